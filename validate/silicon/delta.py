"""Gated DeltaNet and Kimi delta attention kernel by kernel, by ``DeltaRule``, ``ChunkedDeltaRule`` and ``CausalConv``.

No projections. Heads are per rank for vLLM and SGLang. The state is fp32 in vLLM and SGLang, 16 bits in TensorRT-LLM,
whose convolution rows cover the key channels only. Mamba-2's tables hold convolutions and no scan; their rows are listed
with gated DeltaNet's, whose convolution is the same kernel.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from roofline.components.base import Component
from roofline.components.chunked import ChunkedDeltaRule, Heads
from roofline.components.delta import DeltaRule
from roofline.components.recurrent import CausalConv
from roofline.cost import Cost
from roofline.expected.arithmetic import ceil
from roofline.expected.model import Model
from roofline.expected.stream import CHUNK_CHAIN, STREAM_PASS
from roofline.expected.waves import WAVES
from roofline.formats import BF16, FP32
from roofline.validate.silicon.frame import Frame, Numbers, Scatter, make, structures
from roofline.validate.silicon.source import Table, tables
from roofline.work import Work

STRUCTURE = ["num_k_heads", "head_k_dim", "num_v_heads", "head_v_dim", "d_conv"]
SOURCES = {"gated_delta": ("linear_attention", "gdn_perf"), "kda": ("kda", "kda_perf")}
CHUNK, WALK = 64, 1024
"""Tokens of one chunk of a recurrence; tokens that a CTA of TensorRT-LLM's convolution takes at a time."""
KEYS_ONLY = ("0.5.10",)
"""Versions of SGLang whose convolution rows cover the key channels only, as TensorRT-LLM's do."""


def frames(gpu: str) -> Iterator[Frame]:
    """One frame per framework, kernel and phase."""
    for table in tables(gpu, "linear_attention", "mamba2_perf"):
        for (kernel, phase), rows in table.rows.groupby(["kernel_source", "phase"], sort=True):
            yield _mamba(table, rows.reset_index(drop=True), kernel, phase)
    for cls, (operator, file) in SOURCES.items():
        for table in tables(gpu, operator, file):
            for (kernel, phase), rows in table.rows.groupby(["kernel_source", "phase"], sort=True):
                yield _family(table, rows.reset_index(drop=True), cls, kernel, phase)


def component(
    cls: str,
    framework: str,
    keys_only: bool,
    kernel: str,
    phase: str,
    k_heads: int,
    k_dim: int,
    v_heads: int,
    v_dim: int,
    taps: int,
) -> tuple[Component, Model]:  # fmt: skip
    """The component of one kernel, and its time model."""
    if "conv1d" in kernel:
        channels = k_heads * k_dim if keys_only else 2 * k_heads * k_dim + v_heads * v_dim
        by_channel = framework == "trtllm" and phase == "context"
        return CausalConv(channels, taps, False, activation=BF16, state_format=BF16), WAVES if by_channel else STREAM_PASS
    shape = Heads(v_heads, k_dim, v_dim, k_heads)
    by_channel = cls == "kda"
    state = BF16 if framework == "trtllm" else FP32
    rule = DeltaRule(shape, k_dim if by_channel else 1, 2 * v_heads, BF16, state)
    if phase == "context":
        return ChunkedDeltaRule(rule, shape, CHUNK, by_channel=by_channel), CHUNK_CHAIN
    return rule, STREAM_PASS


def _family(table: Table, rows: Any, cls: str, kernel: str, phase: str) -> Frame:
    scatter, numbers, model = Scatter(len(rows)), Numbers(rows), STREAM_PASS
    keys_only = table.framework == "trtllm" or table.version in KEYS_ONLY
    for values, index in structures(rows, STRUCTURE):
        part = numbers.at(index)
        new = part["seq_len"] if phase != "generation" else 1.0 + 0.0 * part["seq_len"]
        work = Work(part["batch_size"], new)
        built, model = component(cls, table.framework, keys_only, kernel, phase, *values)
        cost = built.cost(work)
        if phase == "verify":
            cost = cost + _kept_states(built, work)
        scatter.add(index, cost)
        columns = {"flops": cost.matrix_flops, "tokens": new, "chains": work.B * values[2], "touched": _touched(cost)}
        if isinstance(built, CausalConv):
            columns.update(_channels(built.channels, work))
        for name, value in columns.items():
            scatter.put("columns", name, index, value)
    llm = "model_name" if "model_name" in rows else None
    shared = table.framework != "trtllm" and (cls == "gated_delta" or phase == "generation")
    family = f"={kernel}" if shared else kernel
    columns = {**scatter.columns, "unit": "bf16"}
    return make(table, rows, cls, "bf16", f"{kernel}/{phase}", scatter.cost, model, columns, STRUCTURE, llm, family)


def _mamba(table: Table, rows: Any, kernel: str, phase: str) -> Frame:
    """The convolution over inputs and both projections of the state of each group."""
    scatter, numbers = Scatter(len(rows)), Numbers(rows)
    columns = ["nheads", "head_dim", "n_groups", "d_state", "d_conv"]
    for (heads, dim, groups, state, taps), index in structures(rows, columns):
        part = numbers.at(index)
        channels = heads * dim + 2 * groups * state
        work = Work(part["batch_size"], part["seq_len"] if phase == "context" else 1.0 + 0.0 * part["seq_len"])
        cost = CausalConv(channels, taps, False, activation=BF16, state_format=BF16).cost(work)
        scatter.add(index, cost)
        for name, value in {**_channels(channels, work), "touched": _touched(cost)}.items():
            scatter.put("columns", name, index, value)
    model = WAVES if phase == "context" else STREAM_PASS
    return make(
        table, rows, "gated_delta", "bf16", f"mamba2 {kernel}/{phase}", scatter.cost, model, {**scatter.columns, "unit": "bf16"},
        columns, "model_name", kernel,
    )  # fmt: skip


def _touched(cost: Cost) -> Any:
    """Distinct bytes: a state is written where it was read."""
    return cost.bytes - cost.read["state"]


def _channels(channels: int, work: Work) -> dict[str, Any]:
    """A CTA per sequence and channel, which walks along the tokens."""
    return {"ctas": work.B * channels, "cta.flops": 0.0, "cta.bytes": 0.0, "rounds": ceil(work.T / WALK)}


def _kept_states(rule: Component, work: Work) -> Any:
    """Verification keeps the state behind every draft token, so that a rejected one can be undone."""
    per_sequence = sum(piece.bytes(0) for piece in rule.state())
    return Cost({}, {}, {"state": per_sequence * (work.B * (work.T - 1))}, 0)
