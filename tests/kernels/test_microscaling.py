"""Four-bit blocks: every code and every scale, packing to the nearest, and the bits that the format claims."""

from __future__ import annotations

import pytest

pytest.importorskip("triton")

import torch

from roofline.kernels import microscaling as mx
from roofline.validate.counted import counting

import triton  # isort: skip
import triton.language as tl  # isort: skip


@triton.jit
def widen_kernel(packed, scales, out, ROWS: tl.constexpr, COLUMNS: tl.constexpr, GROUP: tl.constexpr):
    row = tl.arange(0, ROWS)[:, None]
    codes = tl.load(packed + row * (COLUMNS // 2) + tl.arange(0, COLUMNS // 2)[None, :])
    factors = tl.load(scales + row * (COLUMNS // GROUP) + tl.arange(0, COLUMNS // GROUP)[None, :])
    values = mx.widen_blocks(codes, mx.widen_e8m0(factors), ROWS, COLUMNS, GROUP)
    tl.store(out + row * COLUMNS + tl.arange(0, COLUMNS)[None, :], values.to(out.dtype.element_ty))


def widened(packed: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    rows, columns = packed.shape[0], 2 * packed.shape[1]
    out = torch.empty(rows, columns, dtype=dtype)
    with counting():
        widen_kernel[(1,)](packed, scales, out, rows, columns, columns // scales.shape[1])
    return out


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_code_under_every_scale_is_exact(dtype: torch.dtype) -> None:
    """The 256 bytes of a row are the 256 pairs of codes, the rows the scales; 0 and 255 stand for 2^-127 and NaN."""
    pairs = torch.arange(256, dtype=torch.uint8).expand(256, -1).contiguous()
    scales = torch.arange(256, dtype=torch.uint8)[:, None].expand(-1, 16).contiguous()
    out = widened(pairs, scales, dtype).double()
    right = mx.unpack(pairs, scales)
    in_range = right.abs() <= torch.finfo(dtype).max
    assert torch.equal(torch.isnan(out), torch.isnan(right))
    assert torch.equal(out[in_range], right[in_range])
    assert int(in_range.sum()) >= 253 * 512


def test_the_values_are_those_of_the_standard() -> None:
    """OCP Microscaling Formats v1.0, table 5: 0, 0.5, 1, 1.5, 2, 3, 4, 6 and their negatives; first the lower half byte."""
    codes = torch.tensor([[0x10, 0x32, 0x54, 0x76, 0x98, 0xBA, 0xDC, 0xFE]], dtype=torch.uint8)
    right = [0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6]
    assert widened(codes, torch.tensor([[127]], dtype=torch.uint8), torch.float32).tolist() == [right]


def test_packing_takes_the_nearest_and_ties_the_even_code() -> None:
    ties = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 7.0])
    assert mx.nearest(ties).tolist() == [0, 2, 2, 4, 4, 6, 6, 7]
    assert mx.nearest(-ties).tolist() == [8, 10, 10, 12, 12, 14, 14, 15]
    around = torch.tensor([0.26, 0.74, 1.24, 1.76, 2.51, 3.49, 4.99, 5.01])
    assert mx.nearest(around).tolist() == [1, 1, 2, 4, 5, 5, 6, 7]


def test_packing_keeps_within_the_formats_bound_and_the_formats_bits() -> None:
    """At most half the widest step, 1 times the scale, up to 6 times the scale; up to 2 where a magnitude is clamped to 6."""
    values = torch.randn(37, 96, generator=torch.Generator().manual_seed(7), dtype=torch.float64)
    packed, scales = mx.pack(values)
    error = (mx.unpack(packed, scales) - values).abs().unflatten(-1, (-1, 32))
    factors = mx.powers(scales)[..., None].expand_as(error)
    assert bool((error <= 2 * factors).all())
    inside = values.unflatten(-1, (-1, 32)).abs() <= 6 * factors
    assert bool((error[inside] <= factors[inside]).all())
    assert packed.numel() + scales.numel() == mx.MXFP4.bytes(values.numel())


def test_what_is_representable_survives_packing() -> None:
    codes = torch.randint(0, 256, (5, 32), generator=torch.Generator().manual_seed(3), dtype=torch.uint8)
    codes[:, ::16] |= 0x07  # a 6 in every block of 32
    scales = torch.randint(100, 150, (5, 2), generator=torch.Generator().manual_seed(4), dtype=torch.uint8)
    packed, found = mx.pack(mx.unpack(codes, scales))
    assert torch.equal(mx.unpack(packed, found), mx.unpack(codes, scales))
    assert torch.equal(found, scales)


def test_blocks_of_zeros_and_parts_of_blocks() -> None:
    packed, scales = mx.pack(torch.zeros(2, 64))
    assert not mx.unpack(packed, scales).any()
    with pytest.raises(ValueError, match="48 elements are not whole blocks of 32"):
        mx.pack(torch.zeros(1, 48))
