"""Mixture of experts: distinct experts in expectation, routed work, and the dense block as its limit."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from sympy import Rational

from roofline.components.feedforward import MLP
from roofline.components.moe import GroupedLinear, MoE, expected_experts, selection_probabilities
from roofline.configs.load import load_model
from roofline.cost import Cost
from roofline.errors import InputError
from roofline.formats import format_named
from roofline.symbols import symbols
from roofline.work import Ragged, Work

TOKENS = (1, 2, 4, 8, 16, 32, 64, 128, 256)
DISTINCT = {
    (8, 2): (2, 3.5, 5.47, 7.20, 7.92, 8, 8, 8, 8),
    (128, 4): (4, 7.875, 15.27, 28.71, 50.98, 81.66, 111.22, 125.80, 127.96),
    (128, 8): (8, 15.5, 29.12, 51.62, 82.42, 111.77, 125.94, 127.97, 128),
    (512, 10): (10, 19.8, 38.84, 74.74, 138.57, 239.64, 367.11, 471.00, 508.72),
    (256, 8): (8, 15.75, 30.53, 57.42, 101.96, 163.31, 222.44, 251.60, 255.92),
    (384, 8): (8, 15.83, 31.01, 59.52, 109.82, 188.23, 284.19, 358.06, 382.25),
    (256, 6): (6, 11.86, 23.17, 44.24, 80.84, 136.15, 199.89, 243.70, 255.41),
    (384, 6): (6, 11.91, 23.44, 45.46, 85.53, 152.01, 243.85, 332.85, 377.19),
}
"""E (1 - (1 - k/E)^T), printed to two decimals: uniform routing, independent tokens."""

sizes = st.tuples(st.integers(1, 512), st.integers(1, 16)).filter(lambda pair: pair[1] <= pair[0])


@pytest.mark.parametrize(("E", "k"), DISTINCT)
def test_distinct_experts_of_the_published_shapes(E: int, k: int) -> None:
    for tokens, printed in zip(TOKENS, DISTINCT[E, k], strict=True):
        assert float(expected_experts(E, k, tokens)) == pytest.approx(printed, abs=0.005001)


@given(sizes)
def test_one_token_hits_exactly_k_experts_and_k_equal_e_hits_all(pair: tuple[int, int]) -> None:
    E, k = pair
    for skew in (0, 1.2):
        assert type(expected_experts(E, k, 1, skew)) is int
        assert expected_experts(E, k, 1, skew) == k
        assert expected_experts(E, E, 77, skew) == E


@given(sizes, st.integers(2, 10**6))
def test_scalars_and_arrays_agree_and_stay_between_k_and_e(pair: tuple[int, int], tokens: int) -> None:
    E, k = pair
    scalar = float(expected_experts(E, k, tokens))
    array = np.asarray(expected_experts(E, k, np.array([1.0, tokens])), dtype=float) * np.ones(2)
    assert array == pytest.approx([k, scalar], rel=1e-12)
    assert k * (1 - 1e-12) <= scalar <= E
    assert scalar <= min(E, k * tokens) * (1 + 1e-12)


def test_the_formula_has_its_limits_in_symbols() -> None:
    E, k, B, T = symbols("E k B T")
    formula = MoE(8, 16, E, k).expected_experts(B * T)
    assert formula == E * (1 - (1 - k / E) ** (B * T))
    assert formula.subs({B: 1, T: 1}).simplify() == k
    assert formula.subs({E: 8, k: 2, B: 2, T: 2}) == Rational(175, 32)
    assert expected_experts(8, 2, 4) == 5.46875


def test_many_tokens_hit_every_expert() -> None:
    assert expected_experts(128, 8, 10**9) == 128


@given(st.integers(1, 9), st.integers(1, 300), st.integers(0, 5000), st.booleans())
def test_one_expert_is_the_dense_block(B: int, T: int, S: int, gated: bool) -> None:
    moe, dense = MoE(24, 40, 1, 1, gated=gated), MLP(24, 40, gated)
    work = Work(B, T, S)
    assert Cost.total((1, part.cost(work)) for part in moe.experts) == dense.cost(work)
    routed = sum(sum(part.params().values()) for part in moe.experts)
    assert routed == sum(dense.params().values())
    assert sum(moe.params().values()) == routed + 24


@given(st.integers(1, 64), st.integers(1, 64))
def test_routed_flops_follow_the_tokens(B: int, T: int) -> None:
    D, F, E, k = 24, 40, 16, 3
    moe = MoE(D, F, E, k)
    routed = sum(part.cost(Work(B, T)).matrix_flops for part in moe.experts)
    assert routed == B * T * k * 6 * D * F
    assert moe.cost(Work(B, T)).matrix_flops == routed + 2 * B * T * D * E


def test_weight_traffic_is_that_of_the_experts_hit() -> None:
    D, F, E, k = 24, 40, 16, 3
    moe = MoE(D, F, E, k)
    one = sum(part.cost(Work(1, 1)).read["weights"] for part in moe.experts)
    assert one == k * 3 * D * F * 2
    for tokens in (2, 7, 50):
        read = sum(part.cost(Work(tokens, 1)).read["weights"] for part in moe.experts)
        assert read == pytest.approx(float(moe.expected_experts(tokens)) * 3 * D * F * 2, rel=1e-12)


def test_tokens_are_read_once_and_their_picks_written_each() -> None:
    D, F, E, k, tokens = 24, 40, 16, 3, 10
    up, down = (part.cost(Work(tokens, 1)) for part in MoE(D, F, E, k).experts)
    assert (up.read["activations"], up.write["activations"]) == (2 * tokens * D, 2 * tokens * k * F)
    assert (down.read["activations"], down.write["activations"]) == (2 * tokens * k * F, 2 * tokens * k * D)


@pytest.mark.parametrize("name", ["mixtral-8x7b-v0.1", "gpt-oss-20b", "gemma-4-26b-a4b", "llama-4-scout-17b-16e"])
def test_whole_sparse_models_read_alike_in_every_reading(name: str) -> None:
    model = load_model(name)
    B, S = np.array([1.0, 8.0, 64.0]), np.array([16.0, 500.0, 9000.0])
    sweep = model.cost(Work(B, 1, S))
    for index in range(3):
        exact = {entry[:2]: entry[2] for entry in model.cost(Work(int(B[index]), 1, int(S[index]))).entries()}
        for section, key, value in sweep.entries():
            found = np.broadcast_to(np.asarray(value, dtype=float), 3)[index]
            assert found == pytest.approx(float(exact[section, key]), rel=1e-12), (section, key)
    symbol_b, symbol_s = symbols("B S")
    formula = model.cost(Work(symbol_b, 1, symbol_s)).matrix_flops
    assert formula.subs({symbol_b: 8, symbol_s: 500}) == model.cost(Work(8, 1, 500)).matrix_flops


def test_a_ragged_batch_routes_all_its_tokens_together() -> None:
    moe = MoE(24, 40, 16, 3)
    ragged = Ragged((Work(1, 3, 10), Work(1, 9), Work(1, 5, 70)))
    cost, whole = moe.cost(ragged), moe.cost(Work(17, 1))
    assert cost.read["weights"] == whole.read["weights"]
    assert cost.matrix_flops == whole.matrix_flops


def test_parameters_and_active_parameters() -> None:
    D, F, E, k, shared = 24, 40, 16, 3, 56
    moe = MoE(D, F, E, k, shared_F=shared, shared_gate=True, bias=True, router_bias=True, router_linear_bias=True)
    expert = 3 * D * F + 2 * F + D
    beside = D * E + E + E + 3 * D * shared + D
    assert sum(moe.params().values()) == E * expert + beside
    assert moe.active_params() == k * expert + beside


def test_latent_experts_work_at_their_own_width() -> None:
    D, F, E, k, latent = 24, 40, 16, 3, 8
    moe = MoE(D, F, E, k, gated=False, latent=latent)
    assert sum(moe.params().values()) == D * E + 2 * D * latent + E * 2 * latent * F
    assert moe.cost(Work(5, 2)).matrix_flops == 10 * (2 * D * E + 4 * D * latent + k * 4 * latent * F)


def test_storage_of_experts_is_theirs_alone() -> None:
    mxfp4 = format_named("mxfp4")
    moe = MoE(32, 64, 8, 2, shared_F=96, weight=mxfp4, shared_weight=format_named("bf16"))
    params = moe.params()
    assert params[mxfp4] == 8 * 3 * 32 * 64
    assert params[format_named("bf16")] == 32 * 8 + 3 * 32 * 96


@pytest.mark.parametrize(("E", "k", "skew"), [(128, 8, 1.2), (8, 2, 0.5), (16, 4, 6.0), (5, 5, 2.0)])
def test_skewed_routing_still_picks_k_experts_per_token(E: int, k: int, skew: float) -> None:
    chances = selection_probabilities(E, k, skew)
    assert sum(number for _, number in chances) == E
    assert sum(chance * number for chance, number in chances) == pytest.approx(k, rel=1e-12)
    assert all(0 < chance <= 1 for chance, _ in chances)


@pytest.mark.parametrize("tokens", [2, 8, 64, 1000])
def test_skewed_routing_hits_fewer_experts_than_uniform(tokens: int) -> None:
    skewed = [expected_experts(128, 8, tokens, skew) for skew in (0, 0.4, 1.0, 2.0)]
    assert skewed == sorted(skewed, reverse=True)
    assert expected_experts(128, 8, np.array([float(tokens)]), 1.0)[0] == pytest.approx(skewed[2], rel=1e-12)


def test_tiles_pad_the_rows_of_every_expert_hit() -> None:
    tiled = GroupedLinear(8, 8, 16, 4, tile=32)
    assert tiled.rows(1) == 4 * 32
    assert GroupedLinear(8, 8, 16, 4).rows(9) == 36
    many = 10**6
    assert tiled.rows(many) == pytest.approx(4 * many + 16 * 31 / 2, rel=1e-12)
    assert tiled.rows(np.array([1.0, many])) == pytest.approx([4 * 32, tiled.rows(many)], rel=1e-12)


def test_more_experts_per_token_than_experts_are_refused() -> None:
    with pytest.raises(InputError, match="9 is not between 1 and the 8 experts"):
        MoE(8, 16, 8, 9)


def test_the_expectation_is_that_of_drawn_tokens() -> None:
    rng = np.random.default_rng(7)
    E, k, tokens = 16, 3, 6
    drawn = [len({int(e) for _ in range(tokens) for e in rng.choice(E, k, replace=False)}) for _ in range(4000)]
    spread = float(np.std(drawn)) / math.sqrt(len(drawn))
    assert abs(float(np.mean(drawn)) - float(expected_experts(E, k, tokens))) < 4 * spread
