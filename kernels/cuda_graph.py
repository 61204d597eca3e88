"""CUDA graphs: a recorded sequence of launches that replays without the host."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

WARM_UP = 3
"""Runs before the capture: compilation and the allocator's first blocks must not fall into it."""


def capture(work: Callable[[], Any]) -> Callable[[], None]:
    """Records what ``work`` launches and returns what replays it.

    ``work`` must take no decision on values of device memory, and its tensors must live as long as the replay is used; it is
    kept alive with it. Raises RuntimeError where CUDA cannot capture it.
    """
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(WARM_UP):
            work()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        kept = work()

    def replay() -> None:
        graph.replay()

    replay.kept = (kept, work)  # type: ignore[attr-defined]
    return replay
