"""The pytest plugin in repositories of its own: a kernel that keeps its share and its traffic passes, one that does not fails."""

from __future__ import annotations

import subprocess
import sys
import tomllib
from importlib.util import find_spec
from pathlib import Path
from shutil import which

import pytest

ROOT = Path(__file__).parents[2]
pytest_plugins = ["pytester"]

COPY = """
    import pytest
    import torch
    import triton
    import triton.language as tl

    from roofline.cost import Cost

    @triton.jit
    def copy(x, out, n, TWICE: tl.constexpr, BLOCK: tl.constexpr):
        at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
        value = tl.load(x + at, mask=at < n)
        if TWICE:
            value += tl.load(x + at, mask=at < n) * 0
        tl.store(out + at, value, mask=at < n)

    def launch(n, twice):
        x = torch.ones(n)
        copy[(triton.cdiv(n, 64),)](x, torch.empty_like(x), n, TWICE=twice, BLOCK=64)
"""
SHARE = """
    from roofline.cost import Cost

    def test_share(roofline):
        cost = Cost({"bf16": 2 * 4096**3}, {"weights": 2 * 4096**2, "activations": 2 * 4096**2}, {"activations": 2 * 4096**2})
        roofline.check_share(cost, SECONDS, at_least=0.7, gpu="h100-sxm")
"""


