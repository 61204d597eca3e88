"""Programs of a launch run in any order, and lanes of a program too: what depends on the order is found without a GPU."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("triton")

import torch

from roofline.validate.counted import counting
from roofline.validate.planted import Mutant, found

import triton  # isort: skip
import triton.language as tl  # isort: skip


@triton.jit
def turn_kernel(x, SIZE: tl.constexpr, BARRIER: tl.constexpr):
    at = tl.program_id(0) * SIZE + tl.arange(0, SIZE)
    value = tl.load(x + at)
    if BARRIER:
        tl.debug_barrier()
    tl.store(x + tl.program_id(0) * SIZE + SIZE - 1 - tl.arange(0, SIZE), value)


@triton.jit
def double_kernel(x, SIZE: tl.constexpr):
    at = tl.program_id(0) * SIZE + tl.arange(0, SIZE)
    tl.store(x + at, 2 * tl.load(x + at))


@triton.jit
def hand_on_kernel(x, y, SIZE: tl.constexpr, FIRST: tl.constexpr):
    at = tl.program_id(0) * SIZE + tl.arange(0, SIZE)
    if FIRST:
        tl.store(x + SIZE + at, tl.load(y + at))
    tl.store(y + at, tl.load(x + at))
    if not FIRST:
        tl.store(x + SIZE + at, tl.load(y + at))


def test_a_kernel_in_place_is_no_race() -> None:
    with counting() as counts:
        double_kernel[(3,)](torch.ones(24), 8)
        double_kernel[(3,)](torch.ones(24), 8)
    assert (+counts.shared, +counts.unordered) == ({}, {})


@pytest.mark.parametrize("first", [True, False])
def test_what_one_program_stores_and_another_loads_is_a_race_in_either_order(first: bool) -> None:
    with counting() as counts:
        hand_on_kernel[(3,)](torch.ones(32), torch.ones(24), 8, first)
    assert dict(+counts.shared) == {"x": 16}


@pytest.mark.parametrize("barrier", [True, False])
def test_lanes_that_exchange_places_need_a_barrier(barrier: bool) -> None:
    x = torch.arange(16.0)
    with counting() as counts:
        turn_kernel[(2,)](x, 8, barrier)
    assert x.tolist() == [*range(7, -1, -1), *range(15, 7, -1)]
    assert dict(+counts.unordered) == ({} if barrier else {"x": 16})
    assert dict(+counts.shared) == {}


LAST = "    if (tile + 1) * BT >= T:\n        tl.debug_barrier()"
MUTANTS = [
    Mutant("causal_conv1d", "last tile writes", "    if tile == 0:\n        tl.debug_barrier()", LAST, "ragged", "a race"),
    Mutant("causal_conv1d", "no barrier", "        tl.debug_barrier()\n", "", "tile-of-taps", "no barrier between"),
    Mutant("csa_compress", "no barrier", "        tl.debug_barrier()\n", "", "single", "no barrier between"),
]


@pytest.mark.parametrize("mutant", MUTANTS, ids=str)
def test_planted_disorder_is_found(mutant: Mutant, tmp_path: Path) -> None:
    assert mutant.symptom in found(mutant, tmp_path)
