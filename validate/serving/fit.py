"""Fits of the serving constants: three of each engine and two shared to times per token, two shared to first tokens.

Least squares on the logarithm of predicted over measured, robust, with declared priors (the starts of
``roofline.expected.serving``): a constant a factor of its spread away from its prior costs as much as a hundredth of the
rows off by a tenth. The operators' constants are inherited and stay as they are. Deterministic, one start.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from roofline.expected.model import Constant
from roofline.expected.serving import ENGINE_CONSTANTS, SHARED_CONSTANTS, Serving, step_seconds
from roofline.serving.closed_form import Near, Steady, steady
from roofline.validate.fitting import rounded
from roofline.validate.serving.runs import KINDS, Runs

ENGINES = ("vllm", "trtllm", "sglang")
DISPATCH, STEP, *FIRST_TOKEN = SHARED_CONSTANTS
SPREAD = {"dispatch": 0.7, "step_us": 0.3}
"""Spread of a prior as a factor of e; 1 where it is not listed. The floor of a step is hard to tell from that of its layers."""
ERROR = 0.1
"""Log errors below this count squared, above it linearly."""
WEIGHT = 0.01
"""What a prior counts, in shares of all rows."""


@dataclass(frozen=True)
class Fit:
    """Constants by engine and name, and shared ones by name."""

    engines: dict[str, dict[str, float]]
    shared: dict[str, float]

    def of(self, runs: Runs) -> Serving:
        """The constants of each run, as arrays."""
        import numpy

        names = runs.table["engine"].tolist()
        own = {c.name: numpy.array([self.engines[engine][c.name] for engine in names]) for c in ENGINE_CONSTANTS}
        return Serving("", **own, **self.shared)


def predict(runs: Runs, constants: Serving) -> Steady:
    """Means of every run."""
    steps = runs.steps
    seconds = {kind: step_seconds(runs.busy[kind], getattr(steps, kind), constants) for kind in KINDS}
    clients, output = (runs.table[name].to_numpy(dtype=float) for name in ("clients", "output"))
    request = constants.request_seconds(steps.running)
    decode, mixed, alone, burst, few, less, early = (seconds[kind] for kind in KINDS)
    near = Near(few, less, early, constants.request_seconds(1.0))
    return steady(steps, decode, mixed, alone, request, clients, output, runs.client, burst, near)


def solve(constants: Sequence[Constant], model: Callable[[Any], Any], measured: Any) -> Any:
    """Constants that bring ``model`` (values -> predictions) nearest to what was measured."""
    import numpy
    from scipy.optimize import least_squares

    prior = numpy.log([constant.start for constant in constants])
    low, high = (numpy.log([getattr(constant, side) for constant in constants]) for side in ("low", "high"))
    spread = numpy.array([SPREAD.get(constant.name, 1.0) for constant in constants])
    logs, pull = numpy.log(measured), ERROR * (WEIGHT * len(measured)) ** 0.5

    def residuals(values: Any) -> Any:
        return numpy.concatenate([numpy.log(model(numpy.exp(values))) - logs, pull * (values - prior) / spread])

    found = least_squares(
        residuals, prior, bounds=(low, high), loss="soft_l1", f_scale=ERROR, diff_step=1e-4, xtol=1e-9, ftol=1e-9
    )
    return [rounded(float(value)) for value in numpy.exp(found.x)]


def fit(runs: Runs, first: Runs) -> Fit:
    """Constants from the times per token of ``runs`` and, with these held, the times to first token of ``first``."""
    import numpy

    present = [engine for engine in ENGINES if (runs.table["engine"] == engine).any()]
    number = len(ENGINE_CONSTANTS)
    which = numpy.array([present.index(engine) for engine in runs.table["engine"]])
    defaults = {engine: {c.name: c.start for c in ENGINE_CONSTANTS} for engine in ENGINES}

    def tokens(values: Any) -> Any:
        own = values[:-2].reshape(len(present), number)
        kernel, sequence, eager = (own[which, index] for index in range(number))
        constants = Serving("", kernel, sequence, eager, *values[-2:])
        return predict(runs, constants).tpot

    values = solve([*ENGINE_CONSTANTS * len(present), DISPATCH, STEP], tokens, runs.table["tpot"].to_numpy())
    engines = {
        engine: dict(zip((c.name for c in ENGINE_CONSTANTS), values[place * number : (place + 1) * number], strict=True))
        for place, engine in enumerate(present)
    }
    shared = {DISPATCH.name: values[-2], STEP.name: values[-1]}
    partial = Fit({**defaults, **engines}, shared)
    if len(first):

        def starts(values: Any) -> Any:
            given = dict(zip((constant.name for constant in FIRST_TOKEN), values, strict=True))
            return predict(first, Fit(partial.engines, {**shared, **given}).of(first)).ttft

        found = solve(FIRST_TOKEN, starts, first.table["ttft"].to_numpy())
        shared |= dict(zip((constant.name for constant in FIRST_TOKEN), found, strict=True))
    return Fit(partial.engines, shared)
