"""``roofline compare``: every column agrees with the other commands, and the FLOPs by part with the model's formulas."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from roofline import Work, load_model
from roofline.breakdown import ROLES, flops_by_role
from roofline.configs.load import model_names

Cli = Callable[..., Any]
PAIR = ("compare", "llama-3.1-8b", "llama-3.1-8b:kv-heads=2:kv-dtype=fp8", "--gpu", "h100-sxm", "--contexts", "8192,32768")

KEYS = [
    "schema", "model", "edits", "gpu", "batch", "context_tokens", "params", "active_params", "weight_bytes", "kv_bytes_per_token",
    "kv_bytes_per_sequence", "state_bytes_per_sequence", "flop_per_token", "flop_per_token_by_part", "intensity_flop_per_byte",
    "required_bytes", "memory_fraction", "fits", "tpot_bound_s", "output_tok_per_s_bound", "bound_by", "largest_batch",
    "largest_batch_tpot_bound_s", "largest_batch_output_tok_per_s_bound", "provenance", "assumes", "not_modelled",
]  # fmt: skip


def test_a_record_per_model_and_context(cli: Cli) -> None:
    rows = cli(*PAIR, "-o", "json").records
    assert [(row["edits"], row["context_tokens"]) for row in rows] == [
        (edits, context) for edits in ([], ["--kv-heads 2", "--kv-dtype fp8"]) for context in (8192, 32768)
    ]
    assert all(list(row) == KEYS for row in rows)
    assert [row["kv_bytes_per_sequence"] for row in rows] == [131072 * 8192, 131072 * 32768, 16384 * 8192, 16384 * 32768]
    assert [row["kv_bytes_per_token"] for row in rows] == [131072, 131072, 16384, 16384]
    assert {type(row[key]) for row in rows for key in ("params", "weight_bytes", "flop_per_token")} == {int}


def test_columns_are_what_the_other_commands_say(cli: Cli) -> None:
    rows = cli(*PAIR, "-b", "1,8", "-o", "json").records
    for edits, column in ((), rows[:4]), (("--kv-heads", 2, "--kv-dtype", "fp8"), rows[4:]):
        points = cli("what-if", "llama-3.1-8b", *edits, "-g", "h100-sxm", "-b", "1,8", "-c", "8192,32768", "-o", "json").records
        fits = cli("fit", "llama-3.1-8b", *edits, "-g", "h100-sxm", "-b", "1,8", "-c", "8192,32768", "-o", "json").records
        for row, point, fit in zip(column, points[-4:], fits[-4:], strict=True):
            for key in ("batch", "context_tokens", "weight_bytes", "required_bytes", "tpot_bound_s", "fits", "bound_by"):
                assert row[key] == point[key], key
            assert row["largest_batch"] == fit["largest_batch"]


def test_the_largest_batch_runs_as_fast_as_what_if_says(cli: Cli) -> None:
    row = cli(*PAIR, "-o", "json").records[1]
    (point,) = cli("what-if", "llama-3.1-8b", "-g", "h100-sxm", "-b", row["largest_batch"], "-c", 32768, "-o", "json").records
    assert row["largest_batch_output_tok_per_s_bound"] == point["output_tok_per_s_bound"]
    assert row["largest_batch_tpot_bound_s"] == point["tpot_bound_s"]


def test_parts_of_a_dense_model_are_its_formulas() -> None:
    """Scaling book, inference chapter: 4 D H (N + K), 6 D F and 4 N H S FLOPs per layer and token, 2 D V for the head."""
    found = flops_by_role(load_model("llama-3.1-8b"), Work(1, 1, 8191, all_logits=True))
    assert found["projections"] == 32 * 4 * 4096 * 128 * (32 + 8)
    assert found["feed-forward"] == 32 * 6 * 4096 * 14336
    assert found["attention"] == 32 * 4 * 32 * 128 * 8192
    assert found["head"] == 2 * 4096 * 128256
    assert set(found) == {"projections", "feed-forward", "attention", "head", "elementwise"}


def test_parts_of_a_sparse_and_of_a_fixed_state_model() -> None:
    sparse = flops_by_role(load_model("deepseek-v3.2"), Work(1, 1, 8192, all_logits=True))
    assert sparse["experts"] == 58 * (9 * 6 * 7168 * 2048 + 2 * 7168 * 256)
    assert sparse["feed-forward"] == 3 * 6 * 7168 * 18432
    assert sparse["index"] > sparse["head"] > 0
    fixed = flops_by_role(load_model("mamba2-2.7b"), Work(1, 1, 8192, all_logits=True))
    assert set(fixed) == {"mixers", "projections", "head", "elementwise"}


@pytest.mark.parametrize("name", model_names())
def test_parts_add_up_to_every_flop_of_the_step(name: str) -> None:
    model, work = load_model(name), Work(1, 1, 1000, all_logits=True, source=10)
    found = flops_by_role(model, work)
    assert list(found) == [role for role in ROLES if role in found]
    assert sum(found.values()) == sum(model.cost(work).flops.values())
    matrix = sum(amount for role, amount in found.items() if role not in ("elementwise", "mixers"))
    assert matrix <= model.cost(work).matrix_flops


def test_the_table_has_a_column_per_model_and_says_who_is_fastest(cli: Cli) -> None:
    answer = cli(*PAIR, "mamba2-2.7b", "-o", "table")
    lines = answer.out.splitlines()
    assert "at context 32,768 on h100-sxm, most tok/s: mamba2-2.7b, " in lines[1]
    header = next(line for line in lines if line.endswith("mamba2-2.7b") and "llama-3.1-8b    llama" in line)
    assert header.split() == ["llama-3.1-8b", "llama-3.1-8b", "mamba2-2.7b"]
    row = next(line for line in lines if line.startswith("fixed state per sequence"))
    assert row.split()[-2:] == ["163.94", "MiB"]
    assert "assumes: llama-3.1-8b --kv-heads 2 --kv-dtype fp8: cached state in fp8" in lines
    assert not cli(*PAIR, "-q").out.startswith("llama")


def test_options_change_all_models_and_names_one(cli: Cli) -> None:
    rows = cli(
        "compare", "llama-3.1-8b:kv-heads=4", "qwen2.5-7b", "-g", "h100-sxm", "-c", 1024, "--dtype", "fp8", "-o", "json"
    ).records
    assert [row["edits"] for row in rows] == [["--kv-heads 4", "--dtype fp8"], ["--dtype fp8"]]
    swept = cli("compare", "llama-3.1-8b", "-g", "h100-sxm", "-c", 1024, "--kv-heads", "1,2,4", "-o", "json").records
    assert [row["edits"] for row in swept] == [["--kv-heads 1"], ["--kv-heads 2"], ["--kv-heads 4"]]
    inner = cli("compare", "llama-3.1-8b:pattern=LLLG:1024", "-g", "h100-sxm", "-c", 8192, "-o", "json").records
    assert inner[0]["kv_bytes_per_sequence"] == 4096 * (24 * 1024 + 8 * 8192)


def test_an_encoder_takes_its_length_and_the_others_none(cli: Cli) -> None:
    rows = cli("compare", "t5-large", "gpt2", "-g", "h100-sxm", "-c", 128, "--source-len", 64, "-o", "json").records
    assert [row["model"] for row in rows] == ["t5-large", "gpt2"]
    assert "source-len" in cli("compare", "t5-large", "gpt2", "-g", "h100-sxm").err


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["gpt2:kv-hea=2"], "unknown edit 'kv-hea'"),
        (["gpt2:kv-heads=2:kv-heads=3"], "stands twice"),
        (["gpt2:kv-heads=5"], "does not divide"),
        (["gpt3"], "Did you mean"),
        ([], "MODEL"),
        (["gpt2", "-c", "-1"], "contexts: '-1' is out of range"),
        (["gpt2", "-c", "1:100000:+1"], "take larger steps"),
        (["gpt2", "--contxts", "2"], "'--contexts'"),
    ],
)
def test_what_is_wrong_is_named(cli: Cli, arguments: list[str], said: str) -> None:
    answer = cli("compare", *arguments, "--gpu", "h100-sxm")
    assert (answer.code, answer.out) == (2, "")
    assert said in answer.err


def test_a_model_that_does_not_fit_is_told(cli: Cli) -> None:
    answer = cli("compare", "gpt2", "llama-3.1-405b", "-g", "h100-sxm", "-c", 1024)
    assert "llama-3.1-405b does not fit" in answer.out
    row = cli("compare", "llama-3.1-405b", "-g", "h100-sxm", "-c", 1024, "-o", "json").records[0]
    assert (row["largest_batch"], row["largest_batch_output_tok_per_s_bound"], row["fits"]) == (0, None, False)
    assert "none of them fits" in cli("compare", "llama-3.1-405b", "-g", "h100-sxm", "-c", 1024).out
