"""Multi-head latent attention, by ``MLA`` and its parts: bare kernels, whole blocks with projections, absorbed matmuls.

Head counts are per rank. Bare kernels count ``step`` tokens behind the new ones; whole decode blocks count the new token
in ``step``. SGLang's prefill kernel runs absorbed (576 and 512 wide), the others' expanded (192 and 128).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from roofline.components.base import Component
from roofline.components.latent import EntryWrite, LatentAttention, latent_layout
from roofline.components.mla import MLA, ExpandedAttention
from roofline.cost import Cost
from roofline.expected.attention import PREFILL
from roofline.expected.latent import LATENT_DECODE
from roofline.expected.module import MODULE_DECODE, MODULE_PREFILL, quantised
from roofline.formats import BF16
from roofline.validate.silicon.attention import KV, SHORT, on_unit
from roofline.validate.silicon.blocks import WEIGHTS, scatter_block
from roofline.validate.silicon.frame import Frame, Numbers, Scatter, make, structures
from roofline.validate.silicon.source import Table, tables
from roofline.work import Work

RANK, ROTARY, HEAD, VALUE = 512, 64, 128, 128
"""Latent attention of DeepSeek-V3: the only one that these tables measure."""
DEEPSEEK_V3: dict[str, Any] = {"D": 7168, "Q": 1536, "R": RANK, "P": ROTARY, "H": HEAD, "value_dim": VALUE}
NARROW = 64
"""Rows and keys of a tile where values are 512 wide: 128 would not fit the registers."""
ABSORBED_PREFILL = ("flash_attention",)
"""Kernels (SGLang's on Hopper) that run a prefill absorbed."""
BLACKWELL = ("b200-sxm", "gb200", "b300-sxm", "gb300", "rtx-pro-6000")
"""Devices whose kernels multiply 8-bit entries as they are, without widening them to 16 bits first."""


def frames(gpu: str) -> Iterator[Frame]:
    """One frame per framework, kernel, formats and phase."""
    for operator, absorbed in (("generation_mla_perf", True), ("context_mla_perf", False)):
        for table in tables(gpu, "mla", operator):
            for (kernel, kv), rows in table.rows.groupby(["kernel_source", "kv_cache_dtype"], sort=True):
                yield _bare(table, rows.reset_index(drop=True), kernel, kv, decode=absorbed)
    for operator, decode in (("mla_generation_module_perf", True), ("mla_context_module_perf", False)):
        for table in tables(gpu, "mla", operator):
            by = ["kernel_source", "gemm_type", "kv_cache_dtype"]
            for (kernel, gemm, kv), rows in table.rows.groupby(by, sort=True):
                yield _module(table, rows.reset_index(drop=True), kernel, gemm, kv, decode)
    yield from _wide(gpu)


def _wide(gpu: str) -> Iterator[Frame]:
    """Whole blocks of SGLang beside wide groups of experts: ``isl`` is the prompt, or the context of a decode step."""
    for phase, decode in (("generation", True), ("context", False)):
        for table in tables(gpu, "mla", f"wideep_{phase}_mla_perf"):
            for (kernel, gemm, kv), rows in table.rows.groupby(["kernel_source", "gemm_type", "kv_cache_dtype"], sort=True):
                if gemm not in SHORT and gemm != "fp8_block":
                    continue
                rows = rows.reset_index(drop=True)
                meant = rows.assign(step=rows["isl"], isl=1) if decode else rows
                frame = _module(table, meant, kernel, gemm, kv, decode, "wide")
                yield replace(frame, rows=rows)


def core_unit(gpu: str, kv: str) -> str:
    """The unit that runs the attention core."""
    return "fp8" if KV[kv].element_bits == 8 and gpu in BLACKWELL else "bf16"


def _works(part: Any, module_decode: bool = False) -> Work:
    behind = part["step"]
    return Work(part["batch_size"], part["isl"], (behind - 1).clip(min=0) if module_decode else behind)


def core_columns(work: Work, heads: int, absorbed: bool, entries: Any) -> dict[str, Any]:
    """Geometry of the core for both core models."""
    return {
        "core.heads": heads * work.T, "core.sequences": work.B, "core.entries": entries, "core.tokens": work.T,
        "core.behind": work.S, "core.groups": 1 if absorbed else heads, "core.heads_per_group": heads if absorbed else 1,
        "core.width": RANK + ROTARY if absorbed else HEAD + ROTARY, "core.value_width": RANK if absorbed else VALUE,
    }  # fmt: skip


def _bare(table: Table, rows: Any, kernel: str, kv: str, decode: bool) -> Frame:
    absorbed = decode or kernel in ABSORBED_PREFILL
    unit = core_unit(table.gpu, kv)
    scatter, numbers = Scatter(len(rows)), Numbers(rows)
    for (heads,), index in structures(rows, ["num_heads"]):
        work = _works(numbers.at(index))
        layout = latent_layout(RANK, ROTARY, KV[kv], scaled=False)
        write = EntryWrite(heads, 0, layout)
        core: Component = (
            LatentAttention(heads, RANK + ROTARY, RANK, layout)
            if absorbed
            else ExpandedAttention(heads, heads, HEAD + ROTARY, VALUE, cached=False)
        )
        writing = write.cost(work)
        cost = Cost.total(((1, on_unit(core.cost(work), unit)), (1, writing)))
        scatter.add(index, cost)
        geometry = core_columns(work, heads, absorbed, work.S + work.T)
        for name, value in {
            **geometry, **{name.removeprefix("core."): value for name, value in geometry.items()},
            "core.flops": cost.matrix_flops, "core.bytes": cost.bytes, "write_bytes": writing.bytes, "window": 1e9,
        }.items():  # fmt: skip
            scatter.put("columns", name, index, value)
    columns = {**scatter.columns, "core.unit": unit, "unit": unit, "block": NARROW if absorbed else 128}
    cls, model = ("mla_decode", LATENT_DECODE) if decode else ("mla_prefill", PREFILL)
    return make(table, rows, cls, f"bf16-kv-{SHORT[kv]}", kernel, scatter.cost, model, columns, ["num_heads"])


def block(heads: int, gemm: str, kv: str, absorbed: bool, scaled: bool = False) -> MLA:
    """The whole block of one rank: projections in the row's format, the per-head matrices in 16 bits."""
    return MLA(
        **DEEPSEEK_V3, N=heads, form="absorbed" if absorbed else "expanded", kv=KV[kv], scaled=scaled, weight=WEIGHTS[gemm],
        overrides=(("kv_b", BF16),) if absorbed else (),
    )  # fmt: skip


def _module(table: Table, rows: Any, kernel: str, gemm: str, kv: str, decode: bool, setting: str = "") -> Frame:
    absorbed = decode or "MLA" in kernel
    scatter, numbers = Scatter(len(rows)), Numbers(rows)
    units: dict[str, str] = {}
    for (heads,), index in structures(rows, ["num_heads"]):
        work = _works(numbers.at(index), decode)
        _, units = scatter_block(scatter, index, block(heads, gemm, kv, absorbed).parts, work, core_unit(table.gpu, kv))
        for name, value in core_columns(work, heads, absorbed, work.S + work.T).items():
            scatter.put("columns", name, index, value)
    model, prefix = quantised(MODULE_DECODE if decode else MODULE_PREFILL), f"{setting}_" if setting else ""
    phase = "decode" if decode else "prefill"
    name = f"{setting}/{phase} {prefix}{SHORT[kv]}" if setting else f"{kernel}/{phase} kv-{SHORT[kv]}"
    return make(
        table, rows, "mla_module", f"{SHORT.get(gemm, gemm)}-kv-{SHORT[kv]}", f"{prefix}{kernel}/{phase}", scatter.cost, model,
        {**scatter.columns, **units}, ["num_heads"], "model", name,
    )  # fmt: skip
