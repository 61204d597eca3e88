"""What every time model shares: named constants with physical bounds, the chip as plain floats, and the overlap norm.

A time model turns what an operator does (its Cost and its shape) into seconds by at most eight constants, ten where a
pass that quantises activations is part of the kernel. A constant is a duration, a fraction of a datasheet rate, or a
degree of overlap; its bounds say what is physically possible, and its start is the prior that all kernels share.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from roofline.accelerator import Accelerator
from roofline.expected.arithmetic import clip, maximum

Columns = Mapping[str, Any]
"""What a time model looks at: float64 arrays of one length, by name."""
MICROSECOND = 1e-6
EXPONENTIALS_PER_CLOCK = 16
"""Exponentials that the special-function units of one SM finish per clock (CUDA C++ programming guide, throughput table)."""
MOST_CONSTANTS, MORE_FOR_QUANTISE = 8, 2
PARTITIONED = ("sm_80", "sm_90", "sm_100", "sm_103")
"""Architectures whose last-level cache lies in two partitions (NVIDIA A100, H100 and Blackwell architecture papers)."""
HALVED = 0.6
"""Share of a partitioned cache that holds distinct data: half where all lines lie twice, and a little more."""
PAIRED = ("sm_100", "sm_103")
"""Architectures whose matrix instructions span a pair of CTAs (PTX ISA, tcgen05.mma with cta_group::2)."""
FIRST_WITH_PRODUCERS = 90
"""The first architecture with a tensor memory accelerator (CUDA C++ programming guide, compute capability 9.0)."""


@dataclass(frozen=True)
class Constant:
    """One fitted constant.

    Attributes:
        name: what it is called in hardware files.
        start: the prior. low, high: physical bounds.
        meaning: what it is, with its unit.
    """

    name: str
    start: float
    low: float
    high: float
    meaning: str


@dataclass(frozen=True)
class Chip:
    """The numbers of an accelerator that time models use, as floats in base units."""

    accelerator: Accelerator

    @cached_property
    def bandwidth(self) -> float:
        """Device memory [B/s]."""
        return float(self.accelerator.bandwidth.value)

    @cached_property
    def sms(self) -> float:
        """Streaming multiprocessors."""
        return float(self.accelerator.chip["sm_count"].value)

    @cached_property
    def l2(self) -> float:
        """Last-level cache [B], 0 where it is not known."""
        return float(self.accelerator.l2.value) if self.accelerator.l2 else 0.0

    @cached_property
    def resident(self) -> float:
        """What stays in the last-level cache of data that come round again [B].

        A cache in two partitions keeps lines that all SMs read in both of them.
        """
        return self.l2 * (HALVED if self.accelerator.architecture in PARTITIONED else 1.0)

    @cached_property
    def producers(self) -> bool:
        """Whether warps of their own copy tiles, beside those that multiply: the tensor memory accelerator, from sm_90 on."""
        name = self.accelerator.architecture
        return not name.startswith("sm_") or int(name[3:]) >= FIRST_WITH_PRODUCERS

    @cached_property
    def pairs(self) -> bool:
        """Whether two CTAs on neighbouring SMs multiply as a pair, each holding half of the operand that both need."""
        return self.accelerator.architecture in PAIRED

    @cached_property
    def exponentials(self) -> float:
        """Exponentials per second of the whole chip."""
        return self.sms * EXPONENTIALS_PER_CLOCK * self.clock

    @cached_property
    def link(self) -> float:
        """One direction of the link between the accelerators of a server [B/s]."""
        links = self.accelerator.links
        return float(links[next(name for name in ("nvlink", "xgmi", "pcie") if name in links)].bandwidth.value)

    @cached_property
    def clock(self) -> float:
        """Boost clock [Hz]."""
        return float(self.accelerator.chip["boost_clock"].value)

    @cached_property
    def watts_per_flops(self) -> float:
        """Thermal design power over the 16-bit peak [W s/FLOP]."""
        return float(self.accelerator.chip["tdp"].value) / self.peak("bf16")

    def peak(self, unit: str) -> float:
        """Dense rate of the unit that executes work meant for ``unit`` [FLOP/s]."""
        return float(self.accelerator.rate(unit))


@dataclass(frozen=True)
class Model:
    """A time model: its constants, and the function that turns columns into seconds."""

    name: str
    constants: tuple[Constant, ...]
    seconds: Callable[[Columns, Chip, Mapping[str, float]], Any]

    @property
    def start(self) -> dict[str, float]:
        """The priors by name."""
        return {constant.name: constant.start for constant in self.constants}

    def named(self, values: Any) -> dict[str, float]:
        """Constants by name from a sequence in the order of the model."""
        return {constant.name: float(value) for constant, value in zip(self.constants, values, strict=True)}


def overlap(p: float, *terms: Any) -> Any:
    """``(a^p + b^p + ...)^(1/p)``: one after the other at p = 1, perfectly side by side as p grows."""
    longest = terms[0]
    for term in terms[1:]:
        longest = maximum(longest, term)
    longest = maximum(longest, 1e-30)
    return longest * sum((term / longest) ** p for term in terms) ** (1.0 / p)


def cache_gain(touched: Any, chip: Chip, gain: float) -> Any:
    """How much faster than device memory operands come that may lie in the last-level cache: ``gain`` while they fit it."""
    if not chip.l2:
        return 1.0
    return 1.0 + (gain - 1.0) * clip((0.8 * chip.l2 - touched) / (0.4 * chip.l2), 0.0, 1.0)


LAUNCH = Constant("launch_us", 3.0, 0.3, 400.0, "launch, prologue and epilogue of the kernel [us]")
MEMORY = Constant("memory", 0.85, 0.4, 0.93, "achieved fraction of the memory bandwidth")
MATRIX = Constant("matrix", 0.8, 0.2, 0.93, "achieved fraction of the matrix units' peak")
OVERLAP = Constant("overlap", 2.5, 1.0, 8.0, "order of the norm that joins memory and compute: 1 none, 8 perfect overlap")
CACHE = Constant("cache_gain", 1.2, 1.0, 5.0, "bandwidth of the last-level cache over that of memory, for data that fit it")
