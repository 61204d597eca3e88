"""The formula book: every entry prints, reads back, and is the very component that models are made of."""

from __future__ import annotations

from fractions import Fraction
from pathlib import Path

import pytest
import sympy

from roofline import InputError, Work, load_accelerator, load_model
from roofline.components.mla import MLA
from roofline.formulas import formula, markdown, names
from roofline.symbols import ALPHABET, symbol, symbols

DOCS = Path(__file__).parent.parent / "docs" / "formulas.md"

NEEDED = {
    "linear", "mlp", "attention", "attention-window", "attention-unfused", "embedding", "head", "norm", "step", "mla",
    "mla-expanded", "dsa", "csa", "hca", "hyper-connection", "cla", "cross-attention", "mamba", "mamba2", "gated-deltanet", "kda",
    "rwkv", "short-conv", "rg-lru", "lightning", "moe", "moe-shared",
}  # fmt: skip


def test_the_book_covers_every_kind_of_component():
    assert set(names()) >= NEEDED


@pytest.mark.parametrize("name", names())
def test_every_entry_prints_and_reads_back(name):
    found = formula(name)
    lines = found.lines()
    assert lines[0] == f"{name}: {found.title}"
    assert lines[-1].startswith("  source: ")
    assert len(found.latex()) == len(found.rows())
    locals_ = {letter: symbol(letter) for letter in ALPHABET}
    point = {symbol(letter): sympy.Integer(prime) for letter, prime in zip(ALPHABET, sympy.primerange(3, 200), strict=False)}
    for label, value in found.rows():
        again = sympy.sympify(str(value), locals=locals_)
        assert again.xreplace(point) == value.xreplace(point), label
        assert not value.has(sympy.Float), label
        assert {str(s) for s in value.free_symbols} <= set(ALPHABET), label


@pytest.mark.parametrize(
    ("name", "index", "limit"),
    [
        ("linear", 0, "B*T"),
        ("mlp", 0, "B*T"),
        ("mlp-plain", 0, "B*T"),
        ("head", 0, "B*T"),
        ("attention", 0, "N/K"),
        ("attention", 1, "oo"),
        ("attention-full", 0, "N/K"),
        ("attention-window", 0, "N*W/(K*W + N)"),
        ("attention-window", 1, "N*(S + 1)/(K*S + K + N)"),
        ("attention-unfused", 0, "H/2"),
        ("mla-core", 0, "N*(P + 2*R)/(P + R)"),
    ],
)
def test_limits_of_the_intensity(name, index, limit):
    """A decode step's attention tends to G = N / K at bf16: 1 for MHA, 8 for Llama-3-70B; latents give N (2 R + P) / (R + P)."""
    letters = {letter: symbol(letter) for letter in ALPHABET}
    assert sympy.simplify(formula(name).limits[index][1] - sympy.sympify(limit, locals=letters)) == 0 or limit == "oo"
    assert (limit == "oo") == (formula(name).limits[index][1] == sympy.oo)


def test_the_latent_core_of_deepseek_v3_has_intensity_242():
    """FlashMLA's regime: 278528 FLOP over 1152 bytes per cached token."""
    values = {"N": 128, "R": 512, "P": 64}
    assert float(formula("mla-core", values=values).limits[0][1]) == pytest.approx(278528 / 1152)


def at(formula_, B, T, S):
    """Values of a formula's FLOPs, bytes and state at a point."""
    point = dict(zip(symbols("B T S"), map(sympy.Integer, (B, T, S)), strict=True))
    return tuple(value.xreplace(point) for value in (formula_.flops, formula_.bytes, formula_.state_bytes))


