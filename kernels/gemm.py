"""Dense matmul ``[M, K] @ [K, N] (+ bias)``: the linear layers of a model.

Three launches of one piece of mathematics: a tile per program; the same with K split over programs and a second kernel
that sums the parts (decode, where too few tiles exist to fill a GPU); and persistent programs that walk over tiles moved
by the tensor memory accelerator (large shapes on sm_90 and later).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from roofline.components.linear import Linear
from roofline.cost import Cost
from roofline.errors import InputError
from roofline.kernels import buffers
from roofline.kernels.arguments import FLOATING, NARROW, check, check_tile
from roofline.kernels.device import Device, current, of
from roofline.kernels.spec import EVERYWHERE, Build, Case, Expected, Moved, Spec, Tensors, Tolerance
from roofline.kernels.tiling import Tiles, launches, partial_sums, parts_of_k, place, power_of_two, sum_parts
from roofline.kernels.types import NAMES, TYPES, Source
from roofline.numeric import ceil_div
from roofline.work import Work


@triton.jit
def gemm_kernel(
    a, b, bias, out, M, N, K, a_row, a_col, b_row, b_col,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, GROUP: tl.constexpr, SPLITS: tl.constexpr,
    ACCUMULATOR: tl.constexpr, WHOLE_K: tl.constexpr,
):  # fmt: skip
    """One tile of the output, or one part of its sum over K; out is [SPLITS, M, N]."""
    row, column = place(tl.program_id(0), tl.cdiv(M, BM), tl.cdiv(N, BN), GROUP)
    part = tl.program_id(1)
    steps = tl.cdiv(tl.cdiv(K, BK), SPLITS)
    start = part * steps * BK
    rows = row * BM + tl.arange(0, BM)
    columns = column * BN + tl.arange(0, BN)
    inner = tl.arange(0, BK)
    a_at = a + rows[:, None].to(tl.int64) * a_row + (start + inner)[None, :] * a_col
    b_at = b + (start + inner)[:, None].to(tl.int64) * b_row + columns[None, :].to(tl.int64) * b_col
    total = tl.zeros((BM, BN), ACCUMULATOR)
    for k in range(start, tl.minimum(start + steps * BK, K), BK):
        if WHOLE_K:
            x = tl.load(a_at, mask=rows[:, None] < M, other=0.0)
            y = tl.load(b_at, mask=columns[None, :] < N, other=0.0)
        else:
            x = tl.load(a_at, mask=(rows[:, None] < M) & (k + inner[None, :] < K), other=0.0)
            y = tl.load(b_at, mask=(k + inner[:, None] < K) & (columns[None, :] < N), other=0.0)
        total = tl.dot(x, y, total, input_precision="ieee", out_dtype=ACCUMULATOR)
        a_at += BK * a_col
        b_at += BK * b_row
    if bias is not None:
        total += tl.load(bias + columns, mask=columns < N, other=0.0).to(ACCUMULATOR)[None, :]
    at = out + (part * M + rows[:, None]).to(tl.int64) * N + columns[None, :]
    tl.store(at, total.to(out.dtype.element_ty), mask=(rows[:, None] < M) & (columns[None, :] < N))


@triton.jit
def gemm_tma_kernel(
    a, b, out, M, N, K,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, GROUP: tl.constexpr, PROGRAMS: tl.constexpr,
    ACCUMULATOR: tl.constexpr, TRANSPOSED: tl.constexpr,
):  # fmt: skip
    """Tiles first, first + PROGRAMS, ... of the output; a, b and out are tensor descriptors, b of [N, K] if TRANSPOSED."""
    tiles_m = tl.cdiv(M, BM)
    tiles_n = tl.cdiv(N, BN)
    for tile in tl.range(tl.program_id(0), tiles_m * tiles_n, PROGRAMS, flatten=True):
        row, column = place(tile, tiles_m, tiles_n, GROUP)
        total = tl.zeros((BM, BN), ACCUMULATOR)
        for k in range(0, K, BK):
            x = a.load([row * BM, k])
            y = b.load([column * BN, k]).T if TRANSPOSED else b.load([k, column * BN])
            total = tl.dot(x, y, total, out_dtype=ACCUMULATOR)
        out.store([row * BM, column * BN], total.to(out.dtype))


def choose(M: int, N: int, K: int, dtype: str, device: Device, tma: bool) -> Tiles:
    """Tiles by shape, operand type and device; ``tma``: whether the operands can be moved by TMA.

    Rows that begin anywhere are loaded element by element, each with an address in registers, and take small tiles.
    """
    deep = 2 if TYPES[dtype].torch.itemsize == 1 else 1
    if dtype == "fp32":
        return Tiles(64, 64, 32, warps=8, stages=2)
    if M <= 32:
        BM, BN, BK = power_of_two(M, 16), 64, 128 * deep
        return Tiles(BM, BN, BK, parts_of_k(ceil_div(N, BN), K, BK, device), warps=4, stages=3)
    if M <= 64:
        return Tiles(64, 64, 64 * deep, warps=4, stages=4)
    if K % 16 or (N % 16 and not tma and M > 128):
        return Tiles(128, 128 if M > 128 else 64, 32, warps=8, stages=4)
    if ceil_div(M, 128) * ceil_div(N, 256) < device.units or device.shared < 200_000:
        stages = 4 if device.shared >= 200_000 else 3 if device.shared >= 100_000 else 2
        return Tiles(128, 128 if M > 128 else 64, 64 * deep, warps=8 if M > 128 else 4, stages=stages)
    wide = 128 if dtype == "int8" else 256
    return Tiles(128, wide, 64 * deep, warps=8, stages=3, persistent=tma and device.has_tma)


def can_use_tma(a: torch.Tensor, b: torch.Tensor, bias: torch.Tensor | None, N: int, out_size: int) -> bool:
    """TMA wants the inner dimension contiguous and every row at a multiple of 16 bytes."""
    size = a.element_size()
    inner = b.stride(1) == 1 or b.stride(0) == 1
    strides = (a.stride(0) * size, (b.stride(0) if b.stride(1) == 1 else b.stride(1)) * size, N * out_size)
    aligned = all(stride % 16 == 0 for stride in strides) and a.data_ptr() % 16 == b.data_ptr() % 16 == 0
    eight_bits_fit = size > 1 or b.stride(0) == 1
    return bias is None and inner and aligned and a.stride(1) == 1 and eight_bits_fit and a.dtype != torch.float32


def gemm(
    a: torch.Tensor,
    b: torch.Tensor,
    bias: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    tiles: Tiles | None = None,
) -> torch.Tensor:
    """``a [M, K] @ b [K, N] + bias [N]``.

    Any strides; a weight stored [N, K] is passed as ``weight.T``, which 8-bit matrix units want. Sums in fp32, exactly in
    int32 for int8. The result is of ``out_dtype``: by default the operands', int32 for int8. Raises InputError for arguments
    that do not fit each other, and for tiles that cannot do what is asked.
    """
    check("a", a, (None, None), (*FLOATING, *NARROW), strides="any")
    M, K = a.shape
    check("b", b, (K, None), (a.dtype,), a, strides="any")
    N, integers = b.shape[1], a.dtype == torch.int8
    check("bias", bias, (N,), (*FLOATING, torch.int32) if integers else FLOATING, a)
    out_dtype = out_dtype or (torch.int32 if integers else a.dtype)
    if not (integers or out_dtype.is_floating_point):
        raise InputError(f"out_dtype: {out_dtype} of {a.dtype} operands; pass a floating-point type")
    out = buffers.empty(M, N, dtype=out_dtype, device=a.device)
    if not M * N:
        return out
    accumulator, partial_type = (tl.int32, torch.int32) if integers else (tl.float32, torch.float32)
    if tiles is None:
        device = of(a)
        tiles = choose(M, N, K, NAMES[a.dtype], device, can_use_tma(a, b, bias, N, out.element_size()))
    check_tile("tiles", tiles.warps, tiles.BM * tiles.BN, BM=tiles.BM, BN=tiles.BN, BK=tiles.BK)
    if tiles.persistent and not can_use_tma(a, b, bias, N, out.element_size()):
        raise InputError("tiles: persistent ones are moved by TMA: 16 or 8 bits, no bias, rows at multiples of 16 bytes")
    cut: dict[str, Any] = {"BM": tiles.BM, "BN": tiles.BN, "BK": tiles.BK, "GROUP": tiles.group}
    cut |= {"num_warps": tiles.warps, "num_stages": tiles.stages, "ACCUMULATOR": accumulator}
    grid = ceil_div(M, tiles.BM) * ceil_div(N, tiles.BN)
    if tiles.persistent:
        transposed = b.stride(1) != 1
        stored = b.T if transposed else b
        blocks = (tiles.BN, tiles.BK) if transposed else (tiles.BK, tiles.BN)
        programs = min(grid, of(a).units)
        gemm_tma_kernel[(programs,)](
            TensorDescriptor.from_tensor(a, [tiles.BM, tiles.BK]),
            TensorDescriptor.from_tensor(stored, list(blocks)),
            TensorDescriptor.from_tensor(out, [tiles.BM, tiles.BN]),
            M, N, K, PROGRAMS=programs, TRANSPOSED=transposed, **cut,
        )  # fmt: skip
        return out
    parts = partial_sums(out, tiles.splits, partial_type)
    gemm_kernel[(grid, tiles.splits)](
        a, b, bias if tiles.splits == 1 else None, parts, M, N, K, *a.stride(), *b.stride(),
        SPLITS=tiles.splits, WHOLE_K=K % tiles.BK == 0, **cut,
    )  # fmt: skip
    return sum_parts(parts, out, tiles.splits, bias)


@dataclass(frozen=True)
class Gemm(Case):
    """``M, N, K``; ``out``: type of the result; ``stored``: the weight lies as [K, N] or as [N, K]."""

    M: int
    N: int
    K: int
    out: str
    bias: bool = False
    stored: str = "NK"
    tiles: Tiles | None = None

    @property
    def cut(self) -> Tiles:
        """The tiles of its launch."""
        if self.tiles is not None:
            return self.tiles
        size, out = TYPES[self.dtype].torch.itemsize, TYPES[self.out].torch.itemsize
        aligned = self.K * size % 16 == self.N * out % 16 == 0 and (self.stored == "NK" or self.N * size % 16 == 0)
        tma = aligned and not self.bias and self.dtype != "fp32" and (size > 1 or self.stored == "NK")
        return choose(self.M, self.N, self.K, self.dtype, current(), tma)


def inputs(case: Gemm, device: str) -> Tensors:
    """Operands scaled so that sums stay near 1."""
    source = Source(case.name, device)
    a = source.normal(case.M, case.K, dtype=case.dtype)
    b = source.normal(*((case.N, case.K) if case.stored == "NK" else (case.K, case.N)), dtype=case.dtype)
    bias = source.normal(case.N, dtype=case.out) if case.bias else None
    return {"a": a, "b": b.T if case.stored == "NK" else b, "bias": bias}


def reference(case: Gemm, tensors: Tensors) -> Tensors:
    """Matmul in float64, whole numbers for int8."""
    product = tensors["a"].double() @ tensors["b"].double()
    if tensors["bias"] is not None:
        product = product + tensors["bias"].double()
    return {"out": product.to(torch.int32) if case.out == "int32" else product}


def launch(case: Gemm, tensors: Tensors) -> Tensors:
    """The Triton kernel."""
    return {"out": gemm(**tensors, out_dtype=TYPES[case.out].torch, tiles=case.tiles)}


def useful(case: Gemm) -> Cost:
    """The component's Cost: its inputs in the operands' format, its output and bias in the result's."""
    operand, result = TYPES[case.dtype].format, TYPES[case.out].format
    work = Work(1, case.M)
    read = Linear(case.K, case.N, weight=operand, activation=operand).cost(work)
    written = Linear(case.K, case.N, case.bias, operand, result).cost(work)
    return Cost(dict(written.flops), {**read.read, "weights": written.read["weights"]}, dict(written.write), written.launches)


