"""Rows of a mixture of experts in the order of their experts, and back: sort, copy, weighted sum.

Every token has k picked experts; what grouped matmuls want is the rows of one expert together. The order is a stable sort of
the choices by expert, made in two kernels without atomics, so that it is always the same: programs count their share of the
choices by expert, then each finds from all counts where its share begins in every expert's rows, and places it. A third
kernel copies each token to its k rows; a matmul that gathers does without it. The last sums k rows per token by the
router's weights, with what the shared experts gave.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl

from roofline.components.moe import combine as combine_component
from roofline.components.moe import permute as permute_component
from roofline.kernels import buffers
from roofline.kernels.arguments import FLOATING, INT32, NARROW, SINGLE, check, check_indices
from roofline.kernels.spec import EVERYWHERE, Build, Case, Expected, Launch, Moved, Spec, Tensors, Tolerance
from roofline.kernels.tiling import power_of_two
from roofline.kernels.types import TYPES, Source
from roofline.numeric import ceil_div
from roofline.work import Work

MOST_SHARES = 64
BLOCK = 32
"""Choices that a program looks at together."""
WIDEST = 4096
"""Elements of a row that one program moves."""


@triton.jit
def count_kernel(chosen, counts, choices, E, SHARE: tl.constexpr, BLOCK: tl.constexpr, EP: tl.constexpr):
    """Choices of each expert in one share; EP is E, padded."""
    expert = tl.arange(0, EP)
    total = tl.zeros((EP,), tl.int32)
    first = tl.program_id(0) * SHARE
    for start in range(first, tl.minimum(first + SHARE, choices), BLOCK):
        at = start + tl.arange(0, BLOCK)
        one = tl.load(chosen + at, mask=at < choices, other=EP)
        total += tl.sum((one[:, None] == expert[None, :]).to(tl.int32), 0)
    tl.store(counts + tl.program_id(0) * E + expert, total, mask=expert < E)


@triton.jit
def place_kernel(
    chosen, counts, rows, order, offsets, choices, E, SHARE: tl.constexpr, BLOCK: tl.constexpr, EP: tl.constexpr,
):  # fmt: skip
    """The row of each choice of one share, and the choice of each such row; the first program stores where experts begin."""
    expert = tl.arange(0, EP)
    total = tl.zeros((EP,), tl.int32)
    before = tl.zeros((EP,), tl.int32)
    mine = tl.program_id(0)
    for share in range(tl.num_programs(0)):
        some = tl.load(counts + share * E + expert, mask=expert < E, other=0)
        total += some
        before += tl.where(share < mine, some, 0)
    begin = tl.cumsum(total, 0) - total
    if mine == 0:
        tl.store(offsets + expert, begin, mask=expert < E)
        tl.store(offsets + E, choices)
    free = begin + before
    for start in range(mine * SHARE, tl.minimum(mine * SHARE + SHARE, choices), BLOCK):
        at = start + tl.arange(0, BLOCK)
        one = tl.load(chosen + at, mask=at < choices, other=EP)
        hits = (one[:, None] == expert[None, :]).to(tl.int32)
        row = tl.sum(hits * (free[None, :] + tl.cumsum(hits, 0) - hits), 1)
        tl.store(rows + at, row, mask=at < choices)
        tl.store(order + row, at, mask=at < choices)
        free += tl.sum(hits, 0)


@triton.jit
def permute_kernel(x, rows, out, D, PICKED: tl.constexpr, BLOCK: tl.constexpr):
    """BLOCK elements of one token, read once, to its rows."""
    token = tl.program_id(0)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(x + token.to(tl.int64) * D + column, mask=column < D, other=0.0)
    for pick in range(PICKED):
        row = tl.load(rows + token * PICKED + pick).to(tl.int64)
        tl.store(out + row * D + column, value, mask=column < D)


@triton.jit
def combine_kernel(y, rows, weights, shared, out, D, PICKED: tl.constexpr, BLOCK: tl.constexpr):
    """BLOCK elements of one token: the sum of its rows by their weights, and the shared experts' share."""
    token = tl.program_id(0)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), tl.float32)
    for pick in range(PICKED):
        row = tl.load(rows + token * PICKED + pick).to(tl.int64)
        weight = tl.load(weights + token * PICKED + pick)
        total += weight * tl.load(y + row * D + column, mask=column < D, other=0.0).to(tl.float32)
    at = token.to(tl.int64) * D + column
    if shared is not None:
        total += tl.load(shared + at, mask=column < D, other=0.0).to(tl.float32)
    tl.store(out + at, total.to(out.dtype.element_ty), mask=column < D)


def shares(choices: int, most: int = MOST_SHARES) -> tuple[int, int]:
    """Choices of a share, whole blocks, and how many shares there are."""
    size = BLOCK * ceil_div(choices, BLOCK * most)
    return size, ceil_div(choices, size)


