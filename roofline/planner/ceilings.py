"""What binds a deployment, as named ceilings in users: how many it could serve at once if only that one limit held.

A stream's ceiling is the number of users at which it alone (memory traffic, arithmetic, a link) takes the whole time per
output token that the objective allows: that of a decode step, and what the prompts that share the device add to it. Stream
times are the datasheet's; what calibrated step times add to the bound is the ceiling "launch and host".
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from roofline.planner.demand import Demand
from roofline.planner.search import Plan, sized_at
from roofline.serving.metrics import Objective
from roofline.serving.steps import BoundSteps, StepShape

NAMES = {"memory": "memory bandwidth", "compute": "compute", "vector": "elementwise units"}
MOST_USERS = 2**16
MANY = 32
"""Prompts at once beyond which one more reads no weights that the others do not."""
GRID = 241


@dataclass(frozen=True)
class Ceiling:
    """A limit.

    Attributes:
        name: of what binds. users: at once, all instances; None where it never binds. note: what it is made of.
    """

    name: str
    users: int | None
    note: str

    def to_dict(self) -> dict[str, Any]:
        """All figures."""
        return {"ceiling": self.name, "users": self.users, "note": self.note}


def _grid() -> Any:
    import numpy

    return numpy.unique(numpy.geomspace(1, MOST_USERS, GRID).round())


def _last(sequences: Any, seconds: Any, limit: float) -> int | None:
    """The largest number of sequences whose time keeps the limit; 0 where none does, None where all do."""
    import numpy

    kept = numpy.flatnonzero(seconds <= limit)
    if kept.size == len(sequences):
        return None
    if not kept.size:
        return 0
    low, high = int(sequences[kept[-1]]), int(sequences[kept[-1] + 1])
    a, b = float(seconds[kept[-1]]), float(seconds[kept[-1] + 1])
    return low + int((high - low) * (limit - a) / (b - a)) if b > a else low


def _prompt(plan: Plan, load: Demand) -> dict[str, float]:
    """Seconds of each stream that a prompt adds to an instance that decodes; nothing where other instances prefill.

    Where prompts ride in decode steps, those read the weights anyway: a prompt adds what one more of many takes. Where decodes
    wait, prompts read them on their own, as many at once as the token budget holds.
    """
    if plan.prefill is not None:
        return {}
    setup, dp = plan.setup, plan.setup.mesh.dp

    lengths = load.lengths()
    new, cached = max(1, round(lengths.fresh)), round(lengths.cached)

    def together(prompts: int) -> dict[str, float]:
        streams = setup.deployment.prefill(dp * prompts, new, cached=cached).timing.streams
        return {name: float(seconds) for name, seconds in streams.items()}

    if setup.stalls:
        group = max(1, plan.budget // new)
        return {name: seconds / group for name, seconds in together(group).items()}
    few, many = together(MANY), together(2 * MANY)
    return {name: (seconds - few[name]) / MANY for name, seconds in many.items()}


def _streams(plan: Plan, load: Demand, limit: float) -> list[Ceiling]:
    setup = plan.setup
    dp, instances = setup.mesh.dp, plan.instances
    sequences = _grid()
    context = load.lengths().context
    step = setup.deployment.decode(sequences * dp, context * (sequences / sequences)).timing.streams
    prompt = _prompt(plan, load)
    found = []
    for name, seconds in step.items():
        share = sequences / load.osl * prompt.get(name, 0.0)
        last = _last(sequences, seconds + share, limit)
        note = "a decode step and its share of prompts" if prompt else "a decode step"
        found.append(Ceiling(NAMES.get(name, f"link {name}"), None if last is None else last * dp * instances, note))
    return found


def busiest(plan: Plan, load: Demand) -> str:
    """The stream that takes longest, by the datasheet, of a decode step and its share of prompts under the load."""
    setup, sequences = plan.setup, plan.sized.sequences
    dp = setup.mesh.dp
    step = setup.deployment.decode(sequences * dp, load.lengths().context).timing.streams
    prompt = _prompt(plan, load)
    seconds = {name: float(value) + sequences / load.osl * prompt.get(name, 0.0) for name, value in step.items()}
    name = max(seconds, key=seconds.__getitem__)
    return NAMES.get(name, f"link {name}")


def _host(plan: Plan, load: Demand, limit: float) -> Ceiling | None:
    """Users at which what calibrated decode steps take beyond the bound fills the time per token."""
    import numpy

    setup = plan.setup
    if setup.times.provenance != "calibrated":
        return None
    bound = BoundSteps(setup.deployment, longest=setup.longest)
    context = load.lengths().context
    sequences = numpy.unique(numpy.geomspace(1, 4096, 49).round())
    shapes = [StepShape(decodes=int(n), decode_context=int(n) * context) for n in sequences]
    beyond = numpy.array([setup.times.seconds(shape) - bound.seconds(shape) for shape in shapes])
    last = _last(sequences, numpy.maximum.accumulate(beyond), limit)
    users = None if last is None else last * setup.mesh.dp * plan.instances
    return Ceiling("launch and host", users, "calibrated step times beyond the bound")


def _limit(plan: Plan, load: Demand, objective: Objective, name: str) -> Ceiling:
    """Users at which the closed form's TTFT or TPOT reaches its limit, everything together; None where the budget ends first."""
    setup = plan.setup
    low, high, ended = 0, 1, False
    limit = objective.ttft_s if name == "TTFT limit" else objective.tpot_s
    assert limit is not None

    def holds(sequences: int) -> bool:
        nonlocal ended
        if plan.prefill is not None:
            shape = StepShape(decodes=sequences, decode_context=sequences * load.lengths().context)
            return setup.times.seconds(shape) <= limit
        sized = sized_at(setup, sequences, plan.budget, load, objective, plan.drafting)
        ended = sized is None
        return sized is not None and (sized.ttft_high_s if name == "TTFT limit" else sized.tpot_s) <= limit

    while high < MOST_USERS and holds(high):
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if holds(middle) else (low, middle)
    holds(low + 1)
    return Ceiling(name, None if ended else low * setup.mesh.dp * plan.instances, "closed form, everything together")


