"""What answers say of themselves: which times they show, what they rest on, what they leave out."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from roofline.configs.load import read_catalog

Cli = Callable[..., Any]


def test_figures_say_which_batches_lie_beyond_those_measured(cli: Cli, tmp_path: Path) -> None:
    for figure in ("latency", "throughput", "pareto"):
        question = ("plot", figure, "llama-2-13b", "-g", "h100-sxm", "-c", 512, "--out", tmp_path / "figure.svg")
        far = cli(*question, "-b", "1,8,256").out
        assert "expected: batches 1 and 256 are outside the calibrated range of vllm (4 to 128 at once)" in far
        assert "are outside the calibrated range" not in cli(*question, "-b", "8,16").out
    svg = (tmp_path / "figure.svg").read_text(encoding="utf-8")
    assert "mean error 2 to 12 % at batch 4 to 128" in svg


def test_figures_of_memory_say_what_they_rest_on_and_leave_out(cli: Cli, tmp_path: Path) -> None:
    for figure in ("memory", "kv"):
        said = cli("plot", figure, "llama-3.1-8b", "-g", "h100-sxm", "--out", tmp_path / "figure.svg").out
        assert said.splitlines()[-1] == "not modelled: what an engine reserves for itself, and how its pages round"
    assert (
        "assumes: h100-sxm: memory 79.18 GiB (visible)"
        in cli("plot", "memory", "llama-3.1-8b", "-g", "h100-sxm", "--out", tmp_path / "figure.svg").out
    )


def test_bounds_are_called_bounds_where_no_engine_is_named(cli: Cli) -> None:
    question = ("what-if", "llama-3.1-8b", "-g", "h100-sxm")
    told = "assumes: times are the datasheet's bounds, and a real server is slower (--engine vllm"
    assert told in cli(*question).out
    assert told not in cli(*question, "--engine", "vllm").out
    for command in ("what-if", "simulate"):
        assert "[default: none, datasheet bounds" in " ".join(cli(command, "--help").out.split())


def test_validate_alone_shows_examples_and_published_rows_stay_narrow(cli: Cli) -> None:
    alone = cli("validate")
    assert (alone.code, alone.err) == (0, "")
    assert alone.out.count("\n  roofline validate ") >= 3
    assert cli("validate", "publisht").code == 2
    table = cli("validate", "published").out
    assert max(map(len, table.splitlines())) <= 120
    assert any(record["comment"] for record in cli("validate", "published", "-o", "json").records)


def test_formulas_say_how_they_count_and_what_they_leave_out(cli: Cli) -> None:
    said = cli("formula", "attention").out.splitlines()
    assert said[-2].startswith("assumes: a multiply-add is 2 FLOP; causal attention counts the causal half")
    assert said[-1] == "not modelled: re-reads by tiles, caches, launches, host time"
    assert "assumes: as CS336 lecture 10 counts" in cli("formula", "attention", "--convention", "lecture").out
    assert "assumes:" not in cli("formula", "attention", "-q").out
    (record,) = cli("formula", "attention", "-o", "json").records
    assert record["assumes"]
    assert record["not_modelled"]


def test_a_plan_that_finds_nothing_says_so_in_marked_lines(cli: Cli) -> None:
    question = (
        "plan", "llama-3.2-1b", "--isl", 500, "--osl", 50, "--rate", 4, "--ttft", "1us", "--gpus", "h100-sxm,mi300x",
        "--no-disaggregation", "--max-gpus", 1,
    )  # fmt: skip
    verdict, _, behind = cli(*question).out.partition("\n\n")
    assert verdict.splitlines()[2].startswith("no deployment is confirmed: ")
    assert behind.splitlines()
    assert {line.partition(": ")[0] for line in behind.splitlines()} <= {"note", "assumes", "not modelled"}
    emitted = cli(*question, "--emit", "vllm")
    assert (emitted.code, emitted.out) == (1, "")
    assert "no deployment is confirmed" in emitted.err


def test_what_a_model_assumes_and_leaves_out_follows_it_into_plans_fleets_and_simulations(cli: Cli, tmp_path: Path) -> None:
    config = (
        '{"model_type": "llama", "hidden_size": 1024, "intermediate_size": 2048, "num_hidden_layers": 8, '
        '"num_attention_heads": 8, "num_key_value_heads": 8, "vocab_size": 32000, '
        '"max_position_embeddings": 4096, "torch_dtype": "bfloat16"}'
    )
    (tmp_path / "config.json").write_text(config, encoding="utf-8")
    load = ("--gpu", "h100-sxm", "--isl", 100, "--osl", 20)
    few = ("--rate", 1, "--requests", 50)
    for question in (
        ("plan", tmp_path / "config.json", *load, *few, "--max-gpus", 1),
        ("simulate", tmp_path / "config.json", *load, *few),
        ("fleet", tmp_path / "config.json", *load, "--tokens-per-day", "1B"),
    ):
        assert "assumes: tie_word_embeddings = false (not in the config)" in cli(*question).out
    towers = cli("simulate", "gemma-3-4b-it", *load, *few).out.splitlines()[-1]
    assert towers.startswith("not modelled: vision tower")
    assert towers in cli("simulate", "gemma-3-4b-it", *load, *few, "--engine", "vllm").out


def test_the_formats_of_stored_weights_are_said_until_an_edit_changes_them(cli: Cli) -> None:
    """A config that names no quantisation is read in its own dtype, whatever its name promises."""
    plain, mixed = "weights in bf16 (the config names no quantisation)", "weights in mxfp4 and bf16 (as the config's quanti"
    load = ("--rate", 1, "--isl", 100, "--osl", 5, "--requests", 20)
    for command, more in (("what-if", ()), ("explain", ()), ("fit", ()), ("fit", ("--engine", "vllm")), ("simulate", load)):
        assert f"assumes: {plain}" in cli(command, "llama-3.1-8b", "-g", "h100-sxm", *more).out
    assert f"assumes: {plain}" in cli("models", "llama-3.1-8b").out
    assert f"assumes: {mixed}" in cli("models", "gpt-oss-20b").out
    for dtype in ("fp8", "Q4_K_M"):
        assert plain not in cli("explain", "llama-3.1-8b", "-g", "h100-sxm", "--dtype", dtype).out


def test_weights_multiply_in_a_unit_that_the_gpu_has(cli: Cli) -> None:
    """Without a matrix unit for 4 bits the weights alone are narrow (W4A16), and no line says anything else."""
    for model, gpu, more in (("llama-3.1-8b", "a100", ("--dtype", "nvfp4")), ("gpt-oss-20b", "h100-sxm", ())):
        said = cli("explain", model, "-g", gpu, *more).out
        assert "has no fp4 matrix unit" in said
        assert "(W4A16)" in said
        assert "W4A4" not in said
        assert "fp4 work" not in said
    both = cli("what-if", "gpt-oss-20b", "-g", "h100-sxm,b200-sxm").out
    assert "assumes: on b200-sxm: mxfp4 weights multiply in the fp4 matrix unit" in both
    assert "assumes: h100-sxm has no fp4 matrix unit" in both


SERVED = ("simulate", "llama-3.1-8b", "-g", "h100-sxm", "--rate", 1, "--isl", 100, "--osl", 5, "--requests", 20)


def test_a_time_without_a_unit_is_read_as_seconds_and_said(cli: Cli) -> None:
    said = cli(*SERVED, "--tpot", 40, "--ttft", "500ms").out
    assert "meets the objective (TTFT 500.0 ms for 99 % and mean TPOT 40.00 s)" in said
    assert "assumes: --tpot 40 has no unit: read as 40 s" in said
    assert "--ttft 500ms has" not in said
    load = ("--isl", 100, "--osl", 5, "--rate", 1, "--gpus", "h100-sxm", "--show", 1, "--requests", 100)
    assert "assumes: --ttft 5 has no unit: read as 5 s" in cli("plan", "llama-3.1-8b", *load, "--ttft", 5).out
    fleet = cli("fleet", "llama-3.1-8b", "--tokens-per-day", "1B", "--gpus", "h100-sxm", "--tpot", "0.04")
    assert "assumes: --tpot 0.04 has no unit: read as 0.04 s" in fleet.out


def test_verdicts_and_caches_of_edited_models_go_by_their_edits(cli: Cli) -> None:
    said = cli(*SERVED, "--tp", 2, "--dtype", "fp8", "--tpot", "1s").out
    for variant in ("base", "--dtype fp8"):
        assert f"{variant} --tp 2 on h100-sxm at 1/s: meets" in said
        assert any(line.startswith(f"assumes: {variant}: ") and "tokens of cache" in line for line in said.splitlines())
    alone = cli(*SERVED, "--dtype", "fp8", "--no-base", "-o", "json").records
    assert [record["edits"] for record in alone] == [["--dtype fp8"]]
    assert cli(*SERVED, "--no-base").err.startswith("error: no-base: ")


def test_a_refused_request_is_told_which_limit_it_exceeds(cli: Cli) -> None:
    long = ("simulate", "llama-3.1-8b", "-g", "h100-sxm", "--rate", 1, "--osl", 5, "--requests", 3, "--isl", 200_000)
    assert "longer than max-model-len, 131,072 tokens; raise it with --max-model-len" in cli(*long).out
    cache = cli(*long, "--max-model-len", 300_000, "--kv-tokens", 150_000).out
    assert "are refused: longer than the 150,000 tokens of the cache; make room" in cache


def test_the_replay_of_a_plan_simulates_the_planned_model_alone(cli: Cli) -> None:
    load = ("--isl", 100, "--osl", 5, "--rate", 1, "--gpus", "h100-sxm", "--show", 1, "--requests", 100, "-o", "json")
    for dtype, alone in (("fp8", True), ("bf16", False)):
        (record,) = cli("plan", "llama-3.1-8b", *load, "--dtype", dtype, "--kv-dtype", "bf16").records
        assert ("--no-base" in record["replay"]) is alone


def test_figures_say_what_their_solid_roof_and_their_sums_are(cli: Cli, tmp_path: Path) -> None:
    where = ("-g", "h100-sxm", "--out", tmp_path / "figure.svg")
    assert "kernels of other shapes, or of another library, may lie" in cli("plot", "roofline", "llama-3.1-8b", *where).out
    assert "totals are the sums of the kernels; a server's step" in cli("plot", "breakdown", "llama-3.1-8b", *where).out
    assert "a server's step" not in cli("plot", "breakdown", "llama-3.1-8b", *where, "--engine", "none").out


def test_a_measured_time_below_the_bound_of_one_sequence_is_a_finding(cli: Cli, tmp_path: Path) -> None:
    """Llama 3.1 8B in bf16 reads 15 GB a step, which takes an H100 4.5 ms: 9 us is another unit, 9 ms is a server."""
    run = {
        "max_concurrency": 1, "random_input_len": 1024, "random_output_len": 128, "completed": 8, "duration": 20.0,
        "mean_ttft_ms": 90.0, "request_throughput": 3.2, "output_throughput": 409.6, "total_input_tokens": 8192,
        "total_output_tokens": 1024, "model_id": "llama-3.1-8b", "backend": "vllm",
    }  # fmt: skip
    for tpot, code in ((9.0, 0), (0.009, 1)):
        (tmp_path / "run.json").write_text(json.dumps({**run, "mean_tpot_ms": tpot}), encoding="utf-8")
        answer = cli("import-bench", tmp_path / "run.json", "-g", "h100-sxm")
        assert (answer.code, "TPOT is faster than h100-sxm allows" in answer.out) == (code, bool(code))


def test_a_config_file_has_one_name_however_its_path_is_written(
    cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "my-llama"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(read_catalog("llama-3.1-8b")["config"]), encoding="utf-8")
    monkeypatch.chdir(folder)
    for path in ("config.json", "./config.json", folder / "config.json", ".", folder):
        assert cli("fit", path, "-g", "h100-sxm", "-o", "json").records[0]["model"] == "my-llama"
    load = ("--isl", 100, "--osl", 5, "--rate", 1, "--gpus", "h100-sxm", "--show", 1, "--requests", 100)
    assert cli("plan", "config.json", *load).out.startswith("my-llama: 1 request/s")
    assert cli("plan", "llama-3.1-8b", *load).out.startswith("meta-llama/Llama-3.1-8B: 1 request/s")
