"""Depthwise causal convolution over time with its rolling state: a prefill, and with one token each the update of decode.

``y[t] = sum_k weight[k] x[t - (TAPS - 1) + k]`` per channel, plus bias, with SiLU where asked for. Inputs before the first
new token come from the state, which keeps the last TAPS - 1 of them, oldest first. With gates (short convolutions)
``before`` multiplies the input, and the product is what the state keeps; ``after`` multiplies the result.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl

from roofline.components.recurrent import CausalConv
from roofline.errors import InputError
from roofline.kernels import buffers
from roofline.kernels.arguments import FLOATING, check
from roofline.kernels.fixed_state import batch, check_states, moved_tables, sequences, tables
from roofline.kernels.spec import EVERYWHERE, Build, Case, Expected, Launch, Moved, Spec, Tensors, Tolerance
from roofline.kernels.tiling import power_of_two
from roofline.kernels.types import TYPES, Source
from roofline.numeric import ceil_div


@triton.jit
def gated(x, before, at, mask):
    """The inputs at an offset, as the state would keep them."""
    value = tl.load(x + at, mask=mask, other=0.0)
    if before is not None:
        product = value.to(tl.float32) * tl.load(before + at, mask=mask, other=0.0).to(tl.float32)
        value = product.to(value.dtype)
    return value


@triton.jit
def causal_conv1d_kernel(
    x, before, after, weight, bias, state, slots, starts, out, channels,
    TAPS: tl.constexpr, ACTIVATED: tl.constexpr, BT: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    """BT tokens of BC channels of one sequence; the program of the first ones, which reads the state, moves it on."""
    tile = tl.program_id(1)
    sequence = tl.program_id(2)
    start = tl.load(starts + sequence)
    T = tl.load(starts + sequence + 1) - start
    if tile * BT >= T:
        return
    column = tl.program_id(0) * BC + tl.arange(0, BC)
    real = column < channels
    row = tile * BT + tl.arange(0, BT)
    inside = (row[:, None] < T) & real[None, :]
    first = start.to(tl.int64) * channels
    kept = state + tl.load(slots + sequence).to(tl.int64) * (TAPS - 1) * channels + column
    total = tl.zeros((BT, BC), tl.float32)
    if bias is not None:
        total += tl.load(bias + column, mask=real, other=0.0).to(tl.float32)[None, :]
    for tap in tl.static_range(TAPS):
        gain = tl.load(weight + column * TAPS + tap, mask=real, other=0.0).to(tl.float32)
        seen = row - (TAPS - 1) + tap
        at = first + seen[:, None].to(tl.int64) * channels + column[None, :]
        value = gated(x, before, at, inside & (seen[:, None] >= 0)).to(tl.float32)
        if tap < TAPS - 1:
            old = tl.load(
                kept[None, :] + (TAPS - 1 + seen)[:, None] * channels, mask=inside & (seen[:, None] < 0), other=0.0
            )  # fmt: skip
            value += old.to(tl.float32)
        total += gain[None, :] * value
    if ACTIVATED:
        total = total / (1.0 + tl.exp(-total))
    at = first + row[:, None].to(tl.int64) * channels + column[None, :]
    if after is not None:
        total *= tl.load(after + at, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + at, total.to(out.dtype.element_ty), mask=inside)
    if tile == 0:
        tl.debug_barrier()
        for index in tl.static_range(TAPS - 1):
            last = T - (TAPS - 1) + index
            new = gated(x, before, first + last.to(tl.int64) * channels + column, real & (last >= 0))
            older = tl.load(kept + (TAPS - 1 + last) * channels, mask=real & (last < 0), other=0.0)
            chosen = tl.where(last >= 0, new.to(tl.float32), older.to(tl.float32))
            tl.store(kept + index * channels, chosen.to(state.dtype.element_ty), mask=real)


@dataclass(frozen=True)
class Tile:
    """Tokens and channels of one program."""

    BT: int
    BC: int
    warps: int = 4


def choose(longest: int, channels: int) -> Tile:
    """A row of channels per program at decode; otherwise a block of tokens, so that the taps meet in the L1 cache."""
    if longest == 1:
        return Tile(1, min(512, power_of_two(channels)))
    return Tile(min(32, power_of_two(longest)), min(128, power_of_two(channels)))


def causal_conv1d(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, state: torch.Tensor, slots: torch.Tensor,
    starts: torch.Tensor, longest: int, activated: bool = True, before: torch.Tensor | None = None,
    after: torch.Tensor | None = None, tile: Tile | None = None,
) -> torch.Tensor:  # fmt: skip
    """Convolves rows ``x [tokens, channels]`` with ``weight [channels, TAPS]``; updates ``state [slots, TAPS - 1, channels]``.

    ``longest``: the most rows of one sequence. ``before``, ``after``: gates like x, multiplied to input and result. Raises
    InputError for arguments that do not fit each other.
    """
    check("x", x, (None, None), FLOATING)
    rows, channels = x.shape
    check("weight", weight, (channels, None), FLOATING, x)
    check("bias", bias, (channels,), FLOATING, x)
    check("before", before, (rows, channels), (x.dtype,), x)
    check("after", after, (rows, channels), (x.dtype,), x)
    check_states(state, (weight.shape[1] - 1, channels), slots, starts, longest, x)
    out = buffers.empty(rows, channels, dtype=x.dtype, device=x.device)
    cut = tile or choose(longest, channels)
    if min(longest, weight.shape[1] - 1) > cut.BT:
        raise InputError(f"tile: {cut.BT} tokens are shorter than the state: two programs would share it")
    causal_conv1d_kernel[(ceil_div(channels, cut.BC), ceil_div(longest, cut.BT), len(slots))](
        x, before, after, weight, bias, state, slots, starts, out, channels,
        TAPS=weight.shape[1], ACTIVATED=activated, BT=cut.BT, BC=cut.BC, num_warps=cut.warps,
    )  # fmt: skip
    return out


@dataclass(frozen=True)
class Conv(Case):
    """``lengths`` of the sequences, channels and taps."""

    lengths: tuple[int, ...]
    channels: int
    taps: int = 4
    bias: bool = True
    activated: bool = True
    gated: bool = False
    tile: Tile | None = None

    @property
    def cut(self) -> Tile:
        """The tiles of its launch."""
        return self.tile or choose(max(self.lengths), self.channels)


def inputs(case: Conv, device: str) -> Tensors:
    """Rows, weights, and the inputs that earlier tokens left."""
    source, rows = Source(case.name, device), (sum(case.lengths), case.channels)
    tensors = {
        "x": source.normal(*rows, dtype=case.dtype),
        "weight": source.normal(case.channels, case.taps, dtype=case.dtype, scale=0.5),
        "bias": source.normal(case.channels, dtype=case.dtype) if case.bias else None,
        "state": source.normal(len(case.lengths) + 1, case.taps - 1, case.channels, dtype=case.dtype),
        **tables(case.lengths, source),
        "longest": max(case.lengths),
    }
    for gate in ("before", "after") if case.gated else ():
        tensors[gate] = source.normal(*rows, dtype=case.dtype)
    return tensors


def reference(case: Conv, tensors: Tensors) -> Tensors:
    """Sequence by sequence and tap by tap, in float64; a gated input is rounded, as the state keeps it."""
    x, weight, state = tensors["x"], tensors["weight"].double(), tensors["state"].double().clone()
    if case.gated:
        x = (x.float() * tensors["before"].float()).to(x.dtype)
    out = torch.zeros(x.shape, dtype=torch.float64)
    for rows, slot in sequences(case.lengths, tensors):
        seen = torch.cat([state[slot], x[rows].double()])
        T = rows.stop - rows.start
        out[rows] = sum(weight[:, tap] * seen[tap : tap + T] for tap in range(case.taps))
        state[slot] = seen[T:]
    if case.bias:
        out = out + tensors["bias"].double()
    if case.activated:
        out = out / (1 + torch.exp(-out))
    return {"out": out * tensors["after"].double() if case.gated else out, "state": state}


def launch(case: Conv, tensors: Tensors) -> Tensors:
    """The Triton kernel."""
    return {"out": causal_conv1d(**tensors, activated=case.activated, tile=case.tile), "state": tensors["state"]}


def expected(case: Conv, tensors: Tensors) -> Expected:
    """Each tap reads its inputs anew, from the state where they are older than the step; so does the state's update."""
    cut, fmt, taps, B = case.cut, TYPES[case.dtype].format, case.taps, len(case.lengths)
    gates = 2 if case.gated else 0
    component = CausalConv(case.channels, taps, case.bias, case.activated, gates, fmt, fmt)
    cost = component.cost(batch(case.lengths))
    blocks = ceil_div(case.channels, cut.BC)
    tiles = sum(ceil_div(T, cut.BT) for T in case.lengths)
    one_way = cost.write["activations"]
    row = fmt.bytes(case.channels)
    before = sum(min(lag, T) for T in case.lengths for lag in range(taps))
    moved_on = sum(min(taps - 1, T) for T in case.lengths)
    tapped = row * (taps * sum(case.lengths) - before + moved_on)
    state = cost.read["state"]
    programs = blocks * ceil_div(max(case.lengths), cut.BT) * B
    moved = {
        "x": Moved("activations", read=one_way, requested=tapped),
        "weight": Moved("weights", read=row * taps, requested=row * taps * tiles),
        "state": Moved("state", state, cost.write["state"], row * (before + (taps - 1) * B - moved_on)),
        "out": Moved("activations", written=one_way),
        **moved_tables(case.lengths, programs, blocks * tiles),
    }
    if case.bias:
        moved["bias"] = Moved("weights", read=row, requested=row * tiles)
    if case.gated:
        moved["before"] = Moved("activations", read=one_way, requested=tapped)
        moved["after"] = Moved("activations", read=one_way)
    return Expected(cost, {"causal_conv1d_kernel": Launch(programs, moved)})


