"""What users ask of a server, as options: when requests arrive, how long they are, what they share."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated, Any

import typer

from roofline.cli import sweeps
from roofline.cli.bundles import Bundle
from roofline.errors import InputError

if TYPE_CHECKING:
    from roofline.serving.lengths import Distribution
    from roofline.serving.workload import Workload

REQUESTS = 1000
MOST_RATE = 1e9


def seconds(text: str, field: str, *, zero: bool = False) -> float:
    """A time as a user types it, 40ms or 1.5s. Raises InputError that names the field."""
    from roofline.units import parse_quantity

    value = parse_quantity(text, "seconds", field, "s")
    if not 0 <= value <= 10**9 or (value == 0 and not zero):
        raise InputError(f"{field}: {text!r} is out of range; give a time above 0, and at most 1e9 s")
    return float(value)


def number(text: str, field: str, low: float, high: float) -> float:
    """A number in a range. Raises InputError that names the field."""
    values = sweeps.at_least([text], field, 0)
    if len(values) != 1 or not low <= values[0] <= high:
        raise InputError(f"{field}: {text!r} is out of range; give one number from {low:g} to {high:g}")
    return float(values[0])


def whole(text: str, field: str, least: int = 1, most: int = 10**9) -> int:
    """One whole number. Raises InputError that names the field."""
    values = sweeps.whole_numbers([text], field, least, most)
    if len(values) != 1:
        raise InputError(f"{field}: {text!r} are several values; give one")
    return values[0]


@dataclass(frozen=True)
class Load:
    """How often requests come: a rate, users that wait, or a file's own times (neither)."""

    rate: float | None = None
    concurrency: int | None = None

    @property
    def words(self) -> str:
        """As a table shows it."""
        if self.concurrency is not None:
            return f"{self.concurrency:,} users"
        return f"{self.rate:g}/s" if self.rate is not None else "file"


@dataclass(frozen=True)
class Traffic:
    """A workload before it is drawn; it is drawn from the seed where it is served.

    Attributes:
        warm_up, cool_down: requests that come first and last, served and not counted.
        loads: one for each simulation. trace: path of a file, None for a drawn workload. others: see ``synthetic``.
    """

    loads: tuple[Load, ...]
    trace: str | None
    prompt: Distribution | None
    output: Distribution | None
    requests: int | None
    seed: int
    burst: float
    prefix: int
    turns: int
    think_s: float
    classes: int
    speed: float
    warm_up: int
    cool_down: int
    assumes: tuple[str, ...]

    def workload(self, load: Load, longest: int | None) -> Workload:
        """The requests of one simulation; drawn sessions end before they exceed ``longest``."""
        from roofline.serving.traces import read_trace
        from roofline.serving.workload import synthetic

        if self.trace is not None:
            found = read_trace(
                self.trace, requests=self.requests, rate=load.rate, concurrency=load.concurrency, speed=self.speed, seed=self.seed
            )
        else:
            assert self.prompt is not None
            assert self.output is not None
            found = synthetic(
                self.requests or max(REQUESTS, 10 * (load.concurrency or 0)), self.prompt, self.output, rate=load.rate,
                concurrency=load.concurrency, burst=self.burst, seed=self.seed, prefix=self.prefix, turns=self.turns,
                think_s=self.think_s, classes=self.classes, longest=longest,
            )  # fmt: skip
        return replace(found, assumes=(*self.assumes, *found.assumes))


def lengths(isl: str | None, osl: str | None, ratio: float | None) -> Iterator[Distribution]:
    """Lengths of prompts and outputs as typed, from ``ratio`` of them up where it is given."""
    from roofline.serving.lengths import SHAPES, Distribution, parse_length

    for text, field in ((isl, "isl"), (osl, "osl")):
        if text is None:
            raise InputError(
                f"{field}: say how many tokens: --{field} 512, 410:512, lognormal:512:0.6 or a shape ({', '.join(SHAPES)}); "
                "or give a --trace"
            )
        found = parse_length(text, field, output=field == "osl")
        if ratio is not None:
            if found.kind != "constant":
                raise InputError(f"range-ratio: it belongs to one length, and {field} is {text!r}")
            found = Distribution("uniform", max(1, round(found.low * ratio)), found.high)
        yield found


