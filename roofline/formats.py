"""Number formats: how many bits one stored element costs, scales and zero points included, and what computes with it.

``bits`` is exact: a Fraction of a bit per element, so that the bytes of a tensor are an integer or a Fraction and never
a rounded float. The format of *storage* keys bytes; the *unit* that executes keys FLOPs: int4 weights are dequantised
and multiplied by the 16-bit matrix unit.

Sources: OCP Microscaling Formats v1.0 (MX formats: blocks of 32 with an 8-bit scale); NVFP4 (blocks of 16 with an fp8
scale; the one fp32 scale per tensor is left out); DeepSeek-V3 technical report (fp8 with one fp32 scale per 128x128
block); AutoGPTQ / AutoAWQ (fp16 scale and, if asymmetric, a zero point of the width of the weight per group); GGUF block
sizes from the static asserts of ggml/src/ggml-common.h (ggml-org/llama.cpp).
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from fractions import Fraction
from functools import cache, cached_property
from typing import Any

from roofline.errors import InputError, suggest
from roofline.numeric import scale, whole


@dataclass(frozen=True)
class Format:
    """A storage format.

    Attributes:
        name: what users type and what tables show.
        bits: bits per element, scales and zero points included.
        element_bits: bits of the element alone.
        unit: the matrix unit that multiplies it: "bf16", "fp8", "int8" or "fp4".
        note: what the bits are made of.
    """

    name: str
    bits: Fraction
    element_bits: int
    unit: str = "bf16"
    note: str = ""

    @cached_property
    def bytes_per_element(self) -> int | Fraction:
        """Bytes per element: an int where whole."""
        result: int | Fraction = whole(self.bits / 8)
        return result

    def bytes(self, elements: Any) -> Any:
        """Bytes of that many elements, in the reading of ``elements``."""
        return scale(elements, self.bytes_per_element)

    def __str__(self) -> str:
        return self.name


def _plain(name: str, bits: int, unit: str) -> Format:
    return Format(name, Fraction(bits), bits, unit, f"{bits} bits, no scale counted")


def _ggml(name: str, block_bytes: int, block: int, element_bits: int) -> Format:
    return Format(name, Fraction(8 * block_bytes, block), element_bits, "bf16", f"GGUF block of {block}: {block_bytes} bytes")


FP32 = _plain("fp32", 32, "fp32")
BF16 = _plain("bf16", 16, "bf16")
FP16 = _plain("fp16", 16, "bf16")
FP8 = _plain("fp8", 8, "fp8")
INT8 = _plain("int8", 8, "int8")

FORMATS: dict[str, Format] = {
    fmt.name: fmt
    for fmt in (
        FP32, BF16, FP16, FP8, INT8,
        Format("fp8-block", 8 + Fraction(32, 128 * 128), 8, "fp8", "one fp32 scale per 128x128 block"),
        Format("fp8-block-ue8m0", 8 + Fraction(8, 128 * 128), 8, "fp8", "one 8-bit power-of-two scale per 128x128 block"),
        Format("fp8-token", 8 + Fraction(32, 128), 8, "fp8", "activations: one fp32 scale per 1x128"),
        Format("mxfp8", 8 + Fraction(8, 32), 8, "fp8", "one 8-bit scale per 32"),
        Format("mxfp4", 4 + Fraction(8, 32), 4, "fp4", "one 8-bit scale per 32"),
        Format("nvfp4", 4 + Fraction(8, 16), 4, "fp4", "one fp8 scale per 16"),
        Format("nf4", 4 + Fraction(32, 64), 4, "bf16", "bitsandbytes: one fp32 scale per 64"),
        Format("nf4-double", 4 + Fraction(8, 64) + Fraction(32, 64 * 256), 4, "bf16",
               "bitsandbytes double quantisation: fp8 scale per 64, fp32 per 256 scales"),
        _ggml("q4_0", 18, 32, 4), _ggml("q4_1", 20, 32, 4), _ggml("q5_0", 22, 32, 5), _ggml("q5_1", 24, 32, 5),
        _ggml("q8_0", 34, 32, 8), _ggml("q2_k", 84, 256, 2), _ggml("q3_k", 110, 256, 3), _ggml("q4_k", 144, 256, 4),
        _ggml("q5_k", 176, 256, 5), _ggml("q6_k", 210, 256, 6), _ggml("iq4_xs", 136, 256, 4), _ggml("iq4_nl", 18, 32, 4),
        _ggml("iq2_xxs", 66, 256, 2), _ggml("iq2_xs", 74, 256, 2), _ggml("iq2_s", 82, 256, 2),
        _ggml("iq3_xxs", 98, 256, 3), _ggml("iq3_s", 110, 256, 3), _ggml("iq1_s", 50, 256, 1), _ggml("iq1_m", 56, 256, 1),
        _ggml("tq1_0", 54, 256, 1), _ggml("tq2_0", 66, 256, 2), _ggml("gguf-mxfp4", 17, 32, 4),
        _ggml("gguf-nvfp4", 36, 64, 4), _ggml("q1_0", 18, 128, 1), _ggml("q2_0", 18, 64, 2),
    )
}  # fmt: skip

ALIASES = {
    "float32": "fp32", "f32": "fp32", "float": "fp32", "bfloat16": "bf16", "float16": "fp16", "f16": "fp16", "half": "fp16",
    "fp8_e4m3": "fp8", "e4m3": "fp8", "fp8_e5m2": "fp8", "e5m2": "fp8", "float8": "fp8", "float8_e4m3fn": "fp8",
    "fp8_block": "fp8-block", "fp8-128x128": "fp8-block", "w8a8": "int8",
}  # fmt: skip

GROUPED = re.compile(r"int([2-8])-g(\d+)(-asym)?")


def grouped(bits: int, group: int, *, asymmetric: bool = False) -> Format:
    """Group-quantised integer weights: a 16-bit scale per group and, if asymmetric, a zero point as wide as a weight.

    >>> grouped(4, 128).bits, grouped(4, 128, asymmetric=True).bits
    (Fraction(33, 8), Fraction(133, 32))
    """
    extra = Fraction(16 + (bits if asymmetric else 0), group)
    zero = f" and a {bits}-bit zero point" if asymmetric else ""
    name = f"int{bits}-g{group}{'-asym' if asymmetric else ''}"
    return Format(name, bits + extra, bits, "bf16", f"fp16 scale{zero} per {group}")


@cache
def format_named(name: str, field: str = "format") -> Format:
    """The format of a name such as "bf16", "fp8-block", "int4-g128", "int4-g128-asym", "mxfp4", "q4_k".

    A bare "int4" is refused: its scales cost bytes, so the group size must be said. Raises InputError naming the field.
    """
    key = name.strip().lower()
    key = ALIASES.get(key, key)
    if key in FORMATS:
        return FORMATS[key]
    match = GROUPED.fullmatch(key)
    if match and int(match[2]) > 0:
        return grouped(int(match[1]), int(match[2]), asymmetric=match[3] is not None)
    if re.fullmatch(r"int[2-7]", key):
        raise InputError(
            f"{field}: {name!r} needs its group size, because scales cost bytes: write {key}-g128 (or {key}-g128-asym)"
        )
    raise InputError(f"{field}: unknown format {name!r}.{suggest(key, [*FORMATS, 'int4-g128', 'int4-g128-asym'])}")
