"""Expected times beside bounds, for ``roofline what-if``: calibrated to an engine, where constants exist."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

from roofline.errors import UnsupportedModel

if TYPE_CHECKING:
    from roofline.cli.points import Point, Question
    from roofline.expected.errors import Error
    from roofline.inference import Deployment
    from roofline.serving.calibrated import ExpectedSteps

DEFAULT_ENGINE = "vllm"
UNFITTED = "they were not fitted to"


@dataclass(frozen=True)
class Expected:
    """The expected time of a decode step.

    Attributes:
        engine: whose constants. batch: of one replica. seconds: None where there are none, and then ``reason`` says why.
        times: the step times that gave them.
    """

    engine: str
    batch: int
    seconds: float | None = None
    reason: str = ""
    times: ExpectedSteps | None = None

    @cached_property
    def outside(self) -> tuple[str, ...]:
        """How the step leaves the calibrated range; nothing where it does not, or has no time."""
        from roofline.expected.serving import left_range

        return left_range(self.times, [self.batch], prompts=False) if self.times else ()

    @property
    def error(self) -> float | None:
        """Mean absolute error on models that the fit had not seen, of batches like this, as a fraction; None where unknown.

        It is known inside the calibrated range, and of a GPU that was measured without being fitted to.
        """
        found = self.times.error_at([self.batch]) if self.times else None
        return found.mean if found and not self.outside else None

    def record(self) -> dict[str, Any]:
        """The keys of the JSON."""
        from roofline.expected.serving import standing

        return {
            "tpot_expected_s": self.seconds,
            "tpot_expected_error": self.error,
            "tpot_expected_engine": self.engine,
            "tpot_expected_provenance": standing(self.times, [self.batch], prompts=False) if self.times else None,
            "tpot_expected_outside": self.reason or "; ".join(self.outside) or None,
        }


def _steps(deployment: Deployment, engine: str, known: dict[int, ExpectedSteps | str]) -> ExpectedSteps | str:
    """Step times of a deployment, or why there are none; remembered."""
    from roofline.serving.calibrated import ExpectedSteps

    if id(deployment) not in known:
        try:
            known[id(deployment)] = ExpectedSteps(deployment, engine)
        except UnsupportedModel as error:
            known[id(deployment)] = str(error)
    return known[id(deployment)]


def expected(question: Question, points: Sequence[Point], engine: str) -> Iterator[Expected]:
    """The expected decode step of each point, of one data-parallel replica with its share of the batch."""
    known: dict[int, ExpectedSteps | str] = {}
    for point in points:
        batch = -(-int(point.step.batch) // (point.mesh.dp if point.mesh else 1))
        reason = _reason(question, point)
        if reason:
            yield Expected(engine, batch, reason=reason)
            continue
        found = _steps(question.deployment(point.variant, point.accelerator, point.fraction, point.mesh), engine, known)
        if isinstance(found, str):
            yield Expected(engine, batch, reason=found)
            continue
        yield Expected(engine, batch, found.decode_seconds(batch, point.context), times=found)


def notes(found: Sequence[Expected]) -> Iterator[str]:
    """What expected times of one engine rest on: their error, which holds inside the calibrated range, and what leaves it."""
    from roofline.expected.errors import tendency
    from roofline.expected.serving import batches, outside_batches, span

    timed = [one for one in found if one.times]
    errors = list(_errors(timed))
    if errors:
        worst = max(errors, key=lambda error: error.mean)
        engine = timed[0].engine
        several = "up to " if len(set(errors)) > 1 else ""
        where = f" at {worst.at}" if worst.at else ""
        how = (
            f"{several}{100 * worst.mean:.0f} % off{where}{tendency(worst.bias)} {worst.of.replace('it has not seen', UNFITTED)}"
        )
        inside = f"inside the calibrated range ({span(batches(engine))} at once)"
        if all(one.outside for one in timed):
            known = f"{how}" if worst.gpus else f"error unknown; {inside} they are {how}"
            yield f"expected times are extrapolated from those of {engine} servers, {known}"
        else:
            limit = f", {inside}" if any(one.outside for one in timed) else ""
            yield f"expected times are those of {engine} servers, {how}{limit}"
        yield f"memory is what the maths needs, without what {engine} keeps for itself (roofline fit --engine {engine})"
    if timed:
        yield from dict.fromkeys(line for one in timed for line in (one.times.outside if one.times else ()))
        yield from outside_batches(timed[0].engine, {one.batch for one in timed})
    yield from dict.fromkeys(one.reason for one in found if one.reason)


def _errors(timed: Sequence[Expected]) -> Iterator[Error]:
    """The error of each batch inside the calibrated range; of all, where none is."""
    inside = [one for one in timed if not one.outside]
    found = (one.times.error_at([one.batch]) for one in inside or timed if one.times)
    yield from (error for error in found if error)


def _reason(question: Question, point: Point) -> str:
    if question.convention != "exact":
        return "the lecture's convention has bounds only"
    if not point.variant.cached:
        return "naive generation has bounds only"
    return "encoder-decoders have bounds only" if point.variant.model.encoder is not None else ""
