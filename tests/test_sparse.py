"""Sparse latent attention (DSA): the figures of DeepSeek-V3.2 and GLM-5, and its limit, dense latent attention.

Sources: DeepSeek-V3.2-Exp, inference/model.py and config_671B_v3.2.json; the published config.json files; parameter
totals of the transformers 5.24 classes on the meta device.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from roofline.components.latent import LatentAttention, Reach
from roofline.components.mla import MLA
from roofline.components.sparse import DSA, IndexScores, TopK
from roofline.configs.load import load_model
from roofline.errors import InputError, UnsupportedModel
from roofline.formats import FORMATS, FP8
from roofline.model import Layer, Model
from roofline.work import Work, decode, prefill

SMALL = MLA(D=48, N=6, Q=20, R=14, P=4, H=10, value_dim=8)
V32 = DSA(D=7168, N=128, Q=1536, R=512, P=64, H=128, k=2048, index_heads=64, index_dim=128)


def small(k: int) -> DSA:
    """The sparse counterpart of the small latent attention."""
    return DSA(D=48, N=6, Q=20, R=14, P=4, H=10, value_dim=8, k=k, index_heads=3, index_dim=12)


def kernel(block: MLA, kind: type) -> LatentAttention | IndexScores | TopK:
    """The one kernel of that type."""
    (found,) = (part for part in block.parts if isinstance(part, kind))
    return found


def with_blocks(model: Model, **changes: object) -> Model:
    """The model with fields of its sparse blocks changed."""

    def edit(layer: Layer) -> Layer:
        return replace(layer, blocks=tuple(replace(b, **changes) if isinstance(b, DSA) else b for b in layer.blocks))

    return replace(model, layers=tuple(edit(layer) for layer in model.layers))


def test_v32_adds_851524864_parameters_to_v3() -> None:
    indexer = 1536 * 64 * 128 + 7168 * 128 + 7168 * 64 + 2 * 128
    assert V32.indexer is not None
    assert sum(V32.indexer.params().values()) == indexer
    assert load_model("deepseek-v3.2").params - load_model("deepseek-v3").params == 61 * indexer == 851_524_864
    assert load_model("deepseek-v3.2").params == 671_877_929_216
    assert load_model("deepseek-v3.2").active_params == 38_403_807_488


def test_glm_5_totals() -> None:
    model = load_model("glm-5")
    assert model.params == 743_911_199_232
    assert model.active_params == 41_784_709_632
    assert model.kv_bytes_per_token == 109_824


def test_v32_cache_per_token_with_bf16_and_with_fp8_latents() -> None:
    model = load_model("deepseek-v3.2")
    assert model.kv_bytes_per_token == 85_888
    assert model.state_bytes(1) == 61 * (1152 + 132) == 78_324
    assert with_blocks(model, kv=FP8).state_bytes(1) == 61 * (656 + 132) == 48_068


@pytest.mark.parametrize("cached", [1, 2047, 2048, 131_071])
def test_decode_step_of_v32_follows_the_release(cached: int) -> None:
    seen, chosen = cached + 1, min(cached + 1, 2048)
    index, core = kernel(V32, IndexScores).cost(decode(1, cached)), kernel(V32, LatentAttention).cost(decode(1, cached))
    assert index.flops["fp8"] == 16_384 * seen
    assert index.read["index"] == 132 * seen
    assert core.matrix_flops == 278_528 * chosen
    assert core.read["state"] == 1152 * chosen
    assert kernel(V32, TopK).cost(decode(1, cached)).write["activations"] == 4 * chosen


@pytest.mark.parametrize("work", [decode(3, 40), prefill(2, 30), prefill(1, 9, cached=21), Work(1, 30, 0)])
def test_selecting_everything_costs_what_dense_latent_attention_costs(work: Work) -> None:
    sparse = small(k=work.S + work.T)
    assert kernel(sparse, LatentAttention).cost(work) == kernel(SMALL, LatentAttention).cost(work)
    unindexed = replace(sparse, index_heads=0)
    assert unindexed.cost(work) == SMALL.cost(work)


def test_a_selection_never_costs_more_than_dense_attention() -> None:
    for k in (1, 5, 30, 200):
        for work in (decode(1, 100), prefill(1, 50, cached=20)):
            sparse, dense = (kernel(b, LatentAttention).cost(work) for b in (small(k), SMALL))
            assert sparse.matrix_flops <= dense.matrix_flops
            assert sparse.read["state"] <= dense.read["state"]


def enumerated(reach: Reach, work: Work) -> int:
    """Pairs counted query by query."""
    limit = 10**9 if reach.limit is None else reach.limit
    return sum(min(limit, (position + 1) // reach.every) for position in range(work.S, work.S + work.T))


@pytest.mark.parametrize("every", [1, 2, 4, 7])
@pytest.mark.parametrize("limit", [None, 1, 3, 50])
@pytest.mark.parametrize(("T", "S"), [(1, 0), (1, 12), (5, 3), (29, 0), (13, 100)])
def test_pairs_are_the_sum_over_queries(every: int, limit: int | None, T: int, S: int) -> None:
    reach = Reach(every, limit)
    assert reach.pairs(T, S) == enumerated(reach, Work(1, T, S))
    assert reach.read(T, S) <= (S + T) // every


def test_index_of_another_format_changes_bytes_and_unit() -> None:
    scores = kernel(replace(V32, index=FORMATS["mxfp4"]), IndexScores).cost(decode(1, 99))
    assert scores.read["index"] == 68 * 100
    assert scores.flops["fp4"] == 16_384 * 100


def test_prefill_stays_sparse() -> None:
    model = load_model("deepseek-v3.2")
    assert model.for_prefill is model


def indexed(**changes: object) -> dict[str, object]:
    """A small GLM-5 config."""
    base: dict[str, object] = {
        "model_type": "glm_moe_dsa", "hidden_size": 48, "intermediate_size": 56, "moe_intermediate_size": 22,
        "num_hidden_layers": 4, "num_attention_heads": 6, "q_lora_rank": 20, "kv_lora_rank": 14, "qk_nope_head_dim": 10,
        "qk_rope_head_dim": 4, "v_head_dim": 8, "n_routed_experts": 8, "n_shared_experts": 1, "num_experts_per_tok": 3,
        "first_k_dense_replace": 1, "vocab_size": 96, "torch_dtype": "bfloat16", "tie_word_embeddings": False,
        "index_topk": 5, "index_n_heads": 3, "index_head_dim": 12,
    }  # fmt: skip
    return {key: value for key, value in {**base, **changes}.items() if value != "absent"}


def own(model_config: dict[str, object]) -> str:
    """One letter per layer: F where it has its own indexer, S where it shares one."""
    blocks = (b for layer in load_model(model_config).layers for b in layer.blocks if isinstance(b, DSA))
    return "".join("F" if block.index_heads else "S" for block in blocks)


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, "FFFF"),
        ({"indexer_types": ["full", "shared", "shared", "full"]}, "FSSF"),
        ({"index_topk_pattern": "FSFS"}, "FSFS"),
        ({"index_topk_freq": 2, "index_skip_topk_offset": 2}, "FFSF"),
    ],
)
def test_config_keys_decide_which_layers_share_a_selection(changes: dict[str, object], expected: str) -> None:
    assert own(indexed(**changes)) == expected


def test_layers_that_share_a_selection_keep_no_index_keys() -> None:
    all_own, shared = load_model(indexed()), load_model(indexed(index_topk_pattern="FSSS"))
    indexer = 20 * 36 + 48 * 12 + 48 * 3 + 24
    assert all_own.params - shared.params == 3 * indexer
    assert all_own.kv_bytes_per_token - shared.kv_bytes_per_token == 3 * 2 * 12


def test_bad_index_keys_are_refused_by_name() -> None:
    with pytest.raises(UnsupportedModel, match="indexer_types has 'none'"):
        load_model(indexed(indexer_types=["full", "none", "full", "full"]))
    with pytest.raises(InputError, match="must start with a full layer"):
        load_model(indexed(index_topk_pattern="SFFF"))
    with pytest.raises(InputError, match="index_topk needs q_lora_rank"):
        load_model(indexed(q_lora_rank=None))
    with pytest.raises(InputError, match="index_n_heads"):
        load_model(indexed(index_n_heads="absent"))
