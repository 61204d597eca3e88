"""The recurrences of RWKV token by token: version 7, a matrix per head, and version 4, three numbers per channel.

Version 7: ``S = S diag(exp(w)) - (S k) (a k)^T + v u^T`` and ``y = S r`` with a state of values x keys, k the removal key of
length one, a its rate and u the replacement key, all given (the order and the inputs of the authors' kernel). Version 4, wkv:
a running mean of values weighted by ``exp(key)`` under a decay, numerator and denominator kept relative to the largest
exponent so far, so that neither overflows. Versions 5 and 6, whose recurrences the model does not have, are left out.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl

from roofline.components.chunked import Heads
from roofline.components.rwkv import WKV
from roofline.components.rwkv7 import GeneralisedDeltaRule
from roofline.kernels import buffers, plain_steps
from roofline.kernels.arguments import FLOATING, check
from roofline.kernels.fixed_state import STEP_TOLERANCE, batch, check_states, moved_tables, normalised, sequences, tables
from roofline.kernels.spec import EVERYWHERE, Build, Case, Expected, Launch, Moved, Spec, Tensors
from roofline.kernels.tiling import power_of_two
from roofline.kernels.types import TYPES, Source
from roofline.numeric import ceil_div


@triton.jit
def rwkv7_step_kernel(
    r, w, k, v, a, u, state, slots, starts, out, H: tl.constexpr, M: tl.constexpr, BV: tl.constexpr, BK: tl.constexpr
):
    """All new tokens of one sequence for BV rows (values) of one head's state."""
    head = tl.program_id(1)
    sequence = tl.program_id(2)
    start = tl.load(starts + sequence)
    T = tl.load(starts + sequence + 1) - start
    slot = tl.load(slots + sequence)
    row = tl.program_id(0) * BV + tl.arange(0, BV)
    column = tl.arange(0, BK)
    kept = state + (slot.to(tl.int64) * H + head) * M * M + row[:, None] * M + column[None, :]
    inside = (row[:, None] < M) & (column[None, :] < M)
    carried = tl.load(kept, mask=inside, other=0.0).to(tl.float32)
    for token in range(T):
        at = ((start.to(tl.int64) + token) * H + head) * M
        fade = tl.exp(tl.load(w + at + column, mask=column < M, other=0.0).to(tl.float32))
        removal = tl.load(k + at + column, mask=column < M, other=0.0).to(tl.float32)
        strength = tl.load(a + at + column, mask=column < M, other=0.0).to(tl.float32)
        replacement = tl.load(u + at + column, mask=column < M, other=0.0).to(tl.float32)
        receptance = tl.load(r + at + column, mask=column < M, other=0.0).to(tl.float32)
        value = tl.load(v + at + row, mask=row < M, other=0.0).to(tl.float32)
        recalled = tl.sum(carried * removal[None, :], 1)
        carried = carried * fade[None, :] - recalled[:, None] * (strength * removal)[None, :]
        carried += value[:, None] * replacement[None, :]
        result = tl.sum(carried * receptance[None, :], 1)
        tl.store(out + at + row, result.to(out.dtype.element_ty), mask=row < M)
    tl.store(kept, carried.to(state.dtype.element_ty), mask=inside)


@triton.jit
def rwkv4_step_kernel(k, v, decay, first, state, slots, starts, out, width, BLOCK: tl.constexpr):
    """All new tokens of one sequence for BLOCK channels; the state's rows: numerator, denominator, largest exponent."""
    sequence = tl.program_id(1)
    start = tl.load(starts + sequence)
    T = tl.load(starts + sequence + 1) - start
    channel = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    real = channel < width
    kept = state + tl.load(slots + sequence).to(tl.int64) * 3 * width + channel
    numerator = tl.load(kept, mask=real, other=0.0).to(tl.float32)
    denominator = tl.load(kept + width, mask=real, other=0.0).to(tl.float32)
    largest = tl.load(kept + 2 * width, mask=real, other=0.0).to(tl.float32)
    rate = tl.exp(tl.load(decay + channel, mask=real, other=0.0).to(tl.float32))
    bonus = tl.load(first + channel, mask=real, other=0.0).to(tl.float32)
    for token in range(T):
        at = (start.to(tl.int64) + token) * width + channel
        key = tl.load(k + at, mask=real, other=0.0).to(tl.float32)
        value = tl.load(v + at, mask=real, other=0.0).to(tl.float32)
        top = tl.maximum(largest, key + bonus)
        old = tl.exp(largest - top)
        new = tl.exp(key + bonus - top)
        mean = (old * numerator + new * value) / (old * denominator + new)
        tl.store(out + at, mean.to(out.dtype.element_ty), mask=real)
        top = tl.maximum(largest - rate, key)
        old = tl.exp(largest - rate - top)
        new = tl.exp(key - top)
        numerator = old * numerator + new * value
        denominator = old * denominator + new
        largest = top
    tl.store(kept, numerator.to(state.dtype.element_ty), mask=real)
    tl.store(kept + width, denominator.to(state.dtype.element_ty), mask=real)
    tl.store(kept + 2 * width, largest.to(state.dtype.element_ty), mask=real)


