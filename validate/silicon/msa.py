"""Block-sparse attention of MiniMax-M3, whole blocks of one rank by ``BlockSparseAttention``: projections, indexer, core.

``num_heads`` are a rank's: 16 of them share a key-value head and an index head, of which a rank has at least one. ``step``
is the history. The rows stand under DSA. The tables of TensorRT-LLM are not read (``tables.toml`` says why).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from roofline.accelerator import load_accelerator
from roofline.components.block_sparse import BlockSparseAttention
from roofline.expected.arithmetic import ceil
from roofline.expected.latent import HEAD_ROWS
from roofline.expected.module import SPARSE_DECODE, SPARSE_PREFILL, quantised
from roofline.validate.silicon.attention import KV, SHORT
from roofline.validate.silicon.blocks import WEIGHTS, scatter_block
from roofline.validate.silicon.frame import Frame, Numbers, Scatter, make, structures
from roofline.validate.silicon.source import Table, tables
from roofline.validate.silicon.sparse import eager_decode
from roofline.work import Work

MINIMAX_M3: dict[str, Any] = {
    "D": 6144, "H": 128, "mask": "blocks", "size": (128, 16), "qk_norm": "head", "rotary": 64, "index_dim": 128,
    "index_rotary": 64,
}  # fmt: skip
HEADS_PER_GROUP = 16
SCORE_ROWS = 64
"""Queries of one tile of scores: its CTA walks through the whole history, alone, however few tiles there are."""
GRAPHED = {"vllm": True, "sglang": False}
"""Framework -> whether a prefill is replayed as a graph; the host sets the pace elsewhere. Others are not read."""


def frames(gpu: str) -> Iterator[Frame]:
    """One frame per framework, formats and phase."""
    for file, decode in (("msa_generation_module_perf", True), ("msa_context_module_perf", False)):
        for table in tables(gpu, "msa", file):
            if table.framework in GRAPHED:
                for (gemm, kv), rows in table.rows.groupby(["gemm_type", "kv_cache_dtype"], sort=True):
                    yield _module(table, rows.reset_index(drop=True), str(gemm), str(kv), decode)


def block(heads: int, gemm: str, kv: str) -> BlockSparseAttention:
    """The whole block of one rank."""
    groups = max(heads // HEADS_PER_GROUP, 1)
    return BlockSparseAttention(**MINIMAX_M3, N=heads, K=groups, index_heads=groups, kv=KV[kv], weight=WEIGHTS[gemm])


def padding(work: Work, groups: int, sms: float) -> Any:
    """Work of the tiles of a prefill's scores, in whole waves of CTAs, over the work that queries ask for."""
    tiles = ceil(work.T / SCORE_ROWS)
    ctas = work.B * groups * tiles
    return tiles * SCORE_ROWS / work.T * ceil(ctas / sms) * sms / ctas


def _module(table: Table, rows: Any, gemm: str, kv: str, decode: bool) -> Frame:
    """One family for all formats of a framework. Tiles hold the heads of a group and nothing else: no row of them is empty."""
    scatter, numbers = Scatter(len(rows)), Numbers(rows)
    units: dict[str, str] = {}
    chip = load_accelerator(table.gpu)
    slower, sms = float(chip.rate("fp8") / chip.rate("bf16")), float(chip.chip["sm_count"].value)
    for (heads,), index in structures(rows, ["num_heads"]):
        part = numbers.at(index)
        work = Work(part["batch_size"], part["isl"], part["step"])
        whole = block(heads, gemm, kv)
        _, units = scatter_block(scatter, index, whole.parts, work)
        walked = slower if decode else slower * padding(work, whole.K, sms)
        for name, value in {
            "index.flops": walked * scatter.columns["index.flops"][index], "core.heads": HEAD_ROWS,
            "core.sequences": work.B * work.T * whole.K,
            "eager": eager_decode(table.framework, work.B) if decode else float(not GRAPHED[table.framework]),
        }.items():  # fmt: skip
            scatter.put("columns", name, index, value)
    phase = "decode" if decode else "prefill"
    return make(
        table, rows, "dsa", f"{SHORT.get(gemm, gemm)}-kv-{SHORT[kv]}", f"msa {phase}", scatter.cost,
        quantised(SPARSE_DECODE if decode else SPARSE_PREFILL), {**scatter.columns, **units}, ["num_heads"], None, "msa",
    )  # fmt: skip