def _lengths(load: Demand) -> str:
    """How requests differ, and what they hold once between them."""
    mean = "" if load.even else " on average, with room for the luck of their lengths,"
    return f"{mean} {load.shared:,} of them shared" if load.shared else mean


def _kept(plan: Plan) -> str:
    """Why whole requests count, though a request grows to its length."""
    from roofline.serving.policies import RESERVES

    reserves = plan.setup.engine.id in RESERVES
    return ", each reserved at its admission" if reserves else " at their full length, so that none is interrupted"


def ceilings(plan: Plan, load: Demand, objective: Objective) -> list[Ceiling]:
    """Every ceiling of a deployment, the lowest first."""
    setup = plan.setup
    ranks = setup.mesh.dp * plan.instances
    draft, verified = (plan.drafting.draft, 1 + plan.drafting.gamma) if plan.drafting else (None, 1)
    found = [
        Ceiling(
            "KV memory", setup.room(load, plan.budget, plan.batch, draft) * ranks,
            f"requests of {load.length:,} tokens{_lengths(load)} that the pools hold{_kept(plan)}",
        ),
        Ceiling("token budget", plan.budget // verified * ranks, "sequences that can decode in one step"),
    ]  # fmt: skip
    if objective.tpot_s is not None:
        found += _streams(plan, load, objective.tpot_s)
        host = _host(plan, load, objective.tpot_s)
        found += [host] if host else []
        found.append(_limit(plan, load, objective, "TPOT limit"))
    if objective.ttft_s is not None and plan.prefill is None:
        found.append(_limit(plan, load, objective, "TTFT limit"))
    return sorted(found, key=lambda one: (one.users is None, one.users or 0))


def users(plan: Plan, load: Demand) -> int:
    """Users at once under the load."""
    if load.concurrency is not None:
        return load.concurrency
    return plan.sized.sequences * plan.setup.mesh.dp * plan.instances
