"""Mixtures of experts: counts follow the realised routing and meet its expectation; one expert is the dense block."""

from __future__ import annotations

import math

import pytest

pytest.importorskip("triton")

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from roofline.components.feedforward import MLP
from roofline.components.moe import GroupedLinear, MoE, Select, expected_experts
from roofline.cost import Cost
from roofline.errors import InputError
from roofline.formats import FORMATS, FP32
from roofline.kernels import microscaling
from roofline.kernels.gated_mlp import gate_up, gated_mlp
from roofline.kernels.grouped_gemm import grouped_gemm, most_tiles
from roofline.kernels.moe_permute import combine, permute, sort
from roofline.kernels.moe_router import Rule, moe_router
from roofline.kernels.registry import load
from roofline.kernels.tiling import Tiles
from roofline.validate.compare import rms_ratio
from roofline.validate.counted import Counts, counting
from roofline.work import Work

SMALL = Tiles(16, 32, 32)


def drawn(*shape: int, seed: int = 1, scale: float = 1.0) -> torch.Tensor:
    return scale * torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def routed(tokens: int, E: int, k: int, number: int, seed: int, busy: int | None = None) -> torch.Tensor:
    """Choices ``[number, tokens, k]`` of even routing: the k best of independent random logits."""
    logits = torch.rand(number, tokens, busy or E, generator=torch.Generator().manual_seed(seed))
    return logits.topk(k, 2).indices


def standard_error(E: int, k: int, tokens: int, number: int) -> float:
    """Of the mean of ``number`` counts of distinct experts under even routing, from their exact variance.

    An expert is missed by a token with chance 1 - k/E, a pair of them with (E-k)(E-k-1) / (E(E-1)).
    """
    one, both = (1 - k / E) ** tokens, ((E - k) * (E - k - 1) / (E * (E - 1))) ** tokens
    return math.sqrt((E * one * (1 - one) + E * (E - 1) * (both - one * one)) / number)


def distinct(chosen: torch.Tensor) -> torch.Tensor:
    """Experts that each routing hits."""
    return torch.tensor([one.unique().numel() for one in chosen], dtype=torch.float64)


@pytest.mark.parametrize(("E", "k", "tokens"), [(8, 2, 4), (64, 6, 9), (128, 8, 16), (256, 8, 64)])
def test_distinct_experts_of_random_routings_meet_their_expectation(E: int, k: int, tokens: int) -> None:
    """Within three standard errors of 1500 routings; their spread is the exact one within a tenth."""
    hits = distinct(routed(tokens, E, k, 1500, seed=E))
    assert abs(float(hits.mean()) - float(expected_experts(E, k, tokens))) < 3 * standard_error(E, k, tokens, 1500)
    assert float(hits.std()) == pytest.approx(standard_error(E, k, tokens, 1), rel=0.1)


def test_uneven_routing_would_be_seen() -> None:
    hits = distinct(routed(16, 128, 8, 1500, seed=2, busy=112))
    assert abs(float(hits.mean()) - float(expected_experts(128, 8, 16))) > 10 * standard_error(128, 8, 16, 1500)


def test_counted_weights_follow_each_routing_and_on_average_the_formula() -> None:
    """Router, sort and grouped matmul over 24 routings of 3 tokens: bytes of each are its experts', their mean is the model's
    within three standard errors."""
    E, k, tokens, K, N, number = 6, 2, 3, 16, 24, 24
    weight, x = drawn(E, N, K, seed=2), drawn(tokens, K, seed=3)
    one = FP32.bytes(N * K)
    layer = GroupedLinear(K, N, E, k, weight=FP32, activation=FP32, gathers=True)
    read = []
    with counting():
        _, chosen = moe_router(drawn(number * tokens, E, seed=4), Rule(k))
    for some in chosen.view(number, tokens, k):
        with counting() as counts:
            _, order, offsets = sort(some.contiguous(), E)
            grouped_gemm(x, weight, offsets, order, k, tiles=Tiles(16, 32, 16, stages=1))
        tally = counts.kernels["grouped_gemm_kernel"]
        histogram = tuple(torch.bincount(some.flatten().long(), minlength=E).tolist())
        known = GroupedLinear(K, N, E, k, weight=FP32, activation=FP32, gathers=True, counts=histogram).cost(Work(1, tokens))
        read.append(tally.unique("read")["weight"])
        assert offsets.diff().tolist() == list(histogram)
        assert read[-1] == known.read["weights"] == one * sum(1 for rows in histogram if rows)
        assert tally.unique("write")["out"] == known.write["activations"]
    mean = sum(read) / number
    assert abs(mean - layer.cost(Work(1, tokens)).read["weights"]) < 3 * one * standard_error(E, k, tokens, number)


