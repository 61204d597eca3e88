"""GPTQ and AWQ of one layer: what they gain on inputs not seen, and that what is stored multiplies in the kernel."""

from __future__ import annotations

from collections.abc import Callable

import pytest

pytest.importorskip("triton")

import torch

from roofline.kernels.compression.affine import Grid, output_error, round_to_nearest
from roofline.kernels.compression.awq import awq, scaled
from roofline.kernels.compression.checkpoint import packed
from roofline.kernels.compression.gptq import Hessian, gptq
from roofline.kernels.compression.quantize import METHODS
from roofline.kernels.gemm_int4 import gemm_int4
from roofline.kernels.packing import pack_gptq, pack_gptq_zeros, unpack_gptq_zeros, unpack_rows

Layer = Callable[..., tuple[torch.Tensor, torch.Tensor, torch.Tensor]]
HessianOf = Callable[[torch.Tensor], Hessian]
SEEDS = (0, 1, 2)
FORMATS = ["int4-g32-asym", "int3-g32-asym", "int4-g64", "int3-g64"]
MARGIN_GPTQ, MARGIN_ORDER, MARGIN_AWQ = 0.65, 0.45, 0.9
"""Largest output error over that of rounding to nearest."""
MARGIN_FULL, MARGIN_ROOT = 0.75, 1.01
"""Largest output error of AWQ over that of the fixed exponents 1 and 1/2; where 1/2 is near the best, they may be equal."""


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("seed", SEEDS)
def test_gptq_beats_rounding_to_nearest_on_inputs_it_has_not_seen(
    seed: int, name: str, layer: Layer, hessian_of: HessianOf
) -> None:
    weight, x, held = layer(seed)
    nearest = output_error(weight, round_to_nearest(weight, name).dequantized(), held)
    made = gptq(weight, hessian_of(x), name)
    ordered = gptq(weight, hessian_of(x), name, act_order=True)
    assert output_error(weight, made.dequantized(), held) < MARGIN_GPTQ * nearest
    assert output_error(weight, ordered.dequantized(), held) < MARGIN_ORDER * nearest
    assert made.stored_bytes == ordered.stored_bytes == made.format.bytes(weight.numel())


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("seed", SEEDS)
def test_awq_beats_plain_scaling_on_inputs_it_has_not_seen(seed: int, name: str, layer: Layer) -> None:
    """Plain: no scale by activations at all, or one of a fixed exponent."""
    weight, x, held = layer(seed)
    made = awq([weight], x, name)

    def error(alpha: float) -> float:
        return output_error(weight, scaled([weight], x, name, alpha).dequantized()[0], held)

    mine = output_error(weight, made.dequantized()[0], held)
    assert mine < MARGIN_AWQ * error(0)
    assert mine < MARGIN_FULL * error(1)
    assert mine < MARGIN_ROOT * error(0.5)
    assert 0 < made.alpha < 1


def test_a_hessian_is_that_of_all_tokens_in_whatever_parts_they_come(layer: Layer, hessian_of: HessianOf) -> None:
    x = layer(0)[1]
    parts = Hessian(128)
    for rows in (x[:100].view(2, 50, 128), x[100:101], x[101:]):
        parts.add(rows)
    right = 2 * x.double().T @ x.double() / len(x)
    assert torch.allclose(parts.matrix, right, rtol=1e-12)
    assert torch.allclose(hessian_of(x).matrix, right, rtol=1e-12)


def test_gptq_of_uncorrelated_inputs_is_rounding_to_nearest(layer: Layer) -> None:
    """A Hessian without off-diagonal elements leaves nothing to make up for."""
    weight = layer(0)[0]
    hessian = Hessian(128)
    hessian.matrix = torch.eye(128, dtype=torch.float64)
    made, nearest = gptq(weight, hessian, "int4-g32-asym"), round_to_nearest(weight, "int4-g32-asym")
    assert torch.equal(made.codes, nearest.codes)


