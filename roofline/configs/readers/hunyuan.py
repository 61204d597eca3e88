"""Tencent's Hunyuan: keys and values shared across layers (CLA), dense layers or experts with a shared one.

Where use_cla is set, only every cla_share_factor-th layer projects and caches keys and values; the layers behind it read
them, each after a norm of its own. Sources: the model files of model_type "hunyuan" in vLLM (hunyuan_v1.py: HunYuanAttention,
HunYuanCrossAttention, HunYuanSparseMoeBlock) and TensorRT-LLM (modeling_hunyuan_moe.py: the configuration); Hunyuan-Large,
arXiv 2411.02265, table 1.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from roofline.components.attention import AttentionBlock
from roofline.components.base import Component
from roofline.components.mixing import Learned
from roofline.components.moe import MoE
from roofline.configs.config import Config
from roofline.configs.dense import assemble, attention_of, layer_of, mlp_of
from roofline.configs.guard import left_out, refuse_unread
from roofline.configs.readers.moe import EXPERTS, one_size
from roofline.configs.storage import Storage
from roofline.configs.styles import Style
from roofline.errors import InputError, UnsupportedModel
from roofline.model import Layer, Model

STYLE = Style(qkv_bias="attention_bias", o_bias="attention_bias", mlp_bias="mlp_bias", qk_norm="head", qk_norm_if="use_qk_norm")
SWITCHED = {
    "use_mla": ("kv_lora_rank", "q_lora_rank", "qk_rope_head_dim", "v_head_dim", "qk_nope_head_dim"),
    "mamba": ("hybrid_override_pattern", "mamba_d_state"),
}
"""Switch -> keys that the class of the config always writes and that mean nothing while it is off."""
READ = ("use_cla", *EXPERTS, "use_qk_norm", "attention_bias", "mlp_bias")


def share_factor(config: Config) -> int:
    """Layers that use one set of keys and values: 1 without CLA."""
    return config.size("cla_share_factor") if config.flag("use_cla", False) else 1


def _most(config: Config, *keys: str) -> int:
    """The number under the first key present, or the largest of its list."""
    for key in keys:
        value = config.get(key)
        if isinstance(value, list):
            if not value or any(isinstance(entry, bool) or not isinstance(entry, int) for entry in value):
                raise InputError(f"config: {config.where}{key} must be a whole number or a list of them")
            return int(max(value))
    found: int = config.size_or(1, *keys, note=False)
    return found


def experts_of(config: Config, storage: Storage, prefix: str, index: int) -> MoE:
    """The experts of one layer; a shared one as wide as the dense layer, times their number, where layers are mixed."""
    dense = one_size(config, index, "intermediate_size")
    width = one_size(config, index, "moe_intermediate_size", "intermediate_size")
    shared = 0
    if config.flag("use_mixed_mlp_moe", False):
        shared = dense * (one_size(config, index, "num_shared_expert") if "num_shared_expert" in config else 1)
    first, second = storage.linear(f"{prefix}experts.0.gate_proj"), storage.linear(f"{prefix}experts.0.down_proj")
    return MoE(
        D=config.width, F=width, E=one_size(config, index, *EXPERTS),
        k=one_size(config, index, "moe_topk", "num_experts_per_tok"), shared_F=shared,
        weight=first, down_weight=None if second == first else second, router_weight=storage.base,
        shared_weight=storage.linear(f"{prefix}shared_mlp.gate_proj"), activation=storage.base,
    )  # fmt: skip


def _without_switched_off(config: Config) -> Config:
    """The config without keys of features that are switched off. Raises UnsupportedModel where one is on."""
    off: set[str] = set()
    for switch, keys in SWITCHED.items():
        if config.flag(switch, False):
            feature = "latent attention" if switch == "use_mla" else "a hybrid of layer kinds"
            raise UnsupportedModel(f"hunyuan: {feature} ({config.where}{switch}) is not supported in this family")
        off.update(keys)
    return Config({key: value for key, value in config.data.items() if key not in off}, config.where, config.assumes)


def read_hunyuan(config: Config, storage: Storage, name: str) -> Model:
    """A Hunyuan decoder, dense or sparse, with or without CLA."""
    config = _without_switched_off(config)
    refuse_unread(config, "hunyuan", READ, windows=False)
    factor, dense_first = share_factor(config), config.size_or(0, "moe_layer_num_skipped", least=0, note=False)
    sparse = _most(config, *EXPERTS) > 1
    layers: list[Layer] = []
    for index in range(config.layers):
        prefix = f"model.layers.{index}."
        mixer: AttentionBlock = attention_of(config, STYLE, storage, f"{prefix}self_attn.")
        shares = index % factor != 0
        mixer = replace(mixer, shares_kv=shares)
        feed_forward: Component
        if sparse and index >= dense_first:
            feed_forward = experts_of(config, storage, f"{prefix}mlp.", index)
        else:
            feed_forward = mlp_of(config, STYLE, storage, f"{prefix}mlp.", one_size(config, index, "intermediate_size"))
        layer = layer_of("rms", "pre", mixer, feed_forward, config.width, storage)
        if shares and mixer.qk_norm:
            before, *behind = layer.blocks[1:]
            key_norm = Learned(mixer.H, storage.base, "key_norm")
            layer = Layer((layer.blocks[0], before, key_norm, *behind))
        layers.append(layer)
    if factor > 1 and config.flag("use_qk_norm", False):
        config.assume("keys that layers share are cached before the norm that each applies to them; its cost is not counted")
    model = assemble(config, STYLE, storage, tuple(layers), name)
    notes: dict[str, Any] = {"assumes": tuple(config.assumes), "not_modelled": left_out(config)}
    return replace(model, **notes)
