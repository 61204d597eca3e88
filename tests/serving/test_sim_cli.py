"""``roofline simulate``: what it answers, what it refuses, the files that it writes."""

from __future__ import annotations

import csv
import io
import itertools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy
import pytest

from roofline.accelerator import load_accelerator
from roofline.configs.load import load_model
from roofline.engines.profile import load_engine
from roofline.inference import Deployment
from roofline.parallel.mesh import Mesh
from roofline.serving.closed_form import Client, closed_form
from roofline.serving.lengths import Distribution
from roofline.serving.metrics import Objective, Result
from roofline.serving.server import Options, make_server
from roofline.serving.workload import Workload, synthetic
from roofline.sharded import ShardedDeployment

BASE = ("simulate", "llama-3-8b", "--gpu", "h100-sxm", "--requests", "120")
DRAWN = (*BASE, "--rate", "8", "--isl", "512", "--osl", "64")


def test_a_simulation_answers_with_units_and_what_it_rests_on(cli: Callable[..., Any]) -> None:
    (found,) = cli(*DRAWN, "--ttft", "1s", "--tpot", "40ms", "-o", "json").records
    assert (found["schema"], found["completed"], found["refused"]) == (1, 120, 0)
    assert found["input_tokens"] == 120 * 512
    assert found["output_tokens"] == 120 * 64
    assert found["provenance"] == "datasheet"
    assert found["kv_capacity_from"] == "maths"
    assert found["meets_objective"] is True
    assert found["good_share"] == 1
    assert 0 < found["ttft_p50_s"] <= found["ttft_p99_s"] <= found["ttft_max_s"] < 1
    assert found["request_per_s"] == pytest.approx(found["goodput_request_per_s"])
    assert any("tokens of cache" in line for line in found["assumes"])
    assert found["not_modelled"]


def test_the_first_line_says_what_step_times_are_where_no_engine_is_named(cli: Callable[..., Any]) -> None:
    assert cli(*DRAWN).out.startswith("step times are the datasheet's bounds, and a real server is slower: --engine vllm")
    assert cli(*DRAWN, "--engine", "vllm").out.split()[0] == "gpu"
    assert cli(*DRAWN, "--engine", "vllm", "--bound").out.startswith(
        "step times are the datasheet's bounds, and a real server is slower\n"
    )


def test_batches_beyond_those_measured_are_called_extrapolated(cli: Callable[..., Any]) -> None:
    place = (
        "simulate",
        "llama-3-8b",
        "--gpu",
        "h100-sxm",
        "--isl",
        "500",
        "--osl",
        "50",
        "--engine",
        "trtllm",
        "--requests",
        "400",
    )
    answer = cli(*place, "--concurrency", "1,16,200", "-o", "json")
    assert [r["provenance"] for r in answer.records] == ["extrapolated", "calibrated", "extrapolated"]
    assert answer.records[1]["outside_calibrated_range"] == []
    assert answer.records[0]["outside_calibrated_range"] == [
        "batch 1 is outside the calibrated range of trtllm (4 to 128 at once)"
    ]
    assert "assumes: batches 1 and 200 are outside the calibrated range of trtllm" in cli(*place, "--concurrency", "1,16,200").out


def test_requests_that_exceed_the_models_own_context_are_named(cli: Callable[..., Any]) -> None:
    said = "requests of up to 9,010 tokens are longer than the 8,192 that the config admits"
    long = (*BASE, "--rate", "1", "--isl", "9000", "--osl", "10", "--requests", "3", "-o", "json")
    (found,) = cli(*long, "--max-model-len", "16384").records
    assert said in found["assumes"]
    (refused,) = cli(*long).records
    assert refused["refused"] == 3
    assert said not in refused["assumes"]


