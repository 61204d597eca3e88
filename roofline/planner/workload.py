"""What is to be served, and how fast: lengths, load, and the limits on latency."""

from __future__ import annotations

from dataclasses import dataclass, replace

from roofline.errors import InputError

LONGEST = 10_000_000
MOST_USERS = 10_000_000


@dataclass(frozen=True)
class Workload:
    """Requests of one kind.

    Attributes:
        isl, osl: prompt and output tokens of a request.
        rate: requests per second that arrive at random (Poisson), all deployments together.
        concurrency: users of whom each sends the next request when the last is answered.

    Exactly one of ``rate`` and ``concurrency`` is given; neither for batch work, which waits in any amount.
    """

    isl: int
    osl: int
    rate: float | None = None
    concurrency: int | None = None

    def __post_init__(self) -> None:
        for name in ("isl", "osl"):
            value = getattr(self, name)
            if type(value) is not int or not 1 <= value <= LONGEST:
                raise InputError(f"{name}: {value!r} is out of range; give 1 to {LONGEST:,} tokens")
        if self.rate is not None and self.concurrency is not None:
            raise InputError(
                "rate: requests per second and a fixed concurrency contradict each other; give --rate or --concurrency"
            )
        if self.rate is not None and not 0 < self.rate <= 1e9:
            raise InputError(f"rate: {self.rate!r} is out of range; give requests per second above 0, and at most 1e9")
        if self.concurrency is not None and not 1 <= self.concurrency <= MOST_USERS:
            raise InputError(f"concurrency: {self.concurrency!r} is out of range; give 1 to {MOST_USERS:,} users")

    @property
    def offline(self) -> bool:
        """Whether it is batch work."""
        return self.rate is None and self.concurrency is None

    @property
    def length(self) -> int:
        """Tokens of a whole request."""
        return self.isl + self.osl

    def scaled(self, *, isl: float = 1, osl: float = 1, load: float = 1) -> Workload:
        """The workload with lengths and load times factors."""
        return replace(
            self,
            isl=max(1, round(self.isl * isl)),
            osl=max(1, round(self.osl * osl)),
            rate=None if self.rate is None else self.rate * load,
            concurrency=None if self.concurrency is None else max(1, round(self.concurrency * load)),
        )


@dataclass(frozen=True)
class Objective:
    """Limits on latency [s]; None for no limit.

    Attributes:
        ttft: on the ``percentile`` of the time to first token. tpot: on the mean time per output token after it.
    """

    ttft: float | None = None
    tpot: float | None = None
    percentile: float = 99.0

    def __post_init__(self) -> None:
        for name in ("ttft", "tpot"):
            value = getattr(self, name)
            if value is not None and not 0 < value <= 1e6:
                raise InputError(f"{name}: {value!r} s is out of range; give a time above 0, such as 40ms or 1s")
        if not 50 <= self.percentile < 100:
            raise InputError(f"percentile: {self.percentile!r} is out of range; give 50 to below 100, such as 99")

    def met(self, ttft: float, tpot: float) -> bool:
        """Whether a percentile of TTFT and a mean TPOT keep the limits."""
        return (self.ttft is None or ttft <= self.ttft) and (self.tpot is None or tpot <= self.tpot)
