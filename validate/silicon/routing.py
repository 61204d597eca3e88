"""Which experts the collector of the measurements routed tokens to, on the rank that it measured.

"balanced" spreads the choices of a token evenly over the experts by a stride; "power_law_<exponent>" draws loads from a
power law between 1 and 80 % of the tokens, scales them to all choices, and moves the rank with the highest load to
rank 0. A drawn load is averaged over five seeded draws: the real draws are not recorded.
Source: ai-dynamo/aiconfigurator, collector/helper.py.
"""

from __future__ import annotations

import zlib
from dataclasses import dataclass
from functools import cache
from typing import Any

TILES = (16, 32, 64, 128)
"""Rows per tile for which padded tiles are counted."""
DRAWS = 5
EVEN = ("balanced", "uniform")
BALANCER = "_eplb"
"""Ending of a distribution whose experts a balancer spreads over the ranks."""


@dataclass(frozen=True)
class Load:
    """What rank 0 gets: routed rows, experts hit, the largest expert's rows, and tiles for each of ``TILES``."""

    rows: float
    hit: float
    largest: float
    tiles: tuple[float, ...]


def _balanced(tokens: int, experts: int, chosen: int) -> Any:
    import numpy

    stride = -(-experts // chosen)
    first = numpy.arange(tokens) if tokens >= stride else numpy.floor(numpy.arange(tokens) * stride / tokens)
    picked = (first[:, None] + numpy.arange(chosen) * stride) % experts
    return numpy.bincount(picked.astype(int).ravel(), minlength=experts)


def _raise_smallest(counts: Any, amounts: Any) -> Any:
    """Row by row, one more, ``amounts`` times, for whoever has least: the level to which the small ones rise."""
    import numpy

    order = numpy.argsort(counts, axis=1, kind="stable")
    risen = numpy.take_along_axis(counts, order, axis=1)
    places, sums = numpy.arange(1, risen.shape[1] + 1), numpy.cumsum(risen, axis=1)
    many = (places * risen - sums <= amounts[:, None]).sum(axis=1)
    level, rest = numpy.divmod(sums[numpy.arange(len(sums)), many - 1] + amounts, many)
    raised = level[:, None] + (places <= rest[:, None])
    result = numpy.empty_like(counts)
    numpy.put_along_axis(result, order, numpy.where(places <= many[:, None], raised, risen), axis=1)
    return result


def _dealt(counts: Any, amounts: Any, ranks: int) -> Any:
    """Draw by draw, ``amounts`` more (or fewer) dealt to the ranks in turn; within one to whoever has least (or most)."""
    import numpy

    draws = len(counts)
    sign = numpy.where(amounts >= 0, 1, -1)
    each, rest = numpy.divmod(numpy.abs(amounts), ranks)
    shares = each[:, None] + (numpy.arange(ranks) < rest[:, None])
    signs = numpy.repeat(sign, ranks)[:, None]
    return (signs * _raise_smallest(signs * counts.reshape(draws * ranks, -1), shares.ravel())).reshape(draws, ranks, -1)


def _drawn(tokens: int, experts: int, chosen: int, ranks: int, exponent: float, generator: Any) -> Any:
    """Loads of the experts by draw and rank."""
    import numpy

    low, high = (1.0, 0.8 * tokens) if tokens * chosen > experts else (0.01, 2.0)
    power = 1.0 - exponent
    loads = ((high**power - low**power) * generator.random((DRAWS, experts)) + low**power) ** (1.0 / power)
    shares = loads / loads.sum(axis=1, keepdims=True)
    counts = numpy.minimum(numpy.round(shares * tokens * chosen).astype(int), tokens)
    return _dealt(counts, tokens * chosen - counts.sum(axis=1), ranks)


def _fullest(by_rank: Any) -> Any:
    """Loads of the experts of each draw's fullest rank."""
    import numpy

    return by_rank[numpy.arange(len(by_rank)), by_rank.sum(axis=2).argmax(axis=1)]


def _balanced_over(counts: Any, ranks: int, slots: int) -> Any:
    """What the fullest rank gets when a balancer copies the hottest experts into the spare slots and evens out the ranks.

    It gets its share of everything, or one hottest copy where that is more: nothing splits a copy.
    """
    import numpy

    copies = numpy.ones_like(counts)
    rows = numpy.arange(len(counts))
    for _ in range(slots - counts.shape[1]):
        copies[rows, (counts / copies).argmax(axis=1)] += 1
    hottest = (counts / copies).max(axis=1)
    alone = numpy.array([hottest, 0.0 * hottest, hottest, *(numpy.ceil(hottest / tile) for tile in TILES)]).mean(axis=1)
    share = _load(counts) / ranks
    share[1] = numpy.minimum(counts, copies).sum(axis=1).mean() / ranks
    return numpy.maximum(share, alone)


def _load(counts: Any) -> Any:
    """Rows, experts hit, largest load and tiles, averaged over draws."""
    import numpy

    many = numpy.atleast_2d(counts)
    tiles = [numpy.ceil(many / tile).sum(axis=1) for tile in TILES]
    return numpy.array([many.sum(axis=1), (many > 0).sum(axis=1), many.max(axis=1), *tiles]).mean(axis=1)


@cache
def rank_load(tokens: int, experts: int, chosen: int, ranks: int, distribution: str, slots: int = 0) -> Load:
    """The load of rank 0 of ``ranks`` expert-parallel ranks; a balancer has ``slots`` places for copies of experts."""
    import numpy

    if distribution in EVEN:
        found = _load(_balanced(tokens, experts, chosen)[: experts // ranks])
    else:
        law = distribution.removesuffix(BALANCER)
        exponent = float(law.rpartition("_")[2])
        seed = zlib.crc32(f"{tokens} {experts} {chosen} {ranks} {law}".encode())
        generator = numpy.random.Generator(numpy.random.PCG64(seed))
        by_rank = _drawn(tokens, experts, chosen, ranks, exponent, generator)
        evened = law != distribution
        found = _balanced_over(by_rank.reshape(DRAWS, -1), ranks, slots) if evened else _load(_fullest(by_rank))
    rows, hit, largest, *tiles = (float(value) for value in found)
    return Load(rows, hit, largest, tuple(tiles))
