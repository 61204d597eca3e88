"""Eight bits: errors within the format's bound, and what a pass that quantises costs where it stands alone or does not."""

from __future__ import annotations

import pytest

pytest.importorskip("triton")

import torch

from roofline.components.linear import Linear
from roofline.components.mixing import Norm, Quantise
from roofline.errors import InputError
from roofline.formats import BF16, FORMATS
from roofline.kernels.gemm_fp8_block import gemm_fp8_block, quantise_weight, spread_blocks
from roofline.kernels.quantize_fp8 import dequantise, quantize_fp8
from roofline.kernels.rmsnorm import rmsnorm
from roofline.kernels.tiling import Tiles
from roofline.validate.counted import Counts, counting
from roofline.work import Work

HALF_STEP = 2**-4
"""Of e4m3, relative to a normal number: three bits of mantissa."""
SMALLEST_HALF_STEP = 2**-10
"""Of its subnormal numbers, in units of the scale."""
TILES = Tiles(32, 64, 128)
M, N, K = 20, 128, 384


def rows(count: int, width: int, dtype: torch.dtype = torch.bfloat16, seed: int = 3) -> torch.Tensor:
    x = torch.randn(count, width, generator=torch.Generator().manual_seed(seed))
    return (x * torch.exp2(torch.arange(count) % 9 - 4.0)[:, None]).to(dtype)


