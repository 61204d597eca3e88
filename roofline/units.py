"""Parsing and printing quantities; inside the package everything is a plain number of bytes, seconds, FLOP or tokens.

Conventions: GiB (2**30) for memory capacity and footprints, decimal GB and TB/s for traffic, FLOP/s for rates, ms for
latencies in tables (us below one). Values parse exactly: "3.35 TB/s" is the int 3350000000000.
"""

from __future__ import annotations

import math
import re
from fractions import Fraction
from typing import Any

from roofline.errors import InputError
from roofline.numeric import whole

DECIMAL = {"": 1, "k": 10**3, "M": 10**6, "G": 10**9, "T": 10**12, "P": 10**15, "E": 10**18}
BINARY = {"Ki": 2**10, "Mi": 2**20, "Gi": 2**30, "Ti": 2**40, "Pi": 2**50}
GIB = 2**30


def _units() -> dict[str, tuple[str, int | Fraction]]:
    table: dict[str, tuple[str, int | Fraction]] = {"1": ("count", 1), "%": ("count", Fraction(1, 100)), "USD/h": ("price", 1)}
    for prefix, factor in DECIMAL.items():
        for base, dimension in (
            ("B", "bytes"), ("B/s", "bytes/s"), ("FLOP", "flop"), ("FLOP/s", "flop/s"), ("Hz", "hertz"), ("W", "watt"),
        ):  # fmt: skip
            table[prefix + base] = (dimension, factor)
    for prefix, factor in BINARY.items():
        table[prefix + "B"] = ("bytes", factor)
        table[prefix + "B/s"] = ("bytes/s", factor)
    for name, seconds in (
        ("s", Fraction(1)), ("ms", Fraction(1, 10**3)), ("us", Fraction(1, 10**6)), ("ns", Fraction(1, 10**9)),
        ("min", Fraction(60)), ("h", Fraction(3600)), ("d", Fraction(86400)),
    ):  # fmt: skip
        table[name] = ("seconds", seconds)
    return table


UNITS = _units()


SUCH_AS = {
    "bytes": "GB or GiB", "bytes/s": "GB/s or TB/s", "flop/s": "TFLOP/s", "hertz": "MHz or GHz", "watt": "W or kW",
    "seconds": "s, ms or us",
}  # fmt: skip
"""Units to name where one is unknown, by dimension."""


def to_base(value: int | Fraction, unit: str, dimension: str, field: str) -> int | Fraction:
    """A value in the base unit of its dimension, exactly.

    Args:
        value: the number as written.
        unit: one of ``UNITS``, case-sensitive: "TB/s", "GiB", "TFLOP/s", "MHz", "ms", "1".
        dimension: what the field must be: "bytes", "bytes/s", "flop", "flop/s", "hertz", "watt", "seconds", "count".
        field: name of the field, for the error.

    Raises:
        InputError: the unit is unknown or of another dimension.
    """
    if unit not in UNITS:
        raise InputError(f"{field}: unknown unit {unit!r}; write one such as {SUCH_AS.get(dimension, 'GB, GiB, TB/s, MHz, ms')}")
    found, factor = UNITS[unit]
    if found != dimension:
        raise InputError(f"{field}: {unit!r} measures {found}, but this field takes {dimension}")
    result: int | Fraction = whole(value * Fraction(factor))
    return result


QUANTITY = re.compile(r"\s*([+-]?\d[\d_]*(?:\.\d+)?(?:[eE][+-]?\d{1,3})?)\s*([A-Za-z%/]*)\s*")


def parse_quantity(text: str, dimension: str, field: str, default_unit: str) -> int | Fraction:
    """A quantity that a user typed, such as ``40ms`` or ``24GiB``, in the base unit.

    A bare number is in ``default_unit``. Raises InputError that names the field.
    """
    match = QUANTITY.fullmatch(text)
    if match is None:
        raise InputError(f"{field}: {text!r} is not a number with a unit; write it like 1{default_unit}")
    return to_base(Fraction(match[1].replace("_", "")), match[2] or default_unit, dimension, field)


def _significant(value: float, digits: int) -> str:
    if value == 0:
        return "0"
    decimals = max(0, digits - 1 - math.floor(math.log10(abs(value))))
    return f"{value:,.{decimals}f}"


def _with_prefix(value: Any, base: str) -> str:
    number = float(value)
    prefix, factor = next(((p, f) for p, f in reversed(DECIMAL.items()) if abs(number) >= f), ("", 1))
    return f"{_significant(number / factor, 4)} {prefix}{base}"


def capacity(n_bytes: Any) -> str:
    """Memory in GiB: ``capacity(2**30) == "1.00 GiB"``."""
    return f"{float(n_bytes) / GIB:,.2f} GiB"


def traffic(n_bytes: Any) -> str:
    """Moved bytes with a decimal prefix: ``traffic(10**9) == "1.000 GB"``."""
    return _with_prefix(n_bytes, "B")


def bandwidth(bytes_per_s: Any) -> str:
    """Bytes per second with a decimal prefix: ``3.350 TB/s``."""
    return _with_prefix(bytes_per_s, "B/s")


def flop(count: Any) -> str:
    """A count of floating-point operations: ``26.40 TFLOP``."""
    return _with_prefix(count, "FLOP")


def flop_rate(flop_per_s: Any) -> str:
    """Floating-point operations per second: ``989.0 TFLOP/s``."""
    return _with_prefix(flop_per_s, "FLOP/s")


def latency(seconds: Any) -> str:
    """A latency: ms with four significant digits, us below 0.1 ms, s from 10 s on."""
    value = float(seconds)
    if value >= 10:
        return f"{_significant(value, 4)} s"
    return f"{_significant(value * 1e3, 4)} ms" if value >= 1e-4 or value == 0 else f"{_significant(value * 1e6, 4)} us"


def count(value: Any) -> str:
    """A count with digit groups; a float keeps four significant digits."""
    return f"{value:,}" if isinstance(value, int) else _significant(float(value), 4)
