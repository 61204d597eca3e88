"""DeepSeek-V4's compressed attention blocks (CSA, HCA), by ``CompressedAttention`` of one rank. ``step`` is the history."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from roofline.components.compressed import CompressedAttention
from roofline.expected.module import COMPRESSED_DECODE, COMPRESSED_PREFILL, quantised
from roofline.formats import FORMATS
from roofline.validate.silicon.attention import KV, SHORT
from roofline.validate.silicon.blocks import WEIGHTS, scatter_block
from roofline.validate.silicon.frame import Frame, Numbers, Scatter, make, structures
from roofline.validate.silicon.source import Table, tables
from roofline.work import Work

FLASH: dict[str, Any] = {"D": 4096, "Q": 1024, "k": 512}
PRO: dict[str, Any] = {"D": 7168, "Q": 1536, "k": 1024}
COMMON: dict[str, Any] = {"H": 512, "P": 64, "rank": 1024, "window": 128}
HEADS_PER_GROUP = 8
INDEXER: dict[str, Any] = {"overlap": True, "index_heads": 64, "index_dim": 128, "index": FORMATS["fp8-token"]}
CLASSES = {4: "csa", 128: "hca"}


def frames(gpu: str) -> Iterator[Frame]:
    """One frame per framework, weight format and phase of each of the two."""
    for every, cls in CLASSES.items():
        for phase, name in (("decode", "generation"), ("prefill", "context")):
            for table in tables(gpu, "sparse_attention", f"dsv4_{cls}_{name}_module_perf"):
                for gemm, rows in table.rows.groupby("gemm_type", sort=True):
                    yield _module(table, rows.reset_index(drop=True), str(gemm), every, phase)


def block(model: str, heads: int, gemm: str, kv: str, every: int) -> CompressedAttention:
    """The whole block of one rank."""
    size = dict(FLASH if "Flash" in model else PRO)
    if every != 4:
        del size["k"]
    return CompressedAttention(
        **size, **COMMON, N=heads, groups=max(heads // HEADS_PER_GROUP, 1), every=every, kv=KV[kv], weight=WEIGHTS[gemm],
        **(INDEXER if every == 4 else {}),
    )  # fmt: skip


def _module(table: Table, rows: Any, gemm: str, every: int, phase: str) -> Frame:
    scatter, numbers = Scatter(len(rows)), Numbers(rows)
    units: dict[str, str] = {}
    for (model, heads, kv), index in structures(rows, ["model", "num_heads", "kv_cache_dtype"]):
        part = numbers.at(index)
        work = Work(part["batch_size"], part["isl"], part["step"])
        whole = block(model, heads, gemm, kv, every)
        _, units = scatter_block(scatter, index, whole.parts, work)
        selects = 1.0 * ((work.S + work.T) / every > whole.k) if whole.k is not None else 0.0
        for name, value in {
            "selects": selects,
            "core.heads": heads,
            "core.sequences": work.B * work.T,
            "core.entries": 0,
        }.items():
            scatter.put("columns", name, index, value)
    model_of_time = quantised(COMPRESSED_DECODE if phase == "decode" else COMPRESSED_PREFILL)
    return make(
        table, rows, CLASSES[every], SHORT.get(gemm, gemm), phase, scatter.cost, model_of_time,
        {**scatter.columns, **units}, ["model", "num_heads"], "model", phase,
    )  # fmt: skip