def test_an_engine_brings_its_cache_and_its_defaults(cli: Callable[..., Any]) -> None:
    (found,) = cli(*DRAWN, "--engine", "vllm", "-o", "json").records
    (fit,) = cli("fit", "llama-3-8b", "--gpu", "h100-sxm", "--engine", "vllm", "-o", "json").records
    assert found["kv_capacity_from"] == "engine"
    assert found["kv_blocks"] * found["block_tokens"] == found["kv_tokens"] <= fit["kv_tokens"]
    assert fit["kv_tokens"] - found["kv_tokens"] < found["block_tokens"]
    assert found["max_num_seqs"] == fit["max_num_seqs"]
    assert found["max_num_batched_tokens"] == fit["max_num_batched_tokens"]
    assert found["scheduler"] == "chunked"


def test_every_combination_is_a_row(cli: Callable[..., Any]) -> None:
    records = cli(
        *BASE[:2], "--gpu", "h100-sxm,h200-sxm", "--requests", "20", "--concurrency", "1,4", "--tp", "1,2", "--isl", "100",
        "--osl", "10", "--kv-dtype", "fp8", "-o", "json",
    ).records  # fmt: skip
    assert len(records) == 2 * 2 * 2 * 2
    assert {(r["gpu"], r["mesh"], r["concurrency"], r["variant"]) for r in records} == {
        (gpu, mesh, users, variant)
        for gpu in ("h100-sxm", "h200-sxm") for mesh in ("", "--tp 2") for users in (1, 4) for variant in ("base", "edited")
    }  # fmt: skip
    assert {r["gpus"] for r in records} == {1, 2}


def test_a_missed_objective_is_a_finding(cli: Callable[..., Any]) -> None:
    missed = cli(*DRAWN, "--tpot", "1ms", "--check")
    assert missed.code == 1
    assert "misses the objective (mean TPOT 1.000 ms): TPOT mean is" in missed.out
    assert cli(*DRAWN, "--tpot", "1s", "--check").code == 0
    (found,) = cli(*DRAWN, "--ttft", "1us", "-o", "json").records
    assert found["meets_objective"] is False
    assert found["goodput_request_per_s"] == 0


def test_csv_and_table_show_the_same_run(cli: Callable[..., Any]) -> None:
    (row,) = csv.DictReader(io.StringIO(cli(*DRAWN, "-o", "csv").out))
    (record,) = cli(*DRAWN, "-o", "json").records
    assert float(row["ttft_mean_s"]) == record["ttft_mean_s"]
    assert "8/s" in cli(*DRAWN).out


def test_a_trace_is_replayed(cli: Callable[..., Any], tmp_path: Path) -> None:
    path = tmp_path / "azure.csv"
    path.write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46.6805900,374,44\n2023-11-16 18:15:50.99,396,9\n")
    (found,) = cli("simulate", "llama-3-8b", "--gpu", "h100-sxm", "--trace", path, "-o", "json").records
    assert (found["requests"], found["input_tokens"], found["output_tokens"]) == (2, 770, 53)
    assert found["trace"] == str(path)
    assert 4.3 < found["span_s"] < 4.5
    (faster,) = cli("simulate", "llama-3-8b", "--gpu", "h100-sxm", "--trace", path, "--speed", "100", "-o", "json").records
    assert faster["span_s"] < 1


