"""The figures of ``roofline plot``: each reads its options, draws with ``roofline.plots`` and writes a file."""

from __future__ import annotations

import inspect
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated

import typer

from roofline.cli import sweeps
from roofline.cli.bundles import Bundle, bundled
from roofline.cli.edit_options import EDIT_OPTIONS, Chosen
from roofline.cli.mesh_options import MESH_OPTIONS, Meshes
from roofline.cli.options import SWEEP, Batch, Context, Fraction, Gpu, Source, accelerators
from roofline.cli.picture import (
    PICTURE,
    Engine,
    Measured,
    Models,
    Picture,
    deployments,
    edited,
    notes,
    number,
    one,
    source_length,
)
from roofline.cli.picture import measured as measured_points
from roofline.errors import InputError, suggest

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from matplotlib.figure import Figure

    from roofline.inference import Deployment
    from roofline.plots.roofline import Point

BATCHES, CONTEXT, PROMPT, CONTEXTS, STEPS = "1:512:x2", "4096", "1024", "1Ki:1Mi:x2", "1,8,64,256"
PHASES = ("both", "decode", "prefill")
ATTAINED = (
    "solid lines: what the fitted products of two 8,192-square matrices and of a 16,384-square matrix with a vector reach; "
    "kernels of other shapes, or of another library, may lie somewhat above"
)
SUMMED = "totals are the sums of the kernels; a server's step has the host's time and what lies between kernels on top"

Isl = Annotated[
    list[str] | None, typer.Option("--isl", "--input-len", metavar="N", help="New tokens of a prefill.  [default: 1024]")
]
RangeOfBatches = Annotated[
    list[str] | None, typer.Option("--batch", "-b", metavar=SWEEP, help=f"Sequences in the batch.  [default: {BATCHES}]")
]
OneContext = Annotated[
    list[str] | None, typer.Option("--context", "-c", metavar="N", help=f"Tokens cached per sequence.  [default: {CONTEXT}]")
]


def _phase(text: str, known: tuple[str, ...]) -> str:
    if text not in known:
        raise InputError(f"phase: {text!r} is not one of {', '.join(known)}.{suggest(text, known)}")
    return text


def _source(cases: Mapping[str, Deployment], source_len: str | None) -> int:
    return source_length([deployment.model for deployment in cases.values()], source_len)


