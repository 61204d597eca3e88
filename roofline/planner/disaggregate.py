"""Disaggregated deployments: some instances prefill, others decode, and the cache travels between them.

Without prompts in their steps decoding instances keep a steady pace; a prompt waits for a prefilling instance (a queue
with equal service times, M/D/1), is computed, and its cache is sent over the network of the GPUs that hold it. Time to
first token is counted with that transfer.
Sources: Zhong et al. 2024, DistServe (arXiv 2401.09670); Patel et al. 2023, Splitwise (arXiv 2311.18677).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any

from roofline.planner.demand import Demand
from roofline.planner.prices import Rent
from roofline.planner.search import MOST_INSTANCES, SEQUENCES, Plan, headroom, last, order_of
from roofline.planner.setups import Setup
from roofline.planner.sizing import Sized, waiting
from roofline.serving.metrics import Objective
from roofline.serving.steps import StepShape

PREFILL_BUDGET = 8192
"""Tokens of a step of an instance that only prefills."""
MOST_BUSY = 0.9
"""Share of the time that prefilling instances may be busy."""
FEW = 8
"""Decoding instances up to which batch work looks for a whole ratio of prefilling ones."""
NETWORKS = ("network", "pcie", "ici")


def way_out(setup: Setup) -> str | None:
    """Name of the link over which caches leave; None where the GPU's file lists none."""
    return next((name for name in NETWORKS if name in setup.accelerator.links), None)


def transfer_seconds(setup: Setup, tokens: int, front: Setup | None = None) -> float | None:
    """Seconds to send the cache of a prompt; None where the GPU's file lists no way out.

    All GPUs of a rank of the side with fewer of them send or receive at once; without ``front`` both sides are alike.
    """
    name = way_out(setup)
    if name is None:
        return None
    each = [one.mesh.tp * one.mesh.pp for one in (setup, front or setup)]
    return float(setup.variant.model.state_bytes(tokens)) / (min(each) * float(setup.accelerator.links[name].bandwidth.value))


