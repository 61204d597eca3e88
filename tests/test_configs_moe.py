"""Readers of sparse models: totals, active parameters, which layers are sparse, how experts are stored."""

from __future__ import annotations

from typing import Any

import pytest

from roofline.components.moe import MoE
from roofline.configs.config import Config
from roofline.configs.load import load_model
from roofline.configs.readers.moe import sparse_layers
from roofline.errors import InputError, UnsupportedModel
from roofline.model import Model
from roofline.work import Work

COUNTS = {
    "mixtral-8x7b-v0.1": (46702792704, 12879925248),
    "mixtral-8x22b-v0.1": (140620634112, 39152031744),
    "qwen3-30b-a3b": (30532122624, 3353032704),
    "qwen3-235b-a22b": (235093634560, 22190763520),
    "llama-4-scout-17b-16e": (107769861120, 17172894720),
    "llama-4-maverick-17b-128e": (400711848960, 17184691200),
    "gpt-oss-20b": (20914757184, 4187440704),
    "gpt-oss-120b": (116829156672, 5711982912),
    "glm-4.5": (352797814784, 33632251904),
    "glm-4.6": (352797814784, 33632251904),
    "glm-4.5-air": (106852245504, 13424123904),
    "minimax-m2.5": (228689748992, 11030537216),
    "qwen1.5-moe-a2.7b": (14315784192, 2689173504),
    "mimo-v2-flash": (308778768832, 15445924288),
    "step-3.7-flash": (195844496640, 10875690240),
}
"""(total, active) of transformers 5.24 classes on the meta device; active is the total less the experts not picked."""

PUBLISHED = {
    "olmoe-1b-7b-0924": 6919161856,
    "dbrx-base": 131596523520,
    "phi-3.5-moe": 41873153344,
    "ernie-4.5-21b-a3b-pt": 21825437888,
}
"""Elements of the published safetensors files."""

SMALL: dict[str, Any] = {
    "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2,
    "vocab_size": 100, "tie_word_embeddings": False,
}  # fmt: skip


def mixtures(model: Model) -> list[MoE]:
    return [block for layer in model.layers for block in layer.blocks if isinstance(block, MoE)]


@pytest.mark.parametrize("name", COUNTS)
def test_total_and_active_parameters(name: str) -> None:
    model = load_model(name)
    assert (model.params, model.active_params) == COUNTS[name]


@pytest.mark.parametrize("name", PUBLISHED)
def test_totals_of_published_files(name: str) -> None:
    assert load_model(name).params == PUBLISHED[name]


@pytest.mark.parametrize(("name", "size"), [("gpt-oss-20b", 13761264768), ("gpt-oss-120b", 65248815744)])
def test_gpt_oss_occupies_what_its_published_files_do(name: str, size: int) -> None:
    """total_size of model.safetensors.index.json: mxfp4 experts with bf16 biases, everything else bf16."""
    assert load_model(name).weight_bytes == size


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        ({}, "MMMMMM"),
        ({"first_k_dense_replace": 2}, "..MMMM"),
        ({"first_k_dense_replace": 1, "moe_layer_freq": 2}, "..M.M."),
        ({"moe_layer_freq": [0, 1, 1, 0, 1, 1]}, ".MM.MM"),
        ({"decoder_sparse_step": 2}, ".M.M.M"),
        ({"decoder_sparse_step": 1, "mlp_only_layers": [0, 4]}, ".MMM.M"),
        ({"interleave_moe_layer_step": 2}, ".M.M.M"),
        ({"interleave_moe_layer_step": 2, "moe_layers": [0, 1]}, "MM...."),
        ({"moe_layers_enum": "3,4,5"}, "...MMM"),
        ({"moe_layer_start_index": 1, "moe_layer_end_index": 4, "moe_layer_interval": 1}, ".MMMM."),
        ({"moe_layer_start_index": 1, "moe_layer_interval": 2}, ".M.M.M"),
        ({"mlp_layer_types": ["dense", "sparse", "sparse", "dense", "sparse", "sparse"]}, ".MM.MM"),
    ],
)
def test_which_layers_are_sparse(keys: dict[str, Any], expected: str) -> None:
    assert "".join("M" if sparse else "." for sparse in sparse_layers(Config(keys), 6)) == expected


