"""Matrix FLOPs of hybrids equal what torch counts in transformers on the meta device, integer for integer.

What transformers computes beside the projections and the experts is added by its own formula: convolutions, which run
over padding and a spare column; its plain-torch recurrences, whose dot products are matmuls in some families and
elementwise in others, and whose chunks are padded squares; and the masked half of the attention scores. Every size
differs from every other, so that no two can be swapped unnoticed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from types import ModuleType
from typing import Any

import pytest

from roofline.components.mla import MLA
from roofline.configs.load import load_model
from roofline.model import Layer, Model
from roofline.work import Work

pytestmark = pytest.mark.oracle

DECODE, PREFILL = Work(3, 1, 17, all_logits=True), Work(3, 11, 0, all_logits=True)
COMMON = {"vocab_size": 94, "max_position_embeddings": 256, "tie_word_embeddings": False, "pad_token_id": 0}
DELTA = {
    "linear_num_key_heads": 3, "linear_num_value_heads": 9, "linear_key_head_dim": 14, "linear_value_head_dim": 10,
    "linear_conv_kernel_dim": 4, "num_hidden_layers": 4, "full_attention_interval": 4, "head_dim": 16,
    "num_attention_heads": 6, "num_key_value_heads": 2, "hidden_size": 40, "intermediate_size": 58,
}  # fmt: skip
MAMBA2 = {
    "mamba_n_heads": 8, "mamba_d_head": 11, "mamba_n_groups": 2, "mamba_d_state": 14, "mamba_d_conv": 4,
    "mamba_expand": 2, "mamba_chunk_size": 8, "hidden_size": 44, "intermediate_size": 58, "num_attention_heads": 4,
    "num_key_value_heads": 2,
}  # fmt: skip


def delta_scan(work: Work, heads: int, key_dim: int, value_dim: int, chunk: int = 64) -> int:
    """One layer's delta rule: elementwise for one token; else padded chunks, their triangular systems not counted."""
    if work.T == 1:
        return 0
    chunks = -(-work.T // chunk)
    return 2 * work.B * heads * chunks * chunk * (chunk * (2 * key_dim + value_dim) + 3 * key_dim * value_dim)


def kimi_scan(work: Work, heads: int, dim: int, chunk: int = 64) -> int:
    """As ``delta_scan`` where decays by channel make scores elementwise and the inverse of a system is formed."""
    if work.T == 1:
        return 0
    chunks = -(-work.T // chunk)
    return 2 * work.B * heads * chunks * chunk * (chunk * 3 * dim + 3 * dim * dim)


def mamba_scan(work: Work, inner: int, states: int) -> int:
    """One layer's selective scan: the dot product of state and C is a matmul for every token."""
    return 2 * work.B * work.T * inner * states


def mamba2_scan(work: Work, heads: int = 8, dim: int = 11, states: int = 14, chunk: int = 8) -> int:
    """One layer's Mamba-2 scan: a dot product for one token; else padded chunks and a matmul over chunk boundaries."""
    if work.T == 1:
        return 2 * work.B * heads * dim * states
    chunks = -(-work.T // chunk)
    inside = chunks * chunk * (chunk * (states + dim) + 2 * states * dim)
    return 2 * work.B * heads * (inside + (chunks + 1) ** 2 * states * dim)


def lightning_scan(work: Work, heads: int, dim: int, block: int) -> int:
    """One layer's lightning attention: two matmuls with the state per token, and squares of scores inside blocks."""
    whole, rest = divmod(work.T, block)
    squares = whole * block**2 + rest**2
    return work.B * heads * (4 * work.T * dim**2 + (4 * squares * dim if work.S == 0 else 0))


@dataclass(frozen=True)
class Case:
    """A family at a small size.

    Attributes:
        config: the keys of a config.json.
        layers: recurrent layers. convolved: channels of each one's convolution of four taps, 0 for none.
        scan: matmul FLOPs of one layer's recurrence in transformers.
        pairs: matmul FLOPs per masked pair of query and key of the one attention layer.
    """

    config: dict[str, Any]
    layers: int
    convolved: int
    scan: Callable[[Work], int]
    pairs: int


CASES = {
    "qwen3_next": Case(
        {
            "model_type": "qwen3_next", **DELTA, "moe_intermediate_size": 22, "shared_expert_intermediate_size": 26,
            "num_experts": 12, "num_experts_per_tok": 5, "decoder_sparse_step": 1,
        },
        3, 2 * 3 * 14 + 9 * 10, lambda work: delta_scan(work, 9, 14, 10), 2 * 6 * 2 * 16,
    ),
    "qwen3_5": Case(
        {"model_type": "qwen3_5_text", **DELTA}, 3, 2 * 3 * 14 + 9 * 10, lambda work: delta_scan(work, 9, 14, 10), 2 * 6 * 2 * 16
    ),
    "qwen3_5_moe": Case(
        {
            "model_type": "qwen3_5_moe_text", **DELTA, "moe_intermediate_size": 22, "shared_expert_intermediate_size": 26,
            "num_experts": 12, "num_experts_per_tok": 5,
        },
        3, 2 * 3 * 14 + 9 * 10, lambda work: delta_scan(work, 9, 14, 10), 2 * 6 * 2 * 16,
    ),
    "jamba": Case(
        {
            "model_type": "jamba", "hidden_size": 44, "intermediate_size": 58, "num_attention_heads": 4, "num_key_value_heads": 2,
            "num_hidden_layers": 4, "num_experts": 5, "num_experts_per_tok": 3, "attn_layer_period": 4, "attn_layer_offset": 2,
            "expert_layer_period": 2, "expert_layer_offset": 1, "mamba_d_state": 14, "mamba_d_conv": 4, "mamba_expand": 2,
            "mamba_dt_rank": 6,
        },
        3, 88, lambda work: mamba_scan(work, 88, 14), 2 * 4 * 2 * 11,
    ),
    "bamba": Case(
        {"model_type": "bamba", **MAMBA2, "num_hidden_layers": 3, "attn_layer_indices": [1]},
        2, 88 + 2 * 2 * 14, mamba2_scan, 2 * 4 * 2 * 11,
    ),
    "granite": Case(
        {
            "model_type": "granitemoehybrid", **MAMBA2, "num_hidden_layers": 3, "layer_types": ["mamba", "attention", "mamba"],
            "num_local_experts": 5, "num_experts_per_tok": 3, "shared_intermediate_size": 26,
        },
        2, 88 + 2 * 2 * 14, mamba2_scan, 2 * 4 * 2 * 11,
    ),
    "minimax": Case(
        {
            "model_type": "minimax", "hidden_size": 44, "intermediate_size": 58, "num_attention_heads": 4,
            "num_key_value_heads": 2, "num_hidden_layers": 3, "head_dim": 12,
            "layer_types": ["linear_attention", "full_attention", "linear_attention"],
            "num_local_experts": 5, "num_experts_per_tok": 3, "block_size": 8,
        },
        2, 0, lambda work: lightning_scan(work, 4, 12, 8), 2 * 4 * 2 * 12,
    ),
    "kimi": Case(
        {
            "model_type": "kimi_linear", "hidden_size": 40, "intermediate_size": 58, "moe_intermediate_size": 22,
            "num_hidden_layers": 4, "num_attention_heads": 6, "num_key_value_heads": 6, "q_lora_rank": None, "kv_lora_rank": 34,
            "qk_nope_head_dim": 14, "qk_rope_head_dim": 4, "v_head_dim": 12, "num_experts": 16, "num_experts_per_token": 5,
            "num_shared_experts": 1, "first_k_dense_replace": 1,
            "linear_attn_config": {
                "full_attn_layers": [4], "kda_layers": [1, 2, 3], "head_dim": 10, "num_heads": 9, "short_conv_kernel_size": 4,
            },
        },
        3, 3 * 9 * 10, lambda work: kimi_scan(work, 9, 10), 2 * 6 * (14 + 4 + 12),
    ),
}  # fmt: skip


def convolutions(case: Case, work: Work) -> int:
    """Convolutions run over three columns of padding in a prefill, and over the spare column of the cache in decode."""
    outputs = 2 if work.T == 1 else work.T + 3
    return 2 * 4 * case.layers * case.convolved * work.B * outputs


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("work", [DECODE, PREFILL], ids=["decode", "prefill"])
def test_matrix_flops_equal_the_operator_counter(meta: ModuleType, name: str, work: Work) -> None:
    case = CASES[name]
    config = COMMON | case.config
    counted = meta.count_flops(meta.build(**config), work.B, work.T, work.S)
    model = load_model(config)
    expanded = model if name != "kimi" else with_expanded_attention(model)
    masked = case.pairs * work.B * (work.T * (work.T - 1) // 2)
    assert counted == expanded.cost(work).matrix_flops + masked + convolutions(case, work) + case.layers * case.scan(work)


@pytest.mark.parametrize("name", CASES)
def test_parameters_equal_those_of_transformers(meta: ModuleType, name: str) -> None:
    config = COMMON | CASES[name].config
    assert load_model(config).params == meta.parameters(meta.build(**config))


def with_expanded_attention(model: Model) -> Model:
    """transformers expands latents in every step: the prefill form of latent attention, the one-token form of the rest."""

    def edit(layer: Layer) -> Layer:
        return replace(layer, blocks=tuple(block.prefill_form() if isinstance(block, MLA) else block for block in layer.blocks))

    return replace(model, layers=tuple(edit(layer) for layer in model.layers))
