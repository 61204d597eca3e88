"""A run on a GPU, acted out without one: nothing that was measured is lost, time is bounded, what is left out is named."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("triton")

from roofline.cli import run as command
from roofline.cost import Cost
from roofline.errors import InputError
from roofline.kernels.registry import KERNELS, load
from roofline.kernels.spec import Case, Spec
from roofline.validate import measured
from roofline.validate.counted import counting
from roofline.validate.kernels import measured as measured_rows
from roofline.validate.measured import LostGPU, Measurement, Roofs, Times, check_folder, lacks, records, run, save, steps
from roofline.validate.provenance import versions

ROOFS = Roofs(4e12, {"bf16": 8e14, "fp8": 16e14}, 5e-6, 2e-6)
ONCE = Times(1e-3, 1e-3, 1e-3, 10, "graph")
TWO = ["rmsnorm", "gemm"]


def kept(spec: Spec, case: Case, *rest: Any) -> Measurement:
    return Measurement(spec.name, case.name, ONCE, ONCE, None, 1, 1, 0.5, None, None)


@pytest.fixture
def acted(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Replaces what needs a device; keywords replace more of it."""

    def act(**other: Any) -> None:
        device = {"gpu": "NVIDIA Test", "units": 1, "capability": [9, 0], "versions": {}}
        parts = {
            "need_gpu": lambda: None, "Clock": lambda: None, "measure_roofs": lambda clock: ROOFS, "device_state": dict,
            "identity": lambda: device, "settle": lambda: None, "measure": kept, "wrong_on_gpu": lambda spec, case: [],
        }  # fmt: skip
        for name, value in (parts | other).items():
            monkeypatch.setattr(measured, name, value)

    return act


def test_every_kernel_is_proved_and_measured_once_before_any_is_measured_again_and_that_before_proofs() -> None:
    chosen = [load(name) for name in TWO]
    order = [(spec.name, timed) for spec, _, timed in steps(chosen)]
    measures = sum(len(spec.measured) for spec in chosen)
    assert order[:4] == [(name, timed) for name in TWO for timed in (False, True)]
    assert [name for name, _ in order[4:8]] == [*TWO, *TWO]
    assert all(timed for _, timed in order[4 : 2 + measures])
    assert not any(timed for _, timed in order[2 + measures :])
    assert len(order) == len({*((spec.name, case.name) for spec, case, _ in steps(chosen))})
    assert len(order) == sum(len(spec.measured) + len(spec.cases) for spec in chosen)


def test_a_lost_device_ends_the_run_and_the_record_stays(acted: Callable[..., None], tmp_path: Path) -> None:
    done: list[str] = []

    def settle() -> None:
        if len(done) > 1:
            raise LostGPU("the device is lost: an illegal memory access")

    def measure(spec: Spec, case: Case, *rest: Any) -> Measurement:
        done.append(case.name)
        return kept(spec, case)

    acted(settle=settle, measure=measure)
    run(TWO, keep=lambda record: save(record, tmp_path))
    (record,) = records(tmp_path)
    assert [one["case"] for one in record["measurements"]] == done
    assert len(done) == 2
    assert "the device is lost" in next(iter(record["wrong"].values()))[0]
    rest = sum(len(load(name).measured) for name in TWO) - 2
    assert len(record["skipped"]) == rest
    assert all("the device was lost" in line for line in record["skipped"])


def test_what_fails_is_named_and_the_next_is_measured(acted: Callable[..., None]) -> None:
    def measure(spec: Spec, case: Case, *rest: Any) -> Measurement:
        if spec.name == "rmsnorm":
            raise RuntimeError("out of resource")
        return kept(spec, case)

    acted(measure=measure)
    record = run(TWO)
    assert record["wrong"] == {"rmsnorm": [f"{case.name}: RuntimeError: out of resource" for case in load("rmsnorm").measured]}
    assert {one["kernel"] for one in record["measurements"]} == {"gemm"}


