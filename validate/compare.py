"""Comparison of a kernel's outputs with its reference: masks of what is not finite, exact integers, rms error."""

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
    return errors, failures
