"""Numbers on axes as people write them, and labels beside points that cover neither each other nor the points."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from roofline.plots.style import GREY, INK

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

RING = ((1, 0.6), (1, -0.6), (-1, 0.6), (-1, -0.6), (0, 1), (0, -1), (1, 0), (-1, 0), (0.4, -1), (-0.4, 1), (-0.4, -1), (0.4, 1))
"""Directions in which a label may lie, the best first."""
DISTANCES = (9.0, 18.0, 30.0, 44.0, 60.0, 80.0, 104.0, 132.0, 164.0)
"""Points between a mark and its label, the best first."""
NEAR, CROSSED = 14.0, 25.0
"""Points within which marks are near, and what it costs a label to lie on the wrong side of a near mark."""
MOST_TICKS = 11


def tokens(value: float) -> str:
    """A number of tokens or sequences for an axis: "512", "8Ki", "1Mi", "1,000"; a share of one as it is.

    >>> [tokens(n) for n in (0.25, 512, 1000, 8192, 2**20)]
    ['0.25', '512', '1,000', '8Ki', '1Mi']
    """
    if value < 1:
        return f"{value:g}"
    number = round(value)
    for suffix, size in (("Mi", 2**20), ("Ki", 2**10)):
        if number >= size and number % size == 0:
            return f"{number // size}{suffix}"
    return f"{number:,}"


def plain(value: float) -> str:
    """A tick of a logarithmic axis without powers: "0.01", "1", "1,000".

    >>> [plain(n) for n in (0.01, 1, 1000)]
    ['0.01', '1', '1,000']
    """
    if value >= 1:
        return f"{value:,.0f}" if value == round(value) or value >= 100 else f"{value:g}"
    return f"{value:.{max(0, -math.floor(math.log10(value)))}f}" if value > 0 else "0"


def _powers(low: float, high: float, base: int, most: int) -> Iterator[float]:
    """Powers of a base in a range, thinned where they are many."""
    first, last = math.ceil(math.log(low, base) - 1e-9), math.floor(math.log(high, base) + 1e-9)
    step = max(1, math.ceil((last - first + 1) / most))
    yield from (float(base) ** power for power in range(first, last + 1, step))


def log_axis(axes: Axes, which: str, base: int, form: Any = None, most: int = MOST_TICKS) -> None:
    """Makes an axis logarithmic, with ticks at powers of its base inside the limits that are set, written in full.

    Where a decimal axis shows fewer than two powers there are ticks at 1, 2 and 5 times them, else at the ends.
    """
    from matplotlib.ticker import FixedFormatter, FixedLocator, NullLocator

    getattr(axes, f"set_{which}scale")("log", base=base)
    low, high = getattr(axes, f"get_{which}lim")()
    ticks = list(_powers(low, high, base, most))
    if len(ticks) < 2 and base == 10:
        powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)))
        ticks = [tick for power in powers for part in (1, 2, 5) if low <= (tick := part * 10.0**power) <= high]
    if len(ticks) < 2:
        ticks = sorted({*ticks, low, high})
    axis = getattr(axes, f"{which}axis")
    axis.set_major_locator(FixedLocator(ticks))
    axis.set_major_formatter(FixedFormatter([(form or plain)(tick) for tick in ticks]))
    axis.set_minor_locator(NullLocator())


def time_unit(longest: float) -> tuple[float, str]:
    """(seconds of one unit, its name) for an axis that ends at a duration."""
    return (1.0, "s") if longest >= 10 else (1e-3, "ms") if longest >= 1e-4 else (1e-6, "us")


@dataclass(frozen=True)
class Label:
    """A text that belongs to a point in data coordinates."""

    x: float
    y: float
    text: str


def _hits(box: Any, others: Sequence[Any], marks: Any) -> int:
    """How many boxes and marks a box covers; a box counts for more."""
    import numpy

    boxes = sum(box.overlaps(other) for other in others)
    inside = numpy.logical_and.reduce(
        [marks[:, 0] > box.x0 - 2, marks[:, 0] < box.x1 + 2, marks[:, 1] > box.y0 - 2, marks[:, 1] < box.y1 + 2]
    )
    return int(100 * boxes + inside.sum())


def _side(number: int, marks: Any, scale: float) -> float:
    """Above (1) or below (-1) which a mark's label should lie so that labels keep the order of near marks; 0 for alone."""
    import numpy

    apart = marks - marks[number]
    near = (numpy.abs(apart[:, 0]) < 2 * NEAR * scale) & (numpy.abs(apart[:, 1]) < NEAR * scale) & (apart[:, 1] != 0)
    return float(-numpy.sign(apart[near, 1].sum())) if near.any() else 0.0


def place(figure: Figure, axes: Axes, labels: Sequence[Label], avoid: Any = (), boxes: Sequence[Any] = ()) -> None:
    """Writes each label near its point where it covers least, with a thin line to its point where it lies apart.

    The layout is settled first, so limits and everything outside the axes must stand already; labels are not part of it.

    Args:
        avoid: further points in data coordinates that labels should not cover. boxes: artists that they must not cover.
    """
    import numpy
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.transforms import Bbox

    if not labels:
        return
    renderer = FigureCanvasAgg(figure).get_renderer()  # type: ignore[no-untyped-call]
    figure.draw_without_rendering()
    frame = axes.get_window_extent(renderer)
    points = [(label.x, label.y) for label in labels]
    marks = axes.transData.transform(numpy.array([*points, *avoid], dtype=float))
    taken = [artist.get_window_extent(renderer).padded(3) for artist in boxes]
    scale = figure.dpi / 72
    for number, label in enumerate(labels):
        note = axes.annotate(
            label.text, (label.x, label.y), textcoords="offset points", xytext=(0, 0), fontsize=7.5, color=INK, zorder=6,
            annotation_clip=False, bbox={"facecolor": "white", "edgecolor": "none", "alpha": 0.7, "pad": 0.6},
        )  # fmt: skip
        note.set_in_layout(False)
        size = note.get_window_extent(renderer)
        width, height = size.width, size.height
        side = _side(number, marks[: len(labels)], scale)
        best: tuple[float, float, float, Any] | None = None
        for rank, distance in enumerate(DISTANCES):
            for direction, (right, up) in enumerate(RING):
                centre = marks[number] + scale * distance * numpy.array([right, up])
                left = centre[0] - (0 if right > 0 else width if right < 0 else width / 2)
                bottom = centre[1] - height / 2
                box = Bbox.from_bounds(left, bottom, width, height)
                outside = box.x0 < frame.x0 or box.x1 > frame.x1 or box.y0 < frame.y0 or box.y1 > frame.y1
                penalty = 10 * _hits(box, taken, marks) + 2000 * outside + 3 * rank + 0.2 * direction
                penalty += CROSSED if up * side < 0 else 0.0
                if best is None or penalty < best[0]:
                    best = (penalty, left - marks[number][0], bottom - marks[number][1], box)
        assert best is not None
        _, across, above, box = best
        note.set_position((across / scale, above / scale))
        taken.append(box.padded(1))
        nearest = numpy.clip(marks[number], [box.x0, box.y0], [box.x1, box.y1])
        if numpy.hypot(*(nearest - marks[number])) > 16 * scale:
            end = axes.transData.inverted().transform(nearest)
            axes.plot([label.x, end[0]], [label.y, end[1]], color=GREY, linewidth=0.6, zorder=2, scalex=False, scaley=False)
