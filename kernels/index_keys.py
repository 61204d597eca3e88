"""How an indexer's queries and keys are stored: fp8 with one fp32 scale per 128, or MXFP4 with one 8-bit scale per 32.

A page of keys holds the values of all its entries first and their scales behind them, so that both are aligned. MXFP4 has
two elements in a byte, the even one in the low half. Source: OCP Microscaling Formats v1.0; vLLM, the cache of the indexer.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from roofline.formats import FORMATS, Format
from roofline.kernels import microscaling


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


def quantise(x: torch.Tensor, index: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Values and scales of rows ``[..., dim]``: fp8 and fp32, or uint8 (two elements each) and uint8 (a power of two)."""
    kind, dim = INDEX[index], x.shape[-1]
    if x.device.type == "meta":
        values = torch.float8_e4m3fn if kind.packed == 1 else torch.uint8
        shape, scales = (*x.shape[:-1], dim // kind.packed), (*x.shape[:-1], dim // kind.group)
        return torch.empty(shape, dtype=values, device="meta"), torch.empty(scales, dtype=kind.scale, device="meta")
    if kind.packed == 2:
        return microscaling.pack(x)
    groups = x.float().unflatten(-1, (-1, kind.group))
    scales = groups.abs().amax(-1, keepdim=True).clamp(min=1e-6) / 448.0
    return (groups / scales).to(torch.float8_e4m3fn).flatten(-2), scales.squeeze(-1)


def dequantise(values: torch.Tensor, scales: torch.Tensor, index: str) -> torch.Tensor:
    """The inverse, in float64."""
    if INDEX[index].packed == 2:
        return microscaling.unpack(values, scales)
    return (values.double().unflatten(-1, (scales.shape[-1], -1)) * scales.double().unsqueeze(-1)).flatten(-2)


def to_pages(values: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Quantised entries ``[pages, PAGE, ...]`` as pages of bytes: uint8 ``[pages, bytes]``."""
    return torch.cat([part.contiguous().view(torch.uint8).flatten(1) for part in (values, scales)], 1)


def from_pages(cache: torch.Tensor, page: int, dim: int, index: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Values and scales ``[pages, PAGE, ...]`` of pages of bytes."""
    kind = INDEX[index]
    wide, _ = kind.sizes(dim)
    values, scales = cache[:, : page * wide].contiguous(), cache[:, page * wide :].contiguous()
    narrow = values.view(torch.float8_e4m3fn) if kind.packed == 1 else values
    return narrow.view(len(cache), page, -1), scales.view(kind.scale).view(len(cache), page, -1)
