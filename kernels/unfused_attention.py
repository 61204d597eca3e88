"""The baseline that FlashAttention replaced: three kernels, with every score through memory twice in each direction.

The first multiplies queries and keys, the second takes the softmax of whole rows, the third multiplies by values. The mask
saves nothing: all T (S + T) pairs are computed and moved.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl

from roofline.components.attention import Attention, UnfusedAttention
from roofline.errors import InputError
from roofline.kernels import buffers
from roofline.kernels.arguments import FLOATING, check, check_tile, within
from roofline.kernels.device import Device, current, of
from roofline.kernels.masks import attention, visible
from roofline.kernels.spec import EVERYWHERE, Build, Case, Expected, Launch, Moved, Spec, Tensors, Tolerance
from roofline.kernels.tiling import Tiles, power_of_two
from roofline.kernels.types import NAMES, TYPES, Source
from roofline.numeric import ceil_div
from roofline.work import Work

MASKS = ("causal", "window", "full")
WIDEST = 32768


@triton.jit
def scores_kernel(
    q, k, scores, T, keys, scale, N: tl.constexpr, K: tl.constexpr, H: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """One tile of the scores of one head of one sequence; scores are [B, N, T, keys]."""
    columns = tl.cdiv(keys, BN)
    row = tl.program_id(0) // columns * BM + tl.arange(0, BM)
    key = tl.program_id(0) % columns * BN + tl.arange(0, BN)
    head = tl.program_id(1)
    sequence = tl.program_id(2).to(tl.int64)
    inner = tl.arange(0, BK)
    q_at = q + ((sequence * T + row[:, None]) * N + head) * H + inner[None, :]
    k_at = k + ((sequence * keys + key[None, :]) * K + head // (N // K)) * H + inner[:, None]
    total = tl.zeros((BM, BN), tl.float32)
    for h in range(0, H, BK):
        x = tl.load(q_at + h, mask=(row[:, None] < T) & (h + inner[None, :] < H), other=0.0)
        y = tl.load(k_at + h, mask=(key[None, :] < keys) & (h + inner[:, None] < H), other=0.0)
        total = tl.dot(x, y, total, input_precision="ieee")
    at = scores + ((sequence * N + head) * T + row[:, None]) * keys + key[None, :]
    tl.store(at, (total * scale).to(scores.dtype.element_ty), mask=(row[:, None] < T) & (key[None, :] < keys))


@triton.jit
def softmax_kernel(scores, weights, T, keys, size, MASK: tl.constexpr, BLOCK: tl.constexpr):
    """One row of scores, masked and normalised."""
    row = tl.program_id(0)
    at = (tl.program_id(1).to(tl.int64) * T + row) * keys
    key = tl.arange(0, BLOCK)
    position = keys - T + row
    seen = key < keys
    value = tl.load(scores + at + key, mask=seen, other=0.0).to(tl.float32)
    if MASK == "causal" or MASK == "window":
        seen = seen & (key <= position)
    if MASK == "window":
        seen = seen & (key > position - size)
    value = tl.where(seen, value, float("-inf"))
    weight = tl.exp(value - tl.max(value, 0))
    weight = weight / tl.sum(weight, 0)
    tl.store(weights + at + key, weight.to(weights.dtype.element_ty), mask=key < keys)


@triton.jit
def values_kernel(
    weights, v, out, T, keys, N: tl.constexpr, K: tl.constexpr, V: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """One tile of the output of one head of one sequence."""
    columns = tl.cdiv(V, BN)
    row = tl.program_id(0) // columns * BM + tl.arange(0, BM)
    column = tl.program_id(0) % columns * BN + tl.arange(0, BN)
    head = tl.program_id(1)
    sequence = tl.program_id(2).to(tl.int64)
    inner = tl.arange(0, BK)
    w_at = weights + ((sequence * N + head) * T + row[:, None]) * keys + inner[None, :]
    v_at = v + ((sequence * keys + inner[:, None]) * K + head // (N // K)) * V + column[None, :]
    total = tl.zeros((BM, BN), tl.float32)
    for key in range(0, keys, BK):
        x = tl.load(w_at, mask=(row[:, None] < T) & (key + inner[None, :] < keys), other=0.0)
        y = tl.load(v_at, mask=(key + inner[:, None] < keys) & (column[None, :] < V), other=0.0)
        total = tl.dot(x, y, total, input_precision="ieee")
        w_at += BK
        v_at += BK * K * V
    at = out + ((sequence * T + row[:, None]) * N + head) * V + column[None, :]
    tl.store(at, total.to(out.dtype.element_ty), mask=(row[:, None] < T) & (column[None, :] < V))


def choose(T: int, keys: int, dtype: str, device: Device) -> Tiles:
    """One cut for both products: by queries, keys (rows of scores that begin anywhere), operand type and device."""
    if dtype == "fp32":
        return Tiles(32, 32, 32, warps=4, stages=2)
    if T <= 64 or device.shared < 200_000:
        return Tiles(64, 64, 64 if device.shared >= 100_000 else 32, warps=4, stages=2)
    return Tiles(128, 64 if keys % 16 else 128, 64, warps=8, stages=3)


def unfused_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: str = "causal", size: int = 0, tiles: Tiles | None = None
) -> torch.Tensor:
    """Attention of ``q [B, T, N, H]`` over ``k [B, S + T, K, H]`` and ``v [B, S + T, K, V]``; returns ``[B, T, N, V]``.

    ``mask``: "causal", "window" (of ``size``) or "full". Raises InputError for arguments that do not fit each other.
    """
    check("q", q, (None, None, None, None), FLOATING)
    B, T, N, H = q.shape
    check("k", k, (B, None, None, H), (q.dtype,), q)
    keys, K = k.shape[1:3]
    check("v", v, (B, keys, K, None), (q.dtype,), q)
    V = v.shape[3]
    if mask not in MASKS:
        raise InputError(f"mask: unknown {mask!r}; known: {', '.join(MASKS)}")
    if mask == "window":
        within("size", size, 1)
    if not K or N % K:
        raise InputError(f"q: {N} query heads do not divide over {K} key-value heads")
    if not T <= keys <= WIDEST:
        raise InputError(f"k: {keys} keys for {T} queries; pass as many keys as queries at least, and at most {WIDEST}")
    out = buffers.empty(B, T, N, V, dtype=q.dtype, device=q.device)
    scores, weights = (buffers.empty(B, N, T, keys, dtype=q.dtype, device=q.device) for _ in range(2))
    if out.numel():
        cut = tiles or choose(T, keys, NAMES[q.dtype], of(q))
        check_tile("tiles", cut.warps, cut.BM * cut.BN, BM=cut.BM, BN=cut.BN, BK=cut.BK)
        shape: dict[str, Any] = {"N": N, "K": K, "BM": cut.BM, "BN": cut.BN, "BK": cut.BK}
        shape |= {"num_warps": cut.warps, "num_stages": cut.stages}
        rows = ceil_div(T, cut.BM)
        scores_kernel[(rows * ceil_div(keys, cut.BN), N, B)](q, k, scores, T, keys, H**-0.5, H=H, **shape)
        block = power_of_two(keys)
        softmax_kernel[(T, N * B)](
            scores, weights, T, keys, size, MASK=mask, BLOCK=block, num_warps=min(16, max(1, block // 512))
        )
        values_kernel[(rows * ceil_div(V, cut.BN), N, B)](weights, v, out, T, keys, V=V, **shape)
    return out


@dataclass(frozen=True)
class Dense(Case):
    """``B`` sequences of T queries behind S cached keys; heads, widths, mask."""

    B: int
    T: int
    S: int
    N: int
    K: int
    H: int
    V: int = 0
    mask: str = "causal"
    size: int = 0
    tiles: Tiles | None = None

    @property
    def cut(self) -> Tiles:
        """The tiles of its launch."""
        return self.tiles or choose(self.T, self.S + self.T, self.dtype, current())


def inputs(case: Dense, device: str) -> Tensors:
    """Queries, keys and values."""
    source, keys = Source(case.name, device), case.S + case.T
    return {
        "q": source.normal(case.B, case.T, case.N, case.H, dtype=case.dtype),
        "k": source.normal(case.B, keys, case.K, case.H, dtype=case.dtype),
        "v": source.normal(case.B, keys, case.K, case.V or case.H, dtype=case.dtype),
    }


def reference(case: Dense, tensors: Tensors) -> Tensors:
    """Softmax attention in float64."""
    seen = visible(case.mask, case.size, case.T, case.S)
    batch = zip(tensors["q"], tensors["k"], tensors["v"], strict=True)
    return {"out": torch.stack([attention(q, k, v, seen, case.H**-0.5) for q, k, v in batch])}


def launch(case: Dense, tensors: Tensors) -> Tensors:
    """The three Triton kernels."""
    return {"out": unfused_attention(**tensors, mask=case.mask, size=case.size, tiles=case.tiles)}


def expected(case: Dense, tensors: Tensors) -> Expected:
    """Two matmuls per head and sequence, each operand re-read per tile of the other, and a softmax between them.

    The mask saves nothing: every pair is needed.
    """
    cut, fmt, V, work = case.cut, TYPES[case.dtype].format, case.V or case.H, Work(case.B, case.T, case.S)
    shape: dict[str, Any] = {"N": case.N, "K": case.K, "mask": case.mask, "size": case.size or None, "kv": fmt, "activation": fmt}
    cost = UnfusedAttention(H=case.H, value_dim=V, **shape).cost(work)
    queries = Attention(H=case.H, value_dim=0, **shape).cost(work).read["activations"]
    scores = (cost.read["activations"] - queries) // 2
    k = cost.read["state"] * case.H // (case.H + V)
    v = cost.read["state"] - k
    keys, heads, group = case.S + case.T, case.N * case.B, case.N // case.K
    rows, columns, wide = ceil_div(case.T, cut.BM), ceil_div(keys, cut.BN), ceil_div(V, cut.BN)
    first = {
        "q": Moved("activations", read=queries, requested=queries * columns),
        "k": Moved("state", read=k, requested=k * group * rows),
        "scores": Moved("activations", written=scores),
    }
    second = {"scores": Moved("activations", read=scores), "weights": Moved("activations", written=scores)}
    third = {
        "weights": Moved("activations", read=scores, requested=scores * wide),
        "v": Moved("state", read=v, requested=v * group * rows),
        "out": Moved("activations", written=cost.write["activations"] - 2 * scores),
    }
    kernels = {
        "scores_kernel": Launch(rows * columns * heads, first),
        "softmax_kernel": Launch(case.T * heads, second),
        "values_kernel": Launch(rows * wide * heads, third),
    }
    padded = columns * cut.BN * ceil_div(case.H, cut.BK) * cut.BK + wide * cut.BN * ceil_div(keys, cut.BK) * cut.BK
    executed = 2 * heads * rows * cut.BM * padded
    return Expected(cost, kernels, TYPES[case.dtype].triton, executed, lambda: 2 * heads * (case.H + V) * case.T * keys)


def library(case: Dense, tensors: Tensors) -> Any:
    """torch's matmul and softmax, as a model's eager attention runs them."""
    if case.mask == "window":
        return None
    q, k, v = (tensors[name].transpose(1, 2) for name in "qkv")
    k, v = (x.repeat_interleave(case.N // case.K, dim=1) for x in (k, v))
    seen = torch.ones(case.T, k.shape[2], dtype=torch.bool, device=q.device).tril(case.S)
    hidden = None if case.mask == "full" else ~seen

    def run() -> torch.Tensor:
        scores = (q @ k.transpose(2, 3)) * case.H**-0.5
        if hidden is not None:
            scores = scores.masked_fill(hidden, float("-inf"))
        return torch.softmax(scores, 3) @ v

    return run


SMALL = Tiles(32, 16, 32)
CASES = (
    Dense("chosen", "bf16", 1, 17, 50, 1, 1, 32),
    Dense("causal", "bf16", 2, 35, 0, 2, 1, 48, tiles=SMALL),
    Dense("prefix", "bf16", 1, 33, 20, 2, 1, 64, tiles=SMALL),
    Dense("full", "fp16", 3, 17, 5, 2, 2, 40, V=24, mask="full", tiles=SMALL),
    Dense("window", "bf16", 1, 50, 9, 3, 1, 32, mask="window", size=12, tiles=SMALL),
    Dense("single", "fp32", 2, 19, 23, 4, 1, 32, tiles=SMALL),
    Dense("one-token", "fp32", 1, 1, 0, 2, 1, 16, tiles=SMALL),
)
TOLERANCE = {
    "bf16": Tolerance(1e-2, "scores of a few units and weights are rounded to bf16 in memory"),
    "fp16": Tolerance(2e-3, "scores of a few units and weights are rounded to fp16 in memory"),
    "fp32": Tolerance(2e-6, "fp32 sums in another order"),
}
BUILDS = (
    Build(
        Dense("llama-8b", "bf16", 4, 4096, 0, 32, 8, 128),
        {"scores_kernel": "HGMMA", "values_kernel": "HGMMA"},
        targets=EVERYWHERE,
    ),
    Build(Dense("long", "bf16", 1, 256, 16128, 8, 8, 64, mask="full"), {"scores_kernel": "HGMMA", "values_kernel": "HGMMA"}),
)
MEASURED = (Dense("llama-8b-4k", "bf16", 4, 4096, 0, 32, 8, 128),)
SPEC = Spec(
    "unfused_attention", "UnfusedAttention", CASES, inputs, reference, launch, expected, TOLERANCE, BUILDS, MEASURED, library
)  # fmt: skip
