"""Weight-only matmul: 16-bit activations times 4-bit integers with a scale, and perhaps a zero point, per group.

``w = (q - z) * s`` for a weight in the storage order of GPTQ (packed along K) or of AWQ (packed along N, interleaved); both
are read as they lie in a checkpoint. A weight that GPTQ ordered by activations keeps its rows sorted by group, and the
columns of x are gathered through the order instead.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl

from roofline.errors import InputError
from roofline.formats import Format, grouped
from roofline.kernels import buffers, weight_only
from roofline.kernels.arguments import HALF, INT32, check, check_indices, check_tile
from roofline.kernels.device import current, of
from roofline.kernels.spec import EVERYWHERE, Build, Expected, Moved, Spec, Tensors, Tolerance
from roofline.kernels.tiling import Tiles, partial_sums, place, sum_parts
from roofline.kernels.types import Source
from roofline.kernels.weight_only import WeightOnly, spans
from roofline.numeric import ceil_div

SYMMETRIC_ZERO = 8
"""The zero point of a symmetric 4-bit code, which is not stored."""


@triton.jit
def nibbles_of_columns(words, AWQ: tl.constexpr, ROWS: tl.constexpr, BN: tl.constexpr):
    """Codes ``[ROWS, BN]`` of words ``[ROWS, BN / 8]`` that hold eight columns each."""
    place = tl.arange(0, 8)
    nibble = place // 2 + 4 * (place % 2) if AWQ else place
    return tl.reshape((words[:, :, None] >> (4 * nibble)[None, None, :]) & 15, (ROWS, BN))


@triton.jit
def gemm_int4_kernel(
    x, qweight, scales, zeros, order, out, M, N, K,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, GROUP: tl.constexpr, SPLITS: tl.constexpr,
    SIZE: tl.constexpr, SPANS: tl.constexpr, AWQ: tl.constexpr,
):  # fmt: skip
    """One tile of the output, or one part of its sum over K. SIZE: weights per group; SPANS: groups that a step meets."""
    row, column = place(tl.program_id(0), tl.cdiv(M, BM), tl.cdiv(N, BN), GROUP)
    part = tl.program_id(1)
    steps = tl.cdiv(tl.cdiv(K, BK), SPLITS)
    start = part * steps * BK
    rows = row * BM + tl.arange(0, BM)
    columns = column * BN + tl.arange(0, BN)
    packed = column * (BN // 8) + tl.arange(0, BN // 8)
    inner = tl.arange(0, BK)
    span = tl.arange(0, SPANS)
    x_row = x + rows[:, None].to(tl.int64) * K
    total = tl.zeros((BM, BN), tl.float32)
    for k in range(start, tl.minimum(start + steps * BK, K), BK):
        real = k + inner < K
        source = k + inner
        if order is not None:
            source = tl.load(order + source, mask=real, other=0)
        value = tl.load(x_row + source[None, :], mask=(rows[:, None] < M) & real[None, :], other=0.0)
        if AWQ:
            at = qweight + (k + inner)[:, None].to(tl.int64) * (N // 8) + packed[None, :]
            words = tl.load(at, mask=real[:, None] & (packed[None, :] < N // 8), other=0)
            code = nibbles_of_columns(words, True, BK, BN)
        else:
            eighth = k // 8 + tl.arange(0, BK // 8)
            at = qweight + eighth[:, None].to(tl.int64) * N + columns[None, :]
            words = tl.load(at, mask=(eighth[:, None] < K // 8) & (columns[None, :] < N), other=0)
            code = tl.reshape((words[:, None, :] >> (4 * tl.arange(0, 8))[None, :, None]) & 15, (BK, BN))
        group = k // SIZE + span
        known = group < K // SIZE
        scale = tl.load(
            scales + group[:, None] * N + columns[None, :], mask=known[:, None] & (columns[None, :] < N), other=0.0
        ).to(tl.float32)  # fmt: skip
        # A code in the mantissa of 2^23 is that number plus the code: an addition instead of a slow conversion.
        number = (code | 0x4B000000).to(tl.float32, bitcast=True)
        if zeros is None:
            shift = tl.full((SPANS, BN), 8388608.0 + 8.0, tl.float32)
        else:
            held = tl.load(
                zeros + group[:, None] * (N // 8) + packed[None, :], mask=known[:, None] & (packed[None, :] < N // 8), other=0
            )  # fmt: skip
            zero = nibbles_of_columns(held, AWQ, SPANS, BN)
            if not AWQ:
                zero = (zero + 1) & 15
            shift = (zero | 0x4B000000).to(tl.float32, bitcast=True)
        if SPANS > 1:
            shift = tl.reshape(tl.broadcast_to(shift[:, None, :], (SPANS, BK // SPANS, BN)), (BK, BN))
            scale = tl.reshape(tl.broadcast_to(scale[:, None, :], (SPANS, BK // SPANS, BN)), (BK, BN))
        weight = ((number - shift) * scale).to(value.dtype)
        total = tl.dot(value, weight, total, input_precision="ieee")
    at = out + (part * M + rows[:, None]).to(tl.int64) * N + columns[None, :]
    tl.store(at, total.to(out.dtype.element_ty), mask=(rows[:, None] < M) & (columns[None, :] < N))


def gemm_int4(
    x: torch.Tensor, qweight: torch.Tensor, scales: torch.Tensor, zeros: torch.Tensor | None = None,
    order: torch.Tensor | None = None, tiles: Tiles | None = None,
) -> torch.Tensor:  # fmt: skip
    """``x [M, K]`` times a 4-bit weight, summed in fp32, of x's type ``[M, N]``.

    Args:
        qweight: int32, ``[K / 8, N]`` in the order of GPTQ or ``[K, N / 8]`` in that of AWQ: its height says which.
        scales: fp16 ``[K / group, N]``. zeros: int32 ``[K / group, N / 8]`` in the order of ``qweight``'s method, None
            for symmetric codes. order: int32 ``[K]``, the column of x that meets each row of a weight that GPTQ sorted.

    Raises InputError for arguments that do not fit each other.
    """
    check("x", x, (None, None), HALF)
    check("scales", scales, (None, None), HALF, x)
    (M, K), (groups, N) = x.shape, scales.shape
    awq = qweight.shape == (K, N // 8)
    if not groups or N % 8 or K % groups or (K // groups) % 8:
        raise InputError(f"scales: {groups} groups of {N} columns do not fit x {tuple(x.shape)}: whole groups, whole words of 8")
    check("qweight", qweight, (K, N // 8) if awq else (K // 8, N), (torch.int32,), x)
    check("zeros", zeros, (groups, N // 8), (torch.int32,), x)
    check("order", order, (K,), INT32, x)
    check_indices("order", order, K)
    out = buffers.empty(M, N, dtype=x.dtype, device=x.device)
    if M:
        cut, size = tiles or weight_only.choose(M, N, K, of(x)), K // groups
        check_tile("tiles", cut.warps, cut.BM * cut.BN, BM=cut.BM, BN=cut.BN, BK=cut.BK)
        parts = partial_sums(out, cut.splits)
        gemm_int4_kernel[(ceil_div(M, cut.BM) * ceil_div(N, cut.BN), cut.splits)](
            x, qweight, scales, zeros, order, parts, M, N, K, BM=cut.BM, BN=cut.BN, BK=cut.BK, GROUP=cut.group,
            SPLITS=cut.splits, SIZE=size, SPANS=spans(cut, size), AWQ=awq, num_warps=cut.warps, num_stages=cut.stages,
        )  # fmt: skip
        sum_parts(parts, out, cut.splits)
    return out


@dataclass(frozen=True)
class Integers(WeightOnly):
    """Groups of ``group``; ``stored`` in the order of "gptq" or "awq"; ``ordered``: rows sorted by group."""

    group: int = 128
    stored: str = "gptq"
    asymmetric: bool = True
    ordered: bool = False

    @property
    def cut(self) -> Tiles:
        """The tiles of its launch."""
        return self.tiles or weight_only.choose(self.M, self.N, self.K, current())

    @property
    def format(self) -> Format:
        """The format of its weight."""
        return grouped(4, self.group, asymmetric=self.asymmetric)


def inputs(case: Integers, device: str) -> Tensors:
    """Activations, and random words as a checkpoint holds them: every word is eight codes, or eight zero points."""
    source, groups = Source(case.name, device), case.K // case.group

    def words(*shape: int) -> torch.Tensor:
        halves = ((source.uniform(*shape) * 65536).to(torch.int32) for _ in range(2))
        return (next(halves) << 16) | next(halves)

    gptq = case.stored == "gptq"
    return {
        "x": source.normal(case.M, case.K, dtype=case.dtype),
        "qweight": words(case.K // 8, case.N) if gptq else words(case.K, case.N // 8),
        "scales": ((0.5 + source.uniform(groups, case.N)) * (0.2 * case.K**-0.5)).to(torch.float16),
        "zeros": words(groups, case.N // 8) if case.asymmetric else None,
        "order": source.permutation(case.K) if case.ordered else None,
    }


def dequantized(case: Integers, tensors: Tensors) -> torch.Tensor:
    """The weight ``[K, N]`` in float64, nibble by nibble as the storage orders are defined."""
    eight = range(8)
    qweight = tensors["qweight"].to(torch.int64)

    def columns(words: torch.Tensor, nibbles: tuple[int, ...]) -> torch.Tensor:
        return torch.stack([(words >> 4 * nibble) & 15 for nibble in nibbles], 2).flatten(1)

    interleaved, plain = (0, 4, 1, 5, 2, 6, 3, 7), tuple(eight)
    if case.stored == "awq":
        codes = columns(qweight, interleaved)
    else:
        codes = torch.stack([(qweight >> 4 * nibble) & 15 for nibble in eight], 1).flatten(0, 1)
    zeros = torch.full((case.K // case.group, case.N), SYMMETRIC_ZERO, device=qweight.device)
    if case.asymmetric:
        held = tensors["zeros"].to(torch.int64)
        zeros = columns(held, interleaved) if case.stored == "awq" else (columns(held, plain) + 1) % 16
    by_row = [entry.to(torch.float64).repeat_interleave(case.group, 0) for entry in (zeros, tensors["scales"])]
    return (codes.double() - by_row[0]) * by_row[1]


def reference(case: Integers, tensors: Tensors) -> Tensors:
    """The product with the dequantised weight in float64."""
    x = tensors["x"].double()
    if case.ordered:
        x = x[:, tensors["order"].long()]
    return {"out": x @ dequantized(case, tensors)}


def launch(case: Integers, tensors: Tensors) -> Tensors:
    """The Triton kernels."""
    return {"out": gemm_int4(**tensors, tiles=case.tiles)}


def expected(case: Integers, tensors: Tensors) -> Expected:
    """A group's scale and zero point are read again by every step inside it."""
    cut, cost = case.cut, weight_only.useful(case, case.format)
    again, groups = max(1, case.group // cut.BK), case.K // case.group
    weights = {"qweight": (case.K * case.N // 2, 1), "scales": (2 * groups * case.N, again)}
    if case.asymmetric:
        weights["zeros"] = (groups * case.N // 2, again)
    programs = ceil_div(case.M, cut.BM) * ceil_div(case.N, cut.BN)
    extra = {"order": Moved("", read=4 * case.K, requested=4 * case.K * programs)} if case.ordered else {}
    return weight_only.expected(case, cut, cost, "gemm_int4_kernel", weights, extra)


def library(case: Integers, tensors: Tensors) -> Any:
    """cuBLAS over the same weight in 16 bits, rows in the order of x."""
    weight = dequantized(case, tensors)
    if case.ordered:
        weight = torch.empty_like(weight).index_copy_(0, tensors["order"].long(), weight)
    return weight_only.dense_library(tensors["x"], weight)


SMALL, SKINNY = Tiles(32, 32, 32), Tiles(16, 32, 64, splits=4)
CASES = (
    Integers("chosen", "bf16", 3, 136, 640),
    Integers("gptq-ragged", "bf16", 41, 88, 160, Tiles(32, 64, 64), group=32),
    Integers("gptq-symmetric", "fp16", 7, 72, 192, SMALL, group=64, asymmetric=False),
    Integers("gptq-order", "bf16", 19, 40, 256, SMALL, group=64, ordered=True),
    Integers("awq-ragged", "bf16", 37, 104, 224, Tiles(32, 64, 64), group=32, stored="awq"),
    Integers("awq-split", "fp16", 5, 48, 384, SKINNY, stored="awq"),
    Integers("awq-one-row", "bf16", 1, 56, 128, Tiles(16, 64, 32), group=64, stored="awq"),
    Integers("empty-part", "fp16", 9, 24, 320, SKINNY, group=32),
)
TOLERANCE = {
    "bf16": Tolerance(4e-3, "each weight is rounded to bf16 once, and so is the sum: 2^-9 of a value at most, twice"),
    "fp16": Tolerance(5e-4, "each weight is rounded to fp16 once, and so is the sum: 2^-12 of a value at most, twice"),
}
LARGE, DECODE = (4096, 14336, 4096), (16, 4096, 14336)
KERNEL = "gemm_int4_kernel"
BUILDS = (
    Build(Integers("large", "bf16", *LARGE), {KERNEL: "HGMMA"}, (), EVERYWHERE),
    Build(Integers("batch-64", "fp16", 64, 4096, 4096, group=32, stored="awq"), {KERNEL: "HGMMA"}),
    Build(Integers("decode", "bf16", *DECODE), {KERNEL: "HMMA"}),
    Build(Integers("decode-awq", "fp16", *DECODE, stored="awq"), {KERNEL: "HMMA"}),
    Build(Integers("order", "bf16", *DECODE, ordered=True), {KERNEL: "HMMA"}),
)
MEASURED = (
    Integers("decode-1-awq", "bf16", 1, 4096, 14336, stored="awq"),
    Integers("decode-16", "bf16", *DECODE),
)
SPEC = Spec(
    "gemm_int4", "Linear", CASES, inputs, reference, launch, expected, TOLERANCE, BUILDS, MEASURED, library
)  # fmt: skip
