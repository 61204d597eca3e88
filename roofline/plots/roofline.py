"""The roofline: arithmetic intensity against FLOP/s, roofs by format, kernels and steps as points."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from roofline.accelerator import Accelerator
from roofline.cost import MATRIX_UNITS
from roofline.errors import InputError
from roofline.inference import Deployment, Step
from roofline.numeric import reading
from roofline.plots.expected import ENGINE
from roofline.plots.kernels import ROLES, Kernel, kernels, work_of
from roofline.plots.labels import GUIDE, Label, place, spread
from roofline.plots.roofs import Roofs, attained, datasheet
from roofline.plots.style import COLOURS, GREY, INK, MARKERS, drawn, legend, new_figure, nothing_drawn, subtitle
from roofline.plots.ticks import log_axis

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

LABELLED = 9
NAMED_FROM = 0.03
"""The most points that are named, and the share of a step's time from which a kernel is."""
CLOSE = 0.04
"""Points nearer than this many decades are one."""
TERA = 1e12
KNOWN = "known"
ROOMY = (8.0, 5.8)


@dataclass(frozen=True)
class Point:
    """Something that runs, on the roofline.

    Attributes:
        label: its name. phase: "prefill" (filled) or "decode" (hollow).
        intensity: matrix FLOPs per byte. unit: matrix unit whose roof it has.
        rate: FLOP/s at the expected time, else at the bound. least: FLOP/s without any overlap.
        share: of the step's time. colour, marker: of its kind. kind: what the legend calls it, "" for nothing.
        expected: whether ``rate`` is that of an expected time. whole: whether it is a step and not a kernel.
    """

    label: str
    phase: str
    intensity: float
    unit: str
    rate: float
    least: float
    share: float
    colour: str
    marker: str
    kind: str = ""
    expected: bool = False
    whole: bool = False


def kernel_points(deployment: Deployment, batch: int, context: int, *, phase: str = "decode", new_tokens: int = 1024,
                  source: int = 0, engine: str = ENGINE) -> list[Point]:  # fmt: skip
    """The kernels of a decode step at a context, or of a prefill of ``new_tokens`` behind it, that do matrix arithmetic."""
    cached = context if phase == "decode" else 0
    found = kernels(deployment, work_of(phase, batch, cached, new_tokens, source), phase, engine)
    return [_of_kernel(kernel, phase) for kernel in found if kernel.unit]


def _of_kernel(kernel: Kernel, phase: str) -> Point:
    flops = float(kernel.cost.matrix_flops)
    colour, marker, _ = ROLES[kernel.role]
    least = flops / (kernel.serial if kernel.expected is None else kernel.seconds)
    return Point(
        kernel.name, phase, float(kernel.cost.intensity), kernel.unit, flops / kernel.seconds, least,
        kernel.share, colour, marker, kernel.role, kernel.expected is not None,
    )  # fmt: skip


def step_point(step: Step, label: str, number: int = 0, expected: float | None = None, kind: str = "") -> Point:
    """A whole step as one point; ``number`` chooses colour and marker, ``expected`` is its calibrated time.

    ``kind`` is what the legend calls points of this colour, "" where the label says all.

    Raises InputError for a step of arrays, or without matrix FLOPs.
    """
    if reading(step.bound_s) is not None:
        raise InputError("step: a point needs a step of whole numbers; make one step per batch")
    matrix = {unit: float(amount) for unit, amount in step.cost.flops.items() if unit in MATRIX_UNITS and amount}
    if not matrix:
        raise InputError("step: it counts no matrix FLOPs, so it has no place on a roofline; use --convention exact")
    flops = sum(matrix.values())
    return Point(
        label, step.phase, float(step.cost.intensity), max(matrix, key=matrix.__getitem__),
        flops / float(expected or step.bound_s), flops / float(expected or step.serial_s), 1.0,
        COLOURS[number % len(COLOURS)], MARKERS[number % len(MARKERS)], kind, expected is not None, whole=True,
    )  # fmt: skip


def _named(units: Sequence[str], rate: float) -> str:
    return f"{', '.join(units)}: {rate / TERA:,.{0 if rate >= 10 * TERA else 2}f} TFLOP/s"


def _by_rate(rates: Mapping[str, float]) -> list[tuple[float, list[str]]]:
    """Units by rate, those of one rate together, the slowest first."""
    found: dict[float, list[str]] = {}
    for unit, rate in rates.items():
        found.setdefault(rate, []).append(unit)
    return sorted(found.items())


