"""Every plan that is printed comes with a ``roofline simulate`` command, which says the same, figure for figure."""

from __future__ import annotations

import shlex
from collections.abc import Callable
from typing import Any

import pytest

H100 = ("--gpus", "h100-sxm")
ONE = (*H100, "--bound", "--max-gpus", 1)
LENGTHS = ("--isl", 500, "--osl", 50, "--requests", 60)
PLAIN = ("--dtype", "bf16", "--kv-dtype", "bf16")
ASKED: dict[str, tuple[Any, ...]] = {
    "a rate": ("llama-3.2-1b", *LENGTHS, "--gpus", "h100-sxm,l40s", "--bound", "--max-gpus", 2, "--rate", 40, "--show", 3),
    "calibrated": ("llama-3.1-8b", *LENGTHS, *H100, "--max-gpus", 2, "--rate", 30, "--tpot", "9ms", "--show", 2),
    "prefill apart": (
        "llama-3.1-8b", "--isl", 3000, "--osl", 200, "--rate", 24, "--tpot", "8ms", "--ttft", "1s", "--bound", *H100,
        "--max-gpus", 8, *PLAIN, "--requests", 100, "--show", 4,
    ),
    "users": ("llama-3.2-1b", *LENGTHS, *H100, "--max-gpus", 4, "--concurrency", 50, "--tpot", "20ms", "--show", 1),
    "batch work": ("llama-3.2-1b", *LENGTHS, *ONE, "--offline", "--show", 1),
    "speculation": (
        "llama-3.1-8b", *LENGTHS, *ONE, "--rate", 0.5, "--tpot", "3ms", "--draft",
        "llama-3.2-1b", "--alpha", 0.9, "--gamma", 3, *PLAIN, "--show", 1,
    ),
    "attention data parallelism": (
        "qwen3-30b-a3b", "--isl", 2000, "--osl", 100, "--requests", 60, "--gpus", "h200-sxm", "--bound", "--max-gpus", 4,
        "--concurrency", 400, *PLAIN, "--show", 6, "--no-disaggregation",
    ),
    "SGLang": ("llama-3.2-1b", *LENGTHS, *ONE, "--rate", 9, "--engine", "sglang"),
    "TensorRT-LLM": ("llama-3.2-1b", *LENGTHS, *ONE, "--rate", 9, "--engine", "trtllm"),
    "llama.cpp": ("llama-3.2-1b", *LENGTHS, *ONE, "--rate", 2, "--engine", "llamacpp"),
    "mixed lengths": (
        "llama-3.1-8b", "--isl", "lognormal:900.5:0.8", "--osl", "sharegpt", "--requests", 60, *ONE, "--rate", 3, "--burst", 2,
        "--show", 1,
    ),
    "sessions": (
        "llama-3.1-8b", "--isl", "coding-step", "--osl", "20:60", "--requests", 60, *ONE, "--rate", 0.3, "--turns", 5, "--think",
        "1.5s", "--prefix-len", 3000, "--prefix-caching", "--max-model-len", 20000, "--show", 1,
    ),
    "users with sessions": (
        "llama-3.1-8b", "--isl", 300, "--osl", 40, "--requests", 60, *ONE, "--concurrency", 20, "--turns", 4, "--think", "2s",
        "--prefix-caching", "--show", 1,
    ),
    "pages that are not modelled": (
        "deepseek-v4-flash", *LENGTHS, "--gpus", "h200-sxm", "--bound", "--max-gpus", 8, "--rate", 1, "--show", 1,
        "--no-disaggregation",
    ),
}  # fmt: skip


@pytest.mark.parametrize("asked", ASKED)
def test_the_command_beside_a_plan_says_what_the_plan_says(cli: Callable[..., Any], asked: str) -> None:
    plans = cli("plan", *ASKED[asked], "-o", "json").records
    assert plans
    for plan in plans:
        words = shlex.split(plan["replay"])
        assert words[:2] == ["roofline", "simulate"]
        *_, found = cli(*words[1:], "-o", "json").records
        said = plan["simulated"]
        assert (found["requests"], found["refused"]) == (said["requests"], 0)
        assert found["ttft_mean_s"] == said["ttft_s"]
        assert found["ttft_p99_s"] == said["ttft_percentile_s"]
        assert found["tpot_mean_s"] == said["tpot_s"]
        assert found["utilisation"] == said["utilisation"]
        assert (found["mean_decode_batch"], found["preempted_requests"]) == (said["mean_batch"], said["preempted"])
        assert found["prefix_hit_share"] == said["prefix_hit_share"]
        copies = plan["gpus"] / found["gpus"]
        assert copies == round(copies)
        assert found["request_per_s"] * copies == pytest.approx(said["request_per_s"], rel=1e-12)
        assert found["max_num_seqs"] == plan["max_num_seqs"]
        if plan["ttft_limit_s"] or plan["tpot_limit_s"]:
            assert found["meets_objective"] is True
    if asked == "prefill apart":
        assert any(plan["prefill"] for plan in plans)
    if asked == "attention data parallelism":
        assert any("--dp" in plan["mesh"] for plan in plans)
    if asked == "speculation":
        assert plans[0]["draft_tokens"] == 3
