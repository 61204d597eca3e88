"""This machine on its own roofline: two measured roofs, then a few torch operations between them.

One thread. Roofs and operations take turns, and of every time the minimum counts: what disturbs a run only lengthens it.
Only order and lower bound are claimed: nothing is faster than the roofs by more than the noise of the clock.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

ROUNDS = 5
AGAIN = 3
NOISE = 0.1
"""Share of its bound by which an operation may fall below it."""
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


def _operations() -> tuple[list[Operation], Operation, list[Operation]]:
    """(streams for the memory roof, compute roof, operations).

    Streams read, read and write, and read twice and write, so that the roof is that of the best mix. Everything that memory
    limits moves as many bytes as they do, from arrays that the others have driven out of the caches.
    """
    import torch

    torch.set_num_threads(1)
    random = torch.Generator().manual_seed(0)

    def matrix(*shape: int) -> Any:
        return torch.randn(*shape, generator=random)

    source, other, target = (matrix(STREAM_ELEMENTS) for _ in range(3))
    a, b, c = matrix(SQUARE, SQUARE), matrix(SQUARE, SQUARE), matrix(SQUARE, SQUARE)
    size, passed = STREAM_ELEMENTS, FLOAT_BYTES * STREAM_ELEMENTS
    streams = [
        Operation("sum of 128 MiB", float(size), 1.0 * passed, source.sum),
        Operation("dot product of 128 MiB", 2.0 * size, 2.0 * passed, lambda: torch.dot(source, other)),
        Operation("copy of 128 MiB", 0.0, 2.0 * passed, lambda: target.copy_(source)),
        Operation("triad of 128 MiB", 2.0 * size, 3.0 * passed, lambda: torch.add(source, other, alpha=3.0, out=target)),
    ]
    square = Operation(
        f"matmul {SQUARE}^3", 2.0 * SQUARE**3, 3.0 * FLOAT_BYTES * SQUARE**2, lambda: torch.mm(a, b, out=c)
    )  # fmt: skip
    wide, row = source.view(4096, 8192), matrix(8192)
    tall, few = matrix(8192, 512), matrix(512, 512)
    return streams, square, [
        Operation("matrix times vector 4096x8192", 2.0 * wide.numel(), FLOAT_BYTES * (wide.numel() + 4096 + 8192),
                  lambda: torch.mv(wide, row)),
        Operation("matmul 8192x512x512", 2.0 * 8192 * 512 * 512, FLOAT_BYTES * (2 * tall.numel() + few.numel()),
                  lambda: torch.mm(tall, few)),
        Operation("sums of 4096 rows of 32 KiB", float(size), 1.0 * passed + FLOAT_BYTES * 4096, lambda: wide.sum(1)),
        Operation("addition of 128 MiB", float(size), 3.0 * passed, lambda: torch.add(source, other, out=target)),
    ]  # fmt: skip


def measure(rounds: int = ROUNDS) -> tuple[dict[str, float], list[Placed]]:
    """The two roofs [B/s, FLOP/s] and the operations. Raises ModuleNotFoundError without torch.

    Where an operation is faster than the roofs, which a disturbed roof looks like, up to ``AGAIN`` times as many rounds follow.
    """
    streams, square, operations = _operations()
    best = {operation.name: float("inf") for operation in (*streams, square, *operations)}
    roofs: dict[str, float] = {}
    placed: list[Placed] = []
    for _ in range(1 + AGAIN):
        for _ in range(rounds):
            for operation in (*streams, square, *operations):
                start = time.perf_counter()
                operation.run()
                best[operation.name] = min(best[operation.name], time.perf_counter() - start)
        roofs = {
            "bandwidth": max(one.bytes / best[one.name] for one in streams),
            "rate": square.flops / best[square.name],
        }
        placed = [_placed(one, best[one.name], roofs) for one in operations]
        if not too_fast(placed):
            break
    return roofs, placed


def _placed(one: Operation, seconds: float, roofs: dict[str, float]) -> Placed:
    bound = max(one.bytes / roofs["bandwidth"], one.flops / roofs["rate"])
    return Placed(one.name, one.flops, one.bytes, bound, seconds)


def too_fast(placed: Sequence[Placed]) -> list[Placed]:
    """Operations that beat the roofs by more than the noise of the clock."""
    return [one for one in placed if one.ratio < 1 - NOISE]
