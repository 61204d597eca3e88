"""Draws follow the distributions they must: verification of drafts, whole draft-and-verify loops, filters."""

from __future__ import annotations

import pytest

pytest.importorskip("triton")

import itertools

import torch

from roofline.kernels.sampling import Draws, distribution, sample
from roofline.kernels.sampling import inputs as draws
from roofline.kernels.speculative import CHAIN, FORK, chain, depth_of, generate, verify
from roofline.validate.counted import counting

V = 8
FAR_OUT = 24.32
"""What chi-square of seven degrees of freedom exceeds once in a thousand draws."""


def chi_square(observed: torch.Tensor, probabilities: torch.Tensor) -> float:
    """Pearson's statistic of counts against a distribution."""
    expected = probabilities.double() * observed.sum()
    return float(((observed.double() - expected).square() / expected).sum())


def repeated(children: tuple[tuple[int, ...], ...], times: int, seed: int) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """Many sequences with one target and one draft, whose drafts are drawn anew."""
    generator = torch.Generator().manual_seed(seed)
    nodes, width = len(children), max(len(some) for some in children)
    target = torch.softmax(torch.randn(nodes, V, generator=generator), 1)
    draft = torch.softmax(torch.randn(nodes, V, generator=generator), 1)
    tokens = torch.zeros(times, nodes, dtype=torch.int32)
    for node, some in enumerate(children):
        for child in some:
            tokens[:, child] = torch.multinomial(draft[node], times, True, generator=generator).to(torch.int32)
    uniform = torch.rand(times, nodes + 1, generator=generator)
    table = [[*some, *[-1] * (width - len(some))] for some in children]
    tensors = {
        "target": target.expand(times, -1, -1).contiguous(),
        "draft": draft.expand(times, -1, -1).contiguous(),
        "tokens": tokens,
        "children": torch.tensor(table, dtype=torch.int32),
        "accepting": uniform[:, :nodes].contiguous(),
        "drawing": uniform[:, nodes].contiguous(),
    }
    return tensors, torch.tensor(depth_of(table))


@pytest.mark.parametrize(
    ("children", "seed"), [((*CHAIN[:2], ()), 1), (FORK, 2), (((1, 2, 3), (), (), ()), 3)], ids=["chain", "tree", "star"]
)
def test_emitted_tokens_follow_the_target(children: tuple[tuple[int, ...], ...], seed: int) -> None:
    tensors, depth = repeated(children, 400, seed)
    with counting():
        out, accepted = verify(**tensors, depth=int(depth), block=V)
    first = torch.bincount(out[:, 0].long(), minlength=V)
    assert chi_square(first, tensors["target"][0, 0]) < FAR_OUT
    after = [row for row in range(len(out)) if accepted[row] >= 1]
    node = [next(child for child in children[0] if tensors["tokens"][row, child] == out[row, 0]) for row in after]
    branch = max(set(node), key=node.count)
    second = torch.bincount(
        torch.tensor([int(out[row, 1]) for row, at in zip(after, node, strict=True) if at == branch]), minlength=V
    )
    assert chi_square(second, tensors["target"][0, branch]) < FAR_OUT


def test_a_draft_is_accepted_as_often_as_the_distributions_overlap() -> None:
    tensors, depth = repeated(((1,), ()), 600, 4)
    with counting():
        _, accepted = verify(**tensors, depth=int(depth), block=V)
    overlap = float(torch.minimum(tensors["target"][0, 0], tensors["draft"][0, 0]).sum())
    error = (overlap * (1 - overlap) / 600) ** 0.5
    assert abs(float(accepted.double().mean()) - overlap) < 3 * error


def test_the_wrong_residual_would_be_seen() -> None:
    """The statistic has the power to tell: tokens drawn from the target in place of the residual are far out."""
    tensors, depth = repeated(((1,), ()), 400, 1)
    p, q = tensors["target"][0, 0], tensors["draft"][0, 0]
    taken = torch.minimum(p, q)
    biased = taken + (1 - taken.sum()) * p
    with counting():
        out, _ = verify(**tensors, depth=int(depth), block=V)
    assert chi_square(torch.bincount(out[:, 0].long(), minlength=V), biased) > FAR_OUT


