"""Loads whose requests differ, share prefixes or follow each other: what the closed form makes of them, and the simulator."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from roofline import InputError, load_accelerator, load_model
from roofline.engines.profile import load_engine
from roofline.parallel.mesh import Mesh
from roofline.planner.demand import Demand, demand
from roofline.planner.search import Plan, carried, instances, settled, sized_at
from roofline.planner.setups import Setup, Variant, stored_formats
from roofline.planner.sizing import size, waiting
from roofline.planner.verify import Replay, simulate
from roofline.serving.lengths import Distribution, parse_length
from roofline.serving.metrics import Objective
from roofline.sharded import ShardedDeployment

H100, MODEL = load_accelerator("h100-sxm"), load_model("llama-3.1-8b")


def setup(longest: int, engine: str = "vllm") -> Setup:
    deployment = ShardedDeployment(MODEL, H100, mesh=Mesh())
    return Setup(Variant(MODEL, *stored_formats(MODEL)), H100, Mesh(), load_engine(engine), longest, deployment, True)


def length(text: str) -> Distribution:
    return parse_length(text, "isl")


CHAT = demand(length("lognormal:1500:0.8"), length("lognormal:300:0.6"), rate=4.0, most=16384)
AGENT = demand(200, 50, rate=0.5, prefix=4000, turns=8, think_s=5.0, kept=True, most=20000)


def test_requests_that_are_all_alike_need_no_draws():
    found = demand(1000, 200, rate=1.0).lengths()
    assert (found.prompt, found.output, found.cached, found.context, found.far) == (1000, 200, 0, 1100, 1000)
    assert (found.excess, found.variation, found.arrivals) == (1.0, 0.0, 1.0)
    kept = demand(1000, 200, rate=1.0, prefix=3000, kept=True)
    assert (kept.isl, kept.lengths().cached, kept.lengths().fresh, kept.held) == (4000, 3000, 1000, (1200.0, 0.0))
    assert demand(1000, 200, rate=1.0, prefix=3000).lengths().cached == 0


def test_mean_and_spread_of_drawn_lengths_are_those_of_their_distributions():
    found = replace(CHAT, most=None).lengths(99.0)
    assert found.prompt == pytest.approx(1500, rel=0.02)
    assert found.output == pytest.approx(300, rel=0.02)
    assert found.variation == pytest.approx(math.exp(0.8**2) - 1, rel=0.1)
    assert found.excess == pytest.approx(math.exp(0.8**2), rel=0.1), "pairs grow with the square"
    assert found.far == pytest.approx(1500 * math.exp(-(0.8**2) / 2 + 2.326 * 0.8), rel=0.1)
    longer_outputs_count_longer = 1500 + 300 * math.exp(0.6**2) / 2
    assert found.context == pytest.approx(longer_outputs_count_longer, rel=0.02)


def test_turns_hold_what_was_said_before_and_the_cache_has_it():
    """Eight turns of 200 + 50 tokens behind 4,000: the k-th prompt has 4,000 + 200 + 250 (k - 1), and 200 new ones."""
    assert AGENT.requests == 8
    assert AGENT.request_rate == 4
    assert AGENT.isl == 4000 + 200 + round(250 * 3.5)
    warm, cold = AGENT.lengths(), AGENT.lengths(hits=0.0)
    assert warm.fresh == pytest.approx(200 + 7 / 8, abs=0.01), "the last token of an answer is not in the cache"
    assert cold.fresh == pytest.approx(AGENT.isl - 4000, abs=1)
    half = AGENT.lengths(hits=0.5)
    assert half.fresh == pytest.approx((warm.fresh + cold.fresh) / 2)
    assert half.prompt == pytest.approx(warm.prompt)
    assert replace(AGENT, kept=False).lengths().fresh == pytest.approx(AGENT.isl)
    assert AGENT.think_mean_s == pytest.approx(5 * 7 / 8)


def test_lengths_that_differ_make_a_queue_wait_longer():
    even, spread = waiting(0.1, 0.5, 99.0), waiting(0.1, 0.5, 99.0, 2.0)
    assert spread[0] == pytest.approx(2 * even[0]), "M/M/1 waits twice as long as M/D/1"
    assert even[0] == pytest.approx(0.5 * 0.1 / (2 * 0.5))


def test_a_pool_leaves_room_for_the_luck_of_lengths():
    one = setup(16384)
    mean, deviation = CHAT.held
    tokens = one.tokens(CHAT, 2048, 256)
    found = one.room(CHAT, 2048, 256)
    assert tokens is not None
    assert found * mean + 2 * math.sqrt(found) * deviation <= tokens
    assert (found + 1) * mean + 2 * math.sqrt(found + 1) * deviation > tokens
    even = demand(1500, 300, rate=4.0)
    assert setup(even.longest).room(even, 2048, 256) == setup(even.longest).users(2048, 256)
    shared = replace(even, prefix=6000, kept=True)
    room = setup(shared.longest).room(shared, 2048, 256)
    assert room == int((setup(shared.longest).tokens(shared, 2048, 256) - 6000) // 1800), "a prefix is held once"
    apart = replace(shared, kept=False)
    assert room > 3 * setup(apart.longest).room(apart, 2048, 256)


@pytest.mark.parametrize(("load", "sequences"), [(CHAT, 16), (AGENT, 12), (demand(length("200:3000"), 200, rate=1.0), 16)])
def test_the_simulator_finds_about_what_the_closed_form_says(load: Demand, sequences: int) -> None:
    """TPOT within a quarter; the 99th percentile of TTFT, which the closed form adds up from tails, within a factor of 1.8."""
    one = setup(load.longest)
    sized = sized_at(one, sequences, 2048, load, Objective(), None)
    assert sized is not None
    offered = replace(load, rate=sized.rate / load.requests)
    verdict = simulate(Plan(one, 2048, 4 * sequences, 1, sized), offered, Objective(), counted=1200)
    assert verdict.tpot_s == pytest.approx(sized.tpot_s, rel=0.25)
    assert sized.ttft_high_s / 1.8 < verdict.ttft_high_s < sized.ttft_high_s * 1.8
    assert verdict.hits == pytest.approx(load.lengths().cached / load.isl, abs=0.02)


def test_spread_costs_time_to_the_first_token():
    one, even = setup(16384), demand(1500, 300, rate=4.0)
    alike, drawn = (size(one.times, 16, 2048, load) for load in (even, CHAT))
    assert alike is not None
    assert drawn is not None
    assert drawn.ttft_high_s > 2 * alike.ttft_high_s
    assert drawn.tpot_s == pytest.approx(alike.tpot_s, rel=0.05)


def test_a_cache_that_is_too_small_forgets_sessions_as_the_simulator_s_does():
    """Four sessions a second of six turns, in caches that hold a sixth to three quarters of them: hits within 0.06."""
    from roofline.serving.server import Options, make_server
    from roofline.serving.workload import synthetic

    load = demand(400, 100, rate=4.0, turns=6, think_s=5.0, kept=True, most=4096)
    drawn = synthetic(3000, load.prompt, load.output, rate=load.rate, turns=6, think_s=5.0, longest=4096, seed=3)
    one = setup(4096)
    for tokens in (60_000, 160_000):
        server = make_server(one.deployment, drawn, options=Options(prefix_cache=True, bound=True, kv_tokens=tokens))
        served = server.serve(drawn)
        steady = (served.arrival > 40) & (served.arrival < 120)
        later = (drawn.after >= 0) & steady
        left = drawn.prompt[drawn.after[later]] + 100 - 1
        running = ((served.finish - served.admitted) * (drawn.prompt + drawn.output))[steady].sum() / 80
        found = served.hit[later].sum() / left.sum()
        assert load.hits(tokens - running, steady.sum() / 80) == pytest.approx(found, abs=0.06), tokens
    assert load.hits(1e9, 24.0) == 1.0
    assert load.hits(-1.0, 24.0) == 0.0
    assert replace(load, think_s=0.0).hits(10.0, 24.0) == 1.0
    assert replace(load, kept=False).hits(10.0, 24.0) == 1.0


def test_users_who_think_are_more_than_those_whose_requests_run():
    load = replace(AGENT, rate=None, concurrency=100)
    one = setup(load.longest)
    sized = sized_at(one, 8, 2048, load, Objective(), None)
    assert sized is not None
    assert carried(sized, load) == pytest.approx(8 + sized.rate * 5 * 7 / 8)
    number = instances(one, load, sized)
    assert number == math.ceil(100 / carried(sized, load))
    plan = settled(Plan(one, 2048, 64, number, sized), load, Objective())
    assert plan.sized.sequences <= 8
    assert carried(plan.sized, load) >= 100 / number


def test_a_share_of_arrivals_in_bursts_is_less_bursty():
    load = demand(100, 10, rate=8.0, burst=3.0)
    assert load.share(4, 1).rate == 2.0
    assert load.share(4, 1).burst == pytest.approx(math.sqrt(0.25 * 9 + 0.75))
    assert demand(100, 10, rate=8.0).share(3, 1).burst == 1.0
    assert demand(100, 10, concurrency=10).share(4, 1).concurrency == 3


def test_sessions_are_counted_once_as_many_run_as_ever_will():
    one = setup(AGENT.longest)
    sized = sized_at(one, 8, 2048, AGENT, Objective(), None)
    assert sized is not None
    replay = Replay(Plan(one, 2048, 32, 1, sized), AGENT, Objective(), counted=300)
    before, after = replay.ends
    assert before > 4 * 8 * 5 * 0.5
    assert after > 0
    assert replay.result().done.sum() == pytest.approx(300, abs=8)


BASE = ("plan", "llama-3.1-8b", "--gpus", "h100-sxm", "--bound", "--max-gpus", 8, "--dtype", "bf16", "--kv-dtype", "bf16",
        "--show", 1, "--no-disaggregation", "--requests", 200)  # fmt: skip
SESSIONS = ("--isl", 300, "--osl", 60, "--turns", 10, "--think", "3s", "--prefix-len", 8000, "--rate", 1.5, "--ttft", "400ms",
            "--tpot", "25ms", "--percentile", 95)  # fmt: skip


def test_kept_prefixes_need_fewer_gpus_and_are_launched(cli: Callable[..., Any]) -> None:
    (warm,) = cli(*BASE, *SESSIONS, "--prefix-caching", "-o", "json").records
    (cold,) = cli(*BASE, *SESSIONS, "-o", "json").records
    assert warm["gpus"] < cold["gpus"]
    assert warm["simulated"]["prefix_hit_share"] > 0.9
    assert cold["simulated"]["prefix_hit_share"] == 0
    assert warm["rate_request_per_s"] == pytest.approx(15)
    assert ["time to think" in [one["assumption"] for one in found["sensitivity"]] for found in (warm, cold)] == [True, False]
    assert "--enable-prefix-caching" in warm["launch"][0]["argv"]
    assert "--enable-prefix-caching" not in cold["launch"][0]["argv"]
    assert (warm["turns"], warm["prefix_tokens"], warm["prefix_caching"]) == (10, 8000, True)
    assert any("a session stays with its instance" in line for line in warm["assumes"])
    assert any("computed whole each time" in line for line in cold["assumes"])
    (file,) = cli(*BASE, *SESSIONS, "--prefix-caching", "--engine", "trtllm", "-o", "json").records[0]["launch"]
    assert "kv_cache_config:\n  enable_block_reuse: true" in file["files"]["extra.yaml"]


def test_requests_that_no_replica_holds_are_named(cli: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    from roofline.planner import solve
    from roofline.planner.verify import Verdict

    nothing = Verdict(math.nan, math.inf, math.inf, 0.0, 0, 7, 0, 0.0, 0.0, False)
    monkeypatch.setattr(solve, "assured", lambda *_, **__: nothing)
    answer = cli(*BASE, "--isl", 500, "--osl", 50, "--rate", 1)
    assert answer.code == 1
    assert "the simulator refuses 7 requests: longer than its cache" in answer.out


def test_lengths_that_differ_are_asked_for_as_simulate_asks(cli: Callable[..., Any]) -> None:
    drawn = ("--isl", "lognormal:1500:0.8", "--osl", "200:400", "--rate", 3, "--ttft", "1s")
    (found,) = cli(*BASE, *drawn, "-o", "json").records
    assert found["input_tokens"] == pytest.approx(1500, rel=0.05)
    assert found["max_model_len"] % 1024 == 0
    assert f"--max-model-len {found['max_model_len']} " in found["replay"]
    told = cli(*BASE, *drawn).out
    assert "tokens on average, TTFT" in told
    assert "assumes: requests are cut at" in told
    assert "on average, with room for the luck of their lengths" in found["ceilings"][-1]["note"] + str(found["ceilings"])
    (even,) = cli(*BASE, "--isl", 1500, "--osl", 300, "--rate", 3, "--ttft", "1s", "-o", "json").records
    assert even["simulated"]["ttft_percentile_s"] < found["simulated"]["ttft_percentile_s"]
    (narrow,) = cli(*BASE, "--isl", 1000, "--osl", 100, "--range-ratio", 0.8, "--rate", 3, "-o", "json").records
    assert narrow["max_model_len"] == 1100
    assert "--isl 800:1000 --osl 80:100" in narrow["replay"]


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (("--isl", "9,99", "--osl", 9, "--rate", 1), "isl: '9,99' is not a length in tokens"),
        (("--isl", "sharegpd", "--osl", 9, "--rate", 1), "Did you mean"),
        (("--isl", 9, "--osl", 9, "--rate", 1, "--think", "1s"), "think: only sessions"),
        (("--isl", 9, "--osl", 9, "--concurrency", 1, "--burst", 2), "burst: users that wait"),
        (("--isl", 9, "--osl", 9, "--rate", 1, "--range-ratio", 2), "range-ratio"),
        (("--isl", 9, "--osl", 9, "--rate", 1, "--prefix-len", 500, "--max-model-len", 500), "max-model-len: 500 tokens hold no"),
        (("--isl", 200_000, "--osl", "lognormal:10:0.5", "--rate", 1), "200,001 tokens exceeds the 131,072"),
        (("--isl", 9, "--osl", 9, "--rate", 1, "--engine", "llamacpp", "--prefix-caching"), "prefix-caching: llama.cpp keeps"),
    ],
)
def test_loads_that_are_none_are_one_line(cli: Callable[..., Any], arguments: tuple[Any, ...], text: str) -> None:
    answer = cli("plan", "llama-3.2-1b", "--gpus", "h100-sxm", *arguments)
    assert (answer.code, answer.out, answer.err.count("\n")) == (2, "", 1)
    assert text in answer.err
    told = cli("plan", "mamba2-2.7b", "--isl", 9, "--osl", 9, "--rate", 1, "--gpus", "h100-sxm", "--prefix-caching").err
    assert "prefix-caching: the state of mamba2-2.7b does not grow" in told
    with pytest.raises(InputError, match="osl"):
        demand(1, 0)
