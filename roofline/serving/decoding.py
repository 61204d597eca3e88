"""The sequences of a replica that decode: how they advance, what they need next, which of them are done.

``Lockstep`` sequences gain one token per step, so that one counter tells where each of them is, and a run of equal steps
costs no more than one. ``Drafting`` sequences verify drafts, each with luck of its own.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from roofline.serving.request import Request

if TYPE_CHECKING:
    from roofline.serving.pool import Pool


class Lockstep:
    """Sequences that gain one token per step.

    Attributes:
        slots: sequences that a step computes; finished ones of a static batch are among them.
        context: sum of their cached tokens. counter: steps so far.
    """

    drafted = 0

    def __init__(self, pool: Pool, hold: bool = False) -> None:
        self.pool, self.hold = pool, hold
        self.slots = self.context = self.counter = 0
        self.held: list[Request] = []
        self._ends: list[tuple[int, int, int, Request]] = []
        self._sum = 0
        self._phases: list[dict[Request, None]] = [{} for _ in range(pool.block)]

    @property
    def live(self) -> int:
        """Sequences that still want tokens."""
        return self.slots - len(self.held)

    def cached(self, request: Request) -> int:
        """Tokens of a decoding request in the cache."""
        return request.target + self.counter - request.start

    @property
    def left_of_all(self) -> int:
        """Tokens that all of them may still write."""
        return self._sum - self.live * self.counter

    def lefts(self) -> Iterator[int]:
        """Tokens that each of them may still write."""
        return (end - self.counter for end, _, epoch, request in self._ends if epoch == request.epoch)

    def left(self, request: Request) -> int:
        """Tokens that one of them may still write."""
        return request.output - request.done - self.counter + request.start

    def add(self, request: Request) -> None:
        """A request whose ``target`` tokens are cached and whose next token is known starts to decode."""
        request.start = self.counter
        self._sum += self.counter + request.output - request.done
        self.slots += 1
        self.context += request.target
        request.epoch += 1
        heapq.heappush(self._ends, (self.counter + request.output - request.done, request.number, request.epoch, request))
        if self.pool.grows:
            self._phases[(self.counter - request.target) % self.pool.block][request] = None

    def remove(self, request: Request) -> None:
        """A request leaves before its end, with ``done`` and ``target`` set to where it is."""
        cached = self.cached(request)
        self._sum -= request.start + request.output - request.done
        self._leave(request, cached)
        request.done += self.counter - request.start
        request.target = cached
        request.epoch += 1

    def _leave(self, request: Request, cached: int) -> None:
        self.slots -= 1
        self.context -= cached
        if self.pool.grows:
            del self._phases[(request.start - request.target) % self.pool.block][request]

    def steps_left(self) -> int:
        """Steps until the first of them is done."""
        ends = self._ends
        while ends and ends[0][2] != ends[0][3].epoch:
            heapq.heappop(ends)
        return ends[0][0] - self.counter

    def fresh(self, step: int = 0) -> int:
        """Blocks that the next step needs, or a later one."""
        return len(self._phases[(self.counter + step) % self.pool.block]) if self.pool.grows else 0

    def extra(self, request: Request) -> int:
        """Blocks beyond those of its ``target`` tokens that a request needs for its first step."""
        return int(self.pool.grows and request.target % self.pool.block == 0)

    def growth(self, steps: int) -> Any:
        """Blocks that each of the next steps needs, an array."""
        import numpy

        block = self.pool.block
        sizes = numpy.array([len(phase) for phase in self._phases]) if self.pool.grows else numpy.zeros(block, dtype=int)
        return sizes[(self.counter + numpy.arange(steps)) % block]

    def take(self, steps: int) -> None:
        """Takes the blocks of the next steps."""
        if self.pool.grows:
            block = self.pool.block
            for step in range(self.counter, self.counter + min(steps, block)):
                phase = self._phases[step % block]
                if phase:
                    for _ in range(1 + (self.counter + steps - 1 - step) // block):
                        self.pool.grow(phase)

    def advance(self, steps: int) -> list[Request]:
        """Moves on; returns the requests that are done, and no longer decode."""
        self.counter += steps
        self.context += self.slots * steps
        finished = []
        ends, counter = self._ends, self.counter
        while ends and ends[0][0] <= counter:
            end, _, epoch, request = heapq.heappop(ends)
            if epoch != request.epoch:
                continue
            self._sum -= end
            cached = self.cached(request)
            request.done = request.output
            if self.hold:
                if self.pool.grows:
                    del self._phases[(request.start - request.target) % self.pool.block][request]
                self.held.append(request)
            else:
                self._leave(request, cached)
            finished.append(request)
        if self.hold and len(self.held) == self.slots:
            self.slots = self.context = 0
            for request in self.held:
                self.pool.release(request)
            self.held = []
        return finished


class Drafting:
    """Sequences that verify ``drafted`` tokens per step, each of which is accepted with probability ``alpha``.

    Acceptance is independent from token to token, as in the acceptance maths; a step gives the accepted prefix and one
    token of the target's own. Source: Leviathan et al. 2022 (arXiv 2211.17192).
    """

    held: tuple[Request, ...] = ()

    def __init__(self, pool: Pool, drafted: int, alpha: float, seed: int) -> None:
        import random

        self.pool, self.drafted, self.alpha = pool, drafted, alpha
        self.context = self.counter = 0
        self.accepted = self.verified = 0
        self._random = random.Random(seed)
        self._all: dict[Request, None] = {}

    @property
    def slots(self) -> int:
        """Sequences that a step computes."""
        return len(self._all)

    live = slots

    @property
    def left_of_all(self) -> int:
        """Tokens that all of them may still write."""
        return sum(self.lefts())

    def lefts(self) -> Iterator[int]:
        """Tokens that each of them may still write."""
        return (self.left(request) for request in self._all)

    def left(self, request: Request) -> int:
        """Tokens that one of them may still write."""
        return request.output - request.done

    def cached(self, request: Request) -> int:
        """Tokens of a decoding request in the cache."""
        return request.target

    def add(self, request: Request) -> None:
        """A request whose ``target`` tokens are cached and whose next token is known starts to decode."""
        self._all[request] = None
        self.context += request.target

    def remove(self, request: Request) -> None:
        """A request leaves before its end."""
        del self._all[request]
        self.context -= request.target

    def steps_left(self) -> int:
        """One: luck decides after every step."""
        return 1

    def _reach(self, request: Request) -> int:
        return request.target + min(1 + self.drafted, request.output - request.done)

    def fresh(self, step: int = 0) -> int:
        """Blocks that the next step needs if every draft is accepted."""
        block = self.pool.block
        if not self.pool.grows:
            return 0
        return sum(max(0, -(-self._reach(r) // block) - -(-self._room(r) // block)) for r in self._all)

    def _room(self, request: Request) -> int:
        tables = getattr(self.pool, "tables", None)
        return request.held * self.pool.block if tables is None else int(tables.tables[request].tokens)

    def extra(self, request: Request) -> int:
        """Blocks beyond those of its ``target`` tokens that a request needs for its first step."""
        block = self.pool.block
        return -(-self._reach(request) // block) - -(-request.target // block) if self.pool.grows else 0

    def growth(self, steps: int) -> Any:
        """Blocks that the next step needs, an array of one."""
        import numpy

        return numpy.array([self.fresh()])

    def take(self, steps: int) -> None:
        """Takes the blocks of the next step."""
        for request in self._all:
            self.pool.reach(request, self._reach(request))

    def advance(self, steps: int) -> list[Request]:
        """Moves one step on; returns the requests that are done, and no longer decode."""
        self.counter += 1
        finished, draw = [], self._random.random
        for request in self._all:
            left = request.output - request.done
            tokens = 1
            while tokens <= self.drafted and draw() < self.alpha:
                tokens += 1
            self.verified += 1
            tokens = min(tokens, left)
            self.accepted += tokens
            request.done += tokens
            request.target += tokens
            self.context += tokens
            if tokens == left:
                finished.append(request)
        for request in finished:
            self.remove(request)
        return finished
