"""The committed record of the report, one CSV per accelerator: what docs and gate compare with.

Fractions are rounded to four digits; the full report is what ``roofline validate silicon -o json`` prints.
"""

from __future__ import annotations

import csv
import math
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from roofline.validate.scores import Score
from roofline.validate.silicon.suite import CLASSES

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


def harder(gpu: str, classes: Iterable[str] | None = None) -> list[Score]:
    """The recorded scores of the splits that need refits (unseen shapes and models, the larger half, another framework)."""
    wanted = None if classes is None else set(classes)
    found = []
    for row in read(gpu):
        if row["split"] in ("random", "other_gpu") or (wanted is not None and row["class"] not in wanted):
            continue
        ratio, mape, p90, plain = (float(row[name]) for name in ("median_ratio", "mape", "p90", "plain"))
        note = f"recorded; {row['note']}".rstrip("; ")
        found.append(Score(
            row["gpu"], row["class"], row["dtype"], row["kernel"], row["split"], row["band"] or None, int(row["n"]), ratio, mape,
            p90, math.nan, plain, constants=int(row["constants"]), note=note,
        ))  # fmt: skip
    return found


def recorded_gpus(folder: Path = RECORDS) -> list[str]:
    """Accelerators with a record, sorted."""
    return sorted(path.stem for path in folder.glob("*.csv"))


def merge(path: Path, scores: Iterable[Score]) -> None:
    """Replaces in a record the classes and splits that are among the scores; the others stay. Harder splits come last."""
    fresh = list(scores)
    again = {(score.cls, score.split) for score in fresh}
    kept = [row for row in read(path.stem, path.parent) if (row["class"], row["split"]) not in again]
    write(path, fresh)
    rows = [*read(path.stem, path.parent), *kept]
    rows.sort(key=lambda row: (row["split"] not in ("random", "other_gpu"), list(CLASSES).index(row["class"])))
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, FIELDS, lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
