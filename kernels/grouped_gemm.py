"""The matmuls of a mixture of experts in one kernel: each expert's weight times the rows that were routed to it.

Rows stand in the order of their experts (``moe_permute.sort``), or are gathered from the tokens on the way. The host does
not know how many rows an expert has: as many programs start as the least even routing could need, each finds its expert
from the offsets, and those that find none end. Weights are 16-bit, fp8 with a scale per 128x128 block (activations per
1x128), or MXFP4, widened to 16 bits in registers. Gated: ``silu(x @ gate) * (x @ up)`` of a weight that holds gate rows,
then up rows; only the product is written.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl

from roofline.components.feedforward import ACTIVATION_FLOPS
from roofline.components.moe import GroupedLinear
from roofline.cost import Cost
from roofline.errors import InputError
from roofline.formats import FORMATS, FP8, Format
from roofline.kernels import buffers
from roofline.kernels.arguments import FLOATING, INT32, SINGLE, check, check_indices, check_starts, check_tile, within
from roofline.kernels.device import Device, current, of
from roofline.kernels.gemm_fp8_block import spread_blocks
from roofline.kernels.microscaling import BLOCK, MXFP4, pack, unpack, widen_blocks, widen_e8m0
from roofline.kernels.moe_permute import routing
from roofline.kernels.quantize_fp8 import GROUP
from roofline.kernels.spec import EVERYWHERE, Build, Case, Expected, Launch, Moved, Spec, Tensors, Tolerance
from roofline.kernels.tiling import Tiles, power_of_two
from roofline.kernels.types import NAMES, TYPES, Source
from roofline.numeric import ceil_div
from roofline.work import Work


@triton.jit
def find(offsets, tile, E, BM: tl.constexpr, EP: tl.constexpr):
    """The expert of a tile of BM rows, the tile's first row, and where the expert's rows end; past the last tile, EP."""
    expert = tl.arange(0, EP)
    begin = tl.load(offsets + expert, mask=expert < E, other=0)
    end = tl.load(offsets + expert + 1, mask=expert < E, other=0)
    tiles = (end - begin + BM - 1) // BM
    last = tl.cumsum(tiles, 0)
    mine = tl.sum((last <= tile).to(tl.int32), 0)
    here = expert == mine
    first = tl.sum(tl.where(here, begin + (tile - last + tiles) * BM, 0), 0)
    return mine, first, tl.sum(tl.where(here, end, 0), 0)


@triton.jit
def weight_tile(
    weight, scales, rows, real, k, K, BN: tl.constexpr, BK: tl.constexpr, FOUR: tl.constexpr, BLOCK: tl.constexpr,
    WHOLE_K: tl.constexpr, kind: tl.constexpr,
):  # fmt: skip
    """``[BK, BN]`` of an expert's weight ``[N, K]``, from row ``rows`` and column k on; of four bits where FOUR."""
    if FOUR:
        byte, block = k // 2 + tl.arange(0, BK // 2), k // BLOCK + tl.arange(0, BK // BLOCK)
        in_bytes, in_blocks = real[:, None] & (byte < K // 2)[None, :], real[:, None] & (block < K // BLOCK)[None, :]
        packed = tl.load(weight + rows[:, None].to(tl.int64) * (K // 2) + byte[None, :], mask=in_bytes, other=0)
        power = tl.load(scales + rows[:, None].to(tl.int64) * (K // BLOCK) + block[None, :], mask=in_blocks, other=0)
        tile = tl.trans(widen_blocks(packed, widen_e8m0(power), BN, BK, BLOCK).to(kind))
    else:
        inner = k + tl.arange(0, BK)
        at = weight + rows[None, :].to(tl.int64) * K + inner[:, None]
        if WHOLE_K:
            tile = tl.load(at, mask=real[None, :], other=0.0)
        else:
            tile = tl.load(at, mask=real[None, :] & (inner < K)[:, None], other=0.0)
    return tile


@triton.jit
def grouped_gemm_kernel(
    x, x_scales, weight, w_scales, order, offsets, out, E, N, K,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, EP: tl.constexpr, PICKED: tl.constexpr, GATED: tl.constexpr,
    FOUR: tl.constexpr, BLOCK: tl.constexpr, WHOLE_K: tl.constexpr,
):  # fmt: skip
    """One tile of one expert's rows; N counts the columns that are stored, half of a gated weight's rows."""
    columns = tl.cdiv(N, BN)
    expert, first, stop = find(offsets, tl.program_id(0) // columns, E, BM, EP)
    if expert >= E:
        return
    column = tl.program_id(0) % columns
    row = first + tl.arange(0, BM)
    real = row < stop
    source = row if order is None else tl.load(order + row, mask=real, other=0) // PICKED
    wide = column * BN + tl.arange(0, BN)
    inside = wide < N
    blocks = tl.cdiv(K, BK)
    held = 2 * N if GATED else N
    whose = expert.to(tl.int64)
    per_row = K // 2 if FOUR else K
    mine = weight + whose * held * per_row
    if FOUR:
        scales = w_scales + whose * held * (K // BLOCK)
    elif w_scales is not None:
        scales = w_scales + whose * tl.cdiv(held, BK) * blocks + column * BN // BK * blocks
    else:
        scales = w_scales
    up_scales = scales
    if GATED and FOUR:
        up_scales = scales + N.to(tl.int64) * (K // BLOCK)
    elif GATED and w_scales is not None:
        up_scales = scales + N // BK * blocks
    inner = tl.arange(0, BK)
    x_at = x + source[:, None].to(tl.int64) * K + inner[None, :]
    main = tl.zeros((BM, BN), tl.float32)
    up = tl.zeros((BM, BN), tl.float32)
    for k in range(0, K, BK):
        if WHOLE_K:
            tile = tl.load(x_at, mask=real[:, None], other=0.0)
        else:
            tile = tl.load(x_at, mask=real[:, None] & (k + inner < K)[None, :], other=0.0)
        kind: tl.constexpr = x.dtype.element_ty
        w = weight_tile(mine, scales, wide, inside, k, K, BN, BK, FOUR, BLOCK, WHOLE_K, kind)
        if x_scales is None:
            main = tl.dot(tile, w, main, input_precision="ieee")
        else:
            factor = tl.load(x_scales + source.to(tl.int64) * blocks + k // BK, mask=real, other=0.0)
            main += tl.dot(tile, w) * (factor * tl.load(scales + k // BK))[:, None]
        if GATED:
            w = weight_tile(mine + N.to(tl.int64) * per_row, up_scales, wide, inside, k, K, BN, BK, FOUR, BLOCK, WHOLE_K, kind)
            if x_scales is None:
                up = tl.dot(tile, w, up, input_precision="ieee")
            else:
                up += tl.dot(tile, w) * (factor * tl.load(up_scales + k // BK))[:, None]
        x_at += BK
    if GATED:
        main = main / (1.0 + tl.exp(-main)) * up
    at = out + row[:, None].to(tl.int64) * N + wide[None, :]
    tl.store(at, main.to(out.dtype.element_ty), mask=real[:, None] & inside[None, :])


def choose(rows: int, E: int, N: int, K: int, storage: str, gated: bool, device: Device) -> Tiles:
    """Tiles by the rows that an expert has on average, the weight's storage and the device; small ones as in ``gemm``."""
    each = ceil_div(rows, E)
    roomy = device.shared >= 200_000
    if storage == "fp32":
        return Tiles(16, 32, 32, stages=1)
    if K % 16:
        if storage == "fp8":
            return Tiles(16 if gated or each <= 32 else 64, 32, GROUP, warps=8, stages=3)
        return Tiles(16 if each <= 16 else 32 if each <= 32 else 64 if each <= 64 else 128, 64, 32, warps=4 if each <= 32 else 8)
    BK = GROUP if storage == "fp8" else 128 if storage == "mxfp4" and K % 128 == 0 else 64
    if each <= 32:
        return Tiles(16 if each <= 16 else 32, 64, BK, stages=4 if roomy else 2)
    if each <= 64 or storage == "mxfp4" or not roomy:
        return Tiles(64, 64, BK if storage == "fp8" else 64, stages=3 if roomy else 2)
    return Tiles(128, 64 if gated and storage == "fp8" else 128, BK, warps=8, stages=3 if gated else 4)


def most_tiles(rows: int, E: int, BM: int) -> int:
    """Tiles of BM rows that the least even routing needs: as many experts as can have a row, one that has the rest."""
    hit = min(rows, E)
    return hit + (rows - hit) // BM


def grouped_gemm(
    x: torch.Tensor, weight: torch.Tensor, offsets: torch.Tensor, order: torch.Tensor | None = None, picked: int = 1,
    x_scales: torch.Tensor | None = None, w_scales: torch.Tensor | None = None, gated: bool = False,
    out_dtype: torch.dtype | None = None, tiles: Tiles | None = None,
) -> torch.Tensor:  # fmt: skip
    """``[rows, N]``, or ``[rows, N / 2]`` gated: rows ``offsets[e]`` to ``offsets[e + 1]`` times the weight of expert e.

    Args:
        x: ``[rows, K]`` in the order of experts; with ``order [rows]``, tokens ``[T, K]``: row r is token ``order[r] // picked``.
        weight: ``[E, N, K]`` of x's type; e4m3 codes with ``x_scales [.., ceil(K / 128)]`` and ``w_scales
            [E, ceil(N / 128), ceil(K / 128)]``; or uint8 ``[E, N, K / 2]`` in MXFP4 with ``w_scales [E, N, K / 32]``.
        offsets: int32 ``[E + 1]``. out_dtype: by default x's, bf16 for codes.

    Raises InputError for arguments that do not fit each other, and where a gated fp8 weight's halves share a block.
    """
    four, eight = weight.dtype == torch.uint8, x_scales is not None
    code = torch.float8_e4m3fn
    check("x", x, (None, None), (code,) if eight else FLOATING)
    tokens, K = x.shape
    check("weight", weight, (None, None, K // 2 if four else K), (torch.uint8 if four else x.dtype,), x)
    E, held = weight.shape[:2]
    N = held // 2 if gated else held
    rows = tokens if order is None else len(order)
    within("picked", picked, 1)
    check("order", order, (None,), INT32, x)
    check_indices("order", order, tokens * picked)
    check("x_scales", x_scales, (tokens, ceil_div(K, GROUP)), SINGLE, x)
    if check_starts("offsets", offsets, rows, None, x) != E:
        raise InputError(f"offsets: {len(offsets)} of them for {E} experts; pass one more than there are experts")
    if (w_scales is None) == (four or eight) or (four and (eight or K % BLOCK)) or (gated and held % 2):
        raise InputError(f"weight: {weight.dtype} {tuple(weight.shape)} does not fit its scales, or gates in pairs")
    blocks = (E, held, K // BLOCK) if four else (E, ceil_div(held, GROUP), ceil_div(K, GROUP))
    check("w_scales", w_scales, blocks, (torch.uint8,) if four else SINGLE, x)
    out = buffers.empty(rows, N, dtype=out_dtype or (torch.bfloat16 if eight else x.dtype), device=x.device)
    if not rows * N:
        return out
    storage = "mxfp4" if four else NAMES[weight.dtype]
    cut = tiles or choose(rows, E, N, K, storage, gated, of(x))
    if eight and (cut.BK != GROUP or GROUP % cut.BN or (gated and N % GROUP)):
        raise InputError(
            f"tiles: blocks of {GROUP}: {cut.BN} columns, steps of {cut.BK}, {'gated ' if gated else ''}{N} rows do not fit"
        )
    check_tile("tiles", cut.warps, (2 if gated else 1) * cut.BM * cut.BN, BM=cut.BM, BN=cut.BN, BK=cut.BK)
    grid = most_tiles(rows, E, cut.BM) * ceil_div(N, cut.BN)
    grouped_gemm_kernel[(grid,)](
        x, x_scales, weight, w_scales, order, offsets, out, E, N, K, BM=cut.BM, BN=cut.BN, BK=cut.BK, EP=power_of_two(E),
        PICKED=picked, GATED=gated, FOUR=four, BLOCK=BLOCK, WHOLE_K=K % cut.BK == 0, num_warps=cut.warps, num_stages=cut.stages,
    )  # fmt: skip
    return out


@dataclass(frozen=True)
class Experts(Case):
    """``T`` tokens, ``k`` of ``E`` experts each, weights of ``K`` inputs and ``N`` stored outputs.

    ``weight``: "same" as the activations, "fp8" (activations, too) or "mxfp4"; ``gathers``: x holds tokens, not rows.
    """

    T: int
    k: int
    E: int
    N: int
    K: int
    weight: str = "same"
    gated: bool = False
    gathers: bool = True
    busy: int | None = None
    tiles: Tiles | None = None

    @property
    def rows(self) -> int:
        """Rows of all experts."""
        return self.T * self.k

    @property
    def held(self) -> int:
        """Rows of one weight."""
        return 2 * self.N if self.gated else self.N

    @property
    def storage(self) -> str:
        """The weight's elements."""
        return self.dtype if self.weight == "same" else self.weight

    @property
    def cut(self) -> Tiles:
        """The tiles of its launch."""
        return self.tiles or choose(self.rows, self.E, self.N, self.K, self.storage, self.gated, current())

    @property
    def formats(self) -> tuple[Format, Format]:
        """Storage of weights and of x: with scales where all blocks are whole, so that the formats' bits per element hold."""
        if self.weight == "same":
            return TYPES[self.dtype].format, TYPES[self.dtype].format
        if self.weight == "mxfp4":
            return MXFP4, TYPES[self.dtype].format
        whole = self.K % GROUP == 0
        return FORMATS["fp8-block"] if whole and self.held % GROUP == 0 else FP8, FORMATS["fp8-token"] if whole else FP8


def inputs(case: Experts, device: str) -> Tensors:
    """Tokens (or rows), weights scaled so that products stay near 1, and a routing in the sorted order.

    Offsets have values on the meta device, too: what is expected follows from them.
    """
    source, scale = Source(case.name, device), case.K**-0.5
    flat = routing(source, case.T, case.E, case.k, case.busy).flatten().long()
    order = flat.argsort(stable=True).to(torch.int32).to(device)
    ends = torch.bincount(flat, minlength=case.E).cumsum(0)
    offsets = torch.nn.functional.pad(ends, (1, 0)).to(torch.int32).to("cpu" if device == "meta" else device)
    rows, blocks = case.T if case.gathers else case.rows, ceil_div(case.K, GROUP)
    shape = (case.E, case.held)
    x_scales = w_scales = None
    if case.weight == "fp8":
        x = source.normal(rows, case.K, dtype="fp8")
        weight = source.normal(*shape, case.K, dtype="fp8", scale=16)
        x_scales = 0.5 + source.uniform(rows, blocks)
        w_scales = (0.5 + source.uniform(case.E, ceil_div(case.held, GROUP), blocks)) * (scale / 16)
    elif case.weight == "mxfp4":
        x = source.normal(rows, case.K, dtype=case.dtype)
        weight, w_scales = pack(source.normal(*shape, case.K, dtype="bf16", scale=scale)) if device == "cpu" else (
            torch.randint(0, 256, (*shape, case.K // 2), dtype=torch.uint8, device=device),
            torch.full((*shape, case.K // BLOCK), 120, dtype=torch.uint8, device=device),
        )  # fmt: skip
    else:
        x = source.normal(rows, case.K, dtype=case.dtype)
        weight = source.normal(*shape, case.K, dtype=case.dtype, scale=scale)
    return {
        "x": x, "weight": weight, "offsets": offsets, "order": order if case.gathers else None,
        "x_scales": x_scales, "w_scales": w_scales,
    }  # fmt: skip


def reference(case: Experts, tensors: Tensors) -> Tensors:
    """Expert by expert in float64, of what codes stand for."""
    x, weight = tensors["x"].double(), tensors["weight"]
    if case.weight == "fp8":
        x = x * tensors["x_scales"].double().repeat_interleave(GROUP, 1)[:, : case.K]
        weight = weight.double() * spread_blocks(tensors["w_scales"], case.held, case.K).double()
    elif case.weight == "mxfp4":
        weight = unpack(weight, tensors["w_scales"])
    if case.gathers:
        x = x[tensors["order"].long() // case.k]
    bounds = tensors["offsets"].tolist()
    parts = [x[bounds[e] : bounds[e + 1]] @ weight[e].double().T for e in range(case.E)]
    product = torch.cat(parts)
    if not case.gated:
        return {"out": product}
    gate, up = product.chunk(2, dim=1)
    return {"out": gate / (1 + torch.exp(-gate)) * up}


def launch(case: Experts, tensors: Tensors) -> Tensors:
    """The Triton kernel."""
    return {"out": grouped_gemm(**tensors, picked=case.k, gated=case.gated, tiles=case.tiles)}


def useful(case: Experts, counts: tuple[int, ...]) -> Cost:
    """The component's Cost under the realised routing: inputs in their formats, outputs in 16 bits for 8-bit inputs."""
    weight, activation = case.formats
    result = TYPES["bf16" if case.weight == "fp8" else case.dtype].format
    epilogue = ACTIVATION_FLOPS + 1 if case.gated else 0

    def cost(fmt: Format) -> Cost:
        return GroupedLinear(
            case.K, case.held, case.E, case.k, weight=weight, activation=fmt, stored=case.N if case.gated else None,
            epilogue=epilogue, gathers=case.gathers, counts=counts,
        ).cost(Work(1, case.T))  # fmt: skip

    read, written = cost(activation), cost(result)
    return Cost(dict(read.flops), dict(read.read), dict(written.write), 1)


def expected(case: Experts, tensors: Tensors) -> Expected:
    """Weights once per tile of an expert's rows, rows once per column of tiles, offsets by every program.

    Scales of blocks that an edge cuts belong to the launch: a format counts whole blocks.
    """
    bounds = tensors["offsets"].tolist()
    counts = tuple(end - begin for begin, end in itertools.pairwise(bounds))
    cut, cost, hit = case.cut, useful(case, counts), sum(1 for rows in counts if rows)
    tiles, columns = sum(ceil_div(rows, cut.BM) for rows in counts), ceil_div(case.N, cut.BN)
    steps, blocks = ceil_div(case.K, cut.BK), ceil_div(case.K, GROUP)
    programs = most_tiles(case.rows, case.E, cut.BM) * columns
    element = TYPES["fp8" if case.weight == "fp8" else case.dtype].format
    weights = case.held * (case.K // 2 if case.weight == "mxfp4" else element.bytes(case.K))
    rows = case.T if case.gathers else case.rows
    moved = {
        "x": Moved("activations", read=element.bytes(rows * case.K), requested=element.bytes(case.rows * case.K) * columns),
        "weight": Moved("weights", read=hit * weights, requested=tiles * weights),
        "offsets": Moved("", read=4 * (case.E + 1), requested=8 * case.E * programs),
        "out": Moved("activations", written=cost.write["activations"]),
    }
    if case.gathers:
        moved["order"] = Moved("", read=4 * case.rows, requested=4 * case.rows * columns)
    if case.weight == "mxfp4":
        scales = case.held * (case.K // BLOCK)
        moved["w_scales"] = Moved("weights", read=hit * scales, requested=tiles * scales)
    if case.weight == "fp8":
        scales, whole = 4 * ceil_div(case.held, GROUP) * blocks, [fmt is not FP8 for fmt in case.formats]
        requested = 4 * tiles * columns * blocks * (2 if case.gated else 1)
        moved["w_scales"] = Moved("weights" if whole[0] else "", read=hit * scales, requested=requested)
        one = 4 * blocks
        moved["x_scales"] = Moved("activations" if whole[1] else "", read=one * rows, requested=one * case.rows * columns)
    executed = (4 if case.gated else 2) * tiles * cut.BM * columns * cut.BN * steps * cut.BK
    kernels = {"grouped_gemm_kernel": Launch(programs, moved)}
    dot = TYPES["fp8" if case.weight == "fp8" else case.dtype].triton
    return Expected(cost, kernels, dot, executed, lambda: 2 * case.rows * case.held * case.K)


def library(case: Experts, tensors: Tensors) -> Any:
    """torch's grouped matmul behind a gather, the activation after it; 16-bit weights and rows at multiples of 16 bytes only."""
    if case.weight != "same" or case.K % 8 or case.held % 8 or not hasattr(torch.nn.functional, "grouped_mm"):
        return None
    x, weight, ends = tensors["x"], tensors["weight"].transpose(1, 2), tensors["offsets"][1:]

    def run() -> torch.Tensor:
        rows = x[tensors["order"].long() // case.k] if case.gathers else x
        product = torch.nn.functional.grouped_mm(rows, weight, offs=ends)
        if not case.gated:
            return product
        gate, up = product.chunk(2, dim=1)
        return torch.nn.functional.silu(gate) * up

    return run


SMALL, BLOCKS = Tiles(16, 32, 32), Tiles(16, 64, GROUP)
CASES = (
    Experts("chosen", "bf16", 16, 2, 5, 72, 104),
    Experts("ragged", "bf16", 15, 3, 7, 50, 90, tiles=SMALL),
    Experts("gated", "bf16", 19, 2, 6, 40, 72, gated=True, tiles=SMALL),
    Experts("sorted-rows", "fp16", 23, 3, 8, 64, 96, gathers=False, tiles=SMALL),
    Experts("idle-experts", "bf16", 13, 2, 12, 33, 48, busy=3, tiles=SMALL),
    Experts("one-token", "bf16", 1, 4, 9, 65, 70, gated=True, tiles=SMALL),
    Experts("one-expert", "fp32", 17, 1, 1, 48, 40, gated=True, tiles=SMALL),
    Experts("fp8", "bf16", 15, 2, 4, 200, 300, "fp8", tiles=BLOCKS),
    Experts("fp8-gated", "bf16", 18, 2, 3, 128, 256, "fp8", gated=True, tiles=BLOCKS),
    Experts("fp8-rows", "bf16", 11, 3, 4, 256, 128, "fp8", gathers=False, tiles=BLOCKS),
    Experts("mxfp4", "bf16", 20, 2, 5, 45, 96, "mxfp4", tiles=Tiles(16, 32, 64)),
    Experts("mxfp4-gated", "bf16", 13, 4, 6, 40, 160, "mxfp4", gated=True, tiles=Tiles(16, 32, 64)),
)
TOLERANCE = {
    "bf16": Tolerance(3e-3, "products exact in fp32, sums and activation in fp32; rounded once to bf16"),
    "fp16": Tolerance(4e-4, "sums in fp32, rounded once to fp16"),
    "fp32": Tolerance(1e-6, "sums of fp32 products in another order"),
}
QWEN3, GPT_OSS = (128, 768, 2048), (128, 2880, 2880)


def unit(name: str) -> dict[str, str]:
    """The matrix instruction that the kernel must use."""
    return {"grouped_gemm_kernel": name}


BUILDS = (
    Build(Experts("qwen3-prefill", "bf16", 8192, 8, *QWEN3, gated=True), unit("HGMMA"), (), EVERYWHERE),
    Build(Experts("qwen3-decode", "bf16", 128, 8, *QWEN3, gated=True), unit("HMMA")),
    Build(Experts("fp8-prefill", "bf16", 8192, 8, *QWEN3, "fp8", gated=True), unit("QGMMA")),
    Build(Experts("fp8-down", "bf16", 8192, 8, 128, 2048, 768, "fp8", gathers=False), unit("QGMMA")),
    Build(Experts("ragged", "bf16", 4000, 2, 4, 200, 301, gated=True), unit("HGMMA")),
    Build(Experts("fp8-ragged", "bf16", 4000, 2, 4, 200, 300, "fp8"), unit("QGMMA")),
    Build(Experts("gpt-oss-prefill", "bf16", 8192, 4, *GPT_OSS, "mxfp4", gated=True), unit("HGMMA")),
    Build(Experts("gpt-oss-decode", "bf16", 64, 4, *GPT_OSS, "mxfp4", gated=True), unit("HMMA")),
)
MEASURED = (
    Experts("qwen3-prefill", "bf16", 8192, 8, *QWEN3, gated=True),
    Experts("qwen3-decode-fp8", "bf16", 128, 8, *QWEN3, "fp8", gated=True),
    Experts("gpt-oss-decode", "bf16", 64, 4, *GPT_OSS, "mxfp4", gated=True),
)
SPEC = Spec(
    "grouped_gemm", "GroupedLinear", CASES, inputs, reference, launch, expected, TOLERANCE, BUILDS, MEASURED, library
)  # fmt: skip
