"""Decode steps over a range of batches: what latency and throughput curves are drawn from."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from roofline.errors import InputError
from roofline.inference import LARGEST_BATCH, Deployment
from roofline.memory import Memory, largest
from roofline.plots.expected import ENGINE, expected_of
from roofline.units import capacity

FINE = 240
"""Batches at which a curve is evaluated between its first and its last."""
Cases = Deployment | Mapping[str, Deployment]


def named(cases: Cases) -> dict[str, Deployment]:
    """Deployments by label; a single one goes by its model's name. Raises InputError where there is none."""
    found = {cases.model.name: cases} if isinstance(cases, Deployment) else dict(cases)
    if not found:
        raise InputError("cases: there is nothing to draw; give a Deployment, or several by name")
    return found


def source_of(deployment: Deployment, source: int) -> int:
    """The length of an encoder's output; 0 for a model without an encoder."""
    return source if deployment.model.encoder is not None else 0


@dataclass(frozen=True)
class Curve:
    """Decode steps of one deployment at rising batches; arrays have one entry per batch.

    Attributes:
        label: for the legend. deployment: what runs.
        batch: whole batches. bound, serial: seconds of a step. expected: calibrated seconds, None where there are none.
        inside: at which batches these are inside what the constants were fitted to.
        expected_label: what the legend says of them, or why there are none.
        last: the largest batch that fits, None where nothing limits it; 0 where not even one does.
        reason: why the next batch does not fit, "" where nothing limits it.
    """

    label: str
    deployment: Deployment
    batch: Any
    bound: Any
    serial: Any
    expected: Any
    inside: Any
    expected_label: str
    last: int | None
    reason: str

    @property
    def fits(self) -> Any:
        """Which batches fit: an array of booleans."""
        return self.batch <= (float("inf") if self.last is None else self.last)


def _reason(memory: Memory) -> str:
    """What is needed and what there is."""
    parts = {"weights": memory.weight_bytes, "KV": memory.kv_bytes + memory.new_kv_bytes, "workspace": memory.workspace_bytes}
    needed = " + ".join(
        f"{name} {capacity(size).removesuffix(' GiB')}" for name, size in parts.items() if size > memory.required_bytes / 200
    )
    return f"{needed} > {capacity(memory.capacity_bytes)}"


def fine_batches(batches: Sequence[int]) -> Any:
    """Whole batches between the smallest and the largest, evenly spaced on a logarithmic axis, as floats."""
    import numpy

    if len(set(batches)) < 2:
        raise InputError("batch: a curve needs two or more batches; write a range such as 1:512:x2")
    low, high = min(batches), max(batches)
    spaced = numpy.geomspace(low, high, FINE)
    return numpy.unique(numpy.concatenate([numpy.round(spaced), numpy.array(batches, dtype=float)]))


def curve(
    label: str, deployment: Deployment, batches: Sequence[int], context: int, source: int = 0, engine: str = ENGINE
) -> Curve:
    """The steps of a deployment between its smallest and largest batch, at one context."""
    import numpy

    source, known = source_of(deployment, source), expected_of(deployment, engine)
    fine = fine_batches(batches)
    step = deployment.decode(fine, context, source=source)
    found = largest(lambda batch: deployment.decode(batch, context, source=source).memory, LARGEST_BATCH)
    reason = "" if found.size is None else _reason(deployment.decode(found.size + 1, context, source=source).memory)
    flat = numpy.ones_like(fine)
    return Curve(
        label, deployment, fine, step.bound_s * flat, step.serial_s * flat, known.decode(deployment, fine, context),
        known.inside(deployment, fine), known.label, found.size, reason,
    )  # fmt: skip


def subtitle_of(curves: Sequence[Curve], context: int) -> str:
    """What all curves share: context, accelerators, roofs."""
    gpus = ", ".join(dict.fromkeys(place_of(curve.deployment) for curve in curves))
    if all(curve.deployment.convention == "lecture" for curve in curves):
        return f"decode at context {context:,} on {gpus}; bytes of parameters and cache over the bandwidth, nothing else"
    return (
        f"decode at context {context:,} on {gpus}; band from perfect overlap (bound, the line) to none (serial), datasheet roofs"
    )


def place_of(deployment: Deployment) -> str:
    """What a deployment runs on: "h100-sxm", or "8 x h100-sxm (--tp 8)"."""
    mesh = getattr(deployment, "mesh", None)
    name = deployment.accelerator.id
    return name if mesh is None or mesh.ranks == 1 else f"{mesh.ranks} x {name} ({mesh.flags})"


def decades(values: Any) -> float:
    """How many powers of ten positive values span."""
    return math.log10(float(values.max()) / float(values.min()))