def expected(case: Gemm, tensors: Tensors) -> Expected:
    """a is read once per column of tiles, b once per row of tiles; parts of K go through memory in 32 bits."""
    cut, cost = case.cut, useful(case)
    rows, columns, steps = ceil_div(case.M, cut.BM), ceil_div(case.N, cut.BN), ceil_div(case.K, cut.BK)
    bias = TYPES[case.out].format.bytes(case.N) if case.bias else 0
    a, b, out = cost.read["activations"], cost.read["weights"] - bias, cost.write["activations"]
    moved = {
        "a": Moved("activations", read=a, requested=a * columns),
        "b": Moved("weights", read=b, requested=b * rows),
    }
    if case.bias and cut.splits == 1:
        moved["bias"] = Moved("weights", read=bias, requested=bias * rows)
    kernel, programs = "gemm_kernel", rows * columns * cut.splits
    if cut.persistent:
        kernel, programs = "gemm_tma_kernel", min(rows * columns, current().units)
    kernels = launches(kernel, programs, moved, case.M, case.N, cut.splits, out, bias)
    executed = 2 * rows * cut.BM * columns * cut.BN * steps * cut.BK
    return Expected(cost, kernels, TYPES[case.dtype].triton, executed, lambda: 2 * case.M * case.N * case.K)


