"""Models that are Mamba all through (mamba, falcon_mamba, mamba2), and hybrids of Mamba and attention.

Jamba, Bamba and Granite 4 alternate layers; in Falcon-H1 both mixers stand side by side in every layer. Sources: the
modelling files of transformers 5.24 (``models/<family>``); counts are checked against those classes on the meta device.
"""

from __future__ import annotations

from dataclasses import replace

from roofline.components.base import Component
from roofline.components.mixing import Elementwise
from roofline.components.moe import MoE
from roofline.configs.config import Config
from roofline.configs.dense import Style, assemble, attention_of, formats_of, layer_of, make_norm, mlp_of
from roofline.configs.readers.recurrent import (
    ATTENTION,
    RECURRENT,
    expanded,
    layer_kinds,
    mamba2_of,
    mamba_of,
    partial_rotary,
    periodic,
)
from roofline.configs.storage import Storage
from roofline.model import Layer, Model

INNER_NORMS = {"mamba": "", "falcon_mamba": "plain"}
STYLE = Style(qkv_bias="attention_bias", o_bias="attention_bias", mlp_bias="mlp_bias")
SHARED_MLP = {"gate": "input_linear", "up": "input_linear", "down": "output_linear"}
UNROTATED = replace(STYLE, rotary=False)


def read_mamba(config: Config, storage: Storage, name: str) -> Model:
    """A stack of Mamba mixers: mamba, falcon_mamba."""
    inner = config.optional_size("intermediate_size", "d_inner") or expanded(config)
    layers = []
    for index in range(config.layers):
        mixer = mamba_of(config, storage, f"backbone.layers.{index}.mixer.", inner, INNER_NORMS[config.text("model_type")])
        layers.append(Layer((make_norm("rms", config.width, storage, "norm"), mixer)))
    return assemble(config, Style(tied=True), storage, tuple(layers), name)


def read_mamba2(config: Config, storage: Storage, name: str) -> Model:
    """A stack of Mamba-2 mixers."""
    layers = []
    for index in range(config.layers):
        mixer = mamba2_of(config, storage, f"backbone.layers.{index}.mixer.", expanded(config))
        layers.append(Layer((make_norm("rms", config.width, storage, "norm"), mixer)))
    return assemble(config, Style(), storage, tuple(layers), name)


def experts_of(config: Config, storage: Storage, prefix: str, projection: str, shared: int = 0) -> MoE:
    """Routed experts of width intermediate_size, ``shared`` wide shared ones beside them."""
    return MoE(
        D=config.width,
        F=config.feed_forward,
        E=config.size("num_experts", "num_local_experts"),
        k=config.size("num_experts_per_tok"),
        shared_F=shared,
        weight=storage.linear(f"{prefix}{projection}"),
        router_weight=storage.base,
        activation=storage.base,
    )


def read_jamba(config: Config, storage: Storage, name: str) -> Model:
    """Jamba: attention in every attn_layer_period-th layer, experts in every expert_layer_period-th."""
    kinds = periodic(config.layers, config.size("attn_layer_period"), config.size("attn_layer_offset", least=0))
    period, offset = config.size("expert_layer_period"), config.size("expert_layer_offset", least=0)
    layers = []
    for index, kind in enumerate(kinds):
        prefix = f"model.layers.{index}."
        mixer: Component = mamba_of(config, storage, f"{prefix}mamba.", expanded(config), "learned")
        if kind == ATTENTION:
            mixer = attention_of(config, UNROTATED, storage, f"{prefix}self_attn.")
        feed_forward: Component = mlp_of(config, STYLE, storage, f"{prefix}feed_forward.")
        if index % period == offset and config.size("num_experts") > 1:
            feed_forward = experts_of(config, storage, f"{prefix}feed_forward.", "experts.0.up_proj")
        layers.append(layer_of("rms", "pre", mixer, feed_forward, config.width, storage))
    return assemble(config, STYLE, storage, tuple(layers), name)


def read_bamba(config: Config, storage: Storage, name: str) -> Model:
    """Bamba: attention in the layers of attn_layer_indices, half of each head rotated."""
    chosen = config.items("attn_layer_indices") or []
    layers = []
    for index in range(config.layers):
        prefix = f"model.layers.{index}."
        mixer: Component = mamba2_of(config, storage, f"{prefix}mamba.", expanded(config))
        if index in chosen:
            mixer = replace(attention_of(config, STYLE, storage, f"{prefix}self_attn."), rotary=partial_rotary(config, 0.5))
        feed_forward = mlp_of(config, STYLE, storage, f"{prefix}feed_forward.")
        layers.append(layer_of("rms", "pre", mixer, feed_forward, config.width, storage))
    return assemble(config, STYLE, storage, tuple(layers), name)


def read_granite(config: Config, storage: Storage, name: str) -> Model:
    """Granite 4: attention or Mamba-2 by layer_types; shared experts always, routed ones where there are any."""
    count = config.layers
    kinds = layer_kinds(config, count, "layer_types", "layers_block_type")
    if kinds is None:
        config.assume("layer_types: every layer is a Mamba-2 layer (not in the config)")
        kinds = [RECURRENT] * count
    style = STYLE if config.text("position_embedding_type") == "rope" else UNROTATED
    layers = []
    for index, kind in enumerate(kinds):
        prefix = f"model.layers.{index}."
        mixer: Component
        if kind == ATTENTION:
            mixer = attention_of(config, style, storage, f"{prefix}self_attn.")
        else:
            mixer = mamba2_of(config, storage, f"{prefix}mamba.", expanded(config))
        shared = config.size("shared_intermediate_size")
        formats = formats_of(storage, f"{prefix}shared_mlp.", SHARED_MLP)
        feed_forward: Component = replace(mlp_of(config, STYLE, storage, prefix, shared), **formats)  # type: ignore[arg-type]
        if config.optional_size("num_local_experts", least=0):
            experts = experts_of(config, storage, f"{prefix}block_sparse_moe.", "input_linear", shared)
            feed_forward = replace(experts, shared_weight=storage.linear(f"{prefix}shared_mlp.input_linear"))
        layers.append(layer_of("rms", "pre", mixer, feed_forward, config.width, storage))
    return assemble(config, STYLE, storage, tuple(layers), name)


def read_falcon_h1(config: Config, storage: Storage, name: str) -> Model:
    """Falcon-H1: in every layer a Mamba-2 mixer and attention on the same input, their outputs added."""
    width = config.width
    inner = config.optional_size("mamba_d_ssm") or expanded(config)
    normed = config.flag("mamba_rms_norm", False)
    layers = []
    for index in range(config.layers):
        prefix = f"model.layers.{index}."
        layers.append(
            Layer(
                (
                    make_norm("rms", width, storage, "norm"),
                    mamba2_of(config, storage, f"{prefix}mamba.", inner, normed=normed),
                    attention_of(config, STYLE, storage, f"{prefix}self_attn."),
                    Elementwise(2 * width, width, width, storage.base, name="sum_of_mixers"),
                    make_norm("rms", width, storage, "norm"),
                    mlp_of(config, STYLE, storage, f"{prefix}feed_forward."),
                )
            )
        )
    return assemble(config, STYLE, storage, tuple(layers), name)
