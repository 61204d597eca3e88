"""Exchanges of tokens between the ranks that hold experts, by DeepEP: dispatch of hidden states, combination of results.

All ranks lie in one server. A throughput kernel sends a token once to each rank that holds one of its experts; a
low-latency kernel sends it once per expert. A dispatched row is 8-bit with one fp32 scale per 128 elements, or whatever
the engine asks for; a combined row has 16 bits. ``num_tokens`` are those of one rank, choices are drawn evenly.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from roofline.accelerator import load_accelerator
from roofline.components.collective import bytes_sent
from roofline.cost import Cost
from roofline.expected.arithmetic import ceil, where
from roofline.expected.collective import EXCHANGE
from roofline.validate.silicon.frame import Frame, floats, make
from roofline.validate.silicon.source import Table, tables

OMITTED = {"ep_size": 8.0, "sms": 0.0}
"""What a table without the column means: all eight ranks of a server, whatever SMs the kernel takes."""
SHAPE = ("hidden_size", "topk", "num_topk", "num_experts")
ROW_BITS = {"bfloat16": 16, "default": 16, "fp8": 8 + 32 / 128, "nvfp4": 4 + 8 / 16, "fp4": 4 + 8 / 16}
"""Bits of an element on the wire, scales included."""
UNSTEADY = ("v2_context", "v2_generation")
"""Kernels whose times differ twofold between neighbouring rows of one shape: nothing to hold a model to."""
NARROW = {("ht", "dispatch", "nvfp4"): "_nvfp4"}
"""Rows that do not shrink on the wire as their format does, and take constants of their own."""
MICROSECONDS = 1e-3
"""Of a millisecond: these tables count in microseconds, whatever their column is called."""
TIMES = ("transmit_us", "avg_t_us")
MEASURED = (*TIMES, "notify_us", "bandwidth_gbps")
OTHER = {"dispatch": "combine_", "combine": "dispatch_"}
ALIASES = {"num_token": "num_tokens", "num_topk": "topk", "dispatch_sms": "sms", "combine_sms": "sms"}


def frames(gpu: str) -> Iterator[Frame]:
    """One frame per engine, kernel, format of the dispatched rows and phase."""
    for raw in tables(gpu, "comm", "moe_a2a_perf"):
        one_server = raw.rows[raw.rows["node_num"] == 1].drop(columns=["transmit_us", "notify_us"])
        table = replace(raw, rows=one_server.assign(latency=one_server["latency"] * MICROSECONDS))
        for (backend, dtype, phase), rows in table.rows.groupby(["comm_backend", "comm_dtype", "phase"], sort=True):
            kernel = str(backend).removeprefix(f"{table.framework}_").removeprefix("deepep_")
            if kernel not in UNSTEADY and dtype in ROW_BITS:
                yield _family(table, rows.reset_index(drop=True), kernel, str(dtype), str(phase))
    for kernel in ("normal", "ll"):
        for table in tables(gpu, "comm", f"wideep_deepep_{kernel}_perf"):
            for phase in ("dispatch", "combine"):
                yield _family(*_phase(table, phase), kernel, "fp8", phase)


def _phase(table: Table, phase: str) -> tuple[Table, Any]:
    """The rows of one phase of a table that holds both in columns, as a table of its own."""
    rows = table.rows[table.rows["node_num"] == 1]
    time = next(rows[f"{phase}_{name}"] for name in TIMES if f"{phase}_{name}" in rows)
    measured = [name for name in rows if name.endswith(MEASURED) or name.startswith(OTHER[phase])]
    own = rows.drop(columns=measured).assign(phase=phase, latency=time * MICROSECONDS)
    own = own[own["latency"] > 0].drop_duplicates(ignore_index=True)
    return replace(table, rows=own), own


def low_latency(kernel: str) -> bool:
    """Whether a kernel sends a token once per expert."""
    return kernel == "ll"


def copies(kernel: str, ranks: Any, chosen: Any) -> Any:
    """Rows that a token is sent as, its own rank included: per expert, or per distinct rank of them."""
    return chosen if low_latency(kernel) else ranks * (1.0 - (1.0 - 1.0 / ranks) ** chosen)


def ways(kernel: str, sms: Any, experts: Any, every: float) -> Any:
    """SMs that send: those that the engine reserves, or in a low-latency kernel one per group of experts, up to all."""
    if low_latency(kernel):
        return ceil(experts / ceil(experts / every))
    return where(sms > 0, sms, every)


def _family(table: Table, rows: Any, kernel: str, dtype: str, phase: str) -> Frame:
    import numpy

    known = rows.rename(columns=ALIASES)
    tokens, hidden, chosen, experts = (floats(known[name]) for name in ("num_tokens", "hidden_size", "topk", "num_experts"))
    ranks, sms = (floats(known[name]) if name in known else numpy.full(len(rows), other) for name, other in OMITTED.items())
    own = tokens * hidden * ((ROW_BITS[dtype] if phase == "dispatch" else ROW_BITS["bfloat16"]) / 8)
    sent = own * copies(kernel, ranks, chosen)
    wire = numpy.array([bytes_sent("all-to-all", "ring", int(n), size) for n, size in zip(ranks, sent, strict=True)], dtype=float)
    every = float(load_accelerator(table.gpu).chip["sm_count"].value)
    columns = {
        "wire": wire, "least_wire": wire, "own": own, "ways": ways(kernel, sms, experts, every),
        "steps": experts / 100.0 if low_latency(kernel) else hidden / 1024.0,
    }  # fmt: skip
    cost = Cost({}, {"activations": numpy.zeros(len(rows))}, {}, 1)
    return make(
        table, rows, "collective", dtype, f"deepep_{kernel}/{phase}", cost, EXCHANGE, columns,
        [name for name in SHAPE if name in rows], None, f"{kernel} {phase}{NARROW.get((kernel, phase, dtype), '')}",
    )  # fmt: skip
