"""RMSNorm over rows, with the residual addition fused in: ``y = x / rms(x) * weight`` for ``x = branch + residual``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl

from roofline.components.mixing import Norm
from roofline.errors import InputError
from roofline.kernels import buffers
from roofline.kernels.arguments import FLOATING, check
from roofline.kernels.spec import EVERYWHERE, Build, Case, Expected, Launch, Moved, Spec, Tensors, Tolerance
from roofline.kernels.tiling import power_of_two
from roofline.kernels.types import TYPES, Source
from roofline.numeric import ceil_div
from roofline.work import Work

EPSILON = 1e-6
WIDEST = 32768


@triton.jit
def rmsnorm_kernel(
    x, residual, weight, out, stream, rows, D, epsilon, ROWS: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """ROWS whole rows in registers; with a residual, their sum is rounded once and stored as the new residual stream."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, BLOCK)
    inside = (row[:, None] < rows) & (column[None, :] < D)
    at = row[:, None].to(tl.int64) * D + column[None, :]
    value = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
    if residual is not None:
        value += tl.load(residual + at, mask=inside, other=0.0).to(tl.float32)
        rounded = value.to(stream.dtype.element_ty)
        tl.store(stream + at, rounded, mask=inside)
        value = rounded.to(tl.float32)
    inverse = 1.0 / tl.sqrt(tl.sum(value * value, 1) / D + epsilon)
    gain = tl.load(weight + column, mask=column < D, other=0.0).to(tl.float32)
    scaled = value * inverse[:, None] * gain[None, :]
    tl.store(out + at, scaled.to(out.dtype.element_ty), mask=inside)


def rows_per_program(D: int) -> int:
    """Rows whose elements together give each thread enough to do."""
    return max(1, 1024 >> (D - 1).bit_length())


def rmsnorm(
    x: torch.Tensor, weight: torch.Tensor, residual: torch.Tensor | None = None, epsilon: float = EPSILON
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Normalises the rows of ``x [rows, D]`` (plus ``residual``) and scales them by ``weight [D]``.

    Returns the result and, with a residual, the new residual stream ``x + residual``. Raises InputError for arguments that do
    not fit each other.
    """
    check("x", x, (None, None), FLOATING)
    rows, D = x.shape
    check("weight", weight, (D,), FLOATING, x)
    check("residual", residual, (rows, D), (x.dtype,), x)
    if not 1 <= D <= WIDEST:
        raise InputError(f"x: a row of {D} elements does not fit in registers; 1 to {WIDEST} do")
    out = buffers.empty(rows, D, dtype=x.dtype, device=x.device)
    stream = None if residual is None else buffers.empty(rows, D, dtype=x.dtype, device=x.device)
    if rows:
        per, block = rows_per_program(D), power_of_two(D)
        rmsnorm_kernel[(ceil_div(rows, per),)](
            x, residual, weight, out, stream, rows, D, epsilon,
            ROWS=per, BLOCK=block, num_warps=min(16, max(1, per * block // 512)),
        )  # fmt: skip
    return out, stream


@dataclass(frozen=True)
class Rows(Case):
    """``rows`` of ``D`` elements."""

    rows: int
    D: int
    residual: bool = False
    spread: float = 3.0


def inputs(case: Rows, device: str) -> Tensors:
    """Rows, gains and a residual stream."""
    source = Source(case.name, device)
    return {
        "x": source.normal(case.rows, case.D, dtype=case.dtype, scale=case.spread),
        "weight": source.normal(case.D, dtype=case.dtype),
        "residual": source.normal(case.rows, case.D, dtype=case.dtype) if case.residual else None,
    }


def reference(case: Rows, tensors: Tensors) -> Tensors:
    """In float64; the sum with the residual is rounded to the stream's type, as it is stored."""
    x = tensors["x"].double()
    if case.residual:
        x = (tensors["x"].float() + tensors["residual"].float()).to(tensors["x"].dtype).double()
    normalised = x / torch.sqrt(x.square().mean(1, keepdim=True) + EPSILON) * tensors["weight"].double()
    return {"out": normalised, "stream": x} if case.residual else {"out": normalised}


def launch(case: Rows, tensors: Tensors) -> Tensors:
    """The Triton kernel."""
    out, stream = rmsnorm(**tensors)
    return {"out": out} if stream is None else {"out": out, "stream": stream}


def expected(case: Rows, tensors: Tensors) -> Expected:
    """Every element once; the gains once per program."""
    fmt = TYPES[case.dtype].format
    cost = Norm(case.D, case.D, residual=case.residual, weight=fmt, activation=fmt).cost(Work(1, case.rows))
    programs = ceil_div(case.rows, rows_per_program(case.D))
    gains = cost.read["weights"]
    passes = 2 if case.residual else 1
    one_way = cost.read["activations"] // passes
    moved = {
        "x": Moved("activations", read=one_way),
        "weight": Moved("weights", read=gains, requested=gains * programs),
        "out": Moved("activations", written=one_way),
    }
    if case.residual:
        moved |= {"residual": Moved("activations", read=one_way), "stream": Moved("activations", written=one_way)}
    return Expected(cost, {"rmsnorm_kernel": Launch(programs, moved)})


def library(case: Rows, tensors: Tensors) -> Any:
    """torch's rms_norm behind a separate addition."""
    x, weight, residual = tensors["x"], tensors["weight"], tensors["residual"]
    norm = torch.nn.functional.rms_norm
    if residual is None:
        return lambda: norm(x, (case.D,), weight, EPSILON)
    return lambda: norm(x + residual, (case.D,), weight, EPSILON)


CASES = (
    Rows("narrow", "bf16", 37, 64),
    Rows("ragged", "bf16", 5, 1000),
    Rows("residual", "bf16", 7, 320, True),
    Rows("head-norm", "bf16", 43, 128),
    Rows("half", "fp16", 11, 2049, True),
    Rows("single", "fp32", 3, 777, True),
    Rows("one-element", "fp32", 9, 1),
    Rows("wide", "bf16", 2, 7168),
    Rows("faint", "bf16", 6, 96, spread=0.004),
)
TOLERANCE = {
    "bf16": Tolerance(3e-3, "computed in fp32, rounded once to bf16"),
    "fp16": Tolerance(4e-4, "computed in fp32, rounded once to fp16"),
    "fp32": Tolerance(1e-6, "sums of fp32 squares in another order"),
}
BUILDS = (
    Build(Rows("layer", "bf16", 8192, 4096, True), targets=EVERYWHERE),
    Build(Rows("deep", "bf16", 8192, 16384, True)),
    Build(Rows("heads", "bf16", 262144, 128)),
)
MEASURED = (
    Rows("layer-8k", "bf16", 8192, 8192, True),
    Rows("layer-4k", "bf16", 16384, 4096),
    Rows("decode-64", "bf16", 64, 8192, True),
)
SPEC = Spec(
    "rmsnorm", "Norm", CASES, inputs, reference, launch, expected, TOLERANCE, BUILDS, MEASURED, library
)  # fmt: skip