def test_when_time_is_up_neither_measures_nor_proofs_begin(acted: Callable[..., None], monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    begun: list[str] = []

    def begin(spec: Spec, case: Case) -> list[str]:
        begun.append(case.name)
        now[0] += 100.0
        return []

    acted(wrong_on_gpu=begin)
    monkeypatch.setattr(measured, "time", SimpleNamespace(perf_counter=lambda: now[0]))
    record = run(list(KERNELS))
    assert len(begun) == measured.SECONDS_IN_ALL // 100 + 1
    assert record["seconds"] < measured.SECONDS_AT_MOST + 100
    cases, shapes = (sum(len(getattr(load(name), of)) for name in KERNELS) for of in ("cases", "measured"))
    assert sum(record["unproved"].values()) == cases - len(begun)
    assert len(record["skipped"]) + len(record["measurements"]) == shapes
    assert all(line.endswith("out of time") for line in record["skipped"])


def test_what_a_run_wrote_is_what_the_table_of_evidence_reads(
    acted: Callable[..., None], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """From the command to the file and back, through the measurement itself but for the clock; proof cases for shapes."""

    class Clock:
        def both(self, calls: list[Callable[[], Any]]) -> tuple[Times, Times, None]:
            for call in calls:
                call()
            return ONCE, ONCE, None

    def measure(spec: Spec, case: Case, roofs: Roofs, clock: Any) -> Measurement:
        here = dataclasses.replace(spec, inputs=lambda case, device: spec.inputs(case, "cpu"))
        found = real(here, spec.cases[1], roofs, clock)
        return dataclasses.replace(found, case=case.name)

    real = measured.measure
    acted(Clock=Clock, measure=measure)
    with counting():
        assert command(["bench", "rmsnorm", "--folder", str(tmp_path), "--quiet"]) == 0
    (record,) = records(tmp_path)
    assert {"date", "gpu", "versions", "capability", "before", "after", "roofs", "timer", "seconds"} <= set(record)
    monkeypatch.setattr(measured, "records", lambda: records(tmp_path))
    rows = {row["case"]: row for row in measured_rows(["rmsnorm"])}
    assert set(rows) == {case.name for case in load("rmsnorm").measured}
    for row in rows.values():
        assert (row["gpu"], row["measured_s"], row["library_ratio"]) == ("NVIDIA Test", 1e-3, 1.0)
        assert row["expected_bytes"] > 0
        assert row["roof_fraction"] == pytest.approx(row["expected_bytes"] / ROOFS.bandwidth / 1e-3)


def test_a_library_that_fails_leaves_our_time(monkeypatch: pytest.MonkeyPatch) -> None:
    def library(case: Case, tensors: Any) -> Any:
        raise IndexError("no such row")

    monkeypatch.setattr("torch.cuda.synchronize", lambda: None)
    spec = load("rmsnorm")
    here = dataclasses.replace(spec, inputs=lambda case, device: spec.inputs(case, "cpu"), library=library)
    clock: Any = SimpleNamespace(both=lambda calls: (ONCE, ONCE, None))
    found = measured.measure(here, spec.cases[0], ROOFS, clock)
    assert (found.measured, found.library, found.comment) == (ONCE, None, "library: IndexError: no such row")


def test_a_record_names_the_software_and_the_commit() -> None:
    found = versions()
    assert {"torch", "triton", "cuda", "python", "roofline", "commit"} == set(found)
    assert found["commit"] == "" or len(found["commit"].rstrip("+")) == 40


def test_a_run_that_hangs_is_ended_by_the_clock(
    acted: Callable[..., None], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    ended: list[int] = []
    acted(measure=lambda *rest: (time.sleep(0.05), kept(*rest))[1])
    monkeypatch.setattr(measured, "SECONDS_AT_MOST", 0.02)
    monkeypatch.setattr("os._exit", ended.append)
    command(["bench", "rmsnorm", "--folder", str(tmp_path), "--quiet"])
    assert ended == [1]
    assert len(list(records(tmp_path))) == 1


def test_a_folder_that_cannot_be_written_is_refused_before_anything_runs(
    acted: Callable[..., None], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    ran: list[str] = []
    acted(measure_roofs=lambda clock: ran.append("roofs"))
    file = tmp_path / "file"
    file.touch()
    with pytest.raises(InputError, match="folder: cannot write"):
        check_folder(file / "below")
    assert command(["bench", "rmsnorm", "--folder", str(file / "below")]) == 2
    assert "cannot write into" in capsys.readouterr().err
    assert ran == []


def test_an_older_gpu_skips_what_it_cannot_compile_and_a_newer_one_is_wrong(acted: Callable[..., None]) -> None:
    error = RuntimeError("at 3:4")
    error.__cause__ = ValueError("type fp8e4nv not supported in this architecture. The supported fp8 dtypes are ('fp8e5',)")
    assert lacks(error, [8, 0])
    assert not lacks(error, [9, 0])
    assert not lacks(RuntimeError("out of resource"), [8, 0])

    def measure(spec: Spec, case: Case, *rest: Any) -> Measurement:
        raise error

    for capability, where in (([8, 0], "skipped"), ([9, 0], "wrong")):
        device = {"gpu": "NVIDIA Test", "units": 1, "capability": capability, "versions": {}}
        acted(identity=lambda device=device: device, measure=measure)
        record = run(["rmsnorm"])
        assert bool(record["skipped"]) == (where == "skipped")
        assert bool(record["wrong"]) == (where == "wrong")


def test_a_unit_without_a_roof_is_judged_on_the_one_that_multiplies_or_not_at_all() -> None:
    cost = Cost({"fp4": 8 * 10**11, "vector": 7}, {"index": 10**6}, {}, 1)
    assert ROOFS.units(cost, "bf16") == {"fp4": "bf16"}
    assert ROOFS.seconds(cost, "bf16") == pytest.approx(1e-3)
    assert ROOFS.units(cost) == {"fp4": None}
    assert ROOFS.seconds(cost) is None
