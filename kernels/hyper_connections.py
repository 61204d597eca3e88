"""Manifold-constrained hyper-connections (mHC): n residual streams, collapsed in front of a sub-layer and mixed behind it.

Three kernels: the projection of all streams of a token to its coefficients (a skinny matmul with fp32 weights, K split over
programs where tokens are few), what turns coefficients into weights and collapses the streams, and the mix behind the
sub-layer. The norm of the streams is applied to their projection, so that streams are read once per kernel; the n x n mixing
matrix becomes doubly stochastic by Sinkhorn iterations, all in registers. ``head``: only the collapse, behind the last layer.
Source: Xie et al. 2026 (mHC, arXiv 2512.24880); transformers 5.24, models/deepseek_v4.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl

from roofline.components.hyper_connections import HyperApply, HyperConnection, HyperHead
from roofline.kernels import buffers
from roofline.kernels.arguments import FLOATING, SINGLE, check, within
from roofline.kernels.device import Device, current, of
from roofline.kernels.parts import padded
from roofline.kernels.spec import EVERYWHERE, Build, Case, Expected, Launch, Moved, Spec, Tensors, Tolerance
from roofline.kernels.tiling import launches, partial_sums, power_of_two, sum_parts
from roofline.kernels.types import TYPES, Source
from roofline.numeric import ceil_div
from roofline.work import Work

EPSILON = 1e-6
BK = 64


@triton.jit
def hyper_proj_kernel(
    x, weight, out, tokens, K, share,
    RAW: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """One part of K of BM tokens' coefficients; weight is [RAW, K], out is [parts, tokens, RAW]."""
    part = tl.program_id(1)
    row = tl.program_id(0) * BM + tl.arange(0, BM)
    column = tl.arange(0, BN)
    inner = tl.arange(0, BK)
    total = tl.zeros((BM, BN), tl.float32)
    for start in range(part * share, tl.minimum(part * share + share, K), BK):
        real = start + inner < K
        rows = tl.load(
            x + row[:, None].to(tl.int64) * K + start + inner[None, :], mask=(row < tokens)[:, None] & real[None, :], other=0.0
        ).to(tl.float32)  # fmt: skip
        learned = tl.load(
            weight + column[:, None] * K + start + inner[None, :], mask=(column < RAW)[:, None] & real[None, :], other=0.0
        )  # fmt: skip
        total = tl.dot(rows, tl.trans(learned), total, input_precision=PRECISION)
    goal = out + (part * tokens + row[:, None].to(tl.int64)) * RAW + column[None, :]
    tl.store(goal, total, mask=(row < tokens)[:, None] & (column < RAW)[None, :])


@triton.jit
def sigmoid(value):
    """1 / (1 + e^-x)."""
    return 1.0 / (1.0 + tl.exp2(value * -1.4426950408889634))


@triton.jit
def hyper_collapse_kernel(
    x, raw, base, scales, out, coefficients, epsilon,
    D: tl.constexpr, DP: tl.constexpr, N: tl.constexpr, NP: tl.constexpr, RAW: tl.constexpr, ITERATIONS: tl.constexpr,
):  # fmt: skip
    """One token: its streams' norm, the weights, the collapsed streams; coefficients are n to spread and n x n to mix."""
    token = tl.program_id(0).to(tl.int64)
    stream = tl.arange(0, NP)
    column = tl.arange(0, DP)
    real = stream < N
    inside = real[:, None] & (column < D)[None, :]
    value = tl.load(x + token * (N * D) + stream[:, None] * D + column[None, :], mask=inside, other=0.0).to(tl.float32)
    inverse = 1.0 / tl.sqrt(tl.sum(tl.sum(value * value, 1), 0) / (N * D) + epsilon)
    mine = raw + token * RAW
    learned = tl.load(base + stream, mask=real, other=0.0)
    gate = sigmoid(tl.load(mine + stream, mask=real, other=0.0) * inverse * tl.load(scales) + learned) + epsilon
    collapsed = tl.sum(value * gate[:, None], 0)
    tl.store(out + token * D + column, collapsed.to(out.dtype.element_ty), mask=column < D)
    if ITERATIONS > 0:
        goal = coefficients + token * (N + N * N)
        learned = tl.load(base + N + stream, mask=real, other=0.0)
        spread = 2.0 * sigmoid(tl.load(mine + N + stream, mask=real, other=0.0) * inverse * tl.load(scales + 1) + learned)
        tl.store(goal + stream, spread, mask=real)
        square = stream[:, None] * N + stream[None, :]
        both = real[:, None] & real[None, :]
        learned = tl.load(base + 2 * N + square, mask=both, other=0.0)
        mix = tl.load(mine + 2 * N + square, mask=both, other=0.0) * inverse * tl.load(scales + 2) + learned
        mix = tl.where(both, mix, float("-inf"))
        highest = tl.where(real, tl.max(mix, 1), 0.0)
        mix = tl.exp2((mix - highest[:, None]) * 1.4426950408889634)
        mix = tl.where(both, mix / tl.where(real, tl.sum(mix, 1), 1.0)[:, None] + epsilon, 0.0)
        mix = mix / (tl.sum(mix, 0) + epsilon)[None, :]
        for _ in range(ITERATIONS - 1):
            mix = mix / (tl.sum(mix, 1) + epsilon)[:, None]
            mix = mix / (tl.sum(mix, 0) + epsilon)[None, :]
        tl.store(goal + N + square, mix, mask=both)


