"""Affine quantisation by group: ``w = (code - zero) * scale``, with codes of 2 to 8 bits.

Scales are rounded to fp16 before they are used, as they are stored. Symmetric codes have the zero point 2^(bits-1), which
is not stored; asymmetric ones a zero point as wide as a code. Both ranges are stretched over 2^bits - 1 steps, so that a
value is never further than half a scale from its code, the rounding of the scale apart.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from roofline.formats import GROUPED, Format, grouped
from roofline.kernels.packing import pack_rows

SMALLEST = 2.0**-14
"""The least scale that is a normal number in fp16."""


@dataclass(frozen=True)
class Grid:
    """Which codes there are: ``bits``, elements per ``group``, and whether zero points are stored."""

    bits: int
    group: int
    asymmetric: bool

    @staticmethod
    def named(name: str) -> Grid:
        """The grid of a format's name ("int4-g128-asym"). Raises ValueError for a format that has none."""
        match = GROUPED.fullmatch(name)
        if match is None or int(match[2]) < 1:
            raise ValueError(f"{name} is not a format of integers by group; write int4-g128 or int4-g128-asym")
        return Grid(int(match[1]), int(match[2]), match[3] is not None)

    @property
    def format(self) -> Format:
        """The format of the model that counts its bytes."""
        return grouped(self.bits, self.group, asymmetric=self.asymmetric)

    @property
    def largest(self) -> int:
        """The largest code; the least is 0."""
        return (1 << self.bits) - 1

    @property
    def middle(self) -> int:
        """The zero point of symmetric codes."""
        return 1 << (self.bits - 1)

    def fit(self, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """(scales, zero points) of groups along the last dimension, which is kept with size 1; of the values' type."""
        low, high = values.amin(-1, keepdim=True).clamp(max=0), values.amax(-1, keepdim=True).clamp(min=0)
        if not self.asymmetric:
            high = torch.maximum(high, -low)
            low = -high
        scales = ((high - low) / self.largest).clamp(min=SMALLEST).half().to(values.dtype)
        if not self.asymmetric:
            return scales, torch.full_like(scales, self.middle)
        return scales, torch.round(-low / scales).clamp(0, self.largest)

    def encode(self, values: torch.Tensor, scales: torch.Tensor, zeros: torch.Tensor) -> torch.Tensor:
        """The nearest codes, in the values' type."""
        return (torch.round(values / scales) + zeros).clamp(0, self.largest)


@dataclass(frozen=True)
class Quantized:
    """A quantised weight ``[outputs, inputs]``.

    Attributes:
        grid: its codes. codes: uint8 ``[outputs, inputs]``. scales: fp16 ``[outputs, inputs / group]``.
        zeros: uint8 like the scales, None for symmetric codes.
        order: int64 ``[inputs]``, which input each column of codes belongs to where a method sorted them, else None.
    """

    grid: Grid
    codes: torch.Tensor
    scales: torch.Tensor
    zeros: torch.Tensor | None = None
    order: torch.Tensor | None = None

    @property
    def format(self) -> Format:
        """The format of the model that counts its bytes."""
        return self.grid.format

    def dequantized(self, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """The weight that it stands for, inputs in their own order."""
        by_input = [
            part.to(dtype).repeat_interleave(self.grid.group, 1) if part is not None else self.grid.middle
            for part in (self.zeros, self.scales)
        ]
        sorted_ = (self.codes.to(dtype) - by_input[0]) * by_input[1]
        return sorted_ if self.order is None else sorted_[:, self.order.argsort()]

    def stored(self) -> dict[str, torch.Tensor]:
        """The tensors that hold it, codes and zero points as streams of bits along the inputs; the order apart."""
        grid = self.grid
        tensors = {"codes": pack_rows(self.codes.T, grid.bits), "scales": self.scales}
        if self.zeros is not None:
            tensors["zeros"] = pack_rows(self.zeros.T.flatten(), grid.bits)
        return tensors

    @property
    def stored_bytes(self) -> int:
        """Bytes of those tensors."""
        return sum(tensor.numel() * tensor.element_size() for tensor in self.stored().values())


def grouped_columns(weight: torch.Tensor, group: int) -> torch.Tensor:
    """``[outputs, inputs]`` as ``[outputs, inputs / group, group]``. Raises ValueError where the groups are not whole."""
    if weight.shape[1] % group:
        raise ValueError(f"{weight.shape[1]} inputs are not whole groups of {group}")
    return weight.unflatten(1, (-1, group))


def round_to_nearest(weight: torch.Tensor, name: str) -> Quantized:
    """Each weight on its nearest code, whatever the inputs are.

    Args:
        weight: ``[outputs, inputs]``. name: of a format of integers by group, "int4-g128-asym".
    """
    grid = Grid.named(name)
    groups = grouped_columns(weight.float(), grid.group)
    scales, zeros = grid.fit(groups)
    codes = grid.encode(groups, scales, zeros).flatten(1).to(torch.uint8)
    stored_zeros = zeros.squeeze(2).to(torch.uint8) if grid.asymmetric else None
    return Quantized(grid, codes, scales.squeeze(2).half(), stored_zeros)


def output_error(weight: torch.Tensor, quantized: torch.Tensor, x: torch.Tensor) -> float:
    """Root mean square of ``x (w - q).T`` over that of ``x w.T``, for inputs ``x [tokens, inputs]``."""
    error = (x.double() @ (weight.double() - quantized.double()).T).square().mean()
    return float((error / (x.double() @ weight.double().T).square().mean()).sqrt())
