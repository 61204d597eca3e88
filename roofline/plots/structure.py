"""What is drawn, apart from how it is rendered: the artists of a figure as plain data, to compare figures by.

Pixels change with the version of a font or of the renderer; numbers, labels, colours, line styles and limits do not.
"""

from __future__ import annotations

import hashlib
import json
import math
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

SAMPLES = 9
"""Points of a long line that are kept."""
DIGITS = 4


def _round(value: Any, digits: int) -> Any:
    number = float(value)
    return float(f"{number:.{digits}g}") if math.isfinite(number) else str(number)


def _points(points: Any, digits: int) -> list[list[Any]]:
    """Up to ``SAMPLES`` evenly spaced points of a path."""
    rows = list(points)
    if len(rows) > SAMPLES:
        rows = [rows[round(index * (len(rows) - 1) / (SAMPLES - 1))] for index in range(SAMPLES)]
    return [[_round(value, digits) for value in row] for row in rows]


def _colour(colour: Any) -> str:
    from matplotlib.colors import to_hex

    return to_hex(colour, keep_alpha=True) if isinstance(colour, str) or len(colour) else "none"


def _collection(found: Any, digits: int) -> dict[str, Any]:
    offsets = found.get_offsets()
    return {
        "label": str(found.get_label()), "colours": [_colour(colour) for colour in found.get_facecolor()[:3]],
        "hatch": found.get_hatch(), "offsets": _points(offsets, digits), "count": len(offsets),
        "paths": [_points(path.vertices, digits) for path in found.get_paths()[:2]],
    }  # fmt: skip


def dashes(line: Any) -> str:
    """How a line is drawn: "-", "None", or the lengths of its dashes and gaps."""
    style, pattern = str(line.get_linestyle()), getattr(line, "_unscaled_dash_pattern", (0, None))[1]
    return style if pattern is None else " ".join(f"{length:g}" for length in pattern)


def _line(line: Any, digits: int) -> dict[str, Any]:
    points = line.get_xydata()
    return {
        "label": str(line.get_label()), "points": _points(points, digits), "count": len(points),
        "colour": _colour(line.get_color()), "style": dashes(line), "marker": str(line.get_marker()),
        "fill": _colour(line.get_markerfacecolor()), "width": _round(line.get_linewidth(), digits),
    }  # fmt: skip


def _axes(axes: Axes, digits: int) -> dict[str, Any]:
    def limits(pair: Any) -> list[Any]:
        return [_round(value, digits) for value in pair]

    return {
        "title": axes.get_title(loc="left"),
        "x": [axes.get_xlabel(), axes.get_xscale(), limits(axes.get_xlim())],
        "y": [axes.get_ylabel(), axes.get_yscale(), limits(axes.get_ylim())],
        "ticks": [[tick.get_text() for tick in labels] for labels in (axes.get_xticklabels(), axes.get_yticklabels())],
        "lines": [_line(line, digits) for line in axes.lines],
        "collections": [_collection(found, digits) for found in axes.collections],
        "patches": [
            {
                "box": [_round(value, digits) for value in patch.get_path().get_extents(patch.get_patch_transform()).bounds],
                "colour": _colour(patch.get_facecolor()), "hatch": patch.get_hatch(),
            }
            for patch in axes.patches
        ],
        "texts": [
            {"text": text.get_text(), "at": [_round(value, digits) for value in getattr(text, "xy", text.get_position())]}
            for text in axes.texts
        ],
    }  # fmt: skip


def describe(figure: Figure, digits: int = 9) -> dict[str, Any]:
    """The figure as JSON takes it: titles, axes, lines, areas, bars, texts and legends, numbers to so many digits."""
    title = figure.get_suptitle()
    width, height = figure.get_size_inches()
    return {
        "title": title,
        "size": [_round(width, digits), _round(height, digits)],
        "axes": [_axes(axes, digits) for axes in figure.axes],
        "legends": [[text.get_text() for text in legend.get_texts()] for legend in figure.legends],
    }


def digest(figure: Figure) -> str:
    """Ten letters that change with what is drawn (to four digits), and not with fonts or renderers."""
    text = json.dumps(describe(figure, DIGITS), sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:10]