def test_the_trace_for_perfetto_holds_every_step_and_every_request(cli: Callable[..., Any], tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    (record,) = cli(*DRAWN, "--perfetto", path, "-o", "json").records
    events = json.loads(path.read_text())["traceEvents"]
    steps = [event for event in events if event["ph"] == "X"]
    assert sum(event["args"]["steps"] for event in steps) == record["steps"]
    assert sum(event["args"]["prefill_tokens"] for event in steps) == record["prefill_tokens_computed"]
    assert all(event["dur"] > 0 for event in steps)
    ordered = sorted(steps, key=lambda event: event["ts"])
    assert all(one["ts"] + one["dur"] <= two["ts"] + 1e-6 for one, two in itertools.pairwise(ordered))
    begun = [event for event in events if event["ph"] == "b" and event["name"].startswith("request")]
    ended = [event for event in events if event["ph"] == "e" and event["name"].startswith("request")]
    assert len(begun) == len(ended) == 120


def test_the_timeline_has_a_row_for_each_request(cli: Callable[..., Any], tmp_path: Path) -> None:
    path = tmp_path / "requests.csv"
    (record,) = cli(*DRAWN, "--timeline", path, "-o", "json").records
    rows = list(csv.DictReader(path.open()))
    assert len(rows) == 120
    ttft = [float(row["first_token_s"]) - float(row["arrival_s"]) for row in rows]
    assert numpy.mean(ttft) == pytest.approx(record["ttft_mean_s"], rel=1e-9)


def test_replicas_that_only_prefill_have_a_mesh_of_their_own(cli: Callable[..., Any]) -> None:
    apart = (*DRAWN, "--disaggregate", "1:2", "--link", "1GB/s", "-o", "json")
    (alike,) = cli(*apart).records
    (wide,) = cli(*apart, "--prefill-tp", "4").records
    assert (alike["gpus"], wide["gpus"]) == (3, 4 + 2)
    assert (alike["prefill_mesh"], wide["prefill_mesh"]) == (None, "--tp 4")
    assert wide["transfer_s"] == alike["transfer_s"], "the side with fewer GPUs sets the pace of a cache"
    (both,) = cli(*apart, "--prefill-tp", "4", "--tp", "2").records
    assert both["gpus"] == 4 + 2 * 2
    assert both["transfer_s"] == pytest.approx(alike["transfer_s"] / 2)
    (small,) = cli(*apart, "--prefill-max-num-batched-tokens", "256", "--prefill-max-num-seqs", "2").records
    assert small["prefill_tokens_computed"] == alike["prefill_tokens_computed"]
    assert small["steps"] > alike["steps"]
    assert small["max_num_batched_tokens"] == alike["max_num_batched_tokens"]
    (few,) = cli(*apart, "--prefill-kv-tokens", "256").records
    assert few["refused"] == 120
    told = cli(*DRAWN, "--prefill-tp", "2")
    assert (told.code, told.err.count("\n")) == (2, 1)
    assert "prefill-tp: it belongs to replicas that only prefill; give --disaggregate 1:1" in told.err


def test_a_cache_may_be_given_in_tokens(cli: Callable[..., Any]) -> None:
    (found,) = cli(*DRAWN, "--engine", "vllm", "--kv-tokens", "4096", "-o", "json").records
    assert (found["kv_tokens"], found["kv_capacity_from"]) == (4096, "given")
    assert found["kv_occupancy_peak"] > 0.5
    assert "kv-tokens: 8 are less than a block of 16" in cli(*DRAWN, "--kv-tokens", "8").err


def test_requests_of_the_warm_up_are_served_and_not_counted(cli: Callable[..., Any], tmp_path: Path) -> None:
    ends = ("--warm-up", "30", "--cool-down", "20")
    path = tmp_path / "requests.csv"
    (found,) = cli(*DRAWN, *ends, "--timeline", path, "--ttft", "1s", "-o", "json").records
    assert (found["requests"], found["completed"], found["warm_up_requests"], found["cool_down_requests"]) == (70, 70, 30, 20)
    rows = sorted(csv.DictReader(path.open()), key=lambda row: float(row["arrival_s"]))
    counted = rows[30:100]
    ttft = [float(row["first_token_s"]) - float(row["arrival_s"]) for row in counted]
    assert found["ttft_mean_s"] == pytest.approx(numpy.mean(ttft))
    span = float(counted[-1]["arrival_s"]) - float(counted[0]["arrival_s"])
    ended = [row for row in rows if float(counted[0]["arrival_s"]) < float(row["finish_s"]) <= float(counted[-1]["arrival_s"])]
    assert found["span_s"] == pytest.approx(span)
    assert found["request_per_s"] == pytest.approx(len(ended) / span)
    assert found["good_share"] == 1
    assert any("the first 30 and the last 20 requests are served and not counted" in line for line in found["assumes"])
    assert "warm-up: 100 + 20 of 120 requests leave none to count" in cli(*DRAWN, "--warm-up", "100", "--cool-down", "20").err


def test_bounds_may_be_asked_for_where_calibrated_times_are_known(cli: Callable[..., Any]) -> None:
    (best,), (bound,) = (cli(*DRAWN, "--engine", "vllm", *more, "-o", "json").records for more in ((), ("--bound",)))
    assert bound["provenance"] == "datasheet" != best["provenance"]
    assert bound["tpot_mean_s"] < best["tpot_mean_s"]


def test_features_together(cli: Callable[..., Any]) -> None:
    sessions = (*BASE, "--rate", "1", "--isl", "200", "--osl", "50", "--turns", "6", "--think", "2s", "--prefix-len", "1000")
    (cold,) = cli(*sessions, "-o", "json").records
    (warm,) = cli(*sessions, "--prefix-caching", "-o", "json").records
    assert warm["prefix_hit_share"] > 0.8 > cold["prefix_hit_share"] == 0
    assert warm["ttft_mean_s"] < cold["ttft_mean_s"]
    (split,) = cli(*DRAWN, "--disaggregate", "1:2", "--link", "100GB/s", "-o", "json").records
    assert (split["gpus"], split["prefill_replicas"], split["replicas"]) == (3, 1, 2)
    assert split["transfer_s"] == pytest.approx(120 * 512 * 131072 / 100e9)
    (drafted,) = cli(*DRAWN, "--draft-tokens", "3", "--acceptance", "0.8", "--draft-cost", "0.05", "-o", "json").records
    (plain,) = cli(*DRAWN, "-o", "json").records
    assert drafted["tpot_mean_s"] < plain["tpot_mean_s"] / 1.5


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((*BASE, "--isl", "5", "--osl", "5"), "rate: say how requests arrive"),
        ((*BASE, "--rate", "1", "--concurrency", "1", "--isl", "5", "--osl", "5"), "rate: requests arrive at a rate, or when"),
        ((*BASE, "--rate", "0", "--isl", "5", "--osl", "5"), "rate: 0 is out of range"),
        ((*BASE, "--rate", "1"), "isl: say how many tokens"),
        ((*BASE, "--rate", "1", "--isl", "sharegp", "--osl", "5"), "Did you mean 'sharegpt'"),
        ((*DRAWN, "--trace", "x.csv"), "isl: the trace says what requests are like"),
        ((*BASE, "--trace", "nowhere.csv"), "trace: nowhere.csv: no such file"),
        ((*DRAWN, "--scheduler", "fifo"), "scheduler: unknown 'fifo'"),
        ((*DRAWN, "--max-num-batched-tokens", "100"), "max-num-batched-tokens: 100 is less than max-num-seqs 256"),
        ((*DRAWN, "--ttft", "-1s"), "ttft: "),
        ((*DRAWN, "--ttft", "soon"), "ttft: 'soon' is not a number with a unit"),
        ((*DRAWN, "--percentile", "101"), "percentile: "),
        ((*DRAWN, "--acceptance", "0.5"), "acceptance: it belongs to speculative decoding"),
        ((*DRAWN, "--draft-tokens", "3"), "acceptance: say how likely"),
        ((*DRAWN, "--draft-tokens", "3", "--acceptance", "1.5", "--draft-cost", "0"), "acceptance: '1.5' is out of range"),
        ((*DRAWN, "--disaggregate", "2"), "disaggregate: '2' is not a split"),
        ((*DRAWN, "--link", "nvlink"), "link: it carries caches"),
        ((*DRAWN, "--disaggregate", "1:1", "--link", "bluetooth"), "lists no link 'bluetooth'"),
        ((*DRAWN, "--think", "5s"), "think: only sessions"),
        ((*DRAWN, "--allocation", "pages"), "allocation: unknown 'pages'"),
        ((*DRAWN, "--allocation", "oracle", "--prefix-caching"), "prefix-caching: prefixes are shared block by block"),
        ((*DRAWN, "--perfetto", "/nowhere/at/all.json"), "perfetto: /nowhere/at/all.json"),
        ((*DRAWN, "--rate", "1,2", "--perfetto", "x.json"), "perfetto: it shows one simulation"),
        ((*DRAWN, "--burst", "abc"), "burst: 'abc' is not a number"),
        ((*DRAWN, "--seed", "-1"), "seed: "),
        ((*DRAWN, "--ttft", "1e400"), "ttft: '1e400' is out of range"),
        ((*DRAWN, "--disaggregate", "1:1", "--link", "0GB/s"), "link: '0GB/s' is out of range"),
        (("simulate", "whisper-large-v3", *DRAWN[2:]), "serving of encoder-decoders is not modelled"),
        (("simulate", "llama-3-70b", *DRAWN[2:]), "memory: llama-3-70b does not fit"),
        (("simulate", "llama-3-70b", *DRAWN[2:], "--engine", "vllm"), "memory: vllm does not start"),
    ],
)  # fmt: skip
def test_bad_input_is_one_line_that_names_the_field(cli: Callable[..., Any], arguments: tuple[str, ...], message: str) -> None:
    answer = cli(*arguments)
    assert answer.code == 2
    assert answer.err.startswith("error: ")
    assert message in answer.err
    assert answer.err.count("\n") == 1


