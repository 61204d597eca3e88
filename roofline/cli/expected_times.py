"""Expected times beside bounds, for ``roofline what-if``: calibrated to an engine, where constants exist."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from roofline.errors import UnsupportedModel

if TYPE_CHECKING:
    from roofline.cli.points import Point, Question
    from roofline.inference import Deployment
    from roofline.serving.calibrated import ExpectedSteps

DEFAULT_ENGINE = "vllm"


@dataclass(frozen=True)
class Expected:
    """The expected time of a decode step.

    Attributes:
        engine: whose constants. seconds: None where there are none. error: mean absolute error on models that the fit had
            not seen, as a fraction. said: why there is no time, or where it leaves the calibrated range; "" for neither.
    """

    engine: str
    seconds: float | None
    error: float | None
    said: str

    def record(self) -> dict[str, Any]:
        """The keys of the JSON."""
        return {
            "tpot_expected_s": self.seconds,
            "tpot_expected_error": self.error,
            "tpot_expected_engine": self.engine,
            "tpot_expected_provenance": None if self.seconds is None else "calibrated",
            "tpot_expected_outside": self.said or None,
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
        reason = _reason(question, point)
        if reason:
            yield Expected(engine, None, None, reason)
            continue
        found = _steps(question.deployment(point.variant, point.accelerator, point.fraction, point.mesh), engine, known)
        if isinstance(found, str):
            yield Expected(engine, None, None, found)
            continue
        batch = -(-int(point.step.batch) // (point.mesh.dp if point.mesh else 1))
        yield Expected(engine, found.decode_seconds(batch, point.context), found.error, "; ".join(found.outside))


def _reason(question: Question, point: Point) -> str:
    if question.convention != "exact":
        return "the lecture's convention has bounds only"
    if not point.variant.cached:
        return "naive generation has bounds only"
    return "encoder-decoders have bounds only" if point.variant.model.encoder is not None else ""
