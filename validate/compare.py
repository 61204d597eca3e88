"""Comparison of a kernel's outputs with its reference: masks of what is not finite, exact integers, errors.

Errors are bounded three times: the rms error of the whole output, of each row (along the last axis), and each element's.
An error that a few elements hold drowns in the first. Rounding is spread alike over a row and at most a few times its rms,
so that the other two need only small multiples of the first bound."""

from __future__ import annotations

import torch

from roofline.kernels.spec import Case, Spec, Tensors


def rms_ratio(output: torch.Tensor, reference: torch.Tensor) -> float:
    """Root mean square of the error over that of the reference, over the elements that are finite in the reference."""
    finite = torch.isfinite(reference)
    right = reference[finite]
    if not right.numel():
        return 0.0
    error = (output.to(torch.float64)[finite] - right).square().mean().sqrt()
    size = right.square().mean().sqrt()
    return float(error / size) if size > 0 else float(error)


SMALL_ROW = 0.25
"""A row, however small its values, may err as one whose rms is this share of the output's: sums of large terms cancel."""


def worst(output: torch.Tensor, reference: torch.Tensor) -> tuple[float, float]:
    """Largest error of a row and of an element, over the rms of the row; of an element larger than that, over itself."""
    finite = torch.isfinite(reference)
    if not finite.any():
        return 0.0, 0.0
    width = reference.shape[-1] if reference.dim() else 1
    zero = torch.zeros((), dtype=torch.float64)
    right = torch.where(finite, reference.to(torch.float64), zero).reshape(-1, width)
    error = torch.where(finite, output.to(torch.float64) - reference, zero).reshape(-1, width)
    rms = right.square().mean(1).sqrt()
    overall = float(right.square().mean().sqrt())
    scale = torch.clamp(rms, min=SMALL_ROW * overall if overall > 0 else 1.0)
    rows = error.square().mean(1).sqrt() / scale
    elements = error.abs() / torch.maximum(right.abs(), scale[:, None])
    return float(rows.max()), float(elements.max())


def compare(spec: Spec, case: Case, outputs: Tensors, references: Tensors) -> tuple[dict[str, float], list[str]]:
    """Errors by output, and what is wrong: shapes, NaN and infinity masks, exact integers, the tolerance."""
    errors, failures = {}, []
    if set(outputs) != set(references):
        return {}, [f"outputs {sorted(outputs)}, reference {sorted(references)}"]
    tolerance = spec.tolerance[case.precision]
    for name, reference in references.items():
        output = outputs[name].cpu()
        if output.shape != reference.shape:
            failures.append(f"{name}: shape {tuple(output.shape)}, reference {tuple(reference.shape)}")
            continue
        if not reference.is_floating_point():
            wrong = int((output != reference).sum())
            errors[name] = float(wrong)
            if wrong:
                failures.append(f"{name}: {wrong} of {reference.numel()} integers differ")
            continue
        wide = output.to(torch.float64)
        for mask, what in ((torch.isnan, "NaN"), (torch.isposinf, "inf"), (torch.isneginf, "-inf")):
            wrong = int((mask(wide) != mask(reference)).sum())
            if wrong:
                failures.append(f"{name}: {what} at {wrong} places where it must not be, or is missing there")
        errors[name] = rms_ratio(output, reference)
        if not errors[name] <= tolerance.rms:
            failures.append(f"{name}: rms error {errors[name]:.2e} exceeds {tolerance.rms:.0e} ({tolerance.reason})")
        row, element = worst(wide, reference)
        for what, error, times in (("a row's rms", row, tolerance.row), ("an element's", element, tolerance.element)):
            if not error <= times * tolerance.rms:
                failures.append(f"{name}: {what} error {error:.2e} exceeds {times:g} x {tolerance.rms:.0e}")
    return errors, failures
