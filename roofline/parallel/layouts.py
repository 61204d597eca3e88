"""Every way to lay a model out on a number of accelerators."""

from __future__ import annotations

from dataclasses import dataclass

from roofline.accelerator import Accelerator
from roofline.components.moe import MoE
from roofline.errors import InputError, RooflineError
from roofline.model import Model
from roofline.parallel.mesh import Mesh
from roofline.parallel.ranks import Sharded

MOST_RANKS = 1024


@dataclass(frozen=True)
class Layouts:
    """The meshes that a model can be laid out on, and those it cannot with the reason.

    Attributes:
        possible: whatever memory says. refused: (mesh, why).
    """

    possible: tuple[Mesh, ...]
    refused: tuple[tuple[Mesh, str], ...]


def _divisors(number: int) -> list[int]:
    return [size for size in range(1, number + 1) if number % size == 0]


def layouts(model: Model, accelerator: Accelerator, ranks: int, node: int | None = None) -> Layouts:
    """Every mesh of tensor, pipeline and, with experts, attention data and expert parallelism over ``ranks`` accelerators.

    Raises InputError for a number out of range.
    """
    if not 1 <= ranks <= MOST_RANKS:
        raise InputError(f"gpus: {ranks} is out of range; give 1 to {MOST_RANKS}")
    sparse = any(isinstance(block, MoE) for layer in model.layers for block in layer.blocks)
    possible, refused = [], []
    for pp in _divisors(ranks):
        for dp in _divisors(ranks // pp) if sparse else [1]:
            tp = ranks // pp // dp
            for ep in dict.fromkeys([1, tp * dp]) if sparse else [1]:
                mesh = Mesh(tp, pp, dp, ep, node=node)
                try:
                    Sharded(model, accelerator, mesh)
                except RooflineError as error:
                    refused.append((mesh, str(error)))
                else:
                    possible.append(mesh)
    return Layouts(tuple(possible), tuple(refused))
