"""Readers: one function per family, (config, storage, name) -> Model; ``families`` says which reads what."""
