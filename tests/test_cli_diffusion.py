"""``roofline diffusion``: figures of the library, verdicts and refusals."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from roofline import Deployment, load_accelerator, load_model
from roofline.diffusion import Denoising, denoise

Cli = Callable[..., Any]
DENOISE = ("diffusion", "llada-8b", "--gpu", "h100-sxm", "--isl", 512, "--osl", 128)


def test_every_plan_is_the_librarys(cli: Cli) -> None:
    rows = cli(*DENOISE, "--cache", "none,block", "--steps", "8,32", "-b", "1,2", "--guidance", "-o", "json").records
    assert [(row["batch"], row["cache"], row["steps_per_block"]) for row in rows] == [
        (batch, cache, steps) for batch in (1, 2) for cache in ("none", "block") for steps in (8, 32)
    ]
    deployment = Deployment(load_model("llada-8b"), load_accelerator("h100-sxm"))
    for row in rows:
        plan = Denoising(128, 32, row["steps_per_block"], row["cache"], guidance=True)
        found = denoise(deployment, row["batch"], 512, plan).to_dict()
        assert row["input_tokens"] == found.pop("prompt_tokens")
        assert {key: row[key] for key in found} == found


def test_tokens_per_step_set_the_steps(cli: Cli) -> None:
    rows = cli(*DENOISE, "--tokens-per-step", "1,2.5,32", "--block", 32, "-o", "json").records
    assert [row["steps_per_block"] for row in rows] == [32, 13, 1]
    assert rows[1]["tokens_per_step"] == pytest.approx(32 / 13)


def test_the_verdict_says_faster_or_slower_and_from_when_on(cli: Cli) -> None:
    slow = cli(*DENOISE).out.splitlines()[1]
    assert "slower: 0." in slow
    assert "break-even at 2." in slow
    assert "this plan finishes 1" in slow
    fast = cli(*DENOISE, "--cache", "block", "--tokens-per-step", 4).out.splitlines()[1]
    assert "faster: 3." in fast
    many = cli(*DENOISE, "--cache", "none,block", "--tokens-per-step", "1,4").out.splitlines()
    assert many[1] == "2 of 4 plans are faster than autoregressive decoding"
    assert many[2].startswith("best: batch 1, block")
    never = cli(
        "diffusion", "qwen2.5-7b", "-g", "h100-sxm", "-b", 64, "--isl", 4096, "--osl", 64, "--block", 4, "--cache", "prefix"
    )
    assert "no number of tokens per step is as fast" in never.out


def test_edits_and_memory_of_a_denoiser(cli: Cli) -> None:
    base, edited = cli(*DENOISE, "--dtype", "fp8", "-o", "json").records
    assert (base["variant"], edited["variant"]) == ("base", "edited")
    assert edited["weight_bytes"] < base["weight_bytes"]
    huge = (*DENOISE, "--cache", "block", "-b", 4096, "--check")
    assert cli(*huge).code == 1
    assert cli(*DENOISE, "--check").code == 0


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--cache", "duel"], "Did you mean 'dual'"),
        (["--steps", "4", "--tokens-per-step", "2"], "give one of them"),
        (["--steps", "33"], "each step must finish a token"),
        (["--tokens-per-step", "33"], "tokens-per-step: 33 is not between 1 and the block of 32"),
        (["--tokens-per-step", "0.5"], "tokens-per-step: '0.5' is out of range"),
        (["--block", "256"], "longer than the 128 output tokens"),
        (["-b", "1:2000:+1"], "2,000 plans are more than"),
        (["--window", "64"], "cannot be made bidirectional"),
    ],
)
def test_what_is_wrong_with_a_plan_is_named(cli: Cli, arguments: list[str], said: str) -> None:
    answer = cli(*DENOISE, *arguments)
    assert (answer.code, answer.out) == (2, "")
    assert said in answer.err


def test_a_model_without_softmax_attention_is_no_denoiser(cli: Cli) -> None:
    assert "attention with key-value heads" in cli("diffusion", "mamba2-2.7b", "-g", "h100-sxm").err


def test_an_encoder_decoder_is_no_denoiser(cli: Cli) -> None:
    assert "denoising behind an encoder is not supported" in cli("diffusion", "t5-large", "-g", "h100-sxm").err
