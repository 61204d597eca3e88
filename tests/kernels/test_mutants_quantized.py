# ruff: noqa: E501
"""Planted faults in the quantised kernels, each found for its own reason."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("triton")

from roofline.validate.planted import Mutant, found

MUTANTS = [
    Mutant("gemm_int8", "wrong mask", "mask=(rows[:, None] < M) & (k + inner[None, :] < K)", "mask=(rows[:, None] < M) & (k + inner[None, :] < K - 1)", "ragged", "rms error"),
    Mutant("gemm_int8", "wrong scale", "* per_token[:, None] * per_channel", "* per_channel", "ragged", "rms error"),
    Mutant("gemm_int8", "extra load", "    total = tl.zeros((BM, BN), tl.int32)\n", "    total = tl.zeros((BM, BN), tl.int32)\n    tl.load(a)\n", "whole-tiles", "gemm_int8_kernel.a: "),
    Mutant("gemm_int8", "missing write", "tl.store(scales + row, scale)", "tl.store(scales + row, scale, mask=row > 0)", "dynamic", "NaN"),
    Mutant("gemm_int8", "truncated code", "tl.floor(tl.div_rn(value, scale) + 0.5)", "tl.floor(tl.div_rn(value, scale))", "dynamic", "rms error"),
    Mutant("gemm_int4", "wrong nibble", "nibble = place // 2 + 4 * (place % 2) if AWQ else place", "nibble = place", "awq-split", "rms error"),
    Mutant("gemm_int4", "zero point not less one", "zero = (zero + 1) & 15", "zero = zero & 15", "gptq-ragged", "rms error"),
    Mutant("gemm_int4", "wrong group", "group = k // SIZE + span", "group = k // SIZE + 0 * span", "gptq-ragged", "scales: "),
    Mutant("gemm_int4", "ignored order", "source = tl.load(order + source, mask=real, other=0)", "source = k + inner + 0 * tl.load(order + source, mask=real, other=0)", "gptq-order", "rms error"),
    Mutant("gemm_int4", "extra load", "        group = k // SIZE + span\n", "        group = k // SIZE + span\n        tl.load(scales)\n", "awq-one-row", "gemm_int4_kernel.scales: "),
    Mutant("gemm_int4", "missing write", "tl.store(at, total.to(out.dtype.element_ty), mask=(rows[:, None] < M) & (columns[None, :] < N))", "tl.store(at, total.to(out.dtype.element_ty), mask=(rows[:, None] < M) & (columns[None, :] < N) & (part > 0))", "awq-split", "NaN"),
    Mutant("gemm_mxfp4", "wrong block", "at = k // BLOCK + block[None, :]", "at = k // BLOCK + 0 * block[None, :]", "ragged", "rms error"),
    Mutant("gemm_mxfp4", "forgotten factor", "total *= tl.load(factor)", "total *= 1.0 + 0.0 * tl.load(factor)", "nvfp4-split", "rms error"),
    Mutant("gemm_mxfp4", "wrong mask", "mask=real & (k // 2 + byte[None, :] < K // 2)", "mask=real & (k // 2 + byte[None, :] < K // 2 - 1)", "ragged", "packed: "),
    Mutant("gemm_mxfp4", "missing write", "mask=(rows[:, None] < M) & (columns[None, :] < N))\n\n\ndef", "mask=(rows[:, None] < M - 1) & (columns[None, :] < N))\n\n\ndef", "ragged", "NaN at 83 places"),
    Mutant("quantize_kv", "wrong page", "slot = tl.load(slots + token)", "slot = 1 + tl.load(slots + token)", "int4", "rms error"),
    Mutant("quantize_kv", "wrong scale", "tl.div_rn(tl.max(tl.abs(value), 1), 7.0)", "tl.div_rn(tl.max(value, 1), 7.0)", "int4", "rms error"),
    Mutant("quantize_kv", "swapped nibbles", "return (low | (high << 4))", "return (high | (low << 4))", "int4-zeros", "rms error"),
    Mutant("quantize_kv", "missing write", "        tl.store(scales + goal, stored, mask=group < GROUPS)\n", "        tl.store(scales + goal, stored, mask=group < GROUPS - 1)\n", "int4-uneven", "k_scales: "),
    Mutant("quantize_kv", "zero point of the next pair", "zeros + slot * (GROUPS // 2) + pair[None, :]", "zeros + slot * (GROUPS // 2) + (pair[None, :] + 1) % (GROUPS // 2)", "int4-zeros", "rms error"),
    Mutant("quantize_fp8", "wrong largest", "TOP = 448.0", "TOP = 460.0", "tensor", "scales: rms error"),
    Mutant("quantize_fp8", "wrong largest", "TOP = 448.0", "TOP = 460.0", "ragged", "scales: rms error"),
    Mutant("quantize_kv", "saturated too early", "tl.maximum(tl.div_rn(value, scale[:, None]), -448.0), 448.0)", "tl.maximum(tl.div_rn(value, scale[:, None]), -240.0), 240.0)", "fp8", "rms error"),
]  # fmt: skip


@pytest.mark.parametrize("mutant", MUTANTS, ids=str)
def test_planted_fault_is_found(mutant: Mutant, tmp_path: Path) -> None:
    assert mutant.symptom in found(mutant, tmp_path)
