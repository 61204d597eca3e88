"""Sparse latent attention (DSA) blocks, by ``DSA``: projections, indexer, selection, core over the selected entries.

Head counts are per rank. vLLM and TensorRT-LLM count the new token in ``step`` of a decode row, SGLang does not.
Kernels named skip_indexer reuse another layer's selection; dense_mha runs the expanded form without a selection.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from roofline.components.mla import MLA
from roofline.components.sparse import DSA
from roofline.expected.module import MODULE_PREFILL, SPARSE_DECODE, SPARSE_PREFILL, quantised
from roofline.formats import BF16
from roofline.validate.silicon.attention import KV, SHORT
from roofline.validate.silicon.blocks import WEIGHTS, scatter_block
from roofline.validate.silicon.frame import Frame, Numbers, Scatter, make, structures
from roofline.validate.silicon.source import Table, tables
from roofline.work import Work

SHAPES: dict[str, dict[str, Any]] = {
    "DeepseekV32ForCausalLM": {"D": 7168, "Q": 1536, "R": 512, "P": 64, "H": 128, "value_dim": 128, "index_heads": 64},
    "GlmMoeDsaForCausalLM": {"D": 6144, "Q": 2048, "R": 512, "P": 64, "H": 192, "value_dim": 256, "index_heads": 32},
}
SELECTED = 2048
MOST_GRAPHED = 256
STEP_COUNTS_NEW = ("vllm", "trtllm")
GRAPHED = ("trtllm",)
"""Frameworks that replay a prefill as a graph: elsewhere the host sets the pace, and needs longer for 8-bit projections."""
APART = ("vllm",)
"""Frameworks whose prefills have constants for each weight format: shared ones err 6.7 % instead of 5.2 with 16-bit caches."""


def frames(gpu: str) -> Iterator[Frame]:
    """One frame per framework, kernel, formats and phase."""
    for file, decode in (("dsa_generation_module_perf", True), ("dsa_context_module_perf", False)):
        for table in tables(gpu, "sparse_attention", file):
            by = ["kernel_source", "gemm_type", "kv_cache_dtype"]
            for (kernel, gemm, kv), rows in table.rows.groupby(by, sort=True):
                yield _module(table, rows.reset_index(drop=True), kernel, gemm, kv, decode)


def pads_selection(framework: str, kernel: str, kv: str) -> bool:
    """Whether a core works through as many entries as a selection holds, however few there are: all do but FlashAttention-3
    and vLLM's on 16-bit entries, which stop at the last one."""
    return "fa3" not in kernel and not (framework == "vllm" and KV[kv].element_bits == 16)


def eager_decode(framework: str, batch: Any) -> Any:
    """Whether a decode step of that batch is launched kernel by kernel: SGLang captures graphs up to a batch of 256."""
    return 1.0 * (batch > MOST_GRAPHED) if framework == "sglang" else 0.0


def block(architecture: str, heads: int, gemm: str, kv: str, kernel: str) -> MLA:
    """The whole block of one rank."""
    fields = dict(SHAPES[architecture])
    common: dict[str, Any] = {"N": heads, "kv": KV[kv], "weight": WEIGHTS[gemm]}
    if "dense_mha" in kernel:
        del fields["index_heads"]
        return MLA(**fields, **common, form="expanded")
    if "skip_indexer" in kernel:
        fields["index_heads"] = 0
    return DSA(**fields, **common, k=SELECTED, overrides=(("kv_b", BF16),))


def _module(table: Table, rows: Any, kernel: str, gemm: str, kv: str, decode: bool) -> Frame:
    scatter, numbers = Scatter(len(rows)), Numbers(rows)
    units: dict[str, str] = {}
    dense = "dense_mha" in kernel
    for (architecture, heads), index in structures(rows, ["architecture", "num_heads"]):
        part = numbers.at(index)
        behind = part["step"]
        if decode and table.framework in STEP_COUNTS_NEW:
            behind = (behind - 1).clip(min=0)
        work = Work(part["batch_size"], part["isl"], behind)
        whole = block(architecture, heads, gemm, kv, kernel)
        _, units = scatter_block(scatter, index, whole.parts, work)
        if not dense and pads_selection(table.framework, kernel, kv):
            padding = SELECTED * work.T / whole.reach.pairs(work.T, work.S)
            scatter.put("columns", "core.flops", index, scatter.columns["core.flops"][index] * padding)
        eager = eager_decode(table.framework, work.B) if decode else 1.0
        for name, value in {
            "core.heads": heads, "core.sequences": work.B * work.T, "core.entries": SELECTED, "core.tokens": work.T,
            "eager": eager, "core.behind": work.S, "core.groups": heads, "core.heads_per_group": 1,
            "core.width": whole.H + whole.P, "core.value_width": whole.value_width,
        }.items():  # fmt: skip
            scatter.put("columns", name, index, value)
        narrow = sum(unit != "bf16" for name, unit in units.items() if name.startswith("linear"))
        scatter.put("columns", "host.quantised", index, 0 if table.framework in GRAPHED else narrow)
        if dense:
            scatter.put("columns", "core.sequences", index, work.B)
    model = quantised(MODULE_PREFILL if dense else SPARSE_DECODE if decode else SPARSE_PREFILL)
    phase = "decode" if decode else "prefill"
    apart = f"{SHORT.get(gemm, gemm)}-" if table.framework in APART and not decode else ""
    return make(
        table, rows, "dsa", f"{SHORT.get(gemm, gemm)}-kv-{SHORT[kv]}", f"{kernel}/{phase}", scatter.cost, model,
        {**scatter.columns, **units}, ["architecture", "num_heads"], "architecture",
        f"{kernel}/{phase} {apart}kv-{SHORT[kv]}",
    )  # fmt: skip
