"""Measured runs as the closed form sees them: their steps, and what the kernels of these take before any serving constant.

Runs of one structure (model, formats, accelerator, engine, layout) share one list of operators, evaluated over arrays. The
cache of each holds what the engine allocates.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from fractions import Fraction
from functools import cache
from typing import Any

from roofline.accelerator import load_accelerator
from roofline.allocation import Settings, allocate
from roofline.configs.load import load_model
from roofline.edits import Edit, apply, dtype, kv_dtype
from roofline.engines.profile import load_engine
from roofline.errors import InputError, UnsupportedModel
from roofline.expected.kernels import kernels_of
from roofline.expected.load import Load
from roofline.expected.operators import Operator, operators
from roofline.expected.serving import Busy
from roofline.model import Model
from roofline.parallel.mesh import Mesh
from roofline.parallel.ranks import Sharded
from roofline.serving.closed_form import RULES, Client, Loads, Rules, loads

STRUCTURE = ["name", "weights", "kv", "gpu", "engine", "tp", "dp", "ep", "kernels"]
VERSIONS = {"vllm": "0.11", "trtllm": None, "sglang": None}
"""Version whose memory rules hold for the measured engines, None for the newest."""
KINDS = ("decode", "mixed", "alone", "burst", "few", "less", "early")


@dataclass(frozen=True)
class Refused:
    """Runs without a prediction, and why."""

    structure: tuple[Any, ...]
    rows: int
    reason: str


@dataclass(frozen=True)
class Runs:
    """Runs with a prediction.

    Attributes:
        table: their rows. steps: the loads of their steps, arrays. busy: kernels of the kinds of steps.
        client: how requests arrive. capacity: tokens of the cache. refused: runs that have none.
    """

    table: Any
    steps: Loads
    busy: dict[str, Busy]
    client: Client
    capacity: Any
    refused: tuple[Refused, ...]

    def __len__(self) -> int:
        return len(self.table)

    def take(self, mask: Any) -> Runs:
        """The runs of a mask."""
        busy = {kind: _taken(part, mask) for kind, part in self.busy.items()}
        steps = Loads(*(_taken(getattr(self.steps, field.name), mask) for field in fields(Loads)))
        table = self.table[mask].reset_index(drop=True)
        return Runs(table, steps, busy, _taken(self.client, mask), self.capacity[mask], self.refused)


def _taken(value: Any, mask: Any) -> Any:
    if isinstance(value, (Load, Busy, Client, Rules)):
        return replace(value, **{field.name: _taken(getattr(value, field.name), mask) for field in fields(value)})
    return value[mask] if getattr(value, "ndim", 0) else value


@dataclass(frozen=True, eq=False)
class Structure:
    """One deployment and its operators."""

    model: Model
    ranks: Sharded
    engine: str
    operators: tuple[Operator, ...]

    def busy(self, load: Load) -> Busy:
        """What its kernels take in a step."""
        import numpy

        kernels, dispatch = numpy.zeros_like(load.decodes), numpy.zeros_like(load.decodes)
        for operator in self.operators:
            seconds = operator.count * operator.seconds(load)
            if operator.kind == "dispatch":
                dispatch = dispatch + seconds
            else:
                kernels = kernels + seconds
        launches = float(sum(operator.count * operator.launches for operator in self.operators))
        layers = float(len(self.model.layers))
        return Busy(kernels, dispatch, launches + 0.0 * kernels, layers + 0.0 * kernels)

    @cache  # noqa: B019 (structures are few and live as long as the process)
    def capacity(self, fraction: float, sequences: int, budget: int, longest: int) -> float:
        """Tokens of the cache under a server's settings; ``sequences`` 0 for the engine's default."""
        settings = Settings(Fraction(str(fraction)), longest, budget, sequences or None)
        profile = load_engine(self.engine, VERSIONS[self.engine])
        found = allocate(self.model, self.ranks.accelerator, self.ranks.mesh, profile, settings, self.ranks)
        tokens = found.tokens(found.pool.best)
        return float("inf") if tokens is None else float(tokens)


@cache
def structure(name: str, weights: str, kv: str, gpu: str, engine: str, tp: int, dp: int, ep: int, kernels: str = "") -> Structure:
    """A deployment; ``kernels`` replace those of the engine.

    Raises InputError or UnsupportedModel where something does not divide or has no time model.
    """
    model = load_model(name)
    edits: list[Edit] = [dtype(weights)] if weights else []
    edits += [kv_dtype(kv)] if kv else []
    model = apply(model, edits) if edits else model
    accelerator, mesh = load_accelerator(gpu), Mesh(tp=tp, dp=dp, ep=ep)
    ranks = Sharded(model, accelerator, mesh)
    run = kernels_of(engine, accelerator, model.family)
    if kernels:
        operator, _, pair = kernels.partition(" = ")
        family, _, time_model = pair.partition(" | ")
        run = replace(run, names={**run.names, operator: (family, time_model)})
    found = tuple(operators(ranks.stages[0], run))
    return Structure(model, ranks, engine, found)


def _held(one: Structure, rows: Any) -> list[float]:
    """Tokens of the cache of each row's server."""
    sequences = rows[["sequences", "clients"]].min(axis=1).where(rows["sequences"] == float("inf"), rows["sequences"])
    settings = zip(rows["fraction"], sequences, rows["budget"], rows["isl"] + rows["osl"], strict=True)
    return [one.capacity(float(fraction), *map(int, sizes)) for fraction, *sizes in settings]


def _columns(table: Any, *names: str) -> Iterator[Any]:
    for name in names:
        yield table[name].to_numpy(dtype=float)


def _rules(table: Any) -> Rules:
    """How the engine of each row schedules."""
    import numpy

    own = [RULES.get(engine, Rules()) for engine in table["engine"]]
    return Rules(**{field.name: numpy.array([float(getattr(one, field.name)) for one in own]) for field in fields(Rules)})


def runs_of(table: Any) -> Runs:
    """The runs of cleaned rows."""
    import numpy

    capacity = numpy.full(len(table), numpy.nan)
    refused: list[Refused] = []
    groups = table.groupby(STRUCTURE, sort=True).indices
    for key, index in groups.items():
        try:
            one = structure(*(int(v) if isinstance(v, numpy.integer) else v for v in key))
            capacity[index] = _held(one, table.iloc[index])
        except (InputError, UnsupportedModel) as error:
            refused.append(Refused(tuple(key), len(index), str(error)))
    kept = ~numpy.isnan(capacity)
    table, capacity = table[kept].reset_index(drop=True), capacity[kept]
    clients, prompt, output, budget = _columns(table, "clients", "prompt", "output", "budget")
    client = Client(*_columns(table, "rounds", "held", "wave", "spread"))
    steps = loads(clients, prompt, output, capacity, budget, client, rules=_rules(table))
    parts = {kind: {field.name: numpy.zeros(len(table)) for field in fields(Busy)} for kind in KINDS}
    for key, index in table.groupby(STRUCTURE, sort=True).indices.items():
        one = structure(*(int(v) if isinstance(v, numpy.integer) else v for v in key))
        for kind in KINDS:
            busy = one.busy(_taken(getattr(steps, kind), index))
            for field in fields(Busy):
                parts[kind][field.name][index] = getattr(busy, field.name)
    return Runs(table, steps, {kind: Busy(**arrays) for kind, arrays in parts.items()}, client, capacity, tuple(refused))
