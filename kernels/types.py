"""Number types of the kernels: one table of names, torch types, triton names and storage formats."""

from __future__ import annotations

from dataclasses import dataclass
from zlib import crc32

import torch

from roofline.formats import BF16, FP8, FP16, FP32, INT8, Format


@dataclass(frozen=True)
class Type:
    """One number type: torch's, triton's name of it, and the format whose bytes and matrix unit the model counts."""

    torch: torch.dtype
    triton: str
    format: Format


TYPES = {
    "bf16": Type(torch.bfloat16, "bf16", BF16),
    "fp16": Type(torch.float16, "fp16", FP16),
    "fp32": Type(torch.float32, "fp32", FP32),
    "fp8": Type(torch.float8_e4m3fn, "fp8e4nv", FP8),
    "fp8-e5m2": Type(torch.float8_e5m2, "fp8e5", FP8),
    "int8": Type(torch.int8, "int8", INT8),
    "int32": Type(torch.int32, "int32", FP32),
}
NAMES = {entry.torch: name for name, entry in TYPES.items()}


class Source:
    """Seeded test data; on the meta device, where nothing has a value, only shapes."""

    def __init__(self, name: str, device: str) -> None:
        self.device = device
        self.drawn = 0
        self.generator = torch.Generator().manual_seed(crc32(name.encode()))

    def normal(self, *shape: int, dtype: str, scale: float = 1.0) -> torch.Tensor:
        """Normal numbers (whole ones from -127 to 127 for int8) rounded to the type."""
        kind = TYPES[dtype].torch
        if self.device == "meta":
            return torch.empty(shape, dtype=kind, device="meta")
        if kind == torch.int8:
            return torch.randint(-127, 128, shape, generator=self.generator, dtype=torch.int8).to(self.device)
        if self.device != "cpu":
            self.drawn += 1
            seeded = torch.Generator(self.device).manual_seed(self.generator.initial_seed() + self.drawn)
            return (scale * torch.randn(shape, generator=seeded, device=self.device)).to(kind)
        return (scale * torch.randn(shape, generator=self.generator)).to(kind)

    def uniform(self, *shape: int) -> torch.Tensor:
        """fp32 numbers from 0 up to 1."""
        if self.device == "meta":
            return torch.empty(shape, device="meta")
        return torch.rand(shape, generator=self.generator).to(self.device)

    def permutation(self, n: int) -> torch.Tensor:
        """The numbers from 0 to n - 1 in random order, int32."""
        if self.device == "meta":
            return torch.empty(n, dtype=torch.int32, device="meta")
        return torch.randperm(n, generator=self.generator).to(torch.int32).to(self.device)

    def integers(self, values: list[int], dtype: torch.dtype = torch.int32) -> torch.Tensor:
        """The values themselves."""
        return torch.tensor(values, dtype=dtype, device=self.device)