@triton.jit
def hyper_apply_kernel(
    x, y, coefficients, out, D: tl.constexpr, N: tl.constexpr, NP: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """BLOCK columns of one token: every new stream is its share of y and a mix of the old streams."""
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    stream = tl.arange(0, NP)
    mine = coefficients + token * (N + N * N)
    real = stream < N
    spread = tl.load(mine + stream, mask=real, other=0.0)
    total = spread[:, None] * tl.load(y + token * D + column, mask=column < D, other=0.0).to(tl.float32)[None, :]
    for old in tl.static_range(N):
        weight = tl.load(mine + N + old * N + stream, mask=real, other=0.0)
        value = tl.load(x + (token * N + old) * D + column, mask=column < D, other=0.0).to(tl.float32)
        total += weight[:, None] * value[None, :]
    goal = out + token * (N * D) + stream[:, None] * D + column[None, :]
    tl.store(goal, total.to(out.dtype.element_ty), mask=real[:, None] & (column < D)[None, :])


@dataclass(frozen=True)
class Split:
    """Tokens of one program of the projection, and parts of K."""

    rows: int
    parts: int = 1


def choose(tokens: int, K: int, device: Device) -> Split:
    """Rows and parts that fill the device, 8 blocks of K each at the least."""
    rows = 64 if tokens >= 64 else 16
    wanted = ceil_div(2 * device.units, ceil_div(tokens, rows))
    return Split(rows, int(max(1, min(wanted, K // (8 * BK), 64))))


def share_of(K: int, parts: int) -> int:
    """Elements of K in one part: whole blocks."""
    return int(ceil_div(ceil_div(K, BK), parts) * BK)


def column_block(D: int) -> int:
    """Columns of one program of the mix."""
    return int(min(1024, power_of_two(D)))


def project(x: torch.Tensor, weight: torch.Tensor, split: Split | None = None) -> torch.Tensor:
    """Raw coefficients of streams ``x [tokens, n, D]``: fp32 ``[tokens, raw]``, by ``weight [raw, n D]`` in fp32."""
    check("x", x, (None, None, None), FLOATING)
    check("weight", weight, (None, x.shape[1] * x.shape[2]), SINGLE, x)
    tokens, (raw, K) = len(x), weight.shape
    cut = split or choose(tokens, K, of(x))
    out = buffers.empty(tokens, raw, dtype=torch.float32, device=x.device)
    partial = partial_sums(out, cut.parts)
    hyper_proj_kernel[(ceil_div(tokens, cut.rows), cut.parts)](
        x, weight, partial, tokens, K, share_of(K, cut.parts), RAW=raw, BM=cut.rows, BN=padded(raw), BK=BK,
        PRECISION="ieee" if x.dtype == torch.float32 else "tf32", num_warps=4, num_stages=3,
    )  # fmt: skip
    return sum_parts(partial, out, cut.parts)


def collapse(
    x: torch.Tensor, weight: torch.Tensor, base: torch.Tensor, scales: torch.Tensor, iterations: int = 20,
    split: Split | None = None, epsilon: float = EPSILON,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """In front of a sub-layer: its input ``[tokens, D]``, and fp32 coefficients ``[tokens, n + n n]`` for ``apply``.

    Args:
        x: ``[tokens, n, D]``. weight: fp32 ``[raw, n D]``, raw = (2 + n) n, or n for a head (``iterations`` = 0, which
            gives no coefficients). base: fp32 ``[raw]``. scales: fp32 ``[3]``, or ``[1]``.

    Raises InputError for arguments that do not fit each other.
    """
    within("iterations", iterations, 0)
    check("x", x, (None, None, None), FLOATING)
    tokens, n, D = x.shape
    raw_size, factors = ((2 + n) * n, 3) if iterations else (n, 1)
    check("weight", weight, (raw_size, n * D), SINGLE, x)
    check("base", base, (raw_size,), SINGLE, x)
    check("scales", scales, (factors,), SINGLE, x)
    out = buffers.empty(tokens, D, dtype=x.dtype, device=x.device)
    mixing = n + n * n if iterations else 0
    coefficients = buffers.empty(tokens, mixing, dtype=torch.float32, device=x.device)
    if tokens:
        raw, wide = project(x, weight, split), power_of_two(D)
        hyper_collapse_kernel[(tokens,)](
            x, raw, base, scales, out, coefficients, epsilon, D=D, DP=wide, N=n, NP=power_of_two(n),
            RAW=len(base), ITERATIONS=iterations, num_warps=max(1, min(16, n * wide // 1024)),
        )  # fmt: skip
    return out, coefficients


def apply(x: torch.Tensor, y: torch.Tensor, coefficients: torch.Tensor) -> torch.Tensor:
    """Behind a sub-layer: new streams ``[tokens, n, D]`` of the old ones ``x`` and its output ``y [tokens, D]``."""
    check("x", x, (None, None, None), FLOATING)
    tokens, n, D = x.shape
    check("y", y, (tokens, D), (x.dtype,), x)
    check("coefficients", coefficients, (tokens, n + n * n), SINGLE, x)
    out = buffers.empty(tokens, n, D, dtype=x.dtype, device=x.device)
    if tokens:
        block = column_block(D)
        hyper_apply_kernel[(tokens, ceil_div(D, block))](
            x, y, coefficients, out, D=D, N=n, NP=power_of_two(n), BLOCK=block, num_warps=max(1, min(4, block // 128))
        )  # fmt: skip
    return out


@dataclass(frozen=True)
class Streams(Case):
    """``tokens`` with n streams of width D."""

    tokens: int
    n: int
    D: int
    iterations: int = 20
    head: bool = False
    split: Split | None = None

    @property
    def raw(self) -> int:
        """Projected coefficients per token."""
        return self.n if self.head else (2 + self.n) * self.n

    @property
    def cut(self) -> Split:
        """The parts of the projection."""
        return self.split or choose(self.tokens, self.n * self.D, current())


def inputs(case: Streams, device: str) -> Tensors:
    """Streams, a sub-layer's output, and learned tensors such that raw coefficients are of order one."""
    source, K = Source(case.name, device), case.n * case.D
    return {
        "x": source.normal(case.tokens, case.n, case.D, dtype=case.dtype, scale=2.0),
        "y": source.normal(case.tokens, case.D, dtype=case.dtype),
        "weight": source.normal(case.raw, K, dtype="fp32", scale=K**-0.5),
        "base": source.normal(case.raw, dtype="fp32"),
        "scales": source.normal(1 if case.head else 3, dtype="fp32"),
    }


def definition(case: Streams, tensors: Tensors, kind: torch.dtype) -> Tensors:
    """Norm, projection, sigmoids, Sinkhorn and both mixes in the order of the definition, in one number type."""
    x, n = tensors["x"].to(kind), case.n
    weight, base, scales = (tensors[name].to(kind) for name in ("weight", "base", "scales"))
    flat = x.flatten(1)
    raw = flat / torch.sqrt(flat.square().mean(1, keepdim=True) + EPSILON) @ weight.T
    gate = torch.sigmoid(raw[:, :n] * scales[0] + base[:n]) + EPSILON
    collapsed = torch.einsum("tn,tnd->td", gate, x)
    if case.head:
        return {"collapsed": collapsed}
    spread = 2 * torch.sigmoid(raw[:, n : 2 * n] * scales[1] + base[n : 2 * n])
    mix = torch.softmax((raw[:, 2 * n :] * scales[2] + base[2 * n :]).unflatten(1, (n, n)), 2) + EPSILON
    mix = mix / (mix.sum(1, keepdim=True) + EPSILON)
    for _ in range(case.iterations - 1):
        mix = mix / (mix.sum(2, keepdim=True) + EPSILON)
        mix = mix / (mix.sum(1, keepdim=True) + EPSILON)
    streams = torch.einsum("tjk,tjd->tkd", mix, x) + spread[:, :, None] * tensors["y"].to(kind)[:, None]
    return {"collapsed": collapsed, "coefficients": torch.cat([spread, mix.flatten(1)], 1), "streams": streams}


def reference(case: Streams, tensors: Tensors) -> Tensors:
    """The definition in float64."""
    return definition(case, tensors, torch.float64)


def library(case: Streams, tensors: Tensors) -> Any:
    """The definition in torch, operation by operation in fp32, as transformers runs it."""
    return lambda: definition(case, tensors, torch.float32)


def launch(case: Streams, tensors: Tensors) -> Tensors:
    """The Triton kernels."""
    learned = (tensors["weight"], tensors["base"], tensors["scales"])
    collapsed, coefficients = collapse(tensors["x"], *learned, 0 if case.head else case.iterations, case.split)
    if case.head:
        return {"collapsed": collapsed}
    streams = apply(tensors["x"], tensors["y"], coefficients)
    return {"collapsed": collapsed, "coefficients": coefficients, "streams": streams}


def expected(case: Streams, tensors: Tensors) -> Expected:
    """Streams once per kernel; the projection's weights once per block of tokens; parts of K where it is split."""
    fmt, cut, tokens, K = TYPES[case.dtype].format, case.cut, case.tokens, case.n * case.D
    work = Work(1, tokens)
    if case.head:
        cost = HyperHead(case.D, case.n, fmt).cost(work)
    else:
        cost = HyperConnection(case.D, case.n, case.iterations, fmt).cost(work) + HyperApply(case.D, case.n, fmt).cost(work)
    streams, output, raw, weight = fmt.bytes(K) * tokens, fmt.bytes(case.D) * tokens, 4 * case.raw * tokens, 4 * K * case.raw
    rows = ceil_div(tokens, cut.rows)
    biases, scales = 4 * case.raw, 4 * (1 if case.head else 3)
    projected = {"x": Moved("activations", read=streams), "weight": Moved("weights", read=weight, requested=weight * rows)}
    kernels = {
        **launches("hyper_proj_kernel", rows * cut.parts, projected, tokens, case.raw, cut.parts, raw),
        "hyper_collapse_kernel": Launch(tokens, {
            "x": Moved("activations", read=streams), "raw": Moved("activations", read=raw),
            "base": Moved("weights", read=biases, requested=biases * tokens),
            "scales": Moved("weights", read=scales, requested=scales * tokens),
            "out": Moved("activations", written=output),
        }),
    }  # fmt: skip
    if not case.head:
        mixing, blocks = 4 * (case.n + case.n**2) * tokens, ceil_div(case.D, column_block(case.D))
        first = kernels["hyper_collapse_kernel"]
        kernels["hyper_collapse_kernel"] = Launch(
            tokens, {**first.moved, "coefficients": Moved("activations", written=mixing)}
        )  # fmt: skip
        kernels["hyper_apply_kernel"] = Launch(tokens * blocks, {
            "x": Moved("activations", read=streams), "y": Moved("activations", read=output),
            "coefficients": Moved("activations", read=mixing, requested=mixing * blocks),
            "out": Moved("activations", written=streams),
        })  # fmt: skip
    share = share_of(K, cut.parts)
    steps = sum(ceil_div(max(0, min(share, K - part * share)), BK) for part in range(cut.parts))
    executed = 2 * rows * cut.rows * padded(case.raw) * BK * steps
    rounded = 0 if case.dtype == "fp32" else executed
    return Expected(cost, kernels, "fp32", executed, lambda: 2 * tokens * case.raw * K, tf32=rounded)


CASES = (
    Streams("chosen", "bf16", 5, 4, 520),
    Streams("ragged", "bf16", 19, 3, 77, iterations=2, split=Split(16, 2)),
    Streams("blocks", "bf16", 3, 2, 1100, iterations=3),
    Streams("half", "fp16", 7, 4, 96, split=Split(16, 1)),
    Streams("single", "fp32", 6, 5, 40, iterations=5, split=Split(16, 3)),
    Streams("one-iteration", "bf16", 1, 4, 64, iterations=1),
    Streams("head", "bf16", 6, 4, 130, head=True, split=Split(16, 2)),
)
TOLERANCE = {
    "bf16": Tolerance(3e-3, "weights of the projection are rounded to 11 bits (tf32) on a GPU; results once to bf16"),
    "fp16": Tolerance(1e-3, "weights of the projection are rounded to 11 bits (tf32) on a GPU; results once to fp16"),
    "fp32": Tolerance(5e-6, "fp32 sums in another order, exp2 in place of exp"),
}
BUILDS = (
    Build(Streams("v4-pro-prefill", "bf16", 8192, 4, 7168), {"hyper_proj_kernel": "HGMMA"}, (), EVERYWHERE),
    Build(Streams("v4-flash-decode", "bf16", 32, 4, 4096), {"hyper_proj_kernel": "HMMA"}),
)
MEASURED = (
    Streams("v4-pro-8k", "bf16", 8192, 4, 7168),
    Streams("v4-flash-decode-64", "bf16", 64, 4, 4096),
)
SPEC = Spec(
    "hyper_connections", "HyperConnection", CASES, inputs, reference, launch, expected, TOLERANCE, BUILDS, MEASURED, library
)  # fmt: skip