def _draw_roofs(axes: Axes, roofs: Roofs, limits: tuple[float, float], *, solid: bool) -> None:
    """One line per compute roof, each behind the ridge, and the bandwidth up to the highest ridge."""
    style: dict[str, Any] = {"color": INK if solid else GREY, "linewidth": 1.6 if solid else 1.2, "zorder": 3 if solid else 2.5}
    style["linestyle"] = "-" if solid else (0, (5, 2))
    low, high = limits
    top = max(roofs.rates.values())
    last = min(top / roofs.bandwidth, high)
    axes.plot([low, last], [low * roofs.bandwidth / TERA, last * roofs.bandwidth / TERA], **style)
    for rate, _ in _by_rate(roofs.rates):
        if rate / roofs.bandwidth < high:
            axes.plot([max(low, rate / roofs.bandwidth), high], [rate / TERA, rate / TERA], **style)


def _limits(points: Sequence[Point], spec: Roofs, found: Roofs | None) -> tuple[tuple[float, float], tuple[float, float]]:
    """Intensities and TFLOP/s that the axes show: all points, the ridges, and room for the names of the roofs."""
    ridges = [rate / spec.bandwidth for rate in spec.rates.values()]
    low = min([1.0, *(point.intensity for point in points)])
    high = max([4 * max(ridges), *(2 * point.intensity for point in points)])
    low, high = 10 ** math.floor(math.log10(low) + 0.1) * 0.7, 10 ** (math.ceil(math.log10(high) * 4) / 4)
    lowest = min([low * spec.bandwidth, *(point.least for point in points), *([low * found.bandwidth] if found else [])])
    return (low, high), (0.6 * lowest / TERA, 2.6 * max(spec.rates.values()) / TERA)


def _merged(points: Sequence[Point]) -> list[tuple[Point, list[Point]]]:
    """(the first, all) of points of a phase and kind that lie on one another, the largest share first."""
    groups: list[list[Point]] = []
    for point in sorted(points, key=lambda point: -point.share):
        for group in groups:
            first = group[0]
            apart = max(abs(math.log10(point.intensity / first.intensity)), abs(math.log10(point.rate / first.rate)))
            if apart < CLOSE and point.phase == first.phase and (point.kind == first.kind or not point.whole):
                group.append(point)
                break
        else:
            groups.append([point])
    return [(group[0], group) for group in groups]


def _percent(value: float) -> str:
    return f"{100 * value:.0f} %" if value >= 0.095 else f"{100 * value:.2g} %"


def _text(group: Sequence[Point], spec: Roofs) -> str:
    """Name and share of the roof of points that lie together: from no overlap to the bound, or the expected one."""
    first = group[0]
    names = list(dict.fromkeys(point.label for point in group))
    name = ", ".join(names[:2]) + (f" +{len(names) - 2}" if len(names) > 2 else "")
    roof = spec.attainable(first.unit, first.intensity)
    ends = (_percent(first.least / roof), _percent(first.rate / roof))
    if first.expected or ends[0] == ends[1]:
        return f"{name}: {ends[1]}"
    return f"{name}: {ends[0].removesuffix(' %')}–{ends[1]}"


def _name_roofs(axes: Axes, spec: Roofs, found: Roofs | None, limits: tuple[float, float]) -> list[Any]:
    """Writes rates beside the roofs; returns the texts."""
    texts = []
    for rate, units in _by_rate(spec.rates):
        reached = [found.rates[unit] for unit in units if found and unit in found.rates]
        name = _named(units, rate) + (f"\n{_percent(reached[0] / rate)} attained" if reached else "")
        texts.append(axes.annotate(name, (limits[1], rate / TERA), xytext=(4, 0), textcoords="offset points", va="center",
                                   fontsize=7.5, annotation_clip=False))  # fmt: skip
    return texts


def _marks(axes: Axes, groups: Sequence[tuple[Point, list[Point]]], spec: Roofs) -> tuple[list[Label], list[tuple[float, float]]]:
    """Draws the points; returns the names of those that take part of the time worth naming, and where the others are."""
    labels: list[Label] = []
    others: list[tuple[float, float]] = []
    for first, group in groups:
        share = sum(point.share for point in group)
        face = first.colour if first.phase == "prefill" else "white"
        area = 8.0 if first.whole else 4.5 + 7 * math.sqrt(min(1.0, share))
        axes.plot(
            [first.intensity] * 2,
            [first.least / TERA, first.rate / TERA],
            color=first.colour,
            linewidth=1.0,
            zorder=3.5,
            label="_stem",
        )
        axes.plot([first.intensity], [first.rate / TERA], marker=first.marker, markersize=area, color=first.colour,
                  markerfacecolor=face, markeredgewidth=1.5, linestyle="none", zorder=5)  # fmt: skip
        if first.whole or (share >= NAMED_FROM and len(labels) < LABELLED):
            labels.append(Label(first.intensity, first.rate / TERA, _text(group, spec), area / 2))
        else:
            others.append((first.intensity, first.rate / TERA))
    return labels, others


