"""The kernels of sparse blocks one by one: scores of the indexer, selection, attention over what was selected.

By the parts of the same ``DSA`` and ``CompressedAttention`` as whole blocks. Selections of fewer entries than the limit
are tables' zeros, which are no rows; of the two cases of scores only the one in which they differ is taken.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from roofline.accelerator import load_accelerator
from roofline.components.base import Component
from roofline.components.latent import LatentAttention
from roofline.components.sparse import INDEX_BYTES, IndexScores, TopK
from roofline.expected.arithmetic import ceil, floor, maximum, minimum
from roofline.expected.waves import WAVES
from roofline.validate.silicon import compressed, sparse
from roofline.validate.silicon.attention import SHORT
from roofline.validate.silicon.frame import Frame, Numbers, Scatter, make, structures
from roofline.validate.silicon.source import Table, tables
from roofline.work import Work

HEAD_ROWS, ENTRIES = 64, 64
"""Query heads and cached entries of one matrix tile."""
SCORE_ROWS, SCORED = 128, 256
"""Rows (heads of successive queries) of one tile of scores; entries of one where they lie in pages."""
LISTED = 1024
"""Queries that a CTA of paged scores looks through, for each that it works on, in the time of one round."""
POOLED = 128
"""Compressed entries are listed in multiples of this many."""
FAMILIES = {
    "fp8_paged_mqa_logits": "paged_logits", "fp8_fp4_paged_mqa_logits": "paged_logits", "fp8_mqa_logits": "logits",
    "topk_transform_v1": "topk", "topk_transform_v2": "topk", "fast_topk_transform_fused": "topk",
    "flash_mla_sparse_fwd": "flash_mla",
}  # fmt: skip
"""Kernel -> whose constants it shares."""
WORST = "flat"
"""Scores that are all alike: a benchmark's worst case of a selection, which no model produces."""
SCORES, SELECT, CORE = IndexScores, TopK, LatentAttention
PARTS: dict[str, tuple[str, int, type[Component]]] = {
    "glm5_mqa_logits_module_perf": ("dsa", 1, SCORES),
    "glm5_topk_module_perf": ("dsa", 1, SELECT),
    "glm5_dsa_attn_module_perf": ("dsa", 1, CORE),
    "dsv4_paged_mqa_logits_module_perf": ("csa", 4, SCORES),
    "dsv4_csa_topk_calib_perf": ("csa", 4, SELECT),
    "dsv4_hca_attn_module_perf": ("hca", 128, CORE),
}
"""File -> class, tokens per entry, and the part that it measures."""


def frames(gpu: str) -> Iterator[Frame]:
    """One frame per framework, kernel and case of scores."""
    for file, (cls, every, kind) in PARTS.items():
        for table in tables(gpu, "sparse_attention", file):
            rows = table.rows
            if "score_mode" in rows:
                rows = rows[~rows["score_mode"].str.contains(WORST)]
            for (kernel, one), part in rows.groupby(["kernel_source", rows["isl"] == 1], sort=True):
                phase = "decode" if one else "prefill"
                name = f"{str(kernel).rpartition('.')[2]} {phase}"
                yield _part(table, part.reset_index(drop=True), cls, every, kind, name)


def _block(cls: str, every: int, architecture: str, model: str, heads: int, kv: str) -> Any:
    if cls == "dsa":
        return sparse.block(architecture, heads, "bfloat16", "bfloat16", "")
    return compressed.block(model, heads, "bfloat16", kv, every)


def _part(table: Table, rows: Any, cls: str, every: int, kind: type[Component], kernel: str) -> Frame:
    scatter, numbers = Scatter(len(rows)), Numbers(rows)
    sms = float(load_accelerator(table.gpu).chip["sm_count"].value)
    unit = "bf16"
    for (architecture, model, heads, kv), index in structures(rows, ["architecture", "model", "num_heads", "kv_cache_dtype"]):
        part = numbers.at(index)
        work = Work(part["batch_size"], part["isl"], part["step"])
        component = next(one for one in _block(cls, every, architecture, model, heads, kv).parts if isinstance(one, kind))
        cost = component.cost(work)
        scatter.add(index, cost)
        if kind is SCORES:
            unit = component.index.unit  # type: ignore[attr-defined]
        for name, value in _pieces(kind, component, kernel, work, cost, sms).items():
            scatter.put("columns", name, index, value)
    return make(
        table, rows, cls, SHORT.get(str(rows["kv_cache_dtype"].iloc[0]), "fp8"), kernel, scatter.cost, WAVES,
        {**scatter.columns, "unit": unit}, ["isl"], "model", FAMILIES.get(kernel.rpartition(" ")[0], kernel),
    )  # fmt: skip


def _pieces(kind: type[Component], component: Any, kernel: str, work: Work, cost: Any, sms: float) -> dict[str, Any]:
    """How the kernel cuts its work into CTAs."""
    if kind is SELECT:
        active = minimum(work.T, maximum(work.S + work.T - component.chosen.every * component.chosen.limit, 0.0))
        seen = component.seen.pairs(active, work.S + work.T - active) / active
        return {"ctas": work.B * active, "cta.flops": 0.0, "cta.bytes": INDEX_BYTES * seen}
    queries = work.B * work.T
    if kind is SCORES and "paged" in kernel:
        seen = component.reach.pairs(work.T, work.S) / work.T
        blocks = maximum(minimum(ceil(seen / SCORED), seen / SCORED + 0.5), 1.0)
        flops = 2.0 * component.heads * component.dim * SCORED * blocks * queries / sms
        return {"ctas": sms, "cta.flops": flops, "cta.bytes": 0.0, "rounds": 1.0 + queries / sms * queries / LISTED}
    if kind is SCORES:
        ctas = ceil(queries * component.heads / SCORE_ROWS)
        return {"ctas": ctas, "cta.flops": cost.matrix_flops / ctas, "cta.bytes": cost.read["index"] / work.B}
    tiles = queries * ceil(component.N / HEAD_ROWS)
    decode = kernel.endswith(" decode")
    if "sparse_fwd" in kernel:
        blocks, splits = sparse.SELECTED / ENTRIES, 1.0
    else:
        window, pooled = component.reaches
        listed = POOLED * ceil(pooled.entries(work.S + work.T) / POOLED)
        blocks = ceil(minimum(work.S + work.T, window.limit) / ENTRIES) + listed / ENTRIES
        splits = minimum(maximum(floor(sms / tiles), 1.0), blocks) if decode else 1.0
    flops = 2.0 * HEAD_ROWS * (component.H + component.value_dim) * ENTRIES * ceil(blocks / splits)
    return {"ctas": tiles * splits, "cta.flops": flops, "cta.bytes": 0.0}
