"""The recurrence of Mamba-2 in chunks (state-space duality): a prefill on the matrix unit, in three launches.

A sequence is cut into chunks of C tokens. ``chunk_states`` sums what each chunk adds to the state, all chunks at once;
``pass_states`` walks over the chunks, hands the state on and leaves it behind the last one; ``chunk_outputs`` lets tokens of
a chunk meet as in attention without a softmax, and adds what the state on entry gives. Between launches lie, per head and
chunk, the sum in fp32, its decay, and the state on entry in the type of the inputs. The same inputs and the same state as
``mamba2_step``, token by token.

Decays are differences of running sums of dt, taken before they are multiplied by A: each block of tokens sums from its own
start and carries one number for what lies between two blocks, so that no exponent is positive and a token's own is zero.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl

from roofline.components.chunked import ChunkedScan
from roofline.cost import Cost
from roofline.kernels import buffers
from roofline.kernels.arguments import within
from roofline.kernels.device import Device, current, of
from roofline.kernels.fixed_state import batch, moved_tables, softplus
from roofline.kernels.mamba2_step import Scan, check_scan, recur
from roofline.kernels.mamba2_step import inputs as step_inputs
from roofline.kernels.spec import EVERYWHERE, Build, Expected, Launch, Moved, Spec, Tensors, Tolerance
from roofline.kernels.tiling import power_of_two
from roofline.kernels.types import NAMES, TYPES
from roofline.numeric import ceil_div


@triton.jit
def chunk_states_kernel(
    x, dt, b, a_log, dt_bias, starts, added, decays, x_row, b_row, chunks,
    H: tl.constexpr, G: tl.constexpr, P: tl.constexpr, N: tl.constexpr, C: tl.constexpr,
    BT: tl.constexpr, BP: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """What one chunk adds to BP rows of a head's state, seen from the chunk's end, and its decay (logarithm)."""
    chunk = tl.program_id(0)
    blocks: tl.constexpr = (P + BP - 1) // BP
    head = tl.program_id(1) // blocks
    block = tl.program_id(1) % blocks
    sequence = tl.program_id(2)
    start = tl.load(starts + sequence)
    T = tl.load(starts + sequence + 1) - start
    if chunk * C >= T:
        return
    end = tl.minimum(chunk * C + C, T)
    rate = -tl.exp(tl.load(a_log + head).to(tl.float32))
    bias = tl.load(dt_bias + head).to(tl.float32)
    row = block * BP + tl.arange(0, BP)
    column = tl.arange(0, BN)
    gathered = tl.zeros((BP, BN), tl.float32)
    whole = 0.0
    for first in range(chunk * C, end, BT):
        token = first + tl.arange(0, BT)
        real = token < end
        at = (start + token).to(tl.int64)
        step = softplus(tl.load(dt + at * H + head, mask=real, other=0.0).to(tl.float32) + bias)
        step = tl.where(real, step, 0.0)
        upto = tl.cumsum(step, 0)
        passed = tl.max(upto, 0)
        weight = step * tl.exp((passed - upto) * rate)
        value = tl.load(
            x + at[:, None] * x_row + head * P + row[None, :], mask=real[:, None] & (row[None, :] < P), other=0.0
        )  # fmt: skip
        key = tl.load(
            b + at[:, None] * b_row + head // (H // G) * N + column[None, :],
            mask=real[:, None] & (column[None, :] < N), other=0.0,
        )  # fmt: skip
        weighed = (value.to(tl.float32) * weight[:, None]).to(value.dtype)
        gathered = tl.dot(tl.trans(weighed), key, gathered * tl.exp(passed * rate), input_precision="ieee")
        whole += passed * rate
    place = (sequence * chunks + chunk).to(tl.int64) * H + head
    goal = added + place * P * N + row[:, None] * N + column[None, :]
    tl.store(goal, gathered, mask=(row[:, None] < P) & (column[None, :] < N))
    if block == 0:
        tl.store(decays + place, whole)


@triton.jit
def pass_states_kernel(
    state, slots, starts, added, decays, entering, chunks,
    H: tl.constexpr, SIZE: tl.constexpr, C: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Hands BLOCK elements of a head's state from chunk to chunk."""
    head = tl.program_id(1)
    sequence = tl.program_id(2)
    T = tl.load(starts + sequence + 1) - tl.load(starts + sequence)
    element = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = element < SIZE
    kept = state + (tl.load(slots + sequence).to(tl.int64) * H + head) * SIZE + element
    carried = tl.load(kept, mask=inside, other=0.0).to(tl.float32)
    first = sequence.to(tl.int64) * chunks
    for chunk in range(tl.cdiv(T, C)):
        place = (first + chunk) * H + head
        tl.store(entering + place * SIZE + element, carried.to(entering.dtype.element_ty), mask=inside)
        carried = carried * tl.exp(tl.load(decays + place)) + tl.load(added + place * SIZE + element, mask=inside, other=0.0)
    tl.store(kept, carried.to(state.dtype.element_ty), mask=inside)


