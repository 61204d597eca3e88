"""The counting interpreter as a product of its own: counts, attribution, bounds, corrections, and loud failure."""

from __future__ import annotations

import pytest

pytest.importorskip("triton")

import torch

from roofline.validate.counted import counting, interpreter
from roofline.validate.counted_check import check
from roofline.validate.rounding import HarnessError

import triton  # isort: skip
import triton.language as tl  # isort: skip


@triton.jit
def copy_kernel(source, target, N, BLOCK: tl.constexpr, EXTRA: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(target + at, tl.load(source + at + EXTRA, mask=at < N, other=0.0), mask=at < N)


@triton.jit
def scale_kernel(source, target, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    tl.store(target + at, (tl.exp2(tl.load(source + at)) * 2.0 + 0.5).to(target.dtype.element_ty))


@triton.jit
def cast_kernel(source, target, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    tl.store(target + at, tl.load(source + at).to(target.dtype.element_ty))


@triton.jit
def double_kernel(source, target, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    tl.store(target + at, tl.maximum(tl.load(source + at) * 2.0 + 0.5, -1.0))


@triton.jit
def same_place_kernel(target):
    tl.store(target, tl.program_id(0))


def test_check_passes_with_the_installed_triton() -> None:
    check()


def test_bytes_programs_and_masked_lanes_of_a_copy() -> None:
    source, target = torch.randn(70), torch.empty(70)
    with counting() as counts:
        copy_kernel[(3,)](source, target, 70, 32, 0)
    assert torch.equal(source, target)
    assert (counts.programs, counts.launches) == (3, 1)
    assert (dict(counts.read), dict(counts.written)) == ({"source": 280}, {"target": 280})
    assert dict(counts.masked) == {"source": (96 - 70) * 4}
    assert counts.kernels["copy_kernel"].read == counts.read


def test_distinct_bytes_are_counted_once_within_a_kernel_and_again_in_the_next() -> None:
    source, target = torch.randn(32), torch.empty(32)
    with counting() as counts:
        copy_kernel[(1,)](source, target, 32, 32, 0)
        copy_kernel[(1,)](source, target, 32, 32, 0)
        scale_kernel[(1,)](source, target, 32)
    assert counts.read["source"] == 3 * 128
    assert counts.unique("read")["source"] == 2 * 128


def test_views_are_bounded_by_themselves_and_not_by_their_storage() -> None:
    source, target = torch.randn(64)[:32], torch.empty(32)
    with counting():
        copy_kernel[(1,)](source, target, 32, 32, 0)
    with (
        pytest.raises(interpreter.InterpreterError, match=r"read of 1 x 4 bytes .* in none of the tensors source, target"),
        counting(),
    ):
        copy_kernel[(1,)](source, target, 32, 32, 1)


def test_a_store_by_two_programs_to_one_place_is_seen() -> None:
    target = torch.zeros(1, dtype=torch.int32)
    with counting() as counts:
        same_place_kernel[(3,)](target)
    assert dict(counts.rewritten) == {"target": 8}


def test_special_functions_and_arithmetic_are_counted() -> None:
    with counting() as counts:
        scale_kernel[(1,)](torch.randn(64), torch.empty(64), 64)
    assert counts.special == counts.operations["exp2"] == counts.operations["fmul"] == counts.operations["fadd"] == 64


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2])
def test_casts_round_to_nearest_even(dtype: torch.dtype) -> None:
    source, target = torch.linspace(-3, 3, 512), torch.empty(512, dtype=dtype)
    with counting():
        scale_kernel[(1,)](source, target, 512)
    assert torch.equal(target.float(), (torch.exp2(source) * 2.0 + 0.5).to(dtype).float())


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
def test_what_is_too_large_for_eight_bits_becomes_the_largest(dtype: torch.dtype) -> None:
    source = torch.tensor([1e4, 6e4, -1e30, float("inf")] * 4)
    target, largest = torch.empty(16, dtype=dtype), torch.finfo(dtype).max
    with counting():
        cast_kernel[(1,)](source, target, 16)
    assert torch.equal(target.float(), source.clamp(-largest, largest).to(dtype).float())
    assert bool(target.float().isfinite().all())


def test_bfloat16_arithmetic_is_that_of_bfloat16() -> None:
    source, target = torch.linspace(-3, 3, 512).to(torch.bfloat16), torch.empty(512, dtype=torch.bfloat16)
    with counting():
        double_kernel[(1,)](source, target, 512)
    assert torch.equal(target, (source * 2.0 + 0.5).clamp(min=-1.0))


@pytest.mark.parametrize(
    ("owner", "name"), [("InterpreterBuilder", "create_dot"), ("GridExecutor", "_init_args_hst"), ("ReduceOps", "apply_impl")]
)
def test_a_hook_that_triton_renamed_stops_the_count(monkeypatch: pytest.MonkeyPatch, owner: str, name: str) -> None:
    monkeypatch.delattr(getattr(interpreter, owner), name)
    with pytest.raises(HarnessError, match=f"{owner}.{name}"), counting():
        pass


def test_a_hook_that_triton_no_longer_calls_fails_the_check(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("roofline.validate.counted._dot", lambda watch, method: method)
    with pytest.raises(HarnessError, match="dot FLOPs"):
        check()


def test_hooks_are_gone_after_the_block_even_when_it_fails() -> None:
    before = dict(vars(interpreter.InterpreterBuilder))
    with pytest.raises(ZeroDivisionError), counting():
        raise ZeroDivisionError
    assert dict(vars(interpreter.InterpreterBuilder)) == before


def test_an_operation_that_nobody_has_looked_at_fails_the_check(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(interpreter.InterpreterBuilder, "create_tan", lambda self, x: x, raising=False)
    with pytest.raises(HarnessError, match=r"operations without a hook: \['tan'\]"):
        check()


def test_bfloat16_whose_raw_bits_are_subtracted_fails_the_check(monkeypatch: pytest.MonkeyPatch) -> None:
    from roofline.validate import counted

    negate, hook = "fneg" if "create_fneg" in vars(interpreter.InterpreterBuilder) else "fsub", counted._elementwise
    monkeypatch.setattr(counted, "_elementwise", lambda watch, of, method: method if of == negate else hook(watch, of, method))
    with pytest.raises(HarnessError, match="bf16 signs"):
        check()


def test_a_scaled_dot_is_refused_where_triton_has_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(interpreter.InterpreterBuilder, "create_dot_scaled", lambda self: None, raising=False)
    with counting(), pytest.raises(HarnessError, match="dot_scaled is not counted"):
        interpreter.InterpreterBuilder.create_dot_scaled(None)


@triton.jit
def widened_kernel(source, target, N):
    tl.store(target, tl.load(source) + N.to(tl.float32))


@triton.jit
def short_dot_kernel(x, out, K: tl.constexpr):
    rows, inner = tl.arange(0, 16), tl.arange(0, K)
    a = tl.load(x + rows[:, None] * K + inner[None, :])
    tl.store(out + rows[:, None] * 16 + rows[None, :], tl.dot(a, tl.trans(a), input_precision="ieee"))


def test_a_whole_one_is_a_constant_as_it_is_for_the_compiler() -> None:
    with counting():
        widened_kernel[(1,)](torch.zeros(1), torch.zeros(1), 2)
    with pytest.raises(interpreter.InterpreterError, match="'to'"), counting():
        widened_kernel[(1,)](torch.zeros(1), torch.zeros(1), 1)


def test_a_dot_over_too_few_elements_is_refused_as_by_the_compiler() -> None:
    with counting():
        short_dot_kernel[(1,)](torch.ones(16, 16), torch.zeros(16, 16), 16)
    with pytest.raises(interpreter.InterpreterError, match="too few"), counting():
        short_dot_kernel[(1,)](torch.ones(16, 8), torch.zeros(16, 16), 8)
