"""The gate of a change: predictions over a fixed grid against the committed digest, and silicon errors against the record.

Blocks (a) when a case that had an answer has none now, or has another that the digest does not know; (c) when the
held-out error of a family is worse than recorded by more than the margin, or when rows beat the bound without a reason.
"""

from __future__ import annotations

import csv
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from roofline.validate.scores import Score

DIGEST = Path(__file__).with_name("predictions.csv")
GRID_GPUS = ("h100-sxm", "a100-sxm-80gb", "b200-sxm")
DECODES = ((1, 128), (16, 4096), (256, 1024), (8, 65536))
PREFILLS = ((1, 512), (4, 8192))
MARGIN, RELATIVE_MARGIN = 0.003, 0.05
"""A family may be this much worse than its record, in absolute error and as a part of it."""
UNEXPLAINED = 0.001
"""Share of a class's rows that may beat the bound without a reason."""
FIELDS = ("case", "params", "flops", "bytes", "bound_s")


@dataclass(frozen=True)
class Finding:
    """One thing that the gate found; ``blocks`` makes it fail."""

    kind: str
    subject: str
    detail: str
    blocks: bool


def _exact(value: Any) -> str:
    number = float(value)
    return f"{number:.12g}"


def predictions(models: Iterable[str] | None = None) -> Iterator[dict[str, str]]:
    """The grid: parameters, FLOPs, bytes and bound of every model of the catalogue, in decode and prefill, on three GPUs."""
    from roofline.accelerator import load_accelerator
    from roofline.configs.load import load_model, model_names
    from roofline.errors import RooflineError
    from roofline.timing import time
    from roofline.work import decode, prefill

    gpus = [load_accelerator(name) for name in GRID_GPUS]
    for name in model_names() if models is None else models:
        works = [*(("decode", b, s, decode(b, s)) for b, s in DECODES), *(("prefill", b, t, prefill(b, t)) for b, t in PREFILLS)]
        for phase, batch, tokens, work in works:
            case = f"{name} {phase} {batch}x{tokens}"
            try:
                model = load_model(name)
                cost = (model if phase == "decode" else model.for_prefill).cost(work)
                bounds = " ".join(_exact(time(cost, gpu).bound) for gpu in gpus)
                answer = (str(model.params), _exact(cost.matrix_flops), _exact(cost.bytes), bounds)
            except RooflineError as error:
                answer = ("error", type(error).__name__, "", "")
            yield dict(zip(FIELDS, (case, *answer), strict=True))


def read_digest(path: Path = DIGEST) -> dict[str, dict[str, str]]:
    """The committed predictions by case; none where there is no file."""
    if not path.is_file():
        return {}
    with path.open(encoding="utf-8", newline="") as file:
        return {row["case"]: row for row in csv.DictReader(file)}


def write_digest(rows: Iterable[dict[str, str]], path: Path = DIGEST) -> None:
    """Commits the predictions of this state as the ones to compare with."""
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, FIELDS, lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)


def compare_predictions(head: Iterable[dict[str, str]], base: dict[str, dict[str, str]]) -> Iterator[Finding]:
    """What differs between the predictions of this state and the committed ones."""
    seen = set()
    for row in head:
        case, before = row["case"], base.get(row["case"])
        seen.add(case)
        if before is None:
            yield Finding("new", case, "not in the digest", False)
        elif row["params"] == "error" and before["params"] != "error":
            yield Finding("broken", case, f"had an answer, now {row['flops']}", True)
        elif row != before:
            changed = [f"{name} {before[name]} -> {row[name]}" for name in FIELDS if row[name] != before[name]]
            yield Finding("drift", case, "; ".join(changed), True)
    for case in base:
        if case not in seen:
            yield Finding("gone", case, "was in the digest", True)


def compare_errors(scores: Iterable[Score], records: Iterable[dict[str, str]]) -> Iterator[Finding]:
    """Families whose error is worse than recorded, and classes whose rows beat the bound without a reason."""
    before = {(row["class"], row["kernel"], row["dtype"], row["split"]): float(row["mape"]) for row in records if not row["band"]}
    rows: dict[str, int] = {}
    beaten: dict[str, int] = {}
    for score in scores:
        if score.band is not None:
            continue
        key = (score.cls, score.kernel, score.dtype, score.split)
        rows[score.cls] = rows.get(score.cls, 0) + score.n
        if score.bound_violations and not score.explained:
            beaten[score.cls] = beaten.get(score.cls, 0) + score.bound_violations
        if key in before and score.mape > before[key] * (1 + RELATIVE_MARGIN) + MARGIN:
            yield Finding("worse", " ".join(key), f"error {before[key]:.4f} -> {score.mape:.4f}", True)
        elif key in before and score.mape < before[key] * (1 - RELATIVE_MARGIN) - MARGIN:
            yield Finding("better", " ".join(key), f"error {before[key]:.4f} -> {score.mape:.4f}", False)
    for cls, many in beaten.items():
        if many > UNEXPLAINED * rows[cls]:
            yield Finding("beats the bound", cls, f"{many} of {rows[cls]} rows without a reason", True)
