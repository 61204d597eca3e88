"""RWKV-4: a recurrence per channel over exponentially weighted keys, and a feed-forward that looks one token back."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar

from roofline.components.base import Block, Component
from roofline.components.feedforward import ACTIVATION_FLOPS
from roofline.components.linear import Linear
from roofline.components.mixing import Elementwise
from roofline.components.recurrent import GATE_FLOPS, Demand, Recurrent
from roofline.formats import BF16, FP32, Format

WKV_FLOPS = 19
"""Elementwise FLOPs of the wkv recurrence per channel: output 9 (bonus, maximum, two differences, numerator 3,
denominator 2), division 1, state 9 (decay, maximum, two differences, numerator 3, denominator 2)."""
WKV_SPECIALS = 4
"""Exponentials of the wkv recurrence per channel."""


@dataclass(frozen=True)
class TokenShift(Recurrent):
    """Mixes each token with the one before it, once per projection, in one kernel: ``m x[t] + (1 - m) x[t - 1]``.

    FLOPs ``3 mixes D`` elementwise per token (two products and a sum); state ``D`` elements, the last token.

    Attributes:
        D: width. mixes: projections that each have a mix of their own.
    """

    kind: ClassVar[str] = "token_shift"
    piece: ClassVar[str] = "conv"

    D: Any
    mixes: int
    activation: Format = BF16
    state_format: Format = BF16
    name: str = "token_shift"

    @property
    def demand(self) -> Demand:
        mixed = self.mixes * self.D
        return Demand(vector=3 * mixed, special=0, reads=self.D, writes=mixed, weights=mixed, state=self.D)


@dataclass(frozen=True)
class WKV(Recurrent):
    """The wkv recurrence, one kernel: a running weighted mean of values under a decay per channel.

    FLOPs ``19 width`` elementwise and ``4 width`` exponentials per token; state ``3 width`` elements in fp32: numerator,
    denominator, and the largest exponent so far. Source: Peng et al. 2023 (arXiv 2305.13048), appendix D.
    """

    kind: ClassVar[str] = "scan"

    width: Any
    activation: Format = BF16
    state_format: Format = FP32
    name: str = "wkv"

    @property
    def demand(self) -> Demand:
        return Demand(
            vector=WKV_FLOPS * self.width,
            special=WKV_SPECIALS * self.width,
            reads=2 * self.width,
            writes=self.width,
            weights=2 * self.width,
            state=3 * self.width,
        )


@dataclass(frozen=True)
class TimeMix(Block):
    """The mixer of RWKV-4: token shift, key, value and receptance, wkv, gate, output projection.

    Parameters ``4 D width + 3 D + 2 width``; state ``D`` (last token) and ``3 width`` elements (wkv).

    Attributes:
        D, width: width of the residual stream and of the mixer.
        weight, overrides: storage of the projections, and of "key", "value", "receptance", "output" where it differs.
    """

    D: Any
    width: Any
    weight: Format = BF16
    activation: Format = BF16
    overrides: tuple[tuple[str, Format], ...] = ()
    name: str = "time_mix"

    def _linear(self, name: str, inputs: Any, outputs: Any) -> Linear:
        return Linear(inputs, outputs, False, dict(self.overrides).get(name, self.weight), self.activation, name=name)

    @cached_property
    def parts(self) -> tuple[Component, ...]:
        return (
            TokenShift(self.D, 3, self.activation, self.activation),
            *(self._linear(name, self.D, self.width) for name in ("key", "value", "receptance")),
            WKV(self.width, self.activation),
            Elementwise(2 * self.width, self.width, GATE_FLOPS * self.width, self.activation, name="gate"),
            self._linear("output", self.width, self.D),
        )


@dataclass(frozen=True)
class ChannelMix(Block):
    """The feed-forward of RWKV-4: token shift, ``sigmoid(receptance) * value(relu(key)^2)``.

    Parameters ``2 D F + D^2 + 2 D``; state ``D`` elements, the last token.
    """

    D: Any
    F: Any
    weight: Format = BF16
    activation: Format = BF16
    overrides: tuple[tuple[str, Format], ...] = ()
    name: str = "channel_mix"

    def _linear(self, name: str, inputs: Any, outputs: Any, epilogue: int = 0) -> Linear:
        weight = dict(self.overrides).get(name, self.weight)
        return Linear(inputs, outputs, False, weight, self.activation, epilogue=epilogue, name=f"ffn_{name}")

    @cached_property
    def parts(self) -> tuple[Component, ...]:
        return (
            TokenShift(self.D, 2, self.activation, self.activation),
            self._linear("key", self.D, self.F, ACTIVATION_FLOPS),
            self._linear("receptance", self.D, self.D),
            self._linear("value", self.F, self.D),
            Elementwise(2 * self.D, self.D, GATE_FLOPS * self.D, self.activation, name="ffn_gate"),
        )
