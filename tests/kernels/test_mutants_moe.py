# ruff: noqa: E501
"""Planted faults in the kernels of experts and of 8-bit matmuls, each found for its own reason."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("triton")

from roofline.validate.planted import Mutant, found

MUTANTS = [
    Mutant("moe_router", "weights of the corrected scores", "tl.where(here, score, 0.0)", "tl.where(here, best[:, None] * 0.0 + 1.0, 0.0)", "ragged", "weights: rms error"),
    Mutant("moe_router", "ignored correction", "choice += tl.load(bias + expert, mask=real, other=0.0).to(tl.float32)", "choice += 0.0 * tl.load(bias + expert, mask=real, other=0.0).to(tl.float32)", "softplus", "chosen: "),
    Mutant("moe_router", "group worth its best", "worth += tl.max(others, 2)", "worth += 0.0", "grouped-sigmoid", "integers differ"),
    Mutant("moe_router", "padding picked", "choice = tl.where(real, choice, float(\"-inf\"))", "choice = tl.where(real, choice, 2.0)", "ragged", "integers differ"),
    Mutant("moe_router", "missing write", "    tl.store(chosen + goal, index, mask=inside)", "    tl.store(chosen + goal, index, mask=inside & (slot[None, :] > 0))", "mixtral", "chosen: "),
    Mutant("moe_router", "extra load", "    choice = score\n", "    choice = score + 0.0 * tl.load(logits).to(tl.float32)\n", "one-expert", "moe_router_kernel.logits: "),
    Mutant("moe_permute", "unstable order", "tl.cumsum(hits, 0) - hits", "tl.sum(hits, 0)[None, :] - tl.cumsum(hits, 0)", "ragged", "rows: "),
    Mutant("moe_permute", "shares collide", "before += tl.where(share < mine, some, 0)", "before += tl.where(share < mine - 1, some, 0)", "ragged", "place_kernel.order: "),
    Mutant("moe_permute", "missing write", "tl.store(offsets + E, choices)", "pass", "idle-experts", "offsets: "),
    Mutant("moe_permute", "extra load", "    for pick in range(PICKED):\n        row = tl.load(rows + token * PICKED + pick).to(tl.int64)\n        tl.store", "    for pick in range(PICKED):\n        value = tl.load(x + token.to(tl.int64) * D + column, mask=column < D, other=0.0)\n        row = tl.load(rows + token * PICKED + pick).to(tl.int64)\n        tl.store", "ragged", "permute_kernel.x: "),
    Mutant("moe_permute", "wrong weight", "tl.load(weights + token * PICKED + pick)", "tl.load(weights + token * PICKED)", "shared", "combine_kernel.weights: "),
    Mutant("moe_permute", "forgotten shared experts", "total += tl.load(shared + at, mask=column < D, other=0.0).to(tl.float32)", "total += 0.0 * tl.load(shared + at, mask=column < D, other=0.0).to(tl.float32)", "shared", "combined: rms error"),
    Mutant("grouped_gemm", "wrong expert", "(last <= tile)", "(last < tile)", "ragged", "grouped_gemm_kernel.weight: "),
    Mutant("grouped_gemm", "rows of the next expert", "real = row < stop", "real = row < stop + 1", "ragged", "OutOfBounds"),
    Mutant("grouped_gemm", "wrong token", "// PICKED\n", "// (PICKED + 1)\n", "ragged", "rms error"),
    Mutant("grouped_gemm", "missing write", "mask=real[:, None] & inside[None, :])\n\n\ndef", "mask=real[:, None] & inside[None, :] & (expert > 0))\n\n\ndef", "ragged", "NaN"),
    Mutant("grouped_gemm", "extra load", "    if expert >= E:\n        return\n", "    tl.load(weight)\n    if expert >= E:\n        return\n", "idle-experts", "grouped_gemm_kernel.weight: "),
    Mutant("grouped_gemm", "gate and up alike", "weight_tile(mine + N.to(tl.int64) * per_row, up_scales", "weight_tile(mine, up_scales", "gated", "grouped_gemm_kernel.weight: "),
    Mutant("grouped_gemm", "wrong block's scale", "tl.load(scales + k // BK)", "tl.load(scales + 0 * k)", "fp8-gated", "w_scales: "),
    Mutant("grouped_gemm", "scale of another token", "x_scales + source.to(tl.int64) * blocks", "x_scales + (source.to(tl.int64) ^ 1) * blocks", "fp8-gated", "rms error"),
    Mutant("grouped_gemm", "wrong power", "power = tl.load(scales + rows[:, None]", "power = tl.load(scales + 0 * rows[:, None]", "mxfp4", "w_scales: "),
    Mutant("quantize_fp8", "largest without its sign", "tl.max(tl.abs(value), 2)", "tl.max(value, 2)", "ragged", "scales: rms error"),
    Mutant("quantize_fp8", "missing write", "(group * GROUP < D)[None, :])\n    narrow", "(group * GROUP < D - GROUP)[None, :])\n    narrow", "ragged", "scales: NaN"),
    Mutant("quantize_fp8", "wrong group", "GROUP if scales == \"block\" else width", "2 * GROUP if scales == \"block\" else width", "whole-blocks", "shape"),
    Mutant("quantize_fp8", "forgotten share", "mask=part < tl.num_programs(0)", "mask=part < tl.num_programs(0) - 1", "tensor-shared", "quantize_all_kernel.largest: "),
    Mutant("quantize_fp8", "saturated too early", "narrow = tl.minimum(tl.maximum(value, -TOP), TOP)", "narrow = tl.minimum(tl.maximum(value, -240.0), TOP)", "static", "rms error"),
    Mutant("gemm_fp8_block", "wrong mask", "left = block * BK + inner < K", "left = block * BK + inner < K - 1", "ragged", "gemm_fp8_block_kernel.a: "),
    Mutant("gemm_fp8_block", "scale of the first step", "tl.load(b_scale_at + block)", "tl.load(b_scale_at)", "whole-blocks", "b_scales: "),
    Mutant("gemm_fp8_block", "scale of other columns", "column * BN // BK", "(column * BN // BK + 1) % 2", "whole-blocks", "rms error"),
    Mutant("gemm_fp8_block", "sums not promoted", "total += tl.dot(x, y) * scale[:, None]", "total = (total + tl.dot(x, y)) * scale[:, None]", "split", "rms error"),
    Mutant("gemm_fp8_block", "extra load", "    total = tl.zeros((BM, BN), tl.float32)\n", "    total = tl.zeros((BM, BN), tl.float32)\n    tl.load(b)\n", "short", "gemm_fp8_block_kernel.b: "),
    Mutant("gemm_fp8_block", "missing write", "mask=(rows[:, None] < M) & (columns[None, :] < N))\n\n\ndef", "mask=(rows[:, None] < M) & (columns[None, :] < N - 1))\n\n\ndef", "ragged", "NaN at 70 places"),
]  # fmt: skip


@pytest.mark.parametrize("mutant", MUTANTS, ids=str)
def test_planted_fault_is_found(mutant: Mutant, tmp_path: Path) -> None:
    assert mutant.symptom in found(mutant, tmp_path)
