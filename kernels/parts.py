"""Attention whose keys are split over programs: how they are cut, the softmax of one part, and the merge of all.

A program walks over whole blocks of one part of the keys with a running maximum and sum. The only part leaves the result
itself; one of several leaves its own normalised result in fp32 and the base-2 logarithm of its weight, and a second kernel
weighs them against each other. The kernels that decode differ in which keys they read and who sees them, and share this.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from roofline.kernels import buffers
from roofline.kernels.device import Device
from roofline.kernels.spec import Launch, Moved, Tolerance
from roofline.kernels.tiling import power_of_two
from roofline.numeric import ceil_div


@triton.jit
def span(part, low, high, BN: tl.constexpr, SPLITS: tl.constexpr):
    """First key of a part of ``low ... high - 1``, and the one behind its last: whole blocks, the last part the shortest."""
    share = tl.cdiv(tl.cdiv(high - low, BN), SPLITS) * BN
    first = low + part * share
    return first, tl.minimum(first + share, high)


@triton.jit
def begin(sinks, head, real, part, ROWS: tl.constexpr, WIDTH: tl.constexpr):
    """Peak, total and sums of a softmax over nothing yet; a sink per head, where there are sinks, joins the first part."""
    peak = tl.full((ROWS,), float("-inf"), tl.float32)
    total = tl.zeros((ROWS,), tl.float32)
    if sinks is not None:  # noqa: SIM102
        if part == 0:
            peak = tl.load(sinks + head, mask=real, other=0.0).to(tl.float32) * 1.4426950408889634
            total = tl.full((ROWS,), 1.0, tl.float32)
    return peak, total, tl.zeros((ROWS, WIDTH), tl.float32)


@triton.jit
def merge(score, peak, total):
    """One block of scores (base 2) into a running softmax: weights, new peak and total, and what old sums fade by."""
    highest = tl.maximum(peak, tl.max(score, 1))
    base = tl.where(highest == float("-inf"), 0.0, highest)
    weight = tl.exp2(score - base[:, None])
    fade = tl.exp2(peak - base)
    return weight, highest, total * fade + tl.sum(weight, 1), fade


@triton.jit
def leave(out, weights, peak, total, sums, at, part, real, V: tl.constexpr, WIDTH: tl.constexpr, SPLITS: tl.constexpr):
    """Stores the rows ``at`` of a part, divided by their totals (zeros of no key), and weights where parts are several."""
    column = tl.arange(0, WIDTH)
    result = sums / tl.where(total > 0, total, 1.0)[:, None]
    goal = out + (at[:, None] * SPLITS + part).to(tl.int64) * V + column[None, :]
    tl.store(goal, result.to(out.dtype.element_ty), mask=real[:, None] & (column[None, :] < V))
    if SPLITS > 1:
        weighed = tl.where(total > 0, peak + tl.log2(tl.where(total > 0, total, 1.0)), float("-inf"))
        tl.store(weights + at * SPLITS + part, weighed, mask=real)


@triton.jit
def merge_parts_kernel(parts, weights, out, V: tl.constexpr, VP: tl.constexpr, SPLITS: tl.constexpr, SP: tl.constexpr):
    """The parts of one query row, weighed against each other."""
    row = tl.program_id(0).to(tl.int64)
    part = tl.arange(0, SP)
    value = tl.arange(0, VP)
    weighed = tl.load(weights + row * SPLITS + part, mask=part < SPLITS, other=float("-inf"))
    peak = tl.max(weighed, 0)
    weight = tl.exp2(weighed - tl.where(peak == float("-inf"), 0.0, peak))
    total = tl.sum(weight, 0)
    inside = (part[:, None] < SPLITS) & (value[None, :] < V)
    partial = tl.load(parts + (row * SPLITS + part[:, None]) * V + value[None, :], mask=inside, other=0.0)
    result = tl.sum(partial * weight[:, None], 0) / tl.where(total > 0, total, 1.0)
    tl.store(out + row * V + value, result.to(out.dtype.element_ty), mask=value < V)


@dataclass(frozen=True)
class Parts:
    """Keys per block, parts of the sequence, warps, stages."""

    BN: int
    splits: int
    warps: int = 4
    stages: int = 3


@dataclass(frozen=True)
class Blocks(Parts):
    """As ``Parts``, with the query rows of one program."""

    rows: int = 16


def padded(width: int) -> int:
    """A width as the matrix unit takes it: a power of two, 16 at least."""
    return power_of_two(width, 16)


def parts_for(programs: int, keys: int, BN: int, device: Device, resident: int) -> int:
    """Parts of the keys that fill the device with ``resident`` programs per unit, four blocks each at the least."""
    wanted = ceil_div(resident * device.units, programs)
    return int(max(1, min(wanted, ceil_div(keys, 4 * BN), 128)))


def choose_blocks(sequences: int, rows: int, keys: int, dtype: str, device: Device) -> Blocks:
    """Rows, entries and parts of an attention over latents, by sequences, query rows, the longest sequence and the device."""
    if dtype == "fp32":
        return Blocks(16, parts_for(sequences * ceil_div(rows, 16), keys, 16, device, 1), 4, 1, rows=16)
    many = 64 if rows >= 64 and device.arch in ("sm_90", "sm_100") else 16
    BN = 64 if many == 64 and device.arch == "sm_90" else 32 if device.shared >= 100_000 else 16
    warps = 8 if many == 64 else 4
    stages = 2 if device.shared >= 100_000 else 1
    return Blocks(
        BN, parts_for(sequences * ceil_div(rows, many), keys, BN, device, 1 if many == 64 else 2), warps, stages, rows=many
    )


def partials(out: torch.Tensor, splits: int) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Where the parts of ``out [..., V]`` are left, and their weights: ``out`` itself and None for a single part."""
    if splits == 1:
        return out, None
    rows, fp32 = out.shape[:-1], torch.float32
    weights = buffers.empty(*rows, splits, dtype=fp32, device=out.device)
    return buffers.empty(*rows, splits, out.shape[-1], dtype=fp32, device=out.device), weights


