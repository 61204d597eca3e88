"""The gated delta rule token by token: decode of gated DeltaNet, and the verification of drafts.

Per value head ``S = exp(g) S; S += k (beta (v - S^T k))^T; y = S^T q`` with a state of K x V. Queries and keys are divided by
their lengths, queries also by the root of K; ``g = -exp(a_log) softplus(a + dt_bias)`` and ``beta = sigmoid(b)`` are made
here. Value heads share queries and keys in groups. With ``by_channel`` each channel of a key decays at its own rate: the rule
of Kimi delta attention (``kda_step``). ``gated_delta_chunk`` computes the same for a prefill.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl

from roofline.components.chunked import Heads
from roofline.components.delta import DeltaRule
from roofline.errors import InputError
from roofline.kernels import buffers, plain_steps
from roofline.kernels.arguments import FLOATING, check
from roofline.kernels.fixed_state import (
    NORM_EPSILON,
    STEP_TOLERANCE,
    batch,
    check_states,
    moved_tables,
    normalised,
    sequences,
    sigmoid,
    softplus,
    tables,
)
from roofline.kernels.spec import EVERYWHERE, Build, Case, Expected, Launch, Moved, Spec, Tensors
from roofline.kernels.tiling import power_of_two
from roofline.kernels.types import TYPES, Source
from roofline.numeric import ceil_div


@triton.jit
def delta_step_kernel(
    q, k, v, a, b, a_log, dt_bias, state, slots, starts, out, q_row, k_row, v_row, q_scale, epsilon,
    HK: tl.constexpr, H: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BY_CHANNEL: tl.constexpr,
    BK: tl.constexpr, BV: tl.constexpr,
):  # fmt: skip
    """All new tokens of one sequence for BV columns of one head's state."""
    head = tl.program_id(1)
    sequence = tl.program_id(2)
    start = tl.load(starts + sequence)
    T = tl.load(starts + sequence + 1) - start
    slot = tl.load(slots + sequence)
    row = tl.arange(0, BK)
    column = tl.program_id(0) * BV + tl.arange(0, BV)
    kept = state + (slot.to(tl.int64) * H + head) * K * V + row[:, None] * V + column[None, :]
    inside = (row[:, None] < K) & (column[None, :] < V)
    carried = tl.load(kept, mask=inside, other=0.0).to(tl.float32)
    rate = -tl.exp(tl.load(a_log + head).to(tl.float32))
    if BY_CHANNEL:
        bias = tl.load(dt_bias + head * K + row, mask=row < K, other=0.0).to(tl.float32)
    else:
        bias = tl.load(dt_bias + head).to(tl.float32)
    shared = head // (H // HK) * K + row
    for token in range(T):
        at = start.to(tl.int64) + token
        query = tl.load(q + at * q_row + shared, mask=row < K, other=0.0).to(tl.float32)
        key = tl.load(k + at * k_row + shared, mask=row < K, other=0.0).to(tl.float32)
        value = tl.load(v + at * v_row + head * V + column, mask=column < V, other=0.0).to(tl.float32)
        query = query * (q_scale / tl.sqrt(tl.sum(query * query, 0) + epsilon))
        key = key / tl.sqrt(tl.sum(key * key, 0) + epsilon)
        beta = sigmoid(tl.load(b + at * H + head).to(tl.float32))
        if BY_CHANNEL:
            given = tl.load(a + (at * H + head) * K + row, mask=row < K, other=0.0).to(tl.float32)
            carried *= tl.exp(rate * softplus(given + bias))[:, None]
        else:
            carried *= tl.exp(rate * softplus(tl.load(a + at * H + head).to(tl.float32) + bias))
        change = beta * (value - tl.sum(carried * key[:, None], 0))
        carried += key[:, None] * change[None, :]
        result = tl.sum(carried * query[:, None], 0)
        tl.store(out + (at * H + head) * V + column, result.to(out.dtype.element_ty), mask=column < V)
    tl.store(kept, carried.to(state.dtype.element_ty), mask=inside)


