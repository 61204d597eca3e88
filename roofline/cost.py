"""Cost: what a piece of work asks of the machine, before any machine is named.

FLOPs are keyed by the unit that executes them ("bf16", "fp8", "int8", "fp4", "fp32" matrix units, "vector" for
elementwise arithmetic, "special" for exponentials and roots); bytes by direction and stream ("weights", "activations",
"state", "index"); bytes sent to other devices by link; launches count kernels. One multiply-add is 2 FLOP; causal
attention counts the causal half.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from types import MappingProxyType
from typing import Any

from roofline.numeric import is_exact, ratio

MATRIX_UNITS = ("bf16", "fp8", "int8", "fp4", "fp32")
STREAMS = ("weights", "activations", "state", "index")

_NONE: dict[str, Any] = {}


class Cost:
    """FLOPs by executing unit, bytes read and written by stream, bytes sent by link, kernel launches. Immutable.

    Values are ints or Fractions (exact), float64 arrays (sweeps) or sympy expressions (formulas); a Cost never asks
    which. Two Costs compare by value while their entries are exact; comparing inexact ones raises TypeError.
    """

    __slots__ = ("_flops", "_launches", "_read", "_sent", "_write")

    def __init__(
        self,
        flops: dict[str, Any] = _NONE,
        read: dict[str, Any] = _NONE,
        write: dict[str, Any] = _NONE,
        launches: Any = 0,
        sent: dict[str, Any] = _NONE,
    ) -> None:
        self._flops = flops
        self._read = read
        self._write = write
        self._launches = launches
        self._sent = sent

    @property
    def flops(self) -> Mapping[str, Any]:
        """FLOPs by executing unit."""
        return MappingProxyType(self._flops)

    @property
    def read(self) -> Mapping[str, Any]:
        """Bytes read, by stream."""
        return MappingProxyType(self._read)

    @property
    def write(self) -> Mapping[str, Any]:
        """Bytes written, by stream."""
        return MappingProxyType(self._write)

    @property
    def launches(self) -> Any:
        """Kernels launched."""
        return self._launches

    @property
    def sent(self) -> Mapping[str, Any]:
        """Bytes that this device sends to others, in one direction, by name of the link."""
        return MappingProxyType(self._sent)

    @property
    def matrix_flops(self) -> Any:
        """FLOPs of all matrix units together: the matmul FLOPs that an operator counter finds."""
        return sum(v for u, v in self._flops.items() if u in MATRIX_UNITS)

    @property
    def bytes_read(self) -> Any:
        return sum(self._read.values())

    @property
    def bytes_written(self) -> Any:
        return sum(self._write.values())

    @property
    def bytes(self) -> Any:
        """Bytes moved between memory and chip in both directions; what is sent to other devices is not among them."""
        return self.bytes_read + self.bytes_written

    @property
    def activation_bytes(self) -> Any:
        """Bytes of activations read and written."""
        return self._read.get("activations", 0) + self._write.get("activations", 0)

    @property
    def intensity(self) -> Any:
        """Arithmetic intensity: matrix FLOPs per byte moved [FLOP/B]."""
        return ratio(self.matrix_flops, self.bytes)

    @staticmethod
    def total(terms: Iterable[tuple[Any, Cost]]) -> Cost:
        """The sum of ``count * cost`` over (count, cost) pairs, in one pass."""
        flops: dict[str, Any] = {}
        read: dict[str, Any] = {}
        write: dict[str, Any] = {}
        sent: dict[str, Any] = {}
        launches: Any = 0
        for times, cost in terms:
            for total, part in ((flops, cost._flops), (read, cost._read), (write, cost._write), (sent, cost._sent)):
                for key, value in part.items():
                    value = value if times == 1 else times * value
                    total[key] = total[key] + value if key in total else value
            launches = launches + times * cost._launches
        return Cost(flops, read, write, launches, sent)

    def __add__(self, other: Cost) -> Cost:
        return Cost.total(((1, self), (1, other)))

    def __rmul__(self, times: Any) -> Cost:
        return Cost.total(((times, self),))

    def entries(self) -> Iterator[tuple[str, str, Any]]:
        """(section, key, value) of every entry: sections are "flops", "read", "write", "sent", "launches"."""
        for section, part in (("flops", self._flops), ("read", self._read), ("write", self._write), ("sent", self._sent)):
            for key, value in part.items():
                yield section, key, value
        yield "launches", "kernels", self.launches

    def map(self, change: Any) -> Cost:
        """The Cost with ``change`` applied to every entry: a substitution, an evaluation, a rounding."""
        return Cost(
            {k: change(v) for k, v in self._flops.items()},
            {k: change(v) for k, v in self._read.items()},
            {k: change(v) for k, v in self._write.items()},
            change(self.launches),
            {k: change(v) for k, v in self._sent.items()},
        )

    def _nonzero(self) -> dict[tuple[str, str], Any]:
        found = {}
        for section, key, value in self.entries():
            if not is_exact(value):
                raise TypeError(f"Costs compare by value only when exact; {section} {key} is {type(value).__name__}")
            if value != 0:
                found[section, key] = value
        return found

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Cost):
            return NotImplemented
        return self._nonzero() == other._nonzero()

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        parts = [f"{section}.{key}={value}" for section, key, value in self.entries()]
        return f"Cost({', '.join(parts)})"
