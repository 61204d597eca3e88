"""W8A8: int8 activations with one scale per token times int8 weights with one scale per output channel.

The matrix unit sums whole numbers in 32 bits, so the product is exact; both scales are applied once to a finished sum.
Activations that arrive in 16 bits are quantised by a pass of its own in front (``quantize_tokens``), which reads each row
once and writes it back half as wide: what fusing it into the kernel before would save.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl

from roofline.components.linear import Linear
from roofline.components.mixing import Quantise
from roofline.cost import Cost
from roofline.errors import InputError
from roofline.formats import INT8
from roofline.kernels import buffers
from roofline.kernels.arguments import FLOATING, SINGLE, check, check_tile
from roofline.kernels.device import Device, current, of
from roofline.kernels.spec import EVERYWHERE, Build, Case, Expected, Launch, Moved, Spec, Tensors, Tolerance
from roofline.kernels.tiling import Tiles, place, power_of_two
from roofline.kernels.types import TYPES, Source
from roofline.numeric import ceil_div
from roofline.work import Work

MOST = 127
"""The largest magnitude of an int8 code; -128 is left out, so that the range is symmetric."""


@triton.jit
def quantize_tokens_kernel(x, codes, scales, K, BLOCK: tl.constexpr):
    """One row: its largest magnitude over 127 is the scale, and the row over it, rounded to nearest, the codes."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < K
    value = tl.load(x + row * K + column, mask=inside, other=0.0).to(tl.float32)
    scale = tl.maximum(tl.div_rn(tl.max(tl.abs(value), 0), 127.0), 1e-12)
    tl.store(scales + row, scale)
    tl.store(codes + row * K + column, tl.floor(tl.div_rn(value, scale) + 0.5).to(tl.int8), mask=inside)


@triton.jit
def gemm_int8_kernel(
    a, b, a_scale, b_scale, bias, out, M, N, K,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, GROUP: tl.constexpr, WHOLE_K: tl.constexpr,
):  # fmt: skip
    """One tile of the output; a is [M, K], b [N, K], both with K contiguous."""
    row, column = place(tl.program_id(0), tl.cdiv(M, BM), tl.cdiv(N, BN), GROUP)
    rows = row * BM + tl.arange(0, BM)
    columns = column * BN + tl.arange(0, BN)
    inner = tl.arange(0, BK)
    a_at = a + rows[:, None].to(tl.int64) * K + inner[None, :]
    b_at = b + inner[:, None] + columns[None, :].to(tl.int64) * K
    total = tl.zeros((BM, BN), tl.int32)
    for k in range(0, K, BK):
        if WHOLE_K:
            x = tl.load(a_at, mask=rows[:, None] < M, other=0.0)
            y = tl.load(b_at, mask=columns[None, :] < N, other=0.0)
        else:
            x = tl.load(a_at, mask=(rows[:, None] < M) & (k + inner[None, :] < K), other=0.0)
            y = tl.load(b_at, mask=(k + inner[:, None] < K) & (columns[None, :] < N), other=0.0)
        total = tl.dot(x, y, total, out_dtype=tl.int32)
        a_at += BK
        b_at += BK
    per_token = tl.load(a_scale + rows, mask=rows < M, other=0.0)
    per_channel = tl.load(b_scale + columns, mask=columns < N, other=0.0)
    result = total.to(tl.float32) * per_token[:, None] * per_channel[None, :]
    if bias is not None:
        result += tl.load(bias + columns, mask=columns < N, other=0.0).to(tl.float32)[None, :]
    at = out + rows[:, None].to(tl.int64) * N + columns[None, :]
    tl.store(at, result.to(out.dtype.element_ty), mask=(rows[:, None] < M) & (columns[None, :] < N))


def choose(M: int, N: int, K: int, device: Device) -> Tiles:
    """Tiles by shape and device; few rows take narrow tiles, so that many programs stream the weights."""
    if M <= 32:
        return Tiles(power_of_two(M, 16), 32 if ceil_div(N, 64) < device.units else 64, 256, warps=4, stages=4)
    large = device.shared >= 200_000
    if M <= 64 or K % 16 or ceil_div(M, 128) * ceil_div(N, 128) < device.units:
        return Tiles(64, 64, 128, warps=4, stages=4 if large else 3)
    return Tiles(128, 128, 128 if large else 64, warps=8, stages=4 if large else 2)


