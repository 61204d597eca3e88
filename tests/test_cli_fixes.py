"""Verdicts over every phase of a generation, what --check judges, and fixes that work when they are pasted."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest

import roofline

Cli = Callable[..., Any]


def fixes(answer: Any) -> list[str]:
    """The suggested changes of an answer, without what they lead to."""
    line = next(line for line in answer.out.splitlines() if line.startswith("fix: "))
    return [re.sub(r" \([^)]*\)$", "", fix) for fix in line.removeprefix("fix: ").split(" or ")]


def pasted(command: str, fix: str) -> str:
    """The command line after a fix: "A instead of B" takes B's place, other flags are added."""
    pieces = re.findall(r"--\S+ \S+(?: instead of --\S+ \S+(?: --\S+ \S+)*?(?= --|$))?", fix)
    assert " ".join(pieces) == fix
    for piece in pieces:
        new, _, old = piece.partition(" instead of ")
        assert not old or old in command
        command = command.replace(old, new) if old else f"{command} {new}"
    return command


COMMANDS = (
    "llama-2-13b --gpu h100-sxm --batch 1,16,64,256 --context 1024",
    "llama-2-13b --gpu h100-sxm --batch 96 --context 1024 --attention unfused",
    "llama-2-13b --gpu h100-sxm --batch 1 --context 10000000",
    "llama-3.1-70b --gpu h100-sxm --kv-heads 2,4",
    "llama-3.1-70b --gpu h100-sxm --dtype bf16 --batch 2",
    "llama-3.1-70b --gpu h100-sxm,a100-80gb --context 1024,8192",
    "llama-3.1-70b --gpu h100-sxm --tp 1,2 --batch 64",
    "llama-3.1-8b --gpu h100-sxm --isl 100000 --osl 1000 --batch 5",
    "llama-3.1-8b --gpu h100-sxm --isl 100000 --osl 1000 --batch 5 --context 10",
    "llama-3.1-8b --gpu h100-sxm --isl 120000 --batch 4 --prefill-chunk 119999",
    "llama-3.1-8b --gpu h100-sxm --isl 30000 --osl 2 --batch 200 --no-cache",
    "llama-2-13b --gpu h100-sxm --isl 3000000 --osl 10",
)


@pytest.mark.parametrize("command", COMMANDS)
def test_every_suggested_fix_passes_the_check_when_it_is_pasted(cli: Cli, command: str) -> None:
    answer = cli("what-if", *command.split(), "--check")
    assert answer.code == 1
    for fix in fixes(answer):
        assert cli("what-if", *pasted(command, fix).split(), "--check", "-q").code == 0, fix


def test_the_check_judges_the_edited_rows(cli: Cli) -> None:
    sizes = ("llama-3.1-70b", "-g", "h100-sxm", "--check")
    for command in ("what-if", "fit"):
        assert cli(command, *sizes).code == 1
        assert cli(command, *sizes, "--dtype", "fp8").code == 0
        assert cli(command, *sizes, "--dtype", "fp8,bf16").code == 1
        assert cli(command, *sizes, "--attention", "fused").code == 1


def test_a_prefill_that_does_not_fit_is_a_point_that_does_not_fit(cli: Cli) -> None:
    sizes = ("what-if", "llama-3.1-8b", "-g", "h100-sxm", "--isl", 100000, "--osl", 1000)
    deployment = roofline.Deployment(roofline.load_model("llama-3.1-8b"), roofline.load_accelerator("h100-sxm"))
    for batch, context in ((5, ()), (5, ("--context", 10)), (4, ())):
        (row,) = cli(*sizes, "-b", batch, *context, "-o", "json").records
        memory = deployment.prefill(batch, 100000).memory
        assert row["prefill_required_bytes"] == memory.required_bytes
        assert row["prefill_fits"] == row["fits"] == memory.fits == (batch == 4)
        assert cli(*sizes, "-b", batch, *context, "--check").code == (0 if batch == 4 else 1)
    assert "5, prefill of 100,000 tokens" in cli(*sizes, "-b", 5).out
    assert "the largest batch there is 4" in cli(*sizes, "-b", 5).out


def test_a_context_does_not_hide_the_last_step_of_the_generation(cli: Cli) -> None:
    sizes = ("what-if", "llama-3.1-8b", "-g", "h100-sxm", "--isl", 1000, "--osl", 100000, "-b", 8)
    (row,) = cli(*sizes, "--context", 10, "-o", "json").records
    assert row["required_bytes"] < row["capacity_bytes"] < row["generation_required_bytes"]
    assert (row["prefill_fits"], row["fits"]) == (True, False)
    (alone,) = cli("what-if", "llama-3.1-8b", "-g", "h100-sxm", "-o", "json").records
    assert (alone["prefill_fits"], alone["prefill_required_bytes"], alone["generation_required_bytes"]) == (None, None, None)


