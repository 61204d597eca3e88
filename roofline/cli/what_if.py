"""``roofline what-if``: time, throughput and memory of decode steps, and of whole generations, over any sweep."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from roofline.cli import sweeps
from roofline.cli.bundles import bundled
from roofline.cli.edit_options import EDIT_OPTIONS, Chosen
from roofline.cli.mesh_options import MESH_OPTIONS, Meshes
from roofline.cli.options import (
    SWEEP,
    Batch,
    Check,
    Context,
    Convention,
    Fraction,
    Gpu,
    Model,
    Source,
    accelerators,
    complete_engines,
)
from roofline.cli.output import OUTPUT, Cells, Output
from roofline.errors import InputError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from roofline.cli.points import Point, Question

DEFAULT_CONTEXT = 4096
FORMAT_OPTIONS = {"dtype": "dtype", "kv-dtype": "kv_dtype"}
BOUNDS = "times are the datasheet's bounds, and a real server is slower (--engine vllm adds what one is expected to take)"
MOST_CHANGES = 4
"""Combinations of edits whose changes are told in words."""


def _contexts(given: list[str] | None, inputs: Sequence[Any], outputs: Sequence[Any]) -> tuple[list[int | None], list[str]]:
    """The contexts, and what was assumed where none was given."""
    if given:
        return list(sweeps.whole_numbers(given, "context", least=0)), []
    if inputs == [None]:
        return [DEFAULT_CONTEXT], [f"context {DEFAULT_CONTEXT:,} (--context sets it)"]
    length = "input" if outputs == [None] else "input and output"
    return [None], [f"decode steps at the full length of {length} (--context sets another)"]


def _chunk(text: str | None, isl: list[str] | None, no_cache: bool) -> int | None:
    """Tokens of a prefill step, as given."""
    if text is None:
        return None
    if not isl:
        raise InputError("prefill-chunk: chunks cut a prompt; add --isl")
    if no_cache:
        raise InputError("prefill-chunk: a naive generation keeps no cache that a chunk could follow; leave one of them out")
    values = sweeps.whole_numbers([text], "prefill-chunk")
    if len(values) > 1:
        raise InputError(f"prefill-chunk: {text!r} has several values; give one")
    return values[0]


def _typed(given: dict[str, list[str] | None], edits: Chosen, meshes: Meshes) -> dict[str, list[str]]:
    """Option -> what it was given, for options that a fix may replace."""
    found = {option: texts for option, texts in given.items() if texts}
    found |= {option: [",".join(edits.values[name])] for option, name in FORMAT_OPTIONS.items() if name in edits.values}
    return found | {axis: [",".join(map(str, sizes))] for axis, sizes in meshes.sizes.items()}


def _lengths(isl: list[str] | None, osl: list[str] | None, no_cache: bool) -> tuple[list[int | None], list[int | None]]:
    if osl and not isl:
        raise InputError("osl: an output length needs an input length; add --isl")
    if no_cache and not (isl and osl):
        raise InputError("no-cache: the naive generation compares whole generations; add --isl and --osl")
    inputs: list[int | None] = [*sweeps.whole_numbers(isl, "isl")] if isl else [None]
    outputs: list[int | None] = [*sweeps.whole_numbers(osl, "osl")] if osl else [None]
    return inputs, outputs


Column = tuple[str, "Callable[[Point], Any]"]


def _columns(points: Sequence[Point]) -> list[Column]:
    """Headers, and what each shows of a point."""
    from roofline.units import GIB, count

    def gib(value: Any) -> str:
        return f"{float(value) / GIB:,.2f}"

    def ms(seconds: float | None) -> str:
        return "-" if seconds is None else count(float(seconds) * 1e3)

    first = points[0]
    optional: list[tuple[bool, Column]] = [
        (any(p.variant.flags for p in points), ("variant", lambda p: p.variant.label)),
        (len({p.accelerator.id for p in points}) > 1, ("gpu", lambda p: p.accelerator.id)),
        (any(p.mesh for p in points), ("mesh", lambda p: p.mesh.flags if p.mesh else "")),
        (len({p.fraction for p in points}) > 1, ("memory\nfraction", lambda p: f"{float(p.fraction):g}")),
        (first.input_tokens is not None, ("input\ntokens", lambda p: count(p.input_tokens))),
        (first.output_tokens is not None, ("output\ntokens", lambda p: count(p.output_tokens))),
    ]
    columns: list[Column] = [
        ("batch", lambda p: count(p.step.batch)),
        ("context\ntokens", lambda p: count(p.context)),
        ("weights\nGiB", lambda p: gib(p.step.memory.weight_bytes)),
        ("KV\nGiB", lambda p: gib(p.step.memory.kv_bytes)),
        ("required\nGiB", lambda p: gib(p.step.memory.required_bytes)),
        ("TPOT\nbound ms", lambda p: ms(p.step.bound_s)),
        ("TPOT\nserial ms", lambda p: ms(p.step.serial_s)),
        *([("TPOT\nexpected ms", lambda p: ms(p.expected.seconds if p.expected else None))] if first.expected else []),
        ("output\ntok/s", lambda p: count(float(p.step.output_tok_per_s))),
        ("tok/s\nper user", lambda p: count(float(p.step.output_tok_per_s_per_user))),
        ("bound by", lambda p: p.step.bound_by),
        ("fits", lambda p: "yes" if p.fits else "no"),
    ]
    behind: list[tuple[bool, Column]] = [
        (first.first is not None, ("prefill\nGiB", lambda p: gib(p.first.memory.required_bytes) if p.first else "-")),
        (first.first is not None, ("TTFT\nbound ms", lambda p: ms(p.first.bound_s if p.first else None))),
        (first.generation is not None, ("E2E\nbound s", lambda p: count(p.generation.e2e_bound_s) if p.generation else "-")),
        (
            first.generation is not None,
            ("E2E output\ntok/s", lambda p: count(p.generation.output_tok_per_s) if p.generation else "-"),
        ),
    ]
    return [c for shown, c in optional if shown] + columns + [c for shown, c in behind if shown]


def _cells(points: Sequence[Point]) -> Cells:
    columns = _columns(points)
    return [header for header, _ in columns], [[show(point) for _, show in columns] for point in points]


def _before(question: Question, points: Sequence[Point], out: Output) -> list[str]:
    """Title, verdicts and what edits change."""
    from roofline.cli.verdict import change_line, headline, place

    first = points[0]
    gpus = ", ".join(dict.fromkeys(place(p) for p in points))
    lecture = ", lecture's convention" if question.convention == "lecture" else ""
    lines = [out.paint(f"{first.step.model} on {gpus}: decode steps{lecture}", "bold"), *headline(question, points, out)]
    edited = {p.variant.label: p for p in reversed(points) if p.variant.flags}
    shown = list(reversed(edited.values()))[:MOST_CHANGES]
    lines += [change_line(question, first, point) for point in shown]
    return [*lines, ""]


def _warn(assumes: Sequence[str], out: Output) -> None:
    """Says on stderr, too, that the weights in a folder are not those that its config, and so the answer, describes."""
    if assumes:
        from roofline.checkpoints.agreement import DIFFERS

        for line in assumes:
            if line.startswith(DIFFERS):
                out.warn(line)


def _after(points: Sequence[Point], assumes: list[str], fix: list[str]) -> list[str]:
    from roofline.cli.verdict import not_modelled

    lines = ["", *(f"assumes: {line}" for line in assumes)]
    lines.append(f"not modelled: {', '.join(not_modelled(points[0].variant.model, points))}")
    if fix:
        lines.append(f"fix: {' or '.join(fix)}")
    return lines


def _with_expected(question: Question, points: list[Point], engine: str | None, out: Output) -> tuple[list[Point], list[str]]:
    """(points with expected times, what to say of them); a table shows them where an engine was named."""
    if engine is None and out.format in ("table", "md"):
        return points, [BOUNDS] if question.convention == "exact" else []
    from dataclasses import replace

    from roofline.cli.expected_times import DEFAULT_ENGINE, expected, notes
    from roofline.engines.profile import load_engine

    name = load_engine(engine).id if engine else DEFAULT_ENGINE
    found = list(out.watch(expected(question, points, name), f"expecting {name}", len(points)))
    return [replace(p, expected=one) for p, one in zip(points, found, strict=True)], list(notes(found)) if engine else []


@bundled(edits=EDIT_OPTIONS, meshes=MESH_OPTIONS, out=OUTPUT)
def what_if(
    model: Model,
    gpu: Gpu = None,
    batch: Batch = None,
    context: Context = None,
    isl: Annotated[
        list[str] | None,
        typer.Option("--isl", "--input-len", metavar=SWEEP, help="Prompt tokens: adds the bound of the time to first token."),
    ] = None,
    osl: Annotated[
        list[str] | None,
        typer.Option("--osl", "--output-len", metavar=SWEEP, help="Output tokens: adds whole generations (with --isl)."),
    ] = None,
    convention: Convention = "exact",
    memory_fraction: Fraction = None,
    source_len: Source = None,
    prefill_chunk: Annotated[
        str | None,
        typer.Option("--prefill-chunk", metavar="N", help="Tokens of a prompt per prefill step (with --isl).  [default: all]"),
    ] = None,
    no_cache: Annotated[
        bool, typer.Option("--no-cache", help="Compare with naive generation that re-runs the whole sequence per token.")
    ] = False,
    engine: Annotated[
        str | None,
        typer.Option(
            "--engine",
            metavar="NAME",
            help="Adds what a step takes under vllm, trtllm, sglang or llamacpp.  [default: none, datasheet bounds alone]",
            autocompletion=complete_engines,
        ),
    ] = None,
    check: Check = False,
    *,
    edits: Chosen,
    meshes: Meshes,
    out: Output,
) -> int:
    """Time, throughput and memory of a model on a GPU, over any batch, context and edit.

    Numbers may be lists (1,16,64) or sweeps (1:512:x2, 1024:8192:+1024, log:1:512:10); every combination is a row. Edits
    (--kv-heads 8, --dtype fp8, ...) are shown against the model as it is.

    roofline what-if llama-2-13b --gpu h100-sxm --batch 1:512:x2 --context 1024
    """
    import roofline.cli.points as answers
    from roofline.cli.verdict import assumptions, own_notes
    from roofline.configs.load import load_model

    inputs, outputs = _lengths(isl, osl, no_cache)
    contexts, assumes = _contexts(context, inputs, outputs)
    if not batch:
        assumes.insert(0, "batch 1 (--batch sets it)")
    question = answers.Question(
        accelerators(gpu),
        sweeps.whole_numbers(batch or ["1"], "batch"),
        contexts,
        inputs,
        outputs,
        sweeps.fractions(memory_fraction or ["1"], "memory-fraction"),
        convention,
        sweeps.whole_numbers([source_len], "source-len")[0] if source_len else None,
        meshes.all(),
        _chunk(prefill_chunk, isl, no_cache),
    )
    size = question.check_size(1 + max(edits.count, int(no_cache)))
    loaded = load_model(model)
    _warn(loaded.assumes, out)
    compared = answers.variants(loaded, edits, cached=not no_cache)
    answered = (point for variant in compared for point in question.points(variant))
    points = list(out.watch(answered, "answering", size))
    if convention == "lecture":
        assumes.append("all parameters but norms, and the KV read, over the bandwidth; nothing else takes time")
    points, told = _with_expected(question, points, engine, out)
    assumes += told
    given = question.source
    out.note(*_before(question, points, out))
    out.records(
        (point.record(*notes) for point, notes in zip(points, own_notes(points, assumes, source=given), strict=True)),
        lambda: _cells(points),
    )
    counted = answers.judged(compared, edits)
    missing = any(not point.fits for point in points if point.variant in counted)
    fix = []
    if missing and not out.silent:
        from roofline.cli.fixes import Asked, fixes

        typed = _typed({"batch": batch, "context": context, "isl": isl, "gpu": gpu}, edits, meshes)
        typed |= {"prefill-chunk": [prefill_chunk]} if prefill_chunk else {}
        fix = fixes(Asked(question, loaded, edits, not no_cache, typed), counted)
    out.note(*_after(points, assumptions(points, assumes, source=given), fix))
    return 1 if check and missing else 0
