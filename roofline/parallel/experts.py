"""Experts over several ranks: cut like dense layers, spread whole, or both; and the tokens that travel to them.

With tensor-parallel attention every rank holds every token, so spread experts need no exchange but the all-reduce that
dense layers need as well. With attention data parallelism each rank holds tokens of its own: they are gathered to cut
experts and their results scattered back, or sent to the ranks of their experts and returned (all-to-all).
Sources: DeepSeek-V3 report (arXiv 2412.19437), section 3.2.2, and DeepEP: a token goes to each rank once, however many of
its experts live there; vllm/model_executor/layers/fused_moe.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from fractions import Fraction
from functools import cached_property
from typing import Any, ClassVar

from roofline.components.base import Component, Params, State
from roofline.components.collective import Collective
from roofline.components.moe import MoE
from roofline.cost import Cost
from roofline.numeric import ratio, scale, whole
from roofline.parallel.mesh import Mesh, Place
from roofline.parallel.shard import Pieces, divided, narrowed
from roofline.work import Batch, Ragged


@dataclass(frozen=True)
class Gathered(Component):
    """A kernel that runs over the tokens of ``ranks`` ranks with equal work.

    Attributes:
        inner: the kernel.
    """

    kind: ClassVar[str] = "gathered"

    inner: Component
    ranks: int

    @property
    def name(self) -> str:  # type: ignore[override]
        """The name of the kernel."""
        return self.inner.name

    @cached_property
    def parts(self) -> tuple[Component, ...]:
        kernels = self.inner.parts
        return (self,) if kernels == (self.inner,) else tuple(Gathered(part, self.ranks) for part in kernels)

    def cost(self, work: Batch) -> Cost:
        groups = tuple(replace(group, B=scale(group.B, self.ranks)) for group in work.groups)
        return self.inner.cost(groups[0] if len(groups) == 1 else Ragged(groups))

    def params(self) -> Params:
        return self.inner.params()

    def active_params(self) -> Any:
        return self.inner.active_params()

    def state(self) -> State:
        return self.inner.state()


def distinct_ranks(E: int, k: int, ranks: int) -> Any:
    """Expected number of ranks that hold at least one of a token's k experts, E experts spread evenly; exact.

    >>> distinct_ranks(256, 8, 1), round(float(distinct_ranks(256, 8, 8)), 2)
    (1, 5.31)
    """
    elsewhere = E - E // ranks
    missed = Fraction(1)
    for index in range(k):
        missed *= Fraction(max(0, elsewhere - index), E - index)
    return whole(ranks * (1 - missed))


def shard_experts(block: MoE, mesh: Mesh, place: Place) -> Component:
    """A rank's part of an expert block, with its exchanges; its output is still to be summed over the tp ranks.

    Args:
        place: where the tp x dp ranks that share the experts lie.

    Raises InputError where experts, or an expert's width, do not divide.
    """
    held = block.E if mesh.ep == 1 else divided(block.E, mesh.ep, "experts (ep)")
    formats = (block.weight,) if block.down_weight is None else (block.weight, block.down_weight)
    routed = replace(block, F=narrowed(block.F, mesh.moe_tp, "width of an expert", *formats), E=held, k=_rows(block, mesh))
    shared = block
    if block.shared_F:
        stored = block.weight if block.shared_weight is None else block.shared_weight
        shared = replace(block, shared_F=narrowed(block.shared_F, mesh.tp, "width of the shared experts", stored))
    width = block.D if block.latent is None else block.latent
    exchange = _exchange(block, mesh, place, width)
    experts: Component = Pieces(routed.experts, name=block.name)
    if mesh.dp > 1:
        experts = Gathered(experts, mesh.dp)
    inner = (*exchange[:1], experts, *exchange[1:])
    if block.latent is not None:
        around = block._routed()
        inner = (around[0], *inner, *around[1 + len(block.experts) :])
    pieces = (*block.router, *inner, *shared.shared, *block._sum())
    return Pieces(pieces, name=block.name)


def _rows(block: MoE, mesh: Mesh) -> Any:
    """Experts of this rank that a token picks, on average; the busiest rank's with imbalance, at most all its experts."""
    return whole(min(Fraction(block.E // mesh.ep), Fraction(block.k, mesh.ep) * mesh.imbalance))


def _exchange(block: MoE, mesh: Mesh, place: Place, width: Any) -> tuple[Component, ...]:
    """How tokens reach their experts and return, where ranks hold tokens of their own; nothing with dp 1."""
    if mesh.dp == 1:
        return ()
    common: dict[str, Any] = {"link": place.link, "activation": block.activation}
    if mesh.ep == 1:
        servers = min(mesh.dp, place.servers)
        return (
            Collective("all-gather", mesh.dp, width, **common, servers=servers, name="gather_tokens"),
            Collective("reduce-scatter", mesh.dp, width, **common, servers=servers, name="scatter_tokens"),
        )
    share = ratio(distinct_ranks(block.E, block.k, mesh.ep), mesh.tp)
    return tuple(
        Collective("all-to-all", mesh.ep, width, copies=share, servers=min(mesh.ep, place.servers), **common, name=name)
        for name in ("dispatch", "combine")
    )
