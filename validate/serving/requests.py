"""Published times of single requests, no server around them: one decode step, or one prompt, under an engine."""

from __future__ import annotations

import csv
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from roofline.accelerator import load_accelerator
from roofline.configs.load import load_model
from roofline.edits import Edit, apply, dtype, kv_dtype
from roofline.inference import Deployment
from roofline.parallel.mesh import Mesh
from roofline.serving.calibrated import ExpectedSteps
from roofline.serving.steps import BoundSteps, StepShape
from roofline.sharded import ShardedDeployment

FILE = Path(__file__).parents[1] / "published" / "requests.csv"


@dataclass(frozen=True)
class Single:
    """One published time beside bound and expectation; seconds.

    Attributes:
        what: "decode" (behind ``context`` tokens) or "first token" (of a prompt of so many).
        counts: whether the constants speak for it; where not, the comment says why.
    """

    what: str
    engine: str
    model: str
    gpu: str
    gpus: int
    weights: str
    context: int
    measured: float
    bound: float
    expected: float
    source: str
    comment: str

    @property
    def error(self) -> float:
        """Of the expectation, relative to the measurement."""
        return self.expected / self.measured - 1.0

    @property
    def counts(self) -> bool:
        """Whether the constants speak for it."""
        return "Vulkan" not in self.source


def _alone(deployment: Deployment, engine: str) -> ExpectedSteps:
    """Step times without what a server's host does once for a step with prompts."""
    times = ExpectedSteps(deployment, engine)
    times.constants = replace(times.constants, step_us=0.0)
    return times


def singles() -> Iterator[Single]:
    """Every published row."""
    with FILE.open(encoding="utf-8", newline="") as file:
        for row in csv.DictReader(file):
            edits: list[Edit] = [dtype("bf16")] if row["model"] == "gpt-j-6b" else []
            edits += [dtype(row["weights"]), *([kv_dtype(row["kv"])] if row["kv"] else [])]
            model = apply(load_model(row["model"]), edits)
            gpus, tokens = int(row["gpus"]), int(row["context"])
            deployment = ShardedDeployment(model, load_accelerator(row["gpu"]), mesh=Mesh(tp=gpus))
            decode = StepShape(decodes=1, decode_context=tokens)
            shape = decode if row["what"] == "decode" else StepShape(tokens, tokens * (tokens + 1) // 2, 1)
            yield Single(
                row["what"], row["engine"], row["model"], row["gpu"], gpus, row["weights"], tokens,
                float(row["milliseconds"]) * 1e-3, BoundSteps(deployment).seconds(shape),
                _alone(deployment, row["engine"]).seconds(shape), row["source"], row["comment"],
            )  # fmt: skip


def mean_error(found: list[Single], what: str, gpu: str | None = None) -> float:
    """Mean absolute error of the rows that count, of one GPU or all."""
    errors = [abs(one.error) for one in found if one.what == what and one.counts and gpu in (None, one.gpu)]
    return sum(errors) / len(errors)
