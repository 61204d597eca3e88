"""Diffusion language models: LLaDA's published counts, the caches, and decoding as the limit of block diffusion."""

from __future__ import annotations

from fractions import Fraction

import pytest

from roofline import Deployment, InputError, Work, load_accelerator, load_model
from roofline.cost import Cost
from roofline.diffusion import Denoising, bidirectional_model, break_even_tokens_per_step, denoise
from roofline.errors import RooflineError

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
    assert plan.tokens_per_step == Fraction(50, 16), "the last block holds two tokens and takes four steps"
    assert Denoising(48, 16, 4, cache).tokens_per_step == 4


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


@pytest.mark.parametrize("cache", ["none", "prefix", "dual", "block"])
@pytest.mark.parametrize("batch", [1, 4])
def test_at_the_break_even_a_plan_takes_as_long_as_decoding(cache, batch):
    """The time is linear in the steps per block, so the plan's own break-even is found by interpolation."""
    found = denoise(DEPLOYMENT, batch, 512, Denoising(64, 16, 8, cache))
    steps = 16 / found.break_even_tokens_per_step
    times = [denoise(DEPLOYMENT, batch, 512, Denoising(64, 16, n, cache)).e2e_bound_s for n in (4, 12)]
    at_even = times[0] + (steps - 4) * (times[1] - times[0]) / 8
    assert at_even == pytest.approx(found.autoregressive_e2e_bound_s, rel=1e-9)


def test_decoding_can_be_out_of_reach():
    """Refreshing the whole sequence once per short block costs more than decoding the block."""
    assert denoise(DEPLOYMENT, 64, 4096, Denoising(64, 4, 2, "prefix")).break_even_tokens_per_step is None


def test_only_a_cache_is_kept_in_memory():
    kept = {cache: denoise(DEPLOYMENT, 2, 500, Denoising(64, 16, 8, cache)).memory for cache in ("none", "block")}
    assert kept["none"].kv_bytes == 0
    assert kept["block"].kv_bytes == 2 * 564 * QWEN.kv_bytes_per_token
    guided = denoise(DEPLOYMENT, 2, 500, Denoising(64, 16, 8, "block", guidance=True)).memory
    assert guided.kv_bytes == 2 * kept["block"].kv_bytes


def test_published_denoisers_have_their_published_sizes():
    """LLaDA-8B (arXiv 2502.09992), and Dream-7B, which is as large as the Qwen2.5-7B that it was initialised from."""
    llada = load_model("llada-8b")
    assert llada.params == 8_015_581_184
    assert llada.kv_bytes_per_token == 2 * 32 * 32 * 128 * 2
    dream = load_model("dream-v0-instruct-7b")
    assert dream.params == QWEN.params == 7_615_616_512
    assert dream.layers == QWEN.layers
    assert all(any("denoiser" in line for line in model.assumes) for model in (llada, dream))


def test_lladas_published_setting_costs_its_formula():
    """generate.py of ML-GSAI/LLaDA: gen_length 128, steps 128, no cache: 2 P (P_len + G) + 4 L N H (P_len + G)^2 a step."""
    llada, P, G = load_model("llada-8b"), 200, 128
    plan = Denoising(G, G, 128)
    matrices = llada.params - 126464 * 4096 - 65 * 4096
    a_step = 2 * matrices * (P + G) + 4 * 32 * 32 * 128 * (P + G) ** 2
    assert total(bidirectional_model(llada), plan, 1, P).matrix_flops == 128 * a_step
    assert plan.tokens_per_step == 1


