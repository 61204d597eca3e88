"""Speculative decoding: the published tables, exactness, trees against a seeded simulation, and rounds on a GPU."""

from __future__ import annotations

import json
import random
from fractions import Fraction
from typing import Any

import pytest
import sympy
from hypothesis import given, settings
from hypothesis import strategies as st

from roofline import Deployment, InputError, UnsupportedModel, load_accelerator, load_model
from roofline.cli import run
from roofline.speculative.acceptance import (
    acceptance_rate,
    best_length,
    expected_tokens,
    operations_factor,
    oracle_tokens,
    output_distribution,
    pays,
    residual,
    speedup,
)
from roofline.speculative.heads import eagle_step, medusa_heads
from roofline.speculative.rounds import Speculation, multi_token_module
from roofline.speculative.trees import Tree, best_tree, chain, product_tree

H200 = load_accelerator("h200-sxm")
LEVIATHAN_TABLE_1 = (
    (0.6, 2, 1.53, 1.96), (0.7, 3, 1.58, 2.53), (0.8, 2, 1.23, 2.44), (0.8, 5, 1.63, 3.69), (0.9, 2, 1.11, 2.71),
    (0.9, 10, 1.60, 6.86),
)  # fmt: skip
"""arXiv 2211.17192, table 1: alpha, gamma, arithmetic and speed over plain decoding, for a draft that costs nothing."""

LEVIATHAN_TABLE_2 = (
    (7, 0.75, 3.4), (7, 0.80, 2.8), (7, 0.82, 1.7), (7, 0.62, 2.6), (5, 0.68, 2.4), (3, 0.71, 1.4),
    (5, 0.65, 3.1), (5, 0.73, 3.0), (3, 0.74, 2.2), (5, 0.53, 2.3), (3, 0.55, 2.2), (3, 0.56, 1.7),
)  # fmt: skip
"""arXiv 2211.17192, table 2: gamma, alpha and measured speed-up of T5-XXL with T5 small, base, large, four settings."""

OPTIMAL = {
    Fraction(1, 100): ((5, 1.875), (7, 2.297), (9, 2.972), (14, 4.232), (24, 7.486)),
    Fraction(1, 20): ((3, 1.630), (4, 1.921), (6, 2.353), (8, 3.092), (13, 4.674)),
    Fraction(1, 10): ((2, 1.458), (3, 1.674), (4, 1.981), (6, 2.470), (10, 3.431)),
    Fraction(1, 5): ((1, 1.25), (2, 1.4), (3, 1.583), (4, 1.868), (7, 2.373)),
}
"""Draft cost -> (best length, speed-up) at alpha 0.5, 0.6, ... 0.9, from maximising the formula of section 3.3."""


@pytest.mark.parametrize(("alpha", "gamma", "operations", "speed"), LEVIATHAN_TABLE_1)
def test_leviathan_table_1(alpha, gamma, operations, speed):
    assert round(operations_factor(alpha, gamma, 0), 2) == operations
    assert round(speedup(alpha, gamma, 0), 2) == speed


def test_leviathan_table_2_brackets_the_measured_speed_ups():
    """The formula with rounded alphas and independent drafts, against twelve measurements.

    The cost of a draft that each measurement implies lies below 0.3, and a free draft would beat all measurements but for
    16 % in the worst row.
    """
    free = [expected_tokens(alpha, gamma) for gamma, alpha, _ in LEVIATHAN_TABLE_2]
    implied = [(tokens / measured - 1) / gamma for tokens, (gamma, _, measured) in zip(free, LEVIATHAN_TABLE_2, strict=True)]
    assert max(implied) < 0.3, "no row needs a draft that costs a third of the target"
    small, large = (implied[i] for i in (0, 2))
    assert small < large, "T5-small drafts are cheaper than T5-large's"
    within = [tokens / measured > 0.84 for tokens, (_, _, measured) in zip(free, LEVIATHAN_TABLE_2, strict=True)]
    assert all(within), "a measured speed-up beats a free draft by no more than the scatter of alpha"


def test_bigram_draft_of_leviathan():
    """Section 3.6: a bigram table as a draft, alpha 0.2 and gamma 3."""
    assert round(speedup(0.2, 3, 0), 2) == 1.25