def columns_per_program(K: int, V: int) -> int:
    """Columns of a state whose elements give each of 128 threads 32 to hold; at least a sector of memory."""
    return min(power_of_two(V), max(8, 4096 // power_of_two(K)))


def check_rule(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, a: torch.Tensor, b: torch.Tensor, a_log: torch.Tensor,
    dt_bias: torch.Tensor, state: torch.Tensor, slots: torch.Tensor, starts: torch.Tensor, longest: int | None,
    by_channel: bool = True,
) -> None:  # fmt: skip
    """Refuses arguments that do not fit each other, of the step and of the rule in chunks, which has a decay per head."""
    check("v", v, (None, None, None), FLOATING, strides="rows")
    tokens, H, V = v.shape
    check("k", k, (tokens, None, None), (v.dtype,), v, "rows")
    HK, K = k.shape[1:]
    check("q", q, (tokens, HK, K), (v.dtype,), v, "rows")
    if not HK or H % HK:
        raise InputError(f"k: {HK} heads do not share {H} heads of values evenly")
    sides = (H, K) if by_channel and a.dim() == 3 else (H,)
    check("a", a, (tokens, *sides), FLOATING, v)
    check("b", b, (tokens, H), FLOATING, v)
    check("a_log", a_log, (H,), FLOATING, v)
    check("dt_bias", dt_bias, sides, FLOATING, v)
    check_states(state, (H, K, V), slots, starts, longest, v)


def delta_step(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, a: torch.Tensor, b: torch.Tensor, a_log: torch.Tensor,
    dt_bias: torch.Tensor, state: torch.Tensor, slots: torch.Tensor, starts: torch.Tensor,
) -> torch.Tensor:  # fmt: skip
    """Outputs ``[tokens, H, V]``; updates ``state [slots, H, K, V]`` in place.

    ``q, k [tokens, HK, K]``, ``v [tokens, H, V]`` (slices of a wider tensor will do), ``b [tokens, H]``, ``a_log [H]``;
    ``a [tokens, H]`` with ``dt_bias [H]``, or ``a [tokens, H, K]`` with ``dt_bias [H, K]`` for a decay per channel. Raises
    InputError for arguments that do not fit each other.
    """
    check_rule(q, k, v, a, b, a_log, dt_bias, state, slots, starts, None)
    tokens, H, V = v.shape
    HK, K = k.shape[1:]
    out = buffers.empty(tokens, H, V, dtype=v.dtype, device=v.device)
    columns = columns_per_program(K, V)
    delta_step_kernel[(ceil_div(V, columns), H, len(slots))](
        q, k, v, a, b, a_log, dt_bias, state, slots, starts, out, q.stride(0), k.stride(0), v.stride(0), K**-0.5, NORM_EPSILON,
        HK=HK, H=H, K=K, V=V, BY_CHANNEL=a.dim() == 3, BK=power_of_two(K), BV=columns, num_warps=4,
    )  # fmt: skip
    return out


@dataclass(frozen=True)
class Delta(Case):
    """``lengths`` of the sequences; H value heads of V, HK key heads of K; ``kept``: the state's type; decays by channel."""

    lengths: tuple[int, ...]
    HK: int
    H: int
    K: int
    V: int
    kept: str = "fp32"
    by_channel: bool = False

    @property
    def shape(self) -> Heads:
        """The state's shape."""
        return Heads(self.H, self.K, self.V, self.HK)

    @property
    def decays(self) -> int:
        """Decays of a head, per token."""
        return self.K if self.by_channel else 1

    @property
    def component(self) -> DeltaRule:
        """The model's component."""
        learned = self.H * (1 + self.decays)
        return DeltaRule(self.shape, self.decays, learned, TYPES[self.dtype].format, TYPES[self.kept].format)


def inputs(case: Delta, device: str) -> Tensors:
    """What projections and convolution give, the parameters of the decays, and states as earlier tokens left them."""
    source, tokens = Source(case.name, device), sum(case.lengths)
    decays = (case.H, case.K) if case.by_channel else (case.H,)
    tensors = {
        "q": source.normal(tokens, case.HK, case.K, dtype=case.dtype),
        "k": source.normal(tokens, case.HK, case.K, dtype=case.dtype),
        "v": source.normal(tokens, case.H, case.V, dtype=case.dtype),
        "a": source.normal(tokens, *decays, dtype=case.dtype),
        "b": source.normal(tokens, case.H, dtype=case.dtype),
        "a_log": source.normal(case.H, dtype=case.dtype),
        "dt_bias": source.normal(*decays, dtype=case.dtype),
        "state": source.normal(len(case.lengths) + 1, case.H, case.K, case.V, dtype=case.kept),
    }
    return {**tensors, **tables(case.lengths, source)}


def recur(lengths: tuple[int, ...], tensors: Tensors) -> Tensors:
    """The recurrence in float64, token by token."""
    v, state = tensors["v"].double(), tensors["state"].double().clone()
    share = v.shape[1] // tensors["k"].shape[1]
    q, k = (normalised(tensors[name].double()).repeat_interleave(share, 1) for name in "qk")
    q = q * k.shape[2] ** -0.5
    step = torch.nn.functional.softplus(tensors["a"].double() + tensors["dt_bias"].double())
    step = step.unsqueeze(-1) if step.dim() == 2 else step
    decay = torch.exp(-torch.exp(tensors["a_log"].double())[:, None] * step)
    beta = torch.sigmoid(tensors["b"].double())
    out = torch.zeros_like(v)
    for rows, slot in sequences(lengths, tensors):
        for token in range(rows.start, rows.stop):
            faded = decay[token].unsqueeze(-1) * state[slot]
            change = beta[token, :, None] * (v[token] - torch.einsum("hkv,hk->hv", faded, k[token]))
            state[slot] = faded + torch.einsum("hk,hv->hkv", k[token], change)
            out[token] = torch.einsum("hkv,hk->hv", state[slot], q[token])
    return {"out": out, "state": state}


def reference(case: Delta, tensors: Tensors) -> Tensors:
    """The recurrence in float64, token by token."""
    return recur(case.lengths, tensors)


def launch(case: Delta, tensors: Tensors) -> Tensors:
    """The Triton kernel."""
    return {"out": delta_step(**tensors), "state": tensors["state"]}


def expected(case: Delta, tensors: Tensors) -> Expected:
    """A state and a value once; queries and keys by every block of columns of every value head that shares them."""
    cost, fmt, B = case.component.cost(batch(case.lengths)), TYPES[case.dtype].format, len(case.lengths)
    tokens, blocks = sum(case.lengths), ceil_div(case.V, columns_per_program(case.K, case.V))
    values, keys, heads = (fmt.bytes(tokens * size) for size in (case.H * case.V, case.HK * case.K, case.H))
    shared = keys * (case.H // case.HK) * blocks
    learned = fmt.bytes(case.H)
    programs = blocks * case.H * B
    moved = {
        "q": Moved("activations", read=keys, requested=shared),
        "k": Moved("activations", read=keys, requested=shared),
        "v": Moved("activations", read=values),
        "a": Moved("activations", read=heads * case.decays, requested=heads * case.decays * blocks),
        "b": Moved("activations", read=heads, requested=heads * blocks),
        "a_log": Moved("weights", read=learned, requested=learned * blocks * B),
        "dt_bias": Moved("weights", read=learned * case.decays, requested=learned * case.decays * blocks * B),
        "state": Moved("state", cost.read["state"], cost.write["state"]),
        "out": Moved("activations", written=cost.write["activations"]),
        **moved_tables(case.lengths, programs, programs),
    }
    return Expected(cost, {"delta_step_kernel": Launch(programs, moved)})


def library(case: Delta, tensors: Tensors) -> Any:
    """The step in torch, operation by operation."""
    return plain_steps.delta(case.lengths, tensors)


CASES = (
    Delta("ragged", "bf16", (1, 3, 2), 2, 6, 20, 12),
    Delta("decode", "bf16", (1, 1, 1), 2, 4, 16, 24, "bf16"),
    Delta("several-blocks", "fp16", (2, 1), 1, 2, 300, 19),
    Delta("single", "fp32", (5,), 3, 3, 7, 5),
)
QWEN3_NEXT: dict[str, Any] = {"HK": 16, "H": 32, "K": 128, "V": 128}
BUILDS = (Build(Delta("qwen3-next", "bf16", (1,) * 64, **QWEN3_NEXT), targets=EVERYWHERE),)
MEASURED = (Delta("qwen3-next-256", "bf16", (1,) * 256, **QWEN3_NEXT),)
SPEC = Spec(
    "gated_delta_step", "DeltaRule", CASES, inputs, reference, launch, expected, STEP_TOLERANCE, BUILDS, MEASURED, library
)
