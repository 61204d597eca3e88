"""A model as the ranks of a mesh hold it: one smaller model per pipeline stage, collectives among its kernels."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from roofline.accelerator import Accelerator
from roofline.components.altup import LayerEmbeddings
from roofline.components.attention import Attention, AttentionBlock
from roofline.components.base import Block, Component, Params, State
from roofline.components.collective import Collective
from roofline.components.latent import LatentAttention
from roofline.components.linear import Embedding, Linear
from roofline.components.mla import MLA
from roofline.components.moe import MoE
from roofline.cost import Cost
from roofline.errors import InputError, UnsupportedModel
from roofline.model import Layer, Model
from roofline.numeric import ceil_div
from roofline.parallel.experts import shard_experts
from roofline.parallel.mesh import NETWORK, Mesh, Place, padded_vocabulary, require, stage_layers
from roofline.parallel.shard import divided, shard
from roofline.work import Work


@dataclass(frozen=True)
class SpreadKernel(Component):
    """A kernel that keeps, or attends to, 1/ways of the cached tokens.

    Attributes:
        inner: the kernel; an attention core with the heads of all ``ways`` ranks.
    """

    inner: Component
    ways: int

    @property
    def kind(self) -> str:  # type: ignore[override]
        """The kind of the kernel."""
        return self.inner.kind

    @property
    def name(self) -> str:  # type: ignore[override]
        """The name of the kernel."""
        return self.inner.name

    def group_cost(self, work: Work) -> Cost:
        return self.inner.cost(replace(work, S=ceil_div(work.S, self.ways)))

    def params(self) -> Params:
        return self.inner.params()

    def state(self) -> State:
        return tuple(replace(piece, every=piece.every * self.ways) for piece in self.inner.state())


@dataclass(frozen=True)
class SpreadAttention(Block):
    """Attention whose cache is spread by tokens over ``ways`` ranks (decode context parallelism, flash decoding's split).

    Queries of all heads in the group are gathered, each rank attends to its tokens, and partial outputs are exchanged
    with their log-sum-exp, one fp32 per head, to be merged.
    Source: vllm/attention/ops/common.py (dcp), vllm-project/vllm#23734.

    Attributes:
        inner: the rank's attention with its own heads. link: joins the ranks.
    """

    inner: Any
    ways: int
    link: str
    name: str = "attention"

    @cached_property
    def parts(self) -> tuple[Component, ...]:
        parts: list[Component] = []
        for part in self.inner.parts:
            if not isinstance(part, (Attention, LatentAttention)):
                parts.append(SpreadKernel(part, self.ways) if part.state() else part)
                continue
            heads, query = part.N, part.H
            value = part.value_dim if part.value_dim is not None else part.H
            common: dict[str, Any] = {"link": self.link, "activation": self.inner.activation}
            parts += [
                Collective("all-gather", self.ways, heads * query, **common, name="gather_queries"),
                SpreadKernel(replace(part, N=heads * self.ways), self.ways),
                Collective("reduce-scatter", self.ways, heads * (value + 2), **common, name="merge_outputs"),
            ]
        return tuple(parts)

    def prefill_form(self) -> Component:
        """A prefill attends before its keys are spread: the attention without spreading."""
        form: Component = self.inner.prefill_form()
        return form


def _spread(block: Component, mesh: Mesh, place: Place) -> Component:
    if mesh.sp == 1 or not isinstance(block, (AttentionBlock, MLA)):
        return block
    if place.servers > 1:
        raise UnsupportedModel("sp: spreading a cache over several servers is not supported")
    if any(piece.window is not None or piece.every != 1 or piece.name == "index" for piece in block.state()):
        raise UnsupportedModel("sp: spreading the cache of windowed, compressed or sparse attention is not supported")
    return SpreadAttention(block, mesh.sp, place.link)


@dataclass(frozen=True)
class Sharded:
    """A model on a mesh of one kind of accelerator.

    Attributes:
        model: whole. accelerator: of every rank. mesh: how it is split.

    Raises InputError where something does not divide, UnsupportedModel where no rule covers a component.
    """

    model: Model
    accelerator: Accelerator
    mesh: Mesh

    def __post_init__(self) -> None:
        if self.model.encoder is not None and self.mesh.ranks > 1:
            raise UnsupportedModel(f"{self.model.name}: parallelism of encoder-decoders is not supported")
        if self.mesh.ep > 1 and not self.has_experts:
            raise InputError(f"ep: {self.model.name} has no experts to spread")
        _ = self.stages

    @cached_property
    def has_experts(self) -> bool:
        """Whether any layer routes."""
        return any(isinstance(block, MoE) for layer in self.model.layers for block in layer.blocks)

    @cached_property
    def places(self) -> dict[str, Place]:
        """Where the ranks that share tokens ("tp") and those that share experts lie."""
        mesh = self.mesh
        return {
            "tp": mesh.place(self.accelerator, mesh.tp),
            "experts": mesh.place(self.accelerator, mesh.tp * mesh.dp),
        }

    def _reduce(self, width: Any, activation: Any, name: str = "all_reduce") -> Component:
        place = self.places["tp"]
        algorithm = self.mesh.all_reduce(self.accelerator, place.link)
        return Collective(
            "all-reduce", self.mesh.tp, width, place.link, algorithm, servers=place.servers, activation=activation, name=name
        )

    def _layer(self, layer: Layer) -> Layer:
        blocks: list[Component] = []
        for block in layer.blocks:
            if isinstance(block, MoE) and self.mesh.tp * self.mesh.dp > 1:
                part, summed = shard_experts(block, self.mesh, self.places["experts"]), self.mesh.tp > 1
            else:
                part, summed = shard(block, self.mesh.tp)
            blocks.append(_spread(part, self.mesh, self.places["tp"]))
            if summed:
                width = getattr(block, "D", None) or self.width
                blocks.append(self._reduce(width, getattr(block, "activation", self.table.activation)))
        return replace(layer, blocks=tuple(blocks))

    @cached_property
    def table(self) -> Embedding:
        """The embedding table."""
        table = next((c for c in self.model.embedding if isinstance(c, Embedding)), None)
        if table is None:
            raise UnsupportedModel(f"{self.model.name}: parallelism without an embedding table in front is not supported")
        return table

    @property
    def width(self) -> Any:
        """Width of the residual stream."""
        return self.table.width

    def _rows(self, vocabulary: int) -> int:
        """Rows of the padded vocabulary that a rank holds."""
        return divided(padded_vocabulary(vocabulary), self.mesh.tp, "padded vocabulary")

    def _embedding(self) -> tuple[Component, ...]:
        """The tables, each rank with its rows of the padded vocabulary."""
        parts: list[Component] = []
        for component in self.model.embedding:
            if isinstance(component, LayerEmbeddings) and self.mesh.tp > 1:
                parts.append(replace(component, vocabulary=self._rows(component.vocabulary)))
            elif isinstance(component, Embedding) and self.mesh.tp > 1:
                rows = self._rows(component.vocabulary)
                parts += [replace(component, vocabulary=rows), self._reduce(component.width, component.activation, "gather_rows")]
            else:
                parts.append(component)
        return tuple(parts)

    def _head(self) -> tuple[Component, ...]:
        """The head, each rank with its columns, and the gathering of logits."""
        if self.mesh.tp == 1:
            return self.model.head
        parts: list[Component] = []
        for component in self.model.head:
            if isinstance(component, Linear) and component.rows == "logit_rows":
                columns = self._rows(component.outputs)
                gather = Collective(
                    "all-gather", self.mesh.tp, columns, self.places["tp"].link, rows="logit_rows",
                    servers=self.places["tp"].servers, activation=component.activation, name="gather_logits",
                )  # fmt: skip
                parts += [replace(component, outputs=columns), gather]
            else:
                parts.append(component)
        return tuple(parts)

    @cached_property
    def stages(self) -> tuple[Model, ...]:
        """What one rank of each pipeline stage runs; its parameters and state are that rank's."""
        made = {id(layer): self._layer(layer) for layer in self.model.layers}
        layers = [made[id(layer)] for layer in self.model.layers]
        sizes = stage_layers(len(layers), self.mesh.pp)
        activation = self.table.activation
        stages: list[Model] = []
        start = 0
        for index, size in enumerate(sizes):
            first, last = index == 0, index == len(sizes) - 1
            head = self._head() if last else (self._send(index, activation),)
            if last and not first:
                head = tuple(replace(c, tied=False) if isinstance(c, Linear) and c.tied else c for c in head)
            stages.append(
                replace(
                    self.model, embedding=self._embedding() if first else (), layers=tuple(layers[start : start + size]),
                    final=self.model.final if last else (), head=head,
                    tower_params=-(-self.model.tower_params // self.mesh.tp) if first else 0,
                )
            )  # fmt: skip
            start += size
        return tuple(stages)

    def _send(self, stage: int, activation: Any) -> Component:
        """What a stage hands to the next: the residual stream of its tokens."""
        servers = 2 if self.mesh.crosses(self.accelerator, stage) else 1
        if servers == 2:
            require(self.accelerator, NETWORK, self.mesh.ranks)
        link = self.mesh.place(self.accelerator, 2).link if servers == 1 else ""
        return Collective("send", 2, self.width, link, servers=servers, activation=activation, name="send")

    @cached_property
    def collectives(self) -> tuple[tuple[int, Collective], ...]:
        """(count, collective) of everything exchanged in one pass through all stages."""
        return tuple((n, part) for stage in self.stages for n, part in stage.counted if isinstance(part, Collective))

    @property
    def hops(self) -> int:
        """Messages that follow one another in one pass: each costs a latency that the bound leaves out."""
        return sum(number * collective.hops for number, collective in self.collectives)
