"""Attention to a second sequence, in two halves that run at different times.

Keys and values of the source are projected once per request, when it is encoded; a decoder step only projects its
queries and reads them. Their cache grows with the source, not with the text.
Sources: Vaswani et al. 2017 (arXiv 1706.03762), section 3.2.3; modelling files of transformers 5.24 (``models/whisper``,
``t5``, ``bart``, ``mllama``).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar

from roofline.components.attention import Attention, CacheWrite
from roofline.components.base import Block, Component, Params
from roofline.components.linear import Linear
from roofline.components.mixing import Norm
from roofline.cost import Cost
from roofline.formats import BF16, Format
from roofline.numeric import scale
from roofline.work import Batch, Work


@dataclass(frozen=True)
class CrossAttention(Block):
    """The decoder's half: queries from the text, keys and values read from the source's cache.

    Parameters ``2 D N H``; FLOPs ``4 B T D N H + 4 B N H T X`` for X source tokens; state ``2 K H`` elements per source
    token, none per token of the text.

    Attributes:
        D: width of the residual stream. N, K, H: query heads, key-value heads, head dimension.
        q_bias, o_bias: biases. qk_norm: the queries of each head are normalised with H weights.
    """

    D: Any
    N: Any
    K: Any
    H: Any
    q_bias: bool = False
    o_bias: bool = False
    qk_norm: bool = False
    kv: Format = BF16
    weight: Format = BF16
    activation: Format = BF16
    name: str = "cross_attention"

    @cached_property
    def parts(self) -> tuple[Component, ...]:
        width = self.N * self.H
        parts: list[Component] = [Linear(self.D, width, self.q_bias, self.weight, self.activation, name="cross.q_proj")]
        if self.qk_norm:
            parts.append(Norm(width, self.H, activation=self.activation, name="cross.q_norm"))
        parts.append(
            Attention(self.N, self.K, self.H, kv=self.kv, activation=self.activation, source=True, name="cross.attention")
        )
        parts.append(Linear(width, self.D, self.o_bias, self.weight, self.activation, name="cross.o_proj"))
        return tuple(parts)


@dataclass(frozen=True)
class SourceKeys(Block):
    """The encoder's half: keys and values of one decoder layer over the source, once per request.

    Parameters ``2 D K H``; FLOPs ``4 B X D K H``; writes ``2 K H`` elements of state per source token.

    Attributes:
        D: width of the source. k_bias, v_bias: biases. qk_norm: keys are normalised with H weights. Others as above.
    """

    D: Any
    K: Any
    H: Any
    k_bias: bool = False
    v_bias: bool = False
    qk_norm: bool = False
    kv: Format = BF16
    weight: Format = BF16
    activation: Format = BF16
    name: str = "source_keys"

    @cached_property
    def parts(self) -> tuple[Component, ...]:
        width = self.K * self.H
        parts: list[Component]
        if self.k_bias == self.v_bias:
            parts = [Linear(self.D, 2 * width, self.k_bias, self.weight, self.activation, name="cross.kv_proj")]
        else:
            parts = [
                Linear(self.D, width, bias, self.weight, self.activation, name=f"cross.{name}_proj")
                for name, bias in (("k", self.k_bias), ("v", self.v_bias))
            ]
        if self.qk_norm:
            parts.append(Norm(width, self.H, activation=self.activation, name="cross.k_norm"))
        parts.append(CacheWrite(0, self.K, self.H, kv=self.kv, activation=self.activation, name="cross.cache_write"))
        return tuple(parts)


@dataclass(frozen=True)
class RelativeBias(Component):
    """A learned bias per head and bucket of distance, added to every score inside the attention kernel (T5).

    One elementwise FLOP per score; the table is read once. Source: Raffel et al. 2020 (arXiv 1910.10683), section 2.1.

    Attributes:
        N: heads. buckets: rows of the table. core: the attention kernel whose scores it is added to.
        stored: whether this layer holds the table (the first one does, the others reuse it).
    """

    kind: ClassVar[str] = "position_bias"

    N: Any
    buckets: Any
    core: Attention
    stored: bool = True
    weight: Format = BF16
    name: str = "position_bias"

    def group_cost(self, work: Work) -> Cost:
        pairs, _ = self.core.scored(work)
        return Cost({"vector": self.N * (work.B * pairs)}, {"weights": self.weight.bytes(self.N * self.buckets)})

    def params(self) -> Params:
        return {self.weight: self.N * self.buckets} if self.stored else {}


@dataclass(frozen=True)
class Positions(Component):
    """A table of learned positions added to a sequence: ``rows`` x D parameters, one row read per token."""

    kind: ClassVar[str] = "embedding"

    rows: Any
    D: Any
    weight: Format = BF16
    activation: Format = BF16
    name: str = "positions"

    def cost(self, work: Batch) -> Cost:
        elements = self.D * work.tokens
        moved = self.activation.bytes(elements)
        return Cost(
            {"vector": elements}, {"weights": self.weight.bytes(elements), "activations": moved}, {"activations": moved}, 1
        )

    def params(self) -> Params:
        return {self.weight: self.rows * self.D}


@dataclass(frozen=True)
class Convolution(Component):
    """A convolution over time as a matmul over unfolded windows: FLOPs ``2 rows k C D``, weights ``k C D + D``.

    Attributes:
        inputs, outputs: channels C and D. width: k, the window. rows: output rows per token of the sequence behind it.
        stride: input rows per output row.
    """

    kind: ClassVar[str] = "convolution"

    inputs: Any
    outputs: Any
    width: Any
    rows: Any = 1
    stride: Any = 1
    weight: Format = BF16
    activation: Format = BF16
    name: str = "convolution"

    def cost(self, work: Batch) -> Cost:
        rows = scale(work.tokens, self.rows)
        weights = self.width * self.inputs * self.outputs
        return Cost(
            {self.weight.unit: (2 * weights) * rows, "vector": self.outputs * rows},
            {
                "weights": self.weight.bytes(weights) + self.activation.bytes(self.outputs),
                "activations": self.activation.bytes(self.inputs * self.stride * rows),
            },
            {"activations": self.activation.bytes(self.outputs * rows)},
            1,
        )

    def params(self) -> Params:
        params: Params = {self.weight: self.width * self.inputs * self.outputs}
        params[self.activation] = params.get(self.activation, 0) + self.outputs
        return params
