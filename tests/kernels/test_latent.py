"""Two orders of latent attention give one result, and the 8-bit layout is the published one."""

from __future__ import annotations

import pytest

pytest.importorskip("triton")

import torch

from roofline.components.latent import latent_layout, layout_bytes
from roofline.formats import FP8
from roofline.kernels import mla_decode as latent
from roofline.kernels import sparse_mla_decode as sparse
from roofline.kernels.buffers import poisoned
from roofline.kernels.latent_cache import pack, unpack
from roofline.kernels.mla_decode import mla_decode
from roofline.kernels.mla_prefill import expand, mla_prefill
from roofline.kernels.parts import Blocks
from roofline.validate.counted import counting


def test_absorbed_and_expanded_attention_agree() -> None:
    """(q_nope W_k) c = q_nope (W_k c): five queries, the last of a sequence of thirteen, over the same latents."""
    N, H, P, R, keys, T, page = 2, 32, 16, 64, 13, 13, 4
    generator = torch.Generator().manual_seed(3)
    entries = torch.randn(keys, R + P, generator=generator) / 2
    weight = torch.randn(N * 2 * H, R, generator=generator) * R**-0.5
    q = torch.randn(T, N, H + P, generator=generator)
    per_head = weight.view(N, 2 * H, R)
    starts = torch.tensor([0, T], dtype=torch.int32)
    with counting():
        k, v = expand(entries, weight, N, R)
        wide = mla_prefill(q, k, v, starts, T)
        absorbed = torch.cat([torch.einsum("tnh,nhr->tnr", q[..., :H], per_head[:, :H]), q[..., H:]], 2)
        pages = -(-keys // page)
        cache = torch.zeros(pages, page, R + P)
        cache.view(-1, R + P)[:keys] = entries
        table = torch.arange(pages, dtype=torch.int32)[None]
        lengths = torch.tensor([keys], dtype=torch.int32)
        latent = mla_decode(absorbed[None], cache, table, lengths, keys, R, (H + P) ** -0.5, Blocks(16, 1, rows=16))[0]
    assert torch.allclose(torch.einsum("tnr,nhr->tnh", latent, per_head[:, H:]), wide, rtol=1e-4, atol=1e-5)


def test_packed_entry_of_deepseek_is_656_bytes() -> None:
    assert pack(torch.zeros(1, 576, dtype=torch.bfloat16), 512).shape == (1, 656)
    assert layout_bytes(latent_layout(512, 64, FP8)) == 656


def test_packing_keeps_the_rotary_key_and_rounds_latents_to_fp8() -> None:
    entries = torch.randn(7, 256 + 32, generator=torch.Generator().manual_seed(0)).to(torch.bfloat16)
    back = unpack(pack(entries, 256), 256, torch.bfloat16)
    assert torch.equal(back[:, 256:], entries[:, 256:].double())
    error = (back[:, :256] - entries[:, :256].double()).abs() / entries[:, :256].double().abs().clamp(min=0.05)
    assert 0 < error.max() < 2**-3


IDLE, T = (0, 2, 23), 3
"""Lengths of a row that a graph left empty, of one shorter than the queries of a row, and of a usual one."""


def unseen(lengths: tuple[int, ...]) -> torch.Tensor:
    """Which queries stand before their sequence begins: bool ``[B, T]``."""
    return torch.tensor([[length - T + token < 0 for token in range(T)] for length in lengths])


@pytest.mark.parametrize("splits", [1, 2, 5])
@pytest.mark.parametrize("packed", [False, True])
def test_latent_attention_of_an_idle_row_is_zero_and_leaves_its_neighbours_alone(splits: int, packed: bool) -> None:
    whole = latent.Dense("idle", "bf16", (20, 20, 20), 5, 128, 16, T=T, page=4, packed=packed, parts=Blocks(16, splits, rows=16))
    tensors = latent.inputs(whole, "cpu")
    part = {**tensors, "lengths": torch.tensor(IDLE, dtype=torch.int32)}
    with counting(), poisoned():
        right, given = latent.launch(whole, tensors)["out"], latent.launch(whole, part)["out"]
        single = mla_decode(**part, rank=128, scale=whole.scale, parts=Blocks(16, 1, rows=16))
    assert not given[unseen(IDLE)].any()
    assert torch.equal(given[2], right[2])
    assert torch.allclose(given[1, 1:], single[1, 1:], atol=2e-2)
    assert given[1, 1:].abs().sum() > 0


@pytest.mark.parametrize("splits", [1, 2, 5])
def test_sparse_latent_attention_of_an_idle_row_is_zero_and_leaves_its_neighbours_alone(splits: int) -> None:
    whole = sparse.Selected("idle", "bf16", (20, 20, 20), 5, 128, 16, T=T, page=4, k=23, parts=Blocks(16, splits, rows=16))
    tensors = sparse.inputs(whole, "cpu")
    tensors["selected"][1, 1:, :2] = torch.tensor([0, 1], dtype=torch.int32)
    with counting(), poisoned():
        right = sparse.launch(whole, tensors)["out"]
        given = sparse.launch(whole, {**tensors, "lengths": torch.tensor(IDLE, dtype=torch.int32)})["out"]
    assert not given[unseen(IDLE)].any()
    assert torch.equal(given[2], right[2])
    assert torch.isfinite(given).all()
    assert given[1, 1:].abs().sum() > 0
