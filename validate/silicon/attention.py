"""Attention cores with their cache write, by ``Attention`` and ``CacheWrite``: decode, prefill, and encoders without a mask.

Head counts are per rank; ``step`` is the history behind the new tokens; window 0 means none. The timed region holds the
write of new keys and values. SGLang's head width of 192 goes with values of 128, which its table does not record; such a
decode takes one launch more than others do at any size, as of a second kernel that writes the narrower values.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from roofline.components.attention import Attention, CacheWrite
from roofline.components.base import Component
from roofline.cost import Cost
from roofline.expected.attention import DECODE, PREFILL
from roofline.formats import BF16, FP8
from roofline.validate.silicon.frame import Frame, Numbers, Scatter, make, structures
from roofline.validate.silicon.source import Table, tables
from roofline.work import Work

STRUCTURE = ["num_heads", "num_key_value_heads", "head_dim", "window_size"]
KV = {"bfloat16": BF16, "float16": BF16, "fp8": FP8, "fp8_e4m3": FP8}
SHORT = {"bfloat16": "bf16", "float16": "bf16", "fp8": "fp8"}
UNPACKED = ("trtllm",)
"""Frameworks whose prefill kernels do not pack the query heads of a group into one tile."""


def value_width(framework: str, head_dim: int) -> int:
    """Elements of a value head."""
    return 128 if framework == "sglang" and head_dim == 192 else head_dim


def parts(framework: str, kv: str, heads: int, groups: int, head_dim: int, window: int) -> tuple[Component, Component]:
    """Attention core and cache write of one structure."""
    shape: dict[str, Any] = {"N": heads, "K": groups, "H": head_dim, "value_dim": value_width(framework, head_dim), "kv": KV[kv]}
    masked = {"mask": "window", "size": window} if window else {"mask": "causal"}
    return Attention(**shape, **masked), CacheWrite(**shape)


def on_unit(cost: Cost, unit: str) -> Cost:
    """The Cost with its 16-bit matrix FLOPs on another unit: where queries and keys are multiplied in 8 bits."""
    flops = dict(cost.flops)
    if unit != "bf16" and "bf16" in flops:
        flops[unit] = flops.pop("bf16")
    return Cost(flops, dict(cost.read), dict(cost.write), cost.launches)


def family(table: Table, rows: Any, cls: str, kernel: str, attn: str, kv: str) -> Frame:
    """The frame of one kernel and its formats."""
    scatter, numbers = Scatter(len(rows)), Numbers(rows)
    for (heads, groups, head_dim, window), index in structures(rows, STRUCTURE):
        part = numbers.at(index)
        batch, new, behind = part["batch_size"], part["isl"], part["step"]
        work = Work(batch, new, behind)
        core, write = parts(table.framework, kv, heads, groups, head_dim, window)
        writing = write.cost(work)
        scatter.add(index, on_unit(core.cost(work) + writing, "fp8" if attn == "fp8" else "bf16"))
        decode = cls == "attention_decode"
        packs = decode or table.framework not in UNPACKED
        narrow = value_width(table.framework, head_dim)
        keys = behind + new
        for name, value in {
            "sequences": batch, "tokens": new, "behind": behind, "key_bytes": float(KV[kv].bytes_per_element),
            "width": (head_dim + narrow) / 2 if decode else head_dim, "launches": 2.0 if narrow < head_dim else 1.0,
            "groups": groups if packs else heads, "heads_per_group": heads / groups if packs else 1.0,
            "value_width": narrow, "write_bytes": writing.bytes,
            "keys": keys.clip(max=window) if window else keys, "window": window or 1e9, "windowed": 1.0 if window else 0.0,
        }.items():  # fmt: skip
            scatter.put("columns", name, index, value)
    columns = {**scatter.columns, "unit": "fp8" if attn == "fp8" else "bf16"}
    model = DECODE if cls == "attention_decode" else PREFILL
    name = f"{SHORT[attn]}-kv-{SHORT[kv]}"
    return make(table, rows, cls, name, kernel, scatter.cost, model, columns, STRUCTURE)


def frames(gpu: str) -> Iterator[Frame]:
    """One frame per framework, kernel and formats."""
    for cls, file in (("attention_decode", "generation_attention_perf"), ("attention_prefill", "context_attention_perf")):
        for table in tables(gpu, "attention", file):
            by = ["kernel_source", "attn_dtype", "kv_cache_dtype"]
            for (kernel, attn, kv), rows in _with_window(table.rows).groupby(by, sort=True):
                yield family(table, rows.reset_index(drop=True), cls, kernel, attn, kv)
    yield from _encoders(gpu)


def _with_window(rows: Any) -> Any:
    """Rows with a window: older tables measured without and have no such column."""
    return rows if "window_size" in rows else rows.assign(window_size=0)


def _encoders(gpu: str) -> Iterator[Frame]:
    for table in tables(gpu, "encoder_attention", "encoder_attention_perf"):
        for (kernel, attn), rows in table.rows.groupby(["kernel_source", "attn_dtype"], sort=True):
            rows = rows.reset_index(drop=True)
            scatter, numbers = Scatter(len(rows)), Numbers(rows)
            for (heads, head_dim), index in structures(rows, ["num_heads", "head_dim"]):
                part = numbers.at(index)
                batch, new = part["batch_size"], part["isl"]
                core = Attention(heads, heads, head_dim, mask="full", cached=False)
                scatter.add(index, core.cost(Work(batch, new)))
                for name, value in {
                    "sequences": batch, "tokens": new, "width": head_dim, "value_width": head_dim, "groups": heads,
                }.items():  # fmt: skip
                    scatter.put("columns", name, index, value)
            fixed = {"behind": 0.0, "heads_per_group": 1.0, "window": 0.0, "write_bytes": 0.0, "unit": "bf16"}
            yield make(
                table, rows, "attention_prefill", f"{SHORT[attn]}-encoder", kernel, scatter.cost, PREFILL,
                {**scatter.columns, **fixed}, ["num_heads", "head_dim"],
                None, f"{kernel} encoder" if table.framework in UNPACKED else "=fa3 encoder",
            )  # fmt: skip
