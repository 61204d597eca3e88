"""How an indexer's queries and keys are stored: fp8 with one fp32 scale per 128, or MXFP4 with one 8-bit scale per 32.

A page of keys holds the values of all its entries first and their scales behind them, so that both are aligned. MXFP4 has
two elements in a byte, the even one in the low half. Source: OCP Microscaling Formats v1.0; vLLM, the cache of the indexer.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from roofline.formats import FORMATS, Format

FP4_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""Magnitudes of e2m1 by their code; the fourth bit is the sign."""


@dataclass(frozen=True)
class IndexFormat:
    """One storage.

    Attributes:
        format: of the model. group: elements per scale. scale: torch's type of a scale. packed: elements per byte.
        dot: triton's name of the type that is multiplied.
    """

    format: Format
    group: int
    scale: torch.dtype
    packed: int
    dot: str

    def sizes(self, dim: int) -> tuple[int, int]:
        """Bytes of the values and of the scales of one row of ``dim`` elements."""
        return dim // self.packed, dim // self.group * self.scale.itemsize


INDEX = {
    "fp8": IndexFormat(FORMATS["fp8-token"], 128, torch.float32, 1, "fp8e4nv"),
    "mxfp4": IndexFormat(FORMATS["mxfp4"], 32, torch.uint8, 2, "bf16"),
}


@triton.jit
def fp4_values(code):
    """e2m1 codes of four bits (int32) as fp32."""
    magnitude = code & 7
    bits = (((magnitude >> 1) + 126) << 23) | ((magnitude & 1) << 22)
    value = tl.where(magnitude < 2, magnitude.to(tl.float32) * 0.5, bits.to(tl.float32, bitcast=True))
    return tl.where((code & 8) != 0, -value, value)


@triton.jit
def power_of_two(code):
    """ue8m0 codes (unsigned 8 bits, 1 to 254) as fp32."""
    return (code.to(tl.int32) << 23).to(tl.float32, bitcast=True)


def quantise(x: torch.Tensor, index: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Values and scales of rows ``[..., dim]``: fp8 and fp32, or uint8 (two elements each) and uint8 (a power of two)."""
    kind, dim = INDEX[index], x.shape[-1]
    if x.device.type == "meta":
        values = torch.float8_e4m3fn if kind.packed == 1 else torch.uint8
        shape, scales = (*x.shape[:-1], dim // kind.packed), (*x.shape[:-1], dim // kind.group)
        return torch.empty(shape, dtype=values, device="meta"), torch.empty(scales, dtype=kind.scale, device="meta")
    groups = x.float().unflatten(-1, (-1, kind.group))
    largest = groups.abs().amax(-1, keepdim=True).clamp(min=1e-6)
    if kind.packed == 1:
        scales = largest / 448.0
        return (groups / scales).to(torch.float8_e4m3fn).flatten(-2), scales.squeeze(-1)
    exponents = torch.floor(torch.log2(largest)) - 2
    scaled = (groups / torch.exp2(exponents)).flatten(-2)
    steps = torch.tensor(FP4_VALUES, device=x.device)
    codes = torch.bucketize(scaled.abs(), (steps[1:] + steps[:-1]) / 2).to(torch.uint8)
    codes = codes | (scaled < 0).to(torch.uint8) << 3
    return codes[..., 0::2] | codes[..., 1::2] << 4, (exponents.squeeze(-1) + 127).to(torch.uint8)


def dequantise(values: torch.Tensor, scales: torch.Tensor, index: str) -> torch.Tensor:
    """The inverse, in float64."""
    if INDEX[index].packed == 1:
        wide, factors = values.double(), scales.double()
    else:
        steps = torch.tensor(FP4_VALUES, dtype=torch.float64, device=values.device)
        codes = torch.stack([values & 15, values >> 4], -1).flatten(-2).long()
        wide, factors = torch.where(codes >= 8, -1.0, 1.0) * steps[codes & 7], torch.exp2(scales.double() - 127)
    return (wide.unflatten(-1, (factors.shape[-1], -1)) * factors.unsqueeze(-1)).flatten(-2)


def to_pages(values: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Quantised entries ``[pages, PAGE, ...]`` as pages of bytes: uint8 ``[pages, bytes]``."""
    parts = (values, scales) if values.device.type == "meta" else (values.view(torch.uint8), scales.view(torch.uint8))
    sizes = [part[0].numel() * part.element_size() for part in parts]
    if values.device.type == "meta":
        return torch.empty(len(values), sum(sizes), dtype=torch.uint8, device="meta")
    return torch.cat([part.flatten(1) for part in parts], 1)


def from_pages(cache: torch.Tensor, page: int, dim: int, index: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Values and scales ``[pages, PAGE, ...]`` of pages of bytes."""
    kind = INDEX[index]
    wide, _ = kind.sizes(dim)
    values, scales = cache[:, : page * wide].contiguous(), cache[:, page * wide :].contiguous()
    narrow = values.view(torch.float8_e4m3fn) if kind.packed == 1 else values
    return narrow.view(len(cache), page, -1), scales.view(kind.scale).view(len(cache), page, -1)