def test_blocks_of_gptq_only_gather_updates(layer: Layer, hessian_of: HessianOf) -> None:
    weight, x, _ = layer(0)
    one, many = (gptq(weight, hessian_of(x), "int4-g32-asym", block=block) for block in (32, 128))
    assert float((one.dequantized() - many.dequantized()).abs().max()) < 1e-6


def test_gptq_hands_errors_on_as_the_optimal_update_says(hessian_of: HessianOf) -> None:
    """Rounding one input and solving for the rest exactly: the second input moves by -e H_12 / H_22."""
    x = torch.tensor([[1.0, 0.8], [0.2, 1.0], [1.0, 0.9], [0.5, 0.1]])
    weight = torch.tensor([[0.33, 0.71]])
    made = gptq(weight, hessian_of(x), "int2-g1", damping=0.0)
    first = made.dequantized(torch.float64)[0, 0]
    second = x.double().T @ x.double()
    optimal = 0.71 + (0.33 - first) * second[0, 1] / second[1, 1]
    scale, _ = Grid.named("int2-g1").fit(optimal[None, None])
    assert made.scales[0, 1].double() == scale[0, 0]


def test_an_input_never_seen_is_stored_as_zero(layer: Layer, hessian_of: HessianOf) -> None:
    weight, x, _ = layer(1)
    dead = x.clone()
    dead[:, 5] = 0
    made = gptq(weight, hessian_of(dead), "int4-g32", act_order=True)
    assert (made.dequantized()[:, 5] == 0).all()


@pytest.mark.usefixtures("interpreted")
@pytest.mark.parametrize("method", METHODS)
def test_what_is_stored_multiplies_in_the_kernel(method: str, layer: Layer, hessian_of: HessianOf) -> None:
    """A checkpoint's tensors go into ``gemm_int4`` as they lie, and give the product with the dequantised weight."""
    weight, x, held = layer(2, outputs=40)
    if method == "awq":
        made = awq([weight], x, "int4-g32-asym").parts[0]
    elif method == "rtn":
        made = round_to_nearest(weight, "int4-g32-asym")
    else:
        made = gptq(weight, hessian_of(x), "int4-g32-asym", act_order=method == "gptq-order")
    rows = held[:9].half()
    if method == "gptq-order":
        assert made.order is not None
        words, zeros, order = pack_gptq(made.codes.T), pack_gptq_zeros(made.zeros.T), made.order.to(torch.int32)
        out = gemm_int4(rows, words, made.scales.T.contiguous(), zeros, order)
    else:
        stored = packed(made, "awq" if method == "awq" else "gptq")
        out = gemm_int4(rows, stored["qweight"], stored["scales"].contiguous(), stored["qzeros"])
    right = rows.double() @ made.dequantized(torch.float64).T
    assert float((out.double() - right).square().mean().sqrt() / right.square().mean().sqrt()) < 6e-4


@pytest.mark.parametrize("act_order", [False, True])
@pytest.mark.parametrize("name", ["int4-g32-asym", "int3-g32-asym"])
def test_a_gptq_container_is_read_input_by_input(name: str, act_order: bool, layer: Layer, hessian_of: HessianOf) -> None:
    """As AutoGPTQ dequantises: each input's codes by the scale and the zero point, plus one, of the group it names."""
    weight, x, _ = layer(1)
    made = gptq(weight, hessian_of(x), name, act_order=act_order)
    stored = packed(made, "gptq")
    bits = made.grid.bits
    codes, zeros = unpack_rows(stored["qweight"], bits), unpack_gptq_zeros(stored["qzeros"], bits)
    groups = stored["g_idx"].long() if act_order else torch.arange(128) // 32
    assert torch.bincount(groups).tolist() == [32] * 4
    assert torch.equal(((codes - zeros[groups]) * stored["scales"].float()[groups]).T, made.dequantized())
