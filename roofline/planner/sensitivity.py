"""Which assumption, moved within its range, flips the choice.

Each assumption goes to either end of its range while the others stay. At another price the deployments that the simulator
confirmed, and those that it did not look at for their cost, are ordered anew: the point of change is where two cost the
same. Under any other assumption the closed form sizes anew the setups that are in the running, without those that it
prefers and the simulator refutes, and the point of change is found by bisection.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from roofline.accelerator import Quantity
from roofline.planner.choose import Chosen, kind
from roofline.planner.demand import Demand
from roofline.planner.disaggregate import disaggregated
from roofline.planner.prices import Rent
from roofline.planner.search import Plan, order_of, search
from roofline.planner.setups import Setup
from roofline.planner.sizing import Drafting
from roofline.serving.metrics import Objective
from roofline.sharded import ShardedDeployment

LENGTHS, LOAD = (0.75, 1.25), (0.75, 1.25)
BANDWIDTH = {"datasheet": (0.6, 1.0), "calibrated": (0.9, 1.1)}
"""Achieved over modelled memory bandwidth: a bound assumes all of it (engines reach 0.6 to 0.93), calibrated times do not."""
ACCEPTANCE = 0.1
THINKING = (0.5, 2.0)
"""Time between turns over the one asked for: how long a cache must keep a session."""
ROUNDS = 6
RUNNING = 8
"""Setups that stay in the running."""


@dataclass(frozen=True)
class Flip:
    """An assumption and what it does to the choice.

    Attributes:
        assumption: its name. low, high, nominal: its range and value. flips_at: the value at which another deployment
            becomes the cheapest, None where none does. to: that deployment. instances: of the choice at both ends.
    """

    assumption: str
    low: float
    high: float
    nominal: float
    flips_at: float | None
    to: str | None
    instances: tuple[int | None, int | None]

    def to_dict(self) -> dict[str, Any]:
        """All figures."""
        return {
            "assumption": self.assumption, "low": self.low, "high": self.high, "nominal": self.nominal,
            "flips_at": self.flips_at, "to": self.to, "instances_at_ends": list(self.instances),
        }  # fmt: skip


def label(plan: Plan) -> str:
    """A deployment in words: "2 x (4 h200-sxm --tp 4, fp8 weights, fp8 KV)"."""
    setup = plan.setup
    weights, kv = plan.formats
    mesh = f" {setup.mesh.flags}" if setup.mesh.flags else ""
    drafts = f", {plan.drafting.gamma} drafts" if plan.drafting else ""
    front = ""
    if plan.prefill:
        other, gpus = plan.prefill.setup.mesh.flags, plan.prefill.setup.gpus
        front = f"{plan.prefill.instances} prefilling ({gpus} GPU{'' if gpus == 1 else 's'}{' ' + other if other else ''}) + "
    return f"{front}{plan.instances} x ({setup.gpus} {setup.accelerator.id}{mesh}, {weights} weights, {kv} KV{drafts})"


class _Game:
    """The choice as a function of assumptions."""

    def __init__(
        self, running: Sequence[Setup], load: Demand, objective: Objective, rents: dict[str, Rent | None], most: int,
        draftings: Mapping[str, Sequence[Drafting | None]], apart: bool,
    ) -> None:  # fmt: skip
        self.running, self.load, self.objective = list(running), load, objective
        self.rents, self.most, self.draftings = rents, most, draftings
        self.apart, self.refuted = apart, set[Any]()
        self._slower: dict[float, list[Setup]] = {}

    def settle(self, choice: Plan) -> None:
        """Takes out what the closed form prefers to the choice, as things are: the simulator refutes it."""
        while (found := self.best()) is not None and kind(found) != kind(choice):
            self.refuted.add(kind(found))

    def best(self, *, load: Demand | None = None, bandwidth: float = 1.0, alpha: float = 0.0) -> Plan | None:
        """The cheapest deployment under changed assumptions."""
        setups = self.running if bandwidth == 1.0 else self._at(bandwidth)
        drafts = {
            gpu: [d and replace(d, alpha=min(1.0, max(0.0, d.alpha + alpha))) for d in found]
            for gpu, found in self.draftings.items()
        }
        load = load or self.load
        plans = search(setups, load, self.objective, self.rents, self.most, drafts).plans
        if self.apart:
            plans += disaggregated(setups, load, self.objective, self.rents, self.most)[0]
        left = (plan for plan in plans if kind(plan) not in self.refuted)
        return min(left, key=lambda plan: order_of(plan, load), default=None)

    def _at(self, bandwidth: float) -> list[Setup]:
        key = round(bandwidth, 4)
        if key not in self._slower:
            self._slower[key] = [_slowed(setup, key) for setup in self.running]
        return self._slower[key]


def _slowed(setup: Setup, factor: float) -> Setup:
    """A setup whose memory delivers that share of its bandwidth."""
    was = setup.accelerator
    rate = Quantity(round(float(was.bandwidth.value) * factor), was.bandwidth.kind, was.bandwidth.source)
    accelerator = replace(was, bandwidth=rate)
    deployment = ShardedDeployment(setup.variant.model, accelerator, mesh=setup.mesh)
    return Setup(setup.variant, accelerator, setup.mesh, setup.engine, setup.longest, deployment, setup.bound)


def _flip(name: str, low: float, nominal: float, high: float, choice: Plan, at: Callable[[float], Plan | None]) -> Flip:
    ends = at(low), at(high)
    flipped = None
    for end, plan in zip((low, high), ends, strict=True):
        if plan is not None and kind(plan) == kind(choice):
            continue
        near, far, other = nominal, end, plan
        for _ in range(ROUNDS):
            middle = (near + far) / 2
            found = at(middle)
            if found is not None and kind(found) == kind(choice):
                near = middle
            else:
                far, other = middle, found
        if flipped is None or abs(far - nominal) < abs(flipped[0] - nominal):
            flipped = (far, "nothing meets the objective" if other is None else label(other))
    return Flip(
        name, low, high, nominal, flipped[0] if flipped else None, flipped[1] if flipped else None,
        (ends[0].instances if ends[0] else None, ends[1].instances if ends[1] else None),
    )  # fmt: skip


def _price_flip(gpu: str, price: Rent, choice: Plan, others: Sequence[Plan], load: Demand) -> Flip:
    """The price of a GPU at which another deployment costs as little as the choice."""

    def amount(plan: Plan) -> float:
        return plan.gpus / plan.output_tokens(load.osl) if load.offline else float(plan.gpus)

    def paid(plan: Plan) -> float:
        return float("inf") if plan.rent is None else plan.rent.usd * amount(plan)

    name, ends = f"price of {gpu} [USD/h]", (choice.instances, choice.instances)
    mine = choice.setup.accelerator.id == gpu
    rivals = [plan for plan in others if kind(plan) != kind(choice) and mine != (plan.setup.accelerator.id == gpu)]
    if mine:
        best = min(rivals, key=paid, default=None)
        at = None if best is None else paid(best) / amount(choice)
    else:
        best = min(rivals, key=amount, default=None)
        at = None if best is None else paid(choice) / amount(best)
    if best is None or at is None or not price.low <= at <= price.high:
        return Flip(name, price.low, price.high, price.usd, None, None, ends)
    ends = (choice.instances, best.instances) if mine else (best.instances, choice.instances)
    return Flip(name, price.low, price.high, price.usd, at, label(best), ends)


def _running(plans: Sequence[Plan], first: Sequence[Plan]) -> list[Setup]:
    """Setups in the running: of the first plans, of the cheapest, and of each accelerator's cheapest."""
    running: dict[Any, Setup] = {}
    for plan in (*first, *plans):
        of_gpu = sum(key[0] == plan.setup.accelerator.id for key in running)
        if plan in first or len(running) < RUNNING or (of_gpu < 2 and len(running) < 2 * RUNNING):
            for part in (plan, plan.prefill):
                if part is not None:
                    running.setdefault((part.setup.accelerator.id, part.setup.mesh, part.formats), part.setup)
    return list(running.values())


