"""Latency and throughput against the batch: the band that physics leaves, what is expected, what was measured, what fits."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from roofline.errors import InputError
from roofline.plots.curves import Cases, Curve, curve, decades, named, subtitle_of
from roofline.plots.expected import ENGINE
from roofline.plots.limits import ROW, SHADE, Limit, draw_limits, headroom, limits_of, row_of
from roofline.plots.style import (
    COLOURS,
    EXTRAPOLATED,
    GREY,
    INK,
    LIKELY,
    LIKELY_MARK,
    LINES,
    MARKERS,
    SIZE,
    drawn,
    legend,
    new_figure,
    nothing_drawn,
    subtitle,
)
from roofline.plots.ticks import grouped, log_axis, time_unit, tokens

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Measured = Mapping[str, Sequence[tuple[int, float]]] | Sequence[tuple[int, float]]
"""(batch, seconds per step) as measured, by label where there are several cases."""
WIDE_RANGE = 1.5
"""Decades from which on the vertical axis is logarithmic: what is small would lie on the axis otherwise."""
BEYOND: dict[str, Any] = {"linestyle": (0, (1, 2)), "linewidth": 1.2}
"""The bound where memory does not suffice."""


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


def _one_curve(axes: Axes, found: Curve, number: int, quantity: _Quantity, scale: float, given: Sequence[int]) -> None:
    """The band, the line of the bound while it fits and dotted beyond, marks at the batches asked for, the expected line."""
    import numpy

    colour, line, mark = COLOURS[number % len(COLOURS)], LINES[number % len(LINES)], MARKERS[number % len(MARKERS)]
    best, worst = (quantity.of(found.batch, seconds) / scale for seconds in (found.bound, found.serial))
    axes.fill_between(found.batch, best, worst, color=colour, alpha=0.18, linewidth=0, zorder=2)
    fits = found.fits
    axes.plot(found.batch[fits], best[fits], color=colour, linestyle=line, zorder=4)
    axes.plot(found.batch[~fits], best[~fits], color=colour, **BEYOND, zorder=4)
    marked = numpy.isin(found.batch, numpy.array(given, dtype=float))
    for mask, face in ((marked & fits, colour), (marked & ~fits, "white")):
        axes.plot(found.batch[mask], best[mask], linestyle="none", marker=mark, color=colour, markerfacecolor=face, zorder=5)
    if found.expected is not None:
        values = quantity.of(found.batch, found.expected) / scale
        beyond = fits & ~found.inside
        joined = (numpy.convolve(beyond.astype(int), [1, 1, 1], "same") > 0) & fits
        for mask, style in ((fits & found.inside, LIKELY), (joined, EXTRAPOLATED)):
            if mask.any():
                axes.plot(found.batch, numpy.where(mask, values, numpy.nan), color=colour, zorder=3, **style)
        axes.plot(found.batch[marked & fits], values[marked & fits], linestyle="none", marker=mark, color=colour,
                  markersize=LIKELY_MARK, zorder=3.5)  # fmt: skip


def _expected_entries(curves: Sequence[Curve]) -> list[Any]:
    """Legend entries of expected times, and of why there are none; with the names of the curves where these differ."""
    from matplotlib.lines import Line2D

    whose: dict[tuple[str, bool], list[str]] = {}
    for found in curves:
        if found.expected_label and found.fits.any():
            whose.setdefault((found.expected_label, found.expected is not None), []).append(found.label)
    texts = {key: text if len(whose) == 1 else f"{', '.join(names)}: {text}" for key, names in whose.items() for text in key[:1]}
    drawn_ = [found for found in curves if found.expected is not None and found.fits.any()]
    inside = {found.expected_label for found in drawn_ if (found.inside & found.fits).any()}
    beyond = {found.expected_label for found in drawn_ if (~found.inside & found.fits).any()}
    handles = []
    for key in whose:
        style = LIKELY if key[0] in inside else EXTRAPOLATED
        handles.append(Line2D([], [], color=GREY, label=texts[key], **style) if key[1] else nothing_drawn(texts[key]))
    if beyond & inside and beyond <= inside:
        handles.append(Line2D([], [], color=GREY, label="expected, beyond these batches", **EXTRAPOLATED))
    return handles


def _legend(figure: Figure, curves: Sequence[Curve], measured: Mapping[str, Any], limits: Sequence[Limit]) -> None:
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    handles: list[Any] = []
    for number, found in enumerate(curves):
        colour = COLOURS[number % len(COLOURS)]
        limit = "" if found.last is None else f" (fits to {found.last:,})" if found.last else " (does not fit)"
        bound = "" if found.deployment.convention == "lecture" else ", bound"
        line: dict[str, Any] = (
            {"linestyle": LINES[number % len(LINES)]} if found.fits.any() else {"markerfacecolor": "white", **BEYOND}
        )
        handles.append(
            Line2D([], [], color=colour, marker=MARKERS[number % len(MARKERS)], label=f"{found.label}{bound}{limit}", **line)
        )
    exact = [found for found in curves if found.deployment.convention == "exact"]
    if exact:
        handles.append(Patch(facecolor=GREY, alpha=0.3, label="bound to serial"))
    handles += _expected_entries(exact)
    if measured:
        handles.append(Line2D([], [], color=INK, marker="*", markersize=9, linestyle="none", label="measured"))
    if limits:
        handles.append(
            Line2D([], [], color=GREY, marker="o", markerfacecolor="white", label="bound where it does not fit", **BEYOND)
        )
        if len(limits) == len(curves):
            handles.append(Patch(label="does not fit" if len(curves) == 1 else "none of them fits", **SHADE))
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
    limits = limits_of(curves)
    values = numpy.concatenate([quantity.of(c.batch, seconds) for c in curves for seconds in (c.bound, c.serial)]
                               + [quantity.of(c.batch, c.expected)[c.fits] for c in curves if c.expected is not None]
                               + [numpy.array([quantity.of(b, s) for b, s in rows]) for rows in points.values()])  # fmt: skip
    scale, unit = time_unit(float(values.max())) if "{unit}" in quantity.name else (1.0, "")
    own = (SIZE[0], SIZE[1] + ROW * max(0, len(limits) - 1))
    figure = new_figure(title or f"{quantity.word} of {', '.join(deployments)}", size, own)
    axes = figure.add_subplot()
    asked = [float(batch) for batch in batches] + [float(batch) for rows in points.values() for batch, _ in rows]
    low, high = min(asked), max(asked)
    axes.set_xlim(low / (high / low) ** 0.02, high * (high / low) ** 0.02)
    log_axis(axes, "x", 2, tokens)
    row = row_of(figure)
    _vertical(axes, values / scale, headroom(figure, limits))
    axes.set_xlabel("Batch [sequences]")
    axes.set_ylabel(quantity.name.format(unit=unit))
    subtitle(axes, subtitle_of(curves, context))
    for number, found in enumerate(curves):
        _one_curve(axes, found, number, quantity, scale, batches)
        for batch, seconds in points.get(found.label, ()):
            axes.plot([batch], [quantity.of(batch, seconds) / scale], linestyle="none", marker="*", markersize=10, zorder=6,
                      color=COLOURS[number % len(COLOURS)], markeredgecolor=INK)  # fmt: skip
    _legend(figure, curves, points, limits)
    draw_limits(figure, axes, curves, limits, row)
    return figure


def _vertical(axes: Axes, values: Any, above: float) -> None:
    """The vertical axis: logarithmic for a wide range of values, with a share of its height free above them."""
    if decades(values) > WIDE_RANGE:
        bottom, top = values.min() / 1.3, values.max() * 1.3
        axes.set_ylim(bottom, bottom * (top / bottom) ** (1 / (1 - above)))
        log_axis(axes, "y", 10, until=top)
    else:
        top = values.max() * 1.06
        axes.set_ylim(0, top / (1 - above))
        axes.set_yticks([tick for tick in axes.get_yticks() if tick <= top])
        axes.yaxis.set_major_formatter(grouped)


@drawn
def latency_plot(
    cases: Cases, batches: Sequence[int], context: int, *, measured: Measured | None = None, source: int = 0,
    engine: str = ENGINE, title: str = "", size: tuple[float, float] | None = None,
) -> Figure:  # fmt: skip
    """Time per output token against the batch, for one deployment or several by label.

    The line is the bound, the band reaches up to no overlap at all; the thick pale line is the expected time of an engine
    where it is calibrated (``engine``, "none" for no such line), as far as the batch fits, dotted where no constant was
    fitted to such a model or batch; stars are measured (batch,
    seconds). From where on a case does not fit its line is dotted and its marks are hollow: what the bound would be; a row
    above the curves says from which batch on, and why. Where none fits the area is grey.

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
