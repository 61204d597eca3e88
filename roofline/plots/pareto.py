"""What one user gets against what a GPU earns: frontiers over batches and meshes."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from roofline.errors import InputError
from roofline.inference import Deployment
from roofline.plots.curves import source_of
from roofline.plots.expected import ENGINE, Expected, expected_of
from roofline.plots.labels import Label, place
from roofline.plots.style import (
    COLOURS,
    EXTRAPOLATED,
    GREY,
    LIKELY,
    LIKELY_MARK,
    LINES,
    MARKERS,
    drawn,
    legend,
    new_figure,
    nothing_drawn,
    subtitle,
)
from roofline.plots.ticks import grouped, log_axis

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

WIDE_RANGE = 20.0
"""Ratio of the largest to the smallest value from which on an axis is logarithmic."""
MOST_NAMED = 7
BEHIND: dict[str, Any] = {"markersize": 3, "alpha": 0.5}
"""Points that are not on the frontier."""


@dataclass(frozen=True)
class Operating:
    """One way to run: a deployment at a batch.

    Attributes:
        deployment, batch: which. per_user: output tokens per second of one sequence. per_gpu: of all, over the GPUs.
        fits: whether it fits.
    """

    deployment: Deployment
    batch: int
    per_user: float
    per_gpu: float
    fits: bool

    @property
    def name(self) -> str:
        """The mesh, where there is one, and the batch."""
        mesh = getattr(self.deployment, "mesh", None)
        flags = mesh.flags.replace("--", "") if mesh is not None and mesh.ranks > 1 else ""
        return f"{flags}, batch {self.batch:,}".removeprefix(", ")


def operating_points(deployment: Deployment, batches: Sequence[int], context: int, source: int = 0, times: str = "bound",
                     engine: str = ENGINE) -> list[Operating]:  # fmt: skip
    """Decode steps at each batch: at the "bound", without overlap ("serial") or "expected"; empty where nothing is calibrated."""
    mesh = getattr(deployment, "mesh", None)
    gpus = 1 if mesh is None else mesh.ranks
    calibrated = expected_of(deployment, engine).decode(deployment, batches, context) if times == "expected" else ()
    if calibrated is None:
        return []
    found = []
    for number, batch in enumerate(batches):
        step = deployment.decode(batch, context, source=source_of(deployment, source))
        seconds = float(step.serial_s if times == "serial" else step.bound_s if times == "bound" else calibrated[number])
        found.append(Operating(deployment, batch, 1 / seconds, batch / seconds / gpus, bool(step.memory.fits)))
    return found


def frontier(points: Sequence[Operating]) -> list[Operating]:
    """Points that fit and that no other one beats both ways, from most per GPU to most per user."""
    best: list[Operating] = []
    for point in sorted((p for p in points if p.fits), key=lambda p: (-p.per_user, -p.per_gpu)):
        if not best or point.per_gpu > best[-1].per_gpu:
            best.append(point)
    return best[::-1]


def _spread(points: Sequence[Operating]) -> list[Operating]:
    """The ends of a frontier, and where its mesh changes."""
    named = [points[0], *(here for before, here in itertools.pairwise(points)
                          if here.deployment is not before.deployment), points[-1]]  # fmt: skip
    return list({id(point): point for point in named}.values())[:MOST_NAMED]


@drawn
def pareto_plot(
    cases: Mapping[str, Sequence[Deployment]], batches: Sequence[int], context: int, *, source: int = 0,
    engine: str = ENGINE, title: str = "", size: tuple[float, float] | None = None,
) -> Figure:  # fmt: skip
    """Tokens per second of one user against those of one GPU: the frontier of each case over its deployments and batches.

    The line is the frontier at the bound, the band reaches down to that without overlap. The thick pale line with small marks
    is the frontier of expected times where they are calibrated, dotted for a model beyond what they were fitted to. Small
    pale marks are points behind the bound's frontier, crosses do not fit. The ends, and where another mesh takes over, are
    named.

    Args:
        cases: label -> deployments that compete, such as one model on several meshes.

    Raises InputError: nothing to draw, or nothing that fits.
    """
    if not cases or not all(cases.values()):
        raise InputError("cases: there is nothing to draw; give deployments by label")
    if len(cases) > len(COLOURS):
        raise InputError(f"cases: {len(cases)} frontiers are more than the {len(COLOURS)} that stay apart; leave some out")
    everything: dict[str, tuple[list[Operating], list[Operating], list[Operating]]] = {}
    calibrated: dict[str, list[Operating]] = {}
    for label, deployments in cases.items():
        points = [point for d in deployments for point in operating_points(d, batches, context, source)]
        worst = [point for d in deployments for point in operating_points(d, batches, context, source, "serial")]
        everything[label] = (points, frontier(points), frontier(worst))
        likely = [point for d in deployments for point in operating_points(d, batches, context, source, "expected", engine)]
        calibrated[label] = frontier(likely)
    if not any(best for _, best, _ in everything.values()):
        raise InputError("batch: nothing fits, so there is no frontier; give a smaller batch or context, or more GPUs")
    figure = new_figure(title or f"Interactivity against throughput: {', '.join(cases)}", size)
    axes = figure.add_subplot()
    subtitle(axes, f"decode at context {context:,} on {_places(cases)}; line: bound, band: down to no overlap, datasheet roofs")
    shown = [point for points, best, worst in everything.values() for point in (*points, *best, *worst)]
    shown += [point for points in calibrated.values() for point in points]
    for which, values in (("x", [p.per_user for p in shown]), ("y", [p.per_gpu for p in shown])):
        low, high = min(values), max(values)
        if high > WIDE_RANGE * low:
            getattr(axes, f"set_{which}lim")(low / 1.4, high * 1.8)
            log_axis(axes, which, 10)
        else:
            getattr(axes, f"set_{which}lim")(0, high * 1.15)
            getattr(axes, f"{which}axis").set_major_formatter(grouped)
    axes.set_xlabel("Interactivity [tok/s per user]")
    axes.set_ylabel("Throughput [output tok/s per GPU]")
    labels: list[Label] = []
    known = {label: [expected_of(deployment, engine) for deployment in cases[label]] for label in cases}
    for number, (label, (points, best, worst)) in enumerate(everything.items()):
        _draw(axes, number, points, best, worst, calibrated[label], known[label])
        labels += [Label(p.per_user, p.per_gpu, p.name) for p in (_spread(best) if best else [])]
    _legend(figure, everything, known)
    lines = [at for _, best, _ in everything.values() for at in _steps(best)]
    lines += [at for likely in calibrated.values() for at in _steps(likely)]
    place(figure, axes, labels, lines, marks_at=[(p.per_user, p.per_gpu) for p in shown])
    return figure


def _look(number: int) -> tuple[dict[str, Any], str]:
    """Colour and line style of a frontier, and its marker."""
    return {"color": COLOURS[number % len(COLOURS)], "linestyle": LINES[number % len(LINES)]}, MARKERS[number % len(MARKERS)]


def _inside(known: Expected) -> bool:
    """Whether constants were fitted to such a model."""
    return known.steps is not None and known.steps.calibrated_range


def _behind(points: Sequence[Operating], best: Sequence[Operating]) -> list[Operating]:
    """Points that fit and are not on the frontier."""
    on = {id(point) for point in best}
    return [point for point in points if point.fits and id(point) not in on]


def _draw(
    axes: Axes, number: int, points: Sequence[Operating], best: Sequence[Operating], worst: Sequence[Operating],
    likely: Sequence[Operating], known: Sequence[Expected],
) -> None:  # fmt: skip
    """One case: frontiers as steps, the band between them, marks of all points."""
    line, marker = _look(number)
    colour = line["color"]

    def draw(found: Sequence[Operating], **style: Any) -> None:
        if found:
            axes.plot([p.per_user for p in found], [p.per_gpu for p in found], **{"color": colour, "linestyle": "none", **style})

    draw(best, drawstyle="steps-pre", zorder=4, **line)
    if best and worst:
        _band(axes, best, worst, colour)
    draw(best, marker=marker, zorder=5)
    draw(likely, drawstyle="steps-pre", zorder=3, **(LIKELY if any(map(_inside, known)) else EXTRAPOLATED))
    draw(likely, marker=marker, markersize=LIKELY_MARK, zorder=3.5)
    draw(_behind(points, best), marker=marker, zorder=3, **BEHIND)
    draw([p for p in points if not p.fits], marker="x", markersize=5, alpha=0.6, zorder=3)


def _legend(
    figure: Figure, everything: Mapping[str, tuple[list[Operating], list[Operating], list[Operating]]],
    known: Mapping[str, Sequence[Expected]],
) -> None:  # fmt: skip
    """Frontiers, the band, expected times or why there are none, and what the other marks are."""
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    handles: list[Any] = []
    for number, (label, (_, best, _)) in enumerate(everything.items()):
        line, marker = _look(number)
        handles.append(Line2D([], [], marker=marker, label=label + (", bound" if best else " (nothing fits)"), **line))
    handles.append(Patch(facecolor=GREY, alpha=0.3, label="bound to serial"))
    whose: dict[str, dict[str, Expected]] = {}
    for label, times in known.items():
        for one in times:
            if one.label:
                whose.setdefault(one.label, {})[label] = one
    for text, found in whose.items():
        named = text if len(whose) == 1 else f"{', '.join(found)}: {text}"
        one = next(iter(found.values()))
        style = LIKELY if _inside(one) else EXTRAPOLATED
        handles.append(nothing_drawn(named) if one.steps is None else Line2D([], [], color=GREY, label=named, **style))
    if any(_behind(points, best) for points, best, _ in everything.values()):
        handles.append(Line2D([], [], color=GREY, marker="o", linestyle="none", label="behind the frontier", **BEHIND))
    if any(not point.fits for points, _, _ in everything.values() for point in points):
        handles.append(Line2D([], [], color=GREY, marker="x", linestyle="none", label="does not fit"))
    legend(figure, handles)


def _places(cases: Mapping[str, Sequence[Deployment]]) -> str:
    """Accelerators, and how many of each: "1, 2, 4 x h100-sxm"."""
    sizes: dict[str, set[int]] = {}
    for deployment in (d for deployments in cases.values() for d in deployments):
        mesh = getattr(deployment, "mesh", None)
        sizes.setdefault(deployment.accelerator.id, set()).add(1 if mesh is None else mesh.ranks)
    return "; ".join(
        name if numbers == {1} else f"{', '.join(map(str, sorted(numbers)))} x {name}" for name, numbers in sizes.items()
    )


def _steps(points: Sequence[Operating], number: int = 6) -> list[tuple[float, float]]:
    """Points on the line that joins a frontier's as steps, from most per GPU on."""
    found = []
    for before, here in itertools.pairwise(points):
        for part in (step / number for step in range(1, number)):
            found.append((before.per_user, before.per_gpu + part * (here.per_gpu - before.per_gpu)))
            found.append((before.per_user + part * (here.per_user - before.per_user), here.per_gpu))
    return found


def _band(axes: Any, best: Sequence[Operating], worst: Sequence[Operating], colour: str) -> None:
    """The area between two frontiers, as steps, as far as both reach."""
    import numpy

    def steps(points: Sequence[Operating], at: Any) -> Any:
        """The most per GPU among points with at least so much per user; NaN beyond them."""
        users = numpy.array([p.per_user for p in points])
        gpus = numpy.array([p.per_gpu for p in points])
        reachable = users[None, :] >= at[:, None] * (1 - 1e-12)
        return numpy.where(reachable.any(axis=1), numpy.where(reachable, gpus[None, :], -numpy.inf).max(axis=1), numpy.nan)

    corners = sorted({p.per_user for p in (*best, *worst)})
    at = numpy.array([value for corner in corners for value in (corner, corner * (1 + 1e-9))])
    upper, lower = steps(best, at), steps(worst, at)
    axes.fill_between(at, lower, upper, where=~numpy.isnan(upper + lower), color=colour, alpha=0.18, linewidth=0, zorder=2)
