"""RWKV-7: a matrix-valued recurrence per head under a generalised delta rule, and a feed-forward that looks one token back."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar

from roofline.components.base import Block, Component
from roofline.components.chunked import Heads
from roofline.components.feedforward import ACTIVATION_FLOPS
from roofline.components.linear import Linear
from roofline.components.mixing import LAYER_FLOPS, Elementwise, Norm
from roofline.components.recurrent import Demand, Recurrent
from roofline.components.rwkv import TokenShift
from roofline.formats import BF16, FP32, Format

GENERALISED_FLOPS = 9
"""Elementwise FLOPs of the generalised delta rule per element of state and token: decay, recall (2), removal (2), update (2),
output (2)."""


@dataclass(frozen=True)
class GeneralisedDeltaRule(Recurrent):
    """``S = S diag(w) - (S k) (a k)^T + v u^T``, ``y = S r``, one kernel that walks through the tokens.

    FLOPs ``9 heads head_dim^2`` elementwise per token and an exponential per channel (its decay). What is paid per
    channel is left out. State ``heads head_dim^2`` elements in fp32. Source: Peng et al. 2025 (arXiv 2503.14456),
    section 4; the authors' CUDA kernel runs a prefill in the same order.

    Attributes:
        shape: the state.
        learned: parameters per channel: multipliers of the removal key, the replacement key and the bonus; 0 for a
            kernel that is given both keys ready.
    """

    kind: ClassVar[str] = "delta_rule"

    shape: Heads
    learned: int = 3
    activation: Format = BF16
    state_format: Format = FP32
    name: str = "wkv7"

    @property
    def demand(self) -> Demand:
        width = self.shape.values
        return Demand(
            vector=GENERALISED_FLOPS * self.shape.state,
            special=width,
            reads=6 * width,
            writes=width,
            weights=self.learned * width,
            state=self.shape.state,
        )


@dataclass(frozen=True)
class Ranks:
    """Ranks of the low-rank projections of a time mix: decay, in-context rate, value residual, gate."""

    decay: int
    rate: int
    value: int
    gate: int


@dataclass(frozen=True)
class TimeMix7(Block):
    """The mixer of RWKV-7: token shift, receptance, key and value, low-rank projections, recurrence, norm, gate, output.

    Parameters ``4 D^2 + 2 D (decay + rate + gate) + 13 D`` and, but in the first layer, whose values the later ones
    mix in, ``2 D value + D``. State: ``D`` (last token) and ``heads head_dim^2`` elements (recurrence).

    Attributes:
        D: width of the residual stream and of the mixer. head_dim: width of one head.
        ranks: of the low-rank projections. first: whether this is the first layer.
        weight, overrides: storage of the projections, and of "r", "k", "v", "o" and the low-rank "w", "a", "g", "v0".
    """

    D: Any
    head_dim: Any
    ranks: Ranks
    first: bool = False
    weight: Format = BF16
    activation: Format = BF16
    overrides: tuple[tuple[str, Format], ...] = ()
    name: str = "time_mix"

    def _linear(self, name: str, inputs: Any, outputs: Any, bias: bool = False) -> Linear:
        weight = dict(self.overrides).get(name, self.weight)
        return Linear(inputs, outputs, bias, weight, self.activation, name=f"{name}_proj")

    def _low_rank(self) -> list[Component]:
        """Pairs of projections; all but the gate's end in a bias."""
        ranks = {"w": self.ranks.decay, "a": self.ranks.rate, "g": self.ranks.gate}
        if not self.first:
            ranks["v0"] = self.ranks.value
        pairs: list[Component] = []
        for name, rank in ranks.items():
            pairs += [self._linear(name, self.D, rank), self._linear(name, rank, self.D, name != "g")]
        return pairs

    @cached_property
    def parts(self) -> tuple[Component, ...]:
        D, same = self.D, self.activation
        shape = Heads(D // self.head_dim, self.head_dim, self.head_dim, D // self.head_dim)
        return (
            TokenShift(D, 6, same, same),
            *(self._linear(name, D, D) for name in ("r", "k", "v")),
            *self._low_rank(),
            GeneralisedDeltaRule(shape, activation=same),
            Norm(D, 2 * D, LAYER_FLOPS, weight=same, activation=same, name="head_norm"),
            Elementwise(2 * D, D, D, same, name="gate"),
            self._linear("o", D, D),
        )


@dataclass(frozen=True)
class ChannelMix7(Block):
    """The feed-forward of RWKV-7: token shift, ``value(relu(key)^2)``. Parameters ``2 D F + D``; state ``D`` elements."""

    D: Any
    F: Any
    weight: Format = BF16
    activation: Format = BF16
    overrides: tuple[tuple[str, Format], ...] = ()
    name: str = "channel_mix"

    @cached_property
    def parts(self) -> tuple[Component, ...]:
        formats = dict(self.overrides)
        key, value = (formats.get(name, self.weight) for name in ("key", "value"))
        return (
            TokenShift(self.D, 1, self.activation, self.activation),
            Linear(self.D, self.F, False, key, self.activation, epilogue=ACTIVATION_FLOPS, name="ffn_key"),
            Linear(self.F, self.D, False, value, self.activation, name="ffn_value"),
        )