def test_executed_flops_are_the_components_under_its_padding_to_tiles() -> None:
    E, k, tokens, K, N = 6, 2, 21, 32, 64
    chosen = routed(tokens, E, k, 1, seed=9)[0].to(torch.int32)
    with counting() as counts:
        _, order, offsets = sort(chosen, E)
        grouped_gemm(drawn(tokens, K), drawn(E, N, K), offsets, order, k, tiles=SMALL)
    histogram = tuple(offsets.diff().tolist())
    padded = GroupedLinear(K, N, E, k, weight=FP32, activation=FP32, tile=16, counts=histogram)
    plain = GroupedLinear(K, N, E, k, weight=FP32, activation=FP32, counts=histogram)
    assert counts.dot == {"fp32": padded.cost(Work(1, tokens)).matrix_flops}
    assert plain.cost(Work(1, tokens)).matrix_flops == 2 * K * N * k * tokens


def moe(
    x: torch.Tensor, logits: torch.Tensor, rule: Rule, weight: torch.Tensor, down: torch.Tensor, gathers: bool
) -> torch.Tensor:
    """A whole layer: router, sort, (copy,) both grouped matmuls, weighted sum."""
    weights, chosen = moe_router(logits, rule)
    rows, order, offsets = sort(chosen, weight.shape[0])
    if gathers:
        hidden = grouped_gemm(x, weight, offsets, order, rule.k, gated=True, tiles=SMALL)
    else:
        hidden = grouped_gemm(permute(x, rows), weight, offsets, gated=True, tiles=SMALL)
    return combine(grouped_gemm(hidden, down, offsets, tiles=SMALL), rows, weights)


def dense(x: torch.Tensor, weight: torch.Tensor, down: torch.Tensor) -> torch.Tensor:
    """A gated block in float64."""
    gate, up = (x.double() @ weight.double().T).chunk(2, 1)
    return (torch.nn.functional.silu(gate) * up) @ down.double().T


def moved(counts: Counts, kernel: str) -> Cost:
    """Distinct bytes of a kernel, tables apart."""
    tally, tables = counts.kernels[kernel], ("order", "offsets")
    read = {name: size for name, size in tally.unique("read").items() if name not in tables}
    weights = {"weights": read.pop("weight")} if "weight" in read else {}
    return Cost({}, {**weights, "activations": sum(read.values())}, {"activations": sum(tally.unique("write").values())})


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_one_expert_is_the_dense_block(dtype: torch.dtype) -> None:
    """Same numbers as the dense kernels (fp32: to rounding; bf16: to the bit of what each kernel rounds), same traffic."""
    T, D, F = 21, 48, 40
    x, weight, down = (part.to(dtype) for part in (drawn(T, D), drawn(1, 2 * F, D, scale=D**-0.5), drawn(1, D, F, scale=F**-0.5)))
    with counting() as sparse:
        out = moe(x, drawn(T, 1).to(dtype), Rule(1), weight, down, gathers=True)
    with counting() as plain:
        same = gated_mlp(x, weight[0], down[0])
    with counting() as first:
        hidden = gate_up(x, weight[0])
    difference = (out.double() - same.double()).square().mean().sqrt() / same.double().square().mean().sqrt()
    assert float(difference) < (1e-6 if dtype == torch.float32 else 2e-3)
    exact = dense(x, weight[0], down[0])
    assert float((out.double() - exact).square().mean().sqrt() / exact.square().mean().sqrt()) < (
        1e-6 if dtype == torch.float32 else 5e-3
    )
    assert hidden.shape == (T, F)
    both = sparse.unique("read")["weight"], sparse.kernels["grouped_gemm_kernel"].launches
    assert both == (plain.unique("read")["weight"] + plain.unique("read")["b"], 2)
    whole, block = MoE(D, F, 1, 1), MLP(D, F)
    assert Cost.total((1, part.cost(Work(1, T))) for part in whole.experts) == block.cost(Work(1, T))
    assert not any("combine" in part.name for part in whole.parts)
    assert moved(first, "gated_mlp_kernel").bytes == sum(first.unique(side).total() for side in ("read", "write"))


