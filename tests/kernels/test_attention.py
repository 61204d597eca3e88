"""What the attention kernels must show beyond their cases: selective batching, traffic laws, masks against each other."""

from __future__ import annotations

import pytest

pytest.importorskip("triton")

import dataclasses

import torch

from roofline.components.attention import Attention
from roofline.components.linear import Linear
from roofline.cost import Cost
from roofline.formats import FP32
from roofline.kernels import flash_attention as flash
from roofline.kernels import unfused_attention as unfused
from roofline.kernels.flash_attention import Prefill, Tiles, starts
from roofline.kernels.gemm import gemm
from roofline.kernels.tiling import Tiles as GemmTiles
from roofline.validate.counted import Counts, counting
from roofline.work import Ragged, Work

LENGTHS = (3, 9, 5)
SMALL = GemmTiles(16, 32, 32)


def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, lengths: list[int]) -> torch.Tensor:
    """Causal prefill of sequences of these lengths."""
    where = torch.tensor(starts(lengths), dtype=torch.int32)
    return flash.flash_attention(q, k, v, where, where, max(lengths), tiles=Tiles(16, 16))


def test_selective_batching_equals_running_each_sequence_alone() -> None:
    """Lengths 3, 9, 5: one linear call on [17, D], attention per sequence, each equal to the sequence on its own."""
    D, N, K, H = 32, 4, 2, 16
    generator = torch.Generator().manual_seed(5)
    x = torch.randn(sum(LENGTHS), D, generator=generator)
    weight = torch.randn((N + 2 * K) * H, D, generator=generator)
    work = Ragged(tuple(Work(1, length) for length in LENGTHS))

    def layer(rows: torch.Tensor, lengths: list[int]) -> torch.Tensor:
        heads = gemm(rows, weight.T, tiles=SMALL).view(len(rows), N + 2 * K, H)
        q, k, v = (part.contiguous() for part in heads.split([N, K, K], dim=1))
        return attend(q, k, v, lengths)

    with counting() as together:
        batched = layer(x, list(LENGTHS))
    with counting() as apart:
        alone = [layer(rows, [len(rows)]) for rows in x.split(list(LENGTHS))]
    assert torch.equal(batched, torch.cat(alone))
    assert together.kernels["gemm_kernel"].launches == 1
    assert apart.kernels["gemm_kernel"].launches == 3

    linear = Linear(D, (N + 2 * K) * H, weight=FP32, activation=FP32)
    core = Attention(N, K, H, kv=FP32, activation=FP32)
    assert moved(together, "gemm_kernel") == without_flops(linear.cost(work))
    assert moved(together, "flash_attention_kernel") == without_flops(core.cost(work))
    sums = Cost.total((1, core.cost(group)) for group in work.groups)
    assert {**core.cost(work).read} == {**sums.read}
    assert linear.cost(work).matrix_flops == sum(linear.cost(group).matrix_flops for group in work.groups)


def without_flops(cost: Cost) -> tuple[int, int]:
    """Bytes read and written."""
    return cost.bytes_read, cost.bytes_written


def moved(counts: Counts, kernel: str) -> tuple[int, int]:
    """Distinct bytes read and written by a kernel, its index tables apart."""
    tally = counts.kernels[kernel]
    read = {name: size for name, size in tally.unique("read").items() if not name.endswith("starts")}
    return sum(read.values()), sum(tally.unique("write").values())


