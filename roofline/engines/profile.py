"""Engine profiles read from ``roofline/engines/*.toml``: plain numbers, each with unit, kind and source.

A number may carry ``low`` and ``high`` where it is not fixed by code. A version's table overrides what the engine's
table says; a version answers from its ``since`` on.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import cache
from pathlib import Path
from typing import Any

from roofline.accelerator import KINDS, Accelerator
from roofline.errors import InputError, suggest
from roofline.numeric import whole
from roofline.units import UNITS, to_base

FOLDER = Path(__file__).parent
ALIASES = {
    "trt-llm": "trtllm",
    "tensorrt-llm": "trtllm",
    "tensorrt_llm": "trtllm",
    "llama.cpp": "llamacpp",
    "llama-cpp": "llamacpp",
}
BASES = ("total", "free-before-load", "free-after-load", "none")
PARALLEL = 4
"""Devices that share tokens from which on a tier's second number of sequences holds."""
SWITCHES = (
    "batched_follow_length", "logits_of_all_tokens", "graphs_counted", "separate_state", "whole_context", "host_embedding",
    "rotation_computed",
)  # fmt: skip


@dataclass(frozen=True)
class Figure:
    """A sourced number with its range, in the base unit.

    Attributes:
        low, value, high: equal where code fixes the number. kind, source: how and by whom it is known.
    """

    low: int | Fraction
    value: int | Fraction
    high: int | Fraction
    kind: str
    source: str

    @property
    def exact(self) -> bool:
        """Whether it has no range."""
        return self.low == self.high


@dataclass(frozen=True)
class Tier:
    """Defaults of devices from some amount of memory on.

    Attributes:
        least: bytes of memory. batched: token budget of a step. sequences, parallel: sequences of a step on few and on
            many devices. excludes: how ids of devices begin that stay in the tier below, "" for none.
        source: who states them.
    """

    least: int
    batched: int
    sequences: int
    parallel: int
    excludes: str
    source: str


@dataclass(frozen=True)
class Profile:
    """One version of an engine.

    Attributes:
        id, name: of the engine. since: the version it answers from. about: what marks that version.
        fraction_base: what the memory fraction is a fraction of: "total" device memory, what is free
            "free-before-load" or "free-after-load" of the weights, or "none".
        flags: setting -> the engine's documented option. numbers: see the files. tiers: defaults by memory.
        batched_follow_length: a whole prompt is one batch. logits_of_all_tokens: the profile run computes logits of all.
        graphs_counted: graphs are taken out of the budget. separate_state: kinds of layers have pools of their own.
        whole_context: state of all sequences is allocated at start-up, at their longest. host_embedding: the table of
            token embeddings stays on the host. rotation_computed: no table of sines and cosines is stored.
        runs_on, runs_on_source: vendors and kinds of accelerators, and who states them. asked: the version that was asked for,
            "" for the newest.
    """

    id: str
    name: str
    since: str
    about: str
    fraction_base: str
    flags: Mapping[str, str]
    numbers: Mapping[str, Figure]
    tiers: tuple[Tier, ...]
    batched_follow_length: bool = False
    logits_of_all_tokens: bool = False
    graphs_counted: bool = False
    separate_state: bool = False
    whole_context: bool = False
    host_embedding: bool = False
    rotation_computed: bool = False
    runs_on: tuple[str, ...] = ()
    runs_on_source: str = ""
    asked: str = ""

    @property
    def label(self) -> str:
        """Name and version: the one that was asked for, and since which one its rules hold."""
        return f"{self.name} {self.asked} (rules since {self.since})" if self.asked else f"{self.name} (since {self.since})"

    def check(self, accelerator: Accelerator) -> None:
        """Raises InputError where the engine does not run on such an accelerator."""
        if f"{accelerator.vendor} {accelerator.kind}" not in self.runs_on:
            raise InputError(
                f"engine: {self.name} does not run on {accelerator.id} ({accelerator.vendor} {accelerator.kind}); "
                f"it runs on {', '.join(self.runs_on)}"
            )

    def figure(self, name: str) -> Figure:
        """A number by name. Raises InputError where the engine's file lacks it."""
        if name not in self.numbers:
            raise InputError(f"engine: {self.id} has no number {name!r} in its file")
        return self.numbers[name]

    def number(self, name: str) -> int:
        """A whole number by name, its best value."""
        return int(self.figure(name).value)

    def tier(self, accelerator: Accelerator) -> Tier:
        """The defaults of a device: those of the largest memory that it reaches and is not excluded from."""
        memory = (accelerator.reported or accelerator.capacity).value
        reached = [t for t in self.tiers if t.least <= memory and not (t.excludes and accelerator.id.startswith(t.excludes))]
        return max(reached, key=lambda tier: tier.least)

    def batched_tokens(self, accelerator: Accelerator, max_model_len: int) -> int:
        """Default token budget of a step."""
        budget = self.tier(accelerator).batched
        return max(budget, max_model_len) if self.batched_follow_length else budget

    def sequences(self, accelerator: Accelerator, ranks: int) -> int:
        """Default number of sequences of a step, on so many devices that share tokens."""
        found = self.tier(accelerator)
        return found.parallel if ranks >= PARALLEL else found.sequences


