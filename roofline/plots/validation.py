"""Predicted against measured: points around the diagonal, with the bands of an error around it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from roofline.errors import InputError
from roofline.plots.style import COLOURS, GREY, INK, MARKERS, drawn, legend, new_figure
from roofline.plots.ticks import log_axis

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

BANDS = ((0.10, "#9C9C9C"), (0.25, "#DCDCDC"))
"""Relative errors that are shaded, and their greys."""
MOST_PANELS, ACROSS = 16, 4
POINTS = 600
"""The most points drawn of one series, evenly spaced over the order they come in."""
PANEL_TICKS, ONE_PANEL_TICKS = 4, 7
FEW = 25
"""Up to so many points are drawn large."""
UNITS = ((10.0, 1.0, "s"), (0.1, 1e-3, "ms"), (0.0, 1e-6, "us"))
"""Longest time of a panel from which on a unit serves, that unit in seconds, its name."""


@dataclass(frozen=True)
class Compared:
    """Predictions and measurements of one family.

    Attributes:
        panel: the panel it belongs to, such as the class of a kernel. label: its name there.
        measured, predicted: seconds, arrays (or lists) of one length.
        group: whose colour and mark its points have in all panels, such as a framework; "" for its own.
    """

    panel: str
    label: str
    measured: Any
    predicted: Any
    group: str = ""

    @property
    def looks(self) -> str:
        """What the legend calls its points."""
        return self.group or self.label


def _arrays(series: Compared) -> tuple[Any, Any]:
    import numpy

    measured, predicted = (numpy.asarray(values, dtype=float) for values in (series.measured, series.predicted))
    if measured.shape != predicted.shape or measured.ndim != 1 or not measured.size:
        raise InputError(f"validation: {series.label} has {measured.size} measurements and {predicted.size} predictions")
    if not (measured > 0).all() or not (predicted > 0).all():
        raise InputError(f"validation: {series.label} holds a time that is not above 0")
    return measured, predicted


def summary(measured: Any, predicted: Any) -> str:
    """Number of rows, mean absolute error, median ratio, and how many lie within each band."""
    import numpy

    error = numpy.abs(predicted - measured) / measured
    inside = ", ".join(f"{100 * float((error <= band).mean()):.0f} % within {100 * band:.0f} %"
                       for band, _ in BANDS)  # fmt: skip
    ratio = float(numpy.median(measured / predicted))
    return f"n {len(measured):,}, mean error {100 * float(error.mean()):.1f} %, measured/predicted {ratio:.2f}\n{inside}"


@drawn
def validation_plot(series: Sequence[Compared], *, title: str = "", size: tuple[float, float] | None = None) -> Figure:
    """Predicted against measured times, one panel per class, on logarithmic axes.

    The diagonal is a perfect prediction; the grey bands are errors of 10 and 25 % of the measurement. Each panel states
    rows, mean absolute error relative to the measurement, median of measured over predicted, and the rows within the bands.
    Statistics are of all rows; of long series an even sample is drawn. Colours and marks are those of groups, or of series;
    where these are too many to be told apart, all points are alike.

    Raises InputError: nothing to draw, arrays that do not match, times that are not positive, too many panels.
    """
    import numpy
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    panels: dict[str, list[Compared]] = {}
    for found in series:
        panels.setdefault(found.panel, []).append(found)
    if not panels:
        raise InputError("validation: there are no measurements to compare with")
    if len(panels) > MOST_PANELS:
        raise InputError(f"validation: {len(panels)} panels are more than {MOST_PANELS}; choose some classes")
    columns = min(ACROSS, math.ceil(math.sqrt(len(panels))))
    rows = math.ceil(len(panels) / columns)
    side = 5.6 if len(panels) == 1 else 3.5
    groups = list(dict.fromkeys(found.looks for found in series))
    if len(groups) > len(COLOURS):
        groups = ["rows"]
    figure = new_figure(title or "Predicted against measured time", size, (side * columns + 0.6, side * rows + 1.1))
    grid = figure.subplots(rows, columns, squeeze=False)
    for number, axes in enumerate(grid.flat):
        if number >= len(panels):
            axes.set_visible(False)
            continue
        name, members = list(panels.items())[number]
        pairs = [_arrays(found) for found in members]
        measured, predicted = (numpy.concatenate(values) for values in zip(*pairs, strict=True))
        looks = [groups.index(found.looks) if found.looks in groups else 0 for found in members]
        ticks = PANEL_TICKS if len(panels) > 1 else ONE_PANEL_TICKS
        _panel(axes, name, pairs, looks, summary(measured, predicted), ticks)
    handles: list[Any] = [Line2D([], [], color=INK, linewidth=1.0, label="predicted = measured")]
    handles += [Patch(color=grey, label=f"within {100 * band:.0f} %") for band, grey in BANDS]
    handles += [Line2D([], [], linestyle="none", marker=MARKERS[n], color=COLOURS[n], markersize=4, label=group)
                for n, group in enumerate(groups)]  # fmt: skip
    legend(figure, handles)
    return figure


def _panel(axes: Axes, name: str, pairs: Sequence[tuple[Any, Any]], looks: Sequence[int], text: str, ticks: int) -> None:
    """One class: bands, diagonal, points; ``looks`` is the number of each series' colour and mark."""
    import numpy

    ends = [value for measured, predicted in pairs for both in (measured, predicted) for value in (both.min(), both.max())]
    scale, unit = next((scale, unit) for least, scale, unit in UNITS if max(ends) >= least)
    low, high = min(ends) / scale / 1.6, max(ends) / scale * 1.6
    axes.set_xlim(low, high)
    axes.set_ylim(low, high)
    log_axis(axes, "x", 10, most=ticks)
    log_axis(axes, "y", 10, most=ticks)
    line = numpy.array([low, high])
    for band, grey in reversed(BANDS):
        axes.fill_between(line, line * (1 - band), line * (1 + band), color=grey, alpha=0.75, linewidth=0, zorder=1)
    axes.plot(line, line, color=INK, linewidth=1.0, zorder=2)
    for number, (measured, predicted) in zip(looks, pairs, strict=True):
        chosen = numpy.unique(numpy.linspace(0, len(measured) - 1, min(POINTS, len(measured))).round().astype(int))
        marker: dict[str, Any] = {"marker": MARKERS[number], "markersize": 2.6 if len(measured) > FEW else 5.0}
        axes.plot(measured[chosen] / scale, predicted[chosen] / scale, linestyle="none", color=COLOURS[number],
                  markeredgewidth=0, alpha=0.65, zorder=3, rasterized=True, **marker)  # fmt: skip
    axes.set_xlabel(f"Measured [{unit}]")
    axes.set_ylabel(f"Predicted [{unit}]")
    axes.set_title(f"{name}\n{text}", loc="left", color=GREY, fontsize=7.5)
