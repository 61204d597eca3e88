"""Which keys a query sees: pairs to score, keys to read and tokens to keep, for each kind of mask.

A query at position p (0-based, p = S ... S + T - 1) sees

* "causal": the p + 1 positions up to itself;
* "window": the last min(p + 1, W) of them;
* "chunk": those of its own chunk of C, (p mod C) + 1;
* "blocks": its own block of m up to itself and the k - 1 best of those before, size = (m, k);
* "full": all S + T positions (encoders, a denoised block);
* "cross": the S cached positions and none of the T new ones (the lecture's count of attention).
"""

from __future__ import annotations

from typing import Any

from roofline.numeric import floor_div, maximum, minimum, triangle

MASKS = ("causal", "window", "chunk", "blocks", "full", "cross")


def _remainder(n: Any, size: Any) -> Any:
    return n - size * floor_div(n, size)


def _chunk_pairs(positions: Any, size: Any) -> Any:
    """Pairs of the first ``positions`` queries: whole chunks and the open one."""
    return floor_div(positions, size) * triangle(size) + triangle(_remainder(positions, size))


def blocks_before(positions: Any, size: Any) -> Any:
    """Whole blocks that lie before the first ``positions`` queries, summed over them: floor(0 / m) + floor(1 / m) + ..."""
    whole = floor_div(positions, size)
    return size * triangle(whole - 1) + whole * (positions - size * whole)


def _block_pairs(positions: Any, size: Any, count: Any) -> Any:
    """Pairs of the first ``positions`` queries: those of their own blocks, and of count - 1 earlier ones at most."""
    out_of_reach = blocks_before(maximum(0, positions - (count - 1) * size), size)
    return _chunk_pairs(positions, size) + size * (blocks_before(positions, size) - out_of_reach)


def pairs(mask: str, size: Any, T: Any, S: Any) -> Any:
    """Query-key pairs of T new queries behind S cached tokens, per sequence and head.

    causal: S T + T (T + 1) / 2. window: the causal pairs less those out of reach,
    tri(max(0, S + T - W)) - tri(max(0, S - W)) with tri(x) = x (x + 1) / 2.
    """
    if mask == "full":
        return T * (S + T)
    if mask == "cross":
        return T * S
    if mask == "chunk":
        return _chunk_pairs(S + T, size) - _chunk_pairs(S, size)
    if mask == "blocks":
        return _block_pairs(S + T, *size) - _block_pairs(S, *size)
    causal = S * T + triangle(T)
    if mask == "window":
        return causal - triangle(maximum(0, S + T - size)) + triangle(maximum(0, S - size))
    return causal


def keys(mask: str, size: Any, T: Any, S: Any) -> Any:
    """Distinct keys that T new queries behind S cached tokens read, per sequence and key-value head.

    A selection of blocks differs from query to query: exact for one; for many, the union of what they select is taken to
    be everything once their pairs exceed it.
    """
    if mask == "cross":
        return S
    if mask == "window":
        return minimum(S, size - 1) + T
    if mask == "chunk":
        return _remainder(S, size) + T
    if mask == "blocks":
        return minimum(pairs(mask, size, T, S), S + T)
    return S + T


def kept(mask: str, size: Any) -> Any:
    """The most tokens whose keys must stay cached, None for all."""
    return size if mask in ("window", "chunk") else None
