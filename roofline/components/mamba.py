"""State-space mixers: Mamba (selective scan) and Mamba-2 (state-space duality)."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, ClassVar

from roofline.components.base import Block, Component
from roofline.components.chunked import ChunkedScan, Heads
from roofline.components.linear import Linear
from roofline.components.mixing import RMS_FLOPS, Elementwise, Norm
from roofline.components.recurrent import GATE_FLOPS, CausalConv, Demand, GatedNorm, Recurrent
from roofline.formats import BF16, Format

SELECTIVE_FLOPS = 6
"""Elementwise FLOPs of a selective scan per element of state and token: exponent, decay, input, addition, output (2)."""
LINEAR_FLOPS = 5
"""Elementwise FLOPs of a linear recurrence per element of state and token: decay, outer product and addition, output (2)."""


@dataclass(frozen=True)
class SelectiveScan(Recurrent):
    """The scan of Mamba, one kernel: ``h = exp(dt A) h + (dt x) B``, ``y = C h``, gated by ``silu(z)``.

    Every channel and state has a decay of its own, so that no chunk turns into a matmul: a prefill runs the same
    arithmetic. FLOPs ``6 inner J`` elementwise and ``inner J`` exponentials per token, and the gate; products per
    channel (dt x, the skip D x) are left out. State ``inner J``. Source: Gu & Dao 2023 (arXiv 2312.00752), algorithm 2.

    Attributes:
        inner: channels. J: states per channel.
    """

    kind: ClassVar[str] = "scan"

    inner: Any
    J: Any
    activation: Format = BF16
    state_format: Format = BF16
    name: str = "selective_scan"

    @property
    def demand(self) -> Demand:
        states = self.inner * self.J
        return Demand(
            vector=SELECTIVE_FLOPS * states + GATE_FLOPS * self.inner,
            special=states + self.inner,
            reads=3 * self.inner + 2 * self.J,
            writes=self.inner,
            weights=states + self.inner,
            state=states,
        )


@dataclass(frozen=True)
class LinearScan(Recurrent):
    """The one-token form of ``state = decay state + key value``, ``output = query state``, one kernel.

    FLOPs ``5 heads key_dim value_dim`` elementwise per token and an exponential per head; products per channel (dt x,
    the skip D x) are left out. Source: Dao & Gu 2024 (arXiv 2405.21060), section 5.

    Attributes:
        shape: the state.
        rates: learned or given numbers per head and token that set the decay (dt), 0 where decays are constants.
        learned: parameters per head (A, D, dt bias).
    """

    kind: ClassVar[str] = "scan"

    shape: Heads
    rates: int = 1
    learned: int = 3
    activation: Format = BF16
    state_format: Format = BF16
    name: str = "scan"

    @property
    def demand(self) -> Demand:
        heads = self.shape
        return Demand(
            vector=LINEAR_FLOPS * heads.state,
            special=self.rates * heads.heads,
            reads=heads.values + 2 * heads.keys + self.rates * heads.heads,
            writes=heads.values,
            weights=self.learned * heads.heads,
            state=heads.state,
        )


@dataclass(frozen=True)
class MambaBlock(Block):
    """The mixer of Mamba: input projection, convolution, projections of dt, B and C, selective scan, output projection.

    Parameters ``3 D inner + inner (R + 2 J) + inner R + inner (J + width + 3)``, with the biases of convolution and dt.
    State: ``(width - 1) inner`` inputs of the convolution and ``inner J`` elements of the recurrence.

    Attributes:
        D, inner: width of the residual stream and of the mixer. J: states per channel. R: rank of dt.
        width, conv_bias, bias: taps and bias of the convolution; bias of input and output projections.
        inner_norms: "" for none, "learned" for norms of dt, B and C with weights (Jamba), "plain" without (Falcon Mamba).
        weight, overrides: storage of the projections, and of "in", "x", "dt", "out" where it differs.
        state_format: of the recurrence; the convolution keeps activations.
    """

    D: Any
    inner: Any
    J: Any
    R: Any
    width: int = 4
    conv_bias: bool = True
    bias: bool = False
    inner_norms: str = ""
    weight: Format = BF16
    activation: Format = BF16
    state_format: Format = BF16
    overrides: tuple[tuple[str, Format], ...] = ()
    name: str = "mamba"

    def _linear(self, name: str, inputs: Any, outputs: Any, bias: bool) -> Linear:
        return Linear(inputs, outputs, bias, dict(self.overrides).get(name, self.weight), self.activation, name=f"{name}_proj")

    @cached_property
    def parts(self) -> tuple[Component, ...]:
        small = self.R + 2 * self.J
        norms: tuple[Component, ...] = ()
        if self.inner_norms:
            weights = small if self.inner_norms == "learned" else 0
            norms = (Norm(small, weights, RMS_FLOPS, weight=self.activation, activation=self.activation, name="inner_norms"),)
        return (
            self._linear("in", self.D, 2 * self.inner, self.bias),
            CausalConv(self.inner, self.width, self.conv_bias, activation=self.activation, state_format=self.activation),
            self._linear("x", self.inner, small, False),
            *norms,
            self._linear("dt", self.R, self.inner, True),
            SelectiveScan(self.inner, self.J, self.activation, self.state_format),
            self._linear("out", self.inner, self.D, self.bias),
        )


@dataclass(frozen=True)
class Mamba2Block(Block):
    """The mixer of Mamba-2: one input projection, convolution of x, B and C, scan, gated norm, output projection.

    With inner = heads head_dim: parameters ``D (2 inner + 2 groups J + heads) + inner D``, and those of convolution,
    norm and scan. State: ``(width - 1) (inner + 2 groups J)`` inputs of the convolution, ``heads head_dim J`` of the
    recurrence. In chunks where ``chunked``: see ``prefill_form``.

    Attributes:
        D: width of the residual stream. heads, head_dim, groups: of the scan. J: states per channel of a head.
        width, conv_bias: taps and bias of the convolution. in_bias, out_bias: biases of the projections.
        normed: a gated RMSNorm behind the scan; without it only the gate.
        chunk: tokens per chunk of the chunked form. chunked: whether this is that form.
        weight, overrides: storage of the projections, and of "in", "out" where it differs.
        state_format: of the recurrence; the convolution keeps activations.
    """

    D: Any
    heads: Any
    head_dim: Any
    J: Any
    groups: Any = 1
    width: int = 4
    conv_bias: bool = True
    in_bias: bool = False
    out_bias: bool = False
    normed: bool = True
    chunk: int = 256
    chunked: bool = False
    weight: Format = BF16
    activation: Format = BF16
    state_format: Format = BF16
    overrides: tuple[tuple[str, Format], ...] = ()
    name: str = "mamba2"

    def prefill_form(self) -> Mamba2Block:
        """The chunked form."""
        return replace(self, chunked=True)

    def _linear(self, name: str, inputs: Any, outputs: Any, bias: bool) -> Linear:
        return Linear(inputs, outputs, bias, dict(self.overrides).get(name, self.weight), self.activation, name=f"{name}_proj")

    @cached_property
    def parts(self) -> tuple[Component, ...]:
        inner = self.heads * self.head_dim
        convolved = inner + 2 * self.groups * self.J
        shape = Heads(self.heads, self.J, self.head_dim, self.groups)
        scan: Recurrent = LinearScan(shape, activation=self.activation, state_format=self.state_format)
        if self.chunked:
            scan = ChunkedScan(scan, shape, self.chunk)
        gate: Component = Elementwise(2 * inner, inner, GATE_FLOPS * inner, self.activation, name="gate")
        if self.normed:
            gate = GatedNorm(inner, inner, self.activation, self.activation)
        return (
            self._linear("in", self.D, inner + convolved + self.heads, self.in_bias),
            CausalConv(convolved, self.width, self.conv_bias, activation=self.activation, state_format=self.activation),
            scan,
            gate,
            self._linear("out", inner, self.D, self.out_bias),
        )
