"""What would make it fit: changes of the command line, each verified by computing every point that --check judges."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from roofline.cli.edit_options import BY_NAME, Chosen
from roofline.cli.points import Point, Question, Variant, judged, variants
from roofline.errors import RooflineError
from roofline.memory import largest
from roofline.model import Model
from roofline.units import capacity

MOST_FIXES = 4
FORMAT_FIXES: tuple[dict[str, str], ...] = (
    {"kv_dtype": "fp8"},
    {"dtype": "fp8"},
    {"dtype": "fp8", "kv_dtype": "fp8"},
    {"dtype": "int4-g128"},
    {"dtype": "int4-g128", "kv_dtype": "fp8"},
)
"""Formats to try, the mildest first."""
CHUNKS = (8192, 2048, 512)
"""Tokens of a prefill step to try."""


@dataclass(frozen=True)
class Asked:
    """A command line, as far as a fix may change it.

    Attributes:
        question: sizes and GPUs. model: before edits. chosen: the edits. cached: whether a cache is kept.
        typed: option -> what it was given, where it was given; a fix says what it stands in for.
    """

    question: Question
    model: Model
    chosen: Chosen
    cached: bool
    typed: Mapping[str, Sequence[str]]

    def flag(self, option: str, value: Any) -> str:
        """The option with a value; where it stands in the command line already, what the value takes the place of."""
        given = self.typed.get(option)
        old = f" instead of {' '.join(f'--{option} {text}' for text in given)}" if given else ""
        return f"--{option} {value}{old}"


def worst_points(question: Question, compared: Sequence[Variant]) -> list[Point]:
    """For each variant, GPU and mesh the point at the largest sizes; where it fits, all of them fit."""

    sizes = [None if one[0] is None else _most(one) for one in (question.contexts, question.inputs, question.outputs)]
    fraction, batch = min(question.fractions), max(question.batches)
    return [
        question.sized(variant, question.deployment(variant, accelerator, fraction, mesh), batch, *sizes)
        for variant in compared
        for accelerator in question.accelerators
        for mesh in question.meshes
    ]


def _most(values: Sequence[int | None]) -> int:
    """The largest value of an option, 0 where it was not given."""
    return max(value or 0 for value in values)


def _fit(question: Question, compared: Sequence[Variant]) -> Point | None:
    """The greediest of the worst points where all of them fit; None where one does not, or cannot be asked."""
    try:
        points = worst_points(question, compared)
    except RooflineError:
        return None
    greediest = min(points, key=lambda point: point.tightest[1].spare_bytes)
    return greediest if greediest.fits else None


def _needs(point: Point) -> str:
    return f"{capacity(point.tightest[1].required_bytes)}{' per GPU' if point.mesh else ''}"


def _chunks(asked: Asked, compared: Sequence[Variant]) -> Iterator[str]:
    """A prefill in steps of fewer tokens."""
    question = asked.question
    if question.inputs[0] is None or not asked.cached:
        return
    longest = _most(question.inputs)
    for chunk in CHUNKS:
        if chunk < min(question.chunk or longest, longest):
            point = _fit(replace(question, chunk=chunk), compared)
            if point is not None:
                yield f"{asked.flag('prefill-chunk', chunk)} ({_needs(point)})"
                return


def _largest(change: Callable[[int], Question], compared: Sequence[Variant], most: int) -> int:
    """The largest size up to ``most`` with which everything fits, 0 for none."""

    def memory(size: int) -> Any:
        points = worst_points(change(size), compared)
        return min((point.tightest[1] for point in points), key=lambda one: one.spare_bytes)

    size = largest(memory, most).size
    return most if size is None else size


def _sizes(asked: Asked, compared: Sequence[Variant]) -> Iterator[str]:
    """A smaller batch; where not even one sequence fits, a shorter context or prompt."""
    question = asked.question
    if max(question.batches) > 1:
        batch = _largest(lambda size: replace(question, batches=[size]), compared, max(question.batches))
        if batch:
            yield asked.flag("batch", batch)
            return
    if question.inputs[0] is None:
        longest = _most(question.contexts)
        most = min(asked.model.max_context or longest, longest)
        if context := _largest(lambda size: replace(question, contexts=[size]), compared, most):
            yield asked.flag("context", context)
    elif prompt := _largest(lambda size: replace(question, inputs=[size]), compared, _most(question.inputs)):
        yield asked.flag("isl", prompt)


def _formats(asked: Asked) -> Iterator[str]:
    values = asked.chosen.values
    for fix in FORMAT_FIXES:
        if all(values.get(name) == [value] for name, value in fix.items()):
            continue
        more = Chosen({**values, **{name: [value] for name, value in fix.items()}})
        try:
            point = _fit(asked.question, judged(variants(asked.model, more, cached=asked.cached), more))
        except RooflineError:
            continue
        if point is not None:
            yield f"{' '.join(asked.flag(BY_NAME[name].flag[2:], value) for name, value in fix.items())} ({_needs(point)})"
            return


def _gpus(asked: Asked, compared: Sequence[Variant]) -> Iterator[str]:
    """The smallest accelerator of the same kind that everything fits on."""
    from roofline.accelerator import accelerator_ids, load_accelerator

    own = max(asked.question.accelerators, key=lambda gpu: gpu.capacity.value)
    same_kind = [gpu for gpu in map(load_accelerator, accelerator_ids()) if gpu.kind == own.kind]
    for accelerator in sorted(same_kind, key=lambda gpu: (gpu.capacity.value, gpu.id)):
        larger = accelerator.capacity.value > own.capacity.value
        if larger and _fit(replace(asked.question, accelerators=[accelerator]), compared):
            yield f"{asked.flag('gpu', accelerator.id)} ({capacity(accelerator.capacity.value)})"
            return


def _meshes(asked: Asked, compared: Sequence[Variant]) -> Iterator[str]:
    """The fewest GPUs of the same kind, in one server, that hold the model by tensor parallelism."""
    from roofline.parallel.mesh import Mesh

    question = asked.question
    if question.convention != "exact" or not asked.cached:
        return
    meshes = [mesh or Mesh() for mesh in question.meshes]
    server = min(gpu.node_accelerators or 1 for gpu in question.accelerators)
    tp = 2 * max(mesh.tp for mesh in meshes)
    while all(tp * mesh.dp <= (mesh.node or server) for mesh in meshes):
        wider = replace(question, meshes=list(dict.fromkeys(replace(mesh, tp=tp) for mesh in meshes)))
        point = _fit(wider, compared)
        if point is not None:
            yield f"{asked.flag('tp', tp)} ({_needs(point)})"
            return
        tp *= 2


def fixes(asked: Asked, compared: Sequence[Variant]) -> list[str]:
    """Up to four changes of the command line, each of which alone makes everything fit; or one line that says that none does.

    "--batch 70 instead of --batch 64,256" takes the place of what stands there, other flags are added at the end.

    Args:
        asked: the command line. compared: the variants that --check judges.
    """
    sources: tuple[Callable[[], Iterator[str]], ...] = (
        lambda: _chunks(asked, compared),
        lambda: _sizes(asked, compared),
        lambda: _formats(asked),
        lambda: _gpus(asked, compared),
        lambda: _meshes(asked, compared),
    )
    found = [line for source in sources for line in source()][:MOST_FIXES]
    if found:
        return found
    worst = min(worst_points(asked.question, compared), key=lambda point: point.tightest[1].spare_bytes)
    memory = worst.tightest[1]
    devices = float(memory.required_bytes) / float(memory.capacity_bytes)
    return [f"no single change found; it needs the memory of {devices:,.1f} {worst.accelerator.id}"]
