"""Progress of long work: a bar on stderr, on a terminal only, that appears when the work takes longer than a second."""

from __future__ import annotations

import contextlib
import os
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

PATIENCE_S = 1.0
"""Work that ends sooner shows nothing, and pays for nothing."""


def wanted(quiet: bool) -> bool:
    """Whether bars are shown: stderr is a terminal that can move its cursor, and nobody asked for quiet."""
    return not quiet and sys.stderr.isatty() and os.environ.get("TERM") != "dumb"


class _Bar:
    """Steps that are counted, and a bar that shows them once it was started."""

    def __init__(self, what: str, total: int | None, colour: bool) -> None:
        self.what, self.total, self.colour = what, total, colour
        self.done = 0
        self.shown: Any = None
        self.ended = False
        self.lock = threading.Lock()

    def show(self) -> None:
        """Starts the bar, unless the work has ended meanwhile."""
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

        with self.lock:
            if self.ended:
                return
            columns = [SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()]
            console = Console(stderr=True, no_color=not self.colour)
            self.shown = Progress(*columns, console=console, transient=True, redirect_stdout=False, redirect_stderr=False)
            self.shown.add_task(self.what, total=self.total, completed=self.done)
            self.shown.start()

    def step(self) -> None:
        """One piece of the work is done."""
        self.done += 1
        if self.shown is not None:
            self.shown.update(self.shown.task_ids[0], completed=self.done)

    def end(self) -> None:
        """Takes the bar away."""
        with self.lock:
            self.ended = True
            if self.shown is not None:
                self.shown.stop()


def nothing() -> None:
    """A step that nobody sees."""


@contextlib.contextmanager
def bar(what: str, total: int | None, *, quiet: bool, colour: bool) -> Iterator[Callable[[], None]]:
    """A bar while the block runs; what it gives is called after each of ``total`` pieces (None: unknown how many)."""
    if not wanted(quiet):
        yield nothing
        return
    found = _Bar(what, total, colour)
    timer = threading.Timer(PATIENCE_S, found.show)
    timer.daemon = True
    timer.start()
    try:
        yield found.step
    finally:
        timer.cancel()
        found.end()
