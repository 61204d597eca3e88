"""Which experts the collector of the measurements routed tokens to, on the rank that it measured.

"balanced" spreads the choices of a token evenly over the experts by a stride; "power_law_<exponent>" draws loads from a
power law between 1 and 80 % of the tokens, scales them to all choices, and moves the rank with the highest load to
rank 0. A drawn load is averaged over five seeded draws: the real draws are not recorded.
Source: ai-dynamo/aiconfigurator, collector/helper.py.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from functools import cache
from typing import Any

TILES = (16, 32, 64, 128)
"""Rows per tile for which padded tiles are counted."""
FIGURES = ("rows", "hit", "largest", *(f"tiles{tile}" for tile in TILES))
DRAWS = 5
EVEN = ("balanced", "uniform")
BALANCER = "_eplb"
"""Ending of a distribution whose experts a balancer spreads over the ranks."""


def _balanced(tokens: int, experts: int, chosen: int) -> Any:
    import numpy

    stride = -(-experts // chosen)
    first = numpy.arange(tokens) if tokens >= stride else numpy.arange(tokens) * stride // tokens
    starts = numpy.bincount(first % experts, minlength=experts)
    origins = (numpy.arange(experts)[:, None] - numpy.arange(chosen) * stride) % experts
    return starts[origins].sum(axis=1)


def _raise_smallest(counts: Any, amounts: Any) -> Any:
    """Each row in rising order after one more, ``amounts`` times, for whoever has least: the small ones rise to one level."""
    import numpy

    risen = numpy.sort(counts, axis=1)
    places, sums = numpy.arange(1, risen.shape[1] + 1), numpy.cumsum(risen, axis=1)
    many = (places * risen - sums <= amounts[:, None]).sum(axis=1)
    level, rest = numpy.divmod(sums[numpy.arange(len(sums)), many - 1] + amounts, many)
    return numpy.where(places <= many[:, None], level[:, None] + (places <= rest[:, None]), risen)


def _dealt(counts: Any, amounts: Any, ranks: int) -> Any:
    """Draw by draw, ``amounts`` more (or fewer) dealt to the ranks in turn; within one to whoever has least (or most)."""
    import numpy

    draws = len(counts)
    sign = numpy.where(amounts >= 0, 1, -1)
    each, rest = numpy.divmod(numpy.abs(amounts), ranks)
    shares = each[:, None] + (numpy.arange(ranks) < rest[:, None])
    signs = numpy.repeat(sign, ranks)[:, None]
    return (signs * _raise_smallest(signs * counts.reshape(draws * ranks, -1), shares.ravel())).reshape(draws, ranks, -1)


def _uniform(tokens: Sequence[int], experts: int, chosen: int, ranks: int, law: str) -> Any:
    """Random numbers in [0, 1) by number of tokens, draw and expert; each number of tokens has a seed of its own."""
    import numpy

    seeds = [zlib.crc32(f"{many} {experts} {chosen} {ranks} {law}".encode()) for many in tokens]
    return numpy.array([numpy.random.Generator(numpy.random.PCG64(seed)).random((DRAWS, experts)) for seed in seeds])


def _drawn(tokens: Sequence[int], chosen: int, ranks: int, exponent: float, uniform: Any) -> Any:
    """Loads of the experts by draw and rank, the draws of one number of tokens after the other's."""
    import numpy

    experts, power = uniform.shape[-1], 1.0 - exponent
    ends = [(1.0, 0.8 * many) if many * chosen > experts else (0.01, 2.0) for many in tokens]
    low, high = (numpy.array([end**power for end in side])[:, None, None] for side in zip(*ends, strict=True))
    loads = ((high - low) * uniform + low) ** (1.0 / power)
    shares = (loads / loads.sum(axis=2, keepdims=True)).reshape(-1, experts)
    whole = numpy.repeat(tokens, DRAWS)
    counts = numpy.minimum(numpy.round(shares * whole[:, None] * chosen).astype(int), whole[:, None])
    return _dealt(counts, whole * chosen - counts.sum(axis=1), ranks)


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
    alone = _averaged([hottest, 0.0 * hottest, hottest, *(numpy.ceil(hottest / tile) for tile in TILES)])
    share = _load(counts) / ranks
    share[1] = _averaged([numpy.minimum(counts, copies).sum(axis=1)])[0] / ranks
    return numpy.maximum(share, alone)


def _averaged(figures: Sequence[Any], draws: int = DRAWS) -> Any:
    """The mean of each figure over the draws of each number of tokens."""
    import numpy

    return numpy.array(figures).reshape(len(figures), -1, draws).mean(axis=2)


def _load(counts: Any, draws: int = DRAWS) -> Any:
    """Rows, experts hit, largest load and tiles, averaged over draws."""
    import numpy

    tiles = [numpy.ceil(counts / tile).sum(axis=1) for tile in TILES]
    return _averaged([counts.sum(axis=1), (counts > 0).sum(axis=1), counts.max(axis=1), *tiles], draws)


@cache
def rank_loads(
    tokens: tuple[int, ...], experts: int, chosen: int, ranks: int, distribution: str, slots: int = 0
) -> dict[str, Any]:
    """Loads of rank 0 of ``ranks`` expert-parallel ranks by numbers of tokens; a balancer has ``slots`` places for copies.

    Arrays by name: rows (routed to the rank), hit (experts), largest (rows of one expert), tiles16 to tiles128.
    """
    import numpy

    if distribution in EVEN:
        found = _load(numpy.array([_balanced(many, experts, chosen)[: experts // ranks] for many in tokens]), 1)
    else:
        law = distribution.removesuffix(BALANCER)
        uniform = _uniform(tokens, experts, chosen, ranks, law)
        by_rank = _drawn(tokens, chosen, ranks, float(law.rpartition("_")[2]), uniform)
        evened = law != distribution
        found = _balanced_over(by_rank.reshape(-1, experts), ranks, slots) if evened else _load(_fullest(by_rank))
    return dict(zip(FIGURES, found, strict=True))
