"""``roofline compare``: models side by side."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from roofline.cli import sweeps
from roofline.cli.bundles import bundled
from roofline.cli.edit_options import EDIT_OPTIONS, Chosen
from roofline.cli.options import SWEEP, Batch, Fraction, Gpu, Source, accelerators, complete_models
from roofline.cli.output import OUTPUT, Cells, Output
from roofline.errors import InputError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from roofline.cli.columns import Column, Place

DEFAULT_CONTEXTS = (8192, 32768, 131072)
MOST_CELLS = 20_000

Row = tuple[str, "Callable[[Column, Place], Any]", "Callable[[Any], str]"]


def _size_rows() -> list[Row]:
    """What a model is, whatever the point."""
    from roofline.cli.points import kv_bytes_per_token
    from roofline.units import capacity, count

    return [
        ("parameters", lambda c, p: c.variant.model.params, lambda n: f"{n / 1e9:,.3f} B"),
        ("active per token", lambda c, p: c.variant.model.active_params, lambda n: f"{n / 1e9:,.3f} B"),
        ("weights", lambda c, p: c.variant.model.weight_bytes, capacity),
        ("KV bytes per token", lambda c, p: kv_bytes_per_token(c.variant.model), lambda n: count(int(n) if n == int(n) else n)),
        ("fixed state per sequence", lambda c, p: c.variant.model.state_bytes_per_sequence, _mebibytes),
    ]


def _mebibytes(number: Any) -> str:
    return f"{float(number) / 2**20:,.2f} MiB" if number else "-"


def _or_dash(value: float | None) -> str:
    from roofline.units import count

    return "-" if value is None else count(value)


def _context_rows(roles: Sequence[str]) -> list[Row]:
    """What depends on the context alone."""
    from roofline.cli.columns import state_bytes
    from roofline.units import capacity, flop

    def amount(role: str) -> Callable[[Column, Place], Any]:
        return lambda column, place: place.flops.get(role, 0)

    def shown(number: Any) -> str:
        return flop(number) if number else "-"

    return [
        ("KV and state per sequence", state_bytes, capacity),
        *((f"FLOP per token, {role}", amount(role), shown) for role in roles),
        ("FLOP per token", lambda c, p: sum(p.flops.values()), flop),
    ]


def _gpu_rows() -> list[Row]:
    """What depends on context and GPU."""
    from roofline.units import count

    return [
        ("largest batch", lambda c, p: p.largest, lambda n: "no limit" if n is None else count(n)),
        ("tok/s there", lambda c, p: p.best.step.output_tok_per_s if p.best else None, _or_dash),
    ]


def _batch_rows() -> list[Row]:
    """What depends on context, GPU and batch."""
    from roofline.units import count, latency

    return [
        ("FLOP/B", lambda c, p: float(p.point.step.cost.intensity), count),
        ("TPOT bound", lambda c, p: p.point.step.bound_s, latency),
        ("tok/s", lambda c, p: p.point.step.output_tok_per_s if p.point.step.memory.fits else None, _or_dash),
    ]


def _where(place: Place, kind: str, several: dict[str, bool]) -> tuple[str, ...]:
    """The parts of a row's label that say where it holds."""
    point = place.point
    parts = [f"at {point.context:,}"] if kind != "size" else []
    if kind in ("gpu", "batch"):
        parts += [f"on {point.accelerator.id}"] if several["gpu"] else []
        parts += [f"x {float(point.fraction):g}"] if several["fraction"] else []
    return tuple([*parts, f"batch {point.step.batch:,}"] if kind == "batch" else parts)


def _lines(columns: Sequence[Column]) -> Iterator[list[str]]:
    """The rows of the transposed table, quantity by quantity; those that are the same at every place stand once."""
    from roofline.breakdown import ROLES

    places = [column.places for column in columns]
    present = {role for column in places for place in column for role in place.flops}
    several = {
        "gpu": len({place.point.accelerator.id for place in places[0]}) > 1,
        "fraction": len({place.point.fraction for place in places[0]}) > 1,
    }
    roles = [role for role in ROLES if role in present]
    for kind, rows in (("size", _size_rows()), ("context", _context_rows(roles)), ("gpu", _gpu_rows()), ("batch", _batch_rows())):
        for label, value, show in rows:
            found: dict[tuple[str, ...], list[Any]] = {}
            for number, place in enumerate(places[0]):
                where = _where(place, kind, several)
                found.setdefault(where, [value(c, p[number]) for c, p in zip(columns, places, strict=True)])
            same = kind == "context" and len({tuple(values) for values in found.values()}) == 1
            for where, values in found.items():
                yield [" ".join((label,) if same else (label, *where)), *(show(entry) for entry in values)]
                if same:
                    break


