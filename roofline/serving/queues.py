"""Where requests wait: first come, first served, or by priority; whoever was pushed out goes back to its place."""

from __future__ import annotations

import heapq
from collections import deque

from roofline.serving.request import Request


class Arrivals:
    """First come, first served."""

    def __init__(self) -> None:
        self._queue: deque[Request] = deque()

    def __len__(self) -> int:
        return len(self._queue)

    def add(self, request: Request) -> None:
        """At the end."""
        self._queue.append(request)

    def back(self, request: Request) -> None:
        """At the head: it had been running."""
        self._queue.appendleft(request)

    def head(self) -> Request:
        """Whoever is next."""
        return self._queue[0]

    def pop(self) -> Request:
        """Takes the next one out."""
        return self._queue.popleft()


class Priorities:
    """Smaller priorities first, equal ones by arrival."""

    def __init__(self) -> None:
        self._heap: list[tuple[int, float, int, Request]] = []

    def __len__(self) -> int:
        return len(self._heap)

    def add(self, request: Request) -> None:
        """Where its priority and its arrival put it."""
        heapq.heappush(self._heap, (request.priority, request.arrival, request.number, request))

    back = add

    def head(self) -> Request:
        """Whoever is next."""
        return self._heap[0][3]

    def pop(self) -> Request:
        """Takes the next one out."""
        return heapq.heappop(self._heap)[3]
