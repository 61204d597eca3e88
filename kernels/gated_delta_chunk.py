"""The gated delta rule in chunks: a prefill of gated DeltaNet on the matrix unit, in two launches.

A sequence is cut into chunks of C tokens. Inside a chunk the changes that its tokens make depend on each other through a
triangular system: change_i = beta_i (v_i - exp(decays up to i) S^T k_i) - the sum over earlier tokens j of the chunk of
beta_i exp(decays from j to i) (k_i . k_j) change_j. ``prepare`` inverts it, all chunks at once, and writes its solutions for
the values (U) and for the decayed keys (W), and the scores of queries with keys; ``walk`` goes through the chunks with the
state on the chip: changes = U - W S, outputs from state and scores, then the state. The same inputs and the same state as
``gated_delta_step``, token by token.

The inverse is made in fp32 (products in tf32 where the inputs have 16 bits, which is no coarser than they are): diagonal
blocks of 16 row by row, all blocks of a chunk together; with D the inverse of the diagonal blocks and F what lies below them,
M = -D F vanishes in its fourth power, so that the inverse is (I + M)(I + M^2) D.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl

from roofline.components.chunked import ChunkedDeltaRule
from roofline.cost import Cost
from roofline.errors import InputError
from roofline.kernels import buffers
from roofline.kernels.device import Device, current, of
from roofline.kernels.fixed_state import NORM_EPSILON, batch, moved_tables, sigmoid, softplus
from roofline.kernels.gated_delta_step import Delta, check_rule, recur
from roofline.kernels.gated_delta_step import inputs as step_inputs
from roofline.kernels.spec import EVERYWHERE, Build, Expected, Launch, Moved, Spec, Tensors, Tolerance
from roofline.kernels.tiling import power_of_two
from roofline.kernels.types import NAMES, TYPES
from roofline.numeric import ceil_div

BASE = 16
"""Rows of a diagonal block that is inverted row by row."""


@triton.jit
def unit_inverse(system, C: tl.constexpr, BASE: tl.constexpr, PRECISION: tl.constexpr):
    """The inverse of ``I + system`` for a strictly lower triangular ``system [C, C]`` in fp32, of at most four blocks."""
    BLOCKS: tl.constexpr = C // BASE
    block = tl.arange(0, BLOCKS)
    row = tl.arange(0, BASE)
    own = block[:, None, None, None] == block[None, None, :, None]
    near = tl.sum(tl.where(own, tl.reshape(system, (BLOCKS, BASE, BLOCKS, BASE)), 0.0), 2)
    inverse = tl.zeros((BLOCKS, BASE, BASE), tl.float32) + tl.where(row[:, None] == row[None, :], 1.0, 0.0)[None, :, :]
    for step in range(1, BASE):
        here = (row == step)[None, :, None]
        line = tl.sum(tl.where(here, near, 0.0), 1)
        change = tl.sum(line[:, :, None] * inverse, 1)
        inverse -= tl.where(here, change[:, None, :], 0.0)
    inverse = tl.reshape(tl.where(own, inverse[:, :, None, :], 0.0), (C, C))
    if BLOCKS > 1:
        index = tl.arange(0, C)
        far = tl.where(index[:, None] // BASE == index[None, :] // BASE, 0.0, system)
        power = -tl.dot(inverse, far, input_precision=PRECISION)
        total = power + tl.where(index[:, None] == index[None, :], 1.0, 0.0)
        if BLOCKS > 2:
            power = tl.dot(power, power, input_precision=PRECISION)
            total += tl.dot(total, power, input_precision=PRECISION)
        inverse = tl.dot(total, inverse, input_precision=PRECISION)
    return inverse


@triton.jit
def unit_rows(at, mask, scale, epsilon):
    """Rows of a tile, each divided by its length and times ``scale``, in their own type."""
    given = tl.load(at, mask=mask, other=0.0)
    wide = given.to(tl.float32)
    return (wide * (scale / tl.sqrt(tl.sum(wide * wide, 1) + epsilon))[:, None]).to(given.dtype)


@triton.jit
def prepare_kernel(
    q, k, v, a, b, a_log, dt_bias, starts, w, u, scores, q_row, k_row, v_row, q_scale, epsilon,
    HK: tl.constexpr, H: tl.constexpr, K: tl.constexpr, V: tl.constexpr, C: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
    BASE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """One chunk of one value head: W, U, and the decayed scores of queries with keys up to their own."""
    chunk = tl.program_id(0)
    head = tl.program_id(1)
    sequence = tl.program_id(2)
    start = tl.load(starts + sequence)
    T = tl.load(starts + sequence + 1) - start
    if chunk * C >= T:
        return
    index = tl.arange(0, C)
    live = chunk * C + index < T
    at = (start + chunk * C + index).to(tl.int64)
    element = tl.arange(0, BK)
    shared = head // (H // HK) * K + element
    inside = live[:, None] & (element[None, :] < K)
    rate = -tl.exp(tl.load(a_log + head).to(tl.float32))
    bias = tl.load(dt_bias + head).to(tl.float32)
    step = softplus(tl.load(a + at * H + head, mask=live, other=0.0).to(tl.float32) + bias)
    upto = tl.cumsum(tl.where(live, step, 0.0), 0)
    beta = tl.where(live, sigmoid(tl.load(b + at * H + head, mask=live, other=0.0).to(tl.float32)), 0.0)
    fading = (upto[:, None] - upto[None, :]) * rate
    decay = tl.exp(tl.where(index[:, None] >= index[None, :], fading, float("-inf")))
    key = unit_rows(k + at[:, None] * k_row + shared[None, :], inside, 1.0, epsilon)
    query = unit_rows(q + at[:, None] * q_row + shared[None, :], inside, q_scale, epsilon)
    score = tl.dot(query, tl.trans(key), input_precision="ieee") * decay
    goal = scores + (at[:, None] * H + head) * C + index[None, :]
    tl.store(goal, score.to(scores.dtype.element_ty), mask=live[:, None])
    system = tl.dot(key, tl.trans(key), input_precision="ieee") * decay * beta[:, None]
    system = tl.where(index[:, None] > index[None, :], system, 0.0)
    inverse = unit_inverse(system, C, BASE, PRECISION)
    solved = tl.dot((inverse * (beta * tl.exp(upto * rate))[None, :]).to(key.dtype), key, input_precision="ieee")
    tl.store(w + (at[:, None] * H + head) * K + element[None, :], solved.to(w.dtype.element_ty), mask=inside)
    column = tl.arange(0, BV)
    kept = live[:, None] & (column[None, :] < V)
    value = tl.load(v + at[:, None] * v_row + head * V + column[None, :], mask=kept, other=0.0)
    solved = tl.dot((inverse * beta[None, :]).to(key.dtype), value, input_precision="ieee")
    tl.store(u + (at[:, None] * H + head) * V + column[None, :], solved.to(u.dtype.element_ty), mask=kept)


@triton.jit
def walk_kernel(
    q, k, a, a_log, dt_bias, state, slots, starts, w, u, scores, out, q_row, k_row, q_scale, epsilon,
    HK: tl.constexpr, H: tl.constexpr, K: tl.constexpr, V: tl.constexpr, C: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
):  # fmt: skip
    """All chunks of one sequence for BV columns of a head's state."""
    head = tl.program_id(1)
    sequence = tl.program_id(2)
    start = tl.load(starts + sequence)
    T = tl.load(starts + sequence + 1) - start
    element = tl.arange(0, BK)
    column = tl.program_id(0) * BV + tl.arange(0, BV)
    index = tl.arange(0, C)
    kept = state + (tl.load(slots + sequence).to(tl.int64) * H + head) * K * V + element[:, None] * V + column[None, :]
    inside = (element[:, None] < K) & (column[None, :] < V)
    carried = tl.load(kept, mask=inside, other=0.0).to(tl.float32)
    rate = -tl.exp(tl.load(a_log + head).to(tl.float32))
    bias = tl.load(dt_bias + head).to(tl.float32)
    shared = head // (H // HK) * K + element
    for first in range(0, T, C):
        live = first + index < T
        at = (start + first + index).to(tl.int64)
        real = live[:, None] & (element[None, :] < K)
        solved = live[:, None] & (column[None, :] < V)
        step = softplus(tl.load(a + at * H + head, mask=live, other=0.0).to(tl.float32) + bias)
        upto = tl.cumsum(tl.where(live, step, 0.0), 0)
        whole = tl.max(upto, 0)
        keys = tl.load(w + (at[:, None] * H + head) * K + element[None, :], mask=real, other=0.0)
        values = tl.load(u + (at[:, None] * H + head) * V + column[None, :], mask=solved, other=0.0)
        narrow = carried.to(keys.dtype)
        change = values.to(tl.float32) - tl.dot(keys, narrow, input_precision="ieee")
        change = change.to(keys.dtype)
        query = tl.load(q + at[:, None] * q_row + shared[None, :], mask=real, other=0.0).to(tl.float32)
        query = query * (q_scale / tl.sqrt(tl.sum(query * query, 1) + epsilon) * tl.exp(upto * rate))[:, None]
        result = tl.dot(query.to(keys.dtype), narrow, input_precision="ieee")
        score = tl.load(scores + (at[:, None] * H + head) * C + index[None, :], mask=live[:, None], other=0.0)
        result = tl.dot(score, change, result, input_precision="ieee")
        tl.store(out + (at[:, None] * H + head) * V + column[None, :], result.to(out.dtype.element_ty), mask=solved)
        key = tl.load(k + at[:, None] * k_row + shared[None, :], mask=real, other=0.0).to(tl.float32)
        key = key * (tl.exp((whole - upto) * rate) / tl.sqrt(tl.sum(key * key, 1) + epsilon))[:, None]
        carried = tl.dot(tl.trans(key.to(keys.dtype)), change, carried * tl.exp(whole * rate), input_precision="ieee")
    tl.store(kept, carried.to(state.dtype.element_ty), mask=inside)


