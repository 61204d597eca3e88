"""Expected time of kernels that nobody measured one by one: their cost over achieved fractions of the datasheet's rates.

For engines that ``engines.toml`` gives a ``plain`` table: a fraction of the memory bandwidth, one of the matrix peak, and a
gap behind every kernel, fitted to whole steps. Any component with a cost has such a time, on any accelerator.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from roofline.accelerator import Accelerator
from roofline.components.base import Component
from roofline.cost import Cost
from roofline.expected.arithmetic import floor, maximum
from roofline.expected.load import Load
from roofline.expected.model import overlap
from roofline.expected.operators import Operator
from roofline.model import Model
from roofline.timing import time
from roofline.work import Batch, Ragged, Work

SIDE_BY_SIDE = 3.0
"""Order of the norm that joins a kernel's streams."""


@dataclass(frozen=True)
class Plain:
    """Achieved fractions of an engine.

    Attributes:
        memory, matrix: of the bandwidth and of the matrix units' peak. kernel_us: gap behind every kernel [us].
        gpus: what they were fitted on. sequences: at once in the steps they were fitted to, least and most.
        error: mean absolute error of a decode step with the GPU left out. source: of the rows.
    """

    memory: float
    matrix: float
    kernel_us: float
    gpus: tuple[str, ...]
    sequences: tuple[int, int]
    error: float
    rows: int
    source: str


def _whole(value: Any) -> Any:
    """A size as work takes it: an int, or an array of whole numbers."""
    rounded = floor(value + 0.5)
    return rounded if hasattr(rounded, "shape") and rounded.shape else int(rounded)


def work_of(load: Load) -> Batch:
    """The groups of a step: its decodes, and its chunks."""
    groups = []
    if load.decodes > 0:
        groups.append(Work(_whole(maximum(load.decodes, 1.0)), _whole(load.new), _whole(load.context), all_logits=True))
    if load.prompt_tokens > 0:
        groups.append(Work(_whole(maximum(load.chunks, 1.0)), _whole(maximum(load.chunk, 1.0)), _whole(load.behind)))
    return groups[0] if len(groups) == 1 else Ragged(tuple(groups))


def by_tokens(part: Component) -> bool:
    """Whether a kernel's cost depends on the number of new tokens alone, however they are split into sequences."""
    splits = (Work(2, 3, 5), Work(6, 1, 0, all_logits=True), Work(1, 6, 9))
    first, *others = (set(part.cost(work).entries()) for work in splits)
    return all(first == other for other in others)


def plain_operators(stage: Model, accelerator: Accelerator, plain: Plain) -> list[Operator]:
    """The kernels of one rank's step; those of a step with prompts in the form that prefills run.

    Kernels that both forms have and whose time is decided by the number of tokens are listed once, over that number.
    """

    def seconds(cost: Cost) -> Any:
        timing = time(cost, accelerator)
        streams = [timing.memory / plain.memory, timing.compute / plain.matrix, *timing.links.values()]
        return overlap(SIDE_BY_SIDE, *streams)

    def run(part: Component, prompts: bool) -> Callable[[Load], Any]:
        return lambda load: seconds(part.cost(work_of(load))) if (load.prompt_tokens > 0) == prompts else 0.0

    def over_tokens(part: Component) -> Callable[[Load], Any]:
        return lambda load: seconds(part.cost(Work(_whole(maximum(load.tokens, 1.0)))))

    def made(number: int, part: Component, prompts: bool) -> Operator:
        launches = 0 if prompts or part.kind == "learned" else 1
        return Operator(number, "plain", part.name, run(part, prompts), error=plain.error, launches=launches)

    def shared(number: int, part: Component) -> Operator:
        launches = 0 if part.kind == "learned" else 1
        return Operator(number, "plain", part.name, over_tokens(part), error=plain.error, launches=launches, over="all")

    decode, prefill = list(stage.counted), list(stage.for_prefill.counted)
    common = [entry for entry in decode if entry in prefill and by_tokens(entry[1])]
    return [
        *(shared(number, part) for number, part in common),
        *(made(number, part, False) for number, part in decode if (number, part) not in common),
        *(made(number, part, True) for number, part in prefill if (number, part) not in common),
    ]