def test_requests_that_no_cache_holds_are_refused_and_counted(cli: Callable[..., Any]) -> None:
    (found,) = cli(*BASE, "--rate", "1", "--isl", "9000", "--osl", "10", "--ttft", "1s", "-o", "json").records
    assert (found["completed"], found["refused"], found["meets_objective"]) == (0, 120, False)
    assert found["ttft_mean_s"] is None


@pytest.mark.parametrize("engine", ["vllm", "trtllm", None])
@pytest.mark.parametrize(("isl", "osl"), [(1024, 1024), (1024, 256)])
@pytest.mark.parametrize("users", [1, 4, 16, 64])
def test_the_closed_form_agrees_where_nothing_queues(engine: str | None, isl: int, osl: int, users: int) -> None:
    """Time per token and throughput within 5 % on InferenceX's protocol: lengths uniform from 0.8 L to L, a closed loop."""
    deployment = ShardedDeployment(load_model("llama-3-8b"), load_accelerator("h200-sxm"), mesh=Mesh(tp=1))
    lengths = [Distribution("uniform", length * 8 // 10, length) for length in (isl, osl)]
    drawn = synthetic(users * 10, lengths[0], lengths[1], concurrency=users)
    profile = load_engine(engine) if engine else None
    server = make_server(deployment, drawn, engine=profile, options=Options(scheduler="chunked"))
    result = Result(server.serve(drawn))
    found = closed_form(
        deployment, profile, users, drawn.prompt.mean(), drawn.output.mean(), times=server.times,
        batched_tokens=server.policy.batched_tokens, client=Client(rounds=10),
    )  # fmt: skip
    assert found.tpot_s == pytest.approx(result.tpot_s.mean(), rel=0.05)
    assert found.e2e_s == pytest.approx(result.e2e_s.mean(), rel=0.05)


def test_percentiles_of_gaps_are_those_of_the_gaps_written_out() -> None:
    deployment = Deployment(load_model("llama-3-8b"), load_accelerator("h100-sxm"))
    drawn = synthetic(200, Distribution("uniform", 100, 2000), Distribution("uniform", 1, 200), rate=20.0)
    result = Result(make_server(deployment, drawn).serve(drawn), Objective(ttft_s=1.0))
    gaps, weights = result.itl_s()
    found, plain = result.to_dict(), numpy.repeat(gaps, weights)
    assert len(plain) == (drawn.output - 1).sum()
    for percentile in (50, 90, 95, 99):
        assert found[f"itl_p{percentile}_s"] == pytest.approx(numpy.percentile(plain, percentile), rel=1e-12)
    assert found["itl_mean_s"] == pytest.approx(plain.mean(), rel=1e-12)


def test_goodput_counts_the_requests_that_keep_both_limits() -> None:
    three = Workload(numpy.zeros(3), numpy.full(3, 64), numpy.array([1, 5, 9]))
    outcome = make_server(Deployment(load_model("llama-3-8b"), load_accelerator("h100-sxm")), three).serve(three)
    tpot = float(Result(outcome).tpot_s[0])
    assert Result(outcome, Objective(ttft_s=10.0, tpot_s=tpot * 1.01)).good.tolist() == [True, True, True]
    assert Result(outcome, Objective(ttft_s=10.0, tpot_s=tpot * 0.9)).good.tolist() == [True, False, False]
    assert Result(outcome, Objective(ttft_s=1e-6)).good.tolist() == [False, False, False]


def test_requests_on_their_way_to_a_replica_count_for_the_balancer(cli: Callable[..., Any]) -> None:
    """Calibrated times let a request pass a front end before it is scheduled; meanwhile it is its replica's already."""
    (found,) = cli(
        "simulate", "llama-3.1-8b", "--gpu", "h100-sxm", "--engine", "vllm", "--replicas", "3", "--concurrency", "60",
        "--isl", "1000", "--osl", "100", "--requests", "60", "-o", "json",
    ).records  # fmt: skip
    assert min(found["utilisation_by_replica"]) > 0.9 * max(found["utilisation_by_replica"])


LARGE = ("simulate", "llama-3.1-70b", "--gpu", "h200-sxm", "--rate", "1", "--isl", "2000", "--osl", "50", "--engine", "vllm",
         "--requests", "10")  # fmt: skip


def test_edits_are_simulated_where_the_model_as_it_is_does_not_fit(cli: Callable[..., Any]) -> None:
    answer = cli(*LARGE, "--dtype", "fp8", "--kv-dtype", "fp8", "-o", "json")
    (found,) = answer.records
    assert found["edits"] == ["--dtype fp8", "--kv-dtype fp8"]
    assert "llama-3.1-70b as it is does not fit and is left out" in found["assumes"]
    assert cli(*LARGE).code == 2
    assert cli(*LARGE, "--dtype", "bf16,fp16").code == 2


def test_an_edit_is_one_simulation_for_a_timeline(cli: Callable[..., Any], tmp_path: Path) -> None:
    path = tmp_path / "lines.csv"
    (found,) = cli(*DRAWN, "--dtype", "fp8", "--timeline", path, "-o", "json").records
    assert found["edits"] == ["--dtype fp8"]
    assert path.is_file()


def test_a_draft_is_timed_as_the_target_is(cli: Callable[..., Any]) -> None:
    """3 drafts of 0.8 give 2.95 tokens a round, so that a token takes about one draft step more than with a draft for nothing."""
    load = ("--gpu", "h100-sxm", "--engine", "vllm", "--concurrency", "4", "--isl", "500", "--osl", "200", "--requests", "8")
    drafts = ("simulate", "llama-3.1-70b", "--tp", "4", *load, "--draft-tokens", "3", "--acceptance", "0.8", "-o", "json")
    (with_draft,) = cli(*drafts, "--draft", "llama-3.1-8b").records
    (for_nothing,) = cli(*drafts, "--draft-cost", "0").records
    (alone,) = cli("simulate", "llama-3.1-8b", *load, "-o", "json").records
    assert with_draft["tpot_mean_s"] - for_nothing["tpot_mean_s"] == pytest.approx(alone["tpot_mean_s"], rel=0.1)


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (("--gpu", "tpu-v6e", "--engine", "sglang"), "engine: SGLang does not run on tpu-v6e (Google tpu)"),
        (("--gpu", "mi300x", "--engine", "trtllm"), "engine: TensorRT-LLM does not run on mi300x"),
    ],
)
def test_an_engine_that_does_not_run_on_a_device_is_refused(
    cli: Callable[..., Any], arguments: tuple[str, ...], text: str
) -> None:
    for command in (("simulate", "llama-3-8b", "--rate", "1", "--isl", "9", "--osl", "9"), ("fit", "llama-3-8b")):
        answer = cli(*command, *arguments)
        assert (answer.code, answer.out) == (2, "")
        assert text in answer.err


