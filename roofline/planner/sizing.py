"""The closed form that sizes an instance: TTFT, TPOT and requests per second at a number of concurrent sequences.

An engine that cuts prompts into chunks runs two kinds of steps: decode steps, and mixed steps in which some prompt tokens
ride along. In a steady state every sequence is prefilled once while it makes its output, so that with B sequences, n
chunks of a prompt and D decode steps of an output there are ``g = B / (n + D)`` prompts per step, a share
``f = min(1, g n)`` of the steps is mixed, and a step takes ``(1 - f) decode + f mixed`` on average; Little's law gives the
rest. Where chunks would need more of the budget than there is, prefill limits the number of sequences that decode.

The wait of a random arrival behind other prompts is that of a queue with equal service times (M/D/1): mean
``f s / (2 (1 - f))``, and an exponential tail of that mean for percentiles. The simulator has the last word.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from roofline.serving.steps import StepShape

if TYPE_CHECKING:
    from roofline.planner.workload import Workload
    from roofline.serving.steps import StepTimes

NEVER = math.inf


@dataclass(frozen=True)
class Drafting:
    """Speculation with ``gamma`` drafts a round, of which ``tokens`` come out on average, the target's own included.

    Attributes:
        times: of the draft model; None for one that costs nothing.
    """

    gamma: int
    tokens: float
    times: StepTimes | None


@dataclass(frozen=True)
class Sized:
    """An instance's steady state; times in seconds, rates of one data-parallel rank.

    Attributes:
        sequences: in the engine at once. chunks: of a prompt. mixed: share of steps with prompt tokens.
        decode_s, mixed_s: the two kinds of steps. ttft_s, ttft_high_s: mean and percentile. tpot_s: mean.
        rate: requests per second.
    """

    sequences: int
    chunks: int
    mixed: float
    decode_s: float
    mixed_s: float
    ttft_s: float
    ttft_high_s: float
    tpot_s: float
    rate: float


def size(
    times: StepTimes, sequences: int, budget: int, load: Workload, *, percentile: float = 99.0, drafting: Drafting | None = None
) -> Sized | None:
    """The steady state with so many sequences and a token budget per step; None where the budget holds no prompt token."""
    gamma, gained = (drafting.gamma, drafting.tokens) if drafting else (0, 1.0)
    room = budget - sequences * (1 + gamma)
    if room < 1:
        return None
    isl, context = load.isl, load.isl + load.osl // 2
    chunks = -(-isl // room)
    decodes = max(0.0, (load.osl - 1) / gained)
    active, prompts = float(sequences), sequences / (chunks + decodes)
    if prompts * isl > room:
        prompts = room / isl
        active = min(active, max(1.0, prompts * (chunks + decodes)))
    pairs = isl * (isl + 1) / 2

    def step(share: float) -> float:
        """Seconds of a step with that many prompts' tokens."""
        decoding = max(1, round(active))
        shape = StepShape(
            round(share * isl), round(share * pairs), max(1, round(share)) if share else 0, decoding, decoding * context, gamma
        )
        drafts = 0.0
        if drafting and drafting.times is not None:
            one = StepShape(decodes=decoding, decode_context=decoding * context)
            drafts = gamma * drafting.times.seconds(one)
        return times.seconds(shape) + drafts

    mixed = min(1.0, prompts * chunks)
    decode_s, mixed_s = step(0.0), step(prompts / mixed)
    average = (1 - mixed) * decode_s + mixed * mixed_s
    rate = prompts / average
    tpot = average * decodes / (load.osl - 1) if load.osl > 1 else 0.0
    service = chunks * mixed_s
    queued = max(0.0, sequences / rate - service - average / 2 - decodes * average) if active < sequences else 0.0
    wait = mixed * service / (2 * (1 - mixed)) if mixed < 1 else NEVER
    beyond = 1 - percentile / 100
    tail = service / (2 * (1 - mixed)) * math.log(mixed / beyond) if beyond < mixed < 1 else 0.0 if mixed <= beyond else NEVER
    if active < sequences:
        wait = tail = queued
    base = average / 2 + service
    return Sized(
        sequences, chunks, mixed, decode_s, mixed_s, base + wait, base + average / 2 + max(wait, tail), tpot, rate
    )  # fmt: skip
