"""Matmul of 8-bit operands with a scale per block: weights per 128x128, activations per 1x128 (DeepSeek-V3).

A step of K is one block, so that its product has one scale per row and one per program: the matrix unit sums 128 products,
and each step's sum is scaled and added in fp32 registers. That also keeps the 8-bit unit's narrow accumulator short, which
is why DeepGEMM promotes its sums in this rhythm. Activations that come in 16 bits are quantised in the kernel, step by
step: no pass before it, but each column of tiles does it again.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
import triton
import triton.language as tl

from roofline.components.linear import Linear
from roofline.cost import Cost
from roofline.errors import InputError
from roofline.formats import FORMATS, FP8
from roofline.kernels import buffers
from roofline.kernels.arguments import FLOATING, HALF, SINGLE, check, check_tile
from roofline.kernels.device import Device, current, of
from roofline.kernels.quantize_fp8 import GROUP, TINY, TOP, dequantise, quantize_fp8
from roofline.kernels.spec import Build, Case, Expected, Moved, Spec, Tensors, Tolerance
from roofline.kernels.tiling import Tiles, launches, partial_sums, parts_of_k, place, power_of_two, sum_parts
from roofline.kernels.types import TYPES, Source
from roofline.numeric import ceil_div
from roofline.work import Work


@triton.jit
def narrowed(tile, TOP: tl.constexpr, TINY: tl.constexpr):
    """e4m3 codes of a tile's rows and their scales, as ``quantize_fp8`` makes them of a block."""
    wide = tile.to(tl.float32)
    scale = tl.maximum(tl.max(tl.abs(wide), 1), TINY) / TOP
    return (wide * (1.0 / scale)[:, None]).to(tl.float8e4nv), scale


