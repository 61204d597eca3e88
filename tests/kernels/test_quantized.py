"""Quantised matmuls and caches beyond their cases: bounds of the formats, bytes against Costs and edits, refusals."""

from __future__ import annotations

import dataclasses

import pytest

pytest.importorskip("triton")

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from roofline.components.attention import CacheWrite
from roofline.components.linear import Linear
from roofline.configs.load import load_model
from roofline.edits.edit import apply
from roofline.edits.storage import kv_dtype
from roofline.errors import InputError
from roofline.formats import BF16, INT8, format_named
from roofline.kernels import gemm_int8 as int8
from roofline.kernels import quantize_kv as kv
from roofline.kernels.compression.affine import round_to_nearest
from roofline.kernels.compression.network import Sizes
from roofline.kernels.gemm_int4 import SPEC as INT4
from roofline.kernels.gemm_int4 import Integers, gemm_int4
from roofline.kernels.gemm_mxfp4 import SPEC as MXFP4
from roofline.kernels.gemm_mxfp4 import Floats, gemm_mxfp4
from roofline.kernels.microscaling import elements, pack, powers
from roofline.kernels.packing import pack_awq, pack_gptq, pack_gptq_zeros
from roofline.kernels.tiling import Tiles
from roofline.validate.counted import counting
from roofline.work import Work

M, N, K = 7, 40, 128
SMALL = Tiles(16, 32, 32)
ROUNDED = 2.0**-8
"""Of a bf16 weight and a bf16 sum, relative to the sum of magnitudes."""


def operands(seed: int, dtype: torch.dtype = torch.bfloat16) -> tuple[torch.Tensor, torch.Tensor]:
    """Activations ``[M, K]`` and a weight ``[N, K]``, both with large channels."""
    generator = torch.Generator().manual_seed(seed)
    gains = torch.exp(torch.randn(K, generator=generator))
    return (torch.randn(M, K, generator=generator) * gains).to(dtype), torch.randn(N, K, generator=generator)


def check_bound(x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor, off: torch.Tensor) -> None:
    """Each output is within ``|x| . off`` of the product with the weight that was quantised, and rounding.

    Args:
        off: ``[N, K]``, how far the format may leave each weight.
    """
    wide = x.double().abs()
    bound = wide @ off.double().T + ROUNDED * (wide @ weight.double().abs().T)
    error = (out.double() - x.double() @ weight.double().T).abs()
    assert (error <= bound).all()
    assert float(error.max()) > 0


@pytest.mark.usefixtures("interpreted")
@pytest.mark.parametrize("stored", ["awq", "gptq"])
@pytest.mark.parametrize("name", ["int4-g32-asym", "int4-g64-asym"])
def test_an_int4_product_is_within_half_a_scale_per_weight_of_the_whole_one(name: str, stored: str) -> None:
    x, weight = operands(1)
    made = round_to_nearest(weight, name)
    assert made.zeros is not None
    if stored == "awq":
        words, zeros = pack_awq(made.codes.T), pack_awq(made.zeros.T)
    else:
        words, zeros = pack_gptq(made.codes.T), pack_gptq_zeros(made.zeros.T)
    out = gemm_int4(x, words, made.scales.T.contiguous(), zeros, tiles=SMALL)
    check_bound(x, weight, out, 0.51 * made.scales.repeat_interleave(made.grid.group, 1))


@pytest.mark.usefixtures("interpreted")
def test_a_symmetric_int4_product_needs_no_zero_points() -> None:
    x, weight = operands(2)
    made = round_to_nearest(weight, "int4-g32")
    out = gemm_int4(x, pack_gptq(made.codes.T), made.scales.T.contiguous(), tiles=SMALL)
    check_bound(x, weight, out, 0.51 * made.scales.repeat_interleave(32, 1))


@pytest.mark.usefixtures("interpreted")
def test_an_mxfp4_product_is_within_two_units_of_its_block_scale_per_weight_of_the_whole_one() -> None:
    """Elements reach 6 and the scale brings the largest below 8; between 4 and 6 the nearest is 1 away at most."""
    x, weight = operands(3)
    packed, scales = pack(weight)
    out = gemm_mxfp4(x, packed, scales, tiles=SMALL)
    off = powers(scales).repeat_interleave(32, 1)
    largest = (weight.double() / off).abs()
    assert float(largest.max()) < 8
    check_bound(x, weight, out, off * torch.where(largest > 6, 2.0, torch.where(largest > 4, 1.0, 0.5)))


