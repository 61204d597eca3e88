"""FlashAttention: attention of new tokens over contiguous keys and values, scores never leaving the chip.

One program holds a tile of queries of one head and walks over the keys that any of them sees, with a running maximum and
sum. Batches are ragged: rows of all sequences lie behind each other. A sequence with more keys than queries has a cached
prefix. Masks: "causal", "window" (the last W), "chunk" (the own chunk), "full", "block" (the own block of C and all before
it, both directions: a denoised block of a diffusion model). Grouped queries read their shared keys once per head.

The width of a query is cut in two powers of two (192 = 128 + 64, as the expanded form of latent attention has it); the
width of a value may differ.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl

from roofline.components.attention import Attention
from roofline.cost import Cost
from roofline.errors import InputError
from roofline.kernels import buffers
from roofline.kernels.arguments import FLOATING, check, check_heads, check_starts, check_tile, within
from roofline.kernels.device import Device, current, of
from roofline.kernels.masks import MASKS, attention, visible
from roofline.kernels.parts import tolerance
from roofline.kernels.spec import EVERYWHERE, Build, Case, Expected, Launch, Moved, Spec, Tensors
from roofline.kernels.tiling import power_of_two
from roofline.kernels.types import NAMES, TYPES, Source
from roofline.numeric import ceil_div
from roofline.work import Ragged, Work


@triton.jit
def soft_capped(score, CAP: tl.constexpr):
    """``CAP tanh(score / CAP)``; exp2 saturates where tanh does."""
    grown = tl.exp2(score * (2.0 * 1.4426950408889634 / CAP))
    return CAP * (1.0 - 2.0 / (grown + 1.0))


@triton.jit
def attend(
    q1, q2, k, v, k_row, v_row, positions, low, high, peak, total, sums, scale, size,
    H: tl.constexpr, V: tl.constexpr, H1: tl.constexpr, H2: tl.constexpr, VP: tl.constexpr, BN: tl.constexpr,
    MASK: tl.constexpr, EDGE: tl.constexpr, CAP: tl.constexpr,
):  # fmt: skip
    """Adds keys low ... high - 1 to a running softmax; EDGE: some of them are hidden from some queries or do not exist."""
    first = tl.arange(0, H1)
    value = tl.arange(0, VP)
    for start in range(low, high, BN):
        key = start + tl.arange(0, BN)
        k_at = k + key[None, :].to(tl.int64) * k_row
        if EDGE:
            k1 = tl.load(k_at + first[:, None], mask=(key[None, :] < high) & (first[:, None] < H), other=0.0)
        else:
            k1 = tl.load(k_at + first[:, None], mask=first[:, None] < H, other=0.0)
        score = tl.dot(q1, k1, input_precision="ieee")
        if H2 > 0:
            second = H1 + tl.arange(0, H2)
            k2 = tl.load(k_at + second[:, None], mask=(key[None, :] < high) & (second[:, None] < H), other=0.0)
            score = tl.dot(q2, k2, score, input_precision="ieee")
        score = score * scale
        if CAP > 0:
            score = soft_capped(score, CAP)
        score = score * 1.4426950408889634
        if EDGE:
            seen = key[None, :] < high
            if MASK == "causal":
                seen = seen & (key[None, :] <= positions[:, None])
            if MASK == "window":
                seen = seen & (key[None, :] <= positions[:, None]) & (key[None, :] > positions[:, None] - size)
            if MASK == "chunk":
                seen = seen & (key[None, :] <= positions[:, None]) & (key[None, :] >= positions[:, None] // size * size)
            if MASK == "block":
                seen = seen & (positions[:, None] >= 0) & (key[None, :] < (positions[:, None] // size + 1) * size)
            score = tl.where(seen, score, float("-inf"))
        highest = tl.maximum(peak, tl.max(score, 1))
        base = tl.where(highest == float("-inf"), 0.0, highest) if EDGE else highest
        weight = tl.exp2(score - base[:, None])
        fade = tl.exp2(peak - base)
        total = total * fade + tl.sum(weight, 1)
        v_at = v + key[:, None].to(tl.int64) * v_row + value[None, :]
        if EDGE:
            values = tl.load(v_at, mask=(key[:, None] < high) & (value[None, :] < V), other=0.0)
        else:
            values = tl.load(v_at, mask=value[None, :] < V, other=0.0)
        sums = tl.dot(weight.to(values.dtype), values, sums * fade[:, None], input_precision="ieee")
        peak = highest
    return peak, total, sums


@triton.jit
def flash_attention_kernel(
    q, k, v, sinks, out, q_starts, k_starts, scale, size, Q_ROW: tl.constexpr, K_ROW: tl.constexpr, V_ROW: tl.constexpr,
    N: tl.constexpr, K: tl.constexpr, H: tl.constexpr, V: tl.constexpr, H1: tl.constexpr, H2: tl.constexpr, VP: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, MASK: tl.constexpr, CAP: tl.constexpr,
):  # fmt: skip
    """A tile of BM queries of one head of one sequence; the last tiles, which see most keys, start first."""
    tile = tl.num_programs(0) - 1 - tl.program_id(0)
    head = tl.program_id(1)
    sequence = tl.program_id(2)
    q_start = tl.load(q_starts + sequence)
    k_start = tl.load(k_starts + sequence)
    T = tl.load(q_starts + sequence + 1) - q_start
    keys = tl.load(k_starts + sequence + 1) - k_start
    if tile * BM >= T:
        return
    row = tile * BM + tl.arange(0, BM)
    start = keys - T + tile * BM
    last = keys - T + tl.minimum(tile * BM + BM, T) - 1
    positions = keys - T + row
    first = tl.arange(0, H1)
    value = tl.arange(0, VP)
    q_at = q + (q_start + row[:, None]).to(tl.int64) * Q_ROW + head * H
    q1 = tl.load(q_at + first[None, :], mask=(row[:, None] < T) & (first[None, :] < H), other=0.0)
    q2 = q1
    if H2 > 0:
        second = H1 + tl.arange(0, H2)
        q2 = tl.load(q_at + second[None, :], mask=(row[:, None] < T) & (second[None, :] < H), other=0.0)
    low = 0
    high = keys
    open_low = 0
    open_high = keys
    if MASK == "causal" or MASK == "window" or MASK == "chunk":
        high = last + 1
        open_high = start + 1
    if MASK == "block":
        high = tl.minimum((last // size + 1) * size, keys)
        open_high = tl.where(start < 0, 0, tl.minimum((start // size + 1) * size, keys))
    if MASK == "window":
        low = tl.maximum(0, start - size + 1)
        open_low = tl.maximum(0, last - size + 1)
    if MASK == "chunk":
        low = tl.maximum(0, start) // size * size
        open_low = tl.maximum(0, last) // size * size
    open_low = tl.minimum(low + tl.cdiv(open_low - low, BN) * BN, high)
    open_high = tl.maximum(open_low, low + (open_high - low) // BN * BN)
    group: tl.constexpr = N // K
    k_at = k + k_start.to(tl.int64) * K_ROW + head // group * H
    v_at = v + k_start.to(tl.int64) * V_ROW + head // group * V
    peak = tl.full((BM,), float("-inf"), tl.float32)
    total = tl.zeros((BM,), tl.float32)
    sums = tl.zeros((BM, VP), tl.float32)
    if sinks is not None:
        peak = tl.zeros((BM,), tl.float32) + tl.load(sinks + head).to(tl.float32) * 1.4426950408889634
        total = tl.full((BM,), 1.0, tl.float32)
    if MASK == "window" or MASK == "chunk":
        peak, total, sums = attend(
            q1, q2, k_at, v_at, K_ROW, V_ROW, positions, low, open_low, peak, total, sums, scale, size,
            H, V, H1, H2, VP, BN, MASK, True, CAP,
        )  # fmt: skip
    peak, total, sums = attend(
        q1, q2, k_at, v_at, K_ROW, V_ROW, positions, open_low, open_high, peak, total, sums, scale, size,
        H, V, H1, H2, VP, BN, MASK, False, CAP,
    )  # fmt: skip
    peak, total, sums = attend(
        q1, q2, k_at, v_at, K_ROW, V_ROW, positions, open_high, high, peak, total, sums, scale, size,
        H, V, H1, H2, VP, BN, MASK, True, CAP,
    )  # fmt: skip
    result = sums / tl.where(total > 0, total, 1.0)[:, None]
    out_at = out + ((q_start + row[:, None]).to(tl.int64) * N + head) * V + value[None, :]
    tl.store(out_at, result.to(out.dtype.element_ty), mask=(row[:, None] < T) & (value[None, :] < V))


@dataclass(frozen=True)
class Tiles:
    """Queries and keys per tile, warps, stages."""

    BM: int
    BN: int
    warps: int = 4
    stages: int = 2


def halves(width: int) -> tuple[int, int]:
    """A width as two powers of two, the first at least as large; 0 where one holds it. Smaller than 16 is padded to it."""
    first = max(16, 1 << (width.bit_length() - 1))
    rest = width - first
    return first, power_of_two(rest, 16) if rest > 0 else 0


def choose(T: int, H: int, V: int, dtype: str, device: Device) -> Tiles:
    """Tiles by queries, widths, operand type and device."""
    if dtype == "fp32":
        return Tiles(32 if max(H, V) <= 128 else 16, 16, 8 if 64 < max(H, V) <= 128 else 4, 1)
    if device.shared < 100_000:
        return Tiles(64, 32, 4, 1)
    if T <= 64 or device.shared < 200_000:
        return Tiles(64, 64 if H <= 128 else 32, 4, 2)
    if H <= 64:
        return Tiles(128, 128, 8, 2)
    return Tiles(128, 64 if max(H, V) <= 192 else 32, 8, 3 if H <= 128 else 2)


def flash_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, q_starts: torch.Tensor, k_starts: torch.Tensor, longest: int,
    mask: str = "causal", size: int = 0, scale: float | None = None, soft_cap: float = 0.0,
    sinks: torch.Tensor | None = None, tiles: Tiles | None = None,
) -> torch.Tensor:  # fmt: skip
    """Attention of a ragged batch; returns ``[tokens, N, V]``.

    Args:
        q: ``[tokens, N, H]``. k, v: ``[keys, K, H]`` and ``[keys, K, V]``; the queries are the last positions. Rows may lie
            apart, as in slices of what one projection gives for all three.
        q_starts, k_starts: int32 ``[B + 1]``: where each sequence's rows begin, and the end. longest: most queries of one.
        mask, size: one of ``MASKS`` and its window, chunk or block. scale: of the scores, ``H ** -0.5`` by default.
        soft_cap: scores become ``soft_cap tanh(score / soft_cap)``; 0 for none. sinks: a logit per head that joins the softmax.
        tiles: by default those for the shape and the device; others give the same numbers, and may be slower.

    A query that sees no key gets zeros. Raises InputError for arguments that do not fit each other.
    """
    check("q", q, (None, None, None), FLOATING, strides="rows")
    check("v", v, (None, None, None), (q.dtype,), q, "rows")
    (tokens, N, H), (keys, K, V) = q.shape, v.shape
    check("k", k, (keys, K, H), (q.dtype,), q, "rows")
    check("sinks", sinks, (N,), FLOATING, q)
    if check_starts("q_starts", q_starts, tokens, longest, q) != check_starts("k_starts", k_starts, keys, None, q):
        raise InputError(f"k_starts: {len(k_starts)} of them, and {len(q_starts)} of q_starts; both cut the same batch")
    check_heads(N, K, max(H, V))
    if mask not in MASKS:
        raise InputError(f"mask: unknown {mask!r}; known: {', '.join(MASKS)}")
    if mask in ("window", "chunk", "block"):
        within("size", size, 1)
    within("soft_cap", soft_cap, 0)
    out = buffers.empty(tokens, N, V, dtype=q.dtype, device=q.device)
    if tokens:
        cut = tiles or choose(longest, H, V, NAMES[q.dtype], of(q))
        H1, H2 = halves(H)
        if tiles:
            check_tile("tiles", cut.warps, cut.BM * (power_of_two(V, 16) + cut.BN), BM=cut.BM, BN=cut.BN)
        flash_attention_kernel[(ceil_div(longest, cut.BM), N, len(q_starts) - 1)](
            q, k, v, sinks, out, q_starts, k_starts, H**-0.5 if scale is None else scale, size, Q_ROW=q.stride(0),
            K_ROW=k.stride(0), V_ROW=v.stride(0), N=N, K=K, H=H, V=V, H1=H1, H2=H2, VP=power_of_two(V, 16),
            BM=cut.BM, BN=cut.BN, MASK=mask, CAP=soft_cap,
            num_warps=cut.warps, num_stages=cut.stages,
        )  # fmt: skip
    return out


@dataclass(frozen=True)
class Prefill(Case):
    """``batch``: (new tokens, cached tokens) of each sequence; heads, widths, mask and its size; ``gap``: heads between rows."""

    batch: tuple[tuple[int, int], ...]
    N: int
    K: int
    H: int
    V: int = 0
    mask: str = "causal"
    size: int = 0
    sinks: bool = False
    soft_cap: float = 0.0
    gap: int = 0
    tiles: Tiles | None = None

    @property
    def values(self) -> int:
        """Width of a value."""
        return self.V or self.H

    @property
    def cut(self) -> Tiles:
        """The tiles of its launch."""
        return self.tiles or choose(max(T for T, _ in self.batch), self.H, self.values, self.dtype, current())


def starts(lengths: list[int]) -> list[int]:
    """Where each of several rows of lengths begins, and the end."""
    return [sum(lengths[:index]) for index in range(len(lengths) + 1)]


def inputs(case: Prefill, device: str) -> Tensors:
    """Queries of every sequence, keys and values of cached and new tokens."""
    source = Source(case.name, device)
    new, whole = [T for T, _ in case.batch], [T + S for T, S in case.batch]

    def rows(number: int, heads: int, width: int) -> torch.Tensor:
        return source.normal(number, heads + case.gap, width, dtype=case.dtype)[:, :heads]

    return {
        "q": rows(sum(new), case.N, case.H),
        "k": rows(sum(whole), case.K, case.H),
        "v": rows(sum(whole), case.K, case.values),
        "q_starts": source.integers(starts(new)),
        "k_starts": source.integers(starts(whole)),
        "longest": max(new),
        "sinks": source.normal(case.N, dtype=case.dtype) if case.sinks else None,
    }


def reference(case: Prefill, tensors: Tensors) -> Tensors:
    """Softmax attention of each sequence in float64."""
    q_starts, k_starts = tensors["q_starts"].tolist(), tensors["k_starts"].tolist()
    outputs = []
    for index, (T, S) in enumerate(case.batch):
        q = tensors["q"][q_starts[index] : q_starts[index + 1]]
        k, v = (tensors[name][k_starts[index] : k_starts[index + 1]] for name in "kv")
        seen = visible(case.mask, case.size, T, S)
        outputs.append(attention(q, k, v, seen, case.H**-0.5, tensors["sinks"], case.soft_cap))
    return {"out": torch.cat(outputs)}


def launch(case: Prefill, tensors: Tensors) -> Tensors:
    """The Triton kernel."""
    options = {name: getattr(case, name) for name in ("mask", "size", "soft_cap", "tiles")}
    return {"out": flash_attention(**tensors, **options)}


def reach(mask: str, size: int, T: int, S: int, tile: int, BM: int) -> tuple[int, int]:
    """First key that a tile of queries sees, and the first behind them that none does."""
    first, last = S + tile * BM, S + min((tile + 1) * BM, T) - 1
    low = {"window": max(0, first - size + 1), "chunk": first // size * size if size else 0}.get(mask, 0)
    high = {"full": S + T, "block": min((last // size + 1) * size, S + T) if size else 0}.get(mask, last + 1)
    return low, high


def steps(mask: str, size: int, T: int, S: int, tile: int, BM: int, BN: int) -> int:
    """Blocks of keys that a tile of queries walks over: those of its edges and those that all of it sees."""
    low, high = reach(mask, size, T, S, tile, BM)
    first, last = S + tile * BM, S + min((tile + 1) * BM, T) - 1
    lowest = {"window": max(0, last - size + 1), "chunk": last // size * size if size else 0}.get(mask, 0)
    shared = {"full": S + T, "block": min((first // size + 1) * size, S + T) if size else 0}.get(mask, first + 1)
    open_low = min(low + ceil_div(lowest - low, BN) * BN, high)
    open_high = max(open_low, low + (shared - low) // BN * BN)
    return int(ceil_div(open_low - low, BN) + (open_high - open_low) // BN + ceil_div(high - open_high, BN))


def useful(case: Prefill) -> Cost:
    """The component's Cost. A denoised block attends in full to itself and all before it: one group of work per block."""
    fmt = TYPES[case.dtype].format
    mask = "full" if case.mask == "block" else case.mask
    core = Attention(case.N, case.K, case.H, case.values, mask, case.size or None, fmt, fmt, case.sinks)
    cost = core.cost(Ragged(tuple(Work(1, T, S) for T, S in case.batch)))
    if case.mask != "block":
        return cost
    ends = [[*range((S // case.size + 1) * case.size, S + T, case.size), S + T] for T, S in case.batch]
    groups = [
        Work(1, end - begin, begin)
        for (_, S), stops in zip(case.batch, ends, strict=True)
        for begin, end in zip([S, *stops[:-1]], stops, strict=True)
    ]
    return Cost(dict(core.cost(Ragged(tuple(groups))).flops), dict(cost.read), dict(cost.write), 1)


def expected(case: Prefill, tensors: Tensors) -> Expected:
    """Queries once; keys and values once per tile of queries that sees them and per query head."""
    cut, cost, fmt = case.cut, useful(case), TYPES[case.dtype].format
    tiles = [(T, S, tile) for T, S in case.batch for tile in range(ceil_div(T, cut.BM))]
    reached = [reach(case.mask, case.size, T, S, tile, cut.BM) for T, S, tile in tiles]
    loaded = sum(high - low for low, high in reached)
    blocks = sum(steps(case.mask, case.size, *tile, cut.BM, cut.BN) for tile in tiles)
    keys = Attention(case.N, case.K, case.H, 0, "causal", None, fmt, fmt).cost(Work(1, 1, 0)).read["state"]
    k = cost.read["state"] * case.H // (case.H + case.values)
    per_value = keys * case.values // case.H
    H1, H2 = halves(case.H)
    width = H1 + H2 + power_of_two(case.values, 16)
    programs = ceil_div(max(T for T, _ in case.batch), cut.BM) * case.N * len(case.batch)
    index = Moved("", read=4 * (len(case.batch) + 1), requested=8 * programs)
    moved = {
        "q": Moved("activations", read=cost.read["activations"]),
        "k": Moved("state", read=k, requested=keys // case.K * case.N * loaded),
        "v": Moved("state", read=cost.read["state"] - k, requested=per_value // case.K * case.N * loaded),
        "out": Moved("activations", written=cost.write["activations"]),
        "q_starts": index,
        "k_starts": index,
    }
    if case.sinks:
        moved["sinks"] = Moved("", read=fmt.bytes(case.N), requested=fmt.bytes(case.N) * len(tiles))
    executed = 2 * case.N * cut.BM * cut.BN * width * blocks

    def needed() -> int:
        pairs = sum(int(visible(case.mask, case.size, T, S).sum()) for T, S in case.batch)
        return 2 * case.N * (case.H + case.values) * pairs

    return Expected(cost, {"flash_attention_kernel": Launch(programs, moved)}, TYPES[case.dtype].triton, executed, needed)


def library(case: Prefill, tensors: Tensors) -> Any:
    """torch's scaled_dot_product_attention, whichever of its backends it takes; None where it has no such mask."""
    (T, S), B = case.batch[0], len(case.batch)
    if any(one != (T, S) for one in case.batch) or case.mask not in ("causal", "full") or S or case.sinks or case.soft_cap:
        return None
    q, k, v = (tensors[name].view(B, T, *tensors[name].shape[1:]).transpose(1, 2).contiguous() for name in "qkv")
    sdpa = torch.nn.functional.scaled_dot_product_attention
    return lambda: sdpa(q, k, v, is_causal=case.mask == "causal", enable_gqa=case.N != case.K)


SMALL, TALL = Tiles(32, 16), Tiles(64, 32)
CASES = (
    Prefill("chosen", "bf16", ((130, 7), (5, 70)), 1, 1, 32),
    Prefill("causal", "bf16", ((70, 0),), 4, 2, 64, tiles=TALL),
    Prefill("ragged", "bf16", ((3, 0), (9, 0), (5, 0)), 2, 2, 32, tiles=SMALL),
    Prefill("prefix", "bf16", ((20, 37), (1, 50), (33, 0)), 8, 1, 32, tiles=SMALL),
    Prefill("full", "bf16", ((41, 0), (7, 12)), 2, 1, 48, mask="full", tiles=SMALL),
    Prefill("window", "bf16", ((75, 0), (30, 45)), 2, 1, 32, mask="window", size=24, tiles=SMALL),
    Prefill("window-1", "fp32", ((37, 5),), 1, 1, 16, mask="window", size=1, tiles=SMALL),
    Prefill("chunk", "bf16", ((75, 0), (30, 21)), 2, 2, 32, mask="chunk", size=28, tiles=SMALL),
    Prefill("block", "bf16", ((40, 0), (25, 10)), 2, 1, 32, mask="block", size=12, tiles=SMALL),
    Prefill("sinks", "bf16", ((45, 3),), 8, 1, 64, sinks=True, mask="window", size=20, tiles=SMALL),
    Prefill("soft-cap", "fp16", ((39, 0), (2, 30)), 4, 1, 32, soft_cap=5.0, tiles=SMALL),
    Prefill("latent-widths", "bf16", ((35, 8),), 2, 2, 96, V=64, tiles=SMALL),
    Prefill("odd-widths", "fp16", ((21, 4),), 3, 1, 40, V=24, tiles=SMALL),
    Prefill("single", "fp32", ((50, 0), (17, 9)), 4, 4, 64, tiles=SMALL),
    Prefill("one-token", "fp32", ((1, 0),), 2, 1, 16, tiles=SMALL),
    Prefill("rows-apart", "bf16", ((33, 6), (3, 1)), 4, 2, 32, V=16, gap=3, tiles=SMALL),
)
LONG, KERNEL = ((4096, 0),) * 4, {"flash_attention_kernel": "HGMMA"}
BUILDS = (
    Build(Prefill("llama-8b", "bf16", LONG, 32, 8, 128), KERNEL, (), EVERYWHERE),
    Build(Prefill("full-64", "bf16", LONG, 32, 8, 64, mask="full"), KERNEL),
    Build(Prefill("gpt-oss", "bf16", LONG, 64, 8, 64, mask="window", size=128, sinks=True), KERNEL),
    Build(Prefill("gemma", "bf16", LONG, 16, 8, 256, soft_cap=50.0), KERNEL),
    Build(Prefill("latent", "bf16", LONG, 16, 16, 192, V=128), KERNEL),
    Build(Prefill("chunk", "fp16", LONG, 32, 8, 128, mask="chunk", size=8192), KERNEL),
    Build(Prefill("block", "bf16", LONG, 32, 8, 128, mask="block", size=32), KERNEL),
    Build(Prefill("wide-window", "bf16", LONG, 16, 8, 256, mask="window", size=1024), KERNEL),
    Build(Prefill("single", "fp32", LONG, 16, 16, 128)),
)
MEASURED = (
    Prefill("llama-8b-4k", "bf16", ((4096, 0),) * 4, 32, 8, 128),
    Prefill("llama-8b-16k", "bf16", ((16384, 0),), 32, 8, 128),
    Prefill("full-4k", "bf16", ((4096, 0),) * 4, 32, 32, 128, mask="full"),
    Prefill("head-64-4k", "bf16", ((4096, 0),) * 4, 64, 8, 64),
)
SPEC = Spec(
    "flash_attention", "Attention", CASES, inputs, reference, launch, expected, tolerance(), BUILDS, MEASURED, library
)  # fmt: skip