def test_a_diffusion_model_is_not_simulated_token_by_token(cli: Callable[..., Any]) -> None:
    answer = cli("simulate", "llada-8b", "--gpu", "h100-sxm", "--rate", "1", "--isl", "9", "--osl", "9")
    assert answer.code == 2
    assert "roofline diffusion llada-8b" in answer.err


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (("--rate", "1e9"), "rate: 1e+09 is out of range; give requests per second above 0, and below 1e+09"),
        (("--rate", "1", "--draft-tokens", "3", "--acceptance", "0.8"), "(--draft-cost 0.05)\n"),
        (("--rate", "1", "--draft-tokens", "3", "--acceptance", "0.8", "--draft", "mtp", "--draft-cost", "0.1"), ", not both"),
        (("--rate", "1", "--ttft", "1m"), "write one such as s, ms or us"),
    ],
)
def test_what_is_wrong_is_what_is_said(cli: Callable[..., Any], arguments: tuple[str, ...], text: str) -> None:
    answer = cli(*BASE, "--isl", "9", "--osl", "9", *arguments)
    assert answer.code == 2
    assert text in answer.err


def test_weights_that_do_not_fit_are_not_helped_by_a_shorter_context(cli: Callable[..., Any]) -> None:
    answer = cli("simulate", "llama-3.1-405b", "--gpu", "h100-sxm", "--engine", "vllm", "--rate", "1", "--isl", "9", "--osl", "9")
    assert answer.code == 2
    assert "too large per GPU" in answer.err
    assert "-6" not in answer.err
    assert "--max-model-len" not in answer.err