@pytest.mark.parametrize("chunk", [1, 64, 1000, 2000])
def test_chunks_of_a_prompt_are_prefills_behind_each_other(cli: Cli, chunk: int) -> None:
    """More chunks than 64 are one array, fewer are steps of their own; both are the sum over the chunks."""
    sizes = ("what-if", "llama-3.1-8b", "-g", "h100-sxm", "--isl", 1001, "--osl", 3, "-b", 2, "-o", "json")
    deployment = roofline.Deployment(roofline.load_model("llama-3.1-8b"), roofline.load_accelerator("h100-sxm"))
    steps = [deployment.prefill(2, min(chunk, 1001 - done), cached=done) for done in range(0, 1001, chunk)]
    (row,), (whole,) = cli(*sizes, "--prefill-chunk", chunk).records, cli(*sizes).records
    assert row["ttft_bound_s"] == pytest.approx(sum(step.bound_s for step in steps), rel=1e-12)
    assert row["ttft_serial_s"] == pytest.approx(sum(step.serial_s for step in steps), rel=1e-12)
    assert row["e2e_bound_s"] - row["ttft_bound_s"] == pytest.approx(whole["e2e_bound_s"] - whole["ttft_bound_s"], rel=1e-9)
    assert row["prefill_required_bytes"] == max(step.memory.required_bytes for step in steps)
    assert (row["prefill_chunk_tokens"], whole["prefill_chunk_tokens"]) == (chunk, None)


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (("--prefill-chunk", 512), "--isl"),
        (("--isl", 64, "--osl", 4, "--no-cache", "--prefill-chunk", 32), "naive"),
        (("--isl", 64, "--prefill-chunk", "32,64"), "several"),
    ],
)
def test_chunks_that_have_no_meaning_are_refused(cli: Cli, options: tuple[Any, ...], told: str) -> None:
    answer = cli("what-if", "llama-3.1-8b", "-g", "h100-sxm", *options)
    assert (answer.code, answer.out) == (2, "")
    assert "prefill-chunk" in answer.err
    assert told in answer.err


def test_what_does_not_fit_at_batch_1_is_named(cli: Cli) -> None:
    answer = cli("what-if", "llama-2-13b", "-g", "h100-sxm", "-c", 100000)
    assert "not even batch 1 fits: weights 24.24 GiB, KV 76.29 GiB" in answer.out
    assert "--context 4096 instead of --context 100000" in answer.out


def test_each_record_carries_what_its_own_variant_and_gpu_assume(cli: Cli) -> None:
    for command in ("what-if", "fit"):
        rows = cli(command, "llama-3.1-8b", "-g", "h100-sxm,a100-sxm-80gb", "--kv-dtype", "fp8", "-o", "json").records
        assert len(rows) == 4
        for row in rows:
            told = " | ".join(row["assumes"])
            assert ("cached state in fp8" in told, "cached state in bf16" in told) == (bool(row["edits"]), not row["edits"])
            assert [gpu for gpu in ("h100-sxm", "a100-sxm-80gb") if f"{gpu}: " in told] == [row["gpu"]]
            assert row["not_modelled"]
    table = cli("what-if", "llama-3.1-8b", "-g", "h100-sxm", "--kv-dtype", "fp8").out
    assert "assumes: base: cached state in bf16" in table
    assert "assumes: --kv-dtype fp8: cached state in fp8" in table


def test_compare_and_explain_carry_their_own_assumptions(cli: Cli) -> None:
    sizes = ("-g", "h100-sxm,h200-sxm", "-c", "1024,1Mi", "--json")
    for row in cli("compare", "llama-3.1-8b", "llama-3.1-8b:kv-dtype=fp8", *sizes).records:
        told = " | ".join(row["assumes"])
        assert ("in fp8" in told) == bool(row["edits"])
        assert ("longer than" in told) == (row["context_tokens"] == 2**20)
        assert f"roofs of {row['gpu']}" in told
        assert told.count("roofs of") == 1
        assert row["not_modelled"]
    parts = cli("explain", "llama-3.1-8b", "-g", "h100-sxm", "--json").records
    assert all(part["assumes"] and part["not_modelled"] for part in parts)
    assert [part["component"] for part in parts if part["total"]] == ["whole step"]


def test_quantised_activations_and_an_encoders_length_are_assumptions(cli: Cli) -> None:
    assert "activations are quantised to it as well (W8A8)" in cli("what-if", "llama-3.1-8b", "-g", "h100", "--dtype", "fp8").out
    assert "W8A8" not in cli("what-if", "llama-3.1-8b", "-g", "h100", "--dtype", "int4-g128").out
    assert "encoder's output of 1,500 tokens" in cli("what-if", "whisper-large-v3", "-g", "h100").out
    assert "1,500" not in cli("what-if", "whisper-large-v3", "-g", "h100", "--source-len", 700).out


def test_the_check_of_an_engine_judges_the_edited_rows(cli: Cli) -> None:
    sizes = ("fit", "llama-3.1-70b", "-g", "h100-sxm", "--engine", "vllm", "--max-model-len", 4096, "--check")
    assert cli(*sizes).code == 1
    assert cli(*sizes, "--dtype", "int4-g128").code == 0