@dataclass(frozen=True)
class Tile:
    """Columns of a state of one walking program; warps and stages of the two launches."""

    BV: int
    warps: tuple[int, int] = (8, 4)
    stages: int = 2


def choose(sequences: int, H: int, V: int, dtype: str, device: Device) -> Tile:
    """Narrower columns where there are too few heads to fill the device."""
    if dtype == "fp32":
        return Tile(min(16, power_of_two(V, 16)), stages=1)
    BV = 32 if sequences * H * ceil_div(V, 32) >= device.units else 16
    return Tile(min(BV, power_of_two(V, 16)), (8, 4), 2 if device.shared >= 100_000 else 1)


def gated_delta_chunk(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, a: torch.Tensor, b: torch.Tensor, a_log: torch.Tensor,
    dt_bias: torch.Tensor, state: torch.Tensor, slots: torch.Tensor, starts: torch.Tensor, longest: int, chunk: int = 64,
    tile: Tile | None = None,
) -> torch.Tensor:  # fmt: skip
    """``delta_step`` of ``gated_delta_step`` in chunks of 16, 32 or 64 tokens, one decay per head.

    ``longest``: the most new tokens of one sequence. Raises InputError for arguments that do not fit each other.
    """
    if chunk not in (16, 32, 64):
        raise InputError(f"chunk: {chunk} tokens; the system of a chunk is inverted for 16, 32 or 64")
    check_rule(q, k, v, a, b, a_log, dt_bias, state, slots, starts, longest, by_channel=False)
    tokens, H, V = v.shape
    HK, K = k.shape[1:]
    B = len(slots)
    out, w, u, scores = (
        buffers.empty(tokens, H, size, dtype=v.dtype, device=v.device) for size in (V, K, V, chunk)
    )  # fmt: skip
    cut = tile or choose(B, H, V, NAMES[v.dtype], of(v))
    sides = {"HK": HK, "H": H, "K": K, "V": V, "C": chunk, "BK": power_of_two(K, 16), "num_stages": cut.stages}
    scales = (K**-0.5, NORM_EPSILON)
    prepare_kernel[(ceil_div(longest, chunk), H, B)](
        q, k, v, a, b, a_log, dt_bias, starts, w, u, scores, q.stride(0), k.stride(0), v.stride(0), *scales,
        BV=power_of_two(V, 16), BASE=BASE, PRECISION="ieee" if v.dtype == torch.float32 else "tf32",
        num_warps=cut.warps[0], **sides,
    )  # fmt: skip
    walk_kernel[(ceil_div(V, cut.BV), H, B)](
        q, k, a, a_log, dt_bias, state, slots, starts, w, u, scores, out, q.stride(0), k.stride(0), *scales,
        BV=cut.BV, num_warps=cut.warps[1], **sides,
    )  # fmt: skip
    return out


