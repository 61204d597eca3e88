"""Limits are tested at the load that is asked for: no GPU is bought for the grid that the search walks on."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import cache
from typing import Any

import pytest

from roofline import load_accelerator, load_model
from roofline.engines.profile import load_engine
from roofline.planner.ceilings import ceilings
from roofline.planner.demand import demand
from roofline.planner.disaggregate import disaggregated
from roofline.planner.search import BUDGETS, SEQUENCES, Plan, Point, batch_for, frontier, last, search, sized_at
from roofline.planner.setups import Setup, setups, variants
from roofline.planner.sizing import size
from roofline.planner.verify import simulate
from roofline.serving.metrics import Objective
from roofline.serving.steps import StepShape

H100, MODEL = load_accelerator("h100-sxm"), load_model("llama-3.1-8b")
MOST = 8


@cache
def one(weights: str = "bf16", longest: int = 1250) -> Setup:
    """A GPU with the model in one format."""
    engine = load_engine("vllm")
    (found,) = setups(MODEL, variants(MODEL, [weights], [weights], engine, H100), H100, engine, longest, 1, bound=True)
    return found


def least(users: int, objective: Objective) -> int:
    """The fewest instances of which one budget meets the limits at exactly so many users."""
    load = demand(1000, 250, concurrency=users)
    for number in range(1, MOST + 1):
        share = -(-users // number)
        for budget in BUDGETS:
            found = size(one().remembered, share, budget, load, percentile=objective.percentile)
            if found and batch_for(one(), share, budget, load, None) and objective.met(found.ttft_high_s, found.tpot_s):
                return number
    raise AssertionError(f"{MOST} GPUs do not carry {users} users")


def bought(load: Any, objective: Objective) -> Plan:
    return search([one()], load, objective, {}, MOST).plans[0]


@pytest.mark.parametrize("between", [(48, 64), (64, 96)])
def test_a_load_is_bought_the_least_number_of_gpus_that_meets_the_limits_at_exactly_that_load(between):
    """The TPOT limit is that of a number of users between two points of the grid: the upper point misses it."""
    assert all(point in SEQUENCES for point in between)
    middle, load = between[1] - 5, demand(1000, 250, concurrency=1)
    sizes = [size(one().remembered, middle, budget, load) for budget in BUDGETS]
    objective, before = Objective(5.0, min(found.tpot_s for found in sizes if found)), 0
    for users in range(50, 101):
        plan = bought(demand(1000, 250, concurrency=users), objective)
        assert plan.gpus == least(users, objective), users
        assert plan.gpus >= before
        assert plan.sized.sequences == -(-users // plan.instances)
        assert objective.met(plan.sized.ttft_high_s, plan.sized.tpot_s)
        assert (plan.gpus == 1) == (users <= middle)
        before = plan.gpus


def test_what_is_printed_as_a_ceiling_can_be_bought():
    """As many users as the lowest ceiling of a plan names are served by as many GPUs, within the same limits."""
    objective = Objective(5.0, 0.012)
    plan = bought(demand(1000, 250, concurrency=50), objective)
    ceiling = min(limit.users for limit in ceilings(plan, demand(1000, 250, concurrency=50), objective) if limit.users)
    assert ceiling not in SEQUENCES
    assert bought(demand(1000, 250, concurrency=ceiling), objective).gpus == plan.gpus


def test_a_rate_is_bought_the_least_number_of_gpus():
    """By every number of sequences, one by one: the fewest instances whose share some of them carries within the limits."""
    objective, before = Objective(0.3, 0.009), 0
    load = demand(1000, 250, rate=1.0)
    best = 0.0
    for budget in BUDGETS:
        for sequences in range(1, 257):
            found = sized_at(one(), sequences, budget, load, objective, None)
            if found is None or batch_for(one(), sequences, budget, load, None) is None:
                break
            if objective.met(found.ttft_high_s, found.tpot_s):
                best = max(best, found.rate)
    assert best > 0
    for tenths in range(5, 60):
        rate = best * tenths / 10 * 0.9999
        plan = bought(replace(load, rate=rate), objective) if rate < best * MOST else None
        if plan is not None:
            assert plan.instances == math.ceil(tenths / 10 * 0.9999)
            assert plan.rate == pytest.approx(rate)
            assert plan.instances >= before
            before = plan.instances
    assert before > 1


def test_instances_that_only_decode_run_as_many_as_the_limit_admits():
    """The decode step of 80 sequences is the limit: 64 are a point of the grid, 96 are too many."""
    setup, context = one(), demand(1000, 250).lengths().context
    limit = setup.times.seconds(StepShape(decodes=80, decode_context=80 * context))
    (plan,), _ = disaggregated([setup], demand(1000, 250, concurrency=80), Objective(None, limit), {}, MOST)
    assert plan.instances == 1
    assert plan.sized.sequences == plan.batch == 80


def test_memory_is_filled_to_the_last_sequence():
    """Batch work, and users that lie between the last point of the grid that fits and the first that does not."""
    long, load = one(longest=8000), demand(4000, 4000)
    held = long.users(2048, 64)
    assert held not in SEQUENCES
    assert held > 32
    batches = {plan.sized.sequences for plan in search([long], load, Objective(), {}, 1).plans}
    assert held in batches
    plan = search([long], replace(load, concurrency=held), Objective(), {}, 2).plans[0]
    assert plan.instances == 1
    assert plan.batch == held


@pytest.mark.parametrize("budget", [512, 1024, 2048])
def test_where_prompts_queue_tokens_per_second_are_those_of_the_simulator(budget):
    """A batch of 256 and prompts of 1,000 tokens: a budget of 1,024 admits 204 that decode, whatever the batch."""
    load = demand(1000, 250)
    sized = size(one("fp8").remembered, 256, budget, load)
    assert sized is not None
    verdict = simulate(Plan(one("fp8"), budget, 256, 1, sized), load, Objective(), counted=256 * 16)
    assert sized.tpot_s == pytest.approx(verdict.tpot_s, rel=0.1)
    assert sized.rate == pytest.approx(256 / (verdict.ttft_s + 249 * verdict.tpot_s), rel=0.1), "by Little's law"
    if sized.busy == 1:
        assert verdict.batch == pytest.approx(249 * budget / 1249, rel=0.01)
        assert sized.ttft_s == pytest.approx(verdict.ttft_s, rel=0.15)


def test_a_larger_batch_than_the_budget_admits_changes_nothing_but_the_wait():
    load = demand(1000, 250)
    some, more = (size(one("fp8").remembered, number, 1024, load) for number in (256, 320))
    assert some is not None
    assert more is not None
    assert more.rate == some.rate
    assert more.tpot_s == some.tpot_s
    assert more.ttft_s == pytest.approx(some.ttft_s + 64 / some.rate)


def test_points_that_are_the_same_to_whoever_chooses_are_one():
    plan: Any = None
    points = [Point(93.3, 183.2, plan), Point(93.3 + 1e-10, 183.2 - 1e-10, plan), Point(93.29, 183.21, plan)]
    points += [Point(80.0, 300.0, plan), Point(80.0 + 1e-9, 299.0, plan), Point(79.0, 300.1, plan)]
    assert [(round(point.user, 6), round(point.gpu, 6)) for point in frontier(points)] == [(93.3, 183.2), (80.0, 300.0)]


def test_the_last_number_of_which_something_holds():
    for limit in range(3, 20):
        assert last(3, 20, lambda number, limit=limit: number <= limit) == limit
