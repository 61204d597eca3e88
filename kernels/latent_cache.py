"""A paged cache of latents: its two layouts, one step of absorbed attention over it, and cases that are alike for its kernels.

An entry is a latent of R elements, key and value at once, and a rotary key of P beside it. The 8-bit layout is FlashMLA's: R
fp8 elements, one fp32 scale per 128 of them, and the rotary key in 16 bits, 656 bytes for DeepSeek-V3; entries are widened
to the queries' type before they are multiplied.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl

from roofline.components.latent import EVERYTHING, LatentAttention, Reach, latent_layout
from roofline.errors import InputError
from roofline.kernels.arguments import FLOATING, HALF, check, check_pages, within
from roofline.kernels.flash_decoding import paged
from roofline.kernels.parts import Blocks, merge
from roofline.kernels.spec import Case, Tensors
from roofline.kernels.types import TYPES, Source

GROUP = 128
"""Latent elements that share a scale."""


@triton.jit
def entries_at(
    latent, scales, rotary, slot, inside, dtype: tl.constexpr, R: tl.constexpr, P: tl.constexpr, ENTRY: tl.constexpr,
    ROTARY_ENTRY: tl.constexpr, BN: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """The latents ``[BN, R]`` of the slots, widened to the queries' type where they have scales, and rotary keys ``[P, BN]``."""
    wide = tl.arange(0, R)
    if scales is None:
        entries = tl.load(latent + slot[:, None] * ENTRY + wide[None, :], mask=inside[:, None], other=0.0)
    else:
        group = tl.arange(0, R // GROUP)
        member = tl.arange(0, GROUP)
        narrow = tl.load(
            latent + slot[:, None, None] * ENTRY + group[None, :, None] * GROUP + member[None, None, :],
            mask=inside[:, None, None], other=0.0,
        )  # fmt: skip
        factor = tl.load(
            scales + slot[:, None] * (ENTRY // 4) + R // 4 + group[None, :], mask=inside[:, None], other=0.0
        )  # fmt: skip
        entries = tl.reshape(narrow.to(tl.float32) * factor[:, :, None], (BN, R)).to(dtype)
    keys = tl.load(
        rotary + slot[None, :] * ROTARY_ENTRY + tl.arange(0, P)[:, None], mask=inside[None, :], other=0.0
    )  # fmt: skip
    return entries, keys


@triton.jit
def queries_at(q, at, real, R: tl.constexpr, P: tl.constexpr):
    """Latent and rotary parts of the query rows ``at``."""
    row = q + at[:, None].to(tl.int64) * (R + P)
    latent = tl.load(row + tl.arange(0, R)[None, :], mask=real[:, None], other=0.0)
    return latent, tl.load(row + R + tl.arange(0, P)[None, :], mask=real[:, None], other=0.0)


@triton.jit
def attend(
    q_latent, q_rotary, latent, scales, rotary, slot, inside, seen, scale, peak, total, sums, R: tl.constexpr,
    P: tl.constexpr, ENTRY: tl.constexpr, ROTARY_ENTRY: tl.constexpr, BN: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """Adds the entries of the slots to a running softmax, those that are ``seen``."""
    entries, keys = entries_at(latent, scales, rotary, slot, inside, q_latent.dtype, R, P, ENTRY, ROTARY_ENTRY, BN, GROUP)
    score = tl.dot(q_rotary, keys, input_precision="ieee")
    score = tl.dot(q_latent, tl.trans(entries), score, input_precision="ieee") * (scale * 1.4426950408889634)
    weight, peak, total, fade = merge(tl.where(seen, score, float("-inf")), peak, total)
    return peak, total, tl.dot(weight.to(entries.dtype), entries, sums * fade[:, None], input_precision="ieee")


def views(cache: torch.Tensor, rank: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor]:
    """Latents, their scales and the rotary keys of a cache: windows on its memory, None for scales where it is not packed."""
    if cache.dtype != torch.uint8:
        return cache, None, cache[..., rank:]
    begin = (rank + 4 * (rank // GROUP)) // dtype.itemsize
    return cache.view(torch.float8_e4m3fn), cache.view(torch.float32), cache.view(dtype)[..., begin:]


def check_latent(
    q: torch.Tensor, cache: torch.Tensor, table: torch.Tensor, lengths: torch.Tensor, longest: int | None, rank: int
) -> None:
    """Refuses arguments that do not fit each other, of ``mla_decode`` and of what reads the same cache."""
    check("q", q, (None, None, None, None), FLOATING)
    within("rank", rank, 1, q.shape[3] - 1)
    P = q.shape[3] - rank
    if rank & (rank - 1) or P & (P - 1) or min(rank, P) < 16:
        raise InputError(f"rank: {rank} beside a rotary width of {P}; both are powers of two from 16 on")
    packed = cache.dtype == torch.uint8
    if packed and (rank % GROUP or q.dtype not in HALF):
        raise InputError(f"cache: packed with rank {rank} for {q.dtype}; it takes multiples of {GROUP} and queries of 16 bits")
    width = rank + 4 * (rank // GROUP) + 2 * P if packed else rank + P
    check("cache", cache, (None, None, width), (torch.uint8,) if packed else (q.dtype,), q)
    check_pages(table, lengths, longest, cache.shape[1], len(cache), q)


def pack(latents: torch.Tensor, rank: int) -> torch.Tensor:
    """Entries ``[..., rank + P]`` in the 8-bit layout: uint8, each group of 128 scaled to the range of fp8."""
    if latents.is_meta:
        width = rank + 4 * (rank // GROUP) + 2 * (latents.shape[-1] - rank)
        return torch.empty(*latents.shape[:-1], width, dtype=torch.uint8, device="meta")
    groups = latents[..., :rank].float().unflatten(-1, (-1, GROUP))
    scales = (groups.abs().amax(-1, keepdim=True) / 448.0).clamp(min=1e-12)
    narrow = (groups / scales).to(torch.float8_e4m3fn).flatten(-2).contiguous().view(torch.uint8)
    rotary = latents[..., rank:].contiguous().view(torch.uint8)
    return torch.cat([narrow, scales.squeeze(-1).contiguous().view(torch.uint8), rotary], -1)


def unpack(cache: torch.Tensor, rank: int, dtype: torch.dtype) -> torch.Tensor:
    """The inverse of ``pack``, latents rounded to ``dtype`` as the kernel rounds them; float64."""
    end = rank + 4 * (rank // GROUP)
    groups = cache[..., :rank].contiguous().view(torch.float8_e4m3fn).float().unflatten(-1, (-1, GROUP))
    latents = (groups * cache[..., rank:end].contiguous().view(torch.float32).unsqueeze(-1)).flatten(-2).to(dtype)
    return torch.cat([latents.double(), cache[..., end:].contiguous().view(dtype).double()], -1)


@dataclass(frozen=True)
class Latent(Case):
    """``cached`` entries of each sequence behind T new ones, N heads, rank R and rotary width P."""

    cached: tuple[int, ...]
    N: int
    R: int
    P: int
    T: int = 1
    page: int = 64
    packed: bool = False
    parts: Blocks | None = None

    @property
    def scale(self) -> float:
        """Scale of the scores, as for a head of width R / 4 + P before absorption (DeepSeek-V3: 128 + 64)."""
        return math.sqrt(1 / (self.R // 4 + self.P))

    @property
    def lengths(self) -> list[int]:
        """Cached and new tokens of each sequence."""
        return [S + self.T for S in self.cached]

    def core(self, *reaches: Reach) -> LatentAttention:
        """The model's component, over what is cached or what it reaches of that."""
        activation = TYPES[self.dtype].format
        layout = latent_layout(self.R, self.P, TYPES["fp8"].format if self.packed else activation)
        return LatentAttention(self.N, self.R + self.P, self.R, layout, reaches or (EVERYTHING,), activation=activation)


def latent_inputs(case: Latent, source: Source) -> Tensors:
    """Absorbed queries, a latent cache in random pages, its table and lengths."""
    cache, table = paged(case, source, (case.R + case.P,), case.lengths, case.dtype)
    if case.packed:
        cache = pack(cache, case.R)
    q = source.normal(len(case.cached), case.T, case.N, case.R + case.P, dtype=case.dtype, scale=0.5)
    return {"q": q, "cache": cache, "table": table, "lengths": source.integers(case.lengths)}


def stored(case: Latent, cache: torch.Tensor) -> torch.Tensor:
    """Entries ``[pages, PAGE, R + P]`` as the kernels widen them."""
    return unpack(cache, case.R, TYPES[case.dtype].torch) if case.packed else cache


DEEPSEEK: dict[str, Any] = {"N": 128, "R": 512, "P": 64}
