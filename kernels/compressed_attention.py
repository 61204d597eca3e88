"""Decode attention of DeepSeek-V4: the last W tokens exactly, the rest through compressed entries, and a sink, in one softmax.

An entry is key and value at once for all heads. Window entries and compressed ones lie in paged caches of their own; the
compressed ones are all attended to (HCA) or those that an indexer selected (CSA). They are stored in 16 bits or as vLLM
stores them: fp8 with an 8-bit scale per 64 elements, the rotary part in bf16, scales behind the values of a page (584 bytes
for 512 elements). One program holds a block of heads of one token and walks over one part of its entries, window first.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
import triton
import triton.language as tl

from roofline.components.compressed import compressed_layout
from roofline.components.latent import LatentAttention, Reach, layout_bytes
from roofline.errors import InputError
from roofline.kernels import buffers
from roofline.kernels.arguments import FLOATING, HALF, INT32, SINGLE, check, check_pages, check_tile, within
from roofline.kernels.device import Device, current, of
from roofline.kernels.flash_decoding import contiguous
from roofline.kernels.microscaling import widen_e8m0
from roofline.kernels.parts import (
    Blocks,
    begin,
    choose_blocks,
    launches,
    leave,
    merge,
    merge_parts,
    padded,
    partials,
    span,
    tolerance,
)
from roofline.kernels.spec import EVERYWHERE, Build, Case, Expected, Moved, Spec, Tensors
from roofline.kernels.types import NAMES, TYPES, Source
from roofline.numeric import ceil_div
from roofline.work import Ragged, Work

ROTARY = 64
"""Rotary elements of a packed entry, and elements per scale of the others."""


@triton.jit
def plain_entries(cache, slot, inside, H: tl.constexpr, HP: tl.constexpr):
    """Entries ``[BN, HP]`` of slots."""
    column = tl.arange(0, HP)[None, :]
    return tl.load(cache + slot[:, None] * H + column, mask=inside[:, None] & (column < H), other=0.0)


@triton.jit
def packed_entries(
    cache, rotary, scales, page, offset, inside, dtype: tl.constexpr,
    H: tl.constexpr, HP: tl.constexpr, PAGE: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """Entries ``[BN, HP]`` at the offsets in their pages, widened to the queries' type."""
    VALUES: tl.constexpr = H + 64
    group = tl.arange(0, HP // 64)
    member = tl.arange(0, 64)
    at = page * (PAGE * (VALUES + 8)) + offset * VALUES
    plain = inside[:, None] & (group[None, :] < H // 64 - 1)
    narrow = tl.load(
        cache + at[:, None, None] + group[None, :, None] * 64 + member[None, None, :], mask=plain[:, :, None], other=0.0
    )  # fmt: skip
    word = tl.load(scales + page * (PAGE * (VALUES + 8) // 8) + PAGE * VALUES // 8 + offset, mask=inside, other=0)
    factor = widen_e8m0((word[:, None] >> (8 * group)[None, :]) & 255)
    turned = tl.load(rotary + (at // 2 + (H - 64) // 2)[:, None] + member[None, :], mask=inside[:, None], other=0.0)
    last = (group == H // 64 - 1)[None, :, None]
    wide = tl.where(last, turned.to(tl.float32)[:, None, :], narrow.to(tl.float32) * factor[:, :, None])
    return tl.reshape(wide, (BN, HP)).to(dtype)


@triton.jit
def compressed_attention_kernel(
    q, window, window_rotary, window_scales, entries, entry_rotary, entry_scales, window_table, table, selected, lengths,
    sinks, out, weights, window_columns, columns, scale,
    T: tl.constexpr, N: tl.constexpr, H: tl.constexpr, HP: tl.constexpr, W: tl.constexpr, EVERY: tl.constexpr,
    K: tl.constexpr, ROWS: tl.constexpr, BN: tl.constexpr, PAGE: tl.constexpr, SPLITS: tl.constexpr,
):  # fmt: skip
    """One part of what ROWS heads of one token see: its last W tokens, then K or (K = 0) all complete entries."""
    query = tl.program_id(0)
    sequence = query // T
    part = tl.program_id(2)
    head = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    real = head < N
    at = query * N + head
    column = tl.arange(0, HP)
    queries = tl.load(
        q + at[:, None].to(tl.int64) * H + column[None, :], mask=real[:, None] & (column[None, :] < H), other=0.0
    )  # fmt: skip
    visible = tl.maximum(0, tl.load(lengths + sequence) - T + query % T + 1)
    near = tl.minimum(visible, W)
    count = near + (visible // EVERY if K == 0 else tl.minimum(K, visible // EVERY))
    first, last = span(part, 0, count, BN, SPLITS)
    peak, total, sums = begin(sinks, head, real, part, ROWS, HP)
    near_end = tl.minimum(last, near)
    far_begin = tl.maximum(first, near)
    near_blocks = tl.cdiv(tl.maximum(0, near_end - first), BN)
    blocks = near_blocks + tl.cdiv(tl.maximum(0, last - far_begin), BN)
    for block in range(blocks):
        recent = block < near_blocks
        place = tl.where(recent, first + block * BN, far_begin + (block - near_blocks) * BN) + tl.arange(0, BN)
        inside = place < tl.where(recent, near_end, last)
        entry = tl.where(recent, visible - near, -near) + place
        if selected is not None:
            chosen = tl.load(selected + query.to(tl.int64) * K + entry, mask=inside & (block >= near_blocks), other=0)
            entry = tl.where(recent, entry, chosen)
        row = tl.where(recent, window_table + sequence * window_columns, table + sequence * columns)
        page = tl.load(row + entry // PAGE, mask=inside, other=0).to(tl.int64)
        values = tl.where(recent, window, entries)
        if window_scales is None:
            tile = plain_entries(values, page * PAGE + entry % PAGE, inside, H, HP)
        else:
            rotary = tl.where(recent, window_rotary, entry_rotary)
            scales = tl.where(recent, window_scales, entry_scales)
            tile = packed_entries(values, rotary, scales, page, entry % PAGE, inside, queries.dtype, H, HP, PAGE, BN)
        score = tl.dot(queries, tl.trans(tile), input_precision="ieee") * (scale * 1.4426950408889634)
        weight, peak, total, fade = merge(tl.where(inside[None, :], score, float("-inf")), peak, total)
        sums = tl.dot(weight.to(tile.dtype), tile, sums * fade[:, None], input_precision="ieee")
    leave(out, weights, peak, total, sums, at, part, real, H, HP, SPLITS)


def blocks_for(tokens: int, N: int, seen: int, dtype: str, packed: bool, device: Device) -> Blocks:
    """As ``mla_decode`` chooses; packed entries need registers to be widened in and are taken half as many at a time."""
    cut = choose_blocks(tokens, N, seen, dtype, device)
    return replace(cut, BN=32, stages=2) if cut.BN == 64 and packed else cut


def views(cache: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
    """Values, rotary parts and scales of a cache: windows on its memory, None where it is not packed."""
    if cache.dtype != torch.uint8:
        return cache, None, None
    return cache.view(torch.float8_e4m3fn), cache.view(dtype), cache.view(torch.int64)


def compressed_attention(
    q: torch.Tensor, window_cache: torch.Tensor, cache: torch.Tensor, window_table: torch.Tensor, table: torch.Tensor,
    lengths: torch.Tensor, window: int, every: int, longest: int, page: int, scale: float,
    selected: torch.Tensor | None = None, sinks: torch.Tensor | None = None, parts: Blocks | None = None,
) -> torch.Tensor:  # fmt: skip
    """Attention of ``q [B, T, N, H]`` over the last ``window`` tokens and the compressed entries; returns the same shape.

    Args:
        window_cache, cache: entries of tokens and of blocks of ``every`` tokens, ``[pages, page, H]`` of the queries' type or
            uint8 ``[pages, bytes]`` of ``pack``. window_table, table: int32 ``[B, pages]``.
        lengths: int32 ``[B]``, cached and new tokens, of which ``longest`` is the largest.
        selected: int32 ``[B, T, K]``, entries to attend to; the first min(K, complete ones) are read. None for all.
        sinks: fp32 ``[N]``, logits that join the softmax.

    A query that sees no entry gets zeros. Raises InputError for arguments that do not fit each other.
    """
    check("q", q, (None, None, None, None), FLOATING)
    B, T, N, H = q.shape
    within("page", page, 1)
    within("every", every, 1)
    within("window", window, 0)
    stored, narrow = ((None, page, H), False) if cache.dtype != torch.uint8 else ((None, page * (H + ROTARY + 8)), True)
    for name, held in (("window_cache", window_cache), ("cache", cache)):
        check(name, held, stored, (torch.uint8,) if narrow else (q.dtype,), q)
    if narrow and (H % ROTARY or H > 8 * ROTARY or q.dtype not in HALF):
        raise InputError(f"cache: packed entries of {H} elements in pages of {page} for {q.dtype} have no layout")
    check("window_table", window_table, (B, None), INT32, q)
    if window:
        check_pages(window_table, lengths, longest, page, len(window_cache), q, "window_table")
    check_pages(table, lengths, longest, page, len(cache), q, every=every)
    check("selected", selected, (B, T, None), INT32, q)
    check("sinks", sinks, (N,), SINGLE, q)
    out = buffers.empty(B, T, N, H, dtype=q.dtype, device=q.device)
    if not out.numel():
        return out
    K, packed = 0 if selected is None else selected.shape[2], cache.dtype == torch.uint8
    cut = parts or blocks_for(B * T, N, window + (K or longest // every), NAMES[q.dtype], packed, of(q))
    if parts:
        check_tile("parts", cut.warps, cut.rows * (padded(H) + cut.BN), rows=cut.rows, BN=cut.BN)
    partial, weights = partials(out, cut.splits)
    compressed_attention_kernel[(B * T, ceil_div(N, cut.rows), cut.splits)](
        q, *views(window_cache, q.dtype), *views(cache, q.dtype), window_table, table, selected, lengths, sinks, partial,
        weights, window_table.shape[1], table.shape[1], scale, T=T, N=N, H=H, HP=padded(H), W=window, EVERY=every, K=K,
        ROWS=cut.rows, BN=cut.BN, PAGE=page, SPLITS=cut.splits, num_warps=cut.warps, num_stages=cut.stages,
    )  # fmt: skip
    return merge_parts(partial, weights, out)


def pack(entries: torch.Tensor) -> torch.Tensor:
    """Pages ``[pages, PAGE, H]`` of entries as bytes: fp8 and the rotary part of each, then 8 scales for each."""
    pages, PAGE, H = entries.shape
    if entries.device.type == "meta":
        return torch.empty(pages, PAGE * (H + ROTARY + 8), dtype=torch.uint8, device="meta")
    groups = entries[..., : H - ROTARY].float().unflatten(-1, (-1, ROTARY))
    exponents = torch.ceil(torch.log2(groups.abs().amax(-1, keepdim=True).clamp(min=1e-12) / 448.0))
    narrow = (groups / torch.exp2(exponents)).to(torch.float8_e4m3fn).flatten(-2).contiguous().view(torch.uint8)
    values = torch.cat([narrow, entries[..., H - ROTARY :].contiguous().view(torch.uint8)], -1)
    scales = torch.full((pages, PAGE, 8), 127, dtype=torch.uint8, device=entries.device)
    scales[..., : exponents.shape[2]] = (exponents.squeeze(-1) + 127).to(torch.uint8)
    return torch.cat([values.flatten(1), scales.flatten(1)], 1)


def unpack(cache: torch.Tensor, PAGE: int, H: int, dtype: torch.dtype) -> torch.Tensor:
    """The inverse of ``pack``, in float64."""
    values, scales = cache[:, : PAGE * (H + ROTARY)], cache[:, PAGE * (H + ROTARY) :]
    values = values.reshape(len(cache), PAGE, H + ROTARY)
    factors = torch.exp2(scales.reshape(len(cache), PAGE, 8)[..., : H // ROTARY - 1].double() - 127)
    narrow = values[..., : H - ROTARY].contiguous().view(torch.float8_e4m3fn).double().unflatten(-1, (-1, ROTARY))
    return torch.cat(
        [(narrow * factors.unsqueeze(-1)).flatten(-2), values[..., H - ROTARY :].contiguous().view(dtype).double()], -1
    )


@dataclass(frozen=True)
class Compressed(Case):
    """``cached`` tokens of each sequence behind T new ones, an entry for every ``every``, k selected or (k = 0) all."""

    cached: tuple[int, ...]
    N: int
    H: int
    window: int
    every: int
    k: int = 0
    T: int = 1
    page: int = 64
    packed: bool = False
    sinks: bool = True
    parts: Blocks | None = None

    @property
    def scale(self) -> float:
        """Scale of the scores."""
        return float(self.H**-0.5)

    @property
    def cut(self) -> Blocks:
        """The blocks of its launch."""
        seen = self.window + (self.k or (max(self.cached) + self.T) // self.every)
        tokens = len(self.cached) * self.T
        return self.parts or blocks_for(tokens, self.N, seen, self.dtype, self.packed, current())

    def counts(self, visible: int) -> tuple[int, int]:
        """Window entries and compressed ones that a token attends to which sees that many tokens."""
        complete = visible // self.every
        return min(visible, self.window), min(self.k, complete) if self.k else complete

    @property
    def tokens(self) -> Iterator[tuple[int, int, int]]:
        """(sequence, new token, tokens that it sees)."""
        return ((index, token, S + token + 1) for index, S in enumerate(self.cached) for token in range(self.T))


def pages_of(case: Compressed, source: Source, entries: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
    """Random pages that hold so many entries of each sequence, stored as the case says, and their table."""
    widest = max(1, ceil_div(max(entries), case.page))
    pages = len(entries) * widest + 3
    cache = source.normal(pages, case.page, case.H, dtype=case.dtype)
    table = source.permutation(pages)[: len(entries) * widest].view(len(entries), widest)
    return pack(cache) if case.packed else cache, table


def inputs(case: Compressed, device: str) -> Tensors:
    """Queries, both caches in random pages, their tables, lengths, sinks, and a random selection for each token."""
    source, B, lengths = Source(case.name, device), len(case.cached), [S + case.T for S in case.cached]
    window_cache, window_table = pages_of(case, source, lengths)
    cache, table = pages_of(case, source, [length // case.every for length in lengths])
    chosen = []
    for _, _, visible in case.tokens if case.k else ():
        row = source.permutation(visible // case.every)[: case.k]
        chosen.append(torch.cat([row, row.new_full((case.k - len(row),), -1)]))
    return {
        "q": source.normal(B, case.T, case.N, case.H, dtype=case.dtype), "window_cache": window_cache, "cache": cache,
        "window_table": window_table, "table": table, "lengths": source.integers(lengths), "longest": max(lengths),
        "selected": torch.stack(chosen).view(B, case.T, case.k) if chosen else None,
        "sinks": source.normal(case.N, dtype="fp32") if case.sinks else None,
    }  # fmt: skip


def reference(case: Compressed, tensors: Tensors) -> Tensors:
    """One softmax over window, compressed entries and sink of each token, in float64."""
    caches = [tensors["window_cache"], tensors["cache"]]
    if case.packed:
        caches = [unpack(cache, case.page, case.H, TYPES[case.dtype].torch) for cache in caches]
    outputs = []
    for index, token, visible in case.tokens:
        near, far = case.counts(visible)
        recent = contiguous(caches[0], tensors["window_table"][index], visible)[visible - near :]
        entries = contiguous(caches[1], tensors["table"][index], visible // case.every)
        if case.k:
            entries = entries[tensors["selected"][index, token, :far].long()]
        mine = torch.cat([recent, entries])
        scores = tensors["q"][index, token].double() @ mine.T * case.scale
        if case.sinks:
            scores = torch.cat([scores, tensors["sinks"].double()[:, None]], 1)
        outputs.append(torch.softmax(scores, 1)[:, : len(mine)] @ mine)
    return {"out": torch.stack(outputs).view(tensors["q"].shape)}


def launch(case: Compressed, tensors: Tensors) -> Tensors:
    """The Triton kernels."""
    options: dict[str, Any] = {"window": case.window, "every": case.every, "page": case.page, "parts": case.parts}
    return {"out": compressed_attention(**tensors, **options, scale=case.scale)}


def walked(near: int, count: int, cut: Blocks) -> int:
    """Blocks that the parts of one token walk over: those of the window, and those of the other entries."""
    share = ceil_div(ceil_div(count, cut.BN), cut.splits) * cut.BN
    ends = [(part * share, min((part + 1) * share, count)) for part in range(cut.splits)]
    return sum(
        ceil_div(max(0, min(last, near) - first), cut.BN) + ceil_div(max(0, last - max(first, near)), cut.BN)
        for first, last in ends
    )


def expected(case: Compressed, tensors: Tensors) -> Expected:
    """Entries of both kinds once per block of heads of each token; a table entry (and a selected position) for each."""
    cut, fmt, B = case.cut, TYPES[case.dtype].format, len(case.cached)
    layout = compressed_layout(case.H, ROTARY, TYPES["fp8"].format) if case.packed else ((case.H, fmt),)
    recent = (Reach(limit=case.window, recent=True),) if case.window else ()
    reaches = (*recent, Reach(case.every, case.k or None))
    core = LatentAttention(case.N, case.H, case.H, layout, reaches, case.sinks, fmt)
    cost = core.cost(Ragged(tuple(Work(1, case.T, S) for S in case.cached)))
    counts, entry, blocks = (
        [case.counts(visible) for *_, visible in case.tokens],
        layout_bytes(layout),
        ceil_div(case.N, cut.rows),
    )
    near, far = (sum(column) * blocks for column in zip(*counts, strict=True))
    window = entry * sum(min(S, case.window - 1) + case.T for S in case.cached) if case.window else 0
    recent_tokens = [range(max(0, S + 1 - case.window), S + case.T if case.window else 0) for S in case.cached]
    window_pages = sum(len({token // case.page for token in tokens}) for tokens in recent_tokens)
    if case.k:
        rows = tensors["selected"].flatten(1).tolist()
        pages = sum(len({one // case.page for one in row if one >= 0}) for row in rows)
    else:
        pages = sum(ceil_div((S + case.T) // case.every, case.page) for S in case.cached)
    programs, q = B * case.T * blocks * cut.splits, cost.read["activations"]
    moved = {
        "q": Moved("activations", read=q, requested=q * cut.splits),
        "window": Moved("state", read=window, requested=entry * near),
        "entries": Moved("state", read=cost.read["state"] - window, requested=entry * far),
        "window_table": Moved("", read=4 * window_pages, requested=4 * near),
        "table": Moved("", read=4 * pages, requested=4 * far),
        "lengths": Moved("", read=4 * B, requested=4 * programs),
    }
    if case.k:
        moved["selected"] = Moved("", read=4 * far // blocks, requested=4 * far)
    if case.sinks:
        moved["sinks"] = Moved("", read=4 * case.N, requested=4 * case.N * B * case.T)
    tiles = blocks * sum(walked(recent, recent + others, cut) for recent, others in counts)
    executed = 2 * cut.rows * cut.BN * 2 * padded(case.H) * tiles

    def needed() -> int:
        near = sum(len(range(max(0, seen - case.window), seen)) for *_, seen in case.tokens)
        whole = sum(seen // case.every for *_, seen in case.tokens)
        far = int((tensors["selected"] >= 0).sum()) if case.k else whole
        return 4 * case.N * case.H * (near + far)

    rows, out = B * case.T * case.N, cost.write["activations"]
    kernels = launches("compressed_attention_kernel", programs, moved, rows, case.H, cut.splits, out)
    return Expected(cost, kernels, TYPES[case.dtype].triton, executed, needed)


def library(case: Compressed, tensors: Tensors) -> Any:
    """torch's scaled_dot_product_attention over contiguous 16-bit entries, the selected ones gathered, a sink as a key of 0."""
    S, kind = case.cached[0], tensors["q"].dtype
    if case.T > 1 or any(one != S for one in case.cached) or case.k > (S + 1) // case.every:
        return None
    near, far = case.counts(S + 1)

    def rows(cache: torch.Tensor, table: torch.Tensor, end: int) -> torch.Tensor:
        pages = (cache[row] for row in table.long())
        wide = (unpack(held, case.page, case.H, kind) if case.packed else held for held in pages)
        return torch.stack([held.flatten(0, 1)[:end].to(kind) for held in wide])

    recent = rows(tensors["window_cache"], tensors["window_table"], S + 1)[:, S + 1 - near :]
    entries, q = rows(tensors["cache"], tensors["table"], (S + 1) // case.every), tensors["q"].transpose(1, 2)
    nothing, shown = entries.new_zeros(len(entries), 1, case.H), None
    if case.sinks:
        shown = torch.cat([q.new_zeros(case.N, near + far), tensors["sinks"][:, None].to(kind)], 1)[None, :, None]
    selected = tensors["selected"][:, 0, :far, None].long().expand(-1, -1, case.H) if case.k else None
    sdpa = torch.nn.functional.scaled_dot_product_attention

    def run() -> torch.Tensor:
        chosen = entries if selected is None else entries.gather(1, selected)
        mine = torch.cat([recent, chosen, nothing] if case.sinks else [recent, chosen], 1).unsqueeze(1)
        return sdpa(q, mine, mine, attn_mask=shown, scale=case.scale, enable_gqa=True)

    return run


TWO = Blocks(16, 2, rows=16)
CASES = (
    Compressed("chosen", "bf16", (150, 9), 4, 64, 12, 4, k=20, page=8),
    Compressed("selected", "bf16", (130, 33, 70), 21, 80, 17, 3, k=13, page=4, parts=TWO),
    Compressed("all", "bf16", (101, 40), 16, 128, 24, 7, T=2, page=8, parts=Blocks(16, 3, rows=16)),
    Compressed("no-window", "fp16", (50, 3), 8, 48, 0, 4, page=4, sinks=False, parts=Blocks(32, 1, rows=16)),
    Compressed("too-short", "bf16", (2, 0), 5, 32, 9, 4, k=6, page=4, parts=TWO),
    Compressed("packed", "bf16", (67, 20), 12, 256, 10, 4, k=7, page=8, packed=True, parts=TWO),
    Compressed("packed-584", "bf16", (40,), 3, 512, 6, 5, packed=True, parts=Blocks(16, 1, rows=16)),
    Compressed("single", "fp32", (44, 61), 6, 64, 11, 2, k=30, page=16, parts=TWO),
)
LONG = (131071,) * 16
CSA: dict[str, Any] = {"N": 128, "H": 512, "window": 128, "every": 4, "k": 1024}
HCA: dict[str, Any] = {"N": 128, "H": 512, "window": 128, "every": 128}
UNIT = {"compressed_attention_kernel": "HGMMA"}
BUILDS = (
    Build(Compressed("v4-csa", "bf16", LONG, **CSA), UNIT, (), EVERYWHERE),
    Build(Compressed("v4-csa-packed", "bf16", LONG, **CSA, packed=True), UNIT),
    Build(Compressed("v4-hca-packed", "bf16", LONG, **HCA, packed=True), UNIT),
)
MEASURED = (
    Compressed("v4-csa-128k", "bf16", LONG, **CSA, packed=True),
    Compressed("v4-hca-128k", "bf16", LONG, **HCA, packed=True),
)
SPEC = Spec(
    "compressed_attention", "LatentAttention", CASES, inputs, reference, launch, expected, tolerance("entries"), BUILDS, MEASURED,
    library,
)  # fmt: skip