@pytest.mark.parametrize(
    "name",
    ["llama-3.1-8b", "llama-3.2-1b", "gpt2", "mixtral-8x7b-v0.1", "deepseek-v3", "qwen3.5-27b", "nemotron-h-56b", "gemma-2-9b"],
)
def test_the_step_of_a_model_is_its_cost(name):
    model = load_model(name)
    found = formula("step", model=model)
    assert found.params == model.params
    cost = model.cost(Work(1, 1, 7, all_logits=True))
    assert at(found, 1, 1, 7) == (cost.matrix_flops, cost.bytes, model.state_bytes(7))


@pytest.mark.parametrize(
    ("entry", "name", "block"),
    [
        ("moe-shared", "deepseek-v3", lambda model: model.layers[10].blocks[3]),
        ("mla", "deepseek-v3", lambda model: model.layers[0].blocks[1]),
        ("mamba2", "nemotron-h-56b", lambda model: model.layers[0].blocks[1]),
        ("gated-deltanet", "qwen3.5-27b", lambda model: model.layers[0].blocks[1]),
        ("moe", "qwen3-30b-a3b", lambda model: model.layers[0].blocks[3]),
        ("attention-block", "llama-3.1-8b", lambda model: model.layers[0].blocks[1]),
        ("csa", "deepseek-v4-pro", None),
    ],
)
def test_a_model_shows_its_own_block_and_never_another(entry, name, block):
    model = load_model(name)
    found = formula(entry, model=model)
    assert model.name in found.of
    if block is not None:
        own = block(model)
        assert found.params == sum(own.params().values())
        cost = own.cost(Work(2, 1, 9, all_logits=True))
        state = sum(piece.bytes(9) for piece in own.state())
        flops, moved, kept = at(found, 2, 1, 9)
        assert (flops, kept) == (cost.matrix_flops, state)
        assert float(moved) == pytest.approx(float(cost.bytes))


@pytest.mark.parametrize(
    ("entry", "name"),
    [("moe", "llama-3.1-8b"), ("mla", "llama-3.1-8b"), ("mlp", "qwen3-30b-a3b"), ("mamba2", "gpt2"), ("mlp", "gpt2")],
)
def test_a_block_that_the_model_does_not_have_is_refused(entry, name):
    with pytest.raises(InputError, match=f"{name} has no {entry}"):
        formula(entry, model=load_model(name))


def test_the_lecture_formulas_of_a_whole_model():
    """memory = 838860800 B + 26030899200 for Llama-2-13B at S = 1024 (CS336 lecture 10), and the form with letters."""
    B = symbol("B")
    found = formula("step", "lecture", load_model("llama-2-13b"), {"S": 1024})
    assert sympy.expand(found.bytes - (838860800 * B + 26030899200)) == 0
    assert found.flops == 0
    D, F, N, K, H, L, V, S, w, s = symbols("D F N K H L V S w s")
    letters = formula("step", "lecture")
    parameters = 2 * V * D + D * F * 3 * L + (2 * D * N * H + 2 * D * K * H) * L
    assert sympy.expand(letters.bytes - (w * parameters + B * S * K * H * L * 2 * s)) == 0


def test_the_batch_at_the_ridge():
    h100 = load_accelerator("h100-sxm")
    batch = formula("linear", values={"T": 1, "D": 8192, "F": 28672}).batch_at_ridge(h100)
    assert float(batch) == pytest.approx(1 / (1 / h100.ridge() - 1 / 8192 - 1 / 28672))


def test_what_one_more_key_value_head_costs():
    found = formula("attention-block")
    K = symbol("K")
    S, H, s = symbols("S H s")
    assert sympy.expand(sympy.diff(found.state_bytes, K) - 2 * S * H * s) == 0


def test_the_book_shows_the_components_of_models():
    D, N, Q, R, P, H, Z = symbols("D N Q R P H Z")
    block = MLA(D, N, Q, R, P, H, Z)
    B, T, S, w, s = symbols("B T S w s")
    cost = block.cost(Work(B, T, S, all_logits=True))
    assert sympy.expand(cost.matrix_flops - formula("mla").flops) == 0
    assert sympy.expand(cost.bytes - formula("mla").bytes.xreplace({w: 2, s: 2})) == 0