@triton.jit
def chunk_outputs_kernel(
    x, dt, b, c, a_log, d, dt_bias, starts, entering, out, x_row, b_row, c_row, chunks,
    H: tl.constexpr, G: tl.constexpr, P: tl.constexpr, N: tl.constexpr, C: tl.constexpr,
    BT: tl.constexpr, BP: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """BT outputs of BP values of a head: tokens of the chunk from the own block back to its first, then the state on entry."""
    tiles: tl.constexpr = (C + BT - 1) // BT
    chunk = tl.program_id(0) // tiles
    tile = tl.program_id(0) % tiles
    blocks: tl.constexpr = (P + BP - 1) // BP
    head = tl.program_id(1) // blocks
    sequence = tl.program_id(2)
    start = tl.load(starts + sequence)
    T = tl.load(starts + sequence + 1) - start
    end = tl.minimum(chunk * C + C, T)
    first = chunk * C + tile * BT
    if first >= end:
        return
    rate = -tl.exp(tl.load(a_log + head).to(tl.float32))
    bias = tl.load(dt_bias + head).to(tl.float32)
    skip = tl.load(d + head).to(tl.float32)
    row = first + tl.arange(0, BT)
    live = row < end
    row_at = (start + row).to(tl.int64)
    value_at = tl.program_id(1) % blocks * BP + tl.arange(0, BP)
    column = tl.arange(0, BN)
    step = softplus(tl.load(dt + row_at * H + head, mask=live, other=0.0).to(tl.float32) + bias)
    upto = tl.cumsum(tl.where(live, step, 0.0), 0)
    shared = head // (H // G) * N
    query = tl.load(
        c + row_at[:, None] * c_row + shared + column[None, :], mask=live[:, None] & (column[None, :] < N), other=0.0
    )  # fmt: skip
    total = tl.zeros((BT, BP), tl.float32)
    gap = 0.0
    for back in range(tile + 1):
        token = first - back * BT + tl.arange(0, BT)
        real = token < end
        at = (start + token).to(tl.int64)
        step = softplus(tl.load(dt + at * H + head, mask=real, other=0.0).to(tl.float32) + bias)
        step = tl.where(real, step, 0.0)
        key = tl.load(
            b + at[None, :] * b_row + shared + column[:, None], mask=real[None, :] & (column[:, None] < N), other=0.0
        )  # fmt: skip
        value = tl.load(
            x + at[:, None] * x_row + head * P + value_at[None, :], mask=real[:, None] & (value_at[None, :] < P), other=0.0
        )  # fmt: skip
        until = tl.cumsum(step, 0)
        gap = tl.where(back == 0, 0.0, gap + tl.max(until, 0))
        fading = (upto[:, None] + (gap - until)[None, :]) * rate
        seen = tl.where(row[:, None] >= token[None, :], fading, float("-inf"))
        score = tl.dot(query, key, input_precision="ieee") * tl.exp(seen) * step[None, :]
        score = tl.where(row[:, None] == token[None, :], score + skip, score)
        total = tl.dot(score.to(value.dtype), value, total, input_precision="ieee")
    place = (sequence * chunks + chunk).to(tl.int64) * H + head
    carried = tl.load(
        entering + place * P * N + value_at[None, :] * N + column[:, None],
        mask=(value_at[None, :] < P) & (column[:, None] < N), other=0.0,
    )  # fmt: skip
    total += tl.dot(query, carried, input_precision="ieee") * tl.exp((upto + gap) * rate)[:, None]
    goal = out + (row_at[:, None] * H + head) * P + value_at[None, :]
    tl.store(goal, total.to(out.dtype.element_ty), mask=live[:, None] & (value_at[None, :] < P))


@dataclass(frozen=True)
class Tile:
    """Tokens and values (rows of a state) of one program, elements of a state handed on by one; warps, stages."""

    BT: int
    BP: int
    BLOCK: int = 1024
    warps: int = 4
    stages: int = 3


def choose(P: int, N: int, C: int, dtype: str, device: Device) -> Tile:
    """Tiles by the state's sides, the chunk, the type of the inputs and the device."""
    BT = min(64, power_of_two(C, 16))
    if dtype == "fp32":
        return Tile(min(32, BT), min(32, power_of_two(P, 16)), stages=1)
    roomy = device.shared >= 200_000
    return Tile(
        BT, min(64, power_of_two(P, 16)), warps=8 if N > 128 else 4, stages=3 if roomy and N <= 128 else 2 if roomy else 1
    )


def mamba2_chunk(
    x: torch.Tensor, dt: torch.Tensor, b: torch.Tensor, c: torch.Tensor, a_log: torch.Tensor, d: torch.Tensor,
    dt_bias: torch.Tensor, state: torch.Tensor, slots: torch.Tensor, starts: torch.Tensor, longest: int, chunk: int,
    tile: Tile | None = None,
) -> torch.Tensor:  # fmt: skip
    """``mamba2_step`` in chunks of ``chunk`` tokens. ``longest``: the most new tokens of one sequence. InputError as there."""
    within("chunk", chunk, 1)
    check_scan(x, dt, b, c, a_log, d, dt_bias, state, slots, starts, longest)
    tokens, H, P = x.shape
    G, N = b.shape[1:]
    B, chunks = len(slots), ceil_div(longest, chunk)
    out = buffers.empty(tokens, H, P, dtype=x.dtype, device=x.device)
    added = buffers.empty(B, chunks, H, P, N, dtype=torch.float32, device=x.device)
    decays = buffers.empty(B, chunks, H, dtype=torch.float32, device=x.device)
    entering = buffers.empty(B, chunks, H, P, N, dtype=x.dtype, device=x.device)
    cut = tile or choose(P, N, chunk, NAMES[x.dtype], of(x))
    sides: dict[str, int] = {"H": H, "G": G, "P": P, "N": N, "C": chunk, "BT": cut.BT, "BP": cut.BP}
    sides |= {"BN": power_of_two(N, 16), "num_warps": cut.warps, "num_stages": cut.stages}
    heads = H * ceil_div(P, cut.BP)
    chunk_states_kernel[(chunks, heads, B)](
        x, dt, b, a_log, dt_bias, starts, added, decays, x.stride(0), b.stride(0), chunks, **sides
    )
    pass_states_kernel[(ceil_div(P * N, cut.BLOCK), H, B)](
        state, slots, starts, added, decays, entering, chunks, H=H, SIZE=P * N, C=chunk, BLOCK=cut.BLOCK, num_warps=4
    )
    chunk_outputs_kernel[(chunks * ceil_div(chunk, cut.BT), heads, B)](
        x, dt, b, c, a_log, d, dt_bias, starts, entering, out, x.stride(0), b.stride(0), c.stride(0), chunks, **sides
    )
    return out


@dataclass(frozen=True)
class Chunked(Scan):
    """As ``Scan``, in chunks of C tokens."""

    C: int = 256
    tile: Tile | None = None

    @property
    def cut(self) -> Tile:
        """The tiles of its launch."""
        return self.tile or choose(self.P, self.N, self.C, self.dtype, current())

    @property
    def cost(self) -> Cost:
        """The component's Cost."""
        step = self.component
        return ChunkedScan(step, step.shape, self.C).cost(batch(self.lengths))


def inputs(case: Chunked, device: str) -> Tensors:
    """As for a step."""
    return {**step_inputs(case, device), "longest": max(case.lengths)}


def reference(case: Chunked, tensors: Tensors) -> Tensors:
    """The recurrence in float64, token by token."""
    return recur(case.lengths, tensors)


def launch(case: Chunked, tensors: Tensors) -> Tensors:
    """The three Triton kernels."""
    return {"out": mamba2_chunk(**tensors, chunk=case.C, tile=case.tile), "state": tensors["state"]}


def chunk_lengths(lengths: tuple[int, ...], C: int) -> list[int]:
    """Tokens of every chunk of every sequence."""
    return [min(C, T - first) for T in lengths for first in range(0, T, C)]


def expected(case: Chunked, tensors: Tensors) -> Expected:
    """Values, keys and rates once for the chunks' sums and again for outputs, there once per later block of their chunk."""
    cut, cost, fmt, B = case.cut, case.cost, TYPES[case.dtype].format, len(case.lengths)
    H, P, N, tokens = case.H, case.P, case.N, sum(case.lengths)
    pieces = chunk_lengths(case.lengths, case.C)
    blocks, chunks, BN = ceil_div(P, cut.BP), ceil_div(max(case.lengths), case.C), power_of_two(N, 16)
    tiles = [tile for size in pieces for tile in range(ceil_div(size, cut.BT))]
    looks_back = sum(
        tile * cut.BT + min(cut.BT, size - tile * cut.BT) for size in pieces for tile in range(ceil_div(size, cut.BT))
    )  # fmt: skip
    values, keys, rates = (fmt.bytes(tokens * size) for size in (H * P, case.G * N, H))
    learned, parts = fmt.bytes(H), len(pieces) * H
    added, decays, entering = 4 * parts * P * N, 4 * parts, fmt.bytes(parts * P * N)
    sums, outputs = chunks * H * blocks * B, chunks * ceil_div(case.C, cut.BT) * H * blocks * B
    passing = ceil_div(P * N, cut.BLOCK)
    starts = moved_tables(case.lengths, 1, 1)["starts"].read

    def all_read(stream: str, size: int, times: int) -> Moved:
        return Moved(stream, read=size, requested=size * times)

    first = {
        "x": Moved("", read=values),
        "dt": all_read("", rates, blocks),
        "b": Moved("", read=keys, requested=fmt.bytes(tokens * H * N) * blocks),
        **{name: all_read("", learned, len(pieces) * blocks) for name in ("a_log", "dt_bias")},
        "starts": Moved("", read=starts, requested=8 * sums),
        "added": Moved("", written=added),
        "decays": Moved("", written=decays),
    }
    second = {
        "state": Moved("state", cost.read["state"], cost.write["state"]),
        "added": Moved("", read=added),
        "decays": all_read("", decays, passing),
        "entering": Moved("", written=entering),
        **moved_tables(case.lengths, passing * H * B, passing * H * B),
    }
    third = {
        "x": Moved("activations", read=values, requested=fmt.bytes(looks_back * H * P)),
        "dt": Moved("activations", read=rates, requested=fmt.bytes((looks_back + tokens) * H) * blocks),
        "b": Moved("activations", read=keys, requested=fmt.bytes(looks_back * H * N) * blocks),
        "c": Moved("activations", read=keys, requested=fmt.bytes(tokens * H * N) * blocks),
        **{name: all_read("weights", learned, len(tiles) * blocks) for name in ("a_log", "d", "dt_bias")},
        "starts": Moved("", read=starts, requested=8 * outputs),
        "entering": Moved("", read=entering, requested=entering // len(pieces) * len(tiles)),
        "out": Moved("activations", written=cost.write["activations"]),
    }
    kernels = {
        "chunk_states_kernel": Launch(sums, first),
        "pass_states_kernel": Launch(passing * H * B, second),
        "chunk_outputs_kernel": Launch(outputs, third),
    }
    wide = blocks * cut.BP
    squares = sum(tile + 1 for tile in tiles) * 2 * cut.BT * cut.BT * (blocks * BN + wide)
    with_state = 2 * len(tiles) * 2 * cut.BT * wide * BN

    def needed() -> int:
        pairs = sum(token + 1 for size in pieces for token in range(size))
        return 2 * pairs * (case.G * N + H * P) + 4 * tokens * H * P * N

    return Expected(cost, kernels, TYPES[case.dtype].triton, H * (squares + with_state), needed)


CASES = (
    Chunked("ragged", "bf16", (13, 1, 38), 4, 20, 24, 2, C=32, tile=Tile(16, 16, 256)),
    Chunked("chosen", "bf16", (70, 16), 2, 64, 40, C=64),
    Chunked("odd-chunks", "bf16", (50,), 2, 16, 16, kept="bf16", C=20, tile=Tile(16, 16)),
    Chunked("half", "fp16", (45, 8), 2, 12, 18, 2, C=40, tile=Tile(16, 16, 256)),
    Chunked("single", "fp32", (21, 5), 3, 7, 9, C=8, tile=Tile(16, 16, 64)),
)
TOLERANCE = {
    "bf16": Tolerance(6e-3, "scores, weighed values and the state on entry are rounded to bf16 before they multiply"),
    "fp16": Tolerance(8e-4, "scores, weighed values and the state on entry are rounded to fp16 before they multiply"),
    "fp32": Tolerance(2e-6, "fp32 sums in another order, decays as differences of sums"),
}
MATRIX = {"chunk_states_kernel": "HGMMA", "chunk_outputs_kernel": "HGMMA"}
MAMBA2: dict[str, Any] = {"H": 80, "P": 64, "N": 128}
NEMOTRON_H: dict[str, Any] = {"H": 128, "P": 64, "N": 128, "G": 8, "C": 128}
BUILDS = (
    Build(Chunked("mamba2-2.7b", "bf16", (4096,) * 8, **MAMBA2), MATRIX, targets=EVERYWHERE),
    Build(Chunked("nemotron-h-56b", "bf16", (8192,), 256, 64, 256, 8), MATRIX),
)
MEASURED = (
    Chunked("mamba2-2.7b-4k", "bf16", (4096,) * 8, **MAMBA2),
    Chunked("nemotron-h-8b-8k", "bf16", (8192,), **NEMOTRON_H, kept="bf16"),
)
SPEC = Spec("mamba2_chunk", "ChunkedScan", CASES, inputs, reference, launch, expected, TOLERANCE, BUILDS, MEASURED)
