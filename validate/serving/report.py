"""Errors of predicted servers: with the committed constants, and with each model or each accelerator left out of the fit."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any

from roofline.expected.serving import ENGINE_CONSTANTS, fitted
from roofline.validate.serving.fit import Fit, fit, predict
from roofline.validate.serving.rows import FITTED_GPUS, Measured, measured
from roofline.validate.serving.runs import Refused, Runs, runs_of
from roofline.validate.serving.targets import target_of

SPLITS = ("fit", "unseen_model", "unseen_gpu", "blind")


@dataclass(frozen=True)
class Score:
    """One line; errors are fractions of the measurement.

    Attributes:
        metric: "tpot" or "ttft". split: see ``SPLITS``. engine, gpu: None for all.
        model: None for all dense ones, "moe" for all with experts, else one.
        mape, median, p90: of the absolute error. bias: mean error. refused: rows without a prediction.
    """

    metric: str
    split: str
    engine: str | None
    gpu: str | None
    model: str | None
    n: int
    mape: float
    median: float
    bias: float
    p90: float
    refused: int

    @property
    def target(self) -> tuple[float, float] | None:
        """(to reach, stretch), None for a line that is held to nothing."""
        alone = self.engine is None and self.gpu is None
        return target_of(self.metric, self.split, self.model) if alone else None

    def record(self) -> dict[str, Any]:
        """The score under the names of the JSON contract."""
        return {name: getattr(self, name) for name in self.__dataclass_fields__}


@dataclass(frozen=True)
class Data:
    """Runs with predictions: those that constants are fitted to, and those that none has seen."""

    rows: Measured
    fitted: Runs
    blind: Runs
    suspect: Runs
    """Runs that a rule removed but that have a prediction: what the error would be with them."""


@cache
def data() -> Data:
    """The measured runs. Raises ModuleNotFoundError where the package is not installed."""
    rows = measured()
    known = rows.table["gpu"].isin(FITTED_GPUS)
    left = rows.left[rows.left["gpu"].isin(FITTED_GPUS) & (rows.left["tp"] <= 8)].reset_index(drop=True)
    return Data(
        rows,
        runs_of(rows.table[known].reset_index(drop=True)),
        runs_of(rows.table[~known].reset_index(drop=True)),
        runs_of(left),
    )


def first_tokens(runs: Runs) -> Any:
    """Mask of the runs whose time to first token the fit looks at: the client is known, the model dense."""
    return ((runs.table["family"] == "inferencex") & (runs.table["set"] == "dense")).to_numpy()


def refit(runs: Runs, training: Any) -> Fit:
    """Constants from the runs of a mask."""
    return fit(runs.take(training), runs.take(training & first_tokens(runs)))


def committed() -> Fit:
    """The constants of the data file."""
    found = fitted()
    names = [constant.name for constant in ENGINE_CONSTANTS]
    engines = {engine: {name: float(own[name]) for name in names} for engine, own in found["engine"].items()}
    return Fit(engines, {name: float(value) for name, value in found["shared"].items()})


@cache
def held_out(column: str) -> tuple[Any, Any]:
    """(tpot, ttft) of every run by constants fitted without the runs that share its ``column``."""
    import numpy

    runs = data().fitted
    tpot, ttft = numpy.zeros(len(runs)), numpy.zeros(len(runs))
    for value in sorted(set(runs.table[column])):
        test = (runs.table[column] == value).to_numpy()
        found = predict(part := runs.take(test), refit(runs, ~test).of(part))
        tpot[test], ttft[test] = found.tpot, found.ttft
    return tpot, ttft


def everything(runs: Runs) -> Any:
    """A mask of all runs."""
    import numpy

    return numpy.ones(len(runs), dtype=bool)


def _refused(refused: tuple[Refused, ...], rows: Measured, chosen: dict[str, Any]) -> int:
    """Runs without a prediction among those of a line."""
    total = 0
    sets = dict(zip(rows.table["name"], rows.table["set"], strict=True))
    for entry in refused:
        name, _, _, gpu, engine, *_ = entry.structure
        values = {"name": name, "gpu": gpu, "engine": engine, "set": sets[name]}
        total += entry.rows if all(values[key] == value for key, value in chosen.items()) else 0
    return total


def lines(metric: str, split: str, runs: Runs, expected: Any, rows: Measured, mask: Any) -> Iterator[Score]:
    """The lines of one metric and split: all dense runs, all with experts, each model; over all, and by engine and gpu."""
    import numpy

    table = runs.table
    groups: list[tuple[str | None, dict[str, Any]]] = [(None, {"set": "dense"}), ("moe", {"set": "moe"})]
    groups += [(name, {"name": name}) for name in sorted(set(table["name"]))]
    engines, gpus = ([None, *sorted(set(table[column]))] for column in ("engine", "gpu"))
    for model, chosen in groups:
        for engine, gpu in [*((engine, None) for engine in engines), *((None, gpu) for gpu in gpus[1:])]:
            where = {**chosen, **({"engine": engine} if engine else {}), **({"gpu": gpu} if gpu else {})}
            picked = mask.copy()
            for column, value in where.items():
                picked &= (table[column] == value).to_numpy()
            if picked.any():
                error = (expected / table[metric].to_numpy() - 1.0)[picked]
                size = numpy.abs(error)
                yield Score(
                    metric, split, engine, gpu, model, int(picked.sum()), float(size.mean()), float(numpy.median(size)),
                    float(error.mean()), float(numpy.quantile(size, 0.9)), _refused(runs.refused, rows, where),
                )  # fmt: skip


def scores() -> Iterator[Score]:
    """Every line of the report; the left-out fits are made anew."""
    found, constants = data(), committed()
    runs, blind = found.fitted, found.blind
    known = (runs.table["family"] == "inferencex").to_numpy()
    fitted_to, unseen = predict(runs, constants.of(runs)), predict(blind, constants.of(blind))
    models, gpus = held_out("name"), held_out("gpu")
    whole, rows = everything(runs), found.rows
    yield from lines("tpot", "fit", runs, fitted_to.tpot, rows, whole)
    yield from lines("tpot", "unseen_model", runs, models[0], rows, whole)
    yield from lines("tpot", "unseen_gpu", runs, gpus[0], rows, whole)
    yield from lines("tpot", "blind", blind, unseen.tpot, rows, everything(blind))
    yield from lines("ttft", "fit", runs, fitted_to.ttft, rows, known & first_tokens(runs))
    yield from lines("ttft", "unseen_gpu", runs, gpus[1], rows, known & first_tokens(runs))
    yield from lines("ttft", "unseen_model", runs, models[1], rows, known & ~first_tokens(runs))
    yield from lines("ttft", "blind", blind, unseen.ttft, rows, everything(blind))


@dataclass(frozen=True)
class ByLoad:
    """Errors of one engine's runs at one number of clients, held out by model."""

    engine: str
    clients: int
    n: int
    mape: float
    bias: float


