"""How long prompts and outputs are: fixed, uniform as benchmarks draw them, log-normal, and shapes of real traffic.

======================  =============================================================================
``512``                 always 512 tokens
``410:512``             every whole number from 410 to 512 equally likely
``lognormal:512:0.6``   log-normal with mean 512; the logarithm's standard deviation is 0.6
``sharegpt``, ...       one of ``SHAPES``: its prompts with ``--isl``, its outputs with ``--osl``
======================  =============================================================================
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import Any

from roofline.errors import InputError, suggest

LONGEST = 10**8
NINETIETH = 1.2815515655446004
"""The normal distribution's 90th percentile in standard deviations."""


@dataclass(frozen=True)
class Distribution:
    """A distribution of whole numbers from 1 on.

    Attributes:
        kind: "constant", "uniform" or "lognormal".
        low, high: of a uniform one; both the value of a constant one.
        median, sigma: of a log-normal one. longest: where it is cut off. text: as it was typed, "" where it was not.
    """

    kind: str
    low: int = 1
    high: int = 1
    median: float = 1.0
    sigma: float = 0.0
    longest: int = LONGEST
    text: str = field(default="", compare=False)

    def __post_init__(self) -> None:
        if not 1 <= self.low <= self.high <= LONGEST:
            raise InputError(f"length: {self.low} to {self.high} is out of range; give 1 to {LONGEST:,}, the smaller one first")
        if not 0 <= self.sigma <= 5 or not 0 < self.median <= LONGEST:
            raise InputError(f"length: lognormal with sigma {self.sigma:g} is out of range; give 0 to 5")

    def draw(self, number: int, random: Any) -> Any:
        """So many lengths from a numpy Generator, an int64 array."""
        import numpy

        if self.kind == "constant":
            return numpy.full(number, self.low, dtype=numpy.int64)
        if self.kind == "uniform":
            return random.integers(self.low, self.high + 1, size=number, dtype=numpy.int64)
        drawn = numpy.exp(math.log(self.median) + self.sigma * random.standard_normal(number))
        return numpy.clip(numpy.rint(drawn), 1, self.longest).astype(numpy.int64)

    @property
    def mean(self) -> float:
        """Mean, before rounding and cutting off."""
        if self.kind == "lognormal":
            return self.median * math.exp(self.sigma**2 / 2)
        return (self.low + self.high) / 2

    @property
    def words(self) -> str:
        """As it is typed."""
        if self.text:
            return self.text
        if self.kind == "lognormal":
            return f"lognormal:{self.mean!r}:{self.sigma!r}"
        return str(self.low) if self.kind == "constant" else f"{self.low}:{self.high}"

    def scaled(self, factor: float) -> Distribution:
        """Lengths times a factor."""
        if factor == 1:
            return self
        low, high = (max(1, round(value * factor)) for value in (self.low, self.high))
        return replace(self, low=low, high=high, median=self.median * factor, text="")

    def cut(self, longest: int) -> Distribution:
        """Cut off at ``longest`` tokens."""
        if self.kind == "lognormal":
            return Distribution("lognormal", median=self.median, sigma=self.sigma, longest=min(longest, self.longest))
        return Distribution(self.kind, min(self.low, longest), min(self.high, longest))


@dataclass(frozen=True)
class Shape:
    """Prompts and outputs of a kind of traffic, as two log-normal distributions fitted to published figures."""

    prompt: Distribution
    output: Distribution
    source: str


def _from_percentiles(median: float, ninetieth: float) -> Distribution:
    return Distribution("lognormal", median=median, sigma=math.log(ninetieth / median) / NINETIETH)


SHAPES = {
    "sharegpt": Shape(
        _from_percentiles(1730, 5696), _from_percentiles(415, 834),
        "median and 90th percentile of openchat_sharegpt4 (whole conversations), Agrawal et al. 2024 (arXiv 2403.02310), table 2;"
        " 1413, 5161 and 463, 917 in the first 152 rows of microsoft/sarathi-serve, data/processed_traces/"
        "sharegpt_8k_filtered_stats_llama2_tokenizer.csv",
    ),
    "mooncake": Shape(
        _from_percentiles(8429, 26300), _from_percentiles(362, 588),
        "median and 90th percentile of the first 75 requests of kvcache-ai/Mooncake, conversation_trace.jsonl (FAST25 release)",
    ),
    "coding-step": Shape(
        _from_percentiles(886, 8310), _from_percentiles(184, 939),
        "median and 90th percentile of appended and output tokens per step of coding assistants (Codex), "
        "TraceLab, University of Washington, tracelab.cs.washington.edu, token length distribution",
    ),
}  # fmt: skip
"""Kinds of traffic by name."""


def _integer(text: str, field: str) -> int:
    if not text.strip().isascii() or not text.strip().isdigit() or len(text.strip()) > 9:
        raise InputError(f"{field}: {text!r} is not a length in tokens; write one such as 512, 410:512 or lognormal:512:0.6")
    return int(text)


def _real(text: str, field: str) -> float:
    value = float(text) if text.isascii() and text.replace(".", "", 1).isdigit() and len(text) < 40 else math.nan
    if not math.isfinite(value) or value < 0:
        raise InputError(f"{field}: {text!r} is not a number; write it as in lognormal:512:0.6")
    return value


def parse_length(text: str, field: str, *, output: bool = False) -> Distribution:
    """A distribution as a user types it; see the module's table. Raises InputError that names the field."""
    return replace(_parsed(text, field, output), text=text.strip())


def _parsed(text: str, field: str, output: bool) -> Distribution:
    name, *rest = text.strip().split(":")
    if not rest and name in SHAPES:
        return SHAPES[name].output if output else SHAPES[name].prompt
    if name == "lognormal":
        if len(rest) != 2:
            raise InputError(f"{field}: {text!r} needs a mean and a deviation: lognormal:512:0.6")
        mean, sigma = _real(rest[0], field), _real(rest[1], field)
        if not 1 <= mean <= LONGEST or sigma > 5:
            raise InputError(f"{field}: {text!r} is out of range; give a mean of 1 or more and a deviation of at most 5")
        return Distribution("lognormal", median=mean * math.exp(-(sigma**2) / 2), sigma=sigma)
    if name and not name[0].isdigit() and name[0] not in "+-.":
        raise InputError(f"{field}: unknown shape {text!r}.{suggest(name, SHAPES)} Known: {', '.join(SHAPES)}, or a length")
    if len(rest) > 1:
        raise InputError(f"{field}: {text!r} is not a range; write the shortest and the longest: 410:512")
    low = _integer(name, field)
    high = _integer(rest[0], field) if rest else low
    if not 1 <= low <= high <= LONGEST:
        raise InputError(f"{field}: {text!r} is out of range; give 1 to {LONGEST:,}, the smaller one first")
    return Distribution("uniform" if high > low else "constant", low, high)
