"""Activations in 8 bits with fp32 scales: one for 128 neighbours of a row, for a row, for a tensor, or one found earlier.

A scale brings the largest magnitude of what shares it to 448, the largest of e4m3. With gains the rows are normalised on the
way (RMSNorm), and the pass between the norm and the matmul falls away. A scale of a whole tensor takes two kernels, because
every element must have been seen before the first is stored; each program keeps the largest of its share, and every program
of the second kernel reads all of them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl

from roofline.components.mixing import Norm, Quantise
from roofline.cost import Cost
from roofline.errors import InputError
from roofline.formats import FORMATS, FP8
from roofline.kernels import buffers
from roofline.kernels.arguments import FLOATING, SINGLE, check
from roofline.kernels.device import current, of
from roofline.kernels.rmsnorm import EPSILON, WIDEST
from roofline.kernels.spec import Build, Case, Expected, Launch, Moved, Spec, Tensors, Tolerance
from roofline.kernels.tiling import power_of_two
from roofline.kernels.types import TYPES, Source
from roofline.numeric import ceil_div
from roofline.work import Work

GROUP = 128
"""Neighbours that share a scale of "block"."""
SCALES = ("block", "token", "tensor", "static")
TOP = 448.0
"""The largest e4m3 number."""
TINY = 1e-12
"""Stands for the largest magnitude where everything is smaller."""
BLOCK = 4096
"""Elements of one step of a program where the scale is the tensor's."""


@triton.jit
def quantize_rows_kernel(
    x, gains, out, scales, rows, D, epsilon, ROWS: tl.constexpr, GROUPS: tl.constexpr, GROUP: tl.constexpr,
    TOP: tl.constexpr, TINY: tl.constexpr,
):  # fmt: skip
    """ROWS whole rows in registers, as GROUPS groups that have a scale each."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    group = tl.arange(0, GROUPS)
    column = group[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    real = row[:, None, None] < rows
    at = row[:, None, None].to(tl.int64) * D + column[None, :, :]
    value = tl.load(x + at, mask=real & (column < D)[None, :, :], other=0.0).to(tl.float32)
    if gains is not None:
        squares = tl.sum(tl.sum(value * value, 2), 1)
        inverse = 1.0 / tl.sqrt(squares / D + epsilon)
        gain = tl.load(gains + column, mask=column < D, other=0.0).to(tl.float32)
        value = value * inverse[:, None, None] * gain[None, :, :]
    scale = tl.maximum(tl.max(tl.abs(value), 2), TINY) / TOP
    place = row[:, None].to(tl.int64) * tl.cdiv(D, GROUP) + group[None, :]
    tl.store(scales + place, scale, mask=(row[:, None] < rows) & (group * GROUP < D)[None, :])
    narrow = value * (1.0 / scale)[:, :, None]
    tl.store(out + at, narrow.to(out.dtype.element_ty), mask=real & (column < D)[None, :, :])


@triton.jit
def largest_kernel(x, largest, N, BLOCK: tl.constexpr):
    """The largest magnitude of each program's share of all elements."""
    peak = tl.zeros((BLOCK,), tl.float32)
    for start in range(tl.program_id(0) * BLOCK, N, tl.num_programs(0) * BLOCK):
        at = start + tl.arange(0, BLOCK)
        peak = tl.maximum(peak, tl.abs(tl.load(x + at, mask=at < N, other=0.0).to(tl.float32)))
    tl.store(largest + tl.program_id(0), tl.max(peak, 0))


@triton.jit
def quantize_all_kernel(
    x, largest, scale, out, N, BLOCK: tl.constexpr, PARTS: tl.constexpr, TOP: tl.constexpr, TINY: tl.constexpr,
):  # fmt: skip
    """One scale for all elements: that of the largest magnitude (stored by the first program), or a known one."""
    if largest is None:
        factor = tl.load(scale)
    else:
        part = tl.arange(0, PARTS)
        peak = tl.max(tl.load(largest + part, mask=part < tl.num_programs(0), other=0.0), 0)
        factor = tl.maximum(peak, TINY) / TOP
        if tl.program_id(0) == 0:
            tl.store(scale, factor)
    inverse = 1.0 / factor
    for start in range(tl.program_id(0) * BLOCK, N, tl.num_programs(0) * BLOCK):
        at = start + tl.arange(0, BLOCK)
        value = tl.load(x + at, mask=at < N, other=0.0).to(tl.float32) * inverse
        narrow = tl.minimum(tl.maximum(value, -TOP), TOP)
        tl.store(out + at, narrow.to(out.dtype.element_ty), mask=at < N)


def rows_per_program(D: int) -> int:
    """Rows whose elements together give each thread enough to do."""
    return max(1, 2048 >> (D - 1).bit_length())


