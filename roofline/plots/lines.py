"""Any quantity against any other, one line per case: for figures that have no function of their own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from roofline.errors import InputError
from roofline.plots.style import COLOURS, GREY, LINES, MARKERS, drawn, legend, new_figure, subtitle
from roofline.plots.ticks import grouped, log_axis, plain, tokens

if TYPE_CHECKING:
    from matplotlib.figure import Figure

SCALES = ("linear", "log2", "log10")


def _axis(axes: Any, which: str, scale: str, values: Sequence[float]) -> None:
    low, high = min(values), max(values)
    if scale == "linear":
        if which == "y":
            axes.set_ylim(min(0.0, 1.08 * low), 1.12 * high)
        getattr(axes, f"{which}axis").set_major_formatter(grouped)
        return
    if low <= 0:
        raise InputError(f"{which}: {low:g} has no place on a logarithmic axis; use scale linear")
    room = 1.06 if which == "x" else 1.4
    getattr(axes, f"set_{which}lim")(low / room, high * room)
    log_axis(axes, which, 2 if scale == "log2" else 10, tokens if scale == "log2" else plain)


@drawn
def lines_plot(
    lines: Mapping[str, Sequence[tuple[Any, Any]]], *, x: str, y: str, title: str, note: str = "", x_scale: str = "linear",
    y_scale: str = "linear", level: tuple[float, str] | None = None, size: tuple[float, float] | None = None,
) -> Figure:  # fmt: skip
    """(x, y) points joined by a line for each label.

    Args:
        x, y: names of the axes with their units. x_scale, y_scale: "linear", "log2" or "log10".
        level: a value of y worth a dashed line, and its name.

    Raises InputError: nothing to draw, more lines than can be told apart, a value that a scale cannot show.
    """
    from matplotlib.lines import Line2D

    if not lines or not all(lines.values()):
        raise InputError("lines: there is nothing to draw; give points for each label")
    if len(lines) > len(COLOURS):
        raise InputError(f"lines: {len(lines)} are more than the {len(COLOURS)} that stay apart; leave some out")
    for name, scale in (("x_scale", x_scale), ("y_scale", y_scale)):
        if scale not in SCALES:
            raise InputError(f"{name}: {scale!r} is not one of {', '.join(SCALES)}")
    figure = new_figure(title, size)
    axes = figure.add_subplot()
    points = [(float(a), float(b)) for line in lines.values() for a, b in line]
    _axis(axes, "x", x_scale, [a for a, _ in points])
    _axis(axes, "y", y_scale, [b for _, b in points] + ([level[0]] if level else []))
    axes.set_xlabel(x)
    axes.set_ylabel(y)
    if note:
        subtitle(axes, note)
    handles: list[Any] = []
    for number, (label, line) in enumerate(lines.items()):
        style: dict[str, Any] = {"color": COLOURS[number], "linestyle": LINES[number], "marker": MARKERS[number]}
        axes.plot([float(a) for a, _ in line], [float(b) for _, b in line], zorder=4, **style)
        handles.append(Line2D([], [], label=label, **style))
    if level:
        axes.axhline(level[0], color=GREY, linestyle=(0, (5, 2)), linewidth=1.2, zorder=2)
        handles.append(Line2D([], [], color=GREY, linestyle=(0, (5, 2)), linewidth=1.2, label=level[1]))
    legend(figure, handles)
    return figure