LOADS = (4, 8, 16, 32, 64, 128, 256, 512)


def by_concurrency(kind: str = "dense") -> list[ByLoad]:
    """The residual by concurrency: runs of dense models or "moe", held out by model; numbers between powers of two go to the
    one below."""
    import numpy

    runs = data().fitted
    expected = held_out("name")[0]
    error = expected / runs.table["tpot"].to_numpy() - 1.0
    clients, chosen = runs.table["clients"].to_numpy(), (runs.table["set"] == kind).to_numpy()
    found = []
    for engine in sorted(set(runs.table["engine"])):
        for low, high in zip(LOADS, (*LOADS[1:], 10**6), strict=True):
            mask = chosen & (runs.table["engine"] == engine).to_numpy() & (clients >= low) & (clients < high)
            if mask.any():
                size = numpy.abs(error[mask])
                found.append(ByLoad(engine, low, int(mask.sum()), float(size.mean()), float(error[mask].mean())))
    return found


def with_suspects() -> float:
    """Mean error per token of all runs with experts, those that a rule removed included, with the committed constants."""
    import numpy

    found, constants = data(), committed()
    sizes = []
    for runs in (found.fitted, found.suspect):
        mask = (runs.table["set"] == "moe").to_numpy()
        expected = predict(runs, constants.of(runs)).tpot
        sizes.append(numpy.abs(expected / runs.table["tpot"].to_numpy() - 1.0)[mask])
    return float(numpy.concatenate(sizes).mean())


def refused() -> tuple[Refused, ...]:
    """Runs without a prediction, by structure."""
    found = data()
    return (*found.fitted.refused, *found.blind.refused)
