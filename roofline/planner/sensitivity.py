"""Which assumption, moved within its range, flips the choice.

Each assumption goes to either end of its range while the others stay. At another price the deployments that the simulator
confirmed, and those that it did not look at for their cost, are ordered anew: the point of change is where two cost the
same. Under any other assumption the setups that are in the running are planned anew: sized by the closed form and, where the
choice was, confirmed by the simulator. The choice flips where another kind of deployment is cheaper than the cheapest of its own
kind, or where its kind no longer holds; one that costs the same is no reason to change. The point of change is found by
bisection over the closed form; the simulator has to confirm what is found there, else the bisection goes on with its word.
Where the closed form finds no change, the simulator is not asked. What the simulator refutes is so for heavier loads too, and
says nothing of lighter ones.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from roofline.accelerator import Quantity
from roofline.planner.choose import Chosen, choose, kind
from roofline.planner.demand import Demand
from roofline.planner.disaggregate import disaggregated
from roofline.planner.prices import Rent
from roofline.planner.search import Plan, order_of, search
from roofline.planner.setups import Setup
from roofline.planner.sizing import Drafting
from roofline.planner.verify import Verdict, assured
from roofline.serving.metrics import Objective
from roofline.sharded import ShardedDeployment

LENGTHS, LOAD = (0.75, 1.25), (0.75, 1.25)
BANDWIDTH = {"datasheet": (0.6, 1.0), "calibrated": (0.9, 1.1)}
"""Achieved over modelled memory bandwidth: a bound assumes all of it (engines reach 0.6 to 0.93), calibrated times do not."""
ACCEPTANCE = 0.1
THINKING = (0.5, 2.0)
"""Time between turns over the one asked for: how long a cache must keep a session."""
ROUNDS = 3
RUNNING = 8
"""Setups that stay in the running."""
TRIED = 3
"""Deployments that are simulated at one value of an assumption."""
TIE = 1e-9
MET = Verdict(0.0, 0.0, 0.0, 0.0, 0, 0, 0, 0.0, 0.0, True)
"""What stands for the simulator's word where the closed form's is taken."""

Check = Callable[[Plan, Demand, Objective], Verdict]


@dataclass(frozen=True)
class Flip:
    """An assumption and what it does to the choice.

    Attributes:
        assumption: its name. low, high, nominal: its range and value. flips_at: the nearest value at which another deployment
            becomes the cheapest, None where none does. to: that deployment. instances: of the cheapest at both ends.
        usd_per_hour: of that deployment. further_at, further_to, further_usd_per_hour: the same of one further off that costs
            less than it, and than the choice; None where none does.
    """

    assumption: str
    low: float
    high: float
    nominal: float
    flips_at: float | None
    to: str | None
    instances: tuple[int | None, int | None]
    usd_per_hour: float | None = None
    further_at: float | None = None
    further_to: str | None = None
    further_usd_per_hour: float | None = None

    def to_dict(self) -> dict[str, Any]:
        """All figures."""
        return {
            "assumption": self.assumption, "low": self.low, "high": self.high, "nominal": self.nominal,
            "flips_at": self.flips_at, "to": self.to, "instances_at_ends": list(self.instances),
            "usd_per_hour": self.usd_per_hour, "further_at": self.further_at, "further_to": self.further_to,
            "further_usd_per_hour": self.further_usd_per_hour,
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
    """The cheapest deployment as a function of assumptions."""

    def __init__(
        self, running: Sequence[Setup], choice: Plan, load: Demand, objective: Objective, rents: dict[str, Rent | None],
        most: int, draftings: Mapping[str, Sequence[Drafting | None]], apart: bool, check: Check,
    ) -> None:  # fmt: skip
        self.running, self.choice, self.load, self.objective = list(running), choice, load, objective
        self.rents, self.most, self.draftings = rents, most, draftings
        self.apart, self.check = apart, check
        self._changed: dict[Any, list[Setup]] = {}

    def offers(self, load: Demand, bandwidth: float, alpha: float) -> list[Plan]:
        """Deployments that meet the objective by the closed form."""
        setups = self._setups(bandwidth, load.longest)
        drafts = {
            gpu: [d and replace(d, alpha=min(1.0, max(0.0, d.alpha + alpha))) for d in found]
            for gpu, found in self.draftings.items()
        }
        plans = search(setups, load, self.objective, self.rents, self.most, drafts).plans
        if self.apart:
            plans += disaggregated(setups, load, self.objective, self.rents, self.most)[0]
        return plans

    def best(self, heavier: float, *, load: Demand | None = None, bandwidth: float = 1.0, alpha: float = 0.0) -> Plan | None:
        """The cheapest deployment under changed assumptions; of the choice's kind where no other is cheaper.

        ``heavier``: above 0 what is cheaper than the choice was refuted under less, and is not tried; below 0 the choice was
        confirmed under more, and is not tried again.
        """
        load = load or self.load
        plans = self.offers(load, bandwidth, alpha)
        own: list[Plan] = []
        others: list[Plan] = []
        for plan in plans:
            grown = self._grown(plan, load) if heavier > 0 else plan
            if grown is not None:
                (own if kind(grown) == kind(self.choice) else others).append(grown)
        mine: Plan | None
        if heavier < 0 and not load.offline:
            mine = self._first([plan for plan in own if cheaper(plan, self.choice, load)], load) or self.choice
            if cheaper(self.choice, mine, load):
                mine = self.choice
        else:
            mine = self._first(own, load)
        rival = self._first([plan for plan in others if mine is None or cheaper(plan, mine, load)], load)
        return rival if rival is not None and (mine is None or cheaper(rival, mine, load)) else mine

    def _first(self, plans: Sequence[Plan], load: Demand) -> Plan | None:
        """The cheapest that is confirmed."""
        found = choose(plans, load, self.objective, 1, self.most, self.check, TRIED).confirmed
        return found[0].plan if found else None

    def _grown(self, plan: Plan, load: Demand) -> Plan | None:
        """The deployment with so many instances that it does not cost less than the choice."""
        if load.offline or not cheaper(plan, self.choice, load):
            return plan
        if plan.prefill is not None:
            return None
        while cheaper(plan, self.choice, load):
            plan = plan.with_instances(plan.instances + 1)
        return plan if plan.gpus <= self.most else None

    def _setups(self, bandwidth: float, longest: int) -> list[Setup]:
        """Those in the running, at that share of their bandwidth, for requests of up to so many tokens."""
        key = round(bandwidth, 4), longest
        if key not in self._changed:
            self._changed[key] = [_changed(setup, *key) for setup in self.running]
        return self._changed[key]


def _changed(setup: Setup, factor: float, longest: int) -> Setup:
    """A setup whose memory delivers that share of its bandwidth, and that takes requests of that length."""
    longest = max(longest, setup.longest)
    if factor == 1.0 and longest == setup.longest:
        return setup
    was = setup.accelerator
    if factor == 1.0:
        return Setup(setup.variant, was, setup.mesh, setup.engine, longest, setup.deployment, setup.bound)
    rate = Quantity(round(float(was.bandwidth.value) * factor), was.bandwidth.kind, was.bandwidth.source)
    accelerator = replace(was, bandwidth=rate)
    deployment = ShardedDeployment(setup.variant.model, accelerator, mesh=setup.mesh)
    return Setup(setup.variant, accelerator, setup.mesh, setup.engine, longest, deployment, setup.bound)


def cheaper(plan: Plan, other: Plan, load: Demand) -> bool:
    """Whether a deployment costs less; in accelerators where neither has a price."""
    one, two = order_of(plan, load)[:2], order_of(other, load)[:2]
    if one[0] == two[0] == float("inf"):
        return bool(one[1] < two[1])
    return bool(one[0] < two[0] * (1 - TIE))


Best = Callable[[float], Plan | None]
Change = tuple[float, Plan | None]


def _nearest(near: float, far: float, found: Plan | None, at: Best, counts: Callable[[Plan | None], bool]) -> Change:
    """(the value closest to ``near`` for which what is best counts, what is best there)."""
    for _ in range(ROUNDS):
        middle = (near + far) / 2
        best = at(middle)
        if counts(best):
            far, found = middle, best
        else:
            near = middle
    return far, found


def _sure(
    near: float, end: float, found: Plan | None, at: Best, surely: Best, counts: Callable[[Plan | None], bool]
) -> Change | None:
    """The same, where ``surely`` says that it counts, too; None where it does not even at the end."""
    value, found = _nearest(near, end, found, at, counts)
    best = surely(value)
    if counts(best):
        return value, best
    best = surely(end)
    return _nearest(value, end, best, surely, counts) if counts(best) else None


def _flip(
    name: str, low: float, nominal: float, high: float, choice: Plan, load: Demand, at: Best, surely: Best
) -> Flip:  # fmt: skip
    """Where the choice flips between both ends."""

    def other(plan: Plan | None) -> bool:
        return plan is None or kind(plan) != kind(choice)

    ends = at(low), at(high)
    changes: list[Change] = []
    for end, plan in zip((low, high), ends, strict=True):
        if not other(plan):
            continue
        nearest = _sure(nominal, end, plan, at, surely, other)
        if nearest is None:
            continue
        changes.append(nearest)
        value, first = nearest
        if plan is not None and first is not None and cheaper(plan, first, load):

            def as_cheap(found: Plan | None, most: Plan = plan) -> bool:
                return found is not None and other(found) and not cheaper(most, found, load)

            further_off = _sure(value, end, plan, at, surely, as_cheap)
            if further_off is not None:
                changes.append(further_off)
    numbers = (ends[0].instances if ends[0] else None, ends[1].instances if ends[1] else None)
    if not changes:
        return Flip(name, low, high, nominal, None, None, numbers)
    value, to = min(changes, key=lambda one: abs(one[0] - nominal))
    flip = Flip(
        name, low, high, nominal, value, "nothing meets the objective" if to is None else label(to), numbers,
        to.usd_per_hour if to else None,
    )  # fmt: skip
    further: Change | None = None
    for one in changes:
        least = further[1] if further else to
        if one[1] is None or not cheaper(one[1], choice, load) or (least is not None and not cheaper(one[1], least, load)):
            continue
        further = one
    if further is None or further[1] is None:
        return flip
    return replace(
        flip, further_at=further[0], further_to=label(further[1]), further_usd_per_hour=further[1].usd_per_hour
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
    rent = at if best.setup.accelerator.id == gpu else best.rent.usd if best.rent else None
    return Flip(name, price.low, price.high, price.usd, at, label(best), ends, None if rent is None else rent * best.gpus)


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
    draftings: Mapping[str, Sequence[Drafting | None]], chosen: Chosen | None = None, check: Check = assured,
) -> list[Flip]:  # fmt: skip
    """What each assumption does to the choice, those that flip it first.

    Args:
        plans: those of a search, cheapest first. chosen: what the simulator said of them; None to take the closed form's word.
        check: the simulator, which confirms what flips the choice where ``chosen`` is given.
    """
    if chosen is not None:
        choice = chosen.confirmed[0].plan if chosen.confirmed else None
        known = [*(one.plan for one in chosen.confirmed), *chosen.waiting]
    else:
        choice, known = (plans[0] if plans else None), list(plans)
    if choice is None:
        return []
    apart = any(plan.prefill is not None for plan in plans)
    running = _running(plans, [choice])

    def game(check: Check) -> _Game:
        return _Game(running, choice, load, objective, rents, most, draftings, apart, check)

    def trusting(*_: Any) -> Verdict:
        return MET

    quickly = game(trusting)
    surely = quickly if chosen is None else game(check)
    found = []
    for gpu, price in rents.items():
        if price is not None and price.high > price.low:
            found.append(_price_flip(gpu, price, choice, known, load))
    provenance = choice.setup.times.provenance
    low, high = BANDWIDTH[provenance]

    def moved(name: str, low: float, nominal: float, high: float, best: Callable[[_Game, float], Plan | None]) -> None:
        found.append(_flip(name, low, nominal, high, choice, load, partial(best, quickly), partial(best, surely)))

    moved("memory bandwidth achieved", low, 1.0, high, lambda game, v: game.best(1 - v, bandwidth=v))
    moved("prompt length", LENGTHS[0], 1.0, LENGTHS[1], lambda game, v: game.best(v - 1, load=load.scaled(isl=v)))
    moved("output length", LENGTHS[0], 1.0, LENGTHS[1], lambda game, v: game.best(v - 1, load=load.scaled(osl=v)))
    if not load.offline:
        moved("load", LOAD[0], 1.0, LOAD[1], lambda game, v: game.best(v - 1, load=load.scaled(load=v)))
    if load.kept and load.think_s:
        low, high = THINKING
        moved("time to think", low, 1.0, high, lambda game, v: game.best(0, load=replace(load, think_s=load.think_s * v)))
    if any(any(drafts) for drafts in draftings.values()):
        moved("acceptance of drafts", -ACCEPTANCE, 0.0, ACCEPTANCE, lambda game, v: game.best(-v, alpha=v))
    return sorted(found, key=lambda one: one.flips_at is None)
