"""Expected time of a matrix multiplication: waves of tiles over the SMs, fed from the cache, beside the memory stream.

Of a fixed list of tiles and splits of the inner dimension the fastest counts, as a library's heuristic would choose. A
tile step multiplies at the achieved peak or waits for its operands, which pass the port between an SM and the last-level
cache: half of the weights where two tiles of rows multiply as a pair. The last wave may be partly empty; splits add a
reduction. Operands come from memory, with the latency of its first bytes, or from the cache where all that a measurement
goes round in stays there.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from roofline.expected.arithmetic import ceil, clip, minimum, where
from roofline.expected.model import LAUNCH, MATRIX, MEMORY, MICROSECOND, OVERLAP, Chip, Columns, Constant, Model, overlap

SMALL = ((128, 256), (256, 128), (128, 128), (128, 64), (64, 256), (64, 128), (64, 64), (64, 32), (64, 16))
"""Tiles of warps that copy and multiply."""
TILES = (*SMALL, (192, 128), (128, 192), (192, 192), (320, 128), (128, 320))
"""Tiles where producer warps copy: those that multiply keep more accumulators."""
SPLITS = (1, 2, 4, 8)
BY_ROWS = ((64.0, 64, 64), (128.0, 64, 128), (float("inf"), 128, 128))
"""Tiles of CUTLASS kernels that pick theirs by the number of rows alone, and never split: (most rows, tile)."""
PARTIAL_BYTES = 4
"""Bytes of one partial sum of a split, written once and read once."""
REDUCTION = 2.5e-6
"""Seconds of the second pass that adds up the splits: a launch."""
PRODUCED, ALONE = 3.0, 2.0
"""Order of the norm that joins memory and tiles, with producer warps and without, where it is not fitted."""
RAMP = 0.2
"""Half of the range, in last-level caches, over which what a measurement goes round in ceases to stay in the cache."""

PORT = Constant("port_bytes", 80.0, 12.0, 128.0, "operands that reach one SM per clock, those shared with neighbours too [B]")
CACHED = Constant(
    "cache_bytes", 10.0, 2.0, 64.0, "what the last-level cache delivers per clock and SM of data that stay in it [B]"
)
FIRST = Constant("first_us", 1.5, 0.05, 5.0, "until the first bytes arrive from memory, that the cache has at once [us]")
WAVE = Constant("wave_us", 0.3, 0.005, 8.0, "prologue and epilogue of one wave of tiles [us]")
QUANTISE = Constant("quantise", 0.6, 0.05, 0.93, "achieved fraction of the memory bandwidth where activations are quantised")
QUANTISE_ROW = Constant("quantise_row_us", 0.5, 0.005, 8.0, "one wave of rows, 16 per SM, in that pass [us]")
SUSTAINED = Constant("sustained", 0.93, 0.6, 1.0, "rate of the matrix units in a long run over that in a short one: power")

CONSTANTS = (LAUNCH, MEMORY, MATRIX, PORT, WAVE, CACHED, FIRST, SUSTAINED)


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
        feed = (rows * input_bytes + columns * weight_bytes) / (chip.clock * c["port_bytes"])
        waves = ceil(ceil(m / rows) * ceil(n / columns) / chip.sms)
        seconds = waves * (k * overlap(4.0, multiply, feed) + c["wave_us"] * MICROSECOND)
        result = where((m > least) & (m <= most), seconds, result)
        least = most
    return result


def tiled_seconds(
    m: Any, n: Any, k: Any, weight_bytes: Any, input_bytes: float, rate: float, chip: Chip, c: Mapping[str, float],
    splitting: tuple[int, ...] = SPLITS,
) -> Any:  # fmt: skip
    """Time of the multiplication alone, memory apart: the fastest of the tiles and splits [s].

    Args:
        m, n, k: rows, outputs, inputs.
        weight_bytes, input_bytes: bytes per element of weight and of activation as the matrix unit reads them.
        rate: peak of the matrix unit [FLOP/s].
        splitting: parts into which the kernel may cut the inner dimension.
    """
    best: Any = None
    port = chip.clock * c["port_bytes"]
    for rows, columns in TILES if chip.producers else SMALL:
        multiply = 2.0 * rows * columns / (rate / chip.sms * c["matrix"])
        down, across = ceil(m / rows), columns * weight_bytes
        if chip.pairs:
            across = where(down > 1.0, 0.5 * across, across)
        step = overlap(4.0, multiply, (rows * input_bytes + across) / port)
        tiles = down * ceil(n / columns)
        for splits in splitting:
            waves = ceil(tiles * splits / chip.sms)
            seconds = waves * (k * (step / splits) + c["wave_us"] * MICROSECOND)
            if splits > 1:
                seconds = seconds + (2.0 * PARTIAL_BYTES * splits) * m * n / (chip.sms * port) + REDUCTION
            best = seconds if best is None else minimum(best, seconds)
    return best


def quantise_seconds(m: Any, k: Any, chip: Chip, c: Mapping[str, float]) -> Any:
    """The pass that reads 16-bit activations and writes 8-bit ones: all SMs on all rows, or one SM on one row [s]."""
    together = 3.0 * m * k / (chip.bandwidth * c["quantise"])
    rows = ceil(m / (QUANTISE_ROWS * chip.sms)) * c["quantise_row_us"] * MICROSECOND
    return together + rows


def memory_seconds(moved: Any, touched: Any, chip: Chip, c: Mapping[str, float]) -> Any:
    """Time of the operands' stream [s]: from memory, or from the cache as far as ``touched`` bytes stay there."""
    memory = c["first_us"] * MICROSECOND + moved / (chip.bandwidth * c["memory"])
    if touched is None or not chip.l2:
        return memory
    cold = clip((touched - chip.resident) / (2.0 * RAMP * chip.l2) + 0.5, 0.0, 1.0)
    return cold * memory + (1.0 - cold) * moved / (chip.sms * chip.clock * c["cache_bytes"])


