"""Expected time of kernels that stream through memory: elementwise passes, casts, recurrent states, convolutions.

A launch, the bytes over an achieved bandwidth, and a latency below which no wave of CTAs ends; prefills of a recurrence
add the serial chain over chunks and the matrix work beside it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from roofline.expected.arithmetic import ceil, maximum
from roofline.expected.model import CACHE, MATRIX, MEMORY, MICROSECOND, Chip, Columns, Constant, Model, cache_gain, overlap

LAUNCH = Constant("launch_us", 4.0, 0.3, 600.0, "launch, prologue and epilogue of the kernel [us]")
STREAM = Constant("memory", 0.8, 0.05, 0.95, MEMORY.meaning)
LATENCY = Constant("latency_us", 1.0, 0.05, 30.0, "time of one wave of CTAs, however little it moves [us]")
JOIN = Constant("overlap", 2.0, 1.0, 8.0, "order of the norm that joins bytes and latency")
ROW = Constant("row", 1.0, 0.02, 8.0, "rate of one row, in shares of one SM's memory bandwidth")
CHAIN = Constant("chunk_us", 3.0, 0.3, 60.0, "one step of the serial chain over chunks of 64 tokens [us]")
OCCUPANCY = Constant("chains_per_sm", 1.0, 0.05, 16.0, "chains that one SM advances side by side at full speed")
SLOW_MATRIX = Constant("matrix", 0.4, 0.02, 0.93, MATRIX.meaning)
CHUNK = 64


def stream_seconds(columns: Columns, chip: Chip, c: Mapping[str, float]) -> Any:
    """Columns: bytes; touched (of them, what one launch touches; all where absent); row_bytes (of a row that one CTA walks)."""
    touched = columns.get("touched", columns["bytes"])
    memory = columns["bytes"] / (chip.bandwidth * c["memory"] * cache_gain(touched, chip, c["cache_gain"]))
    alone = columns["row_bytes"] / (chip.bandwidth / chip.sms * c["row"]) if "row" in c else 0.0
    moved = maximum(memory, alone)
    return c["launch_us"] * MICROSECOND + overlap(c["overlap"], moved, c["latency_us"] * MICROSECOND)


def chain_seconds(columns: Columns, chip: Chip, c: Mapping[str, float]) -> Any:
    """Columns: bytes, flops, tokens (per sequence), chains (sequences times heads)."""
    memory = columns["bytes"] / (chip.bandwidth * c["memory"])
    multiply = columns["flops"] / (chip.peak("bf16") * c["matrix"])
    crowded = maximum(1.0, columns["chains"] / (chip.sms * c["chains_per_sm"]))
    chain = ceil(columns["tokens"] / CHUNK) * c["chunk_us"] * MICROSECOND * crowded
    return c["launch_us"] * MICROSECOND + overlap(c["overlap"], memory, multiply, chain)


STREAM_PASS = Model("stream", (LAUNCH, STREAM, LATENCY, JOIN, CACHE), stream_seconds)
ROW_PASS = Model("rows", (LAUNCH, STREAM, LATENCY, JOIN, CACHE, ROW), stream_seconds)
CHUNK_CHAIN = Model("chunk_chain", (LAUNCH, STREAM, SLOW_MATRIX, CHAIN, OCCUPANCY, JOIN), chain_seconds)
