"""Golden values of CS336 lecture 10 (stanford-cs336/lectures, lecture_10.py): Llama-2-13B on an H100, and its limits."""

from __future__ import annotations

from fractions import Fraction

import pytest
import sympy

from roofline import Deployment, load_accelerator, load_model
from roofline.components.attention import Attention
from roofline.edits import apply, kv_heads
from roofline.formulas import formula
from roofline.symbols import symbols

S = 1024
H100 = load_accelerator("h100-sxm")
MHA = load_model("llama-2-13b")
GQA = apply(MHA, [kv_heads(8)])

# model, batch, memory [B], latency [s], throughput [tok/s]: the table that the lecture's script prints
ROWS = [
    (MHA, 1, 26869760000, 0.00802082388059702, 124.675471608232),
    (MHA, 64, 79717990400, 0.0237964150447761, 2689.48074235449),
    (MHA, 256, 240779264000, 0.0718744071641791, 3561.76850843767),
    (GQA, 1, 22843228160, 0.00681887407761194, 146.651776908925),
    (GQA, 64, 33412874240, 0.00997399231044776, 6416.68832378785),
    (GQA, 256, 65625128960, 0.0195895907343284, 13068.1647958776),
]


@pytest.mark.parametrize(("model", "batch", "memory", "latency", "throughput"), ROWS)
def test_the_lecture_table_to_twelve_digits(model, batch, memory, latency, throughput):
    step = Deployment(model, H100, "lecture").decode(batch, S)
    assert step.memory.total_bytes == memory
    assert step.bound_s == pytest.approx(latency, rel=1e-12)
    assert step.output_tok_per_s == pytest.approx(throughput, rel=1e-12)


@pytest.mark.parametrize(
    ("model", "per_sequence", "weights", "slope", "intercept", "throughput"),
    [
        (MHA, 838860800, 26030899200, 0.000250406208955224, 0.00777041767164179, "127792.358398438*B/(32*B + 993)"),
        (GQA, 167772160, 22675456000, 5.00812417910448e-5, 0.0067687928358209, "638961.791992188*B/(32*B + 4325)"),
    ],
)
def test_the_symbolic_rows_of_the_lecture(model, per_sequence, weights, slope, intercept, throughput):
    (B,) = symbols("B")
    step = Deployment(model, H100, "lecture").decode(B, S)
    assert sympy.expand(step.memory.total_bytes - (per_sequence * B + weights)) == 0
    line = sympy.Poly(step.timing.memory, B)
    assert [float(c) for c in line.all_coeffs()] == pytest.approx([slope, intercept], rel=1e-12)
    printed = sympy.sympify(throughput, locals={"B": B})
    for batch in (1, 7, 64, 256, 10**6):
        ours = (B / step.timing.memory).xreplace({B: sympy.Integer(batch)})
        assert float(ours) == pytest.approx(float(printed.xreplace({B: sympy.Integer(batch)})), rel=1e-12)


def test_lecture_parameters_are_the_published_ones_without_norms():
    norms = (2 * 40 + 1) * 5120
    assert MHA.params == 13015864320 == 13015449600 + norms
    assert MHA.lecture_weight_bytes == 2 * 13015449600
    assert GQA.lecture_weight_bytes == 2 * 11337728000


def test_batch_256_fits_only_with_eight_key_value_heads():
    assert not Deployment(MHA, H100, "lecture").decode(256, S).memory.fits
    assert Deployment(GQA, H100, "lecture").decode(256, S).memory.fits


def test_still_memory_bound_at_batch_256_with_compute_counted():
    step = Deployment(GQA, H100).decode(256, S)
    assert step.timing.compute == pytest.approx(2 * 256 * 11337728000 / 989e12, rel=0.06)
    assert step.bound_by == "memory"


def test_ridge_of_the_h100():
    assert H100.ridge() == 295.2238805970149
    assert round(H100.ridge()) == 295


def test_matmul_counts_and_intensity_limit():
    B, D, F = symbols("B D F")
    linear = formula("linear", values={"T": 1})
    w = symbols("w")[0]
    assert linear.flops == 2 * B * D * F
    assert sympy.expand(linear.bytes.xreplace({w: 2}) - (2 * B * D + 2 * D * F + 2 * B * F)) == 0
    assert sympy.simplify(linear.intensity - B * D * F / (B * D + B * F + D * F)) == 0
    assert linear.limits[0][1] == B


def test_mlp_counts_and_intensity_limit():
    B, T, D, F, w = symbols("B T D F w")
    mlp = formula("mlp")
    assert sympy.expand(mlp.flops - 6 * B * T * D * F) == 0
    assert sympy.expand(mlp.bytes.xreplace({w: 2}) - (4 * B * T * D + 4 * B * T * F + 6 * D * F)) == 0
    assert sympy.simplify(mlp.intensity - 3 * B * D * F * T / (2 * B * D * T + 2 * B * F * T + 3 * D * F)) == 0
    assert sympy.expand(mlp.limits[0][1] - B * T) == 0


def test_attention_counts_and_intensity_under_the_lecture_convention():
    B, T, s_, N, H, s = symbols("B T S N H s")
    attention = formula("attention", "lecture")
    D = N * H
    assert sympy.expand(attention.flops - 4 * B * s_ * T * D) == 0
    assert sympy.expand(attention.bytes.xreplace({s: 2}) - (4 * B * s_ * D + 4 * B * T * D)) == 0
    assert sympy.simplify(attention.intensity - s_ * T / (s_ + T)) == 0


def test_prefill_and_decode_intensity_of_attention():
    core = Attention(4, 4, 16, mask="cross")
    from roofline import Work

    assert core.cost(Work(1, 2048, 2048)).intensity == 2048 / 2
    assert core.cost(Work(1, 1, 2048)).intensity == Fraction(2048, 2049)
    assert core.cost(Work(1, 1, 2048)).intensity < 1
