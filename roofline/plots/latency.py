"""Latency and throughput against the batch: the band that physics leaves, what is expected, what was measured, what fits."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from roofline.errors import InputError
from roofline.plots.curves import Cases, Curve, curve, decades, named, subtitle_of
from roofline.plots.expected import ENGINE
from roofline.plots.labels import log_axis, time_unit, tokens
from roofline.plots.style import (
    COLOURS,
    GREY,
    INK,
    LINES,
    MARKERS,
    PALE,
    drawn,
    legend,
    new_figure,
    nothing_drawn,
    subtitle,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Measured = Mapping[str, Sequence[tuple[int, float]]] | Sequence[tuple[int, float]]
"""(batch, seconds per step) as measured, by label where there are several cases."""
WIDE_RANGE = 1.5
"""Decades from which on the vertical axis is logarithmic: what is small would lie on the axis otherwise."""


@dataclass(frozen=True)
class _Quantity:
    """What the vertical axis shows: a function of batch and seconds, its axis label, and the word for the title."""

    of: Callable[[Any, Any], Any]
    name: str
    word: str


def _measured(measured: Measured | None, labels: Sequence[str]) -> dict[str, list[tuple[int, float]]]:
    if not measured:
        return {}
    found = dict(measured) if isinstance(measured, Mapping) else {labels[0]: measured}
    for label, rows in found.items():
        if label not in labels:
            raise InputError(f"measured: {label!r} is not one of the curves: {', '.join(labels)}")
        for batch, seconds in rows:
            if not (batch >= 1 and 0 < seconds < float("inf")):
                raise InputError(f"measured: batch {batch}, {seconds} s of {label!r} is not a measurement")
    return {label: list(rows) for label, rows in found.items()}


def _shade(axes: Axes, curves: Sequence[Curve], low: float, high: float) -> bool:
    """Greys batches at which no curve fits, with the reason; returns whether there are some."""
    ends = [found.last for found in curves]
    if any(end is None for end in ends):
        return False
    last = max(end for end in ends if end is not None)
    if last >= high:
        return False
    best = next(found for found in curves if found.last == last)
    start = low if last < low else min(high, last + 0.5)
    axes.axvspan(start, high, facecolor=PALE, edgecolor="#C8C8C8", hatch="////", linewidth=0, zorder=0)
    who = f"{best.label}: " if len(curves) > 1 else ""
    text = f"{who}batch {last + 1:,} does not fit:\n{best.reason}" if last else f"{who}not even batch 1 fits:\n{best.reason}"
    _, top = axes.get_ylim()
    right = start > (low * high) ** 0.5
    axes.annotate(
        text, (start, top), xytext=(-5 if right else 5, -4), textcoords="offset points", va="top",
        ha="right" if right else "left", fontsize=7.5, color=INK, zorder=7,
        bbox={"facecolor": "white", "edgecolor": "none", "alpha": 0.85, "pad": 1.5},
    ).set_in_layout(False)  # fmt: skip
    return True


def _one_curve(axes: Axes, found: Curve, number: int, quantity: _Quantity, scale: float, given: Sequence[int]) -> None:
    """The band, the line of the bound while it fits and dotted beyond, marks at the batches asked for, the expected line."""
    import numpy

    colour, line = COLOURS[number % len(COLOURS)], LINES[number % len(LINES)]
    best, worst = (quantity.of(found.batch, seconds) / scale for seconds in (found.bound, found.serial))
    axes.fill_between(found.batch, best, worst, color=colour, alpha=0.18, linewidth=0, zorder=2)
    fits = found.fits
    axes.plot(found.batch[fits], best[fits], color=colour, linestyle=line, zorder=4)
    axes.plot(found.batch[~fits], best[~fits], color=colour, linestyle=(0, (1, 2)), linewidth=1.2, zorder=4)
    marked = numpy.isin(found.batch, numpy.array(given, dtype=float))
    for mask, face in ((marked & fits, colour), (marked & ~fits, "white")):
        axes.plot(found.batch[mask], best[mask], linestyle="none", marker=MARKERS[number % len(MARKERS)], color=colour,
                  markerfacecolor=face, zorder=5)  # fmt: skip
    if found.expected is not None:
        values = quantity.of(found.batch, found.expected)[fits] / scale
        axes.plot(
            found.batch[fits], values, color=colour, linestyle="-", linewidth=3.2, alpha=0.55, zorder=3, solid_capstyle="round"
        )


def _legend(figure: Figure, curves: Sequence[Curve], measured: Mapping[str, Any], shaded: bool) -> None:
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    handles: list[Any] = []
    for number, found in enumerate(curves):
        colour = COLOURS[number % len(COLOURS)]
        limit = "" if found.last is None else f" (fits to {found.last:,})" if found.last else " (does not fit)"
        handles.append(Line2D([], [], color=colour, linestyle=LINES[number % len(LINES)], marker=MARKERS[number % len(MARKERS)],
                              label=f"{found.label}{limit}"))  # fmt: skip
    exact = [found for found in curves if found.deployment.convention == "exact"]
    if exact:
        handles.append(Patch(facecolor=GREY, alpha=0.3, label="bound to serial"))
    shown = dict.fromkeys((found.expected_label, found.expected is not None) for found in exact if found.expected_label)
    pale: dict[str, Any] = {"color": GREY, "linewidth": 3.2, "alpha": 0.55}
    handles += [Line2D([], [], label=label, **pale) if drawn_ else nothing_drawn(label) for label, drawn_ in shown]
    if measured:
        handles.append(Line2D([], [], color=INK, marker="*", markersize=9, linestyle="none", label="measured"))
    if shaded:
        handles.append(Patch(facecolor=PALE, edgecolor="#C8C8C8", hatch="////", linewidth=0, label="does not fit"))
    legend(figure, handles)


def _plot(
    cases: Cases, batches: Sequence[int], context: int, quantity: _Quantity, measured: Measured | None, source: int, engine: str,
    title: str, size: tuple[float, float] | None,
) -> Figure:  # fmt: skip
    import numpy

    deployments = named(cases)
    if len(deployments) > len(COLOURS):
        raise InputError(f"cases: {len(deployments)} curves are more than the {len(COLOURS)} that stay apart; leave some out")
    points = _measured(measured, list(deployments))
    curves = [curve(label, deployment, batches, context, source, engine) for label, deployment in deployments.items()]
    values = numpy.concatenate([quantity.of(c.batch, seconds) for c in curves for seconds in (c.bound, c.serial)]
                               + [quantity.of(c.batch, c.expected)[c.fits] for c in curves if c.expected is not None]
                               + [numpy.array([quantity.of(b, s) for b, s in rows]) for rows in points.values()])  # fmt: skip
    scale, unit = time_unit(float(values.max())) if "{unit}" in quantity.name else (1.0, "")
    shown = title or f"{quantity.word} of {', '.join(deployments)}"
    figure = new_figure("\n".join(textwrap.wrap(shown, 70)), size)
    axes = figure.add_subplot()
    low, high = min(c.batch.min() for c in curves), max(c.batch.max() for c in curves)
    axes.set_xlim(low / (high / low) ** 0.02, high * (high / low) ** 0.02)
    log_axis(axes, "x", 2, tokens)
    wide = decades(values) > WIDE_RANGE
    if wide:
        axes.set_ylim(values.min() / scale / 1.3, values.max() / scale * 2)
        log_axis(axes, "y", 10)
    else:
        axes.set_ylim(0, values.max() / scale * 1.12)
        axes.yaxis.set_major_formatter(lambda value, _: f"{value:,.10g}")
    axes.set_xlabel("Batch [sequences]")
    axes.set_ylabel(quantity.name.format(unit=unit))
    subtitle(axes, subtitle_of(curves, context))
    for number, found in enumerate(curves):
        _one_curve(axes, found, number, quantity, scale, batches)
        for batch, seconds in points.get(found.label, ()):
            axes.plot([batch], [quantity.of(batch, seconds) / scale], linestyle="none", marker="*", markersize=10, zorder=6,
                      color=COLOURS[number % len(COLOURS)], markeredgecolor=INK)  # fmt: skip
    shaded = _shade(axes, curves, *axes.get_xlim())
    _legend(figure, curves, points, shaded)
    return figure


@drawn
def latency_plot(
    cases: Cases, batches: Sequence[int], context: int, *, measured: Measured | None = None, source: int = 0,
    engine: str = ENGINE, title: str = "", size: tuple[float, float] | None = None,
) -> Figure:  # fmt: skip
    """Time per output token against the batch, for one deployment or several by label.

    The line is the bound, the band reaches up to no overlap at all; the thick pale line is the expected time of an engine
    where it is calibrated (``engine``, "none" for no such line), as far as the batch fits; stars are measured (batch,
    seconds). Where a batch does not fit the line is dotted, and where none fits the area is grey and says why.

    Raises InputError: fewer than two batches, more curves than can be told apart, measurements of an unknown label.
    """
    quantity = _Quantity(lambda batch, seconds: seconds + 0 * batch, "Time per output token [{unit}]", "Latency")
    return _plot(cases, batches, context, quantity, measured, source, engine, title, size)


@drawn
def throughput_plot(
    cases: Cases, batches: Sequence[int], context: int, *, measured: Measured | None = None, source: int = 0,
    engine: str = ENGINE, title: str = "", size: tuple[float, float] | None = None,
) -> Figure:  # fmt: skip
    """Output tokens per second of the whole batch against the batch; otherwise as ``latency_plot``."""
    quantity = _Quantity(lambda batch, seconds: batch / seconds, "Throughput [output tok/s]", "Throughput")
    return _plot(cases, batches, context, quantity, measured, source, engine, title, size)
