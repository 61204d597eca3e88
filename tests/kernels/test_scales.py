"""Layouts with a scale per group use the whole range of e4m3, whose largest number torch knows."""

from __future__ import annotations

import pytest

pytest.importorskip("triton")

import torch

from roofline.kernels import index_keys, latent_cache

FP8 = torch.float8_e4m3fn


def values() -> torch.Tensor:
    return torch.randn(7, 256, generator=torch.Generator().manual_seed(4)) * 3


def test_packed_latents_use_the_whole_range_and_keep_their_largest() -> None:
    latents, rotary = values(), torch.zeros(7, 64, dtype=torch.bfloat16)
    entries = torch.cat([latents.to(torch.bfloat16), rotary], 1)
    packed = latent_cache.pack(entries, 256)
    codes = packed[:, :256].contiguous().view(FP8).float().unflatten(1, (2, 128))
    assert torch.equal(codes.abs().amax(2), torch.full((7, 2), torch.finfo(FP8).max))
    back = latent_cache.unpack(packed, 256, torch.float32)[:, :256].unflatten(1, (2, 128))
    right = entries[:, :256].double().unflatten(1, (2, 128))
    assert (back.abs().amax(2) / right.abs().amax(2) - 1).abs().max() < 1e-6
    assert ((back.double() - right).abs() <= right.abs() / 16 + right.abs().amax(2, keepdim=True) * 2.0**-18).all()


def test_quantised_index_keys_use_the_whole_range() -> None:
    codes, scales = index_keys.quantise(values()[:, :128], "fp8")
    assert torch.equal(codes.float().abs().amax(1), torch.full((7,), torch.finfo(FP8).max))
    assert scales.flatten().tolist() == pytest.approx((values()[:, :128].abs().amax(1) / 448).tolist(), rel=1e-6)