@pytest.mark.parametrize("cost", OPTIMAL)
def test_optimal_draft_lengths(cost):
    for tenths, (gamma, speed) in zip(range(5, 10), OPTIMAL[cost], strict=True):
        found, value = best_length(Fraction(tenths, 10), cost)
        assert (found, round(float(value), 3)) == (gamma, speed)


def test_the_sum_is_the_closed_form_in_every_reading():
    alpha = sympy.Symbol("alpha", positive=True)
    for gamma in (0, 1, 5):
        closed = (1 - alpha ** (gamma + 1)) / (1 - alpha)
        assert sympy.simplify(expected_tokens(alpha, gamma) - closed) == 0
    assert expected_tokens(Fraction(1, 2), 3) == Fraction(15, 8)
    assert expected_tokens(1, 7) == 8
    assert expected_tokens(0, 7) == 1
    numpy = pytest.importorskip("numpy")
    assert list(expected_tokens(numpy.array([0.0, 0.5]), 2)) == [1.0, 1.75]


@given(st.fractions(0, Fraction(49, 50), max_denominator=50), st.fractions(Fraction(1, 50), 1, max_denominator=50))
def test_drafting_pays_exactly_where_alpha_exceeds_the_cost(alpha, cost):
    gamma, value = best_length(alpha, cost)
    assert pays(alpha, cost) == (gamma > 0)
    if gamma:
        assert value >= (1 + alpha) / (1 + cost)
        assert value < oracle_tokens(alpha)


weights = st.lists(st.integers(0, 9), min_size=2, max_size=5).filter(any)


@given(st.data())
def test_the_output_has_the_distribution_of_the_target(data):
    target = data.draw(weights)
    draft = data.draw(st.lists(st.integers(0, 9), min_size=len(target), max_size=len(target)).filter(any))
    p, q = ([Fraction(n, sum(many)) for n in many] for many in (target, draft))
    assert output_distribution(p, q) == p
    assert acceptance_rate(p, q) == 1 - sum(abs(a - b) for a, b in zip(p, q, strict=True)) / 2
    assert sum(residual(p, q)) == 1


ACCURACIES = ((0.6, 0.2, 0.1), (0.5, 0.25), (0.4, 0.2, 0.1))


def simulated_tokens(tree: Tree, rounds: int) -> float:
    """Tokens per round when, at each depth, one guess at most is right, by chance; the draw walks down the tree."""
    draw, nodes, total = random.Random(7), set(tree.nodes), 0
    for _ in range(rounds):
        path: tuple[int, ...] = ()
        while len(path) < len(ACCURACIES):
            ranks = ACCURACIES[len(path)]
            rank = draw.choices([*range(len(ranks)), -1], [*ranks, 1 - sum(ranks)])[0]
            if (*path, rank) not in nodes:
                break
            path = (*path, rank)
        total += len(path) + 1
    return total / rounds


@pytest.mark.parametrize("tree", [chain(3), product_tree((3, 2, 3)), best_tree(ACCURACIES, 9), Tree(((1,), (0,), (0, 1)))])
def test_tree_formula_against_a_simulation(tree):
    assert simulated_tokens(tree, 40_000) == pytest.approx(tree.expected_tokens(ACCURACIES), abs=0.02)


def test_a_chain_is_a_tree_without_branches():
    same = ((Fraction(4, 5),),) * 5
    assert chain(5).expected_tokens(same) == expected_tokens(Fraction(4, 5), 5)
    assert (chain(5).tokens, chain(5).depth, chain(5).widths()) == (6, 5, [1, 1, 1, 1, 1])


def test_the_best_tree_beats_every_other_of_its_size():
    def subtrees(size: int) -> set[frozenset[Any]]:
        found = {frozenset[Any]()}
        everything = product_tree((3, 2, 3)).nodes
        for _ in range(size):
            found = {s | {n} for s in found for n in everything if n not in s and (len(n) == 1 or n[:-1] in s)}
        return found

    for size in (1, 3, 5):
        best = best_tree(ACCURACIES, size).expected_tokens(ACCURACIES)
        every = [Tree(tuple(sorted(nodes, key=len))).expected_tokens(ACCURACIES) for nodes in subtrees(size)]
        assert best == pytest.approx(max(every), rel=1e-12)
    assert len(best_tree(ACCURACIES, 4000).nodes) == 3 + 6 + 18