def merge_parts(parts: torch.Tensor, weights: torch.Tensor | None, out: torch.Tensor) -> torch.Tensor:
    """``out [..., V]``, merged from ``parts [..., SPLITS, V]`` by their weights ``[..., SPLITS]`` where there are several."""
    if weights is not None:
        splits, V = parts.shape[-2:]
        merge_parts_kernel[(out.numel() // V,)](
            parts, weights, out, V=V, VP=power_of_two(V), SPLITS=splits, SP=power_of_two(splits), num_warps=4
        )  # fmt: skip
    return out


def block_counts(low: int, length: int, cut: Parts) -> int:
    """Blocks of keys that the parts of one sequence walk over together."""
    share = ceil_div(ceil_div(length - low, cut.BN), cut.splits) * cut.BN
    ends = [(low + part * share, min(low + (part + 1) * share, length)) for part in range(cut.splits)]
    return sum(ceil_div(last - first, cut.BN) for first, last in ends if last > first)


def launches(
    kernel: str, programs: int, moved: dict[str, Moved], rows: int, V: int, splits: int, out: int
) -> dict[str, Launch]:  # fmt: skip
    """The kernel that walks over the parts of ``rows`` results of width V, and with several the one that merges them.

    Args:
        moved: what the first moves beside its result. out: bytes of the result.
    """
    result = {"out": Moved("activations", written=out)}
    if splits == 1:
        return {kernel: Launch(programs, {**moved, **result})}
    sums, weights = 4 * rows * splits * V, 4 * rows * splits
    left = {"out": Moved("", written=sums), "weights": Moved("", written=weights)}
    second = {"parts": Moved("", read=sums), "weights": Moved("", read=weights), **result}
    return {kernel: Launch(programs, {**moved, **left}), "merge_parts_kernel": Launch(rows, second)}


def tolerance(values: str = "values") -> dict[str, Tolerance]:
    """How far attention may be from float64: its weights take the operands' type to multiply ``values``."""

    def rounded(dtype: str) -> str:
        return f"weights of at most 1 are rounded to {dtype} before they multiply {values}; the result once more"

    return {
        "bf16": Tolerance(5e-3, rounded("bf16")),
        "fp16": Tolerance(6e-4, rounded("fp16")),
        "fp32": Tolerance(2e-6, "fp32 sums in another order, exp2 in place of exp"),
    }
