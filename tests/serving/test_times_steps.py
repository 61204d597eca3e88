"""Calibrated step times and the closed form: laws that hold for any deployment, and the figures that they must give."""

from __future__ import annotations

import re
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from roofline.accelerator import load_accelerator
from roofline.configs.load import load_model
from roofline.edits import apply, dtype, kv_dtype
from roofline.engines.profile import load_engine
from roofline.errors import InputError, UnsupportedModel
from roofline.expected.arithmetic import ceil, clip, floor, log2, maximum, minimum, sqrt, where
from roofline.expected.calibration import families
from roofline.expected.kernels import engines
from roofline.expected.serving import fitted, serving_of
from roofline.parallel.mesh import Mesh
from roofline.serving.calibrated import ExpectedSteps
from roofline.serving.closed_form import RULES, Client, Rules, closed_form, loads, steady
from roofline.serving.metrics import Result
from roofline.serving.policies import Policy
from roofline.serving.server import Cache, Server
from roofline.serving.steps import BoundSteps, StepShape, step_times
from roofline.serving.workload import Workload
from roofline.sharded import ShardedDeployment

LLAMA = apply(load_model("llama-3.1-70b"), [dtype("fp8"), kv_dtype("fp8")])
PLACES = {
    "llama-70b fp8": (LLAMA, "h100-sxm", Mesh(tp=4), "vllm"),
    "llama-8b": (load_model("llama-3.1-8b"), "h100-sxm", Mesh(), "trtllm"),
    "gpt-oss": (load_model("gpt-oss-120b"), "h200-sxm", Mesh(tp=2), "vllm"),
    "deepseek-v3": (load_model("deepseek-v3"), "h200-sxm", Mesh(tp=8), "sglang"),
}


def place(name: str) -> ShardedDeployment:
    model, gpu, mesh, _ = PLACES[name]
    return ShardedDeployment(model, load_accelerator(gpu), mesh=mesh)


STEPS = {name: ExpectedSteps(place(name), PLACES[name][3]) for name in PLACES}
BOUNDS = {name: BoundSteps(place(name)) for name in PLACES}


