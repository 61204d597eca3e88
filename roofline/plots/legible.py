"""Whether a figure can be read: which of its words cover one another, leave it, or have no room."""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from roofline.errors import InputError

if TYPE_CHECKING:
    from matplotlib.figure import Figure

TOUCH = 1.0
"""Pixels by which boxes of words may meet, and stand out."""
LEAST_AXES = 0.7
"""Inches: the least width and height of axes that show something."""


def settled(figure: Figure) -> Any:
    """A renderer of the figure, its layout done; what collapses there is told by the axes' size, not by a warning."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="constrained_layout not applied", category=UserWarning)
        figure.draw_without_rendering()
    return FigureCanvasAgg(figure).get_renderer()  # type: ignore[no-untyped-call]


def words(figure: Figure) -> list[tuple[str, Any]]:
    """(text, box in pixels) of everything that is written."""
    from matplotlib.text import Text

    renderer = settled(figure)
    hidden = {id(label) for label in _hidden(figure)}
    shown = [
        text for text in figure.findobj(Text)
        if text.get_visible() and text.get_text().strip() and id(text) not in hidden
        and (text.axes is None or text.axes.get_visible())
    ]  # fmt: skip
    return [(text.get_text(), text.get_window_extent(renderer)) for text in shown]


def _hidden(figure: Figure) -> Iterator[Any]:
    """Labels of ticks outside the limits of their axis, or switched off: they are not drawn."""
    for axes in figure.axes:
        for axis in (axes.xaxis, axes.yaxis):
            low, high = sorted(axis.get_view_interval())
            for tick in (*axis.get_major_ticks(), *axis.get_minor_ticks()):
                inside = low * (1 - 1e-9) <= tick.get_loc() <= high * (1 + 1e-9)
                yield from (label for label in (tick.label1, tick.label2) if not (inside and label.get_visible()))


def faults(figure: Figure) -> list[str]:
    """What cannot be read: words that cover one another or leave the figure, and axes without room."""
    found = words(figure)
    width, height = figure.get_size_inches() * figure.dpi
    inner = [(text, box.padded(-TOUCH)) for text, box in found]
    faults = [f"{a!r} and {b!r} cover one another"
              for (a, one), (b, other) in itertools.combinations(inner, 2) if one.overlaps(other)]  # fmt: skip
    faults += [f"{text!r} leaves the figure" for text, box in inner
               if box.x0 < 0 or box.y0 < 0 or box.x1 > width or box.y1 > height]  # fmt: skip
    for axes in figure.axes:
        box = axes.get_window_extent()
        if axes.get_visible() and min(box.width, box.height) < LEAST_AXES * figure.dpi * (0.5 if len(figure.axes) > 1 else 1):
            faults.append("axes have no room")
    return faults


def check(figure: Figure) -> None:
    """Raises InputError where a figure of an asked size cannot be read."""
    found = faults(figure)
    if found:
        width, height = figure.get_size_inches()
        raise InputError(f"size: {width:g} x {height:g} inches leave no room for the words of this figure; give more, or no size")
