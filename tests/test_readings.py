"""One formula, several readings: exact, symbolic and vectorised agree; and the rules that keep it so."""

from __future__ import annotations

from fractions import Fraction

import numpy
import pytest
import sympy
from hypothesis import given, settings
from hypothesis import strategies as st

from roofline import Deployment, Work, load_accelerator
from roofline.components.attention import Attention, AttentionBlock, UnfusedAttention
from roofline.components.draft_heads import MedusaHeads
from roofline.components.feedforward import MLP
from roofline.components.linear import Embedding, Linear
from roofline.components.mixing import Quantise, layer_norm, rms_norm
from roofline.cost import Cost
from roofline.formats import FORMATS, FP8, grouped
from roofline.model import Layer, Model
from roofline.numeric import (
    ceil_div,
    floor_div,
    half,
    is_exact,
    maximum,
    ratio,
    reading,
    scale,
    triangle,
    where,
)
from roofline.sweep import decode_sweep
from roofline.symbols import ALPHABET, symbol, symbols

H100 = load_accelerator("h100-sxm")
D, F, N, K, H, L, V = 40, 56, 6, 2, 12, 3, 101


def tiny(**attention) -> Model:
    """A small decoder whose dimensions are pairwise distinct."""
    options = {"D": D, "N": N, "K": K, "H": H, "rotary": H, **attention}
    layer = Layer((rms_norm(D, residual=True), AttentionBlock(**options), rms_norm(D, residual=True), MLP(D, F)))
    head = Linear(D, V, rows="logit_rows", name="head")
    return Model("tiny", (Embedding(V, D),), (layer,) * L, (rms_norm(D, residual=True),), (head,))


COMPONENTS = {
    "linear": Linear(D, F, bias=True, weight=grouped(4, 128)),
    "embedding": Embedding(V, D, positions=64),
    "rms": rms_norm(D),
    "layer-norm": layer_norm(D, residual=True),
    "norm-quantised": rms_norm(D, residual=True, output=FORMATS["fp8-token"]),
    "quantise-block": Quantise(D, block=16),
    "quantise-tensor": Quantise(D, "tensor"),
    "causal": Attention(N, K, H),
    "window": Attention(N, K, H, mask="window", size=7),
    "chunk": Attention(N, K, H, mask="chunk", size=5),
    "full": Attention(N, K, H, mask="full"),
    "cross": Attention(N, K, H, mask="cross"),
    "values-of-another-width": Attention(N, K, H, value_dim=8, kv=FP8),
    "unfused": UnfusedAttention(N, K, H),
    "block": AttentionBlock(D, N, K, H, rotary=8, qkv_bias=True, qk_norm="head", gated=True),
    "mlp": MLP(D, F, weight=FORMATS["fp8-block"]),
    "medusa": MedusaHeads(D, V, 3, 2),
    "mlp-plain": MLP(D, F, gated=False, bias=True),
}
POINTS = [(1, 1, 0), (3, 1, 17), (2, 9, 0), (5, 4, 11), (7, 13, 6), (2, 6, 7), (1, 5, 5)]


@pytest.mark.parametrize("name", COMPONENTS)
def test_exact_symbolic_and_vectorised_readings_agree(name):
    component = COMPONENTS[name]
    formula = component.cost(Work(*symbols("B T S"), all_logits=True))
    columns = [numpy.array(column, dtype=float) for column in zip(*POINTS, strict=True)]
    swept = component.cost(Work(*columns, all_logits=True))
    for index, point in enumerate(POINTS):
        exact = component.cost(Work(*point, all_logits=True))
        values = dict(zip(symbols("B T S"), map(sympy.Integer, point), strict=True))
        arrays = {(a, b): v for a, b, v in swept.entries()}
        letters = {(a, b): v for a, b, v in formula.entries()}
        for section, key, value in exact.entries():
            assert isinstance(value, (int, Fraction)), (section, key)
            symbolic = sympy.sympify(letters[section, key]).xreplace(values)
            assert symbolic.is_Rational, (section, key)
            assert Fraction(int(symbolic.p), int(symbolic.q)) == value, (section, key)
            array = numpy.broadcast_to(arrays[section, key], len(POINTS))
            assert array[index] == pytest.approx(float(value), rel=1e-12), (section, key)


