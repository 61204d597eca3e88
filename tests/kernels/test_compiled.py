"""What the launches become on GPUs that need not be here: gates, and the reader of intermediate code."""

from __future__ import annotations

import pytest

pytest.importorskip("triton")

import dataclasses
import os
import pickle

from filelock import FileLock

from roofline.kernels.device import DEVICES
from roofline.kernels.registry import KERNELS, load
from roofline.kernels.spec import Build
from roofline.validate import compiled
from roofline.validate.compiled import Compiled

# Compiling everything takes minutes, and a worker may wait for another that does it.
pytestmark = [pytest.mark.timeout(900), pytest.mark.xdist_group("compiled")]


@pytest.fixture(scope="module")
def everything(tmp_path_factory: pytest.TempPathFactory) -> list[Compiled]:
    """Every build, compiled by the worker that is first; the others wait for it and read."""
    if "PYTEST_XDIST_WORKER" not in os.environ:
        return compiled.run()
    shared = tmp_path_factory.getbasetemp().parent / "compiled.pickle"
    with FileLock(f"{shared}.lock"):
        if not shared.exists():
            shared.write_bytes(pickle.dumps(compiled.run()))
        return pickle.loads(shared.read_bytes())


def test_every_build_passes_its_gates(everything: list[Compiled]) -> None:
    failures = [
        f"{one.kernel} {one.case} {one.function} {one.arch}: {'; '.join(one.failures)}" for one in everything if one.failures
    ]
    assert failures == []


def test_every_build_is_compiled_for_each_of_its_targets(everything: list[Compiled]) -> None:
    wanted = {(name, build.case.name, arch) for name in KERNELS for build in load(name).builds for arch in build.targets}
    assert {(one.kernel, one.case, one.arch) for one in everything} == wanted
    assert {name for name, _, _ in wanted} == set(KERNELS)


def test_no_kernel_spills_on_sm_90_and_every_one_can_be_launched(everything: list[Compiled]) -> None:
    here = [one for one in everything if one.arch == "sm_90"]
    assert {one.spills for one in here} == {0}
    assert max(one.shared for one in here) <= DEVICES["sm_90"].shared
    assert max(one.registers for one in here) <= compiled.MOST_REGISTERS
    assert min(one.occupancy for one in here) >= 1


def test_stated_kernels_exist_in_the_launch(everything: list[Compiled]) -> None:
    launched = {(one.kernel, one.case, one.function) for one in everything}
    stated = {
        (name, build.case.name, function)
        for name in KERNELS
        for build in load(name).builds
        for function in (*build.units, *build.tma)
    }
    assert stated <= launched


GOOD = Compiled("k", "c", "f", "sm_90", 128, 0, 98304, 232448, 8, 2, {"HGMMA": 4, "UTMALDG": 2})


@pytest.mark.parametrize(
    ("change", "gate"),
    [
        ({"shared": 262144}, "shared memory"),
        ({"spills": 3}, "spill"),
        ({"occupancy": 0}, "do not fit"),
        ({"instructions": {"HMMA": 4, "UTMALDG": 2}}, "no HGMMA"),
        ({"instructions": {"HGMMA": 4}}, "no TMA"),
    ],
)
def test_each_gate_can_fail(change: dict[str, object], gate: str) -> None:
    build = Build(load("gemm").cases[0], {"f": "HGMMA"}, ("f",))
    assert list(compiled.gates(build, GOOD, DEVICES["sm_90"])) == []
    failures = list(compiled.gates(build, dataclasses.replace(GOOD, **change), DEVICES["sm_90"]))  # type: ignore[arg-type]
    assert len(failures) == 1
    assert gate in failures[0]


def test_occupancy_is_what_the_scarcest_resource_allows() -> None:
    hopper = DEVICES["sm_90"]
    assert compiled.occupancy(hopper, 128, 0, 8, 32) == 2
    assert compiled.occupancy(hopper, 32, 100_000, 4, 32) == 2
    assert compiled.occupancy(hopper, 16, 0, 4, 32) == 16
    assert compiled.occupancy(hopper, 255, 0, 16, 32) == 0


def test_loop_reader_separates_prologue_and_loop() -> None:
    text = """
    %0 = tt.load %p : tensor<64x32x!tt.ptr<bf16>>
    scf.for %i = %a to %b step %c  : i32 {
      %1 = tt.load %q, %m : tensor<32x16x!tt.ptr<f32>>
      %2 = tt.dot %x, %y, %z : tensor<64x32xbf16> * tensor<32x16xbf16> -> tensor<64x16xf32>
    }
    tt.store %r, %2 : tensor<64x16x!tt.ptr<f32>>
    """
    assert compiled.loops(text) == {"0.load": 4096, "1.load": 2048, "1.dot": 2 * 64 * 16 * 32, "0.store": 4096}


@pytest.mark.parametrize("case", ["large", "medium", "batch-64"])
def test_loop_of_the_compiled_gemm_asks_for_its_tiles(everything: list[Compiled], case: str) -> None:
    one = next(one for one in everything if (one.kernel, one.case, one.arch) == ("gemm", case, "sm_90"))
    depth = "2" if one.function == "gemm_tma_kernel" else "1"
    BM, BN, BK = {"large": (128, 256, 64), "medium": (128, 128, 64), "batch-64": (64, 64, 64)}[case]
    assert one.loops[f"{depth}.load"] == (BM + BN) * BK * 2
    assert one.loops[f"{depth}.dot"] == 2 * BM * BN * BK
