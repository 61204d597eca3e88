"""Proof of one kernel case in the interpreter: right numbers, and exactly the expected traffic and FLOPs."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from roofline.kernels.buffers import poisoned
from roofline.kernels.spec import Case, Expected, Launch, Spec, Tensors
from roofline.validate.counted import Counts, Tally, counting

import torch  # isort: skip


@dataclass(frozen=True)
class Proof:
    """What a case showed.

    Attributes:
        expected, counts: both sides of the traffic. errors: rms error over rms of the reference, by output.
        failures: one line per thing that is not as it must be.
    """

    kernel: str
    case: Case
    expected: Expected
    counts: Counts
    errors: dict[str, float]
    failures: tuple[str, ...]


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


def _kernel_mismatches(kernel: str, expected: Launch | None, counts: Tally | None) -> Iterator[str]:
    """What one kernel moved and ran against what it should."""
    if expected is None or counts is None:
        yield f"{kernel}: {'launched, not expected' if expected is None else 'expected, not launched'}"
        return
    distinct_read, distinct_written = counts.unique("read"), counts.unique("write")
    for name in sorted({*expected.moved, *counts.read, *counts.written}):
        if name not in expected.moved:
            yield f"{kernel}.{name}: {counts.read[name]} B read and {counts.written[name]} B written, none expected"
            continue
        moved = expected.moved[name]
        for what, counted, right in (
            ("requested to read", counts.read[name], moved.loads),
            ("distinct read", distinct_read[name], moved.read),
            ("stored", counts.written[name], moved.written),
            ("distinct stored", distinct_written[name], moved.written),
        ):
            if counted != right:
                yield f"{kernel}.{name}: {counted} B {what}, expected {right}"
    if counts.programs != expected.programs:
        yield f"{kernel}: {counts.programs} programs, expected {expected.programs}"
    if counts.launches != 1:
        yield f"{kernel}: launched {counts.launches} times"
    if counts.atomic:
        yield f"{kernel}: atomics on {', '.join(counts.atomic)}, none expected"


def mismatches(expected: Expected, counts: Counts) -> Iterator[str]:
    """What of the traffic, the FLOPs and the programs is not as expected."""
    for kernel in sorted({*expected.kernels, *counts.kernels}):
        yield from _kernel_mismatches(kernel, expected.kernels.get(kernel), counts.kernels.get(kernel))
    arguments = [moved for launch in expected.kernels.values() for moved in launch.moved.values()]
    useful = expected.useful
    for stream in sorted({*useful.read, *useful.write, *(moved.stream for moved in arguments)} - {""}):
        mine = [moved for moved in arguments if moved.stream == stream]
        for what, here, cost in (
            ("read", sum(moved.read for moved in mine), useful.read.get(stream, 0)),
            ("written", sum(moved.written for moved in mine), useful.write.get(stream, 0)),
        ):
            if here != cost:
                yield f"{stream}: arguments sum to {here} B {what}, the component says {cost}"
    dots = {expected.dot: expected.flops} if expected.flops else {}
    if dict(counts.dot) != dots:
        yield f"dot FLOPs: {dict(counts.dot)}, expected {dots}"


def prove(spec: Spec, case: Case) -> Proof:
    """Runs a case in the interpreter and compares numbers with the reference, counts with the expectation."""
    inputs: dict[str, Any] = spec.inputs(case, "cpu")
    references = spec.reference(case, inputs)
    expected = spec.expected(case, inputs)
    with poisoned(), counting() as counts:
        outputs = spec.launch(case, inputs)
    errors, failures = compare(spec, case, outputs, references)
    return Proof(spec.name, case, expected, counts, errors, (*failures, *mismatches(expected, counts)))
