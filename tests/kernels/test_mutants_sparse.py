# ruff: noqa: E501
"""Planted faults in the kernels of sparse and compressed attention, each found for its own reason."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("triton")

from roofline.validate.planted import Mutant, found

MUTANTS = [
    Mutant("dsa_indexer", "wrong page", "entry % PAGE * D\n", "(entry + 1) % PAGE * D\n", "entries", "rms error"),
    Mutant("dsa_indexer", "scale of another key", "PAGE * D // 4 + entry % PAGE", "PAGE * D // 4 + 0 * entry", "entries", "keys: "),
    Mutant("dsa_indexer", "no ReLU", "tl.maximum(score, 0.0)", "score", "entries", "rms error"),
    Mutant("dsa_indexer", "future entry", "+ query % T + 1) // EVERY", "+ query % T + 2) // EVERY", "fp4-ragged", "dsa_indexer_kernel.keys: "),
    Mutant("dsa_indexer", "swapped nibbles", "tl.dot(q_odd, tl.trans(odd), tl.dot(q_even, tl.trans(even)))", "tl.dot(q_odd, tl.trans(even), tl.dot(q_even, tl.trans(odd)))", "fp4-half", "rms error"),
    Mutant("dsa_indexer", "wrong block's scale", "scale_at[:, None] + group[None, :]", "scale_at[:, None] + 0 * group[None, :]", "fp4", "distinct read"),
    Mutant("dsa_indexer", "missing write", "total, mask=inside)", "total, mask=inside & (entry > 0))", "entries", "NaN"),
    Mutant("topk_select", "tie too many", "tied + tl.cumsum(ties, 0) <= wanted", "tied + tl.cumsum(ties, 0) <= wanted + 1", "ties", "OutOfBounds"),
    Mutant("topk_select", "zeros of two signs", "value = tl.where(value == 0.0, 0.0, value)", "value = value + 0.0 * tl.abs(value) * -1.0", "all-equal", "integers differ"),
    Mutant("topk_select", "digit skipped", "next_digit(row, count, found, wanted, 8, BLOCK)", "next_digit(row, count, found, wanted, 16, BLOCK)", "ragged", "integers differ"),
    Mutant("topk_select", "extra load", "    wanted = tl.minimum(K, count)\n", "    wanted = tl.minimum(K, count)\n    tl.load(row)\n", "chosen", "topk_select_kernel.scores: "),
    Mutant("sparse_mla_decode", "wrong page", "slot = page * PAGE + position % PAGE", "slot = page * PAGE + (position + 1) % PAGE", "apart", "rms error"),
    Mutant("sparse_mla_decode", "selection of another token", "query.to(tl.int64) * K + place", "sequence.to(tl.int64) * T * K + place", "apart", "sparse_mla_decode_kernel.selected: "),
    Mutant("sparse_mla_decode", "entry too many", "count = tl.maximum(0, tl.minimum(K, ", "count = tl.maximum(0, tl.minimum(K + 1, ", "apart", "OutOfBounds"),
    Mutant("sparse_mla_decode", "missing write", "tl.store(weights + at * SPLITS + part, weighed, mask=real)", "tl.store(weights + at * SPLITS + part, weighed, mask=real & (part > 0))", "single", "NaN", "parts"),
    Mutant("sparse_mla_decode", "wrong mask", "inside, inside[None, :], scale", "inside, (place >= 0)[None, :], scale", "single", "rms error"),
    Mutant("csa_compress", "state not written", "((before + token) % POOLED)[:, None]", "((before + token + 1) % POOLED)[:, None]", "chunk", "state: "),
    Mutant("csa_compress", "series swapped", "series = row // EVERY * DIM", "series = (SERIES - 1 - row // EVERY) * DIM", "chunk", "rms error"),
    Mutant("csa_compress", "zeros before the first block", "gate = tl.where(real[:, None], gate", "gate = tl.where(row[:, None] < POOLED, gate", "prefill", "rms error"),
    Mutant("csa_compress", "wrong position", "angles, block * EVERY, epsilon", "angles, block * EVERY + EVERY - 1, epsilon", "prefill", "rms error"),
    Mutant("csa_compress", "state read too often", "part + SERIES, (before", "part + SERIES + 1, (before", "single", "compress_kernel."),
    Mutant("csa_compress", "entry not written", "block % PAGE) * DIM + column\n            tl.store(goal, entry", "(block + 1) % PAGE) * DIM + column\n            tl.store(goal, entry", "single", "entries: NaN"),
    Mutant("csa_compress", "scale of another entry", "PAGE * DIM // 4 + block % PAGE, factor", "PAGE * DIM // 4 + (block + 1) % PAGE, factor", "index-keys", "entries: "),
    Mutant("compressed_attention", "window too wide", "near = tl.minimum(visible, W)", "near = tl.minimum(visible, W + 1)", "single", "compressed_attention_kernel.window: "),
    Mutant("compressed_attention", "open block seen", "tl.minimum(K, visible // EVERY)", "tl.minimum(K, (visible + EVERY - 1) // EVERY)", "single", "compressed_attention_kernel."),
    Mutant("compressed_attention", "wrong page", "row + entry // PAGE", "row + entry // (PAGE + 1)", "single", "rms error"),
    Mutant("compressed_attention", "lost sink", "total = tl.full((ROWS,), 1.0, tl.float32)", "total = tl.zeros((ROWS,), tl.float32)", "single", "rms error", "parts"),
    Mutant("compressed_attention", "sink in every part", "if part == 0:", "if part >= 0:", "single", "sinks: ", "parts"),
    Mutant("compressed_attention", "wrong scale", "(8 * group)[None, :]", "(0 * group)[None, :]", "packed", "rms error"),
    Mutant("compressed_attention", "missing write", "at, part, real, H, HP, SPLITS)", "at, part, real & (head > 0), H, HP, SPLITS)", "no-window", "NaN"),
    Mutant("hyper_connections", "mix transposed", "mine + N + old * N + stream", "mine + N + stream * N + old", "single", "streams: rms error"),
    Mutant("hyper_connections", "one iteration less", "range(ITERATIONS - 1)", "range(ITERATIONS - 2)", "single", "coefficients: rms error"),
    Mutant("hyper_connections", "norm over padding", "/ (N * D) + epsilon", "/ (NP * DP) + epsilon", "single", "coefficients: rms error"),
    Mutant("hyper_connections", "padded stream mixed", "mix = tl.where(both, mix, float(\"-inf\"))", "mix = tl.where(both, mix, 0.0)", "single", "coefficients: rms error"),
    Mutant("hyper_connections", "part skipped", "part * share + share, K)", "part * share + share - BK, K)", "half", "hyper_proj_kernel."),
    Mutant("hyper_connections", "missing write", "tl.store(goal + stream, spread, mask=real)", "tl.store(goal + stream, spread, mask=real & (stream > 0))", "half", "coefficients: NaN"),
]  # fmt: skip


@pytest.mark.parametrize("mutant", MUTANTS, ids=str)
def test_planted_fault_is_found(mutant: Mutant, tmp_path: Path) -> None:
    assert mutant.symptom in found(mutant, tmp_path)
