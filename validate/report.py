"""The report on operators: expected against measured, on rows that no constant has seen."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from roofline.accelerator import load_accelerator
from roofline.errors import InputError
from roofline.expected.calibration import Family, base_of, families, like, scale_of, transferred
from roofline.expected.model import Chip
from roofline.validate.fitting import predict
from roofline.validate.scores import Score, by_band, errors, with_target
from roofline.validate.silicon.bad import dropped, explanation
from roofline.validate.silicon.frame import Frame
from roofline.validate.silicon.source import joined
from roofline.validate.silicon.suite import beats_bound, bound, chip_of, frames

LONG_KEYS = 1024
"""Keys from which a decode step without a window is long."""
UNFITTED = "no constants: the bound itself"
COMMON = ("device", "framework", "version")
"""Columns of keys that a whole table shares."""


def keys_of(frame: Frame, rows: list[int]) -> list[str]:
    """The keys of some rows, as text."""
    return joined(frame.rows.iloc[rows], [name for name in frame.keys_of if name not in COMMON], named=True, by=" ")


def scores_of(frame: Frame, chip: Chip, expected: Any, split: str, rows: Any, constants: int, note: str = "") -> Iterator[Score]:
    """Scores of some rows of a frame (a mask): over all of them, and by band. Rows of the bad list are left out.

    Only what has constants is held to a target: nobody says that a bound is close.
    """
    import numpy

    bad, reasons = dropped(frame)
    limit = bound(frame, chip)
    faster = beats_bound(frame, chip, limit) & ~bad
    kept, measured = rows & ~bad, frame.seconds
    masks = list(by_band(limit))
    if frame.cls == "attention_decode":
        masks.append((f"keys>={LONG_KEYS}, no window", (frame.columns["keys"] >= LONG_KEYS) & (frame.columns["windowed"] == 0)))
    masks = [(band, mask) for band, mask in masks if (kept & mask).any()]
    errs = numpy.abs(numpy.log(expected / measured))
    furthest = [int(numpy.where(kept & mask, errs, -1.0).argmax()) for _, mask in masks]
    for (band, mask), worst, key in zip(masks, furthest, keys_of(frame, furthest), strict=True):
        here = kept & mask
        figures = errors(expected[here], measured[here], limit[here])
        gone = rows & bad & mask
        with_bad = rows & mask
        beaten = faster if band is None else faster & mask
        score = Score(
            frame.gpu, frame.cls, frame.dtype, frame.kernel, split, band, **figures,
            bound_violations=int(beaten.sum()), explained=explanation(frame) if beaten.any() else "", dropped=int(gone.sum()),
            mape_with_dropped=errors(expected[with_bad], measured[with_bad], limit[with_bad])["mape"] if gone.any() else None,
            constants=constants, worst=f"{measured[worst] / expected[worst]:.2f}x {key}",
            note="; ".join((*reasons, note) if note else reasons),
        )  # fmt: skip
        yield with_target(score) if constants else score


def expect(frame: Frame, gpu: str) -> tuple[Any, Family] | None:
    """Expected seconds of each row by the constants that an accelerator takes, and those; None where there are none."""
    accelerator = load_accelerator(gpu)
    base = base_of(accelerator)
    family = like(families(base), frame.family, frame.model.name)
    if family is None:
        return None
    chip, constants = chip_of(gpu), dict(family.constants)
    if base != accelerator.id:
        constants = transferred(constants, chip_of(base), chip, scale_of(accelerator, family.model))
    return predict(frame, chip, constants), family


def score_silicon(gpu: str, classes: Iterable[str] | None = None) -> list[Score]:
    """Scores of every family of an accelerator: on its held-out rows, or on all rows where constants are another's.

    A family that no constants fit is held against its bound alone, so that no measured row goes unchecked.
    Raises InputError where there are no rows.
    """
    import numpy

    accelerator = load_accelerator(gpu)
    name, base = accelerator.id, base_of(accelerator)
    chip = chip_of(name)
    found: list[Score] = []
    for frame in frames(name, classes):
        rows = frame.held_out if base == name else numpy.ones(len(frame), dtype=bool)
        split = "random" if base == name else "other_gpu"
        answer = expect(frame, name)
        if answer is None:
            found += scores_of(frame, chip, bound(frame, chip), split, rows, 0, UNFITTED)
        else:
            found += scores_of(frame, chip, answer[0], split, rows, len(answer[1].constants))
    if not found:
        raise InputError(f"class: no operators of {', '.join(classes or ('any class',))} were measured on {name}")
    return found
