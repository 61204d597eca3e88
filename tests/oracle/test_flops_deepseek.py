"""Matrix FLOPs of the DeepSeek models equal what torch counts in transformers on the meta device, integer for integer.

transformers computes the whole rectangle of scores and masks it; the model counts the causal part. The difference, the
masked pairs, is added explicitly. Every size differs from every other, so that no two can be swapped unnoticed.
"""

from __future__ import annotations

from dataclasses import replace
from types import ModuleType
from typing import Any

import pytest

from roofline.components.compressed import CompressedAttention
from roofline.components.latent import LatentAttention
from roofline.components.mla import MLA
from roofline.components.sparse import IndexScores
from roofline.configs.load import load_model
from roofline.model import Layer, Model
from roofline.work import Work

pytestmark = pytest.mark.oracle

LATENT = {
    "hidden_size": 40, "intermediate_size": 58, "moe_intermediate_size": 22, "num_hidden_layers": 3,
    "num_attention_heads": 5, "num_key_value_heads": 5, "q_lora_rank": 26, "kv_lora_rank": 34, "qk_nope_head_dim": 14,
    "qk_rope_head_dim": 4, "v_head_dim": 12, "n_routed_experts": 16, "n_shared_experts": 2, "num_experts_per_tok": 6,
    "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1, "vocab_size": 94, "max_position_embeddings": 128,
    "tie_word_embeddings": False,
}  # fmt: skip
INDEXED = {**LATENT, "index_topk": 8, "index_n_heads": 7, "index_head_dim": 10}
COMPRESSED = {
    "model_type": "deepseek_v4", "hidden_size": 40, "moe_intermediate_size": 22, "num_hidden_layers": 3,
    "num_attention_heads": 6, "num_key_value_heads": 1, "head_dim": 16, "qk_rope_head_dim": 4, "q_lora_rank": 26,
    "o_groups": 2, "o_lora_rank": 14, "sliding_window": 9, "hc_mult": 4, "num_hash_layers": 1, "n_routed_experts": 12,
    "n_shared_experts": 1, "num_experts_per_tok": 5, "index_n_heads": 7, "index_head_dim": 10, "index_topk": 3,
    "vocab_size": 94, "max_position_embeddings": 128, "tie_word_embeddings": False,
    "layer_types": ["sliding_attention", "compressed_sparse_attention", "heavily_compressed_attention"],
    "compress_rates": {"compressed_sparse_attention": 4, "heavily_compressed_attention": 8},
}  # fmt: skip
WORKS = [Work(3, 11, 0, all_logits=True), Work(3, 1, 17, all_logits=True), Work(2, 9, 13, all_logits=True)]


def counted(meta: ModuleType, config: dict[str, Any], work: Work) -> int:
    """FLOPs of one step of the transformers class, counted on the meta device."""
    count: int = meta.count_flops(meta.build(**config), work.B, work.T, work.S)
    return count


def in_form(model: Model, form: str) -> Model:
    """The model with its latent attention in one of its forms."""

    def edit(layer: Layer) -> Layer:
        return replace(layer, blocks=tuple(replace(b, form=form) if isinstance(b, MLA) else b for b in layer.blocks))

    return replace(model, layers=tuple(edit(layer) for layer in model.layers))


