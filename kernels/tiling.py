"""How a matmul is cut: tiles, the order in which they run, parts of its sum over K and the kernel that adds them up."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from roofline.kernels import buffers
from roofline.kernels.device import Device
from roofline.kernels.spec import Launch, Moved
from roofline.numeric import ceil_div


@dataclass(frozen=True)
class Tiles:
    """How a launch is cut: tile sizes, parts of K, tile rows that share their columns in the cache, warps, stages."""

    BM: int
    BN: int
    BK: int
    splits: int = 1
    group: int = 8
    warps: int = 4
    stages: int = 3
    persistent: bool = False


@triton.jit
def place(tile, rows, columns, GROUP: tl.constexpr):
    """Row and column of a tile, GROUP rows at a time, so that tiles that run together share their operands in L2."""
    per_group = GROUP * columns
    first = tile // per_group * GROUP
    height = tl.minimum(-(first - rows), GROUP)  # a number of rows known beforehand stays a number in every interpreter
    return first + tile % per_group % height, tile % per_group // height


@triton.jit
def sum_parts_kernel(parts, bias, out, M, N, SPLITS: tl.constexpr, BLOCK: tl.constexpr):
    """The sum of the parts of K, one row and BLOCK columns per program, in a fixed order."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < N
    total = tl.load(parts + row * N + columns, mask=inside, other=0.0)
    for part in tl.static_range(1, SPLITS):
        total += tl.load(parts + (part * M + row) * N + columns, mask=inside, other=0.0)
    if bias is not None:
        total += tl.load(bias + columns, mask=inside, other=0.0).to(total.dtype)
    tl.store(out + row * N + columns, total.to(out.dtype.element_ty), mask=inside)


def power_of_two(size: int, least: int = 1) -> int:
    """The smallest power of two that holds ``size`` elements, and ``least``."""
    return max(least, 1 << (size - 1).bit_length())


def sum_block(N: int) -> int:
    """Columns that one program of the second kernel sums."""
    return min(1024, power_of_two(N))


def parts_of_k(columns: int, K: int, BK: int, device: Device) -> int:
    """Parts of K where there are few rows: a power of two up to 16, two programs per unit, four steps each at the least."""
    splits = max(1, min(ceil_div(2 * device.units, columns), ceil_div(K, 4 * BK), 16))
    return int(1 << (splits.bit_length() - 1))


def partial_sums(out: torch.Tensor, splits: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Where a matmul stores: the result ``out [M, N]`` itself, or its parts ``[splits, M, N]``."""
    return out if splits == 1 else buffers.empty(splits, *out.shape, dtype=dtype, device=out.device)


def sum_parts(parts: torch.Tensor, out: torch.Tensor, splits: int, bias: torch.Tensor | None = None) -> torch.Tensor:
    """``out``, summed from its parts where there are several, with ``bias [N]``."""
    if splits > 1:
        M, N = out.shape
        block = sum_block(N)
        sum_parts_kernel[(M, ceil_div(N, block))](parts, bias, out, M, N, SPLITS=splits, BLOCK=block, num_warps=4)
    return out


def launches(
    kernel: str, programs: int, moved: dict[str, Moved], M: int, N: int, splits: int, out: int, bias: int = 0
) -> dict[str, Launch]:  # fmt: skip
    """The kernel whose programs make each one part of a tile, and with several parts the one that sums them.

    Args:
        moved: what the first moves beside its result. out, bias: bytes of the result, and of a bias that joins the sum.
    """
    result = {"out": Moved("activations", written=out)}
    if splits == 1:
        return {kernel: Launch(programs, {**moved, **result})}
    parts = 4 * splits * M * N
    second = {"parts": Moved("", read=parts), **result}
    if bias:
        second["bias"] = Moved("weights", read=bias, requested=bias * M)
    first = {**moved, "out": Moved("", written=parts)}
    return {kernel: Launch(programs, first), "sum_parts_kernel": Launch(M * ceil_div(N, sum_block(N)), second)}