def test_dense_layers_take_the_dense_width() -> None:
    config = {
        **SMALL,
        "model_type": "qwen3_moe",
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
        "mlp_only_layers": [1],
    }
    model = load_model(config)
    assert [len(layer.blocks) for layer in model.layers] == [4, 4, 4, 4]
    assert len(mixtures(model)) == 3
    assert sum(model.layers[1].blocks[3].params().values()) == 3 * 64 * 96


def test_shared_experts_by_width_by_count_and_always() -> None:
    moe = {**SMALL, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
    by_width = load_model({**moe, "model_type": "qwen2_moe", "num_experts": 8, "shared_expert_intermediate_size": 48})
    assert {(m.shared_F, m.shared_gate) for m in mixtures(by_width)} == {(48, True)}
    by_count = load_model(
        {**moe, "model_type": "glm4_moe", "n_routed_experts": 8, "n_shared_experts": 3, "first_k_dense_replace": 1}
    )
    assert {(m.shared_F, m.shared_gate) for m in mixtures(by_count)} == {(96, False)}
    llama4 = {
        **SMALL,
        "model_type": "llama4_text",
        "num_local_experts": 8,
        "num_experts_per_tok": 1,
        "intermediate_size_mlp": 128,
    }
    assert {m.shared_F for m in mixtures(load_model(llama4))} == {96}


def test_experts_per_layer_may_be_listed() -> None:
    config = {**SMALL, "model_type": "hunyuan_v1_moe", "num_experts": [4, 4, 8, 8], "moe_topk": [1, 1, 2, 2], "head_dim": 16}
    assert [(m.E, m.k) for m in mixtures(load_model(config))] == [(4, 1), (4, 1), (8, 2), (8, 2)]


def test_fp8_checkpoints_keep_their_routers() -> None:
    model = load_model("minimax-m2.5")
    moe = mixtures(model)[0]
    assert (moe.weight.name, moe.router_weight.name) == ("fp8-block", "bf16")


def test_a_step_reads_the_experts_it_hits() -> None:
    model = load_model("mixtral-8x7b-v0.1")
    one = model.cost(Work(1, 1, 0)).read["weights"]
    assert one == 2 * (model.active_params - 32000 * 4096) + 2 * 4096
    many = model.cost(Work(4096, 1, 0)).read["weights"]
    assert many == pytest.approx(2 * (model.params - 32000 * 4096) + 2 * 4096 * 4096, rel=1e-12)


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        ({"num_experts_per_tok": 9}, InputError, "exceeds the 8 experts"),
        ({"num_local_experts": None}, InputError, "num_local_experts"),
        ({"num_experts_per_tok": None}, InputError, "num_experts_per_tok"),
        ({"mlp_only_layers": [4]}, InputError, "mlp_only_layers must list layers from 0 to 3"),
        ({"mlp_layer_types": ["sparse"]}, InputError, "mlp_layer_types has 1 entries for 4 layers"),
        ({"kv_lora_rank": 512}, UnsupportedModel, "latent attention"),
        ({"attention_bias": True}, UnsupportedModel, "biases"),
    ],
)
def test_bad_sparse_configs_name_the_key(change: dict[str, Any], error: type[Exception], words: str) -> None:
    config = {**SMALL, "model_type": "mixtral", "num_local_experts": 8, "num_experts_per_tok": 2, **change}
    with pytest.raises(error, match=words):
        load_model(config)


def test_gpt_oss_assumes_biases_only_where_the_config_is_silent() -> None:
    config = {**SMALL, "model_type": "gpt_oss", "num_local_experts": 8, "num_experts_per_tok": 2, "sliding_window": 16}
    silent, stated = load_model(config), load_model({**config, "attention_bias": False})
    assert any("attention_bias = true" in note for note in silent.assumes)
    assert not any("attention_bias" in note for note in stated.assumes)
    assert silent.params - stated.params == 4 * (4 * 16 + 2 * 2 * 16 + 64)


def test_layers_for_multi_token_prediction_are_named_and_not_counted() -> None:
    model = load_model("step-3.7-flash")
    assert any("multi-token prediction" in note for note in model.not_modelled)
