"""Absorbed latent attention of a few new tokens over a paged latent cache: every head attends to the same entries.

An entry is a latent of R elements, key and value at once, and a rotary key of P beside it. One program holds a block of
query rows (heads of one or more new tokens) and walks over one part of the entries; parts are merged as in
``flash_decoding``. The 8-bit layout is FlashMLA's: R fp8 elements, one fp32 scale per 128 of them, and the rotary key in 16
bits, 656 bytes for DeepSeek-V3; entries are widened to the queries' type before they are multiplied.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl

from roofline.components.latent import LatentAttention, latent_layout
from roofline.errors import InputError
from roofline.kernels import buffers
from roofline.kernels.arguments import FLOATING, HALF, check, check_pages, within
from roofline.kernels.device import Device, current, of
from roofline.kernels.flash_attention import visible
from roofline.kernels.flash_decoding import Parts, block_counts, contiguous, merge, merge_parts, merged, paged, parts_for
from roofline.kernels.spec import EVERYWHERE, Build, Case, Expected, Launch, Moved, Spec, Tensors, Tolerance
from roofline.kernels.types import NAMES, TYPES, Source
from roofline.numeric import ceil_div
from roofline.work import Ragged, Work

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
def mla_decode_kernel(
    q, latent, scales, rotary, table, lengths, out, weights, columns, scale,
    T: tl.constexpr, N: tl.constexpr, R: tl.constexpr, P: tl.constexpr, ENTRY: tl.constexpr, ROTARY_ENTRY: tl.constexpr,
    ROWS: tl.constexpr, BN: tl.constexpr, PAGE: tl.constexpr, SPLITS: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """One part of the entries of one sequence for ROWS query rows; ENTRY, ROTARY_ENTRY: elements from entry to entry."""
    sequence = tl.program_id(0)
    part = tl.program_id(2)
    row = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    real = row < T * N
    token = row // N
    at = sequence * T * N + row
    wide = tl.arange(0, R)
    turned = tl.arange(0, P)
    q_at = q + at[:, None].to(tl.int64) * (R + P)
    q_latent = tl.load(q_at + wide[None, :], mask=real[:, None], other=0.0)
    q_rotary = tl.load(q_at + R + turned[None, :], mask=real[:, None], other=0.0)
    length = tl.load(lengths + sequence)
    share = tl.cdiv(tl.cdiv(length, BN), SPLITS) * BN
    first = part * share
    last = tl.minimum(first + share, length)
    peak = tl.full((ROWS,), float("-inf"), tl.float32)
    total = tl.zeros((ROWS,), tl.float32)
    sums = tl.zeros((ROWS, R), tl.float32)
    for start in range(first, last, BN):
        key = start + tl.arange(0, BN)
        inside = key < last
        page = tl.load(table + sequence * columns + key // PAGE, mask=inside, other=0).to(tl.int64)
        slot = page * PAGE + key % PAGE
        entries, keys = entries_at(
            latent, scales, rotary, slot, inside, q_latent.dtype, R, P, ENTRY, ROTARY_ENTRY, BN, GROUP
        )  # fmt: skip
        score = tl.dot(q_rotary, keys, input_precision="ieee")
        score = tl.dot(q_latent, tl.trans(entries), score, input_precision="ieee") * (scale * 1.4426950408889634)
        seen = inside[None, :] & (key[None, :] <= length - T + token[:, None])
        score = tl.where(seen, score, float("-inf"))
        weight, peak, total, fade = merge(score, peak, total)
        sums = tl.dot(weight.to(entries.dtype), entries, sums * fade[:, None], input_precision="ieee")
    result = sums / tl.where(total > 0, total, 1.0)[:, None]
    goal = out + (at[:, None] * SPLITS + part).to(tl.int64) * R + wide[None, :]
    tl.store(goal, result.to(out.dtype.element_ty), mask=real[:, None])
    if SPLITS > 1:
        weighed = tl.where(total > 0, peak + tl.log2(tl.where(total > 0, total, 1.0)), float("-inf"))
        tl.store(weights + at * SPLITS + part, weighed, mask=real)


@dataclass(frozen=True)
class Blocks(Parts):
    """As ``Parts``, with the query rows of one program."""

    rows: int = 16


def choose(sequences: int, rows: int, R: int, keys: int, dtype: str, device: Device) -> Blocks:
    """Rows, entries and parts by sequences, query rows, width, the longest sequence and the device."""
    if dtype == "fp32":
        return Blocks(16, parts_for(sequences * ceil_div(rows, 16), keys, 16, device, 1), 4, 1, rows=16)
    many = 64 if rows >= 64 and device.arch in ("sm_90", "sm_100") else 16
    BN = 64 if many == 64 and device.arch == "sm_90" else 32 if device.shared >= 100_000 else 16
    warps = 8 if many == 64 else 4
    stages = 2 if device.shared >= 100_000 else 1
    return Blocks(
        BN, parts_for(sequences * ceil_div(rows, many), keys, BN, device, 1 if many == 64 else 2), warps, stages, rows=many
    )


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


def mla_decode(
    q: torch.Tensor, cache: torch.Tensor, table: torch.Tensor, lengths: torch.Tensor, longest: int,
    rank: int, scale: float, parts: Blocks | None = None,
) -> torch.Tensor:  # fmt: skip
    """Attention of absorbed queries ``q [B, T, N, rank + P]``; returns ``[B, T, N, rank]``, in the latent space.

    Args:
        cache: ``[pages, PAGE, rank + P]`` of the queries' type, or uint8 ``[pages, PAGE, bytes]`` in the 8-bit layout.
        table: int32 ``[B, pages]``. lengths: int32 ``[B]``, cached and new tokens. longest: the largest of them.
        scale: of the scores: one over the root of a head's width before absorption.

    A query that sees no entry, as in an idle row of length 0, gets zeros. Raises InputError for arguments that do not fit.
    """
    check_latent(q, cache, table, lengths, longest, rank)
    B, T, N, width = q.shape
    P, PAGE = width - rank, cache.shape[1]
    out = buffers.empty(B, T, N, rank, dtype=q.dtype, device=q.device)
    if not out.numel():
        return out
    latent, scales, rotary = views(cache, rank, q.dtype)
    cut = parts or choose(B, T * N, rank, longest, NAMES[q.dtype], of(q))
    split = cut.splits > 1
    partial = buffers.empty(B, T, N, cut.splits, rank, dtype=torch.float32, device=q.device) if split else out
    weights = buffers.empty(B, T, N, cut.splits, dtype=torch.float32, device=q.device) if split else None
    mla_decode_kernel[(B, ceil_div(T * N, cut.rows), cut.splits)](
        q, latent, scales, rotary, table, lengths, partial, weights, table.shape[1], scale,
        T=T, N=N, R=rank, P=P, ENTRY=latent.stride(1), ROTARY_ENTRY=rotary.stride(1), ROWS=cut.rows, BN=cut.BN,
        PAGE=PAGE, SPLITS=cut.splits, GROUP=GROUP, num_warps=cut.warps, num_stages=cut.stages,
    )  # fmt: skip
    if weights is not None:
        merge_parts(partial, weights, out)
    return out


def pack(latents: torch.Tensor, rank: int) -> torch.Tensor:
    """Entries ``[..., rank + P]`` in the 8-bit layout: uint8, each group of 128 scaled to the range of fp8."""
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
    def cut(self) -> Blocks:
        """The blocks of its launch."""
        rows, longest = self.T * self.N, max(self.cached) + self.T
        return self.parts or choose(len(self.cached), rows, self.R, longest, self.dtype, current())


def inputs(case: Latent, device: str) -> Tensors:
    """Absorbed queries, a latent cache in random pages, its table and lengths."""
    source, lengths = Source(case.name, device), [S + case.T for S in case.cached]
    cache, table = paged(case, source, (case.R + case.P,), lengths, case.dtype)
    if case.packed:
        size = case.R + 4 * (case.R // GROUP) + 2 * case.P
        on_device = device != "meta"
        cache = pack(cache, case.R) if on_device else torch.empty(*cache.shape[:2], size, dtype=torch.uint8, device=device)
    q = source.normal(len(lengths), case.T, case.N, case.R + case.P, dtype=case.dtype, scale=0.5)
    return {"q": q, "cache": cache, "table": table, "lengths": source.integers(lengths), "longest": max(lengths)}


def reference(case: Latent, tensors: Tensors) -> Tensors:
    """Softmax attention of each sequence over its own entries, in float64; the values are the latents."""
    cache = tensors["cache"]
    if case.packed:
        cache = unpack(cache, case.R, TYPES[case.dtype].torch)
    outputs = []
    for index, S in enumerate(case.cached):
        entries = contiguous(cache, tensors["table"][index], S + case.T)
        scores = torch.einsum("tnr,sr->nts", tensors["q"][index].double(), entries) * case.scale
        scores = scores.masked_fill(~visible("causal", 0, case.T, S), float("-inf"))
        outputs.append(torch.einsum("nts,sr->tnr", torch.softmax(scores, 2), entries[:, : case.R]))
    return {"out": torch.stack(outputs)}


def launch(case: Latent, tensors: Tensors) -> Tensors:
    """The Triton kernels."""
    return {"out": mla_decode(**tensors, rank=case.R, scale=case.scale, parts=case.parts)}


def expected(case: Latent, tensors: Tensors) -> Expected:
    """Entries once per block of query rows; queries once per part; a table entry per entry read."""
    cut, fmt, B = case.cut, TYPES[case.dtype].format, len(case.cached)
    layout = latent_layout(case.R, case.P, TYPES["fp8"].format if case.packed else fmt)
    core = LatentAttention(case.N, case.R + case.P, case.R, layout, activation=fmt)
    cost = core.cost(Ragged(tuple(Work(1, case.T, S) for S in case.cached)))
    lengths = [S + case.T for S in case.cached]
    rows = case.T * case.N
    blocks = ceil_div(rows, cut.rows)
    programs, state = B * blocks * cut.splits, int(cost.read["state"])
    moved = {
        "q": Moved("activations", read=cost.read["activations"], requested=cost.read["activations"] * cut.splits),
        "latent": Moved("state", read=state, requested=state * blocks),
        "table": Moved("", read=4 * sum(ceil_div(n, case.page) for n in lengths), requested=4 * sum(lengths) * blocks),
        "lengths": Moved("", read=4 * B, requested=4 * programs),
    }
    first, second = merged(B * rows, case.R, cut.splits, cost.write["activations"])
    walked = blocks * sum(block_counts(0, length, cut) for length in lengths)
    executed = 2 * cut.rows * cut.BN * (2 * case.R + case.P) * walked

    def needed() -> int:
        pairs = sum(int(visible("causal", 0, case.T, S).sum()) for S in case.cached)
        return 2 * case.N * (2 * case.R + case.P) * pairs

    kernels = {"mla_decode_kernel": Launch(programs, {**moved, **first}), **second}
    return Expected(cost, kernels, TYPES[case.dtype].triton, executed, needed)


CASES = (
    Latent("chosen", "bf16", (150, 3), 4, 128, 32, page=16),
    Latent("ragged", "bf16", (0, 33, 70), 16, 128, 32, page=16, parts=Blocks(16, 2, rows=16)),
    Latent("odd-heads", "bf16", (45,), 21, 128, 16, page=8, parts=Blocks(32, 1, rows=16)),
    Latent("verify", "bf16", (20, 37), 8, 256, 64, T=3, page=16, parts=Blocks(16, 3, rows=16)),
    Latent("packed", "bf16", (40, 17), 16, 256, 64, page=16, packed=True, parts=Blocks(16, 2, rows=16)),
    Latent("packed-656", "bf16", (19,), 5, 512, 64, T=2, packed=True, parts=Blocks(16, 1, rows=16)),
    Latent("half", "fp16", (50,), 4, 128, 32, page=4, parts=Blocks(16, 4, rows=16)),
    Latent("single", "fp32", (30, 9), 6, 64, 16, page=16, parts=Blocks(16, 2, rows=16)),
)
TOLERANCE = {
    "bf16": Tolerance(5e-3, "weights of at most 1 are rounded to bf16 before they multiply latents; the result once more"),
    "fp16": Tolerance(6e-4, "weights of at most 1 are rounded to fp16 before they multiply latents; the result once more"),
    "fp32": Tolerance(2e-6, "fp32 sums in another order, exp2 in place of exp"),
}
DEEPSEEK: dict[str, Any] = {"N": 128, "R": 512, "P": 64}
LONG = (32767,) * 16
BUILDS = (
    Build(Latent("deepseek", "bf16", LONG, **DEEPSEEK), {"mla_decode_kernel": "HGMMA"}, (), EVERYWHERE),
    Build(Latent("deepseek-packed", "bf16", LONG, **DEEPSEEK, packed=True), {"mla_decode_kernel": "HGMMA"}),
    Build(Latent("sixteen-heads", "bf16", LONG, 16, 512, 64), {"mla_decode_kernel": "HMMA"}),
    Build(Latent("sixteen-packed", "bf16", LONG, 16, 512, 64, packed=True), {"mla_decode_kernel": "HMMA"}),
)
MEASURED = (
    Latent("deepseek-32k", "bf16", LONG, **DEEPSEEK),
    Latent("sixteen-heads-32k", "bf16", LONG, 16, 512, 64),
    Latent("sixteen-packed-32k", "bf16", LONG, 16, 512, 64, packed=True),
)
SPEC = Spec(
    "mla_decode", "LatentAttention", CASES, inputs, reference, launch, expected, TOLERANCE, BUILDS, MEASURED
)  # fmt: skip
