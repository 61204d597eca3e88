"""Expected time of collectives between the accelerators of one server: start-up per rank, then the wire.

An all-reduce sends every byte at least once and receives it once; a ring sends ``2 (n - 1) / n`` of them, and switches
that add up on the way come down to the single pass. The rest send ``(n - 1) / n``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from roofline.expected.arithmetic import log2, maximum, minimum, sqrt
from roofline.expected.model import MICROSECOND, Chip, Columns, Constant, Model, overlap

PASSES = {"all_reduce": 2, "all_gather": 1, "reduce_scatter": 1, "alltoall": 1}
"""Times that a ring sends ``(n - 1) / n`` of the message."""

START = Constant("launch_us", 4.0, 0.5, 60.0, "launch and first handshake [us]")
RANK = Constant("rank_us", 0.5, 0.01, 6.0, "handshake with one more rank [us]")
LINK = Constant("link", 0.85, 0.3, 0.95, "achieved fraction of the link's bandwidth by long messages")
RAMP = Constant("ramp", 3.0, 0.05, 20.0, "what a message of 1 MB pays beside its bytes, in MB of wire, growing with its root")
JOIN = Constant("overlap", 1.5, 1.0, 8.0, "order of the norm that joins start-up and wire")
SWITCH = Constant("in_switch", 0.1, 0.01, 1.0, "share of a ring that switches save, per doubling of ranks beyond two")
DIRECT = Constant("direct", 0.6, 0.1, 0.95, "achieved fraction of the link where each rank reads all others at once, in one step")
SECOND = Constant("second_us", 3.0, 0.05, 30.0, "what the algorithm in two steps takes more to start [us]")

EAGER = Constant("direct", 0.05, 0.005, 0.95, "achieved fraction of the link by short messages, whose words carry flags")

MEGABYTE = 1e6
SIDE_BY_SIDE = 3.0
"""Order of the norm that joins the link and the SMs that feed it."""


def wire_bytes(kind: str, ranks: Any, size: Any) -> Any:
    """Bytes that a rank sends in a ring; ``size`` is the whole message."""
    return PASSES[kind] * (ranks - 1.0) / ranks * size


def least_wire_bytes(kind: str, ranks: Any, size: Any) -> Any:
    """Bytes that a rank must send whatever the algorithm: an all-reduce each of its own once."""
    return size if kind == "all_reduce" else (ranks - 1.0) / ranks * size


def seconds(columns: Columns, chip: Chip, c: Mapping[str, float]) -> Any:
    """Columns: ranks, wire (bytes of a ring); at_once (bytes of the longest queue of a way in one step) where there is one."""
    ranks, wire = columns["ranks"], columns["wire"]
    if "in_switch" in c:
        wire = wire * maximum(1.0 - c["in_switch"] * log2(ranks / 2.0), 0.5)
    start = c["launch_us"] * MICROSECOND + c["rank_us"] * MICROSECOND * ranks
    rate = chip.link * c["link"]
    ramp = c["ramp"] * MEGABYTE * sqrt(columns["wire"] / MEGABYTE)
    if "direct" not in c:
        return overlap(c["overlap"], start, (wire + ramp) / rate)
    at_once = overlap(c["overlap"], start, columns["at_once"] / (chip.link * c["direct"]))
    in_steps = overlap(c["overlap"], start + c["second_us"] * MICROSECOND, (wire + ramp) / rate)
    return minimum(at_once, in_steps)


EXCHANGE_START = Constant("launch_us", 30.0, 0.5, 600.0, "launch, handshake and, where the host is in it, its work [us]")
STEP = Constant(
    "step_us", 1.0, 0.01, 30.0, "one of the steps that a message waits for: 1024 elements of a row, or 100 experts [us]"
)
WIRE = Constant("link", 0.7, 0.05, 0.95, LINK.meaning)
WAY = Constant("way", 0.6, 0.01, 8.0, "rate at which one SM sends, in shares of one SM's memory bandwidth")
OWN = Constant("own", 0.5, 0.01, 8.0, "what a token costs beside its copies, in copies")


def exchange_seconds(columns: Columns, chip: Chip, c: Mapping[str, float]) -> Any:
    """Columns: wire (bytes that a rank sends); own (bytes of its tokens, once); ways (SMs that send); steps."""
    moved = columns["wire"] + c["own"] * columns["own"]
    link = moved / (chip.link * c["link"])
    sending = moved / (columns["ways"] * (chip.bandwidth / chip.sms) * c["way"])
    start = (c["launch_us"] + c["step_us"] * columns["steps"]) * MICROSECOND
    return start + overlap(SIDE_BY_SIDE, link, sending)


COLLECTIVE = Model("collective", (START, RANK, LINK, RAMP, JOIN), seconds)
ALL_TO_ALL = Model("all_to_all", (START, RANK, LINK, RAMP, JOIN, EAGER, SECOND), seconds)
ALL_REDUCE = Model("all_reduce", (START, RANK, LINK, RAMP, JOIN, SWITCH), seconds)
CUSTOM_ALL_REDUCE = Model("custom_all_reduce", (START, RANK, LINK, RAMP, JOIN, SWITCH, DIRECT, SECOND), seconds)
EXCHANGE = Model("exchange", (EXCHANGE_START, STEP, WIRE, WAY, OWN), exchange_seconds)
