"""Expected time of attention kernels of the FlashAttention kind: blocks of keys per CTA, CTAs in waves over the SMs.

Decode: one CTA per sequence, key-value head and split of the keys; each costs a fixed time, in which nothing streams, and
then its blocks. A cache of keys and values that fits the last-level cache comes at that cache's rate, whatever the memory.
Prefill: the query rows of one key-value head are packed into tiles of 128; a tile walks the blocks of 128 keys that its
mask shows, and each block pays the two matmuls and the exponentials; the longest tile ends the kernel.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from roofline.expected.arithmetic import ceil, clip, floor, minimum, where
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

BLOCK = 128
"""Keys per block, and query rows per tile."""
HEAD_ROWS = 64
"""Query heads of one key-value head that one CTA of a decode kernel serves."""
MOST_SPLITS = 64

CTA = Constant("cta_us", 2.5, 0.1, 30.0, "fixed time of one wave of CTAs: descriptors, first loads, epilogue [us]")
BLOCK_TIME = Constant("block_us", 0.7, 0.01, 5.0, "one block of 128 keys of 128 16-bit elements in one CTA [us]")
CACHE = Constant("cache_bytes", 16.0, 6.0, 64.0, "what one SM reads per clock of data that lie in the last-level cache [B]")
CACHED, UNCACHED = 0.7, 1.0
"""Parts of the last-level cache up to which data lie in it from one run to the next, and from which none do."""
MERGE = Constant("merge_us", 1.0, 0.02, 8.0, "second pass that merges split keys [us]")

EXPONENT = Constant("exponent", 0.6, 0.1, 0.95, "achieved fraction of the exponential units' rate")
TILE = Constant("tile_us", 2.7, 0.05, 12.0, "fixed time of one tile of query rows [us]")
LONGEST = Constant("longest", 2.0, 1.0, 8.0, "order of the norm that joins the average load of an SM and the longest tile")
WRITE = Constant("cache_write", 0.5, 0.1, 0.95, "achieved fraction of the memory bandwidth where new keys and values are written")


def decode_seconds(columns: Columns, chip: Chip, c: Mapping[str, float]) -> Any:
    """Seconds of one decode step.

    Columns: sequences, groups (key-value heads), heads_per_group, keys, windowed, width (of keys and values, their mean),
    key_bytes (per element), bytes; launches (of kernels one after the other, 1 where it is absent); warm (0 where other
    kernels ran since the keys were read last; 1, a kernel run again and again, where it is absent).
    """
    ctas = columns["sequences"] * columns["groups"] * ceil(columns["heads_per_group"] / HEAD_ROWS)
    blocks = ceil(columns["keys"] / BLOCK) + columns["windowed"]
    splits = clip(minimum(floor(chip.sms / ctas), blocks), 1.0, MOST_SPLITS)
    block = c["block_us"] * MICROSECOND * (columns["width"] / 128.0) * (columns["key_bytes"] / 2.0)
    waves = ceil(ctas * splits / chip.sms)
    fixed = columns.get("launches", 1.0) * c["launch_us"] + where(splits > 1, c["merge_us"], 0.0) + waves * c["cta_us"]
    moved = columns["bytes"]
    fits = clip((UNCACHED * chip.l2 - moved) / ((UNCACHED - CACHED) * chip.l2), 0.0, 1.0) if chip.l2 else 0.0
    cached = columns.get("warm", 1.0) * fits
    near, far = chip.sms * chip.clock * c["cache_bytes"], chip.bandwidth * c["memory"]
    memory = moved * (cached / near + (1.0 - cached) / far)
    return fixed * MICROSECOND + overlap(c["overlap"], memory, waves * ceil(blocks / splits) * block)


def blocks_seen(rows: Any, keys: Any, window: Any, behind: Any, size: float = BLOCK) -> tuple[Any, Any]:
    """Blocks of keys that tiles of query rows walk: the average over tiles, and the longest.

    Args:
        rows: tokens that one tile covers (128 rows over the heads of a group). keys: last position + 1.
        window: keys that a query sees, the number of keys where there is no window; 0 for a full mask.
        behind: cached tokens in front of the first query. size: keys per block.
    """
    full = window == 0
    reach = minimum(where(full, keys, window), keys)
    longest = ceil(minimum(keys, reach + rows) / size)
    new = keys - behind
    ramp = clip(reach - behind, 0.0, new)
    mean = (ramp * (behind + 0.5 * ramp) + (new - ramp) * reach) / new
    average = minimum((mean + 0.5 * minimum(rows, reach)) / size + 0.5, longest)
    return where(full, ceil(keys / size), average), longest


def prefill_seconds(columns: Columns, chip: Chip, c: Mapping[str, float]) -> Any:
    """Seconds of a prefill.

    Columns: sequences, tokens (new, per sequence), behind (cached), groups, heads_per_group (1 where rows are not packed),
    width, value_width, window (keys a query sees; 0 for a full mask), bytes, write_bytes (cache write), unit, block (rows and
    keys of a tile; 128 where it is absent).
    """
    packed, size = columns["heads_per_group"], columns.get("block", BLOCK)
    tiles = ceil(columns["tokens"] * packed / size)
    keys = columns["tokens"] + columns["behind"]
    average, longest = blocks_seen(size / packed, keys, columns["window"], columns["behind"], size)
    padded = ceil(columns["width"] / 64) * 64 + ceil(columns["value_width"] / 64) * 64
    multiply = 2.0 * padded * size**2 / (chip.peak(columns["unit"]) / chip.sms * c["matrix"])
    exponents = size**2 / (chip.exponentials / chip.sms * c["exponent"])
    block = overlap(c["overlap"], multiply, exponents)
    tile = c["tile_us"] * MICROSECOND
    load = columns["sequences"] * columns["groups"] * tiles * (average * block + tile) / chip.sms
    memory = (columns["bytes"] - columns["write_bytes"]) / (chip.bandwidth * c["memory"])
    written = columns["write_bytes"] / (chip.bandwidth * c["cache_write"])
    core = overlap(3.0, overlap(c["longest"], load, longest * block + tile), memory)
    return c["launch_us"] * MICROSECOND + core + written


DECODE = Model("decode", (LAUNCH, MEMORY, CTA, BLOCK_TIME, MERGE, OVERLAP, CACHE), decode_seconds)
PREFILL = Model("prefill", (LAUNCH, MEMORY, MATRIX, EXPONENT, TILE, OVERLAP, LONGEST, WRITE), prefill_seconds)
