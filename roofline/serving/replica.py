"""One replica of an engine: it composes a step, takes the time that the step takes, and hands tokens out at its end.

Nothing is approximated: every step is one iteration of the engine. Where the next steps are known to be alike (decodes
only, nobody can join, nobody ends, blocks suffice) they are evaluated as one array.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from roofline.serving.decoding import Drafting, Lockstep
from roofline.serving.expectation import Expectation
from roofline.serving.policies import Policy
from roofline.serving.queues import Arrivals, Priorities
from roofline.serving.steps import StepShape, StepTimes
from roofline.serving.totals import Span, Totals

if TYPE_CHECKING:
    from roofline.serving.pool import Pool
    from roofline.serving.request import Request

FEW = 4
"""Runs of fewer steps are evaluated one by one."""
MOST = 4096
"""Steps of one array."""
FOREVER = float("inf")


@dataclass(frozen=True)
class Speculation:
    """Drafted tokens per step, how likely each is accepted, and what drafting one costs.

    Attributes:
        drafted: gamma. alpha: acceptance of a token. draft: step times of a draft model, None where ``cost`` says it.
        cost: seconds of drafting one token over those of a plain decode step.
    """

    drafted: int
    alpha: float
    draft: StepTimes | None = None
    cost: float = 0.0


@dataclass(frozen=True)
class Swap:
    """Moving a request's cache to host memory and back: bytes per token over a bandwidth."""

    token_bytes: float
    bandwidth: float

    def seconds(self, tokens: int) -> float:
        """Seconds of moving so many tokens one way."""
        return tokens * self.token_bytes / self.bandwidth