def _traffic(**given: Any) -> Traffic:
    texts = {name: text for name, text in given.items() if text is not None}
    loads: list[Load] = []
    if "rate" in texts and "concurrency" in texts:
        raise InputError("rate: requests arrive at a rate, or when a user is free (--concurrency); give one of them")
    for rate in sweeps.at_least(texts["rate"], "rate", 0) if "rate" in texts else ():
        if not 0 < rate < MOST_RATE:
            raise InputError(f"rate: {float(rate):g} is out of range; give requests per second above 0, and below {MOST_RATE:g}")
        loads.append(Load(rate=float(rate)))
    if "concurrency" in texts:
        loads = [Load(concurrency=users) for users in sweeps.whole_numbers(texts["concurrency"], "concurrency", most=10**6)]
    trace = texts.get("trace")
    drawn = {"burst", "isl", "osl", "prefix_len", "turns", "think", "priorities", "range_ratio"} & set(texts)
    if trace is not None and drawn:
        flag = sorted(drawn)[0].replace("_", "-")
        raise InputError(f"{flag}: the trace says what requests are like; leave out --{flag}, or the trace")
    if trace is None and "speed" in texts:
        raise InputError("speed: it scales the times of a trace; give a --trace")
    if not loads:
        if trace is None:
            raise InputError("rate: say how requests arrive: --rate 4 (per second), --concurrency 64 (users) or --trace FILE")
        loads = [Load()]
    ratio = number(texts["range_ratio"], "range-ratio", 0, 1) if "range_ratio" in texts else None
    prompt = output = None
    if trace is None:
        prompt, output = lengths(texts.get("isl"), texts.get("osl"), ratio)
    burst = number(texts["burst"], "burst", 0, 100) if "burst" in texts else 1.0
    if "burst" in texts and loads[0].rate is None:
        raise InputError("burst: users that wait for answers do not arrive in bursts; it belongs to --rate")
    turns = whole(texts["turns"], "turns", most=10_000) if "turns" in texts else 1
    if "think" in texts and turns == 1:
        raise InputError("think: only sessions of several turns think between them; give --turns")
    assumes = []
    if trace is None:
        cut = "lognormal" in (prompt.kind if prompt else "", output.kind if output else "")
        more = ", and cut so that a request fits into max-model-len" if cut else ""
        more += "; prompts of later turns hold all that was said before" if turns > 1 else ""
        assumes.append(f"lengths are drawn independently{more}")
    if loads[0].rate is not None and trace is None:
        kind = {0.0: "evenly spaced", 1.0: "a Poisson process"}.get(burst, f"gamma distributed gaps, variation {burst:g}")
        assumes.append(f"arrivals are {kind}")
    if "warm_up" in texts or "cool_down" in texts:
        ends = [f"the {which} {texts[name]}" for name, which in (("warm_up", "first"), ("cool_down", "last")) if name in texts]
        assumes.append(
            f"{' and '.join(ends)} requests are served and not counted; rates, utilisation, mean batch and cache are of the time "
            "between the first and the last arrival of the others, gaps between tokens and peaks of the whole run"
        )
    return Traffic(
        tuple(loads), trace, prompt, output,
        whole(texts["requests"], "requests", most=20_000_000) if "requests" in texts else None,
        whole(texts["seed"], "seed", 0, 2**62) if "seed" in texts else 0, burst,
        whole(texts["prefix_len"], "prefix-len", 0) if "prefix_len" in texts else 0, turns,
        seconds(texts["think"], "think", zero=True) if "think" in texts else 0.0,
        whole(texts["priorities"], "priorities", most=1000) if "priorities" in texts else 1,
        number(texts["speed"], "speed", 1e-6, 1e6) if "speed" in texts else 1.0,
        whole(texts["warm_up"], "warm-up", 0) if "warm_up" in texts else 0,
        whole(texts["cool_down"], "cool-down", 0) if "cool_down" in texts else 0, tuple(assumes),
    )  # fmt: skip


def _one(flag: str, metavar: str, text: str) -> tuple[Any, None]:
    return Annotated[str | None, typer.Option(*flag.split(), metavar=metavar, help=text)], None


def _several(flag: str, metavar: str, text: str) -> tuple[Any, None]:
    return Annotated[list[str] | None, typer.Option(*flag.split(), metavar=metavar, help=text)], None


TRAFFIC_OPTIONS = Bundle(
    {
        "rate": _several("--rate", "R|LIST", "Requests per second (Poisson); a simulation for each."),
        "concurrency": _several("--concurrency", "N|LIST", "Users that each wait for their answer; a simulation for each."),
        "trace": _one("--trace", "FILE", "Replays a CSV, JSON or JSON lines file: Azure, Mooncake, ShareGPT, BurstGPT, ..."),
        "isl": _one("--isl --input-len", "LENGTH", "Prompt tokens: 512, 410:512, lognormal:512:0.6 or a shape (sharegpt, ...)."),
        "osl": _one("--osl --output-len", "LENGTH", "Output tokens, in the same way."),
        "range_ratio": _one("--range-ratio", "R", "Lengths uniform from R times --isl and --osl up to them."),
        "requests": _one("--requests", "N", "Requests, all turns counted.  [default: 1000, or 10 per user; all of a trace]"),
        "warm_up": _one("--warm-up", "N", "Requests that come first, which are served and not counted.  [default: 0]"),
        "cool_down": _one("--cool-down", "N", "Requests that come last, in the same way.  [default: 0]"),
        "seed": _one("--seed", "N", "Of everything that is drawn.  [default: 0]"),
        "burst": _one("--burst", "CV", "Variation of the gaps between arrivals: 0 even, 1 Poisson, more in bursts."),
        "prefix_len": _one("--prefix-len", "N", "Tokens that all prompts begin with, beside --isl."),
        "turns": _one("--turns", "N", "Requests of a session; each prompt holds what was said before."),
        "think": _one("--think", "TIME", "Mean time between an answer and the next turn.  [default: 0]"),
        "priorities": _one("--priorities", "N", "Classes of requests, equally likely; for --scheduler priority."),
        "speed": _one("--speed", "X", "Divides the times of a trace."),
    },
    _traffic,
)
