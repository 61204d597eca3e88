"""Probes of a device's roofs and its floor: streaming bandwidth, matrix rate, the cost of a launch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import triton
import triton.language as tl

BLOCK = 4096
MATRIX_SIZE = 8192


@triton.jit
def stream_kernel(source, target, size, BLOCK: tl.constexpr, READ_ONLY: tl.constexpr):
    """Copies a block, or reads it and writes one sum."""
    program = tl.program_id(0).to(tl.int64)
    at = program * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(source + at, mask=at < size, other=0.0)
    if READ_ONLY:
        tl.store(target + program, tl.sum(value, 0))
    else:
        tl.store(target + at, value, mask=at < size)


@triton.jit
def nothing_kernel(target):
    """A program that does nothing that anybody sees."""
    if tl.program_id(0) > 0:
        tl.store(target, 0.0)


def stream(elements: int, device: str, read_only: bool = False) -> tuple[Callable[[], Any], int]:
    """A pass over ``elements`` fp32 numbers, and the bytes that it moves: copied, or read and summed per block."""
    source = torch.ones(elements, device=device)
    blocks = -(-elements // BLOCK)
    target = torch.empty(blocks if read_only else elements, device=device)

    def run() -> None:
        stream_kernel[(blocks,)](source, target, elements, BLOCK=BLOCK, READ_ONLY=read_only, num_warps=8)

    return run, 4 * (elements + target.numel())


def matmul_peak(unit: str, device: str, size: int = MATRIX_SIZE) -> tuple[Callable[[], Any], int]:
    """The library's matmul of square matrices on a matrix unit ("bf16", "fp8", "int8", "fp32"), and its FLOPs."""
    wide = torch.randn(size, size, device=device, dtype=torch.float32)
    flops = 2 * size**3
    if unit == "fp8":
        narrow, one = wide.to(torch.float8_e4m3fn), torch.ones((), device=device)
        columns = narrow.t().contiguous().t()
        return lambda: torch._scaled_mm(narrow, columns, scale_a=one, scale_b=one, out_dtype=torch.bfloat16), flops
    if unit == "int8":
        whole = (16 * wide).clamp(-127, 127).to(torch.int8)
        columns = whole.t().contiguous().t()
        return lambda: torch._int_mm(whole, columns), flops
    square = wide.to({"bf16": torch.bfloat16, "fp32": torch.float32}[unit])
    return lambda: torch.mm(square, square), flops


def launch_overhead(device: str) -> Callable[[], Any]:
    """One launch of a kernel of one program that does nothing."""
    target = torch.zeros(1, device=device)
    return lambda: nothing_kernel[(1,)](target, num_warps=1)