def library(case: Conv, tensors: Tensors) -> Any:
    """torch's depthwise conv1d behind the state's columns, over sequences of one length, and its SiLU."""
    if len(set(case.lengths)) > 1 or case.gated:
        return None
    x = tensors["x"].view(len(case.lengths), -1, case.channels).transpose(1, 2)
    weight, bias, silu = tensors["weight"].unsqueeze(1), tensors["bias"], torch.nn.functional.silu
    state = tensors["state"][tensors["slots"].long()].transpose(1, 2)

    def run() -> torch.Tensor:
        seen = torch.cat([state, x], 2)
        out = torch.nn.functional.conv1d(seen, weight, bias, groups=case.channels)
        return silu(out) if case.activated else out

    return run


CASES = (
    Conv("ragged", "bf16", (11, 1, 2, 7), 37, tile=Tile(4, 16)),
    Conv("chosen", "bf16", (35, 4), 150),
    Conv("update", "bf16", (1, 1, 1), 70),
    Conv("wide-tile", "fp16", (3, 9), 19, taps=5, bias=False, tile=Tile(16, 32)),
    Conv("tile-of-taps", "fp32", (5, 6, 3), 10, activated=False, tile=Tile(4, 8)),
    Conv("short-gated", "bf16", (6, 1, 13), 24, taps=3, bias=False, activated=False, gated=True, tile=Tile(8, 16)),
)
TOLERANCE = {
    "bf16": Tolerance(3e-3, "summed in fp32, rounded once to bf16"),
    "fp16": Tolerance(4e-4, "summed in fp32, rounded once to fp16"),
    "fp32": Tolerance(1e-6, "fp32 sums in another order"),
}
BUILDS = (
    Build(Conv("mamba2-prefill", "bf16", (4096,) * 8, 5376), targets=EVERYWHERE),
    Build(Conv("mamba2-update", "bf16", (1,) * 64, 5376)),
    Build(Conv("lfm2-prefill", "bf16", (4096,) * 8, 2048, 3, False, False, gated=True)),
)
MEASURED = (
    Conv("nemotron-h-8k", "bf16", (8192,) * 4, 10240),
    Conv("qwen3-next-decode-256", "bf16", (1,) * 256, 8192, bias=False),
)
SPEC = Spec(
    "causal_conv1d", "CausalConv", CASES, inputs, reference, launch, expected, TOLERANCE, BUILDS, MEASURED, library
)  # fmt: skip
