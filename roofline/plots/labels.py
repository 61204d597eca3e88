"""Labels beside points, that cover neither each other nor the points."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from roofline.plots.legible import settled
from roofline.plots.style import GREY, INK

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

RING = ((1, 0.6), (1, -0.6), (-1, 0.6), (-1, -0.6), (0, 1), (0, -1), (1, 0), (-1, 0), (0.4, -1), (-0.4, 1), (-0.4, -1), (0.4, 1))
"""Directions in which a label may lie, the best first."""
DISTANCES = (9.0, 18.0, 30.0, 44.0, 60.0, 80.0, 104.0)
"""Points between a mark and its label, the best first."""
NEAR, CROSSED = 14.0, 25.0
"""Points within which marks are near, and what it costs a label to lie on the wrong side of a near mark."""
OVER_TEXT, OVER_MARK, OVER_LINE, LINE_ROOM = 10_000.0, 60.0, 8.0, 1.5
"""What it costs a label to cover a text, a mark and a point of a line, and the points that it keeps from a line."""
GUIDE = "_guide"
"""Label of lines that mean nothing by themselves: they lead from a word to what it names."""


@dataclass(frozen=True)
class Label:
    """A text that belongs to a point in data coordinates; ``radius`` of its mark in points."""

    x: float
    y: float
    text: str
    radius: float = 4.0


def _cost(box: Any, others: Sequence[Any], marks: Any, radii: Any, lines: Any, scale: float) -> float:
    """What it costs a label to lie in a box: most where it covers another text, then a mark, then a line."""
    import numpy

    across = numpy.maximum(box.x0 - marks[:, 0], marks[:, 0] - box.x1)
    above = numpy.maximum(box.y0 - marks[:, 1], marks[:, 1] - box.y1)
    covered = int((numpy.maximum(across, above) < radii).sum())
    room = LINE_ROOM * scale
    crossed = 0
    if len(lines):
        crossed = int(
            ((lines[:, 0] > box.x0 - room) & (lines[:, 0] < box.x1 + room)
             & (lines[:, 1] > box.y0 - room) & (lines[:, 1] < box.y1 + room)).sum()
        )  # fmt: skip
    return OVER_TEXT * sum(bool(box.overlaps(other)) for other in others) + OVER_MARK * covered + OVER_LINE * crossed


def _side(number: int, marks: Any, scale: float) -> float:
    """Above (1) or below (-1) which a mark's label should lie so that labels keep the order of near marks; 0 for alone."""
    import numpy

    apart = marks - marks[number]
    near = (numpy.abs(apart[:, 0]) < 2 * NEAR * scale) & (numpy.abs(apart[:, 1]) < NEAR * scale) & (apart[:, 1] != 0)
    return float(-numpy.sign(apart[near, 1].sum())) if near.any() else 0.0


def spread(figure: Figure, texts: Sequence[Any], gap: float = 1.0) -> None:
    """Moves annotations that stand above one another apart, as little as keeps them in their order; layout settled first."""
    renderer = settled(figure)
    ordered = sorted(texts, key=lambda text: float(text.get_window_extent(renderer).y0))
    boxes = [text.get_window_extent(renderer) for text in ordered]
    shifts = [0.0] * len(boxes)
    for _ in range(4 * len(boxes)):
        for number in range(len(boxes) - 1):
            lower, upper = boxes[number].y1 + shifts[number], boxes[number + 1].y0 + shifts[number + 1]
            missing = lower + gap * figure.dpi / 72 - upper
            if missing > 0:
                shifts[number] -= missing / 2
                shifts[number + 1] += missing / 2
    for text, shift in zip(ordered, shifts, strict=True):
        across, above = text.get_position()
        text.set_position((across, above + shift * 72 / figure.dpi))


def place(figure: Figure, axes: Axes, labels: Sequence[Label], avoid: Any = (), boxes: Sequence[Any] = (),
          marks_at: Sequence[tuple[float, float]] = ()) -> None:  # fmt: skip
    """Writes each label near its point where it covers least, with a thin line to its point where it lies apart.

    The layout is settled first, so limits and everything outside the axes must stand already; labels are not part of it.
    A label that finds no place free of other texts is left out: earlier ones come first.

    Args:
        avoid: points of lines in data coordinates that labels should not cross. boxes: artists that they must not cover.
        marks_at: further marks, without labels.
    """
    import numpy
    from matplotlib.transforms import Bbox

    if not labels:
        return
    renderer = settled(figure)
    frame, scale = axes.get_window_extent(renderer), figure.dpi / 72
    transform = axes.transData.transform
    marks = transform(numpy.array([*((label.x, label.y) for label in labels), *marks_at], dtype=float))
    radii = scale * numpy.array([*(label.radius for label in labels), *([4.0] * len(marks_at))])
    lines = transform(numpy.array(list(avoid), dtype=float)) if len(avoid) else numpy.empty((0, 2))
    taken = [artist.get_window_extent(renderer).padded(3) for artist in boxes]
    for number, label in enumerate(labels):
        note = axes.annotate(
            label.text, (label.x, label.y), textcoords="offset points", xytext=(0, 0), fontsize=7.5, color=INK, zorder=6,
            annotation_clip=False, bbox={"facecolor": "white", "edgecolor": "none", "alpha": 0.7, "pad": 0.6},
        )  # fmt: skip
        note.set_in_layout(False)
        size = note.get_window_extent(renderer)
        side = _side(number, marks[: len(labels)], scale)
        best: tuple[float, Any] | None = None
        for rank, distance in enumerate(DISTANCES):
            for direction, (right, up) in enumerate(RING):
                reach = scale * (distance + label.radius - 4.0)
                centre = marks[number] + reach * numpy.array([right, up])
                left = centre[0] - (0 if right > 0 else size.width if right < 0 else size.width / 2)
                box = Bbox.from_bounds(left, centre[1] - size.height / 2, size.width, size.height)
                outside = box.x0 < frame.x0 or box.x1 > frame.x1 or box.y0 < frame.y0 or box.y1 > frame.y1
                cost = _cost(box, taken, marks, radii, lines, scale) + OVER_TEXT * outside + 3 * rank + 0.2 * direction
                cost += CROSSED if up * side < 0 else 0.0
                if best is None or cost < best[0]:
                    best = (cost, box)
        assert best is not None
        cost, box = best
        if cost >= OVER_TEXT:
            note.remove()
            continue
        note.set_position(((box.x0 - marks[number][0]) / scale, (box.y0 - marks[number][1]) / scale))
        taken.append(Bbox.from_extents(box.x0 - 5 * scale, box.y0 - scale, box.x1 + 5 * scale, box.y1 + scale))
        nearest = numpy.clip(marks[number], [box.x0, box.y0], [box.x1, box.y1])
        if numpy.hypot(*(nearest - marks[number])) > (12 + label.radius) * scale:
            end = axes.transData.inverted().transform(nearest)
            axes.plot([label.x, end[0]], [label.y, end[1]], color=GREY, linewidth=0.6, zorder=2, scalex=False, scaley=False,
                      label=GUIDE)  # fmt: skip