def test_bad_rates_lengths_and_trees_are_refused_by_name():
    for call, text in (
        (lambda: expected_tokens(1.2, 3), "alpha: 1.2"),
        (lambda: expected_tokens(0.5, -1), "gamma: -1"),
        (lambda: speedup(0.5, 2, -0.1), "draft cost"),
        (lambda: oracle_tokens(1), "alpha: at 1"),
        (lambda: Tree(((0, 0),)), "before its parent"),
        (lambda: best_tree(((0.6, 0.6),), 3), "exclude each other"),
        (lambda: best_tree(((0.1, 0.6),), 3), "sort them"),
        (lambda: chain(2).expected_tokens(((0.5,),)), "2 deep"),
        (lambda: Speculation(load_model("llama-3.1-8b"), H200), "draft: give a draft model"),
    ):
        with pytest.raises(InputError, match=text):
            call()


def test_verification_is_the_targets_own_step():
    target, draft = load_model("llama-3.1-8b"), load_model("llama-3.2-1b")
    found = Speculation(target, H200, draft).chain(16, 2048, 0.8, 4)
    whole = Deployment(target, H200)
    assert found.verify.bound == whole.decode(16, 2048, new_tokens=5).bound_s
    assert found.plain.bound == whole.decode(16, 2048).bound_s
    assert found.draft.bound == pytest.approx(sum(Deployment(draft, H200).decode(16, 2048 + i).bound_s for i in range(4)))
    assert found.speedup == pytest.approx(expected_tokens(0.8, 4) * found.plain.bound / (found.draft.bound + found.verify.bound))


@settings(max_examples=20, deadline=None)
@given(st.floats(0.3, 0.95), st.sampled_from([1, 4, 64, 512]))
def test_the_best_length_is_the_best_of_all_lengths(alpha, batch):
    setup = Speculation(load_model("llama-3.1-8b"), H200, draft_cost=0.1)
    best = setup.best(batch, 1024, alpha, 12)
    assert best.speedup == max(setup.chain(batch, 1024, alpha, gamma).speedup for gamma in range(13))
    assert best.speedup >= 1


def test_drafting_shortens_and_stops_paying_as_the_batch_grows():
    """A short context leaves decoding compute-bound at large batches, where rejected drafts are lost arithmetic."""
    setup = Speculation(load_model("llama-3.1-8b"), H200, load_model("llama-3.2-1b"))
    lengths = [setup.best(batch, 512, 0.8).gamma for batch in (1, 16, 128, 512, 2048)]
    assert lengths == sorted(lengths, reverse=True)
    last = setup.last_paying_batch(512, 0.8)
    assert last is not None
    assert 1 < last < 2048
    assert setup.best(last, 512, 0.8).gamma > 0
    assert setup.best(last + 1, 512, 0.8).gamma == 0
    assert Speculation(load_model("llama-3.1-8b"), H200, draft_cost=1).last_paying_batch(512, 0.8) == 0


def test_where_every_draft_survives_the_search_goes_on():
    """At alpha 1 a round of gamma drafts gives gamma + 1 tokens: longer is faster until verifying is bound by arithmetic."""
    setup = Speculation(load_model("llama-3.1-70b"), H200, load_model("llama-3.2-1b"))
    best = setup.best(1, 512, 1)
    assert best.gamma > 64
    assert best.speedup > setup.chain(1, 512, 1, 64).speedup
    assert best.speedup == max(setup.chain(1, 512, 1, gamma).speedup for gamma in range(best.gamma - 40, best.gamma + 41))


def test_the_search_ends_where_no_longer_draft_can_be_faster():
    setup = Speculation(load_model("llama-3.1-8b"), H200, draft_cost=0.02)
    for alpha in (0.5, 0.9):
        best = setup.best(4, 512, alpha)
        assert best.speedup == max(setup.chain(4, 512, alpha, gamma).speedup for gamma in range(201))


def test_a_draft_of_another_vocabulary_is_refused(capsys):
    with pytest.raises(InputError, match="vocabulary of 32,000"):
        Speculation(load_model("llama-3.1-8b"), H200, load_model("tinyllama-1.1b-chat-v1.0"))
    Speculation(load_model("qwen2.5-72b"), H200, load_model("qwen2.5-14b"))
    code, _, err = cli(capsys, "llama-3.1-8b", "--draft", "qwen3-0.6b", "--alpha", "0.8", "--gpu", "h200")
    assert code == 2
    assert "vocabulary" in err


