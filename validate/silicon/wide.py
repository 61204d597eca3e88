"""Experts of wide expert-parallel groups: the time of a rank whose tokens have arrived, by the same grouped matmuls.

``num_tokens`` are those of the whole group. "uniform" routes evenly; with a balancer, copies of experts even out the
ranks. SGLang's prompts stay out: with even routing they read fewer experts than there are (32 tokens on two ranks
beat the bound fourfold), and the table does not say which.
"""

from __future__ import annotations

from collections.abc import Iterator

from roofline.validate.silicon import moe
from roofline.validate.silicon.frame import Frame
from roofline.validate.silicon.routing import BALANCER
from roofline.validate.silicon.source import tables

FILES = ("wideep_generation_moe_perf", "wideep_moe_perf")


def frames(gpu: str) -> Iterator[Frame]:
    """One frame per framework, kernel and kind of routing."""
    for file in FILES:
        for table in tables(gpu, "moe", file):
            names, rows = table.rows["distribution"].astype(str), table.rows
            kind = names.where(names.isin(["uniform"]), "power-law").where(~names.str.endswith(BALANCER), "eplb")
            for (kernel, dtype, routing), part in rows.groupby(["kernel_source", "moe_dtype", kind], sort=True):
                if dtype in moe.WEIGHTS:
                    yield moe.family(table, part.reset_index(drop=True), str(kernel), str(dtype), str(routing), "wide_")
