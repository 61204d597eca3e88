"""Edits on the command line: applied in the order in which they are typed, and told as a change of the model as it is."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

Cli = Callable[..., Any]
MODEL = ("what-if", "llama-3.1-8b", "--gpu", "h100-sxm", "--context", 8192)
LAYER_BYTES = 2 * 8 * 128 * 2
"""Keys and values of one token in one layer, at bf16."""


def edited(cli: Cli, *options: Any) -> dict[str, Any]:
    found: dict[str, Any] = cli(*MODEL, *options, "-o", "json").records[-1]
    return found


def test_edits_are_applied_in_the_order_in_which_they_are_typed(cli: Cli) -> None:
    """A pattern without a width takes the window that the model has by then; a later window overrides a pattern."""
    narrow = edited(cli, "--window", 1024, "--pattern", "LG")
    assert narrow["edits"] == ["--window 1024", "--pattern LG"]
    assert narrow["kv_bytes"] == LAYER_BYTES * 16 * (1024 + 8192)
    wide = edited(cli, "--pattern", "LG:512", "--window", 1024)
    assert wide["edits"] == ["--pattern LG:512", "--window 1024"]
    assert wide["kv_bytes"] == LAYER_BYTES * 32 * 1024
    refused = cli(*MODEL, "--pattern", "LG", "--window", 1024)
    assert refused.code == 2
    assert "no window for the L layers" in refused.err


def test_sweeps_of_edits_vary_the_last_typed_fastest(cli: Cli) -> None:
    rows = cli(*MODEL, "--kv-dtype", "bf16,fp8", "--kv-heads", "8,4", "-o", "json").records
    assert [row["edits"] for row in rows[1:]] == [
        [f"--kv-dtype {fmt}", f"--kv-heads {heads}"] for fmt in ("bf16", "fp8") for heads in (8, 4)
    ]


def test_quant_is_another_name_of_dtype(cli: Cli) -> None:
    assert edited(cli, "--quant", "fp8") == edited(cli, "--dtype", "fp8")
    assert edited(cli, "--quant", "fp8")["edits"] == ["--dtype fp8"]
    assert "Did you mean 'fp8'" in cli(*MODEL, "--quant", "fp9").err


@pytest.mark.parametrize(
    ("option", "value", "told"),
    [
        ("--share-kv-every", "2", "KV bytes/token 131,072 -> 65,536"),
        ("--mla-rank", "512", "KV bytes/token 131,072 -> 36,864"),
        ("--swap-attention", "gated-deltanet:3of4", "KV bytes/token 131,072 -> 32,768"),
        ("--pattern", "LLLG:1024", "KV at batch 1, context 8,192 1.00 GiB -> 0.34 GiB"),
        ("--experts", "8:2", "parameters 8.030 B -> 47.491 B"),
        ("--prune-width", "hidden=3072,ffn=9216", "parameters 8.030 B -> 4.513 B"),
        ("--prune-depth", "16", "parameters 8.030 B -> 4.540 B"),
        ("--dtype", "int4-g128", "weights 14.96 GiB -> "),
    ],
)
def test_an_edit_is_told_as_a_change(cli: Cli, option: str, value: str, told: str) -> None:
    change = next(
        line for line in cli(*MODEL, option, value).out.splitlines() if line.startswith(f"{option} {value}: ") and "->" in line
    )
    assert told in change
    assert "time per token at batch 1, context 8,192 " in change
    assert "largest batch there 64 -> " in change


def test_fixes_keep_the_edits_that_were_asked_for(cli: Cli) -> None:
    answer = cli("what-if", "llama-2-13b", "-g", "h100-sxm", "-b", 96, "-c", 1024, "--attention", "unfused")
    fixes = next(line for line in answer.out.splitlines() if line.startswith("fix: "))
    assert "--kv-dtype fp8" in fixes
