"""Diffusion language models: LLaDA's published counts, the caches, and decoding as the limit of block diffusion."""

from __future__ import annotations

import pytest

from roofline import Deployment, InputError, Work, load_accelerator, load_model
from roofline.cost import Cost
from roofline.diffusion import Denoising, bidirectional_model, break_even_tokens_per_step, denoise

H100 = load_accelerator("h100-sxm")
QWEN = load_model("qwen2.5-7b")
DEPLOYMENT = Deployment(QWEN, H100)


def total(model, plan, batch, prompt):
    return Cost.total((number, model.cost(work)) for number, work in plan.work(batch, prompt))


def test_full_sequence_denoising_costs_steps_times_a_square():
    """LLaDA's generate.py: a full forward over prompt and answer in every step, no cache."""
    P, G, steps = 100, 60, 60
    N, H, L, V, D = 28, 128, 28, 152064, 3584
    embedding, norms, biases = V * D, (2 * L + 1) * D, L * (N + 8) * H
    matrices = QWEN.params - embedding - norms - biases
    model = bidirectional_model(QWEN)
    flops = total(model, Denoising(G, G, steps), 1, P).matrix_flops
    assert flops == steps * (2 * matrices * (P + G) + 4 * L * N * H * (P + G) ** 2)


def test_guidance_doubles_every_step():
    model = bidirectional_model(QWEN)
    plain = total(model, Denoising(32, 16, 8), 1, 50)
    guided = total(model, Denoising(32, 16, 8, guidance=True), 1, 50)
    assert guided.matrix_flops == 2 * plain.matrix_flops
    assert guided.read["state"] == 2 * plain.read["state"]


def test_block_diffusion_with_blocks_of_one_token_is_decoding():
    plan = Denoising(output_tokens=9, block=1, steps=1, cache="block")
    model = bidirectional_model(QWEN)
    steps = [(number, work) for number, work in plan.work(3, 40) if work.all_logits]
    assert len(steps) == 9
    for index, (number, work) in enumerate(steps):
        assert number == 1
        assert model.cost(work) == QWEN.cost(Work(3, 1, 40 + index, all_logits=True))


@pytest.mark.parametrize("cache", ["none", "prefix", "dual", "block"])
def test_every_output_token_is_denoised_in_its_block(cache):
    plan = Denoising(output_tokens=50, block=16, steps=4, cache=cache)
    steps = sum(number for number, work in plan.work(1, 10) if work.all_logits)
    assert steps == 4 * 4
    assert plan.tokens_per_step == 4


def test_caches_save_in_their_order():
    model = bidirectional_model(QWEN)
    flops = [total(model, Denoising(128, 32, 8, cache), 1, 512).matrix_flops for cache in ("none", "prefix", "dual", "block")]
    assert flops == sorted(flops, reverse=True)
    assert flops[0] > 3 * flops[2]


def test_the_break_even_is_one_token_where_memory_binds_and_the_block_where_compute_binds():
    small = break_even_tokens_per_step(DEPLOYMENT, 1, 1024, 32)
    large = break_even_tokens_per_step(DEPLOYMENT, 512, 16, 32)
    assert 1 <= small < 1.05
    assert 30 < large < 33


def test_denoising_behind_a_cache_beats_decoding_at_batch_one():
    found = denoise(DEPLOYMENT, 1, 512, Denoising(256, 32, 16, "block"))
    assert found.plan.tokens_per_step == 2
    assert found.speedup == pytest.approx(2, rel=0.05)
    assert found.e2e_bound_s <= found.e2e_serial_s
    assert denoise(DEPLOYMENT, 1, 512, Denoising(256, 32, 32, "none")).speedup < 1
    assert found.to_dict()["steps"] == 128
    assert len(found.to_frame()) == 1


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        ({"block": 0}, "block"), ({"steps": 0}, "steps"), ({"output_tokens": -1}, "output tokens"), ({"block": 65}, "longer"),
        ({"steps": 33}, "each step must finish a token"), ({"cache": "all"}, "cache"),
    ],
)  # fmt: skip
def test_bad_plans_name_the_field(options, complaint):
    with pytest.raises(InputError, match=complaint):
        Denoising(**{"output_tokens": 64, "block": 32, "steps": 8, **options})


def test_attention_with_a_window_cannot_be_made_bidirectional():
    with pytest.raises(InputError, match="diffusion"):
        bidirectional_model(load_model("mamba2-2.7b"))
