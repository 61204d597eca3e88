"""Weight-only matmul: 16-bit activations times 4-bit floats (e2m1) in blocks, MXFP4 or NVFP4.

MXFP4 shares an 8-bit power of two among 32 elements; NVFP4 an fp8 number among 16, and one fp32 number among all, which
multiplies the finished sums. An element times its block's scale is exact in bfloat16 for both, so nothing is lost on the way.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl

from roofline.configs.quantization import weight_only as in_16_bits
from roofline.errors import InputError
from roofline.formats import FORMATS, Format
from roofline.kernels import buffers, weight_only
from roofline.kernels.arguments import FLOATING, SINGLE, check, check_tile
from roofline.kernels.device import current, of
from roofline.kernels.microscaling import elements, powers, widen_blocks, widen_e8m0
from roofline.kernels.spec import EVERYWHERE, Build, Expected, Moved, Spec, Tensors, Tolerance
from roofline.kernels.tiling import Tiles, partial_sums, place, sum_parts
from roofline.kernels.types import Source
from roofline.kernels.weight_only import WeightOnly
from roofline.numeric import ceil_div

BLOCKS = {"mxfp4": 32, "nvfp4": 16}
"""Elements that share a scale."""
SKINNY = (32, 128)
"""Columns and steps of K at few rows: bytes lie along K."""


@triton.jit
def gemm_mxfp4_kernel(
    x, packed, scales, factor, out, M, N, K,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, GROUP: tl.constexpr, SPLITS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One tile of the output, or one part of its sum over K; packed is [N, K / 2], scales [N, K / BLOCK]."""
    row, column = place(tl.program_id(0), tl.cdiv(M, BM), tl.cdiv(N, BN), GROUP)
    part = tl.program_id(1)
    steps = tl.cdiv(tl.cdiv(K, BK), SPLITS)
    start = part * steps * BK
    rows = row * BM + tl.arange(0, BM)
    columns = column * BN + tl.arange(0, BN)
    inner = tl.arange(0, BK)
    byte = tl.arange(0, BK // 2)
    block = tl.arange(0, BK // BLOCK)
    x_row = x + rows[:, None].to(tl.int64) * K
    packed_row = packed + columns[:, None].to(tl.int64) * (K // 2)
    scale_row = scales + columns[:, None].to(tl.int64) * (K // BLOCK)
    total = tl.zeros((BM, BN), tl.float32)
    for k in range(start, tl.minimum(start + steps * BK, K), BK):
        value = tl.load(x_row + k + inner[None, :], mask=(rows[:, None] < M) & (k + inner[None, :] < K), other=0.0)
        real = columns[:, None] < N
        codes = tl.load(packed_row + k // 2 + byte[None, :], mask=real & (k // 2 + byte[None, :] < K // 2), other=0)
        at = k // BLOCK + block[None, :]
        if factor is None:
            scale = widen_e8m0(tl.load(scale_row + at, mask=real & (at < K // BLOCK), other=0))
        else:
            scale = tl.load(scale_row + at, mask=real & (at < K // BLOCK), other=0.0).to(tl.float32)
        weight = widen_blocks(codes, scale, BN, BK, BLOCK).to(value.dtype)
        total = tl.dot(value, tl.trans(weight), total, input_precision="ieee")
    if factor is not None:
        total *= tl.load(factor)
    at = out + (part * M + rows[:, None]).to(tl.int64) * N + columns[None, :]
    tl.store(at, total.to(out.dtype.element_ty), mask=(rows[:, None] < M) & (columns[None, :] < N))


def gemm_mxfp4(
    x: torch.Tensor, packed: torch.Tensor, scales: torch.Tensor, factor: torch.Tensor | None = None, tiles: Tiles | None = None
) -> torch.Tensor:
    """``x [M, K]`` times a weight of 4-bit floats, summed in fp32, of x's type ``[M, N]``.

    Args:
        packed: uint8 ``[N, K / 2]``, the earlier element in the lower half of a byte. scales: of MXFP4 e8m0 in uint8
            ``[N, K / 32]``; of NVFP4 fp8 ``[N, K / 16]``. factor: NVFP4's fp32 number for the whole tensor, ``[1]``.

    Raises InputError for arguments that do not fit each other.
    """
    check("x", x, (None, None), FLOATING)
    M, K = x.shape
    size = BLOCKS["mxfp4" if factor is None else "nvfp4"]
    if K % size:
        raise InputError(f"x: {K} columns are not whole blocks of {size}")
    check("packed", packed, (None, K // 2), (torch.uint8,), x)
    N = len(packed)
    check("scales", scales, (N, K // size), (torch.uint8 if factor is None else torch.float8_e4m3fn,), x)
    check("factor", factor, (1,), SINGLE, x)
    out = buffers.empty(M, N, dtype=x.dtype, device=x.device)
    if M:
        cut = tiles or weight_only.choose(M, N, K, of(x), SKINNY)
        check_tile("tiles", cut.warps, cut.BM * cut.BN, BM=cut.BM, BN=cut.BN, BK=cut.BK)
        parts = partial_sums(out, cut.splits)
        gemm_mxfp4_kernel[(ceil_div(M, cut.BM) * ceil_div(N, cut.BN), cut.splits)](
            x, packed, scales, factor, parts, M, N, K, BM=cut.BM, BN=cut.BN, BK=cut.BK, GROUP=cut.group, SPLITS=cut.splits,
            BLOCK=size, num_warps=cut.warps, num_stages=cut.stages,
        )  # fmt: skip
        sum_parts(parts, out, cut.splits)
    return out


@dataclass(frozen=True)
class Floats(WeightOnly):
    """``stored`` as "mxfp4" or "nvfp4"."""

    stored: str = "mxfp4"

    @property
    def cut(self) -> Tiles:
        """The tiles of its launch."""
        return self.tiles or weight_only.choose(self.M, self.N, self.K, current(), SKINNY)

    @property
    def block(self) -> int:
        """Elements that share a scale."""
        return BLOCKS[self.stored]

    @property
    def format(self) -> Format:
        """The format of its weight."""
        return in_16_bits(FORMATS[self.stored])


def inputs(case: Floats, device: str) -> Tensors:
    """Activations, every code of an element, and scales of several binades."""
    source, nvidia = Source(case.name, device), case.stored == "nvfp4"
    spread = source.uniform(case.N, case.K // case.block)
    scales = (0.25 + spread).to(torch.float8_e4m3fn) if nvidia else (120 + spread * 5).to(torch.uint8)
    return {
        "x": source.normal(case.M, case.K, dtype=case.dtype),
        "packed": (source.uniform(case.N, case.K // 2) * 256).to(torch.uint8),
        "scales": scales,
        "factor": source.uniform(1) / 16 + 0.01 if nvidia else None,
    }


def dequantized(case: Floats, tensors: Tensors) -> torch.Tensor:
    """The weight ``[N, K]`` in float64."""
    scales = tensors["scales"]
    wide = scales.double() * tensors["factor"].double() if case.stored == "nvfp4" else powers(scales)
    return elements(tensors["packed"]) * wide.repeat_interleave(case.block, 1)


def reference(case: Floats, tensors: Tensors) -> Tensors:
    """The product with the dequantised weight in float64."""
    return {"out": tensors["x"].double() @ dequantized(case, tensors).T}


def launch(case: Floats, tensors: Tensors) -> Tensors:
    """The Triton kernels."""
    return {"out": gemm_mxfp4(**tensors, tiles=case.tiles)}


def expected(case: Floats, tensors: Tensors) -> Expected:
    """Elements and scales once per row of tiles; the number of the whole tensor once per program."""
    cut, cost = case.cut, weight_only.useful(case, case.format)
    programs = ceil_div(case.M, cut.BM) * ceil_div(case.N, cut.BN) * cut.splits
    extra = {"factor": Moved("", read=4, requested=4 * programs)} if case.stored == "nvfp4" else {}
    weights = {"packed": (case.N * case.K // 2, 1), "scales": (case.N * case.K // case.block, 1)}
    return weight_only.expected(case, cut, cost, "gemm_mxfp4_kernel", weights, extra)


def library(case: Floats, tensors: Tensors) -> Any:
    """cuBLAS over the same weight in 16 bits."""
    return weight_only.dense_library(tensors["x"], dequantized(case, tensors).T)


SMALL, SPLIT = Tiles(32, 32, 32), Tiles(16, 32, 64, splits=4)
CASES = (
    Floats("chosen", "bf16", 3, 72, 544),
    Floats("ragged", "bf16", 41, 83, 160, Tiles(32, 64, 64)),
    Floats("split", "bf16", 5, 50, 352, SPLIT),
    Floats("half", "fp16", 19, 40, 96, SMALL),
    Floats("nvfp4-ragged", "bf16", 37, 77, 112, Tiles(32, 32, 64), stored="nvfp4"),
    Floats("nvfp4-split", "fp16", 7, 45, 272, SPLIT, stored="nvfp4"),
    Floats("nvfp4-one-row", "bf16", 1, 1, 48, Tiles(16, 16, 32), stored="nvfp4"),
)
TOLERANCE = {
    "bf16": Tolerance(3e-3, "weights are exact in bf16, sums in fp32, rounded once to bf16"),
    "fp16": Tolerance(4e-4, "weights are exact in fp16 here, sums in fp32, rounded once to fp16"),
}
LARGE, DECODE = (4096, 14336, 4096), (16, 4096, 14336)
KERNEL = "gemm_mxfp4_kernel"
BUILDS = (
    Build(Floats("large", "bf16", *LARGE), {KERNEL: "HGMMA"}, (), EVERYWHERE),
    Build(Floats("large-nvfp4", "bf16", *LARGE, stored="nvfp4"), {KERNEL: "HGMMA"}),
    Build(Floats("decode", "bf16", *DECODE), {KERNEL: "HMMA"}),
    Build(Floats("decode-nvfp4", "bf16", *DECODE, stored="nvfp4"), {KERNEL: "HMMA"}),
)
MEASURED = (
    Floats("decode-16", "bf16", *DECODE),
    Floats("decode-1-nvfp4", "bf16", 1, 4096, 14336, stored="nvfp4"),
)
SPEC = Spec(
    "gemm_mxfp4", "Linear", CASES, inputs, reference, launch, expected, TOLERANCE, BUILDS, MEASURED, library
)  # fmt: skip
