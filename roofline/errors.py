"""What goes wrong in the open: two errors that a caller may show to a user as they are."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class RooflineError(Exception):
    """Base of the errors that the package raises on purpose; the message is one line, fit for a user."""


class InputError(RooflineError):
    """Bad input: the message names the field, what was wrong and what to do."""


class UnsupportedModel(RooflineError):
    """A model whose architecture, or one feature of it, is not modelled; the message names the feature."""


def suggest(word: str, known: Iterable[str]) -> str:
    """A closing sentence for an unknown name: the nearest known ones, or an empty string."""
    near = difflib.get_close_matches(word.lower(), list(known), n=3, cutoff=0.5)
    return f" Did you mean {' or '.join(repr(name) for name in near)}?" if near else ""
