"""FlashDecoding: attention of a few new tokens over a long cache in pages, its keys split over programs.

One program holds all query rows that share a key-value head (grouped heads times new tokens, so that keys are read once
for all of them) and walks over one part of the sequence's pages; ``parts`` says how parts are merged. The new tokens' keys
lie in the cache already; several new tokens (verification of drafts) see each other causally, or as a tree says. An 8-bit
cache is widened to the queries' type, which is exact; its scales are applied to scores and sums.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl

from roofline.components.attention import Attention
from roofline.errors import InputError
from roofline.kernels import buffers
from roofline.kernels.arguments import FLOATING, NARROW, check, check_heads, check_pages, check_tile, within
from roofline.kernels.device import Device, current, of
from roofline.kernels.flash_attention import soft_capped
from roofline.kernels.masks import attention, visible
from roofline.kernels.parts import (
    Parts,
    begin,
    block_counts,
    launches,
    leave,
    merge,
    merge_parts,
    padded,
    partials,
    parts_for,
    span,
    tolerance,
)
from roofline.kernels.spec import EVERYWHERE, Build, Case, Expected, Moved, Spec, Tensors
from roofline.kernels.types import NAMES, TYPES, Source
from roofline.numeric import ceil_div
from roofline.work import Ragged, Work


@triton.jit
def flash_decoding_kernel(
    q, k_cache, v_cache, table, lengths, sinks, tree, out, weights, columns, scale, v_scale, size,
    T: tl.constexpr, N: tl.constexpr, K: tl.constexpr, H: tl.constexpr, V: tl.constexpr, HP: tl.constexpr,
    VP: tl.constexpr, ROWS: tl.constexpr, BN: tl.constexpr, PAGE: tl.constexpr, SPLITS: tl.constexpr,
    WINDOW: tl.constexpr, CAP: tl.constexpr,
):  # fmt: skip
    """One part of the keys of one sequence and key-value head; out is [B, T, N, SPLITS, V]."""
    sequence = tl.program_id(0)
    head = tl.program_id(1)
    part = tl.program_id(2)
    group: tl.constexpr = N // K
    row = tl.arange(0, ROWS)
    token = row // group
    real = row < T * group
    at = (sequence * T + token) * N + head * group + row % group
    width = tl.arange(0, HP)
    value = tl.arange(0, VP)
    queries = tl.load(q + at[:, None] * H + width[None, :], mask=real[:, None] & (width[None, :] < H), other=0.0)
    length = tl.load(lengths + sequence)
    cached = length - T
    low = 0
    if WINDOW:
        low = tl.maximum(0, cached - size + 1)
    first, last = span(part, low, length, BN, SPLITS)
    peak, total, sums = begin(sinks, head * group + row % group, real, part, ROWS, VP)
    for start in range(first, last, BN):
        key = start + tl.arange(0, BN)
        inside = key < last
        page = tl.load(table + sequence * columns + key // PAGE, mask=inside, other=0).to(tl.int64)
        slot = (page * PAGE + key % PAGE) * K + head
        keys = tl.load(
            k_cache + slot[None, :] * H + width[:, None], mask=inside[None, :] & (width[:, None] < H), other=0.0
        )  # fmt: skip
        score = tl.dot(queries, keys.to(queries.dtype), input_precision="ieee") * scale
        if CAP > 0:
            score = soft_capped(score, CAP)
        score = score * 1.4426950408889634
        if tree is None:
            seen = key[None, :] <= cached + token[:, None]
            if WINDOW:
                seen = seen & (key[None, :] > cached + token[:, None] - size)
        else:
            branch = tree + (sequence * T + token[:, None]) * T + (key - cached)[None, :]
            new = (key >= cached) & inside
            shown = new[None, :] & (real & (cached + token >= 0))[:, None]
            seen = (key < cached)[None, :] | (tl.load(branch, mask=shown, other=0) != 0)
        score = tl.where(seen & inside[None, :], score, float("-inf"))
        weight, peak, total, fade = merge(score, peak, total)
        values = tl.load(
            v_cache + slot[:, None] * V + value[None, :], mask=inside[:, None] & (value[None, :] < V), other=0.0
        )  # fmt: skip
        widened = values.to(queries.dtype)
        sums = tl.dot(weight.to(queries.dtype), widened, sums * fade[:, None], input_precision="ieee")
    leave(out, weights, peak, total, sums * v_scale, at, part, real, V, VP, SPLITS)


def choose(sequences: int, K: int, rows: int, H: int, keys: int, dtype: str, device: Device) -> Parts:
    """Blocks and parts by sequences, heads, rows, width, the longest sequence and the device."""
    if dtype == "fp32":
        return Parts(32, parts_for(sequences * K, keys, 32, device, 2), 4, 1)
    BN = 64 if padded(H) <= 128 and device.shared >= 100_000 else 32
    stages = 3 if device.shared >= 100_000 else 1
    return Parts(BN, parts_for(sequences * K, keys, BN, device, 2), 8 if rows > 64 else 4, stages)


def flash_decoding(
    q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, table: torch.Tensor, lengths: torch.Tensor, longest: int,
    window: int = 0, scale: float | None = None, soft_cap: float = 0.0, sinks: torch.Tensor | None = None,
    tree: torch.Tensor | None = None, k_scale: float = 1.0, v_scale: float = 1.0, parts: Parts | None = None,
) -> torch.Tensor:  # fmt: skip
    """Attention of ``q [B, T, N, H]`` over the cache; returns ``[B, T, N, V]``.

    Args:
        k_cache, v_cache: ``[pages, PAGE, K, H]`` and ``[pages, PAGE, K, V]``, of the queries' type, fp8 or int8.
        table: int32 ``[B, pages]``. lengths: int32 ``[B]``, cached and new tokens. longest: the largest of them.
        window: the last keys that a query sees, 0 for all. soft_cap, sinks: as in ``flash_attention``.
        tree: uint8 ``[B, T, T]``, which new tokens each new token sees; causal where it is None.
        k_scale, v_scale: what the cache's elements are multiplied by.

    A query that sees no key, as in an idle row of length 0, gets zeros. Raises InputError for arguments that do not fit.
    """
    check("q", q, (None, None, None, None), FLOATING)
    check("v_cache", v_cache, (None, None, None, None), (q.dtype, *NARROW), q)
    (B, T, N, H), (pages, PAGE, K, V) = q.shape, v_cache.shape
    check("k_cache", k_cache, (pages, PAGE, K, H), (v_cache.dtype,), q)
    check("sinks", sinks, (N,), FLOATING, q)
    check("tree", tree, (B, T, T), (torch.uint8,), q)
    check_pages(table, lengths, longest, PAGE, pages, q)
    check_heads(N, K, max(H, V))
    within("window", window, 0)
    within("soft_cap", soft_cap, 0)
    if tree is not None and window:
        raise InputError(f"tree: given with a window of {window}; a tree sees all that is cached")
    out = buffers.empty(B, T, N, V, dtype=q.dtype, device=q.device)
    if not out.numel():
        return out
    rows = T * (N // K)
    cut = parts or choose(B, K, rows, H, longest, NAMES[q.dtype], of(q))
    if parts:
        check_tile("parts", cut.warps, padded(rows) * (padded(V) + cut.BN), BN=cut.BN)
    partial, weights = partials(out, cut.splits)
    flash_decoding_kernel[(B, K, cut.splits)](
        q, k_cache, v_cache, table, lengths, sinks, tree, partial, weights, table.shape[1],
        (H**-0.5 if scale is None else scale) * k_scale, v_scale, window, T=T, N=N, K=K, H=H, V=V, HP=padded(H), VP=padded(V),
        ROWS=padded(rows), BN=cut.BN, PAGE=PAGE, SPLITS=cut.splits, WINDOW=window > 0, CAP=soft_cap,
        num_warps=cut.warps, num_stages=cut.stages,
    )  # fmt: skip
    return merge_parts(partial, weights, out)


@dataclass(frozen=True)
class Decode(Case):
    """``cached`` tokens of each sequence behind T new ones; heads, widths, pages; what the queries see."""

    cached: tuple[int, ...]
    N: int
    K: int
    H: int
    V: int = 0
    T: int = 1
    page: int = 16
    kv: str = ""
    window: int = 0
    soft_cap: float = 0.0
    sinks: bool = False
    tree: bool = False
    parts: Parts | None = None

    @property
    def values(self) -> int:
        """Width of a value."""
        return self.V or self.H

    @property
    def stored(self) -> str:
        """Type of the cache."""
        return self.kv or self.dtype

    @property
    def cut(self) -> Parts:
        """The parts of its launch."""
        rows, longest = self.T * (self.N // self.K), max(self.cached) + self.T
        return self.parts or choose(len(self.cached), self.K, rows, self.H, longest, self.dtype, current())


SCALES = {"fp8": (0.5, 0.25), "int8": (0.02, 0.01)}
TREE = ((1, 0, 0, 0, 0), (1, 1, 0, 0, 0), (1, 0, 1, 0, 0), (1, 1, 0, 1, 0), (1, 0, 1, 0, 1))
"""Two branches below one token: which new tokens each of five sees."""


def paged(case: Any, source: Source, shape: tuple[int, ...], lengths: list[int], dtype: str) -> tuple[Any, Any]:
    """A cache of random pages of ``shape`` and a table that gives each sequence its own."""
    widest = ceil_div(max(lengths), case.page)
    pages = len(lengths) * widest + 3
    cache = source.normal(pages, case.page, *shape, dtype=dtype)
    return cache, source.permutation(pages)[: len(lengths) * widest].view(len(lengths), widest)


def inputs(case: Decode, device: str) -> Tensors:
    """Queries, a cache in random pages, its table and lengths."""
    source, lengths = Source(case.name, device), [S + case.T for S in case.cached]
    k_cache, table = paged(case, source, (case.K, case.H), lengths, case.stored)
    v_cache, _ = paged(case, source, (case.K, case.values), lengths, case.stored)
    k_scale, v_scale = SCALES.get(case.stored, (1.0, 1.0))
    tree = torch.tensor(TREE, dtype=torch.uint8, device=device).expand(len(lengths), -1, -1).contiguous() if case.tree else None
    return {
        "q": source.normal(len(lengths), case.T, case.N, case.H, dtype=case.dtype), "k_cache": k_cache, "v_cache": v_cache,
        "table": table, "lengths": source.integers(lengths), "longest": max(lengths),
        "sinks": source.normal(case.N, dtype=case.dtype) if case.sinks else None, "tree": tree,
        "k_scale": k_scale, "v_scale": v_scale,
    }  # fmt: skip


def contiguous(cache: torch.Tensor, row: torch.Tensor, length: int) -> torch.Tensor:
    """The tokens of one sequence out of its pages, in float64."""
    return cache[row.long()].flatten(0, 1)[:length].double()


def reference(case: Decode, tensors: Tensors) -> Tensors:
    """Softmax attention over each sequence's own contiguous keys, in float64."""
    outputs = []
    for index, S in enumerate(case.cached):
        row, length = tensors["table"][index], S + case.T
        k = contiguous(tensors["k_cache"], row, length) * tensors["k_scale"]
        v = contiguous(tensors["v_cache"], row, length) * tensors["v_scale"]
        seen = visible("window" if case.window else "causal", case.window, case.T, S).clone()
        if case.tree:
            seen[:, S:] = tensors["tree"][index].bool()
        outputs.append(attention(tensors["q"][index], k, v, seen, case.H**-0.5, tensors["sinks"], case.soft_cap))
    return {"out": torch.stack(outputs)}


