"""One request on its way through a server."""

from __future__ import annotations

from collections.abc import Hashable

Segments = tuple[tuple[Hashable, int], ...]
"""What a request's tokens are, from the first on: (name, where it ends in tokens). Equal names are equal tokens."""


class Request:
    """A request, and how far it is.

    Attributes:
        number: in the workload. arrival: seconds. prompt, output: tokens. priority: smaller runs first.
        segments: whose tokens the prompt begins with; empty where no other request shares them.
        done: output tokens so far.
        target: tokens that must be cached before the next token comes: the prompt, and after a preemption by
            recomputation what had been generated as well. computed: how many of them are.
        start: the decode counter when it began to decode. since: when. last: time of its last token.
        admitted, first, finish: times, None before. hit: prompt tokens found in the prefix cache.
    """

    __slots__ = (
        "admitted", "arrival", "computed", "done", "epoch", "finish", "first", "held", "hit", "last", "number", "output",
        "preempted", "priority", "prompt", "segments", "since", "start", "swapped", "target",
    )  # fmt: skip

    def __init__(self, number: int, arrival: float, prompt: int, output: int, priority: int = 0, segments: Segments = ()) -> None:
        self.number, self.arrival, self.prompt, self.output = number, arrival, prompt, output
        self.priority, self.segments = priority, segments
        self.done = self.computed = self.start = self.epoch = self.held = self.hit = self.preempted = 0
        self.target = prompt
        self.since = self.last = arrival
        self.swapped = False
        self.admitted: float | None = None
        self.first: float | None = None
        self.finish: float | None = None

    @property
    def longest(self) -> int:
        """Tokens in the cache at its last step."""
        return self.prompt + self.output - 1
