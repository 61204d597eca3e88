"""What Gemma 3n and Gemma 4 add around a layer: AltUp streams, a low-rank residual, an embedding per layer.

AltUp keeps n copies of the residual stream and runs a layer on one of them: before it, all copies are predicted from all
(an n x n mixing whose coefficients the active copy gives); behind it, all are corrected by what the layer changed.
Sources: Baykal et al. 2023, "Alternating Updates for Efficient Transformers" (NeurIPS 2023); Menghani et al. 2025, LAuReL
(arXiv 2411.07501); modelling files of transformers 5.24 (``models/gemma3n``, ``models/gemma4``).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar

from roofline.components.base import Block, Component
from roofline.components.feedforward import ACTIVATION_FLOPS
from roofline.components.linear import Embedding, Linear
from roofline.components.mixing import Elementwise, Norm, rms_norm
from roofline.cost import Cost
from roofline.formats import BF16, Format
from roofline.work import Batch


@dataclass(frozen=True)
class StreamMix(Component):
    """n streams of width D, each replaced by a weighted sum of all: 2 n^2 D FLOPs per token, weights given per token."""

    kind: ClassVar[str] = "stream_mix"

    n: Any
    D: Any
    activation: Format = BF16
    name: str = "altup.mix"

    def cost(self, work: Batch) -> Cost:
        streams = self.n * self.D
        return Cost(
            {"bf16": (2 * self.n * streams) * work.tokens, "vector": streams * work.tokens},
            {"activations": self.activation.bytes((streams + self.n * self.n) * work.tokens)},
            {"activations": self.activation.bytes(streams * work.tokens)},
            1,
        )


@dataclass(frozen=True)
class AltUpPredict(Block):
    """The prediction step: the router looks at the active stream (width D), n^2 coefficients mix the n streams."""

    n: Any
    D: Any
    weight: Format = BF16
    activation: Format = BF16
    name: str = "altup.predict"

    @cached_property
    def parts(self) -> tuple[Component, ...]:
        formats = {"weight": self.weight, "activation": self.activation}
        return (
            Norm(self.D, self.D, name="altup.router_norm", **formats),  # type: ignore[arg-type]
            Linear(self.D, self.n, name="altup.router", **formats),  # type: ignore[arg-type]
            Linear(self.n, self.n * self.n, name="altup.prediction", **formats),  # type: ignore[arg-type]
            StreamMix(self.n, self.D, self.activation),
        )


@dataclass(frozen=True)
class AltUpCorrect(Block):
    """The correction step: the same router looks at the layer's output; every stream moves by its share of the change."""

    n: Any
    D: Any
    weight: Format = BF16
    activation: Format = BF16
    name: str = "altup.correct"

    @cached_property
    def parts(self) -> tuple[Component, ...]:
        formats = {"weight": self.weight, "activation": self.activation}
        streams = self.n * self.D
        return (
            Norm(self.D, 0, name="altup.router_norm", **formats),  # type: ignore[arg-type]
            Linear(self.D, self.n, tied=True, name="altup.router", **formats),  # type: ignore[arg-type]
            Linear(self.n, self.n, name="altup.correction", **formats),  # type: ignore[arg-type]
            Elementwise(streams + self.D, streams, 2 * streams + self.D, self.activation, name="altup.correct"),
        )


@dataclass(frozen=True)
class LowRankResidual(Block):
    """LAuReL: the stream through a rank-r bottleneck and a norm, added to it: 2 D r parameters."""

    D: Any
    rank: Any
    weight: Format = BF16
    activation: Format = BF16
    name: str = "laurel"

    @cached_property
    def parts(self) -> tuple[Component, ...]:
        return (
            Linear(self.D, self.rank, weight=self.weight, activation=self.activation, name="laurel.left"),
            Linear(self.rank, self.D, weight=self.weight, activation=self.activation, name="laurel.right"),
            rms_norm(self.D, residual=True, name="laurel.norm", activation=self.activation),
        )


@dataclass(frozen=True)
class LayerEmbeddings(Block):
    """One embedding of P elements per layer and token: a lookup of L P elements, and a projection of the stream added.

    Attributes:
        vocabulary: rows of the table. width: L P, elements of one row. part: P. D: width of the stream.
    """

    vocabulary: Any
    width: Any
    part: Any
    D: Any
    weight: Format = BF16
    activation: Format = BF16
    name: str = "layer_embeddings"

    @cached_property
    def parts(self) -> tuple[Component, ...]:
        return (
            Embedding(self.vocabulary, self.width, 0, self.weight, self.activation, name="layer_embedding"),
            Linear(self.D, self.width, weight=self.weight, activation=self.activation, name="layer_embedding.projection"),
            Norm(self.width, self.part, activation=self.activation, name="layer_embedding.norm"),
            Elementwise(2 * self.width, self.width, 2 * self.width, self.activation, name="layer_embedding.add"),
        )


@dataclass(frozen=True)
class LayerInput(Block):
    """How a layer takes its embedding in: a gate of P elements, the product with the embedding, a projection, a norm."""

    D: Any
    part: Any
    weight: Format = BF16
    activation: Format = BF16
    name: str = "layer_input"

    @cached_property
    def parts(self) -> tuple[Component, ...]:
        formats = {"weight": self.weight, "activation": self.activation}
        return (
            Linear(self.D, self.part, epilogue=ACTIVATION_FLOPS, name="layer_input.gate", **formats),  # type: ignore[arg-type]
            Elementwise(2 * self.part, self.part, self.part, self.activation, name="layer_input.product"),
            Linear(self.part, self.D, name="layer_input.projection", **formats),  # type: ignore[arg-type]
            rms_norm(self.D, residual=True, name="layer_input.norm", activation=self.activation),
        )