@dataclass(frozen=True)
class Chunked(Delta):
    """As ``Delta``, in chunks of C tokens."""

    C: int = 64
    tile: Tile | None = None

    @property
    def cut(self) -> Tile:
        """The tiles of its launch."""
        return self.tile or choose(len(self.lengths), self.H, self.V, self.dtype, current())

    @property
    def cost(self) -> Cost:
        """The component's Cost."""
        return ChunkedDeltaRule(self.component, self.shape, self.C).cost(batch(self.lengths))


def inputs(case: Chunked, device: str) -> Tensors:
    """As for a step."""
    return {**step_inputs(case, device), "longest": max(case.lengths)}


def reference(case: Chunked, tensors: Tensors) -> Tensors:
    """The recurrence in float64, token by token."""
    return recur(case.lengths, tensors)


def launch(case: Chunked, tensors: Tensors) -> Tensors:
    """The two Triton kernels."""
    return {"out": gated_delta_chunk(**tensors, chunk=case.C, tile=case.tile), "state": tensors["state"]}


def inverse_flops(C: int) -> int:
    """Dot FLOPs of ``unit_inverse``: two products from two blocks on, four for four."""
    blocks = C // BASE
    return 2 * C**3 * 2 * (blocks.bit_length() - 1)


def expected(case: Chunked, tensors: Tensors) -> Expected:
    """Values once; queries, keys and rates in both launches, in the walk by every block of columns."""
    cut, cost, fmt, B = case.cut, case.cost, TYPES[case.dtype].format, len(case.lengths)
    H, K, V, C, tokens = case.H, case.K, case.V, case.C, sum(case.lengths)
    BK, chunks = power_of_two(K, 16), sum(ceil_div(T, C) for T in case.lengths)
    share, columns = case.H // case.HK, ceil_div(V, cut.BV)
    values, keys, heads = (fmt.bytes(tokens * size) for size in (H * V, case.HK * K, H))
    solved, scores, learned = fmt.bytes(tokens * H * K), fmt.bytes(tokens * H * C), fmt.bytes(H)
    starts = moved_tables(case.lengths, 1, 1)["starts"].read
    prepared, walked = ceil_div(max(case.lengths), C) * H * B, columns * H * B
    first = {
        **{name: Moved("activations", read=keys, requested=keys * share) for name in "qk"},
        "v": Moved("activations", read=values),
        **{name: Moved("activations", read=heads) for name in "ab"},
        **{name: Moved("weights", read=learned, requested=learned * chunks) for name in ("a_log", "dt_bias")},
        "starts": Moved("", read=starts, requested=8 * prepared),
        "w": Moved("", written=solved),
        "u": Moved("", written=values),
        "scores": Moved("", written=scores),
    }
    second = {
        **{name: Moved("", read=keys, requested=keys * share * columns) for name in "qk"},
        "a": Moved("", read=heads, requested=heads * columns),
        **{name: Moved("", read=learned, requested=learned * columns * B) for name in ("a_log", "dt_bias")},
        "state": Moved("state", cost.read["state"], cost.write["state"]),
        "w": Moved("", read=solved, requested=solved * columns),
        "u": Moved("", read=values),
        "scores": Moved("", read=scores, requested=scores * columns),
        "out": Moved("activations", written=cost.write["activations"]),
        **moved_tables(case.lengths, walked, walked),
    }
    kernels = {"prepare_kernel": Launch(prepared, first), "walk_kernel": Launch(walked, second)}
    wide = columns * cut.BV
    per_chunk = 2 * C * C * (3 * BK + power_of_two(V, 16)) + 2 * C * wide * (3 * BK + C)
    dot = TYPES[case.dtype].triton
    solving = {"fp32": inverse_flops(C) * H * chunks}

    def needed() -> int:
        sizes = [min(C, T - start) for T in case.lengths for start in range(0, T, C)]
        below = sum(token for size in sizes for token in range(size))
        triangle = below + tokens
        keys_and_solution, scores_and_values = (K + K + V) * below, (K + V) * triangle
        return 2 * H * (keys_and_solution + scores_and_values + 3 * tokens * K * V)

    return Expected(cost, kernels, dot, per_chunk * H * chunks, needed, solving, 0 if case.dtype == "fp32" else solving["fp32"])


