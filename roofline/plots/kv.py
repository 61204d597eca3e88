"""State of one sequence against its length, for several models: what a longer context costs each of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from roofline.accelerator import Accelerator
from roofline.errors import InputError
from roofline.model import Model
from roofline.plots.labels import GUIDE
from roofline.plots.style import COLOURS, GREY, LINES, MARKERS, drawn, legend, new_figure, nothing_drawn, subtitle
from roofline.plots.ticks import log_axis, tokens
from roofline.units import capacity

if TYPE_CHECKING:
    from matplotlib.figure import Figure

DECADES = {2.0**10: "KiB", 2.0**20: "MiB", 2.0**30: "GiB", 2.0**40: "TiB"}
MOST_MODELS = 14
FINE = 160


def binary(value: float) -> str:
    """Bytes with a binary prefix, for an axis: "64 MiB".

    >>> [binary(n) for n in (64 * 2**20, 2**30, 1536)]
    ['64 MiB', '1 GiB', '1.5 KiB']
    """
    size, name = max(((size, name) for size, name in DECADES.items() if value >= size), default=(1.0, "B"))
    return f"{value / size:,.4g} {name}"


def style_of(number: int) -> dict[str, Any]:
    """Colour, line and marker of a line; after all colours the lines change."""
    turn = number // len(COLOURS)
    return {"color": COLOURS[number % len(COLOURS)], "linestyle": LINES[(number + turn) % len(LINES)],
            "marker": MARKERS[(number + 3 * turn) % len(MARKERS)]}  # fmt: skip


@drawn
def kv_plot(
    models: Mapping[str, Model], contexts: Sequence[int], *, accelerator: Accelerator | None = None, source: int = 0,
    title: str = "", size: tuple[float, float] | None = None,
) -> Figure:  # fmt: skip
    """Bytes of KV cache and fixed state of one sequence against the tokens it has, both axes logarithmic.

    Marks stand at the contexts asked for; beyond what a config admits they are hollow and the line is thin. A grey line is
    the memory of an accelerator, weights not counted.

    Args:
        models: by label.

    Raises InputError: no models, more than can be told apart, fewer than two contexts, or a model without any state.
    """
    import numpy
    from matplotlib.lines import Line2D

    if not models or len(set(contexts)) < 2:
        raise InputError("contexts: give models and two or more contexts, as in 8Ki:1Mi:x2")
    if len(models) > MOST_MODELS:
        raise InputError(f"models: {len(models)} lines are more than the {MOST_MODELS} that stay apart; leave some out")
    low, high = max(1, min(contexts)), max(contexts)
    fine = numpy.unique(
        numpy.concatenate([numpy.round(numpy.geomspace(low, high, FINE)), [max(1.0, float(c)) for c in contexts]])
    )
    marked = numpy.isin(fine, [max(1.0, float(c)) for c in contexts])
    lines = {label: _bytes(model, fine, source) for label, model in models.items()}
    figure = new_figure(title or "Cached state of one sequence", size, (7.0, 5.4))
    axes = figure.add_subplot()
    subtitle(axes, "KV cache and fixed state as stored, all layers")
    limits = [float(accelerator.capacity.value)] if accelerator else []
    values = [*(float(v.min()) for v in lines.values()), *(float(v.max()) for v in lines.values()), *limits]
    axes.set_ylim(min(values) / 2, max(values) * 2.5)
    axes.set_xlim(low / 1.08, high * 1.08)
    log_axis(axes, "x", 2, tokens)
    log_axis(axes, "y", 2, binary)
    axes.set_xlabel("Context [tokens]")
    axes.set_ylabel("State per sequence")
    handles: list[Any] = []
    for number, (label, value) in enumerate(lines.items()):
        style, longest = style_of(number), models[label].max_context or float("inf")
        inside = fine <= longest
        axes.plot(fine[inside], value[inside], color=style["color"], linestyle=style["linestyle"], zorder=4)
        axes.plot(fine[~inside], value[~inside], color=style["color"], linestyle=style["linestyle"], linewidth=0.9, zorder=4)
        for mask, face in ((marked & inside, style["color"]), (marked & ~inside, "white")):
            axes.plot(fine[mask], value[mask], linestyle="none", marker=style["marker"], color=style["color"],
                      markerfacecolor=face, markersize=4.5, zorder=5)  # fmt: skip
        handles.append(Line2D([], [], label=f"{label}: {binary(float(value[-1]))}", **style))
    if accelerator:
        axes.axhline(limits[0], color=GREY, linestyle=(0, (5, 2)), linewidth=1.2, zorder=2, label=GUIDE)
        axes.annotate(f"{accelerator.id}: {capacity(limits[0])}", (low, limits[0]), xytext=(3, 3), textcoords="offset points",
                      fontsize=7.5, color=GREY)  # fmt: skip
    if any(high > (model.max_context or high) for model in models.values()):
        handles.append(Line2D([], [], color=GREY, marker="o", markerfacecolor="white", linewidth=0.9,
                              label="longer than the config admits"))  # fmt: skip
    legend(figure, [nothing_drawn(f"at {tokens(high)} tokens:"), *handles])
    return figure


def _bytes(model: Model, contexts: Any, source: int) -> Any:
    import numpy

    value = numpy.asarray(model.state_bytes(contexts, source if model.encoder is not None else 0) + 0.0 * contexts, dtype=float)
    if not value.max() > 0:
        raise InputError(f"models: {model.name} keeps no state between steps, so there is nothing to draw")
    return numpy.maximum(value, value[value > 0].min())
