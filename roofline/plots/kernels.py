"""The kernels of one step with what each is for: the material of the roofline and of the breakdown."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from roofline.breakdown import role_of
from roofline.components.base import Component
from roofline.components.collective import Collective
from roofline.cost import MATRIX_UNITS, Cost
from roofline.errors import InputError
from roofline.inference import Deployment
from roofline.model import Model
from roofline.plots.expected import ENGINE, kernel_seconds
from roofline.plots.style import GREY
from roofline.work import Work

PHASES = ("prefill", "decode")
ROLES: dict[str, tuple[str, str, str]] = {
    "attention": ("#0072B2", "o", ""),
    "index": ("#56B4E9", "X", "xxx"),
    "mixers": ("#CC79A7", "h", "..."),
    "projections": ("#E69F00", "s", "///"),
    "feed-forward": ("#009E73", "^", "\\\\\\"),
    "experts": ("#D55E00", "D", "---"),
    "head": ("#000000", "p", "++"),
    "other": (GREY, "v", "ooo"),
    "elementwise": ("#BBBBBB", "*", "|||"),
    "collectives": ("#F0E442", "P", "oo"),
}
"""Role -> colour, marker, hatch."""


@dataclass(frozen=True)
class Kernel:
    """A kernel of a step, all its occurrences together.

    Attributes:
        name, role: what it is, and what it is for.
        cost: of all occurrences. bound, serial: seconds on the datasheet's roofs.
        expected: calibrated seconds, None where there are none.
        share: of the time of all kernels.
    """

    name: str
    role: str
    cost: Cost
    bound: float
    serial: float
    expected: float | None
    share: float = 0.0

    @property
    def seconds(self) -> float:
        """The expected time, or the bound where there is none."""
        return self.bound if self.expected is None else self.expected

    @property
    def unit(self) -> str:
        """The matrix unit that does most of it; "" for a kernel without matrix FLOPs."""
        matrix = {unit: float(flops) for unit, flops in self.cost.flops.items() if unit in MATRIX_UNITS and flops}
        return max(matrix, key=matrix.__getitem__) if matrix else ""


def role(kernel: Component) -> str:
    """One of ``ROLES``: as ``roofline.breakdown`` has it, with exchanges and kernels without matrix FLOPs by themselves."""
    if isinstance(kernel, Collective):
        return "collectives"
    found = role_of(kernel)
    if found in ("attention", "index", "mixers") or kernel.cost(Work(2, 1, 4)).matrix_flops:
        return found
    return "elementwise"


def models_of(deployment: Deployment, phase: str) -> Sequence[Model]:
    """The models whose kernels a step runs: the model, or one rank's part of each pipeline stage."""
    ranks = getattr(deployment, "ranks", None)
    stages: Sequence[Model] = ranks.stages if ranks is not None else (deployment.model,)
    return stages if phase == "decode" else [stage.for_prefill for stage in stages]


def work_of(phase: str, batch: int, context: int, new_tokens: int, source: int = 0) -> Work:
    """A decode step of one token at a context, or a prefill of new tokens behind it."""
    if phase not in PHASES:
        raise InputError(f"phase: {phase!r} is not one of {', '.join(PHASES)}")
    if phase == "decode":
        return Work(batch, 1, context, all_logits=True, source=source)
    return Work(batch, new_tokens, context, source=source)


def kernels(deployment: Deployment, work: Work, phase: str, engine: str = ENGINE) -> list[Kernel]:
    """The kernels of a step, the slowest first; with expected times where all that do matrix arithmetic are calibrated."""
    roles = {part.name: role(part) for model in models_of(deployment, phase) for _, part in model.counted}
    expected = kernel_seconds(deployment, work, phase, engine)
    found = deployment.explain(work, phase)
    if any(part.name not in expected and part.cost.matrix_flops for part in found):
        expected = {}
    made = [
        Kernel(
            part.name, roles[part.name], part.cost, float(part.timing.bound), float(part.timing.serial), expected.get(part.name)
        )
        for part in found
    ]  # fmt: skip
    whole = sum(kernel.seconds for kernel in made) or 1.0
    shared = [replace(kernel, share=kernel.seconds / whole) for kernel in made]
    return sorted(shared, key=lambda kernel: -kernel.share)