def _figure(table: Any, where: str) -> Figure:
    for key in ("value", "unit", "kind", "source"):
        if not isinstance(table, dict) or key not in table:
            raise InputError(f"{where}: {key} is missing; every number carries value, unit, kind and source")
    unit, kind, source = str(table["unit"]), table["kind"], table["source"]
    if kind not in KINDS or not isinstance(source, str) or len(source.strip()) < 4:
        raise InputError(f"{where}: kind must be one of {', '.join(KINDS)}, and source must say who states the number")
    dimension = UNITS[unit][0] if unit in UNITS else "count"
    values = []
    for key in ("low", "value", "high"):
        value = table.get(key, table["value"])
        if isinstance(value, bool) or not isinstance(value, (int, Fraction)) or value < 0:
            raise InputError(f"{where}: {key} must be a number from 0 on, not {value!r}")
        values.append(to_base(value, unit, dimension, where))
    low, best, high = values
    if not low <= best <= high:
        raise InputError(f"{where}: low, value and high must not fall")
    return Figure(low, best, high, kind, source)


def _tiers(tables: Any, where: str) -> tuple[Tier, ...]:
    found = []
    for table in tables:
        for key in ("from", "batched", "sequences", "source"):
            if key not in table:
                raise InputError(f"{where} tier: {key} is missing")
        sequences = table["sequences"]
        excludes = str(table.get("excludes", ""))
        parallel = table.get("parallel", sequences)
        found.append(Tier(table["from"] * 2**30, table["batched"], sequences, parallel, excludes, str(table["source"])))
    if not any(tier.least == 0 for tier in found):
        raise InputError(f"{where}: a tier from 0 GiB on is missing")
    return tuple(found)


def _version(text: str, field: str) -> tuple[int, ...]:
    parts = text.strip().lstrip("v").split(".")
    if not all(part.isdigit() for part in parts):
        raise InputError(f"{field}: {text!r} is not a version; write it like 0.11 or 0.11.2")
    return tuple(map(int, parts))


def _switches(entry: Mapping[str, Any]) -> dict[str, Any]:
    """What is marked of a version."""
    return {name: bool(entry.get(name, False)) for name in SWITCHES}


@cache
def _read(path: Path) -> tuple[Profile, ...]:
    with path.open("rb") as file:
        data = tomllib.load(file, parse_float=lambda text: whole(Fraction(text)))
    where = path.name
    if data.get("fraction_base") not in BASES:
        raise InputError(f"{where}: fraction_base must be one of {', '.join(BASES)}")
    if not data.get("runs_on") or len(str(data.get("runs_on_source", ""))) < 4:
        raise InputError(f"{where}: runs_on and runs_on_source must say which accelerators the engine runs on, and who states it")
    common = {key: _figure(table, f"{where} {key}") for key, table in data["numbers"].items()}
    return tuple(
        Profile(
            data["id"], data["name"], entry["since"], entry["about"], data["fraction_base"], data["flags"],
            {**common, **{key: _figure(t, f"{where} {entry['since']} {key}") for key, t in entry.get("numbers", {}).items()}},
            _tiers(entry.get("tier", data["tier"]), where), **_switches(entry),
            runs_on=tuple(data["runs_on"]), runs_on_source=str(data["runs_on_source"]), asked="",
        )
        for entry in data["version"]
    )  # fmt: skip


def engine_ids() -> list[str]:
    """Ids of all engines, sorted."""
    return sorted(path.stem for path in FOLDER.glob("*.toml"))


def load_engine(name: str, version: str | None = None) -> Profile:
    """The profile of an engine ("vllm", "sglang", "trtllm", "llamacpp"), of a version where one is given, else the newest.

    Raises InputError: an unknown engine (the nearest are suggested), or a text that is no version.
    """
    key = name.strip().lower()
    key = ALIASES.get(key, key)
    if key not in engine_ids():
        raise InputError(
            f"engine: unknown engine {name!r}.{suggest(key, [*engine_ids(), *ALIASES])} Known: {', '.join(engine_ids())}"
        )
    profiles = sorted(_read(FOLDER / f"{key}.toml"), key=lambda profile: _version(profile.since, "since"))
    if version is None:
        return profiles[-1]
    wanted = _version(version, "engine-version")
    found = [profile for profile in profiles if _version(profile.since, "since") <= wanted][-1]
    return replace(found, asked=version.strip().lstrip("v"))
