"""Expected time of attention over one shared latent entry: decode streams entries for all heads, 64 of which fill a tile."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from roofline.expected.arithmetic import ceil, floor, maximum
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

HEAD_ROWS = 64
"""Query rows of one matrix tile of a decode kernel; fewer heads leave the rest of it empty."""
ENTRIES = 64
"""Cached entries per block."""

CTA = Constant("cta_us", 5.0, 0.1, 30.0, "fixed time of one wave of CTAs [us]")
BLOCK = Constant("block_us", 0.3, 0.005, 8.0, "one block of 64 entries in one CTA [us]")


def core_seconds(columns: Columns, chip: Chip, c: Mapping[str, float], gain: Any = 1.0) -> Any:
    """The decode core [s]. Columns: core.flops, core.bytes, core.heads (rows per sequence), core.sequences, core.entries."""
    rows = columns["core.heads"]
    padded = ceil(rows / HEAD_ROWS) * HEAD_ROWS / rows
    ctas = columns["core.sequences"] * ceil(rows / HEAD_ROWS)
    multiply = columns["core.flops"] * padded / (chip.peak(columns["core.unit"]) * c["matrix"])
    memory = columns["core.bytes"] / (chip.bandwidth * c["memory"] * gain)
    waves = ceil(ctas / chip.sms)
    core = overlap(c["overlap"], memory, multiply) + waves * c["cta_us"] * MICROSECOND
    if "block_us" in c:
        splits = maximum(floor(chip.sms / ctas), 1.0)
        core = core + waves * ceil(ceil(columns["core.entries"] / ENTRIES) / splits) * c["block_us"] * MICROSECOND
    return core


def decode_seconds(columns: Columns, chip: Chip, c: Mapping[str, float]) -> Any:
    """Seconds of the core with its cache write."""
    gain = cache_gain(columns["bytes"], chip, c["cache_gain"])
    return c["launch_us"] * MICROSECOND + core_seconds(columns, chip, c, gain)


CONVERTING = Constant("matrix", MATRIX.start, 0.04, MATRIX.high, f"{MATRIX.meaning}; the conversion of 8-bit entries shows here")

LATENT_DECODE = Model("latent_decode", (LAUNCH, MEMORY, CONVERTING, CTA, BLOCK, OVERLAP, CACHE), decode_seconds)