def seconds(columns: Columns, chip: Chip, c: Mapping[str, float]) -> Any:
    """Seconds of each row.

    Columns: m, n, k; bytes (all moved); weight_bytes, input_bytes per element (input scalar in all rows alike); unit;
    menu ("library", "by_rows", or "whole" for a kernel that never splits); touched (bytes that a measurement goes round in,
    absent where operands come from memory).
    """
    memory = memory_seconds(columns["bytes"], columns.get("touched"), chip, c)
    rate = chip.peak(columns["unit"])
    operands = (columns["m"], columns["n"], columns["k"], columns["weight_bytes"], columns["input_bytes"])
    menu = columns.get("menu")
    if menu == "by_rows":
        multiply = by_rows_seconds(*operands, rate, chip, c)
    else:
        multiply = tiled_seconds(*operands, rate, chip, c, (1,) if menu == "whole" else SPLITS)
    ideal = 2.0 * columns["m"] * columns["n"] * columns["k"] / rate
    multiply = multiply * (1.0 + (1.0 / c.get("sustained", 1.0) - 1.0) * ideal / (ideal + LONG))
    order = c.get("overlap", PRODUCED if chip.producers else ALONE)
    total = c["launch_us"] * MICROSECOND + overlap(order, memory, multiply)
    if "quantise" in c:
        total = total + quantise_seconds(columns["m"], columns["k"], chip, c)
    return total


GEMM = Model("gemm", CONSTANTS, seconds)
HEADS_GEMM = Model("heads_gemm", (*CONSTANTS[:-1], OVERLAP), seconds)
"""A matmul per head: short, and not always in one kernel."""
QUANTISED_GEMM = Model("gemm_q", (*CONSTANTS, QUANTISE, QUANTISE_ROW), seconds)
