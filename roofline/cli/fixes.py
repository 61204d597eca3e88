"""What would make it fit: changes of the command line, each verified by computing it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

from roofline.cli.edit_options import EDITS, Chosen
from roofline.cli.points import Point, Question, Variant, variants
from roofline.cli.verdict import largest_batch, largest_context
from roofline.errors import RooflineError
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
FLAGS = {option.name: option.flag for option in EDITS}


def _fits(point: Point) -> bool:
    return bool(point.step.memory.fits)


def _again(question: Question, worst: Point, variant: Variant, accelerator: Any = None, mesh: Any = None) -> Point:
    """The worst point with another model, GPU or mesh."""
    deployment = question.deployment(variant, accelerator or worst.accelerator, worst.fraction, mesh or worst.mesh)
    return question.point(variant, deployment, worst.step.batch, worst.context, None, None)


def _formats(question: Question, worst: Point, model: Model, chosen: Chosen, cached: bool) -> Iterator[str]:
    given = {name: values[-1] for name, values in chosen.values.items()}
    for fix in FORMAT_FIXES:
        if all(given.get(name) == value for name, value in fix.items()):
            continue
        combined = Chosen({name: [value] for name, value in {**given, **fix}.items()})
        try:
            point = _again(question, worst, variants(model, combined, cached=cached)[-1])
        except RooflineError:
            continue
        if _fits(point):
            flags = " ".join(f"{FLAGS[name]} {value}" for name, value in fix.items())
            yield f"{flags} ({capacity(point.step.memory.required_bytes)})"
            return


def _gpus(question: Question, worst: Point) -> Iterator[str]:
    """The smallest accelerator of the same kind that the point fits on."""
    from roofline.accelerator import accelerator_ids, load_accelerator

    own = worst.accelerator
    same_kind = [gpu for gpu in map(load_accelerator, accelerator_ids()) if gpu.kind == own.kind]
    for accelerator in sorted(same_kind, key=lambda gpu: (gpu.capacity.value, gpu.id)):
        if accelerator.capacity.value > own.capacity.value and _fits(_again(question, worst, worst.variant, accelerator)):
            yield f"--gpu {accelerator.id} ({capacity(accelerator.capacity.value)})"
            return


def _meshes(question: Question, worst: Point) -> Iterator[str]:
    """The fewest GPUs of the same kind, in one server, that hold the model by tensor parallelism."""
    from roofline.parallel.mesh import Mesh

    if question.convention != "exact" or not worst.variant.cached:
        return
    own = worst.mesh or Mesh()
    tp = 2 * own.tp
    while tp * own.dp <= (own.node or worst.accelerator.node_accelerators or 1):
        try:
            point = _again(question, worst, worst.variant, mesh=replace(own, tp=tp))
        except RooflineError:
            return
        if _fits(point):
            yield f"--tp {tp} ({capacity(point.step.memory.required_bytes)} per GPU)"
            return
        tp *= 2


def _sizes(question: Question, worst: Point) -> Iterator[str]:
    """A smaller batch; where not even one sequence fits, a shorter context."""
    if batch := largest_batch(question, worst, worst.context).size:
        yield f"--batch {batch}"
    elif context := largest_context(question, worst, worst.step.batch).size:
        yield f"--context {context}"


def fixes(question: Question, worst: Point, model: Model, chosen: Chosen, cached: bool) -> list[str]:
    """Up to four flags to paste, each of which alone makes the worst point fit; or one line that says that none does.

    Args:
        question: what was asked. worst: the point that misses by most.
        model: before edits. chosen: the edits that were asked for; a fix adds to them or replaces the same option.
        cached: whether a cache is kept.
    """
    sources: tuple[Callable[[], Iterator[str]], ...] = (
        lambda: _sizes(question, worst),
        lambda: _formats(question, worst, model, chosen, cached),
        lambda: _gpus(question, worst),
        lambda: _meshes(question, worst),
    )
    found = [line for source in sources for line in source()][:MOST_FIXES]
    if found:
        return found
    memory = worst.step.memory
    devices = float(memory.required_bytes) / float(memory.capacity_bytes)
    return [f"no single change found; it needs the memory of {devices:,.1f} {worst.accelerator.id}"]