@triton.jit
def gemm_fp8_block_kernel(
    a, a_scales, b, b_scales, out, M, N, K,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, GROUP: tl.constexpr, SPLITS: tl.constexpr, WHOLE_K: tl.constexpr,
    TOP: tl.constexpr, TINY: tl.constexpr,
):  # fmt: skip
    """One tile of ``a [M, K] @ b [N, K].T``, or one part of its sum over K; BK is a block, and BN divides one."""
    row, column = place(tl.program_id(0), tl.cdiv(M, BM), tl.cdiv(N, BN), GROUP)
    part = tl.program_id(1)
    blocks = tl.cdiv(K, BK)
    steps = tl.cdiv(blocks, SPLITS)
    first = part * steps
    rows = row * BM + tl.arange(0, BM)
    columns = column * BN + tl.arange(0, BN)
    inner = tl.arange(0, BK)
    a_at = a + rows[:, None].to(tl.int64) * K + (first * BK + inner)[None, :]
    b_at = b + columns[None, :].to(tl.int64) * K + (first * BK + inner)[:, None]
    b_scale_at = b_scales + (column * BN // BK) * blocks
    total = tl.zeros((BM, BN), tl.float32)
    for block in range(first, tl.minimum(first + steps, blocks)):
        if WHOLE_K:
            x = tl.load(a_at, mask=rows[:, None] < M, other=0.0)
            y = tl.load(b_at, mask=columns[None, :] < N, other=0.0)
        else:
            left = block * BK + inner < K
            x = tl.load(a_at, mask=(rows[:, None] < M) & left[None, :], other=0.0)
            y = tl.load(b_at, mask=left[:, None] & (columns[None, :] < N), other=0.0)
        if a_scales is None:
            x, x_scale = narrowed(x, TOP, TINY)
        else:
            x_scale = tl.load(a_scales + rows.to(tl.int64) * blocks + block, mask=rows < M, other=0.0)
        scale = x_scale * tl.load(b_scale_at + block)
        total += tl.dot(x, y) * scale[:, None]
        a_at += BK
        b_at += BK
    at = out + (part * M + rows[:, None]).to(tl.int64) * N + columns[None, :]
    tl.store(at, total.to(out.dtype.element_ty), mask=(rows[:, None] < M) & (columns[None, :] < N))


def choose(M: int, N: int, K: int, fused: bool, device: Device) -> Tiles:
    """Tiles by shape and device; ``fused``: activations are quantised in the kernel, which needs registers."""
    if M <= 32:
        return Tiles(power_of_two(M, 16), 64, GROUP, parts_of_k(ceil_div(N, 64), K, GROUP, device), stages=4)
    if M <= 64 or K % 16 or ceil_div(M, 128) * ceil_div(N, 128) < device.units:
        return Tiles(64, 64, GROUP, stages=4)
    return Tiles(64 if fused else 128, 128, GROUP, warps=4 if fused else 8, stages=4)


def gemm_fp8_block(
    a: torch.Tensor, a_scales: torch.Tensor | None, b: torch.Tensor, b_scales: torch.Tensor,
    out_dtype: torch.dtype = torch.bfloat16, tiles: Tiles | None = None,
) -> torch.Tensor:  # fmt: skip
    """``a [M, K] @ b [N, K].T`` of e4m3 codes under their scales, summed in fp32.

    Args:
        a: codes with ``a_scales [M, ceil(K / 128)]``, or 16-bit numbers without, which are quantised in the kernel.
        b_scales: ``[ceil(N / 128), ceil(K / 128)]``.

    Raises InputError for arguments that do not fit each other.
    """
    codes = (torch.float8_e4m3fn,)
    check("a", a, (None, None), HALF if a_scales is None else codes)
    M, K = a.shape
    check("b", b, (None, K), codes, a)
    N, blocks = len(b), ceil_div(K, GROUP)
    check("a_scales", a_scales, (M, blocks), SINGLE, a)
    check("b_scales", b_scales, (ceil_div(N, GROUP), blocks), SINGLE, a)
    if out_dtype not in FLOATING:
        raise InputError(f"out_dtype: {out_dtype}; pass a floating-point type of 16 or 32 bits")
    out = buffers.empty(M, N, dtype=out_dtype, device=a.device)
    if not M * N:
        return out
    cut = tiles or choose(M, N, K, a_scales is None, of(a))
    check_tile("tiles", cut.warps, 2 * cut.BM * cut.BN, BM=cut.BM, BN=cut.BN, BK=cut.BK)
    if cut.BK != GROUP or GROUP % cut.BN:
        raise InputError(f"tiles: a step of K is a block of {GROUP}, and {cut.BN} columns must divide one")
    parts = partial_sums(out, cut.splits)
    gemm_fp8_block_kernel[(ceil_div(M, cut.BM) * ceil_div(N, cut.BN), cut.splits)](
        a, a_scales, b, b_scales, parts, M, N, K, BM=cut.BM, BN=cut.BN, BK=cut.BK, GROUP=cut.group, SPLITS=cut.splits,
        WHOLE_K=K % cut.BK == 0, TOP=TOP, TINY=TINY, num_warps=cut.warps, num_stages=cut.stages,
    )  # fmt: skip
    return sum_parts(parts, out, cut.splits)


def quantise_weight(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """e4m3 codes of a weight ``[..., N, K]`` and a scale per 128x128 block, ``[..., ceil(N / 128), ceil(K / 128)]``."""
    N, K = weight.shape[-2:]
    padded = torch.nn.functional.pad(weight.float(), (0, -K % GROUP, 0, -N % GROUP))
    blocks = padded.unflatten(-1, (-1, GROUP)).unflatten(-3, (-1, GROUP))
    scales = blocks.abs().amax((-3, -1)).clamp(min=TINY) / TOP
    spread = spread_blocks(scales, N, K)
    return (weight.float() / spread).to(torch.float8_e4m3fn), scales


def spread_blocks(scales: torch.Tensor, N: int, K: int) -> torch.Tensor:
    """The scale of every element of a weight ``[..., N, K]``."""
    return scales.repeat_interleave(GROUP, -2)[..., :N, :].repeat_interleave(GROUP, -1)[..., :K]


@dataclass(frozen=True)
class Blocked(Case):
    """``M, N, K``; ``dtype``: "fp8" for codes, else activations that the kernel quantises."""

    M: int
    N: int
    K: int
    out: str = "bf16"
    tiles: Tiles | None = None

    @property
    def cut(self) -> Tiles:
        """The tiles of its launch."""
        return self.tiles or choose(self.M, self.N, self.K, self.dtype != "fp8", current())

    @property
    def precision(self) -> str:
        """Results are rounded to the output's type, and quantised on the way or not."""
        return self.out if self.dtype == "fp8" else f"{self.dtype}-{self.out}"


def inputs(case: Blocked, device: str) -> Tensors:
    """Codes of all sizes under scales that differ from block to block, so that sums stay near 1."""
    source = Source(case.name, device)
    blocks = ceil_div(case.K, GROUP)
    a = source.normal(case.M, case.K, dtype=case.dtype)
    b = source.normal(case.N, case.K, dtype="fp8", scale=16)
    b_scales = (0.5 + source.uniform(ceil_div(case.N, GROUP), blocks)) * (case.K**-0.5 / 16)
    a_scales = 0.5 + source.uniform(case.M, blocks) if case.dtype == "fp8" else None
    return {"a": a, "a_scales": a_scales, "b": b, "b_scales": b_scales}


def reference(case: Blocked, tensors: Tensors) -> Tensors:
    """Matmul in float64 of what the codes stand for."""
    a, scales = tensors["a"], tensors["a_scales"]
    if scales is None:
        padded = torch.nn.functional.pad(a.double(), (0, -case.K % GROUP))
        scales = (padded.unflatten(1, (-1, GROUP)).abs().amax(2).clamp(min=TINY) / torch.finfo(torch.float8_e4m3fn).max).float()
        a = (a.double() / dequantise(torch.ones_like(a), widest(scales))[:, : case.K]).float().to(torch.float8_e4m3fn)
    weight = tensors["b"].double() * spread_blocks(tensors["b_scales"], case.N, case.K).double()
    return {"out": dequantise(a, widest(scales)) @ weight.T}


def widest(scales: torch.Tensor) -> torch.Tensor:
    """Scales of blocks, also where a row is a single, short one."""
    return scales if scales.shape[1] > 1 else scales.expand(-1, 2)


def launch(case: Blocked, tensors: Tensors) -> Tensors:
    """The Triton kernels."""
    return {"out": gemm_fp8_block(**tensors, out_dtype=TYPES[case.out].torch, tiles=case.tiles)}


def whole(case: Blocked) -> tuple[bool, bool]:
    """Whether activations, and weights, consist of whole blocks, so that their formats' bits per element hold."""
    return case.K % GROUP == 0, case.K % GROUP == case.N % GROUP == 0


def useful(case: Blocked) -> Cost:
    """The component's Cost: operands in their formats, scales included where all blocks are whole, the output in its own."""
    work, result = Work(1, case.M), TYPES[case.out].format
    activation = TYPES[case.dtype].format if case.dtype != "fp8" else FORMATS["fp8-token"] if whole(case)[0] else FP8
    weight = FORMATS["fp8-block"] if whole(case)[1] else FP8
    read, written = (Linear(case.K, case.N, weight=weight, activation=fmt).cost(work) for fmt in (activation, result))
    return Cost(dict(read.flops), dict(read.read), dict(written.write), read.launches)


def expected(case: Blocked, tensors: Tensors) -> Expected:
    """a is read once per column of tiles, b once per row of tiles, a scale of b by every program once per step.

    Scales of blocks that the edge cuts belong to the launch: a format counts whole blocks.
    """
    cut, cost, (whole_a, whole_b) = case.cut, useful(case), whole(case)
    rows, columns, blocks = ceil_div(case.M, cut.BM), ceil_div(case.N, cut.BN), ceil_div(case.K, GROUP)
    size = TYPES[case.dtype].format
    a, b = size.bytes(case.M * case.K), FP8.bytes(case.N * case.K)
    b_scales = 4 * ceil_div(case.N, GROUP) * blocks
    moved = {
        "a": Moved("activations", read=a, requested=a * columns),
        "b": Moved("weights", read=b, requested=b * rows),
        "b_scales": Moved("weights" if whole_b else "", read=b_scales, requested=4 * rows * columns * blocks),
    }
    if case.dtype == "fp8":
        scales = 4 * case.M * blocks
        moved["a_scales"] = Moved("activations" if whole_a else "", read=scales, requested=scales * columns)
    programs, out = rows * columns * cut.splits, cost.write["activations"]
    kernels = launches("gemm_fp8_block_kernel", programs, moved, case.M, case.N, cut.splits, out)
    executed = 2 * rows * cut.BM * columns * cut.BN * blocks * GROUP
    return Expected(cost, kernels, TYPES["fp8"].triton, executed, lambda: 2 * case.M * case.N * case.K)


def library(case: Blocked, tensors: Tensors) -> Any:
    """cuBLAS's matmul with the same blocks, where torch offers it; a quantise pass before it for 16-bit activations."""
    a, scales, b, b_scales = (tensors[name] for name in ("a", "a_scales", "b", "b_scales"))
    if not all(whole(case)):
        return None
    columns = b_scales.t()
    known = None if scales is None else scales.t().contiguous().t()

    def run() -> torch.Tensor:
        codes, by_block = a, known
        if known is None:
            codes, found = quantize_fp8(a)
            by_block = found.t().contiguous().t()
        return torch._scaled_mm(codes, b.t(), scale_a=by_block, scale_b=columns, out_dtype=TYPES[case.out].torch)

    return run


SMALL, SKINNY = Tiles(32, 64, GROUP), Tiles(16, 32, GROUP, splits=2)
CASES = (
    Blocked("ragged", "fp8", 70, 150, 300, tiles=SMALL),
    Blocked("whole-blocks", "fp8", 33, 256, 384, tiles=SMALL),
    Blocked("chosen-skinny", "fp8", 3, 136, 1100),
    Blocked("split", "fp8", 9, 128, 640, "fp32", tiles=SKINNY),
    Blocked("short", "fp8", 1, 40, 72, tiles=replace(SKINNY, splits=1)),
    Blocked("grouped-rows", "fp8", 90, 96, 200, "fp32", tiles=replace(SMALL, BN=32, group=2)),
    Blocked("quantised-inside", "bf16", 37, 128, 256, tiles=SMALL),
    Blocked("inside-ragged", "bf16", 21, 77, 333, tiles=SKINNY),
)
TOLERANCE = {
    "bf16": Tolerance(3e-3, "products of fp8 are exact in fp32, steps scaled and added in fp32; rounded once to bf16"),
    "fp32": Tolerance(1e-6, "products of fp8 are exact in fp32; sums in another order"),
    "bf16-bf16": Tolerance(
        1e-2, "codes as the reference rounds them, but where fp32 and float64 fall on two sides of a half", element=6
    ),
}
DEEPSEEK = (4096, 7168, 4096)
UNIT = {"gemm_fp8_block_kernel": "QGMMA"}
BUILDS = (
    Build(Blocked("deepseek", "fp8", *DEEPSEEK), UNIT, targets=("sm_90", "sm_100")),
    Build(Blocked("deepseek-inside", "bf16", *DEEPSEEK), UNIT),
    Build(Blocked("batch-64", "fp8", 64, 7168, 2048), UNIT),
    Build(Blocked("decode", "fp8", 16, 7168, 2048)),
)
MEASURED = (
    Blocked("deepseek-4k", "fp8", *DEEPSEEK),
    Blocked("decode-64-inside", "bf16", 64, 7168, 16384),
)
SPEC = Spec(
    "gemm_fp8_block", "Linear", CASES, inputs, reference, launch, expected, TOLERANCE, BUILDS, MEASURED, library
)  # fmt: skip