@bundled(edits=EDIT_OPTIONS, meshes=MESH_OPTIONS, picture=PICTURE)
def roofline(
    models: Models,
    gpu: Gpu = None,
    batch: Batch = None,
    context: OneContext = None,
    isl: Isl = None,
    phase: Annotated[str, typer.Option("--phase", metavar="PHASE", help="both, decode or prefill.")] = "both",
    source_len: Source = None,
    engine: Engine = "vllm",
    *,
    edits: Chosen,
    meshes: Meshes,
    picture: Picture,
) -> int:
    """Kernels of a decode step (hollow) and of a prefill (filled) under the roofs of a GPU, with their share of the roof.

    One model at one batch shows its kernels; several models or batches show whole steps. Dashed roofs are the datasheet's,
    solid ones what measured kernels attain.

    roofline plot roofline llama-3.1-8b --gpu h100-sxm --batch 32 --context 8192 --out roofline.svg
    """
    from roofline.plots.curves import place_of
    from roofline.plots.expected import expected_of
    from roofline.plots.roofline import kernel_points, roofline_plot, step_point
    from roofline.plots.roofs import attained

    chosen = _phase(phase, PHASES)
    phases = ("prefill", "decode") if chosen == "both" else (chosen,)
    cases = deployments(models, edits, gpu, meshes)
    chips = {deployment.accelerator.id: deployment.accelerator for deployment in cases.values()}
    if len(chips) > 1:
        raise InputError("gpu: a roofline shows one GPU; draw one figure for each")
    batches, cached, new = (
        sweeps.whole_numbers(batch or ["1"], "batch"),
        one(context, "context", CONTEXT, 0),
        one(isl, "isl", PROMPT),
    )
    source = _source(cases, source_len)
    points: list[Point] = []
    lost: list[str] = []
    whole = len(cases) > 1 or len(batches) > 1
    for order, (label, deployment) in enumerate(cases.items()):
        away = source if deployment.model.encoder is not None else 0
        known = expected_of(deployment, engine)
        for size in batches:
            for name in phases:
                decoding = name == "decode"
                step = deployment.decode(size, cached, source=away) if decoding else deployment.prefill(size, new, source=away)
                several = label if len(cases) > 1 else ""
                if not step.memory.fits:
                    lost.append(" ".join(filter(None, [several, name, f"of batch {size:,}" if len(batches) > 1 else ""])))
                if not whole:
                    points += kernel_points(deployment, size, cached, phase=name, new_tokens=new, source=away, engine=engine)
                    continue
                name_of = f"batch {size:,}" if len(batches) > 1 else label
                expected = known.one_decode(deployment, size, cached) if decoding else known.one_prefill(deployment, size, new)
                points.append(step_point(step, name_of, order, expected, several))
    sizes = f"batch {', '.join(f'{size:,}' for size in batches[:8])}"
    told = {"decode": f"decode at context {cached:,}", "prefill": f"prefill of {new:,} tokens"}
    meant = "whole steps" if whole else next(iter(cases))
    how = {True: f"at expected times ({engine})", False: "from no overlap to the bound"}
    share = ", or ".join(words for some, words in how.items() if any(point.expected is some for point in points))
    text = f"{meant}: {' and '.join(told[name] for name in phases)}, {sizes}; % of the datasheet roof {share}"
    text += f"; does not fit: {', '.join(lost)}" if lost else ""
    if not picture.title:
        places = dict.fromkeys(place_of(deployment) for deployment in cases.values())
        picture = replace(picture, title=f"{', '.join(cases)} on {', '.join(places)}")
    chip = next(iter(chips.values()))
    figure = roofline_plot(chip, points, note=text, **picture.options)
    roofs = attained(chip)
    line = [ATTAINED] if roofs and "fitted" in roofs.source else []
    return picture.write(figure, [*line, *notes(cases, engine, batches if whole else ())])


@dataclass(frozen=True)
class Curves:
    """What the curves of a figure against the batch are of."""

    models: list[str]
    gpu: list[str] | None
    batch: list[str] | None
    context: list[str] | None
    memory_fraction: list[str] | None
    measured: str | None
    source_len: str | None
    engine: str

    def draw(self, with_: Callable[..., Figure], edits: Chosen, meshes: Meshes, picture: Picture) -> int:
        """Draws the curves and writes the figure."""
        cases = deployments(self.models, edits, self.gpu, meshes, self.memory_fraction)
        source = _source(cases, self.source_len)
        figure = with_(
            cases, sweeps.whole_numbers(self.batch or [BATCHES], "batch"), one(self.context, "context", CONTEXT, 0),
            measured=measured_points(self.measured, list(cases)), source=source, engine=self.engine, **picture.options,
        )  # fmt: skip
        return picture.write(figure, notes(cases, self.engine, sweeps.whole_numbers(self.batch or [BATCHES], "batch")))


CURVES = Bundle(
    {
        "models": (Models, inspect.Parameter.empty),
        "gpu": (Gpu, None),
        "batch": (RangeOfBatches, None),
        "context": (OneContext, None),
        "memory_fraction": (Fraction, None),
        "measured": (Measured, None),
        "source_len": (Source, None),
        "engine": (Engine, "vllm"),
    },
    Curves,
)


@bundled(curves=CURVES, edits=EDIT_OPTIONS, meshes=MESH_OPTIONS, picture=PICTURE)
def latency(*, curves: Curves, edits: Chosen, meshes: Meshes, picture: Picture) -> int:
    """Time per output token against the batch: a band from perfect overlap to none, and where a batch does not fit.

    Edits behind a name change that model, those given as options all of them; several GPUs or meshes are a curve each.

    roofline plot latency llama-2-13b llama-2-13b:kv-heads=8 --gpu h100-sxm --context 1024 --out latency.svg
    """
    from roofline.plots.latency import latency_plot

    return curves.draw(latency_plot, edits, meshes, picture)


