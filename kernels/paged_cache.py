"""Moving keys and values in and out of the pages of a cache: write, gather, and the copy of whole pages.

A page holds PAGE tokens, ``[PAGE, K, H]`` keys and ``[PAGE, K, V]`` values; rows are copied as they are. Which pages a
sequence has, shares and must copy before it writes is ``pages.PageTable``'s business.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl

from roofline.components.attention import Attention, CacheWrite
from roofline.cost import Cost
from roofline.errors import InputError
from roofline.kernels import buffers
from roofline.kernels.arguments import FLOATING, INT32, NARROW, check, check_distinct, check_indices, check_starts, readable
from roofline.kernels.spec import EVERYWHERE, Build, Case, Expected, Launch, Moved, Spec, Tensors, Tolerance
from roofline.kernels.tiling import power_of_two
from roofline.kernels.types import TYPES, Source
from roofline.numeric import ceil_div
from roofline.work import Work


@triton.jit
def copy_row(source, target, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    """WIDTH elements from one place to another."""
    at = tl.arange(0, BLOCK)
    tl.store(target + at, tl.load(source + at, mask=at < WIDTH), mask=at < WIDTH)


@triton.jit
def write_kernel(
    k, v, slots, k_cache, v_cache, KEY: tl.constexpr, VALUE: tl.constexpr, KEYS: tl.constexpr, VALUES: tl.constexpr
):  # fmt: skip
    """One token's keys and values to its slot."""
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + token).to(tl.int64)
    copy_row(k + token * KEY, k_cache + slot * KEY, KEY, KEYS)
    copy_row(v + token * VALUE, v_cache + slot * VALUE, VALUE, VALUES)


