"""The recurrence of Mamba-2, token by token: decode, and with a few tokens the verification of drafts.

Per head ``S = exp(dt A) S + dt x B^T`` and ``y = S C + D x``, for x of P elements and B, C of N, which the heads of a group
share; ``A = -exp(a_log)``, and dt is the softplus of what the projection gives plus a bias. A state ``[P, N]`` stays on the
chip from the first new token to the last. ``mamba2_chunk`` computes the same for a prefill.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl

from roofline.components.chunked import Heads
from roofline.components.mamba import LinearScan
from roofline.errors import InputError
from roofline.kernels import buffers, plain_steps
from roofline.kernels.arguments import FLOATING, check
from roofline.kernels.fixed_state import STEP_TOLERANCE, batch, check_states, moved_tables, sequences, softplus, tables
from roofline.kernels.spec import EVERYWHERE, Build, Case, Expected, Launch, Moved, Spec, Tensors
from roofline.kernels.tiling import power_of_two
from roofline.kernels.types import TYPES, Source
from roofline.numeric import ceil_div


@triton.jit
def mamba2_step_kernel(
    x, dt, b, c, a_log, d, dt_bias, state, slots, starts, out, x_row, b_row, c_row,
    H: tl.constexpr, G: tl.constexpr, P: tl.constexpr, N: tl.constexpr, BP: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """All new tokens of one sequence for BP rows of one head's state."""
    head = tl.program_id(1)
    sequence = tl.program_id(2)
    start = tl.load(starts + sequence)
    T = tl.load(starts + sequence + 1) - start
    slot = tl.load(slots + sequence)
    row = tl.program_id(0) * BP + tl.arange(0, BP)
    column = tl.arange(0, BN)
    kept = state + (slot.to(tl.int64) * H + head) * P * N + row[:, None] * N + column[None, :]
    inside = (row[:, None] < P) & (column[None, :] < N)
    carried = tl.load(kept, mask=inside, other=0.0).to(tl.float32)
    rate = -tl.exp(tl.load(a_log + head).to(tl.float32))
    skip = tl.load(d + head).to(tl.float32)
    bias = tl.load(dt_bias + head).to(tl.float32)
    group = head // (H // G)
    for token in range(T):
        at = start.to(tl.int64) + token
        step = softplus(tl.load(dt + at * H + head).to(tl.float32) + bias)
        value = tl.load(x + at * x_row + head * P + row, mask=row < P, other=0.0).to(tl.float32)
        key = tl.load(b + at * b_row + group * N + column, mask=column < N, other=0.0).to(tl.float32)
        query = tl.load(c + at * c_row + group * N + column, mask=column < N, other=0.0).to(tl.float32)
        carried = carried * tl.exp(step * rate) + (step * value)[:, None] * key[None, :]
        result = tl.sum(carried * query[None, :], 1) + skip * value
        tl.store(out + (at * H + head) * P + row, result.to(out.dtype.element_ty), mask=row < P)
    tl.store(kept, carried.to(state.dtype.element_ty), mask=inside)


