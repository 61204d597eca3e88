"""Replicas side by side, and the events between them: arrivals, ends of steps, caches that travel.

Events are taken in the order of time; at one moment arrivals come first, then travelling caches, then ends of steps, and
only then does a free replica begin its next step. Nothing depends on anything but the workload and the seed.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from roofline.errors import InputError
from roofline.serving.replica import Replica
from roofline.serving.request import Request
from roofline.serving.workload import Workload

ARRIVAL, SCHEDULED, TRANSFER, STEP = 0, 1, 2, 3
FOREVER = float("inf")


@dataclass(frozen=True)
class Link:
    """What carries a cache from a replica that prefills to one that decodes; one cache at a time, in order.

    Attributes:
        bandwidth: bytes per second. bytes_of: bytes of a cache of so many tokens. latency: seconds before the first byte.
    """

    bandwidth: float
    bytes_of: Callable[[int], Any]
    latency: float = 0.0

    def seconds(self, tokens: int) -> float:
        """Seconds of one cache."""
        return self.latency + float(self.bytes_of(tokens)) / self.bandwidth


class _Source:
    """Hands out the requests of a workload."""

    def __init__(self, workload: Workload) -> None:
        import numpy

        self.workload = workload
        self.arrival = workload.arrival.tolist()
        self.prompt, self.output = workload.prompt.tolist(), workload.output.tolist()
        self.priority = None if workload.priority is None else workload.priority.tolist()
        self.next_of: dict[int, int] = {}
        heads = numpy.arange(len(workload))
        if workload.after is not None:
            follows = workload.after >= 0
            self.next_of = dict(zip(workload.after[follows].tolist(), heads[follows].tolist(), strict=True))
            if len(self.next_of) != int(follows.sum()):
                raise InputError("after: a request is followed by one other at most")
            heads = heads[~follows]
        if workload.concurrency is None:
            heads = heads[numpy.argsort(workload.arrival[heads], kind="stable")]
        self.heads = heads.tolist()
        self.given = 0
        self.free = len(self.heads) if workload.concurrency is None else workload.concurrency

    def next_time(self) -> float:
        """When the next request arrives that waits for no other."""
        if self.given >= min(self.free, len(self.heads)):
            return FOREVER
        return 0.0 if self.workload.concurrency is not None else float(self.arrival[self.heads[self.given]])

    def take(self, now: float) -> Request:
        """The next request, arriving now."""
        number = self.heads[self.given]
        self.given += 1
        return self.make(number, now)

    def make(self, number: int, now: float) -> Request:
        """The request of a number, arriving now."""
        segments = self.workload.segments
        return Request(
            number, now, self.prompt[number], self.output[number], 0 if self.priority is None else self.priority[number],
            () if segments is None else segments(number),
        )  # fmt: skip

    def followed(self, request: Request, now: float) -> tuple[float, Request] | None:
        """(arrival, request) of whoever follows one that has ended, in its session or in its user's place."""
        number = self.next_of.get(request.number)
        if number is not None:
            at = now + self.arrival[number]
            return at, self.make(number, at)
        return self.replaced(now)

    def replaced(self, now: float) -> tuple[float, Request] | None:
        """Whoever comes in the place of a user that has left, where users are a fixed number."""
        if self.workload.concurrency is not None and self.given < len(self.heads):
            return now, self.take(now)
        return None


@dataclass
class Outcome:
    """What became of each request; arrays in the order of the workload, NaN where something did not happen.

    Attributes:
        arrival, admitted, first, finish: seconds. hit: prompt tokens from the prefix cache. preempted: times.
        refused: numbers of requests that no replica can hold. replicas: with their totals and logs.
        transfers_s: seconds that links were busy. end: when the last request ended.
    """

    workload: Workload
    arrival: Any
    admitted: Any
    first: Any
    finish: Any
    hit: Any
    preempted: Any
    replicas: list[Replica]
    refused: list[int] = field(default_factory=list)
    transfers_s: float = 0.0
    end: float = 0.0


def _least(replicas: Sequence[Replica], request: Request, load: Callable[[Replica], int]) -> Replica:
    """The replica of the request's session, or the one with the fewest requests, those on their way to it included."""
    if len(replicas) == 1:
        return replicas[0]
    name = request.segments[-1][0] if request.segments else None
    if isinstance(name, tuple) and name[0] == "session" and isinstance(name[1], int):
        return replicas[name[1] % len(replicas)]
    return min(replicas, key=load)