def library(case: Gemm, tensors: Tensors) -> Any:
    """cuBLAS through torch."""
    a, b, bias = tensors["a"], tensors["b"], tensors["bias"]
    if case.dtype in ("bf16", "fp16", "fp32"):
        return lambda: torch.addmm(bias, a, b) if bias is not None else torch.mm(a, b)
    if case.dtype == "int8":
        return lambda: torch._int_mm(a, b)
    one = torch.ones((), device=a.device)
    return lambda: torch._scaled_mm(a, b, scale_a=one, scale_b=one, out_dtype=TYPES[case.out].torch)


SMALL, SKINNY, PERSISTENT = Tiles(32, 64, 32), Tiles(16, 32, 64, splits=4), Tiles(32, 64, 64, persistent=True)
CASES = (
    Gemm("chosen-skinny", "bf16", 3, 136, 1040, "bf16"),
    Gemm("chosen", "bf16", 130, 200, 72, "bf16", bias=True),
    Gemm("ragged", "bf16", 70, 150, 100, "bf16", bias=True, tiles=SMALL),
    Gemm("whole-tiles", "bf16", 64, 128, 96, "bf16", stored="KN", tiles=SMALL),
    Gemm("one-row", "bf16", 1, 72, 200, "bf16", tiles=SKINNY),
    Gemm("one-column", "bf16", 37, 1, 65, "fp32", tiles=SMALL),
    Gemm("grouped-rows", "bf16", 300, 90, 33, "bf16", tiles=Tiles(32, 32, 32, group=4)),
    Gemm("split-bias", "fp16", 5, 130, 330, "fp16", bias=True, tiles=SKINNY),
    Gemm("split-empty-part", "fp16", 3, 40, 150, "fp16", tiles=SKINNY),
    Gemm("half", "fp16", 33, 65, 129, "fp16", stored="KN", tiles=SMALL),
    Gemm("single", "fp32", 45, 77, 110, "fp32", bias=True, tiles=SMALL),
    Gemm("fp8", "fp8", 50, 96, 144, "bf16", tiles=SMALL),
    Gemm("fp8-split", "fp8", 9, 80, 272, "bf16", tiles=SKINNY),
    Gemm("fp8-e5m2", "fp8-e5m2", 34, 70, 90, "fp16", tiles=SMALL),
    Gemm("int8", "int8", 41, 83, 170, "int32", tiles=SMALL),
    Gemm("int8-split", "int8", 7, 50, 260, "int32", tiles=SKINNY),
    Gemm("tma", "bf16", 72, 136, 104, "bf16", tiles=PERSISTENT),
    Gemm("tma-rows", "fp16", 40, 200, 88, "fp16", stored="KN", tiles=PERSISTENT),
    Gemm("tma-fp8", "fp8", 50, 96, 144, "bf16", tiles=PERSISTENT),
    Gemm("tma-many", "bf16", 400, 640, 16, "bf16", tiles=Tiles(32, 32, 16, persistent=True)),
)
ROUNDED = "sums in fp32, rounded once to {}: half a unit in the last place is {:.0e} of a value at most"
TOLERANCE = {
    "bf16": Tolerance(3e-3, ROUNDED.format("bf16", 2**-9)),
    "fp16": Tolerance(4e-4, ROUNDED.format("fp16", 2**-12)),
    "fp32": Tolerance(1e-6, "sums of fp32 products in another order"),
    "fp8": Tolerance(3e-3, "products of fp8 are exact in fp32; " + ROUNDED.format("bf16", 2**-9)),
    "fp8-e5m2": Tolerance(4e-4, "products of fp8 are exact in fp32; " + ROUNDED.format("fp16", 2**-12)),
    "int8": Tolerance(0, "exact"),
}
LARGE, DECODE = (4096, 14336, 4096), (16, 4096, 14336)
TMA = ("gemm_tma_kernel",)
BUILDS = (
    Build(Gemm("large", "bf16", *LARGE, "bf16"), {"gemm_tma_kernel": "HGMMA"}, TMA, EVERYWHERE),
    Build(Gemm("large-bias", "bf16", *LARGE, "bf16", bias=True), {"gemm_kernel": "HGMMA"}),
    Build(Gemm("large-half", "fp16", *LARGE, "fp16"), {"gemm_tma_kernel": "HGMMA"}, TMA),
    Build(Gemm("medium", "bf16", 256, 4096, 4096, "bf16"), {"gemm_kernel": "HGMMA"}),
    Build(Gemm("batch-64", "bf16", 64, 4096, 4096, "bf16"), {"gemm_kernel": "HGMMA"}),
    Build(Gemm("decode", "bf16", *DECODE, "bf16"), {"gemm_kernel": "HMMA"}),
    Build(Gemm("large-fp8", "fp8", *LARGE, "bf16"), {"gemm_tma_kernel": "QGMMA"}, TMA),
    Build(Gemm("large-int8", "int8", *LARGE, "int32"), {"gemm_tma_kernel": "IGMMA"}, TMA),
    Build(Gemm("single", "fp32", 1024, 1024, 1024, "fp32")),
    Build(Gemm("ragged", "bf16", 4095, 4097, 4099, "bf16"), {"gemm_kernel": "HGMMA"}),
    Build(Gemm("ragged-bias", "bf16", 4096, 4096, 11000, "bf16", bias=True), {"gemm_kernel": "HGMMA"}),
    Build(Gemm("vocabulary", "bf16", 4096, 50257, 4096, "bf16"), {"gemm_kernel": "HGMMA"}),
)
MEASURED = (
    Gemm("square-8k", "bf16", 8192, 8192, 8192, "bf16"),
    Gemm("mlp-4k", "bf16", *LARGE, "bf16"),
    Gemm("batch-64", "bf16", 64, 4096, 14336, "bf16"),
    Gemm("decode-16", "bf16", *DECODE, "bf16"),
    Gemm("decode-1", "bf16", 1, 4096, 14336, "bf16"),
    Gemm("square-8k-fp8", "fp8", 8192, 8192, 8192, "bf16"),
    Gemm("square-8k-int8", "int8", 8192, 8192, 8192, "int32"),
)
SPEC = Spec(
    "gemm", "Linear", CASES, inputs, reference, launch, expected, TOLERANCE, BUILDS, MEASURED, library
)  # fmt: skip
