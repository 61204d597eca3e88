"""Tensors of more than 2^31 elements: offsets are 64 bits wide. Only the pages that a kernel touches take memory."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("triton")

import importlib

import torch

from roofline.validate.counted import counting, interpreter
from roofline.validate.planted import Mutant, mutated

FAR = 2**31
Launch = Callable[[Any], tuple[torch.Tensor, torch.Tensor]]
"""A module of a kernel -> what it gives, and what is right."""


def normal(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(3))


def product(module: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """A weight whose rows lie 2^27 elements apart."""
    K, N = 32, 24
    b = torch.empty(K * FAR // 16, dtype=torch.float8_e4m3fn).as_strided((K, N), (FAR // 16, 1))
    b[:] = normal(K, N).to(b.dtype)
    a = normal(5, K).to(b.dtype)
    return module.gemm(a, b, out_dtype=torch.float16), a.double() @ b.double()


def written(module: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """One row into the last slot of a cache."""
    pages = FAR // (16 * 8 * 128) + 2
    k_cache, v_cache = (torch.empty(pages, 16, 8, 128, dtype=torch.float8_e4m3fn) for _ in range(2))
    k, v = (normal(1, 8, 128).to(k_cache.dtype) for _ in range(2))
    module.write(k, v, torch.tensor([pages * 16 - 1], dtype=torch.int32), k_cache, v_cache)
    return torch.stack([k_cache[-1, -1], v_cache[-1, -1]]).double(), torch.cat([k, v]).double()


def decoded(module: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """A sequence in the last page of a cache."""
    pages, length = FAR // (16 * 8 * 128) + 2, 13
    k_cache, v_cache = (torch.empty(pages, 16, 8, 128, dtype=torch.float8_e4m3fn) for _ in range(2))
    k, v = (normal(length, 8, 128).to(k_cache.dtype) for _ in range(2))
    k_cache[-1, :length], v_cache[-1, :length] = k, v
    q = normal(1, 1, 8, 128).half()
    table, lengths = (torch.tensor([value], dtype=torch.int32) for value in ([pages - 1], length))
    out = module.flash_decoding(q, k_cache, v_cache, table, lengths, length)
    seen = torch.ones(1, length, dtype=torch.bool)
    return out[0], module.attention(q[0], k, v, seen, 128**-0.5)


def attended(module: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """The end of a sequence longer than 2^31 elements, through a window, and a sequence behind it."""
    H, T = 256, 5
    long = FAR // H + 20
    k, v = (torch.empty(long + T, 1, H, dtype=torch.float16) for _ in range(2))
    k[-20 - T :], v[-20 - T :] = normal(20 + T, 1, H), normal(20 + T, 1, H) + 1
    q = normal(2 * T, 1, H).half()
    starts = [torch.tensor(values, dtype=torch.int32) for values in ([0, T, 2 * T], [0, long, long + T])]
    out = module.flash_attention(q, k, v, *starts, T, mask="window", size=8, tiles=module.Tiles(16, 16))
    spans = (q[:T], slice(-20 - T, -T), 15), (q[T:], slice(-T, None), 0)
    right = [module.attention(x, k[at], v[at], module.visible("window", 8, T, S), H**-0.5) for x, at, S in spans]
    return out, torch.cat(right)


LAUNCHES: dict[str, Launch] = {
    "gemm": product, "paged_cache": written, "flash_decoding": decoded, "flash_attention": attended,
}  # fmt: skip


def error(name: str, module: Any) -> float:
    with counting():
        out, right = LAUNCHES[name](module)
    return float((out.double() - right).abs().max() / right.abs().max())


@pytest.mark.parametrize("name", LAUNCHES)
def test_elements_beyond_two_billion_are_found(name: str) -> None:
    assert error(name, importlib.import_module(f"roofline.kernels.{name}")) < 4e-3


NARROW = [
    Mutant("gemm", "32 bits", "[:, None].to(tl.int64) * b_row +", "[:, None] * b_row +", "", ""),
    Mutant("paged_cache", "32 bits", "slot = tl.load(slots + token).to(tl.int64)", "slot = tl.load(slots + token)", "", ""),
    Mutant("flash_decoding", "32 bits", "mask=inside, other=0).to(tl.int64)", "mask=inside, other=0)", "", ""),
    Mutant("flash_attention", "32 bits row", "key[None, :].to(tl.int64) * k_row", "key[None, :] * k_row", "", ""),
    Mutant("flash_attention", "32 bits start", "k_at = k + k_start.to(tl.int64) * K_ROW", "k_at = k + k_start * K_ROW", "", ""),
]  # fmt: skip


def strays(mutant: Mutant, folder: Path) -> bool:
    module = mutated(mutant, folder)
    try:
        return error(mutant.kernel, module) > 4e-3
    except interpreter.InterpreterError as outside:
        return "in none of the tensors" in str(outside)


@pytest.mark.parametrize("mutant", NARROW, ids=str)
def test_offsets_of_32_bits_would_be_found(mutant: Mutant, tmp_path: Path) -> None:
    assert strays(mutant, tmp_path)