@bundled(curves=CURVES, edits=EDIT_OPTIONS, meshes=MESH_OPTIONS, picture=PICTURE)
def throughput(*, curves: Curves, edits: Chosen, meshes: Meshes, picture: Picture) -> int:
    """Output tokens per second of the whole batch against the batch; otherwise as roofline plot latency.

    roofline plot throughput llama-3.1-8b --gpu h100-sxm,h200-sxm --context 8192 --out throughput.svg
    """
    from roofline.plots.latency import throughput_plot

    return curves.draw(throughput_plot, edits, meshes, picture)


@bundled(edits=EDIT_OPTIONS, meshes=MESH_OPTIONS, picture=PICTURE)
def pareto(
    models: Models,
    gpu: Gpu = None,
    batch: RangeOfBatches = None,
    context: OneContext = None,
    memory_fraction: Fraction = None,
    source_len: Source = None,
    engine: Engine = "vllm",
    *,
    edits: Chosen,
    meshes: Meshes,
    picture: Picture,
) -> int:
    """Tokens per second of one user against those of one GPU: the frontier of each model and GPU over batches and meshes.

    roofline plot pareto llama-3.1-70b --gpu h100-sxm --tp 2,4,8 --context 8192 --out pareto.svg
    """
    from roofline.plots.pareto import pareto_plot

    groups: dict[str, list[Deployment]] = {}
    cases = deployments(models, edits, gpu, meshes, memory_fraction)
    for label, deployment in cases.items():
        mesh = getattr(deployment, "mesh", None)
        name = label.removesuffix(f" {mesh.flags or '--tp 1'}") if mesh is not None else label
        groups.setdefault(name, []).append(deployment)
    source = _source(cases, source_len)
    figure = pareto_plot(
        groups, sweeps.whole_numbers(batch or [BATCHES], "batch"), one(context, "context", CONTEXT, 0), source=source,
        engine=engine, **picture.options,
    )  # fmt: skip
    return picture.write(figure, notes(cases, engine, sweeps.whole_numbers(batch or [BATCHES], "batch")))


@bundled(edits=EDIT_OPTIONS, meshes=MESH_OPTIONS, picture=PICTURE)
def memory(
    models: Models,
    gpu: Gpu = None,
    batch: Annotated[list[str] | None, typer.Option("--batch", "-b", metavar="N", help="Sequences.  [default: 1]")] = None,
    context: OneContext = None,
    memory_fraction: Fraction = None,
    source_len: Source = None,
    *,
    edits: Chosen,
    meshes: Meshes,
    picture: Picture,
) -> int:
    """Weights, state and workspace of each GPU, stacked, against its memory; pipeline stages are bars of their own.

    roofline plot memory llama-3.1-70b --gpu h100-sxm --tp 2,4,8 --batch 32 --context 8192 --out memory.svg
    """
    from roofline.plots.memory import memory_plot

    cases = deployments(models, edits, gpu, meshes, memory_fraction)
    source = _source(cases, source_len)
    figure = memory_plot(cases, one(batch, "batch", "1"), one(context, "context", CONTEXT, 0), source=source, **picture.options)
    return picture.write(figure, notes(cases))


@bundled(edits=EDIT_OPTIONS, picture=PICTURE)
def kv(
    models: Models,
    gpu: Gpu = None,
    context: Annotated[
        list[str] | None, typer.Option("--contexts", "--context", "-c", metavar=SWEEP, help=f"Tokens.  [default: {CONTEXTS}]")
    ] = None,
    source_len: Source = None,
    *,
    edits: Chosen,
    picture: Picture,
) -> int:
    """Bytes of KV cache and fixed state of one sequence against its length; with --gpu, against the memory of one.

    roofline plot kv llama-2-13b llama-3.1-8b deepseek-v3 mamba2-2.7b --gpu h100-sxm --out kv.svg
    """
    from roofline.plots.kv import kv_plot

    found = edited(models, edits)
    chips = accelerators(gpu) if gpu else [None]
    if len(chips) > 1:
        raise InputError("gpu: this figure shows the memory of one GPU")
    lengths = sweeps.whole_numbers(context or [CONTEXTS], "context")
    figure = kv_plot(found, lengths, accelerator=chips[0], source=source_length(found.values(), source_len), **picture.options)
    return picture.write(figure, notes(found))