@settings(max_examples=5, deadline=None, derandomize=True)
@given(st.integers(1, 18), st.integers(1, 7), st.integers(1, 4), st.booleans())
def test_a_layer_equals_its_experts_one_by_one(T: int, E: int, k: int, gathers: bool) -> None:
    k, D, F = min(k, E), 24, 20
    x, logits = drawn(T, D, seed=T), drawn(T, E, seed=E)
    weight, down = drawn(E, 2 * F, D, seed=5, scale=D**-0.5), drawn(E, D, F, seed=6, scale=F**-0.5)
    with counting():
        out = moe(x, logits, Rule(k), weight, down, gathers)
    scores = torch.softmax(logits.double(), 1)
    best = scores.topk(k, 1)
    right = torch.zeros(T, D, dtype=torch.float64)
    for token in range(T):
        for weighing, expert in zip(best.values[token] / best.values[token].sum(), best.indices[token], strict=True):
            right[token] += weighing * dense(x[token : token + 1], weight[expert], down[expert])[0]
    assert float((out.double() - right).abs().max()) < 1e-5


def test_gathering_spares_the_copy_that_the_model_charges_for_it() -> None:
    """Same result to the bit; a physical permutation moves D read and k D written per token, and k D where D is read after."""
    T, D, E, k, F = 17, 32, 6, 3, 16
    x, weight, down = drawn(T, D), drawn(E, 2 * F, D), drawn(E, D, F)
    with counting() as gathered:
        one = moe(x, drawn(T, E), Rule(k), weight, down, gathers=True)
    with counting() as copied:
        two = moe(x, drawn(T, E), Rule(k), weight, down, gathers=False)
    assert torch.equal(one, two)

    def activations(counts: Counts) -> int:
        tables = ("rows", "order", "offsets", "chosen", "counts", "weights", "logits", "weight")
        return sum(
            size for side in ("read", "write") for name, size in counts.unique(side).items() if name not in tables
        )  # fmt: skip

    assert activations(copied) - activations(gathered) == FP32.bytes(T * (D + k * D) + T * (k - 1) * D)
    assert copied.launches == gathered.launches + 1


def test_four_bit_experts_are_within_the_formats_bound() -> None:
    """|x w - x w'| <= |x| e: e at most twice the block's scale, where a magnitude above six of them is clamped."""
    E, T, K, N = 3, 9, 96, 40
    weight, x = drawn(E, N, K, seed=7, scale=K**-0.5), drawn(T, K, seed=8)
    packed, scales = microscaling.pack(weight)
    chosen = routed(T, E, 1, 1, seed=4)[0].to(torch.int32)
    with counting():
        _, order, offsets = sort(chosen, E)
        out = grouped_gemm(x, packed, offsets, order, 1, w_scales=scales, tiles=Tiles(16, 32, 64)).double()
    steps = 2 * microscaling.powers(scales).repeat_interleave(microscaling.BLOCK, 2)
    mine = chosen[order.long(), 0].long()
    rows = x.double()[order.long()]
    exact = torch.einsum("rk,rnk->rn", rows, weight.double()[mine])
    most = torch.einsum("rk,rnk->rn", rows.abs(), steps[mine])
    held = torch.einsum("rk,rnk->rn", rows, microscaling.unpack(packed, scales)[mine])
    assert bool(((out - exact).abs() <= most).all())
    assert torch.allclose(out, held, rtol=1e-5, atol=1e-5)
    assert packed.numel() + scales.numel() == FORMATS["mxfp4"].bytes(E * N * K)


