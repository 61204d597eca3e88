"""What a token keeps: heads, latents, windows and compressed entries."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from roofline import Model, Work, load_model
from roofline.components.attention import Attention, AttentionBlock
from roofline.edits import apply, kv_dtype

GIB, MIB = 2**30, 2**20


@pytest.mark.complaint("D01", "36*8*128*2*2 = 147456")
def test_head_dim_is_not_the_width_over_the_heads(
    config_of: Callable[..., dict[str, Any]], attention_blocks: Callable[[Model], list[AttentionBlock]]
) -> None:
    """LMCache/LMCache#688: the key head_dim was ignored, and 2560 / 32 = 80 taken for 128."""
    model = load_model(config_of("qwen3-4b"))
    assert model.kv_bytes_per_token == 147456
    (block,) = {*attention_blocks(model)}
    assert (block.N, block.K, block.H) == (32, 8, 128)
    assert sum(block.params().values()) == 2560 * 128 * (2 * 32 + 2 * 8) + 2 * 128
    core = next(part for part in block.parts if isinstance(part, Attention))
    assert core.cost(Work(1, 1, 1023)).matrix_flops == 4 * 32 * 128 * 1024


@pytest.mark.complaint("D02", "61*(512+64)", "35136", "70272")
def test_a_latent_is_key_and_value_at_once() -> None:
    """LMCache/LMCache#694: the latent counted twice, its rotary part not at all."""
    model = load_model("deepseek-v3")
    assert sum(number * piece.elements for number, pieces in model.state for piece in pieces) == 35136
    assert model.kv_bytes_per_token == 70272
    assert model.state_bytes(1000) == 1000 * 70272


@pytest.mark.complaint("D04", "10.41 GB", "(10*131072 + 52*1024)*8192")
def test_windowed_layers_stop_growing(config_of: Callable[..., dict[str, Any]]) -> None:
    """unslothai/unsloth#4757: 81.38 GB for gemma-3-27b at 131072, every layer taken for a global one."""
    found = load_model(config_of("gemma-3-27b")).state_bytes(131072)
    assert found == (10 * 131072 + 52 * 1024) * 8192
    assert round(found / GIB, 2) == 10.41


@pytest.mark.complaint("D05", "10.72 GB = 61*576*2*163840")
def test_latents_do_not_come_in_heads(state_of: Callable[[Model, str, int], Any]) -> None:
    """unslothai/unsloth#4757: 2.08 GB for DeepSeek-V3.1 at 163840. The thread's GLM-5 counts its 79th, MTP layer as well."""
    assert load_model("deepseek-v3").state_bytes(163840) == 61 * 576 * 2 * 163840
    assert round(61 * 576 * 2 * 163840 / GIB, 2) == 10.72
    assert round(load_model("kimi-k2").state_bytes(262144) / GIB, 2) == 17.16
    glm = load_model("glm-5")
    assert len(glm.layers) == 78
    assert round(state_of(glm, "latent", 202752) / 78 * 79 / GIB, 2) == 17.18


@pytest.mark.complaint("D13", "2*L*Nkv*head_dim*bytes")
def test_a_token_costs_two_vectors_per_key_value_head(config_of: Callable[..., dict[str, Any]]) -> None:
    """jranaraki/vllm-fit#2: the width multiplied by the number of heads once more."""
    for config, expected in ((config_of("llama-2-7b"), 524288), (config_of("llama-3-8b"), 131072)):
        assert 2 * config["num_hidden_layers"] * config["num_key_value_heads"] * 128 * 2 == expected
        assert load_model(config).kv_bytes_per_token == expected


@pytest.mark.complaint("D14", "131072 B/token")
def test_the_width_is_not_the_width_of_the_keys(config_of: Callable[..., dict[str, Any]]) -> None:
    """vllm-project/vllm#29736: Llama-3-8B as if it had 32 key-value heads."""
    assert load_model(config_of("llama-3-8b")).kv_bytes_per_token == 131072


@pytest.mark.complaint("D15", "architecture formula")
def test_the_cache_does_not_follow_the_parameters(config_of: Callable[..., dict[str, Any]]) -> None:
    """Osmantic/ODS#3324: the cache taken for a share of the parameter count."""
    few, many = load_model(config_of("mixtral")), load_model({**config_of("mixtral"), "num_local_experts": 64})
    assert many.params > 7 * few.params
    assert many.state_bytes(32768) == few.state_bytes(32768) == 32768 * 131072


@pytest.mark.complaint("D17", "some engines ignore the window")
def test_a_window_is_in_the_config_and_can_be_ignored(config_of: Callable[..., dict[str, Any]]) -> None:
    """Andyyyy64/whichllm#124: Mistral-7B-v0.1 unchanged by its window. Both kinds of runtime, side by side."""
    honoured, ignored = load_model(config_of("mistral-7b")), load_model({**config_of("mistral-7b"), "sliding_window": None})
    assert honoured.state_bytes(131072) == honoured.state_bytes(4096) == 4096 * 131072
    assert ignored.state_bytes(131072) == 131072 * 131072
    gemma = load_model({**config_of("gemma-3-27b"), "layer_types": ["full_attention"] * 62, "sliding_window_pattern": None})
    assert gemma.state_bytes(131072) == 62 * 131072 * 8192


@pytest.mark.complaint("D19", "18*(T+128)*1024 B", "1.1341 GiB/seq (72.6 GiB for 64)", "36*T*1024 = 2.2637")
def test_every_other_layer_is_windowed(config_of: Callable[..., dict[str, Any]]) -> None:
    """ai-dynamo/aiconfigurator#1537: 64 sequences of gpt-oss-120b at fp8 refused, all 36 layers taken for global."""
    T = 65536 + 400
    model = apply(load_model(config_of("gpt-oss-120b")), [kv_dtype("fp8")])
    assert model.state_bytes(T) == 18 * (T + 128) * 1024
    assert round(model.state_bytes(T) / GIB, 4) == 1.1341
    assert round(64 * model.state_bytes(T) / GIB, 1) == 72.6
    everywhere = apply(load_model({**config_of("gpt-oss-120b"), "layer_types": ["full_attention"] * 36}), [kv_dtype("fp8")])
    assert everywhere.state_bytes(T) == 36 * T * 1024
    assert round(everywhere.state_bytes(T) / GIB, 4) == 2.2637


@pytest.mark.complaint("D31", "latent/compressed dims")
def test_compressed_entries_are_not_heads() -> None:
    """vllm-project/vllm#44376: DeepSeek-V4 stored with the dimensions of multi-head attention.

    Per layer 584 bytes for an entry (448 in fp8 with their scales, 64 in bf16), one per 4 or 128 tokens, a window of
    128, and 68 bytes of index (arXiv 2606.19348).
    """
    model = load_model("deepseek-v4-flash")
    S = 131072
    entries = 21 * (S // 4) * (584 + 68) + 20 * (S // 128) * 584 + 43 * 128 * 584
    assert model.state_bytes(S) == entries + model.state_bytes_per_sequence
    assert model.state_bytes(S) * 200 < S * 43 * 2 * 64 * 512 * 2


@pytest.mark.complaint("D43", "780 MiB at f16")
def test_the_cache_has_the_dtype_of_the_model(config_of: Callable[..., dict[str, Any]]) -> None:
    """abetlen/llama-cpp-python#66: LLaMA-30B at 512 tokens with a cache in fp32, 1560 MB."""
    model = load_model(config_of("llama-30b"))
    assert model.state_bytes(512) == 780 * MIB
    assert apply(model, [kv_dtype("fp32")]).state_bytes(512) == 1560 * MIB
