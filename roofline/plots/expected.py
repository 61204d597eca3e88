"""Expected times beside the bounds: calibrated steps of an engine, and calibrated kernels of a step; or why there are none."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from roofline.errors import InputError, UnsupportedModel, suggest
from roofline.inference import Deployment
from roofline.numeric import ceil_div
from roofline.work import Work

if TYPE_CHECKING:
    from roofline.serving.calibrated import ExpectedSteps

ENGINE, NONE = "vllm", "none"


def check_engine(engine: str) -> str:
    """An engine that constants were fitted to, or "none" for no expected times. Raises InputError for another one."""
    from roofline.expected.kernels import engines

    known = [*engines(), NONE]
    if engine not in known:
        raise InputError(f"engine: {engine!r} is not one of {', '.join(known)}.{suggest(engine, known)}")
    return engine


@dataclass(frozen=True)
class Expected:
    """Calibrated decode steps of a deployment, or why there are none.

    Attributes:
        engine: whose. steps: None where there are none. reason: why not, "" where there are.
    """

    engine: str
    steps: ExpectedSteps | None
    reason: str = ""

    def decode(self, deployment: Deployment, batches: Iterable[float], context: int) -> Any:
        """Seconds of decode steps at whole batches, an array; None where nothing is calibrated."""
        import numpy

        from roofline.serving.steps import StepShape

        if self.steps is None:
            return None
        groups = getattr(getattr(deployment, "mesh", None), "dp", 1)
        local = [ceil_div(int(batch), groups) for batch in batches]
        return numpy.array([self.steps.seconds(StepShape(decodes=n, decode_context=n * context)) for n in local])

    def inside(self, deployment: Deployment, batches: Iterable[float]) -> Any:
        """Where batches are among those that constants were fitted to, and so is the model: an array of booleans."""
        import numpy

        from roofline.expected.serving import batches as fitted

        groups = getattr(getattr(deployment, "mesh", None), "dp", 1)
        local = numpy.array([ceil_div(int(batch), groups) for batch in batches])
        if self.steps is None or not self.steps.calibrated_range:
            return numpy.zeros(len(local), dtype=bool)
        low, high = fitted(self.engine)
        return (local >= low) & (local <= high)

    def one_decode(self, deployment: Deployment, batch: int, context: int) -> float | None:
        """Seconds of one decode step; None where nothing is calibrated."""
        found = self.decode(deployment, [batch], context)
        return None if found is None else float(found[0])

    def one_prefill(self, deployment: Deployment, batch: int, tokens: int) -> float | None:
        """Seconds of one step that prefills ``tokens`` tokens of each sequence; None where nothing is calibrated."""
        from roofline.serving.steps import StepShape

        if self.steps is None:
            return None
        local = ceil_div(batch, getattr(getattr(deployment, "mesh", None), "dp", 1))
        pairs = local * tokens * (tokens + 1) // 2
        return self.steps.seconds(StepShape(prefill_tokens=local * tokens, prefill_pairs=pairs, prefills=local))

    @property
    def label(self) -> str:
        """What a legend calls the times; "" where none were asked for."""
        if self.steps is None:
            return f"expected: {self.reason}" if self.reason else ""
        from roofline.expected.serving import batches, span

        if not self.steps.calibrated_range:
            return f"expected, {self.engine} (beyond what it was fitted to)"
        found = self.steps.errors
        sizes = list(dict.fromkeys(f"{100 * size:.0f}" for size in (min(found), max(found)))) if found else []
        mean = f", mean error {' to '.join(sizes)} %" if sizes else ""
        return f"expected, {self.engine}{mean} at batch {span(batches(self.engine))}"


def expected_of(deployment: Deployment, engine: str = ENGINE) -> Expected:
    """The calibrated times of a deployment under an engine, or the reason why there are none."""
    from roofline.serving.calibrated import ExpectedSteps

    if check_engine(engine) == NONE:
        return Expected(engine, None)
    if deployment.convention != "exact" or deployment.model.encoder is not None:
        return Expected(engine, None, "not calibrated")
    try:
        return Expected(engine, ExpectedSteps(deployment, engine))
    except UnsupportedModel as error:
        return Expected(engine, None, str(error))


def kernel_seconds(deployment: Deployment, work: Work, phase: str, engine: str = ENGINE) -> dict[str, float]:
    """Calibrated seconds of a step's kernels by name, all occurrences together; empty where they are not calibrated."""
    from roofline.expected.kernels import kernels_of
    from roofline.expected.load import Load
    from roofline.expected.operators import operators

    if check_engine(engine) == NONE or deployment.model.encoder is not None:
        return {}
    ranks, mesh = getattr(deployment, "ranks", None), getattr(deployment, "mesh", None)
    stages: Sequence[Any] = (deployment.model,) if ranks is None else ranks.stages
    batch = float(ceil_div(work.B, 1 if mesh is None else mesh.dp))
    load = Load(batch, float(work.S)) if phase == "decode" else Load(0.0, 0.0, batch, float(work.T), float(work.S))
    found: dict[str, float] = {}
    try:
        for stage in stages:
            for operator in operators(stage, kernels_of(engine, deployment.accelerator, deployment.model.family)):
                seconds = float(operator.count * operator.seconds(load))
                found[operator.name] = found.get(operator.name, 0.0) + seconds
    except UnsupportedModel:
        return {}
    return found
