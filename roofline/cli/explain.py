"""``roofline explain``: one step kernel by kernel."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from roofline.cli import sweeps
from roofline.cli.bundles import bundled
from roofline.cli.edit_options import EDIT_OPTIONS, Chosen
from roofline.cli.options import Gpu, Model, Source, accelerators
from roofline.cli.output import OUTPUT, Cells, Output
from roofline.errors import InputError, suggest

if TYPE_CHECKING:
    from collections.abc import Sequence

    from roofline.inference import Part, Step

DEFAULT_CONTEXT, DEFAULT_PROMPT = 4096, 1024
PHASES = ("decode", "prefill")
TOTAL = "whole step"


def _one(texts: list[str] | None, field: str, default: int, least: int = 1) -> int:
    """The one value of an option that explains a single step."""
    values = sweeps.whole_numbers(texts, field, least) if texts else [default]
    if len(values) > 1:
        raise InputError(f"{field}: explain shows one step, so give one value; what-if takes lists")
    return values[0]


def _whole(step: Step, parts: Sequence[Part]) -> dict[str, Any]:
    """The step as the last line of its parts."""
    from roofline.memory import plain

    return {
        "component": TOTAL,
        "count": sum(part.count for part in parts),
        "matrix_flop": plain(step.cost.matrix_flops),
        "bytes_read": plain(step.cost.bytes_read),
        "bytes_written": plain(step.cost.bytes_written),
        "intensity_flop_per_byte": float(step.cost.intensity),
        "bound_s": step.bound_s,
        "serial_s": step.serial_s,
        "bound_by": step.bound_by,
        "share": 1.0,
    }


def _cells(records: Sequence[dict[str, Any]]) -> Cells:
    from roofline.cli.verdict import share
    from roofline.units import count, flop, latency, traffic

    headers = ["component", "count", "FLOP", "read", "written", "FLOP/B", "bound", "serial", "share", "bound by"]
    rows = [
        [
            r["component"], count(r["count"]), flop(r["matrix_flop"]), traffic(r["bytes_read"]),
            traffic(r["bytes_written"]), count(r["intensity_flop_per_byte"]), latency(r["bound_s"]), latency(r["serial_s"]),
            share(r["share"], 1), r["bound_by"],
        ]
        for r in records
    ]  # fmt: skip
    return headers, rows


@bundled(edits=EDIT_OPTIONS, out=OUTPUT)
def explain(
    model: Model,
    gpu: Gpu = None,
    batch: Annotated[
        list[str] | None, typer.Option("--batch", "-b", metavar="N", help="Sequences in the batch.  [default: 1]")
    ] = None,
    context: Annotated[
        list[str] | None,
        typer.Option("--context", "-c", metavar="N", help="Tokens cached per sequence (decode: 4096; prefill: 0)."),
    ] = None,
    isl: Annotated[
        list[str] | None, typer.Option("--isl", "--input-len", metavar="N", help="New tokens of a prefill.  [default: 1024]")
    ] = None,
    phase: Annotated[
        str, typer.Option("--phase", metavar="PHASE", help="decode or prefill.", autocompletion=lambda: list(PHASES))
    ] = "decode",
    source_len: Source = None,
    *,
    edits: Chosen,
    out: Output,
) -> int:
    """One step kernel by kernel: FLOPs, bytes, intensity, time, what binds.

    The bound of the whole step lets all kernels overlap, so it is below the sum of theirs; shares are of that sum.

    roofline explain llama-3.1-8b --gpu h100-sxm --batch 64 --context 4096
    """
    import roofline.cli.points as answers
    from roofline.cli.verdict import assumptions, bound_line, not_modelled
    from roofline.configs.load import load_model
    from roofline.inference import Deployment
    from roofline.units import latency
    from roofline.work import Work

    if phase not in PHASES:
        raise InputError(f"phase: {phase!r} is not one of {', '.join(PHASES)}.{suggest(phase, PHASES)}")
    if isl and phase == "decode":
        raise InputError("isl: a decode step has one new token per sequence; add --phase prefill")
    chips = accelerators(gpu)
    if len(chips) > 1 or edits.count > 1:
        raise InputError("gpu: explain shows one step, so give one GPU and one value per edit; what-if takes lists")
    variant = answers.variants(load_model(model), edits)[-1]
    rows = _one(batch, "batch", 1)
    cached = _one(context, "context", DEFAULT_CONTEXT if phase == "decode" else 0, least=0)
    given = _one([source_len], "source-len", 0) if source_len else None
    source = answers.source_length(variant.model, given)
    deployment = Deployment(variant.model, chips[0])
    if phase == "decode":
        step = deployment.decode(rows, cached, source=source)
        work = Work(rows, 1, cached, all_logits=True, source=source)
        sizes = f"a decode step of batch {rows:,} at context {cached:,}"
    else:
        new = _one(isl, "isl", DEFAULT_PROMPT)
        step = deployment.prefill(rows, new, cached=cached, source=source)
        work = Work(rows, new, cached, source=source)
        sizes = f"a prefill of batch {rows:,}, {new:,} new tokens behind {cached:,}"
    parts = deployment.explain(work, phase)
    records = [*({**part.to_dict(), "total": False} for part in parts), {**_whole(step, parts), "total": True}]
    point = answers.Point(variant, chips[0], deployment.memory_fraction, step)
    assumes, left = assumptions([point], [], source=given), not_modelled(variant.model, [point])
    about = {"model": step.model, "gpu": step.gpu, "phase": phase, "edits": list(variant.flags), "provenance": "datasheet"}
    edited = f" with {variant.label}" if variant.flags else ""
    out.note(
        out.paint(f"{step.model}{edited} on {step.gpu}: {sizes}", "bold"),
        f"{latency(step.bound_s)} bound, {latency(step.serial_s)} serial; {bound_line([point])}",
        f"intensity {float(step.cost.intensity):,.1f} FLOP/B; ridge of {step.gpu} {chips[0].ridge():,.1f} FLOP/B (bf16)",
        "",
    )
    notes = {"assumes": assumes, "not_modelled": left}
    out.records(({**about, **record, **notes} for record in records), lambda: _cells(records))
    out.note("", *(f"assumes: {line}" for line in assumes))
    out.note(f"not modelled: {', '.join(left)}")
    return 0
