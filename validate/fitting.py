"""Fitting a time model's constants to measured rows: least squares on the logarithm of predicted over measured.

Robust (soft L1), bounded by each constant's physics, and drawn weakly towards the prior that all kernels share, so that
a constant that the rows do not identify stays there. Deterministic: rows by the order of their hash, one start.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from roofline.expected.model import Chip, Model
from roofline.validate.silicon.frame import Frame

ROWS = 6000
"""Most rows that a fit looks at, those of the smallest hashes."""
EVALUATIONS = 80
SCALES = (0.1, 0.03)
"""Log errors well below this count squared, above it linearly; the second, nearly a mean of absolute errors, refines."""
PRIOR = 0.05
"""Weight of a factor e between a constant and its prior, in units of the rows' mean squared log error."""
FAR = 2.3
"""A launch takes this many factors of e longer than the prior where the host launches kernel by kernel: start there."""
HELD = 1e3
"""The same for a constant that is to stay at its prior."""
DIGITS = 3


def rounded(value: float) -> float:
    """A constant as it is stored."""
    return float(f"{value:.{DIGITS}g}")


def sample(frame: Frame, most: int = ROWS) -> Frame:
    """Rows of the smallest hashes, at most that many."""
    import numpy

    if len(frame) <= most:
        return frame
    return frame.take(numpy.sort(numpy.argsort(frame.order, kind="stable")[:most]))


def predict(frame: Frame, chip: Chip, constants: Mapping[str, float]) -> Any:
    """Expected seconds of each row."""
    return frame.model.seconds(frame.columns, chip, constants)


def fit(frames: Sequence[Frame], chip: Chip, most: int = ROWS, held: Sequence[str] = ()) -> dict[str, float]:
    """Constants fitted to the rows of the frames of one family, at most ``most`` of all of them; ``held`` stay at their prior."""
    import numpy
    from scipy.optimize import least_squares

    model: Model = frames[0].model
    total = sum(len(frame) for frame in frames)
    parts = [sample(frame, max(most * len(frame) // total, 1)) for frame in frames]
    measured = numpy.log(numpy.concatenate([part.seconds for part in parts]))
    prior = numpy.log([constant.start for constant in model.constants])
    low = numpy.log([constant.low for constant in model.constants])
    high = numpy.log([constant.high for constant in model.constants])
    first = prior.copy()
    shortest = numpy.quantile(measured, 0.02) + numpy.log(0.9e6)
    for number, constant in enumerate(model.constants):
        if constant.name == "host_us":
            first[number] = numpy.log(_host_floor(parts) * 0.9e6)
        elif constant.name == "launch_us" and shortest > prior[number] + FAR:
            first[number] = shortest
    stiff = [HELD if constant.name in held else PRIOR for constant in model.constants]
    pull = (numpy.array(stiff) * len(measured)) ** 0.5

    logs = numpy.clip(first, low + 1e-9, high - 1e-9)
    for scale in SCALES:

        def residuals(logs: Any, scale: float = scale) -> Any:
            constants = model.named(numpy.exp(logs))
            found = numpy.concatenate([model.seconds(part.columns, chip, constants) for part in parts])
            return numpy.concatenate([numpy.log(found) - measured, pull * scale * (logs - prior)])

        logs = least_squares(
            residuals, numpy.clip(logs, low + 1e-9, high - 1e-9), bounds=(low, high), loss="soft_l1", f_scale=scale,
            max_nfev=EVALUATIONS, xtol=1e-5, ftol=1e-6, diff_step=1e-4,
        ).x  # fmt: skip
    return {name: rounded(value) for name, value in model.named(numpy.exp(logs)).items()}


def _host_floor(parts: Sequence[Frame]) -> float:
    """The shortest times of rows that the host launches kernel by kernel [s]; a prior's worth where there are none."""
    import numpy

    eager = [part.seconds[numpy.broadcast_to(part.columns.get("eager", 1.0), len(part)) > 0] for part in parts]
    seconds = numpy.concatenate(eager)
    return float(numpy.quantile(seconds, 0.02)) if len(seconds) else 20e-6
