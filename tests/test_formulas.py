"""The formula book: every entry prints, reads back, and is the very component that models are made of."""

from __future__ import annotations

from pathlib import Path

import pytest
import sympy

from roofline import InputError, Work, load_accelerator, load_model
from roofline.components.mla import MLA
from roofline.formulas import formula, letters_of, markdown, names
from roofline.symbols import ALPHABET, symbol, symbols

DOCS = Path(__file__).parent.parent / "docs" / "formulas.md"

NEEDED = {
    "linear", "mlp", "attention", "attention-window", "attention-unfused", "embedding", "head", "norm", "dense-model", "mla",
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


def test_substituting_a_model_gives_the_cost_of_its_component():
    model = load_model("llama-3.1-8b")
    found = formula("dense-model", model=model)
    assert found.params == model.params
    B, T, S, w, s = symbols("B T S w s")
    point = {B: 3, T: 5, S: 7, w: 2, s: 2}
    cost = model.cost(Work(3, 5, 7, all_logits=True))
    assert found.flops.xreplace(point) == cost.matrix_flops
    assert found.bytes.xreplace(point) == cost.bytes
    assert letters_of(model)["G" if "G" in letters_of(model) else "K"] == 8


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


def test_docs_are_generated_from_the_code():
    assert DOCS.read_text(encoding="utf-8") == markdown(), "run python docs/generate_formulas.py"


@pytest.mark.parametrize(
    ("call", "complaint"),
    [
        (lambda: formula("atention"), "atention.*Did you mean 'attention'"),
        (lambda: formula("linear", "other"), "convention"),
        (lambda: formula("linear", values={"Ø": 1}), "not a letter"),
    ],
)
def test_bad_requests_name_the_field(call, complaint):
    with pytest.raises(InputError, match=complaint):
        call()


KEYS = [
    "name", "title", "convention", "flop", "elementwise_flop", "bytes", "intensity", "limits", "parameters",
    "state_bytes_per_sequence", "values", "source",
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
    """With a model's numbers, a number of one's own and a ridge; a value that was set no longer stands in a formula."""
    (row,) = cli(
        "formula", name, "--model", "mixtral-8x7b-v0.1", "--set", "S=1024,T=1", "--gpu", "h100-sxm", "-o", "json"
    ).records
    assert list(row) == [*KEYS, "batch_at_ridge"]
    left = sympy.sympify(row["bytes"], locals={letter: symbol(letter) for letter in ALPHABET})
    assert not {"S", "T"} & {str(letter) for letter in left.free_symbols}
    assert row["values"].get("T", 1) == 1
    assert cli("formula", name, "--latex").out.startswith(r"\text{")