def prompt_seconds(setup: Setup, load: Demand) -> float:
    """Seconds of the steps that prefill one mean prompt alone on an instance."""
    lengths = load.lengths()
    new, cached = max(1, round(lengths.fresh)), round(lengths.cached)
    chunks = -(-new // PREFILL_BUDGET)
    each = -(-new // chunks)
    total = 0.0
    for start in range(0, new, each):
        tokens = min(each, new - start)
        pairs = round((tokens * (cached + start) + tokens * (tokens + 1) // 2) * lengths.excess)
        total += setup.times.seconds(StepShape(prefill_tokens=tokens, prefill_pairs=pairs, prefills=1))
    return total


def _decoding(setup: Setup, load: Demand, tpot_s: float | None) -> Iterator[tuple[int, int, float, float]]:
    """(sequences, batch, step, requests per second) of one rank that only decodes, up to as many as limit and memory admit."""
    context = load.lengths().context
    steps = max(1, load.osl - 1)

    def batch(sequences: int) -> int:
        return headroom(sequences) if load.rate is not None else sequences

    def step(sequences: int) -> float:
        return setup.remembered.seconds(StepShape(decodes=sequences, decode_context=sequences * context))

    def admitted(sequences: int) -> bool:
        fits = batch(sequences) <= setup.room(load, BATCH_BUDGET, batch(sequences))
        return fits and (tpot_s is None or step(sequences) <= tpot_s)

    before = 0
    for point in SEQUENCES:
        sequences = point if admitted(point) else last(before, point, admitted)
        if sequences > before:
            yield sequences, batch(sequences), step(sequences), sequences / (steps * step(sequences))
        if sequences < point:
            return
        before = point


BATCH_BUDGET = 2048
"""Token budget for which memory of decoding instances is worked out."""


def _prefilling(
    setup: Setup, load: Demand, rate: float, limit: float | None, percentile: float
) -> tuple[int, float, float] | None:
    """(instances, mean, percentile) of waiting and prefilling at a request rate; None where no number is fast enough."""
    service, lengths = prompt_seconds(setup, load), load.lengths(percentile)
    if limit is not None and service >= limit:
        return None
    longer = (lengths.far / lengths.fresh - 1.0) * service
    number = max(1, math.ceil(rate * service / (setup.mesh.dp * MOST_BUSY)))
    while number <= MOST_INSTANCES:
        busy = rate * service / (number * setup.mesh.dp)
        mean, tail = waiting(service, busy, percentile, lengths.variation + lengths.arrivals)
        high = service + math.hypot(tail, longer)
        if limit is None or high <= limit:
            return number, service + mean, high
        if longer >= limit - service:
            return None
        number += max(1, number // 8)
    return None


def _rates(load: Demand, sequences: int, step: float, each: float, dp: int) -> tuple[int, float]:
    """(decoding instances, requests per second that the deployment sees)."""
    if load.request_rate is not None:
        return math.ceil(load.request_rate / (each * dp) * (1 - 1e-9)), load.request_rate
    if load.concurrency is not None:
        life = max(1, load.osl - 1) * step
        rate = load.concurrency / (life + load.think_mean_s)
        return math.ceil(rate * life / (sequences * dp) * (1 - 1e-9)), rate
    return FEW, FEW * dp * each


def disaggregated(
    candidates: Iterable[Setup], load: Demand, objective: Objective, rents: dict[str, Rent | None], most: int
) -> tuple[list[Plan], int]:
    """(the cheapest disaggregated deployment of each kind of accelerator and formats, deployments sized)."""
    groups: dict[Any, list[Setup]] = {}
    for setup in candidates:
        groups.setdefault((setup.accelerator.id, setup.variant.weights, setup.variant.kv), []).append(setup)
    plans, tried = [], 0
    for (accelerator, _, _), found in groups.items():
        best: Plan | None = None
        price = rents.get(accelerator)
        cheapest: dict[tuple[float, int], tuple[Setup, int, float, float] | None] = {}
        for setup in found:
            if way_out(setup) is None:
                continue
            for sequences, batch, step, each in _decoding(setup, load, objective.tpot_s):
                tried += 1
                number, rate = _rates(load, sequences, step, each, setup.mesh.dp)
                if number * setup.gpus >= most or number > MOST_INSTANCES:
                    continue
                pace = round(math.log(rate) * 20)
                rate_up = math.exp((pace + 1) / 20) if load.rate is None else rate
                key = pace, setup.mesh.tp * setup.mesh.pp
                if key not in cheapest:
                    cheapest[key] = _cheapest_prefill(found, load, rate_up, objective, setup)
                    tried += len(found)
                prefill = cheapest[key]
                if prefill is None:
                    continue
                plan = _joined(setup, prefill, (sequences, batch, step, number), rate, load, price)
                if plan.gpus <= most and (best is None or order_of(plan, load) < order_of(best, load)):
                    best = plan
        if best is not None:
            plans.append(best)
    return plans, tried


def _cheapest_prefill(
    found: list[Setup], load: Demand, rate: float, objective: Objective, decoder: Setup
) -> tuple[Setup, int, float, float] | None:
    best = None
    for setup in found:
        moved = transfer_seconds(decoder, load.isl, setup) or 0.0
        limit = None if objective.ttft_s is None else objective.ttft_s - moved
        sized = _prefilling(setup, load, rate, limit, objective.percentile)
        if sized and (best is None or sized[0] * setup.gpus < best[1] * best[0].gpus):
            best = (setup, *sized)
    return best


def _joined(
    setup: Setup, prefill: tuple[Setup, int, float, float], decode: tuple[int, int, float, int], rate: float, load: Demand,
    price: Rent | None,
) -> Plan:  # fmt: skip
    first, count, mean, tail = prefill
    sequences, batch, step, number = decode
    moved = transfer_seconds(setup, load.isl, first) or 0.0
    share = rate / (number * setup.mesh.dp)
    service = prompt_seconds(first, load)
    lag = float(getattr(first.times, "request_seconds", lambda running: 0.0)(1.0))
    mean, tail = mean + lag, tail + lag
    sized = Sized(sequences, 1, 0.0, step, step, mean + moved + step, tail + moved + step, step, share)
    waiting = Sized(1, 1, 1.0, service, service, mean, tail, 0.0, rate / (count * first.mesh.dp))
    front = Plan(first, PREFILL_BUDGET, max(1, PREFILL_BUDGET // round(load.lengths().fresh)), count, waiting, rent=price)
    return Plan(setup, BATCH_BUDGET, batch, number, sized, None, price, front, moved)


def with_more(plan: Plan, prefill: int, decode: int) -> Plan:
    """The plan with more instances of each kind."""
    assert plan.prefill is not None
    front = plan.prefill
    return replace(
        plan, instances=plan.instances + decode, prefill=replace(front, instances=front.instances + prefill),
        sized=replace(plan.sized, rate=plan.sized.rate * plan.instances / (plan.instances + decode)),
    )  # fmt: skip
