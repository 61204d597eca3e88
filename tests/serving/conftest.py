"""What tests of files that come from outside share: a limit of time for each of them."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import pytest

Within = Callable[[float], AbstractContextManager[None]]


class HungError(AssertionError):
    """A reader that took longer than it may."""


@contextmanager
def _within(seconds: float) -> Iterator[None]:
    def ring(*_: Any) -> None:
        raise HungError(f"still running after {seconds:g} s")

    whose = signal.signal(signal.SIGALRM, ring)
    left, again = signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, whose)
        signal.setitimer(signal.ITIMER_REAL, left, again)


@pytest.fixture
def within() -> Within:
    """``with within(5.0):`` fails where its block takes longer; the suite's own limit, which may count with the same clock,
    goes on after it. Without alarms (Windows) that limit alone is left.
    """
    if not hasattr(signal, "setitimer"):
        from contextlib import nullcontext

        return lambda seconds: nullcontext()
    return _within
