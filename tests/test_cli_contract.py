"""The JSON of what-if as a contract: which keys there are at least, in which order, of which type, and never NaN."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from typing import Any

import pytest

Cli = Callable[..., Any]

TEXT, COUNT, FLAG, REAL = (str,), (int,), (bool,), (float,)
NUMBER = (int, float)

SCHEMA: dict[str, tuple[type, ...]] = {
    "schema": COUNT, "model": TEXT, "variant": TEXT, "edits": (list,), "gpu": TEXT, "convention": TEXT,
    "batch": COUNT, "context_tokens": COUNT, "dtype": TEXT, "kv_dtype": (str, type(None)),
    "weight_bytes": NUMBER, "kv_bytes": NUMBER, "total_bytes": NUMBER, "workspace_bytes": NUMBER, "required_bytes": NUMBER,
    "capacity_bytes": NUMBER, "memory_fraction": REAL, "fits": FLAG,
    "tpot_bound_s": REAL, "tpot_serial_s": REAL, "tpot_expected_s": (float, type(None)),
    "output_tok_per_s_bound": REAL, "output_tok_per_s_per_user_bound": REAL, "bound_by": TEXT,
    "input_tokens": (int, type(None)), "output_tokens": (int, type(None)),
    "ttft_bound_s": (float, type(None)), "ttft_serial_s": (float, type(None)),
    "e2e_bound_s": (float, type(None)), "e2e_serial_s": (float, type(None)),
    "generation_tpot_bound_s": (float, type(None)), "generation_output_tok_per_s_bound": (float, type(None)),
    "generation_total_tok_per_s_bound": (float, type(None)), "provenance": TEXT, "assumes": (list,),
    "not_modelled": (list,),
}  # fmt: skip
"""Key -> the types that its value may have; a bool is no number. Keys may be added, none may go or change its type."""
SCALAR = (str, int, bool, float, type(None))
"""What an added key may hold."""

COMMAND_LINES = {
    "one point": ("llama-2-13b",),
    "whole generations": ("llama-2-13b", "--isl", 64, "--osl", 16),
    "one output token": ("llama-2-13b", "--isl", 64, "--osl", 1),
    "no cache": ("llama-2-13b", "--isl", 64, "--osl", 4, "--no-cache"),
    "lecture": ("llama-2-13b", "--convention", "lecture"),
    "fractions of bytes": ("llama-3.1-8b", "--dtype", "int4-g128", "--kv-dtype", "q4_k", "-b", 3, "-c", 1001),
    "does not fit": ("llama-3.1-405b", "-b", 1024),
    "no cache to keep": ("mamba2-2.7b", "-c", 0),
    "experts": ("deepseek-v3", "-b", "1,64"),
    "encoder": ("t5-large", "--source-len", 128),
    "edits": ("llama-3.1-8b", "--kv-heads", "1,2", "--window", 512),
}


def refuse_constant(name: str) -> None:
    raise AssertionError(f"{name} is not JSON")


@pytest.mark.parametrize("name", COMMAND_LINES)
def test_every_point_follows_the_schema(cli: Cli, name: str) -> None:
    answer = cli("what-if", *COMMAND_LINES[name], "--gpu", "h100-sxm", "-o", "json")
    assert (answer.code, answer.err) == (0, "")
    rows = json.loads(answer.out, parse_constant=refuse_constant)
    assert rows
    for row in rows:
        assert [key for key in row if key in SCHEMA] == list(SCHEMA)
        wrong = {key: value for key, value in row.items() if type(value) not in SCHEMA.get(key, SCALAR)}
        assert wrong == {}
        assert all(math.isfinite(value) for value in row.values() if isinstance(value, float))
        assert all(value >= 0 for value in row.values() if isinstance(value, (int, float)))


def test_the_enumerations_of_the_schema(cli: Cli) -> None:
    rows = cli("what-if", "llama-2-13b", "-g", "h100-sxm", "-b", "1,512", "-c", 1, "--kv-heads", "8", "-o", "json").records
    assert {row["schema"] for row in rows} == {1}
    assert {row["variant"] for row in rows} == {"base", "edited"}
    assert {row["bound_by"] for row in rows} == {"memory", "compute"}
    assert {row["provenance"] for row in rows} == {"datasheet"}
    assert all(isinstance(line, str) for row in rows for line in (*row["edits"], *row["assumes"]))


def test_bytes_that_are_whole_are_ints_and_exact(cli: Cli) -> None:
    """Nothing is rounded on the way out: ints of more than 53 bits survive."""
    (row,) = cli("what-if", "llama-2-13b", "-g", "h100-sxm", "-b", 10**9, "-c", 10**6 + 1, "-o", "json").records
    assert row["kv_bytes"] == 819200 * 10**9 * (10**6 + 1)
    assert type(row["kv_bytes"]) is int
