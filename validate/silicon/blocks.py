"""Whole attention blocks as rows: the Cost is the sum over the block's parts, and the time model sees them by kind."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from roofline.components.base import Component
from roofline.cost import MATRIX_UNITS, Cost
from roofline.formats import BF16, FORMATS
from roofline.validate.silicon.attention import on_unit
from roofline.validate.silicon.frame import Scatter
from roofline.work import Work

WEIGHTS = {"bfloat16": BF16, "fp8_block": FORMATS["fp8-block"], "nvfp4": FORMATS["nvfp4"]}
"""Storage of a block's projections by ``gemm_type``."""
LINEAR, CORE, INDEX = "linear", "attention", ("index_scores", "select")


def scatter_block(
    scatter: Scatter, index: Any, parts: Iterable[Component], work: Work, core_unit: str = "bf16"
) -> tuple[Cost, dict[str, str]]:
    """Writes Cost and columns of a block at the rows of ``index``; returns the Cost and the units of its linear parts."""
    costs = [(part, part.cost(work)) for part in parts]
    costs = [(part, on_unit(cost, core_unit) if part.kind == CORE else cost) for part, cost in costs]
    total = Cost.total((1, cost) for _, cost in costs)
    units: dict[str, str] = {}
    sums: dict[str, Any] = {"core.flops": 0.0, "core.bytes": 0.0, "index.flops": 0.0, "index.bytes": 0.0, "other.bytes": 0.0}
    number = 0
    for part, cost in costs:
        if part.kind == LINEAR:
            name = f"linear{number}"
            units[f"{name}.unit"] = next(unit for unit in cost.flops if unit in MATRIX_UNITS)
            scatter.put("columns", f"{name}.flops", index, cost.matrix_flops)
            scatter.put("columns", f"{name}.bytes", index, cost.bytes)
            scatter.put("columns", f"{name}.input", index, cost.read["activations"] * 0.5)
            number += 1
        else:
            kind = "core" if part.kind == CORE else "index" if part.kind in INDEX else "other"
            sums[f"{kind}.bytes"] = sums[f"{kind}.bytes"] + cost.bytes
            if kind != "other":
                sums[f"{kind}.flops"] = sums[f"{kind}.flops"] + cost.matrix_flops
    for name, value in sums.items():
        scatter.put("columns", name, index, value)
    scatter.add(index, total)
    return total, {**units, "core.unit": core_unit}