def programs_for(elements: int, units: int) -> int:
    """Programs that share all elements of a tensor: four to a unit, as far as there is a block for each."""
    return min(-(-elements // BLOCK), 4 * units)


def quantize_fp8(
    x: torch.Tensor, scales: str = "block", gains: torch.Tensor | None = None, scale: torch.Tensor | None = None,
    programs: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """e4m3 codes of ``x [rows, D]`` and their fp32 scales; an element is its code times its scale.

    Args:
        scales: "block" (scales ``[rows, ceil(D / 128)]``), "token" (``[rows, 1]``), "tensor" (``[1]``), or "static", with
            ``scale [1]`` given: what lies beyond its reach is clamped.
        gains: ``[D]``: rows are divided by their root mean square and multiplied by these first.

    Raises InputError for arguments that do not fit each other.
    """
    if scales not in SCALES:
        raise InputError(f"scales: unknown {scales!r}; known: {', '.join(SCALES)}")
    check("x", x, (None, None), FLOATING)
    rows, D = x.shape
    check("gains", gains, (D,), FLOATING, x)
    check("scale", scale, (1,), SINGLE, x)
    out = buffers.empty(rows, D, dtype=torch.float8_e4m3fn, device=x.device)
    common: dict[str, Any] = {"TOP": TOP, "TINY": TINY}
    if scales in ("tensor", "static"):
        if gains is not None or (scale is None) != (scales == "tensor"):
            raise InputError(f"scale: {scales!r} takes {'a scale' if scales == 'static' else 'no scale'} and no gains")
        found = buffers.empty(1, dtype=torch.float32, device=x.device) if scale is None else scale
        count = programs or programs_for(x.numel(), of(x).units)
        if count:
            largest = None
            if scale is None:
                largest = buffers.empty(count, dtype=torch.float32, device=x.device)
                largest_kernel[(count,)](x, largest, x.numel(), BLOCK=BLOCK, num_warps=8)
            parts = power_of_two(count)
            quantize_all_kernel[(count,)](x, largest, found, out, x.numel(), BLOCK=BLOCK, PARTS=parts, num_warps=8, **common)
        return out, found
    if not 1 <= D <= WIDEST:
        raise InputError(f"x: a row of {D} elements does not fit in registers; 1 to {WIDEST} do")
    if scale is not None:
        raise InputError(f"scale: given, and {scales!r} finds its own; it goes with 'static'")
    width = power_of_two(D)
    group = GROUP if scales == "block" else width
    found = buffers.empty(rows, ceil_div(D, group), dtype=torch.float32, device=x.device)
    if rows:
        per, groups = rows_per_program(D), max(1, width // group)
        quantize_rows_kernel[(ceil_div(rows, per),)](
            x, gains, out, found, rows, D, EPSILON, ROWS=per, GROUPS=groups, GROUP=group,
            num_warps=min(16, max(4, per * width // 1024)), **common,
        )  # fmt: skip
    return out, found


def dequantise(codes: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """float64 of codes ``[rows, D]`` under scales of any of the shapes that ``quantize_fp8`` gives."""
    if scales.ndim == 1:
        return codes.double() * scales.double()
    spread = scales.double().repeat_interleave(GROUP if scales.shape[1] > 1 else codes.shape[1], 1)
    return codes.double() * spread[:, : codes.shape[1]]


@dataclass(frozen=True)
class Quantised(Case):
    """``rows`` of ``D`` elements; ``scales``: what shares one; ``norm``: normalised on the way."""

    rows: int
    D: int
    scales: str = "block"
    norm: bool = False
    programs: int | None = None


def inputs(case: Quantised, device: str) -> Tensors:
    """Rows of differing size, gains, and a scale that clamps a few elements where it is known beforehand."""
    source = Source(case.name, device)
    x = source.normal(case.rows, case.D, dtype=case.dtype)
    if device == "cpu":
        x = x * torch.exp2(torch.arange(case.rows) % 7 - 3.0)[:, None].to(x.dtype)
        x[1 : case.rows // 2 : 4] = 0
    gains = source.normal(case.D, dtype=case.dtype) if case.norm else None
    scale = torch.full((1,), 16 / TOP, device=device) if case.scales == "static" else None
    return {"x": x, "gains": gains, "scale": scale}


def reference(case: Quantised, tensors: Tensors) -> Tensors:
    """In float64; scales are rounded to fp32 as they are stored, codes to e4m3."""
    x, largest = tensors["x"].double(), torch.finfo(torch.float8_e4m3fn).max
    if case.norm:
        x = x / torch.sqrt(x.square().mean(1, keepdim=True) + EPSILON) * tensors["gains"].double()
    if case.scales in ("tensor", "static"):
        scales = tensors["scale"] if case.scales == "static" else (x.abs().amax().clamp(min=TINY) / largest).float()[None]
        spread = scales.double()
    else:
        group = GROUP if case.scales == "block" else case.D
        padded = torch.nn.functional.pad(x, (0, -case.D % group))
        scales = (padded.unflatten(1, (-1, group)).abs().amax(2).clamp(min=TINY) / largest).float()
        spread = scales.double().repeat_interleave(group, 1)[:, : case.D]
    codes = (x / spread).clamp(-largest, largest).float().to(torch.float8_e4m3fn).double()
    return {"codes": codes, "scales": scales.double()}


def launch(case: Quantised, tensors: Tensors) -> Tensors:
    """The Triton kernels."""
    codes, scales = quantize_fp8(**tensors, scales=case.scales, programs=case.programs)
    return {"codes": codes, "scales": scales}


def useful(case: Quantised) -> Cost:
    """A pass of its own, or a norm that writes 8 bits."""
    fmt, work = TYPES[case.dtype].format, Work(1, case.rows)
    if case.norm:
        return Norm(case.D, case.D, weight=fmt, activation=fmt, output=FORMATS["fp8-token"]).cost(work)
    return Quantise(case.D, case.scales, GROUP, activation=fmt).cost(work)


def expected(case: Quantised, tensors: Tensors) -> Expected:
    """Every element once (twice for a tensor's own scale), gains once per program, the largest of shares by every program."""
    cost, codes = useful(case), FP8.bytes(case.rows * case.D)
    read, scales = cost.read["activations"], cost.write["activations"] - codes
    out = Moved("activations", written=codes)
    if case.scales in ("block", "token"):
        programs = ceil_div(case.rows, rows_per_program(case.D))
        moved = {"x": Moved("activations", read=read), "out": out, "scales": Moved("activations", written=scales)}
        if case.norm:
            gains = cost.read["weights"]
            moved["gains"] = Moved("weights", read=gains, requested=gains * programs)
        return Expected(cost, {"quantize_rows_kernel": Launch(programs, moved)})
    programs = case.programs or programs_for(case.rows * case.D, current().units)
    if case.scales == "static":
        known = Moved("weights", read=cost.read["weights"], requested=cost.read["weights"] * programs)
        moved = {"x": Moved("activations", read=read), "scale": known, "out": out}
        return Expected(cost, {"quantize_all_kernel": Launch(programs, moved)})
    once, shares = Moved("activations", read=read // 2), 4 * programs
    first = {"x": once, "largest": Moved("", written=shares)}
    second = {
        "x": once,
        "largest": Moved("", read=shares, requested=shares * programs),
        "scale": Moved("activations", written=scales),
        "out": out,
    }
    return Expected(cost, {"largest_kernel": Launch(programs, first), "quantize_all_kernel": Launch(programs, second)})


def library(case: Quantised, tensors: Tensors) -> Any:
    """The same in plain torch operations, compiled by nobody."""
    x, gains, D = tensors["x"], tensors["gains"], case.D
    if case.scales == "static" or (case.scales == "block" and D % GROUP):
        return None

    def run() -> tuple[torch.Tensor, torch.Tensor]:
        rows = x if gains is None else torch.nn.functional.rms_norm(x, (D,), gains, EPSILON)
        parts = rows.unflatten(1, (-1, GROUP if case.scales == "block" else D))
        largest = rows.abs().amax() if case.scales == "tensor" else parts.abs().amax(2, keepdim=True)
        scales = largest.float().clamp(min=TINY) / TOP
        return (parts / scales).to(torch.float8_e4m3fn).flatten(1), scales

    return run


CASES = (
    Quantised("ragged", "bf16", 37, 300),
    Quantised("whole-blocks", "bf16", 11, 384),
    Quantised("less-than-a-block", "bf16", 5, 70),
    Quantised("one-row", "fp16", 1, 1024),
    Quantised("token", "bf16", 13, 333, "token"),
    Quantised("token-single", "fp32", 7, 130, "token"),
    Quantised("normalised", "bf16", 6, 640, norm=True),
    Quantised("tensor", "bf16", 37, 301, "tensor"),
    Quantised("tensor-shared", "bf16", 29, 431, "tensor", programs=3),
    Quantised("static", "bf16", 23, 257, "static"),
)
FLIPS = "as the reference rounds, but where fp32 and float64 fall on two sides of a half: then by an eighth at most"
TOLERANCE = {name: Tolerance(6e-3, FLIPS, element=21) for name in ("bf16", "fp16", "fp32")}
WITH_FP8 = ("sm_90", "sm_100")
BUILDS = (
    Build(Quantised("deepseek", "bf16", 8192, 7168), targets=WITH_FP8),
    Build(Quantised("deepseek-norm", "bf16", 8192, 7168, norm=True)),
    Build(Quantised("tensor", "bf16", 8192, 8192, "tensor")),
)
MEASURED = (
    Quantised("deepseek-8k", "bf16", 8192, 7168),
    Quantised("deepseek-norm-8k", "bf16", 8192, 7168, norm=True),
)
SPEC = Spec(
    "quantize_fp8", "Quantise", CASES, inputs, reference, launch, expected, TOLERANCE, BUILDS, MEASURED, library
)  # fmt: skip
