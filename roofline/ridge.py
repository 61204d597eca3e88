"""The batch at which a formula's intensity reaches an accelerator's ridge: in closed form, else by bisection."""

from __future__ import annotations

from typing import Any

from roofline.accelerator import Accelerator
from roofline.errors import InputError
from roofline.symbols import symbol

LARGEST_BATCH = 2.0**40
CLOSE = 1e-12


def batch_at_ridge(intensity: Any, accelerator: Accelerator) -> Any:
    """The B, not rounded, at which an intensity [FLOP/B] equals the ridge at bf16; None where no B reaches it.

    A fraction of polynomials in B is solved in closed form, whatever letters are left. Expected experts are a power of B,
    which has no closed form: there the other letters must be numbers. Raises InputError where they are not.
    """
    import sympy

    B = sympy.Symbol("B", positive=True)
    ridge = sympy.Rational(accelerator.rate("bf16")) / sympy.Rational(accelerator.bandwidth.value)
    gap = intensity.xreplace({symbol("B"): B}) - ridge
    if gap.is_rational_function(B):
        numerator, denominator = sympy.fraction(sympy.together(gap + ridge))
        equation = sympy.Poly(numerator - ridge * denominator, B)
        roots = (
            [sympy.together(-equation.nth(0) / equation.nth(1))] if equation.degree() == 1 else sympy.solve(equation.as_expr(), B)
        )
        solutions = [found for found in roots if found.is_positive is not False]
        return solutions[0] if solutions else None
    left = sorted(str(letter) for letter in gap.free_symbols - {B})
    if left:
        raise InputError(
            f"gpu: the batch at the ridge has no closed form here; set {', '.join(left)} to numbers, with --model or --set"
        )
    return _bisect(sympy.lambdify(B, gap, "math"))


def _bisect(gap: Any) -> Any:
    """The root of an increasing function of the batch; None where it stays below 0."""
    import sympy

    low = high = 1.0
    while gap(high) < 0:
        low, high = high, 2 * high
        if high > LARGEST_BATCH:
            return None
    while gap(low) > 0:
        low, high = low / 2, low
    while high - low > CLOSE * high:
        middle = (low + high) / 2
        low, high = (middle, high) if gap(middle) < 0 else (low, middle)
    return sympy.Float(high)