def test_a_size_that_overflows_int64_is_right_in_every_reading():
    """80 layers, B = 512, T = S = 131072: 3.2e19 attention FLOPs and more, where int64 would wrap to a negative number."""
    core = Attention(64, 8, 128)
    exact = 80 * core.cost(Work(512, 131072, 131072)).flops["bf16"]
    assert exact == 80 * 4 * 512 * 64 * 128 * (131072 * 131072 + 131072 * 131073 // 2)
    assert exact > 2**63
    swept = core.cost(Work(numpy.array([512]), numpy.array([131072]), numpy.array([131072]))).flops["bf16"]
    assert 80 * swept[0] == pytest.approx(float(exact), rel=1e-12)


def test_sweep_equals_the_scalar_path():
    deployment = Deployment(tiny(), H100)
    batches, contexts = [1, 8, 300, 2], [0, 17, 4096, 131072]
    found = decode_sweep(deployment, batches, contexts)
    for index, (batch, context) in enumerate(zip(batches, contexts, strict=True)):
        step = deployment.decode(batch, context)
        assert found.tpot_bound_s[index] == pytest.approx(step.bound_s, rel=1e-12)
        assert found.tpot_serial_s[index] == pytest.approx(step.serial_s, rel=1e-12)
        assert found.required_bytes[index] == step.memory.required_bytes
        assert bool(found.fits[index]) == step.memory.fits


@given(st.integers(-(10**30), 10**30))
def test_half_is_an_int_where_whole_and_a_fraction_elsewhere(x):
    assert half(x) * 2 == x
    assert isinstance(half(x), int if x % 2 == 0 else Fraction)


@given(st.integers(0, 10**20), st.integers(1, 10**6))
def test_ratio_scale_and_divisions_are_exact(a, b):
    assert ratio(a, b) * b == a
    assert isinstance(ratio(a * b, b), int)
    assert scale(a, Fraction(33, 64)) * 64 == 33 * a
    assert isinstance(scale(64 * a, Fraction(33, 64)), int)
    assert floor_div(a, b) * b <= a < (floor_div(a, b) + 1) * b
    assert ceil_div(a, b) == -(-a // b)
    assert triangle(b) == sum(range(b + 1)) if b < 2000 else triangle(b) == b * (b + 1) // 2


def test_a_fraction_never_makes_an_object_array():
    array = numpy.array([1.0, 2.0])
    for result in (scale(array, Fraction(9, 16)), maximum(array, Fraction(3, 2)), ratio(array, Fraction(3, 2))):
        assert result.dtype == numpy.float64


def test_integer_arrays_are_refused_because_they_overflow():
    with pytest.raises(TypeError, match="float64"):
        scale(numpy.array([1, 2]), 2)
    assert Work(numpy.array([1, 2])).B.dtype == numpy.float64


def test_arrays_and_symbols_do_not_mix():
    with pytest.raises(TypeError, match="symbol"):
        maximum(numpy.array([1.0]), symbol("S"))


def test_where_never_tests_the_truth_of_an_array_or_a_symbol():
    S, W = symbols("S W")
    assert where(S < W, 1, 2).xreplace({S: sympy.Integer(3), W: sympy.Integer(5)}) == 1
    assert where(numpy.array([True, False]), 1.0, 2.0).tolist() == [1.0, 2.0]
    assert where(True, 1, 2) == 1
    with pytest.raises(TypeError):
        where("yes", 1, 2)


def test_symbols_carry_their_assumptions_and_are_made_once():
    assert symbol("S") is symbol("S")
    assert symbol("S").is_nonnegative
    assert symbol("S").is_positive is None, "a prefill has S = 0, so S must not be positive"
    assert all(symbol(name).is_positive for name, letter in ALPHABET.items() if not letter.may_be_zero)
    assert maximum(symbol("S"), 1) != symbol("S")


def test_reading_refuses_what_is_not_a_number():
    assert reading(1, Fraction(1, 2), 2.0) is None
    with pytest.raises(TypeError):
        reading("1")


def test_costs_compare_by_value_only_while_exact():
    assert Cost(flops={"bf16": 4}, launches=1) == Cost(flops={"bf16": 4, "fp8": 0}, launches=1)
    assert Cost(flops={"bf16": 4}) != Cost(flops={"bf16": 5})
    with pytest.raises(TypeError, match="exact"):
        assert Cost(flops={"bf16": 4.0}) == Cost(flops={"bf16": 4.0})
    with pytest.raises(TypeError):
        hash(Cost())


def test_a_cost_is_immutable():
    cost = Cost(flops={"bf16": 4})
    with pytest.raises(AttributeError):
        cost.launches = 3
    with pytest.raises(TypeError):
        cost.flops["bf16"] = 5


def test_exactness_is_told_by_type():
    assert is_exact(3)
    assert is_exact(Fraction(1, 3))
    assert is_exact(symbol("B") / 3)
    assert not is_exact(3.0)
    assert not is_exact(symbol("B") * 0.5)


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 40), st.integers(1, 40), st.integers(0, 60), st.integers(1, 50))
def test_masks_equal_a_brute_force_count(B, T, S, size):
    from roofline.components.masks import keys, pairs

    def seen(mask, position):
        if mask == "causal":
            return range(position + 1)
        if mask == "window":
            return range(max(0, position + 1 - size), position + 1)
        if mask == "chunk":
            return range(position - position % size, position + 1)
        return range(S + T) if mask == "full" else range(S)

    for mask in ("causal", "window", "chunk", "full", "cross"):
        visible = [set(seen(mask, position)) for position in range(S, S + T)]
        assert pairs(mask, size, T, S) == sum(map(len, visible)), mask
        touched = set().union(*visible)
        if mask == "chunk":  # one contiguous read from the open chunk on, whole even where a later chunk starts inside
            assert keys(mask, size, T, S) == S + T - (S - S % size)
        else:
            assert keys(mask, size, T, S) == len(touched), mask
