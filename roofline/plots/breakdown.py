"""Where a step's time goes: the kernels of a step by what they are for, as shares of all of them."""

from __future__ import annotations

import textwrap
from typing import TYPE_CHECKING, Any

from roofline.errors import InputError
from roofline.plots.curves import Cases, named, place_of, source_of
from roofline.plots.expected import ENGINE
from roofline.plots.kernels import ROLES, Kernel, kernels, work_of
from roofline.plots.style import INK, drawn, legend, new_figure, subtitle
from roofline.units import latency

if TYPE_CHECKING:
    from collections.abc import Sequence

    from matplotlib.figure import Figure

MOST_BARS = 30
WRITTEN_FROM = 0.06
"""Share from which its percentage stands in a bar."""


def by_role(found: Sequence[Kernel], expected: bool) -> dict[str, float]:
    """Expected seconds, or those of the bounds, by role, in the order of ``ROLES``."""
    seconds: dict[str, float] = {}
    for kernel in found:
        seconds[kernel.role] = seconds.get(kernel.role, 0.0) + (kernel.seconds if expected else kernel.bound)
    return {role: seconds[role] for role in ROLES if role in seconds}


@drawn
def breakdown_plot(
    cases: Cases, batches: Sequence[int], context: int, *, phase: str = "decode", new_tokens: int = 1024, source: int = 0,
    engine: str = ENGINE, title: str = "", size: tuple[float, float] | None = None,
) -> Figure:  # fmt: skip
    """Shares of a step's kernels in their summed time, one bar per case and batch, the time of the whole step beside it.

    Kernels count at their expected times where all of them are calibrated (``engine``, "none" for bounds), else at their
    own bounds, whose sum exceeds the step's bound, in which all kernels may overlap. A step that does not fit says so.

    Args:
        phase: "decode" at ``context``, or "prefill" of ``new_tokens`` behind nothing.

    Raises InputError: nothing to draw, or more bars than fit.
    """
    from matplotlib.patches import Patch

    found_in: list[tuple[str, list[Kernel]]] = []
    deployments = named(cases)
    for label, deployment in deployments.items():
        for batch in batches:
            away = source_of(deployment, source)
            cached = context if phase == "decode" else 0
            found = kernels(deployment, work_of(phase, batch, cached, new_tokens, away), phase, engine)
            name = f"batch {batch:,}" if len(deployments) == 1 else f"{label}, batch {batch:,}" if len(batches) > 1 else label
            step = deployment.decode if phase == "decode" else deployment.prefill
            if not step(batch, context if phase == "decode" else new_tokens, source=away).memory.fits:
                name += " (does not fit)"
            found_in.append((name, found))
    calibrated = all(k.expected is not None for _, found in found_in for k in found if k.unit)
    rows = [(name, by_role(found, calibrated)) for name, found in found_in]
    if not rows:
        raise InputError("batch: there is nothing to draw; give one or more batches")
    if len(rows) > MOST_BARS:
        raise InputError(f"batch: {len(rows)} bars are more than {MOST_BARS}; leave some cases or batches out")
    what = f"decode at context {context:,}" if phase == "decode" else f"prefill of {new_tokens:,} tokens"
    places = ", ".join(dict.fromkeys(place_of(d) for d in deployments.values()))
    kind = f"expected times of {engine}'s kernels" if calibrated else "each kernel at its own bound, datasheet roofs"
    names = ", ".join(dict.fromkeys(d.model.name for d in deployments.values()))
    shown = title or f"Where the time of a step goes: {names}"
    names_of = [textwrap.wrap(name, 30) for name, _ in rows]
    longest = max(len(line) for lines in names_of for line in lines)
    figure = new_figure(shown, size, (7.0 + 0.05 * longest, max(2.6, 1.7 + 0.42 * len(rows))))
    axes = figure.add_subplot()
    fixed = "" if len(batches) > 1 else f", batch {batches[0]:,}"
    subtitle(axes, f"{what}{fixed} on {places}; {kind}; right: sum of all kernels", 0.4 + 0.07 * longest)
    axes.set_xlim(0, 100)
    axes.set_ylim(len(rows) - 0.4, -0.6)
    for number, (_, seconds) in enumerate(rows):
        _bar(axes, number, seconds, sum(seconds.values()))
    axes.set_yticks(range(len(rows)), ["\n".join(lines) for lines in names_of])
    axes.grid(visible=False, axis="y")
    axes.set_xlabel("Share of the summed time of all kernels [%]")
    present = [role for role in ROLES if any(role in seconds for _, seconds in rows)]
    legend(figure, [Patch(facecolor=ROLES[r][0], hatch=ROLES[r][2], edgecolor="white", label=r) for r in present])
    return figure


def _bar(axes: Any, number: int, seconds: dict[str, float], whole: float) -> None:
    left = 0.0
    for role, amount in seconds.items():
        colour, _, hatch = ROLES[role]
        share = 100 * amount / whole
        axes.barh(number, share, 0.66, left, color=colour, hatch=hatch, edgecolor="white", linewidth=0.6, zorder=2)
        if share >= 100 * WRITTEN_FROM:
            axes.text(left + share / 2, number, f"{share:.0f}", ha="center", va="center", fontsize=8, color=INK, zorder=4,
                      bbox={"facecolor": "white", "edgecolor": "none", "alpha": 0.85, "pad": 1.0})  # fmt: skip
        left += share
    axes.annotate(latency(whole), (100, number), xytext=(5, 0), textcoords="offset points", va="center", fontsize=8,
                  annotation_clip=False)  # fmt: skip
