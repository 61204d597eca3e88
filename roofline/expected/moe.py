"""Expected time of fused experts: two grouped matmuls in tiles of padded rows, weights streamed for experts that are hit."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from roofline.expected.arithmetic import ceil, minimum
from roofline.expected.gemm import FEED, WAVE
from roofline.expected.model import (
    LAUNCH,
    MATRIX,
    MEMORY,
    MICROSECOND,
    OVERLAP,
    Chip,
    Columns,
    Constant,
    Model,
    overlap,
)  # fmt: skip

ROWS = (16, 32, 64, 128)
WIDTHS = (64, 128, 256)
MOST_ACCUMULATORS = 128 * 256

ACTIVATION = Constant("activation", 0.5, 0.05, 0.95, "achieved fraction of the memory bandwidth on gathered and scattered rows")
EXPERT = Constant("expert_us", 0.05, 0.0005, 3.0, "fixed time per expert that is hit: its entry in the schedule [us]")


def grouped_seconds(columns: Columns, name: str, chip: Chip, c: Mapping[str, float]) -> Any:
    """One grouped matmul. Columns: tiles16 ... tiles128, <name>.n, <name>.k, <name>.weights (bytes read), and the formats."""
    n, k = columns[f"{name}.n"], columns[f"{name}.k"]
    rate = chip.peak(columns["unit"]) / chip.sms * c["matrix"]
    feed_rate = chip.bandwidth / chip.sms * c["feed"]
    best: Any = None
    for rows in ROWS:
        for width in WIDTHS:
            if rows * width > MOST_ACCUMULATORS:
                continue
            multiply = 2.0 * rows * width / rate
            feed = (rows * columns["input_bytes"] + width * columns["weight_bytes"]) / feed_rate
            waves = ceil(columns[f"tiles{rows}"] * ceil(n / width) / chip.sms)
            seconds = waves * (k * overlap(4.0, multiply, feed) + c["wave_us"] * MICROSECOND)
            best = seconds if best is None else minimum(best, seconds)
    memory = columns[f"{name}.weights"] / (chip.bandwidth * c["memory"])
    return overlap(c["overlap"], memory, best)


def seconds(columns: Columns, chip: Chip, c: Mapping[str, float]) -> Any:
    """Seconds of each row. Further columns: activation_bytes, hit."""
    total = c["launch_us"] * MICROSECOND + c["expert_us"] * MICROSECOND * columns["hit"]
    total = total + columns["activation_bytes"] / (chip.bandwidth * c["activation"])
    for name in ("up", "down"):
        total = total + grouped_seconds(columns, name, chip, c)
    return total


STREAMED = Constant("memory", MEMORY.start, 0.05, MEMORY.high, MEMORY.meaning)
MULTIPLIED = Constant("matrix", MATRIX.start, 0.05, MATRIX.high, MATRIX.meaning)

MOE = Model("moe", (LAUNCH, STREAMED, MULTIPLIED, FEED, WAVE, OVERLAP, ACTIVATION, EXPERT), seconds)