def bound(x: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """The most that e4m3 under a scale may be off: half a step; a hundredth more for scales and inverses in fp32."""
    return 1.01 * torch.maximum(HALF_STEP * x.double().abs(), SMALLEST_HALF_STEP * scales)


@pytest.mark.parametrize("scales", ["block", "token", "tensor"])
def test_every_element_is_within_half_a_step_of_its_code(scales: str) -> None:
    x = rows(11, 300)
    with counting():
        codes, factors = quantize_fp8(x, scales)
    spread = dequantise(torch.ones_like(x), factors)
    assert bool(((dequantise(codes, factors) - x.double()).abs() <= bound(x, spread)).all())
    assert float(codes.float().abs().max()) == 448


def test_finer_scales_are_closer() -> None:
    x = rows(18, 512)
    with counting():
        errors = [(dequantise(*quantize_fp8(x, scales)) - x.double()).square().sum() for scales in ("block", "token", "tensor")]
    assert errors == sorted(errors)
    assert float(errors[0]) < float(errors[2])


def test_a_known_scale_clamps_what_lies_beyond_its_reach() -> None:
    x = torch.tensor([[3.0, -5.0, 0.5, 0.0]])
    with counting():
        codes, scale = quantize_fp8(x, "static", scale=torch.tensor([2 / 448]))
    assert dequantise(codes, scale)[0].tolist() == pytest.approx([2, -2, 0.5, 0], rel=HALF_STEP)


def test_zeros_stay_zeros() -> None:
    with counting():
        codes, scales = quantize_fp8(torch.zeros(2, 200), "block")
    assert not codes.float().any()
    assert bool((scales > 0).all())


def test_the_quantised_product_is_within_the_bound_of_its_operands_steps() -> None:
    """|xy - x'y'| <= |x| ey + |y| ex + ex ey, summed over K, for every element of the result."""
    x, weight = rows(M, K), torch.randn(N, K, generator=torch.Generator().manual_seed(4)) * K**-0.5
    with counting():
        codes, factors = quantize_fp8(x)
        w, w_scales = quantise_weight(weight)
        out = gemm_fp8_block(codes, factors, w, w_scales, torch.float32, TILES).double()
    exact = x.double() @ weight.double().T
    e_x = bound(x, dequantise(torch.ones_like(x), factors))
    e_w = bound(weight, spread_blocks(w_scales, N, K).double())
    most = e_x @ weight.double().abs().T + x.double().abs() @ e_w.T + e_x @ e_w.T
    assert bool(((out - exact).abs() <= most + 1e-6 * exact.abs()).all())
    dequantised = dequantise(codes, factors) @ (w.double() * spread_blocks(w_scales, N, K).double()).T
    assert torch.allclose(out, dequantised, rtol=1e-5, atol=1e-5 * float(dequantised.abs().max()))


def test_sums_are_promoted_block_by_block() -> None:
    """A block under a scale of 2^20 and one under 2^-20 that cancels a part: each step's product is scaled by itself."""
    x = torch.ones(16, 256).to(torch.float8_e4m3fn)
    factors = torch.tensor([[2.0**20, 2.0**-20]]).expand(16, -1).contiguous()
    w = torch.cat([torch.ones(128, 128), -torch.ones(128, 128)], 1).to(torch.float8_e4m3fn)
    w_scales = torch.tensor([[2.0**-20, 2.0**20]])
    with counting():
        out = gemm_fp8_block(x, factors, w, w_scales, torch.float32, TILES)
    assert not out.any()


def moved(counts: Counts) -> int:
    """Distinct bytes, both directions."""
    return sum(counts.unique("read").values()) + sum(counts.unique("write").values())


def test_a_pass_that_quantises_costs_what_fusing_it_saves() -> None:
    """Norm and matmul with the pass apart, in the norm and in the matmul: same result, and bytes as the model says."""
    x, gains = rows(M, K), rows(1, K, seed=8)[0]
    w, w_scales = quantise_weight(torch.randn(N, K, generator=torch.Generator().manual_seed(4)))
    with counting() as apart:
        normed, _ = rmsnorm(x, gains)
        separate = gemm_fp8_block(*quantize_fp8(normed), w, w_scales, tiles=TILES)
    with counting() as in_norm:
        early = gemm_fp8_block(*quantize_fp8(x, gains=gains), w, w_scales, tiles=TILES)
    with counting() as in_matmul:
        normed, _ = rmsnorm(x, gains)
        late = gemm_fp8_block(normed, None, w, w_scales, tiles=TILES)
    assert torch.equal(separate, late)
    assert torch.allclose(separate.float(), early.float(), rtol=0.1, atol=0.05 * float(separate.float().abs().max()))

    work, weight, narrow = Work(1, M), FORMATS["fp8-block"], FORMATS["fp8-token"]
    written = BF16.bytes(M * N)
    norm, matmul = Norm(K, K).cost(work).bytes, Linear(K, N, weight=weight, activation=narrow).cost(work).bytes_read + written
    wide_matmul = Linear(K, N, weight=weight).cost(work).bytes
    assert moved(apart) == norm + Quantise(K).cost(work).bytes + matmul
    assert moved(in_norm) == Norm(K, K, output=narrow).cost(work).bytes + matmul
    assert moved(in_matmul) == norm + wide_matmul
    assert moved(apart) - moved(in_norm) == BF16.bytes(2 * M * K)
    assert apart.launches == in_norm.launches + 1 == in_matmul.launches + 1
    assert apart.launches == Norm(K, K).cost(work).launches + Quantise(K).cost(work).launches + 1


def test_quantising_by_an_unknown_scale_is_refused() -> None:
    with pytest.raises(InputError, match="scales: unknown 'row'"):
        Quantise(K, "row")
    with pytest.raises(InputError, match="scale: 'static' takes a scale"):
        quantize_fp8(torch.zeros(1, 4), "static")
    codes = torch.zeros(256, 128).to(torch.float8_e4m3fn)
    with pytest.raises(InputError, match="tiles: BN=96"):
        gemm_fp8_block(codes, torch.zeros(256, 1), codes, torch.zeros(2, 1), tiles=Tiles(16, 96, 128))
    with pytest.raises(InputError, match="256 columns must divide one"):
        gemm_fp8_block(codes, torch.zeros(256, 1), codes, torch.zeros(2, 1), tiles=Tiles(16, 256, 128))
