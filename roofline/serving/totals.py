"""What a replica did: sums, over all and over a part of the time, and a log of its steps."""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field
from typing import Any

RUN = 5
"""Numbers that are kept of each run of steps: start, end, steps that decode, sequences of each, block seconds."""


@dataclass(frozen=True)
class Part:
    """What a replica did between two moments; a run of steps that one of them cuts counts by its share of the time.

    Attributes:
        busy_s: time in which steps ran. decode_steps, decode_slots, block_seconds: as in ``Totals``.
    """

    busy_s: float
    decode_steps: float
    decode_slots: float
    block_seconds: float


@dataclass
class Totals:
    """What a replica did, summed.

    Attributes:
        steps, busy_s: iterations and their time. prompt_tokens, output_tokens: computed, and handed out.
        decode_slots: sequences of all decode steps, summed. decode_steps: steps that decode.
        block_seconds: blocks in use, integrated over busy time. peak_blocks: the most at once.
        preemptions: requests pushed out. recomputed: cached tokens lost by it. swapped_s: time of swapping.
        gaps, weights: seconds between successive tokens of a request, and how many pairs of tokens are that far apart.
        runs: ``RUN`` numbers of each run of steps, one run after the other.
    """

    steps: int = 0
    busy_s: float = 0.0
    prompt_tokens: int = 0
    output_tokens: int = 0
    decode_slots: int = 0
    decode_steps: int = 0
    block_seconds: float = 0.0
    peak_blocks: int = 0
    preemptions: int = 0
    recomputed: int = 0
    swapped_s: float = 0.0
    gaps: list[Any] = field(default_factory=list)
    weights: list[int] = field(default_factory=list)
    runs: array[float] = field(default_factory=lambda: array("d"))

    def between(self, low: float, high: float) -> Part:
        """What of it happened between two moments [s]."""
        import numpy

        start, end, steps, slots, blocks = numpy.array(self.runs).reshape(-1, RUN).T
        inside = numpy.clip(numpy.minimum(end, high) - numpy.maximum(start, low), 0.0, None)
        lasts = end > start
        share = numpy.where(lasts, inside / numpy.where(lasts, end - start, 1.0), (start >= low) & (end <= high))
        sums = (inside, share * steps, share * steps * slots, share * blocks)
        return Part(*(float(values.sum()) for values in sums))


@dataclass(frozen=True)
class Span:
    """Steps that ran as one entry of the log: when, what, and the replica's state."""

    start: float
    end: float
    steps: int
    prefills: int
    prefill_tokens: int
    decodes: int
    waiting: int
    blocks: int
