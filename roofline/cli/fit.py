"""``roofline fit``: the largest batch and context that fit."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Any

import typer

from roofline.cli import sweeps
from roofline.cli.bundles import bundled
from roofline.cli.edit_options import EDIT_OPTIONS, Chosen
from roofline.cli.engine_fit import ENGINE_OPTIONS, EngineChoice
from roofline.cli.mesh_options import MESH_OPTIONS, Meshes
from roofline.cli.options import (
    Batch,
    Check,
    Context,
    Fraction,
    Gpu,
    Model,
    Source,
    accelerators,
)
from roofline.cli.output import OUTPUT, Cells, Output
from roofline.errors import InputError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from roofline.cli.points import Point, Question
    from roofline.memory import Largest

DEFAULT_CONTEXT = 4096
MOST_VERDICTS = 6
"""Models, GPUs and layouts that get a verdict in words."""

Answer = tuple["Point", "Largest", "Largest"]


def _answers(question: Question, points: Sequence[Point]) -> list[Answer]:
    """(point, largest batch at its context, largest context at its batch) of each point; equal searches run once."""
    from roofline.cli.verdict import largest_batch, largest_context

    found: dict[Any, Largest] = {}
    rows = []
    for point in points:
        where = (point.variant.label, point.accelerator.id, point.fraction, point.mesh)
        by_context, by_batch = (*where, "context", point.context), (*where, "batch", point.step.batch)
        if by_context not in found:
            found[by_context] = largest_batch(question, point, point.context)
        if by_batch not in found:
            found[by_batch] = largest_context(question, point, point.step.batch)
        rows.append((point, found[by_context], found[by_batch]))
    return rows


def _record(answer: Answer, assumes: list[str], left: list[str]) -> dict[str, Any]:
    point, batch, context = answer
    record = point.record(assumes)
    about = (
        "schema", "model", "variant", "edits", "gpu", "gpus", "mesh", "batch", "context_tokens", "dtype", "kv_dtype",
        "weight_bytes", "kv_bytes", "required_bytes", "capacity_bytes", "memory_fraction", "fits",
    )  # fmt: skip
    return {
        **{key: record[key] for key in about},
        "largest_batch": batch.size,
        "next_batch_missing_bytes": batch.missing_bytes,
        "largest_context_tokens": context.size,
        "next_context_missing_bytes": context.missing_bytes,
        "max_context_tokens": point.variant.model.max_context,
        "provenance": "datasheet",
        "assumes": assumes,
        "not_modelled": left,
    }


def _size(size: int | None) -> str:
    return "no limit" if size is None else f"{size:,}"


def _missing(found: Largest) -> str:
    """By how much the next size misses, in the unit that shows it."""
    from roofline.units import GIB

    if found.missing_bytes is None:
        return "-"
    missing = float(found.missing_bytes)
    return f"{missing / GIB:,.2f} GiB" if missing >= GIB / 100 else f"{missing / 2**20:,.3f} MiB"


def _cells(answers: Sequence[Answer]) -> Cells:
    from roofline.cli.verdict import place
    from roofline.units import GIB

    several = any(point.variant.flags for point, _, _ in answers)
    headers = [
        *(["variant"] if several else []), "gpu", "weights\nGiB", "capacity\nGiB", "at\ncontext", "largest\nbatch",
        "the next\nmisses by", "at\nbatch", "largest\ncontext", "the next\nmisses by",
    ]  # fmt: skip
    rows = [
        [
            *([point.variant.label] if several else []), place(point),
            f"{float(point.step.memory.weight_bytes) / GIB:,.2f}", f"{float(point.step.memory.capacity_bytes) / GIB:,.2f}",
            f"{point.context:,}", _size(batch.size), _missing(batch),
            f"{point.step.batch:,}", _size(context.size), _missing(context),
        ]
        for point, batch, context in answers
    ]  # fmt: skip
    return headers, rows


def _layouts(model: Any, question: Question, gpus: str, meshes: Meshes) -> list[Any]:
    """Every mesh of so many GPUs that the model can be laid out on. Raises InputError where there is none."""
    from roofline.parallel.layouts import layouts

    if meshes.sizes:
        raise InputError("gpus: every layout is tried, so --tp, --pp, --dp, --ep and --sp contradict it; give one or the other")
    number = sweeps.whole_numbers([gpus], "gpus")[0]
    found = [layouts(model, accelerator, number, meshes.node) for accelerator in question.accelerators]
    common = [mesh for mesh in found[0].possible if all(mesh in other.possible for other in found)]
    if not common:
        why = "; ".join(dict.fromkeys(reason for one in found for _, reason in one.refused))
        raise InputError(f"gpus: no layout of {model.name} on {number} GPUs is possible: {why}")
    return common


def _nowhere(answers: Sequence[Answer]) -> list[str]:
    """That none of several layouts fits, and what the smallest needs."""
    from roofline.cli.verdict import place
    from roofline.units import capacity

    points = [point for point, _, _ in answers]
    if len({point.mesh for point in points}) < 2 or any(point.step.memory.fits for point in points):
        return []
    least = min(points, key=lambda point: point.step.memory.required_bytes)
    memory = least.step.memory
    return [
        f"no layout fits: the smallest, {place(least)}, needs {capacity(memory.required_bytes)} of memory per GPU, and "
        f"{capacity(memory.capacity_bytes)} is there"
    ]


def _verdicts(answers: Sequence[Answer], out: Output) -> list[str]:
    """For each variant on each GPU: what fits, or by how much not even the weights do."""
    from roofline.cli.verdict import place
    from roofline.units import capacity

    groups: dict[tuple[Any, ...], list[Answer]] = {}
    for answer in answers:
        point = answer[0]
        groups.setdefault((point.variant.label, place(point), point.fraction), []).append(answer)
    lines = []
    for members in groups.values():
        point = members[0][0]
        memory = point.step.memory
        part = f" x {float(point.fraction):g}" if point.fraction != 1 else ""
        who = f"{point.step.model}{' with ' + point.variant.label if point.variant.flags else ''} on {place(point)}{part}"
        short = memory.weight_bytes - memory.capacity_bytes
        per = " per GPU" if point.mesh else ""
        if short > 0:
            lines.append(f"{who}: {out.paint('does not fit:', 'red')} the weights alone are {capacity(short)} too large{per}")
            continue
        batches = dict.fromkeys(f"{out.paint(_size(b.size), 'green')} at context {p.context:,}" for p, b, _ in members)
        contexts = dict.fromkeys(
            f"{out.paint(_size(c.size), 'green')}{'' if c.size is None else ' tokens'} at batch {p.step.batch:,}"
            for p, _, c in members
        )
        lines.append(f"{who}: largest batch {', '.join(batches)}; largest context {', '.join(contexts)}")
    if len(lines) > MOST_VERDICTS:
        lines = [*lines[:MOST_VERDICTS], f"and {len(lines) - MOST_VERDICTS} others in the table"]
    admitted = answers[0][0].variant.model.max_context
    if admitted is not None and any(context.size is None or context.size > admitted for _, _, context in answers):
        lines.append(f"the config admits a context of {admitted:,}")
    return lines


@bundled(edits=EDIT_OPTIONS, meshes=MESH_OPTIONS, engine=ENGINE_OPTIONS, out=OUTPUT)
def fit(
    model: Model,
    gpu: Gpu = None,
    batch: Batch = None,
    context: Context = None,
    memory_fraction: Fraction = None,
    source_len: Source = None,
    gpus: Annotated[
        str | None, typer.Option("--gpus", metavar="N", help="Every layout on N GPUs, instead of --tp and the like.")
    ] = None,
    check: Check = False,
    *,
    edits: Chosen,
    meshes: Meshes,
    engine: EngineChoice,
    out: Output,
) -> int:
    """The largest batch at a context, and the largest context at a batch, that fit; and by how much the next one misses.

    With --engine: what the engine allocates, term by term, and the tokens that its start-up log would print. With --check
    the exit code is 1 where something does not fit.

    roofline fit llama-2-13b --gpu h100-sxm --context 1024 --memory-fraction 0.9
    """
    import roofline.cli.points as what
    from roofline.cli.verdict import assumptions, not_modelled, own_notes
    from roofline.configs.load import load_model

    assumes = [] if batch else ["batch 1 (--batch sets it)"]
    assumes += [] if context else [f"context {DEFAULT_CONTEXT:,} (--context sets it)"]
    question = what.Question(
        accelerators(gpu),
        sweeps.whole_numbers(batch or ["1"], "batch"),
        sweeps.whole_numbers(context or [str(DEFAULT_CONTEXT)], "context", least=0),
        fractions=sweeps.fractions(memory_fraction or ["1"], "memory-fraction"),
        source=sweeps.whole_numbers([source_len], "source-len")[0] if source_len else None,
        meshes=meshes.all(),
    )
    loaded = load_model(model)
    if gpus:
        question = replace(question, meshes=_layouts(loaded, question, gpus, meshes))
    question.check_size(1 + edits.count)
    if engine.engine is not None:
        from roofline.cli.engine_fit import answer

        shares = sweeps.fractions(memory_fraction, "memory-fraction") if memory_fraction else [None]
        return answer(what.variants(loaded, edits), question, engine, shares, check, out)
    compared = what.variants(loaded, edits)
    points = [point for variant in compared for point in question.points(variant)]
    answers = _answers(question, points)
    given = question.source
    own = own_notes(points, assumes, memory_only=True, source=given)
    out.note(*_nowhere(answers), *_verdicts(answers, out), "")
    out.records((_record(answer, *notes) for answer, notes in zip(answers, own, strict=True)), lambda: _cells(answers))
    out.note("", *(f"assumes: {line}" for line in assumptions(points, assumes, memory_only=True, source=given)))
    out.note(f"not modelled: {', '.join(not_modelled(loaded, memory_only=True))}")
    counted = what.judged(compared, edits)
    return 1 if check and not all(point.fits for point in points if point.variant in counted) else 0