@pytest.mark.usefixtures("interpreted")
def test_an_nvfp4_product_is_that_of_elements_scales_and_the_number_of_the_tensor() -> None:
    x, _ = operands(4)
    generator = torch.Generator().manual_seed(4)
    packed = torch.randint(0, 256, (N, K // 2), generator=generator, dtype=torch.uint8)
    scales = (0.5 + torch.rand(N, K // 16, generator=generator)).to(torch.float8_e4m3fn)
    factor = torch.tensor([0.375])
    out = gemm_mxfp4(x, packed, scales, factor, tiles=SMALL)
    weight = elements(packed) * scales.double().repeat_interleave(16, 1) * 0.375
    assert torch.equal((weight / 0.375).to(torch.bfloat16).double(), weight / 0.375)
    check_bound(x, weight, out, torch.zeros_like(weight))


@pytest.mark.usefixtures("interpreted")
def test_a_w8a8_product_is_within_half_a_scale_per_operand_of_the_whole_one() -> None:
    x, weight = operands(5)
    b, b_scale = int8.quantize_tokens(weight)
    a, a_scale = int8.quantize_tokens(x)
    out = int8.gemm_int8(x, b, None, b_scale, tiles=SMALL)
    assert torch.equal(out, int8.gemm_int8(a, b, a_scale, b_scale, tiles=SMALL))
    wide = x.double()
    half_x, half_w = 0.5 * a_scale.double()[:, None], 0.5 * b_scale.double()[:, None]
    bound = half_x * weight.double().abs().sum(1) + wide.abs().sum(1, keepdim=True) * half_w.T + K * half_x * half_w.T
    error = (out.double() - wide @ weight.double().T).abs()
    assert (error <= bound + ROUNDED * (wide.abs() @ weight.double().abs().T)).all()


def test_quantising_apart_costs_what_the_pass_reads_and_writes() -> None:
    """2 bytes an element in, 1 out and a scale per token: what a kernel in front that quantises its output need not move."""
    case = int8.Scaled("apart", "bf16", M, N, K, dynamic=True, tiles=SMALL)
    apart = int8.expected(case, {}).useful
    fused = int8.expected(dataclasses.replace(case, dynamic=False), {}).useful
    assert apart.bytes - fused.bytes == 2 * M * K + M * K + 4 * M
    assert apart.launches - fused.launches == 1
    assert fused.matrix_flops == apart.matrix_flops == Linear(K, N, weight=INT8).cost(Work(1, M)).flops["int8"]


@pytest.mark.parametrize(
    ("spec", "case", "name"),
    [
        (INT4, Integers("bytes", "bf16", M, N, K, SMALL, group=32), "int4-g32-asym"),
        (INT4, Integers("bytes", "bf16", M, N, K, SMALL, group=64, asymmetric=False), "int4-g64"),
        (MXFP4, Floats("bytes", "bf16", M, N, K, SMALL), "mxfp4"),
        (MXFP4, Floats("bytes", "bf16", M, N, K, SMALL, stored="nvfp4"), "nvfp4"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_weights_read_are_the_bits_of_the_format(spec: object, case: object, name: str) -> None:
    tensors = spec.inputs(case, "cpu")  # type: ignore[attr-defined]
    with counting() as counts:
        spec.launch(case, tensors)  # type: ignore[attr-defined]
    read = counts.unique("read")
    weights = sum(size for argument, size in read.items() if argument not in ("x", "factor"))
    assert 8 * weights == format_named(name).bits * N * K


# Keys and values.


@settings(max_examples=20, deadline=None)
@given(
    st.integers(1, 5), st.integers(1, 3), st.sampled_from(["fp8", "fp8-token", "int4-g32", "int4-g64-asym", "int4-g32-asym"]),
    st.integers(0, 2**31),
)  # fmt: skip
def test_entries_come_back_within_half_a_step_from_random_slots(tokens: int, heads: int, name: str, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    width, page = 128 * heads, 4
    k, v = (torch.randn(2, tokens, heads, 128, generator=generator) * 3).to(torch.bfloat16)
    slots = torch.randperm(8 * page, generator=generator)[:tokens].to(torch.int32)
    pages = [kv.allocate(8, page, width, name) for _ in "kv"]
    with counting():
        kv.quantize_kv(k, v, slots, *pages, name, 0.05, 0.05)
    layout = kv.Layout.named(name)
    for values, held in zip((k, v), pages, strict=True):
        back = kv.dequantize(held, name, 0.05).flatten(0, 1)
        entries = values.flatten(1).double()
        if layout.bits == 8:
            steps = entries.abs() * 2**-3 + 0.05 * 2**-8
        else:
            assert held.scales is not None
            steps = 1.02 * held.scales.flatten(0, 1)[slots.long()].double().repeat_interleave(layout.group, 1)
            if not layout.zeros:
                steps = steps * torch.where(entries > 7 * steps / 1.02, 2.0, 1.0)
        assert ((back[slots.long()] - entries).abs() <= steps / 2).all()
        untouched = torch.ones(len(back), dtype=torch.bool)
        untouched[slots.long()] = False
        assert (back[untouched] == 0).all()


@pytest.mark.parametrize("name", ["fp8", "fp8-token", "int4-g64", "int4-g32-asym", "int4-g128-asym"])
def test_pages_hold_the_bytes_of_the_edited_model(name: str) -> None:
    """``--kv-dtype``: what one token adds to the state, and what ``CacheWrite`` writes."""
    sizes = Sizes(vocabulary=64, D=256, F=128, N=4, K=2, H=128, layers=3)
    model = apply(load_model(sizes.config()), [kv_dtype(name)])
    pages = [kv.allocate(5, 16, sizes.K * sizes.H, name) for _ in "kv"]
    tokens = 5 * 16
    stored = sizes.layers * sum(part.stored_bytes for part in pages)
    assert stored == model.state_bytes(tokens)
    written = CacheWrite(0, sizes.K, sizes.H, kv=format_named(name), activation=BF16).cost(Work(1, tokens)).write["state"]
    assert stored == sizes.layers * written


def test_constant_groups_are_exact_and_zeros_stay_zero() -> None:
    values = torch.zeros(2, 1, 128, dtype=torch.bfloat16)
    values[0, 0, :64] = 6.0
    for name in ("int4-g32-asym", "int4-g32", "fp8-token"):
        pages = [kv.allocate(1, 2, 128, name) for _ in "kv"]
        with counting():
            kv.quantize_kv(values, values, torch.tensor([0, 1], dtype=torch.int32), *pages, name)
        back = kv.dequantize(pages[0], name)[0]
        assert (back[1] == 0).all()
        assert (back[0, 64:] == 0).all()
        assert torch.allclose(back[0, :64], torch.tensor(6.0, dtype=torch.float64), rtol=2**-10)


# Refusals and nothing to do.


def test_shapes_and_formats_that_do_not_fit_are_refused() -> None:
    x = torch.zeros(2, 64, dtype=torch.bfloat16)
    with pytest.raises(InputError, match=r"qweight: shape \(9, 16\) does not fit"):
        gemm_int4(x, torch.zeros(9, 16, dtype=torch.int32), torch.zeros(2, 16, dtype=torch.float16))
    with pytest.raises(InputError, match="groups of 24 and steps of 32 do not nest"):
        gemm_int4(
            torch.zeros(2, 48, dtype=torch.bfloat16), torch.zeros(6, 16, dtype=torch.int32),
            torch.zeros(2, 16, dtype=torch.float16), tiles=SMALL,
        )  # fmt: skip
    with pytest.raises(InputError, match=r"scales: shape \(8, 4\) does not fit"):
        gemm_mxfp4(x, torch.zeros(8, 32, dtype=torch.uint8), torch.zeros(8, 4, dtype=torch.uint8))
    with pytest.raises(InputError, match="b: bfloat16 is not taken here; pass int8"):
        int8.gemm_int8(x, torch.zeros(8, 64, dtype=torch.bfloat16), None, torch.ones(8))
    with pytest.raises(InputError, match="not quantised to int8"):
        kv.Layout.named("int8")
    with pytest.raises(InputError, match="an entry of 96 elements is not an even number of groups of 32"):
        kv.Layout.named("int4-g32-asym").groups(96)


def test_no_rows_launch_nothing() -> None:
    none = torch.zeros(0, 64, dtype=torch.bfloat16)
    with counting() as counts:
        first = gemm_int4(none, torch.zeros(8, 16, dtype=torch.int32), torch.zeros(2, 16, dtype=torch.float16))
        second = gemm_mxfp4(none, torch.zeros(8, 32, dtype=torch.uint8), torch.zeros(8, 2, dtype=torch.uint8))
        third = int8.gemm_int8(none, torch.zeros(24, 64, dtype=torch.int8), None, torch.ones(24))
        kv.quantize_kv(
            none[:, None], none[:, None], torch.zeros(0, dtype=torch.int32), *[kv.allocate(1, 2, 64, "fp8")] * 2, "fp8"
        )
    assert (first.shape, second.shape, third.shape) == ((0, 16), (0, 8), (0, 24))
    assert counts.launches == 0
