"""Four-bit floats in blocks: e2m1 elements, two to a byte, with one scale per block (OCP Microscaling Formats v1.0).

An e2m1 element has a sign, two bits of exponent and one of mantissa: 0, 0.5, 1, 1.5, 2, 3, 4, 6. The lower half of a byte
holds the element that comes first. MXFP4 gives every 32 elements an e8m0 scale, a power of two 2^(byte - 127) whose byte
255 is NaN; NVFP4 gives every 16 an e4m3 one. Elements of both formats times their scales are exact in bfloat16 while the
scale is a power of two.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from roofline.configs.quantization import weight_only
from roofline.formats import FORMATS

MXFP4 = weight_only(FORMATS["mxfp4"])
"""Storage of MXFP4 weights that are multiplied in 16 bits."""
BLOCK = 32
"""Elements of MXFP4 that share a scale."""
LARGEST = 6.0
VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""Magnitudes of e2m1 by their three bits."""


@triton.jit
def widen_e2m1(code):
    """fp16 of e2m1 elements in the lowest four bits of integers: the exponent moves to fp16's, and 2^14 mends its bias."""
    narrow = ((code & 7) << 9) | ((code & 8) << 12)
    return narrow.to(tl.uint16).to(tl.float16, bitcast=True) * 16384.0


@triton.jit
def widen_e8m0(code):
    """fp32 of e8m0 scales in uint8: the byte is fp32's exponent, except for 0 (2^-127) and 255 (NaN)."""
    byte = code.to(tl.uint32)
    bits = tl.where(byte == 0, 0x00400000, tl.where(byte == 255, 0x7FC00000, byte << 23))
    return bits.to(tl.uint32).to(tl.float32, bitcast=True)


@triton.jit
def widen_blocks(packed, scales, ROWS: tl.constexpr, COLUMNS: tl.constexpr, GROUP: tl.constexpr):
    """fp32 ``[ROWS, COLUMNS]`` of ``packed [ROWS, COLUMNS / 2]`` (uint8) and fp32 ``scales [ROWS, COLUMNS / GROUP]``."""
    code = packed.to(tl.int32)
    elements = tl.join(widen_e2m1(code & 15), widen_e2m1(code >> 4)).to(tl.float32)
    blocks = tl.reshape(elements, (ROWS, COLUMNS // GROUP, GROUP))
    return tl.reshape(blocks * scales[:, :, None], (ROWS, COLUMNS))


def pack(values: torch.Tensor, group: int = BLOCK) -> tuple[torch.Tensor, torch.Tensor]:
    """MXFP4 of ``values [..., K]``: bytes ``[..., K / 2]`` and e8m0 scales ``[..., K / group]``, both uint8.

    The scale is the power of two that brings the largest magnitude of a block into e2m1's last binade (OCP MX, 6.3);
    elements are rounded to the nearest, ties to the even code, and clamped. Raises ValueError where K holds no whole blocks.
    """
    if values.shape[-1] % group:
        raise ValueError(f"{values.shape[-1]} elements are not whole blocks of {group}")
    blocks = values.double().unflatten(-1, (-1, group))
    largest = blocks.abs().amax(-1)
    exponent = torch.where(largest > 0, torch.frexp(largest).exponent - 1 - 2, torch.full_like(largest, -127))
    exponent = exponent.clamp(-127, 127)
    scaled = (blocks / torch.exp2(exponent.double())[..., None]).flatten(-2)
    return to_bytes(nearest(scaled)), (exponent + 127).to(torch.uint8)


def nearest(scaled: torch.Tensor) -> torch.Tensor:
    """e2m1 codes (uint8) of numbers: rounded to the nearest, ties to the even code, clamped."""
    magnitude = scaled.abs().clamp(max=LARGEST)
    table = torch.tensor(VALUES, dtype=torch.float64, device=scaled.device)
    middles = (table[1:] + table[:-1]) / 2
    below, above = torch.bucketize(magnitude, middles), torch.bucketize(magnitude, middles, right=True)
    code = torch.where(below == above, below, below + below % 2)
    return (code + 8 * torch.signbit(scaled)).to(torch.uint8)


def to_bytes(codes: torch.Tensor) -> torch.Tensor:
    """Codes ``[..., K]``, each below 16, two to a byte: ``[..., K / 2]``."""
    return codes[..., ::2] | (codes[..., 1::2] << 4)


def elements(packed: torch.Tensor) -> torch.Tensor:
    """float64 elements ``[..., K]`` of bytes ``[..., K / 2]``, scales apart."""
    codes = torch.stack([packed & 15, packed >> 4], -1).flatten(-2).long()
    signed = torch.tensor([*VALUES, *(-value for value in VALUES)], dtype=torch.float64, device=packed.device)
    return signed[codes]


def powers(scales: torch.Tensor) -> torch.Tensor:
    """float64 of e8m0 scales."""
    return torch.where(scales == 255, torch.nan, torch.exp2(scales.double() - 127))


def unpack(packed: torch.Tensor, scales: torch.Tensor, group: int = BLOCK) -> torch.Tensor:
    """The inverse of ``pack``: float64 ``[..., K]``."""
    return (elements(packed).unflatten(-1, (-1, group)) * powers(scales)[..., None]).flatten(-2)
