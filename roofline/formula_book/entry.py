"""What an entry of the formula book is."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from roofline.components.base import Component
from roofline.formats import Format

Formats = dict[str, Format]
Build = Callable[[Formats], list[tuple[Any, Component]]]
Bind = Callable[[Component], Component | None]
Steps = tuple[tuple[str, str], ...]

LECTURE = "CS336 (Stanford) lecture 10, inference; scaling book, inference chapter"


@dataclass(frozen=True)
class Entry:
    """One entry: what it is, how it is built, which limits of its intensity tell something.

    Attributes:
        title: one line. source: where the formula comes from.
        exact: builds (count, component) pairs from open formats.
        bind: a model's component -> what stands for the entry in it, None where it does not: so that a model's formula is
            that of its own block.
        lecture: the same under the lecture's convention, None where the lecture counts what ``exact`` counts.
        in_lecture: whether the lecture counts this entry at all.
        meanings: (letter, what it means here) where that is not what the alphabet says.
        limits: each a chain of (letter, target) steps; target "oo", a number or another letter.
    """

    title: str
    source: str
    exact: Build
    bind: Bind
    lecture: Build | None = None
    in_lecture: bool = False
    limits: tuple[Steps, ...] = ()
    meanings: tuple[tuple[str, str], ...] = ()


def of_kind(kind: type[Component], test: Callable[[Any], bool] = lambda block: True) -> Bind:
    """Binds components of exactly this class that pass a test, as they are."""

    def bind(component: Component) -> Component | None:
        return component if type(component) is kind and test(component) else None

    return bind
