"""Absorbed latent attention of a few new tokens over a paged latent cache: every head attends to the same entries.

One program holds a block of query rows (heads of one or more new tokens) and walks over one part of the entries;
``latent_cache`` says how they lie in memory, ``parts`` how parts are merged.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl

from roofline.kernels import buffers
from roofline.kernels.arguments import check_tile
from roofline.kernels.device import current, of
from roofline.kernels.flash_decoding import contiguous
from roofline.kernels.latent_cache import (
    DEEPSEEK,
    GROUP,
    Latent,
    attend,
    check_latent,
    latent_inputs,
    queries_at,
    stored,
    views,
)
from roofline.kernels.masks import visible
from roofline.kernels.parts import (
    Blocks,
    begin,
    block_counts,
    choose_blocks,
    launches,
    leave,
    merge_parts,
    partials,
    span,
    tolerance,
)
from roofline.kernels.spec import EVERYWHERE, Build, Expected, Moved, Spec, Tensors
from roofline.kernels.types import NAMES, TYPES, Source
from roofline.numeric import ceil_div
from roofline.work import Ragged, Work


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
    q_latent, q_rotary = queries_at(q, at, real, R, P)
    length = tl.load(lengths + sequence)
    first, last = span(part, 0, length, BN, SPLITS)
    peak, total, sums = begin(None, at, real, part, ROWS, R)
    for start in range(first, last, BN):
        key = start + tl.arange(0, BN)
        inside = key < last
        page = tl.load(table + sequence * columns + key // PAGE, mask=inside, other=0).to(tl.int64)
        slot = page * PAGE + key % PAGE
        seen = inside[None, :] & (key[None, :] <= length - T + token[:, None])
        peak, total, sums = attend(
            q_latent, q_rotary, latent, scales, rotary, slot, inside, seen, scale, peak, total, sums,
            R, P, ENTRY, ROTARY_ENTRY, BN, GROUP,
        )  # fmt: skip
    leave(out, weights, peak, total, sums, at, part, real, R, R, SPLITS)


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
    cut = parts or choose_blocks(B, T * N, longest, NAMES[q.dtype], of(q))
    if parts:
        check_tile("parts", cut.warps, cut.rows * (rank + cut.BN), rows=cut.rows, BN=cut.BN)
    partial, weights = partials(out, cut.splits)
    mla_decode_kernel[(B, ceil_div(T * N, cut.rows), cut.splits)](
        q, latent, scales, rotary, table, lengths, partial, weights, table.shape[1], scale,
        T=T, N=N, R=rank, P=P, ENTRY=latent.stride(1), ROTARY_ENTRY=rotary.stride(1), ROWS=cut.rows, BN=cut.BN,
        PAGE=PAGE, SPLITS=cut.splits, GROUP=GROUP, num_warps=cut.warps, num_stages=cut.stages,
    )  # fmt: skip
    return merge_parts(partial, weights, out)


@dataclass(frozen=True)
class Dense(Latent):
    """Every cached entry is attended to."""

    @property
    def cut(self) -> Blocks:
        """The blocks of its launch."""
        rows, longest = self.T * self.N, max(self.lengths)
        return self.parts or choose_blocks(len(self.cached), rows, longest, self.dtype, current())


def inputs(case: Dense, device: str) -> Tensors:
    """Absorbed queries, a latent cache in random pages, its table and lengths."""
    return {**latent_inputs(case, Source(case.name, device)), "longest": max(case.lengths)}


def reference(case: Dense, tensors: Tensors) -> Tensors:
    """Softmax attention of each sequence over its own entries, in float64; the values are the latents."""
    cache, outputs = stored(case, tensors["cache"]), []
    for index, S in enumerate(case.cached):
        entries = contiguous(cache, tensors["table"][index], S + case.T)
        scores = torch.einsum("tnr,sr->nts", tensors["q"][index].double(), entries) * case.scale
        scores = scores.masked_fill(~visible("causal", 0, case.T, S), float("-inf"))
        outputs.append(torch.einsum("nts,sr->tnr", torch.softmax(scores, 2), entries[:, : case.R]))
    return {"out": torch.stack(outputs)}


def launch(case: Latent, tensors: Tensors) -> Tensors:
    """The Triton kernels."""
    return {"out": mla_decode(**tensors, rank=case.R, scale=case.scale, parts=case.parts)}


def expected(case: Dense, tensors: Tensors) -> Expected:
    """Entries once per block of query rows; queries once per part; a table entry per entry read."""
    cut, lengths, B = case.cut, case.lengths, len(case.cached)
    cost = case.core().cost(Ragged(tuple(Work(1, case.T, S) for S in case.cached)))
    rows = case.T * case.N
    blocks = ceil_div(rows, cut.rows)
    programs, state = B * blocks * cut.splits, int(cost.read["state"])
    moved = {
        "q": Moved("activations", read=cost.read["activations"], requested=cost.read["activations"] * cut.splits),
        "latent": Moved("state", read=state, requested=state * blocks),
        "table": Moved("", read=4 * sum(ceil_div(n, case.page) for n in lengths), requested=4 * sum(lengths) * blocks),
        "lengths": Moved("", read=4 * B, requested=4 * programs),
    }
    walked = blocks * sum(block_counts(0, length, cut) for length in lengths)
    executed = 2 * cut.rows * cut.BN * (2 * case.R + case.P) * walked

    def needed() -> int:
        pairs = sum(int(visible("causal", 0, case.T, S).sum()) for S in case.cached)
        return 2 * case.N * (2 * case.R + case.P) * pairs

    out = cost.write["activations"]
    kernels = launches("mla_decode_kernel", programs, moved, B * rows, case.R, cut.splits, out)
    return Expected(cost, kernels, TYPES[case.dtype].triton, executed, needed)


def library(case: Dense, tensors: Tensors) -> Any:
    """torch's scaled_dot_product_attention over contiguous entries in 16 bits, one head for all: what it costs without pages."""
    S, T = case.cached[0], case.T
    if T > 1 or any(one != S for one in case.cached):
        return None
    pages, sdpa = (tensors["cache"][row] for row in tensors["table"].long()), torch.nn.functional.scaled_dot_product_attention
    rows = [stored(case, held).flatten(0, 1)[: S + T].to(tensors["q"].dtype) for held in pages]
    q, entries = tensors["q"].transpose(1, 2).contiguous(), torch.stack(rows).unsqueeze(1)
    return lambda: sdpa(q, entries, entries[..., : case.R], scale=case.scale, enable_gqa=True)