def test_bytes_of_an_element_may_be_fractions():
    half_byte = formula("linear", values={"w": Fraction(33, 64), "B": 1, "T": 1})
    D, F = symbols("D F")
    assert sympy.expand(half_byte.bytes - (2 * D + 2 * F + sympy.Rational(33, 64) * D * F)) == 0


def test_a_formula_of_nothing_prints():
    assert formula("attention", values={"S": 0, "T": 1, "B": 1}).lines()


def test_docs_are_generated_from_the_code():
    assert DOCS.read_text(encoding="utf-8") == markdown(), "run python docs/generate_formulas.py"


@pytest.mark.parametrize(
    ("call", "complaint"),
    [
        (lambda: formula("atention"), "atention.*Did you mean 'attention'"),
        (lambda: formula("linear", "other"), "convention"),
        (lambda: formula("linear", values={"Ø": 1}), "not a letter"),
        (lambda: formula("linear", values={"S": 1}), "has no S; its letters are B, D, F, T, w"),
        (lambda: formula("linear", values={"B": 0}), "B = 0 is out of range"),
        (lambda: formula("attention", values={"N": 32, "K": 5}), "do not divide"),
        (lambda: formula("moe", values={"E": 4, "k": 9}), "more than the E = 4"),
        (lambda: formula("norm", "lecture"), "the lecture does not count norm; it counts linear"),
    ],
)
def test_bad_requests_name_the_field(call, complaint):
    with pytest.raises(InputError, match=complaint):
        call()


KEYS = [
    "name", "title", "convention", "flop", "elementwise_flop", "bytes", "intensity", "limits", "parameters",
    "state_bytes_per_sequence", "values", "of", "source",
]  # fmt: skip


@pytest.mark.parametrize("name", names())
def test_every_entry_has_the_same_keys_whatever_is_zero(name):
    found = formula(name)
    record = found.to_dict()
    assert list(record) == KEYS
    locals_ = {letter: symbol(letter) for letter in ALPHABET}
    again = sympy.sympify(record["flop"], locals=locals_)
    assert again == found.flops or sympy.expand(again - found.flops) == 0
    assert list(record["limits"]) == [condition for condition, _ in found.limits]
    assert not any(condition in record for condition, _ in found.limits), "a limit is no formula of the component"


def test_experts_reach_the_ridge_at_a_batch_that_is_found_by_bisection():
    """All experts are hit long before: the batch is near ridge E / k, and a little above for the other bytes."""
    h100 = load_accelerator("h100-sxm")
    values = {"T": 1, "D": 8192, "F": 28672, "E": 8, "k": 2}
    found = formula("moe", values=values)
    batch = float(found.batch_at_ridge(h100))
    assert float(found.intensity.xreplace({symbol("B"): sympy.Float(batch)})) == pytest.approx(h100.ridge(), rel=1e-9)
    assert 1 < batch / (h100.ridge() * 8 / 2) < 1.1
    with pytest.raises(InputError, match=r"no closed form here; set E, k to numbers"):
        formula("moe", values={"T": 1, "D": 8192, "F": 28672}).batch_at_ridge(h100)
    assert formula("moe", values={**values, "D": 8, "F": 8}).batch_at_ridge(h100) is None


@pytest.mark.parametrize("name", names())
def test_every_entry_answers_on_the_command_line(name, cli):
    """With numbers for B and T and a ridge where it has one; a value that was set no longer stands in a formula."""
    (row,) = cli("formula", name, "--set", "T=1", "-o", "json").records
    assert list(row) == [*KEYS, "assumes", "not_modelled"]
    left = sympy.sympify(row["bytes"], locals={letter: symbol(letter) for letter in ALPHABET})
    assert "T" not in {str(letter) for letter in left.free_symbols}
    assert row["values"] == {"T": 1}
    assert cli("formula", name, "--latex").out.startswith(r"\text{")
