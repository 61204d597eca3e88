"""Kimi-Linear and Kimi-K3: Kimi delta attention in most layers, latent attention without rotation in the others.

K3 adds, each under a key of its own: an output gate on latent attention (mla_use_output_gate), a full gate on delta
attention (use_full_rank_gate), experts on a latent with a norm behind them (routed_expert_hidden_size,
latent_moe_use_norm), attention over depth in place of residual additions (attn_res_block_size).
Sources: transformers 5.24, models/kimi_linear, against which counts are checked; the published configuration of K3 and
vLLM's model of it for shapes. The router's correction bias is a buffer and no parameter.
"""

from __future__ import annotations

from dataclasses import replace

from roofline.components.base import Component
from roofline.components.delta import KimiDeltaAttention
from roofline.components.gated_latent import DepthAttention, GatedLatentAttention
from roofline.components.mixing import Norm
from roofline.components.moe import MoE
from roofline.configs.config import Config
from roofline.configs.dense import Style, assemble, make_norm, mlp_of
from roofline.configs.readers.deepseek import mla_of
from roofline.configs.readers.recurrent import ATTENTION, RECURRENT, layer_kinds, overrides_of, without_prediction
from roofline.configs.storage import Storage
from roofline.errors import InputError
from roofline.model import Layer, Model

STYLE = Style()
MODULES = {
    "qkv": "q_proj", "f_a": "f_a_proj", "f_b": "f_b_proj", "b": "b_proj", "g_a": "g_a_proj", "g_b": "g_b_proj",
    "g": "g_proj", "out": "o_proj",
}  # fmt: skip


def linear_section(config: Config) -> Config:
    """The section that describes delta attention; the config itself where its keys stand at the top."""
    return config.section("linear_attn_config") if "linear_attn_config" in config else config


def kinds_of(config: Config) -> list[str]:
    """The mixer of every layer: the lists of linear_attn_config, which count from 1, else layer_types."""
    count = config.layers
    section = linear_section(config)
    full, delta = section.items("full_attn_layers"), section.items("kda_layers")
    if full is None or delta is None:
        kinds = layer_kinds(config, count, "layer_types")
        if kinds is None:
            raise InputError(f"config: {section.where}full_attn_layers and kda_layers are missing, and so is layer_types")
        return kinds
    named = full + delta
    if len(named) != count or set(map(str, named)) != set(map(str, range(1, count + 1))):
        raise InputError(f"config: {section.where}full_attn_layers and kda_layers must name each of the {count} layers once")
    return [ATTENTION if index + 1 in full else RECURRENT for index in range(count)]


def delta_of(config: Config, storage: Storage, prefix: str) -> KimiDeltaAttention:
    """The delta attention of one layer; its state is kept in fp32."""
    section = linear_section(config)
    return KimiDeltaAttention(
        D=config.width,
        heads=section.size("num_heads", "linear_num_heads"),
        head_dim=section.size("head_dim") if section is not config else config.size("linear_head_dim"),
        width=section.size("short_conv_kernel_size", "linear_conv_kernel_dim"),
        full_gate=section.flag("use_full_rank_gate", False),
        activation=storage.base,
        **overrides_of(storage, prefix, MODULES),  # type: ignore[arg-type]
    )


def attention_of(config: Config, storage: Storage, prefix: str) -> Component:
    """The latent attention of one layer, gated where the config says so."""
    latent = mla_of(config, storage, prefix)
    if config.flag("mla_use_output_gate", False):
        return GatedLatentAttention(latent, storage.linear(f"{prefix}g_proj"))
    return latent


def experts_of(config: Config, storage: Storage, prefix: str) -> tuple[Component, ...]:
    """Routed and shared experts, and the norm between routed experts and their way back from the latent."""
    width = config.size("moe_intermediate_size")
    latent = config.optional_size("routed_expert_hidden_size")
    moe = MoE(
        D=config.width,
        F=width,
        E=config.size("num_experts"),
        k=config.size("num_experts_per_token", "num_experts_per_tok"),
        shared_F=width * config.size_or(0, "num_shared_experts", "n_shared_experts", least=0),
        weight=storage.linear(f"{prefix}experts.0.w1"),
        router_weight=storage.base,
        shared_weight=storage.linear(f"{prefix}shared_experts.up_proj"),
        activation=storage.base,
        latent=latent,
        latent_weight=storage.base,
    )
    if latent is None or not config.flag("latent_moe_use_norm", False):
        return (moe,)
    return (moe, Norm(latent, latent, weight=storage.base, activation=storage.base, name="latent_norm"))


def routed_layers(config: Config) -> list[bool]:
    """Which layers hold experts: mlp_layer_types, else every moe_layer_freq-th from first_k_dense_replace on."""
    types = config.per_layer("mlp_layer_types", config.layers)
    if types is not None:
        return [found == "sparse" for found in types[: config.layers]]
    first = config.size_or(1, "first_k_dense_replace", least=0)
    frequency = config.size_or(1, "moe_layer_freq", note=False)
    return [index >= first and index % frequency == 0 for index in range(config.layers)]


def joint(config: Config, storage: Storage, blocks: int | None) -> Component:
    """What stands in front of a mixer: a norm with its residual addition, or attention over that many blocks of layers."""
    if blocks is None:
        return make_norm("rms", config.width, storage, "norm")
    return DepthAttention(config.width, blocks, weight=storage.base, activation=storage.base)


def read_kimi_linear(config: Config, storage: Storage, name: str, root: str = "model.") -> Model:
    """A Kimi-Linear or Kimi-K3 text decoder; ``root`` is the path of its modules in the checkpoint."""
    kinds, routed = kinds_of(config), routed_layers(config)
    depth = config.optional_size("attn_res_block_size")
    layers = []
    for index, kind in enumerate(kinds):
        prefix = f"{root}layers.{index}."
        make = attention_of if kind == ATTENTION else delta_of
        mixer = make(config, storage, f"{prefix}self_attn.")
        feed_forward: tuple[Component, ...] = (mlp_of(config, STYLE, storage, f"{prefix}mlp."),)
        if routed[index]:
            feed_forward = experts_of(config, storage, f"{prefix}block_sparse_moe.")
        before = None if depth is None else -(-index // depth)
        between = None if depth is None else index // depth + 1
        layers.append(Layer((joint(config, storage, before), mixer, joint(config, storage, between), *feed_forward)))
    model = assemble(config, STYLE, storage, tuple(layers), name)
    if depth is not None:
        last = DepthAttention(config.width, -(-len(kinds) // depth), False, storage.base, storage.base)
        model = replace(model, final=(last, *model.final))
    return without_prediction(config, model, "num_nextn_predict_layers")
