"""The planner's sizes: against the closed form they rest on, against the simulator, and against arithmetic by hand."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from roofline import InputError, load_accelerator, load_model
from roofline.engines.profile import load_engine
from roofline.parallel.mesh import Mesh
from roofline.planner.ceilings import ceilings
from roofline.planner.demand import demand
from roofline.planner.prices import parse_prices, rent, watts
from roofline.planner.search import Plan, Point, frontier, headroom
from roofline.planner.setups import Setup, comparable, setups, stored_formats, variants
from roofline.planner.sizing import Drafting, size
from roofline.planner.verify import simulate
from roofline.serving.closed_form import closed_form
from roofline.serving.metrics import Objective
from roofline.serving.steps import StepShape

H100, LOAD = load_accelerator("h100-sxm"), demand(1000, 200, concurrency=32)


def setup(name: str = "llama-3.1-8b", mesh: Mesh | None = None, engine: str = "vllm", gpu: Any = H100) -> Setup:
    from roofline.planner.setups import Variant
    from roofline.sharded import ShardedDeployment

    model = load_model(name)
    deployment = ShardedDeployment(model, gpu, mesh=mesh or Mesh())
    return Setup(Variant(model, *stored_formats(model)), gpu, deployment.mesh, load_engine(engine), LOAD.length, deployment, True)


ONE = setup()


class Even:
    """Step times by hand: so much for a step, for each prompt token and for each sequence."""

    provenance, notes = "datasheet", ()

    def __init__(self, step: float, token: float, sequence: float) -> None:
        self.step, self.token, self.sequence = step, token, sequence

    def seconds(self, shape: StepShape) -> float:
        return self.step + self.token * shape.prefill_tokens + self.sequence * shape.decodes

    def decode_run(self, decodes: int, context: int, steps: int) -> Any:
        import numpy

        return numpy.full(steps, self.seconds(StepShape(decodes=decodes)))


@pytest.mark.parametrize("sequences", [1, 8, 64])
def test_means_are_those_of_the_closed_form(sequences):
    ours = size(ONE.times, sequences, 4096, LOAD)
    theirs = closed_form(
        ONE.deployment, ONE.engine, sequences, LOAD.isl, LOAD.osl - 1, times=ONE.times, capacity_tokens=float("inf"),
        batched_tokens=4096,
    )  # fmt: skip
    assert ours is not None
    assert ours.tpot_s == pytest.approx(theirs.tpot_s, rel=5e-3)


def test_a_steady_state_by_hand():
    """100 sequences, prompts of 100 tokens in one chunk, 100 decode steps: one prompt joins nearly every step."""
    load = demand(100, 101, concurrency=100)
    found = size(Even(1e-3, 1e-5, 1e-5), 100, 8192, load)
    assert found is not None
    assert found.decode_s == pytest.approx(2e-3)
    together = 0.99 / (1 - math.exp(-0.99))
    assert found.mixed_s == pytest.approx(2e-3 + together * 1e-3, rel=1e-2)
    others = 99 / (found.ttft_s + 100 * found.tpot_s)
    assert found.tpot_s == pytest.approx(2e-3 / (1 - others * 1e-3), rel=5e-3)
    assert found.tpot_s == pytest.approx(2e-3 + 99 / 100 * 1e-3, rel=0.01)


def test_prompts_that_want_more_steps_than_there_are_queue():
    """A budget of 110 tokens and 100 sequences leave 10 tokens a step for prompts of 100."""
    load = demand(100, 101, concurrency=100)
    found = size(Even(1e-3, 1e-5, 0), 100, 110, load)
    assert found is not None
    assert found.busy == 1
    assert found.rate <= 110 / 100 / 1e-3
    assert found.ttft_s > 10 * found.mixed_s
    assert size(Even(1e-3, 1e-5, 0), 111, 110, load) is None, "not every sequence could decode"


def test_an_engine_whose_decodes_wait_pays_whole_prompts_between_them():
    together = size(ONE.times, 32, 8192, LOAD)
    apart = size(ONE.times, 32, 8192, LOAD, stalls=True)
    assert together is not None
    assert apart is not None
    assert apart.tpot_s > together.tpot_s


def test_drafts_that_are_always_right_and_free_divide_the_time_per_token():
    plain = size(Even(1e-3, 0, 0), 8, 8192, LOAD)
    drafted = size(Even(1e-3, 0, 0), 8, 8192, LOAD, drafting=Drafting(3, 1.0, None))
    assert plain is not None
    assert drafted is not None
    assert drafted.tpot_s == pytest.approx(plain.tpot_s / 4, rel=1e-6)


@pytest.mark.parametrize(("sequences", "budget", "engine"), [(4, 2048, "vllm"), (48, 2048, "vllm"), (24, 8192, "sglang")])
def test_the_simulator_finds_what_the_closed_form_says(sequences, budget, engine):
    """Within a fifth: equal lengths keep waves of requests together, which a mean over even arrivals does not see."""
    found = setup(engine=engine)
    load = demand(1000, 200, concurrency=sequences)
    sized = size(found.times, sequences, budget, load, stalls=found.stalls)
    assert sized is not None
    verdict = simulate(Plan(found, budget, sequences, 1, sized), load, Objective(), counted=400)
    assert verdict.tpot_s == pytest.approx(sized.tpot_s, rel=0.2)
    assert verdict.rate == pytest.approx(sized.rate, rel=0.2)


def test_random_arrivals_wait_as_the_queue_formula_says():
    """A third of all steps carry prompts: percentiles of TTFT within half of the simulator's, means within a quarter."""
    load = demand(1000, 200, rate=12.0)
    sized = size(ONE.times, 24, 1024, load)
    assert sized is not None
    verdict = simulate(Plan(ONE, 1024, 64, 1, sized), replace(load, rate=sized.rate), Objective(), counted=1500)
    assert verdict.ttft_s == pytest.approx(sized.ttft_s, rel=0.25)
    assert verdict.ttft_high_s == pytest.approx(sized.ttft_high_s, rel=0.5)


