"""Nothing is lost: what fails as a whole has a record that names kernel and case, and what follows is proved all the same."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("triton")

from roofline.kernels.registry import load
from roofline.kernels.spec import Build, Case, Expected, Launch, Spec, Tensors
from roofline.validate import compiled, prove
from roofline.validate.compiled import Compiled, CompileError

RMSNORM = load("rmsnorm")
SHORT = dataclasses.replace(RMSNORM, cases=RMSNORM.cases[:2])


def expecting(kernels: dict[str, Launch]) -> Spec:
    def expected(case: Case, tensors: Tensors) -> Expected:
        return Expected(RMSNORM.expected(case, tensors).useful, kernels)

    return dataclasses.replace(SHORT, expected=expected)


@pytest.mark.parametrize(
    ("kernels", "said"), [({}, "launched, not expected"), ({"other": Launch(1, {})}, "expected, not launched")]
)
def test_a_kernel_that_is_not_the_expected_one_keeps_its_records(kernels: dict[str, Launch], said: str) -> None:
    spec = expecting(kernels)
    for case in spec.cases:
        records = list(prove.rows(prove.prove(spec, case)))
        assert {record["argument"] for record in records} >= {"rmsnorm_kernel.x", "rmsnorm_kernel.out"}
        assert all(any(said in failure for failure in record["failures"]) for record in records)


def test_a_case_that_neither_moves_nor_expects_anything_has_a_record() -> None:
    spec = dataclasses.replace(expecting({}), launch=lambda case, tensors: {})
    (record,) = prove.rows(prove.prove(spec, spec.cases[0]))
    assert record["failures"]


def test_a_case_that_raises_is_named_and_the_next_is_proved(monkeypatch: pytest.MonkeyPatch) -> None:
    def launch(case: Case, tensors: Tensors) -> Tensors:
        if case is SHORT.cases[0]:
            raise RuntimeError("a traceback") from IndexError("in none of the tensors x, weight\n")
        return RMSNORM.launch(case, tensors)

    bad = dataclasses.replace(SHORT, launch=launch)

    def loaded(name: str) -> Spec:
        if name == "gone":
            raise ImportError("no such file")
        return dataclasses.replace({"bad": bad, "good": SHORT}[name], name=name)

    monkeypatch.setattr(prove, "load", loaded)
    names = ["gone", "bad", "good"]
    records = prove.complete(names, prove.proved(names), "")
    assert records[:2] == [
        {"kernel": "gone", "case": "", "failures": ["ImportError: no such file"]},
        {"kernel": "bad", "case": SHORT.cases[0].name, "failures": ["IndexError: in none of the tensors x, weight"]},
    ]
    assert {record["case"] for record in records[2:]} == {case.name for case in SHORT.cases}
    assert not any(record["failures"] for record in records[2:])


def test_what_a_process_did_not_live_to_prove_is_named() -> None:
    found = [{"kernel": "gemm", "cases": ["one", "two"]}, {"kernel": "gemm", "case": "one", "failures": []}]
    records = prove.complete(["gemm", "rmsnorm"], found, "killed")
    assert [(record["kernel"], record["case"], record["failures"]) for record in records] == [
        ("gemm", "one", []), ("gemm", "two", ["not proved: killed"]), ("rmsnorm", "", ["not proved: killed"]),
    ]  # fmt: skip


BINARY = SimpleNamespace(asm={"cubin": b"not a cubin", "amdgcn": ".vgpr_count: 3"})


def test_a_disassembler_that_fails_is_no_kernel_without_spills(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(CompileError, match="cuobjdump"):
        compiled._nvidia(BINARY)
    monkeypatch.setattr(compiled, "_tool", lambda name, *arguments: "")
    with pytest.raises(CompileError, match="registers"):
        compiled._nvidia(BINARY)
    monkeypatch.setattr(compiled, "_tool", lambda name, *arguments: "REG:40" if name == "cuobjdump" else "")
    with pytest.raises(CompileError, match="no instructions"):
        compiled._nvidia(BINARY)
    with pytest.raises(CompileError, match="vgpr_spill_count"):
        compiled._amd(BINARY)


def test_a_build_that_fails_is_named_and_the_next_is_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    good = Compiled("rmsnorm", "", "f", "sm_90", 32, 0, 0, 1, 4, 4)

    def compile_build(spec: Spec, build: Build, arch: str) -> list[Compiled]:
        if spec.name == "gemm":
            raise RuntimeError("no such instruction")
        return [dataclasses.replace(good, case=build.case.name)]

    monkeypatch.setattr(compiled, "compile_build", compile_build)
    found = list(compiled.compile_all(["gemm", "rmsnorm"], ["sm_90"]))
    first = [one for one in found if one.kernel == "gemm"]
    assert [one.case for one in first] == [build.case.name for build in load("gemm").builds if "sm_90" in build.targets]
    assert {one.failures for one in first} == {("not compiled: RuntimeError: no such instruction",)}
    assert [one for one in found if one.kernel == "rmsnorm" and not one.failures]


def test_a_build_without_a_record_is_named() -> None:
    good = Compiled("rmsnorm", "a", "f", "sm_90", 32, 0, 0, 1, 4, 4)
    found = compiled.complete([("rmsnorm", "a", "sm_90"), ("rmsnorm", "b", "sm_90")], [good], "killed")
    assert [(one.case, one.failures) for one in found] == [("a", ()), ("b", ("not compiled: killed",))]


def test_a_launch_that_starts_no_kernel_is_no_build() -> None:
    spec = dataclasses.replace(SHORT, launch=lambda case, tensors: {})
    with pytest.raises(CompileError, match="no kernel"):
        compiled.compile_build(spec, SHORT.builds[0], "sm_90")


def said(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], failures: list[str]) -> tuple[int, str]:
    from roofline.cli import run
    from roofline.validate import kernels

    def evidence(names: list[str], archs: tuple[str, ...] = ()) -> Iterator[dict[str, Any]]:
        yield kernels._record(kernel="rmsnorm", case="a", failures=failures)
        yield kernels._record(kernel="rmsnorm", case="b", argument="k.x", expected_bytes=4, counted_bytes=4)

    monkeypatch.setattr(kernels, "evidence", lambda names: list(evidence(names)))
    code = run(["validate", "kernels", "--class", "rmsnorm"])
    return code, "".join(capsys.readouterr())


def test_the_table_claims_equality_only_where_there_is_no_failure(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    code, text = said(monkeypatch, capsys, ["IndexError: in none"])
    assert code != 0
    assert "rmsnorm a: IndexError: in none" in text
    assert "1 of 2 cases are wrong" in text
    assert "equals" not in text
    code, text = said(monkeypatch, capsys, [])
    assert code == 0
    assert "counted equals expected as integers" in text
