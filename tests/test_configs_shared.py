"""Keys and values shared across layers (Hunyuan), and the vision tower of Kimi K3.

Sources: Hunyuan-Large, arXiv 2411.02265 (table 1: 389 billion parameters, 52 billion of them active; table 2: bytes of the
cache); model files of vLLM (hunyuan_v1.py) and of SGLang (kimi_k3).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from roofline.components.attention import AttentionBlock
from roofline.components.mixing import Learned
from roofline.components.moe import MoE
from roofline.configs.load import load_model
from roofline.errors import InputError, UnsupportedModel
from roofline.work import decode

HUNYUAN: dict[str, Any] = {
    "model_type": "hunyuan", "hidden_size": 48, "intermediate_size": 76, "num_hidden_layers": 7, "num_attention_heads": 6,
    "num_key_value_heads": 2, "attention_head_dim": 8, "vocab_size": 101, "tie_word_embeddings": True, "torch_dtype": "bfloat16",
    "num_experts": 1, "use_cla": True, "cla_share_factor": 2, "use_qk_norm": True,
}  # fmt: skip
SPARSE = {
    "num_experts": 5, "moe_topk": 2, "use_mixed_mlp_moe": True, "num_shared_expert": 1, "moe_intermediate_size": 20,
}  # fmt: skip


def attention(model: Any) -> list[AttentionBlock]:
    return [block for layer in model.layers for block in layer.blocks if isinstance(block, AttentionBlock)]


def test_hunyuan_large() -> None:
    model = load_model("tencent-hunyuan-large")
    assert round(model.params / 1e9) == 389
    assert round((model.active_params + 129_024 * 6400) / 1e9) == 52
    assert model.kv_bytes_per_token == 2 * 8 * 80 * 64
    assert 20 * model.kv_bytes_per_token == 4 * 80 * 80 * 64


@pytest.mark.parametrize(("factor", "own"), [(1, 7), (2, 4), (3, 3), (7, 1), (9, 1)])
def test_every_so_many_layers_keep_keys_and_values(factor: int, own: int) -> None:
    model = load_model({**HUNYUAN, "cla_share_factor": factor})
    assert [block.shares_kv for block in attention(model)] == [index % factor != 0 for index in range(7)]
    assert model.kv_bytes_per_token == 2 * own * 2 * 2 * 8
    plain = load_model({**HUNYUAN, "use_cla": False})
    assert plain.params - model.params == (7 - own) * 2 * 48 * 2 * 8
    work = decode(3, 100)
    assert plain.cost(work).matrix_flops - model.cost(work).matrix_flops == 2 * 3 * (7 - own) * 2 * 48 * 2 * 8


def test_a_factor_of_one_is_no_sharing() -> None:
    assert load_model({**HUNYUAN, "cla_share_factor": 1}).layers == load_model({**HUNYUAN, "use_cla": False}).layers


def test_shared_keys_have_a_norm_of_their_own() -> None:
    model = load_model(HUNYUAN)
    assert sum(isinstance(block, Learned) for layer in model.layers for block in layer.blocks) == 3
    without = load_model({**HUNYUAN, "use_qk_norm": False})
    assert model.params - without.params == 7 * 2 * 8
    assert any("keys that layers share" in line for line in model.assumes)
    assert not any("keys that layers share" in line for line in without.assumes)


def test_experts_and_a_shared_one_as_wide_as_a_dense_layer() -> None:
    model = load_model({**HUNYUAN, **SPARSE, "moe_layer_num_skipped": 2})
    mixtures = [block for layer in model.layers for block in layer.blocks if isinstance(block, MoE)]
    assert len(mixtures) == 5
    assert {(moe.E, moe.k, moe.F, moe.shared_F) for moe in mixtures} == {(5, 2, 20, 76)}
    dense = load_model({**HUNYUAN, **SPARSE, "use_mixed_mlp_moe": False, "moe_layer_num_skipped": 2})
    assert model.params - dense.params == 5 * 3 * 48 * 76


def test_lists_give_each_layer_its_own_number() -> None:
    model = load_model({**HUNYUAN, **SPARSE, "moe_topk": [1, 2, 3, 1, 2, 3, 1], "num_shared_expert": [1, 2, 1, 2, 1, 2, 1]})
    mixtures = [block for layer in model.layers for block in layer.blocks if isinstance(block, MoE)]
    assert [moe.k for moe in mixtures] == [1, 2, 3, 1, 2, 3, 1]
    assert [moe.shared_F for moe in mixtures] == [76, 152, 76, 152, 76, 152, 76]


def test_keys_of_what_is_switched_off_mean_nothing() -> None:
    off = {
        "use_mla": False,
        "kv_lora_rank": 512,
        "q_lora_rank": 1536,
        "qk_rope_head_dim": 64,
        "mamba": False,
        "mamba_d_state": 128,
    }
    assert load_model({**HUNYUAN, **off}).layers == load_model(HUNYUAN).layers


@pytest.mark.parametrize(
    ("keys", "says"),
    [
        ({"use_mla": True}, "latent attention"),
        ({"mamba": True}, "hybrid"),
        ({"sliding_window": 8}, "windowed attention"),
    ],
)
def test_what_the_reader_does_not_know_is_refused(keys: dict[str, Any], says: str) -> None:
    with pytest.raises(UnsupportedModel, match=says):
        load_model({**HUNYUAN, **keys})


def test_a_missing_factor_is_asked_for() -> None:
    with pytest.raises(InputError, match="cla_share_factor is missing"):
        load_model({key: value for key, value in HUNYUAN.items() if key != "cla_share_factor"})
    with pytest.raises(InputError, match="num_experts"):
        load_model({**HUNYUAN, "num_experts": [2, "x"]})


def kimi_k3() -> Path:
    core = pytest.importorskip("aiconfigurator_core")
    path = Path(core.__file__).parent / "model_configs" / "moonshotai--Kimi-K3_config.json"
    if not path.is_file():
        pytest.skip("aiconfigurator-core has no configuration of Kimi-K3")
    return path


def test_the_wrapper_of_kimi_k3_counts_its_tower() -> None:
    """401 million parameters in the tower, 46 million in the projector; text as in the catalogue."""
    model = load_model(kimi_k3())
    D, Q, F = 1024, 1536, 4096
    tower = 3 * 14 * 14 * D + 64 * 64 * D + 27 * (4 * D * Q + 2 * D * F + 2 * D) + D
    projector = F * F + F * 7168 + 7168
    assert tower == 401_214_464
    assert model.tower_params == tower + projector
    assert model.params == load_model("kimi-k3").params
    assert model.layers == load_model("kimi-k3").layers


def test_another_tower_of_kimi_k3_is_refused() -> None:
    import json

    config = json.loads(kimi_k3().read_text(encoding="utf-8"))
    for key, value in (("norm_type", "layernorm"), ("mm_projector_type", "patchmerger")):
        changed = {**config, "vision_config": {**config["vision_config"], key: value}}
        with pytest.raises(UnsupportedModel, match="kimi_k3"):
            load_model(changed)