def test_users_that_a_cache_holds_are_bytes_over_bytes():
    found = ONE.memory(2048, 64)
    assert ONE.users(2048, 64) == int(found.pool.best // found.request_bytes)
    draft = load_model("llama-3.2-1b")
    left = found.pool.best - draft.weight_bytes
    assert ONE.users(2048, 64, draft) == int(left // (found.request_bytes + draft.state_bytes(ONE.longest)))


@pytest.mark.parametrize("engine", ["trtllm", "vllm"])
def test_the_simulator_gives_out_the_cache_as_the_engine_does(engine):
    """TensorRT-LLM admits a request with room for all its tokens (GUARANTEED_NO_EVICT): it interrupts none, and runs fewer."""
    load = demand(4000, 4000, concurrency=90)
    found = replace(setup(engine=engine), longest=load.length)
    held = found.users(8192, 64)
    assert 30 < held < 80
    sized = size(found.times, 90, 8192, load)
    assert sized is not None
    verdict = simulate(Plan(found, 8192, 90, 1, sized), load, Objective(), counted=200)
    blocks, page = found.blocks(8192, 90)
    assert blocks is not None
    assert blocks // -(-load.length // page) in (held, held + 1), "the ceiling counts what the simulator reserves"
    assert (verdict.preempted == 0) == (engine == "trtllm")
    assert (verdict.batch <= held + 1) == (engine == "trtllm")


def test_ceilings_are_named_and_the_lowest_binds():
    load, objective = demand(1000, 200, concurrency=32), Objective(1.0, 0.02)
    sized = size(ONE.times, 32, 2048, load)
    assert sized is not None
    found = {one.name: one.users for one in ceilings(Plan(ONE, 2048, 32, 1, sized), load, objective)}
    assert {"memory bandwidth", "compute", "KV memory", "token budget", "TTFT limit", "TPOT limit"} <= set(found)
    last = found["TPOT limit"]
    assert last is not None
    at, beyond = (size(ONE.times, number, 2048, load) for number in (last, last + 1))
    assert at is not None
    assert at.tpot_s <= 0.02
    assert beyond is None or beyond.tpot_s > 0.02
    memory = found["memory bandwidth"]
    assert memory is not None
    few, many = (ONE.deployment.prefill(number, 1000).timing.memory for number in (64, 128))
    step = ONE.deployment.decode(memory, 1100).timing.memory + memory / 200 * (many - few) / 64
    assert step == pytest.approx(0.02, rel=0.02)
    twice = {one.name: one.users for one in ceilings(Plan(ONE, 2048, 32, 2, sized), load, objective)}
    assert twice["KV memory"] == 2 * found["KV memory"]


def test_bounds_and_calibrated_times_do_not_compete():
    class Told(Even):
        def __init__(self, provenance: str) -> None:
            super().__init__(1e-3, 0, 0)
            self.provenance = provenance

    fitted, bound = setup(), setup("llama-3.1-8b", gpu=load_accelerator("mi300x"))
    fitted._times, bound._times = Told("calibrated"), Told("datasheet")
    kept, notes = comparable([fitted, bound])
    assert kept == [fitted]
    assert notes[0].startswith("mi300x: 1 of 1 layouts and formats left out")
    assert comparable([bound]) == ([bound], [])


def test_layouts_that_an_engine_does_not_offer_are_left_out():
    model, engine = load_model("qwen3-30b-a3b"), load_engine("sglang")
    found = list(setups(model, variants(model, None, None, engine, H100), H100, engine, 2048, 8, bound=True))
    assert {one.mesh.dp for one in found if one.mesh.dp > 1 and one.mesh.ranks == 4} == {4}
    assert all(one.mesh.pp == 1 for one in found), "stages inside a server with NVLink only add latency"
    cpp = load_engine("llamacpp")
    layers = list(setups(model, variants(model, None, None, cpp, H100), H100, cpp, 2048, 4, bound=True))
    assert all(one.mesh.tp == 1 for one in layers)
    old = load_accelerator("a100-sxm-80gb")
    assert {v.weights for v in variants(model, None, None, engine, old)} == {"bf16"}, "no 8-bit unit, no 8-bit default"
    assert {v.weights for v in variants(model, ["fp8"], None, engine, old)} == {"fp8"}


def test_prices_are_data_with_dates_or_said_to_be_absent():
    assert rent(load_accelerator("l40s")) is None
    found = rent(H100)
    assert found is not None
    assert (found.usd, found.low, found.high) == (2.95, 1.99, 5.0)
    assert "2026-05-20" in found.source
    assert rent(H100, {"": 2.0}).usd == rent(H100, {"h100-sxm": 2.0}).usd == 2.0
    assert watts(H100) == 700
    ids = {"h100-sxm": "h100-sxm", "h100": "h100-sxm"}
    assert parse_prices(["h100=2.5,3"], ids) == {"h100-sxm": 2.5, "": 3.0}
    for text in ("l40s=2", "h100=x", "-1"):
        with pytest.raises(InputError, match="price:"):
            parse_prices([text], ids)


@given(st.lists(st.tuples(st.integers(1, 50), st.integers(1, 50)), min_size=1, max_size=40))
@settings(max_examples=60, deadline=None)
def test_the_frontier_holds_what_nothing_beats(pairs):
    plan: Any = None
    points = [Point(user, gpu, plan) for user, gpu in pairs]
    found = frontier(points)
    for point in points:
        beaten = any(o.user >= point.user and o.gpu >= point.gpu and (o.user, o.gpu) != (point.user, point.gpu) for o in points)
        assert ((point.user, point.gpu) in {(one.user, one.gpu) for one in found}) == (not beaten)


def test_room_for_fluctuations_grows_with_the_root():
    assert headroom(100) == 130
    assert headroom(1) == 4
