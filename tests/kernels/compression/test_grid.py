"""Packing of codes and the affine grid: what is stored, in how many bits, and how far from the weight."""

from __future__ import annotations

import pytest

pytest.importorskip("triton")

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from roofline.components.base import weight_bytes
from roofline.components.linear import Linear
from roofline.formats import format_named
from roofline.kernels.compression.affine import Grid, Quantized, round_to_nearest
from roofline.kernels.packing import pack_awq, pack_gptq, pack_gptq_zeros, pack_rows, unpack_awq, unpack_gptq_zeros, unpack_rows


@settings(max_examples=25, deadline=None)
@given(st.integers(2, 8), st.integers(1, 3), st.integers(1, 5), st.integers(0, 2**31))
def test_a_stream_of_bits_is_read_back_and_holds_nothing_else(bits: int, blocks: int, columns: int, seed: int) -> None:
    codes = torch.randint(0, 1 << bits, (32 * blocks, columns), generator=torch.Generator().manual_seed(seed))
    words = pack_rows(codes, bits)
    assert torch.equal(unpack_rows(words, bits), codes)
    assert 32 * words.numel() == bits * codes.numel()


def test_packed_words_are_those_of_autogptq_and_autoawq() -> None:
    """Nibble i of a GPTQ word is row i; of an AWQ word, column 0 2 4 6 1 3 5 7 (AutoAWQ, packing_utils)."""
    codes = torch.arange(8)
    assert int(pack_gptq(codes[:, None])[0, 0]) & 0xFFFFFFFF == 0x76543210
    assert int(pack_awq(codes[None])[0, 0]) & 0xFFFFFFFF == 0x75316420
    many = torch.randint(0, 16, (5, 24), generator=torch.Generator().manual_seed(0))
    assert torch.equal(unpack_awq(pack_awq(many)), many)
    assert torch.equal(unpack_gptq_zeros(pack_gptq_zeros(many)), many)


@pytest.mark.parametrize("name", ["int2-g16", "int3-g32-asym", "int4-g64", "int4-g32-asym", "int8-g128"])
def test_no_weight_is_further_than_half_a_scale_from_its_code(name: str) -> None:
    """But for the rounding of the scale to fp16, which can move the last code by 2^-11 of the range."""
    weight = torch.randn(24, 256, generator=torch.Generator().manual_seed(1))
    made = round_to_nearest(weight, name)
    steps = made.scales.float().repeat_interleave(made.grid.group, 1)
    slack = made.grid.largest * 2**-11
    assert ((weight - made.dequantized()).abs() <= (0.5 + slack) * steps + 1e-7).all()
    assert int(made.codes.max()) <= made.grid.largest


@pytest.mark.parametrize("name", ["int4-g128", "int4-g128-asym", "int3-g64-asym", "int3-g128", "int2-g32-asym", "int8-g32"])
def test_stored_bits_per_weight_are_the_fraction_of_the_format(name: str) -> None:
    weight = torch.randn(64, 384, generator=torch.Generator().manual_seed(2))
    made = round_to_nearest(weight, name)
    fmt = format_named(name)
    assert made.format == fmt
    assert 8 * made.stored_bytes == fmt.bits * weight.numel()
    assert made.stored_bytes == weight_bytes(Linear(384, 64, weight=fmt).params())
    stored = made.stored()
    codes = unpack_rows(stored["codes"], made.grid.bits).T
    zeros = unpack_rows(stored["zeros"], made.grid.bits).view(-1, 64).T if "zeros" in stored else None
    again = Quantized(made.grid, codes, stored["scales"], zeros)
    assert torch.equal(again.dequantized(), made.dequantized())


@pytest.mark.parametrize("name", ["fp8", "int4", "int9-g32", "q4_k"])
def test_a_format_without_a_grid_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match="not a format of integers by group"):
        Grid.named(name)


def test_inputs_that_are_no_whole_groups_are_refused() -> None:
    with pytest.raises(ValueError, match="100 inputs are not whole groups of 32"):
        round_to_nearest(torch.zeros(8, 100), "int4-g32")
