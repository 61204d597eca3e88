"""Keys and values of new tokens quantised on their way into the pages of a cache.

Four storages, by the names that ``--kv-dtype`` takes: "fp8" with one scale for all keys and one for all values, known
before; "fp8-token" with an fp32 scale per 128 elements, found here; "int4-g64" and the like, an fp16 scale per group and
codes -8 to 7; "int4-g32-asym", with a 4-bit zero point beside the scale. An entry is the K heads of one token in a row;
groups do not cross tokens. Codes lie two to a byte, the earlier one in the lower half, and so do zero points. Quotients are
rounded as IEEE says, which a GPU's plain division does not, so that a code is the same everywhere.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl

from roofline.components.attention import CacheWrite
from roofline.errors import InputError
from roofline.formats import GROUPED, Format, format_named
from roofline.kernels.arguments import FLOATING, INT32, check, check_distinct
from roofline.kernels.spec import EVERYWHERE, Build, Case, Expected, Launch, Moved, Spec, Tensors, Tolerance
from roofline.kernels.tiling import power_of_two
from roofline.kernels.types import TYPES, Source
from roofline.work import Work

FP8_GROUP, FP8_MOST = 128, 448.0
SMALLEST = 2.0**-14
"""The least scale in fp16 that is a normal number; groups of zeros get it."""


@triton.jit
def two_to_a_byte(codes, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """uint8 ``[ROWS, COLUMNS / 2]`` of codes below 16."""
    low, high = tl.split(tl.reshape(codes, (ROWS, COLUMNS // 2, 2)))
    return (low | (high << 4)).to(tl.uint8)


@triton.jit
def quantize_entry(
    source, target, scales, zeros, factor, token, slot,
    GROUPS: tl.constexpr, SLOTS: tl.constexpr, SIZE: tl.constexpr, WIDTH: tl.constexpr, BITS: tl.constexpr,
):  # fmt: skip
    """One entry of GROUPS groups of SIZE elements, out of WIDTH lanes, from row ``token`` of source to ``slot``."""
    group = tl.arange(0, SLOTS)
    lane = tl.arange(0, WIDTH)
    inside = (group[:, None] < GROUPS) & (lane[None, :] < SIZE)
    at = group[:, None] * SIZE + lane[None, :]
    value = tl.load(source + token * (GROUPS * SIZE) + at, mask=inside, other=0.0).to(tl.float32)
    goal = slot * GROUPS + group
    if BITS == 8:
        scale = tl.full((SLOTS,), factor, tl.float32)
        if scales is not None:
            scale = tl.maximum(tl.div_rn(tl.max(tl.abs(value), 1), 448.0), 1e-12)
            tl.store(scales + goal, scale, mask=group < GROUPS)
        narrow = tl.minimum(tl.maximum(tl.div_rn(value, scale[:, None]), -448.0), 448.0)
        tl.store(target + slot * (GROUPS * SIZE) + at, narrow.to(target.dtype.element_ty), mask=inside)
    else:
        if zeros is None:
            stored = tl.maximum(tl.div_rn(tl.max(tl.abs(value), 1), 7.0), 0.00006103515625).to(tl.float16)
            zero = tl.full((SLOTS,), 8.0, tl.float32)
        else:
            low = tl.minimum(tl.min(value, 1), 0.0)
            high = tl.maximum(tl.max(value, 1), 0.0)
            stored = tl.maximum(tl.div_rn(high - low, 15.0), 0.00006103515625).to(tl.float16)
            zero = tl.minimum(tl.floor(0.5 - tl.div_rn(low, stored.to(tl.float32))), 15.0)
            pair = tl.arange(0, SLOTS // 2)
            tl.store(
                zeros + slot * (GROUPS // 2) + pair[None, :], two_to_a_byte(zero.to(tl.int32)[None, :], 1, SLOTS),
                mask=pair[None, :] < GROUPS // 2,
            )  # fmt: skip
        tl.store(scales + goal, stored, mask=group < GROUPS)
        code = tl.floor(tl.div_rn(value, stored.to(tl.float32)[:, None]) + 0.5) + zero[:, None]
        code = tl.minimum(tl.maximum(code, 0.0), 15.0).to(tl.int32)
        byte = tl.arange(0, WIDTH // 2)
        held = (group[:, None] < GROUPS) & (byte[None, :] < SIZE // 2)
        at = group[:, None] * (SIZE // 2) + byte[None, :]
        tl.store(target + slot * (GROUPS * SIZE // 2) + at, two_to_a_byte(code, SLOTS, WIDTH), mask=held)


@triton.jit
def quantize_kv_kernel(
    k, v, slots, k_cache, v_cache, k_scales, v_scales, k_zeros, v_zeros, k_factor, v_factor,
    KG: tl.constexpr, VG: tl.constexpr, KEYS: tl.constexpr, VALUES: tl.constexpr, K_SIZE: tl.constexpr, V_SIZE: tl.constexpr,
    K_WIDTH: tl.constexpr, V_WIDTH: tl.constexpr, BITS: tl.constexpr,
):  # fmt: skip
    """One token: its keys and its values, group by group, into its slot."""
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + token).to(tl.int64)
    quantize_entry(k, k_cache, k_scales, k_zeros, k_factor, token, slot, KG, KEYS, K_SIZE, K_WIDTH, BITS)
    quantize_entry(v, v_cache, v_scales, v_zeros, v_factor, token, slot, VG, VALUES, V_SIZE, V_WIDTH, BITS)


@dataclass(frozen=True)
class Layout:
    """How one kind of entry is stored: ``bits`` per element, ``group`` elements per scale (0: none here), zero points."""

    bits: int
    group: int
    zeros: bool

    @staticmethod
    def named(kv: str) -> Layout:
        """The layout of a format's name. Raises InputError for one that the kernel does not write."""
        match = GROUPED.fullmatch(kv)
        if match and match[1] == "4":
            return Layout(4, int(match[2]), match[3] is not None)
        if kv not in ("fp8", "fp8-token"):
            raise InputError(f"kv: keys and values are not quantised to {kv}; fp8, fp8-token and int4-gSIZE[-asym] are written")
        return Layout(8, FP8_GROUP if kv == "fp8-token" else 0, False)

    def groups(self, width: int) -> tuple[int, int]:
        """(groups, elements of each) of an entry. Raises InputError where the groups are not whole."""
        size = self.group or min(width & -width, 128)
        if width % size or (self.zeros and width // size % 2):
            number = "an even number of" if self.zeros else "whole"
            raise InputError(f"k, v: an entry of {width} elements is not {number} groups of {size}")
        return width // size, size

    def parts(self, width: int) -> dict[str, tuple[int, torch.dtype]]:
        """Elements and type of what an entry has in each tensor of its pages."""
        groups, _ = self.groups(width)
        parts = {"data": (width * self.bits // 8, torch.float8_e4m3fn if self.bits == 8 else torch.uint8)}
        if self.group:
            parts["scales"] = (groups, torch.float32 if self.bits == 8 else torch.float16)
        if self.zeros:
            parts["zeros"] = (groups // 2, torch.uint8)
        return parts


@dataclass(frozen=True)
class Pages:
    """Pages of one kind of entry: ``data`` and, where the layout has them, ``scales`` and ``zeros``, [pages, PAGE, ...]."""

    data: torch.Tensor
    scales: torch.Tensor | None = None
    zeros: torch.Tensor | None = None

    @property
    def stored_bytes(self) -> int:
        """Bytes of all its tensors."""
        return sum(part.numel() * part.element_size() for part in (self.data, self.scales, self.zeros) if part is not None)


def allocate(pages: int, page: int, width: int, kv: str, device: str | torch.device = "cpu") -> Pages:
    """Empty pages for entries of ``width`` elements (all heads of a token) in a format; bytes are 0."""
    parts = Layout.named(kv).parts(width).items()
    return Pages(**{name: torch.zeros(pages, page, size, dtype=kind, device=device) for name, (size, kind) in parts})


def check_held(name: str, pages: Pages, layout: Layout, entries: torch.Tensor) -> None:
    """Refuses pages that ``allocate`` would not give for entries ``[tokens, heads, width]`` of a layout."""
    wanted, held = layout.parts(entries.shape[1] * entries.shape[2]), pages.data.shape[:2]
    for part in ("data", "scales", "zeros"):
        given = getattr(pages, part)
        if (part in wanted) != (given is not None):
            raise InputError(f"{name}: {part} {'given' if part not in wanted else 'missing'}; allocate pages of the same format")
        if part in wanted:
            size, kind = wanted[part]
            check(f"{name}.{part}", given, (*held, size), (kind,), entries)


def quantize_kv(
    k: torch.Tensor, v: torch.Tensor, slots: torch.Tensor, k_pages: Pages, v_pages: Pages, kv: str,
    k_factor: float = 1.0, v_factor: float = 1.0,
) -> None:  # fmt: skip
    """Writes ``k [tokens, K, H]`` and ``v [tokens, K, V]`` into their slots (int32 ``[tokens]``), in the format ``kv``.

    ``k_factor`` and ``v_factor`` are what elements of plain fp8 are multiplied by when they are read. Raises InputError for
    arguments that do not fit each other.
    """
    layout = Layout.named(kv)
    check("k", k, (None, None, None), FLOATING)
    check("v", v, (len(k), k.shape[1], None), (k.dtype,), k)
    check("slots", slots, (len(k),), INT32, k)
    for name, entries, pages in (("k_pages", k, k_pages), ("v_pages", v, v_pages)):
        check_held(name, pages, layout, entries)
    check_distinct("slots", slots, k_pages.data.shape[0] * k_pages.data.shape[1])
    if not len(k):
        return
    (kg, k_size), (vg, v_size) = layout.groups(k[0].numel()), layout.groups(v[0].numel())

    def power(number: int) -> int:
        return power_of_two(number, 2)

    quantize_kv_kernel[(len(k),)](
        k, v, slots, k_pages.data, v_pages.data, k_pages.scales, v_pages.scales, k_pages.zeros, v_pages.zeros, k_factor, v_factor,
        KG=kg, VG=vg, KEYS=power(kg), VALUES=power(vg), K_SIZE=k_size, V_SIZE=v_size, K_WIDTH=power(k_size),
        V_WIDTH=power(v_size), BITS=layout.bits, num_warps=4,
    )  # fmt: skip


def dequantize(pages: Pages, kv: str, factor: float = 1.0) -> torch.Tensor:
    """What the pages stand for, float64 ``[pages, PAGE, width]``."""
    layout = Layout.named(kv)
    if layout.bits == 8:
        data = pages.data.double()
        if pages.scales is None:
            return data * factor
        return data * pages.scales.double().repeat_interleave(layout.group, -1)
    codes = nibbles(pages.data)
    zeros = 8.0 if pages.zeros is None else nibbles(pages.zeros).repeat_interleave(layout.group, -1)
    assert pages.scales is not None
    return (codes - zeros) * pages.scales.double().repeat_interleave(layout.group, -1)


def nibbles(packed: torch.Tensor) -> torch.Tensor:
    """float64 codes of bytes that hold two each."""
    return torch.stack([packed & 15, packed >> 4], -1).flatten(-2).double()


@dataclass(frozen=True)
class Entries(Case):
    """``tokens`` with K heads of width H (values V), stored as ``kv`` in pages of ``page`` tokens."""

    tokens: int
    K: int
    H: int
    kv: str
    V: int = 0
    page: int = 16

    @property
    def precision(self) -> str:
        return self.kv.partition("-g")[0]

    @property
    def values(self) -> int:
        """Width of a value."""
        return self.V or self.H

    @property
    def format(self) -> Format:
        """The format of the cache."""
        return format_named(self.kv)


FACTORS = (0.02, 0.01)


def inputs(case: Entries, device: str) -> Tensors:
    """Projected keys and values, keys with a channel far from zero, random slots."""
    source = Source(case.name, device)
    k = source.normal(case.tokens, case.K, case.H, dtype=case.dtype)
    if device != "meta":
        k[..., 0] += 4
    pages = -(-2 * case.tokens // case.page)
    return {
        "k": k,
        "v": source.normal(case.tokens, case.K, case.values, dtype=case.dtype),
        "slots": source.permutation(pages * case.page)[: case.tokens],
        "pages": pages,
    }


def rounded(values: torch.Tensor, kv: str, factor: float) -> torch.Tensor:
    """Entries ``[tokens, width]`` quantised and dequantised in float64; scales and fp8 are rounded as they are stored."""
    layout = Layout.named(kv)
    groups = values.double().unflatten(1, layout.groups(values.shape[1]))
    if layout.bits == 8:
        scales = (groups.abs().amax(2, keepdim=True) / FP8_MOST).clamp(min=1e-12).float().double() if layout.group else factor
        narrow = (groups / scales).clamp(-FP8_MOST, FP8_MOST).float().to(torch.float8_e4m3fn).double()
        return (narrow * scales).flatten(1)
    if layout.zeros:
        low, high = groups.amin(2, keepdim=True).clamp(max=0), groups.amax(2, keepdim=True).clamp(min=0)
        scales = ((high - low) / 15).clamp(min=SMALLEST).half().double()
        zeros = torch.floor(0.5 - low / scales).clamp(max=15)
    else:
        scales = (groups.abs().amax(2, keepdim=True) / 7).clamp(min=SMALLEST).half().double()
        zeros = torch.full_like(scales, 8)
    codes = (torch.floor(groups / scales + 0.5) + zeros).clamp(0, 15)
    return ((codes - zeros) * scales).flatten(1)


def reference(case: Entries, tensors: Tensors) -> Tensors:
    """What each slot stands for, untouched ones 0, in float64."""
    outputs = {}
    for name, factor in zip(("k", "v"), FACTORS, strict=True):
        entries = rounded(tensors[name].flatten(1), case.kv, factor)
        whole = torch.zeros(tensors["pages"] * case.page, entries.shape[1], dtype=torch.float64)
        whole[tensors["slots"].long()] = entries
        outputs[name] = whole.unflatten(0, (-1, case.page))
    return outputs


def timed(case: Entries, tensors: Tensors) -> tuple[Pages, Pages]:
    """The kernel alone."""
    k, v, device = tensors["k"], tensors["v"], tensors["k"].device
    if "k_pages" not in tensors:
        for name, entry in (("k_pages", k), ("v_pages", v)):
            tensors[name] = allocate(tensors["pages"], case.page, entry[0].numel(), case.kv, device)
    k_pages, v_pages = tensors["k_pages"], tensors["v_pages"]
    quantize_kv(k, v, tensors["slots"], k_pages, v_pages, case.kv, *FACTORS)
    return k_pages, v_pages


def launch(case: Entries, tensors: Tensors) -> Tensors:
    """The Triton kernel, and what it wrote dequantised."""
    stored = timed(case, tensors)
    if tensors["k"].device.type == "meta":
        return {}
    return {
        name: dequantize(pages, case.kv, factor) for name, pages, factor in zip(("k", "v"), stored, FACTORS, strict=True)
    }  # fmt: skip


def expected(case: Entries, tensors: Tensors) -> Expected:
    """Every element once; the bytes of codes, scales and zero points together are what the format says."""
    fmt, layout, T = TYPES[case.dtype].format, Layout.named(case.kv), case.tokens
    cost = CacheWrite(0, case.K, case.H, case.values, kv=case.format, activation=fmt).cost(Work(1, T))
    moved = {"slots": Moved("", read=4 * T)}
    for name, width in (("k", case.K * case.H), ("v", case.K * case.values)):
        groups, _ = layout.groups(width)
        moved[name] = Moved("activations", read=fmt.bytes(T * width))
        moved[f"{name}_cache"] = Moved("state", written=T * width * layout.bits // 8)
        if layout.group:
            moved[f"{name}_scales"] = Moved("state", written=T * groups * (4 if layout.bits == 8 else 2))
        if layout.zeros:
            moved[f"{name}_zeros"] = Moved("state", written=T * groups // 2)
    return Expected(cost, {"quantize_kv_kernel": Launch(T, moved)})


def library(case: Entries, tensors: Tensors) -> Any:
    """torch, operation by operation: scales, zero points, codes, and an indexed write of each."""
    layout, slots = Layout.named(case.kv), tensors["slots"].long()
    k_pages, v_pages = (
        allocate(tensors["pages"], case.page, tensors[name][0].numel(), case.kv, slots.device) for name in ("k", "v")
    )

    def write(values: torch.Tensor, pages: Pages, factor: float) -> None:
        groups = values.flatten(1).float().unflatten(1, layout.groups(values[0].numel()))
        zero = None
        if layout.bits == 8:
            scale = (groups.abs().amax(2) / FP8_MOST).clamp(min=1e-12) if layout.group else None
            narrow = groups / (factor if scale is None else scale[..., None])
            data = narrow.clamp(-FP8_MOST, FP8_MOST).to(torch.float8_e4m3fn).view(torch.uint8).flatten(1)
        else:
            low, high = groups.amin(2).clamp(max=0), groups.amax(2).clamp(min=0)
            if layout.zeros:
                scale = ((high - low) / 15).clamp(min=SMALLEST).half()
                zero = torch.floor(0.5 - low / scale.float()).clamp(max=15)
            else:
                scale = (torch.maximum(high, -low) / 7).clamp(min=SMALLEST).half()
            codes = torch.floor(groups / scale.float()[..., None] + 0.5) + (8.0 if zero is None else zero[..., None])
            data = halves_of(codes.clamp(0, 15).flatten(1))
        pages.data.view(torch.uint8).flatten(0, 1)[slots] = data
        if scale is not None and pages.scales is not None:
            pages.scales.flatten(0, 1)[slots] = scale
        if zero is not None and pages.zeros is not None:
            pages.zeros.flatten(0, 1)[slots] = halves_of(zero)

    def run() -> tuple[Pages, Pages]:
        write(tensors["k"], k_pages, FACTORS[0])
        write(tensors["v"], v_pages, FACTORS[1])
        return k_pages, v_pages

    return run


def halves_of(codes: torch.Tensor) -> torch.Tensor:
    """Bytes that hold two codes each, the earlier in the lower half."""
    return (codes[:, ::2] + 16 * codes[:, 1::2]).to(torch.uint8)


CASES = (
    Entries("fp8", "bf16", 7, 2, 64, "fp8"),
    Entries("fp8-uneven", "fp16", 5, 3, 80, "fp8", V=48, page=4),
    Entries("fp8-token", "bf16", 9, 3, 128, "fp8-token", V=256),
    Entries("int4", "bf16", 6, 2, 64, "int4-g64", page=8),
    Entries("int4-uneven", "fp16", 11, 3, 96, "int4-g32", V=32, page=8),
    Entries("int4-zeros", "bf16", 13, 1, 128, "int4-g32-asym", V=64),
    Entries("int4-zeros-uneven", "fp32", 1, 6, 32, "int4-g32-asym", page=4),
)
TOLERANCE = {
    "fp8": Tolerance(1e-6, "rounded as the reference rounds"),
    "fp8-token": Tolerance(1e-3, "rounded as the reference rounds, but where an fp32 quotient falls on another side of a half"),
    "int4": Tolerance(1e-6, "rounded as the reference rounds; one code that differed would be an error of 1e-3 at least"),
}
BUILDS = (
    Build(Entries("fp8", "bf16", 8192, 8, 128, "fp8")),
    Build(Entries("fp8-token", "bf16", 8192, 8, 128, "fp8-token")),
    Build(Entries("int4", "bf16", 8192, 8, 128, "int4-g64")),
    Build(Entries("int4-zeros", "bf16", 8192, 8, 128, "int4-g32-asym"), targets=EVERYWHERE),
)
MEASURED = (
    Entries("int4-zeros-8k", "bf16", 8192, 8, 128, "int4-g32-asym"),
    Entries("fp8-8k", "bf16", 8192, 8, 128, "fp8"),
)
SPEC = Spec(
    "quantize_kv", "CacheWrite", CASES, inputs, reference, launch, expected, TOLERANCE, BUILDS, MEASURED, library, timed
)  # fmt: skip
