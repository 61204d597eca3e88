"""Hybrids of gated DeltaNet and attention: Qwen3-Next, Qwen3.5 (dense and with experts), OLMo hybrid.

Sources: the modelling files of transformers 5.24 (``models/<family>``); counts are checked against those classes on the
meta device. Multi-token-prediction layers are left out.
"""

from __future__ import annotations

from dataclasses import replace

from roofline.components.attention import AttentionBlock
from roofline.components.base import Component
from roofline.components.delta import GatedDeltaNet
from roofline.components.moe import MoE
from roofline.configs.config import Config
from roofline.configs.dense import Style, assemble, attention_of, layer_of, mlp_of
from roofline.configs.readers.recurrent import (
    ATTENTION,
    layer_kinds,
    overrides_of,
    partial_rotary,
    periodic,
    state_format,
    without_prediction,
)
from roofline.configs.storage import Storage
from roofline.model import Model

STYLE = Style(qkv_bias="attention_bias", o_bias="attention_bias", qk_norm="head")
POST = Style(qkv_bias="attention_bias", o_bias="attention_bias", qk_norm="full")
ROTARY_FRACTION = 0.25
MODULES = {"qkv": "in_proj_qkv", "z": "in_proj_z", "b": "in_proj_b", "a": "in_proj_a", "out": "out_proj"}
FUSED_MODULES = {
    "qkv": "in_proj_qkvz", "z": "in_proj_qkvz", "b": "in_proj_ba", "a": "in_proj_ba", "out": "out_proj",
}  # fmt: skip
SEPARATE_MODULES = {"qkv": "q_proj", "z": "g_proj", "b": "b_proj", "a": "a_proj", "out": "o_proj"}


def delta_of(config: Config, storage: Storage, prefix: str, modules: dict[str, str]) -> GatedDeltaNet:
    """The gated DeltaNet of one layer."""
    return GatedDeltaNet(
        D=config.width,
        key_heads=config.size("linear_num_key_heads"),
        value_heads=config.size("linear_num_value_heads"),
        key_dim=config.size("linear_key_head_dim"),
        value_dim=config.size("linear_value_head_dim"),
        width=config.size("linear_conv_kernel_dim"),
        activation=storage.base,
        state_format=state_format(config, storage),
        **overrides_of(storage, prefix, modules),  # type: ignore[arg-type]
    )


def gated_attention_of(config: Config, storage: Storage, prefix: str) -> AttentionBlock:
    """Attention with an output gate, a quarter of each head rotated where the config does not say."""
    return replace(
        attention_of(config, STYLE, storage, prefix),
        gated=config.flag("attn_output_gate", True),
        rotary=partial_rotary(config, ROTARY_FRACTION),
    )


def moe_of(config: Config, storage: Storage, prefix: str) -> MoE:
    """Routed experts and one shared expert behind a sigmoid gate."""
    return MoE(
        D=config.width,
        F=config.size("moe_intermediate_size"),
        E=config.size("num_experts"),
        k=config.size("num_experts_per_tok"),
        shared_F=config.size_or(0, "shared_expert_intermediate_size", least=0),
        shared_gate=True,
        weight=storage.linear(f"{prefix}experts.0.up_proj"),
        router_weight=storage.linear(f"{prefix}gate"),
        shared_weight=storage.linear(f"{prefix}shared_expert.up_proj"),
        activation=storage.base,
    )


def kinds_of(config: Config) -> list[str]:
    """The mixer of every layer: layer_types, else attention in every full_attention_interval-th."""
    kinds = layer_kinds(config, config.layers, "layer_types")
    if kinds is not None:
        return kinds
    interval = config.size_or(4, "full_attention_interval")
    return periodic(config.layers, interval, interval - 1)


def routed_layers(config: Config) -> list[bool]:
    """Which layers hold experts: all, less mlp_only_layers and what decoder_sparse_step skips."""
    if not config.optional_size("num_experts", least=0):
        return [False] * config.layers
    dense = config.items("mlp_only_layers") or []
    step = config.size_or(1, "decoder_sparse_step", note=False)
    return [index not in dense and (index + 1) % step == 0 for index in range(config.layers)]


def read_gated_delta(config: Config, storage: Storage, name: str, root: str = "model.") -> Model:
    """A Qwen3-Next or Qwen3.5 text decoder; ``root`` is the path of its modules in the checkpoint."""
    modules = FUSED_MODULES if config.text("model_type") == "qwen3_next" else MODULES
    routed = routed_layers(config)
    layers = []
    for index, kind in enumerate(kinds_of(config)):
        prefix = f"{root}layers.{index}."
        mixer: Component
        if kind == ATTENTION:
            mixer = gated_attention_of(config, storage, f"{prefix}self_attn.")
        else:
            mixer = delta_of(config, storage, f"{prefix}linear_attn.", modules)
        feed_forward: Component
        feed_forward = (
            moe_of(config, storage, f"{prefix}mlp.") if routed[index] else mlp_of(config, STYLE, storage, f"{prefix}mlp.")
        )
        layers.append(layer_of("rms", "pre", mixer, feed_forward, config.width, storage))
    model = assemble(config, STYLE, storage, tuple(layers), name)
    return without_prediction(config, model, "mtp_num_hidden_layers", "num_nextn_predict_layers")


def read_olmo_hybrid(config: Config, storage: Storage, name: str) -> Model:
    """OLMo hybrid: DeltaNet layers with norms in front, attention layers with norms behind."""
    layers = []
    for index, kind in enumerate(kinds_of(config)):
        prefix = f"model.layers.{index}."
        mixer: Component = delta_of(config, storage, f"{prefix}linear_attn.", SEPARATE_MODULES)
        if kind == ATTENTION:
            mixer = attention_of(config, POST, storage, f"{prefix}self_attn.")
        feed_forward = mlp_of(config, POST, storage, f"{prefix}mlp.")
        norms = "post" if kind == ATTENTION else "pre"
        layers.append(layer_of("rms", norms, mixer, feed_forward, config.width, storage))
    return assemble(config, POST, storage, tuple(layers), name)
