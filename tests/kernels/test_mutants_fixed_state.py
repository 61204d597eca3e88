# ruff: noqa: E501
"""Planted faults in the kernels with a state of fixed size: each proof must turn red for the stated reason."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("triton")

from roofline.kernels.registry import load
from roofline.validate.planted import Mutant, found, mutate
from roofline.validate.prove import prove

MUTANTS = [
    Mutant("causal_conv1d", "wrong mask", "inside & (seen[:, None] >= 0)).to", "inside & (seen[:, None] > 0)).to", "ragged", "causal_conv1d_kernel.x: "),
    Mutant("causal_conv1d", "future seen", "seen = row - (TAPS - 1) + tap", "seen = row - (TAPS - 2) + tap", "chosen", "OutOfBounds"),
    Mutant("causal_conv1d", "state not moved on", "    if tile == 0:\n", "    if tile < 0:\n", "update", "causal_conv1d_kernel.state: 0 B stored"),
    Mutant("causal_conv1d", "state moved on twice", "    if tile == 0:\n", "    if tile <= 1:\n", "ragged", "B stored"),
    Mutant("causal_conv1d", "wrong slot", "tl.load(slots + sequence).to(tl.int64)", "(tl.load(slots + sequence).to(tl.int64) * 0 + sequence)", "ragged", "state: rms error"),
    Mutant("causal_conv1d", "gate not kept", "new = gated(x, before, first", "new = gated(x, None, first", "short-gated", "state: rms error"),
    Mutant("causal_conv1d", "missing bias", "    if bias is not None:\n", "    if bias is None:\n", "ragged", "causal_conv1d_kernel.bias: 0 B"),
    Mutant("mamba2_step", "wrong group", "group = head // (H // G)", "group = head % G", "ragged", "rms error"),
    Mutant("mamba2_step", "missing write", "    tl.store(kept, carried.to(state.dtype.element_ty), mask=inside)\n", "", "decode", "mamba2_step_kernel.state: 0 B stored"),
    Mutant("mamba2_step", "skip not added", " + skip * value", "", "ragged", "out: rms error"),
    Mutant("mamba2_step", "extra load", "    for token in range(T):\n", "    tl.load(x)\n    for token in range(T):\n", "single", "mamba2_step_kernel.x: "),
    Mutant("mamba2_step", "wrong slot", "(slot.to(tl.int64) * H + head)", "((slot.to(tl.int64) + 1) % 4 * H + head)", "ragged", "rms error"),
    Mutant("mamba1_step", "wrong mask", "(column[None, :] < J)", "(column[None, :] < J - 1)", "ragged", "mamba1_step_kernel.state: "),
    Mutant("mamba1_step", "ungated", "result * gate / (1.0", "result / (1.0", "half", "out: rms error"),
    Mutant("mamba2_chunk", "decay of a token itself", "row[:, None] >= token[None, :], fading", "row[:, None] > token[None, :], fading", "half", "out: rms error"),
    Mutant("mamba2_chunk", "gap between blocks forgotten", "gap + tl.max(until, 0))", "tl.max(until, 0))", "half", "out: rms error"),
    Mutant("mamba2_chunk", "chunk's end ignored", "end = tl.minimum(chunk * C + C, T)\n    rate", "end = T\n    rate", "half", "chunk_states_kernel.x: "),
    Mutant("mamba2_chunk", "state of the next chunk", "        tl.store(entering + place * SIZE + element, carried.to(entering.dtype.element_ty), mask=inside)\n        carried = carried * tl.exp(tl.load(decays + place)) + tl.load(added + place * SIZE + element, mask=inside, other=0.0)\n",
           "        carried = carried * tl.exp(tl.load(decays + place)) + tl.load(added + place * SIZE + element, mask=inside, other=0.0)\n        tl.store(entering + place * SIZE + element, carried.to(entering.dtype.element_ty), mask=inside)\n", "half", "out: rms error"),
    Mutant("mamba2_chunk", "missing write", "    if block == 0:\n        tl.store(decays + place, whole)\n", "", "half", "chunk_states_kernel.decays: 0 B stored"),
    Mutant("mamba2_chunk", "racing write", "    if block == 0:\n        tl.store(decays", "    if block >= 0:\n        tl.store(decays", "ragged", "chunk_states_kernel.decays: "),
    Mutant("mamba2_chunk", "blocks read again", "for back in range(tile + 1)", "for back in range(tiles)", "half", "OutOfBounds"),
    Mutant("gated_delta_step", "wrong group", "shared = head // (H // HK) * K + row", "shared = head % HK * K + row", "ragged", "rms error"),
    Mutant("gated_delta_step", "recall before decay", "tl.sum(carried * key[:, None], 0))", "tl.sum(tl.load(kept, mask=inside, other=0.0).to(tl.float32) * key[:, None], 0))", "decode", "rms error"),
    Mutant("gated_delta_step", "missing write", "mask=column < V)\n    tl.store(kept", "mask=column < V - 1)\n    tl.store(kept", "single", "out: NaN"),
    Mutant("gated_delta_chunk", "diagonal in the system", "tl.where(index[:, None] > index[None, :], system", "tl.where(index[:, None] >= index[None, :], system", "one-block", "rms error"),
    Mutant("gated_delta_chunk", "row forgotten", "for step in range(1, BASE)", "for step in range(1, BASE - 1)", "one-block", "rms error"),
    Mutant("gated_delta_chunk", "doubling forgotten", "if BLOCKS > 2:", "if BLOCKS > 4:", "half", "dot FLOPs"),
    Mutant("gated_delta_chunk", "wrong mask", "live = first + index < T", "live = first + index <= T", "chosen", "OutOfBounds"),
    Mutant("gated_delta_chunk", "missing write", "    tl.store(kept, carried.to(state.dtype.element_ty), mask=inside)\n", "", "one-block", "walk_kernel.state: 0 B stored"),
    Mutant("gated_delta_chunk", "changes undone", "- tl.dot(keys, narrow", "+ tl.dot(keys, narrow", "one-block", "rms error"),
    Mutant("rwkv_step", "removal undone", "- recalled[:, None] * (strength", "+ recalled[:, None] * (strength", "ragged", "rms error"),
    Mutant("rwkv_step", "bonus kept", "top = tl.maximum(largest - rate, key)", "top = tl.maximum(largest, key)", "version-4", "state: rms error"),
    Mutant("rwkv_step", "missing write", "    tl.store(kept + width, denominator", "    tl.store(kept, denominator", "version-4-single", "rwkv4_step_kernel.state: "),
]  # fmt: skip


@pytest.mark.parametrize("mutant", MUTANTS, ids=str)
def test_planted_fault_is_found(mutant: Mutant, tmp_path: Path) -> None:
    assert mutant.symptom in found(mutant, tmp_path)


@pytest.mark.parametrize(
    ("old", "new", "symptom"),
    [
        ("dt_bias + head * K + row", "dt_bias + row", "delta_step_kernel.dt_bias: "),
        ("(rate * softplus(given + bias))[:, None]", "(rate * softplus(given + bias))[:, None] * 0.0 + 1.0", "rms error"),
    ],
)
def test_planted_fault_in_the_decay_by_channel_is_found(old: str, new: str, symptom: str, tmp_path: Path) -> None:
    spec, case = load("kda_step"), load("kda_step").cases[0]
    faulty = mutate(Mutant("gated_delta_step", "", old, new, "", ""), tmp_path)
    assert prove(spec, case).failures == ()
    assert symptom in "; ".join(prove(faulty, case).failures)
