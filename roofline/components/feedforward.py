"""Dense feed-forward blocks: gated (three matrices) and plain (two)."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

from roofline.components.base import Block, Component
from roofline.components.linear import Linear
from roofline.formats import BF16, Format

ACTIVATION_FLOPS = 4
"""Elementwise FLOPs of an activation function per element (SiLU: negate, add, divide, multiply), its exponential apart."""


@dataclass(frozen=True)
class MLP(Block):
    """Feed-forward block of width F.

    Gated: ``down(act(gate(x)) * up(x))``, parameters ``3 D F``, FLOPs ``6 B T D F``; plain: ``down(act(up(x)))``,
    ``2 D F`` and ``4 B T D F``. The activation is fused into the first matmul, which therefore writes F elements:
    bytes ``4 B T D + 4 B T F + 6 D F`` at bf16, as the lecture counts them. Source: CS336 lecture 10, MLP intensity.

    Attributes:
        overrides: ((projection, format), ...) for "gate", "up", "down" whose storage differs from ``weight``.
        vectors: storage of biases, None for the activation format.
    """

    D: Any
    F: Any
    gated: bool = True
    bias: bool = False
    weight: Format = BF16
    activation: Format = BF16
    overrides: tuple[tuple[str, Format], ...] = ()
    vectors: Format | None = None
    name: str = "mlp"

    @cached_property
    def parts(self) -> tuple[Component, ...]:
        formats = dict(self.overrides)
        up, gate, down = (formats.get(part, self.weight) for part in ("up", "gate", "down"))
        epilogue = ACTIVATION_FLOPS + (1 if self.gated else 0)

        def linear(name: str, inputs: Any, outputs: Any, weight: Format, **fields: Any) -> Linear:
            own = {"vectors": self.vectors, "name": f"{self.name}.{name}", **fields}
            return Linear(inputs, outputs, self.bias, weight, self.activation, **own)

        first: tuple[Linear, ...]
        if self.gated and gate == up:
            first = (linear("gate_up", self.D, 2 * self.F, up, stored=self.F, epilogue=epilogue),)
        elif self.gated:
            first = (linear("gate", self.D, self.F, gate), linear("up", self.D, self.F, up, epilogue=epilogue))
        else:
            first = (linear("up", self.D, self.F, up, epilogue=epilogue),)
        return (*first, linear("down", self.F, self.D, down))
