"""Kernels by evidence: what each launch is expected to move, what was counted, what it compiles to, what was measured.

The three kinds of evidence stand at different shapes: counted at small ones, argument by argument; compiled and measured at
production ones. A record carries every key; what has no evidence at its shape is None.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from roofline.kernels.registry import KERNELS

KEYS = (
    "kernel", "case", "argument", "direction", "expected_bytes", "counted_bytes", "expected_flops", "counted_flops",
    "registers", "spills", "shared_bytes", "matrix_unit", "measured_s", "roof_fraction",
)  # fmt: skip
EXTRA = ("distinct_bytes", "occupancy", "arch", "gpu", "library_ratio", "failures")


def _record(**known: Any) -> dict[str, Any]:
    return {**dict.fromkeys((*KEYS, *EXTRA)), "failures": [], **known}


def counted(names: Iterable[str]) -> Iterator[dict[str, Any]]:
    """Every argument of every proof case."""
    from roofline.validate.prove import prove_apart

    for row in prove_apart(names):
        yield _record(**row)


def compiled(names: Iterable[str], archs: Iterable[str]) -> Iterator[dict[str, Any]]:
    """Every Triton kernel of every build."""
    from roofline.validate.compiled import run

    for one in run(names, archs):
        if not one.registers:
            yield _record(kernel=one.kernel, case=one.case, arch=one.arch, failures=list(one.failures))
            continue
        yield _record(
            kernel=one.kernel, case=one.case, argument=one.function, registers=one.registers, spills=one.spills,
            shared_bytes=one.shared, matrix_unit=one.matrix_unit or None, occupancy=one.occupancy, arch=one.arch,
            failures=list(one.failures),
        )  # fmt: skip


def measured(names: Iterable[str]) -> Iterator[dict[str, Any]]:
    """The latest committed measurement of every case, by GPU."""
    from roofline.validate.measured import records

    wanted, latest = set(names), {}
    for record in records():
        for one in record["measurements"]:
            if one["kernel"] in wanted:
                latest[record["gpu"], one["kernel"], one["case"]] = one
    for (gpu, kernel, case), one in latest.items():
        yield _record(
            kernel=kernel, case=case, expected_bytes=one["bytes"], expected_flops=one["flops"], gpu=gpu,
            measured_s=one["measured"]["median"], roof_fraction=one["roof_fraction"], library_ratio=one["library_ratio"],
        )  # fmt: skip


def evidence(names: Iterable[str] = KERNELS, archs: Iterable[str] = ("sm_90",)) -> list[dict[str, Any]]:
    """All records: counted, compiled, measured. Takes a minute."""
    chosen = list(names)
    return [*counted(chosen), *compiled(chosen, archs), *measured(chosen)]


def summary(records: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """One line per kernel, case and kind of evidence: sums over arguments, the worst of the compiled kernels."""
    lines: dict[tuple[Any, ...], dict[str, Any]] = {}
    for record in records:
        line = lines.setdefault((record["kernel"], record["case"], record["gpu"], record["arch"]), {
            "kernel": record["kernel"], "case": record["case"], "expected": 0, "counted": 0, "flops": None, "registers": None,
            "spills": None, "shared": None, "matrix_unit": "", "arch": record["arch"],
            "measured_s": None, "roof_fraction": None, "failures": set(),
        })  # fmt: skip
        line["expected"] += record["expected_bytes"] or 0
        line["counted"] += record["counted_bytes"] or 0
        line["flops"] = record["expected_flops"] if line["flops"] is None else line["flops"]
        for here, key in (("registers", "registers"), ("spills", "spills"), ("shared", "shared_bytes")):
            if record[key] is not None:
                line[here] = max(record[key], line[here] or 0)
        line["matrix_unit"] = record["matrix_unit"] or line["matrix_unit"]
        line["measured_s"] = record["measured_s"] or line["measured_s"]
        line["roof_fraction"] = record["roof_fraction"] or line["roof_fraction"]
        line["failures"] |= set(record["failures"])
    return list(lines.values())
