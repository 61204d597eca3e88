"""The size of an instance: TTFT, TPOT and requests per second at a number of concurrent sequences.

Means are those of ``serving.closed_form``: decode steps, mixed steps in which chunks of prompts ride along, Little's law.
Added here is what a planner needs beyond means: where prompts want more steps than there are, they fill every step and
queue, and no more decode than a budget of T tokens admits, whose n decode steps and p prompt tokens are in balance at
``n T / (p + n)`` of them; an engine that lets decodes wait while prompts run pays whole prompts between decode steps; drafts; and
the wait of a random arrival behind other prompts, that of a queue with equal service times (M/D/1): where prompts arrive
at a rate r and take s seconds of the budget each, f = r s, the mean is ``f s v / (2 (1 - f))``; percentiles take an
exponential tail of that mean. v is 1, or, where prompts differ and arrivals come in bursts, the sum of the squared
coefficients of variation of both (Kingman's and Allen and Cunneen's approximation); the percentile of TTFT is then that of
a long prompt too.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import TYPE_CHECKING

from roofline.serving.closed_form import Loads, loads, shape_of, steady
from roofline.serving.steps import StepShape
from roofline.speculative.acceptance import expected_tokens

if TYPE_CHECKING:
    from roofline.expected.load import Load
    from roofline.model import Model
    from roofline.planner.demand import Demand, Lengths
    from roofline.serving.steps import StepTimes

NEVER = math.inf
CROWDED = 0.5
"""Share of a budget beyond which the time per token is held against that of a full step, which no step exceeds."""


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
        sequences: in the engine at once. chunks: of a prompt. busy: share of what a budget offers to prompts that they take.
        decode_s, mixed_s: the two kinds of steps. ttft_s, ttft_high_s: mean and percentile. tpot_s: mean.
        rate: requests per second.
    """

    sequences: int
    chunks: int
    busy: float
    decode_s: float
    mixed_s: float
    ttft_s: float
    ttft_high_s: float
    tpot_s: float
    rate: float


def size(
    times: StepTimes, sequences: int, budget: int, load: Demand, *, percentile: float = 99.0,
    drafting: Drafting | None = None, stalls: bool = False, hits: float = 1.0,
) -> Sized | None:  # fmt: skip
    """The steady state with so many sequences and a token budget per step; None where the budget holds no prompt token.

    ``stalls``: decodes wait while prompts run. ``hits``: share of turns whose session is still in the prefix cache.
    """
    lengths = load.lengths(percentile, hits)
    gained = drafting.tokens if drafting else 1.0
    steps = _steps(sequences, budget, lengths, drafting.gamma if drafting else 0, gained, stalls)
    if steps is None:
        return None
    found, rounds, room, fresh = steps.found, steps.rounds, steps.room, lengths.fresh
    decode_s, mixed_s, alone_s, full_s = _seconds(times, steps, drafting)
    if steps.saturated:
        return _saturated(times, sequences, steps, mixed_s, fresh, gained)
    if stalls:
        mixed_s = decode_s + alone_s
    request, turns = _request(times, sequences), float(found.turns)
    means = steady(found, decode_s, mixed_s, alone_s, request, float(sequences), rounds)
    tpot = min(float(means.tpot), full_s) if steps.full else float(means.tpot)
    rate = sequences / (float(means.ttft) + rounds * tpot)
    added = turns * (alone_s if stalls else mixed_s - decode_s) / float(found.group)
    service = added if stalls else mixed_s * fresh / room
    busy = min(1.0, rate * service)
    mean, high = waiting(service, busy, percentile, lengths.variation + lengths.arrivals)
    own = request + turns * mixed_s
    longer = max((lengths.far / fresh - 1.0) * added, (math.ceil(lengths.far / room) - turns) * mixed_s, 0.0)
    return Sized(
        sequences, round(turns), busy, decode_s, mixed_s, max(float(means.ttft), own + tpot / 2 + mean),
        own + tpot + math.hypot(high, longer), tpot / gained, rate,
    )  # fmt: skip


def _request(times: StepTimes, running: float) -> float:
    """What passes before a request is scheduled [s], where the step times know it."""
    return float(getattr(times, "request_seconds", lambda running: 0.0)(float(running)))


@dataclass(frozen=True)
class _Steps:
    """The steps of a steady state, which are the same for every deployment: their loads and, in whole numbers, their shapes."""

    found: Loads
    rounds: float
    room: float
    saturated: bool
    decode: StepShape
    mixed: StepShape
    alone: StepShape | None
    full: StepShape | None


