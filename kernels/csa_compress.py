"""Compression of tokens into entries (DeepSeek-V4): gated pooling of blocks of m tokens, and its rolling state.

A token's projections are values and gates, one series of each, or two where blocks overlap: the first then counts for the
next block, the second for its own. An entry is the sum of its block's values weighted by a softmax over tokens, one for
each channel, of gate plus bias; then an RMS norm and a rotary embedding (pairs of neighbours, the last P elements) at the
block's first position. The state is a ring of the projections of the last tokens that a block can still need, in fp32.

One program makes one entry. The first program of a sequence makes every entry that needs the state, and only then writes
the new tokens into the ring, so that nobody reads what is being overwritten. Prefill, chunks and decode are one kernel.
Source: DeepSeek-V4 (arXiv 2606.19348), section 2.3; transformers 5.24, models/deepseek_v4.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from roofline.components.compressed import CompressWrite
from roofline.errors import InputError
from roofline.kernels import buffers
from roofline.kernels.arguments import FLOATING, INT32, SINGLE, check, check_indices, check_starts, readable, within
from roofline.kernels.index_keys import INDEX, dequantise, from_pages
from roofline.kernels.rotary import angle_table
from roofline.kernels.spec import EVERYWHERE, Build, Case, Expected, Launch, Moved, Spec, Tensors, Tolerance
from roofline.kernels.tiling import power_of_two
from roofline.kernels.types import TYPES, Source
from roofline.numeric import ceil_div
from roofline.work import Ragged, Work

EPSILON = 1e-6


@triton.jit
def pooled(
    x, state, bias, block, cached, begin,
    DIM: tl.constexpr, BLOCK: tl.constexpr, EVERY: tl.constexpr, SERIES: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """The weighted sum of one block's values, its tokens taken from x where they are new and else from the state."""
    WIDTH: tl.constexpr = 2 * SERIES * DIM
    POOLED: tl.constexpr = SERIES * EVERY
    column = tl.arange(0, BLOCK)[None, :]
    peak = tl.full((BLOCK,), float("-inf"), tl.float32)
    total = tl.zeros((BLOCK,), tl.float32)
    sums = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, POOLED, ROWS):
        row = start + tl.arange(0, ROWS)
        token = (block - SERIES + 1) * EVERY + row
        series = row // EVERY * DIM
        real = (row < POOLED) & (token >= 0)
        new = (real & (token >= cached))[:, None] & (column < DIM)
        old = (real & (token < cached))[:, None] & (column < DIM)
        x_at = x + (begin + token - cached).to(tl.int64)[:, None] * WIDTH + series[:, None] + column
        state_at = state + (token % POOLED)[:, None] * WIDTH + series[:, None] + column
        value = tl.load(x_at, mask=new, other=0.0).to(tl.float32) + tl.load(state_at, mask=old, other=0.0)
        gate = tl.load(x_at + SERIES * DIM, mask=new, other=0.0).to(tl.float32)
        gate += tl.load(state_at + SERIES * DIM, mask=old, other=0.0)
        bias_at = bias + (row % EVERY * (SERIES * DIM) + series)[:, None] + column
        gate += tl.load(bias_at, mask=(row < POOLED)[:, None] & (column < DIM), other=0.0)
        gate = tl.where(real[:, None], gate * 1.4426950408889634, float("-inf"))
        highest = tl.maximum(peak, tl.max(gate, 0))
        base = tl.where(highest == float("-inf"), 0.0, highest)
        weight = tl.exp2(gate - base[None, :])
        fade = tl.exp2(peak - base)
        total = total * fade + tl.sum(weight, 0)
        sums = sums * fade + tl.sum(weight * value, 0)
        peak = highest
    return sums / total