class Replica:
    """One replica.

    Args:
        times: seconds of steps. policy, pool: how it schedules, and its cache.
        speculation, swap: None for none. prefill_only: hands requests on after their prompt (disaggregation).
        record: keep a log of steps, and in ``left`` the blocks still in use after each (seconds, blocks).
        exact_steps: evaluate every step alone, never an array (a check).
    """

    def __init__(
        self, times: StepTimes, policy: Policy, pool: Pool, *, name: str = "replica 0", speculation: Speculation | None = None,
        swap: Swap | None = None, seed: int = 0, prefill_only: bool = False, record: bool = False, exact_steps: bool = False,
    ) -> None:  # fmt: skip
        self.times, self.policy, self.pool, self.name = times, policy, pool, name
        self.speculation, self.swap, self.prefill_only = speculation, swap, prefill_only
        self.waiting: Arrivals | Priorities = Priorities() if policy.scheduler == "priority" else Arrivals()
        self.running: dict[Request, None] = {}
        self.prefilling: dict[Request, None] = {}
        self.decoding: Lockstep | Drafting = (
            Lockstep(pool, policy.scheduler == "static")
            if speculation is None
            else Drafting(pool, speculation.drafted, speculation.alpha, seed)
        )
        self.expected = None if policy.estimate is None else Expectation(policy.estimate, pool)
        self.totals = Totals()
        self.log: list[Span] | None = [] if record else None
        self.left: list[tuple[float, int]] = []
        self.ends: float | None = None
        self._single = exact_steps
        self._pushed = False
        self._chunks: list[tuple[Request, int]] = []
        self._steps = self._waited = 0
        self._decodes = False
        self._moments: Any = ()
        self._extra = 0.0
        self._emitted: dict[float, int] = {}
        self._last_decode = -1.0

    def add(self, request: Request) -> None:
        """A request arrives."""
        self.waiting.add(request)

    @property
    def load(self) -> int:
        """Requests that are here."""
        return len(self.waiting) + len(self.running)

    @property
    def _seats(self) -> int:
        return self.policy.sequences - len(self.running) - len(self.decoding.held)

    def begin(self, now: float, horizon: float) -> float | None:
        """Starts the next step, or several alike, at ``now``; returns when they end, None where there is nothing to do.

        ``horizon`` is when the next thing happens elsewhere: a run of steps ends with the first that reaches it.
        """
        self._chunks = self._compose(now)
        self._decodes = bool(self.decoding.slots) and not (self.policy.stalls and self._chunks)
        if not self._chunks and not self._decodes:
            assert self.prefill_only or not self.load, "whoever waits can run once nobody else does"
            if self.expected is not None:
                self.expected.idle()
            return None
        self._waited = len(self.waiting)
        if self._chunks or self._pushed or self._single or self.speculation is not None:
            self._moments = [now, now + self._seconds()]
        else:
            self._moments = self._run(now, horizon)
        self._steps = len(self._moments) - 1
        self.ends = float(self._moments[-1])
        return self.ends

    def interrupt(self, now: float) -> float | None:
        """Somebody has arrived who may join: a run ends with the step under way; returns when, None if it stays as it is."""
        if self._steps < 2 or not (self.policy.scheduler == "priority" or (self._seats > 0 and len(self.waiting) == 1)):
            return None
        from bisect import bisect_left

        steps = bisect_left(self._moments, now, 1)
        if steps >= self._steps:
            return None
        self._steps, self._moments = steps, self._moments[: steps + 1]
        self.ends = float(self._moments[-1])
        return self.ends

    def _seconds(self) -> float:
        """Seconds of one step of the chunks and, if they take part, the decoding sequences."""
        tokens = pairs = 0
        for request, size in self._chunks:
            tokens += size
            pairs += size * request.computed + size * (size + 1) // 2
        slots, context = (self.decoding.slots, self.decoding.context) if self._decodes else (0, 0)
        drafted = self.decoding.drafted
        seconds = self.times.seconds(StepShape(tokens, pairs, len(self._chunks), slots, context, drafted))
        if drafted and slots and self.speculation is not None:
            plain = StepShape(decodes=slots, decode_context=context)
            draft = self.speculation.draft
            each = draft.seconds(plain) if draft is not None else self.speculation.cost * self.times.seconds(plain)
            seconds += drafted * each
        seconds += self.policy.overhead_s + self._extra
        self._extra = 0.0
        return seconds

    def _run(self, now: float, horizon: float) -> Any:
        """Moments at which decode-only steps begin and end, until one is done, blocks run out, or the horizon is reached."""
        decoding, overhead = self.decoding, self.policy.overhead_s
        if (len(self.waiting) or not self._seats) and self.policy.scheduler != "priority":
            horizon = FOREVER
        steps, slots, context = decoding.steps_left(), decoding.slots, decoding.context
        first = self.times.seconds(StepShape(decodes=slots, decode_context=context)) + overhead + self._extra
        self._extra = 0.0
        if steps >= FEW and horizon < FOREVER:
            steps = min(steps, int((horizon - now) / first) + 2)
        if steps >= FEW:
            return self._array(now, horizon, min(steps, MOST), first)
        end = now + first
        moments, free = [now, end], self.pool.free - decoding.fresh()
        for step in range(1, steps):
            free -= decoding.fresh(step)
            if end >= horizon or free < 0:
                break
            end += self.times.seconds(StepShape(decodes=slots, decode_context=context + step * slots)) + overhead
            moments.append(end)
        return moments

    def _array(self, now: float, horizon: float, steps: int, first: float) -> Any:
        import numpy

        decoding = self.decoding
        needed = numpy.cumsum(decoding.growth(steps))
        steps = max(1, min(steps, int(numpy.searchsorted(needed, self.pool.free, side="right"))))
        seconds = self.times.decode_run(decoding.slots, decoding.context, steps) + self.policy.overhead_s
        seconds[0] = first
        moments = numpy.cumsum(numpy.concatenate([[now], seconds]))
        return moments[: min(steps, int(numpy.searchsorted(moments[1:], horizon)) + 1) + 1]

    def _book(self) -> None:
        """Adds the steps that have ended to the totals, and takes their blocks."""
        totals, start, end = self.totals, float(self._moments[0]), float(self._moments[-1])
        used, slots = self.pool.used, self.decoding.slots if self._decodes else 0
        held = 0.0
        if self._decodes:
            if self._steps > FEW:
                import numpy

                growing = used + numpy.cumsum(self.decoding.growth(self._steps))
                held = float((growing * numpy.diff(self._moments)).sum())
            else:
                for step in range(self._steps):
                    used += self.decoding.fresh(step)
                    held += used * float(self._moments[step + 1] - self._moments[step])
            self.decoding.take(self._steps)
        else:
            held = used * (end - start)
        totals.block_seconds += held
        totals.peak_blocks = max(totals.peak_blocks, self.pool.used)
        totals.steps += self._steps
        totals.busy_s += end - start
        totals.runs.extend((start, end, self._steps if self._decodes else 0, slots, held))
        if self.log is not None:
            tokens = sum(size for _, size in self._chunks)
            self.log.append(Span(start, end, self._steps, len(self._chunks), tokens, slots, self._waited, self.pool.used))

    def complete(self) -> tuple[list[Request], list[Request]]:
        """The step that began is over: (requests that are done, requests whose prompt is, of a replica for prompts)."""
        assert self.ends is not None
        now, self.ends = self.ends, None
        self._book()
        finished: list[Request] = []
        if self._decodes:
            live = self.decoding.live
            self.totals.decode_steps += self._steps
            self.totals.decode_slots += self.decoding.slots * self._steps
            self._gaps(live)
            before = self.decoding.accepted if isinstance(self.decoding, Drafting) else 0
            finished = self.decoding.advance(self._steps)
            gained = self.decoding.accepted - before if isinstance(self.decoding, Drafting) else live * self._steps
            self.totals.output_tokens += gained
            self._last_decode = now
            if self.expected is not None:
                self.expected.stepped(self._steps)
            for request in finished:
                self._done(request, now, self.policy.scheduler != "static")
            if live > len(finished):
                self._emitted[now] = live - len(finished)
        handed = self._prompts(now, finished)
        if self.expected is not None and (finished or handed):
            self.expected.full = False
        self.leave(now)
        return finished, handed

    def leave(self, now: float) -> None:
        """Logs the blocks that are in use after a step, or after a cache has travelled."""
        if self.log is not None:
            self.left.append((now, self.pool.used))

    def _gaps(self, live: int) -> None:
        """Books the time since each sequence's token before."""
        first = float(self._moments[1])
        gaps, weights = self.totals.gaps, self.totals.weights
        for moment, number in self._emitted.items():
            if number:
                gaps.append(first - moment)
                weights.append(number)
        self._emitted = {}
        if self._steps > 1:
            import numpy

            gaps.append(numpy.diff(self._moments[1:]))
            weights.append(live)

    def _prompts(self, now: float, finished: list[Request]) -> list[Request]:
        """Books the chunks; a prompt that is complete gives its next token."""
        handed = []
        for request, size in self._chunks:
            request.computed += size
            self.totals.prompt_tokens += size
            if request.computed < request.target:
                continue
            del self.prefilling[request]
            request.done += 1
            self.totals.output_tokens += 1
            if request.first is None:
                request.first = now
            else:
                self.totals.gaps.append(now - request.last)
                self.totals.weights.append(1)
            request.since = request.last = now
            if request.done == request.output:
                self._done(request, now, True)
                finished.append(request)
            elif self.prefill_only:
                del self.running[request]
                handed.append(request)
            else:
                self._decode(request, now)
        return handed

    def _decode(self, request: Request, now: float) -> None:
        request.since = now
        self.decoding.add(request)
        self._emitted[request.last] = self._emitted.get(request.last, 0) + 1

    def _done(self, request: Request, now: float, release: bool) -> None:
        request.finish = request.last = now
        del self.running[request]
        if release:
            self.pool.release(request)

    def _compose(self, now: float) -> list[tuple[Request, int]]:
        """Makes room for the decodes and admits who may run; returns the chunks of prompts of the next step."""
        policy, decoding = self.policy, self.decoding
        self._pushed = False
        budget = policy.batched_tokens
        if not policy.stalls:
            self._make_room()
            if policy.scheduler == "priority":
                self._yield_seats()
            budget -= decoding.slots * (1 + decoding.drafted)
        chunks: list[tuple[Request, int]] = []
        for request in self.prefilling:
            if budget <= 0:
                break
            size = min(request.target - request.computed, budget)
            chunks.append((request, size))
            budget -= size
        settled = not self._pushed or not self.running
        if settled and len(self.waiting) and not (policy.scheduler == "static" and decoding.slots):
            self._admit(now, budget, chunks)
        if policy.stalls and not chunks:
            self._make_room()
        return chunks

    def _admit(self, now: float, budget: int, chunks: list[tuple[Request, int]]) -> None:
        """Lets waiting requests in while seats, blocks and tokens last."""
        waiting, chunked, expected = self.waiting, self.policy.chunks, self.expected
        seats = 0 if expected is not None and expected.full and self.running else self._seats
        keep = 0 if self.policy.stalls else self.decoding.fresh()
        while seats > 0 and len(waiting):
            request = waiting.head()
            ready = request.swapped or (request.computed == request.target and request.done > 0)
            size = request.target - request.computed
            if not ready and (budget <= 0 or (not chunked and chunks and size > budget)):
                break
            if not ready and expected is not None and not expected.admits(request, self.decoding, self.prefilling):
                break
            extra = self.decoding.extra(request) if ready else 0
            hit = self.pool.admit(request, request.target, keep + extra)
            if hit is None:
                break
            waiting.pop()
            seats -= 1
            if request.admitted is None:
                request.admitted = now
            self.running[request] = None
            if ready:
                keep += extra
                self._resume(request, now)
                continue
            request.computed = hit
            if request.first is None:
                request.hit = hit
            size = min(request.target - hit, budget) if chunked or self.policy.stalls else request.target - hit
            self.prefilling[request] = None
            chunks.append((request, size))
            budget -= size

    def _resume(self, request: Request, now: float) -> None:
        """A request whose cache has come back, or has come from another replica, goes on decoding."""
        if request.swapped and self.swap is not None:
            moved = self.swap.seconds(request.target)
            self._extra += moved
            self.totals.swapped_s += moved
        request.swapped = False
        self._decode(request, now)

    def _make_room(self) -> None:
        """Pushes out requests, the latest first, until the next decode step has its blocks."""
        while self.decoding.fresh() > self.pool.free:
            self._push_out(self._latest())
            self._pushed = True

    def _latest(self) -> Request:
        if self.policy.scheduler == "priority":
            return max(self.running, key=lambda r: (r.priority, r.arrival, r.number))
        if self.expected is not None and self.decoding.slots:
            decoding = [request for request in self.running if request not in self.prefilling]
            return min(reversed(decoding), key=lambda r: (r.output - self.decoding.left(r), -r.prompt))
        return next(reversed(self.running))

    def _yield_seats(self) -> None:
        """Pushes out requests of larger priority where seats or blocks are taken and a smaller one waits."""
        while len(self.waiting) and self.running:
            head, last = self.waiting.head(), self._latest()
            room = -(-head.target // self.pool.block) <= self.pool.free
            if head.priority >= last.priority or (self._seats > 0 and room):
                break
            self._push_out(last)

    def _push_out(self, request: Request) -> None:
        """Preempts a running request: its blocks go, it waits again."""
        del self.running[request]
        self.totals.preemptions += 1
        request.preempted += 1
        if request in self.prefilling:
            del self.prefilling[request]
            lost, request.computed = request.computed, 0
        else:
            lost = self._interrupt(request)
        self.totals.recomputed += lost
        self.pool.release(request)
        if self.expected is None:
            self.waiting.back(request)
            return
        self.waiting.add(request)
        others = [other for other in self.running if other not in self.prefilling]
        outputs = sum(other.output for other in others)
        self.expected.retracted(outputs - self.decoding.left_of_all, outputs, len(others))

    def _interrupt(self, request: Request) -> int:
        """Takes a request out of the decoding ones; returns cached tokens that are lost."""
        if self._last_decode > request.since:
            request.last = self._last_decode
        self.decoding.remove(request)
        self._emitted[request.last] -= 1
        if self.policy.preemption == "swap" and self.swap is not None:
            moved = self.swap.seconds(request.target)
            self._extra += moved
            self.totals.swapped_s += moved
            request.swapped = True
            return 0
        lost, request.computed = request.target, 0
        request.target = request.prompt + request.done
        return lost
