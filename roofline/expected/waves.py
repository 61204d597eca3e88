"""Expected time of kernels whose CTAs each work through one piece: a query's selection, a block of scores, a channel.

CTAs run in waves over the SMs; one of them costs a fixed time and its matrix work or its bytes, whichever is longer. A
kernel that splits pieces over idle SMs has smaller pieces, not fewer bytes: memory as a whole stays the floor.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from roofline.expected.arithmetic import maximum
from roofline.expected.model import LAUNCH, MATRIX, MEMORY, MICROSECOND, Chip, Columns, Constant, Model, overlap

WAVE = Constant("wave_us", 1.0, 0.02, 60.0, "fixed time of one wave of CTAs [us]")
FEED = Constant("feed", 1.0, 0.02, 16.0, "rate at which one CTA reads, in shares of one SM's memory bandwidth")
LOW_MATRIX = Constant("matrix", 0.5, 0.02, 0.93, MATRIX.meaning)
SIDE_BY_SIDE = 3.0
"""Order of the norms that join a CTA's two streams, and all CTAs with memory."""


def waves_seconds(columns: Columns, chip: Chip, c: Mapping[str, float]) -> Any:
    """Columns: bytes; ctas; of each: cta.flops, cta.bytes, rounds (of its fixed time, 1 where absent); unit."""
    multiply = columns["cta.flops"] / (chip.peak(columns["unit"]) / chip.sms * c["matrix"])
    feed = columns["cta.bytes"] / (chip.bandwidth / chip.sms * c["feed"])
    piece = columns.get("rounds", 1.0) * c["wave_us"] * MICROSECOND + overlap(SIDE_BY_SIDE, multiply, feed)
    waves = maximum(1.0, columns["ctas"] / chip.sms)
    memory = columns["bytes"] / (chip.bandwidth * c["memory"])
    return c["launch_us"] * MICROSECOND + overlap(SIDE_BY_SIDE, memory, waves * piece)


WAVES = Model("waves", (LAUNCH, MEMORY, LOW_MATRIX, WAVE, FEED), waves_seconds)
