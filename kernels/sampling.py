"""Sampling from logits: temperature, min-p, top-k and top-p, then one draw, without sorting the vocabulary.

Every filter keeps the tokens at or above a threshold, so each is a search for one number: the k-th largest logit, or the
logit down to which the likeliest tokens hold a mass of p. Both are found by halving the range of an integer that orders as
the logits do, 32 passes over a row that stays in the cache. Tokens that tie with the threshold are kept.

Order: temperature; min-p against the likeliest token; top-k; top-p of the mass that is left; the draw.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl

from roofline.components.mixing import Elementwise
from roofline.errors import InputError
from roofline.kernels import buffers
from roofline.kernels.arguments import FLOATING, INT32, SINGLE, check, check_values, within
from roofline.kernels.spec import EVERYWHERE, Build, Case, Expected, Launch, Moved, Spec, Tensors, Tolerance
from roofline.kernels.tiling import power_of_two
from roofline.kernels.types import TYPES, Source
from roofline.work import Work

SEARCH = 32
"""Passes that find one threshold."""
FIXED = 3
"""Passes that every row needs: its maximum, its kept mass, the draw."""


@triton.jit
def scaled(row, start, V, inverse, BLOCK: tl.constexpr):
    """A block of logits over the temperature, -inf behind the end."""
    at = start + tl.arange(0, BLOCK)
    return tl.load(row + at, mask=at < V, other=float("-inf")).to(tl.float32) * inverse


@triton.jit
def ordered(value):
    """fp32 as an int32 of the same order."""
    bits = value.to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def likelihood(value, peak):
    """exp of a logit below the peak; 1 at the peak, be it infinite."""
    return tl.exp2(tl.where(value == peak, 0.0, value - peak) * 1.4426950408889634)


@triton.jit
def above(row, V, inverse, peak, floor, BLOCK: tl.constexpr):
    """How many logits are at or above the threshold, and the mass they hold (relative to the likeliest)."""
    count = tl.zeros((BLOCK,), tl.int32)
    mass = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, V, BLOCK):
        value = scaled(row, start, V, inverse, BLOCK)
        kept = (ordered(value) >= floor) & (value > float("-inf"))
        count += kept.to(tl.int32)
        mass += tl.where(kept, likelihood(value, peak), 0.0)
    return tl.sum(count, 0), tl.sum(mass, 0)


@triton.jit
def sampling_kernel(logits, temperatures, top_k, top_p, min_p, uniform, out, logprobs, V, BLOCK: tl.constexpr):
    """One row: its thresholds, then the first token at which the running kept mass passes the drawn share of it."""
    row_index = tl.program_id(0).to(tl.int64)
    row = logits + row_index * V
    temperature = tl.load(temperatures + row_index)
    k = tl.load(top_k + row_index)
    p = tl.load(top_p + row_index)
    share = tl.load(uniform + row_index)
    if temperature <= 0:
        k = tl.full((), 1, tl.int32)
        share = tl.zeros((), tl.float32)
    inverse = tl.where(temperature > 0, 1.0 / tl.where(temperature > 0, temperature, 1.0), 1.0)
    highest = tl.full((BLOCK,), float("-inf"), tl.float32)
    for start in range(0, V, BLOCK):
        highest = tl.maximum(highest, scaled(row, start, V, inverse, BLOCK))
    peak = tl.max(highest, 0)
    least = tl.load(min_p + row_index)
    best = ordered(peak)
    floor = ordered(tl.where(least > 0, peak + tl.log2(tl.where(least > 0, least, 1.0)) / 1.4426950408889634, float("-inf")))
    floor = tl.minimum(floor, best)
    if (k > 0) & (k < V):
        low = tl.full((), -2147483648, tl.int64)
        high = tl.full((), 2147483647, tl.int64)
        for _ in range(32):
            middle = low + (high - low + 1) // 2
            count, _mass = above(row, V, inverse, peak, middle, BLOCK)
            low = tl.where(count >= k, middle, low)
            high = tl.where(count >= k, high, middle - 1)
        floor = tl.maximum(floor, low.to(tl.int32))
    _count, mass = above(row, V, inverse, peak, floor, BLOCK)
    if p < 1:
        low = tl.full((), -2147483648, tl.int64)
        high = tl.full((), 2147483647, tl.int64)
        for _ in range(32):
            middle = low + (high - low + 1) // 2
            _count, held = above(row, V, inverse, peak, tl.maximum(middle, floor.to(tl.int64)), BLOCK)
            low = tl.where(held >= p * mass, middle, low)
            high = tl.where(held >= p * mass, high, middle - 1)
        floor = tl.maximum(floor, tl.minimum(low.to(tl.int32), best))
        _count, mass = above(row, V, inverse, peak, floor, BLOCK)
    goal = share * mass
    running = tl.zeros((), tl.float32)
    passed = tl.zeros((), tl.int32)
    last = tl.zeros((), tl.int32)
    for start in range(0, V, BLOCK):
        at = start + tl.arange(0, BLOCK)
        value = scaled(row, start, V, inverse, BLOCK)
        kept = (ordered(value) >= floor) & (value > float("-inf"))
        weight = tl.where(kept, likelihood(value, peak), 0.0)
        sums = running + tl.cumsum(weight, 0)
        passed += tl.sum(((sums <= goal) & (at < V)).to(tl.int32), 0)
        last = tl.maximum(last, tl.max(tl.where(weight > 0, at, 0), 0))
        running += tl.sum(weight, 0)
    token = tl.minimum(passed, last)
    tl.store(out + row_index, token)
    value = tl.load(row + token).to(tl.float32) * inverse
    tl.store(logprobs + row_index, tl.where(value == peak, 0.0, value - peak) - tl.log2(mass) / 1.4426950408889634)


def sample(
    logits: torch.Tensor, temperatures: torch.Tensor, top_k: torch.Tensor, top_p: torch.Tensor, min_p: torch.Tensor,
    uniform: torch.Tensor, block: int = 4096,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """One token per row of ``logits [B, V]``, int32 ``[B]``, and the logarithm of its probability among those kept.

    Args:
        temperatures: fp32 ``[B]``; 0 takes the likeliest token. top_k: int32 ``[B]``, 0 for all. top_p: fp32 ``[B]``, 1 for
            all. min_p: fp32 ``[B]``, 0 for none. uniform: fp32 ``[B]``, drawn from [0, 1).

    The likeliest token is always kept; infinite logits share the whole mass, NaN is never drawn. Raises InputError for
    arguments that do not fit each other.
    """
    check("logits", logits, (None, None), FLOATING)
    B, V = logits.shape
    within("block", block, 1)
    check("top_k", top_k, (B,), INT32, logits)
    check_values("top_k", top_k, 0)
    numbers = {"temperatures": temperatures, "top_p": top_p, "min_p": min_p, "uniform": uniform}
    for name, given in numbers.items():
        check(name, given, (B,), SINGLE, logits)
        check_values(name, given, 0, float("inf") if name == "temperatures" else 1)
    if not V:
        raise InputError("logits: rows of 0 tokens; there is none to draw")
    out = buffers.empty(B, dtype=torch.int32, device=logits.device)
    logprobs = buffers.empty(B, dtype=torch.float32, device=logits.device)
    if B:
        block = min(block, power_of_two(V))
        sampling_kernel[(B,)](logits, temperatures, top_k, top_p, min_p, uniform, out, logprobs, V, BLOCK=block, num_warps=8)
    return out, logprobs


@dataclass(frozen=True)
class Draws(Case):
    """Rows of V logits, one for each (temperature, top-k, top-p, min-p)."""

    V: int
    rows: tuple[tuple[float, int, float, float], ...]
    block: int = 64


def inputs(case: Draws, device: str) -> Tensors:
    """Logits, each row's settings, one uniform number per row."""
    source, B = Source(case.name, device), len(case.rows)
    temperature, k, p, least = (list(column) for column in zip(*case.rows, strict=True))

    def column(values: list[Any], dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.tensor(values, dtype=dtype, device=device)

    return {
        "logits": source.normal(B, case.V, dtype=case.dtype, scale=2.0), "temperatures": column(temperature),
        "top_k": column(k, torch.int32), "top_p": column(p), "min_p": column(least),
        "uniform": source.uniform(B), "block": case.block,
    }  # fmt: skip


def distribution(logits: torch.Tensor, temperature: float, k: int, p: float, least: float) -> torch.Tensor:
    """What one row is drawn from, by sorting, in float64."""
    if temperature <= 0:
        temperature, k = 1.0, 1
    value = logits.double() / temperature
    weight = torch.exp(value - value.max())
    if least > 0:
        weight = torch.where(weight >= least, weight, 0.0)
    if 0 < k < len(value):
        weight = torch.where(value >= value.sort(descending=True).values[k - 1], weight, 0.0)
    if p < 1:
        ranked = weight.sort(descending=True).values
        enough = int((ranked.cumsum(0) < p * weight.sum()).sum())
        weight = torch.where(weight >= ranked[enough], weight, 0.0)
    return weight / weight.sum()


def reference(case: Draws, tensors: Tensors) -> Tensors:
    """The first token whose running probability passes the row's uniform number; that of 0 for a greedy row."""
    tokens, logprobs = [], []
    for row, settings in enumerate(case.rows):
        share = float(tensors["uniform"][row]) if settings[0] > 0 else 0.0
        chances = distribution(tensors["logits"][row], *settings)
        tokens.append(int((chances.cumsum(0) <= share).sum()))
        logprobs.append(chances[tokens[-1]].log())
    return {"out": torch.tensor(tokens, dtype=torch.int32), "logprobs": torch.stack(logprobs)}


def launch(case: Draws, tensors: Tensors) -> Tensors:
    """The Triton kernel."""
    return dict(zip(("out", "logprobs"), sample(**tensors), strict=True))


def passes(case: Draws, settings: tuple[float, int, float, float]) -> int:
    """How often a row is read: fixed passes, a search for each of top-k and top-p, and its mass again behind the second."""
    temperature, k, p, _ = settings
    searched = 0 < (1 if temperature <= 0 else k) < case.V
    return FIXED + SEARCH * searched + (SEARCH + 1) * (p < 1)


def expected(case: Draws, tensors: Tensors) -> Expected:
    """Logits once, as often requested as there are passes and the drawn one again; a token and its chance per row."""
    B, fmt = len(case.rows), TYPES[case.dtype].format
    row = fmt.bytes(case.V)
    read = Elementwise(case.V, 0, 0, fmt).cost(Work(B)).read["activations"]
    settings = Moved("", read=4 * B)
    cost = Elementwise(case.V, 2 * words(case), 0, fmt).cost(Work(B))
    moved = {
        "logits": Moved("activations", read=read, requested=row * sum(passes(case, one) for one in case.rows) + B * fmt.bytes(1)),
        "out": Moved("activations", written=4 * B),
        "logprobs": Moved("activations", written=4 * B),
        **dict.fromkeys(("temperatures", "top_k", "top_p", "min_p", "uniform"), settings),
    }
    return Expected(cost, {"sampling_kernel": Launch(B, moved)})


def words(case: Draws) -> int:
    """Elements of the logits' type that 4 bytes are as long as."""
    return 4 // int(TYPES[case.dtype].torch.itemsize)


def library(case: Draws, tensors: Tensors) -> Any:
    """torch: sort, top-k, softmax, top-p, multinomial, where all rows have the same settings and draw."""
    temperature, k, p, least = case.rows[0]
    if {*case.rows} != {case.rows[0]} or temperature <= 0 or least > 0:
        return None
    logits = tensors["logits"]

    def run() -> torch.Tensor:
        ranked, order = (logits.float() / temperature).sort(dim=1, descending=True)
        if k > 0:
            ranked[:, k:] = float("-inf")
        chances = torch.softmax(ranked, 1)
        chances[chances.cumsum(1) - chances > p] = 0
        return order.gather(1, torch.multinomial(chances, 1)).flatten()

    return run


CASES = (
    Draws("filters", "fp32", 100, ((1.0, 0, 1.0, 0.0), (0.7, 5, 1.0, 0.0), (1.3, 0, 0.8, 0.0), (1.0, 0, 1.0, 0.1))),
    Draws("together", "fp32", 77, ((0.9, 20, 0.7, 0.02), (1.5, 40, 0.95, 0.0)), 32),
    Draws("greedy", "fp32", 50, ((0.0, 0, 1.0, 0.0), (1.0, 1, 1.0, 0.0), (0.0, 9, 0.5, 0.2))),
    Draws("narrow", "bf16", 130, ((1.0, 50, 1.0, 0.0), (1.0, 0, 0.5, 0.0)), 32),
    Draws("one-token", "fp32", 1, ((1.0, 3, 0.9, 0.1),), 16),
)
SUMMED = Tolerance(2e-6, "tokens are equal one by one; their chances are fp32 sums of fp32 exponentials")
TOLERANCE = {"fp32": SUMMED, "bf16": SUMMED}
USUAL = (0.8, 50, 0.95, 0.0)
BUILDS = (Build(Draws("llama-3", "fp32", 128256, (USUAL,) * 64, 4096), targets=EVERYWHERE),)
MEASURED = (Draws("llama-3-64", "fp32", 128256, (USUAL,) * 64, 4096),)
SPEC = Spec(
    "sampling", "Elementwise", CASES, inputs, reference, launch, expected, TOLERANCE, BUILDS, MEASURED, library
)  # fmt: skip