def test_the_verdict_says_first_that_nothing_fits(capsys):
    _, out, _ = cli(capsys, "llama-3.1-70b", "--draft", "llama-3.1-8b", "--alpha", "0.8", "--gpu", "h100-sxm", "--batch", "1")
    lines = out.splitlines()
    assert lines[1].startswith("nothing fits: target and draft need")
    assert "memory aside" in out
    _, out, _ = cli(capsys, "llama-3.1-8b", "--draft", "llama-3.2-1b", "--alpha", "0.8", "--gpu", "h100-sxm", "--batch", "1")
    assert "nothing fits" not in out


def test_multi_token_prediction_of_deepseek_v3():
    """Acceptance of the second token 85-90 %, 1.8 times the tokens per second (arXiv 2412.19437, section 5.4.3).

    The MTP module stores 11.5 B parameters of its own (the model's README).
    """
    model = load_model("deepseek-v3")
    module = multi_token_module(model)
    assert module.params == pytest.approx(11.5e9, rel=0.02)
    assert [round(expected_tokens(alpha, 1), 2) for alpha in (0.85, 0.9)] == [1.85, 1.9]
    found = Speculation(model, H200, module).chain(256, 4096, 0.85, 1)
    assert 1.6 < found.speedup < 1.85
    with pytest.raises(UnsupportedModel):
        multi_token_module(load_model("whisper-large-v3"))


def test_medusa_heads_run_once_however_deep_they_guess():
    target = load_model("vicuna-13b-v1.3")
    setup = Speculation(target, H200, medusa_heads(target, 4), guesses=4)
    drafts = {setup.chain(2, 512, 0.7, gamma).draft for gamma in (1, 2, 4)}
    assert len(drafts) == 1
    assert setup.tree(2, 512, ACCURACIES, product_tree((2, 2))).draft in drafts
    assert setup.chain(2, 512, 0.7, 0).draft.bound == 0
    assert setup.best(1, 512, 1).gamma == 4
    with pytest.raises(InputError, match="4 heads guess 4 tokens ahead, not 5"):
        setup.chain(2, 512, 0.7, 5)


def test_an_eagle_step_runs_once_per_token():
    target = load_model("vicuna-13b-v1.3")
    setup = Speculation(target, H200, eagle_step(target))
    one, three = (setup.chain(2, 512, 0.7, gamma).draft.bound for gamma in (1, 3))
    assert three == pytest.approx(3 * one, rel=0.02)


