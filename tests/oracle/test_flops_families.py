"""Matrix FLOPs and parameters of sparse and hybrid families equal those of transformers, integer for integer.

Experts run as batched matmuls, which FlopCounterMode sees (it misses grouped ones). Eager attention computes the whole
rectangle of T new queries and the keys that the cache of the layer holds (a window keeps its last W - 1); the model counts
the pairs that the mask leaves. What is masked is added here, layer by layer.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any

import pytest

from roofline.components.attention import Attention
from roofline.components.block_sparse import BlockScores
from roofline.components.latent import EVERYTHING
from roofline.configs.load import load_model
from roofline.model import Model
from roofline.work import Work

pytestmark = pytest.mark.oracle

STEPS = {
    "prefill": Work(3, 7, 0, all_logits=True),
    "decode": Work(3, 1, 29, all_logits=True),
    "chunk": Work(3, 5, 13, all_logits=True),
}

BASE: dict[str, Any] = {
    "hidden_size": 48, "intermediate_size": 76, "num_hidden_layers": 6, "num_attention_heads": 6, "num_key_value_heads": 2,
    "head_dim": 8, "vocab_size": 101, "tie_word_embeddings": False, "max_position_embeddings": 128, "pad_token_id": 0,
}  # fmt: skip
WINDOW = {**BASE, "sliding_window": 10}
EXPERTS = {"num_experts_per_tok": 3, "num_local_experts": 7}
LAYER_EMBEDDINGS = {"hidden_size_per_layer_input": 10, "vocab_size_per_layer_input": 101}

CASES: dict[str, dict[str, Any]] = {
    "mixtral": {**BASE, "model_type": "mixtral", **EXPERTS},
    "qwen2_moe": {
        **BASE, "model_type": "qwen2_moe", "num_experts": 7, "num_experts_per_tok": 3, "moe_intermediate_size": 20,
        "shared_expert_intermediate_size": 28, "decoder_sparse_step": 2,
    },
    "qwen3_moe": {
        **BASE, "model_type": "qwen3_moe", "num_experts": 7, "num_experts_per_tok": 3, "moe_intermediate_size": 20,
        "mlp_only_layers": [1],
    },
    "glm4_moe": {
        **BASE, "model_type": "glm4_moe", "n_routed_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 20,
        "n_shared_experts": 2, "first_k_dense_replace": 2, "n_group": 1, "topk_group": 1, "attention_bias": True,
        "use_qk_norm": True,
    },
    "gpt_oss": {**WINDOW, "model_type": "gpt_oss", **EXPERTS, "attention_bias": True},
    "gemma2": {**WINDOW, "model_type": "gemma2", "tie_word_embeddings": True},
    "gemma3": {**WINDOW, "model_type": "gemma3_text", "tie_word_embeddings": True, "sliding_window_pattern": 3},
    "gemma4": {
        **WINDOW, "model_type": "gemma4_text", "tie_word_embeddings": True, "global_head_dim": 12, "attention_k_eq_v": True,
        "num_global_key_value_heads": 1, **LAYER_EMBEDDINGS,
        "layer_types": ["sliding_attention", "sliding_attention", "full_attention"] * 2,
    },
    "gemma4-mixture": {
        **WINDOW, "model_type": "gemma4_text", "tie_word_embeddings": True, "global_head_dim": 12, "enable_moe_block": True,
        "num_experts": 7, "top_k_experts": 3, "moe_intermediate_size": 20, "hidden_size_per_layer_input": 0,
        "layer_types": ["sliding_attention", "sliding_attention", "full_attention"] * 2,
    },
    "gemma3n": {
        **WINDOW, "model_type": "gemma3n_text", "tie_word_embeddings": True, "num_kv_shared_layers": 2, "altup_num_inputs": 3,
        "laurel_rank": 5, **LAYER_EMBEDDINGS, "activation_sparsity_pattern": [0.0] * 6,
        "layer_types": ["sliding_attention", "full_attention"] * 3,
    },
    "minimax_m3": {
        **BASE, "model_type": "minimax_m3_vl_text", **EXPERTS, "intermediate_size": 20, "dense_intermediate_size": 76,
        "shared_intermediate_size": 28, "rotary_dim": 4, "index_n_heads": 2, "index_head_dim": 10, "index_block_size": 4,
        "index_topk_blocks": 3, "index_local_blocks": 1, "mlp_layer_types": ["dense"] * 2 + ["sparse"] * 4,
        "layer_types": ["full_attention"] * 2 + ["minimax_m3_sparse"] * 4,
    },
    "cohere2": {**WINDOW, "model_type": "cohere2", "tie_word_embeddings": True, "sliding_window_pattern": 3},
    "olmo3": {**{k: v for k, v in WINDOW.items() if k != "head_dim"}, "model_type": "olmo3"},
    "exaone4": {**{k: v for k, v in WINDOW.items() if k != "head_dim"}, "model_type": "exaone4"},
}  # fmt: skip


def masked(model: Model, work: Work) -> int:
    """FLOPs that eager attention spends on scores that its mask throws away: selected blocks are a mask to it as well."""
    total = 0
    for number, part in model.counted:
        if isinstance(part, Attention):
            pairs, keys = part.scored(work)
            keys = work.S + work.T if part.mask == "blocks" else keys
            value_dim = part.H if part.value_dim is None else part.value_dim
            total += number * 2 * work.B * part.N * (part.H + value_dim) * (work.T * keys - pairs)
        elif isinstance(part, BlockScores):
            pairs = EVERYTHING.pairs(work.T, work.S)
            total += number * 2 * work.B * part.heads * part.dim * (work.T * (work.S + work.T) - pairs)
    return total


@pytest.fixture(scope="module", params=CASES)
def pair(request: pytest.FixtureRequest, meta: ModuleType) -> tuple[Model, Any]:
    config = CASES[request.param]
    return load_model(config), meta.build(**config)


def test_parameters_are_those_of_transformers(pair: tuple[Model, Any], meta: ModuleType) -> None:
    model, theirs = pair
    assert model.params == meta.parameters(theirs)


@pytest.mark.parametrize("step", STEPS)
def test_matrix_flops_are_those_of_transformers(pair: tuple[Model, Any], meta: ModuleType, step: str) -> None:
    model, theirs = pair
    work = STEPS[step]
    counted = meta.count_flops(theirs, work.B, work.T, work.S)
    assert model.cost(work).matrix_flops + masked(model, work) == counted
