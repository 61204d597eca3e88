"""Quantisation-aware training: a forward pass over rounded weights, a gradient that passes rounding as if it were none.

The straight-through gradient is 1 inside the range of the codes and 0 outside (Bengio et al. 2013, arXiv 1308.3432). Scales
and zero points follow the weight in every step, so that what is trained is what ``frozen`` stores.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from roofline.kernels.compression.affine import Grid, Quantized, grouped_columns, round_to_nearest


class FakeQuantize(torch.autograd.Function):
    """Rounds ``values [..., group]`` to a grid and back; see the module for its gradient."""

    @staticmethod
    def forward(context: Any, values: torch.Tensor, scales: torch.Tensor, zeros: torch.Tensor, grid: Grid) -> torch.Tensor:
        """The nearest values of the grid."""
        unclamped = torch.round(values / scales) + zeros
        context.save_for_backward((unclamped >= 0) & (unclamped <= grid.largest))
        return (unclamped.clamp(0, grid.largest) - zeros) * scales

    @staticmethod
    def backward(context: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        """The gradient itself where the code was inside its range."""
        (inside,) = context.saved_tensors
        return gradients[0] * inside, None, None, None


def fake_quantize(weight: torch.Tensor, name: str) -> torch.Tensor:
    """A weight ``[outputs, inputs]`` rounded to a format and back, with a straight-through gradient."""
    grid = Grid.named(name)
    groups = grouped_columns(weight, grid.group)
    scales, zeros = grid.fit(groups.detach())
    rounded: torch.Tensor = FakeQuantize.apply(groups, scales, zeros, grid)
    return rounded.flatten(1)


class _Rounded(nn.Module):
    """A parametrisation that rounds a weight in every forward pass."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name

    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        return fake_quantize(weight, self.name)


def prepare(network: nn.Module, name: str, keep: tuple[str, ...] = ("lm_head",)) -> nn.Module:
    """Makes every linear layer of a network round its weight in training, but those whose name ends in one of ``keep``."""
    for path, module in list(network.named_modules()):
        if isinstance(module, nn.Linear) and not path.endswith(keep):
            nn.utils.parametrize.register_parametrization(module, "weight", _Rounded(name))
    return network


def frozen(network: nn.Module) -> dict[str, Quantized]:
    """The quantised weights of a prepared network by module; the network keeps the rounded weights and trains plainly on."""
    found = {}
    for path, module in list(network.named_modules()):
        if isinstance(module, nn.Linear) and nn.utils.parametrize.is_parametrized(module, "weight"):
            original, rounding = module.parametrizations.weight.original, module.parametrizations.weight[0]
            found[path] = round_to_nearest(original.detach(), rounding.name)
            nn.utils.parametrize.remove_parametrizations(module, "weight", leave_parametrized=True)
    return found
