"""The alphabet of the formulas: one letter, one meaning, one unit.

Letters follow the scaling book ("How to Scale Your Model", inference chapter) and the CS336 lecture on inference.
sympy Symbols are made here and nowhere else: two symbols of one name but different assumptions are different symbols
to sympy, and substitution would silently miss one of them.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any


@dataclass(frozen=True)
class Letter:
    """One entry of the alphabet: what a letter counts, in which unit, and whether it may be zero."""

    name: str
    meaning: str
    unit: str
    may_be_zero: bool = False


ALPHABET: dict[str, Letter] = {
    letter.name: letter
    for letter in (
        Letter("B", "sequences in the batch", "sequences"),
        Letter("T", "new tokens per sequence in this step (decode: 1)", "tokens"),
        Letter("S", "tokens already cached per sequence (prefill: 0)", "tokens", may_be_zero=True),
        Letter("D", "width of the residual stream", "elements"),
        Letter("F", "width of the feed-forward layer", "elements"),
        Letter("N", "query heads", "heads"),
        Letter("K", "key-value heads", "heads"),
        Letter("G", "query heads per key-value head, N / K", "heads"),
        Letter("H", "dimension of one head", "elements"),
        Letter("L", "layers", "layers"),
        Letter("V", "vocabulary", "tokens"),
        Letter("W", "attention window", "tokens"),
        Letter("C", "attention chunk, or chunk of a scan", "tokens"),
        Letter("E", "routed experts", "experts"),
        Letter("k", "routed experts (or entries) selected per token", "experts"),
        Letter("R", "rank of a latent (MLA key-value rank)", "elements"),
        Letter("Q", "rank of the query latent", "elements"),
        Letter("P", "dimension of a rotary part kept beside a latent", "elements"),
        Letter("M", "tokens compressed into one entry", "tokens"),
        Letter("X", "tokens of a second sequence (encoder frames, image tokens)", "tokens", may_be_zero=True),
        Letter("I", "heads of a sparse-attention index", "heads"),
        Letter("Y", "dimension of an index head", "elements"),
        Letter("Z", "dimension of a value head, where it differs", "elements"),
        Letter("J", "state size of a recurrent head", "elements"),
        Letter("U", "width inside a recurrent mixer", "elements"),
        Letter("n", "residual streams of hyper-connections", "streams"),
        Letter("w", "bytes per stored weight element", "bytes"),
        Letter("a", "bytes per activation element", "bytes"),
        Letter("s", "bytes per element of cached state", "bytes"),
    )
}


@cache
def symbol(name: str) -> Any:
    """The sympy Symbol of a letter of the alphabet.

    S and X are nonnegative integers (a prefill starts from S = 0), the byte widths are positive, all others are
    positive integers. Raises KeyError for a letter that the alphabet does not hold.
    """
    import sympy

    letter = ALPHABET[name]
    if letter.unit == "bytes":
        return sympy.Symbol(name, positive=True)
    if letter.may_be_zero:
        return sympy.Symbol(name, integer=True, nonnegative=True)
    return sympy.Symbol(name, integer=True, positive=True)


def symbols(names: str) -> tuple[Any, ...]:
    """Several Symbols at once, by names with spaces between: ``B, T = symbols("B T")``."""
    return tuple(symbol(name) for name in names.split())
