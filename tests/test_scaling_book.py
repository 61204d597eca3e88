"""Golden values of "How to Scale Your Model" (jax-ml/scaling-book, inference and applied-inference chapters), TPU v5e."""

from __future__ import annotations

from dataclasses import replace

import pytest

from roofline import load_accelerator
from roofline.cost import Cost
from roofline.timing import time

V5E = load_accelerator("tpu-v5e")


def slice_of(accelerator, chips):
    """Several chips as one: every rate times their number, as the book counts a slice."""
    compute = {unit: replace(rate, value=chips * rate.value) for unit, rate in accelerator.compute.items()}
    return replace(
        accelerator, compute=compute, bandwidth=replace(accelerator.bandwidth, value=chips * accelerator.bandwidth.value)
    )


def step_s(accelerator, batch, kv_bytes, parameters, weight_bytes, unit="bf16"):
    """The book's step time: the cache is loaded beside nothing, the matmuls take the longer of loading and computing."""
    cache = time(Cost(read={"state": batch * kv_bytes}), accelerator)
    matmuls = time(Cost(flops={unit: 2 * batch * parameters}, read={"weights": weight_bytes}), accelerator)
    return cache.bound + matmuls.bound


# The book rounds its inputs: 6.7 GB (MHA) or 1.34 GB (GQA 1:5) of cache per sequence of 8192, 26 GB of weights.
TABLES = {
    "MHA": (
        6_700_000_000,
        {
            1: (4.98, 200.61, 32.7), 8: (12.13, 659.30, 79.6), 16: (20.30, 787.99, 133.2),
            32: (36.65, 873.21, 240.4), 64: (69.33, 923.13, 454.8), 240: (249.09, 963.53, 1634),
        },
    ),
    "GQA": (
        1_340_000_000,
        {
            1: (4.17, 239.94, None), 8: (5.60, 1429.19, None), 16: (7.23, 2212.48, None),
            32: (10.50, 3047.62, None), 64: (17.04, 3756.62, None), 240: (52.99, 4529.34, None),
        },
    ),
}  # fmt: skip
POINTS = [(name, kv, batch, row) for name, (kv, rows) in TABLES.items() for batch, row in rows.items()]


@pytest.mark.parametrize(("name", "kv", "batch", "row"), POINTS, ids=[f"{p[0]}-B{p[2]}" for p in POINTS])
def test_llama_2_13b_tables_on_eight_v5e(name, kv, batch, row):
    seconds = step_s(slice_of(V5E, 8), batch, kv, 13_000_000_000, 26_000_000_000)
    assert round(seconds * 1e3, 2) == row[0]
    assert round(batch / seconds, 2) == row[1]
    if row[2] is not None:
        assert (batch * kv + 26_000_000_000) / 1e9 == pytest.approx(row[2], abs=0.5)


@pytest.mark.parametrize(("batch", "printed_ms"), [(4, 2.57), (256, 21.05)])
def test_pop_quiz_30b_int8_on_sixteen_v5e(batch, printed_ms):
    """30 B int8 parameters, bf16 FLOPs, 100 kB of cache per token, 8192 tokens: the book says 2.5 and 21 ms (at 8.1e11 B/s)."""
    slow = replace(V5E, bandwidth=replace(V5E.bandwidth, value=810 * 10**9))
    seconds = step_s(slice_of(slow, 16), batch, 8192 * 100_000, 30 * 10**9, 30 * 10**9)
    assert round(seconds * 1e3, 2) == printed_ms


def test_v5e_ridges():
    assert round(V5E.rate("bf16") / 8.2e11) == 240
    assert V5E.ridge() == pytest.approx(240, rel=0.01)