@pytest.fixture
def repository(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> pytest.Pytester:
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.delenv("PYTEST_ADDOPTS", raising=False)
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    pytester.makefile(".toml", pyproject="[tool.pytest.ini_options]\n")
    return pytester


def run(repository: pytest.Pytester, *arguments: str) -> pytest.RunResult:
    """pytest in a process of its own with no plugin but this one, whether the package is installed or not."""
    plugins = ("-p", "no:cacheprovider", "-p", "roofline.validate.pytest_plugin")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
        return repository.runpytest_subprocess(*plugins, *arguments)


def counted(repository: pytest.Pytester, body: str, *arguments: str) -> pytest.RunResult:
    if find_spec("triton") is None:
        pytest.skip("triton is not installed")
    repository.makepyfile(test_copy=COPY + body)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_INTERPRET", "1")
        return run(repository, *arguments)


def test_a_kernel_above_its_share_passes(repository: pytest.Pytester) -> None:
    """The bound of a 4096-cubed bf16 matmul on 989 TFLOP/s is 139 us."""
    repository.makepyfile(SHARE.replace("SECONDS", "170e-6"))
    run(repository).assert_outcomes(passed=1)


def test_a_kernel_below_its_share_fails_and_says_by_what(repository: pytest.Pytester) -> None:
    repository.makepyfile(SHARE.replace("SECONDS", "300e-6"))
    result = run(repository)
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(
        ["E*Failed: 0.46 of the roof, at least 0.70 wanted: measured 0.3000 ms, bound 0.1390 ms (compute: 137.4 GFLOP at "
         "989.* TFLOP/s bf16; h100-sxm, datasheet)"]
    )  # fmt: skip


def test_a_time_that_beats_the_roof_fails(repository: pytest.Pytester) -> None:
    repository.makepyfile(SHARE.replace("SECONDS", "100e-6"))
    run(repository).stdout.fnmatch_lines(["E*Failed: 1.39 of the roof is more than there is*", "*the inputs stay in a cache*"])


def test_the_share_is_a_property_of_the_report(repository: pytest.Pytester) -> None:
    repository.makepyfile(SHARE.replace("SECONDS", "170e-6"))
    run(repository, "--junitxml=report.xml").assert_outcomes(passed=1)
    assert '<property name="roofline_share" value="0.8175"' in (repository.path / "report.xml").read_text(encoding="utf-8")


def test_an_accelerator_may_be_chosen_for_the_run(repository: pytest.Pytester) -> None:
    repository.makepyfile(SHARE.replace("SECONDS", "170e-6").replace(', gpu="h100-sxm"', ""))
    run(repository, "--roofline-gpu", "h100-sxm").assert_outcomes(passed=1)
    run(repository, "--roofline-gpu", "b200").assert_outcomes(failed=1)
    result = run(repository, "--roofline-gpu", "h1000")
    result.stdout.fnmatch_lines(["E*InputError: gpu: unknown accelerator 'h1000'. Did you mean*"])


def test_without_a_gpu_measuring_skips_unless_it_is_required(repository: pytest.Pytester) -> None:
    if find_spec("torch") is None or which("nvidia-smi"):
        pytest.skip("torch without a GPU is needed")
    repository.makepyfile(SHARE.replace("SECONDS", "lambda: None"))
    run(repository).assert_outcomes(skipped=1)
    result = run(repository, "--roofline-require", "times")
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(["E*no CUDA device: times are measured on a GPU (--roofline-require times)"])


EXPECTED = """
    COST = Cost({}, {"activations": 4000}, {"activations": 4000})

    @pytest.mark.parametrize("twice", [False, True])
    @pytest.mark.parametrize("expected", [COST, {"x": 4000, "out": 4000}], ids=["cost", "arguments"])
    def test_traffic(roofline, expected, twice):
        with roofline.counting() as counts:
            launch(1000, twice)
        roofline.check_traffic(counts, expected)

    def test_twice_is_allowed(roofline):
        with roofline.counting() as counts:
            launch(1000, True)
        roofline.check_traffic(counts, COST, at_most=2)

    def test_unnamed(roofline):
        with roofline.counting() as counts:
            launch(1000, False)
        roofline.check_traffic(counts, {"x": 4000})

    def test_nothing(roofline):
        with roofline.counting() as counts:
            pass
        roofline.check_traffic(counts, {})
"""


def test_traffic_that_is_expected_passes_and_more_fails(repository: pytest.Pytester) -> None:
    result = counted(repository, EXPECTED)
    result.assert_outcomes(passed=3, failed=4)
    result.stdout.fnmatch_lines_random(
        [
            "E*Failed: more traffic than expected:", "E*bytes read: 8,000 B, 4,000 B expected (2 times)",
            "E*x: 8,000 B, 4,000 B expected (2 times)", "E*out: 4,000 B, 0 B expected", "E*no triton kernel was launched*",
        ]
    )  # fmt: skip
    failed = ["cost-True", "arguments-True"]
    result.stdout.fnmatch_lines_random([f"FAILED *test_traffic[[]{name}]*" for name in failed])


BASELINE = """
    def test_traffic(roofline):
        with roofline.counting() as counts:
            launch(1000, TWICE)
        roofline.check_traffic(counts)
"""


def test_traffic_is_held_against_the_committed_baseline(repository: pytest.Pytester) -> None:
    once, twice = BASELINE.replace("TWICE", "False"), BASELINE.replace("TWICE", "True")
    counted(repository, once).stdout.fnmatch_lines(["E*roofline-baseline.json has no entry*pytest --roofline-update*"])
    counted(repository, once, "--roofline-update").assert_outcomes(passed=1)
    assert '"copy.x read": 4000' in (repository.path / "roofline-baseline.json").read_text(encoding="utf-8")
    counted(repository, once).assert_outcomes(passed=1)
    result = counted(repository, twice)
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(["E*copy.x read: 4,000 B -> 8,000 B (+100 %)", "E*if that is meant*"])


def test_less_traffic_passes_and_is_told(repository: pytest.Pytester) -> None:
    counted(repository, BASELINE.replace("TWICE", "True"), "--roofline-update").assert_outcomes(passed=1)
    result = counted(repository, BASELINE.replace("TWICE", "False"))
    result.assert_outcomes(passed=1)
    result.stdout.fnmatch_lines(["test_copy.py::test_traffic: less traffic than the baseline"])


def test_counting_without_the_interpreter_skips_unless_it_is_required(
    repository: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    repository.makepyfile("def test_traffic(roofline):\n    with roofline.counting():\n        pass\n")
    run(repository).assert_outcomes(skipped=1)
    result = run(repository, "--roofline-require", "traffic")
    result.stdout.fnmatch_lines(["E*set TRITON_INTERPRET=1 for the whole run (--roofline-require traffic)"])


@pytest.mark.parametrize(
    ("device", "accelerator"),
    [
        ("NVIDIA H100 80GB HBM3", "h100-sxm"), ("NVIDIA H100 PCIe", "h100-pcie"), ("NVIDIA A100-SXM4-40GB", "a100-sxm-40gb"),
        ("NVIDIA GeForce RTX 4090", "rtx-4090"), ("AMD Instinct MI300X", "mi300x"),
    ],
)  # fmt: skip
def test_the_device_that_is_here_is_known_by_its_name(device: str, accelerator: str) -> None:
    from roofline.validate.guard import accelerator_of

    assert accelerator_of(device).id == accelerator


def test_a_device_that_is_like_a_known_one_is_not_taken_for_it() -> None:
    from roofline.errors import InputError
    from roofline.validate.guard import accelerator_of

    with pytest.raises(InputError, match="Laptop GPU' is not known"):
        accelerator_of("NVIDIA GeForce RTX 4090 Laptop GPU")


def test_installing_the_package_registers_the_plugin_and_it_imports_nothing_heavy() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    module = project["entry-points"]["pytest11"]["roofline"]
    code = (
        f"import pytest, sys; before = set(sys.modules); import {module}; "
        "print(*sorted(name for name in set(sys.modules) - before if not name.startswith('roofline')))"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.split() == []
