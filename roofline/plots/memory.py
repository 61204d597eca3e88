"""What each rank holds against what it has: weights, state and workspace, stacked."""

from __future__ import annotations

import textwrap
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from roofline.errors import InputError
from roofline.inference import Deployment
from roofline.memory import Memory
from roofline.numeric import ceil_div
from roofline.plots.curves import Cases, named, place_of, source_of
from roofline.plots.style import COLOURS, GREY, INK, drawn, legend, new_figure, subtitle
from roofline.plots.ticks import grouped
from roofline.units import GIB, capacity
from roofline.work import Work

if TYPE_CHECKING:
    from matplotlib.figure import Figure

PARTS = {"weights": (COLOURS[0], ""), "KV and state": (COLOURS[1], "///"), "workspace": (COLOURS[2], "...")}
"""Part of a stack -> colour, hatch."""
MOST_BARS = 24
RED = "#A63A00"
SHORT: dict[str, Any] = {"edgecolor": RED, "linewidth": 1.8}
FREE: dict[str, Any] = {"edgecolor": GREY, "linewidth": 0.8, "linestyle": ":"}
"""Outlines of what is missing, and of what is left."""


@dataclass(frozen=True)
class Rank:
    """Ranks that hold the same.

    Attributes:
        label: which. memory: of each of them.
    """

    label: str
    memory: Memory

    @property
    def parts(self) -> dict[str, float]:
        """Bytes by part of the stack."""
        return {
            "weights": float(self.memory.weight_bytes),
            "KV and state": float(self.memory.kv_bytes + self.memory.new_kv_bytes),
            "workspace": float(self.memory.workspace_bytes),
        }


def ranks_of(deployment: Deployment, batch: int, context: int, source: int = 0) -> list[Rank]:
    """What the ranks of a decode step hold, pipeline stages with the same contents together."""
    whole = deployment.decode(batch, context, source=source_of(deployment, source))
    mesh = getattr(deployment, "mesh", None)
    stages = getattr(getattr(deployment, "ranks", None), "stages", ())
    if mesh is None or len(stages) < 2:
        number = 1 if mesh is None else mesh.ranks
        return [Rank("1 GPU" if number == 1 else f"each of {number} GPUs", whole.memory)]
    local, each = ceil_div(batch, mesh.dp), mesh.ranks // mesh.pp
    micro = ceil_div(local, min(local, mesh.microbatches or mesh.pp))
    found: list[tuple[int, int, Memory]] = []
    for number, stage in enumerate(stages):
        _, workspace = stage.step(Work(micro, 1, context, all_logits=True))
        before = local * stage.state_bytes(context)
        memory = Memory(
            stage.weight_bytes, before, workspace, whole.memory.capacity_bytes, local * stage.state_bytes(context + 1) - before
        )
        if found and found[-1][2] == memory:
            found[-1] = (found[-1][0], number, memory)
        else:
            found.append((number, number, memory))
    return [
        Rank(f"stage {first}" + (f"–{last}" if last > first else "") + (f"\neach of {each}" if each > 1 else ""), memory)
        for first, last, memory in found
    ]


