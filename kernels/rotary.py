"""Rotary embedding of queries and keys, fused with the write of keys and values into the pages of a cache.

A page holds ``PAGE`` tokens, ``[PAGE, K, H]``; a token's slot is its page times PAGE plus its place there. The halves of
the rotated part are rotated against each other (the layout of Llama and all that follow it).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl

from roofline.components.attention import CacheWrite
from roofline.errors import InputError
from roofline.kernels import buffers
from roofline.kernels.arguments import FLOATING, INT32, NARROW, SINGLE, check, check_distinct, check_indices
from roofline.kernels.spec import EVERYWHERE, Build, Case, Expected, Launch, Moved, Spec, Tensors, Tolerance
from roofline.kernels.tiling import power_of_two
from roofline.kernels.types import NAMES, TYPES, Source
from roofline.work import Work

BASE = 10000.0


@triton.jit
def narrowed(value, cache, scale):
    """fp32 as the cache stores it: divided by the scale; int8 rounded to the nearest and kept within -127 to 127."""
    scaled = value / scale
    if cache.dtype.element_ty == tl.int8:
        return tl.floor(tl.minimum(tl.maximum(scaled, -127.0), 127.0) + 0.5).to(tl.int8)
    return scaled.to(cache.dtype.element_ty)


@triton.jit
def rotate_heads(
    source, target, cos, sin, scale, HEADS: tl.constexpr, WIDTH: tl.constexpr, ROTARY: tl.constexpr,
    SLOTS: tl.constexpr, HALF: tl.constexpr, REST: tl.constexpr,
):  # fmt: skip
    """Reads HEADS heads of one token, rotates the first ROTARY elements of each and writes them where target points."""
    head = tl.arange(0, SLOTS)[:, None] * WIDTH
    real = tl.arange(0, SLOTS)[:, None] < HEADS
    pair = tl.arange(0, HALF)[None, :]
    inside = real & (pair < ROTARY // 2)
    first = tl.load(source + head + pair, mask=inside, other=0.0).to(tl.float32)
    second = tl.load(source + head + pair + ROTARY // 2, mask=inside, other=0.0).to(tl.float32)
    tl.store(target + head + pair, narrowed(first * cos - second * sin, target, scale), mask=inside)
    tl.store(target + head + pair + ROTARY // 2, narrowed(second * cos + first * sin, target, scale), mask=inside)
    if REST > 0:
        other = ROTARY + tl.arange(0, REST)[None, :]
        left = real & (other < WIDTH)
        kept = tl.load(source + head + other, mask=left, other=0.0).to(tl.float32)
        tl.store(target + head + other, narrowed(kept, target, scale), mask=left)


@triton.jit
def rotary_kernel(
    q, k, v, angles, positions, slots, q_out, k_cache, v_cache, k_scale, v_scale,
    N: tl.constexpr, K: tl.constexpr, H: tl.constexpr, V: tl.constexpr, ROTARY: tl.constexpr,
    QUERIES: tl.constexpr, KEYS: tl.constexpr, HALF: tl.constexpr, REST: tl.constexpr, VALUE: tl.constexpr,
):  # fmt: skip
    """One token: all its query and key heads rotated, its keys and values stored in its slot."""
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + token).to(tl.int64)
    at = tl.load(positions + token).to(tl.int64) * ROTARY
    pair = tl.arange(0, HALF)
    cos = tl.load(angles + at + pair, mask=pair < ROTARY // 2, other=0.0)[None, :]
    sin = tl.load(angles + at + ROTARY // 2 + pair, mask=pair < ROTARY // 2, other=0.0)[None, :]
    rotate_heads(q + token * N * H, q_out + token * N * H, cos, sin, 1.0, N, H, ROTARY, QUERIES, HALF, REST)
    rotate_heads(k + token * K * H, k_cache + slot * K * H, cos, sin, k_scale, K, H, ROTARY, KEYS, HALF, REST)
    head = tl.arange(0, KEYS)[:, None]
    column = tl.arange(0, VALUE)[None, :]
    inside = (head < K) & (column < V)
    value = tl.load(v + token * K * V + head * V + column, mask=inside, other=0.0).to(tl.float32)
    tl.store(v_cache + slot * K * V + head * V + column, narrowed(value, v_cache, v_scale), mask=inside)


def angle_table(positions: int, rotary: int, base: float = BASE, device: str = "cpu") -> torch.Tensor:
    """Cosines, then sines, of every position's angles: fp32 ``[positions, rotary]``."""
    rates = base ** (-torch.arange(0, rotary, 2, dtype=torch.float64) / rotary)
    angles = torch.arange(positions, dtype=torch.float64)[:, None] * rates
    return torch.cat([angles.cos(), angles.sin()], 1).float().to(device)


