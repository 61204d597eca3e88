"""A served workload over time, from a trace in Chrome's event format: requests, steps of replicas, counters."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from roofline.errors import InputError
from roofline.plots.labels import GUIDE
from roofline.plots.style import COLOURS, LINES, drawn, legend, new_figure, subtitle
from roofline.plots.ticks import grouped, time_unit

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

MICRO = 1e-6
KINDS: dict[str, tuple[str, str]] = {
    "queue": ("#D0D0D0", "///"),
    "prefill": (COLOURS[1], "\\\\\\"),
    "decode": (COLOURS[0], ""),
    "prefill + decode": (COLOURS[2], "xxx"),
    "step": (COLOURS[5], "..."),
}
"""Kind of a slice -> colour, hatch."""
MOST_REQUESTS, MOST_TRACKS = 80, 16
DENSE = 60
"""Slices of a kind in a row from which on no line is drawn between them."""


@dataclass(frozen=True)
class Slice:
    """Something that lasts: seconds, the track it lies on, and one of ``KINDS``."""

    track: str
    kind: str
    start: float
    end: float


@dataclass(frozen=True)
class Trace:
    """What a trace holds.

    Attributes:
        requests: slices by request, in the order of arrival. steps: slices by replica. counters: name -> replica -> (s, value).
    """

    requests: Mapping[str, Sequence[Slice]]
    steps: Mapping[str, Sequence[Slice]]
    counters: Mapping[str, Mapping[str, Sequence[tuple[float, float]]]]


def _kind(name: str) -> str:
    """The kind of a slice from its name: "prefill 512 + decode 3" is both."""
    words = [word for word in ("queue", "prefill", "decode") if word in name]
    return "prefill + decode" if words == ["prefill", "decode"] else words[0] if len(words) == 1 else "step"


def read_trace(path: str | Path) -> list[dict[str, Any]]:
    """The events of a file: a JSON object with traceEvents, or a list. Raises InputError."""
    try:
        data = json.loads(Path(path).expanduser().read_text(encoding="utf-8"))
    except OSError as error:
        raise InputError(f"trace: {path} cannot be read ({error.strerror})") from None
    except ValueError as error:
        raise InputError(f"trace: {path} is not JSON ({error})") from None
    found = data.get("traceEvents") if isinstance(data, dict) else data
    if not isinstance(found, list) or not all(isinstance(event, dict) for event in found):
        raise InputError(f"trace: {path} has no list of events; write one in Chrome's trace event format, with traceEvents")
    return found


def parse(events: Iterable[Mapping[str, Any]]) -> Trace:
    """Slices and counters of complete (X), asynchronous (b, e) and counter (C) events. Raises InputError for a broken one."""
    names: dict[Any, str] = {}
    steps: dict[str, list[Slice]] = {}
    open_: dict[Any, float] = {}
    requests: dict[str, list[Slice]] = {}
    counters: dict[str, dict[str, list[tuple[float, float]]]] = {}
    for number, event in enumerate(events):
        try:
            phase, pid = event["ph"], event.get("pid", 0)
            track = names.get(pid, f"process {pid}")
            if phase == "M" and event["name"] == "process_name":
                names[pid] = str(event["args"]["name"])
            elif phase == "X":
                start = float(event["ts"]) * MICRO
                end = start + float(event["dur"]) * MICRO
                steps.setdefault(track, []).append(Slice(track, _kind(str(event["name"])), start, end))
            elif phase == "C":
                for name, value in event["args"].items():
                    line = counters.setdefault(str(name), {}).setdefault(track, [])
                    line.append((float(event["ts"]) * MICRO, float(value)))
            elif phase in ("b", "e"):
                key, name = (event["id"], event["name"]), str(event["name"])
                if phase == "b":
                    open_[key] = float(event["ts"]) * MICRO
                elif _kind(name) != "step":
                    row = f"request {event['id']}"
                    requests.setdefault(row, []).append(Slice(row, _kind(name), open_.pop(key), float(event["ts"]) * MICRO))
        except (KeyError, TypeError, ValueError) as error:
            raise InputError(f"trace: event {number} is broken ({type(error).__name__}: {error})") from None
    ordered = sorted(requests.items(), key=lambda item: item[1][0].start)
    return Trace(dict(ordered), steps, counters)


def _cut(trace: Trace, start: float, end: float) -> Trace:
    """What lies between two moments, cut off there; counters keep their last value before."""

    def inside(slices: Sequence[Slice]) -> list[Slice]:
        return [Slice(s.track, s.kind, max(s.start, start), min(s.end, end)) for s in slices if s.end > start and s.start < end]

    def kept(line: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
        before = [(start, value) for moment, value in line if moment < start][-1:]
        found = before + [(moment, value) for moment, value in line if start <= moment <= end]
        return [*found, (end, found[-1][1])] if found else []

    return Trace(
        {row: cut for row, slices in trace.requests.items() if (cut := inside(slices))},
        {track: cut for track, slices in trace.steps.items() if (cut := inside(slices))},
        {name: {track: kept(line) for track, line in tracks.items()} for name, tracks in trace.counters.items()},
    )


def _rows(axes: Axes, rows: Mapping[str, Sequence[Slice]], scale: float, height: float) -> None:
    """Slices as bars, one row per key, the first on top."""
    for number, slices in enumerate(rows.values()):
        for kind in dict.fromkeys(s.kind for s in slices):
            colour, hatch = KINDS[kind]
            spans = [(s.start / scale, (s.end - s.start) / scale) for s in slices if s.kind == kind]
            edge = 0.2 if len(spans) < DENSE else 0.0
            axes.broken_barh(
                spans, (number - height / 2, height), facecolor=colour, hatch=hatch, edgecolor="white", linewidth=edge
            )
    axes.set_ylim(len(rows) - 0.4, -0.6)
    axes.grid(visible=False, axis="y")


def _span(trace: Trace) -> tuple[float, float]:
    slices = [s for rows in (*trace.requests.values(), *trace.steps.values()) for s in rows]
    if not slices:
        raise InputError("trace: it holds no requests and no steps, so there is nothing to draw")
    moments = [moment for tracks in trace.counters.values() for line in tracks.values() for moment, _ in line]
    return min(s.start for s in slices), max([*(s.end for s in slices), *moments])


@drawn
def timeline_plot(
    events: Iterable[Mapping[str, Any]], *, start: float | None = None, end: float | None = None, title: str = "",
    size: tuple[float, float] | None = None,
) -> Figure:  # fmt: skip
    """Requests (queue, prefill, decode), the steps of each replica, and counters over the same time.

    Of more requests than fit, an even sample in the order of arrival is shown, and the figure says so.

    Args:
        events: of Chrome's trace event format, from ``read_trace`` or ``roofline.serving.perfetto.events``.
        start, end: seconds between which to show; all where not given.

    Raises InputError: a broken event, or nothing to draw there.
    """
    from matplotlib.patches import Patch

    whole = parse(events)
    first, last = _span(whole)
    low, high = first if start is None else start, last if end is None else end
    if not low < high:
        raise InputError(f"start: {low:g} s is not before the end, {high:g} s")
    trace = _cut(whole, low, high)
    _span(trace)
    scale, unit = time_unit(high) if high >= 1e-4 else (1e-6, "us")
    number = len(trace.requests)
    shown = list(trace.requests.items())
    if number > MOST_REQUESTS:
        shown = [shown[round(i * (number - 1) / (MOST_REQUESTS - 1))] for i in range(MOST_REQUESTS)]
    if len(trace.steps) > MOST_TRACKS:
        raise InputError(f"trace: {len(trace.steps)} tracks are more than {MOST_TRACKS}")
    heights = [max(0.9, min(3.6, 0.16 * len(shown)))] if shown else []
    heights += [0.45 + 0.3 * len(trace.steps)] if trace.steps else []
    heights += [1.0] * len(trace.counters)
    figure = new_figure(title or "A served workload", size, (8.0, 1.5 + sum(heights)))
    grid = list(figure.subplots(len(heights), 1, sharex=True, squeeze=False, height_ratios=heights)[:, 0])
    _title(grid[0], number, len(shown))
    panels = list(grid)
    if shown:
        axes = panels.pop(0)
        _rows(axes, dict(shown), scale, 0.8)
        axes.set_ylabel("Requests")
        axes.set_yticks([])
    if trace.steps:
        axes = panels.pop(0)
        _rows(axes, trace.steps, scale, 0.7)
        axes.set_yticks(range(len(trace.steps)), list(trace.steps))
    for axes, (name, tracks) in zip(panels, trace.counters.items(), strict=True):
        alone = {"label": GUIDE} if len(tracks) == 1 else {}
        for order, (_, line) in enumerate(tracks.items()):
            axes.step([moment / scale for moment, _ in line], [value for _, value in line], where="post", linewidth=1.3,
                      color=COLOURS[order % len(COLOURS)], linestyle=LINES[order % len(LINES)], **alone)  # fmt: skip
        axes.set_ylim(0, 1.15 * max([1.0, *(value for line in tracks.values() for _, value in line)]))
        axes.yaxis.set_major_formatter(grouped)
        axes.set_ylabel(name.replace(" ", "\n").capitalize())
        axes.yaxis.get_major_locator().set_params(nbins=4, integer=True)
    grid[-1].set_xlabel(f"Time [{unit}]")
    grid[-1].set_xlim(low / scale, high / scale)
    grid[-1].xaxis.set_major_formatter(grouped)
    present = {s.kind for rows in (*trace.requests.values(), *trace.steps.values()) for s in rows}
    handles: list[Any] = [Patch(facecolor=c, hatch=h, edgecolor="white", label=k) for k, (c, h) in KINDS.items() if k in present]
    legend(figure, [*handles, *_lines(trace)])
    return figure


def _title(axes: Axes, number: int, shown: int) -> None:
    many = (
        f"every {number / shown:.1f}th of {number:,} requests"
        if shown < number
        else f"{number:,} request{'' if number == 1 else 's'}"
    )
    subtitle(axes, f"{many}, in the order of arrival" if number else "steps")


def _lines(trace: Trace) -> list[Any]:
    """Legend entries of replicas, where counters show several."""
    from matplotlib.lines import Line2D

    tracks = list(dict.fromkeys(track for lines in trace.counters.values() for track in lines))
    if len(tracks) < 2:
        return []
    return [
        Line2D([], [], color=COLOURS[n % len(COLOURS)], linestyle=LINES[n % len(LINES)], label=track)
        for n, track in enumerate(tracks)
    ]