@pytest.mark.usefixtures("interpreted")
def test_a_correction_steers_the_choice_and_leaves_the_weights() -> None:
    logits, bias = drawn(5, 12, seed=3), torch.zeros(12)
    bias[[2, 7]] = 10.0
    weights, chosen = moe_router(logits, Rule(2, "sigmoid", normalise=False), bias)
    assert chosen.sort(1).values.tolist() == [[2, 7]] * 5
    assert torch.allclose(weights, torch.sigmoid(logits).gather(1, chosen.long()), rtol=1e-6)


@pytest.mark.usefixtures("interpreted")
def test_groups_that_are_all_kept_change_nothing() -> None:
    logits = drawn(6, 24, seed=3)
    plain = moe_router(logits, Rule(4, "sigmoid"))
    grouped = moe_router(logits, Rule(4, "sigmoid", groups=6, kept=6))
    assert torch.equal(plain[0], grouped[0])
    assert torch.equal(plain[1], grouped[1])


@pytest.mark.usefixtures("interpreted")
def test_equal_logits_pick_the_first_experts() -> None:
    _, chosen = moe_router(torch.zeros(3, 10), Rule(4))
    assert chosen.tolist() == [[0, 1, 2, 3]] * 3


@pytest.mark.parametrize("rule", [Rule(5, groups=4, kept=1), Rule(1, groups=3), Rule(1, "tanh"), Rule(0)])
def test_a_rule_that_cannot_be_kept_is_refused(rule: Rule) -> None:
    with pytest.raises(InputError, match="does not pick from 16 experts"):
        moe_router(torch.zeros(2, 16), rule)


def test_no_tokens_launch_nothing() -> None:
    with counting() as counts:
        weights, chosen = moe_router(torch.zeros(0, 4), Rule(2))
        rows, order, offsets = sort(chosen, 4)
        hidden = grouped_gemm(torch.zeros(0, 8), torch.zeros(4, 6, 8), offsets, order, 2)
        out = combine(hidden, rows, weights)
    assert counts.launches == 0
    assert (out.shape, offsets.tolist()) == ((0, 6), [0] * 5)


@given(st.lists(st.integers(0, 40), min_size=1, max_size=8), st.sampled_from([16, 32, 64]))
def test_enough_tiles_start_for_every_histogram_and_no_more_than_the_worst_needs(counts: list[int], BM: int) -> None:
    rows, E = sum(counts), len(counts)
    assert sum(-(-one // BM) for one in counts) <= most_tiles(rows, E, BM)
    hit = min(rows, E)
    worst = [rows - hit + 1, *[1] * (hit - 1)] if rows else []
    assert sum(-(-one // BM) for one in worst) == most_tiles(rows, E, BM)


@pytest.mark.parametrize(
    ("name", "cases", "outputs"),
    [
        ("moe_router", ("mixtral", "ragged", "grouped-sigmoid", "grouped-odd"), ("weights", "chosen")),
        ("moe_permute", ("ragged", "shared"), ("permuted", "combined")),
        ("grouped_gemm", ("chosen", "gated", "sorted-rows"), ("out",)),
        ("quantize_fp8", ("whole-blocks", "token", "normalised"), ("codes",)),
    ],
)
def test_what_times_are_compared_with_does_the_same(name: str, cases: tuple[str, ...], outputs: tuple[str, ...]) -> None:
    spec = load(name)
    assert spec.library is not None
    for case in spec.cases:
        if case.name in cases:
            tensors = spec.inputs(case, "cpu")
            run, right = spec.library(case, tensors), spec.reference(case, tensors)
            assert run is not None
            found = run()
            made = found if isinstance(found, tuple) else (found,)
            parts = found if isinstance(found, dict) else dict(zip(outputs, made, strict=False))
            assert {*parts} == {*outputs}
            for output, part in parts.items():
                assert rms_ratio(part, right[output].double()) < 2e-2


def test_a_histogram_has_a_number_for_every_expert_and_the_router_may_write_another_format() -> None:
    with pytest.raises(InputError, match="3 numbers for 4 experts"):
        GroupedLinear(8, 8, 4, 2, counts=(1, 2, 3))
    wide, narrow = Select(8, 2, picked=FP32).cost(Work(1, 5)), Select(8, 2).cost(Work(1, 5))
    assert wide.write["activations"] == 2 * narrow.write["activations"] == 5 * 2 * 2 * 4
    assert wide.read == narrow.read
