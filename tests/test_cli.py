"""Answers of the command line: numbers, formats, verdicts, and exit codes when all is well."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from roofline.cli.app import COMMANDS

LLAMA_2_13B = {
    "model_type": "llama", "hidden_size": 5120, "intermediate_size": 13824, "num_hidden_layers": 40, "num_attention_heads": 40,
    "num_key_value_heads": 40, "vocab_size": 32000, "max_position_embeddings": 4096, "torch_dtype": "float16",
    "tie_word_embeddings": False,
}  # fmt: skip
"""Public config of meta-llama/Llama-2-13b-hf, the keys that count."""

CONTRACT = (
    "model", "variant", "gpu", "batch", "context_tokens", "weight_bytes", "kv_bytes", "total_bytes", "tpot_bound_s",
    "tpot_serial_s", "tpot_expected_s", "output_tok_per_s_bound", "bound_by", "fits", "provenance",
)  # fmt: skip


Cli = Callable[..., Any]


@pytest.fixture
def llama(tmp_path: Path) -> Path:
    path = tmp_path / "llama-2-13b.json"
    path.write_text(json.dumps(LLAMA_2_13B), encoding="utf-8")
    return path


def points(answer: Any) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = answer.records
    return found


def test_lecture_convention_gives_the_lectures_latency_and_throughput(cli: Cli, llama: Path) -> None:
    """CS336 lecture 10, Llama 2 13B on an H100: 8.02 ms and 124.7 tokens/s at batch 1, less memory with 8 KV heads."""
    sizes = ("--gpu", "h100-sxm", "--batch", 1, "--context", 1024, "--convention", "lecture", "--kv-heads", 8)
    base, edited = points(cli("what-if", llama, *sizes, "--json"))
    assert (base["variant"], edited["variant"]) == ("base", "edited")
    assert base["total_bytes"] == 26869760000
    assert base["tpot_bound_s"] == pytest.approx(0.00802082388059702, rel=1e-12)
    assert base["output_tok_per_s_bound"] == pytest.approx(124.675471608232, rel=1e-12)
    assert edited["total_bytes"] == 22843228160
    assert edited["edits"] == ["--kv-heads 8"]


def test_every_combination_of_swept_options_is_one_point(cli: Cli, llama: Path) -> None:
    found = points(cli("what-if", llama, "-g", "h100-sxm,h200-sxm", "-b", "1:4:x2", "-c", "1024,2048", "-o", "json"))
    assert [(p["gpu"], p["context_tokens"], p["batch"]) for p in found] == [
        (gpu, context, batch) for gpu in ("h100-sxm", "h200-sxm") for context in (1024, 2048) for batch in (1, 2, 4)
    ]
    assert all(key in point for point in found for key in CONTRACT)
    assert {type(point["weight_bytes"]) for point in found} == {int}
    assert all(point["tpot_expected_s"] > point["tpot_bound_s"] for point in found)
    assert all(point["total_bytes"] == point["weight_bytes"] + point["kv_bytes"] for point in found)
    assert all(
        point["required_bytes"] == point["total_bytes"] + point["new_kv_bytes"] + point["workspace_bytes"] for point in found
    )
    assert all(point["workspace_bytes"] > 0 for point in found)


def test_json_lines_and_csv_carry_the_points_of_json(cli: Cli, llama: Path) -> None:
    sizes = ("what-if", llama, "-g", "h100-sxm", "-b", "1,64", "-c", 1024)
    whole = points(cli(*sizes, "-o", "json"))
    lines = cli(*sizes, "-o", "jsonl")
    assert [json.loads(line) for line in lines.out.splitlines()] == whole
    assert lines.err == ""
    table = cli(*sizes, "-o", "csv")
    rows = list(csv.DictReader(io.StringIO(table.out)))
    assert [float(row["tpot_bound_s"]) for row in rows] == [point["tpot_bound_s"] for point in whole]
    assert rows[0].keys() == whole[0].keys()
    assert "assumes:" in table.err


def test_markdown_is_only_the_table_on_stdout(cli: Cli, llama: Path) -> None:
    answer = cli("what-if", llama, "-g", "h100-sxm", "-o", "md")
    assert all(line.startswith("|") for line in answer.out.splitlines())
    assert "not modelled:" in answer.err


def test_table_says_the_verdict_first_and_every_default(cli: Cli, llama: Path) -> None:
    answer = cli("what-if", llama, "-g", "h100-sxm")
    lines = answer.out.splitlines()
    assert lines[1].startswith("fits: yes (27.37 of 79.18 GiB, 35 %)")
    assert lines[2].startswith("bound by memory")
    assert "assumes: batch 1 (--batch sets it)" in lines
    assert "assumes: context 4,096 (--context sets it)" in lines
    assert "3.350 TB/s (datasheet)" in answer.out
    assert answer.err == ""
    quiet = cli("what-if", llama, "-g", "h100-sxm", "-q")
    assert "assumes" not in quiet.out
    assert len(quiet.out.splitlines()) == 4


def test_what_does_not_fit_is_a_finding_with_check(cli: Cli, llama: Path) -> None:
    sizes = ("what-if", llama, "-g", "h100-sxm", "-b", 128, "-c", 1024)
    answer = cli(*sizes)
    assert answer.code == 0
    assert "does not fit: 45." in answer.out
    assert cli(*sizes, "--check").code == 1
    (fix,) = [line for line in answer.out.splitlines() if line.startswith("fix: ")]
    assert len(fix.split(" or ")) == 4
    assert cli("what-if", llama, "-g", "h100-sxm", "--check").code == 0


def test_edits_are_shown_against_the_model_as_it_is(cli: Cli, llama: Path) -> None:
    answer = cli("what-if", llama, "-g", "h100-sxm", "-c", 1024, "--kv-heads", 8)
    change = next(line for line in answer.out.splitlines() if line.startswith("--kv-heads 8: KV bytes/token"))
    assert "KV bytes/token 819,200 -> 163,840" in change
    assert "largest batch there 70 -> 371" in change


def test_lengths_add_first_token_and_whole_generation(cli: Cli, llama: Path) -> None:
    sizes = ("what-if", llama, "-g", "h100-sxm", "--isl", 128, "--osl", 32)
    base, naive = points(cli(*sizes, "--no-cache", "-o", "json"))
    assert (base["input_tokens"], base["output_tokens"], base["context_tokens"]) == (128, 32, 160)
    assert base["ttft_bound_s"] == naive["ttft_bound_s"] > 0
    assert base["e2e_bound_s"] > base["ttft_bound_s"]
    assert naive["e2e_bound_s"] > base["e2e_bound_s"]
    assert naive["kv_bytes"] == 0 < base["kv_bytes"]


def test_fit_finds_the_batch_that_what_if_confirms(cli: Cli, llama: Path) -> None:
    (row,) = points(cli("fit", llama, "-g", "h100-sxm", "-c", 1024, "--memory-fraction", "0.9", "-o", "json"))
    assert row["largest_batch"] == 60
    for batch, fits in ((60, True), (61, False)):
        sizes = ("-g", "h100-sxm", "-b", batch, "-c", 1024, "--memory-fraction", "0.9", "-o", "json")
        assert points(cli("what-if", llama, *sizes))[0]["fits"] is fits
    assert row["next_batch_missing_bytes"] > 0


def test_fit_is_zero_when_the_weights_alone_are_too_large(cli: Cli, llama: Path) -> None:
    answer = cli("fit", llama, "-g", "l4", "--check")
    assert answer.code == 1
    assert "the weights alone are" in answer.out
    (row,) = points(cli("fit", llama, "-g", "l4", "-o", "json"))
    assert (row["largest_batch"], row["largest_context_tokens"]) == (0, 0)


def test_explain_ends_with_the_whole_step(cli: Cli, llama: Path) -> None:
    rows = points(cli("explain", llama, "-g", "h100-sxm", "-b", 64, "-c", 1024, "-o", "json"))
    *parts, whole = rows
    assert whole["component"] == "whole step"
    assert sum(part["matrix_flop"] for part in parts) == whole["matrix_flop"]
    assert sum(part["bytes_read"] for part in parts) == whole["bytes_read"]
    (point,) = points(cli("what-if", llama, "-g", "h100-sxm", "-b", 64, "-c", 1024, "-o", "json"))
    assert whole["bound_s"] == point["tpot_bound_s"] <= sum(part["bound_s"] for part in parts)
    prefill = points(cli("explain", llama, "-g", "h100-sxm", "--phase", "prefill", "--isl", 2048, "-o", "json"))
    assert prefill[-1]["bound_by"] == "compute"


def test_formula_prints_flops_bytes_and_the_limit_of_intensity(cli: Cli) -> None:
    assert {entry["name"] for entry in points(cli("formula", "-o", "json"))} >= {"linear", "attention", "mlp"}
    text = cli("formula", "linear").out
    assert "2*B*D*F*T" in text
    assert "B*T" in text
    assert r"\text{FLOP} = 2 B D F T" in cli("formula", "linear", "--latex").out
    at_ridge = cli("formula", "linear", "--set", "T=1,D=5120,F=13824", "--gpu", "h100-sxm").out
    assert "batch at the ridge of h100-sxm, 295.2 FLOP/B: 320.6" in at_ridge


def test_lists_of_models_and_gpus_name_what_can_be_asked_for(cli: Cli) -> None:
    gpus = points(cli("gpus", "-o", "json"))
    h100 = next(gpu for gpu in gpus if gpu["id"] == "h100-sxm")
    assert h100["bandwidth_bytes_per_s"] == 3_350_000_000_000
    numbers = points(cli("gpus", "h100", "-o", "json"))
    assert all(number["kind"] in ("datasheet", "measured", "derived") and number["source"] for number in numbers)
    models = points(cli("models", "-o", "json"))
    assert all(model["params"] >= model["active_params"] > 0 for model in models)


def test_a_model_shows_its_groups_of_layers(cli: Cli, llama: Path) -> None:
    (model,) = points(cli("models", llama, "-o", "json"))
    assert model["params"] == 13_015_864_320
    assert [group["count"] for group in model["layer_groups"]] == [40]
    assert "13,015,864,320" in cli("models", llama).out


def test_doctor_names_versions_and_data(cli: Cli) -> None:
    found = {entry["what"]: entry["found"] for entry in points(cli("doctor", "-o", "json"))}
    assert found["Python"].startswith("3.")
    assert int(found["GPU files"]) > 0


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_explains_itself(cli: Cli, command: str) -> None:
    answer = cli(command, "--help")
    assert answer.code == 0
    assert f"roofline {command}" in answer.out


def test_roofline_alone_shows_examples_and_help_lists_commands(cli: Cli) -> None:
    assert cli().out.count("\n  roofline ") == 3
    help_text = cli("--help").out
    assert all(command in help_text for command in COMMANDS)
    assert cli("-h").out == help_text
    assert cli("--version").out.startswith("roofline ")
