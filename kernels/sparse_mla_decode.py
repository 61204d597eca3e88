"""Absorbed latent attention over selected entries only: the core of DeepSeek sparse attention (DSA).

Each query token brings the positions that an indexer selected for it; they are looked up in the block table and gathered
from the paged latent cache, in 16 bits or in the 656-byte layout of ``mla_decode``. Heads of one token share its entries;
tokens do not share theirs. Which entries are selected says who may be seen, so that there is no mask. With at least as many
positions as there are entries this is dense latent attention, bit for bit where the positions ascend.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
import triton
import triton.language as tl

from roofline.components.latent import Reach
from roofline.kernels import buffers
from roofline.kernels.arguments import INT32, check, check_tile
from roofline.kernels.device import Device, current, of
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
def sparse_mla_decode_kernel(
    q, latent, scales, rotary, table, selected, lengths, out, weights, columns, scale,
    T: tl.constexpr, N: tl.constexpr, R: tl.constexpr, P: tl.constexpr, ENTRY: tl.constexpr, ROTARY_ENTRY: tl.constexpr,
    K: tl.constexpr, ROWS: tl.constexpr, BN: tl.constexpr, PAGE: tl.constexpr, SPLITS: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """One part of the selected entries of one token for ROWS of its heads."""
    query = tl.program_id(0)
    sequence = query // T
    part = tl.program_id(2)
    head = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    real = head < N
    at = query * N + head
    q_latent, q_rotary = queries_at(q, at, real, R, P)
    count = tl.maximum(0, tl.minimum(K, tl.load(lengths + sequence) - T + query % T + 1))
    first, last = span(part, 0, count, BN, SPLITS)
    peak, total, sums = begin(None, at, real, part, ROWS, R)
    for start in range(first, last, BN):
        place = start + tl.arange(0, BN)
        inside = place < last
        position = tl.load(selected + query.to(tl.int64) * K + place, mask=inside, other=0)
        page = tl.load(table + sequence * columns + position // PAGE, mask=inside, other=0).to(tl.int64)
        slot = page * PAGE + position % PAGE
        peak, total, sums = attend(
            q_latent, q_rotary, latent, scales, rotary, slot, inside, inside[None, :], scale, peak, total, sums,
            R, P, ENTRY, ROTARY_ENTRY, BN, GROUP,
        )  # fmt: skip
    leave(out, weights, peak, total, sums, at, part, real, R, R, SPLITS)


def blocks_for(tokens: int, N: int, K: int, dtype: str, packed: bool, device: Device) -> Blocks:
    """As ``mla_decode`` chooses; a gather of 16-bit entries needs more registers for addresses and takes half the entries."""
    cut = choose_blocks(tokens, N, K, dtype, device)
    return replace(cut, BN=32, stages=3) if cut.BN == 64 and not packed else cut


def sparse_mla_decode(
    q: torch.Tensor, cache: torch.Tensor, table: torch.Tensor, selected: torch.Tensor, lengths: torch.Tensor,
    rank: int, scale: float, parts: Blocks | None = None,
) -> torch.Tensor:  # fmt: skip
    """Attention of absorbed queries ``q [B, T, N, rank + P]`` over selected entries; returns ``[B, T, N, rank]``.

    Args:
        cache, table, lengths, scale: as in ``mla_decode``.
        selected: int32 ``[B, T, K]``, positions in the sequence; the first min(K, visible ones) are read.

    A query that sees no entry gets zeros. Raises InputError for arguments that do not fit each other.
    """
    check_latent(q, cache, table, lengths, None, rank)
    check("selected", selected, (*q.shape[:2], None), INT32, q)
    B, T, N, width = q.shape
    P, K = width - rank, selected.shape[2]
    out = buffers.empty(B, T, N, rank, dtype=q.dtype, device=q.device)
    if not out.numel():
        return out
    latent, scales, rotary = views(cache, rank, q.dtype)
    cut = parts or blocks_for(B * T, N, K, NAMES[q.dtype], scales is not None, of(q))
    if parts:
        check_tile("parts", cut.warps, cut.rows * (rank + cut.BN), rows=cut.rows, BN=cut.BN)
    partial, weights = partials(out, cut.splits)
    sparse_mla_decode_kernel[(B * T, ceil_div(N, cut.rows), cut.splits)](
        q, latent, scales, rotary, table, selected, lengths, partial, weights, table.shape[1], scale,
        T=T, N=N, R=rank, P=P, ENTRY=latent.stride(1), ROTARY_ENTRY=rotary.stride(1), K=K, ROWS=cut.rows, BN=cut.BN,
        PAGE=cache.shape[1], SPLITS=cut.splits, GROUP=GROUP, num_warps=cut.warps, num_stages=cut.stages,
    )  # fmt: skip
    return merge_parts(partial, weights, out)


@dataclass(frozen=True)
class Selected(Latent):
    """``k`` entries are selected for each new token.

    Several tokens select entries that do not overlap, or all: what the component's count of distinct entries is exact for.
    """

    k: int = 0

    @property
    def cut(self) -> Blocks:
        """The blocks of its launch."""
        tokens = len(self.cached) * self.T
        return self.parts or blocks_for(tokens, self.N, self.k, self.dtype, self.packed, current())

    def counts(self, S: int) -> list[int]:
        """Entries that each new token of a sequence attends to."""
        return [min(self.k, S + token + 1) for token in range(self.T)]


def chosen(case: Selected, source: Source) -> torch.Tensor:
    """Random selections, behind the visible ones -1."""
    rows = []
    for S in case.cached:
        counts = case.counts(S)
        apart = sum(counts) <= S + 1
        order, begin = source.permutation(S + 1), 0
        for token, count in enumerate(counts):
            row = order[begin : begin + count] if apart else source.permutation(S + token + 1)[:count]
            begin += count
            rows.append(torch.cat([row, row.new_full((case.k - count,), -1)]))
    return torch.stack(rows).view(len(case.cached), case.T, case.k)


def inputs(case: Selected, device: str) -> Tensors:
    """As of ``mla_decode``, and a selection for each token."""
    source = Source(case.name, device)
    return {**latent_inputs(case, source), "selected": chosen(case, source)}


def reference(case: Selected, tensors: Tensors) -> Tensors:
    """Softmax attention of each token over its own selection, in float64."""
    cache, outputs = stored(case, tensors["cache"]), []
    for index, S in enumerate(case.cached):
        entries = contiguous(cache, tensors["table"][index], S + case.T)
        for token, count in enumerate(case.counts(S)):
            mine = entries[tensors["selected"][index, token, :count].long()]
            scores = tensors["q"][index, token].double() @ mine.T * case.scale
            outputs.append(torch.softmax(scores, 1) @ mine[:, : case.R])
    return {"out": torch.stack(outputs).view(len(case.cached), case.T, case.N, case.R)}


def launch(case: Selected, tensors: Tensors) -> Tensors:
    """The Triton kernels."""
    return {"out": sparse_mla_decode(**tensors, rank=case.R, scale=case.scale, parts=case.parts)}


def looked_up(case: Selected, selected: torch.Tensor) -> int:
    """Entries of the block table that the selections need."""
    rows = selected.flatten(1).tolist()
    return sum(len({position // case.page for position in row if position >= 0}) for row in rows)


def expected(case: Selected, tensors: Tensors) -> Expected:
    """Entries once per block of heads of each token; queries once per part; a position and a table entry per entry read."""
    cut, B = case.cut, len(case.cached)
    cost = case.core(Reach(limit=case.k)).cost(Ragged(tuple(Work(1, case.T, S) for S in case.cached)))
    counts = [count for S in case.cached for count in case.counts(S)]
    distinct = sum(min(sum(case.counts(S)), S + case.T) for S in case.cached)
    blocks = ceil_div(case.N, cut.rows)
    programs, entry = B * case.T * blocks * cut.splits, int(cost.read["state"]) // distinct
    moved = {
        "q": Moved("activations", read=cost.read["activations"], requested=cost.read["activations"] * cut.splits),
        "latent": Moved("state", read=entry * distinct, requested=entry * sum(counts) * blocks),
        "table": Moved("", read=4 * looked_up(case, tensors["selected"]), requested=4 * sum(counts) * blocks),
        "selected": Moved("", read=4 * sum(counts), requested=4 * sum(counts) * blocks),
        "lengths": Moved("", read=4 * B, requested=4 * programs),
    }
    walked = blocks * sum(block_counts(0, count, cut) for count in counts)
    executed = 2 * cut.rows * cut.BN * (2 * case.R + case.P) * walked

    def needed() -> int:
        return 2 * case.N * (2 * case.R + case.P) * int((tensors["selected"] >= 0).sum())

    rows, out = B * case.T * case.N, cost.write["activations"]
    kernels = launches("sparse_mla_decode_kernel", programs, moved, rows, case.R, cut.splits, out)
    return Expected(cost, kernels, TYPES[case.dtype].triton, executed, needed)


def library(case: Selected, tensors: Tensors) -> Any:
    """torch: the selected 16-bit entries gathered, then scaled_dot_product_attention over them."""
    if case.T > 1 or case.k > min(case.cached) + 1:
        return None
    q, selected = tensors["q"].transpose(1, 2), tensors["selected"][:, 0].long()
    entries = stored(case, tensors["cache"]).flatten(0, 1).to(q.dtype)
    slots = torch.gather(tensors["table"].long(), 1, selected // case.page) * case.page + selected % case.page
    sdpa = torch.nn.functional.scaled_dot_product_attention

    def run() -> torch.Tensor:
        mine = entries[slots].unsqueeze(1)
        return sdpa(q, mine, mine[..., : case.R], scale=case.scale, enable_gqa=True)

    return run


CASES = (
    Selected("chosen", "bf16", (150, 3), 4, 128, 32, page=16, k=40),
    Selected("ragged", "bf16", (0, 33, 70), 21, 128, 16, page=16, k=45, parts=Blocks(16, 2, rows=16)),
    Selected("apart", "bf16", (50, 37), 8, 256, 64, T=3, page=8, k=11, parts=Blocks(16, 1, rows=16)),
    Selected("everything", "fp16", (20, 0), 16, 128, 32, T=2, page=4, k=64, parts=Blocks(32, 2, rows=16)),
    Selected("packed", "bf16", (40, 17), 16, 256, 64, page=16, packed=True, k=19, parts=Blocks(16, 2, rows=16)),
    Selected("packed-656", "bf16", (35,), 5, 512, 64, packed=True, k=18, parts=Blocks(16, 1, rows=16)),
    Selected("single", "fp32", (30, 9), 6, 64, 16, page=16, k=13, parts=Blocks(16, 3, rows=16)),
)
LONG = (16383,) * 64
GATHERED: dict[str, Any] = {**DEEPSEEK, "k": 2048}
BUILDS = (
    Build(Selected("deepseek", "bf16", LONG, **GATHERED), {"sparse_mla_decode_kernel": "HGMMA"}, (), EVERYWHERE),
    Build(Selected("deepseek-packed", "bf16", LONG, **GATHERED, packed=True), {"sparse_mla_decode_kernel": "HGMMA"}),
)
MEASURED = (
    Selected("deepseek-16k", "bf16", LONG, **GATHERED),
    Selected("deepseek-16k-packed", "bf16", LONG, **GATHERED, packed=True),
)
SPEC = Spec(
    "sparse_mla_decode", "LatentAttention", CASES, inputs, reference, launch, expected, tolerance("latents"), BUILDS, MEASURED,
    library,
)  # fmt: skip
