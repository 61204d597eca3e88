"""From which batch on each curve does not fit, and why: a row for each above the curves, and a line down to the axis."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from roofline.plots.curves import Curve
from roofline.plots.labels import GUIDE
from roofline.plots.legible import settled
from roofline.plots.style import COLOURS, INK, PALE

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

ROW, AROUND = 0.17, 1.6
"""Inches of a row, and of what of a figure's height is about not that of the axes."""
LEAST, MOST, GAP = 0.015, 0.09, 0.4
"""The least and most that a row takes of the height of the axes; the share of a row that is free below all of them."""
SHADE: dict[str, Any] = {"facecolor": PALE, "edgecolor": "#C8C8C8", "hatch": "////", "linewidth": 0}
"""Where no curve fits."""
STRIP: dict[str, Any] = {"hatch": "////", "edgecolor": "white", "linewidth": 0, "alpha": 0.45}
"""Where one does not."""


@dataclass(frozen=True)
class Limit:
    """Where a curve ends to fit.

    Attributes:
        number: of the curve. label: its name, "" for the only one. last: the largest batch that fits, 0 for none. reason: why.
    """

    number: int
    label: str
    last: int
    reason: str

    def text(self, most: int) -> str:
        """What does not fit and why, the name cut short where the text has no room for so many letters."""
        what = f"batch {self.last + 1:,} does not fit" if self.last else "not even batch 1 fits"
        rest = f"{what}: {self.reason}"
        if not self.label:
            return rest
        room = max(8, most - len(rest) - 2)
        if len(self.label) <= room:
            return f"{self.label}: {rest}"
        return f"{self.label[: (room - 1) // 2]}…{self.label[-(room // 2) :]}: {rest}"


def limits_of(curves: Sequence[Curve]) -> list[Limit]:
    """The limits inside the batches that are drawn, in the order of the curves."""
    return [
        Limit(number, found.label if len(curves) > 1 else "", found.last, found.reason)
        for number, found in enumerate(curves)
        if found.last is not None and found.last < found.batch.max()
    ]


def row_of(figure: Figure) -> float:
    """The share of the axes' height that a row takes."""
    return min(MOST, max(LEAST, ROW / max(0.1, float(figure.get_size_inches()[1]) - AROUND)))


def headroom(figure: Figure, limits: Sequence[Limit]) -> float:
    """The share of the axes' height that all rows take."""
    return (len(limits) + GAP) * row_of(figure) if limits else 0.0


def draw_limits(figure: Figure, axes: Axes, curves: Sequence[Curve], limits: Sequence[Limit], row: float) -> None:
    """Rows of a share of the axes' height each, lines, and the shade where no curve fits.

    The layout and the limits of the axes must stand already.
    """
    low, high = axes.get_xlim()
    below = axes.get_xaxis_transform()
    starts = [low if limit.last < low else limit.last + 0.5 for limit in limits]
    if limits and len(limits) == len(curves):
        axes.axvspan(max(starts), high, 0, 1 - (len(limits) + GAP) * row, zorder=0, **SHADE)
    renderer = settled(figure)
    frame = axes.get_window_extent(renderer)
    letters = int(frame.width / figure.dpi * 16)
    for number, (limit, start) in enumerate(zip(limits, starts, strict=True)):
        colour, middle = COLOURS[limit.number % len(COLOURS)], 1 - (number + 0.5) * row
        axes.fill_between([start, high], middle - 0.42 * row, middle + 0.42 * row, transform=below, facecolor=colour, zorder=6,
                          label=GUIDE, **STRIP)  # fmt: skip
        if start > low:
            axes.plot([start, start], [0, middle + 0.42 * row], transform=below, color=colour, linewidth=0.9, zorder=1.5,
                      linestyle=(0, (1, 1)), label=GUIDE, scalex=False, scaley=False)  # fmt: skip
        note = axes.annotate(
            limit.text(letters), (start, middle), xycoords=below, xytext=(-4, 0), textcoords="offset points", va="center",
            ha="right", fontsize=7.5, color=INK, zorder=7,
            bbox={"facecolor": "white", "edgecolor": "none", "alpha": 0.85, "pad": 0.8},
        )  # fmt: skip
        note.set_in_layout(False)
        width, at = note.get_window_extent(renderer).width + 4 * figure.dpi / 72, axes.transData.transform((start, 1.0))[0]
        if at - width < frame.x0:
            fits = at + width < frame.x1
            note.xy = (start if fits else high, middle)
            note.set_position((4 if fits else -4, 0))
            note.set_horizontalalignment("left" if fits else "right")