@lru_cache(maxsize=8192)
def _steps(sequences: int, budget: int, lengths: Lengths, gamma: int, gained: float, stalls: bool) -> _Steps | None:
    """None where the budget holds no prompt token."""
    rounds = max(1.0, (lengths.output - 1) / gained)
    extra = 0 if stalls else sequences * gamma
    if budget - extra - (0 if stalls else sequences) < 1 or sequences * (1 + gamma) > budget:
        return None
    wide, room = 1 + gamma, float(budget if stalls else budget - extra - sequences)
    saturated = not stalls and sequences / rounds * lengths.fresh > room
    running = max(1.0, rounds * budget / (lengths.fresh + rounds * wide)) if saturated else float(sequences)
    room = max(1.0, budget - running * wide) if saturated else room
    found = loads(running, float(lengths.prompt), rounds, NEVER, room + running, cached=float(lengths.cached))
    chunks, chunk = max(1.0, room / lengths.fresh), min(room, lengths.fresh)
    filled = replace(found.mixed, chunks=chunks, chunk=chunk, behind=lengths.cached + 0.5 * (lengths.fresh - chunk))
    found = replace(found, decode=filled, mixed=filled) if saturated else found

    def shape(one: Load) -> StepShape:
        plain = shape_of(one)
        pairs = plain.prefill_pairs if lengths.excess == 1.0 else round(plain.prefill_pairs * lengths.excess)
        context = plain.decodes * lengths.context
        return StepShape(plain.prefill_tokens, pairs, plain.prefills, plain.decodes, context, gamma)

    alone = shape(replace(found.mixed, decodes=0.0)) if stalls else None
    crowded = not stalls and not saturated and sequences / rounds * lengths.fresh > CROWDED * room
    full = shape(filled) if crowded else None
    return _Steps(found, rounds, room, saturated, shape(found.decode), shape(found.mixed), alone, full)


def shapes(sequences: int, budget: int, lengths: Lengths, drafting: Drafting | None, stalls: bool) -> list[StepShape]:
    """The steps that ``size`` asks the times of."""
    gamma, gained = (drafting.gamma, drafting.tokens) if drafting else (0, 1.0)
    steps = _steps(sequences, budget, lengths, gamma, gained, stalls)
    found = () if steps is None else (steps.decode, steps.mixed, steps.alone, steps.full)
    return [one for one in found if one is not None]


def _seconds(times: StepTimes, steps: _Steps, drafting: Drafting | None) -> tuple[float, float, float, float]:
    """Seconds of a decode step, a mixed one, where decodes wait one of its prompts alone, and a full one; drafts included."""

    def step(shape: StepShape | None) -> float:
        if shape is None:
            return 0.0
        drafts = 0.0
        if drafting and drafting.times is not None and shape.decodes:
            plain = StepShape(decodes=shape.decodes, decode_context=shape.decode_context)
            drafts = drafting.gamma * drafting.times.seconds(plain)
        return times.seconds(shape) + drafts

    return step(steps.decode), step(steps.mixed), step(steps.alone), step(steps.full)


def _saturated(times: StepTimes, sequences: int, steps: _Steps, mixed_s: float, fresh: float, gained: float) -> Sized:
    """Prompts fill the budget of every step: fewer sequences decode, and the others wait for their prompts to run."""
    rate = steps.room / fresh / mixed_s
    ttft = max(fresh / steps.room * mixed_s, sequences / rate - steps.rounds * mixed_s) + _request(times, sequences)
    chunks = math.ceil(fresh / steps.room)
    return Sized(sequences, chunks, 1.0, mixed_s, mixed_s, ttft, 2 * ttft, mixed_s / gained, rate)


def waiting(service: float, busy: float, percentile: float, variation: float = 1.0) -> tuple[float, float]:
    """Mean and percentile of the wait for a server that is busy that share of the time.

    ``variation``: of service times and of the time between arrivals, squared coefficients summed; 1 for equal service times
    and random arrivals.
    """
    if busy >= 1:
        return NEVER, NEVER
    scale, beyond = service * variation / (2 * (1 - busy)), 1 - percentile / 100
    tail = scale * math.log(busy / beyond) if busy > beyond else 0.0
    return busy * scale, max(busy * scale, tail)
