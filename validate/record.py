"""The committed record of the report, one CSV per accelerator: what docs and gate compare with.

Fractions are rounded to four digits; the full report is what ``roofline validate silicon -o json`` prints.
"""

from __future__ import annotations

import csv
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from roofline.validate.scores import Score

RECORDS = Path(__file__).with_name("records")
FIELDS = (
    "gpu", "class", "dtype", "kernel", "split", "band", "n", "median_ratio", "mape", "p90", "plain", "noise_floor",
    "bound_violations", "explained", "target", "stretch", "dropped", "mape_with_dropped", "constants", "note",
)  # fmt: skip


def _cell(value: Any) -> Any:
    return f"{value:.4g}" if isinstance(value, float) else "" if value is None else value


def write(path: Path, scores: Iterable[Score]) -> None:
    """Writes scores."""
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(FIELDS)
        for score in scores:
            record = score.record()
            writer.writerow([_cell(record[field]) for field in FIELDS])


def read(gpu: str, folder: Path = RECORDS) -> list[dict[str, str]]:
    """The records of an accelerator; none where it has no file."""
    path = folder / f"{gpu}.csv"
    if not path.is_file():
        return []
    with path.open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def recorded_gpus(folder: Path = RECORDS) -> list[str]:
    """Accelerators with a record, sorted."""
    return sorted(path.stem for path in folder.glob("*.csv"))


def merge(path: Path, scores: Iterable[Score]) -> None:
    """Replaces in a record the splits that are among the scores; the others stay."""
    fresh = list(scores)
    splits = {score.split for score in fresh}
    kept = [row for row in read(path.stem, path.parent) if row["split"] not in splits]
    write(path, fresh)
    with path.open("a", encoding="utf-8", newline="") as file:
        csv.DictWriter(file, FIELDS, lineterminator="\n").writerows(kept)
