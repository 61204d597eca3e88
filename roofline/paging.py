"""Where a cache's memory goes: contiguous, power-of-two and paged allocation, and what sharing blocks saves.

A request of p prompt and o output tokens lives for o steps and holds p + t tokens after t of them. A contiguous
allocator reserves its whole length at once: the longest that the engine admits, the output rounded up to a power of two,
or, with an oracle, exactly p + o; the region itself is a power of two where a buddy system hands it out. A paged one
takes blocks as tokens come, and wastes no more than the open end of the last. Shares are averages over time, so a
request counts for as long as it lives.
Source: Kwon et al. 2023, vLLM (arXiv 2309.06180), sections 3.1 and 6.1: 20.4, 26.8 and 38.2 % of memory hold tokens in
Orca's three ways of reserving, 96.3 % in vLLM.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from fractions import Fraction
from statistics import NormalDist
from typing import Any

from roofline.errors import InputError
from roofline.numeric import ceil_div, floor_div, ratio, scale, triangle

POLICIES = ("contiguous", "power-of-two", "oracle", "paged")
GRID = 48
"""Quantiles of each length that a distribution is represented by."""


def blocks(tokens: Any, block: Any) -> Any:
    """Blocks that hold so many tokens."""
    return ceil_div(tokens, block)


def open_slots(tokens: Any, block: Any) -> Any:
    """Slots of the last block that no token fills: internal fragmentation of one sequence."""
    return ceil_div(tokens, block) * block - tokens


def expected_waste(length: Any, block: Any) -> Any:
    """Share of a sequence's slots that is wasted on average: ``((b - 1) / 2) / (length + (b - 1) / 2)``.

    Any remainder of the length modulo the block is taken to be equally likely.
    """
    waste = ratio(block - 1, 2)
    return ratio(waste, length + waste)


def contiguous_waste(length: Any, longest: Any) -> Any:
    """Share of a contiguous region that stays empty: ``1 - length / longest``."""
    return 1 - ratio(length, longest)


def shared_blocks(prompt: Any, samples: Any, block: Any) -> Any:
    """Blocks that ``samples`` outputs of one prompt save by sharing it: ``floor(prompt / b) (samples - 1)``.

    The last, partial block is shared as well until the first output that writes to it; copy-on-write then gives every
    sample but one a block of its own.
    """
    return floor_div(prompt, block) * (samples - 1)


def copies_on_write(prompt: int, samples: int, block: int) -> int:
    """Blocks copied when ``samples`` outputs of one prompt diverge: one for each but the last, or none at a block's end."""
    return samples - 1 if prompt % block else 0


def power_of_two(tokens: int) -> int:
    """The smallest power of two that is not below ``tokens``."""
    return 1 << max(0, tokens - 1).bit_length()


@dataclass(frozen=True)
class Usage:
    """Shares of the memory that live requests hold, averaged over time; they sum to 1.

    Attributes:
        policy: one of ``POLICIES``.
        tokens: holds tokens. reserved: will hold tokens of the same request. internal: reserved and never used.
        external: lost to the size of regions that the allocator hands out.
        slots: slots of an average live request.
    """

    policy: str
    tokens: Fraction
    reserved: Fraction
    internal: Fraction
    external: Fraction
    slots: Fraction


def _sum_of_blocks(first: int, last: int, block: int) -> int:
    """Sum of ``ceil(x / block) block`` over x from first to last."""

    def up_to(x: int) -> int:
        whole, rest = divmod(x, block)
        return block * (block * (whole * (whole + 1) // 2) + rest * (whole + 1))

    return up_to(last) - up_to(first - 1)


def _reserved(policy: str, prompt: int, output: int, longest: int) -> int:
    if policy == "contiguous":
        return longest
    return prompt + (power_of_two(output) if policy == "power-of-two" else output)


def usage(policy: str, requests: Iterable[tuple[int, int]], longest: int, block: int = 16, *, buddy: bool = True) -> Usage:
    """Where the memory of a stream of requests goes.

    Args:
        requests: (prompt tokens, output tokens) of each. longest: the longest request that the engine admits.
        block: tokens of a block, for "paged". buddy: regions are powers of two, for the others.

    Raises InputError: an unknown policy, or a request longer than ``longest``.
    """
    if policy not in POLICIES:
        raise InputError(f"policy: {policy!r} is not one of {', '.join(POLICIES)}")
    held = reserved = internal = external = steps = 0
    for prompt, output in requests:
        if prompt < 0 or output < 1 or prompt + output > longest:
            raise InputError(
                f"requests: {prompt} prompt and {output} output tokens do not fit into {longest}; output is 1 or more"
            )
        alive = output * prompt + triangle(output)
        steps += output
        held += alive
        if policy == "paged":
            internal += _sum_of_blocks(prompt + 1, prompt + output, block) - alive
            continue
        region = _reserved(policy, prompt, output, longest)
        handed_out = power_of_two(region) if buddy else region
        reserved += output * (prompt + output) - alive
        internal += output * (region - prompt - output)
        external += output * (handed_out - region)
    total = held + reserved + internal + external
    if not total:
        raise InputError("requests: none given")
    tokens, later, inside, outside = (Fraction(part, total) for part in (held, reserved, internal, external))
    return Usage(policy, tokens, later, inside, outside, Fraction(total, steps))


@dataclass(frozen=True)
class Lengths:
    """Lengths of requests: two independent log-normal distributions, cut at a total.

    Attributes:
        prompt, output: mean tokens. spread: standard deviation over mean, of both; 0 for fixed lengths.
        longest: the most that prompt and output may be together.

    Raises InputError for lengths out of range.
    """

    prompt: int
    output: int
    longest: int
    spread: Fraction = Fraction(1)

    def __post_init__(self) -> None:
        if self.prompt < 0 or self.output < 1 or self.prompt + self.output > self.longest:
            raise InputError(f"lengths: {self.prompt} prompt and {self.output} output tokens do not fit into {self.longest}")
        if not 0 <= self.spread <= 10:
            raise InputError(f"spread: {float(self.spread):g} is out of range; give a standard deviation of 0 to 10 means")

    def _quantiles(self, mean: int) -> list[int]:
        import math

        if self.spread == 0 or mean == 0:
            return [mean]
        variance = math.log1p(float(self.spread) ** 2)
        normal = NormalDist(math.log(mean) - variance / 2, math.sqrt(variance))
        return [max(1, round(math.exp(normal.inv_cdf((2 * i + 1) / (2 * GRID))))) for i in range(GRID)]

    def requests(self) -> list[tuple[int, int]]:
        """(prompt, output) at a grid of equally likely quantiles; what exceeds ``longest`` is cut off, the output first."""
        found = []
        for prompt in self._quantiles(self.prompt):
            kept = min(prompt, self.longest - 1)
            found += [(kept, min(output, self.longest - kept)) for output in self._quantiles(self.output)]
        return found


def sharing(prompt: int, samples: int, output: int, block: int) -> tuple[int, int]:
    """(blocks without sharing, blocks with sharing) of ``samples`` finished outputs of one prompt."""
    alone = samples * blocks(prompt + output, block)
    return alone, alone - shared_blocks(prompt, samples, block)


def gib_of(slots: Any, token_bytes: Any) -> float:
    """GiB of so many slots of a model's cache."""
    return float(scale(slots, token_bytes)) / 2**30