@drawn
def memory_plot(
    cases: Cases, batch: int, context: int, *, source: int = 0, title: str = "", size: tuple[float, float] | None = None
) -> Figure:
    """Bytes that each rank holds during a decode step, stacked, against the memory that a process can use.

    Cases stand side by side, pipeline stages within them; stages that hold the same are one bar. Above each bar stands
    what is needed of the capacity, and where it does not fit, how much is missing.

    Raises InputError: nothing to draw, or more bars than fit beside each other.
    """
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    bars = [
        (label, deployment, rank)
        for label, deployment in named(cases).items()
        for rank in ranks_of(deployment, batch, context, source)
    ]
    if len(bars) > MOST_BARS:
        raise InputError(f"cases: {len(bars)} bars are more than {MOST_BARS}; leave some cases or pipeline stages out")
    models = dict.fromkeys(deployment.model.name for deployment in named(cases).values())
    figure = new_figure(title or f"Memory of {', '.join(models)}", size, (max(5.5, min(30.0, 2.2 + 1.25 * len(bars))), 5.0))
    axes = figure.add_subplot()
    subtitle(axes, f"decode step of batch {batch:,} at context {context:,}; capacity: what a process can use")
    top = max(max(sum(rank.parts.values()), float(rank.memory.capacity_bytes)) for _, _, rank in bars) / GIB
    axes.set_ylim(0, top * 1.22)
    axes.set_xlim(-0.6, len(bars) - 0.4)
    for number, (_, _, rank) in enumerate(bars):
        _bar(axes, number, rank, top)
    one = len({label for label, _, _ in bars}) == 1
    axes.set_xticks(range(len(bars)), [_name(label, deployment, rank, one) for label, deployment, rank in bars], fontsize=8)
    axes.grid(visible=False, axis="x")
    axes.set_ylabel("Memory per GPU [GiB]")
    axes.yaxis.set_major_formatter(grouped)
    handles: list[Any] = [Patch(facecolor=c, hatch=h, edgecolor="white", label=name) for name, (c, h) in PARTS.items()]
    handles.append(Line2D([], [], color=INK, linestyle=(0, (5, 2)), label="capacity"))
    fits = [bool(rank.memory.fits) for _, _, rank in bars]
    if any(fits):
        handles.append(Patch(facecolor="none", label="free", **FREE))
    if not all(fits):
        handles.append(Patch(facecolor="none", label="does not fit", **SHORT))
    legend(figure, handles)
    return figure


def _name(label: str, deployment: Deployment, rank: Rank, one: bool) -> str:
    """What stands under a bar."""
    lines = [] if one else textwrap.wrap(label, 17)
    mesh = getattr(deployment, "mesh", None)
    chip = deployment.accelerator.id
    if mesh is not None and mesh.flags in label:
        lines.append(f"{mesh.ranks} x {chip}")
    elif one or place_of(deployment) != chip or not label.endswith(f" on {chip}"):
        lines += textwrap.wrap(place_of(deployment), 17)
    return "\n".join([*lines, rank.label])


def _bar(axes: Any, number: int, rank: Rank, top: float) -> None:
    bottom, limit = 0.0, float(rank.memory.capacity_bytes) / GIB
    for name, amount in rank.parts.items():
        colour, hatch = PARTS[name]
        height = amount / GIB
        axes.bar(number, height, 0.62, bottom, color=colour, hatch=hatch, edgecolor="white", linewidth=0.6, zorder=2)
        if height > 0.055 * top:
            axes.text(number, bottom + height / 2, f"{height:,.2f}", ha="center", va="center", fontsize=8, zorder=4,
                      color=INK, bbox={"facecolor": "white", "edgecolor": "none", "alpha": 0.85, "pad": 1.2})  # fmt: skip
        bottom += height
    axes.plot([number - 0.42, number + 0.42], [limit, limit], color=INK, linestyle=(0, (5, 2)), linewidth=1.6, zorder=3)
    fits = bool(rank.memory.fits)
    held = f"{bottom:,.2f} of {limit:,.2f}"
    text = f"{held}\n{100 * bottom / limit:,.0f} %" if fits else f"{held}\n{capacity(-rank.memory.spare_bytes)} short"
    axes.text(number, max(bottom, limit) + 0.015 * top, text, ha="center", va="bottom", fontsize=8,
              color=INK if fits else RED, fontweight="normal" if fits else "bold")  # fmt: skip
    if not fits:
        axes.bar(number, bottom - limit, 0.62, limit, color="none", zorder=5, **SHORT)
    else:
        axes.bar(number, limit - bottom, 0.62, bottom, color="none", zorder=1, **FREE)
