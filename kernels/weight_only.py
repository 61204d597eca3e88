"""What the weight-only matmuls share: tiles, parts of K, and what a launch is expected to move.

Weights of 4 bits are widened inside the kernel and multiplied in 16 bits, so that at few rows a launch reads a quarter of
the bytes and at many it gains nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from roofline.components.linear import Linear
from roofline.cost import Cost
from roofline.errors import InputError
from roofline.formats import Format
from roofline.kernels.device import Device
from roofline.kernels.spec import Case, Expected, Moved
from roofline.kernels.tiling import Tiles, launches, parts_of_k, power_of_two
from roofline.kernels.types import TYPES
from roofline.numeric import ceil_div
from roofline.work import Work


def choose(M: int, N: int, K: int, device: Device, skinny: tuple[int, int] = (128, 64)) -> Tiles:
    """Tiles by shape and device: at few rows K is split until every unit streams weights.

    Args:
        skinny: columns and steps of K of a tile of few rows, the longer one where the storage is contiguous.
    """
    if M <= 32:
        BN, BK = skinny
        return Tiles(power_of_two(M, 16), BN, BK, parts_of_k(ceil_div(N, BN), K, BK, device), warps=4, stages=4)
    large = device.shared >= 200_000
    if M <= 64 or ceil_div(M, 128) * ceil_div(N, 128) < device.units:
        return Tiles(64, 128, 64, warps=4, stages=4 if large else 3)
    return Tiles(128, 128, 64 if large else 32, warps=8, stages=4 if large else 2)


def spans(tiles: Tiles, group: int) -> int:
    """Groups that one step over K meets. Raises InputError unless steps and groups nest."""
    if group % tiles.BK and tiles.BK % group:
        raise InputError(f"tiles: groups of {group} and steps of {tiles.BK} do not nest")
    return max(1, tiles.BK // group)


@dataclass(frozen=True)
class WeightOnly(Case):
    """``M, N, K`` and how a launch is cut."""

    M: int
    N: int
    K: int
    tiles: Tiles | None = None


def useful(case: WeightOnly, weight: Format) -> Cost:
    """The component's Cost: weights in their format, scales and zero points included, the rest in 16 bits."""
    return Linear(case.K, case.N, weight=weight, activation=TYPES[case.dtype].format).cost(Work(1, case.M))


def expected(
    case: WeightOnly, cut: Tiles, cost: Cost, kernel: str, weights: Mapping[str, tuple[int, int]], extra: Mapping[str, Moved]
) -> Expected:
    """x once per column of tiles, weights once per row of tiles and as often as ``weights`` says within one.

    Args:
        weights: argument -> (bytes, times that one row of tiles reads them). extra: further arguments.
    """
    rows, columns, steps = ceil_div(case.M, cut.BM), ceil_div(case.N, cut.BN), ceil_div(case.K, cut.BK)
    x, out = cost.read["activations"], cost.write["activations"]
    moved: dict[str, Moved] = {"x": Moved("activations", read=x, requested=x * columns), **extra}
    for name, (size, times) in weights.items():
        moved[name] = Moved("weights", read=size, requested=size * times * rows)
    kernels = launches(kernel, rows * columns * cut.splits, moved, case.M, case.N, cut.splits, out)
    executed = 2 * rows * cut.BM * columns * cut.BN * steps * cut.BK
    return Expected(cost, kernels, TYPES[case.dtype].triton, executed, lambda: 2 * case.M * case.N * case.K)


def dense_library(x: torch.Tensor, weight: torch.Tensor) -> Any:
    """cuBLAS over the same weight ``[K, N]`` in 16 bits: what a user without a weight-only kernel calls."""
    wide = weight.to(x.dtype).T.contiguous().T
    return lambda: x @ wide
