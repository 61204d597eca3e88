"""Kernels that carry a state of fixed size from token to token: the contract, the causal convolution, the gated norm.

Whatever a kernel does between the first and the last token of a step, its state is read once and written once per
sequence and step: intermediate states stay on the chip, in the one-token form as in the chunked form of a prefill.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar

from roofline.components.base import Component, Params, State, StatePiece
from roofline.components.feedforward import ACTIVATION_FLOPS
from roofline.components.linear import Linear
from roofline.components.mixing import RMS_FLOPS
from roofline.cost import Cost
from roofline.formats import BF16, Format
from roofline.work import Batch

GATE_FLOPS = ACTIVATION_FLOPS + 1
"""Elementwise FLOPs of ``activation(gate) * x`` per element, the exponential of the activation apart."""


@dataclass(frozen=True)
class Demand:
    """What a recurrent kernel asks per token, and per step.

    Attributes:
        vector, special: elementwise FLOPs and exponentials (or roots) per token.
        reads, writes: activation elements per token.
        weights: parameter elements, read once per step.
        state: elements of state per sequence, read and written once per step.
    """

    vector: Any
    special: Any
    reads: Any
    writes: Any
    weights: Any
    state: Any


class Recurrent(Component):
    """A kernel with a state of fixed size; subclasses say what it asks for in ``demand``."""

    piece: ClassVar[str] = "recurrent"
    activation: Format
    state_format: Format

    @property
    def demand(self) -> Demand:
        """FLOPs, elements and state of this kernel."""
        raise TypeError(f"{type(self).__name__} does not define its demand")

    @cached_property
    def _constants(self) -> tuple[Any, Any, Any, Any, Any, Any]:
        """Vector and special FLOPs, activation bytes read and written per token; weight bytes; state bytes per sequence."""
        asked = self.demand
        return (
            asked.vector,
            asked.special,
            self.activation.bytes(asked.reads),
            self.activation.bytes(asked.writes),
            self.activation.bytes(asked.weights),
            self.state_format.bytes(asked.state),
        )

    def cost(self, work: Batch) -> Cost:
        vector, special, read, written, weights, state = self._constants
        tokens = work.tokens
        carried = state * work.sequences
        return Cost(
            {"vector": vector * tokens, "special": special * tokens},
            {"weights": weights, "activations": read * tokens, "state": carried},
            {"activations": written * tokens, "state": carried},
            1,
        )

    def params(self) -> Params:
        return {self.activation: self.demand.weights}

    def state(self) -> State:
        return (StatePiece(self.piece, self.demand.state, self.state_format, "nothing"),)


@dataclass(frozen=True)
class CausalConv(Recurrent):
    """Depthwise causal convolution over time, one kernel: ``y[t] = sum_j w[j] x[t - j]``, j below ``width``, per channel.

    FLOPs ``2 B T width channels``; state ``(width - 1) channels``: the inputs that later tokens still see. A cache that
    keeps ``width`` columns stores one that no later token needs. Source: Gu & Dao 2023 (arXiv 2312.00752), figure 3.

    Attributes:
        channels, width: channels, and taps per channel.
        bias: whether each channel has one; the sum starts from it, which costs nothing.
        activated: whether an activation (SiLU) is fused into it.
        gates: elementwise products fused around it per channel, each with one more input (short convolutions).
    """

    kind: ClassVar[str] = "convolution"
    piece: ClassVar[str] = "conv"

    channels: Any
    width: int
    bias: bool = True
    activated: bool = True
    gates: int = 0
    activation: Format = BF16
    state_format: Format = BF16
    name: str = "conv"

    @property
    def demand(self) -> Demand:
        per_channel = 2 * self.width + self.gates + (ACTIVATION_FLOPS if self.activated else 0)
        return Demand(
            vector=per_channel * self.channels,
            special=self.channels if self.activated else 0,
            reads=(1 + self.gates) * self.channels,
            writes=self.channels,
            weights=(self.width + (1 if self.bias else 0)) * self.channels,
            state=(self.width - 1) * self.channels,
        )


@dataclass(frozen=True)
class GatedNorm(Component):
    """RMSNorm of the mixer's output and its product with an activated gate, one kernel.

    Reads the output and the gate, writes as many elements as either has.

    Attributes:
        elements: elements normalised per token. weights: learned elements (one head's width where heads share them).
    """

    kind: ClassVar[str] = "norm"

    elements: Any
    weights: Any
    weight: Format = BF16
    activation: Format = BF16
    name: str = "gated_norm"

    def cost(self, work: Batch) -> Cost:
        elements = self.elements * work.tokens
        return Cost(
            {"vector": (RMS_FLOPS + GATE_FLOPS) * elements, "special": elements},
            {"weights": self.weight.bytes(self.weights), "activations": self.activation.bytes(2 * elements)},
            {"activations": self.activation.bytes(elements)},
            1,
        )

    def params(self) -> Params:
        return {self.weight: self.weights}


def projections(
    inputs: Any, widths: dict[str, Any], weight: Format, overrides: tuple[tuple[str, Format], ...], activation: Format
) -> tuple[Linear, ...]:
    """Projections of one input, fused into one matmul per storage format.

    Args:
        inputs: elements per row of the input.
        widths: outputs by the name of the projection.
        weight, overrides: their storage, and ((name, format), ...) for those that differ.
    """
    formats = dict(overrides)
    fused: dict[Format, list[str]] = {}
    for name in widths:
        fused.setdefault(formats.get(name, weight), []).append(name)
    return tuple(
        Linear(inputs, sum(widths[name] for name in names), False, fmt, activation, name=f"{'_'.join(names)}_proj")
        for fmt, names in fused.items()
    )
