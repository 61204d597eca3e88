"""Measured evidence: arithmetic of roofs and records here; the measurements themselves where there is a GPU."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("triton")

import torch

from roofline.cost import Cost
from roofline.kernels.registry import KERNELS, load
from roofline.validate import measured
from roofline.validate.kernels import EXTRA, KEYS, summary
from roofline.validate.kernels import measured as measured_rows
from roofline.validate.measured import NoGPU, Roofs, Times, gpu_id, need_gpu, quantiles, records, save

ROOT = Path(__file__).parents[2]
ROOFS = Roofs(4e12, {"bf16": 8e14, "fp8": 16e14, "int8": 16e14, "fp32": 5e13}, 5e-6, 2e-6)
RECORD = {
    "date": "2026-01-02T030405Z", "gpu": "NVIDIA H200",
    "measurements": [
        {"kernel": "gemm", "case": "square", "bytes": 100, "flops": 7, "roof_fraction": 0.5, "library_ratio": None,
         "measured": {"median": 1e-3}}
    ],
}  # fmt: skip
READS_VALUES = ("rotary", "speculative", "compressed_attention", "sparse_mla_decode")
"""Their expectation follows from positions, probabilities or a selection, which inputs without memory lack."""
NO_GPU = pytest.mark.skipif(torch.cuda.is_available(), reason="says what happens without a GPU")


def bench(*arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"} | {"PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "roofline", "bench", *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False, env=environment, cwd=ROOT)


def test_least_time_on_the_roofs_is_memory_or_the_matrix_units_in_turn() -> None:
    cost = Cost({"bf16": 8 * 10**11, "fp8": 16 * 10**11, "vector": 10**15}, {"weights": 10**9}, {}, 1)
    assert ROOFS.seconds(cost) == pytest.approx(2e-3)
    assert ROOFS.seconds(Cost({}, {"weights": 8 * 10**9}, {"activations": 8 * 10**9}, 1)) == pytest.approx(4e-3)


def test_quantiles_are_of_the_times_themselves() -> None:
    times = quantiles([float(n) for n in range(10, 0, -1)], "eager")
    assert (times.p10, times.median, times.p90, times.calls, times.timer) == (2.0, 6.0, 10.0, 10, "eager")


def test_record_comes_back_from_its_folder(tmp_path: Path) -> None:
    path = save(RECORD, tmp_path)
    assert path == tmp_path / "nvidia-h200" / "2026-01-02T030405Z.json"
    assert list(records(tmp_path)) == [RECORD]
    assert gpu_id("AMD Instinct MI300X (OAM)") == "amd-instinct-mi300x-oam"


def test_table_takes_the_latest_measurement_of_a_case(monkeypatch: pytest.MonkeyPatch) -> None:
    newer = json.loads(json.dumps(RECORD))
    newer["measurements"][0]["measured"]["median"] = 2e-3
    monkeypatch.setattr(measured, "records", lambda: iter([RECORD, newer]))
    (row,) = measured_rows(["gemm", "rmsnorm"])
    assert (row["measured_s"], row["roof_fraction"], row["expected_bytes"]) == (2e-3, 0.5, 100)
    assert set(row) == {*KEYS, *EXTRA}
    assert summary([row])[0]["measured_s"] == 2e-3


@pytest.mark.parametrize("name", list(KERNELS))
def test_every_kernel_has_shapes_to_measure_and_their_useful_work(name: str) -> None:
    """Sizes that a GPU of 80 GB holds; nothing is allocated here."""
    spec = load(name)
    assert spec.measured
    for case in spec.measured:
        inputs = spec.inputs(case, "meta")
        held = sum(value.numel() * value.element_size() for value in inputs.values() if isinstance(value, torch.Tensor))
        assert held < 30e9
        if name not in READS_VALUES:
            expected = spec.expected(case, inputs)
            assert expected.useful.bytes > 0
            assert None not in ROOFS.units(expected.useful, expected.dot).values()


class NoClock:
    """Runs calls once and keeps what the last one gave."""

    def both(self, calls: list[Callable[[], Any]]) -> tuple[Times, Times, None]:
        self.out = [call() for call in calls][-1]
        times = Times(1e-3, 1e-3, 1e-3, 1, "none")
        return times, times, None


@pytest.mark.usefixtures("interpreted")
@pytest.mark.parametrize(
    "name", ["gemm", "gated_mlp", "flash_attention", "flash_decoding", "mla_prefill", "rmsnorm", "unfused_attention"]
)
def test_the_library_that_a_kernel_is_compared_with_does_the_same(name: str) -> None:
    """At a proof case, through the whole measurement but its clock."""
    spec = load(name)
    here = dataclasses.replace(spec, inputs=lambda case, device: spec.inputs(case, "cpu"))
    assert spec.library is not None
    compared = 0
    for case in spec.cases:
        tensors = spec.inputs(case, "cpu")
        if compared == 2 or spec.library(case, tensors) is None:
            continue
        clock = NoClock()
        found = measured.measure(here, case, ROOFS, clock)  # type: ignore[arg-type]
        right = next(iter(spec.reference(case, tensors).values()))
        heads_first = clock.out.dim() == 4 and clock.out.numel() == right.numel()
        out = clock.out.transpose(1, 2).reshape(right.shape) if heads_first else clock.out
        assert (out.double() - right.double()).abs().max() < 2e-2 * right.double().abs().max()
        assert (found.library_ratio, found.comment) == (1.0, "")
        assert found.roof_fraction == pytest.approx(ROOFS.seconds(spec.expected(case, tensors).useful) / 1e-3)
        compared += 1
    assert compared


@NO_GPU
def test_without_a_gpu_bench_exits_3_and_says_so() -> None:
    with pytest.raises(NoGPU):
        need_gpu()
    done = bench()
    assert (done.returncode, done.stdout) == (3, "")
    assert done.stderr == "error: no CUDA device: this measures on a GPU (validate kernels shows what is proved without one)\n"


def test_bench_refuses_an_unknown_kernel_with_the_nearest_name() -> None:
    done = bench("gem")
    assert done.returncode == 2
    assert "Did you mean 'gemm'" in done.stderr


def test_table_of_evidence_has_the_promised_keys_and_agrees() -> None:
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "roofline", "validate", "kernels", "--class", "rmsnorm", "-o", "json"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    rows = json.loads(done.stdout)
    assert all(set(KEYS) <= set(row) for row in rows)
    counted = [row for row in rows if row["counted_bytes"] is not None]
    assert {row["case"] for row in counted} == {case.name for case in load("rmsnorm").cases}
    assert all(row["counted_bytes"] == row["expected_bytes"] for row in counted)
    compiled = [row for row in rows if row["registers"] is not None]
    assert {row["case"] for row in compiled} == {build.case.name for build in load("rmsnorm").builds}
    assert all(row["spills"] == 0 for row in compiled)


@pytest.mark.gpu
@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_kernels_are_right_on_the_gpu_and_reach_their_targets(tmp_path: Path) -> None:
    done = bench("--folder", str(tmp_path), "-o", "json")
    assert done.returncode == 0, done.stderr
    found = {(one["kernel"], one["case"]): one for one in json.loads(done.stdout)}
    assert found["gemm", "square-8k"]["library_ratio"] >= 0.80
    assert found["flash_attention", "llama-8b-4k"]["library_ratio"] >= 0.65
    assert found["flash_decoding", "llama-70b-32k"]["roof_fraction"] >= 0.75
    assert found["rmsnorm", "layer-8k"]["roof_fraction"] >= 0.85
