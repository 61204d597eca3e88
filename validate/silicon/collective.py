"""Collectives inside one server. ``message_size`` counts elements."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from roofline.cost import Cost
from roofline.expected.collective import (
    ALL_REDUCE,
    ALL_TO_ALL,
    COLLECTIVE,
    CUSTOM_ALL_REDUCE,
    PASSES,
    least_wire_bytes,
    wire_bytes,
)
from roofline.validate.silicon.frame import Frame, floats, make
from roofline.validate.silicon.source import Table, tables

WIDTH = {"half": 2, "bfloat16": 2, "float16": 2, "int8": 1, "float": 4}


def frames(gpu: str) -> Iterator[Frame]:
    """One frame per library, operation and launch mode."""
    for table in tables(gpu, "comm", "nccl_perf"):
        for kind, rows in table.rows.groupby("op_name", sort=True):
            if kind in PASSES:
                yield _family(table, rows.reset_index(drop=True), "nccl", str(kind), "nccl_dtype")
    for table in tables(gpu, "comm", "custom_allreduce_perf"):
        mode = "backend" if "backend" in table.rows else "kernel_source"
        eager = table.rows[mode].astype(str).str.contains("eager")
        for kernel, rows in table.rows.groupby(eager.map({True: "custom_eager", False: "custom_graph"}), sort=True):
            yield _family(table, rows.reset_index(drop=True), str(kernel), "all_reduce", "allreduce_dtype")


def _family(table: Table, rows: Any, kernel: str, kind: str, dtype: str) -> Frame:
    import numpy

    size = floats(rows["message_size"]) * rows[dtype].map(WIDTH).to_numpy(dtype=float)
    ranks = floats(rows["num_gpus"])
    wire = wire_bytes(kind, ranks, size)
    at_once = size / ranks if kind == "alltoall" else (ranks - 1.0) * size
    columns = {"ranks": ranks, "wire": wire, "least_wire": least_wire_bytes(kind, ranks, size), "at_once": at_once}
    cost = Cost({}, {"activations": numpy.zeros(len(rows))}, {}, 1)
    cls, model = ("all_reduce", ALL_REDUCE) if kind == "all_reduce" else ("collective", COLLECTIVE)
    if kernel != "nccl":
        model = CUSTOM_ALL_REDUCE
    elif kind == "alltoall":
        model = ALL_TO_ALL
    return make(table, rows, cls, "any", f"{kernel}/{kind}", cost, model, columns, ["num_gpus"], None, kernel)
