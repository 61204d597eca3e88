"""Calibration: constants fitted to the training half of every family, written into the accelerator's hardware file.

Deterministic: the split and the sample are by hash, every fit starts at the shared prior, constants are rounded to three
digits before their error is taken. The date changes only when a constant does.
"""

from __future__ import annotations

import datetime
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from roofline.accelerator import HARDWARE, forget
from roofline.errors import InputError
from roofline.expected.calibration import families, like, transferred
from roofline.expected.model import Chip, Model
from roofline.validate.fitting import fit, predict, sample
from roofline.validate.scores import errors
from roofline.validate.silicon.bad import dropped
from roofline.validate.silicon.frame import Frame
from roofline.validate.silicon.source import PACKAGE, package_version
from roofline.validate.silicon.suite import bound, chip_of, frames

Group = tuple[tuple[str, str], list[Frame]]
"""((family, model), its frames)."""
SPLIT = "held out iff sha256(key) is even"
LEAST = 8
"""Training rows without which a family is not fitted."""


@dataclass(frozen=True)
class Fitted:
    """Constants of one family and the error on its held-out rows."""

    family: str
    model: Model
    constants: dict[str, float]
    fitted: int
    held_out: int
    mape: float


def cleaned(found: Iterable[Frame]) -> dict[tuple[str, str], list[Frame]]:
    """Frames by (family, model), without the rows of the bad list."""
    result: dict[tuple[str, str], list[Frame]] = {}
    for frame in found:
        bad, _ = dropped(frame)
        kept = frame.take(~bad)
        if len(kept):
            result.setdefault((kept.family, kept.model.name), []).append(kept)
    return result


def halves(many: Sequence[Frame], masks: Sequence[Any]) -> list[Frame]:
    """The frames at their masks, those with rows."""
    return [part for part in (frame.take(mask) for frame, mask in zip(many, masks, strict=True)) if len(part)]


def error_of(many: Sequence[Frame], chip: Chip, constants: dict[str, float]) -> dict[str, Any]:
    """Error figures over the rows of several frames."""
    import numpy

    expected = numpy.concatenate([predict(frame, chip, constants) for frame in many])
    measured = numpy.concatenate([frame.seconds for frame in many])
    return errors(expected, measured, numpy.concatenate([bound(frame, chip) for frame in many]))


def calibrate_family(name: str, many: Sequence[Frame], chip: Chip) -> Fitted | None:
    """Constants of one family, None where it has too few rows."""
    training = halves(many, [~frame.held_out for frame in many])
    rest = halves(many, [frame.held_out for frame in many])
    rows = sum(map(len, training))
    if rows < LEAST or not rest:
        return None
    constants = fit(training, chip)
    return Fitted(name, many[0].model, constants, rows, sum(map(len, rest)), error_of(rest, chip, constants)["mape"])


def calibrate(
    gpu: str, classes: Iterable[str] | None = None, watch: Callable[[list[Group]], Iterable[Group]] = iter
) -> list[Fitted]:
    """Constants of every family of an accelerator; ``watch`` sees the families go by."""
    chip = chip_of(gpu)
    found = [calibrate_family(name, many, chip) for (name, _), many in watch(sorted(cleaned(frames(gpu, classes)).items()))]
    return [entry for entry in found if entry is not None]


def fit_scale(gpu: str, base: str) -> float:
    """The one factor of an accelerator that takes another's constants: least mean log error on bf16 GEMM training rows."""
    import numpy
    from scipy.optimize import minimize_scalar

    known, chip, own = families(base), chip_of(gpu), chip_of(base)
    parts = []
    for frame in frames(gpu, ["gemm"]):
        family = like(known, frame.family, frame.model.name) if frame.dtype == "bf16" else None
        if family is not None:
            parts.append((sample(frame.take(~frame.held_out)), family))

    def error(scale: float) -> float:
        logs = [
            numpy.log(predict(part, chip, transferred(family.constants, own, chip, scale)) / part.seconds)
            for part, family in parts
        ]
        return float(numpy.abs(numpy.concatenate(logs)).mean())

    return float(f"{minimize_scalar(error, bounds=(0.5, 2.0), method='bounded', options={'xatol': 1e-3}).x:.3g}")


def number(value: float) -> str:
    """A constant in the fewest characters of its three digits."""
    text = f"{value:.3g}" if value < 100 else f"{value:.0f}"
    return text[1:] if text.startswith("0.") else text


def section(found: Sequence[Fitted], date: str) -> str:
    """The ``[calibration]`` part of a hardware file."""
    lines = ["[calibration]", f'package = "{PACKAGE} {package_version()}"', f'date = "{date}"', f'split = "{SPLIT}"']
    by_class: dict[str, dict[str, list[str]]] = {}
    for entry in sorted(found, key=lambda entry: (entry.family.split(" ")[0], entry.model.name, entry.family)):
        cls, _, name = entry.family.partition(" ")
        values = " ".join(number(value) for value in entry.constants.values())
        line = f"{name}={entry.fitted} {number(float(f'{entry.mape:.2g}'))} {values}"
        by_class.setdefault(cls, {}).setdefault(entry.model.name, []).append(line)
    for cls, of_model in by_class.items():
        lines += ["", f"[calibration.{cls}]"]
        lines += [f'{model}="""\n{joined}"""' for model, joined in ((m, "\n".join(each)) for m, each in of_model.items())]
    return "\n".join(lines) + "\n"


def replaced(text: str, fresh: str) -> str:
    """The ``[calibration]`` part ``text`` with the header and the classes of ``fresh``, and its own other classes."""
    parts: list[dict[str, str]] = [{}, {}]
    for part, whole in zip(parts, (text, fresh), strict=True):
        for block in whole.rstrip("\n").split("\n\n"):
            part[block.partition("\n")[0]] = block
    both = parts[0] | parts[1]
    header = both.pop("[calibration]")
    return "\n\n".join([header, *(both[name] for name in sorted(both))]) + "\n"


def borrowed(gpu: str, base: str, scale: float | None, date: str) -> str:
    """The ``[calibration]`` part of a device that takes another's constants."""
    lines = ["[calibration]", f'package = "{PACKAGE} {package_version()}"', f'date = "{date}"', f'base = "{base}"']
    return "\n".join([*lines, *([f"scale = {scale:.3g}"] if scale is not None else [])]) + "\n"


def write(gpu: str, text_for: Any, folder: Path = HARDWARE, some: bool = False) -> bool:
    """Replaces the ``[calibration]`` part of a hardware file (its end) by ``text_for(date)``; whether it changed.

    With ``some``, classes that the text does not have stay. The date stays where nothing else changes. Raises InputError
    where there is no such file.
    """
    path = folder / f"{gpu}.toml"
    if not path.is_file():
        raise InputError(f"gpu: {gpu} has no file in {folder.name}/ to write constants to")
    before = path.read_text(encoding="utf-8")
    head, mark, old = before.partition("\n[calibration]\n")
    old = f"[calibration]\n{old}"

    def text(date: str) -> str:
        fresh: str = text_for(date)
        return replaced(old, fresh) if some and mark else fresh

    if mark:
        dates = [line.partition('"')[2].rstrip('"') for line in old.splitlines() if line.startswith("date = ")]
        if dates and old == text(dates[0]):
            return False
    path.write_text(f"{head}\n{text(datetime.date.today().isoformat())}", encoding="utf-8")
    forget()
    families.cache_clear()
    return True
