"""GPTQ: weights rounded one input at a time, each rounding error made up for by the inputs that are not rounded yet.

For a layer's inputs x the output error of a row is ``d H d`` with ``H = x.T x``. Rounding input i leaves an error that the
remaining weights cancel best by ``-e_i / U_ii * U_i,i+1:`` with U the upper Cholesky factor of H's inverse; updates of far
inputs are gathered per block. Source: Frantar et al. 2022 (arXiv 2210.17323), algorithm 1; the order of activations is
that of the authors' later code.
"""

from __future__ import annotations

import torch

from roofline.kernels.compression.affine import Grid, Quantized, grouped_columns


class Hessian:
    """``2 x.T x`` over the inputs that a layer sees, as a running mean over tokens; float64."""

    def __init__(self, inputs: int, device: torch.device | str = "cpu") -> None:
        self.matrix = torch.zeros(inputs, inputs, dtype=torch.float64, device=device)
        self.tokens = 0

    def add(self, x: torch.Tensor) -> None:
        """Takes in ``x [..., inputs]``."""
        rows = x.detach().reshape(-1, x.shape[-1]).double()
        total = self.tokens + len(rows)
        self.matrix += (2 * rows.T @ rows - len(rows) * self.matrix) / total
        self.tokens = total

    def factor(self, order: torch.Tensor, damping: float) -> torch.Tensor:
        """Upper Cholesky factor of the inverse, inputs in ``order``.

        Args:
            damping: what is added to the diagonal, as a share of its mean. An input never seen counts as seen alone.
        """
        matrix = self.matrix[order][:, order]
        diagonal = matrix.diagonal()
        diagonal[diagonal == 0] = 1.0
        diagonal += damping * diagonal.mean()
        return torch.linalg.cholesky(torch.cholesky_inverse(torch.linalg.cholesky(matrix)), upper=True)


def gptq(
    weight: torch.Tensor, hessian: Hessian, name: str, *, damping: float = 0.01, block: int = 128, act_order: bool = False
) -> Quantized:
    """A weight ``[outputs, inputs]`` in a format of integers by group, against the inputs gathered in ``hessian``.

    Args:
        block: inputs whose errors are handed on at once. act_order: the inputs with most energy first; groups are then
            made of inputs of like energy, and the result has an ``order``.
    """
    grid = Grid.named(name)
    inputs = weight.shape[1]
    diagonal, device = hessian.matrix.diagonal(), weight.device
    order = diagonal.argsort(descending=True, stable=True) if act_order else torch.arange(inputs, device=device)
    rest = weight.double()[:, order].clone()
    rest[:, diagonal[order] == 0] = 0.0
    factor = hessian.factor(order, damping)
    groups = grouped_columns(rest, grid.group).shape[1]
    codes = torch.empty(weight.shape, dtype=torch.uint8, device=device)
    scales, zeros = (torch.empty(len(weight), groups, dtype=torch.float64, device=device) for _ in range(2))
    span = max(1, block // grid.group) * grid.group
    for first in range(0, inputs, span):
        last = min(first + span, inputs)
        errors = torch.empty(len(weight), last - first, dtype=torch.float64, device=device)
        for column in range(first, last):
            group = column // grid.group
            if column % grid.group == 0:
                scale, zero = grid.fit(rest[:, column : column + grid.group])
                scales[:, group], zeros[:, group] = scale[:, 0], zero[:, 0]
            code = grid.encode(rest[:, column], scales[:, group], zeros[:, group])
            codes[:, column] = code.to(torch.uint8)
            left = rest[:, column] - (code - zeros[:, group]) * scales[:, group]
            errors[:, column - first] = left / factor[column, column]
            rest[:, column + 1 : last] -= errors[:, column - first, None] * factor[column, column + 1 : last]
        rest[:, last:] -= errors @ factor[first:last, last:]
    return Quantized(grid, codes, scales.half(), zeros.to(torch.uint8) if grid.asymmetric else None, order if act_order else None)