def rows_per_program(P: int, N: int) -> int:
    """Rows of a state whose elements give each of 128 threads 16 to hold."""
    return max(1, min(power_of_two(P), 2048 // power_of_two(N)))


def check_scan(
    x: torch.Tensor, dt: torch.Tensor, b: torch.Tensor, c: torch.Tensor, a_log: torch.Tensor, d: torch.Tensor,
    dt_bias: torch.Tensor, state: torch.Tensor, slots: torch.Tensor, starts: torch.Tensor, longest: int | None,
) -> None:  # fmt: skip
    """Refuses arguments that do not fit each other, of the step and of the recurrence in chunks."""
    check("x", x, (None, None, None), FLOATING, strides="rows")
    tokens, H, P = x.shape
    check("b", b, (tokens, None, None), (x.dtype,), x, "rows")
    G, N = b.shape[1:]
    check("c", c, (tokens, G, N), (x.dtype,), x, "rows")
    check("dt", dt, (tokens, H), FLOATING, x)
    for name, given in (("a_log", a_log), ("d", d), ("dt_bias", dt_bias)):
        check(name, given, (H,), FLOATING, x)
    if not G or H % G:
        raise InputError(f"b: {G} groups do not share {H} heads evenly")
    check_states(state, (H, P, N), slots, starts, longest, x)


def mamba2_step(
    x: torch.Tensor, dt: torch.Tensor, b: torch.Tensor, c: torch.Tensor, a_log: torch.Tensor, d: torch.Tensor,
    dt_bias: torch.Tensor, state: torch.Tensor, slots: torch.Tensor, starts: torch.Tensor,
) -> torch.Tensor:  # fmt: skip
    """Outputs ``[tokens, H, P]``; updates ``state [slots, H, P, N]`` in place.

    ``x [tokens, H, P]``, ``b, c [tokens, G, N]`` (slices of a wider tensor will do), ``dt [tokens, H]`` contiguous;
    ``a_log, d, dt_bias [H]``. Raises InputError for arguments that do not fit each other.
    """
    check_scan(x, dt, b, c, a_log, d, dt_bias, state, slots, starts, None)
    tokens, H, P = x.shape
    G, N = b.shape[1:]
    out = buffers.empty(tokens, H, P, dtype=x.dtype, device=x.device)
    rows = rows_per_program(P, N)
    mamba2_step_kernel[(ceil_div(P, rows), H, len(slots))](
        x, dt, b, c, a_log, d, dt_bias, state, slots, starts, out, x.stride(0), b.stride(0), c.stride(0),
        H=H, G=G, P=P, N=N, BP=rows, BN=power_of_two(N), num_warps=4,
    )  # fmt: skip
    return out


@dataclass(frozen=True)
class Scan(Case):
    """``lengths`` of the sequences, H heads in G groups, P values and N states each; ``kept``: the state's type."""

    lengths: tuple[int, ...]
    H: int
    P: int
    N: int
    G: int = 1
    kept: str = "fp32"

    @property
    def component(self) -> LinearScan:
        """The model's component."""
        return LinearScan(
            Heads(self.H, self.N, self.P, self.G),
            activation=TYPES[self.dtype].format, state_format=TYPES[self.kept].format,
        )  # fmt: skip


def inputs(case: Scan, device: str) -> Tensors:
    """What projection and convolution give, the parameters of the heads, and states as earlier tokens left them."""
    source, tokens = Source(case.name, device), sum(case.lengths)
    tensors = {
        "x": source.normal(tokens, case.H, case.P, dtype=case.dtype),
        "dt": source.normal(tokens, case.H, dtype=case.dtype),
        "b": source.normal(tokens, case.G, case.N, dtype=case.dtype),
        "c": source.normal(tokens, case.G, case.N, dtype=case.dtype),
    }
    tensors |= {name: source.normal(case.H, dtype=case.dtype) for name in ("a_log", "d", "dt_bias")}
    tensors["state"] = source.normal(len(case.lengths) + 1, case.H, case.P, case.N, dtype=case.kept)
    return {**tensors, **tables(case.lengths, source)}


def recur(lengths: tuple[int, ...], tensors: Tensors) -> Tensors:
    """The recurrence in float64, token by token."""
    x, b, c = (tensors[name].double() for name in "xbc")
    state, H = tensors["state"].double().clone(), x.shape[1]
    share = H // b.shape[1]
    b, c = b.repeat_interleave(share, 1), c.repeat_interleave(share, 1)
    step = torch.nn.functional.softplus(tensors["dt"].double() + tensors["dt_bias"].double())
    decay = torch.exp(-step * torch.exp(tensors["a_log"].double()))
    out = torch.zeros_like(x)
    for rows, slot in sequences(lengths, tensors):
        for token in range(rows.start, rows.stop):
            pushed = torch.einsum("hp,hn->hpn", step[token, :, None] * x[token], b[token])
            state[slot] = decay[token, :, None, None] * state[slot] + pushed
            out[token] = torch.einsum("hpn,hn->hp", state[slot], c[token]) + tensors["d"].double()[:, None] * x[token]
    return {"out": out, "state": state}


def reference(case: Scan, tensors: Tensors) -> Tensors:
    """The recurrence in float64, token by token."""
    return recur(case.lengths, tensors)


def launch(case: Scan, tensors: Tensors) -> Tensors:
    """The Triton kernel."""
    return {"out": mamba2_step(**tensors), "state": tensors["state"]}


def expected(case: Scan, tensors: Tensors) -> Expected:
    """A state and a value once; B and C by every head's every block of rows."""
    cost, fmt, B = case.component.cost(batch(case.lengths)), TYPES[case.dtype].format, len(case.lengths)
    tokens, blocks = sum(case.lengths), ceil_div(case.P, rows_per_program(case.P, case.N))
    values, keys, rates = (fmt.bytes(tokens * size) for size in (case.H * case.P, case.G * case.N, case.H))
    shared = fmt.bytes(tokens * case.H * case.N) * blocks
    programs, learned = blocks * case.H * B, fmt.bytes(case.H)
    moved = {
        "x": Moved("activations", read=values),
        "dt": Moved("activations", read=rates, requested=rates * blocks),
        "b": Moved("activations", read=keys, requested=shared),
        "c": Moved("activations", read=keys, requested=shared),
        **{name: Moved("weights", read=learned, requested=learned * blocks * B) for name in ("a_log", "d", "dt_bias")},
        "state": Moved("state", cost.read["state"], cost.write["state"]),
        "out": Moved("activations", written=cost.write["activations"]),
        **moved_tables(case.lengths, programs, programs),
    }
    return Expected(cost, {"mamba2_step_kernel": Launch(programs, moved)})


def library(case: Scan, tensors: Tensors) -> Any:
    """The step in torch, operation by operation."""
    return plain_steps.mamba2(case.lengths, tensors)


CASES = (
    Scan("ragged", "bf16", (1, 3, 2), 6, 12, 20, 3),
    Scan("decode", "bf16", (1, 1, 1), 4, 8, 16, kept="bf16"),
    Scan("several-blocks", "fp16", (2, 1), 2, 40, 100),
    Scan("single", "fp32", (4,), 3, 5, 7),
)
MAMBA2: dict[str, Any] = {"H": 80, "P": 64, "N": 128}
NEMOTRON_H: dict[str, Any] = {"H": 128, "P": 64, "N": 128, "G": 8}
BUILDS = (
    Build(Scan("mamba2-2.7b", "bf16", (1,) * 64, **MAMBA2), targets=EVERYWHERE),
    Build(Scan("nemotron-h-56b", "bf16", (1,) * 64, 256, 64, 256, 8, "bf16")),
)
MEASURED = (
    Scan("mamba2-2.7b-128", "bf16", (1,) * 128, **MAMBA2),
    Scan("nemotron-h-8b-256", "bf16", (1,) * 256, **NEMOTRON_H, kept="bf16"),
)
SPEC = Spec("mamba2_step", "LinearScan", CASES, inputs, reference, launch, expected, STEP_TOLERANCE, BUILDS, MEASURED, library)
