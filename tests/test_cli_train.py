"""``roofline train``: figures of the library, what distilling saves, refusals."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from roofline import edits, load_model
from roofline.training import distillation, training_flops

Cli = Callable[..., Any]
LLAMA = load_model("llama-3.1-8b")
MINITRON = ("train", "llama-3.1-8b", "--prune-width", "hidden=3072,ffn=9216")


def test_training_flops_are_exact_ints(cli: Cli) -> None:
    (row,) = cli("train", "llama-3.1-8b", "--tokens", "15e12", "--sequence", 8192, "-o", "json").records
    assert row["training_flop"] == training_flops(LLAMA, 15 * 10**12, 8192)
    assert row["six_nd_flop"] == 6 * 8_030_261_248 * 15 * 10**12
    assert type(row["training_flop"]) is int
    assert (row["gpu"], row["gpu_hours_bound"], row["mfu"], row["gpu_hours_at_mfu"]) == (None, None, None, None)


def test_distilling_a_pruned_model_beside_training_it(cli: Cli) -> None:
    """Minitron (arXiv 2407.14679): 94 B tokens of distillation; Llama-3.1-Minitron-4B-Width has 4.51 B parameters."""
    rows = cli(*MINITRON, "--distill-tokens", "94e9", "--scratch-tokens", "8e12", "-o", "json").records
    assert [(row["run"], row["variant"], row["tokens"]) for row in rows] == [
        ("training", "base", 10**12), ("training", "edited", 8 * 10**12), ("distillation", "edited", 94 * 10**9),
    ]  # fmt: skip
    student = edits.apply(LLAMA, [edits.prune_width("hidden=3072,ffn=9216")])
    found = distillation(student, LLAMA, 94 * 10**9, 8 * 10**12, 4096)
    assert rows[1]["training_flop"] == found.scratch_flop
    assert rows[2]["training_flop"] == found.distill_flop
    assert rows[1]["params"] == 4_512_746_496
    text = cli(*MINITRON, "--distill-tokens", "94e9", "--scratch-tokens", "8e12").out
    assert f"costs 1/{found.saving:.1f} of training from scratch on 8e+12" in text


def test_gpu_hours_are_a_bound_and_a_utilisation_an_assumption(cli: Cli) -> None:
    options = ("train", "llama-3.1-8b", "-g", "h100-sxm,h200-sxm", "--mfu", "0.4")
    rows = cli(*options, "-o", "json").records
    assert [row["gpu"] for row in rows] == ["h100-sxm", "h200-sxm"]
    assert rows[0]["gpu_hours_bound"] == pytest.approx(rows[0]["training_flop"] / 989e12 / 3600, rel=1e-12)
    assert rows[0]["gpu_hours_at_mfu"] == pytest.approx(rows[0]["gpu_hours_bound"] / 0.4, rel=1e-12)
    assert "model FLOP utilisation 0.4 is an assumption" in cli(*options).out
    (bound,) = cli("train", "gpt2", "-g", "h100-sxm", "-o", "json").records
    assert bound["gpu_hours_at_mfu"] is None


def test_qat_pays_on_every_weight_in_every_step(cli: Cli) -> None:
    rows = cli("train", "gpt2", "--qat-tokens", "1e9", "--step-tokens", "1e6", "-o", "json").records
    assert rows[-1]["run"] == "QAT"
    assert rows[-1]["fake_quant_flop"] == 6 * 124_439_808 * 1000
    assert rows[0]["fake_quant_flop"] is None
    assert "elementwise FLOP per matrix FLOP" in cli("train", "gpt2", "--qat-tokens", "1e9").out


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--distill-tokens", "1e9"], "distill-tokens: there is no student"),
        (["--scratch-tokens", "1e9"], "scratch-tokens: there is no student"),
        (["--mfu", "0.4"], "mfu: GPU-hours need an accelerator"),
        (["--mfu", "1.4", "-g", "h100-sxm"], "mfu: '1.4'"),
        (["--tokens", "1,2"], "tokens: give one value"),
        (["--tokens", "0"], "tokens: '0' is out of range"),
        (["--tokens", "1e17"], "tokens: '1e17' is out of range"),
        (["--sequence", "x"], "sequence: 'x' is not a number"),
        (["--prune-depth", "99"], "--prune-depth"),
    ],
)
def test_what_is_wrong_with_a_training_run_is_named(cli: Cli, arguments: list[str], said: str) -> None:
    answer = cli("train", "gpt2", *arguments)
    assert (answer.code, answer.out) == (2, "")
    assert said in answer.err


def test_an_encoder_decoder_is_not_trained(cli: Cli) -> None:
    assert "training an encoder beside the decoder is not supported" in cli("train", "t5-large").err


def test_tokens_may_be_written_as_corpora_are(cli: Cli) -> None:
    written = [cli("train", "llama-3.1-8b", "--tokens", text, "-o", "json").records[0] for text in ("1.5T", "1500B", "15e11")]
    assert [record["tokens"] for record in written] == [1_500_000_000_000] * 3
    assert cli("train", "llama-3.1-8b", "--tokens", "4Ki").code == 0
    assert cli("train", "llama-3.1-8b", "--tokens", "T").code == 2
