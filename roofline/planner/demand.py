"""What is to be served: how long requests are and how that spreads, what they share, and how they come.

The closed form wants a few figures of a load: means, the spread of what a prompt costs, what a prefix cache already has.
Loads whose requests are all alike give them exactly; of all others they are those of ``SAMPLE`` requests, drawn as the
simulator draws them, so that distributions, shared prefixes and sessions of several turns need no formula of their own.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import Any

from roofline.errors import InputError
from roofline.serving.lengths import Distribution

LONGEST = 10_000_000
MOST_USERS = 10_000_000
SAMPLE = 20_000
WHOLE = 1024
"""The longest request of a load without an end of its own is rounded up to a multiple of this."""
EXPONENTIAL = 1.0
"""Squared coefficient of variation of the time between random arrivals."""
STEPS_OF_HITS = 50
"""Shares of hits that are told apart."""


@dataclass(frozen=True)
class Lengths:
    """A load as the closed form sees it, at a share of hits in the prefix cache; tokens.

    Attributes:
        prompt, output: means of a request. cached: of the prompt, found in the cache. context: behind a decoding sequence,
            over all decode steps. excess: mean query-key pairs of a prompt over those of a mean prompt.
        variation: squared coefficient of variation of the prompt's new tokens. far: its new tokens at the percentile asked
            for. arrivals: squared coefficient of variation of the time between arrivals.
    """

    prompt: float
    output: float
    cached: float
    context: int
    excess: float = 1.0
    variation: float = 0.0
    far: float = 0.0
    arrivals: float = EXPONENTIAL

    @property
    def fresh(self) -> float:
        """New tokens of a mean prompt."""
        return self.prompt - self.cached


@dataclass(frozen=True)
class _Drawn:
    """Requests of a load that was drawn; arrays. ``history``: tokens said before in the session, 0 in its first turn."""

    prompt: Any
    output: Any
    history: Any
    sessions: int


@dataclass(frozen=True)
class Demand:
    """Requests, and how they come.

    Attributes:
        prompt, output: lengths of what a request adds [tokens].
        rate: per second, of requests that follow no other, all deployments together. concurrency: users of whom each sends
            the next request when the last is answered. At most one of them; neither for batch work, which waits in any amount.
        burst: coefficient of variation of the time between arrivals. prefix: tokens that all prompts begin with.
        turns: requests of a session; each prompt holds what was said before. think_s: mean time between an answer and the
            next turn. kept: the engine keeps prefixes of past requests. most: tokens of the longest request, None for what
            the lengths say.
    """

    prompt: Distribution
    output: Distribution
    rate: float | None = None
    concurrency: int | None = None
    burst: float = 1.0
    prefix: int = 0
    turns: int = 1
    think_s: float = 0.0
    kept: bool = False
    most: int | None = None

    def __post_init__(self) -> None:
        for name, given in (("isl", self.prompt), ("osl", self.output)):
            if not 1 <= given.mean <= LONGEST:
                raise InputError(f"{name}: {given.mean:g} is out of range; give 1 to {LONGEST:,} tokens")
        if self.rate is not None and self.concurrency is not None:
            raise InputError(
                "rate: requests per second and a fixed concurrency contradict each other; give --rate or --concurrency"
            )
        if self.rate is not None and not 0 < self.rate <= 1e9:
            raise InputError(f"rate: {self.rate!r} is out of range; give requests per second above 0, and at most 1e9")
        if self.concurrency is not None and not 1 <= self.concurrency <= MOST_USERS:
            raise InputError(f"concurrency: {self.concurrency!r} is out of range; give 1 to {MOST_USERS:,} users")
        if self.most is not None and self.most < self.least:
            raise InputError(f"max-model-len: {self.most:,} tokens hold no request; the shortest has {self.least:,}")

    @property
    def least(self) -> int:
        """Tokens that every request may have, whatever its lengths are cut at."""
        return self.prefix + sum(1 if one.kind == "lognormal" else one.high for one in (self.prompt, self.output))

    @property
    def offline(self) -> bool:
        """Whether it is batch work."""
        return self.rate is None and self.concurrency is None

    @property
    def even(self) -> bool:
        """Whether all requests are alike."""
        return self.prompt.kind == self.output.kind == "constant" and self.turns == 1

    @cached_property
    def _drawn(self) -> _Drawn:
        return _draw(self.prompt, self.output, self.prefix, self.turns, self.most)

    @cached_property
    def isl(self) -> int:
        """Mean tokens of a prompt, with all that it begins with."""
        return self.prompt.low + self.prefix if self.even else max(1, round(float(self._drawn.prompt.mean())))

    @cached_property
    def osl(self) -> int:
        """Mean tokens of an output."""
        return self.output.low if self.even else max(1, round(float(self._drawn.output.mean())))

    @property
    def length(self) -> int:
        """Tokens of a mean request."""
        return self.isl + self.osl

    @cached_property
    def longest(self) -> int:
        """Tokens of the longest request: as given, else what the lengths say, else the longest of those drawn, rounded up."""
        if self.most is not None:
            return self.most
        if self.even:
            return self.length
        if self.turns == 1 and "lognormal" not in (self.prompt.kind, self.output.kind):
            return self.prefix + self.prompt.high + self.output.high
        return -(-int((self._drawn.prompt + self._drawn.output).max()) // WHOLE) * WHOLE

    @cached_property
    def requests(self) -> float:
        """Mean requests of a session."""
        return 1.0 if self.turns == 1 else len(self._drawn.prompt) / self._drawn.sessions

    @property
    def request_rate(self) -> float | None:
        """Requests per second, all turns counted."""
        return None if self.rate is None else self.rate * self.requests

    @property
    def think_mean_s(self) -> float:
        """Mean seconds for which a user thinks, over all requests."""
        return self.think_s * (1.0 - 1.0 / self.requests)

    @cached_property
    def held(self) -> tuple[float, float]:
        """(mean, standard deviation) of the tokens at its end, prefixes that all share left out, of whoever runs."""
        if self.even:
            return float(self.length - self.shared), 0.0
        import numpy

        drawn = self._drawn
        own, weights = drawn.prompt + drawn.output - self.shared, drawn.output / drawn.output.sum()
        mean = float((own * weights).sum())
        return mean, float(numpy.sqrt(((own - mean) ** 2 * weights).sum()))

    @property
    def shared(self) -> int:
        """Tokens that running requests hold once between them."""
        return self.prefix if self.kept else 0

    @cached_property
    def idle(self) -> float:
        """Tokens that a request leaves behind, prefixes that all share left out."""
        return float((self._drawn.prompt + self._drawn.output).mean()) - self.shared

    def lengths(self, percentile: float = 99.0, hits: float = 1.0) -> Lengths:
        """The load where the cache has kept that share of what sessions come back to."""
        return _lengths(self, percentile, round(hits * STEPS_OF_HITS) if self.turns > 1 and self.kept else STEPS_OF_HITS)

    def hits(self, tokens: float, rate: float) -> float:
        """Share of turns whose session is still in the cache.

        Args:
            tokens: that whoever runs leaves free. rate: requests per second.

        What was used least recently goes first, so that all goes that was not used for some time t: requests leave tokens
        behind that stay for t, or until the session comes back. With exponential thinking ``rate * left * (ended * t +
        going_on * think * (1 - exp(-t / think))) = tokens``, and a turn finds its session with ``1 - exp(-t / think)``.
        Source: Che, Tung and Wang 2002, Hierarchical web caching systems (the characteristic time of a least recently
        used cache).
        """
        from math import exp

        if self.turns == 1 or not self.kept:
            return 1.0
        if tokens <= 0 or rate <= 0:
            return 0.0 if tokens <= 0 else 1.0
        if self.think_s <= 0:
            return 1.0
        flow, ended, think = rate * self.idle, 1.0 / self.requests, self.think_s

        def taken(time: float) -> float:
            return flow * (ended * time + (1.0 - ended) * think * (1.0 - exp(-time / think)))

        low, high = 0.0, 20.0 * think
        if taken(high) <= tokens:
            return 1.0
        for _ in range(20):
            middle = (low + high) / 2
            low, high = (middle, high) if taken(middle) <= tokens else (low, middle)
        return 1.0 - exp(-low / think)

    def scaled(self, *, isl: float = 1, osl: float = 1, load: float = 1) -> Demand:
        """The demand with lengths and load times factors."""
        return replace(
            self,
            prompt=self.prompt.scaled(isl),
            output=self.output.scaled(osl),
            rate=None if self.rate is None else self.rate * load,
            concurrency=None if self.concurrency is None else max(1, round(self.concurrency * load)),
        )

    def share(self, of: int, parts: int) -> Demand:
        """What ``parts`` of ``of`` equal deployments get: that part of the rate, drawn at random, or of the users."""
        part = parts / of
        return replace(
            self,
            rate=None if self.rate is None else self.rate * part,
            burst=1.0 if self.burst == 1.0 else (part * self.burst**2 + 1.0 - part) ** 0.5,
            concurrency=None if self.concurrency is None else max(1, -(-self.concurrency * parts // of)),
        )


def constant(length: int, field: str = "isl") -> Distribution:
    """Always so many tokens. Raises InputError that names the field."""
    if type(length) is not int or not 1 <= length <= LONGEST:
        raise InputError(f"{field}: {length!r} is out of range; give 1 to {LONGEST:,} tokens")
    return Distribution("constant", length, length)


def demand(
    isl: int | Distribution, osl: int | Distribution, rate: float | None = None, concurrency: int | None = None, **more: Any
) -> Demand:
    """A demand whose lengths may be plain numbers of tokens."""
    prompt = isl if isinstance(isl, Distribution) else constant(isl, "isl")
    output = osl if isinstance(osl, Distribution) else constant(osl, "osl")
    return Demand(prompt, output, rate, concurrency, **more)


@lru_cache(maxsize=64)
def _draw(prompt: Distribution, output: Distribution, prefix: int, turns: int, most: int | None) -> _Drawn:
    import numpy

    from roofline.serving.workload import synthetic

    found = synthetic(-(-SAMPLE // turns) * turns, prompt, output, rate=1.0, prefix=prefix, turns=turns, longest=most, seed=0)
    history: Any = numpy.zeros(len(found))
    sessions = len(found)
    if found.after is not None:
        follows = found.after >= 0
        before: Any = found.after[follows]
        history[follows] = found.prompt[before] + found.output[before] - 1
        sessions = int((~follows).sum())
    return _Drawn(found.prompt.astype(float), found.output.astype(float), history, sessions)


@lru_cache(maxsize=4096)
def _lengths(load: Demand, percentile: float, hits: int) -> Lengths:
    arrivals = load.burst**2 if load.rate is not None else EXPONENTIAL
    if load.even:
        prefix = min(load.shared, load.isl - 1)
        return Lengths(load.isl, load.osl, prefix, load.isl + load.osl // 2, far=load.isl - prefix, arrivals=arrivals)
    import numpy

    drawn, share = load._drawn, hits / STEPS_OF_HITS
    cold = numpy.minimum(load.shared, drawn.prompt - 1)
    warm = numpy.minimum(numpy.maximum(drawn.history, load.shared), drawn.prompt - 1) if load.kept else cold
    cached = numpy.concatenate([warm, cold])
    weights = numpy.concatenate([numpy.full(len(warm), share), numpy.full(len(cold), 1 - share)]) / len(cold)
    prompt = numpy.concatenate([drawn.prompt, drawn.prompt])
    new = prompt - cached
    fresh = float((new * weights).sum())
    behind = float((cached * weights).sum())
    pairs = float(((new * cached + new * (new + 1) / 2) * weights).sum())
    spread = float(((new - fresh) ** 2 * weights).sum())
    order: Any = numpy.argsort(new)
    place = min(int(numpy.searchsorted(numpy.cumsum(weights[order]), percentile / 100)), len(order) - 1)
    contexts = float((drawn.output * (drawn.prompt + drawn.output / 2)).sum() / drawn.output.sum())
    return Lengths(
        fresh + behind, float(drawn.output.mean()), behind, round(contexts),
        pairs / (fresh * behind + fresh * (fresh + 1) / 2), spread / fresh**2, float(new[order][place]), arrivals,
    )  # fmt: skip
