"""Hyper-connections and casts: kernels that only stream, by ``HyperConnection``, ``hyper_apply`` and ``Elementwise``."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from roofline.components.hyper_connections import HyperConnection, hyper_apply
from roofline.components.mixing import Elementwise
from roofline.cost import Cost
from roofline.expected.stream import ROW_PASS, STREAM_PASS
from roofline.formats import BF16, FP8
from roofline.validate.silicon.frame import Frame, Numbers, Scatter, make, structures
from roofline.validate.silicon.source import tables
from roofline.work import Work


def frames(gpu: str) -> Iterator[Frame]:
    """Hyper-connections by framework and side of the sub-layer; static casts and the dynamic part of a quantisation."""
    for table in tables(gpu, "mhc", "mhc_module_perf"):
        kind = table.rows["kernel_source"].str.replace(r".*mhc_|_mapping|_tilelang", "", regex=True)
        for name, rows in table.rows.groupby(kind, sort=True):
            rows = rows.reset_index(drop=True)
            scatter, numbers = Scatter(len(rows)), Numbers(rows)
            for (width, streams, sites, rounds), index in structures(
                rows, ["hidden_size", "hc_mult", "num_sites", "sinkhorn_iters"]
            ):
                before = str(name).startswith("pre")
                built: Any = HyperConnection(width, streams, rounds) if before else hyper_apply(width, streams)
                cost = sites * built.cost(Work(1, numbers.at(index)["num_tokens"]))
                scatter.add(index, cost)
                scatter.put("columns", "touched", index, cost.bytes / sites)
            columns = scatter.columns
            yield make(
                table, rows, "mhc", "bf16", str(name), scatter.cost, STREAM_PASS, columns, ["hidden_size"], None,
                f"={name}" if name == "post" else str(name),
            )  # fmt: skip
    for file in ("scale_matrix_perf", "computescale_perf"):
        for table in tables(gpu, "quantize", file):
            rows = table.rows.reset_index(drop=True)
            scatter, numbers = Scatter(len(rows)), Numbers(rows)
            for (width,), index in structures(rows, ["k"]):
                work = Work(1, numbers.at(index)["m"])
                parts = [Elementwise(width, 0, width, BF16)]
                if file == "scale_matrix_perf":
                    parts.append(Elementwise(0, width, 0, FP8))
                scatter.add(index, Cost.total((1, part.cost(work)) for part in parts))
                scatter.put("columns", "row_bytes", index, 3.0 * width)
            name = file.removesuffix("_perf")
            yield make(table, rows, "quantize", "fp8", name, scatter.cost, ROW_PASS, scatter.columns, ["k"], None, name)
