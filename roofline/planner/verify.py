"""The simulator's word on a plan: percentiles of TTFT and the mean TPOT of its own load, request by request.

One data-parallel rank of one instance is simulated under its share of the load; a balancer that sends requests to the
least loaded rank does better than the random share that is assumed here. Requests that arrive before a steady state is
reached are served and not counted. What calibrated times say passes before a request is scheduled is added to its TTFT.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from roofline.planner.disaggregate import transfer_seconds
from roofline.planner.search import Plan
from roofline.planner.setups import scheduler
from roofline.planner.workload import Objective, Workload

if TYPE_CHECKING:
    from roofline.serving.replica import Replica

COUNTED = 1500
"""Requests that are counted: fifteen of them lie beyond the 99th percentile."""
LIVES = 2
"""How often the sequences that run at once are served and replaced before counting begins."""


@dataclass(frozen=True)
class Verdict:
    """What the simulator found.

    Attributes:
        ttft_s, ttft_high_s, tpot_s: mean, percentile, mean. rate: requests per second of all instances, as served.
        requests: counted. refused: requests that no replica can hold. preempted: requests that were pushed out.
        utilisation: share of the time that the simulated rank was busy. batch: mean sequences of decode steps.
        met: whether the objective is.
    """

    ttft_s: float
    ttft_high_s: float
    tpot_s: float
    rate: float
    requests: int
    refused: int
    preempted: int
    utilisation: float
    batch: float
    met: bool


def _replica(plan: Plan, *, prefill_only: bool = False, seed: int = 0) -> Replica:
    from roofline.serving.policies import RESERVES, Policy
    from roofline.serving.pool import Counted
    from roofline.serving.replica import Replica, Speculation

    setup = plan.setup
    blocks, page = setup.blocks(plan.budget, plan.batch, plan.drafting.draft if plan.drafting else None)
    speculation = None
    if plan.drafting:
        speculation = Speculation(plan.drafting.gamma, plan.drafting.alpha, plan.drafting.times)
    policy = Policy(
        scheduler(setup.engine), plan.batch, max(plan.budget, plan.batch * (1 + (plan.drafting.gamma if plan.drafting else 0)))
    )
    pool = Counted(blocks, page, RESERVES.get(setup.engine.id, "paged"))
    return Replica(setup.times, policy, pool, speculation=speculation, seed=seed, prefill_only=prefill_only)


def simulate(plan: Plan, load: Workload, objective: Objective, *, counted: int = COUNTED, seed: int = 0) -> Verdict:
    """Serves the plan's share of the load by the simulator."""
    import numpy

    from roofline.serving.cluster import Cluster, Link
    from roofline.serving.lengths import Distribution
    from roofline.serving.workload import synthetic

    ranks = plan.instances * plan.setup.mesh.dp
    prompt, output = (Distribution("constant", length, length) for length in (load.isl, load.osl))
    if plan.prefill is None:
        cluster, share = Cluster([_replica(plan, seed=seed)]), 1 / ranks
    else:
        front, parts = _ratio(plan)
        moved = transfer_seconds(plan.setup, load.isl) or 0.0
        link = Link(1.0, lambda tokens: moved * tokens / load.isl)
        before = [_replica(plan.prefill, prefill_only=True, seed=seed) for _ in range(front)]
        cluster = Cluster(before, [_replica(plan, seed=seed) for _ in range(parts)], link)
        share = parts / ranks
    running = max(1, round(plan.sized.sequences * share * ranks))
    warm = LIVES * running
    if load.rate is not None:
        drawn = synthetic(warm + counted, prompt, output, rate=load.rate * share, seed=seed)
    else:
        users = running if load.concurrency is None else max(1, -(-load.concurrency * round(share * ranks) // ranks))
        warm = LIVES * users
        drawn = synthetic(warm + counted + users, prompt, output, concurrency=users, seed=seed)
    outcome = cluster.serve(drawn)
    order = numpy.argsort(outcome.arrival, kind="stable")[warm : warm + counted]
    first, finish, arrival = (column[order] for column in (outcome.first, outcome.finish, outcome.arrival))
    served = numpy.isfinite(finish)
    refused = int(counted - served.sum())
    entry = plan.prefill or plan
    lag = float(getattr(entry.setup.times, "request_seconds", lambda running: 0.0)(float(running)))
    ttft = (first - arrival)[served] + lag
    tpot = ((finish - first) / max(1, load.osl - 1))[served]
    if refused or not len(ttft):
        return Verdict(float("nan"), float("inf"), float("inf"), 0.0, int(served.sum()), refused, 0, 0.0, 0.0, False)
    high, mean = float(numpy.percentile(ttft, objective.percentile)), float(tpot.mean())
    span = float(numpy.max(finish) - numpy.min(finish))
    rate = (len(ttft) - 1) / span / share if span > 0 else 0.0
    replica = (cluster.decoders or cluster.replicas)[0]
    totals = replica.totals
    kept_up = load.rate is None or ttft[-len(ttft) // 4 :].mean() <= 4 * max(ttft[: len(ttft) // 4].mean(), 1e-9)
    return Verdict(
        float(ttft.mean()), high, mean, rate, len(ttft), refused, int((outcome.preempted[order] > 0).sum()),
        totals.busy_s / outcome.end if outcome.end else 0.0, totals.decode_slots / max(1, totals.decode_steps),
        bool(objective.met(high, mean) and kept_up),
    )  # fmt: skip


def _ratio(plan: Plan) -> tuple[int, int]:
    """(prefilling ranks, decoding ranks) in lowest terms, which are simulated together."""
    from math import gcd

    assert plan.prefill is not None
    front, parts = plan.prefill.instances * plan.prefill.setup.mesh.dp, plan.instances * plan.setup.mesh.dp
    common = gcd(front, parts)
    return front // common, parts // common


def verdict_record(found: Verdict | None) -> dict[str, Any] | None:
    """All figures under keys that carry their unit; None where nothing was simulated."""
    if found is None:
        return None
    return {
        "ttft_s": found.ttft_s, "ttft_percentile_s": found.ttft_high_s, "tpot_s": found.tpot_s,
        "request_per_s": found.rate, "requests": found.requests, "refused": found.refused, "preempted": found.preempted,
        "utilisation": found.utilisation, "mean_batch": found.batch, "met": found.met,
    }  # fmt: skip
