"""Time: what a Cost takes on an accelerator.

Streams run side by side on a device: the matrix units (their formats share the same silicon, so their times add), the
elementwise units, and memory. ``bound`` is the longest stream, perfect overlap: nothing can be faster. ``serial`` is
their sum, no overlap at all, and at most (number of streams) times the bound.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from roofline.accelerator import Accelerator
from roofline.cost import MATRIX_UNITS, Cost
from roofline.numeric import maximum, reading

MEMORY, COMPUTE, VECTOR = "memory", "compute", "vector"


@dataclass(frozen=True)
class Timing:
    """Seconds by stream; floats, float64 arrays or expressions.

    Attributes:
        memory: bytes moved over the memory bandwidth.
        compute: FLOPs of the matrix units, each over the rate of the unit that executes them.
        vector: elementwise FLOPs over the vector rate; 0 where the rate is not known.
    """

    memory: Any
    compute: Any
    vector: Any

    @property
    def streams(self) -> dict[str, Any]:
        """Seconds by stream name."""
        return {MEMORY: self.memory, COMPUTE: self.compute, VECTOR: self.vector}

    @property
    def bound(self) -> Any:
        """The longest stream: perfect overlap [s]."""
        return maximum(maximum(self.memory, self.compute), self.vector)

    @property
    def serial(self) -> Any:
        """All streams one after another: no overlap [s]."""
        return self.memory + self.compute + self.vector

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
    return Timing(_seconds(cost.bytes, accelerator.bandwidth.value), compute, vector)
