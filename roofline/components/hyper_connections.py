"""Manifold-constrained hyper-connections (mHC): a residual of n streams, mixed around every sub-layer.

Before a sub-layer the n streams (n D elements per token) are projected to n + n + n^2 coefficients; the first n collapse
the streams into its input, the others spread its output and mix the streams behind it. The n x n mixing matrix is made
doubly stochastic by Sinkhorn iterations. All of this runs in fp32.
Source: Xie et al. 2026 (mHC, arXiv 2512.24880); DeepSeek-V4 (arXiv 2606.19348), section 2.2.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar

from roofline.components.base import Block, Component, Params
from roofline.components.linear import Linear
from roofline.components.mixing import RMS_FLOPS, Elementwise
from roofline.cost import Cost
from roofline.formats import BF16, FP32, Format
from roofline.numeric import ratio
from roofline.work import Batch

SINKHORN_FLOPS = 4
"""Elementwise FLOPs of one Sinkhorn iteration per entry of the matrix: sum and division over rows, then over columns."""
COEFFICIENT_FLOPS = 4
"""Elementwise FLOPs per coefficient: scale, shift and the arithmetic of a sigmoid, its exponential apart."""


@dataclass(frozen=True)
class Coefficients(Component):
    """What turns the projected coefficients into mixing weights, and collapses the streams into one, one kernel.

    Reads the n D elements of the streams and the raw coefficients, writes D elements and the finished coefficients.

    Attributes:
        D: width of one stream. n: streams. raw: coefficients projected per token.
        iterations: of Sinkhorn, 0 where there is no mixing matrix.
        biases: learned shifts and scales, stored in fp32.
    """

    kind: ClassVar[str] = "elementwise"

    D: Any
    n: Any
    raw: Any
    iterations: Any
    biases: Any
    activation: Format = BF16
    name: str = "hyper_collapse"

    @cached_property
    def _constants(self) -> tuple[Any, Any, Any, Any]:
        """Vector FLOPs, exponentials, activation bytes read and written; per token."""
        streams = self.n * self.D
        return (
            (RMS_FLOPS + 2) * streams + COEFFICIENT_FLOPS * self.raw + (SINKHORN_FLOPS * self.iterations) * (self.n * self.n),
            self.raw,
            self.activation.bytes(streams) + FP32.bytes(self.raw),
            self.activation.bytes(self.D) + FP32.bytes(self.raw - self.n),
        )

    def cost(self, work: Batch) -> Cost:
        flops, special, read, written = self._constants
        tokens = work.tokens
        return Cost(
            {"vector": flops * tokens, "special": special * tokens},
            {"weights": FP32.bytes(self.biases), "activations": read * tokens},
            {"activations": written * tokens},
            1,
        )

    def params(self) -> Params:
        return {FP32: self.biases}


def _projection(D: Any, n: Any, raw: Any, activation: Format) -> Linear:
    """The streams, 16 bits wide, to raw coefficients that leave in fp32."""
    written = ratio(FP32.bytes(raw), activation.bytes_per_element)
    return Linear(n * D, raw, weight=FP32, activation=activation, stored=written, name="hyper_proj")


@dataclass(frozen=True)
class HyperConnection(Block):
    """In front of a sub-layer: coefficients from the streams, and the collapse into one input.

    Parameters ``(2 + n) n (n D + 1) + 3`` in fp32; matrix FLOPs ``2 (2 + n) n n D`` per token.
    """

    D: Any
    n: Any
    iterations: Any = 20
    activation: Format = BF16
    name: str = "hyper_connection"

    @cached_property
    def parts(self) -> tuple[Component, ...]:
        raw = (2 + self.n) * self.n
        return (
            _projection(self.D, self.n, raw, self.activation),
            Coefficients(self.D, self.n, raw, self.iterations, raw + 3, self.activation),
        )


@dataclass(frozen=True)
class HyperHead(Block):
    """Behind the last layer: the streams collapse into one. Parameters ``n (n D + 1) + 1``, FLOPs ``2 n n D`` per token."""

    D: Any
    n: Any
    activation: Format = BF16
    name: str = "hyper_head"

    @cached_property
    def parts(self) -> tuple[Component, ...]:
        return (
            _projection(self.D, self.n, self.n, self.activation),
            Coefficients(self.D, self.n, self.n, 0, self.n + 1, self.activation),
        )


@dataclass(frozen=True)
class HyperApply(Component):
    """Behind a sub-layer: streams' = mix^T streams + spread output, one kernel; ``n (2 n + 2) D`` elementwise FLOPs per token.

    Reads the streams, the output and the n + n^2 finished coefficients (fp32), writes the streams.
    """

    kind: ClassVar[str] = "elementwise"

    D: Any
    n: Any
    activation: Format = BF16
    name: str = "hyper_apply"

    @cached_property
    def _constants(self) -> tuple[Any, Any, Any]:
        """Vector FLOPs, activation bytes read and written; per token."""
        return (
            self.n * (2 * self.n + 2) * self.D,
            self.activation.bytes((self.n + 1) * self.D) + FP32.bytes(self.n + self.n * self.n),
            self.activation.bytes(self.n * self.D),
        )

    def cost(self, work: Batch) -> Cost:
        flops, read, written = self._constants
        tokens = work.tokens
        return Cost({"vector": flops * tokens}, {"activations": read * tokens}, {"activations": written * tokens}, 1)


def hyper_apply(D: Any, n: Any, activation: Format = BF16) -> HyperApply:
    """What runs behind a sub-layer."""
    return HyperApply(D, n, activation)


def hyper_spread(D: Any, n: Any, activation: Format = BF16) -> Elementwise:
    """Behind the embedding: one stream copied to n."""
    return Elementwise(D, n * D, 0, activation, name="hyper_spread")