def rotary(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, angles: torch.Tensor, positions: torch.Tensor, slots: torch.Tensor,
    k_cache: torch.Tensor, v_cache: torch.Tensor, k_scale: float = 1.0, v_scale: float = 1.0,
) -> torch.Tensor:  # fmt: skip
    """Returns the rotated queries; stores rotated keys, and values, in their slots.

    Args:
        q, k, v: ``[tokens, N, H]``, ``[tokens, K, H]``, ``[tokens, K, V]``. angles: of ``angle_table``.
        positions, slots: int32 ``[tokens]``. k_cache, v_cache: ``[pages, PAGE, K, H]`` and ``[pages, PAGE, K, V]``.
        k_scale, v_scale: what an 8-bit cache's elements are multiplied by when they are read.

    Raises InputError for arguments that do not fit each other.
    """
    check("q", q, (None, None, None), FLOATING)
    tokens, N, H = q.shape
    check("k", k, (tokens, None, H), (q.dtype,), q)
    K = k.shape[1]
    check("v", v, (tokens, K, None), (q.dtype,), q)
    check("angles", angles, (None, None), SINGLE, q)
    V, turned = v.shape[2], angles.shape[1]
    if turned % 2 or not 2 <= turned <= H:
        raise InputError(f"angles: {turned} of the {H} elements of a head cannot turn in pairs")
    check("k_cache", k_cache, (None, None, K, H), (q.dtype, *NARROW), q)
    pages, page = k_cache.shape[:2]
    check("v_cache", v_cache, (pages, page, K, V), (q.dtype, *NARROW), q)
    check("positions", positions, (tokens,), INT32, q)
    check_indices("positions", positions, len(angles))
    check("slots", slots, (tokens,), INT32, q)
    check_distinct("slots", slots, pages * page)
    q_out = buffers.empty(tokens, N, H, dtype=q.dtype, device=q.device)
    if tokens:
        rotary_kernel[(tokens,)](
            q, k, v, angles, positions, slots, q_out, k_cache, v_cache, k_scale, v_scale,
            N=N, K=K, H=H, V=V, ROTARY=turned, QUERIES=power_of_two(N), KEYS=power_of_two(K), HALF=power_of_two(turned // 2),
            REST=0 if turned == H else power_of_two(H - turned), VALUE=power_of_two(V), num_warps=4 if N * H <= 4096 else 8,
        )  # fmt: skip
    return q_out


@dataclass(frozen=True)
class Heads(Case):
    """``tokens`` with N query heads and K key-value heads of width H (values V), of which ``rotary`` elements turn."""

    tokens: int
    N: int
    K: int
    H: int
    rotary: int
    V: int = 0
    kv: str = ""
    page: int = 16
    pages: int = 0

    @property
    def stored(self) -> str:
        """Type of the cache."""
        return self.kv or self.dtype

    @property
    def precision(self) -> str:
        return self.stored


SCALES = {"fp8": (0.25, 0.5), "fp8-e5m2": (0.25, 0.5), "int8": (0.03, 0.05)}


def inputs(case: Heads, device: str) -> Tensors:
    """Projected heads, random positions and slots, a cache that holds zeros."""
    source, V, kind = Source(case.name, device), case.V or case.H, TYPES[case.stored].torch
    pages = case.pages or -(-2 * case.tokens // case.page)
    k_scale, v_scale = SCALES.get(case.stored, (1.0, 1.0))
    shapes = [(pages, case.page, case.K, case.H), (pages, case.page, case.K, V)]
    k_cache, v_cache = (
        torch.zeros(shape, dtype=torch.uint8 if kind.itemsize == 1 else kind, device=device).view(kind) for shape in shapes
    )
    return {
        "q": source.normal(case.tokens, case.N, case.H, dtype=case.dtype),
        "k": source.normal(case.tokens, case.K, case.H, dtype=case.dtype),
        "v": source.normal(case.tokens, case.K, V, dtype=case.dtype),
        "angles": angle_table(max(64, case.tokens), case.rotary, device=device),
        "positions": source.permutation(max(64, case.tokens))[: case.tokens],
        "slots": source.permutation(pages * case.page)[: case.tokens],
        "k_cache": k_cache,
        "v_cache": v_cache,
        "k_scale": k_scale,
        "v_scale": v_scale,
    }  # fmt: skip


def turn(x: torch.Tensor, angles: torch.Tensor) -> torch.Tensor:
    """Rotation of ``x [tokens, heads, H]`` by ``angles [tokens, rotary]``, in float64."""
    cos, sin = angles.double()[:, None, :].chunk(2, dim=2)
    half = cos.shape[2]
    first, second, rest = x.double().split([half, half, x.shape[2] - 2 * half], dim=2)
    return torch.cat([first * cos - second * sin, second * cos + first * sin, rest], 2)


def stored(values: torch.Tensor, cache: torch.Tensor, slots: torch.Tensor, scale: float) -> torch.Tensor:
    """The cache after the values (float64) are written to their slots: read back and rescaled, float64."""
    flat = torch.zeros(cache.shape[0] * cache.shape[1], *cache.shape[2:], dtype=torch.float64)
    flat[slots.long()] = values
    if cache.dtype == torch.int8:
        flat = torch.floor((flat / scale).clamp(-127, 127) + 0.5) * scale
    return flat.view(cache.shape)


def reference(case: Heads, tensors: Tensors) -> Tensors:
    """In float64; what the cache holds is rescaled."""
    angles = tensors["angles"][tensors["positions"].long()]
    q, k = turn(tensors["q"], angles), turn(tensors["k"], angles)
    return {
        "q": q,
        "k_cache": stored(k, tensors["k_cache"], tensors["slots"], tensors["k_scale"]),
        "v_cache": stored(tensors["v"].double(), tensors["v_cache"], tensors["slots"], tensors["v_scale"]),
    }


def launch(case: Heads, tensors: Tensors) -> Tensors:
    """The Triton kernel."""
    q = rotary(**tensors)
    wide = torch.float64 if q.device.type == "cpu" else torch.float32
    scaled = {
        name: tensors[name].to(wide) * tensors[f"{name[0]}_scale"] for name in ("k_cache", "v_cache") if q.device.type != "meta"
    }
    return {"q": q, **scaled}


def timed(case: Heads, tensors: Tensors) -> Any:
    """The kernel alone: caches are not rescaled behind it."""
    return rotary(**tensors)


def expected(case: Heads, tensors: Tensors) -> Expected:
    """Every element once; a row of the table of angles, a position and a slot per token."""
    fmt, kv, V = TYPES[case.dtype].format, TYPES[case.stored].format, case.V or case.H
    cost = CacheWrite(case.N, case.K, case.H, V, case.rotary, kv=kv, activation=fmt).cost(Work(1, case.tokens))
    queries = cost.write["activations"]
    keys = CacheWrite(0, case.K, case.H, 0, case.rotary, kv=kv, activation=fmt).cost(Work(1, case.tokens))
    k, k_stored = keys.read["activations"], keys.write["state"]
    row = 4 * case.rotary
    moved = {
        "q": Moved("activations", read=queries),
        "k": Moved("activations", read=k),
        "v": Moved("activations", read=cost.read["activations"] - queries - k),
        "q_out": Moved("activations", written=queries),
        "k_cache": Moved("state", written=k_stored),
        "v_cache": Moved("state", written=cost.write["state"] - k_stored),
        "angles": Moved("", read=row * len(set(tensors["positions"].tolist())), requested=row * case.tokens),
        "positions": Moved("", read=4 * case.tokens),
        "slots": Moved("", read=4 * case.tokens),
    }
    return Expected(cost, {"rotary_kernel": Launch(case.tokens, moved)})


def library(case: Heads, tensors: Tensors) -> Any:
    """The same in plain torch operations, as a model without a fused kernel runs it."""
    slots, positions = tensors["slots"].long(), tensors["positions"].long()
    kind = NAMES[tensors["q"].dtype]
    if case.stored != kind:
        return None

    def run() -> torch.Tensor:
        cos, sin = tensors["angles"][positions][:, None, :].to(tensors["q"].dtype).chunk(2, dim=2)
        turned = []
        for x in (tensors["q"], tensors["k"]):
            first, second, rest = x.split([cos.shape[2], cos.shape[2], x.shape[2] - 2 * cos.shape[2]], dim=2)
            turned.append(torch.cat([first * cos - second * sin, second * cos + first * sin, rest], 2))
        tensors["k_cache"].view(-1, *tensors["k"].shape[1:])[slots] = turned[1]
        tensors["v_cache"].view(-1, *tensors["v"].shape[1:])[slots] = tensors["v"]
        return turned[0]

    return run


CASES = (
    Heads("grouped", "bf16", 7, 8, 2, 64, 64),
    Heads("partial", "bf16", 5, 6, 3, 80, 20),
    Heads("one-token", "bf16", 1, 4, 4, 128, 128),
    Heads("wide-values", "fp16", 9, 5, 1, 48, 32, V=96),
    Heads("single", "fp32", 11, 3, 1, 40, 40, page=4),
    Heads("fp8-cache", "bf16", 6, 8, 4, 64, 64, kv="fp8"),
    Heads("int8-cache", "fp16", 13, 4, 2, 32, 16, kv="int8", page=8),
)
TOLERANCE = {
    "bf16": Tolerance(3e-3, "fp32 products of fp32 angles, rounded once to bf16"),
    "fp16": Tolerance(4e-4, "fp32 products of fp32 angles, rounded once to fp16"),
    "fp32": Tolerance(1e-6, "fp32 products of fp32 angles"),
    "fp8": Tolerance(4e-2, "rounded once to fp8: 2^-4 of a value at most"),
    "int8": Tolerance(4e-3, "rounded as the reference rounds, but where fp32 and float64 fall on two sides of a half"),
}
BUILDS = (
    Build(Heads("llama-70b", "bf16", 8192, 64, 8, 128, 128), targets=EVERYWHERE),
    Build(Heads("fp8-cache", "bf16", 8192, 32, 8, 128, 128, kv="fp8")),
    Build(Heads("partial", "bf16", 8192, 32, 8, 80, 20)),
)
MEASURED = (
    Heads("llama-70b-8k", "bf16", 8192, 64, 8, 128, 128),
    Heads("decode-256", "bf16", 256, 64, 8, 128, 128),
)
SPEC = Spec(
    "rotary", "CacheWrite", CASES, inputs, reference, launch, expected, TOLERANCE, BUILDS, MEASURED, library, timed
)  # fmt: skip
