# ruff: noqa: E501
"""Planted faults: each changes one place of a kernel's file, and the proof of a case must turn red for the stated reason."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("triton")

from roofline.validate.planted import Mutant, found

MUTANTS = [
    Mutant("gemm", "wrong mask", "(rows[:, None] < M) & (k + inner[None, :] < K)", "rows[:, None] < M", "ragged", "OutOfBounds"),
    Mutant("gemm", "wrong mask", "(rows[:, None] < M) & (k + inner[None, :] < K)", "(rows[:, None] < M) & (k + inner[None, :] < K - 1)", "fp8", "rms error"),
    Mutant("gemm", "missing write", "mask=(rows[:, None] < M) & (columns[None, :] < N))", "mask=(rows[:, None] < M - 1) & (columns[None, :] < N))", "ragged", "NaN at 150 places"),
    Mutant("gemm", "extra load", "    total = tl.zeros((BM, BN), ACCUMULATOR)\n    for", "    total = tl.zeros((BM, BN), ACCUMULATOR)\n    tl.load(a)\n    for", "ragged", "gemm_kernel.a: 42018 B requested"),
    Mutant("gemm", "missing part", "tl.static_range(1, SPLITS)", "tl.static_range(2, SPLITS)", "split-bias", "sum_parts_kernel.parts: 7800 B requested", "tiling"),
    Mutant("gemm", "swapped tiles", "row, column = place(tl", "column, row = place(tl", "grouped-rows", "NaN"),
    Mutant("gemm", "rounded operands", ', input_precision="ieee", out_dtype=ACCUMULATOR)', ", out_dtype=ACCUMULATOR)", "single", "rounded to tf32"),
    Mutant("flash_attention", "rounded operands", 'tl.dot(q1, k1, input_precision="ieee")', "tl.dot(q1, k1)", "single", "rounded to tf32"),
    Mutant("gemm", "one wrong element", "    at = out + (part * M + rows[:, None]).to(tl.int64) * N", "    total = tl.where((rows[:, None] == M - 1) & (columns[None, :] == N - 2), total * 1.2, total)\n    at = out + (part * M + rows[:, None]).to(tl.int64) * N", "ragged", "an element's error"),
    Mutant("gemm", "one wrong element", "    at = out + (part * M + rows[:, None]).to(tl.int64) * N", "    total = tl.where((rows[:, None] == M - 1) & (columns[None, :] == N - 2), total * 1.2, total)\n    at = out + (part * M + rows[:, None]).to(tl.int64) * N", "half", "an element's error"),
    Mutant("rmsnorm", "wrong epsilon", "/ D + epsilon", "/ D + epsilon * 100", "faint", "rms error"),
    Mutant("rmsnorm", "wrong mask", "(column[None, :] < D)", "(column[None, :] < D - 1)", "ragged", "NaN at 5 places"),
    Mutant("rmsnorm", "missing write", "        tl.store(stream + at, rounded, mask=inside)\n", "", "residual", "stream: NaN at 2240 places"),
    Mutant("rmsnorm", "wrong divisor", "/ D + epsilon", "/ BLOCK + epsilon", "ragged", "rms error"),
    Mutant("rotary", "wrong slot", "k_cache + slot * K * H", "k_cache + (slot + 1) * K * H", "grouped", "OutOfBounds"),
    Mutant("rotary", "wrong sign", "second * cos + first * sin", "second * cos - first * sin", "grouped", "rms error"),
    Mutant("paged_cache", "wrong page", "position // PAGE).to", "(position + 1) // PAGE).to", "gather-uneven", "rms error"),
    Mutant("paged_cache", "missing write", "    copy_row(v + token * VALUE, v_cache + slot * VALUE, VALUE, VALUES)\n", "", "write", "write_kernel.v: 0 B requested"),
    Mutant("flash_attention", "wrong mask", "(key[None, :] > positions[:, None] - size)", "(key[None, :] >= positions[:, None] - size)", "window", "rms error"),
    Mutant("flash_attention", "extra load", "low = tl.maximum(0, start - size + 1)", "low = tl.maximum(0, start - size)", "window", "requested to read"),
    Mutant("flash_attention", "missing write", "tile = tl.num_programs(0) - 1 - tl.program_id(0)", "tile = tl.num_programs(0) - tl.program_id(0)", "causal", "NaN"),
    Mutant("flash_attention", "wrong head", "V_ROW + head // group * V", "V_ROW + head % K * V", "causal", "rms error"),
    Mutant("flash_attention", "rows packed", "K_ROW=k.stride(0)", "K_ROW=K * H", "rows-apart", "rms error"),
    Mutant("flash_attention", "one wrong row", "    result = sums / tl.where(total > 0, total, 1.0)[:, None]", "    result = sums / tl.where(total > 0, total, 1.0)[:, None]\n    result = tl.where((row[:, None] == T - 1) & (head == 0), result * 1.03, result)", "causal", "a row's rms error"),
    Mutant("flash_attention", "lost scale", "sums * fade[:, None]", "sums", "causal", "rms error"),
    Mutant("unfused_attention", "wrong mask", "seen & (key <= position)", "seen & (key < position)", "prefix", "rms error"),
    Mutant("flash_decoding", "wrong page", "(page * PAGE + key % PAGE) * K", "(page * PAGE + (key + 1) % PAGE) * K", "ragged", "rms error"),
    Mutant("flash_decoding", "wrong table row", "table + sequence * columns + key // PAGE", "table + key // PAGE", "ragged", "rms error"),
    Mutant("flash_decoding", "wrong mask", "key[None, :] <= cached + token[:, None]", "key[None, :] < cached + token[:, None]", "verify", "rms error"),
    Mutant("flash_decoding", "extra load", "tl.minimum(first + share, high)", "tl.minimum(first + share + 1, high)", "ragged", "k_cache: ", "parts"),
    Mutant("flash_decoding", "missing write", "tl.store(weights + at * SPLITS + part, weighed, mask=real)", "tl.store(weights + at * SPLITS + part, weighed, mask=real & (part > 0))", "ragged", "NaN", "parts"),
    Mutant("flash_decoding", "forgotten scale", " * v_scale", "", "fp8-cache", "rms error"),
    Mutant("flash_decoding", "ignored tree", "(key < cached)[None, :] | (tl.load(", "(key <= cached + 9)[None, :] | (tl.load(", "tree", "rms error"),
    Mutant("mla_decode", "wrong page", "slot = page * PAGE + key % PAGE", "slot = page * PAGE + (key + 1) % PAGE", "ragged", "rms error"),
    Mutant("mla_decode", "wrong scale", "(ENTRY // 4) + R // 4 + group[None, :]", "(ENTRY // 4) + R // 4 + 0 * group[None, :]", "packed", "rms error", "latent_cache"),
    Mutant("mla_decode", "missing write", "at, part, real, R, R, SPLITS)", "at, part, real & (row > 0), R, R, SPLITS)", "odd-heads", "NaN"),
    Mutant("mla_prefill", "wrong width", "value_dim=case.V", "value_dim=case.V + 1", "ragged", "activations: arguments sum"),
    Mutant("speculative", "wrong residual", "                        shift += sums\n", "                        shift = sums * 0.0\n", "fork", "integers differ"),
    Mutant("speculative", "missing write", "mask=rest > count", "mask=rest > count + 1", "chain", "integers differ"),
    Mutant("speculative", "extra load", "q_end = tl.where(shift > 0, V, 0)", "q_end = V", "alike", "draft: "),
    Mutant("sampling", "wrong threshold", "low = tl.where(count >= k, middle, low)", "low = tl.where(count > k, middle, low)", "together", "logprobs: rms error"),
    Mutant("sampling", "skipped filter", "    if p < 1:", "    if p < 0:", "filters", "logits: "),
    Mutant("gated_mlp", "extra load", "    gate = tl.zeros((BM, BN), tl.float32)\n", "    gate = tl.zeros((BM, BN), tl.float32) + 0.0 * tl.load(weight).to(tl.float32)\n", "ragged", "requested to read"),
    Mutant("gated_mlp", "wrong operand", "tl.dot(tile, w_up, up", "tl.dot(tile, w_gate, up", "half", "rms error"),
]  # fmt: skip


@pytest.mark.parametrize("mutant", MUTANTS, ids=str)
def test_planted_fault_is_found(mutant: Mutant, tmp_path: Path) -> None:
    assert mutant.symptom in found(mutant, tmp_path)
