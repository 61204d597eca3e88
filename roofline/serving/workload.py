"""What users ask of a server: when requests arrive, how long they are, what they share, which follows which.

Everything is drawn at once from one seed, so that a workload is the same whatever serves it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from roofline.errors import InputError
from roofline.serving.lengths import LONGEST, Distribution
from roofline.serving.request import Segments

MOST = 20_000_000
EVER = LONGEST * 10


@dataclass(frozen=True)
class Workload:
    """Requests, as arrays.

    Attributes:
        arrival: seconds; of a request that follows another, the seconds between that one's end and its own arrival.
        prompt, output: tokens.
        after: number of the request that it follows, -1 for none; None where none follows any. A request is followed by
            one at most.
        priority: smaller runs first; None where all are alike.
        segments: what the tokens of a request are, where requests share some.
        concurrency: users that each wait for an answer before they ask again; arrivals are then ignored but for thinking.
        assumes: what was filled in.

    Raises InputError for arrays that do not belong together or values out of range.
    """

    arrival: Any
    prompt: Any
    output: Any
    after: Any = None
    priority: Any = None
    segments: Callable[[int], Segments] | None = None
    concurrency: int | None = None
    assumes: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        number = len(self.prompt)
        if not 1 <= number <= MOST:
            raise InputError(f"requests: {number:,} is out of range; give 1 to {MOST:,}")
        if len(self.arrival) != number or len(self.output) != number:
            raise InputError(f"requests: {len(self.arrival)} arrivals, {number} prompts and {len(self.output)} outputs differ")
        if self.concurrency is not None and self.concurrency < 1:
            raise InputError(f"concurrency: {self.concurrency} is out of range; give 1 or more")
        for name, values in (("prompt", self.prompt), ("output", self.output)):
            if min(values) < 1 or max(values) > LONGEST:
                raise InputError(f"{name}: {min(values)} to {max(values)} tokens; a request has 1 to {LONGEST:,}")
        if not (min(self.arrival) >= 0 and max(self.arrival) < 1e12):
            raise InputError("arrival: times must be from 0 to 1e12 seconds")

    def __len__(self) -> int:
        return len(self.prompt)


def _generator(seed: int) -> Any:
    import numpy

    if not 0 <= seed < 2**63:
        raise InputError(f"seed: {seed} is out of range; give a whole number from 0 to 2**63 - 1")
    return numpy.random.Generator(numpy.random.PCG64(seed))


def arrivals(number: int, rate: float | None, random: Any, burst: float = 1.0) -> Any:
    """Arrival times of requests, the first at 0.

    Args:
        rate: per second; None lets all arrive at once.
        burst: coefficient of variation of the time between them: 1 Poisson, above 1 bursts (gamma distributed gaps),
            0 evenly spaced.

    Raises InputError for a rate or a burst out of range.
    """
    import numpy

    if rate is None:
        return numpy.zeros(number)
    if not 0 < rate < 1e9:
        raise InputError(f"rate: {rate!r} is out of range; give requests per second above 0")
    if not 0 <= burst <= 100:
        raise InputError(f"burst: {burst!r} is out of range; give a coefficient of variation from 0 to 100, 1 for Poisson")
    if burst == 0:
        return numpy.arange(number) / rate
    shape = 1 / burst**2
    times: Any = numpy.cumsum(random.gamma(shape, 1 / (shape * rate), number))
    return times - times[0]


def synthetic(
    number: int, prompt: Distribution, output: Distribution, *, rate: float | None = None, concurrency: int | None = None,
    burst: float = 1.0, seed: int = 0, prefix: int = 0, turns: int = 1, think_s: float = 0.0, classes: int = 1,
    longest: int | None = None,
) -> Workload:  # fmt: skip
    """A drawn workload.

    Args:
        number: requests, all turns counted. rate: of requests without predecessor, per second; None: all at once.
        concurrency: users that wait for their answers, instead of a rate. burst: see ``arrivals``.
        prefix: tokens that all prompts begin with, beside ``prompt``. turns: requests of a session; each prompt holds all
            that was said before. think_s: mean seconds between an answer and the next turn, exponential.
        classes: priorities 0 ... classes - 1, equally likely. longest: log-normal lengths are cut, and sessions end, so that
            prompt and output do not exceed it.

    Raises InputError for sizes out of range.
    """
    import numpy

    if rate is not None and concurrency is not None:
        raise InputError("rate: requests arrive at a rate or when a user is free (concurrency); give one of them")
    for value, name, least, most in (
        (number, "requests", 1, MOST), (prefix, "prefix", 0, LONGEST), (turns, "turns", 1, 10_000),
        (classes, "priorities", 1, 1000),
    ):  # fmt: skip
        if not least <= value <= most:
            raise InputError(f"{name}: {value:,} is out of range; give {least} to {most:,}")
    if not 0 <= think_s < 1e9:
        raise InputError(f"think: {think_s!r} is out of range; give seconds from 0 on")
    random = _generator(seed)
    prompts, outputs = prompt.draw(number, random), output.draw(number, random)
    if longest is not None:
        if prompt.kind == "lognormal":
            prompts = numpy.minimum(prompts, max(1, longest - prefix - 1))
        if output.kind == "lognormal":
            outputs = numpy.minimum(outputs, numpy.maximum(1, longest - prefix - prompts))
    starts = numpy.arange(number) % turns == 0
    times = numpy.zeros(number)
    times[starts] = arrivals(int(starts.sum()), rate, random, burst)
    after = None
    if turns > 1:
        times[~starts] = random.exponential(think_s, int((~starts).sum())) if think_s else 0.0
        session = numpy.arange(number) // turns
        both = numpy.cumsum(prompts + outputs)
        before = both - (prompts + outputs)
        prompts = prompts + before - before[session * turns]
        after = numpy.where(starts, -1, numpy.arange(number) - 1)
    prompts = prompts + prefix
    if longest is not None and turns > 1:
        kept = _kept(prompts + outputs, longest, turns)
        after = numpy.where(starts, -1, numpy.cumsum(kept) - 2)[kept]
        times, prompts, outputs, starts = times[kept], prompts[kept], outputs[kept], starts[kept]
        number = len(prompts)
    priority = random.integers(0, classes, number) if classes > 1 else None
    sessions = numpy.cumsum(starts) - 1
    return Workload(times, prompts, outputs, after, priority, _shared(prefix, sessions if turns > 1 else None), concurrency)


def _kept(lengths: Any, longest: int, turns: int) -> Any:
    """Turns up to the first of their session that is too long; the first turn always."""
    import numpy

    index = numpy.arange(len(lengths))
    good = (lengths <= longest) | (index % turns == 0)
    bad_before = numpy.cumsum(~good)
    at_start = bad_before[(index // turns) * turns]
    return bad_before == at_start


@dataclass(frozen=True)
class _Shared:
    prefix: int
    sessions: Any

    def __call__(self, number: int) -> Segments:
        found: list[tuple[Any, int]] = [("shared", self.prefix)] if self.prefix else []
        if self.sessions is not None:
            found.append((("session", int(self.sessions[number])), EVER))
        return tuple(found)


def _shared(prefix: int, sessions: Any) -> Callable[[int], Segments] | None:
    return _Shared(prefix, sessions) if prefix or sessions is not None else None
