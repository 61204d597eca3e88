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
from roofline.kernels.registry import load_all
from roofline.kernels.spec import Case, Expected, Launch, Spec
from roofline.validate.compare import compare
from roofline.validate.counted import Counts, HarnessError, Tally, counting


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


def prove(spec: Spec, case: Case) -> Proof:
    """Runs a case in the interpreter and compares numbers with the reference, counts with the expectation."""
    inputs: dict[str, Any] = spec.inputs(case, "cpu")
    references = spec.reference(case, inputs)
    expected = spec.expected(case, inputs)
    with poisoned(), counting() as counts:
        outputs = spec.launch(case, inputs)
    errors, failures = compare(spec, case, outputs, references)
    return Proof(spec.name, case, expected, counts, errors, (*failures, *mismatches(expected, counts)))


def rows(proof: Proof) -> Iterator[dict[str, Any]]:
    """One record per argument and direction of every Triton kernel of a case, with the FLOPs of the case in each."""
    counts = proof.counts
    for kernel, launch in proof.expected.kernels.items():
        tally = counts.kernels[kernel]
        for name, moved in launch.moved.items():
            for direction, expected, counted, distinct in (
                ("read", moved.loads, tally.read[name], tally.unique("read")[name]),
                ("write", moved.written, tally.written[name], tally.unique("write")[name]),
            ):
                if expected or counted:
                    yield {
                        "kernel": proof.kernel, "case": proof.case.name, "argument": f"{kernel}.{name}",
                        "direction": direction, "expected_bytes": expected, "counted_bytes": counted,
                        "distinct_bytes": distinct, "expected_flops": proof.expected.flops,
                        "counted_flops": sum(counts.dot.values()), "failures": list(proof.failures),
                    }  # fmt: skip


def prove_apart(names: Iterable[str]) -> list[dict[str, Any]]:
    """The records of every case of the kernels, proved in a process of its own, which interprets."""
    environment = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    command = [sys.executable, "-m", "roofline.validate.prove", ",".join(names)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    if done.returncode:
        raise HarnessError(f"proving failed: {done.stderr.strip()[-2000:]}")
    return [json.loads(line) for line in done.stdout.splitlines()]


if __name__ == "__main__":
    for spec in load_all(sys.argv[1].split(",")):
        for case in spec.cases:
            for row in rows(prove(spec, case)):
                print(json.dumps(row))
