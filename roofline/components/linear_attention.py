"""Further mixers of fixed state: lightning attention, short convolutions, and the gated linear recurrent unit."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, ClassVar

from roofline.components.base import Block, Component, Params
from roofline.components.chunked import ChunkedScan, Heads
from roofline.components.feedforward import ACTIVATION_FLOPS
from roofline.components.linear import Linear
from roofline.components.mamba import LinearScan
from roofline.components.mixing import Elementwise, Norm
from roofline.components.recurrent import GATE_FLOPS, CausalConv, Demand, Recurrent
from roofline.cost import Cost
from roofline.formats import BF16, FP32, Format
from roofline.work import Batch

LRU_FLOPS = 8
"""Elementwise FLOPs of an RG-LRU per channel: the exponent (2), its double, 1 - a^2, two input products, decay, addition."""
LRU_SPECIALS = 5
"""Exponentials and roots of an RG-LRU per channel: two sigmoids, a, a^2, the square root."""


@dataclass(frozen=True)
class LightningBlock(Block):
    """Lightning attention: linear attention with one constant decay per head, a norm and an output gate.

    Parameters ``5 D heads head_dim`` and the norm; state ``heads head_dim^2`` elements. Source: MiniMax 2025
    (arXiv 2501.08313), section 2.2.

    Attributes:
        D: width of the residual stream. heads, head_dim: of queries, keys and values.
        chunk: tokens per chunk of the chunked form. chunked: whether this is that form.
        weight, overrides: storage of the projections, and of "qkv", "gate", "out" where it differs.
    """

    D: Any
    heads: Any
    head_dim: Any
    chunk: int = 256
    chunked: bool = False
    weight: Format = BF16
    activation: Format = BF16
    state_format: Format = BF16
    overrides: tuple[tuple[str, Format], ...] = ()
    name: str = "lightning_attention"

    def prefill_form(self) -> LightningBlock:
        """The chunked form."""
        return replace(self, chunked=True)

    def _linear(self, name: str, inputs: Any, outputs: Any, epilogue: int = 0) -> Linear:
        weight = dict(self.overrides).get(name, self.weight)
        return Linear(inputs, outputs, False, weight, self.activation, epilogue=epilogue, name=f"{name}_proj")

    @cached_property
    def parts(self) -> tuple[Component, ...]:
        values = self.heads * self.head_dim
        shape = Heads(self.heads, self.head_dim, self.head_dim, self.heads)
        scan: Recurrent = LinearScan(shape, 0, 0, self.activation, self.state_format)
        if self.chunked:
            scan = ChunkedScan(scan, shape, self.chunk)
        return (
            self._linear("qkv", self.D, 3 * values, ACTIVATION_FLOPS),
            scan,
            Norm(values, values, weight=self.activation, activation=self.activation),
            self._linear("gate", self.D, values),
            Elementwise(2 * values, values, GATE_FLOPS * values, self.activation, name="gate"),
            self._linear("out", values, self.D),
        )


@dataclass(frozen=True)
class ShortConvBlock(Block):
    """A gated short convolution: three projections, ``C * conv(B * x)``, output projection.

    Parameters ``4 D^2 + width D``; state ``(width - 1) D`` elements. Source: transformers 5.24, models/lfm2.

    Attributes:
        D: width of the residual stream. width: taps. bias: of projections and convolution alike.
        weight, overrides: storage of the projections, and of "in", "out" where it differs.
    """

    D: Any
    width: int = 3
    bias: bool = False
    weight: Format = BF16
    activation: Format = BF16
    overrides: tuple[tuple[str, Format], ...] = ()
    name: str = "short_conv"

    @cached_property
    def parts(self) -> tuple[Component, ...]:
        formats = dict(self.overrides)
        inward, outward = (formats.get(name, self.weight) for name in ("in", "out"))
        return (
            Linear(self.D, 3 * self.D, self.bias, inward, self.activation, name="in_proj"),
            CausalConv(self.D, self.width, self.bias, False, gates=2, activation=self.activation, state_format=self.activation),
            Linear(self.D, self.D, self.bias, outward, self.activation, name="out_proj"),
        )


@dataclass(frozen=True)
class BlockDiagonal(Component):
    """``blocks`` square matmuls side by side with biases, one kernel: FLOPs ``2 B T width^2 / blocks``.

    Attributes:
        blocks, side: number of matrices, and rows of each; the width is their product.
        copies: matrices of that shape applied to the same input (two gates).
    """

    kind: ClassVar[str] = "linear"

    blocks: Any
    side: Any
    copies: int = 1
    weight: Format = BF16
    activation: Format = BF16
    name: str = "block_diagonal"

    def cost(self, work: Batch) -> Cost:
        tokens = work.tokens
        width = self.blocks * self.side
        elements = self.copies * width * self.side
        outputs = self.copies * width
        return Cost(
            {self.weight.unit: 2 * elements * tokens, "vector": outputs * tokens},
            {"weights": self.weight.bytes(elements + outputs), "activations": self.activation.bytes(width) * tokens},
            {"activations": self.activation.bytes(outputs) * tokens},
            1,
        )

    def params(self) -> Params:
        return {self.weight: self.copies * self.blocks * self.side * (self.side + 1)}


@dataclass(frozen=True)
class LinearUnit(Recurrent):
    """The recurrence of an RG-LRU, one kernel: ``h = a h + sqrt(1 - a^2) (i x)``, ``a = exp(-8 r softplus(p))``.

    FLOPs ``8 width`` elementwise and ``5 width`` exponentials and roots per token, the gates' sigmoids among them;
    softplus(p) is a constant. State ``width`` elements in fp32. No chunk turns into a matmul.
    Source: De et al. 2024 (arXiv 2402.19427), section 2.4.
    """

    kind: ClassVar[str] = "scan"

    width: Any
    activation: Format = BF16
    state_format: Format = FP32
    name: str = "rg_lru"

    @property
    def demand(self) -> Demand:
        return Demand(
            vector=LRU_FLOPS * self.width,
            special=LRU_SPECIALS * self.width,
            reads=3 * self.width,
            writes=self.width,
            weights=self.width,
            state=self.width,
        )


@dataclass(frozen=True)
class GriffinBlock(Block):
    """The recurrent block of Griffin: two projections, convolution, RG-LRU, product with the other branch, projection.

    Parameters ``3 D width`` with biases, the block-diagonal gates' ``2 width (width / heads + 1)``, convolution and
    rates. State: ``(taps - 1) width`` inputs of the convolution and ``width`` elements of the recurrence.

    Attributes:
        D, width: width of the residual stream and of the recurrence. heads: blocks of the gates. taps: of the convolution.
        weight, overrides: storage of the projections, and of "y", "x", "out" where it differs.
    """

    D: Any
    width: Any
    heads: int
    taps: int = 4
    weight: Format = BF16
    activation: Format = BF16
    state_format: Format = FP32
    overrides: tuple[tuple[str, Format], ...] = ()
    name: str = "griffin"

    def _linear(self, name: str, inputs: Any, outputs: Any, epilogue: int = 0) -> Linear:
        weight = dict(self.overrides).get(name, self.weight)
        return Linear(inputs, outputs, True, weight, self.activation, epilogue=epilogue, name=f"linear_{name}")

    @cached_property
    def parts(self) -> tuple[Component, ...]:
        width, same = self.width, self.activation
        return (
            self._linear("y", self.D, width, ACTIVATION_FLOPS),
            self._linear("x", self.D, width),
            CausalConv(width, self.taps, True, False, activation=same, state_format=same),
            BlockDiagonal(self.heads, width // self.heads, 2, same, same, name="gates"),
            LinearUnit(width, same, self.state_format),
            Elementwise(2 * width, width, width, same, name="branches"),
            self._linear("out", width, self.D),
        )
