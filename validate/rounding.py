"""What Triton's interpreter rounds wrongly, put right: bfloat16, whose raw bits it computes with, and 8-bit floats."""

from __future__ import annotations

import os
from typing import Any

os.environ.setdefault("TRITON_INTERPRET", "1")

import numpy as np
import torch
import triton.language as tl
from triton.runtime import interpreter as interpreter_module

from roofline.errors import RooflineError

interpreter: Any = interpreter_module
FP8 = {"fp8e4nv": torch.float8_e4m3fn, "fp8e5": torch.float8_e5m2}


class HarnessError(RooflineError):
    """The counting interpreter does not fit the installed triton."""


def decoded(handle: Any) -> Any:
    """A bfloat16 handle (raw bits) as float32; any other as it is."""
    if hasattr(handle, "dtype") and handle.dtype.scalar == tl.bfloat16:
        return interpreter.TensorHandle((handle.data.astype(np.uint32) << 16).view(np.float32), tl.float32)
    return handle


def encoded(values: Any) -> Any:
    """float32 as bfloat16 bits, rounded to nearest even."""
    bits = np.ascontiguousarray(values, dtype=np.float32).view(np.uint32)
    rounded = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)
    return np.where(np.isnan(values), np.uint16(0x7FC0), rounded).reshape(np.shape(values))


def as_bf16(values: Any) -> Any:
    """float32 as a bfloat16 handle."""
    return interpreter.TensorHandle(encoded(values), tl.bfloat16)


def is_bf16(handle: Any) -> bool:
    """Whether a handle holds bfloat16."""
    return hasattr(handle, "dtype") and handle.dtype.scalar == tl.bfloat16


def converting(convert_float: Any) -> Any:
    """Casts between float types: to 8 bits rounded to nearest even, what is too large to the largest.

    So sm_90 rounds (``cvt.rn.satfinite``). bfloat16 is rounded to nearest even.
    """

    def convert(values: Any, source: Any, target: Any, rounding: Any) -> Any:
        if source == tl.float32 and target == tl.bfloat16:
            return encoded(values)
        source8, target8 = FP8.get(str(source)), FP8.get(str(target))
        if source8 is not None:
            bits = torch.from_numpy(np.ascontiguousarray(values).view(np.uint8)).view(source8)
            values, source = bits.to(torch.float32).numpy(), tl.float32
        if target8 is not None and source in (tl.float32, tl.float16):
            largest = torch.finfo(target8).max
            cast = torch.from_numpy(np.ascontiguousarray(values)).clamp(-largest, largest).to(target8)
            return cast.view(torch.uint8).numpy().reshape(np.shape(values))
        if source8 is not None:
            if target == tl.bfloat16:
                return encoded(values)
            wide = values.astype(np.float32 if target == tl.float32 else np.float16)
            return wide.view(np.uint32 if target == tl.float32 else np.uint16)
        return convert_float(values, source, target, rounding)

    return convert


def casting(cast_impl: Any) -> Any:
    """Casts between integers and bfloat16 through float32."""

    def cast(self: Any, source: Any, target: Any) -> Any:
        from_type, to_type = source.dtype.scalar, target.scalar
        if str(from_type) in FP8 or str(to_type) in FP8:
            raise HarnessError(f"the interpreter cannot cast {from_type} to {to_type}; cast through fp32")
        if from_type == tl.bfloat16 and to_type != tl.float32:
            return cast_impl(self, decoded(source), target)
        if to_type == tl.bfloat16 and from_type != tl.float32:
            return as_bf16(source.data.astype(np.float32))
        return cast_impl(self, source, target)

    return cast
