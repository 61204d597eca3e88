"""How a model is split over several GPUs, as options."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

import typer

from roofline.cli import sweeps
from roofline.cli.bundles import Bundle
from roofline.errors import InputError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from roofline.cli.points import Point
    from roofline.parallel.mesh import Mesh

AXES = {
    "tp": ("--tp", "Tensor parallelism: GPUs that cut each layer."),
    "pp": ("--pp", "Pipeline stages."),
    "dp": ("--dp", "Attention data parallelism: groups with sequences of their own that share the experts."),
    "ep": ("--ep", "GPUs over which experts are spread; divides tp x dp."),
    "sp": ("--sp", "GPUs of a tp group over which cached tokens are spread."),
}
"""Axis -> flag and help."""


@dataclass(frozen=True)
class Meshes:
    """The meshes that were asked for, as sizes of each axis; none where no option was given.

    Attributes:
        sizes: axis -> values. node: GPUs of a server, where said. more: what else a mesh is told, where said.
    """

    sizes: dict[str, list[int]]
    node: int | None
    more: dict[str, Any]

    def all(self) -> list[Mesh | None]:
        """Every combination; [None], one GPU, where nothing was asked for. Raises InputError where one does not fit together."""
        if not self.sizes:
            if self.node is not None:
                raise InputError("node: a server's size matters with several GPUs only; add --tp, --pp or --dp")
            if self.more:
                raise InputError(f"{next(iter(self.more))}: it matters with several GPUs only; add --tp, --pp, --dp or --ep")
            return [None]
        from roofline.parallel.mesh import Mesh

        axes = [self.sizes.get(axis, [1]) for axis in AXES]
        return [Mesh(tp, pp, dp, ep, sp, node=self.node, **self.more) for tp, pp, dp, ep, sp in itertools.product(*axes)]


def _meshes(node: str | None, imbalance: str | None, microbatches: str | None, **given: list[str] | None) -> Meshes:
    sizes = {axis: sweeps.whole_numbers(texts, axis) for axis, texts in given.items() if texts}
    more: dict[str, Any] = {}
    if imbalance:
        values = sweeps.at_least([imbalance], "imbalance", 1)
        if len(values) != 1:
            raise InputError(f"imbalance: {imbalance!r} are several values; give one")
        more["imbalance"] = values[0]
    if microbatches:
        more["microbatches"] = sweeps.whole_numbers([microbatches], "microbatches")[0]
    return Meshes(sizes, sweeps.whole_numbers([node], "node")[0] if node else None, more)


MESH_OPTIONS = Bundle(
    {
        **{
            axis: (Annotated[list[str] | None, typer.Option(flag, metavar="N|LIST", help=text)], None)
            for axis, (flag, text) in AXES.items()
        },
        "node": (
            Annotated[
                str | None, typer.Option("--node", metavar="N", help="GPUs of one server.  [default: what the GPU's file says]")
            ],
            None,
        ),
        "imbalance": (
            Annotated[
                str | None,
                typer.Option("--imbalance", metavar="X", help="Rows of the busiest expert rank over the mean.  [default: 1]"),
            ],
            None,
        ),
        "microbatches": (
            Annotated[
                str | None,
                typer.Option("--microbatches", metavar="N", help="Batches in flight in the pipeline.  [default: one per stage]"),
            ],
            None,
        ),
    },
    _meshes,
)


def notes(points: Sequence[Point], *, memory_only: bool = False) -> list[str]:
    """What rests on the meshes of some points: whose memory it is, what the bound of collectives leaves out."""
    found: dict[str, None] = {}
    for point in points:
        if point.mesh is None or point.mesh.ranks == 1:
            continue
        times = "" if memory_only else "; times and rates are of all together"
        found[f"memory is that of the GPU with most to hold{times}"] = None
        if not memory_only:
            found[f"{point.mesh.flags} on {point.accelerator.id}: {_exchange(point)}"] = None
    return list(found)


def _exchange(point: Point) -> str:
    from roofline.units import traffic

    ranks: Any = point.ranks
    sent = ", ".join(f"{traffic(amount)} over {name}" for name, amount in point.step.cost.sent.items()) or "nothing"
    rates = {name: point.accelerator.links[name].bandwidth.value for name in point.step.cost.sent}
    by = ", ".join(f"{name} at {float(rate) / 1e9:,.0f} GB/s" for name, rate in rates.items())
    algorithms = sorted({c.algorithm for _, c in ranks.collectives if c.operation == "all-reduce"})
    how = f", all-reduce by {'/'.join(algorithms)}" if algorithms else ""
    return f"each GPU sends {sent} per step ({by}{how}) in {ranks.hops:,} hops, whose latency is left out"