CASES = (
    Dense("chosen", "bf16", (150, 3), 4, 128, 32, page=16),
    Dense("ragged", "bf16", (0, 33, 70), 16, 128, 32, page=16, parts=Blocks(16, 2, rows=16)),
    Dense("odd-heads", "bf16", (45,), 21, 128, 16, page=8, parts=Blocks(32, 1, rows=16)),
    Dense("verify", "bf16", (20, 37), 8, 256, 64, T=3, page=16, parts=Blocks(16, 3, rows=16)),
    Dense("packed", "bf16", (40, 17), 16, 256, 64, page=16, packed=True, parts=Blocks(16, 2, rows=16)),
    Dense("packed-656", "bf16", (19,), 5, 512, 64, T=2, packed=True, parts=Blocks(16, 1, rows=16)),
    Dense("half", "fp16", (50,), 4, 128, 32, page=4, parts=Blocks(16, 4, rows=16)),
    Dense("single", "fp32", (30, 9), 6, 64, 16, page=16, parts=Blocks(16, 2, rows=16)),
)
LONG = (32767,) * 16
BUILDS = (
    Build(Dense("deepseek", "bf16", LONG, **DEEPSEEK), {"mla_decode_kernel": "HGMMA"}, (), EVERYWHERE),
    Build(Dense("deepseek-packed", "bf16", LONG, **DEEPSEEK, packed=True), {"mla_decode_kernel": "HGMMA"}),
    Build(Dense("sixteen-heads", "bf16", LONG, 16, 512, 64), {"mla_decode_kernel": "HMMA"}),
    Build(Dense("sixteen-packed", "bf16", LONG, 16, 512, 64, packed=True), {"mla_decode_kernel": "HMMA"}),
)
MEASURED = (
    Dense("deepseek-32k", "bf16", LONG, **DEEPSEEK),
    Dense("sixteen-heads-32k", "bf16", LONG, 16, 512, 64),
    Dense("sixteen-packed-32k", "bf16", LONG, 16, 512, 64, packed=True),
)
SPEC = Spec(
    "mla_decode", "LatentAttention", CASES, inputs, reference, launch, expected, tolerance("latents"), BUILDS, MEASURED, library
)  # fmt: skip
