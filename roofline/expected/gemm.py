"""Expected time of a matrix multiplication: waves of tiles over the SMs, fed from the cache, beside the memory stream.

Of a fixed list of tiles and splits of the inner dimension the fastest counts, as a library's heuristic would choose. A
tile step multiplies at the achieved peak or waits for its operands; the last wave may be partly empty; splits add a
reduction through memory.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from roofline.expected.arithmetic import ceil, minimum, where
from roofline.expected.model import (
    CACHE,
    LAUNCH,
    MATRIX,
    MEMORY,
    MICROSECOND,
    OVERLAP,
    Chip,
    Columns,
    Constant,
    Model,
    cache_gain,
    overlap,
)  # fmt: skip

TILES = ((128, 256), (256, 128), (128, 128), (128, 64), (64, 256), (64, 128), (64, 64), (64, 32), (64, 16))
SPLITS = (1, 2, 4, 8)
BY_ROWS = ((64.0, 64, 64), (128.0, 64, 128), (float("inf"), 128, 128))
"""Tiles of CUTLASS kernels that pick theirs by the number of rows alone, and never split: (most rows, tile)."""
PARTIAL_BYTES = 4
"""Bytes of one partial sum of a split, written once and read once."""

FEED = Constant("feed", 7.0, 1.0, 12.0, "bandwidth from the last-level cache to all SMs, in units of the memory bandwidth")
WAVE = Constant("wave_us", 0.3, 0.005, 8.0, "prologue and epilogue of one wave of tiles [us]")
SPLIT = Constant("split_us", 2.5, 0.5, 60.0, "second pass that adds up the splits [us]")
QUANTISE = Constant("quantise", 0.6, 0.05, 0.93, "achieved fraction of the memory bandwidth where activations are quantised")
QUANTISE_ROW = Constant("quantise_row_us", 0.5, 0.005, 8.0, "one wave of rows, 16 per SM, in that pass [us]")
SUSTAINED = Constant("sustained", 0.93, 0.6, 1.0, "rate of the matrix units in a long run over that in a short one: power")

CONSTANTS = (LAUNCH, MEMORY, MATRIX, FEED, WAVE, SPLIT, OVERLAP, SUSTAINED)


QUANTISE_ROWS = 16
"""Rows that one SM quantises side by side."""
LONG = 1e-3
"""Seconds of matrix work at which half of the power limit's effect shows."""


def by_rows_seconds(
    m: Any, n: Any, k: Any, weight_bytes: Any, input_bytes: float, rate: float, chip: Chip, c: Mapping[str, float]
) -> Any:
    """As ``tiled_seconds``, for a kernel whose tile depends on the number of rows only."""
    result: Any = 0.0 * m
    least = 0.0
    for most, rows, columns in BY_ROWS:
        multiply = 2.0 * rows * columns / (rate / chip.sms * c["matrix"])
        feed = (rows * input_bytes + columns * weight_bytes) / (chip.bandwidth / chip.sms * c["feed"])
        waves = ceil(ceil(m / rows) * ceil(n / columns) / chip.sms)
        seconds = waves * (k * overlap(4.0, multiply, feed) + c["wave_us"] * MICROSECOND)
        result = where((m > least) & (m <= most), seconds, result)
        least = most
    return result


def tiled_seconds(
    m: Any, n: Any, k: Any, weight_bytes: Any, input_bytes: float, rate: float, chip: Chip, c: Mapping[str, float]
) -> Any:
    """Time of the multiplication alone, memory apart: the fastest of the tiles and splits [s].

    Args:
        m, n, k: rows, outputs, inputs.
        weight_bytes, input_bytes: bytes per element of weight and of activation as the matrix unit reads them.
        rate: peak of the matrix unit [FLOP/s].
    """
    best: Any = None
    for rows, columns in TILES:
        multiply = 2.0 * rows * columns / (rate / chip.sms * c["matrix"])
        feed = (rows * input_bytes + columns * weight_bytes) / (chip.bandwidth / chip.sms * c["feed"])
        step = overlap(4.0, multiply, feed)
        tiles = ceil(m / rows) * ceil(n / columns)
        for splits in SPLITS:
            waves = ceil(tiles * splits / chip.sms)
            seconds = waves * (k * (step / splits) + c["wave_us"] * MICROSECOND)
            if splits > 1:
                partial = (2.0 * PARTIAL_BYTES * splits) * m * n / (c["feed"] * chip.bandwidth)
                seconds = seconds + partial + c["split_us"] * MICROSECOND
            best = seconds if best is None else minimum(best, seconds)
    return best


def quantise_seconds(m: Any, k: Any, chip: Chip, c: Mapping[str, float]) -> Any:
    """The pass that reads 16-bit activations and writes 8-bit ones: all SMs on all rows, or one SM on one row [s]."""
    together = 3.0 * m * k / (chip.bandwidth * c["quantise"])
    rows = ceil(m / (QUANTISE_ROWS * chip.sms)) * c["quantise_row_us"] * MICROSECOND
    return together + rows


def seconds(columns: Columns, chip: Chip, c: Mapping[str, float]) -> Any:
    """Seconds of each row.

    Columns: m, n, k; bytes (all moved); weight_bytes, input_bytes per element (input scalar in all rows alike); unit.
    """
    gain = cache_gain(columns["bytes"], chip, c["cache_gain"]) if "cache_gain" in c else 1.0
    memory = columns["bytes"] / (chip.bandwidth * c["memory"] * gain)
    tiled = by_rows_seconds if columns.get("menu") == "by_rows" else tiled_seconds
    rate = chip.peak(columns["unit"])
    operands = (columns["m"], columns["n"], columns["k"], columns["weight_bytes"], columns["input_bytes"])
    multiply = tiled(*operands, rate, chip, c)
    ideal = 2.0 * columns["m"] * columns["n"] * columns["k"] / rate
    multiply = multiply * (1.0 + (1.0 / c.get("sustained", 1.0) - 1.0) * ideal / (ideal + LONG))
    total = c["launch_us"] * MICROSECOND + overlap(c["overlap"], memory, multiply)
    if "quantise" in c:
        total = total + quantise_seconds(columns["m"], columns["k"], chip, c)
    return total


GEMM = Model("gemm", CONSTANTS, seconds)
HEADS_GEMM = Model("heads_gemm", (*CONSTANTS[:-1], CACHE), seconds)
"""A matmul per head, whose weights are small enough to stay in the cache."""
QUANTISED_GEMM = Model("gemm_q", (*CONSTANTS, QUANTISE, QUANTISE_ROW), seconds)
