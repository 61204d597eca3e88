"""The device that a launch chooses its tiles for: what tile sizes depend on, and nothing else."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import cache
from typing import Any


@dataclass(frozen=True)
class Device:
    """A target of a launch.

    Attributes:
        arch: "sm_90", "gfx942", ...
        units: streaming multiprocessors (compute units).
        shared: bytes of shared memory that one program may use.
        registers: 32-bit registers of one unit; shared_per_unit: its bytes of shared memory; threads: its resident threads.
    """

    arch: str
    units: int
    shared: int
    shared_per_unit: int
    registers: int = 65536
    threads: int = 2048

    @property
    def has_tma(self) -> bool:
        """Whether tiles can be moved by the tensor memory accelerator."""
        return self.arch.startswith("sm_") and int(self.arch.removeprefix("sm_")) >= 90


DEVICES = {
    "sm_80": Device("sm_80", 108, 166912, 167936),
    "sm_90": Device("sm_90", 132, 232448, 233472),
    "sm_100": Device("sm_100", 148, 232448, 233472),
    "gfx942": Device("gfx942", 304, 65536, 65536, registers=131072),
}
"""Limits per architecture. Source: CUDA C++ programming guide, technical specifications; AMD CDNA 3 ISA guide."""

DEFAULT = "sm_90"
_chosen: ContextVar[Device | None] = ContextVar("device", default=None)


@contextmanager
def target(arch: str) -> Iterator[Device]:
    """Launches inside the block choose their tiles for this architecture, wherever the tensors are."""
    token = _chosen.set(DEVICES[arch])
    try:
        yield DEVICES[arch]
    finally:
        _chosen.reset(token)


@cache
def _present(index: int) -> Device:
    import torch

    found = torch.cuda.get_device_properties(index)
    arch = found.gcnArchName.partition(":")[0] if torch.version.hip else f"sm_{found.major}{found.minor}"
    known = DEVICES.get(arch, DEVICES[DEFAULT])
    shared = getattr(found, "shared_memory_per_block_optin", known.shared)
    return Device(arch, found.multi_processor_count, shared, known.shared_per_unit, known.registers, known.threads)


def current() -> Device:
    """The device that launches of tensors without a GPU choose for: the target, or an H100."""
    return _chosen.get() or DEVICES[DEFAULT]


def of(tensor: Any) -> Device:
    """The device of a tensor: the chosen target, the GPU it is on, or an H100 where it is on none."""
    return _present(tensor.device.index or 0) if tensor.is_cuda and _chosen.get() is None else current()
