"""What serving adds to the kernels of a step: constants fitted to whole servers, and the time of one iteration.

An engine leaves gaps between kernels, spends host time on every sequence of a step, and launches a step with prompts
kernel by kernel where it replays decodes as a graph. Three constants of each engine say how much; two that all share say
which part of a fused-expert kernel's launch, timed alone, remains inside a graph, and what the host does for a step with
prompts once, however many layers follow. They were fitted with the operators' constants held (``roofline validate calibrate
--serving``).
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from roofline.errors import UnsupportedModel
from roofline.expected.arithmetic import where
from roofline.expected.kernels import engines
from roofline.expected.load import Load
from roofline.expected.model import MICROSECOND, Constant, overlap
from roofline.expected.plain import Plain

DATA = Path(__file__).with_name("serving.toml")
SIDE_BY_SIDE = 4.0
"""Order of the norm that joins a step's kernels and the host that launches them one by one."""

ENGINE_CONSTANTS = (
    Constant("kernel_us", 1.0, 0.05, 20.0, "gap behind every kernel of a step, beyond its own launch [us]"),
    Constant("sequence_us", 20.0, 0.05, 500.0, "host time for each sequence of a step that nothing hides [us]"),
    Constant("eager_us", 200.0, 5.0, 2000.0, "floor per layer of a step with prompts: the host launches its kernels [us]"),
)  # fmt: skip
SHARED_CONSTANTS = (
    Constant("dispatch", 0.5, 0.05, 1.0, "share of a fused-expert kernel's launch, timed alone, that is left in a step"),
    Constant("step_us", 5000.0, 100.0, 2e4, "floor of a step with prompts beside its layers: scheduling, inputs, sampling [us]"),
    Constant("request_us", 2e4, 1e3, 2e5, "what a request takes before it is scheduled: network, tokeniser, queues [us]"),
    Constant("waiting_us", 300.0, 1.0, 5000.0, "what each running sequence adds to that [us]"),
)  # fmt: skip


@dataclass(frozen=True)
class Serving:
    """Constants of serving under one engine.

    Attributes:
        engine: its id. kernel_us, sequence_us, eager_us: of the engine. dispatch, step_us, request_us, waiting_us: shared by all.
    """

    engine: str
    kernel_us: Any
    sequence_us: Any
    eager_us: Any
    dispatch: Any
    step_us: Any = 0.0
    request_us: Any = 0.0
    waiting_us: Any = 0.0

    def request_seconds(self, running: Any) -> Any:
        """What passes before a request is scheduled [s]."""
        return (self.request_us + self.waiting_us * running) * MICROSECOND


@dataclass(frozen=True)
class Busy:
    """What the kernels of a step take on their own, before any constant of serving; floats or arrays.

    Attributes:
        kernels: seconds. dispatch: seconds of expert kernels' launches, timed alone.
        launches: kernels of the step. layers: of the model.
    """

    kernels: Any
    dispatch: Any
    launches: Any
    layers: Any


def step_seconds(busy: Busy, load: Load, c: Serving) -> Any:
    """Seconds of one iteration: its kernels, their gaps, the host's share of each sequence; with prompts a floor."""
    run = busy.kernels + busy.dispatch * c.dispatch
    run = run + (busy.launches * c.kernel_us + load.sequences * c.sequence_us) * MICROSECOND
    floor = where(load.prompt_tokens > 0, (c.step_us + busy.layers * c.eager_us) * MICROSECOND, 0.0)
    return overlap(SIDE_BY_SIDE, run, floor)


@cache
def fitted() -> Mapping[str, Any]:
    """The data file: package, date, split, rows, constants, what they were fitted to, and errors."""
    return tomllib.loads(DATA.read_text(encoding="utf-8"))


def plain_of(engine: str) -> Plain | None:
    """Achieved fractions of an engine that has no kernels of its own in the tables; None for one that has."""
    table = engines().get(engine, {}).get("plain")
    return None if table is None else Plain(**{**table, "gpus": tuple(table["gpus"]), "sequences": tuple(table["sequences"])})


def serving_of(engine: str) -> Serving:
    """Fitted constants of an engine. Raises UnsupportedModel where there are none."""
    data = fitted()
    if (plain := plain_of(engine)) is not None:
        return Serving(engine, plain.kernel_us, 0.0, 0.0, 0.0)
    if engine not in data["engine"]:
        raise UnsupportedModel(f"no serving constants were fitted to {engine}; there are some of {', '.join(data['engine'])}")
    own = data["engine"][engine]
    names = (*(constant.name for constant in ENGINE_CONSTANTS), *(constant.name for constant in SHARED_CONSTANTS))
    return Serving(engine, **{name: float(own.get(name, data["shared"].get(name))) for name in names})


