"""From a Hugging Face ``config.json`` to a Model: one reader per family, chosen by the config's own keys."""
