"""Arithmetic of time models over plain floats and over arrays of rows: one spelling, and no numpy where nothing is an array.

A what-if answer evaluates a few kernels over floats and must not pay for numpy; a calibration evaluates millions of rows.
"""

from __future__ import annotations

import math
import sys
from typing import Any

PLAIN = frozenset((float, int))
"""Types that are surely no arrays; most answers evaluate nothing else."""


def _numpy(*operands: Any) -> Any:
    """The numpy module where an operand is one of its arrays or numbers, else None."""
    numpy = sys.modules.get("numpy")
    if numpy is not None and any(isinstance(operand, (numpy.ndarray, numpy.generic)) for operand in operands):
        return numpy
    return None


def ceil(x: Any) -> Any:
    """The whole number above, as a float."""
    if type(x) in PLAIN:
        return float(math.ceil(x))
    numpy = _numpy(x)
    return float(math.ceil(x)) if numpy is None else numpy.ceil(x)


def floor(x: Any) -> Any:
    """The whole number below, as a float."""
    if type(x) in PLAIN:
        return float(math.floor(x))
    numpy = _numpy(x)
    return float(math.floor(x)) if numpy is None else numpy.floor(x)


def sqrt(x: Any) -> Any:
    """The square root."""
    numpy = _numpy(x)
    return math.sqrt(x) if numpy is None else numpy.sqrt(x)


def log2(x: Any) -> Any:
    """The logarithm to base 2."""
    numpy = _numpy(x)
    return math.log2(x) if numpy is None else numpy.log2(x)


def exp(x: Any) -> Any:
    """The exponential."""
    numpy = _numpy(x)
    return math.exp(x) if numpy is None else numpy.exp(x)


def maximum(a: Any, b: Any) -> Any:
    """The larger one."""
    if type(a) in PLAIN and type(b) in PLAIN:
        return a if a > b else b
    numpy = _numpy(a, b)
    return (a if a > b else b) if numpy is None else numpy.maximum(a, b)


def minimum(a: Any, b: Any) -> Any:
    """The smaller one."""
    if type(a) in PLAIN and type(b) in PLAIN:
        return a if a < b else b
    numpy = _numpy(a, b)
    return (a if a < b else b) if numpy is None else numpy.minimum(a, b)


def clip(x: Any, low: Any, high: Any) -> Any:
    """The nearest value between two."""
    return minimum(maximum(x, low), high)


def where(condition: Any, yes: Any, no: Any) -> Any:
    """``yes`` where the condition holds, ``no`` elsewhere; both are evaluated."""
    if isinstance(condition, bool):
        return yes if condition else no
    return sys.modules["numpy"].where(condition, yes, no)
