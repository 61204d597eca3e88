"""Time: what a Cost takes on an accelerator.

Streams run side by side on a device: the matrix units (their formats share the same silicon, so their times add), the
elementwise units, memory, and each link to other devices. ``bound`` is the longest stream, perfect overlap: nothing can
be faster. ``serial`` is their sum, no overlap at all, and at most (number of streams) times the bound.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from roofline.accelerator import Accelerator
from roofline.cost import MATRIX_UNITS, Cost
from roofline.errors import InputError
from roofline.numeric import maximum, reading

MEMORY, COMPUTE, VECTOR = "memory", "compute", "vector"


@dataclass(frozen=True)
class Timing:
    """Seconds by stream; floats, float64 arrays or expressions.

    Attributes:
        memory: bytes moved over the memory bandwidth.
        compute: FLOPs of the matrix units, each over the rate of the unit that executes them.
        vector: elementwise FLOPs over the vector rate; 0 where the rate is not known.
        links: bytes sent over the bandwidth of each link, by its name; empty on one device.
    """

    memory: Any
    compute: Any
    vector: Any
    links: Mapping[str, Any] = field(default_factory=dict)

    @property
    def streams(self) -> dict[str, Any]:
        """Seconds by stream name."""
        return {MEMORY: self.memory, COMPUTE: self.compute, VECTOR: self.vector, **self.links}

    @property
    def bound(self) -> Any:
        """The longest stream: perfect overlap [s]."""
        longest = maximum(maximum(self.memory, self.compute), self.vector)
        for seconds in self.links.values():
            longest = maximum(longest, seconds)
        return longest

    @property
    def serial(self) -> Any:
        """All streams one after another: no overlap [s]."""
        total = self.memory + self.compute + self.vector
        for seconds in self.links.values():
            total = total + seconds
        return total

    @property
    def bound_by(self) -> Any:
        """Name of the stream that binds (an array of names for arrays)."""
        names = tuple(self.streams)
        module = reading(*self.streams.values())
        if module is None:
            return max(names, key=self.streams.__getitem__)
        if module.__name__ == "numpy":
            values = module.broadcast_arrays(*self.streams.values())
            return module.array(names)[module.argmax(module.stack(values), axis=0)]
        raise TypeError("which stream binds depends on the values: substitute numbers for the symbols first")


def _seconds(amount: Any, rate: Any) -> Any:
    value = amount / rate
    return float(value) if reading(value) is None else value


def time(cost: Cost, accelerator: Accelerator) -> Timing:
    """The stream times of a Cost on an accelerator, in the reading of the Cost."""
    compute: Any = 0.0
    flops = cost._flops
    for unit, amount in flops.items():
        if unit in MATRIX_UNITS:
            compute = compute + _seconds(amount, accelerator.rate(unit))
    vector: Any = 0.0
    if "vector" in flops and "vector" in accelerator.compute:
        vector = _seconds(flops["vector"], accelerator.compute["vector"].value)
    links = {name: _seconds(amount, link_rate(accelerator, name)) for name, amount in cost._sent.items()}
    return Timing(_seconds(cost.bytes, accelerator.bandwidth.value), compute, vector, links)


def link_rate(accelerator: Accelerator, name: str) -> Any:
    """Bytes per second of a link in one direction. Raises InputError where the accelerator's file does not list it."""
    if name not in accelerator.links:
        known = ", ".join(accelerator.links) or "none"
        raise InputError(f"gpu: {accelerator.id} lists no link {name!r} (it lists {known}); add it to its file under [links]")
    return accelerator.links[name].bandwidth.value
