"""Memory that a launch fills: plain in use, poisoned under test, so that an element never written cannot pass."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import torch

_poisoned: ContextVar[bool] = ContextVar("poisoned", default=False)


@contextmanager
def poisoned() -> Iterator[None]:
    """Every buffer made inside the block starts as NaN (the largest number of an integer type)."""
    token = _poisoned.set(True)
    try:
        yield
    finally:
        _poisoned.reset(token)


def empty(*shape: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """An uninitialised tensor."""
    made = torch.empty(shape, dtype=dtype, device=device)
    if _poisoned.get():
        if dtype.is_floating_point and dtype.itemsize == 1:
            made.view(torch.uint8).fill_(0x7F)
        else:
            made.fill_(float("nan") if dtype.is_floating_point else torch.iinfo(dtype).max)
    return made