class _Run:
    """One workload on its way through the replicas."""

    def __init__(self, cluster: Cluster, workload: Workload) -> None:
        self.replicas, self.decoders, self.link, self.lag = cluster.replicas, cluster.decoders, cluster.link, cluster.lag
        self.everyone = [*cluster.replicas, *cluster.decoders]
        self.place = {id(replica): index for index, replica in enumerate(self.everyone)}
        self.source = _Source(workload)
        self.events: list[tuple[float, int, int, Any]] = []
        self.serial = 0
        self.coming = [0] * len(self.everyone)
        self.free_replicas: dict[int, None] = {}
        self.link_free = [0.0] * len(cluster.replicas)
        self.transfers_s = self.end = 0.0
        number = len(workload)
        self.arrival, self.admitted, self.first, self.finish = ([float("nan")] * number for _ in range(4))
        self.hit, self.preempted, self.refused = [0] * number, [0] * number, list[int]()

    def push(self, time: float, kind: int, what: Any) -> None:
        """Puts an event in its place."""
        self.serial += 1
        heapq.heappush(self.events, (time, kind, self.serial, what))

    def go(self) -> None:
        """Takes events until there are none."""
        source, events, everyone = self.source, self.events, self.everyone
        while True:
            arrives = source.next_time()
            now = min(arrives, events[0][0]) if events else arrives
            if now == FOREVER:
                return
            while True:
                if source.next_time() <= now:
                    self.arrive(source.take(now), now)
                elif events and events[0][0] <= now:
                    _, kind, _, what = heapq.heappop(events)
                    HANDLERS[kind](self, what, now)
                else:
                    break
            horizon = min(source.next_time(), events[0][0] if events else FOREVER)
            for index in sorted(self.free_replicas):
                ends = everyone[index].begin(now, horizon)
                if ends is not None:
                    self.push(ends, STEP, index)
                    horizon = min(horizon, ends)
            self.free_replicas.clear()

    def step(self, index: int, now: float) -> None:
        """A replica's step has ended, unless the run of steps was cut short before."""
        replica = self.everyone[index]
        if replica.ends != now:
            return
        self.free_replicas[index] = None
        finished, handed = replica.complete()
        for request in finished:
            i = request.number
            assert request.admitted is not None
            assert request.first is not None
            self.arrival[i], self.admitted[i], self.first[i], self.finish[i] = (
                request.arrival, request.admitted, request.first, now,
            )  # fmt: skip
            self.hit[i], self.preempted[i] = request.hit, request.preempted
            self.end = now
            self.follow(self.source.followed(request, now))
        for request in handed:
            assert self.link is not None
            seconds = self.link.seconds(request.target)
            self.transfers_s += seconds
            self.link_free[index] = max(now, self.link_free[index]) + seconds
            self.push(self.link_free[index], TRANSFER, (index, request))

    def follow(self, follower: tuple[float, Request] | None) -> None:
        """Whoever comes after a request that has ended is on its way."""
        if follower is not None:
            self.push(follower[0], ARRIVAL, follower[1])

    def arrive(self, request: Request, now: float) -> None:
        """A request arrives, at a replica that could hold it to its end."""
        if not all(group[0].pool.fits(request) for group in (self.replicas, self.decoders) if group):
            self.refused.append(request.number)
            self.arrival[request.number] = now
            self.follow(self.source.replaced(now))
            return
        replica = _least(self.replicas, request, self.load)
        if self.lag is None:
            self.deliver(replica, request, now)
        else:
            index = self.place[id(replica)]
            self.coming[index] += 1
            self.push(now + self.lag(len(replica.running) + 1), SCHEDULED, (index, request))

    def load(self, replica: Replica) -> int:
        """Requests that a replica has, and those that are still in its front end."""
        return replica.load + self.coming[self.place[id(replica)]]

    def scheduled(self, waited: tuple[int, Request], now: float) -> None:
        """A request has passed the front end of its replica."""
        self.coming[waited[0]] -= 1
        self.deliver(self.everyone[waited[0]], waited[1], now)

    def transfer(self, travelled: tuple[int, Request], now: float) -> None:
        """A cache has travelled: its blocks are free where it came from."""
        sender, request = travelled
        self.everyone[sender].pool.release(request)
        self.everyone[sender].leave(now)
        if self.everyone[sender].ends is None:
            self.free_replicas[sender] = None
        self.deliver(_least(self.decoders, request, self.load), request, now)

    def deliver(self, replica: Replica, request: Request, now: float) -> None:
        """Hands a request to a replica, which looks at it when its step under way has ended."""
        replica.add(request)
        index = self.place[id(replica)]
        if replica.ends is None:
            self.free_replicas[index] = None
            return
        sooner = replica.interrupt(now)
        if sooner is not None:
            self.push(sooner, STEP, index)


HANDLERS: tuple[Callable[[_Run, Any, float], None], ...] = (_Run.arrive, _Run.scheduled, _Run.transfer, _Run.step)


class Cluster:
    """Replicas that serve a workload together.

    Args:
        replicas: that take requests as they arrive. decoders: with them ``replicas`` only prefill, and hand caches over.
        link: carries caches to ``decoders``; each prefilling replica has one.
        lag: seconds between a request's arrival and its scheduling, by the requests that run on its replica when it arrives,
            itself counted; None for none. Those that wait for a place or are in the front end themselves do not count: the
            constant is what each running sequence adds, and the closed form that it was fitted with takes it so.

    Raises InputError where only one of ``decoders`` and ``link`` is given.
    """

    def __init__(
        self, replicas: Sequence[Replica], decoders: Sequence[Replica] = (), link: Link | None = None,
        lag: Callable[[int], float] | None = None,
    ) -> None:  # fmt: skip
        if bool(decoders) != (link is not None):
            raise InputError("disaggregation: replicas that decode need a link that brings them caches, and the other way round")
        self.replicas, self.decoders, self.link, self.lag = list(replicas), list(decoders), link, lag

    def serve(self, workload: Workload) -> Outcome:
        """Serves a workload to its end."""
        import numpy

        run = _Run(self, workload)
        run.go()
        times = [numpy.array(column, dtype=numpy.float64) for column in (run.arrival, run.admitted, run.first, run.finish)]
        return Outcome(
            workload, times[0], times[1], times[2], times[3], numpy.array(run.hit), numpy.array(run.preempted), run.everyone,
            run.refused, run.transfers_s, run.end,
        )  # fmt: skip
