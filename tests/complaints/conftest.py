"""Configs that several complaints are about, and what is asked of their models."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from roofline.components.attention import AttentionBlock
from roofline.model import Model


def dense(family: str, D: int, N: int, K: int, F: int, L: int, V: int, **more: Any) -> dict[str, Any]:
    """The keys of a dense decoder's config.json."""
    return {
        "model_type": family, "hidden_size": D, "num_attention_heads": N, "num_key_value_heads": K, "intermediate_size": F,
        "num_hidden_layers": L, "vocab_size": V, "torch_dtype": "bfloat16", "tie_word_embeddings": False, **more,
    }  # fmt: skip


CONFIGS = {
    "qwen3-4b": dense("qwen3", 2560, 32, 8, 9728, 36, 151936, head_dim=128, attention_bias=False, tie_word_embeddings=True),
    "llama-2-7b": dense("llama", 4096, 32, 32, 11008, 32, 32000),
    "llama-3-8b": dense("llama", 4096, 32, 8, 14336, 32, 128256),
    "llama-30b": dense("llama", 6656, 52, 52, 17920, 60, 32000, torch_dtype="float16"),
    "mistral-7b": dense("mistral", 4096, 32, 8, 14336, 32, 32000, sliding_window=4096),
    "gemma-2-27b": dense("gemma2", 4608, 32, 16, 36864, 46, 256000, head_dim=128, sliding_window=4096, tie_word_embeddings=True),
    "gemma-3-27b": dense(
    "gemma3_text", 5376, 32, 16, 21504, 62, 262208, head_dim=128, sliding_window=1024, sliding_window_pattern=6,
    tie_word_embeddings=True,
),
    "mixtral": dense("mixtral", 4096, 32, 8, 14336, 32, 32000, num_local_experts=8, num_experts_per_tok=2),
    "gpt-oss-120b": dense(
    "gpt_oss", 2880, 64, 8, 2880, 36, 201088, head_dim=64, attention_bias=True, num_local_experts=128,
    num_experts_per_tok=4, sliding_window=128, layer_types=["sliding_attention", "full_attention"] * 18,
),
    "qwen35-9b": dense(
    "qwen3_5_text", 4096, 16, 4, 12288, 32, 248320, head_dim=256, attn_output_gate=True, full_attention_interval=4,
    layer_types=["linear_attention", "linear_attention", "linear_attention", "full_attention"] * 8,
    linear_conv_kernel_dim=4, linear_key_head_dim=128, linear_num_key_heads=16, linear_num_value_heads=32,
    linear_value_head_dim=128, mamba_ssm_dtype="float32", partial_rotary_factor=0.25,
),
}  # fmt: skip


@pytest.fixture
def config_of() -> Callable[..., dict[str, Any]]:
    """The keys of a model's config.json by its name, some of them replaced."""
    return lambda name, **replaced: {**CONFIGS[name], **replaced}


@pytest.fixture
def attention_blocks() -> Callable[[Model], list[AttentionBlock]]:
    """The attention blocks of a model, layer by layer."""
    return lambda model: [block for layer in model.layers for block in layer.blocks if isinstance(block, AttentionBlock)]


@pytest.fixture
def state_of() -> Callable[[Model, str, int], Any]:
    """Bytes of the state pieces of one name, per sequence."""
    return lambda model, name, cached: sum(
        number * piece.bytes(cached) for number, pieces in model.state for piece in pieces if piece.name == name
    )
