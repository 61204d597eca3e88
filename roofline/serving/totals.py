"""What a replica did: sums, and a log of its steps."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass
class Totals:
    """What a replica did, summed.

    Attributes:
        steps, busy_s: iterations and their time. prompt_tokens, output_tokens: computed, and handed out.
        decode_slots: sequences of all decode steps, summed. decode_steps: steps that decode.
        block_seconds: blocks in use, integrated over busy time. peak_blocks: the most at once.
        preemptions: requests pushed out. recomputed: cached tokens lost by it. swapped_s: time of swapping.
        gaps, weights: seconds between successive tokens of a request, and how many pairs of tokens are that far apart.
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
