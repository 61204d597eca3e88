"""From what the closed form found to what is recommended: the cheapest deployments that the simulator confirms."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from roofline.planner.demand import Demand
from roofline.planner.disaggregate import with_more
from roofline.planner.search import Plan, order_of, settled
from roofline.planner.verify import Verdict, simulate
from roofline.serving.metrics import Objective

MOST_SIMULATED = 24
"""Deployments that are simulated before the search gives up."""


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
        waiting: deployments that were not simulated, since they cost more than those that were.
    """

    confirmed: list[Choice]
    refuted: list[Choice]
    waiting: list[Plan] = field(default_factory=list)


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
    pace = verdict.tpot_s if verdict.tpot_high_s is None else verdict.tpot_high_s
    slow = objective.tpot_s is not None and pace > objective.tpot_s
    step = max(1, (plan.instances if slow else plan.prefill.instances) // 4)
    yield with_more(plan, 0 if slow else step, step if slow else 0)


def choose(
    plans: Iterable[Plan], load: Demand, objective: Objective, wanted: int, most_gpus: int,
    check: Callable[[Plan, Demand, Objective], Verdict] = simulate,
) -> Chosen:  # fmt: skip
    """Simulates the cheapest deployments, one of each kind, until ``wanted`` are confirmed.

    A deployment that misses is tried again with more instances, in its turn by cost.
    """
    number = itertools.count()
    heap: list[tuple[Any, int, Plan]] = []
    for plan in plans:
        heapq.heappush(heap, (order_of(plan, load), next(number), plan))
    confirmed: list[Choice] = []
    refuted: list[Choice] = []
    done: set[Any] = set()
    seen: set[Any] = set()
    misses: dict[Any, int] = {}
    while heap and len(confirmed) < wanted and len(confirmed) + len(refuted) < MOST_SIMULATED:
        _, _, plan = heapq.heappop(heap)
        if kind(plan) in done or plan.key() in seen or misses.get(kind(plan), 0) >= 4:
            continue
        seen.add(plan.key())
        if plan.prefill is None:
            plan = settled(plan, load, objective)
        verdict = check(plan, load, objective)
        if verdict.met:
            done.add(kind(plan))
            confirmed.append(Choice(plan, verdict))
            continue
        refuted.append(Choice(plan, verdict))
        misses[kind(plan)] = misses.get(kind(plan), 0) + 1
        for other in _more(plan, load, objective, verdict):
            if other.gpus <= most_gpus:
                heapq.heappush(heap, (order_of(other, load), next(number), other))
    confirmed.sort(key=lambda one: (*order_of(one.plan, load)[:2], one.plan.prefill is not None, one.verdict.tpot_s))
    return Chosen(confirmed, refuted, [plan for _, _, plan in heap])
