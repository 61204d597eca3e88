"""All frames of an accelerator, their bounds, and the physical check: nothing measured may beat the bound."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from roofline.accelerator import load_accelerator
from roofline.errors import InputError, suggest
from roofline.expected.model import Chip
from roofline.timing import time
from roofline.validate.silicon import (
    attention,
    collective,
    compressed,
    delta,
    exchange,
    gemm,
    mla,
    moe,
    msa,
    parts,
    sparse,
    streams,
    wide,
)
from roofline.validate.silicon.frame import Frame

CLASSES = {
    "gemm": gemm, "attention_prefill": attention, "attention_decode": attention, "mla_prefill": mla, "mla_decode": mla,
    "mla_module": mla, "dsa": sparse, "csa": compressed, "hca": compressed, "moe": moe, "gated_delta": delta, "kda": delta,
    "mhc": streams, "quantize": streams, "all_reduce": collective, "collective": collective,
}  # fmt: skip
"""Class -> the adapter that has its rows."""
MORE = {"dsa": (parts, msa), "csa": (parts,), "hca": (parts,), "moe": (wide,), "collective": (exchange,)}
"""Classes with rows from further adapters: parts of blocks kernel by kernel, MiniMax-M3's blocks, wide groups of experts,
token exchanges."""
SLACK = 0.95
"""A row may be this much of the bound: clocks and timers are not exact."""
WARM = 1.5
"""Rows whose bytes fit in this many last-level caches may be warm in it, and faster than memory allows."""


def check_class(cls: str | None) -> None:
    """Raises InputError for a class that is not one."""
    if cls is not None and cls not in CLASSES:
        raise InputError(f"class: {cls!r} is not an operator class.{suggest(cls, CLASSES)} Classes: {', '.join(CLASSES)}")


def frames(gpu: str, classes: Iterable[str] | None = None) -> Iterator[Frame]:
    """Every frame of an accelerator, of some classes or all."""
    wanted = list(CLASSES) if classes is None else list(classes)
    adapters = dict.fromkeys(adapter for cls in wanted for adapter in (CLASSES[cls], *MORE.get(cls, ())))
    for adapter in adapters:
        for frame in adapter.frames(gpu):
            if frame.cls in wanted and len(frame):
                yield frame


def chip_of(gpu: str) -> Chip:
    """The numbers of an accelerator for the time models."""
    return Chip(load_accelerator(gpu))


def bound(frame: Frame, chip: Chip) -> Any:
    """Datasheet bound of each row [s]."""
    if "least_wire" in frame.columns:
        return frame.columns["least_wire"] / chip.link
    return time(frame.cost, chip.accelerator).bound


def beats_bound(frame: Frame, chip: Chip, limit: Any = None) -> Any:
    """Mask of the rows that no cache explains: faster than ``SLACK`` of the bound, on more distinct bytes than caches hold,
    or of the arithmetic alone."""
    fast = frame.seconds < SLACK * (bound(frame, chip) if limit is None else limit)
    if "least_wire" in frame.columns or not fast.any():
        return fast
    touched = frame.columns.get("touched", frame.columns["bytes"])
    compute = time(frame.cost, chip.accelerator).compute
    return fast & ((touched > WARM * chip.l2) | (frame.seconds < SLACK * compute))