def test_llada_2_is_a_mixture_of_experts_behind_a_dense_layer():
    """LLaDA2.0-mini (arXiv 2512.15745), 16 B with 1.4 B active: 256 experts, 8 picked, one shared, the first layer dense."""
    config = {
        "model_type": "llada2_moe", "hidden_size": 2048, "num_hidden_layers": 20, "num_attention_heads": 16,
        "num_key_value_heads": 4, "head_dim": 128, "intermediate_size": 5120, "moe_intermediate_size": 512, "num_experts": 256,
        "num_experts_per_tok": 8, "num_shared_experts": 1, "first_k_dense_replace": 1, "vocab_size": 157184, "use_bias": False,
        "use_qkv_bias": False, "use_qk_norm": True, "partial_rotary_factor": 0.5, "tie_word_embeddings": False,
    }  # fmt: skip
    model = load_model(config)
    attention = 2048 * (16 + 2 * 4) * 128 + 2048 * 2048 + 2 * 128
    expert = 3 * 2048 * 512
    around = 2 * 157184 * 2048 + 41 * 2048
    assert model.params == 20 * attention + 3 * 2048 * 5120 + 19 * (257 * expert + 256 * 2048) + around
    assert model.active_params == 20 * attention + 3 * 2048 * 5120 + 19 * (9 * expert + 256 * 2048) + around
    assert (round(model.params / 1e9), round(model.active_params / 1e9, 1)) == (16, 1.4)
    assert load_model({**config, "use_bias": True}).params == model.params + 20 * 2048
    assert bidirectional_model(model).params == model.params


LLADA = {
    "model_type": "llada", "d_model": 64, "n_layers": 2, "n_heads": 4, "mlp_hidden_size": 96, "vocab_size": 100,
    "block_type": "llama", "layer_norm_type": "rms", "rope": True, "weight_tying": False, "max_sequence_length": 50,
}  # fmt: skip
LAYER = 4 * 64 * 64 + 3 * 64 * 96 + 2 * 64


@pytest.mark.parametrize(
    ("keys", "params"),
    [
        ({}, 2 * LAYER + 64 + 2 * 6400),
        ({"embedding_size": 128}, 2 * LAYER + 64 + 2 * 128 * 64),
        ({"weight_tying": True}, 2 * LAYER + 64 + 6400),
        ({"mlp_hidden_size": None}, 2 * (LAYER - 3 * 64 * 96 + 3 * 64 * 256) + 64 + 2 * 6400),
        ({"n_kv_heads": 2}, 2 * (LAYER - 2 * 64 * 32) + 64 + 2 * 6400),
        ({"multi_query_attention": True}, 2 * (LAYER - 2 * 64 * 48) + 64 + 2 * 6400),
        ({"include_qkv_bias": True}, 2 * (LAYER + 3 * 64) + 64 + 2 * 6400),
        ({"include_bias": True, "bias_for_layer_norm": False}, 2 * (LAYER + 5 * 64 + 2 * 96) + 64 + 2 * 6400 + 100),
        ({"layer_norm_type": "default", "bias_for_layer_norm": True}, 2 * (LAYER + 2 * 64) + 128 + 2 * 6400),
        ({"layer_norm_type": "default", "layer_norm_with_affine": False}, 2 * (LAYER - 2 * 64) + 2 * 6400),
        ({"rope": False}, 2 * LAYER + 64 + 2 * 6400 + 50 * 64),
        ({"rope": False, "alibi": True}, 2 * LAYER + 64 + 2 * 6400),
    ],
)
def test_the_keys_of_llada_decide_its_shape(keys, params):
    assert load_model({**LLADA, **keys}).params == params


@pytest.mark.parametrize(
    ("keys", "complaint"),
    [
        ({"block_type": "sequential"}, "block_type"),
        ({"block_type": None}, "block_type"),
        ({"attention_layer_norm": True}, "attention_layer_norm"),
        ({"layer_norm_type": "gemma_rms"}, "gemma_rms"),
        ({"n_kv_heads": 3}, "n_kv_heads"),
        ({"n_kv_heads": 2, "multi_query_attention": True}, "contradict"),
        ({"num_experts": 8}, "mixture of experts"),
    ],
)
def test_what_llada_does_not_support_is_refused_by_key(keys, complaint):
    with pytest.raises(RooflineError, match=complaint):
        load_model({**LLADA, **keys})
