"""From what the closed form found to what is recommended: the cheapest deployments that the simulator confirms.

Deployments are simulated in order of cost. One that is refuted speaks for those of its kind that have no more instances and
that the closed form says are no faster in what it missed: they are passed over. Where many were simulated and none is
confirmed, the fastest deployment of each kind is, with as many instances as may be: it shows whether there is any use in going
on, and stays as an answer should nothing cheaper be confirmed.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from roofline.planner.demand import Demand
from roofline.planner.disaggregate import with_more
from roofline.planner.search import Plan, order_of, settled
from roofline.planner.verify import Verdict, assured
from roofline.serving.metrics import Objective

MOST_SIMULATED = 24
"""Deployments that are simulated before the search is content with fewer confirmed ones than asked for."""
GIVES_UP = 160
"""Deployments that are simulated before the search gives up with none."""


@dataclass(frozen=True)
class Choice:
    """A deployment and what the simulator said of it."""

    plan: Plan
    verdict: Verdict


@dataclass(frozen=True)
class Chosen:
    """What came of a verification.

    Attributes:
        confirmed: deployments that the simulator says meet the objective, the cheapest first. refuted: those it says miss it.
        waiting: deployments that were not simulated, since they cost more than those that were, or since the search gave up.
        passed: deployments that were not simulated, since one of their kind that is no slower was refuted.
        gave_up: whether deployments cheaper than the first confirmed one wait.
    """

    confirmed: list[Choice]
    refuted: list[Choice]
    waiting: list[Plan] = field(default_factory=list)
    passed: list[Plan] = field(default_factory=list)
    gave_up: bool = False

    @property
    def simulated(self) -> int:
        """Deployments that were simulated."""
        return len(self.confirmed) + len(self.refuted)


def kind(plan: Plan) -> tuple[Any, ...]:
    """What two deployments share that differ in settings and numbers only."""
    setup = plan.setup
    front = plan.prefill.setup.mesh if plan.prefill else None
    return setup.accelerator.id, setup.mesh, plan.formats, bool(plan.drafting), front


def _more(plan: Plan, load: Demand, objective: Objective, verdict: Verdict) -> Iterable[Plan]:
    """The same deployment with more instances."""
    if load.offline or verdict.refused:
        return
    if plan.prefill is None:
        step = max(1, plan.instances // 8)
        yield plan.with_instances(plan.instances + step)
        return
    step = max(1, (plan.instances if _slow(verdict, objective) else plan.prefill.instances) // 4)
    yield with_more(plan, 0 if _slow(verdict, objective) else step, step if _slow(verdict, objective) else 0)


def _slow(verdict: Verdict, objective: Objective) -> bool:
    """Whether the time per token misses its limit."""
    pace = verdict.tpot_s if verdict.tpot_high_s is None else verdict.tpot_high_s
    return objective.tpot_s is not None and pace > objective.tpot_s


def stress(plan: Plan, objective: Objective) -> float:
    """The larger share of its limits that the closed form says a deployment uses."""
    return max(
        plan.sized.ttft_high_s / objective.ttft_s if objective.ttft_s else 0.0,
        plan.sized.tpot_s / objective.tpot_s if objective.tpot_s else 0.0,
    )


@dataclass
class _Trial:
    """Deployments in order of cost, and what came of those that were simulated."""

    load: Demand
    objective: Objective
    most_gpus: int
    check: Callable[[Plan, Demand, Objective], Verdict]
    heap: list[tuple[Any, int, Plan]] = field(default_factory=list)
    number: itertools.count[int] = field(default_factory=itertools.count)
    found: dict[Any, Choice] = field(default_factory=dict)
    missed: dict[Any, list[Choice]] = field(default_factory=dict)
    passed: dict[Any, Plan] = field(default_factory=dict)

    def push(self, plan: Plan) -> None:
        """Puts a deployment in its turn: by cost, then by what it leaves of its limits."""
        order = order_of(plan, self.load)
        heapq.heappush(self.heap, ((*order[:2], stress(plan, self.objective), *order[2:]), next(self.number), plan))

    def settled(self, plan: Plan) -> Plan:
        """The deployment under the load that its instances get."""
        return settled(plan, self.load, self.objective) if plan.prefill is None else plan

    def hopeless(self, plan: Plan) -> bool:
        """Whether one of its kind that the closed form says is no slower was refuted, with as many instances."""
        for one in self.missed.get(kind(plan), ()):
            other, slow = one.plan, _slow(one.verdict, self.objective)
            fewer = plan.instances <= other.instances
            if plan.prefill is not None and other.prefill is not None:
                fewer = fewer and plan.prefill.instances <= other.prefill.instances
            if slow:
                worse = plan.sized.tpot_s >= other.sized.tpot_s
            else:
                worse = self.objective.ttft_s is not None and plan.sized.ttft_high_s >= other.sized.ttft_high_s
            if fewer and worse:
                return True
        return False

    def simulated(self, plan: Plan) -> Choice:
        """What the simulator says of a deployment; one that misses comes again with more instances."""
        choice = self.found[plan.key()] = Choice(plan, self.check(plan, self.load, self.objective))
        if not choice.verdict.met:
            self.missed.setdefault(kind(plan), []).append(choice)
            self.again(plan, choice.verdict)
        return choice

    def again(self, plan: Plan, verdict: Verdict) -> None:
        """Puts the deployment with more instances in its turn."""
        for other in _more(plan, self.load, self.objective, verdict):
            if other.gpus <= self.most_gpus:
                self.push(other)

    def short(self, plan: Plan) -> float:
        """What the closed form says of a deployment in the limit that the last refuted one of its kind missed."""
        missed = self.missed.get(kind(plan))
        if not missed or self.objective.ttft_s is None:
            return stress(plan, self.objective)
        return plan.sized.tpot_s if _slow(missed[-1].verdict, self.objective) else plan.sized.ttft_high_s

    def fastest(self) -> list[Plan]:
        """Of each kind that waits the deployment with most instances that is fastest in what was missed."""
        best: dict[Any, Plan] = {}
        for _, _, plan in self.heap:
            times = self.most_gpus // plan.gpus
            if self.load.offline or (times <= 1 and plan.prefill is not None):
                continue
            if plan.prefill is None:
                most = self.settled(plan.with_instances(self.most_gpus // plan.setup.gpus))
            else:
                most = with_more(plan, plan.prefill.instances * (times - 1), plan.instances * (times - 1))
            known = best.get(kind(plan))
            if known is None or self.short(most) < self.short(known):
                best[kind(plan)] = most
        return sorted(best.values(), key=lambda plan: stress(plan, self.objective))


def choose(
    plans: Iterable[Plan], load: Demand, objective: Objective, wanted: int, most_gpus: int,
    check: Callable[[Plan, Demand, Objective], Verdict] = assured, gives_up: int = GIVES_UP,
) -> Chosen:  # fmt: skip
    """Simulates the cheapest deployments, one of each kind, until ``wanted`` are confirmed.

    A deployment that misses is tried again with more instances, in its turn by cost. The search ends after
    ``MOST_SIMULATED`` where one is confirmed by then, else when one is, when none is left, or after ``gives_up``.
    """
    trial = _Trial(load, objective, most_gpus, check)
    for plan in plans:
        trial.push(plan)
    confirmed: list[Choice] = []
    done: set[Any] = set()
    spare: Choice | None = None
    probed = False
    while trial.heap and len(confirmed) < wanted:
        if len(trial.found) >= (MOST_SIMULATED if confirmed else gives_up):
            break
        if len(trial.found) >= MOST_SIMULATED and not probed:
            probed = True
            spare = _spare(trial)
        _, _, plan = heapq.heappop(trial.heap)
        if spare is not None and not _cheaper(plan, spare.plan, load):
            trial.push(plan)
            break
        if kind(plan) in done or plan.key() in trial.found or plan.key() in trial.passed:
            continue
        plan = trial.settled(plan)
        if trial.hopeless(plan):
            trial.passed[plan.key()] = plan
            trial.again(plan, trial.missed[kind(plan)][0].verdict)
            continue
        choice = trial.simulated(plan)
        if choice.verdict.met:
            done.add(kind(plan))
            confirmed.append(choice)
    if not confirmed and spare is not None:
        confirmed.append(spare)
    confirmed.sort(key=lambda one: (*order_of(one.plan, load)[:2], one.plan.prefill is not None, one.verdict.tpot_s))
    waiting = [plan for _, _, plan in trial.heap]
    gave_up = any(not confirmed or _cheaper(plan, confirmed[0].plan, load) for plan in waiting)
    refuted = [one for missed in trial.missed.values() for one in missed]
    return Chosen(confirmed, refuted, waiting, list(trial.passed.values()), gave_up)


def _cheaper(plan: Plan, other: Plan, load: Demand) -> bool:
    return bool(order_of(plan, load)[:2] < order_of(other, load)[:2])


def _again(trial: _Trial) -> Iterable[Plan]:
    """The fastest in what those before them missed."""
    yield from trial.fastest()


def _spare(trial: _Trial) -> Choice | None:
    """The cheapest confirmed one of the fastest deployments of each kind, with no more instances than it takes."""
    best: Choice | None = None
    first = trial.fastest()
    for plan in itertools.chain(first, _again(trial)):
        if plan.key() in trial.found or trial.hopeless(plan):
            continue
        choice = trial.simulated(plan)
        if choice.verdict.met and (best is None or _cheaper(plan, best.plan, trial.load)):
            best = choice
    if best is None or best.plan.prefill is not None:
        return best
    refused = [one.plan.instances for one in trial.missed.get(kind(best.plan), ())]
    low, high = max(refused, default=0), best.plan.instances
    while high - low > 1:
        middle = trial.settled(best.plan.with_instances((low + high) // 2))
        choice = trial.simulated(middle)
        if choice.verdict.met:
            best, high = choice, middle.instances
        else:
            low = middle.instances
    return best
