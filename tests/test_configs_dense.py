"""Dense families from the keys that real configs throw at them: right by formula, or refused by name.

The counts here are worked out by hand from the config's numbers; ``oracle/test_params_dense.py`` asks transformers.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from roofline.components.attention import Attention, AttentionBlock, CacheWrite
from roofline.components.feedforward import MLP
from roofline.configs.families import READERS
from roofline.configs.guard import FEATURES
from roofline.configs.load import load_model
from roofline.configs.readers.irregular import ADJUST
from roofline.configs.styles import STYLES
from roofline.configs.unsupported import UNSUPPORTED
from roofline.errors import InputError, UnsupportedModel
from roofline.model import Layer, Model
from roofline.work import decode

D, F, L, N, K, H, V = 96, 160, 3, 6, 2, 16, 500
BASE = {
    "hidden_size": D, "intermediate_size": F, "num_hidden_layers": L, "num_attention_heads": N, "num_key_value_heads": K,
    "vocab_size": V, "max_position_embeddings": 128, "tie_word_embeddings": False, "torch_dtype": "bfloat16",
}  # fmt: skip


def model(family: str, **keys: Any) -> Model:
    """A small model; a key set to None is left out."""
    merged = {"model_type": family, **BASE, **keys}
    return load_model({key: value for key, value in merged.items() if value is not None})


def without(*keys: str) -> dict[str, None]:
    return dict.fromkeys(keys)


def mixer(layer: Layer) -> AttentionBlock:
    return next(block for block in layer.blocks if isinstance(block, AttentionBlock))


def windows(found: Model) -> list[int | None]:
    return [mixer(layer).size for layer in found.layers]


def llama_params(kv: int = K, head: int = H, feed: int = F) -> int:
    """2 V D + L (2 D H (N + K) + 3 D F + 2 D) + D."""
    return 2 * V * D + L * (2 * D * head * (N + kv) + 3 * D * feed + 2 * D) + D


def config_of(shared: Path, stem: str) -> dict[str, Any]:
    return json.loads((shared / "cases" / "configs" / f"{stem}.json").read_text(encoding="utf-8"))


# Files that transformers cannot build.


def test_chatglm3_by_formula(shared: Path) -> None:
    """GQA with two groups, biases at queries, keys and values only, a gated feed-forward, an untied head."""
    c = config_of(shared, "THUDM__chatglm3-6b")
    width, head, groups = c["hidden_size"], c["kv_channels"], c["multi_query_group_num"]
    qkv = (c["num_attention_heads"] + 2 * groups) * head
    layer = width * qkv + qkv + width * width + 3 * width * c["ffn_hidden_size"] + 2 * width
    assert load_model(c).params == 2 * c["padded_vocab_size"] * width + c["num_layers"] * layer + width == 6_243_584_000
    assert load_model(c).kv_bytes_per_token == 2 * 2 * groups * head * c["num_layers"] == 28_672


def test_phi_2_in_its_first_form_by_formula(shared: Path) -> None:
    """MHA, biases everywhere, one LayerNorm per layer, a plain feed-forward of 4 D, an untied head with a bias."""
    c = config_of(shared, "microsoft__phi-2_msft")
    width, vocabulary = c["n_embd"], c["vocab_size"]
    layer = 4 * (width * width + width) + 2 * 4 * width * width + 5 * width + 2 * width
    assert load_model(c).params == 2 * vocabulary * width + vocabulary + c["n_layer"] * layer + 2 * width == 2_779_683_840
    assert load_model(c).kv_bytes_per_token == 2 * 2 * width * c["n_layer"]
    assert mixer(load_model(c).layers[0]).rotary == 32


def test_mimo_by_formula_without_its_prediction_layer(shared: Path) -> None:
    c = config_of(shared, "XiaomiMiMo__MiMo-7B-Base")
    width, head = c["hidden_size"], c["head_dim"]
    qkv = (c["num_attention_heads"] + 2 * c["num_key_value_heads"]) * head
    layer = width * qkv + qkv + c["num_attention_heads"] * head * width + 3 * width * c["intermediate_size"] + 2 * width
    found = load_model(c)
    assert found.params == 2 * c["vocab_size"] * width + c["num_hidden_layers"] * layer + width == 7_622_619_136
    assert found.not_modelled == ("1 layer for multi-token prediction (num_nextn_predict_layers)",)


def test_nemotron_default_by_formula(shared: Path) -> None:
    """A plain feed-forward with squared ReLU and LayerNorms with biases; num_key_value_heads null means MHA."""
    c = config_of(shared, "tf-default__NemotronConfig")
    width = c["hidden_size"]
    layer = 4 * width * width + 2 * width * c["intermediate_size"] + 4 * width
    found = load_model(c)
    assert found.params == 2 * c["vocab_size"] * width + c["num_hidden_layers"] * layer + 2 * width == 17_642_041_344
    assert "num_key_value_heads = 48 (not in the config: MHA)" in found.assumes
    assert mixer(found.layers[0]).rotary == 64


def test_layers_found_by_search_by_formula(shared: Path) -> None:
    """Llama-3.3-Nemotron-Super-49B: a layer without attention has no norm for it either."""
    c = config_of(shared, "nvidia__Llama-3_3-Nemotron-Super-49B-v1")
    width, total = c["hidden_size"], 2 * c["vocab_size"] * c["hidden_size"] + c["hidden_size"]
    keyed = 0
    for block in c["block_configs"]:
        if not block["attention"]["no_op"]:
            kv = c["num_attention_heads"] // block["attention"]["n_heads_in_group"]
            keyed += kv
            total += width + 2 * width * width + 2 * width * kv * (width // c["num_attention_heads"])
        exact = int(2 * block["ffn"]["ffn_mult"] * width / 3)
        total += width + 3 * width * (exact + -exact % 256)
    found = load_model(c)
    assert found.params == total == 49_867_145_216
    assert found.kv_bytes_per_token == 2 * 2 * 128 * keyed == 200_704
    assert len({id(layer) for layer in found.layers}) <= len(c["block_configs"])


# Keys.


def test_heads_of_another_size_than_their_share_of_the_width() -> None:
    assert model("llama", head_dim=24).params == llama_params(head=24)
    assert model("llama", head_dim=None).params == llama_params()


def test_missing_key_value_heads_mean_mha_and_are_noted() -> None:
    found = model("llama", num_key_value_heads=None)
    assert found.params == llama_params(kv=N)
    assert "num_key_value_heads = 6 (not in the config: MHA)" in found.assumes


def test_missing_key_value_heads_mean_the_default_of_the_family() -> None:
    """MistralConfig has 8 key-value heads where the config does not say, not as many as query heads."""
    found = model("mistral", num_attention_heads=16, num_key_value_heads=None, head_dim=6)
    assert mixer(found.layers[0]).K == 8
    assert "num_key_value_heads = 8 (not in the config: the family's default)" in found.assumes


def test_missing_head_dim_means_the_default_of_the_family() -> None:
    assert mixer(model("qwen3").layers[0]).H == 128
    assert mixer(model("gemma").layers[0]).H == 256
    assert mixer(model("llama").layers[0]).H == 16


@pytest.mark.parametrize(
    ("keys", "kv"),
    [
        ({}, 1), ({"multi_query": False}, 6), ({"new_decoder_architecture": True, "num_kv_heads": 3}, 3),
        ({"num_kv_heads": 6}, 1), ({"new_decoder_architecture": True}, 6),
    ],
)  # fmt: skip
def test_falcon_counts_num_kv_heads_in_its_new_architecture_only(keys: dict[str, Any], kv: int) -> None:
    assert kv == mixer(model("falcon", num_key_value_heads=None, **keys).layers[0]).K


@pytest.mark.parametrize(
    ("keys", "norms"),
    [
        ({}, 1), ({"parallel_attn": False}, 2), ({"new_decoder_architecture": True}, 2),
        ({"new_decoder_architecture": True, "num_ln_in_parallel_attn": 1}, 1),
    ],
)  # fmt: skip
def test_falcon_has_as_many_norms_as_its_keys_say(keys: dict[str, Any], norms: int) -> None:
    parts = model("falcon", num_key_value_heads=None, **keys).layers[0].parts
    assert sum(part.kind == "norm" for part in parts) == norms


def test_alibi_rotates_nothing() -> None:
    assert mixer(model("falcon", num_key_value_heads=None, alibi=True).layers[0]).rotary == 0
    assert mixer(model("falcon", num_key_value_heads=None, alibi=False).layers[0]).rotary == H


def test_one_key_value_head_of_bigcode() -> None:
    gpt = {**without(*BASE), "n_embd": D, "n_layer": L, "n_head": N, "n_positions": 64, "vocab_size": V}
    assert model("gpt_bigcode", **gpt).kv_bytes_per_token == 2 * 2 * L * H
    assert model("gpt_bigcode", **gpt, multi_query=False).kv_bytes_per_token == 2 * 2 * L * N * H


def test_gpt2_names_of_sizes_and_a_null_inner_width() -> None:
    gpt = {"model_type": "gpt2", "n_embd": D, "n_layer": L, "n_head": N, "n_positions": 64, "vocab_size": V, "n_inner": None}
    layer = 12 * D * D + 13 * D
    assert load_model(gpt).params == (V + 64) * D + L * layer + 2 * D
    assert load_model({**gpt, "n_inner": 2 * D}).params == load_model(gpt).params - L * (4 * D * D + 2 * D)


@pytest.mark.parametrize(
    ("family", "keys", "rotary"),
    [
        ("llama", {}, 16), ("phi", {"partial_rotary_factor": 0.25}, 4), ("phi", {}, 8), ("stablelm", {"rope_pct": 0.5}, 8),
        ("gpt_neox", {"rotary_pct": 1.0, "num_key_value_heads": None}, 16), ("gpt_neox", {"num_key_value_heads": None}, 4),
        ("glm", {"head_dim": 16, "rope_parameters": {"partial_rotary_factor": 0.75}}, 12),
        ("gptj", {"rotary_dim": 8, "num_key_value_heads": None}, 8), ("bloom", {"num_key_value_heads": None}, 0),
        ("nemotron", {"head_dim": 16}, 8),
    ],
)  # fmt: skip
def test_rotated_elements_per_head(family: str, keys: dict[str, Any], rotary: int) -> None:
    found = model(family, **keys)
    assert next(part for part in found.layers[0].parts if isinstance(part, CacheWrite)).rotary == rotary


def test_every_fourth_layer_of_smollm3_stands_still() -> None:
    still = [mixer(layer).rotary == 0 for layer in model("smollm3", num_hidden_layers=8).layers]
    assert still == [False, False, False, True] * 2


# Windows.


@pytest.mark.parametrize("family", ["mistral", "ministral3", "phi3", "starcoder2"])
def test_a_window_holds_for_all_layers_where_it_is_set(family: str) -> None:
    assert windows(model(family, sliding_window=32)) == [32] * L
    assert windows(model(family, sliding_window=None)) == [None] * L


@pytest.mark.parametrize("family", ["qwen2", "qwen3"])
def test_the_window_of_qwen_is_off_unless_switched_on_and_starts_at_its_layer(family: str) -> None:
    keys = {"sliding_window": 32, "max_window_layers": 2}
    assert windows(model(family, **keys, use_sliding_window=False)) == [None] * L
    assert windows(model(family, **keys, use_sliding_window=True)) == [None, None, 32]


def test_state_stops_growing_at_the_window_but_not_per_token_below_it() -> None:
    found = model("mistral", sliding_window=32)
    assert found.kv_bytes_per_token == 2 * 2 * K * H * L
    assert found.state_bytes(20) == 20 * found.kv_bytes_per_token
    assert found.state_bytes(100) == 32 * found.kv_bytes_per_token


def test_the_smollm3_window_covers_the_layers_that_stand_still() -> None:
    found = model("smollm3", num_hidden_layers=4, use_sliding_window=True, sliding_window=32)
    assert windows(found) == [None, None, None, 32]


def test_cwm_sees_everything_in_every_fourth_layer() -> None:
    assert windows(model("cwm", num_hidden_layers=5, sliding_window=32)) == [None, 32, 32, 32, None]
    kinds = ["sliding_attention", "full_attention", "sliding_attention"]
    assert windows(model("cwm", sliding_window=32, layer_types=kinds)) == [32, None, 32]


# What stands around the blocks.


def test_opt_projects_a_narrow_embedding() -> None:
    """OPT-350M: word_embed_proj_dim 512 of 1024, norms behind each half and none in front of the head."""
    config = {
        "model_type": "opt", "hidden_size": 1024, "ffn_dim": 4096, "num_hidden_layers": 24, "num_attention_heads": 16,
        "word_embed_proj_dim": 512, "do_layer_norm_before": False, "vocab_size": 50272, "max_position_embeddings": 2048,
    }  # fmt: skip
    found = load_model(config)
    assert found.params == 331_196_416
    assert found.final == ()
    assert found.cost(decode(1, 0)).matrix_flops > 2 * 512 * 50272


def test_bloom_normalises_its_embedding() -> None:
    assert [part.kind for part in model("bloom", num_key_value_heads=None).embedding] == ["embedding", "norm"]


def test_apertus_learns_two_scalars_per_activation() -> None:
    assert model("apertus", hidden_act="xielu").params == model("apertus", hidden_act="silu").params + 2 * L


def test_qwen_1_counts_both_halves_of_the_feed_forward() -> None:
    found = model("qwen", num_key_value_heads=None)
    assert next(block for block in found.layers[0].blocks if isinstance(block, MLP)).F == F // 2


def test_linear_and_absent_halves_of_searched_layers() -> None:
    regular = {"attention": {"n_heads_in_group": 3}, "ffn": {"ffn_mult": 2.0}}
    linear = {"attention": {"replace_with_linear": True}, "ffn": {"replace_with_linear": True}}
    nothing = {"attention": {"no_op": True}, "ffn": {"no_op": True}}
    found = model("nemotron-nas", num_key_value_heads=None, intermediate_size=None, block_configs=[regular, linear, nothing])
    wide = 256
    first = 2 * D + 2 * D * H * (N + 2) + 3 * D * wide
    assert found.params == 2 * V * D + D + first + (2 * D + 2 * D * D)
    assert found.kv_bytes_per_token == 2 * 2 * 2 * H
    assert found.layers[2].parts == ()


@pytest.mark.parametrize(("key", "value"), [("window_length", 8192), ("num_sink_tokens", 4), ("sparsify", ["x"])])
def test_features_of_searched_layers_that_are_not_modelled(key: str, value: object) -> None:
    block = {"attention": {"n_heads_in_group": 3, key: value}, "ffn": {"ffn_mult": 2.0}}
    with pytest.raises(UnsupportedModel, match=key):
        model("nemotron-nas", num_key_value_heads=None, block_configs=[block] * L)


@pytest.mark.parametrize(
    ("family", "keys", "says"),
    [
        ("mpt", {"no_bias": False}, "biases"), ("mpt", {"attn_config": {"alibi": False}}, "learned positions"),
        ("mpt", {"attn_config": {"qk_ln": True}}, "norm of queries"), ("mpt", {"attn_config": {"attn_type": "x"}}, "attn_type"),
        ("mpt", {"ffn_config": {"ffn_type": "mptglu"}}, "feed-forward"),
    ],
)  # fmt: skip
def test_what_mpt_may_have_and_the_reader_does_not(family: str, keys: dict[str, Any], says: str) -> None:
    with pytest.raises(UnsupportedModel, match=says):
        model(family, num_key_value_heads=None, intermediate_size=None, **keys)


def test_grouped_queries_of_mpt() -> None:
    attention = {"attn_type": "grouped_query_attention", "kv_n_heads": 2}
    found = model("mpt", num_key_value_heads=None, intermediate_size=None, attn_config=attention)
    assert next(part for part in found.layers[0].parts if isinstance(part, Attention)).K == 2


# Refusals.

ON: dict[str, Any] = {
    "num_local_experts": 8, "num_experts": 64, "n_routed_experts": [4, 8], "kv_lora_rank": 512, "q_lora_rank": 64,
    "layers_block_type": ["mamba"], "sliding_window": 64, "attention_chunk_size": 64, "cross_attention_layers": [1],
    "is_encoder_decoder": True, "text_config": {"hidden_size": 64}, "llm_config": {"hidden_size": 64}, "block_configs": [{}],
    "use_qk_norm": True, "use_parallel_residual": True, "multi_query": True, "num_kv_shared_layers": 2, "index_topk": 2048,
    "no_rope_layers": [1, 0, 1], "pruned_heads": {"1": [0]}, "use_cla": True, "mamba_d_state": 16, "qkv_bias": True,
}  # fmt: skip


@pytest.mark.parametrize(("key", "value"), ON.items(), ids=ON)
def test_a_feature_that_llama_does_not_read_is_refused_by_name(key: str, value: object) -> None:
    assert key in FEATURES
    with pytest.raises(UnsupportedModel, match=f"llama: .*{key} ="):
        model("llama", **{key: value})


@pytest.mark.parametrize("value", [None, False, 0, [], {}, ""])
@pytest.mark.parametrize("key", [*ON, "hc_mult"])
def test_a_feature_that_is_switched_off_changes_nothing(key: str, value: object) -> None:
    config = {"model_type": "llama", **BASE, key: value}
    assert load_model(config) == model("llama")


def test_one_expert_is_no_mixture() -> None:
    assert model("llama", num_local_experts=1).params == llama_params()


def test_layer_types_that_are_not_read_are_refused() -> None:
    assert model("llama", layer_types=["full_attention"] * L).params == llama_params()
    for family, kind in (("llama", "sliding_attention"), ("qwen3", "linear_attention"), ("mistral", "chunked_attention")):
        with pytest.raises(UnsupportedModel, match=f"{family}: .*{kind}"):
            model(family, layer_types=["full_attention", kind, kind], attention_chunk_size=None, sliding_window=None)


def test_models_without_a_language_head_are_refused() -> None:
    with pytest.raises(UnsupportedModel, match="LlamaForSequenceClassification has no language-model head"):
        model("llama", architectures=["LlamaForSequenceClassification"])


def test_a_window_that_is_switched_off_is_no_window() -> None:
    assert windows(model("llama", sliding_window=64, use_sliding_window=False)) == [None] * L


def test_mha_families_refuse_other_key_value_heads() -> None:
    with pytest.raises(InputError, match="one for each query head"):
        model("gpt_neox", num_key_value_heads=2)


# Tables.


def test_every_family_is_read_or_named_as_missing() -> None:
    assert set(ADJUST) <= set(STYLES) <= set(READERS)
    for family, feature in list(UNSUPPORTED.items())[:5]:
        with pytest.raises(UnsupportedModel, match=f"^{family}: {feature.split('(')[0].strip()}"):
            model(family)


def test_an_unknown_family_is_answered_with_a_near_one() -> None:
    with pytest.raises(UnsupportedModel, match=r"lama: .*Did you mean.*'llama'"):
        model("lama")


@pytest.mark.parametrize("family", STYLES)
def test_a_style_reads_only_keys_that_the_guard_knows_or_that_no_one_else_sets(family: str) -> None:
    """A flag that a style reads is a feature elsewhere: the guard must know it, or it passes unread in other families."""
    known = {*FEATURES, "bias", "enable_bias", "attn_config"}
    assert STYLES[family].keys <= known
