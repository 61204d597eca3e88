"""AWQ: inputs with large activations are scaled up in the weight before it is rounded, and down again in front of it.

``x w.T = (x / s) (w s).T``: an input that carries much is rounded more finely, at the cost of its group's range. The scale
is ``s = mean|x|^alpha``, and alpha is searched for the least output error on the inputs given. Whoever makes x divides by s
in advance: the norm in front, or the rows of the linear layer in front. Source: Lin et al. 2023 (arXiv 2306.00978), 3.2.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from roofline.kernels.compression.affine import Quantized, round_to_nearest

STEPS = 20
"""Exponents that are tried: 0, 1/20, ..., 1."""


@dataclass(frozen=True)
class Scaled:
    """Weights that share their inputs, quantised after their inputs were scaled.

    Attributes:
        parts: the weights ``w s``. scales: s, fp32 ``[inputs]``: x must be divided by it. alpha: the exponent.
        error: mean square of the output error on the inputs given.
    """

    parts: tuple[Quantized, ...]
    scales: torch.Tensor
    alpha: float
    error: float

    def dequantized(self) -> tuple[torch.Tensor, ...]:
        """The weights that they stand for, for inputs that were not divided."""
        return tuple(part.dequantized() / self.scales for part in self.parts)


def scaled(weights: Sequence[torch.Tensor], x: torch.Tensor, name: str, alpha: float) -> Scaled:
    """The weights rounded after scaling by ``mean|x|^alpha``; alpha 0 is rounding to nearest."""
    size = x.float().abs().mean(0).clamp(min=1e-4) ** alpha
    scales = size / (size.max() * size.min()).sqrt()
    parts = tuple(round_to_nearest(weight.float() * scales, name) for weight in weights)
    error = 0.0
    for weight, part in zip(weights, parts, strict=True):
        error += float((x.float() @ (weight.float() - part.dequantized() / scales).T).square().mean())
    return Scaled(parts, scales, alpha, error)


def awq(weights: Sequence[torch.Tensor], x: torch.Tensor, name: str, steps: int = STEPS) -> Scaled:
    """The best of ``steps`` + 1 exponents for weights ``[outputs, inputs]`` that share their inputs ``x [tokens, inputs]``."""
    tried = (scaled(weights, x, name, step / steps) for step in range(steps + 1))
    return min(tried, key=lambda found: found.error)
