"""Does it fit: weights, state and workspace of one device against its memory, and the largest batch and context that do."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

from roofline.accelerator import Accelerator
from roofline.numeric import floor_div, reading, scale


@dataclass(frozen=True)
class Memory:
    """Bytes that one step holds at once, against what the device offers.

    Attributes:
        weight_bytes: stored weights.
        kv_bytes: state of all sequences: KV cache and fixed recurrent state; before a decode step, after a prefill.
        workspace_bytes: activations of the greediest kernel (inputs and outputs).
        capacity_bytes: device memory times the fraction that may be used.
        new_kv_bytes: state that a decode step adds, which must have room as well.
    """

    weight_bytes: Any
    kv_bytes: Any
    workspace_bytes: Any
    capacity_bytes: Any
    new_kv_bytes: Any = 0

    @property
    def total_bytes(self) -> Any:
        """Weights and state: the tensors that stay."""
        return self.weight_bytes + self.kv_bytes

    @property
    def required_bytes(self) -> Any:
        """Weights, state with what the step adds to it, and workspace: what must fit."""
        return self.total_bytes + self.new_kv_bytes + self.workspace_bytes

    @property
    def spare_bytes(self) -> Any:
        """Capacity that is left over; negative by what is missing."""
        return self.capacity_bytes - self.required_bytes

    @property
    def fits(self) -> Any:
        """Whether it fits: a bool, or an array of them."""
        return self.spare_bytes >= 0


def usable(accelerator: Accelerator, fraction: Fraction) -> Any:
    """The whole bytes of device memory that may be used."""
    return floor_div(scale(accelerator.capacity.value, fraction), 1)


@dataclass(frozen=True)
class Largest:
    """The largest size that fits, and by how much the next one misses.

    Attributes:
        size: the largest batch or context that fits; 0 where not even 1 does; None where nothing limits it.
        missing_bytes: bytes that size + 1 lacks; None where nothing limits it.
    """

    size: int | None
    missing_bytes: Any


def largest(memory_at: Callable[[int], Memory], limit: int) -> Largest:
    """The largest size in 1 ... limit whose memory fits, by bisection; memory must grow with size.

    ``size`` is None when even ``limit`` fits: the memory does not bound it.
    """
    low, high = 0, 1
    while memory_at(high).fits:
        low = high
        if high >= limit:
            return Largest(None, None)
        high = min(2 * high, limit)
    while high - low > 1:
        middle = (low + high) // 2
        if memory_at(middle).fits:
            low = middle
        else:
            high = middle
    return Largest(low, -memory_at(low + 1).spare_bytes)


def plain(value: Any) -> Any:
    """A number as JSON takes it: ints stay ints, a whole Fraction becomes one, another Fraction a float, a formula text."""
    if isinstance(value, Fraction):
        return value.numerator if value.denominator == 1 else float(value)
    if isinstance(value, str) or value is None or hasattr(value, "tolist"):
        return value.tolist() if hasattr(value, "tolist") else value
    return value if reading(value) is None else str(value)
