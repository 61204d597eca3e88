"""What stands between the matmuls: norms and elementwise passes over the residual stream."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from roofline.components.base import Component, Params
from roofline.cost import Cost
from roofline.errors import InputError
from roofline.formats import BF16, FP8, FP32, Format
from roofline.numeric import ceil_div
from roofline.work import Batch

RMS_FLOPS = 4
"""Elementwise FLOPs of an RMS norm per element: square and add, scale by the root, multiply by the weight."""
LAYER_FLOPS = 7
"""Elementwise FLOPs of a LayerNorm per element: as RMS, plus the mean, its subtraction and the shift."""
QUANTISE_FLOPS = 3
"""Elementwise FLOPs of quantising an element: its magnitude, the largest of them, its product with the inverse scale."""
SCALE_BYTES = 4
"""Of an activation's scale, fp32."""


@dataclass(frozen=True)
class Norm(Component):
    """RMSNorm or LayerNorm over rows, one kernel; with ``residual`` it also adds and stores the residual stream.

    Reads ``elements`` per token (twice with a residual: branch and stream), writes as many.

    Attributes:
        elements: elements normalised per token.
        weights: learned elements: ``elements`` for an RMSNorm, twice that for a LayerNorm with bias, one head's width
            for a norm shared by all heads, 0 for a norm without parameters.
        flops_per_element: ``RMS_FLOPS`` or ``LAYER_FLOPS``.
        residual: whether the residual addition is fused into it.
        output: what the result is quantised to on its way out, scales included; None: it is stored as it came.
    """

    kind: ClassVar[str] = "norm"

    elements: Any
    weights: Any
    flops_per_element: int = RMS_FLOPS
    residual: bool = False
    weight: Format = BF16
    activation: Format = BF16
    output: Format | None = None
    name: str = "norm"

    def cost(self, work: Batch) -> Cost:
        elements = self.elements * work.tokens
        passes = 2 if self.residual else 1
        flops = self.flops_per_element + (1 if self.residual else 0)
        moved = written = self.activation.bytes(passes * elements)
        if self.output is not None:
            flops += QUANTISE_FLOPS
            written = self.activation.bytes((passes - 1) * elements) + self.output.bytes(elements)
        return Cost(
            {"vector": flops * elements},
            {"weights": self.weight.bytes(self.weights), "activations": moved},
            {"activations": written},
            1,
        )

    def params(self) -> Params:
        return {self.weight: self.weights} if self.weights != 0 else {}


def rms_norm(width: Any, *, residual: bool = False, name: str = "norm", **formats: Format) -> Norm:
    """An RMSNorm over ``width`` elements with one weight each."""
    return Norm(width, width, RMS_FLOPS, residual, name=name, **formats)


def layer_norm(width: Any, *, bias: bool = True, residual: bool = False, name: str = "norm", **formats: Format) -> Norm:
    """A LayerNorm over ``width`` elements with a weight and, usually, a bias each."""
    return Norm(width, 2 * width if bias else width, LAYER_FLOPS, residual, name=name, **formats)


@dataclass(frozen=True)
class Elementwise(Component):
    """A pass over ``reads`` elements per token that writes ``writes`` and does ``flops`` elementwise FLOPs on the way."""

    kind: ClassVar[str] = "elementwise"

    reads: Any
    writes: Any
    flops: Any
    activation: Format = BF16
    name: str = "elementwise"

    def cost(self, work: Batch) -> Cost:
        return Cost(
            {"vector": self.flops * work.tokens},
            {"activations": self.activation.bytes(self.reads * work.tokens)},
            {"activations": self.activation.bytes(self.writes * work.tokens)},
            1,
        )


@dataclass(frozen=True)
class Quantise(Component):
    """A pass of its own that stores activations in fewer bits, with fp32 scales for what a matmul reads next.

    Reads ``elements`` per token and writes them in the narrow format with their scales. A scale of the whole tensor takes two
    kernels, as every element must have been seen before the first is stored, and reads everything twice. Where a norm or a
    matmul quantises on its way, this pass falls away: see ``Norm.output``.
    Source: DeepSeek-V3 (arXiv 2412.19437), section 3.3, for scales per 1x128.

    Attributes:
        elements: per token. scales: what shares a scale: "block" (``block`` neighbours of a token), "token", "tensor", or
            "static", one that was found in calibration and is read.
        stored: the narrow format, scales apart.
    """

    kind: ClassVar[str] = "quantise"

    elements: Any
    scales: str = "block"
    block: int = 128
    activation: Format = BF16
    stored: Format = FP8
    name: str = "quantise"

    def __post_init__(self) -> None:
        if self.scales not in ("block", "token", "tensor", "static"):
            raise InputError(f"scales: unknown {self.scales!r}; known: block, token, tensor, static")

    def cost(self, work: Batch) -> Cost:
        tokens, passes = work.tokens, 2 if self.scales == "tensor" else 1
        elements = self.elements * tokens
        number = {"block": ceil_div(self.elements, self.block) * tokens, "token": tokens, "tensor": 1, "static": 0}[self.scales]
        read = {"activations": self.activation.bytes(passes * elements)}
        if self.scales == "static":
            read["weights"] = SCALE_BYTES
        written = self.stored.bytes(elements) + SCALE_BYTES * number
        return Cost({"vector": QUANTISE_FLOPS * elements}, read, {"activations": written}, passes)

    def params(self) -> Params:
        return {FP32: 1} if self.scales == "static" else {}


@dataclass(frozen=True)
class Learned(Component):
    """A few learned elements that a neighbouring kernel reads on the way: scalars of an activation, a layer's scale.

    Stored and read once per step; no launch and no FLOPs of its own.
    """

    kind: ClassVar[str] = "learned"

    elements: Any
    weight: Format = BF16
    name: str = "learned"

    def cost(self, work: Batch) -> Cost:
        return Cost({}, {"weights": self.weight.bytes(self.elements)})

    def params(self) -> Params:
        return {self.weight: self.elements}


@dataclass(frozen=True)
class Scale(Component):
    """The product of ``elements`` per token with learned factors, one kernel.

    Attributes:
        elements: elements scaled per token. weights: learned factors: one each, or a single gate for all.
    """

    kind: ClassVar[str] = "scale"

    elements: Any
    weights: Any
    weight: Format = BF16
    activation: Format = BF16
    name: str = "scale"

    def cost(self, work: Batch) -> Cost:
        elements = self.elements * work.tokens
        moved = self.activation.bytes(elements)
        read = {"weights": self.weight.bytes(self.weights), "activations": moved}
        return Cost({"vector": elements}, read, {"activations": moved}, 1)

    def params(self) -> Params:
        return {self.weight: self.weights}
