"""What an entry of the formula book is."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from roofline.components.base import Component
from roofline.formats import Format

Formats = dict[str, Format]
Build = Callable[[Formats], list[tuple[Any, Component]]]
Steps = tuple[tuple[str, str], ...]

LECTURE = "CS336 (Stanford) lecture 10, inference; scaling book, inference chapter"


@dataclass(frozen=True)
class Entry:
    """One entry: what it is, how it is built, which limits of its intensity tell something.

    Attributes:
        title: one line. source: where the formula comes from.
        exact: builds (count, component) pairs from open formats.
        lecture: the same under the lecture's convention, None where it makes no difference.
        limits: each a chain of (letter, target) steps; target "oo", a number or another letter.
    """

    title: str
    source: str
    exact: Build
    lecture: Build | None = None
    limits: tuple[Steps, ...] = ()