def test_traffic_of_flash_falls_with_the_tile_and_that_of_the_baseline_does_not() -> None:
    """Re-reads of keys: N^2 d / BM; the baseline moves N^2 scores whatever its tile (Dao et al. 2022, theorem 2)."""
    n, d = 128, 16
    requested, baseline = {}, {}
    for BM in (16, 32, 64):
        case = Prefill(f"tile-{BM}", "fp32", ((n, 0),), 1, 1, d, mask="full", tiles=Tiles(BM, 16))
        with counting() as counts:
            flash.launch(case, flash.inputs(case, "cpu"))
        requested[BM] = counts.read["k"] + counts.read["v"]
        whole = unfused.Dense(f"tile-{BM}", "fp32", 1, n, 0, 1, 1, d, mask="full", tiles=GemmTiles(BM, 16, 16))
        with counting() as counts:
            unfused.launch(whole, unfused.inputs(whole, "cpu"))
        distinct = counts.unique("read") + counts.unique("write")
        baseline[BM] = distinct["scores"] + distinct["weights"]
    assert requested == {BM: 2 * (n // BM) * n * d * 4 for BM in requested}
    assert set(baseline.values()) == {4 * n * n * 4}


@pytest.mark.usefixtures("interpreted")
@pytest.mark.parametrize("mask", ["window", "chunk"])
def test_a_reach_longer_than_the_sequence_is_causal(mask: str) -> None:
    case = Prefill("reach", "fp32", ((20, 0),), 2, 1, 16, tiles=Tiles(16, 16))
    tensors = flash.inputs(case, "cpu")
    causal = flash.launch(case, tensors)["out"]
    far = flash.launch(dataclasses.replace(case, mask=mask, size=1000), tensors)["out"]
    assert torch.equal(causal, far)


@pytest.mark.usefixtures("interpreted")
def test_a_block_of_one_token_is_causal_and_one_of_all_is_full() -> None:
    case = Prefill("blocks", "fp32", ((18, 0),), 1, 1, 16, tiles=Tiles(16, 16))
    tensors = flash.inputs(case, "cpu")
    for size, same in ((1, "causal"), (18, "full")):
        block = flash.launch(dataclasses.replace(case, mask="block", size=size), tensors)["out"]
        assert torch.equal(block, flash.launch(dataclasses.replace(case, mask=same), tensors)["out"])
        assert flash.useful(dataclasses.replace(case, mask="block", size=size)) == flash.useful(
            dataclasses.replace(case, mask=same)
        )


@pytest.mark.usefixtures("interpreted")
def test_a_chunked_prefill_equals_a_whole_one() -> None:
    case = Prefill("whole", "fp32", ((24, 0),), 2, 1, 16, tiles=Tiles(16, 16))
    tensors = flash.inputs(case, "cpu")
    whole = flash.launch(case, tensors)["out"]
    q, k, v = tensors["q"], tensors["k"], tensors["v"]
    second = flash.flash_attention(
        q[10:], k, v, torch.tensor([0, 14], dtype=torch.int32), torch.tensor([0, 24], dtype=torch.int32), 14, tiles=case.cut
    )
    assert torch.allclose(whole[10:], second, rtol=1e-5, atol=1e-6)


def test_layers_that_share_a_cache_read_the_same_keys_and_keep_none_of_their_own() -> None:
    """Cross-layer attention: the second layer's queries over the first layer's keys; same Cost, no state."""
    first, second = Attention(4, 2, 16), Attention(4, 2, 16, cached=False)
    assert first.cost(Work(1, 7, 5)) == second.cost(Work(1, 7, 5))
    assert second.state() == ()
    case = Prefill("shared", "fp32", ((7, 5),), 4, 2, 16, tiles=Tiles(16, 16))
    tensors = flash.inputs(case, "cpu")
    other = {**tensors, "q": tensors["q"].flip(0).contiguous()}
    right = flash.reference(case, other)["out"]
    with counting() as counts:
        out = flash.launch(case, other)["out"]
    assert (out.double() - right).abs().max() < 1e-5
    assert set(counts.written) == {"out"}


def test_no_tokens_launch_nothing() -> None:
    empty = torch.zeros(0, 2, 16)
    where = torch.zeros(2, dtype=torch.int32)
    with counting() as counts:
        out = flash.flash_attention(empty, empty, empty, where, where, 0)
        product = gemm(torch.zeros(0, 8), torch.zeros(8, 4))
    assert (out.shape, product.shape) == ((0, 2, 16), (0, 4))
    assert counts.launches == 0
