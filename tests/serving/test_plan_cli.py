"""``roofline plan`` and ``roofline fleet`` on the command line."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from roofline.engines.documented import load_server

LENGTHS = ("--isl", 500, "--osl", 50, "--requests", 150)
SMALL = ("plan", "llama-3.2-1b", *LENGTHS, "--gpus", "h100-sxm,l40s", "--bound", "--max-gpus", 2, "--kv-dtype", "bf16")
ONLINE = (*SMALL, "--rate", 4, "--ttft", "1s", "--tpot", "20ms")
ONE = (*ONLINE, "--dtype", "bf16", "--gpus", "h100-sxm", "--show", 1, "--no-disaggregation")


def test_the_answer_as_data(cli):
    records = cli(*ONLINE, "--price", "l40s=1", "-o", "json").records
    assert [record["rank"] for record in records] == list(range(1, len(records) + 1))
    costs = [record["usd_per_hour"] for record in records]
    assert costs == sorted(costs)
    first = records[0]
    assert (first["gpu"], first["usd_per_hour"], first["price_source"]) == ("l40s", 1.0, "as given")
    assert first["simulated"]["met"]
    assert first["simulated"]["ttft_percentile_s"] <= 1
    assert first["simulated"]["tpot_s"] <= 0.02
    assert first["output_tok_per_s"] == pytest.approx(200)
    assert first["usd_per_mtok_output"] == pytest.approx(1 / 3600 / 200 * 1e6)
    assert first["joule_per_output_token"] == pytest.approx(350 / 200)
    assert first["binds"] == first["ceilings"][0]["ceiling"]
    users = [one["users"] for one in first["ceilings"] if one["users"] is not None]
    assert users == sorted(users)
    assert users[0] >= first["users"]
    assert first["searched"] > 300
    assert first["pareto"]
    assert {one["assumption"] for one in first["sensitivity"]} >= {"prompt length", "load", "memory bandwidth achieved"}
    assert first["provenance"] == "datasheet"
    assert any("datasheet's bound" in note for note in first["notes"])
    assert first["replay"].startswith("roofline simulate llama-3.2-1b --gpu l40s ")


def test_the_answer_in_words(cli):
    answer = cli(*ONLINE, "--explain", "--show", 1)
    assert answer.code == 0
    for text in (
        "cheapest: ", "ceilings in users: ", "what flips the choice", "the trade between", "vllm serve meta-llama/Llama-3.2-1B",
        "without a price, and so behind all others: l40s", "price of l40s: no dated price is known; give --price l40s=USD",
        "assumes: price of h100-sxm: 2.95 USD", "not modelled: failures, cold starts", "replay what was simulated",
        "roofline simulate llama-3.2-1b --gpu ",
    ):  # fmt: skip
        assert text in answer.out
    quiet = cli(*ONE, "-q", "-o", "csv")
    assert quiet.out.splitlines()[0].startswith("schema,model,")


@pytest.mark.parametrize("engine", ["vllm", "sglang", "trtllm", "llamacpp"])
def test_every_plan_that_is_listed_has_its_launch_command(cli, engine):
    sizes = ("--isl", 3000, "--osl", 200, "--rate", 12, "--tpot", "12ms", "--ttft", "2s", "--requests", 100, "--show", 4)
    records = cli("plan", "llama-3.1-8b", *sizes, "--gpus", "h100-sxm", "--bound", "--max-gpus", 4, "--engine", engine,
                  "-o", "json").records  # fmt: skip
    assert len(records) > 1
    assert len({record["launch"][0]["command"] for record in records}) > 1
    for record in records:
        servers = [one for one in record["launch"] if one["role"] != "router"]
        assert [one["role"] for one in servers] == (["prefill", "decode"] if record["prefill"] else ["instance"])
        assert servers[-1]["instances"] == record["instances"]
        for one in servers:
            assert load_server(engine).check(one["argv"])


@pytest.mark.parametrize("engine", ["vllm", "sglang", "trtllm", "llamacpp"])
def test_emit_prints_the_command_and_nothing_else(cli, engine):
    one = [part for part in ONE if engine != "llamacpp" or part not in ("--kv-dtype", "--dtype", "bf16")]
    answer = cli(*one, "--emit", engine)
    assert answer.code == 0
    command = next(line for line in answer.out.splitlines() if line.startswith(load_server(engine).program[0]))
    import shlex

    assert load_server(engine).check(shlex.split(command))
    if engine == "vllm":
        (record,) = cli(*one, "--emit", engine, "-o", "json").records
        assert load_server(engine).check(record["argv"])


def test_batch_work_is_planned_for_tokens_per_dollar(cli):
    records = cli(*SMALL, "--offline", "--price", 1, "--show", 2, "-o", "json").records
    dollars = [record["usd_per_mtok_output"] for record in records]
    assert dollars[0] == pytest.approx(min(dollars), rel=0.1)
    assert records[0]["offline"]
    assert records[0]["ttft_limit_s"] is None


def test_users_who_wait_are_planned_for(cli):
    (first, *_) = cli(*SMALL, "--concurrency", 50, "--tpot", "20ms", "--show", 1, "-o", "json").records
    assert first["users"] == 50
    assert first["simulated"]["tpot_s"] <= 0.02


def test_speculation_is_weighed(cli):
    answer = cli(
        "plan", "llama-3.1-8b", *LENGTHS, "--gpus", "h100-sxm", "--bound", "--max-gpus", 1, "--rate", 0.5, "--tpot", "3ms",
        "--draft", "llama-3.2-1b", "--alpha", 0.9, "--gamma", 3, "--dtype", "bf16", "--kv-dtype", "bf16", "--show", 1,
        "-o", "json",
    )  # fmt: skip
    (first, *_) = answer.records
    assert first["draft_tokens"] == 3
    assert "--speculative-config" in first["launch"][0]["command"]
    assert load_server("vllm").check(first["launch"][0]["argv"])["speculative_config"]["model"] == "meta-llama/Llama-3.2-1B"


def test_what_cannot_be_met_is_a_finding_that_names_the_nearest(cli):
    answer = cli(*SMALL, "--rate", 2, "--ttft", "1us", "--tpot", "1us")
    assert answer.code == 1
    assert "no deployment is confirmed: nearest is" in answer.out
    assert cli(*ONE, "--ttft", "1us", "--emit", "vllm").code == 1
    assert json.loads(cli(*ONE, "--ttft", "1us", "-o", "json").out) == []


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (("plan", "llama-3.2-1b"), "isl: say how long"),
        (("plan", "llama-3.2-1b", "--isl", 9, "--osl", 9), "rate: say what the load is"),
        ((*SMALL, "--rate", 1, "--concurrency", 1), "rate: requests per second and"),
        ((*SMALL, "--offline", "--rate", 1), "offline:"),
        ((*SMALL, "--offline", "--tpot", "1ms"), "offline: batch work has no limit"),
        ((*SMALL[:2], "--isl", 500, "--osl", 1, "--rate", 1, "--tpot", "1ms"), "tpot: a request of one output token has no time"),
        ((*SMALL, "--rate", 1, "--ttft", "1m"), "ttft: unknown unit 'm'; write one such as s, ms or us"),
        ((*SMALL, "--rate", "x"), "rate: 'x'"),
        ((*SMALL, "--rate", 1, "--tpot", "fast"), "tpot: 'fast'"),
        ((*SMALL, "--rate", 1, "--percentile", "x"), "percentile"),
        ((*SMALL, "--rate", 1, "--emit", "vlm"), "Did you mean"),
        ((*SMALL, "--rate", 1, "--emit", "vllm", "--engine", "sglang"), "emit:"),
        ((*SMALL, "--rate", 1, "--draft", "llama-3.2-1b"), "speculation needs"),
        ((*SMALL, "--rate", 1, "--gamma", 2), "gamma:"),
        ((*SMALL, "--rate", 1, "--price", "b200=3"), "price: 'b200' is not among"),
        ((*SMALL, "--rate", "1,2"), "rate: '1,2' is not a number"),
        (("plan", "llama-3.1-405b", "--isl", 9, "--osl", 9, "--rate", 1, "--gpus", "l4", "--max-gpus", 1), "gpus: l4 left out"),
        (("plan", "llama-3.1-405b", "--isl", 9, "--osl", 9, "--rate", 1, "--gpus", "l4"), "on up to 16 of them"),
        (("plan", "gpt2", "--isl", 2000, "--osl", 9, "--rate", 1), "exceeds the 1,024"),
        (("plan", "whisper-large-v3", "--isl", 9, "--osl", 9, "--rate", 1), "encoder-decoder"),
        (("plan", "llada-8b", "--isl", 9, "--osl", 9, "--rate", 1), "roofline diffusion llada-8b"),
        (
            (*SMALL[:6], "--rate", 1, "--gpus", "xeon-8480", "--emit", "trtllm"),
            "TensorRT-LLM does not run on xeon-8480 (Intel cpu)",
        ),
        ((*SMALL[:6], "--rate", 1, "--gpus", "tpu-v6e", "--engine", "sglang"), "SGLang does not run on tpu-v6e"),
        (("fleet", "whisper-large-v3", "--tokens-per-day", "1T"), "encoder-decoder"),
        (("fleet", "gpt2", "--tokens-per-day", "1T"), "exceeds the 1,024"),
        (("fleet", "llama-3.1-8b", "--isl", 300000, "--tokens-per-day", "1T"), "exceeds the 131,072"),
        (("fleet", "llada-8b", "--tokens-per-day", "1T"), "roofline diffusion llada-8b"),
        (("fleet", "llama-3.2-1b", "--tokens-per-day", "1T", "--gpus", "mi300x", "--engine", "trtllm"), "does not run on mi300x"),
        (("fleet", "llama-3.2-1b"), "tokens-per-day: say"),
        (("fleet", "llama-3.2-1b", "--tokens-per-day", "many"), "tokens-per-day: 'many'"),
        (("fleet", "llama-3.2-1b", "--tokens-per-day", "1T", "--utilisation", 2), "utilisation"),
    ],
)
def test_bad_questions_are_one_line(cli, arguments, text):
    answer = cli(*arguments)
    assert (answer.code, answer.out) == (2, "")
    assert answer.err.count("\n") == 1
    assert text in answer.err


def test_a_fleet_against_a_training_run(cli):
    arguments = (
        "fleet", "llama-3.1-8b", "--tokens-per-day", "8.6T", "--trained-tokens", "32T", "--gpus", "h100-sxm", "--bound",
        "--isl", 2000, "--osl", 500,
    )  # fmt: skip
    (one,) = cli(*arguments, "-o", "json").records
    assert one["token_days"] == pytest.approx(32 / 8.6)
    assert one["gpus"] == one["instances"]
    assert one["instances"] == -int(-8.6e12 // (86400 * 0.5 * one["instance_tok_per_s"]))
    assert one["watt"] == 700 * one["gpus"]
    assert one["usd_per_day"] == pytest.approx(2.95 * 24 * one["gpus"])
    (full,) = cli(*arguments, "--utilisation", 1, "-o", "json").records
    assert full["gpus"] == pytest.approx(one["gpus"] / 2, abs=1)
    words = cli(*arguments)
    assert "as many tokens as the training run had are served in 3.72 days" in words.out
    assert "utilisation 0.5" in words.out


def test_calibrated_times_say_their_error_and_range(cli):
    answer = cli("plan", "llama-3.1-8b", *LENGTHS, "--gpus", "h100-sxm", "--rate", 1, "--max-gpus", 1, "--show", 1, "-o", "json")
    first: Any = answer.records[0]
    assert first["provenance"] == "extrapolated"
    assert "32 layers are outside the calibrated range of vllm (36 to 80)" in first["outside_calibrated_range"]
    assert "batch 1 is outside the calibrated range of vllm (4 to 128 at once)" in first["outside_calibrated_range"]
    assert any(
        "extrapolated" in note and "to the first token" in note and "inside the calibrated range" in note
        for note in first["notes"]
    )


def test_times_beyond_what_was_measured_are_called_extrapolated(cli):
    arguments = ("plan", "llama-3.1-70b", *LENGTHS, "--rate", 5, "--dtype", "fp8", "--kv-dtype", "bf16", "--show", 1,
                 "--no-disaggregation")  # fmt: skip
    far, near = (cli(*arguments, "--gpus", gpu).out for gpu in ("b200-sxm", "h100-sxm"))
    assert "  extrapolated" in far
    assert "  calibrated" in near
    assert "extrapolated" not in near
    size = r"\d+ % (?:\(\d+ % too (?:short|long) on average\) )?"
    assert re.search(rf"mean error on models it has not seen: {size}per token, most at 128 at once, \d+ %", near)
    assert re.search(rf"; {size}to the first token on a GPU it has not seen \(llama-3\.1-70b alone\); inside", near)
    assert re.search(rf"mean error on b200-sxm, which it has not seen \(llama-3\.1-70b alone\): {size}per token; {size}to", far)


def test_rates_say_whether_they_are_offered_or_served(cli):
    arguments = ("plan", "llama-3.2-1b", *LENGTHS, "--gpus", "h100-sxm", "--max-gpus", 1, "--show", 1, "--requests", 100)
    open_, closed = (cli(*arguments, *load, "-o", "json").records[0] for load in (("--rate", 2), ("--concurrency", 4)))
    assert open_["rates_are"] == "offered"
    assert open_["output_tok_per_s"] == 2 * open_["output_tokens"]
    assert open_["simulated"]["request_per_s"] != open_["request_per_s"]
    assert (closed["rates_are"], closed["request_per_s"]) == ("simulated", closed["simulated"]["request_per_s"])
    table, other = (cli(*arguments, *load).out for load in (("--rate", 2), ("--concurrency", 4)))
    assert "offered" in table.partition("assumes:")[0]
    assert "USD and J per token rest on them; what a run served" in table
    assert "offered" not in other
    assert "those that the simulator served" in other


def test_a_fleet_says_what_its_step_times_are_worth(cli):
    arguments = ("fleet", "llama-3.1-70b", "--tokens-per-day", "1T", "--tpot", "30ms", "--gpus", "h100-sxm,b200-sxm")
    rows = {line.split()[3]: line.split()[-1] for line in cli(*arguments).out.splitlines() if line.startswith("1 x (")}
    assert rows == {"h100-sxm": "calibrated", "b200-sxm": "extrapolated"}
    found = {record["gpu"]: record for record in cli(*arguments, "-o", "json").records}
    assert {gpu: record["provenance"] for gpu, record in found.items()} == rows
    assert found["b200-sxm"]["outside_calibrated_range"]
    assert found["h100-sxm"]["outside_calibrated_range"] == []
    (bound, _) = cli(*arguments, "--bound", "-o", "json").records
    assert bound["provenance"] == "datasheet"


def test_a_fleet_says_its_prices_the_range_of_all_its_batches_and_what_it_leaves_out(cli):
    arguments = ("fleet", "llama-3.1-8b", "--tokens-per-day", "1T", "--gpus", "h100-sxm,h200-sxm")
    answer = cli(*arguments).out
    assert "assumes: price of h100-sxm: 2.95 USD per GPU and hour (20" in answer
    batches = r"assumes: batch\S* \d+( to \d+)? (is|are) outside the calibrated range of vllm \(4 to 128 at once\)"
    assert re.search(batches, answer)
    assert answer.rstrip().splitlines()[-1].startswith("not modelled: the load over a day")
    found = cli(*arguments, "-o", "json").records
    assert [record["usd_per_gpu_hour"] for record in found] == [2.95, 4.0]
    assert all("prefix caches" in record["not_modelled"] for record in found)


def test_an_engine_whose_first_tokens_were_never_measured_says_so():
    from roofline import Deployment, load_accelerator, load_model
    from roofline.expected.errors import error_of
    from roofline.serving.calibrated import ExpectedSteps

    found = ExpectedSteps(Deployment(load_model("qwen3-32b"), load_accelerator("h100-sxm")), "sglang")
    assert "not known to the first token" in found.notes[0]
    assert error_of("llamacpp", False, "ttft") is None


def test_one_output_token_has_no_time_between_tokens(cli):
    arguments = ("plan", "llama-3.2-1b", "--isl", 500, "--osl", 1, "--requests", 100, *SMALL[6:], "--rate", 2, "--ttft", "1s",
                 "--show", 1)  # fmt: skip
    (first,) = cli(*arguments, "-o", "json").records
    assert first["simulated"]["tpot_s"] is None
    assert first["closed_form"]["tpot_s"] is None
    assert first["output_tok_per_s_per_user"] is None
    assert first["rate_request_per_s"] == 2
    assert "0.00 us" not in cli(*arguments).out


def test_where_no_price_is_known_the_fewest_gpus_are_named_as_such(cli):
    arguments = ("plan", "llama-3.2-1b", *LENGTHS, "--bound", "--max-gpus", 1, "--gpus", "l40s", "--rate", 1, "--show", 1)
    assert "fewest GPUs: 1 x (1 l40s" in cli(*arguments).out
    assert "cheapest: 1 x (1 l40s" in cli(*arguments, "--price", "0.5").out


def test_weights_of_32_bits_are_asked_for(cli):
    for engine in ("vllm", "sglang", "trtllm"):
        wide = ("--dtype", "fp32", "--kv-dtype", "fp32", "--gpus", "h100-sxm", "--bound", "--max-gpus", 1, "--no-disaggregation")
        text = cli("plan", "gpt2", *LENGTHS, "--rate", 1, "--show", 1, *wide, "--emit", engine).out
        assert "dtype: float32" in text if engine == "trtllm" else "--dtype float32" in text


def test_lists_of_objects_in_csv_are_json(cli):
    import csv
    import io

    (row,) = csv.DictReader(io.StringIO(cli(*ONE, "-o", "csv", "-q").out))
    assert json.loads(row["ceilings"].split("; ")[0])["ceiling"]


def test_caches_that_travel_name_their_link_and_time(cli):
    arguments = ("plan", "llama-3.1-8b", "--isl", 3000, "--osl", 200, "--rate", 12, "--tpot", "8ms", "--ttft", "1s", "--bound",
                 "--gpus", "h100-sxm", "--max-gpus", 8, "--dtype", "bf16", "--kv-dtype", "bf16", "--requests", 200,
                 "--show", 6)  # fmt: skip
    apart = [one for one in cli(*arguments, "-o", "json").records if one["mode"] == "disaggregated"]
    assert apart
    assert {one["prefill"]["link"] for one in apart} == {"network"}
    assert "assumes: a cache of 3,000 tokens travels over network in " in cli(*arguments).out


def test_a_percentile_of_the_time_per_token_may_be_asked_for(cli):
    sizes = ("plan", "llama-3.1-8b", "--isl", 4000, "--osl", 40, "--rate", 12, "--gpus", "h100-sxm", "--bound", "--max-gpus", 4,
             "--dtype", "bf16", "--kv-dtype", "bf16", "--no-disaggregation", "--requests", 200, "--show", 1,
             "-o", "json")  # fmt: skip
    (mean,) = cli(*sizes, "--tpot", "20ms").records
    assert mean["simulated"]["tpot_percentile_s"] is None
    (high,) = cli(*sizes, "--tpot", "20ms", "--tpot-percentile", 99).records
    found = high["simulated"]
    assert found["tpot_s"] < found["tpot_percentile_s"] <= 0.02
    assert "--tpot-percentile 99" in high["replay"]
    assert high["tpot_percentile"] == 99
    said = cli(*sizes[:-2], "--tpot", "20ms", "--tpot-percentile", 99).out
    assert "p99 of TPOT 20.00 ms" in said
    assert "tpot-percentile: it judges a limit" in cli(*sizes, "--tpot-percentile", 99).err


def test_a_fleet_leaves_out_what_its_engine_does_not_run_on(cli):
    told = cli("fleet", "llama-3.2-1b", "--tokens-per-day", "1T", "--engine", "trtllm", "--bound")
    assert told.code == 0
    assert "mi300x left out: engine: TensorRT-LLM does not run on mi300x" in told.out
