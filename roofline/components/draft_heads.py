"""Heads that guess several tokens ahead from one hidden state, in one pass."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

from roofline.components.base import Block, Component
from roofline.components.feedforward import ACTIVATION_FLOPS
from roofline.components.linear import Linear
from roofline.formats import BF16, Format


@dataclass(frozen=True)
class MedusaHeads(Block):
    """One head per position ahead: residual layers ``x + silu(W x + b)``, then a projection onto the vocabulary.

    Parameters ``heads (layers (D^2 + D) + D V)``, FLOPs per token twice the matrices. Source: Cai et al. 2024, Medusa
    (arXiv 2401.10774), section 2.1.1; the released heads have one layer and a projection of their own each.

    Attributes:
        D, vocabulary: width of the hidden state, and V.
        heads: positions that are guessed. layers: residual layers of each head.
    """

    D: Any
    vocabulary: Any
    heads: int
    layers: int = 1
    weight: Format = BF16
    activation: Format = BF16
    name: str = "medusa"

    @cached_property
    def parts(self) -> tuple[Component, ...]:
        residual = Linear(
            self.D, self.D, True, self.weight, self.activation, epilogue=ACTIVATION_FLOPS + 1, name=f"{self.name}.residual"
        )
        projection = Linear(self.D, self.vocabulary, False, self.weight, self.activation, name=f"{self.name}.projection")
        return (*[residual] * self.layers, projection) * self.heads
