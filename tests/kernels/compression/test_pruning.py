"""Pruning by importance: what is dead goes first, sizes are those of the pruned model, and distillation heals."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import cache

import pytest

pytest.importorskip("triton")

import torch

from roofline.configs.load import load_model
from roofline.edits.edit import apply
from roofline.kernels.compression.distillation import distillation_loss, divergence
from roofline.kernels.compression.minitron import importance, prune
from roofline.kernels.compression.network import Decoder, Sizes

Correlated = Callable[[int], tuple[Decoder, torch.Tensor, torch.Tensor]]
DEAD_NEURONS, DEAD_LAYER, DEAD_CHANNEL = (3, 100, 255), 1, 77
FOUR = Sizes(vocabulary=64, D=128, F=256, N=4, K=2, H=32, layers=3)


@cache
def planted() -> tuple[Decoder, torch.Tensor]:
    """A decoder in float64 with three dead neurons in each layer and a dead layer, and tokens."""
    network = Decoder.seeded(FOUR, 7).double()
    with torch.no_grad():
        for layer_ in network.model.layers:
            layer_.mlp.gate_proj.weight[list(DEAD_NEURONS)] = 0
        last = network.model.layers[DEAD_LAYER]
        last.self_attn.o_proj.weight.zero_()
        last.mlp.down_proj.weight.zero_()
    return network, torch.randint(0, FOUR.vocabulary, (3, 16), generator=torch.Generator().manual_seed(8))


def test_dead_neurons_and_layers_rank_last_and_pruning_them_changes_nothing() -> None:
    network, tokens = planted()
    scores = importance(network, tokens)
    for neurons in scores.neurons:
        assert set(neurons.argsort()[:3].tolist()) == set(DEAD_NEURONS)
    assert int(scores.layers.argmin()) == DEAD_LAYER
    assert float(scores.layers[DEAD_LAYER]) == pytest.approx(0, abs=1e-12)
    with torch.no_grad():
        right = network(tokens)
        assert torch.allclose(prune(network, scores, ffn=253).network(tokens), right, rtol=0, atol=1e-10)
        assert torch.allclose(prune(network, scores, layers=2).network(tokens), right, rtol=0, atol=1e-10)
        assert not torch.allclose(prune(network, scores, ffn=252).network(tokens), right, rtol=0, atol=1e-4)
        assert not torch.allclose(prune(network, scores, layers=1).network(tokens), right, rtol=0, atol=1e-4)


@pytest.mark.parametrize(("N", "K"), [(6, 6), (6, 3)])
def test_dead_heads_rank_last_and_pruning_them_changes_nothing(N: int, K: int) -> None:
    """A head is dead with its values, and so is every query head that shares them."""
    sizes = Sizes(vocabulary=64, D=96, F=64, N=N, K=K, H=16, layers=2)
    network = Decoder.seeded(sizes, 9).double()
    with torch.no_grad():
        for layer_, head in zip(network.model.layers, (2, 0), strict=True):
            layer_.self_attn.v_proj.weight[16 * head : 16 * (head + 1)] = 0
    tokens = torch.randint(0, 64, (2, 12), generator=torch.Generator().manual_seed(10))
    scores = importance(network, tokens)
    group = N // K
    for layer_scores, head in zip(scores.heads, (2, 0), strict=True):
        assert set(layer_scores.argsort()[:group].tolist()) == set(range(head * group, (head + 1) * group))
    made = prune(network, scores, kv_heads=K - 1)
    assert [edit.flag for edit in made.edits] == [f"--prune-width heads={N - group},kv-heads={K - 1}"]
    with torch.no_grad():
        right = network(tokens)
        assert torch.allclose(made.network(tokens), right, rtol=0, atol=1e-10)
        assert not torch.allclose(prune(network, scores, kv_heads=K - 2).network(tokens), right, rtol=0, atol=1e-4)


def test_a_dead_channel_ranks_last() -> None:
    network, tokens = copy.deepcopy(planted()[0]), planted()[1]
    with torch.no_grad():
        network.model.embed_tokens.weight[:, DEAD_CHANNEL] = 0
        for layer_ in network.model.layers:
            layer_.self_attn.o_proj.weight[DEAD_CHANNEL] = 0
            layer_.mlp.down_proj.weight[DEAD_CHANNEL] = 0
    assert int(importance(network, tokens).channels.argmin()) == DEAD_CHANNEL


def test_the_pruned_network_is_the_pruned_model() -> None:
    """``--prune-width`` and ``--prune-depth`` of the model count the parameters of the pruned weights."""
    network, tokens = planted()
    made = prune(network, importance(network, tokens), hidden=96, ffn=200, heads=2, layers=2)
    whole = load_model(FOUR.config())
    edited = apply(whole, made.edits)
    assert [edit.flag for edit in made.edits] == ["--prune-width hidden=96,ffn=200,heads=2", "--prune-depth 2"]
    assert sum(parameter.numel() for parameter in made.network.parameters()) == edited.params
    assert load_model(made.network.sizes.config()).params == edited.params
    assert torch.isfinite(made.network(tokens)).all()


def test_sizes_that_cannot_be_pruned_to_are_refused() -> None:
    network, tokens = planted()
    scores = importance(network, tokens)
    with pytest.raises(ValueError, match="F = 300 is not between 1 and 256"):
        prune(network, scores, ffn=300)
    with pytest.raises(ValueError, match="3 heads do not divide over 2 key-value heads"):
        prune(network, scores, heads=3)


def test_distillation_heals_a_pruned_network(correlated: Correlated) -> None:
    """Three eighths of the neurons are kept; thirty steps bring the divergence from the whole network below 0.6 of it."""
    network, tokens, held = correlated(0)
    made = prune(network, importance(network, tokens), ffn=96).network
    generator = torch.Generator().manual_seed(11)
    with torch.no_grad():
        teacher = network(held)

    def distance() -> float:
        with torch.no_grad():
            return divergence(made(held), teacher).item()

    before = distance()
    optimiser = torch.optim.Adam(made.parameters(), lr=5e-4)
    for _ in range(30):
        batch = torch.randint(0, network.sizes.vocabulary, (8, 32), generator=generator)
        with torch.no_grad():
            target = network(batch)
        optimiser.zero_grad()
        distillation_loss(made(batch), target).backward()
        optimiser.step()
    assert distance() < 0.6 * before