def measured_versions(engine: str) -> str:
    """Versions of the servers that an engine's constants were fitted to: ", versions 1.0 to 1.2"; "" where none is stated."""
    own = fitted()["engine"].get(engine)
    return f", versions {' to '.join(dict.fromkeys(own['versions']))}" if own else ""


def untested(engine: str, version: str) -> tuple[str, ...]:
    """What is to be said of a version that no measured server ran: one sentence, nothing for one between those measured."""
    own = fitted()["engine"].get(engine)
    if not version or own is None:
        return ()
    low, high = own["versions"][0], own["versions"][-1]
    if _numbers(low)[:2] <= _numbers(version)[:2] <= _numbers(high)[:2]:
        return ()
    measured = " to ".join(dict.fromkeys((low, high)))
    return (f"{engine} {version} is untested: its step times are those of the measured servers ({measured})",)


def _numbers(version: str) -> list[int]:
    return [int(part) for part in re.findall(r"\d+", version)]


def outside(engine: str, gpu: str, ranks: int, layers: int, formats: set[str]) -> tuple[str, ...]:
    """How a deployment leaves the range that the constants were fitted in: one sentence each, nothing where it does not."""
    said = []
    if (plain := plain_of(engine)) is not None:
        if gpu not in plain.gpus or ranks > 1:
            said.append(f"{ranks} x {gpu} is outside the calibrated range of {engine} (one of {', '.join(plain.gpus)})")
        return tuple(said)
    own = fitted()["engine"][engine]
    if gpu not in own["gpus"]:
        said.append(f"{gpu} is outside the calibrated range of {engine} ({', '.join(own['gpus'])})")
    if ranks > own["most_ranks"]:
        said.append(f"{ranks} GPUs are outside the calibrated range of {engine} (up to {own['most_ranks']})")
    low, high = own["layers"]
    if not low <= layers <= high:
        said.append(f"{layers} layers are outside the calibrated range of {engine} ({low} to {high})")
    if strange := sorted(formats - set(own["formats"])):
        said.append(f"{', '.join(strange)} is outside the calibrated formats of {engine} ({', '.join(own['formats'])})")
    return tuple(said)


def batches(engine: str) -> tuple[int, int]:
    """Sequences at once of one replica, least and most, that the constants were fitted in."""
    plain = plain_of(engine)
    low, high = fitted()["engine"][engine]["sequences"] if plain is None else plain.sequences
    return int(low), int(high)


def outside_batches(engine: str, sequences: Collection[float]) -> tuple[str, ...]:
    """How batches of one replica leave the range that the constants were fitted in: one sentence, nothing where none does."""
    low, high = batches(engine)
    numbers = [round(number) for number in sequences]
    beyond = [span([n for n in numbers if n < low]), span([n for n in numbers if n > high])]
    told = " and ".join(filter(None, beyond))
    if not told:
        return ()
    several = len({number for number in numbers if not low <= number <= high}) > 1
    who = f"batches {told} are" if several else f"batch {told} is"
    return (f"{who} outside the calibrated range of {engine} ({span((low, high))} at once)",)


def outside_prompts(engine: str) -> tuple[str, ...]:
    """That steps with prompts leave the range that the constants were fitted in, where they do."""
    return () if plain_of(engine) is None else (f"prompts are outside the calibrated range of {engine}",)


def span(numbers: Collection[int]) -> str:
    """ "256", "256 to 512"; "" of nothing."""
    if not numbers:
        return ""
    low, high = min(numbers), max(numbers)
    return f"{low:,}" if low == high else f"{low:,} to {high:,}"


def left_range(times: Any, sequences: Collection[float] = (), prompts: bool = True) -> tuple[str, ...]:
    """How step times leave the range they were fitted in; nothing for bounds, which were fitted to nothing.

    ``sequences``: batches of one replica. ``prompts``: whether there are prompts in the steps.
    """
    if times.provenance != "calibrated":
        return ()
    more = outside_prompts(times.engine) if prompts else ()
    return (*times.outside, *more, *outside_batches(times.engine, sequences))


def standing(times: Any, sequences: Collection[float] = (), prompts: bool = True) -> str:
    """What step times are worth in a word: "datasheet" of a bound, "calibrated", "extrapolated" where they leave their range."""
    return "extrapolated" if left_range(times, sequences, prompts) else str(times.provenance)