CASES = (
    Chunked("ragged", "bf16", (37, 1, 20), 2, 4, 20, 12, C=32, tile=Tile(16)),
    Chunked("chosen", "bf16", (65, 30), 1, 2, 32, 40),
    Chunked("one-block", "bf16", (33,), 2, 2, 16, 24, "bf16", C=16, tile=Tile(32)),
    Chunked("half", "fp16", (150, 3), 1, 1, 24, 20, tile=Tile(32)),
    Chunked("single", "fp32", (21, 40), 1, 3, 9, 7, C=32, tile=Tile(16)),
)
TOLERANCE = {
    "bf16": Tolerance(
        8e-3,
        "the inverse, W, U, scores and the state on entry are rounded to bf16 before they multiply; rows near 0 cancel",
        row=4,
    ),
    "fp16": Tolerance(2e-3, "the inverse (made in tf32), W, U, scores and the state on entry are rounded to fp16"),
    "fp32": Tolerance(3e-6, "fp32 sums in another order, decays as differences of sums"),
}
MATRIX = {"prepare_kernel": "HGMMA", "walk_kernel": "HGMMA"}
QWEN3_NEXT: dict[str, Any] = {"HK": 16, "H": 32, "K": 128, "V": 128}
BUILDS = (
    Build(Chunked("qwen3-next", "bf16", (8192,) * 4, **QWEN3_NEXT), MATRIX, targets=EVERYWHERE),
    Build(Chunked("qwen3-next-one", "bf16", (8192,), **QWEN3_NEXT, kept="bf16"), MATRIX),
)
MEASURED = (
    Chunked("qwen3-next-8k", "bf16", (8192,), **QWEN3_NEXT),
    Chunked("qwen3-next-4x8k", "bf16", (8192,) * 4, **QWEN3_NEXT),
)
SPEC = Spec(
    "gated_delta_chunk", "ChunkedDeltaRule", CASES, inputs, reference, launch, expected, TOLERANCE, BUILDS, MEASURED
)  # fmt: skip
