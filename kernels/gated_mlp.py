"""The first half of a gated feed-forward block in one kernel: ``silu(x @ gate) * (x @ up)``.

Both products share each tile of x, and neither reaches memory: only their gated product is written. The second half, the
down projection, is a plain ``gemm``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl

from roofline.components.feedforward import MLP
from roofline.errors import InputError
from roofline.kernels import buffers
from roofline.kernels.arguments import FLOATING, check, check_tile
from roofline.kernels.device import Device, current, of
from roofline.kernels.gemm import gemm
from roofline.kernels.spec import EVERYWHERE, Build, Case, Expected, Launch, Moved, Spec, Tensors, Tolerance
from roofline.kernels.tiling import Tiles, place, power_of_two
from roofline.kernels.types import NAMES, TYPES, Source
from roofline.numeric import ceil_div
from roofline.work import Work


@triton.jit
def gated_mlp_kernel(
    x, weight, out, M, F, K, x_row, w_row,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, GROUP: tl.constexpr, WHOLE_K: tl.constexpr,
):  # fmt: skip
    """One tile of the gated product; weight is [2 F, K], gate rows first."""
    row, column = place(tl.program_id(0), tl.cdiv(M, BM), tl.cdiv(F, BN), GROUP)
    rows = row * BM + tl.arange(0, BM)
    columns = column * BN + tl.arange(0, BN)
    inner = tl.arange(0, BK)
    x_at = x + rows[:, None].to(tl.int64) * x_row + inner[None, :]
    gate_at = weight + inner[:, None] + columns[None, :].to(tl.int64) * w_row
    up_at = weight + inner[:, None] + (columns + F)[None, :].to(tl.int64) * w_row
    gate = tl.zeros((BM, BN), tl.float32)
    up = tl.zeros((BM, BN), tl.float32)
    for k in range(0, K, BK):
        if WHOLE_K:
            tile = tl.load(x_at, mask=rows[:, None] < M, other=0.0)
            w_gate = tl.load(gate_at, mask=columns[None, :] < F, other=0.0)
            w_up = tl.load(up_at, mask=columns[None, :] < F, other=0.0)
        else:
            left = k + inner < K
            tile = tl.load(x_at, mask=(rows[:, None] < M) & left[None, :], other=0.0)
            w_gate = tl.load(gate_at, mask=left[:, None] & (columns[None, :] < F), other=0.0)
            w_up = tl.load(up_at, mask=left[:, None] & (columns[None, :] < F), other=0.0)
        gate = tl.dot(tile, w_gate, gate, input_precision="ieee")
        up = tl.dot(tile, w_up, up, input_precision="ieee")
        x_at += BK
        gate_at += BK
        up_at += BK
    product = gate / (1.0 + tl.exp(-gate)) * up
    inside = (rows[:, None] < M) & (columns[None, :] < F)
    tl.store(out + rows[:, None].to(tl.int64) * F + columns[None, :], product.to(out.dtype.element_ty), mask=inside)


def choose(M: int, F: int, K: int, dtype: str, device: Device) -> Tiles:
    """Tiles by shape, operand type and device: two accumulators halve the columns that ``gemm`` takes."""
    if dtype == "fp32":
        return Tiles(32, 32, 16 if K % 16 else 32, warps=4, stages=2)
    if M <= 32:
        narrow = 16 if ceil_div(F, 32) < device.units else 32
        return Tiles(power_of_two(M, 16), narrow, 128, warps=4, stages=3)
    if K % 16:
        return Tiles(64 if M <= 64 else 128, 64, 32, warps=8, stages=4)
    if M <= 64 or ceil_div(M, 128) * ceil_div(F, 128) < device.units:
        return Tiles(64, 64, 64, warps=4, stages=4 if device.shared >= 200_000 else 2)
    if device.shared < 200_000:
        return Tiles(128, 64, 64 if device.shared > 100_000 else 32, warps=8, stages=2)
    return Tiles(128, 128, 64, warps=8, stages=4)


def gate_up(x: torch.Tensor, weight: torch.Tensor, tiles: Tiles | None = None) -> torch.Tensor:
    """``silu(x @ gate.T) * (x @ up.T)`` for ``x [M, K]`` and ``weight [2 F, K]`` (gate rows, then up rows).

    Rows may lie apart, elements of a row may not. Raises InputError for arguments that do not fit each other.
    """
    check("x", x, (None, None), FLOATING, strides="rows")
    M, K = x.shape
    check("weight", weight, (None, K), (x.dtype,), x, strides="rows")
    F = weight.shape[0] // 2
    if weight.shape[0] != 2 * F:
        raise InputError(f"weight: {weight.shape[0]} rows are not as many of the gate as of the other half")
    out = buffers.empty(M, F, dtype=x.dtype, device=x.device)
    if M * F:
        cut = tiles or choose(M, F, K, NAMES[x.dtype], of(x))
        check_tile("tiles", cut.warps, 2 * cut.BM * cut.BN, BM=cut.BM, BN=cut.BN, BK=cut.BK)
        gated_mlp_kernel[(ceil_div(M, cut.BM) * ceil_div(F, cut.BN),)](
            x, weight, out, M, F, K, x.stride(0), weight.stride(0), BM=cut.BM, BN=cut.BN, BK=cut.BK, GROUP=cut.group,
            WHOLE_K=K % cut.BK == 0, num_warps=cut.warps, num_stages=cut.stages,
        )  # fmt: skip
    return out


def gated_mlp(x: torch.Tensor, weight: torch.Tensor, down: torch.Tensor) -> torch.Tensor:
    """The whole block: ``gate_up(x, weight) @ down.T`` with ``down [D, F]``."""
    return gemm(gate_up(x, weight), down.T)


@dataclass(frozen=True)
class Gated(Case):
    """``M`` rows of width ``D``, hidden width ``F``."""

    M: int
    D: int
    F: int
    tiles: Tiles | None = None

    @property
    def cut(self) -> Tiles:
        """The tiles of its launch."""
        return self.tiles or choose(self.M, self.F, self.D, self.dtype, current())


def inputs(case: Gated, device: str) -> Tensors:
    """Rows, and weights scaled so that the products stay near 1."""
    source = Source(case.name, device)
    scale = case.D**-0.5
    return {
        "x": source.normal(case.M, case.D, dtype=case.dtype),
        "weight": source.normal(2 * case.F, case.D, dtype=case.dtype, scale=scale),
    }


def reference(case: Gated, tensors: Tensors) -> Tensors:
    """In float64."""
    gate, up = (tensors["x"].double() @ tensors["weight"].double().T).chunk(2, dim=1)
    return {"out": gate / (1 + torch.exp(-gate)) * up}


def launch(case: Gated, tensors: Tensors) -> Tensors:
    """The Triton kernel."""
    return {"out": gate_up(**tensors, tiles=case.tiles)}


def expected(case: Gated, tensors: Tensors) -> Expected:
    """x is read once per column of tiles, each weight once per row of tiles; the two products stay on the chip."""
    cut, fmt = case.cut, TYPES[case.dtype].format
    cost = MLP(case.D, case.F, weight=fmt, activation=fmt).parts[0].cost(Work(1, case.M))
    rows, columns, steps = ceil_div(case.M, cut.BM), ceil_div(case.F, cut.BN), ceil_div(case.D, cut.BK)
    x, weight = cost.read["activations"], cost.read["weights"]
    moved = {
        "x": Moved("activations", read=x, requested=x * columns),
        "weight": Moved("weights", read=weight, requested=weight * rows),
        "out": Moved("activations", written=cost.write["activations"]),
    }
    executed = 4 * rows * cut.BM * columns * cut.BN * steps * cut.BK
    kernels = {"gated_mlp_kernel": Launch(rows * columns, moved)}
    return Expected(cost, kernels, TYPES[case.dtype].triton, executed, lambda: 4 * case.M * case.F * case.D)


def library(case: Gated, tensors: Tensors) -> Any:
    """cuBLAS for both products at once, then torch's activation: three kernels."""
    x, weight = tensors["x"], tensors["weight"].T

    def run() -> torch.Tensor:
        gate, up = (x @ weight).chunk(2, dim=1)
        return torch.nn.functional.silu(gate) * up

    return run


