"""The lightning indexer's scores: how much each cached entry matters to a new token, by a few cheap heads.

``score(t, s) = scale * sum over heads h of w(t, h) ReLU(q(t, h) . k(s))``, the input of a top-k selection (DSA over tokens,
CSA over compressed entries). Queries and keys are fp8 and multiplied as such, or MXFP4, which is widened to bf16 (exactly)
in front of the matrix unit. One program holds the heads of one token and walks over one part of the paged keys.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl

from roofline.components.latent import Reach
from roofline.components.sparse import IndexScores
from roofline.errors import InputError
from roofline.kernels import buffers
from roofline.kernels.arguments import FLOATING, SINGLE, check, check_pages, check_tile, within
from roofline.kernels.device import Device, current, of
from roofline.kernels.index_keys import INDEX, dequantise, from_pages, quantise, to_pages
from roofline.kernels.microscaling import widen_e2m1, widen_e8m0
from roofline.kernels.parts import Parts, block_counts, padded, parts_for, span
from roofline.kernels.spec import EVERYWHERE, Build, Case, Expected, Launch, Moved, Spec, Tensors, Tolerance
from roofline.kernels.tiling import power_of_two
from roofline.kernels.types import TYPES, Source
from roofline.numeric import ceil_div
from roofline.work import Ragged, Work

FP8_WIDTH = 128
"""Width of an index key in fp8: what shares one scale."""


@triton.jit
def fp4_halves(values, scales, at, scale_at, real, WIDTH: tl.constexpr, ROWS: tl.constexpr, GROUPS: tl.constexpr):
    """Even and odd elements of ROWS rows of MXFP4, in bf16 ``[ROWS, 16 GROUPS]``; 0 behind the width and where not real."""
    group = tl.arange(0, GROUPS)
    byte = tl.arange(0, 16)
    inside = real[:, None] & (group[None, :] < WIDTH // 32)
    code = tl.load(
        values + at[:, None, None] + group[None, :, None] * 16 + byte[None, None, :], mask=inside[:, :, None], other=0
    ).to(tl.int32)  # fmt: skip
    factor = widen_e8m0(tl.load(scales + scale_at[:, None] + group[None, :], mask=inside, other=127))[:, :, None]
    even = tl.reshape(widen_e2m1(code & 15).to(tl.float32) * factor, (ROWS, 16 * GROUPS)).to(tl.bfloat16)
    odd = tl.reshape(widen_e2m1(code >> 4).to(tl.float32) * factor, (ROWS, 16 * GROUPS)).to(tl.bfloat16)
    return even, odd


@triton.jit
def dsa_indexer_kernel(
    q, q_scales, head_weights, keys, key_scales, table, lengths, out, columns, longest, scale,
    T: tl.constexpr, N: tl.constexpr, D: tl.constexpr, EVERY: tl.constexpr, PAGE: tl.constexpr, PARTS: tl.constexpr,
    ROWS: tl.constexpr, BN: tl.constexpr, GROUPS: tl.constexpr, FP4: tl.constexpr,
):  # fmt: skip
    """One part of the keys of one token; out is [B, T, longest]."""
    query = tl.program_id(0)
    sequence = query // T
    head = tl.arange(0, ROWS)
    real = head < N
    row = query * N + head
    gain = tl.load(head_weights + row, mask=real, other=0.0).to(tl.float32) * scale
    count = (tl.load(lengths + sequence) - T + query % T + 1) // EVERY
    first, last = span(tl.program_id(1), 0, count, BN, PARTS)
    if FP4:
        q_even, q_odd = fp4_halves(q, q_scales, row * (D // 2), row * (D // 32), real, D, ROWS, GROUPS)
    else:
        element = tl.arange(0, D)
        heads = tl.load(q + row[:, None] * D + element[None, :], mask=real[:, None], other=0.0)
        widths = tl.load(q_scales + row, mask=real, other=0.0)
    for start in range(first, last, BN):
        entry = start + tl.arange(0, BN)
        inside = entry < last
        page = tl.load(table + sequence * columns + entry // PAGE, mask=inside, other=0).to(tl.int64)
        if FP4:
            size: tl.constexpr = D // 2 + D // 32
            at = page * (PAGE * size) + entry % PAGE * (D // 2)
            scale_at = page * (PAGE * size) + PAGE * (D // 2) + entry % PAGE * (D // 32)
            even, odd = fp4_halves(keys, key_scales, at, scale_at, inside, D, BN, GROUPS)
            score = tl.dot(q_odd, tl.trans(odd), tl.dot(q_even, tl.trans(even)))
        else:
            at = page * (PAGE * (D + 4)) + entry % PAGE * D
            narrow = tl.load(keys + at[:, None] + element[None, :], mask=inside[:, None], other=0.0)
            scale_at = page * (PAGE * (D + 4) // 4) + PAGE * D // 4 + entry % PAGE
            factor = tl.load(key_scales + scale_at, mask=inside, other=0.0)
            score = tl.dot(heads, tl.trans(narrow)) * widths[:, None] * factor[None, :]
        total = tl.sum(tl.maximum(score, 0.0) * gain[:, None], 0)
        tl.store(out + query.to(tl.int64) * longest + entry, total, mask=inside)


def choose(tokens: int, keys: int, index: str, device: Device) -> Parts:
    """Keys per block and parts by tokens, the longest sequence of keys, storage and device."""
    BN = 64 if index == "mxfp4" or device.shared < 100_000 else 128
    return Parts(BN, parts_for(tokens, keys, BN, device, 2), 4, 3 if device.shared >= 100_000 else 1)


def dsa_indexer(
    q: torch.Tensor, q_scales: torch.Tensor, head_weights: torch.Tensor, cache: torch.Tensor, table: torch.Tensor,
    lengths: torch.Tensor, longest: int, page: int, scale: float, every: int = 1, parts: Parts | None = None,
) -> torch.Tensor:  # fmt: skip
    """Scores fp32 ``[B, T, entries]`` of every entry a token sees, as many as the longest sequence has; the rest is not set.

    Args:
        q, q_scales: of ``index_keys.quantise``, ``[B, T, heads, ...]``. head_weights: ``[B, T, heads]``.
        cache: uint8 ``[pages, bytes]`` of ``index_keys.to_pages``, ``page`` keys each. table: int32 ``[B, pages]``.
        lengths: int32 ``[B]``, cached and new tokens. longest: the largest of them. every: tokens per entry.

    Raises InputError for arguments that do not fit each other.
    """
    check("head_weights", head_weights, (None, None, None), FLOATING)
    B, T, N = head_weights.shape
    check("q", q, (B, T, N, None), (torch.float8_e4m3fn, torch.uint8), head_weights)
    within("page", page, 1)
    within("every", every, 1)
    fp4 = q.dtype == torch.uint8
    dim = q.shape[3] * (2 if fp4 else 1)
    if dim % 32 or not (fp4 or dim == FP8_WIDTH):
        raise InputError(f"q: index width {dim}; one of {FP8_WIDTH} in fp8, a multiple of 32 in MXFP4")
    wide, factors = INDEX["mxfp4" if fp4 else "fp8"].sizes(dim)
    check("q_scales", q_scales, (B, T, N, dim // 32 if fp4 else 1), (torch.uint8,) if fp4 else SINGLE, q)
    check("cache", cache, (None, page * (wide + factors)), (torch.uint8,), q)
    check_pages(table, lengths, longest, page, len(cache), q, every=every)
    entries = longest // every
    out = buffers.empty(B, T, entries, dtype=torch.float32, device=q.device)
    if not out.numel():
        return out
    cut = parts or choose(B * T, entries, "mxfp4" if fp4 else "fp8", of(q))
    check_tile("parts", cut.warps, padded(N) * cut.BN, BN=cut.BN)
    keys, scales = (cache, cache) if fp4 else (cache.view(torch.float8_e4m3fn), cache.view(torch.float32))
    dsa_indexer_kernel[(B * T, cut.splits)](
        q, q_scales, head_weights, keys, scales, table, lengths, out, table.shape[1], entries, scale,
        T=T, N=N, D=dim, EVERY=every, PAGE=page, PARTS=cut.splits, ROWS=padded(N), BN=cut.BN,
        GROUPS=groups_of(dim), FP4=fp4, num_warps=cut.warps, num_stages=cut.stages,
    )  # fmt: skip
    return out


def groups_of(dim: int) -> int:
    """Groups of 32 elements of MXFP4 that a program holds: a power of two."""
    return power_of_two(dim // 32)


@dataclass(frozen=True)
class Index(Case):
    """``cached`` tokens of each sequence behind T new ones, an entry for every ``every``; N heads of width ``dim``."""

    cached: tuple[int, ...]
    N: int
    dim: int
    index: str
    T: int = 1
    every: int = 1
    page: int = 64
    parts: Parts | None = None

    @property
    def precision(self) -> str:
        return self.index

    @property
    def scale(self) -> float:
        """As DeepSeek scales: one over the roots of width and heads."""
        return float((self.dim * self.N) ** -0.5)

    @property
    def cut(self) -> Parts:
        """The parts of its launch."""
        entries = (max(self.cached) + self.T) // self.every
        return self.parts or choose(len(self.cached) * self.T, entries, self.index, current())

    def counts(self, S: int) -> list[int]:
        """Entries that each new token of a sequence sees."""
        return [(S + token + 1) // self.every for token in range(self.T)]


def inputs(case: Index, device: str) -> Tensors:
    """Quantised queries, head weights, quantised keys in random pages, their table and lengths."""
    source, B, lengths = Source(case.name, device), len(case.cached), [S + case.T for S in case.cached]
    widest = max(1, ceil_div(max(lengths) // case.every, case.page))
    pages = B * widest + 3
    q, q_scales = quantise(source.normal(B, case.T, case.N, case.dim, dtype="fp32"), case.index)
    keys = to_pages(*quantise(source.normal(pages, case.page, case.dim, dtype="fp32"), case.index))
    return {
        "q": q, "q_scales": q_scales, "head_weights": source.normal(B, case.T, case.N, dtype=case.dtype), "cache": keys,
        "table": source.permutation(pages)[: B * widest].view(B, widest), "lengths": source.integers(lengths),
        "longest": max(lengths),
    }  # fmt: skip


def reference(case: Index, tensors: Tensors) -> Tensors:
    """The formula over what the quantised operands stand for, in float64; visible entries of all tokens behind each other."""
    q = dequantise(tensors["q"], tensors["q_scales"], case.index)
    keys = dequantise(*from_pages(tensors["cache"], case.page, case.dim, case.index), case.index)
    scores = []
    for index, S in enumerate(case.cached):
        mine = keys[tensors["table"][index].long()].flatten(0, 1)
        for token, count in enumerate(case.counts(S)):
            weights = tensors["head_weights"][index, token].double()
            scores.append(case.scale * weights @ torch.relu(q[index, token] @ mine[:count].T))
    return {"scores": torch.cat(scores)}


def timed(case: Index, tensors: Tensors) -> torch.Tensor:
    """The Triton kernel."""
    return dsa_indexer(**tensors, page=case.page, scale=case.scale, every=case.every, parts=case.parts)


def launch(case: Index, tensors: Tensors) -> Tensors:
    """The Triton kernel; of its scores those that a token sees."""
    scores = timed(case, tensors)
    rows = [(index, token, count) for index, S in enumerate(case.cached) for token, count in enumerate(case.counts(S))]
    return {"scores": torch.cat([scores[index, token, :count] for index, token, count in rows])}


def expected(case: Index, tensors: Tensors) -> Expected:
    """Keys once per token that sees them, with a table entry each; queries, scales and weights once per part."""
    cut, kind, fmt, B = case.cut, INDEX[case.index], TYPES[case.dtype].format, len(case.cached)
    scores = IndexScores(case.N, case.dim, Reach(case.every), kind.format, fmt)
    cost = scores.cost(Ragged(tuple(Work(1, case.T, S) for S in case.cached)))
    counts = [count for S in case.cached for count in case.counts(S)]
    pairs, programs = sum(counts), B * case.T * cut.splits
    values, scales = (B * case.T * case.N * size for size in kind.sizes(case.dim))
    weights = fmt.bytes(B * case.T * case.N)
    walked = sum(block_counts(0, count, cut) for count in counts)
    pages = sum(ceil_div((S + case.T) // case.every, case.page) for S in case.cached)
    moved = {
        "q": Moved("activations", read=values, requested=values * cut.splits),
        "q_scales": Moved("activations", read=scales, requested=scales * cut.splits),
        "head_weights": Moved("activations", read=weights, requested=weights * cut.splits),
        "keys": Moved("index", read=cost.read["index"], requested=sum(kind.sizes(case.dim)) * pairs),
        "table": Moved("", read=4 * pages, requested=4 * pairs),
        "lengths": Moved("", read=4 * B, requested=4 * programs),
        "out": Moved("activations", written=cost.write["activations"]),
    }
    width = 32 * groups_of(case.dim)
    executed = 2 * padded(case.N) * cut.BN * width * walked

    def needed() -> int:
        seen = (end // case.every for S in case.cached for end in range(S + 1, S + case.T + 1))
        return 2 * case.N * case.dim * sum(seen)

    return Expected(cost, {"dsa_indexer_kernel": Launch(programs, moved)}, kind.dot, executed, needed)


def library(case: Index, tensors: Tensors) -> Any:
    """torch over contiguous bf16 keys: matmul, ReLU, weighted sum, each a kernel."""
    if case.T > 1 or any(case.cached[0] != S for S in case.cached):
        return None
    count = case.counts(case.cached[0])[0]
    q = dequantise(tensors["q"], tensors["q_scales"], case.index).to(torch.bfloat16)[:, 0]
    values, scales = from_pages(tensors["cache"], case.page, case.dim, case.index)
    rows = tensors["table"].long()
    keys = torch.stack([dequantise(values[row], scales[row], case.index).flatten(0, 1)[:count].bfloat16() for row in rows])
    weights = tensors["head_weights"][:, 0, :, None] * case.scale
    return lambda: (torch.relu(torch.bmm(q, keys.transpose(1, 2))) * weights).sum(1)


CASES = (
    Index("chosen", "bf16", (150, 3), 5, 128, "fp8", page=16),
    Index("ragged", "bf16", (0, 33, 70), 21, 128, "fp8", T=3, page=8, parts=Parts(32, 2)),
    Index("entries", "bf16", (61, 2), 3, 128, "fp8", every=4, page=4, parts=Parts(16, 2)),
    Index("fp4", "bf16", (90, 17), 16, 128, "mxfp4", page=16, parts=Parts(32, 2)),
    Index("fp4-ragged", "bf16", (45, 0), 7, 96, "mxfp4", T=2, every=3, page=8, parts=Parts(16, 1)),
    Index("fp4-half", "fp16", (37,), 4, 32, "mxfp4", every=2, parts=Parts(16, 3)),
)
TOLERANCE = {
    "fp8": Tolerance(1e-3, "products of fp8 are exact, but the matrix unit of sm_90 adds them with about 14 bits"),
    "mxfp4": Tolerance(1e-5, "operands are exact in bf16; fp32 sums in another order"),
}
LONG = (32767,) * 16
BUILDS = (
    Build(Index("v3.2", "bf16", LONG, 64, 128, "fp8"), {"dsa_indexer_kernel": "QGMMA"}, (), ("sm_90", "sm_100")),
    Build(Index("v4", "bf16", (131071,) * 16, 64, 128, "mxfp4", every=4), {"dsa_indexer_kernel": "HGMMA"}, (), EVERYWHERE),
)
MEASURED = (
    Index("v3.2-32k", "bf16", LONG, 64, 128, "fp8"),
    Index("v4-128k", "bf16", (131071,) * 16, 64, 128, "mxfp4", every=4),
)
SPEC = Spec(
    "dsa_indexer", "IndexScores", CASES, inputs, reference, launch, expected, TOLERANCE, BUILDS, MEASURED, library, timed
)  # fmt: skip
