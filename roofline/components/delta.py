"""Mixers of the gated delta rule: gated DeltaNet (one decay per head) and Kimi delta attention (one per channel).

Both update a matrix per head by ``S = decay S; S += k (beta (v - S^T k))^T`` and read it by ``S^T q``.
Sources: Yang et al. 2024 (arXiv 2412.06464); Kimi Team 2025 (arXiv 2510.26692).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, ClassVar

from roofline.components.base import Block, Component
from roofline.components.chunked import ChunkedDeltaRule, Heads
from roofline.components.linear import Linear
from roofline.components.recurrent import CausalConv, Demand, GatedNorm, Recurrent, projections
from roofline.formats import BF16, FP32, Format

DELTA_FLOPS = 7
"""Elementwise FLOPs of the delta rule per element of state and token: decay, recall (2), update (2), output (2)."""


@dataclass(frozen=True)
class DeltaRule(Recurrent):
    """The one-token form of the gated delta rule, one kernel.

    FLOPs ``7 heads key_dim value_dim`` elementwise per token; an exponential per decay. What is paid per channel (the
    norms of queries and keys, beta) is left out.

    Attributes:
        shape: the state. decays: decays per head and token: 1, or one per channel of a key.
        learned: parameters (rates and biases of the decays).
    """

    kind: ClassVar[str] = "delta_rule"

    shape: Heads
    decays: Any = 1
    learned: Any = 0
    activation: Format = BF16
    state_format: Format = BF16
    name: str = "delta_rule"

    @property
    def demand(self) -> Demand:
        heads = self.shape
        decays = heads.heads * self.decays
        return Demand(
            vector=DELTA_FLOPS * heads.state,
            special=decays,
            reads=2 * heads.keys + heads.values + heads.heads + decays,
            writes=heads.values,
            weights=self.learned,
            state=heads.state,
        )


@dataclass(frozen=True)
class GatedDeltaNet(Block):
    """Gated DeltaNet: projections, convolution of queries, keys and values, delta rule, gated norm, output projection.

    Parameters ``D (2 key_heads key_dim + 2 value_heads value_dim + 2 value_heads) + value_heads value_dim D`` and those
    of convolution, decay and norm. State: ``(width - 1) (2 key_heads key_dim + value_heads value_dim)`` inputs of the
    convolution and ``value_heads key_dim value_dim`` elements of the recurrence.

    Attributes:
        D: width of the residual stream.
        key_heads, value_heads, key_dim, value_dim: heads of queries and keys, of values, and their widths.
        width: taps of the convolution. chunk: tokens per chunk of the chunked form. chunked: whether this is that form.
        weight, overrides: storage of the projections, and of "qkv", "z", "b", "a", "out" where it differs.
        state_format: of the recurrence; the convolution keeps activations.
    """

    D: Any
    key_heads: Any
    value_heads: Any
    key_dim: Any
    value_dim: Any
    width: int = 4
    chunk: int = 64
    chunked: bool = False
    weight: Format = BF16
    activation: Format = BF16
    state_format: Format = BF16
    overrides: tuple[tuple[str, Format], ...] = ()
    name: str = "gated_delta_net"

    def prefill_form(self) -> GatedDeltaNet:
        """The chunked form."""
        return replace(self, chunked=True)

    @cached_property
    def parts(self) -> tuple[Component, ...]:
        values = self.value_heads * self.value_dim
        convolved = 2 * self.key_heads * self.key_dim + values
        shape = Heads(self.value_heads, self.key_dim, self.value_dim, self.key_heads)
        rule: Recurrent = DeltaRule(shape, 1, 2 * self.value_heads, self.activation, self.state_format)
        if self.chunked:
            rule = ChunkedDeltaRule(rule, shape, self.chunk)
        widths = {"qkv": convolved, "z": values, "b": self.value_heads, "a": self.value_heads}
        out = dict(self.overrides).get("out", self.weight)
        return (
            *projections(self.D, widths, self.weight, self.overrides, self.activation),
            CausalConv(convolved, self.width, False, activation=self.activation, state_format=self.activation),
            rule,
            GatedNorm(values, self.value_dim, self.activation, self.activation),
            Linear(values, self.D, False, out, self.activation, name="out_proj"),
        )


@dataclass(frozen=True)
class KimiDeltaAttention(Block):
    """KDA: as gated DeltaNet with a decay per channel, which a low-rank projection makes; so is the output gate.

    Parameters ``4 D heads head_dim + D heads + 2 (D head_dim + head_dim heads head_dim)`` and those of convolution,
    decay and norm; with ``full_gate`` the gate has ``D heads head_dim``. State: ``3 (width - 1) heads head_dim`` inputs
    of the convolution and ``heads head_dim^2`` elements of the recurrence, kept in fp32.

    Attributes:
        D: width of the residual stream. heads, head_dim: of queries, keys and values alike.
        width, chunk, chunked: as in GatedDeltaNet.
        full_gate: the output gate is one full matrix.
        weight, overrides: storage of the projections, and of "qkv", "f_a", "f_b", "b", "g_a", "g_b", "g", "out".
    """

    D: Any
    heads: Any
    head_dim: Any
    width: int = 4
    chunk: int = 64
    chunked: bool = False
    full_gate: bool = False
    weight: Format = BF16
    activation: Format = BF16
    state_format: Format = FP32
    overrides: tuple[tuple[str, Format], ...] = ()
    name: str = "kimi_delta_attention"

    def prefill_form(self) -> KimiDeltaAttention:
        """The chunked form."""
        return replace(self, chunked=True)

    def _linear(self, name: str, inputs: Any, outputs: Any) -> Linear:
        return Linear(inputs, outputs, False, dict(self.overrides).get(name, self.weight), self.activation, name=f"{name}_proj")

    @cached_property
    def parts(self) -> tuple[Component, ...]:
        values = self.heads * self.head_dim
        shape = Heads(self.heads, self.head_dim, self.head_dim, self.heads)
        rule: Recurrent = DeltaRule(shape, self.head_dim, values + self.heads, self.activation, self.state_format)
        if self.chunked:
            rule = ChunkedDeltaRule(rule, shape, self.chunk, by_channel=True)
        widths = {"qkv": 3 * values, "f_a": self.head_dim, "b": self.heads}
        widths |= {"g": values} if self.full_gate else {"g_a": self.head_dim}
        second = ("f_b",) if self.full_gate else ("f_b", "g_b")
        return (
            *projections(self.D, widths, self.weight, self.overrides, self.activation),
            *(self._linear(name, self.head_dim, values) for name in second),
            CausalConv(3 * values, self.width, False, activation=self.activation, state_format=self.activation),
            rule,
            GatedNorm(values, self.head_dim, self.activation, self.activation),
            self._linear("out", values, self.D),
        )