def test_draft_and_verify_writes_what_the_target_alone_would() -> None:
    """Pairs of a Markov chain's tokens, drafted by another chain, follow the target's own chain."""
    generator = torch.Generator().manual_seed(11)
    target, draft = (torch.softmax(torch.randn(4, 4, generator=generator), 1) for _ in range(2))
    counts, turns = torch.zeros(4, 4), 0
    with counting():
        for _ in range(4):
            text, more = generate(lambda text: target[text[-1]], lambda text: draft[text[-1]], [0], 3, 60, generator)
            turns += more
            for before, after in itertools.pairwise(text):
                counts[before, after] += 1
    assert sum(chi_square(counts[row], target[row]) for row in range(4)) < 32.91  # 12 degrees of freedom, once in a thousand
    assert turns < 4 * 60


def test_a_draft_like_its_target_is_always_accepted() -> None:
    tensors, depth = repeated(CHAIN, 20, 6)
    tensors["draft"] = tensors["target"].clone()
    for node in range(4):
        tensors["tokens"][:, node + 1] = torch.multinomial(tensors["target"][0, node], 20, True).to(torch.int32)
    with counting():
        out, accepted = verify(**tensors, depth=int(depth), block=V)
    assert accepted.tolist() == [4] * 20
    assert torch.equal(out[:, :4], tensors["tokens"][:, 1:])
    assert chain(4).tolist() == [[1], [2], [3], [4], [-1]]


ONCE_IN_A_THOUSAND = (0.0, 10.83, 13.82, 16.27, 18.47, 20.52, 22.46, FAR_OUT)
"""What chi-square exceeds once in a thousand draws, by degrees of freedom."""
FILTERS = {
    "plain": ((1.0, 0, 1.0, 0.0), 200), "min-p": ((0.4, 0, 1.0, 0.05), 100),
    "top-k": ((0.35, 4, 1.0, 0.0), 45), "top-p": ((0.35, 0, 0.97, 0.0), 45),
}  # fmt: skip
"""Temperature, top-k, top-p and min-p, and how often each is drawn."""


def drawn_from(settings: tuple[float, int, float, float], times: int) -> dict[str, torch.Tensor]:
    """Inputs of many draws from one row of logits."""
    tensors = draws(Draws("many", "fp32", V, (settings,) * times, V), "cpu")
    tensors["logits"] = tensors["logits"][:1].expand(times, -1).contiguous()
    return tensors


def limit(kept: torch.Tensor) -> float:
    """What the statistic of a right sampler exceeds once in a thousand runs."""
    return ONCE_IN_A_THOUSAND[int(kept.sum()) - 1]


@pytest.mark.parametrize(("settings", "times"), FILTERS.values(), ids=FILTERS)
def test_samples_follow_the_filtered_distribution(settings: tuple[float, int, float, float], times: int) -> None:
    tensors = drawn_from(settings, times)
    probabilities = distribution(tensors["logits"][0], *settings)
    with counting():
        tokens, _ = sample(**tensors)
    kept = probabilities > 0
    counts = torch.bincount(tokens.long(), minlength=V)
    assert int(counts[~kept].sum()) == 0
    assert chi_square(counts[kept], probabilities[kept]) < limit(kept)


@pytest.mark.parametrize("name", ["min-p", "top-k", "top-p"])
@pytest.mark.parametrize("wrong", ["temperature ignored", "uniform over what is kept"])
def test_a_wrong_sampler_would_be_seen_at_so_many_draws(name: str, wrong: str) -> None:
    """At least 19 times in 20: the statistic of draws from the wrong distribution is over the limit."""
    settings, times = FILTERS[name]
    logits = drawn_from(settings, times)["logits"][0]
    probabilities = distribution(logits, *settings)
    kept = probabilities > 0
    other = kept.double() if wrong.startswith("uniform") else distribution(logits, 1.0, *settings[1:])
    generator = torch.Generator().manual_seed(5)
    seen = 0
    for _ in range(200):
        counts = torch.bincount(torch.multinomial(other, times, True, generator=generator), minlength=V)
        seen += int(counts[~kept].sum()) > 0 or chi_square(counts[kept], probabilities[kept]) > limit(kept)
    assert seen >= 190
