"""Block-sparse attention (MiniMax-M3): counts by brute force, its limit, the published configuration.

Sources: transformers 5.24, models/minimax_m3_vl; parameter totals of its classes on the meta device.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy
import pytest

from roofline.components.attention import Attention, AttentionBlock
from roofline.components.block_sparse import BlockScores, BlockSelect, BlockSparseAttention, blocks_kept, blocks_seen
from roofline.components.masks import keys, pairs
from roofline.configs.load import load_model
from roofline.edits import apply, window
from roofline.errors import InputError, UnsupportedModel
from roofline.model import Model
from roofline.parallel.shard import shard
from roofline.symbols import symbols
from roofline.work import Work, decode, prefill

CONFIG: dict[str, Any] = {
    "model_type": "minimax_m3", "hidden_size": 48, "intermediate_size": 20, "dense_intermediate_size": 76,
    "shared_intermediate_size": 28, "num_hidden_layers": 5, "num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 8,
    "rotary_dim": 4, "vocab_size": 101, "num_local_experts": 7, "num_experts_per_tok": 3, "moe_layer_freq": [0, 1, 1, 1, 1],
    "use_qk_norm": True, "qk_norm_type": "per_head", "tie_word_embeddings": False, "torch_dtype": "bfloat16",
    "sparse_attention_config": {
        "use_sparse_attention": True, "sparse_num_index_heads": 2, "sparse_index_dim": 10, "sparse_block_size": 4,
        "sparse_topk_blocks": 3, "sparse_local_block": 1, "sparse_init_block": 0, "sparse_score_type": "max",
        "sparse_attention_freq": [0, 0, 1, 1, 1], "sparse_disable_index_value": [0, 0, 1, 1, 1],
    },
}  # fmt: skip


def changed(**section: Any) -> dict[str, Any]:
    return {**CONFIG, "sparse_attention_config": {**CONFIG["sparse_attention_config"], **section}}


def points() -> Iterator[tuple[int, int, int, int]]:
    """(tokens per block, blocks kept, T, S)."""
    for size, count in ((1, 1), (4, 1), (4, 3), (5, 2), (3, 20)):
        for T in (1, 2, 7, 13):
            for S in (0, 1, 3, 4, 11, 12, 30):
                yield size, count, T, S


def attended(position: int, size: int, count: int) -> int:
    """Keys that one query attends to: its own block up to itself, the best of the blocks before."""
    return min(position // size, count - 1) * size + position % size + 1


@pytest.mark.parametrize(("size", "count", "T", "S"), list(points()))
def test_counts_are_those_of_a_loop(size: int, count: int, T: int, S: int) -> None:
    queries = range(S, S + T)
    expected = sum(attended(p, size, count) for p in queries)
    assert pairs("blocks", (size, count), T, S) == expected
    assert keys("blocks", (size, count), T, S) == min(expected, S + T)
    assert blocks_seen(size, T, S) == sum(p // size + 1 for p in queries)
    assert blocks_kept(size, count, T, S) == sum(min(p // size + 1, count) for p in queries)


@pytest.mark.parametrize("S", [0, 5, 11, 100])
def test_all_readings_give_one_number(S: int) -> None:
    symbolic = pairs("blocks", (4, 3), symbols("T")[0], symbols("S")[0])
    exact = pairs("blocks", (4, 3), 7, S)
    assert symbolic.subs({symbols("T")[0]: 7, symbols("S")[0]: S}) == exact
    assert pairs("blocks", (4, 3), numpy.array([7.0]), numpy.array([float(S)]))[0] == exact


BLOCK = BlockSparseAttention(
    48, 6, 2, 8, mask="blocks", size=(4, 3), qk_norm="head", rotary=4, index_heads=2, index_dim=10, index_rotary=4
)


def core(block: AttentionBlock) -> Attention:
    (found,) = (part for part in block.parts if isinstance(part, Attention))
    return found


@pytest.mark.parametrize("work", [Work(2, 1, 11), Work(2, 5, 7), Work(2, 12, 0), decode(3, 4)])
def test_as_many_blocks_as_there_are_tokens_is_dense_attention(work: Work) -> None:
    dense = AttentionBlock(48, 6, 2, 8, qk_norm="head", rotary=4)
    assert core(BLOCK).cost(work) == core(dense).cost(work)
    indexer = [part for part in BLOCK.parts if part not in dense.parts and not isinstance(part, Attention)]
    assert BLOCK.cost(work).matrix_flops == dense.cost(work).matrix_flops + sum(p.cost(work).matrix_flops for p in indexer)


def test_a_long_context_costs_the_selected_blocks_only() -> None:
    work = decode(1, 1003)
    seen = attended(1003, 4, 3)
    assert seen == 12
    assert core(BLOCK).cost(work).matrix_flops == 2 * 6 * (8 + 8) * seen
    assert core(BLOCK).cost(work).read["state"] == seen * 2 * 2 * 8 * 2


def test_the_indexer_by_hand() -> None:
    work = Work(2, 3, 9)
    (scores,) = (part for part in BLOCK.parts if isinstance(part, BlockScores))
    (select,) = (part for part in BLOCK.parts if isinstance(part, BlockSelect))
    causal = 10 + 11 + 12
    assert scores.cost(work).matrix_flops == 2 * 2 * 2 * 10 * causal
    assert scores.cost(work).read["index"] == 2 * 12 * 10 * 2
    assert select.cost(work).write["activations"] == 4 * 2 * 2 * (3 + 3 + 3)
    assert sum(BLOCK.params().values()) - sum(AttentionBlock(48, 6, 2, 8, qk_norm="head").params().values()) == 48 * 10 * 3 + 20


def test_state_is_keys_values_and_an_index_key() -> None:
    model = load_model(CONFIG)
    assert model.kv_bytes_per_token == 2 * (5 * 2 * 2 * 8 + 3 * 10)
    assert model.state_bytes(100) == 100 * model.kv_bytes_per_token


def published(name: str) -> Model:
    core = pytest.importorskip("aiconfigurator_core")
    path = Path(core.__file__).parent / "model_configs" / f"{name}_config.json"
    if not path.is_file():
        pytest.skip(f"aiconfigurator-core has no {path.name}")
    return load_model(path)


@pytest.mark.parametrize("name", ["MiniMaxAI--MiniMax-M3", "nvidia--MiniMax-M3-NVFP4"])
def test_the_published_configuration(name: str) -> None:
    model = published(name)
    assert model.params == 426_174_565_632
    assert model.kv_bytes_per_token == 2 * (60 * 2 * 4 * 128 + 57 * 128) == 137_472
    assert model.tower_params == (631_185_920 + 234_381_312 if "NVFP4" in name else 0)
    blocks = [layer.blocks[1] for layer in model.layers]
    assert [isinstance(block, BlockSparseAttention) for block in blocks] == [False] * 3 + [True] * 57


def test_formats_of_the_quantised_checkpoint() -> None:
    model = published("nvidia--MiniMax-M3-NVFP4")
    experts = 57 * 128 * 3 * 6144 * 3072
    by_format = {fmt.name: number for fmt, number in model.params_by_format.items()}
    assert by_format["nvfp4"] == experts
    index = 57 * 6144 * 128 * 5
    attention = 60 * 6144 * 128 * (2 * 64 + 2 * 4)
    assert by_format["mxfp8"] == index + attention + 3 * 3 * 6144 * 12288 + 57 * 3 * 6144 * 3072


REFUSED = {
    "no own block": (changed(sparse_local_block=0), "sparse_local_block"),
    "first blocks": (changed(sparse_init_block=1), "sparse_init_block"),
    "another score": (changed(sparse_score_type="mean"), "sparse_score_type"),
    "values of the index": (changed(sparse_disable_index_value=[0, 0, 1, 0, 1]), "sparse_disable_index_value"),
    "a gate": ({**CONFIG, "attention_output_gate": True}, "attention_output_gate"),
    "another norm": ({**CONFIG, "qk_norm_type": "per_layer"}, "qk_norm_type"),
    "another layer": ({**CONFIG, "layer_types": ["linear_attention"] * 5}, "linear_attention"),
    "latent attention": ({**CONFIG, "kv_lora_rank": 8}, "latent attention"),
}


@pytest.mark.parametrize(("config", "says"), REFUSED.values(), ids=REFUSED)
def test_what_the_code_does_not_have_is_refused(config: dict[str, Any], says: str) -> None:
    with pytest.raises(UnsupportedModel, match=says):
        load_model(config)


def test_index_heads_go_with_key_value_heads() -> None:
    with pytest.raises(InputError, match="3 index heads for 2 key-value heads"):
        load_model(changed(sparse_num_index_heads=3))


def test_without_the_switch_all_layers_are_dense() -> None:
    model = load_model(changed(use_sparse_attention=False))
    assert not any(isinstance(layer.blocks[1], BlockSparseAttention) for layer in model.layers)


def test_keys_at_the_top_are_those_of_the_section() -> None:
    flat = {key: value for key, value in CONFIG.items() if key != "sparse_attention_config"}
    flat |= {
        "index_n_heads": 2, "index_head_dim": 10, "index_block_size": 4, "index_topk_blocks": 3, "index_local_blocks": 1,
        "layer_types": ["full_attention"] * 2 + ["minimax_m3_sparse"] * 3,
    }  # fmt: skip
    assert load_model(flat).layers == load_model(CONFIG).layers


def test_a_window_leaves_selected_blocks_alone() -> None:
    edited = apply(load_model(CONFIG), [window(16)])
    assert [block.mask for layer in edited.layers if isinstance(block := layer.blocks[1], AttentionBlock)] == (
        ["window"] * 2 + ["blocks"] * 3
    )


def test_another_mask_needs_no_indexer() -> None:
    assert replace(BLOCK, mask="causal", size=None).parts == AttentionBlock(48, 6, 2, 8, qk_norm="head", rotary=4).parts


def test_prefill_of_many_queries_reads_each_key_once() -> None:
    work = prefill(1, 400)
    assert core(BLOCK).cost(work).read["state"] == 400 * 2 * 2 * 8 * 2


def test_a_rank_scores_for_its_own_key_value_heads_only() -> None:
    """Two ranks hold one key-value head and one index head each; the index key is on both."""
    part, summed = shard(BLOCK, 2)
    assert summed
    assert isinstance(part, BlockSparseAttention)
    assert (part.N, part.K, part.index_heads) == (3, 1, 1)
    work = Work(2, 3, 50)
    kinds = (BlockScores, BlockSelect)
    whole = sum(p.cost(work).flops["vector"] for p in BLOCK.parts if isinstance(p, kinds))
    assert 2 * sum(p.cost(work).flops["vector"] for p in part.parts if isinstance(p, kinds)) == whole
    assert {piece.name: piece.elements for piece in part.state()} == {"kv": 2 * 8, "index": 10}