def test_a_trace_that_is_a_folder_is_called_one(cli: Callable[..., Any], tmp_path: Path) -> None:
    answer = cli("simulate", "llama-3-8b", "--gpu", "h100-sxm", "--trace", tmp_path)
    assert "a folder; name the file in it" in answer.err


def test_hashes_of_a_trace_cover_its_prompt(cli: Callable[..., Any], tmp_path: Path) -> None:
    path = tmp_path / "moon.jsonl"
    path.write_text('{"timestamp": 0, "input_length": 600, "output_length": 5, "hash_ids": [1, 2, 3]}\n', encoding="utf-8")
    answer = cli("simulate", "llama-3-8b", "--gpu", "h100-sxm", "--trace", path)
    assert "3 hash_ids of 512 tokens for a prompt of 600" in answer.err


def test_states_of_fixed_size_are_counted_by_requests(cli: Callable[..., Any]) -> None:
    """They do not grow, so that nobody is pushed out."""
    arguments = ("mamba2-2.7b", "--gpu", "h100-sxm", "--engine", "vllm", "--max-model-len", "2048", "-o", "json")
    (found,) = cli("simulate", *arguments, "--concurrency", "256", "--isl", "500", "--osl", "100", "--requests", "400").records
    (fit,) = cli("fit", *arguments).records
    assert found["preemptions"] == 0
    assert found["kv_blocks"] == int(fit["max_concurrency"])
    assert found["kv_occupancy_peak"] == 1
