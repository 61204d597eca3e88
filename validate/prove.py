"""Proof of one kernel case in the interpreter: right numbers, and exactly the expected traffic and FLOPs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from roofline.kernels.buffers import poisoned
from roofline.kernels.registry import load
from roofline.kernels.spec import Case, Expected, Launch, Moved, Spec
from roofline.validate.compare import compare
from roofline.validate.counted import Counts, Tally, counting
from roofline.validate.counted_check import check


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
    for name, elements in (+counts.shared).items():
        yield f"{kernel}.{name}: {elements} elements loaded by one program and stored by another: a race"
    for name, elements in (+counts.unordered).items():
        yield f"{kernel}.{name}: {elements} elements loaded and stored by two lanes of a program with no barrier between"
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
    if dict(counts.dot) != expected.dots:
        yield f"dot FLOPs: {dict(counts.dot)}, expected {expected.dots}"
    if counts.tf32 != expected.tf32:
        yield f"dot FLOPs of fp32 rounded to tf32: {counts.tf32}, expected {expected.tf32}"
    matrix, needed = useful.matrix_flops, expected.needed()
    if matrix != needed:
        yield f"useful dot FLOPs: the component says {matrix}, the reference needs {needed}"
    if counts.special < useful.flops.get("special", 0):
        yield f"special functions: {counts.special} run, fewer than the component's {useful.flops['special']}"
    if expected.executed < needed:
        yield f"dot FLOPs: {expected.executed} executed, fewer than the {needed} that the reference needs"


def prove(spec: Spec, case: Case) -> Proof:
    """Runs a case in the interpreter and compares numbers with the reference, counts with the expectation."""
    inputs: dict[str, Any] = spec.inputs(case, "cpu")
    references = spec.reference(case, inputs)
    expected = spec.expected(case, inputs)
    with poisoned(), counting() as counts:
        outputs = spec.launch(case, inputs)
    errors, failures = compare(spec, case, outputs, references)
    return Proof(spec.name, case, expected, counts, errors, (*failures, *mismatches(expected, counts)))


def record(proof: Proof, **known: Any) -> dict[str, Any]:
    """What is common to the records of a proof."""
    return {
        "kernel": proof.kernel, "case": proof.case.name, "expected_flops": proof.expected.flops,
        "counted_flops": sum(proof.counts.dot.values()), "failures": list(proof.failures), **known,
    }  # fmt: skip


def rows(proof: Proof) -> Iterator[dict[str, Any]]:
    """One record per argument and direction of every Triton kernel of a case, expected or launched; at least one."""
    found = False
    for kernel in sorted({*proof.expected.kernels, *proof.counts.kernels}):
        moved = proof.expected.kernels.get(kernel, Launch(0, {})).moved
        tally = proof.counts.kernels.get(kernel, Tally())
        for name in sorted({*moved, *tally.read, *tally.written}):
            one = moved.get(name, Moved(""))
            for direction, expected, counted, distinct in (
                ("read", one.loads, tally.read[name], tally.unique("read")[name]),
                ("write", one.written, tally.written[name], tally.unique("write")[name]),
            ):
                if expected or counted:
                    found = True
                    yield record(
                        proof, argument=f"{kernel}.{name}", direction=direction, expected_bytes=expected,
                        counted_bytes=counted, distinct_bytes=distinct,
                    )  # fmt: skip
    if not found:
        yield record(proof)


def cause(error: BaseException) -> str:
    """An error in one line: what lies at its root."""
    while error.__cause__ is not None:
        error = error.__cause__
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {' '.join(lines)[-300:]}"


def proved(names: Iterable[str]) -> Iterator[dict[str, Any]]:
    """Records of kernels one after another. What fails as a whole gives one record that says so, and the next goes on."""
    for name in names:
        try:
            spec = load(name)
        except Exception as error:
            yield {"kernel": name, "case": "", "failures": [cause(error)]}
            continue
        yield {"kernel": name, "cases": [case.name for case in spec.cases]}
        for case in spec.cases:
            try:
                yield from rows(prove(spec, case))
            except Exception as error:
                yield {"kernel": name, "case": case.name, "failures": [cause(error)]}


def complete(names: Iterable[str], found: Iterable[dict[str, Any]], why: str) -> list[dict[str, Any]]:
    """The records, and one more for every kernel and case that was announced, or had to be, and has none."""
    records, seen, announced = [], set(), dict[str, list[str]]()
    for one in found:
        if "cases" in one:
            announced[one["kernel"]] = one["cases"]
        else:
            records.append(one)
            seen.add((one["kernel"], one["case"]))
    failed = {kernel for kernel, case in seen if not case}
    for name in names:
        if name not in announced and name not in failed:
            records.append({"kernel": name, "case": "", "failures": [f"not proved: {why}"]})
        missing = [case for case in announced.get(name, []) if (name, case) not in seen]
        records += [{"kernel": name, "case": case, "failures": [f"not proved: {why}"]} for case in missing]
    return records


def prove_apart(names: Iterable[str]) -> list[dict[str, Any]]:
    """The records of every case of the kernels, proved in a process of its own, which interprets.

    A case that raises, or that the process did not live to prove, has a record with the failure.
    """
    chosen = list(names)
    environment = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    done = subprocess.run(
        [sys.executable, "-m", "roofline.validate.prove", ",".join(chosen)],
        capture_output=True, text=True, check=False, env=environment,
    )  # fmt: skip
    found = [json.loads(line) for line in done.stdout.splitlines()]
    last = (done.stderr.strip().splitlines() or ["no record of it"])[-1]
    return complete(chosen, found, f"the process ended with {done.returncode}, {last}")


if __name__ == "__main__":
    check()
    for row in proved(sys.argv[1].split(",")):
        print(json.dumps(row), flush=True)