def quantize_tokens(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """``x [M, K]`` as int8 codes ``[M, K]`` and fp32 scales ``[M]`` with ``x = codes * scales`` up to half a scale."""
    check("x", x, (None, None), FLOATING)
    M, K = x.shape
    codes = buffers.empty(M, K, dtype=torch.int8, device=x.device)
    scales = buffers.empty(M, dtype=torch.float32, device=x.device)
    if M:
        block = power_of_two(K)
        quantize_tokens_kernel[(M,)](x, codes, scales, K, BLOCK=block, num_warps=min(16, max(1, block // 512)))
    return codes, scales


def gemm_int8(
    a: torch.Tensor, b: torch.Tensor, a_scale: torch.Tensor | None, b_scale: torch.Tensor,
    bias: torch.Tensor | None = None, out_dtype: torch.dtype = torch.bfloat16, tiles: Tiles | None = None,
) -> torch.Tensor:  # fmt: skip
    """``(a * a_scale[:, None]) @ (b * b_scale[:, None]).T + bias`` for a weight ``b [N, K]`` of int8.

    ``a [M, K]`` is int8 with fp32 scales ``[M]``, or floating-point with ``a_scale`` None: then it is quantised first. Raises
    InputError for arguments that do not fit each other.
    """
    check("a", a, (None, None), FLOATING if a_scale is None else (torch.int8,))
    M, K = a.shape
    check("b", b, (None, K), (torch.int8,), a)
    N = len(b)
    check("a_scale", a_scale, (M,), SINGLE, a)
    check("b_scale", b_scale, (N,), SINGLE, a)
    check("bias", bias, (N,), FLOATING, a)
    if out_dtype not in FLOATING:
        raise InputError(f"out_dtype: {out_dtype}; pass a floating-point type of 16 or 32 bits")
    if a_scale is None:
        a, a_scale = quantize_tokens(a)
    out = buffers.empty(M, N, dtype=out_dtype, device=a.device)
    if M * N:
        cut = tiles or choose(M, N, K, of(a))
        check_tile("tiles", cut.warps, cut.BM * cut.BN, BM=cut.BM, BN=cut.BN, BK=cut.BK)
        gemm_int8_kernel[(ceil_div(M, cut.BM) * ceil_div(N, cut.BN),)](
            a, b, a_scale, b_scale, bias, out, M, N, K, BM=cut.BM, BN=cut.BN, BK=cut.BK, GROUP=cut.group,
            WHOLE_K=K % cut.BK == 0, num_warps=cut.warps, num_stages=cut.stages,
        )  # fmt: skip
    return out


@dataclass(frozen=True)
class Scaled(Case):
    """``M, N, K``; ``dtype`` is the result's; ``dynamic``: activations arrive in that type and are quantised first."""

    M: int
    N: int
    K: int
    bias: bool = False
    dynamic: bool = False
    tiles: Tiles | None = None

    @property
    def cut(self) -> Tiles:
        """The tiles of its launch."""
        return self.tiles or choose(self.M, self.N, self.K, current())


def inputs(case: Scaled, device: str) -> Tensors:
    """Codes, or activations with an outlying channel, and scales that keep sums near 1."""
    source = Source(case.name, device)
    codes = source.normal(case.M, case.K, dtype="int8")
    wide = source.normal(case.M, case.K, dtype=case.dtype) if case.dynamic else None
    return {
        "a": codes if wide is None else wide,
        "b": source.normal(case.N, case.K, dtype="int8"),
        "a_scale": None if case.dynamic else (0.5 + source.uniform(case.M)) / MOST,
        "b_scale": (0.5 + source.uniform(case.N)) * (case.K**-0.5 / MOST),
        "bias": source.normal(case.N, dtype=case.dtype) if case.bias else None,
    }


def rounded_rows(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes and scales of each row, scales in fp32 as they are stored, all else in float64."""
    scales = (x.float().abs().amax(1) / MOST).clamp(min=1e-12)
    return torch.floor(x.double() / scales.double()[:, None] + 0.5), scales


def reference(case: Scaled, tensors: Tensors) -> Tensors:
    """The product of the dequantised operands in float64; with ``dynamic`` the codes and scales in between as well."""
    a, a_scale = tensors["a"].double(), tensors["a_scale"]
    if case.dynamic:
        a, a_scale = rounded_rows(tensors["a"])
    product = (a * a_scale.double()[:, None]) @ (tensors["b"].double() * tensors["b_scale"].double()[:, None]).T
    return {"out": product if tensors["bias"] is None else product + tensors["bias"].double()}


def launch(case: Scaled, tensors: Tensors) -> Tensors:
    """The Triton kernels."""
    return {"out": gemm_int8(**tensors, out_dtype=TYPES[case.dtype].torch, tiles=case.tiles)}


def useful(case: Scaled) -> tuple[Cost, Cost]:
    """The components' Costs: of the matmul, int8 in and 16 bits out, and of the pass that quantises (none if static).

    The int8 format has no scales of its own: those that the matmul reads are the launch's.
    """
    work, result = Work(1, case.M), TYPES[case.dtype].format
    read = Linear(case.K, case.N, weight=INT8, activation=INT8).cost(work)
    written = Linear(case.K, case.N, case.bias, INT8, result).cost(work)
    product = Cost(dict(written.flops), {**read.read, "weights": written.read["weights"]}, dict(written.write), 1)
    return product, Quantise(case.K, "token", activation=result, stored=INT8).cost(work) if case.dynamic else Cost()


def expected(case: Scaled, tensors: Tensors) -> Expected:
    """As ``gemm``: a once per column of tiles, b once per row of tiles; scales likewise."""
    cut, (product, pass_) = case.cut, useful(case)
    rows, columns, steps = ceil_div(case.M, cut.BM), ceil_div(case.N, cut.BN), ceil_div(case.K, cut.BK)
    bias = TYPES[case.dtype].format.bytes(case.N) if case.bias else 0
    a, b = product.read["activations"], product.read["weights"] - bias
    moved = {
        "a": Moved("activations", read=a, requested=a * columns),
        "b": Moved("weights", read=b, requested=b * rows),
        "a_scale": Moved("", read=4 * case.M, requested=4 * case.M * columns),
        "b_scale": Moved("", read=4 * case.N, requested=4 * case.N * rows),
        "out": Moved("activations", written=product.write["activations"]),
    }
    if case.bias:
        moved["bias"] = Moved("weights", read=bias, requested=bias * rows)
    kernels = {"gemm_int8_kernel": Launch(rows * columns, moved)}
    if case.dynamic:
        kernels["quantize_tokens_kernel"] = Launch(case.M, {
            "x": Moved("activations", read=pass_.read["activations"]),
            "codes": Moved("activations", written=pass_.write["activations"] - 4 * case.M),
            "scales": Moved("activations", written=4 * case.M),
        })  # fmt: skip
    executed = 2 * rows * cut.BM * columns * cut.BN * steps * cut.BK
    return Expected(product + pass_, kernels, TYPES["int8"].triton, executed, lambda: 2 * case.M * case.N * case.K)


def library(case: Scaled, tensors: Tensors) -> Any:
    """cuBLAS's int8 product to int32, then torch's scaling: what torch offers without a fused kernel."""
    a, b, a_scale, b_scale = (tensors[name] for name in ("a", "b", "a_scale", "b_scale"))
    if case.dynamic or case.bias or case.M <= 16:
        return None
    kind = TYPES[case.dtype].torch
    return lambda: (torch._int_mm(a, b.T) * a_scale[:, None] * b_scale[None, :]).to(kind)


SMALL = Tiles(32, 64, 32)
CASES = (
    Scaled("chosen", "bf16", 5, 72, 520),
    Scaled("ragged", "bf16", 41, 83, 170, bias=True, tiles=SMALL),
    Scaled("whole-tiles", "bf16", 64, 128, 96, tiles=SMALL),
    Scaled("one-row", "fp16", 1, 50, 200, tiles=Tiles(16, 32, 64)),
    Scaled("one-column", "fp16", 37, 1, 65, tiles=SMALL),
    Scaled("dynamic", "bf16", 19, 70, 300, dynamic=True, tiles=SMALL),
    Scaled("grouped-rows", "bf16", 130, 40, 33, dynamic=True, bias=True, tiles=Tiles(32, 32, 32, group=2)),
)
TOLERANCE = {
    "bf16": Tolerance(3e-3, "sums are exact, both scales multiply in fp32, rounded once to bf16"),
    "fp16": Tolerance(4e-4, "sums are exact, both scales multiply in fp32, rounded once to fp16"),
}
LARGE = (4096, 14336, 4096)
BUILDS = (
    Build(Scaled("large", "bf16", *LARGE, dynamic=True), {"gemm_int8_kernel": "IGMMA"}, (), EVERYWHERE),
    Build(Scaled("batch-64", "bf16", 64, 4096, 4096), {"gemm_int8_kernel": "IGMMA"}),
    Build(Scaled("decode", "bf16", 16, 4096, 14336), {"gemm_int8_kernel": "IMMA"}),
)
MEASURED = (
    Scaled("mlp-4k", "bf16", *LARGE),
    Scaled("decode-16", "bf16", 16, 4096, 14336),
)
SPEC = Spec(
    "gemm_int8", "Linear", CASES, inputs, reference, launch, expected, TOLERANCE, BUILDS, MEASURED, library
)  # fmt: skip