def masked(work: Work) -> int:
    """Pairs per head that a mask throws away after they were computed."""
    return work.B * (work.T * (work.S + work.T) - (work.S * work.T + work.T * (work.T + 1) // 2))


@pytest.mark.parametrize("work", WORKS, ids=["prefill", "decode", "chunk"])
@pytest.mark.parametrize("rank", [26, None], ids=["low-rank-query", "full-query"])
@pytest.mark.parametrize("family", ["deepseek_v2", "deepseek_v3"])
def test_expanded_latents_are_what_transformers_computes(meta: ModuleType, family: str, rank: int | None, work: Work) -> None:
    config = {**LATENT, "model_type": family, "q_lora_rank": rank}
    flops = in_form(load_model(config), "expanded").cost(work).matrix_flops
    per_pair = 2 * 5 * (14 + 4 + 12)
    assert counted(meta, config, work) == flops + 3 * per_pair * masked(work)


@pytest.mark.parametrize("work", WORKS, ids=["prefill", "decode", "chunk"])
@pytest.mark.parametrize("family", ["deepseek_v32", "glm_moe_dsa"])
def test_sparse_attention_is_what_transformers_computes_under_a_mask(meta: ModuleType, family: str, work: Work) -> None:
    """transformers scores in fp32 and sums the heads by a matmul, which costs 2 FLOP per head and pair more."""
    config = {**INDEXED, "model_type": family}
    flops = in_form(load_model(config), "expanded").cost(work).matrix_flops
    rectangle = work.B * work.T * (work.S + work.T)
    extra = 2 * 5 * (14 + 4 + 12) * masked(work) + 2 * 7 * 10 * masked(work) + 2 * 7 * rectangle
    assert counted(meta, config, work) == flops + 3 * extra


@pytest.mark.parametrize("work", [*WORKS, Work(3, 1, 39, all_logits=True), Work(1, 27, 0, all_logits=True)])
def test_compressed_attention_is_what_transformers_computes_under_a_mask(meta: ModuleType, work: Work) -> None:
    """transformers selects by a mask as well, and mixes the residual streams by a matmul (n^2 D per site)."""
    model = load_model(COMPRESSED)
    extra = 3 * 2 * (2 * 4 * 4 * 40) * work.tokens
    for layer in model.layers:
        for block in layer.blocks:
            if not isinstance(block, CompressedAttention):
                continue
            for part in block.parts:
                if isinstance(part, LatentAttention):
                    seen = sum(r.entries(work.S + work.T) if not r.recent else r.read(work.T, work.S) for r in part.reaches)
                    extra += 4 * 6 * 16 * work.B * (work.T * seen - part.scored(work)[0])
                if isinstance(part, IndexScores):
                    seen = part.reach.entries(work.S + work.T)
                    extra += 2 * 7 * 10 * work.B * (work.T * seen - part.reach.pairs(work.T, work.S))
    assert counted(meta, COMPRESSED, work) == model.cost(work).matrix_flops + extra


def test_the_absorbed_order_equals_a_hand_written_one() -> None:
    """Per layer: queries into the latent space, scores and sums over latents, values out of it."""
    torch = pytest.importorskip("torch")
    from torch.utils.flop_counter import FlopCounterMode

    block = load_model({**LATENT, "model_type": "deepseek_v3"}).layers[0].blocks[1]
    assert isinstance(block, MLA)
    B, T, S = 3, 1, 17
    with torch.device("meta"):
        hidden = torch.empty(B, T, 40)
        key_out, value_out = torch.empty(5, 14, 34), torch.empty(5, 34, 12)
        cache = torch.empty(B, S + T, 34 + 4)
        with FlopCounterMode(display=False) as counter:
            query = (hidden @ torch.empty(40, 26)) @ torch.empty(26, 5 * 18)
            hidden @ torch.empty(40, 34 + 4)
            heads = query.view(B * T, 5, 18).transpose(0, 1)
            absorbed = torch.bmm(heads[..., :14], key_out)
            queries = torch.cat([absorbed, heads[..., 14:]], dim=-1).transpose(0, 1).reshape(B, T * 5, 38)
            scores = queries @ cache.transpose(1, 2)
            latents = scores @ cache[..., :34]
            values = torch.bmm(latents.view(B * T, 5, 34).transpose(0, 1), value_out)
            values.transpose(0, 1).reshape(B, T, 60) @ torch.empty(60, 40)
    assert counter.get_total_flops() == block.cost(Work(B, T, S)).matrix_flops
    core = next(part for part in block.parts if isinstance(part, LatentAttention))
    assert core.cost(Work(B, T, S)).matrix_flops == 2 * B * (S + T) * 5 * (38 + 34)
