"""This machine on its own roofline: two measured roofs, then a few torch operations between them.

One thread. Roofs and operations take turns, and of every time the minimum counts: what disturbs a run only lengthens it.
Only order and lower bound are claimed: nothing is faster than the roofs by more than the noise of the clock.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

ROUNDS = 7
STREAM_ELEMENTS = 1 << 25
SQUARE = 1024
FLOAT_BYTES = 4


@dataclass(frozen=True)
class Operation:
    """One operation with what it asks: FLOPs and bytes of its operands and results, each touched once."""

    name: str
    flops: float
    bytes: float
    run: Callable[[], Any]


@dataclass(frozen=True)
class Placed:
    """An operation on the roofline: bound and measured seconds."""

    name: str
    flops: float
    bytes: float
    bound_s: float
    measured_s: float

    @property
    def ratio(self) -> float:
        """Measured over bound."""
        return self.measured_s / self.bound_s


def _operations() -> tuple[Operation, Operation, Operation, list[Operation]]:
    """(memory roof by copying, by reading, compute roof, operations)."""
    import torch

    torch.set_num_threads(1)
    random = torch.Generator().manual_seed(0)

    def matrix(*shape: int) -> Any:
        return torch.randn(*shape, generator=random)

    source, target = matrix(STREAM_ELEMENTS), matrix(STREAM_ELEMENTS)
    a, b, c = matrix(SQUARE, SQUARE), matrix(SQUARE, SQUARE), matrix(SQUARE, SQUARE)
    copy = Operation("copy of 128 MiB", 0.0, 2.0 * FLOAT_BYTES * STREAM_ELEMENTS, lambda: target.copy_(source))
    square = Operation(
        f"matmul {SQUARE}^3", 2.0 * SQUARE**3, 3.0 * FLOAT_BYTES * SQUARE**2, lambda: torch.mm(a, b, out=c)
    )  # fmt: skip
    wide, row = matrix(4096, 8192), matrix(8192)
    tall, few = matrix(8192, 512), matrix(512, 512)
    size = 1 << 23
    many, other, result = matrix(size), matrix(size), matrix(size)
    read = Operation("sum of 128 MiB", float(STREAM_ELEMENTS), 1.0 * FLOAT_BYTES * STREAM_ELEMENTS, source.sum)
    return copy, read, square, [
        Operation("matrix times vector 4096x8192", 2.0 * wide.numel(), FLOAT_BYTES * (wide.numel() + 4096 + 8192),
                  lambda: torch.mv(wide, row)),
        Operation("matmul 8192x512x512", 2.0 * 8192 * 512 * 512, FLOAT_BYTES * (2 * tall.numel() + few.numel()),
                  lambda: torch.mm(tall, few)),
        Operation("sum of 32 MiB", float(size), 1.0 * FLOAT_BYTES * size, many.sum),
        Operation("addition of 32 MiB", float(size), 3.0 * FLOAT_BYTES * size, lambda: torch.add(many, other, out=result)),
    ]  # fmt: skip


def measure(rounds: int = ROUNDS) -> tuple[dict[str, float], list[Placed]]:
    """The two roofs [B/s, FLOP/s] and the operations. Raises ModuleNotFoundError without torch."""
    copy, read, square, operations = _operations()
    best = {operation.name: float("inf") for operation in (copy, read, square, *operations)}
    for _ in range(rounds):
        for operation in (copy, read, square, *operations):
            start = time.perf_counter()
            operation.run()
            best[operation.name] = min(best[operation.name], time.perf_counter() - start)
    bandwidth = max(one.bytes / best[one.name] for one in (copy, read))
    rate = square.flops / best[square.name]
    placed = [
        Placed(one.name, one.flops, one.bytes, max(one.bytes / bandwidth, one.flops / rate), best[one.name]) for one in operations
    ]
    return {"bandwidth": bandwidth, "rate": rate}, placed
