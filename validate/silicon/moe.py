"""Fused experts on one rank, by the grouped matmuls of ``MoE``; which experts are hit is in ``routing``.

Experts are split over the expert-parallel ranks, their width over the tensor-parallel ones. Nemotron 3's rows (22 of 512
experts, or width 2688 with 6) have no gate matrix, like the kernels that say so.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields
from typing import Any

from roofline.components.moe import GroupedLinear, MoE
from roofline.cost import Cost
from roofline.expected.moe import MOE, copied
from roofline.formats import Format, format_named
from roofline.validate.silicon.frame import Frame, Numbers, Scatter, make, structures
from roofline.validate.silicon.gemm import INPUT_BYTES
from roofline.validate.silicon.routing import rank_loads
from roofline.validate.silicon.source import Table, tables

WEIGHTS = {
    "bfloat16": "bf16", "float16": "bf16", "fp8": "fp8", "fp8_block": "fp8-block", "int4_wo": "int4-g128", "int8_wo": "int8-g128",
    "w4a16_mxfp4": "mxfp4", "w4afp8": "int4-g128", "w4a8_mxfp4_mxfp8": "mxfp4", "nvfp4": "nvfp4",
}  # fmt: skip
ALL_ROWS = ("fused_moe_triton", "tritonexperts", "marlin")
"""Kernels whose intermediate rows and their sum run over all choices of all tokens, on every rank.

The others work on the rank's own rows, and write the sum for every token; in wide groups tokens arrive sorted, and are
summed up where they came from.
"""
COPIES = "trtllm"
"""Framework whose CUTLASS kernels copy rows expert by expert (``copied``), and walk all experts of the rank, hit or not."""
SHORT = {"bfloat16": "bf16", "float16": "bf16"}
ROUTING = ["num_experts", "topk", "moe_ep_size", "distribution", "num_slots"]


@dataclass(frozen=True)
class Rows:
    """What a grouped matmul looks at: token-equivalents of one rank (routed rows over choices per token)."""

    tokens: Any


@dataclass(frozen=True)
class Routed(GroupedLinear):
    """A grouped matmul whose number of hit experts is known instead of expected."""

    known: Any = None

    def hit(self, tokens: Any) -> Any:
        """Experts whose weights are read."""
        return self.known


def gated(kernel: str, hidden: int, chosen: int) -> bool:
    """Whether experts have a gate matrix."""
    return "nongated" not in kernel and chosen != 22 and not (hidden == 2688 and chosen == 6)


def engine(kernel: str) -> str:
    """The part of vLLM's long kernel names that tells the experts' kernel."""
    name = kernel.removesuffix("_situ_as_silu")
    return name.rpartition("_")[2] + kernel.removeprefix(name) if name.startswith("vllm") else kernel


def weight_of(dtype: str) -> tuple[Format, str]:
    """Storage of the experts and the unit that multiplies them (16 bits where only weights are narrow)."""
    weight = format_named(WEIGHTS[dtype])
    return weight, "bf16" if dtype.startswith("w4a16") else weight.unit


def experts(hidden: int, inter: int, chosen: int, has_gate: bool, weight: Format, known: Any) -> tuple[GroupedLinear, ...]:
    """The two grouped matmuls of a rank's experts, with the experts hit known: how many the rank holds does not matter."""
    block = MoE(hidden, inter, chosen, chosen, gated=has_gate, weight=weight)
    parts = [part for part in block.experts if isinstance(part, GroupedLinear)]
    return tuple(Routed(**{field.name: getattr(part, field.name) for field in fields(part)}, known=known) for part in parts)


def frames(gpu: str) -> Iterator[Frame]:
    """One frame per framework, kernel, weight format and kind of routing."""
    import numpy

    for table in tables(gpu, "moe", "moe_perf"):
        routings = numpy.where(table.rows["distribution"] == "balanced", "balanced", "power-law")
        for (kernel, dtype, routing), part in table.rows.groupby(["kernel_source", "moe_dtype", routings], sort=True):
            if dtype in WEIGHTS:
                yield family(table, part.reset_index(drop=True), kernel, dtype, routing)


