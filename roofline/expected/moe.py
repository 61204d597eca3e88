"""Expected time of fused experts: two grouped matmuls in tiles of padded rows, weights streamed for experts that are hit.

Around the matmuls rows are copied expert by expert, quantised where that is a pass of its own, and summed up again: all
SMs move those bytes at a rate of their own, and memory has to carry them. What feeds the tiles comes from the last-level
cache, whose rate goes by the clock as well, not by the memory that lies behind it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from roofline.expected.arithmetic import ceil, minimum
from roofline.expected.gemm import WAVE
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

FEED = Constant("feed_bytes", 90.0, 12.0, 128.0, "what one SM gets per clock from the last-level cache [B]")
COPY = Constant("copy_bytes", 6.0, 0.4, 128.0, "what one SM moves per clock where rows are copied, quantised and summed [B]")
EXPERT = Constant("expert_us", 0.05, 0.0005, 3.0, "one expert in the schedules that both matmuls walk [us]")


def copied(hidden: Any, inter: Any, input_bytes: float, quantises: bool) -> Any:
    """Bytes that the passes around the matmuls move for one routed row, where a kernel copies rows expert by expert.

    A row of ``hidden`` 16-bit elements is read, written and read as the matmul wants it (``input_bytes`` per element);
    the second matmul writes it and the sum reads it. What lies between the matmuls, ``inter`` wide, is written and read
    once: the gate is fused. With ``quantises`` both are written in 16 bits first, for a pass that makes 8 of them.
    """
    fed = 2.0 + 2.0 + 1.0 + 1.0 if quantises else 2.0 * input_bytes
    return (2.0 + fed + 2.0 + 2.0) * hidden + fed * inter


def grouped_seconds(columns: Columns, name: str, chip: Chip, c: Mapping[str, float]) -> Any:
    """One grouped matmul.

    Columns: tiles16 ... tiles128, walked (experts in its schedule), <name>.n, <name>.k, <name>.weights (bytes read), formats.
    """
    n, k = columns[f"{name}.n"], columns[f"{name}.k"]
    rate = chip.peak(columns["unit"]) / chip.sms * c["matrix"]
    feed_rate = chip.clock * c["feed_bytes"]
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
    walk = columns["walked"] * (0.5 * c["expert_us"] * MICROSECOND)
    memory = columns[f"{name}.weights"] / (chip.bandwidth * c["memory"])
    return overlap(c["overlap"], memory, best + walk)


def seconds(columns: Columns, chip: Chip, c: Mapping[str, float]) -> Any:
    """Seconds of each row. Further columns: activation_bytes (all that the passes move), copied_bytes (of rows)."""
    total = c["launch_us"] * MICROSECOND + columns["activation_bytes"] / (chip.bandwidth * MEMORY.high)
    total = total + columns["copied_bytes"] / (chip.sms * chip.clock * c["copy_bytes"])
    for name in ("up", "down"):
        total = total + grouped_seconds(columns, name, chip, c)
    return total


STREAMED = Constant("memory", MEMORY.start, 0.05, MEMORY.high, MEMORY.meaning)
MULTIPLIED = Constant("matrix", MATRIX.start, 0.05, MATRIX.high, MATRIX.meaning)

MOE = Model("moe", (LAUNCH, STREAMED, MULTIPLIED, FEED, WAVE, OVERLAP, COPY, EXPERT), seconds)
