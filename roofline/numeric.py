"""Arithmetic that does not know in which reading it is.

A formula is ordinary Python over its dimensions. It is read exactly (ints and Fractions), symbolically (sympy) or over
a whole sweep (float64 arrays). The few operations whose spelling differs between the three live here, and pick theirs
by operand; numpy and sympy are looked up among the loaded modules, never imported, because an operand of theirs proves
that they are loaded.

Rules, each of which protects one reading:

* exact: ``half``, ``ratio`` and ``scale`` return an int where the value is whole and a Fraction where it is not;
* arrays are float64: an int64 array overflows silently, so it is refused; a Fraction is turned into a float before it
  meets an array, because numpy would otherwise build an array of objects;
* symbols and arrays do not mix: TypeError.
"""

from __future__ import annotations

import math
import sys
from fractions import Fraction
from types import ModuleType
from typing import Any

PLAIN = (int, Fraction, float)


def reading(*operands: Any) -> ModuleType | None:
    """Which reading the operands belong to: None (plain Python numbers), the numpy module or the sympy module.

    Raises TypeError for integer arrays, for arrays mixed with symbols, and for anything that is not a number.
    """
    found: ModuleType | None = None
    numpy, sympy = sys.modules.get("numpy"), sys.modules.get("sympy")
    for operand in operands:
        if isinstance(operand, PLAIN):
            continue
        if numpy is not None and isinstance(operand, numpy.ndarray):
            if operand.dtype != numpy.float64:
                raise TypeError(
                    f"arrays must be float64, not {operand.dtype}: integer arrays overflow silently; use .astype(float)"
                )
            kind = numpy
        elif sympy is not None and isinstance(operand, sympy.Basic):
            kind = sympy
        else:
            raise TypeError(
                f"{type(operand).__name__} is not a number that formulas accept (int, Fraction, float, float64 array, sympy)"
            )
        if found is not None and found is not kind:
            raise TypeError("an array and a symbol met in one formula: evaluate either the sweep or the symbols")
        found = kind
    return found


def as_taken_by(module: ModuleType, value: Any) -> Any:
    """A plain number as the module takes it: sympy wants a Rational, an array a float."""
    if isinstance(value, Fraction):
        return module.Rational(value.numerator, value.denominator) if module.__name__ == "sympy" else float(value)
    return value


def whole(value: Any) -> Any:
    """A Fraction with denominator 1 as an int; everything else unchanged."""
    if type(value) is Fraction and value.denominator == 1:
        return value.numerator
    return value


def maximum(a: Any, b: Any) -> Any:
    """The larger of two values, elementwise for arrays, ``Max`` for symbols."""
    if type(a) is int and type(b) is int:
        return a if a > b else b
    module = reading(a, b)
    if module is None:
        return a if a > b else b
    if module.__name__ == "sympy":
        return module.Max(as_taken_by(module, a), as_taken_by(module, b))
    return module.maximum(as_taken_by(module, a), as_taken_by(module, b))


def minimum(a: Any, b: Any) -> Any:
    """The smaller of two values, elementwise for arrays, ``Min`` for symbols."""
    if type(a) is int and type(b) is int:
        return a if a < b else b
    module = reading(a, b)
    if module is None:
        return a if a < b else b
    if module.__name__ == "sympy":
        return module.Min(as_taken_by(module, a), as_taken_by(module, b))
    return module.minimum(as_taken_by(module, a), as_taken_by(module, b))


def floor_div(a: Any, b: Any) -> Any:
    """Whole times that b goes into a. Over arrays exact below 2**53, and twice as fast as numpy's floor_divide."""
    module = reading(a, b)
    if module is None:
        return a // b
    return module.floor(as_taken_by(module, a) / as_taken_by(module, b))


def ceil_div(a: Any, b: Any) -> Any:
    """Whole groups of b that are needed to hold a."""
    module = reading(a, b)
    if module is None:
        return -(-a // b)
    if module.__name__ == "sympy":
        return module.ceiling(as_taken_by(module, a) / as_taken_by(module, b))
    return module.ceil(as_taken_by(module, a) / as_taken_by(module, b))


def half(x: Any) -> Any:
    """x / 2: an int where it is whole, a Fraction where it is not."""
    if type(x) is int:
        return x >> 1 if not x & 1 else Fraction(x, 2)
    return ratio(x, 2)


def ratio(a: Any, b: Any) -> Any:
    """a / b: exact for ints and Fractions (an int where whole), true division elsewhere."""
    module = reading(a, b)
    if module is not None:
        return as_taken_by(module, a) / as_taken_by(module, b)
    if isinstance(a, float) or isinstance(b, float):
        return a / b
    return whole(Fraction(a) / b)


def scale(x: Any, factor: Any) -> Any:
    """x * factor for a factor that may be a Fraction: bytes of x elements, say."""
    if type(x) is int and type(factor) is int:
        return x * factor
    module = reading(x, factor)
    if module is not None:
        return as_taken_by(module, x) * as_taken_by(module, factor)
    return whole(x * factor)


def where(condition: Any, yes: Any, no: Any) -> Any:
    """``yes`` where the condition holds, ``no`` elsewhere; both are evaluated.

    The condition is a bool, a boolean array or a sympy relation. It is never truth-tested unless it is a bool.
    """
    if isinstance(condition, bool):
        return yes if condition else no
    numpy, sympy = sys.modules.get("numpy"), sys.modules.get("sympy")
    if numpy is not None and isinstance(condition, (numpy.ndarray, numpy.bool_)):
        return numpy.where(condition, as_taken_by(numpy, yes), as_taken_by(numpy, no))
    if sympy is not None and isinstance(condition, sympy.Basic):
        return sympy.Piecewise((as_taken_by(sympy, yes), condition), (as_taken_by(sympy, no), True))
    raise TypeError(f"{type(condition).__name__} is not a condition")


def triangle(x: Any) -> Any:
    """1 + 2 + ... + x = x (x + 1) / 2."""
    return half(x * (x + 1))


def is_exact(value: Any) -> bool:
    """Whether a value is an int, a Fraction or a symbolic expression without floats."""
    if isinstance(value, (int, Fraction)):
        return True
    return is_symbolic(value) and not value.has(sys.modules["sympy"].Float)


def at_least_once(probability: Any, trials: Any) -> Any:
    """1 - (1 - p)^n: how likely something of probability p happens at least once in n independent trials.

    Exact at its edges (p itself after one trial, 1 where p is 1), a float in between, symbolic for symbols.
    """
    module = reading(probability, trials)
    if module is None:
        if probability == 1 or trials == 1:
            return probability
        return -math.expm1(float(trials) * math.log1p(-float(probability)))
    if module.__name__ == "sympy":
        return 1 - (1 - as_taken_by(module, probability)) ** trials
    if isinstance(probability, PLAIN) and probability == 1:
        return 1
    return -module.expm1(trials * module.log1p(-as_taken_by(module, probability)))


def is_symbolic(value: Any) -> bool:
    """Whether a value is a sympy expression."""
    sympy = sys.modules.get("sympy")
    return sympy is not None and isinstance(value, sympy.Basic)