def _on(unit: str, cost: Cost) -> Cost:
    flops = {unit if name not in ("vector", "special") else name: value for name, value in cost.flops.items()}
    return Cost(flops, dict(cost.read), dict(cost.write), cost.launches)


def _loads(rows: Any, numbers: Numbers) -> Scatter:
    """What each row's rank gets (columns ``FIGURES``): one draw per routing and number of tokens."""
    import numpy

    scatter = Scatter(len(rows))
    for (total, chosen, ep, distribution, slots), index in structures(rows, ROUTING):
        tokens, of_row = numpy.unique(numbers.at(index)["num_tokens"].astype(int), return_inverse=True)
        for name, values in rank_loads(tuple(tokens.tolist()), total, chosen, ep, distribution, slots).items():
            scatter.put("columns", name, index, values[of_row])
    return scatter


def family(table: Table, rows: Any, kernel: str, dtype: str, routing: str, setting: str = "") -> Frame:
    """The frame of one kernel, format and kind of routing; ``setting`` tells its constants from those of fused experts."""
    import numpy

    rows = rows.assign(width=(rows["inter_size"] // rows["moe_tp_size"]).clip(lower=1))
    rows = rows if "num_slots" in rows else rows.assign(num_slots=rows["num_experts"])
    numbers = Numbers(rows)
    scatter = _loads(rows, numbers)
    weight, unit = weight_of(dtype)
    for (hidden, width, chosen), index in structures(rows, ["hidden_size", "width", "topk"]):
        tokens = numbers.at(index)["num_tokens"]
        routed, hit = (scatter.columns[name][index] for name in ("rows", "hit"))
        parts = experts(hidden, width, chosen, gated(kernel, hidden, chosen), weight, hit)
        work: Any = Rows(routed / chosen)
        costs = [_on(unit, part.cost(work)) for part in parts]
        scatter.add(index, Cost.total((1, cost) for cost in costs))
        rows_bytes = moved = sum(cost.activation_bytes for cost in costs)
        if kernel == "moe_torch_flow" or any(name in kernel for name in ALL_ROWS):
            rows_bytes = moved = moved * (tokens * chosen / numpy.maximum(routed, 1.0))
        elif table.framework == COPIES and not setting:
            rows_bytes = routed * copied(hidden, width, INPUT_BYTES.get(unit, 2.0), dtype == "fp8_block")
            moved = rows_bytes + 4.0 * hidden * tokens
        elif not setting:
            rows_bytes = moved = moved + 2.0 * hidden * tokens
        scatter.put("columns", "activation_bytes", index, moved)
        scatter.put("columns", "copied_bytes", index, rows_bytes)
        for name, part, cost in zip(("up", "down"), parts, costs, strict=True):
            for what, value in (("n", part.outputs), ("k", part.inputs), ("weights", cost.read["weights"])):
                scatter.put("columns", f"{name}.{what}", index, value)
    walks_all = table.framework == COPIES and kernel != "moe_torch_flow"
    held = numbers["num_slots"] // numbers["moe_ep_size"]
    columns = {
        **scatter.columns, "walked": held if walks_all else scatter.columns["hit"], "unit": unit,
        "input_bytes": INPUT_BYTES.get(unit, 2.0), "weight_bytes": float(weight.bits) / 8,
    }  # fmt: skip
    name = f"{engine(kernel)} {setting}{SHORT.get(dtype, dtype)}"
    return make(
        table, rows, "moe", f"{SHORT.get(dtype, dtype)}-{routing}", kernel, scatter.cost, MOE, columns,
        ["hidden_size", "inter_size", "topk", "num_experts"], None, name,
    )  # fmt: skip