def launch(case: Decode, tensors: Tensors) -> Tensors:
    """The Triton kernels."""
    options: dict[str, Any] = {"window": case.window, "soft_cap": case.soft_cap, "parts": case.parts}
    return {"out": flash_decoding(**tensors, **options)}


def expected(case: Decode, tensors: Tensors) -> Expected:
    """Keys and values once for all rows that share them; queries once per part; a table entry per key and head.

    The pairs that a tree hides count as needed, as in a chain: so the component counts them.
    """
    cut, fmt, kv, B = case.cut, TYPES[case.dtype].format, TYPES[case.stored].format, len(case.cached)
    mask, size = ("window", case.window) if case.window else ("causal", None)
    core = Attention(case.N, case.K, case.H, case.values, mask, size, kv, fmt, case.sinks)
    cost = core.cost(Ragged(tuple(Work(1, case.T, S) for S in case.cached)))
    lows = [max(0, S - case.window + 1) if case.window else 0 for S in case.cached]
    spans = [(low, S + case.T) for low, S in zip(lows, case.cached, strict=True)]
    keys = sum(length - low for low, length in spans)
    entries = sum((length - 1) // case.page - low // case.page + 1 for low, length in spans)
    programs, k = B * case.K * cut.splits, cost.read["state"] * case.H // (case.H + case.values)
    moved = {
        "q": Moved("activations", read=cost.read["activations"], requested=cost.read["activations"] * cut.splits),
        "k_cache": Moved("state", read=k),
        "v_cache": Moved("state", read=cost.read["state"] - k),
        "table": Moved("", read=4 * entries, requested=4 * keys * case.K),
        "lengths": Moved("", read=4 * B, requested=4 * programs),
    }
    group = case.N // case.K
    if case.sinks:
        sinks = fmt.bytes(case.N)
        moved["sinks"] = Moved("", read=sinks, requested=sinks * case.T * B)
    if case.tree:
        moved["tree"] = Moved("", read=B * case.T**2, requested=B * case.K * case.T**2 * group)
    blocks = case.K * sum(block_counts(low, length, cut) for low, length in spans)
    widths = padded(case.H) + padded(case.values)
    executed = 2 * padded(case.T * group) * cut.BN * widths * blocks

    def needed() -> int:
        pairs = sum(int(visible(mask, case.window, case.T, S).sum()) for S in case.cached)
        return 2 * case.N * (case.H + case.values) * pairs

    rows, out = B * case.T * case.N, cost.write["activations"]
    kernels = launches("flash_decoding_kernel", programs, moved, rows, case.values, cut.splits, out)
    return Expected(cost, kernels, TYPES[case.dtype].triton, executed, needed)


def library(case: Decode, tensors: Tensors) -> Any:
    """torch's scaled_dot_product_attention over contiguous keys of the queries' type: what it costs without pages and 8 bits."""
    S, T, kind = case.cached[0], case.T, tensors["q"].dtype
    if any(one != S for one in case.cached) or case.window or case.sinks or case.soft_cap or case.tree:
        return None

    def rows(name: str) -> torch.Tensor:
        pages = (tensors[f"{name}_cache"][row] for row in tensors["table"].long())
        wide = [held.flatten(0, 1)[: S + T].to(kind) * tensors[f"{name}_scale"] for held in pages]
        return torch.stack(wide).transpose(1, 2).contiguous()

    k, v, q = rows("k"), rows("v"), tensors["q"].transpose(1, 2).contiguous()
    seen = visible("causal", 0, T, S).to(q.device) if T > 1 else None
    sdpa = torch.nn.functional.scaled_dot_product_attention
    return lambda: sdpa(q, k, v, attn_mask=seen, enable_gqa=case.N != case.K)


ONE, FOUR = Parts(16, 1), Parts(16, 4)
CASES = (
    Decode("chosen", "bf16", (300, 11), 4, 1, 32),
    Decode("ragged", "bf16", (0, 76, 129), 8, 2, 64, parts=FOUR),
    Decode("one-part", "bf16", (33, 5), 4, 1, 32, parts=ONE),
    Decode("no-groups", "fp16", (40, 63), 3, 3, 48, page=8, parts=Parts(32, 2)),
    Decode("wide-group", "bf16", (50,), 8, 1, 32, V=64, parts=Parts(16, 3)),
    Decode("verify", "bf16", (21, 64), 4, 2, 32, T=4, parts=Parts(16, 2)),
    Decode("tree", "bf16", (30, 0), 4, 2, 32, T=5, tree=True, parts=Parts(16, 2)),
    Decode("window", "bf16", (90, 9), 4, 1, 32, window=40, parts=Parts(16, 2)),
    Decode("window-verify", "fp16", (55, 3), 2, 1, 32, T=3, window=17, page=4, parts=Parts(16, 3)),
    Decode("sinks", "bf16", (37, 70), 8, 1, 32, sinks=True, parts=Parts(16, 3)),
    Decode("sinks-window", "bf16", (61,), 4, 4, 16, sinks=True, window=20, T=2, parts=ONE),
    Decode("soft-cap", "fp32", (44,), 2, 1, 80, soft_cap=3.0, parts=Parts(16, 2)),
    Decode("fp8-cache", "bf16", (45, 18), 4, 2, 64, kv="fp8", parts=Parts(16, 2)),
    Decode("int8-cache", "fp16", (29, 41), 4, 1, 32, kv="int8", page=8, parts=Parts(16, 2)),
    Decode("single", "fp32", (65, 1, 30), 4, 2, 32, parts=FOUR),
)
BUILDS = (
    Build(Decode("llama-70b", "bf16", (32767,) * 16, 64, 8, 128), {"flash_decoding_kernel": "HMMA"}, (), EVERYWHERE),
    Build(Decode("llama-70b-fp8", "bf16", (32767,) * 16, 64, 8, 128, kv="fp8"), {"flash_decoding_kernel": "HMMA"}),
    Build(Decode("int8", "bf16", (32767,) * 16, 32, 8, 128, kv="int8"), {"flash_decoding_kernel": "HMMA"}),
    Build(Decode("gpt-oss", "bf16", (32767,) * 16, 64, 8, 64, window=128, sinks=True), {"flash_decoding_kernel": "HMMA"}),
    Build(Decode("verify", "bf16", (32764,) * 4, 64, 8, 128, T=8), {"flash_decoding_kernel": "HGMMA"}),
    Build(Decode("tree", "bf16", (32764,) * 4, 32, 8, 128, T=5, tree=True), {"flash_decoding_kernel": "HMMA"}),
    Build(Decode("gemma", "bf16", (8191,) * 4, 16, 8, 256, soft_cap=50.0), {"flash_decoding_kernel": "HMMA"}),
)
MEASURED = (
    Decode("llama-70b-32k", "bf16", (32767,) * 16, 64, 8, 128),
    Decode("llama-8b-32k-one", "bf16", (32767,), 32, 8, 128),
    Decode("heads-32-32k", "bf16", (32767,) * 4, 32, 32, 128),
    Decode("llama-70b-32k-fp8", "bf16", (32767,) * 16, 64, 8, 128, kv="fp8"),
    Decode("verify-32k", "bf16", (32764,) * 16, 64, 8, 128, T=4),
)
SPEC = Spec(
    "flash_decoding", "Attention", CASES, inputs, reference, launch, expected, tolerance(), BUILDS, MEASURED, library
)  # fmt: skip