def _cells(columns: Sequence[Column]) -> Cells:
    headers = ["", *("\n".join((c.variant.model.name, *c.variant.flags)) for c in columns)]
    return headers, list(_lines(columns))


def _headline(columns: Sequence[Column]) -> Iterator[str]:
    """Who is fastest at its largest batch, at the longest context on each GPU."""
    longest = max(place.point.context for place in columns[0].places)
    for number, first in enumerate(columns[0].places):
        point = first.point
        if point.context != longest or point.step.batch != columns[0].question.batches[0]:
            continue
        speeds = {c.label: (p.best.step.output_tok_per_s, p.largest) for c in columns if (p := c.places[number]).best}
        where = f"at context {point.context:,} on {point.accelerator.id}"
        if not speeds:
            yield f"{where}: none of them fits"
            continue
        best = max(speeds, key=lambda label: speeds[label][0])
        others = [f"{label} {speed / speeds[best][0]:,.2f} x" for label, (speed, _) in speeds.items() if label != best]
        lost = [f"{c.label} does not fit" for c in columns if c.places[number].largest == 0]
        most = f"most tok/s: {best}, {speeds[best][0]:,.0f} at batch {speeds[best][1]:,}"
        yield f"{where}, {'; '.join([most, *([', '.join(others)] if others else []), *lost])}"


@bundled(edits=EDIT_OPTIONS, out=OUTPUT)
def compare(
    models: Annotated[
        list[str],
        typer.Argument(
            metavar="MODEL...",
            help="Catalogue names or paths, with edits of their own: llama-3.1-8b:kv-heads=2.",
            show_default=False,
            autocompletion=complete_models,
        ),
    ],
    gpu: Gpu = None,
    contexts: Annotated[
        list[str] | None,
        typer.Option("--contexts", "--context", "-c", metavar=SWEEP, help="Tokens cached.  [default: 8192,32768,131072]"),
    ] = None,
    batch: Batch = None,
    memory_fraction: Fraction = None,
    source_len: Source = None,
    *,
    edits: Chosen,
    out: Output,
) -> int:
    """Models side by side: parameters, state, FLOPs by part, intensity, largest batch and tokens per second.

    Edits given as options change every model; those behind a name change that one.

    roofline compare llama-3.1-8b llama-3.1-8b:kv-heads=2 mamba2-2.7b --gpu h100-sxm
    """  # fmt: skip
    from roofline.cli.columns import columns, record
    from roofline.cli.verdict import merged, not_modelled, roofs

    sizes = sweeps.whole_numbers(contexts or [str(n) for n in DEFAULT_CONTEXTS], "contexts", least=0)
    batches = sweeps.whole_numbers(batch or ["1"], "batch")
    shares = sweeps.fractions(memory_fraction or ["1"], "memory-fraction")
    chips = accelerators(gpu)
    source = sweeps.whole_numbers([source_len], "source-len")[0] if source_len else None
    cells = len(models) * max(edits.count, 1) * len(sizes) * len(batches) * len(shares) * len(chips)
    if cells > MOST_CELLS:
        raise InputError(f"sweep: {cells:,} columns and points are more than {MOST_CELLS:,}; take larger steps")
    shown = columns(models, edits, chips, batches, sizes, shares, source)
    points = [place.point for column in shown for place in column.places]
    extra = [*([] if batch else ["batch 1 (--batch sets it)"])]
    rates = "tok/s are bounds of decode steps on one device; '-' where the batch does not fit"
    assumes = [*extra, *merged([(c.label, c.notes(c.places)) for c in shown]), rates, *roofs(points)]
    gpus = ", ".join(chip.id for chip in chips)
    out.note(out.paint(f"{', '.join(c.label for c in shown)} on {gpus}", "bold"), *_headline(shown), "")
    out.records(
        (
            record(column, place, [*extra, *column.notes([place]), rates, *roofs([place.point])])
            for column in shown
            for place in column.places
        ),
        lambda: _cells(shown),
    )
    left = merged([(c.label, not_modelled(c.variant.model, points)) for c in shown])
    out.note("", *(f"assumes: {line}" for line in assumes), f"not modelled: {', '.join(left)}")
    return 0
