"""Expected time of a whole attention block: the sum of its projections, its core and what runs between them.

Projections overlap their own memory and matrix streams and cost a fixed time each; elementwise kernels stream through
memory; 8-bit projections pay a pass that quantises their input, as fast as the SMs convert or memory allows. A block
that the host launches kernel by kernel cannot be faster than the host; one that is replayed as a graph has no such
floor (column ``eager``). For an 8-bit projection the host launches a pass more (column ``host.quantised``: how many).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from roofline.expected.arithmetic import ceil, minimum
from roofline.expected.attention import BLOCK as KEY_BLOCK
from roofline.expected.attention import EXPONENT, blocks_seen
from roofline.expected.attention import TILE as QUERY_TILE
from roofline.expected.latent import CTA, core_seconds
from roofline.expected.model import (
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

LAUNCH = Constant("launch_us", 20.0, 0.5, 150.0, "fixed time of the block: norms, rotation, cache write, gaps [us]")
HOST = Constant("host_us", 20.0, 1.0, 3000.0, "what the host needs to launch the block, a floor [us]")
PROJECTION = Constant("projection", 0.5, 0.08, 0.93, "achieved fraction of the matrix units' peak in projections")
PROJECTION_TIME = Constant("projection_us", 5.0, 0.3, 60.0, "fixed time of one projection [us]")
QUANTISE = Constant("quantise_bytes", 6.0, 0.4, 64.0, "what one SM moves per clock where activations are quantised [B]")
QUANTISE_TIME = Constant("quantise_us", 2.0, 0.05, 20.0, "fixed time of one such pass [us]")
SELECT = Constant("select_us", 10.0, 0.05, 200.0, "one wave of queries in a selection of fewer than there are [us]")
SHORT_CTA = Constant("cta_us", 1.0, 0.01, 30.0, CTA.meaning)
INDEX_MATRIX = Constant("index_matrix", 0.4, 0.01, 0.93, "achieved fraction of the matrix peak in the indexer's scores")
INDEX_MEMORY = Constant("index_memory", 0.3, 0.005, 0.93, "achieved fraction of the memory bandwidth in scores and selection")

SIDE_BY_SIDE = 3.0
"""Order of the norm that joins the two streams of a projection."""
HOST_OVERLAP = 8.0
HOST_QUANTISED_US = 80.0
"""What the host needs more for a projection that quantises its input [us]: the host's floors of 8-bit blocks in SGLang lie 73 to
86 per projection above those of 16-bit ones on an H100, in blocks of three, four and five such projections alike (in vLLM 58
to 60; its families are one per weight format, so that the rest goes into their own floors)."""


def projections_seconds(columns: Columns, chip: Chip, c: Mapping[str, float]) -> Any:
    """All projections, their quantisation passes included. Columns: linear<i>.flops, .bytes, .unit, .input (elements)."""
    total: Any = 0.0
    number = 0
    while f"linear{number}.flops" in columns:
        name = f"linear{number}"
        unit = columns[f"{name}.unit"]
        multiply = columns[f"{name}.flops"] / (chip.peak(unit) * c["projection"])
        memory = columns[f"{name}.bytes"] / (chip.bandwidth * c["memory"])
        total = total + overlap(SIDE_BY_SIDE, memory, multiply) + c["projection_us"] * MICROSECOND
        if unit != "bf16" and "quantise_bytes" in c:
            moved = 3.0 * columns[f"{name}.input"]
            rate = minimum(chip.sms * chip.clock * c["quantise_bytes"], chip.bandwidth * MEMORY.high)
            total = total + moved / rate + c["quantise_us"] * MICROSECOND
        number += 1
    return total


def index_seconds(columns: Columns, chip: Chip, c: Mapping[str, float]) -> Any:
    """Scores and selection of an indexer. Columns: index.flops, index.bytes."""
    multiply = columns["index.flops"] / (chip.peak("fp8") * c.get("index_matrix", 0.4))
    return overlap(SIDE_BY_SIDE, multiply, columns["index.bytes"] / (chip.bandwidth * c["index_memory"]))


def tiles_seconds(columns: Columns, chip: Chip, c: Mapping[str, float]) -> Any:
    """A prefill core in tiles of query rows; columns as for ``attention.prefill_seconds``, with "core." in front."""
    packed = columns["core.heads_per_group"]
    tiles = ceil(columns["core.tokens"] * packed / KEY_BLOCK)
    keys = columns["core.tokens"] + columns["core.behind"]
    average, longest = blocks_seen(KEY_BLOCK / packed, keys, keys, columns["core.behind"])
    padded = columns["core.width"] + columns["core.value_width"]
    multiply = 2.0 * padded * KEY_BLOCK**2 / (chip.peak(columns["core.unit"]) / chip.sms * c["matrix"])
    exponents = KEY_BLOCK**2 / (chip.exponentials / chip.sms * c["exponent"])
    block, tile = overlap(2.0, multiply, exponents), c["tile_us"] * MICROSECOND
    load = columns["core.sequences"] * columns["core.groups"] * tiles * (average * block + tile) / chip.sms
    memory = columns["core.bytes"] / (chip.bandwidth * c["memory"])
    return overlap(SIDE_BY_SIDE, overlap(2.0, load, longest * block + tile), memory)


Seconds = Callable[[Columns, Chip, Mapping[str, float]], Any]


def block_seconds(core: Seconds) -> Seconds:
    """The time model of a block with that core."""

    def seconds(columns: Columns, chip: Chip, c: Mapping[str, float]) -> Any:
        total = c["launch_us"] * MICROSECOND + projections_seconds(columns, chip, c) + core(columns, chip, c)
        if "select_us" in c:
            waves = ceil(columns["core.sequences"] / chip.sms)
            total = total + columns["selects"] * waves * c["select_us"] * MICROSECOND
        total = total + columns["other.bytes"] / (chip.bandwidth * c["memory"])
        if "index_memory" in c:
            total = total + index_seconds(columns, chip, c)
        if "host_us" not in c:
            return total
        host = c["host_us"] + HOST_QUANTISED_US * columns.get("host.quantised", 0.0)
        return overlap(HOST_OVERLAP, total, host * MICROSECOND * columns.get("eager", 1.0))

    return seconds


PROJECTIONS = (PROJECTION, PROJECTION_TIME)
QUANTISED = (QUANTISE, QUANTISE_TIME)
_DECODE, _PREFILL = block_seconds(core_seconds), block_seconds(tiles_seconds)


def _joined(columns: Columns, chip: Chip, c: Mapping[str, float]) -> Any:
    """A block whose core joins memory and matrix units as the prior says."""
    return _DECODE(columns, chip, {**c, "overlap": OVERLAP.start})


MODULE_DECODE = Model("module_decode", (LAUNCH, HOST, MEMORY, MATRIX, CTA, OVERLAP, *PROJECTIONS), _DECODE)
MODULE_PREFILL = Model("module_prefill", (LAUNCH, HOST, MEMORY, MATRIX, EXPONENT, QUERY_TILE, *PROJECTIONS), _PREFILL)
SPARSE_DECODE = Model(
    "sparse_decode", (LAUNCH, HOST, MEMORY, MATRIX, CTA, *PROJECTIONS, INDEX_MEMORY),
    _joined,
)  # fmt: skip
SPARSE_PREFILL = Model(
    "sparse_prefill", (LAUNCH, HOST, MEMORY, MATRIX, *PROJECTIONS, INDEX_MATRIX, INDEX_MEMORY),
    lambda columns, chip, c: _DECODE(columns, chip, {**c, "cta_us": 0.0, "overlap": OVERLAP.start}),
)  # fmt: skip

COMPRESSED_DECODE = Model("compressed_decode", (LAUNCH, MEMORY, MATRIX, CTA, *PROJECTIONS, INDEX_MEMORY, SELECT), _joined)
COMPRESSED_PREFILL = Model("compressed_prefill", (LAUNCH, MEMORY, MATRIX, SHORT_CTA, *PROJECTIONS, INDEX_MEMORY, SELECT), _joined)


def quantised(model: Model) -> Model:
    """The same block with 8-bit projections: two constants more."""
    return Model(f"{model.name}_q", (*model.constants, *QUANTISED), model.seconds)