def sort(
    chosen: torch.Tensor, E: int, most: int = MOST_SHARES
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    """Where the choices ``chosen [T, k]`` (int32, each below E) go, by at most ``most`` programs; all int32.

    Returns:
        rows: ``[T, k]``, the row of each choice. order: ``[T k]``, the choice of each row, ``token * k + pick``.
        offsets: ``[E + 1]``, an expert's rows are those from ``offsets[e]`` up to ``offsets[e + 1]``.
    """
    check("chosen", chosen, (None, None), INT32)
    check_indices("chosen", chosen, E)
    choices, kind, device = chosen.numel(), torch.int32, chosen.device
    rows = buffers.empty(*chosen.shape, dtype=kind, device=device)
    order = buffers.empty(choices, dtype=kind, device=device)
    if not choices:
        return rows, order, torch.zeros(E + 1, dtype=kind, device=device)
    offsets = buffers.empty(E + 1, dtype=kind, device=device)
    size, number = shares(choices, most)
    counts = buffers.empty(number, E, dtype=kind, device=device)
    cut: dict[str, Any] = {"SHARE": size, "BLOCK": BLOCK, "EP": power_of_two(E), "num_warps": 8 if E > 128 else 4}
    count_kernel[(number,)](chosen, counts, choices, E, **cut)
    place_kernel[(number,)](chosen, counts, rows, order, offsets, choices, E, **cut)
    return rows, order, offsets


def block(D: int) -> int:
    """Elements of a row that one program moves."""
    return min(WIDEST, power_of_two(D))


def permute(x: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """Tokens ``x [T, D]`` copied to their ``rows [T, k]``: ``[T k, D]``, in the order of experts."""
    check("x", x, (None, None), (*FLOATING, *NARROW))
    check("rows", rows, (len(x), None), INT32, x)
    check_indices("rows", rows, rows.numel())
    (T, D), k = x.shape, rows.shape[1]
    out = buffers.empty(T * k, D, dtype=x.dtype, device=x.device)
    if T:
        permute_kernel[(T, ceil_div(D, block(D)))](x, rows, out, D, PICKED=k, BLOCK=block(D), num_warps=4)
    return out


def combine(
    y: torch.Tensor, rows: torch.Tensor, weights: torch.Tensor, shared: torch.Tensor | None = None
) -> torch.Tensor:  # fmt: skip
    """``[T, D]``: the sum of a token's rows of ``y [T k, D]`` by its ``weights [T, k]`` (fp32), and ``shared [T, D]``."""
    check("rows", rows, (None, None), INT32)
    check("y", y, (rows.numel(), None), FLOATING, rows)
    (T, k), D = rows.shape, y.shape[1]
    check("weights", weights, (T, k), SINGLE, y)
    check("shared", shared, (T, D), (y.dtype,), y)
    check_indices("rows", rows, T * k)
    out = buffers.empty(T, D, dtype=y.dtype, device=y.device)
    if T:
        combine_kernel[(T, ceil_div(D, block(D)))](y, rows, weights, shared, out, D, PICKED=k, BLOCK=block(D), num_warps=4)
    return out


@dataclass(frozen=True)
class Routed(Case):
    """``T`` tokens of width ``D``, ``k`` of ``E`` experts each; ``busy``: experts that are picked at all, None for any.

    ``most``: shares that the choices are cut into.
    """

    T: int
    D: int
    E: int
    k: int
    shared: bool = False
    busy: int | None = None
    most: int = MOST_SHARES


def routing(source: Source, T: int, E: int, k: int, busy: int | None = None) -> torch.Tensor:
    """Choices ``[T, k]``, int32, on the host, distinct within a token: of the last ``busy`` experts, evenly."""
    number = busy or E
    chosen = torch.rand(T, number, generator=source.generator).argsort(1)[:, :k] + E - number
    return chosen.to(torch.int32)


def inputs(case: Routed, device: str) -> Tensors:
    """Tokens, their choices and weights, what the experts gave in the sorted order, and the shared experts' part."""
    source = Source(case.name, device)
    return {
        "x": source.normal(case.T, case.D, dtype=case.dtype),
        "chosen": routing(source, case.T, case.E, case.k, case.busy).to(device),
        "weights": source.uniform(case.T, case.k),
        "y": source.normal(case.T * case.k, case.D, dtype=case.dtype),
        "shared": source.normal(case.T, case.D, dtype=case.dtype) if case.shared else None,
    }


def reference(case: Routed, tensors: Tensors) -> Tensors:
    """A stable sort, its inverse, and sums in float64."""
    flat = tensors["chosen"].flatten().long()
    order = flat.argsort(stable=True)
    rows = torch.empty_like(order).scatter_(0, order, torch.arange(len(order))).view(case.T, case.k)
    offsets = torch.nn.functional.pad(torch.bincount(flat, minlength=case.E).cumsum(0), (1, 0))
    combined = (tensors["weights"].double()[..., None] * tensors["y"].double()[rows]).sum(1)
    if case.shared:
        combined = combined + tensors["shared"].double()
    whole = {"rows": rows, "order": order, "offsets": offsets}
    permuted = tensors["x"].double()[order // case.k]
    return {**{name: value.to(torch.int32) for name, value in whole.items()}, "permuted": permuted, "combined": combined}


def launch(case: Routed, tensors: Tensors) -> Tensors:
    """The Triton kernels."""
    rows, order, offsets = sort(tensors["chosen"], case.E, case.most)
    permuted = permute(tensors["x"], rows)
    combined = combine(tensors["y"], rows, tensors["weights"], tensors["shared"])
    return {"rows": rows, "order": order, "offsets": offsets, "permuted": permuted, "combined": combined}


def expected(case: Routed, tensors: Tensors) -> Expected:
    """Tokens once and k rows of each, both ways; counts of all shares by every share; rows by every block of a token."""
    fmt, work = TYPES[case.dtype].format, Work(1, case.T)
    there = permute_component(case.D, case.k, fmt).cost(work)
    back = combine_component(case.D, case.k + case.shared, fmt).cost(work)
    choices = case.T * case.k
    _, number = shares(choices, case.most)
    blocks, places, counts = ceil_div(case.D, block(case.D)), 4 * choices, 4 * number * case.E
    token = fmt.bytes(case.T * case.D)
    chosen, rows = Moved("", read=places), Moved("", read=places, requested=places * blocks)
    combined = {
        "y": Moved("activations", read=fmt.bytes(choices * case.D)),
        "rows": rows,
        "weights": rows,
        "out": Moved("activations", written=back.write["activations"]),
    }
    if case.shared:
        combined["shared"] = Moved("activations", read=token)
    kernels = {
        "count_kernel": Launch(number, {"chosen": chosen, "counts": Moved("", written=counts)}),
        "place_kernel": Launch(number, {
            "chosen": chosen,
            "counts": Moved("", read=counts, requested=counts * number),
            "rows": Moved("", written=places),
            "order": Moved("", written=places),
            "offsets": Moved("", written=4 * (case.E + 1)),
        }),
        "permute_kernel": Launch(case.T * blocks, {
            "x": Moved("activations", read=there.read["activations"]),
            "rows": rows,
            "out": Moved("activations", written=there.write["activations"]),
        }),
        "combine_kernel": Launch(case.T * blocks, combined),
    }  # fmt: skip
    return Expected(there + back, kernels)


def library(case: Routed, tensors: Tensors) -> Any:
    """torch's sort, gather and sum, as a model without these kernels runs them."""

    def run() -> Tensors:
        order = tensors["chosen"].flatten().argsort(stable=True)
        rows = torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=order.device))
        picked = tensors["y"][rows].view(case.T, case.k, case.D)
        combined = (tensors["weights"].to(picked.dtype)[..., None] * picked).sum(1)
        combined = combined if tensors["shared"] is None else combined + tensors["shared"]
        return {"permuted": tensors["x"][order // case.k], "combined": combined}

    return run


CASES = (
    Routed("ragged", "bf16", 23, 70, 12, 3),
    Routed("shared", "bf16", 21, 96, 8, 2, shared=True),
    Routed("idle-experts", "bf16", 17, 33, 20, 4, busy=5),
    Routed("one-expert", "bf16", 5, 48, 1, 1),
    Routed("one-token", "fp16", 1, 130, 60, 6, shared=True),
    Routed("long-shares", "fp32", 70, 17, 9, 4, most=3),
    Routed("wide", "bf16", 2, 4103, 4, 2),
)
TOLERANCE = {
    "bf16": Tolerance(3e-3, "summed in fp32, rounded once to bf16"),
    "fp16": Tolerance(4e-4, "summed in fp32, rounded once to fp16"),
    "fp32": Tolerance(1e-6, "sums in another order"),
}
BUILDS = (
    Build(Routed("deepseek", "bf16", 8192, 7168, 256, 8, shared=True), targets=EVERYWHERE),
    Build(Routed("kimi", "bf16", 128, 7168, 384, 8)),
)
MEASURED = (
    Routed("deepseek-8k", "bf16", 8192, 7168, 256, 8, shared=True),
    Routed("qwen3-decode", "bf16", 128, 2048, 128, 8),
)
SPEC = Spec(
    "moe_permute", "Elementwise", CASES, inputs, reference, launch, expected, TOLERANCE, BUILDS, MEASURED, library
)  # fmt: skip