@triton.jit
def gather_kernel(
    k_cache, v_cache, table, starts, k, v, columns, PAGE: tl.constexpr,
    KEY: tl.constexpr, VALUE: tl.constexpr, KEYS: tl.constexpr, VALUES: tl.constexpr,
):  # fmt: skip
    """One token of one sequence from its page to its row; rows of all sequences lie behind each other from ``starts``."""
    position = tl.program_id(0)
    sequence = tl.program_id(1)
    start = tl.load(starts + sequence)
    if position >= tl.load(starts + sequence + 1) - start:
        return
    page = tl.load(table + sequence * columns + position // PAGE).to(tl.int64)
    slot = page * PAGE + position % PAGE
    row = (start + position).to(tl.int64)
    copy_row(k_cache + slot * KEY, k + row * KEY, KEY, KEYS)
    copy_row(v_cache + slot * VALUE, v + row * VALUE, VALUE, VALUES)


@triton.jit
def copy_kernel(k_cache, v_cache, pairs, KEY: tl.constexpr, VALUE: tl.constexpr, BLOCK: tl.constexpr):
    """BLOCK elements of the keys and of the values of one page to another page."""
    source = tl.load(pairs + 2 * tl.program_id(0)).to(tl.int64)
    target = tl.load(pairs + 2 * tl.program_id(0) + 1).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    tl.store(k_cache + target * KEY + at, tl.load(k_cache + source * KEY + at, mask=at < KEY), mask=at < KEY)
    tl.store(v_cache + target * VALUE + at, tl.load(v_cache + source * VALUE + at, mask=at < VALUE), mask=at < VALUE)


COPIED = 4096
"""Elements of a page that one program copies."""


ROWS = (*FLOATING, *NARROW)
"""Types of rows that are copied as they are."""


def _check_caches(k_cache: torch.Tensor, v_cache: torch.Tensor) -> None:
    check("k_cache", k_cache, (None, None, None, None), ROWS)
    check("v_cache", v_cache, (*k_cache.shape[:3], None), (k_cache.dtype,), k_cache)


def _widths(k_cache: torch.Tensor, v_cache: torch.Tensor) -> dict[str, int]:
    """Elements of one token's row of each cache, and the powers of two that hold them."""
    key, value = k_cache.shape[2] * k_cache.shape[3], v_cache.shape[2] * v_cache.shape[3]
    return {"KEY": key, "VALUE": value, "KEYS": power_of_two(key), "VALUES": power_of_two(value)}


def write(k: torch.Tensor, v: torch.Tensor, slots: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor) -> None:
    """Stores ``k [tokens, K, H]`` and ``v [tokens, K, V]`` in ``slots [tokens]`` (int32) of the caches.

    Raises InputError for arguments that do not fit each other.
    """
    _check_caches(k_cache, v_cache)
    pages, page = k_cache.shape[:2]
    check("slots", slots, (None,), INT32, k_cache)
    check("k", k, (len(slots), *k_cache.shape[2:]), (k_cache.dtype,), k_cache)
    check("v", v, (len(slots), *v_cache.shape[2:]), (v_cache.dtype,), k_cache)
    check_distinct("slots", slots, pages * page)
    if len(slots):
        write_kernel[(len(slots),)](k, v, slots, k_cache, v_cache, **_widths(k_cache, v_cache), num_warps=2)


def gather(
    k_cache: torch.Tensor, v_cache: torch.Tensor, table: torch.Tensor, starts: torch.Tensor, longest: int, total: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values of all sequences, contiguous: ``[total, K, H]`` and ``[total, K, V]``.

    Args:
        table: int32 ``[B, pages]``. starts: int32 ``[B + 1]``, where each sequence's rows begin; the last is ``total``.
        longest: tokens of the longest sequence.

    Raises InputError for arguments that do not fit each other.
    """
    _check_caches(k_cache, v_cache)
    pages, page = k_cache.shape[:2]
    check("table", table, (check_starts("starts", starts, total, longest, k_cache), None), INT32, k_cache)
    check_indices("table", table, pages)
    if longest > table.shape[1] * page:
        raise InputError(f"table: rows of {table.shape[1]} pages hold {table.shape[1] * page} tokens; a sequence has {longest}")
    k = buffers.empty(total, *k_cache.shape[2:], dtype=k_cache.dtype, device=k_cache.device)
    v = buffers.empty(total, *v_cache.shape[2:], dtype=v_cache.dtype, device=v_cache.device)
    if longest:
        gather_kernel[(longest, len(table))](
            k_cache, v_cache, table, starts, k, v, table.shape[1], PAGE=k_cache.shape[1],
            **_widths(k_cache, v_cache), num_warps=2,
        )  # fmt: skip
    return k, v


def copy(pairs: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor) -> None:
    """Copies page ``pairs[i, 0]`` over page ``pairs[i, 1]``, keys and values; int32 ``[n, 2]``, all at once.

    No page may be written that is also read or written twice. Raises InputError for that, and for what does not fit.
    """
    _check_caches(k_cache, v_cache)
    check("pairs", pairs, (None, 2), INT32, k_cache)
    check_indices("pairs", pairs, len(k_cache))
    check_distinct("pairs", pairs[:, 1], len(k_cache))
    if readable(pairs) and torch.isin(pairs[:, 0], pairs[:, 1]).any():
        raise InputError(f"pairs: {pairs.tolist()} reads a page that it writes; copy in two calls")
    key, value = k_cache[0].numel(), v_cache[0].numel()
    if len(pairs):
        copy_kernel[(len(pairs), ceil_div(max(key, value), COPIED))](
            k_cache, v_cache, pairs, KEY=key, VALUE=value, BLOCK=COPIED, num_warps=4
        )  # fmt: skip


@dataclass(frozen=True)
class Moves(Case):
    """``op`` ("write", "gather", "copy") of ``lengths`` tokens per sequence, or of that many pages each for a copy."""

    op: str
    lengths: tuple[int, ...]
    K: int
    H: int
    V: int
    page: int

    @property
    def tokens(self) -> int:
        """Tokens moved."""
        return sum(self.lengths) * (self.page if self.op == "copy" else 1)


def inputs(case: Moves, device: str) -> Tensors:
    """A cache of random numbers, random pages and slots."""
    source, page = Source(case.name, device), case.page
    pages = 2 * -(-case.tokens // page) + len(case.lengths) * -(-max(case.lengths) // page)
    tensors = {
        "k_cache": source.normal(pages, page, case.K, case.H, dtype=case.dtype),
        "v_cache": source.normal(pages, page, case.K, case.V, dtype=case.dtype),
    }
    if case.op == "write":
        slots = source.permutation(pages * page)[: case.tokens]
        k = source.normal(case.tokens, case.K, case.H, dtype=case.dtype)
        return {"k": k, "v": source.normal(case.tokens, case.K, case.V, dtype=case.dtype), "slots": slots, **tensors}
    free = source.permutation(pages)
    if case.op == "copy":
        return {"pairs": free[: 2 * sum(case.lengths)].view(-1, 2), **tensors}
    widest = -(-max(case.lengths) // page)
    table = torch.stack([free[torch.arange(widest) + widest * row] for row in range(len(case.lengths))])
    starts = source.integers([sum(case.lengths[:row]) for row in range(len(case.lengths) + 1)])
    return {**tensors, "table": table, "starts": starts, "longest": max(case.lengths), "total": case.tokens}


def reference(case: Moves, tensors: Tensors) -> Tensors:
    """By indexing."""
    caches = {name: tensors[f"{name}_cache"].clone() for name in "kv"}
    if case.op == "gather":
        gathered = {}
        for name, cache in caches.items():
            rows = zip(tensors["table"].long(), case.lengths, strict=True)
            gathered[name] = torch.cat([cache[row].flatten(0, 1)[:length] for row, length in rows]).double()
        return gathered
    for name, cache in caches.items():
        if case.op == "write":
            cache.flatten(0, 1)[tensors["slots"].long()] = tensors[name]
        else:
            cache[tensors["pairs"][:, 1].long()] = cache[tensors["pairs"][:, 0].long()]
    return {name: cache.double() for name, cache in caches.items()}


def launch(case: Moves, tensors: Tensors) -> Tensors:
    """The Triton kernel of the operation."""
    if case.op == "gather":
        return dict(zip("kv", gather(**tensors), strict=True))
    caches = {name: tensors[f"{name}_cache"].clone() for name in "kv"}
    into = {f"{name}_cache": cache for name, cache in caches.items()}
    if case.op == "write":
        write(tensors["k"], tensors["v"], tensors["slots"], **into)
    else:
        copy(tensors["pairs"], **into)
    return caches


def timed(case: Moves, tensors: Tensors) -> Any:
    """The kernel alone, in place: the caches are not copied before it."""
    operations: dict[str, Any] = {"write": write, "gather": gather, "copy": copy}
    return operations[case.op](**tensors)


def expected(case: Moves, tensors: Tensors) -> Expected:
    """Each element once in each direction, and the slots, table entries and pairs that say where."""
    fmt = TYPES[case.dtype].format
    written = CacheWrite(0, case.K, case.H, case.V, kv=fmt, activation=fmt).cost(Work(1, case.tokens))
    keys = CacheWrite(0, case.K, case.H, 0, kv=fmt, activation=fmt).cost(Work(1, case.tokens)).write["state"]
    values = written.write["state"] - keys
    if case.op == "write":
        moved = {
            "k": Moved("activations", read=keys), "v": Moved("activations", read=values),
            "k_cache": Moved("state", written=keys), "v_cache": Moved("state", written=values),
            "slots": Moved("", read=4 * case.tokens),
        }  # fmt: skip
        return Expected(written, {"write_kernel": Launch(case.tokens, moved)})
    if case.op == "gather":
        programs = len(case.lengths) * max(case.lengths)
        entries = sum(-(-length // case.page) for length in case.lengths)
        moved = {
            "k_cache": Moved("state", read=keys), "v_cache": Moved("state", read=values),
            "k": Moved("activations", written=keys), "v": Moved("activations", written=values),
            "table": Moved("", read=4 * entries, requested=4 * case.tokens),
            "starts": Moved("", read=4 * (len(case.lengths) + 1), requested=8 * programs),
        }  # fmt: skip
        back = Cost({}, {"state": written.write["state"]}, {"activations": written.read["activations"]}, 1)
        return Expected(back, {"gather_kernel": Launch(programs, moved)})
    pages = sum(case.lengths)
    held = sum(piece.bytes(case.page) for piece in Attention(case.K, case.K, case.H, case.V, kv=fmt).state())
    parts = ceil_div(case.page * case.K * max(case.H, case.V), COPIED)
    moved = {
        "k_cache": Moved("state", read=keys, written=keys),
        "v_cache": Moved("state", read=values, written=values),
        "pairs": Moved("", read=8 * pages, requested=8 * pages * parts),
    }
    both = Cost({}, {"state": held * pages}, {"state": held * pages}, 1)
    return Expected(both, {"copy_kernel": Launch(pages * parts, moved)})


def library(case: Moves, tensors: Tensors) -> Any:
    """torch's indexing."""
    if case.op == "gather":
        return None
    k_cache, v_cache = tensors["k_cache"], tensors["v_cache"]
    if case.op == "copy":
        source, goal = tensors["pairs"].long().unbind(1)

        def copied() -> Tensors:
            k_cache[goal] = k_cache[source]
            v_cache[goal] = v_cache[source]
            return {"k": k_cache, "v": v_cache}

        return copied
    slots = tensors["slots"].long()

    def written() -> Tensors:
        k_cache.flatten(0, 1)[slots] = tensors["k"]
        v_cache.flatten(0, 1)[slots] = tensors["v"]
        return {"k": k_cache, "v": v_cache}

    return written


CASES = (
    Moves("write", "bf16", "write", (7,), 2, 64, 64, 16),
    Moves("write-ragged", "fp32", "write", (3, 1, 5), 3, 40, 24, 4),
    Moves("write-fp8", "fp8", "write", (11,), 1, 96, 96, 8),
    Moves("gather", "bf16", "gather", (33, 1, 16), 2, 64, 64, 16),
    Moves("gather-uneven", "fp16", "gather", (5, 9), 3, 20, 36, 4),
    Moves("gather-one", "fp32", "gather", (1,), 1, 16, 8, 16),
    Moves("copy", "bf16", "copy", (3,), 2, 64, 64, 16),
    Moves("copy-large", "int8", "copy", (2,), 8, 128, 96, 16),
)
EXACT = Tolerance(0, "rows are copied as they are")
TOLERANCE = dict.fromkeys(("bf16", "fp16", "fp32", "fp8", "int8"), EXACT)
BUILDS = (
    Build(Moves("write", "bf16", "write", (8192,), 8, 128, 128, 16), targets=EVERYWHERE),
    Build(Moves("copy", "bf16", "copy", (64,), 8, 128, 128, 16)),
)
MEASURED = (
    Moves("write-8k", "bf16", "write", (8192,), 8, 128, 128, 16),
    Moves("copy-1k-pages", "bf16", "copy", (1024,), 8, 128, 128, 16),
)
SPEC = Spec(
    "paged_cache", "CacheWrite", CASES, inputs, reference, launch, expected, TOLERANCE, BUILDS, MEASURED, library, timed
)  # fmt: skip
