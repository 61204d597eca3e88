"""The selective scan of Mamba, token by token: every channel and state decays at its own rate.

``h = exp(dt A) h + dt x B`` and ``y = (C h + D x) silu(z)`` for each channel's J states; ``A = -exp(a_log)``, and dt is the
softplus of what its projection gives, bias included. A prefill runs the same arithmetic: no chunk of it turns into a matmul.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl

from roofline.components.mamba import SelectiveScan
from roofline.kernels import buffers, plain_steps
from roofline.kernels.arguments import FLOATING, check
from roofline.kernels.fixed_state import STEP_TOLERANCE, batch, check_states, moved_tables, sequences, softplus, tables
from roofline.kernels.spec import EVERYWHERE, Build, Case, Expected, Launch, Moved, Spec, Tensors
from roofline.kernels.tiling import power_of_two
from roofline.kernels.types import TYPES, Source
from roofline.numeric import ceil_div


@triton.jit
def mamba1_step_kernel(
    x, dt, z, b, c, a_log, d, state, slots, starts, out, inner, J: tl.constexpr, BC: tl.constexpr, BJ: tl.constexpr
):
    """All new tokens of one sequence for BC channels."""
    sequence = tl.program_id(1)
    start = tl.load(starts + sequence)
    T = tl.load(starts + sequence + 1) - start
    slot = tl.load(slots + sequence)
    row = tl.program_id(0) * BC + tl.arange(0, BC)
    column = tl.arange(0, BJ)
    real = row < inner
    inside = real[:, None] & (column[None, :] < J)
    place = row[:, None] * J + column[None, :]
    kept = state + slot.to(tl.int64) * inner * J + place
    carried = tl.load(kept, mask=inside, other=0.0).to(tl.float32)
    rate = -tl.exp(tl.load(a_log + place, mask=inside, other=0.0).to(tl.float32))
    skip = tl.load(d + row, mask=real, other=0.0).to(tl.float32)
    for token in range(T):
        at = start.to(tl.int64) + token
        line = at * inner + row
        step = softplus(tl.load(dt + line, mask=real, other=0.0).to(tl.float32))
        value = tl.load(x + line, mask=real, other=0.0).to(tl.float32)
        gate = tl.load(z + line, mask=real, other=0.0).to(tl.float32)
        key = tl.load(b + at * J + column, mask=column < J, other=0.0).to(tl.float32)
        query = tl.load(c + at * J + column, mask=column < J, other=0.0).to(tl.float32)
        carried = carried * tl.exp(step[:, None] * rate) + (step * value)[:, None] * key[None, :]
        result = tl.sum(carried * query[None, :], 1) + skip * value
        result = result * gate / (1.0 + tl.exp(-gate))
        tl.store(out + line, result.to(out.dtype.element_ty), mask=real)
    tl.store(kept, carried.to(state.dtype.element_ty), mask=inside)


def channels_per_program(inner: int, J: int) -> int:
    """Channels whose states give each of 128 threads 16 to hold."""
    return max(1, min(power_of_two(inner), 2048 // power_of_two(J)))


def mamba1_step(
    x: torch.Tensor, dt: torch.Tensor, z: torch.Tensor, b: torch.Tensor, c: torch.Tensor, a_log: torch.Tensor,
    d: torch.Tensor, state: torch.Tensor, slots: torch.Tensor, starts: torch.Tensor,
) -> torch.Tensor:  # fmt: skip
    """Outputs ``[tokens, inner]``; updates ``state [slots, inner, J]`` in place.

    ``x, dt, z [tokens, inner]``, ``b, c [tokens, J]``, ``a_log [inner, J]``, ``d [inner]``. Raises InputError for arguments
    that do not fit each other.
    """
    check("x", x, (None, None), FLOATING)
    tokens, inner = x.shape
    check("b", b, (tokens, None), FLOATING, x)
    J = b.shape[1]
    check("c", c, (tokens, J), FLOATING, x)
    for name, given in (("dt", dt), ("z", z)):
        check(name, given, (tokens, inner), FLOATING, x)
    check("a_log", a_log, (inner, J), FLOATING, x)
    check("d", d, (inner,), FLOATING, x)
    check_states(state, (inner, J), slots, starts, None, x)
    out = buffers.empty(tokens, inner, dtype=x.dtype, device=x.device)
    channels = channels_per_program(inner, J)
    mamba1_step_kernel[(ceil_div(inner, channels), len(slots))](
        x, dt, z, b, c, a_log, d, state, slots, starts, out, inner, J=J, BC=channels, BJ=power_of_two(J), num_warps=4
    )
    return out


@dataclass(frozen=True)
class Selective(Case):
    """``lengths`` of the sequences, channels and states per channel; ``kept``: the state's type."""

    lengths: tuple[int, ...]
    inner: int
    J: int
    kept: str = "fp32"