CASES = (
    Gated("chosen", "bf16", 66, 80, 100),
    Gated("ragged", "bf16", 70, 100, 150, Tiles(32, 64, 32)),
    Gated("whole-tiles", "bf16", 64, 96, 128, Tiles(32, 64, 32)),
    Gated("one-row", "bf16", 1, 200, 72, Tiles(16, 32, 64)),
    Gated("grouped-rows", "bf16", 130, 48, 65, Tiles(32, 32, 16, group=2)),
    Gated("half", "fp16", 33, 65, 129, Tiles(32, 64, 32)),
    Gated("single", "fp32", 45, 110, 77, Tiles(32, 32, 32)),
)
TOLERANCE = {
    "bf16": Tolerance(3e-3, "sums and activation in fp32, rounded once to bf16"),
    "fp16": Tolerance(4e-4, "sums and activation in fp32, rounded once to fp16"),
    "fp32": Tolerance(1e-6, "sums of fp32 products in another order"),
}
BUILDS = (
    Build(Gated("large", "bf16", 4096, 4096, 14336), {"gated_mlp_kernel": "HGMMA"}, (), EVERYWHERE),
    Build(Gated("batch-64", "bf16", 64, 4096, 14336), {"gated_mlp_kernel": "HGMMA"}),
    Build(Gated("decode", "bf16", 16, 4096, 14336), {"gated_mlp_kernel": "HMMA"}),
    Build(Gated("single", "fp32", 512, 1024, 1024)),
    Build(Gated("ragged", "bf16", 4095, 1001, 1003), {"gated_mlp_kernel": "HGMMA"}),
    Build(Gated("one-column", "bf16", 40, 1, 16)),
    Build(Gated("single-ragged", "fp32", 45, 110, 77)),
)
MEASURED = (
    Gated("prefill-4k", "bf16", 4096, 4096, 14336),
    Gated("batch-64", "bf16", 64, 4096, 14336),
    Gated("decode-1", "bf16", 1, 4096, 14336),
)
SPEC = Spec(
    "gated_mlp", "MLP", CASES, inputs, reference, launch, expected, TOLERANCE, BUILDS, MEASURED, library
)  # fmt: skip
