"""The report on a user's own measurements: bound check, error of the shipped constants, and a fit where there are enough rows."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from roofline.accelerator import load_accelerator
from roofline.expected.calibration import base_of, families, transferred
from roofline.validate.fitting import fit, predict
from roofline.validate.own import frames
from roofline.validate.report import UNFITTED, scores_of
from roofline.validate.scores import Score
from roofline.validate.silicon.suite import bound, chip_of

ENOUGH = 40
"""Rows from which a family is fitted."""


def report_own(path: Path, gpu: str) -> list[Score]:
    """Scores of every class and dtype in the file: fitted on half of its rows, and by the constants shipped for the GPU.

    Where there are neither enough rows nor constants, against the bound alone.
    """
    found: list[Score] = []
    chip = chip_of(gpu)
    for frame in frames(path, gpu):
        shipped = _shipped(gpu, frame.cls, frame.model.name, frame.dtype)
        if shipped is not None:
            name, constants = shipped
            everything = frame.seconds > 0
            expected = predict(frame, chip, constants)
            note = f"constants of {name}"
            found += [
                replace(s, target=None)
                for s in scores_of(frame, chip, expected, "other_framework", everything, len(constants), note)
            ]
        if len(frame) >= ENOUGH and "sm_count" in chip.accelerator.chip:
            constants = fit([frame.take(~frame.held_out)], chip)
            note = f"{frame.cls} {frame.dtype} fitted: {', '.join(f'{name} {value:g}' for name, value in constants.items())}"
            scores = scores_of(frame, chip, predict(frame, chip, constants), "random", frame.held_out, len(constants), note)
            found += [replace(score, target=None) for score in scores]
        elif shipped is None:
            scores = scores_of(frame, chip, bound(frame, chip), "random", frame.seconds > 0, 0, UNFITTED)
            found += [replace(score, target=None) for score in scores]
    return found


def _shipped(gpu: str, cls: str, model: str, dtype: str) -> tuple[str, dict[str, Any]] | None:
    """The shipped family of the class, model and dtype with the smallest error."""
    accelerator = load_accelerator(gpu)
    base = base_of(accelerator)
    wanted = dtype.replace("-kv-", "/")
    alike = [
        family
        for (name, of), family in families(base).items()
        if of == model and name.startswith(f"{cls} ") and name.replace(" ", "/").endswith(f"/{wanted}")
    ]
    if not alike:
        return None
    best = min(alike, key=lambda family: family.mape)
    constants = dict(best.constants)
    return best.name, constants if base == gpu else transferred(constants, chip_of(base), chip_of(gpu))
