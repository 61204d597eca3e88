"""The size of an instance: TTFT, TPOT and requests per second at a number of concurrent sequences.

Means are those of ``serving.closed_form``: decode steps, mixed steps in which chunks of prompts ride along, Little's law.
Added here is what a planner needs beyond means: where prompts want more steps than there are, decodes go on in every step
and prompts queue; an engine that lets decodes wait while prompts run pays whole prompts between decode steps; drafts; and
the wait of a random arrival behind other prompts, that of a queue with equal service times (M/D/1): with a share f of the
time spent on prompts of s seconds, mean ``f s / (2 (1 - f))``, and an exponential tail of that mean for percentiles.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from roofline.serving.closed_form import Loads, loads, shape_of, steady
from roofline.serving.steps import StepShape
from roofline.speculative.acceptance import expected_tokens

if TYPE_CHECKING:
    from roofline.model import Model
    from roofline.planner.workload import Workload
    from roofline.serving.steps import StepTimes

NEVER = math.inf


@dataclass(frozen=True)
class Drafting:
    """Speculation with ``gamma`` drafts a round.

    Attributes:
        alpha: acceptance of a drafted token. times: of the draft model; None for one that costs nothing.
        draft: that model.
    """

    gamma: int
    alpha: float
    times: StepTimes | None
    draft: Model | None = field(default=None, repr=False)

    @property
    def tokens(self) -> float:
        """Expected tokens of a round."""
        return float(expected_tokens(self.alpha, self.gamma))


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
    times: StepTimes, sequences: int, budget: int, load: Workload, *, percentile: float = 99.0,
    drafting: Drafting | None = None, stalls: bool = False,
) -> Sized | None:  # fmt: skip
    """The steady state with so many sequences and a token budget per step; None where the budget holds no prompt token.

    ``stalls``: decodes wait while prompts run.
    """
    gamma, gained = (drafting.gamma, drafting.tokens) if drafting else (0, 1.0)
    rounds = max(1.0, (load.osl - 1) / gained)
    extra = 0 if stalls else sequences * gamma
    if budget - extra - (0 if stalls else sequences) < 1 or sequences * (1 + gamma) > budget:
        return None
    whole = float(budget + sequences) if stalls else float(budget - extra)
    found = loads(float(sequences), float(load.isl), rounds, NEVER, whole)
    decode_s, mixed_s, alone_s = _seconds(times, found, load, drafting, stalls)
    if stalls:
        mixed_s = decode_s + alone_s
    request = float(getattr(times, "request_seconds", lambda running: 0.0)(float(sequences)))
    group, turns = float(found.group), float(found.turns)
    busy = sequences / rounds * turns / group
    if not stalls and busy >= 1:
        return _saturated(times, sequences, whole, load, rounds, (request, gained), drafting)
    means = steady(found, decode_s, mixed_s, alone_s, request, float(sequences), rounds)
    tpot = float(means.tpot)
    share = busy * alone_s / tpot if stalls else busy
    rate = sequences / (float(means.ttft) + rounds * tpot)
    one = Sized(sequences, round(turns), share, decode_s, mixed_s, float(means.ttft), 0.0, tpot / gained, rate)
    service = turns * (alone_s if stalls else mixed_s) / group
    return _waiting(one, service, tpot / 2, percentile)


def _seconds(
    times: StepTimes, found: Loads, load: Workload, drafting: Drafting | None, alone: bool = False
) -> tuple[float, float, float]:
    """Seconds of a decode step, a mixed one and, where it is wanted, one of prompts only; drafts included."""
    context, gamma = load.isl + load.osl // 2, drafting.gamma if drafting else 0

    def step(one: Any) -> float:
        found = shape_of(one)
        prompts = (found.prefill_tokens, found.prefill_pairs, found.prefills)
        shape = StepShape(*prompts, found.decodes, found.decodes * context, gamma)
        drafts = 0.0
        if drafting and drafting.times is not None and shape.decodes:
            plain = StepShape(decodes=shape.decodes, decode_context=shape.decode_context)
            drafts = gamma * drafting.times.seconds(plain)
        return times.seconds(shape) + drafts

    return step(found.decode), step(found.mixed), step(found.alone) if alone else 0.0


def _saturated(
    times: StepTimes, sequences: int, budget: float, load: Workload, rounds: float, fixed: tuple[float, float],
    drafting: Drafting | None,
) -> Sized:  # fmt: skip
    """Prompts fill the budget of every step: fewer sequences decode, and the others wait for their prompts to run."""
    request, gained = fixed
    room = max(1.0, budget - sequences)
    decoding = max(1.0, min(float(sequences), rounds * room / load.isl))
    found = loads(decoding, float(load.isl), rounds, NEVER, room + decoding)
    _, mixed_s, _ = _seconds(times, found, load, drafting)
    rate = room / load.isl / mixed_s
    ttft = max(request + load.isl / room * mixed_s, sequences / rate - rounds * mixed_s)
    return Sized(sequences, math.ceil(load.isl / room), 1.0, mixed_s, mixed_s, ttft, 2 * ttft, mixed_s / gained, rate)


def _waiting(found: Sized, service: float, half: float, percentile: float) -> Sized:
    """With the wait for a server that is busy ``found.mixed`` of the time, mean and percentile."""
    if found.mixed >= 1:
        return replace(found, ttft_s=NEVER, ttft_high_s=NEVER)
    scale, beyond = service / (2 * (1 - found.mixed)), 1 - percentile / 100
    mean = found.mixed * scale
    tail = scale * math.log(found.mixed / beyond) if found.mixed > beyond else 0.0
    return replace(found, ttft_s=found.ttft_s + mean, ttft_high_s=found.ttft_s + half + max(mean, tail))
