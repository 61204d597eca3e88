"""Errors of predictions against measurements, one score per family, split and size band, and the targets they are held to."""

from __future__ import annotations

import tomllib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from fnmatch import fnmatch
from functools import cache
from pathlib import Path
from typing import Any

TARGETS = Path(__file__).with_name("targets.toml")
BANDS = (("<1us", 0.0, 1e-6), ("1-10us", 1e-6, 1e-5), ("10-100us", 1e-5, 1e-4), ("0.1-1ms", 1e-4, 1e-3), (">1ms", 1e-3, 1e9))
"""Size bands by the datasheet bound, in seconds: not by the measurement, which would pick its own errors."""
SPLITS = ("random", "unseen_shape", "unseen_model", "larger", "other_framework", "other_gpu")


@dataclass(frozen=True)
class Score:
    """One line of the report; errors are fractions.

    Attributes:
        band: size band by the bound, None for all rows. n: rows.
        median_ratio: of measured over expected. mape: mean |expected - measured| / measured. p90: its 90th percentile.
        symmetric: mean |log(expected / measured)|. plain: mape of the bound itself.
        noise_floor: how far two measurements of the same lie apart, where known.
        bound_violations: rows faster than the bound that no cache explains. explained: why that may be, "" if nobody knows.
        target, stretch: what the line is held to, None for nothing.
        dropped: rows that the list of bad rows removed. mape_with_dropped: the error with them.
        constants: fitted constants of the family. worst: key of the worst row. note: what else to know.
    """

    gpu: str
    cls: str
    dtype: str
    kernel: str
    split: str
    band: str | None
    n: int
    median_ratio: float
    mape: float
    p90: float
    symmetric: float
    plain: float
    noise_floor: float | None = None
    bound_violations: int = 0
    explained: str = ""
    target: float | None = None
    stretch: float | None = None
    dropped: int = 0
    mape_with_dropped: float | None = None
    constants: int = 0
    worst: str = ""
    note: str = ""

    @property
    def met(self) -> bool | None:
        """Whether the target is met, None where there is none."""
        return None if self.target is None else self.mape <= self.target

    def record(self) -> dict[str, Any]:
        """The score under the names of the JSON contract."""
        fields = {name: getattr(self, name) for name in self.__dataclass_fields__}
        return {"gpu": fields.pop("gpu"), "class": fields.pop("cls"), **fields}


@cache
def targets() -> tuple[dict[str, Any], ...]:
    """The entries of targets.toml."""
    return tuple(tomllib.loads(TARGETS.read_text(encoding="utf-8"))["target"])


@dataclass(frozen=True)
class Extrapolation:
    """The error of one family on the larger half of its rows, by constants of the smaller half, beside its random split's.

    ``limit`` is what it may be; None for a family that is only reported.
    """

    family: str
    interpolated: float
    extrapolated: float
    limit: float | None

    @property
    def met(self) -> bool | None:
        """Whether the limit holds, None where there is none."""
        return None if self.limit is None else self.extrapolated <= self.limit


def extrapolations(records: Iterable[Mapping[str, str]], interpolated: Mapping[str, float]) -> Iterator[Extrapolation]:
    """Each family's ``larger`` split among the records beside its error on a random half, by the family's name."""
    rules = tomllib.loads(TARGETS.read_text(encoding="utf-8"))["extrapolation"]
    for row in records:
        name = row["kernel"] if row["kernel"] == row["dtype"] else f"{row['kernel']} {row['dtype']}"
        family = f"{row['class']} {name}"
        if row["split"] != "larger" or family not in interpolated:
            continue
        factor = next((r["factor"] for r in rules if r["class"] == row["class"] and fnmatch(name, r["family"])), None)
        error = interpolated[family]
        yield Extrapolation(family, error, float(row["mape"]), None if factor is None else factor * error)


def with_target(score: Score) -> Score:
    """The score with its target and noise floor."""
    for entry in targets():
        wanted = (
            (score.cls, entry["class"]), (score.dtype, entry.get("dtype", "*")), (score.kernel, entry.get("kernel", "*")),
            (score.gpu, entry.get("gpu", "h100-sxm")),
        )  # fmt: skip
        same = (score.split == "other_gpu") == (entry.get("split") == "other_gpu") and score.band == entry.get("band")
        if same and all(fnmatch(value, pattern) for value, pattern in wanted):
            return replace(score, target=entry["reach"], stretch=entry["stretch"], noise_floor=entry.get("noise"))
    return score


def errors(expected: Any, measured: Any, limit: Any) -> dict[str, Any]:
    """The error figures of some rows."""
    import numpy

    relative = numpy.abs(expected - measured) / measured
    return {
        "n": len(measured),
        "median_ratio": float(numpy.median(measured / expected)),
        "mape": float(relative.mean()),
        "p90": float(numpy.quantile(relative, 0.9)),
        "symmetric": float(numpy.abs(numpy.log(expected / measured)).mean()),
        "plain": float((numpy.abs(limit - measured) / measured).mean()),
    }


def by_band(limit: Any) -> Iterator[tuple[str | None, Any]]:
    """(band, mask) of all rows and of every band that has some."""
    yield None, limit >= 0
    for name, low, high in BANDS:
        mask = (limit >= low) & (limit < high)
        if mask.any():
            yield name, mask