def rows_per_program(M: int) -> int:
    """Rows of a state whose elements give each of 128 threads 16 to hold."""
    return max(1, min(power_of_two(M), 2048 // power_of_two(M)))


def rwkv7_step(
    r: torch.Tensor, w: torch.Tensor, k: torch.Tensor, v: torch.Tensor, a: torch.Tensor, u: torch.Tensor,
    state: torch.Tensor, slots: torch.Tensor, starts: torch.Tensor,
) -> torch.Tensor:  # fmt: skip
    """Outputs ``[tokens, H, M]`` of six inputs of that shape (w: logarithms); updates ``state [slots, H, M, M]`` in place.

    Raises InputError for arguments that do not fit each other.
    """
    check("v", v, (None, None, None), FLOATING)
    tokens, H, M = v.shape
    for name, given in (("r", r), ("w", w), ("k", k), ("a", a), ("u", u)):
        check(name, given, (tokens, H, M), FLOATING, v)
    check_states(state, (H, M, M), slots, starts, None, v)
    out = buffers.empty(tokens, H, M, dtype=v.dtype, device=v.device)
    rows = rows_per_program(M)
    rwkv7_step_kernel[(ceil_div(M, rows), H, len(slots))](
        r, w, k, v, a, u, state, slots, starts, out, H=H, M=M, BV=rows, BK=power_of_two(M), num_warps=4
    )
    return out


def rwkv4_step(
    k: torch.Tensor, v: torch.Tensor, decay: torch.Tensor, first: torch.Tensor, state: torch.Tensor, slots: torch.Tensor,
    starts: torch.Tensor,
) -> torch.Tensor:  # fmt: skip
    """Outputs ``[tokens, width]`` of keys and values of that shape; updates ``state [slots, 3, width]`` in place.

    ``decay [width]``: logarithms of the rates, ``first [width]``: the bonus of the token itself. Raises InputError for
    arguments that do not fit each other.
    """
    check("v", v, (None, None), FLOATING)
    tokens, width = v.shape
    check("k", k, (tokens, width), (v.dtype,), v)
    check("decay", decay, (width,), FLOATING, v)
    check("first", first, (width,), FLOATING, v)
    check_states(state, (3, width), slots, starts, None, v)
    out = buffers.empty(tokens, width, dtype=v.dtype, device=v.device)
    block = min(256, power_of_two(width))
    rwkv4_step_kernel[(ceil_div(width, block), len(slots))](
        k, v, decay, first, state, slots, starts, out, width, BLOCK=block, num_warps=max(1, block // 64)
    )
    return out


@dataclass(frozen=True)
class Rwkv(Case):
    """``lengths`` of the sequences; H heads of M channels in version 7, H M channels in version 4; ``kept``: the state's type."""

    lengths: tuple[int, ...]
    H: int
    M: int
    version: int = 7
    kept: str = "fp32"

    @property
    def component(self) -> GeneralisedDeltaRule | WKV:
        """The model's component."""
        fmt, kept = TYPES[self.dtype].format, TYPES[self.kept].format
        if self.version == 4:
            return WKV(self.H * self.M, fmt, kept)
        return GeneralisedDeltaRule(Heads(self.H, self.M, self.M, self.H), 0, fmt, kept)


def inputs(case: Rwkv, device: str) -> Tensors:
    """Inputs as a time mix makes them: decays below one, removal keys of length one; and states of earlier tokens."""
    source, tokens, width, slots = Source(case.name, device), sum(case.lengths), case.H * case.M, len(case.lengths) + 1
    if case.version == 4:
        tensors = {name: source.normal(tokens, width, dtype=case.dtype) for name in "kv"}
        tensors |= {name: source.normal(width, dtype=case.dtype) for name in ("decay", "first")}
        state = source.normal(slots, 3, width, dtype=case.kept)
        state[:, 1] = state[:, 1].abs() + 1.0
        tensors["state"] = state
    else:
        kind, shape = TYPES[case.dtype].torch, (tokens, case.H, case.M)
        tensors = {name: source.normal(*shape, dtype=case.dtype) for name in ("r", "w", "k", "v", "a", "u")}
        tensors["w"] = (-0.6065 * torch.sigmoid(tensors["w"].float())).to(kind)
        tensors["k"] = normalised(tensors["k"].float()).to(kind)
        tensors["a"] = torch.sigmoid(tensors["a"].float()).to(kind)
        tensors["state"] = source.normal(slots, case.H, case.M, case.M, dtype=case.kept)
    return {**tensors, **tables(case.lengths, source)}


def recur7(lengths: tuple[int, ...], tensors: Tensors) -> Tensors:
    """Version 7 in float64, token by token."""
    r, w, k, v, a, u = (tensors[name].double() for name in ("r", "w", "k", "v", "a", "u"))
    state, out = tensors["state"].double().clone(), torch.zeros_like(v)
    for rows, slot in sequences(lengths, tensors):
        for token in range(rows.start, rows.stop):
            recalled = torch.einsum("hvk,hk->hv", state[slot], k[token])
            removed = torch.einsum("hv,hk->hvk", recalled, a[token] * k[token])
            added = torch.einsum("hv,hk->hvk", v[token], u[token])
            state[slot] = state[slot] * torch.exp(w[token]).unsqueeze(1) - removed + added
            out[token] = torch.einsum("hvk,hk->hv", state[slot], r[token])
    return {"out": out, "state": state}


def recur4(lengths: tuple[int, ...], tensors: Tensors) -> Tensors:
    """Version 4 in float64, token by token."""
    k, v, decay, first = (tensors[name].double() for name in ("k", "v", "decay", "first"))
    state, out = tensors["state"].double().clone(), torch.zeros_like(v)
    for rows, slot in sequences(lengths, tensors):
        numerator, denominator, largest = state[slot]
        for token in range(rows.start, rows.stop):
            own = torch.exp(k[token] + first - largest)
            out[token] = (numerator + own * v[token]) / (denominator + own)
            top = torch.maximum(largest - torch.exp(decay), k[token])
            old, new = torch.exp(largest - torch.exp(decay) - top), torch.exp(k[token] - top)
            numerator, denominator, largest = old * numerator + new * v[token], old * denominator + new, top
        state[slot] = torch.stack([numerator, denominator, largest])
    return {"out": out, "state": state}


def reference(case: Rwkv, tensors: Tensors) -> Tensors:
    """The recurrence in float64, token by token."""
    return (recur4 if case.version == 4 else recur7)(case.lengths, tensors)


def launch(case: Rwkv, tensors: Tensors) -> Tensors:
    """The Triton kernel of the version."""
    return {"out": (rwkv4_step if case.version == 4 else rwkv7_step)(**tensors), "state": tensors["state"]}


def expected(case: Rwkv, tensors: Tensors) -> Expected:
    """Version 7 reads what runs along a row of the state once per block of rows; version 4 everything once."""
    cost, fmt, B = case.component.cost(batch(case.lengths)), TYPES[case.dtype].format, len(case.lengths)
    width, one_way = case.H * case.M, cost.write["activations"]
    state = {"state": Moved("state", cost.read["state"], cost.write["state"])}
    out = {"out": Moved("activations", written=one_way)}
    if case.version == 4:
        learned = fmt.bytes(width)
        programs = ceil_div(width, min(256, power_of_two(width))) * B
        moved = {name: Moved("activations", read=one_way) for name in "kv"}
        moved |= {name: Moved("weights", read=learned, requested=learned * B) for name in ("decay", "first")}
        kernel = "rwkv4_step_kernel"
    else:
        blocks = ceil_div(case.M, rows_per_program(case.M))
        programs = blocks * case.H * B
        moved = {name: Moved("activations", read=one_way, requested=one_way * blocks) for name in ("r", "w", "k", "a", "u")}
        moved["v"] = Moved("activations", read=one_way)
        kernel = "rwkv7_step_kernel"
    tables_moved = moved_tables(case.lengths, programs, programs)
    return Expected(cost, {kernel: Launch(programs, {**moved, **state, **out, **tables_moved})})


def library(case: Rwkv, tensors: Tensors) -> Any:
    """The step in torch, operation by operation."""
    return (plain_steps.rwkv4 if case.version == 4 else plain_steps.rwkv7)(case.lengths, tensors)


CASES = (
    Rwkv("ragged", "bf16", (1, 3, 2), 3, 20),
    Rwkv("decode", "bf16", (1, 1), 2, 16, kept="bf16"),
    Rwkv("several-blocks", "fp16", (2,), 1, 70),
    Rwkv("single", "fp32", (4, 1), 2, 7),
    Rwkv("version-4", "bf16", (3, 1, 2), 5, 60, 4),
    Rwkv("version-4-single", "fp32", (6,), 1, 37, 4),
)
RWKV7: dict[str, Any] = {"H": 40, "M": 64}
BUILDS = (
    Build(Rwkv("rwkv-7-2.9b", "bf16", (1,) * 64, **RWKV7), targets=EVERYWHERE),
    Build(Rwkv("rwkv-4-7b", "bf16", (1,) * 64, 64, 64, 4)),
)
MEASURED = (
    Rwkv("rwkv-7-2.9b-256", "bf16", (1,) * 256, **RWKV7),
    Rwkv("rwkv-4-7b-256", "bf16", (1,) * 256, 64, 64, 4),
)
SPEC = Spec(
    "rwkv_step", "GeneralisedDeltaRule", CASES, inputs, reference, launch, expected, STEP_TOLERANCE, BUILDS, MEASURED, library
)  # fmt: skip