def inputs(case: Selective, device: str) -> Tensors:
    """What the projections give, the parameters of the channels, and states as earlier tokens left them."""
    source, tokens = Source(case.name, device), sum(case.lengths)
    tensors = {name: source.normal(tokens, case.inner, dtype=case.dtype) for name in ("x", "dt", "z")}
    tensors |= {name: source.normal(tokens, case.J, dtype=case.dtype) for name in ("b", "c")}
    tensors["a_log"] = source.normal(case.inner, case.J, dtype=case.dtype)
    tensors["d"] = source.normal(case.inner, dtype=case.dtype)
    tensors["state"] = source.normal(len(case.lengths) + 1, case.inner, case.J, dtype=case.kept)
    return {**tensors, **tables(case.lengths, source)}


def reference(case: Selective, tensors: Tensors) -> Tensors:
    """The recurrence in float64, token by token."""
    x, z, b, c, d = (tensors[name].double() for name in "xzbcd")
    state, rate = tensors["state"].double().clone(), -torch.exp(tensors["a_log"].double())
    step = torch.nn.functional.softplus(tensors["dt"].double())
    out = torch.zeros_like(x)
    for rows, slot in sequences(case.lengths, tensors):
        for token in range(rows.start, rows.stop):
            pushed = (step[token] * x[token])[:, None] * b[token]
            state[slot] = torch.exp(step[token][:, None] * rate) * state[slot] + pushed
            out[token] = (state[slot] @ c[token] + d * x[token]) * z[token] / (1 + torch.exp(-z[token]))
    return {"out": out, "state": state}


def launch(case: Selective, tensors: Tensors) -> Tensors:
    """The Triton kernel."""
    return {"out": mamba1_step(**tensors), "state": tensors["state"]}


def expected(case: Selective, tensors: Tensors) -> Expected:
    """Everything of a channel once; B and C by every block of channels, rates by every sequence."""
    fmt, B, tokens = TYPES[case.dtype].format, len(case.lengths), sum(case.lengths)
    cost = SelectiveScan(case.inner, case.J, fmt, TYPES[case.kept].format).cost(batch(case.lengths))
    blocks = ceil_div(case.inner, channels_per_program(case.inner, case.J))
    line, keys = fmt.bytes(tokens * case.inner), fmt.bytes(tokens * case.J)
    rates, skips = fmt.bytes(case.inner * case.J), fmt.bytes(case.inner)
    moved = {
        **{name: Moved("activations", read=line) for name in ("x", "dt", "z")},
        **{name: Moved("activations", read=keys, requested=keys * blocks) for name in ("b", "c")},
        "a_log": Moved("weights", read=rates, requested=rates * B),
        "d": Moved("weights", read=skips, requested=skips * B),
        "state": Moved("state", cost.read["state"], cost.write["state"]),
        "out": Moved("activations", written=cost.write["activations"]),
        **moved_tables(case.lengths, blocks * B, blocks * B),
    }
    return Expected(cost, {"mamba1_step_kernel": Launch(blocks * B, moved)})


def library(case: Selective, tensors: Tensors) -> Any:
    """The step in torch, operation by operation."""
    return plain_steps.mamba1(case.lengths, tensors)


CASES = (
    Selective("ragged", "bf16", (2, 1, 4), 150, 20),
    Selective("decode", "bf16", (1, 1), 96, 16, "bf16"),
    Selective("half", "fp16", (3,), 300, 8),
    Selective("single", "fp32", (1, 2), 33, 5),
)
MAMBA: dict[str, Any] = {"inner": 5120, "J": 16}
BUILDS = (Build(Selective("mamba-2.8b", "bf16", (1,) * 64, **MAMBA), targets=EVERYWHERE),)
MEASURED = (Selective("mamba-2.8b-256", "bf16", (1,) * 256, **MAMBA),)
SPEC = Spec("mamba1_step", "SelectiveScan", CASES, inputs, reference, launch, expected, STEP_TOLERANCE, BUILDS, MEASURED, library)