def cli(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    code = run(["speculate", *arguments])
    return code, *capsys.readouterr()


def test_command_reports_each_length_and_marks_the_best(capsys):
    code, out, _ = cli(
        capsys, "llama-3.1-70b", "--draft", "llama-3.1-8b", "--alpha", "0.8", "--gpu", "h200-sxm", "--batch", "1,64", "--json"
    )
    records = json.loads(out)
    assert code == 0
    for batch in (1, 64):
        rows = [r for r in records if r["batch"] == batch]
        (best,) = [r for r in rows if r["best"]]
        assert best["speedup_bound"] == max(r["speedup_bound"] for r in rows)
    assert records[0]["required_bytes"] > load_model("llama-3.1-70b").weight_bytes + load_model("llama-3.1-8b").weight_bytes


def test_command_without_a_target_gives_the_formulas(capsys):
    code, out, _ = cli(capsys, "--alpha", "0.8", "--draft-cost", "0.05", "--json")
    (best,) = [r for r in json.loads(out) if r["best"]]
    assert code == 0
    assert (best["gamma"], round(best["speedup"], 3)) == (8, 3.092)


def test_command_weighs_trees(capsys):
    code, out, _ = cli(
        capsys, "vicuna-13b-v1.3", "--draft-cost", "0.02", "--tree", "4,6", "--accuracy", "0.7,0.15", "--accuracy", "0.6,0.15",
        "--gpu", "a100-80gb", "--batch", "1,256", "--context", "128", "--json",
    )  # fmt: skip
    small, large = ([r for r in json.loads(out) if r["batch"] == batch] for batch in (1, 256))
    assert code == 0
    assert small[-1]["expected_tokens"] > small[0]["expected_tokens"]
    assert large[-1]["verify_bound_s"] > 1.1 * large[0]["verify_bound_s"], "at batch 256 every node costs arithmetic"


def test_command_on_a_mesh(capsys):
    arguments = (
        "llama-3.1-70b",
        "--draft",
        "llama-3.1-8b",
        "--alpha",
        "0.8",
        "--gpu",
        "h100-sxm",
        "--batch",
        "8",
        "--gamma",
        "4",
    )
    _, one, _ = cli(capsys, *arguments, "--json")
    code, eight, _ = cli(capsys, *arguments, "--tp", "8", "--json")
    single, sharded = (next(r for r in json.loads(out) if r["gamma"] == 4) for out in (one, eight))
    assert code == 0
    assert (sharded["gpus"], sharded["mesh"]) == (8, "--tp 8")
    assert single["verify_bound_s"] / 8.5 < sharded["verify_bound_s"] < single["verify_bound_s"] / 7
    assert sharded["fits"]
    assert not single["fits"]
    code, out, _ = cli(
        capsys, "deepseek-v3", "--draft", "mtp", "--alpha", "0.85", "--gpu", "h200-sxm", "--tp", "8", "--ep", "8", "--json"
    )
    assert code == 0
    assert json.loads(out)[0]["fits"]


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ((), "alpha: say how often"),
        (("llama-3.1-8b", "--alpha", "0.8", "--draft-cost", "0.1", "--gpu", "h200", "--pp", "2"), "mesh: speculate takes"),
        (("--alpha", "0.8"), "target: name the model"),
        (("llama-3.1-8b", "--alpha", "0.8", "--gpu", "h200"), "draft: name a draft model"),
        (("llama-3.1-8b", "--alpha", "1.5", "--draft-cost", "0.1", "--gpu", "h200"), "alpha: '1.5' is out of range"),
        (("llama-3.1-8b", "--alpha", "0.8", "--draft-cost", "x", "--gpu", "h200"), "draft-cost: 'x'"),
        (("llama-3.1-8b", "--tree", "8", "--draft-cost", "0.1", "--gpu", "h200"), "tree: say how often"),
        (("llama-3.1-8b", "--alpha", "0.8", "--accuracy", "0.5", "--draft-cost", "0.1"), "accuracy: chances"),
        (("whisper-large-v3", "--alpha", "0.8", "--draft-cost", "0.1", "--gpu", "h200"), "encoder-decoder"),
    ],
)
def test_command_refuses_in_one_line(capsys, arguments, text):
    code, out, err = cli(capsys, *arguments)
    assert (code, out) == (2, "")
    assert text in err


def test_command_drafts_with_heads_of_the_target(capsys):
    code, out, _ = cli(
        capsys, "vicuna-13b-v1.3", "--draft", "medusa:3", "--alpha", "0.7", "--gpu", "h200-sxm", "--batch", "1", "--json"
    )
    assert code == 0
    assert [record["gamma"] for record in json.loads(out)] == [1, 2, 3]
    code, out, _ = cli(
        capsys, "vicuna-13b-v1.3", "--draft", "eagle", "--alpha", "0.7", "--gpu", "h200-sxm", "--batch", "1", "--json"
    )
    assert code == 0
    assert json.loads(out)[0]["draft"] == "vicuna-13b-v1.3 EAGLE head"
    code, _, err = cli(capsys, "vicuna-13b-v1.3", "--draft", "medusa:x", "--alpha", "0.7", "--gpu", "h200-sxm")
    assert code == 2
    assert "'x' is not a number of Medusa heads" in err
    code, _, err = cli(capsys, "vicuna-13b-v1.3", "--draft", "medusa", "--alpha", "0.7", "--gpu", "h200-sxm", "--tp", "2")
    assert code == 2
    assert "Medusa heads over several GPUs are not modelled" in err


def test_no_draft_at_all_pays_nowhere(capsys: pytest.CaptureFixture[str]) -> None:
    _, out, _ = cli(capsys, "llama-3.1-8b", "--draft", "llama-3.2-1b", "--alpha", "0.8", "--gpu", "h100-sxm", "--gamma", "0")
    assert "drafting pays" not in out