@bundled(edits=EDIT_OPTIONS, meshes=MESH_OPTIONS, picture=PICTURE)
def breakdown(
    models: Models,
    gpu: Gpu = None,
    batch: Annotated[
        list[str] | None, typer.Option("--batch", "-b", metavar=SWEEP, help=f"Sequences, a bar each.  [default: {STEPS}]")
    ] = None,
    context: Context = None,
    isl: Isl = None,
    phase: Annotated[str, typer.Option("--phase", metavar="PHASE", help="decode or prefill.")] = "decode",
    source_len: Source = None,
    engine: Engine = "vllm",
    *,
    edits: Chosen,
    meshes: Meshes,
    picture: Picture,
) -> int:
    """Where the time of a step goes: attention, projections, feed-forward, experts, exchanges, as shares.

    roofline plot breakdown deepseek-v3 --gpu b200-sxm --batch 1,8,64,512 --context 32768 --out breakdown.svg
    """
    from roofline.plots.breakdown import breakdown_plot

    cases = deployments(models, edits, gpu, meshes)
    chosen = _phase(phase, PHASES[1:])
    if isl and chosen == "decode":
        raise InputError("isl: a decode step has one new token per sequence; add --phase prefill")
    source = _source(cases, source_len)
    figure = breakdown_plot(
        cases, sweeps.whole_numbers(batch or [STEPS], "batch"), one(context, "context", CONTEXT, 0), phase=chosen,
        new_tokens=one(isl, "isl", PROMPT), source=source, engine=engine, **picture.options,
    )  # fmt: skip
    step = [f"{SUMMED} (roofline what-if --engine {engine})"] if engine != "none" else []
    return picture.write(figure, [*step, *notes(cases, engine)])


@bundled(picture=PICTURE)
def validation(
    gpu: Gpu = None,
    cls: Annotated[
        list[str] | None, typer.Option("--class", metavar="NAME|LIST", help="Classes of kernels, a panel each.  [default: all]")
    ] = None,
    *,
    picture: Picture,
) -> int:
    """Predicted against measured times of kernels that others measured, with bands of 10 and 25 % error (extra: silicon).

    roofline plot validation --gpu h100-sxm --class gemm,attention_decode --out validation.png
    """
    from roofline.plots.validation import validation_plot
    from roofline.validate.plots import silicon, title_of

    chips = accelerators(gpu)
    if len(chips) > 1:
        raise InputError("gpu: this figure takes one GPU")
    series = silicon(chips[0].id, sweeps.names(cls, "class") if cls else None)
    options = {**picture.options, "title": picture.title or title_of(chips[0].id)}
    return picture.write(validation_plot(series, **options))


@bundled(picture=PICTURE)
def timeline(
    trace: Annotated[str, typer.Argument(metavar="TRACE", help="A trace in Chrome's event format (JSON).", show_default=False)],
    start: Annotated[str | None, typer.Option("--start", metavar="SECONDS", help="Show from here on.  [default: all]")] = None,
    end: Annotated[str | None, typer.Option("--end", metavar="SECONDS", help="Show up to here.  [default: all]")] = None,
    *,
    picture: Picture,
) -> int:
    """Requests in queue, prefill and decode, the steps of each replica and counters over time, from a trace file.

    roofline plot timeline trace.json --start 10 --end 20 --out timeline.png
    """
    from roofline.plots.timeline import read_trace, timeline_plot

    begin, stop = (number(text, name) if text else None for text, name in ((start, "start"), (end, "end")))
    return picture.write(timeline_plot(read_trace(trace), start=begin, end=stop, **picture.options))