def sensitivity(
    plans: Sequence[Plan], load: Demand, objective: Objective, rents: dict[str, Rent | None], most: int,
    draftings: Mapping[str, Sequence[Drafting | None]], chosen: Chosen | None = None,
) -> list[Flip]:  # fmt: skip
    """What each assumption does to the choice, those that flip it first.

    Args:
        plans: those of a search, cheapest first. chosen: what the simulator said of them; None to take the closed form's word.
    """
    if chosen is not None:
        choice = chosen.confirmed[0].plan if chosen.confirmed else None
        known = [*(one.plan for one in chosen.confirmed), *chosen.waiting]
    else:
        choice, known = (plans[0] if plans else None), list(plans)
    if choice is None:
        return []
    apart = any(plan.prefill is not None for plan in plans)
    game = _Game(_running(plans, [choice]), load, objective, rents, most, draftings, apart)
    game.settle(choice)
    found = []
    for gpu, price in rents.items():
        if price is not None and price.high > price.low:
            found.append(_price_flip(gpu, price, choice, known, load))
    provenance = choice.setup.times.provenance
    low, high = BANDWIDTH[provenance]
    found.append(_flip("memory bandwidth achieved", low, 1.0, high, choice, lambda value: game.best(bandwidth=value)))
    found.append(_flip("prompt length", LENGTHS[0], 1.0, LENGTHS[1], choice, lambda v: game.best(load=load.scaled(isl=v))))
    found.append(_flip("output length", LENGTHS[0], 1.0, LENGTHS[1], choice, lambda v: game.best(load=load.scaled(osl=v))))
    if not load.offline:
        found.append(_flip("load", LOAD[0], 1.0, LOAD[1], choice, lambda v: game.best(load=load.scaled(load=v))))
    if load.kept and load.think_s:
        low, high = THINKING

        def thinking(factor: float) -> Plan | None:
            return game.best(load=replace(load, think_s=load.think_s * factor))

        found.append(_flip("time to think", low, 1.0, high, choice, thinking))
    if any(any(drafts) for drafts in draftings.values()):
        found.append(_flip("acceptance of drafts", -ACCEPTANCE, 0.0, ACCEPTANCE, choice, lambda v: game.best(alpha=v)))
    return sorted(found, key=lambda one: one.flips_at is None)