@triton.jit
def finished(
    value, gain, angles, position, epsilon, DIM: tl.constexpr, BLOCK: tl.constexpr, ROTARY: tl.constexpr
):  # fmt: skip
    """The pooled value normalised, scaled by the gain and rotated."""
    column = tl.arange(0, BLOCK)
    value = value / tl.sqrt(tl.sum(value * value, 0) / DIM + epsilon)
    value *= tl.load(gain + column, mask=column < DIM, other=0.0).to(tl.float32)
    if ROTARY > 0:
        even, odd = tl.split(tl.reshape(value, (BLOCK // 2, 2)))
        turn = tl.arange(0, BLOCK // 2) - (DIM - ROTARY) // 2
        inside = (turn >= 0) & (turn < ROTARY // 2)
        cos = tl.load(angles + position * ROTARY + turn, mask=inside, other=1.0)
        sin = tl.load(angles + position * ROTARY + ROTARY // 2 + turn, mask=inside, other=0.0)
        value = tl.reshape(tl.join(even * cos - odd * sin, odd * cos + even * sin), (BLOCK,))
    return value


@triton.jit
def compress_kernel(
    x, state, bias, gain, angles, table, starts, cached, cache, scales, columns, epsilon,
    DIM: tl.constexpr, BLOCK: tl.constexpr, EVERY: tl.constexpr, SERIES: tl.constexpr, ROTARY: tl.constexpr,
    ROWS: tl.constexpr, PAGE: tl.constexpr,
):  # fmt: skip
    """Entries that need the state and then the state itself (part 0), or one entry further on; state is a ring per sequence."""
    WIDTH: tl.constexpr = 2 * SERIES * DIM
    POOLED: tl.constexpr = SERIES * EVERY
    sequence = tl.program_id(0)
    part = tl.program_id(1)
    before = tl.load(cached + sequence)
    begin = tl.load(starts + sequence)
    tokens = tl.load(starts + sequence + 1) - begin
    ring = state + sequence.to(tl.int64) * (POOLED * WIDTH)
    column = tl.arange(0, BLOCK)
    first = before // EVERY + tl.where(part == 0, 0, part + SERIES - 1)
    last = tl.minimum(before // EVERY + part + SERIES, (before + tokens) // EVERY)
    for block in range(first, last):
        value = pooled(x, ring, bias, block, before, begin, DIM, BLOCK, EVERY, SERIES, ROWS)
        entry = finished(value, gain, angles, block * EVERY, epsilon, DIM, BLOCK, ROTARY)
        page = tl.load(table + sequence * columns + block // PAGE).to(tl.int64)
        if scales is None:
            goal = cache + (page * PAGE + block % PAGE) * DIM + column
            tl.store(goal, entry.to(cache.dtype.element_ty), mask=column < DIM)
        else:
            factor = tl.maximum(tl.max(tl.abs(entry), 0), 1e-6) / 448.0
            goal = cache + page * (PAGE * (DIM + 4)) + block % PAGE * DIM + column
            tl.store(goal, (entry / factor).to(cache.dtype.element_ty), mask=column < DIM)
            tl.store(scales + page * (PAGE * (DIM + 4) // 4) + PAGE * DIM // 4 + block % PAGE, factor)
    if part == 0:
        tl.debug_barrier()
        kept = tl.minimum(tokens, POOLED)
        for start in range(0, kept, ROWS):
            token = tokens - kept + start + tl.arange(0, ROWS)
            inside = (token < tokens)[:, None] & (column < DIM)[None, :]
            x_at = x + (begin + token).to(tl.int64)[:, None] * WIDTH + column[None, :]
            ring_at = ring + ((before + token) % POOLED)[:, None] * WIDTH + column[None, :]
            for series in tl.static_range(2 * SERIES):
                projected = tl.load(x_at + series * DIM, mask=inside, other=0.0)
                tl.store(ring_at + series * DIM, projected.to(tl.float32), mask=inside)


def rows_for(DIM: int, every: int, series: int) -> int:
    """Tokens that a program pools together: those of a block, as far as registers allow."""
    return int(min(power_of_two(series * every), max(1, 4096 >> (DIM - 1).bit_length())))


def compress(
    x: torch.Tensor, state: torch.Tensor, bias: torch.Tensor, gain: torch.Tensor, angles: torch.Tensor, table: torch.Tensor,
    starts: torch.Tensor, cached: torch.Tensor, cache: torch.Tensor, longest: int, page: int, epsilon: float = EPSILON,
) -> None:  # fmt: skip
    """Pools the blocks that new tokens complete into entries of ``cache``, and puts the tokens into ``state``.

    Args:
        x: ``[tokens, 2 s D]``, values and gates of every series; sequences behind each other from ``starts`` (int32
            ``[B + 1]``) on, ``longest`` tokens at most. state: fp32 ``[B, s m, 2 s D]``, token p in row p mod s m.
        bias: fp32 ``[m, s D]``. gain: ``[D]``. angles: of ``rotary.angle_table``, as wide as the rotated part.
        cached: int32 ``[B]``, tokens before this step. table: int32 ``[B, pages]`` of the entries.
        cache: ``[pages, page, D]`` of x's type, or uint8 pages of ``index_keys`` in fp8.

    Raises InputError for arguments that do not fit each other.
    """
    check("x", x, (None, None), FLOATING)
    check("gain", gain, (None,), FLOATING, x)
    check("bias", bias, (None, None), SINGLE, x)
    every, DIM = bias.shape[0], gain.shape[0]
    series = bias.shape[1] // DIM
    if not every or series not in (1, 2) or bias.shape[1] != series * DIM:
        raise InputError(f"bias: shape {tuple(bias.shape)} is not of 1 or 2 series of {DIM} elements per token of a block")
    check("x", x, (None, 2 * series * DIM), FLOATING)
    B = check_starts("starts", starts, len(x), longest, x)
    check("state", state, (B, series * every, 2 * series * DIM), SINGLE, x)
    check("cached", cached, (B,), INT32, x)
    check("angles", angles, (None, None), SINGLE, x)
    check("table", table, (B, None), INT32, x)
    within("page", page, 1)
    if cache.dtype == torch.uint8:
        check("cache", cache, (None, page * (DIM + 4)), (torch.uint8,), x)
    else:
        check("cache", cache, (None, page, DIM), (x.dtype,), x)
    check_indices("table", table, len(cache))
    if readable(starts) and B:
        whole = int((cached + starts.diff()).max())
        if whole // every > table.shape[1] * page or (angles.shape[1] and whole // every * every - every >= len(angles)):
            raise InputError(f"table: a sequence of {whole} tokens has more entries than its pages or the angles have room for")
    if not len(x):
        return
    narrow = cache.dtype == torch.uint8
    stored, scales = (cache.view(torch.float8_e4m3fn), cache.view(torch.float32)) if narrow else (cache, None)
    compress_kernel[(len(cached), parts(longest, every, series))](
        x, state, bias, gain, angles, table, starts, cached, stored, scales, table.shape[1], epsilon,
        DIM=DIM, BLOCK=power_of_two(DIM), EVERY=every, SERIES=series, ROTARY=angles.shape[1],
        ROWS=rows_for(DIM, every, series), PAGE=page, num_warps=4 if DIM <= 512 else 8,
    )  # fmt: skip


def parts(longest: int, every: int, series: int) -> int:
    """Programs of a sequence: one for the entries that the state can reach, one for each that may follow."""
    return int(1 + max(0, ceil_div(longest, every) - series))


@dataclass(frozen=True)
class Pooling(Case):
    """Sequences of (new tokens, cached tokens); entries of ``dim`` elements, ``rotary`` of them turned, one per ``every`` tokens.

    ``index``: entries are an indexer's keys, in fp8.
    """

    batch: tuple[tuple[int, int], ...]
    dim: int
    every: int
    overlap: bool
    rotary: int = 0
    page: int = 16
    index: bool = False

    @property
    def precision(self) -> str:
        return "fp8" if self.index else self.dtype

    @property
    def series(self) -> int:
        """Series of projections."""
        return 2 if self.overlap else 1

    @property
    def width(self) -> int:
        """Projected elements per token."""
        return 2 * self.series * self.dim

    @property
    def ring(self) -> int:
        """Tokens that the state holds."""
        return self.series * self.every

    def blocks(self, T: int, S: int) -> range:
        """Blocks that a sequence completes."""
        return range(S // self.every, (S + T) // self.every)


def inputs(case: Pooling, device: str) -> Tensors:
    """Projections, a state as earlier steps left it (NaN where no token was), learned tensors, pages for the entries."""
    source, B = Source(case.name, device), len(case.batch)
    starts = [sum(T for T, _ in case.batch[:index]) for index in range(B + 1)]
    entries = max(1, *((S + T) // case.every for T, S in case.batch))
    widest = ceil_div(entries, case.page)
    state = source.normal(B, case.ring, case.width, dtype="fp32")
    if device != "meta":
        for index, (_, S) in enumerate(case.batch):
            state[index, S:] = float("nan")
    kind = torch.uint8 if case.index else TYPES[case.dtype].torch
    shape = (case.page * (case.dim + 4),) if case.index else (case.page, case.dim)
    return {
        "x": source.normal(starts[-1], case.width, dtype=case.dtype), "state": state,
        "bias": source.normal(case.every, case.series * case.dim, dtype="fp32"),
        "gain": source.normal(case.dim, dtype=case.dtype),
        "angles": angle_table(entries * case.every, case.rotary, device=device),
        "table": source.permutation(B * widest + 2)[: B * widest].view(B, widest), "starts": source.integers(starts),
        "cached": source.integers([S for _, S in case.batch]),
        "cache": buffers.empty(B * widest + 2, *shape, dtype=kind, device=torch.device(device)),
        "longest": max(T for T, _ in case.batch), "page": case.page,
    }  # fmt: skip


def entry(case: Pooling, values: torch.Tensor, gates: torch.Tensor, tensors: Tensors, position: int) -> torch.Tensor:
    """One entry of values and biased gates ``[tokens, D]``, in float64."""
    value = (torch.softmax(gates, 0) * values).sum(0)
    value = value / torch.sqrt(value.square().mean() + EPSILON) * tensors["gain"].double()
    even, odd = value[case.dim - case.rotary :].unflatten(0, (-1, 2)).unbind(1)
    cos, sin = tensors["angles"][position].double().chunk(2)
    turned = torch.stack([even * cos - odd * sin, odd * cos + even * sin], 1).flatten()
    return torch.cat([value[: case.dim - case.rotary], turned])


def reference(case: Pooling, tensors: Tensors) -> Tensors:
    """Block by block over all tokens, state and new ones, in float64; new entries of all sequences behind each other."""
    entries, state = [torch.empty(0, case.dim, dtype=torch.float64)], tensors["state"].double().clone()
    for index, (T, S) in enumerate(case.batch):
        start = int(tensors["starts"][index])
        x = tensors["x"][start : start + T].double()
        tokens = {p: state[index, p % case.ring].clone() for p in range(max(0, S - case.ring), S)}
        tokens |= {S + offset: x[offset] for offset in range(T)}
        for block in case.blocks(T, S):
            values, gates = [], []
            for token in range(max(0, (block - case.series + 1) * case.every), (block + 1) * case.every):
                series = case.series - 1 - (block - token // case.every)
                columns = slice(series * case.dim, (series + 1) * case.dim)
                value, gate = tokens[token].chunk(2)
                values.append(value[columns])
                gates.append(gate[columns] + tensors["bias"][token % case.every, columns].double())
            made = entry(case, torch.stack(values), torch.stack(gates), tensors, block * case.every)
            entries.append(made[None])
        for offset in range(T):
            state[index, (S + offset) % case.ring] = x[offset]
    return {"entries": torch.cat(entries), "state": state}


def launch(case: Pooling, tensors: Tensors) -> Tensors:
    """The Triton kernel, on copies of what it changes; of its entries the new ones."""
    state = tensors["state"].clone()
    cache = buffers.empty(*tensors["cache"].shape, dtype=tensors["cache"].dtype, device=tensors["cache"].device)
    compress(**{**tensors, "state": state, "cache": cache})
    if case.index:
        cache = dequantise(*from_pages(cache, case.page, case.dim, "fp8"), "fp8")
    made = [(index, block) for index, (T, S) in enumerate(case.batch) for block in case.blocks(T, S)]
    index, block = torch.tensor(made, dtype=torch.long, device=state.device).view(-1, 2).unbind(1)
    pages = tensors["table"].long()[index, block // case.page]
    return {"entries": cache[pages, block % case.page], "state": state}


def expected(case: Pooling, tensors: Tensors) -> Expected:
    """New projections once in each entry that pools them and once on their way into the state; learned tensors per entry."""
    fmt, B = TYPES[case.dtype].format, len(case.batch)
    layout = ((case.dim, INDEX["fp8"].format if case.index else fmt),)
    name = "index" if case.index else "compressed"
    component = CompressWrite(case.dim, case.every, case.overlap, case.rotary, layout, fmt, name)
    cost = component.cost(Ragged(tuple(Work(1, T, S) for T, S in case.batch)))
    made = [(index, block) for index, (T, S) in enumerate(case.batch) for block in case.blocks(T, S)]
    kept = sum(min(T, case.ring) for T, _ in case.batch)
    programs = B * parts(max(T for T, _ in case.batch), case.every, case.series)
    row, biases, gains = 2 * 4 * case.dim, 4 * case.every * case.series * case.dim, fmt.bytes(case.dim)
    taken = cost.read["state"] // row
    missing = case.every * (case.series - 1) * sum(block == 0 for _, block in made)
    fresh = case.ring * len(made) - taken - missing
    entries, learned, turned = len(made) * sum(kind.bytes(n) for n, kind in layout), 1 if made else 0, 4 * case.rotary
    waiting = 4 * case.width * kept
    moved = {
        "x": Moved("activations", cost.read["activations"], 0, fmt.bytes(2 * case.dim) * fresh + fmt.bytes(case.width) * kept),
        "state": Moved("state", cost.read["state"], waiting),
        "bias": Moved("weights", biases * learned, 0, biases * len(made)),
        "gain": Moved("weights", gains * learned, 0, gains * len(made)),
        "angles": Moved("", turned * len({block for _, block in made}), 0, turned * len(made)),
        "table": Moved("", 4 * len({(index, block // case.page) for index, block in made}), 0, 4 * len(made)),
        "starts": Moved("", 4 * (B + 1), 0, 8 * programs),
        "cached": Moved("", 4 * B, 0, 4 * programs),
        "cache": Moved("index" if case.index else "state", written=entries),
    }
    return Expected(cost, {"compress_kernel": Launch(programs, moved)})


CASES = (
    Pooling("prefill", "bf16", ((23, 0), (4, 0), (3, 0)), 40, 4, True, 8, page=4),
    Pooling("chunk", "bf16", ((9, 5), (7, 3), (1, 11), (30, 16)), 24, 3, True, 6, page=2),
    Pooling("decode", "bf16", ((1, 15), (1, 7), (1, 3), (1, 2), (1, 0)), 64, 4, True, 16),
    Pooling("half", "fp16", ((14, 2),), 20, 5, True, page=3),
    Pooling("single", "fp32", ((5, 6), (12, 1)), 36, 2, True, 4, page=4),
    Pooling("index-keys", "bf16", ((13, 2), (1, 3)), 128, 4, True, 64, page=4, index=True),
)
TOLERANCE = {
    "bf16": Tolerance(3e-3, "pooled in fp32, entries rounded once to bf16; the state is exact"),
    "fp16": Tolerance(4e-4, "pooled in fp32, entries rounded once to fp16; the state is exact"),
    "fp32": Tolerance(1e-6, "fp32 sums in another order, exp2 in place of exp"),
    "fp8": Tolerance(3e-2, "entries are rounded to fp8, three bits behind the point"),
}
BUILDS = (
    Build(Pooling("v4-prefill", "bf16", ((8192, 0),), 512, 4, True, 64, page=64), targets=EVERYWHERE),
    Build(Pooling("v4-index", "bf16", ((8192, 0),), 128, 4, True, 64, page=64, index=True)),
)
MEASURED = (
    Pooling("v4-prefill-8k", "bf16", ((8192, 0),) * 2, 512, 4, True, 64, page=64),
    Pooling("v4-decode-128", "bf16", ((1, 4095),) * 128, 512, 4, True, 64, page=64),
)
SPEC = Spec(
    "csa_compress", "CompressWrite", CASES, inputs, reference, launch, expected, TOLERANCE, BUILDS, MEASURED,
    timed=lambda case, tensors: compress(**tensors),
)  # fmt: skip
