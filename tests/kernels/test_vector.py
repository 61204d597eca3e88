# ruff: noqa: E501
"""Elementwise FLOPs that a launch runs are those of the component and a stated rest, as integers, where blocks are whole.

Blocks that an edge cuts run their operations on what is not there, so the shapes here are powers of two. The rest is what a
component leaves out: what is done once per row, scale or head, and where a kernel does more, or less, per element.
"""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("triton")

from roofline.kernels.gated_delta_step import Delta
from roofline.kernels.gated_mlp import Gated
from roofline.kernels.mamba2_step import Scan
from roofline.kernels.quantize_fp8 import Quantised
from roofline.kernels.registry import load
from roofline.kernels.rmsnorm import Rows
from roofline.kernels.rotary import Heads
from roofline.kernels.tiling import Tiles
from roofline.kernels.unfused_attention import Dense
from roofline.validate.counted import counting

ROWS, D, BLOCKS = 16, 512, 4
"""Rows of whole programs, their width, and the blocks of 128 of a row."""
ROW, SCALE = 3, 3
"""Once per row of a norm: mean, epsilon, inverse. Once per scale: a floor, itself, its inverse."""
FRESH, TOKENS, HEADS = (3, 1), 4, 4
"""Tokens of two sequences, how many that are, and their heads."""
STEPS = TOKENS * HEADS
PROGRAMS = 2 * HEADS
"""Each negates the rate of its head."""

CASES: list[tuple[str, str, Any, int]] = [
    ("rmsnorm", "rmsnorm_kernel", Rows("plain", "fp32", ROWS, D), ROW * ROWS),
    ("rmsnorm", "rmsnorm_kernel", Rows("residual", "bf16", ROWS, D, True), ROW * ROWS),
    ("quantize_fp8", "quantize_rows_kernel", Quantised("blocks", "bf16", ROWS, D), SCALE * ROWS * BLOCKS),
    ("quantize_fp8", "quantize_rows_kernel", Quantised("tokens", "bf16", ROWS, D, "token"), SCALE * ROWS),
    # The squares are summed block by block, and then those sums.
    ("quantize_fp8", "quantize_rows_kernel", Quantised("norm", "bf16", ROWS, D, "block", True), ROW * ROWS + (SCALE + 1) * ROWS * BLOCKS),
    # Every element is divided by the scale that it is stored with, 1 in 16 bits.
    ("rotary", "rotary_kernel", Heads("turned", "bf16", 8, 4, 2, 32, 32), 8 * (4 + 2 + 2) * 32),
    # gate / (1 + exp(-gate)): a division in place of an inverse and a product.
    ("gated_mlp", "gated_mlp_kernel", Gated("gated", "bf16", 32, 64, 64, Tiles(32, 32, 32)), -32 * 64),
    # The component leaves the weights undivided, as a fused kernel does.
    ("unfused_attention", "softmax_kernel", Dense("full", "fp32", 1, 16, 48, 2, 1, 32, mask="full"), 2 * 16 * 64),
    # Three per value (its step, the skipped input and its addition); the step, by a softplus, and the decay of a head.
    ("mamba2_step", "mamba2_step_kernel", Scan("scan", "fp32", FRESH, HEADS, 16, 32, 2), STEPS * (3 * 16 + 4) + PROGRAMS),
    # Norms of query and key, the correction of a value and its beta; a decay takes four, all else of a head six.
    ("gated_delta_step", "delta_step_kernel", Delta("rule", "fp32", FRESH, 2, HEADS, 32, 16), STEPS * (6 * 32 + 2 * 16 + 4 + 6) + PROGRAMS),
    ("kda_step", "delta_step_kernel", Delta("channels", "fp32", FRESH, 4, HEADS, 32, 16, by_channel=True), STEPS * (6 * 32 + 2 * 16 + 4 * 32 + 6) + PROGRAMS),
]  # fmt: skip


@pytest.mark.parametrize(("name", "kernel", "case", "rest"), CASES, ids=[f"{one[0]}-{one[2].name}" for one in CASES])
def test_elementwise_flops_are_the_components_and_a_stated_rest(name: str, kernel: str, case: Any, rest: int) -> None:
    spec = load(name)
    tensors = spec.inputs(case, "cpu")
    with counting() as counts:
        spec.launch(case, tensors)
    assert counts.kernels[kernel].vector == spec.expected(case, tensors).useful.flops["vector"] + rest


def test_padding_runs_as_well() -> None:
    """300 of 512 lanes hold an element."""
    case = Rows("ragged", "fp32", 4, 300)
    spec = load("rmsnorm")
    tensors = spec.inputs(case, "cpu")
    with counting() as counts:
        spec.launch(case, tensors)
    assert counts.vector == 4 * 4 * 512 + ROW * 4