def _handles(points: Sequence[Point], found: Roofs | None, *, missing: bool) -> list[Any]:
    """Entries of the legend: roofs, phases, kinds of the points that are drawn, what a stem is."""
    from matplotlib.lines import Line2D

    handles: list[Any] = [Line2D([], [], color=GREY, linestyle=(0, (5, 2)), linewidth=1.2, label="datasheet roof")]
    if found:
        handles += [Line2D([], [], color=INK, linewidth=1.6, label=found.source)]
    elif missing:
        handles += [nothing_drawn("attained roof: not calibrated")]
    present = {point.phase for point in points}
    for phase, face in (("prefill", INK), ("decode", "white")):
        if phase in present:
            handles += [Line2D([], [], marker="o", linestyle="none", color=INK, label=phase, markerfacecolor=face)]
    kinds = {point.kind: (point.colour, point.marker) for point in points if point.kind}
    handles += [Line2D([], [], marker=marker, linestyle="none", color=c, label=kind) for kind, (c, marker) in kinds.items()]
    if any(not point.expected for point in points):
        handles += [Line2D([], [], color=GREY, marker="|", markersize=9, linestyle="none", label="stem: down to no overlap")]
    return handles


@drawn
def roofline_plot(
    accelerator: Accelerator, points: Sequence[Point], *, reached: Roofs | str | None = KNOWN, title: str = "", note: str = "",
    size: tuple[float, float] | None = None,
) -> Figure:  # fmt: skip
    """Kernels or steps under the roofs of an accelerator, on two logarithmic axes.

    Dashed: the datasheet's roofs; work for a unit that the accelerator lacks stands under that of its 16-bit unit. Solid: what
    kernels attain, measured on such a device or fitted to measurements, where known. A mark stands at the expected time
    where that is calibrated, else at the bound, with a stem down to where no overlap at all would leave it; its percentage
    is of the datasheet's roof above it.

    Args:
        points: of ``kernel_points`` or ``step_point``; prefill is filled, decode hollow. May be empty: roofs alone.
        reached: "known" for the attained roofs that are known, None for none, or Roofs of one's own.
        note: a line under the title.
    """
    if isinstance(reached, str) and reached != KNOWN:
        raise InputError(f"reached: {reached!r} is not {KNOWN!r}; give Roofs of your own, or None for the datasheet alone")
    spec = datasheet(accelerator)
    found = attained(accelerator) if isinstance(reached, str) else reached
    points = [replace(point, unit=accelerator.unit_for(point.unit)) for point in points]
    figure = new_figure(title or f"Roofline of {accelerator.id}", size, ROOMY)
    axes = figure.add_subplot()
    across, up = _limits(points, spec, found)
    axes.set_xlim(*across)
    axes.set_ylim(*up)
    log_axis(axes, "x", 10)
    log_axis(axes, "y", 10)
    axes.set_xlabel("Arithmetic intensity [FLOP/B]")
    axes.set_ylabel("Performance [TFLOP/s]")
    subtitle(axes, note)
    _draw_roofs(axes, spec, across, solid=False)
    if found:
        _draw_roofs(axes, found, across, solid=True)
    ridge = spec.rates["bf16"] / spec.bandwidth
    axes.plot([ridge, ridge], [up[0], spec.rates["bf16"] / TERA], color=GREY, linewidth=1.0, linestyle=":", zorder=1, label=GUIDE)
    texts = _name_roofs(axes, spec, found, across)
    texts.append(axes.annotate(f"ridge, bf16: {ridge:,.0f} FLOP/B", (ridge, up[0]), xytext=(3, 4), textcoords="offset points",
                               fontsize=7.5, color=INK))  # fmt: skip
    middle = math.sqrt(across[0] * min(spec.rates.values()) / spec.bandwidth)
    share = f", {_percent(found.bandwidth / spec.bandwidth)} attained" if found else ""
    groups = _merged(points)
    named, others = _marks(axes, groups, spec)
    labels = [Label(middle, middle * spec.bandwidth / TERA, f"{spec.bandwidth / TERA:,.3g} TB/s{share}"), *named]
    legend(figure, _handles([first for first, _ in groups], found, missing=isinstance(reached, str)))
    spread(figure, texts[:-1])
    ladder = [
        (x, roofs.attainable(unit, x) / TERA) for roofs in (spec, found) if roofs for unit in roofs.rates for x in _steps(*across)
    ]
    place(figure, axes, labels, ladder, texts, others)
    return figure


def _steps(low: float, high: float, number: int = 90) -> list[float]:
    """Numbers from low to high, evenly spaced on a logarithmic axis."""
    return [low * (high / low) ** (index / (number - 1)) for index in range(number)]