def shape(decodes: int, context: int, chunks: int = 0, chunk: int = 0, behind: int = 0) -> StepShape:
    pairs = chunks * (chunk * behind + chunk * (chunk + 1) // 2)
    return StepShape(chunks * chunk, pairs, chunks, decodes, decodes * context)


@pytest.mark.parametrize("name", PLACES)
@given(data=st.data())
@settings(max_examples=25, deadline=None)
def test_no_step_is_faster_than_its_bound(name: str, data: st.DataObject) -> None:
    decodes = data.draw(st.integers(0, 256))
    chunks = data.draw(st.integers(0 if decodes else 1, 4))
    one = shape(
        decodes, data.draw(st.integers(1, 20_000)), chunks, data.draw(st.integers(1, 2048)), data.draw(st.integers(0, 8192))
    )
    assert STEPS[name].seconds(one) >= BOUNDS[name].seconds(one)


@pytest.mark.parametrize("name", PLACES)
def test_a_run_of_decodes_is_its_steps_one_by_one(name: str) -> None:
    run = STEPS[name].decode_run(16, 16 * 1000, 8)
    each = [STEPS[name].seconds(StepShape(decodes=16, decode_context=16 * (1000 + step))) for step in range(8)]
    assert run == pytest.approx(each, rel=1e-12)


def test_remembered_rows_are_those_evaluated_anew() -> None:
    """Beyond a few numbers of rows blocks are filled at once: the same seconds, to rounding."""
    worn = ExpectedSteps(place("llama-8b"), "trtllm")
    for decodes in range(1, 200):
        worn.seconds(shape(decodes, 500))
    for decodes in (3, 150, 199, 600):
        fresh = ExpectedSteps(place("llama-8b"), "trtllm").seconds(shape(decodes, 500))
        assert worn.seconds(shape(decodes, 500)) == pytest.approx(fresh, rel=1e-12)


@pytest.mark.parametrize("name", PLACES)
def test_more_work_takes_longer(name: str) -> None:
    steps = STEPS[name]
    base = steps.seconds(shape(32, 2000))
    assert base < steps.seconds(shape(32, 8000))
    assert base < steps.seconds(shape(64, 2000))
    assert base < steps.seconds(shape(32, 2000, 1, 1024)) < steps.seconds(shape(32, 2000, 4, 1024))


def test_verifying_drafts_costs_more_than_decoding_and_less_than_that_many_steps() -> None:
    steps = STEPS["llama-70b fp8"]
    one = steps.seconds(StepShape(decodes=8, decode_context=8000))
    verified = steps.seconds(StepShape(decodes=8, decode_context=8000, drafted=3))
    assert one < verified < 2 * one


def test_time_models_say_the_same_over_floats_and_arrays() -> None:
    values = np.array([0.3, 1.0, 2.5, 1000.0])
    for function in (ceil, floor, sqrt, log2):
        assert [function(float(x)) for x in values] == pytest.approx(function(values).tolist(), rel=1e-15)
    assert [maximum(float(x), 2.0) for x in values] == maximum(values, 2.0).tolist()
    assert [minimum(2.0, float(x)) for x in values] == minimum(2.0, values).tolist()
    assert [clip(float(x), 1.0, 2.0) for x in values] == clip(values, 1.0, 2.0).tolist()
    assert [where(float(x) > 1, 5.0, 6.0) for x in values] == where(values > 1, 5.0, 6.0).tolist()


def test_a_step_of_floats_needs_no_numpy() -> None:
    code = (
        "import sys\n"
        "from roofline.accelerator import load_accelerator\n"
        "from roofline.configs.load import load_model\n"
        "from roofline.inference import Deployment\n"
        "from roofline.serving.calibrated import ExpectedSteps\n"
        "from roofline.serving.steps import StepShape\n"
        "steps = ExpectedSteps(Deployment(load_model('llama-3.1-8b'), load_accelerator('h100-sxm')), 'vllm')\n"
        "assert steps.seconds(StepShape(decodes=8, decode_context=8000)) > 0\n"
        "print('numpy' in sys.modules)\n"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "False"


def test_what_has_no_constants_is_a_bound_that_says_why() -> None:
    hybrid = ShardedDeployment(load_model("qwen3-next-80b-a3b"), load_accelerator("h200-sxm"), mesh=Mesh(tp=2))
    times = step_times(hybrid, load_engine("vllm"))
    assert times.provenance == "datasheet"
    assert any("no time model" in note for note in times.notes)
    with pytest.raises(UnsupportedModel, match="no time model"):
        ExpectedSteps(hybrid, "vllm")
    assert step_times(place("llama-8b")).provenance == "datasheet"


def test_what_leaves_the_calibrated_range_says_so() -> None:
    far = ShardedDeployment(load_model("llama-3.1-8b"), load_accelerator("a100-sxm-80gb"))
    times = step_times(far, load_engine("vllm"))
    assert times.provenance == "calibrated"
    assert any("a100-sxm-80gb is outside the calibrated range of vllm" in note for note in times.notes)
    inside = step_times(place("llama-8b"), load_engine("trtllm"))
    assert not any("outside" in note for note in inside.notes)


def test_a_word_says_what_times_are_worth_at_a_batch() -> None:
    from roofline.expected.serving import left_range, standing

    inside, far = step_times(place("llama-8b"), load_engine("trtllm")), step_times(place("llama-8b"), load_engine("vllm"))
    assert [standing(inside, [n]) for n in (3, 4, 128, 129)] == ["extrapolated", "calibrated", "calibrated", "extrapolated"]
    assert (standing(inside), standing(far, [16])) == ("calibrated", "extrapolated")
    assert standing(step_times(place("llama-8b")), [10**6]) == "datasheet"
    assert left_range(inside, [1, 2, 200]) == (
        "batches 1 to 2 and 200 are outside the calibrated range of trtllm (4 to 128 at once)",
    )


def test_notes_say_in_which_direction_times_err() -> None:
    from roofline.expected.errors import tendency

    (first, *_) = step_times(place("llama-8b"), load_engine("vllm")).notes
    assert re.search(r": \d+ % \(\d+ % too (short|long) on average\) per token, most at .*; \d+ % .*to the first token", first)
    assert "inside the calibrated range (4 to 128 at once)" in first
    assert [tendency(bias) for bias in (None, 0.004, -0.043, 0.2)] == [
        "", "", " (4 % too short on average)", " (20 % too long on average)",
    ]  # fmt: skip


def test_constants_lie_within_their_bounds_and_say_where_they_come_from() -> None:
    from roofline.expected.serving import ENGINE_CONSTANTS, SHARED_CONSTANTS

    data = fitted()
    assert {"package", "date", "split", "rows"} <= set(data)
    for engine in data["engine"]:
        constants = serving_of(engine)
        for constant in (*ENGINE_CONSTANTS, *SHARED_CONSTANTS):
            assert constant.low <= getattr(constants, constant.name) <= constant.high
    assert len(ENGINE_CONSTANTS) <= 3
    with pytest.raises(UnsupportedModel, match="no serving constants"):
        serving_of("tgi")


def test_every_kernel_of_an_engine_has_constants() -> None:
    """A family that is renamed would otherwise turn a prediction into a bound."""
    known = {(family.name, family.model) for family in families("h100-sxm").values()}
    texts = [text for table in engines().values() for text in table.values() if isinstance(text, str)]
    named = [tuple(part.strip() for part in text.split("|")) for text in texts]
    assert len(named) > 40
    assert [pair for pair in named if pair not in known] == []


def test_latent_attention_under_vllm_takes_kernels_that_sglang_timed_and_says_so() -> None:
    """FlashAttention 3 runs latent attention under both; the engines' own kernels of everything else differ."""
    deployment = place("deepseek-v3")
    found = step_times(deployment, load_engine("vllm"))
    assert found.provenance == "calibrated"
    assert any("timed under sglang" in note for note in found.notes)
    assert not any("timed under" in note for note in step_times(deployment, load_engine("sglang")).notes)
    assert not any("timed under" in note for note in step_times(place("gpt-oss"), load_engine("vllm")).notes)
    decode = shape(16, 4000)
    assert BoundSteps(deployment).seconds(decode) < found.seconds(decode) < 2 * STEPS["deepseek-v3"].seconds(decode)


@pytest.mark.parametrize("name", PLACES)
def test_times_that_are_prepared_together_are_those_of_each_step(name: str) -> None:
    asked = [shape(decodes, 700, chunks, 300) for decodes in (0, 1, 7, 48) for chunks in (0, 1, 3) if decodes + chunks]
    together, alone = (ExpectedSteps(place(name), PLACES[name][3]) for _ in range(2))
    together.prepare(iter(asked))
    known = [one for stage in together._stages for one in stage._rows.values() if one._operators]
    assert all(len(one._known) > 1 for one in known if one._operators[0].over == "all"), "nothing was prepared"
    assert [together.seconds(one) for one in asked] == pytest.approx([alone.seconds(one) for one in asked], rel=1e-12)


def test_one_client_waits_for_nobody() -> None:
    """A single closed-loop client: TPOT is a decode step, TTFT its own prefill; no step is under way."""
    deployment, engine = place("llama-70b fp8"), load_engine("vllm")
    steps = STEPS["llama-70b fp8"]
    answer = closed_form(deployment, engine, 1, 1000, 200, times=steps)
    assert answer.tpot_s == pytest.approx(steps.seconds(shape(1, 1100)))
    assert answer.ttft_s == pytest.approx(steps.seconds(shape(0, 0, 1, 1000)) + steps.request_seconds(1.0))
    assert answer.output_tok_per_s == pytest.approx(200 / (answer.ttft_s + 199 * answer.tpot_s))


def test_prompts_of_others_lengthen_tokens_and_a_full_cache_makes_requests_wait() -> None:
    deployment, engine = place("llama-8b"), load_engine("trtllm")

    def answer(clients: int, tokens: float | None = None):
        return closed_form(deployment, engine, clients, 2000, 200, times=STEPS["llama-8b"], capacity_tokens=tokens)

    few, many = answer(4), answer(64)
    assert few.tpot_s < many.tpot_s
    assert few.output_tok_per_s < many.output_tok_per_s
    full = answer(64, 10_000.0)
    assert full.running == pytest.approx(10_000 / 2200), "TensorRT-LLM reserves a request's whole output"
    paged = closed_form(deployment, None, 64, 2000, 200, times=STEPS["llama-8b"], capacity_tokens=10_000.0)
    assert paged.running == pytest.approx(10_000 / 2120)
    assert full.full
    assert not many.full
    assert full.ttft_s > 10 * many.ttft_s
    assert full.output_tok_per_s < many.output_tok_per_s


def test_sglang_admits_the_newest_with_room_for_all_of_its_output() -> None:
    found = loads(64.0, 2000.0, 200.0, 10_000.0, 8192.0, rules=RULES["sglang"])
    assert found.running == pytest.approx(1 + (10_000 - 2200) / (2000 + 0.55 * 200))


def test_long_prompts_are_cut_by_the_token_budget() -> None:
    cut = loads(8.0, 30_000.0, 500.0, 1e9, 8192.0)
    assert cut.turns == 4.0
    assert cut.mixed.chunk * cut.turns == pytest.approx(30_000)
    whole = loads(8.0, 4000.0, 500.0, 1e9, 8192.0)
    assert (whole.turns, whole.mixed.chunk, whole.mixed.behind) == (1.0, 4000.0, 0.0)


def test_a_step_that_has_prompts_has_a_poisson_number_of_them() -> None:
    """Mean of those above nothing; TensorRT-LLM packs whole prompts, vLLM fills the budget."""
    found = loads(101.0, 100.0, 100.0, 1e9, 8192.0)
    number = np.arange(1, 60)
    chances = np.exp(-1.0) / np.cumprod(number)
    assert found.group == pytest.approx((number * chances).sum() / chances.sum())
    long = [loads(64.0, 3000.0, 300.0, 1e9, 8192.0, rules=RULES.get(engine, Rules())) for engine in ("vllm", "trtllm")]
    assert [one.together for one in long] == [pytest.approx(8192 / 3000), 2.0]
    assert [one.share for one in long] == [pytest.approx(3000 / (8192 - 64)), 0.5]


def test_a_wave_waits_for_half_of_the_others_prompts_before_and_after_its_first_token() -> None:
    """Pairs of prompts, one after the other: 32 of them, of which 31 are others."""
    client = Client(wave=1.0)
    found = loads(64.0, 4096.0, 256.0, 1e9, 8192.0, client)
    assert found.group == 2.0
    means = steady(found, 0.02, 0.5, 0.4, 0.0, 64.0, 256.0, client, burst=0.4)
    assert means.ttft == pytest.approx((32 + 1) / 2 * 0.4)
    assert means.tpot == pytest.approx(0.02 + 31 / 2 * 0.4 / 256)


def test_the_first_round_of_ten_waits_for_half_of_all_prompts() -> None:
    """InferenceX: ten requests of each client, all start at once: 32 prompts, four in a step of the budget."""
    found = loads(32.0, 2048.0, 1000.0, 1e9, 8192.0)
    assert found.together == 4.0
    ten = steady(found, 0.01, 0.05, 0.05, 0.0, 32.0, 1000.0, Client(rounds=10.0), burst=0.3)
    endless = steady(found, 0.01, 0.05, 0.05, 0.0, 32.0, 1000.0)
    assert ten.ttft - endless.ttft == pytest.approx((0.5 * (32 / 4 + 1) * 0.3 - endless.ttft) / 10)
    assert ten.tpot - 0.01 == pytest.approx((endless.tpot - 0.01) * (1 - 1 / 20)), "the first prompts meet half of the others"


def test_ends_of_lives_gather_as_their_spread_says() -> None:
    """The k-th end of a life is spread by sqrt(k): the self-density of a wrapped normal distribution, by sampling."""
    found = loads(4.0, 10.0, 1000.0, 1e9, 8192.0, Client(rounds=3.0, spread=0.1)).gathered
    random, bins = np.random.Generator(np.random.PCG64(1)), 50
    density = 0.0
    for k in (1, 2):
        ends = 0.1 * np.sqrt(k) * random.standard_normal(400_000) % 1.0
        share = np.bincount((ends * bins).astype(int), minlength=bins) / len(ends)
        density += bins * (share**2).sum() / 2
    assert found == pytest.approx(density, rel=0.01)
    assert loads(4.0, 10.0, 1000.0, 1e9, 8192.0, Client(spread=0.1)).gathered == 1.0, "endless lives are spread evenly"


def test_a_request_waits_for_the_rest_of_the_step_that_is_under_way_when_it_is_known() -> None:
    """Answered at the end of a step, known 25 ms later: in the middle of the third step of 10 ms, or shortly before its end."""
    found = loads(2.0, 100.0, 1e5, 1e9, 8192.0)
    for request, left in ((0.025, 0.005), (0.0299, 0.0001), (0.0, 0.0)):
        means = steady(found, 0.01, 0.012, 0.012, request, 2.0, 1e5)
        assert means.ttft == pytest.approx(request + left + 0.012, abs=1e-5)


def test_long_steps_are_not_met_more_often_than_they_occur() -> None:
    """The clock of a closed loop is its steps: prompts of a second that come with one step in 100 are met once in 100 times."""
    found = loads(11.0, 1000.0, 1000.0, 1e9, 8192.0)
    means = steady(found, 0.01, 1.01, 1.0, 0.009, 11.0, 1000.0)
    rate = 10 / (means.ttft + 1000 * means.tpot)
    added = 1.0 / found.group
    assert means.tpot == pytest.approx(0.01 / (1 - rate * added), rel=1e-4)
    met = 1 - np.exp(-rate * means.tpot)
    wait = met * (1.01 - 0.009) + (1 - met) * 0.001
    assert means.ttft == pytest.approx(0.009 + 0.01 + added + wait + rate * means.tpot * added, rel=2e-3)
    assert means.quiet


def test_prompts_that_want_more_than_all_steps_set_the_pace() -> None:
    """128 clients, two prompts a step, 32 steps of output: a prompt in every half step, the rest of a life is waiting."""
    found = loads(128.0, 4000.0, 32.0, 1e9, 8128.0)
    means = steady(found, 0.01, 0.09, 0.08, 0.0, 128.0, 32.0)
    assert means.tpot == pytest.approx(0.09), "every step is full"
    assert means.ttft + 32 * means.tpot == pytest.approx(127 * 0.045), "Little's law"


@pytest.mark.parametrize(
    ("clients", "prompt", "output", "budget"),
    [(8, 4096, 1024, 2048), (64, 1024, 1024, 8192), (64, 4096, 256, 8192), (64, 4096, 64, 2048), (32, 8192, 128, 2048)],
)
def test_the_closed_form_finds_the_simulators_queues(clients: int, prompt: int, output: int, budget: int) -> None:
    """A tenth per token and a quarter to the first token where prompts take 1 to 200 % of all steps."""
    deployment, times = place("llama-70b fp8"), STEPS["llama-70b fp8"]
    random, number = np.random.Generator(np.random.PCG64(1)), 10 * clients
    lengths = [random.integers(int(0.8 * size), size + 1, number) for size in (prompt, output)]
    load = Workload(np.zeros(number), *lengths, concurrency=clients)
    cache = Cache(None, 16, None, "engine", "", clients, budget)
    served = Result(Server(deployment, cache, Policy("chunked", clients, budget), times).serve(load))
    closed = closed_form(
        deployment, None, clients, 0.9 * prompt, 0.9 * output, times=times, capacity_tokens=1e12, batched_tokens=budget,
        client=Client(rounds=10.0),
    )  # fmt: skip
    assert closed.tpot_s == pytest.approx(served.tpot_s.mean(), rel=0.10)
    assert closed.ttft_s == pytest.approx(served.ttft_s.mean(), rel=0.25)


@pytest.mark.parametrize(
    ("clients", "prompt", "output", "cached"), [(0, 10, 10, 0), (1, 0, 10, 0), (1, 10, 0, 0), (1, 10, 10, 10)]
)
def test_sizes_out_of_range_are_named(clients: int, prompt: int, output: int, cached: int) -> None:
    with pytest.raises(InputError, match="give"):
        closed_form(place("llama-8b"), None, clients, prompt, output, times=BOUNDS["llama-8b"], cached=cached)


def test_a_request_that_no_cache_holds_is_refused() -> None:
    with pytest.raises(InputError, match="does not fit"):
        closed_form(place("llama-8b"), None, 1, 1000, 1000, times=BOUNDS["llama-8b"], capacity_tokens=1500.0)


@pytest.mark.parametrize("name", ["llama-3.1-8b", "gpt-oss-20b", "deepseek-v2-lite"])
def test_kernels_that_look_at_tokens_alone_are_listed_once_and_take_the_same_time(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    deployment = ShardedDeployment(load_model(name), load_accelerator("rtx-4090"))
    asked = [shape(decodes, 700, chunks, 300) for decodes in (0, 1, 7, 200) for chunks in (0, 1, 3) if decodes + chunks]
    found = [ExpectedSteps(deployment, "llamacpp").seconds(one) for one in asked]
    (stage,) = ExpectedSteps(deployment, "llamacpp")._stages
    assert 0 < len(stage._other) < len(stage._rows["all"]._operators)
    monkeypatch.setattr("roofline.expected.plain.by_tokens", lambda part: False)
    apart = ExpectedSteps(deployment, "llamacpp")
    assert found == pytest.approx([apart.seconds(one) for one in asked], rel=1e-12)
