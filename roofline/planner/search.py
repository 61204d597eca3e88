"""The search: every setting of every setup, sized by the closed form, and what it takes to carry a load."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from roofline.expected.serving import left_range, standing
from roofline.planner.demand import Demand
from roofline.planner.prices import Rent
from roofline.planner.setups import Setup
from roofline.planner.sizing import Drafting, Sized, shapes, size
from roofline.serving.metrics import Objective

SEQUENCES = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 160, 192, 256, 320, 384, 512, 768, 1024)
BUDGETS = (512, 1024, 2048, 4096, 8192, 16384)
HEADROOM = 3.0
"""Standard deviations of a Poisson number of sequences that memory and batch leave room for at least."""
AMPLE = 8.0
"""The same, for the batch setting where memory is there: it costs nothing until it is used."""
SMALL_BATCH = 32
"""A batch setting below this is not proposed where memory is there for it."""
BEYOND = 4.0
"""Larger batches are left out once the TPOT is so many times its limit."""
MOST_INSTANCES = 100_000
ROUNDS = 3
"""Rounds in which a rate and the share of sessions that a cache keeps find each other."""
NO_DRAFTS: tuple[Drafting | None, ...] = (None,)


@dataclass(frozen=True)
class Plan:
    """A deployment: instances of one setup with their settings.

    Attributes:
        setup: of each instance. budget: tokens per step. batch: sequences per step and data-parallel rank.
        instances: equal ones behind a balancer. sized: steady state of one rank under its share of the load.
        drafting: speculation, None without. rent: price of a GPU, None where unknown.
        prefill: for a disaggregated deployment, the instances that prefill; ``setup`` then decodes only.
    """

    setup: Setup
    budget: int
    batch: int
    instances: int
    sized: Sized
    drafting: Drafting | None = None
    rent: Rent | None = None
    prefill: Plan | None = None
    transfer_s: float = 0.0

    @property
    def gpus(self) -> int:
        """All accelerators."""
        return self.setup.gpus * self.instances + (self.prefill.gpus if self.prefill else 0)

    @property
    def rate(self) -> float:
        """Requests per second of all instances."""
        return self.sized.rate * self.setup.mesh.dp * self.instances

    @property
    def usd_per_hour(self) -> float | None:
        """Rent of all accelerators, None where the price is unknown."""
        return None if self.rent is None else self.rent.usd * self.gpus

    @property
    def formats(self) -> tuple[str, str]:
        """Formats of weights and cache."""
        return self.setup.variant.weights, self.setup.variant.kv

    @property
    def outside(self) -> list[str]:
        """How it leaves the range that its step times are calibrated in; nothing where it does not."""
        front = () if self.prefill is None else left_range(self.prefill.setup.times)
        return list(dict.fromkeys([*left_range(self.setup.times, [self.sized.sequences]), *front]))

    @property
    def step_times(self) -> str:
        """What its step times are worth, in a word: "datasheet", "calibrated" or "extrapolated"."""
        front = () if self.prefill is None else left_range(self.prefill.setup.times)
        return "extrapolated" if front else standing(self.setup.times, [self.sized.sequences])

    def output_tokens(self, osl: int) -> float:
        """Output tokens per second of all instances."""
        return self.rate * osl

    def key(self) -> tuple[Any, ...]:
        """What makes it another deployment than others."""
        setup, other = self.setup, self.prefill.key() if self.prefill else ()
        return (
            setup.accelerator.id, setup.mesh, self.formats, self.budget, self.batch, self.instances,
            self.drafting.gamma if self.drafting else 0, other,
        )  # fmt: skip

    def with_instances(self, number: int) -> Plan:
        """The same with another number of instances, steady state as it was."""
        return replace(self, instances=number)


def left_ranges(plans: Sequence[Plan]) -> tuple[str, ...]:
    """How deployments of one engine leave the range that its step times are calibrated in, their batches in one sentence."""
    setups = [setup for plan in plans for setup in (plan.setup, plan.prefill.setup if plan.prefill else plan.setup)]
    batches = [plan.sized.sequences for plan in plans]
    lines = [left_range(setup.times) for setup in setups]
    return tuple(dict.fromkeys(line for found in (*lines, left_range(setups[0].times, batches)) for line in found))


@dataclass(frozen=True)
class Point:
    """A point of the trade between users and GPUs: an instance at a batch, whatever the load.

    Attributes:
        user: output tokens per second that one user sees. gpu: output tokens per second of a GPU.
    """

    user: float
    gpu: float
    plan: Plan


@dataclass
class Found:
    """What a search found.

    Attributes:
        plans: deployments that meet the objective by the closed form at full load, the cheapest first. points: of the trade-off.
        tried: deployments that were sized. nearest: the deployment that misses least where none meets the objective.
    """

    plans: list[Plan]
    points: list[Point]
    tried: int
    nearest: Plan | None = None


def cost(plan: Plan) -> tuple[float, int, float]:
    """Order of deployments: rent, then accelerators, then latency; those without a price come last."""
    usd = plan.usd_per_hour
    return (math.inf if usd is None else usd, plan.gpus, plan.sized.tpot_s)


def per_token(plan: Plan, osl: int) -> tuple[float, float]:
    """Order of batch work: rent per output token, or accelerators per token where no price is known."""
    tokens = plan.output_tokens(osl)
    usd = plan.usd_per_hour
    return (math.inf if usd is None else usd / tokens, plan.gpus / tokens)


def headroom(sequences: int, deviations: float = HEADROOM) -> int:
    """Sequences that a batch must admit when so many are there on average, arriving at random."""
    return math.ceil(sequences + deviations * math.sqrt(sequences))


def sized_at(
    setup: Setup, sequences: int, budget: int, load: Demand, objective: Objective, drafting: Drafting | None
) -> Sized | None:
    """The steady state of a rank of a setup, as its engine schedules and as far as its cache keeps sessions."""
    asked: dict[str, Any] = {"percentile": objective.percentile, "drafting": drafting, "stalls": setup.stalls}
    found = size(setup.remembered, sequences, budget, load, **asked)
    if found is None or not load.kept or load.turns == 1:
        return found
    pool = setup.tokens(load, budget, sequences, drafting.draft if drafting else None)
    if pool is None:
        return found
    left = pool - load.shared - sequences * load.held[0]
    for _ in range(ROUNDS):
        hits = load.hits(left, found.rate)
        found = size(setup.remembered, sequences, budget, load, hits=hits, **asked)
        if found is None or hits == 1.0:
            return found
    return found


def batch_for(setup: Setup, sequences: int, budget: int, load: Demand, drafting: Drafting | None) -> int | None:
    """The batch setting for so many sequences on average: what memory and budget admit, and room for random arrivals.

    None where they do not admit them. A closed loop takes the next round setting where that fits too.
    """
    draft, verified = (drafting.draft, 1 + drafting.gamma) if drafting else (None, 1)

    def fits(batch: int) -> bool:
        return batch * verified <= budget and batch <= setup.room(load, budget, batch, draft)

    batch = headroom(sequences) if load.rate is not None else sequences
    if not fits(batch):
        return None
    if load.rate is None:
        rounded = next((one for one in SEQUENCES if one >= sequences), sequences)
        return rounded if fits(rounded) else sequences
    ample = max(SMALL_BATCH, headroom(sequences, AMPLE))
    return max(batch, min(setup.room(load, budget, ample, draft), ample, budget // verified))


def last(low: int, high: int, holds: Callable[[int], bool]) -> int:
    """The last number from ``low``, of which it holds, to below ``high``, of which it does not, for what holds up to a number."""
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if holds(middle) else (low, middle)
    return low


def settings(setup: Setup, load: Demand, objective: Objective, drafting: Drafting | None) -> Iterable[tuple[int, int, Sized]]:
    """(budget, batch, steady state) on a grid of sequences, up to exactly as many as memory and the engine admit."""
    draft = drafting.draft if drafting else None
    most = setup.room(load, BUDGETS[0], SEQUENCES[-1], draft)
    wanted = [(sequences, budget) for budget in BUDGETS for sequences in SEQUENCES if sequences <= most]
    lengths = load.lengths(objective.percentile)
    setup.remembered.prepare(one for pair in wanted for one in shapes(*pair, lengths, drafting, setup.stalls))
    for budget in BUDGETS:

        def batch(sequences: int, budget: int = budget) -> int | None:
            return batch_for(setup, sequences, budget, load, drafting)

        before = 0
        for point in SEQUENCES:
            sequences = point if batch(point) else last(before, point, lambda number: batch(number) is not None)
            admitted = batch(sequences) if sequences > before else None
            sized = sized_at(setup, sequences, budget, load, objective, drafting) if admitted else None
            if sized is None or admitted is None:
                break
            yield budget, admitted, sized
            slow = objective.tpot_s is not None and sized.tpot_s > BEYOND * objective.tpot_s
            if sized.busy >= 1 or slow or sequences < point:
                break
            before = sequences


def carried(sized: Sized, load: Demand) -> float:
    """Users of a rank: those whose requests run, and those who think."""
    return sized.sequences + sized.rate * load.think_mean_s


def instances(setup: Setup, load: Demand, sized: Sized) -> int:
    """Instances that carry a load at that steady state."""
    if load.request_rate is not None:
        return math.ceil(load.request_rate / (sized.rate * setup.mesh.dp) * (1 - 1e-9))
    if load.concurrency is not None:
        return math.ceil(load.concurrency / (carried(sized, load) * setup.mesh.dp) * (1 - 1e-9))
    return 1


def settled(plan: Plan, load: Demand, objective: Objective, above: int = 0) -> Plan:
    """The plan with the steady state under the share of the load that each instance really gets.

    ``above``: sequences of a rank that are known not to carry that share.
    """
    ranks = plan.instances * plan.setup.mesh.dp

    def at(sequences: int) -> Sized | None:
        return sized_at(plan.setup, sequences, plan.budget, load, objective, plan.drafting)

    if load.concurrency is not None and not load.think_mean_s:
        found = at(-(-load.concurrency // ranks))
        return replace(plan, sized=found) if found else plan
    if load.offline:
        return plan
    wanted = (load.request_rate or load.concurrency or 0) / ranks

    def short(sequences: int) -> bool:
        sized = at(sequences)
        return sized is None or (sized.rate if load.request_rate else carried(sized, load)) < wanted

    found = at(last(min(above, plan.sized.sequences - 1), plan.sized.sequences, short) + 1)
    if found is None:
        return plan
    return replace(plan, sized=replace(found, rate=min(found.rate, wanted)) if load.request_rate else found)


def _met(plan: Plan, objective: Objective) -> bool:
    return objective.met(plan.sized.ttft_high_s, plan.sized.tpot_s)


def _cheapest(row: Sequence[Plan], load: Demand, objective: Objective) -> tuple[Plan | None, int]:
    """(the deployment of the fewest instances that meets the objective, steady states worked out for it).

    ``row``: a setup with a budget at more and more sequences. The limits hold up to some number of them, which lies between
    two of the row: it is found exactly where it saves instances, and the limits are tested at the load that is asked for.
    """
    tried = 0
    good = [number for number, plan in enumerate(row) if _met(plan, objective)]
    if not good:
        return None, tried
    best, beyond = row[good[-1]], row[good[-1] + 1 : good[-1] + 2]

    def at(sequences: int) -> Plan | None:
        nonlocal tried
        tried += 1
        batch = batch_for(best.setup, sequences, best.budget, load, best.drafting)
        sized = sized_at(best.setup, sequences, best.budget, load, objective, best.drafting) if batch else None
        if sized is None or batch is None:
            return None
        return replace(best, batch=batch, sized=sized, instances=instances(best.setup, load, sized))

    def holds(sequences: int) -> bool:
        plan = at(sequences)
        return plan is not None and _met(plan, objective)

    if beyond and (load.offline or beyond[0].instances < best.instances):
        sequences = last(best.sized.sequences, beyond[0].sized.sequences, holds)
        best = at(sequences) or best
    if load.offline:
        return min([best, *(row[number] for number in good)], key=lambda plan: order_of(plan, load)), tried
    above = max((plan.sized.sequences for plan in row if plan.instances > best.instances), default=0)
    tight = settled(best, load, objective, above)
    batch = batch_for(best.setup, tight.sized.sequences, best.budget, load, best.drafting)
    return (replace(tight, batch=batch or tight.batch) if _met(tight, objective) else best), tried + 1


def search(
    candidates: Iterable[Setup], load: Demand, objective: Objective, rents: dict[str, Rent | None], most: int,
    draftings: Mapping[str, Sequence[Drafting | None]] | None = None,
) -> Found:  # fmt: skip
    """Every deployment of the candidates, up to ``most`` GPUs, that meets the objective by the closed form.

    ``draftings`` are tried on the accelerators of these ids; without, no drafts.
    """
    plans: list[Plan] = []
    points: list[Point] = []
    tried, nearest, miss = 0, None, math.inf
    for setup in candidates:
        price = rents.get(setup.accelerator.id)
        for drafting in (draftings or {}).get(setup.accelerator.id, NO_DRAFTS):
            rows: dict[int, list[Plan]] = {}
            for budget, batch, sized in settings(setup, load, objective, drafting):
                plan = Plan(setup, budget, batch, instances(setup, load, sized), sized, drafting, price)
                rows.setdefault(budget, []).append(plan)
                if sized.tpot_s and sized.busy < 1:
                    share = sized.rate * load.osl * setup.mesh.dp / setup.gpus
                    points.append(Point(1 / sized.tpot_s, share, plan.with_instances(1)))
                wrong = max(
                    sized.ttft_high_s / objective.ttft_s if objective.ttft_s else 0.0,
                    sized.tpot_s / objective.tpot_s if objective.tpot_s else 0.0,
                )
                if wrong < miss and _within(plan, most) and not _met(plan, objective):
                    nearest, miss = plan, wrong
            for row in rows.values():
                found, more = _cheapest(row, load, objective)
                tried += len(row) + more
                if found is not None and _within(found, most):
                    plans.append(found)
    return Found(sorted(plans, key=lambda plan: order_of(plan, load)), points, tried, nearest)


def _within(plan: Plan, most: int) -> bool:
    return plan.instances <= MOST_INSTANCES and plan.gpus <= most


def order_of(plan: Plan, load: Demand) -> tuple[Any, ...]:
    """By what deployments are ordered: rent, or for batch work rent per token."""
    return per_token(plan, load.osl) if load.offline else cost(plan)


ALIKE = 1e-3
"""Relative difference below which two figures of the trade-off are the same."""


def frontier(points: Sequence[Point]) -> list[Point]:
    """The points that no other beats in tokens per user and tokens per GPU at once, from the fastest user on.

    What beats another by less than ``ALIKE`` in either is the same to whoever chooses; of such points the best per GPU stays.
    """
    found: list[Point] = []
    for point in sorted(points, key=lambda one: (-one.user, -one.gpu)):
        if not found or point.gpu > found[-1].gpu * (1 + ALIKE):
            if found and found[-1].user < point.user * (1 + ALIKE):
                found.pop()
            found.append(point)
    return found
