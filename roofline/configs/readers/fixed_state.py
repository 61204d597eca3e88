"""Further families of fixed state: RecurrentGemma, LFM2 (dense and with experts), MiniMax-01.

Sources: the modelling files of transformers 5.24 (``models/<family>``), MiniMax-01 also its published configuration;
counts are checked against those classes on the meta device.
"""

from __future__ import annotations

from dataclasses import replace

from roofline.components.base import Component
from roofline.components.linear_attention import GriffinBlock, LightningBlock, ShortConvBlock
from roofline.components.moe import MoE
from roofline.configs.config import Config
from roofline.configs.dense import Style, assemble, attention_of, formats_of, layer_of, mlp_of
from roofline.configs.readers.mamba import experts_of
from roofline.configs.readers.recurrent import ATTENTION, RECURRENT, layer_kinds, overrides_of, partial_rotary
from roofline.configs.storage import Storage
from roofline.errors import InputError, UnsupportedModel
from roofline.model import Model

GRIFFIN = Style(qkv_bias="attention_bias", o_bias=True, mlp_bias=True, tied=True)
PLAIN = Style()
W123 = {"gate": "w1", "up": "w3", "down": "w2"}


def read_recurrent_gemma(config: Config, storage: Storage, name: str) -> Model:
    """RecurrentGemma: block_types repeat; attention is local, and half of each head is rotated."""
    cycle = layer_kinds(config, len(config.items("block_types") or ()), "block_types")
    if not cycle:
        raise InputError(f"config: {config.where}block_types is missing; it gives the mixers of the first layers, which repeat")
    width = config.size_or(config.width, "lru_width", note=False)
    layers = []
    for index in range(config.layers):
        prefix = f"model.layers.{index}."
        mixer: Component
        if cycle[index % len(cycle)] == ATTENTION:
            mixer = replace(
                attention_of(config, GRIFFIN, storage, f"{prefix}temporal_block."),
                mask="window", size=config.size("attention_window_size"), rotary=partial_rotary(config, 0.5),
            )  # fmt: skip
        else:
            modules = {"y": "linear_y", "x": "linear_x", "out": "linear_out"}
            mixer = GriffinBlock(
                D=config.width, width=width, heads=config.heads, taps=config.size("conv1d_width"), activation=storage.base,
                **overrides_of(storage, f"{prefix}temporal_block.", modules),  # type: ignore[arg-type]
            )  # fmt: skip
        feed_forward = mlp_of(config, GRIFFIN, storage, f"{prefix}mlp_block.", config.feed_forward // 2)
        layers.append(layer_of("rms", "pre", mixer, feed_forward, config.width, storage))
    return assemble(config, GRIFFIN, storage, tuple(layers), name)


def adjusted_width(config: Config) -> int:
    """F of LFM2: two thirds of block_ff_dim, times a multiplier, rounded up to whole multiples; or the key as it stands."""
    width = config.size("block_ff_dim", "intermediate_size")
    if not config.flag("block_auto_adjust_ff_dim", True):
        return width
    width = int(2 * width / 3)
    multiple = config.size_or(256, "block_multiple_of")
    width = int(config.number("block_ffn_dim_multiplier", 1.0) * width)
    if width < 1:
        raise InputError(f"config: {config.where}block_ffn_dim_multiplier leaves no feed-forward layer")
    return multiple * -(-width // multiple)


def read_lfm2(config: Config, storage: Storage, name: str) -> Model:
    """LFM2: short convolutions and attention by layer_types or full_attn_idxs; experts from num_dense_layers on."""
    count = config.layers
    kinds = layer_kinds(config, count, "layer_types")
    if kinds is None:
        chosen = config.items("full_attn_idxs")
        if chosen is None:
            config.assume("layer_types: every layer is attention (neither layer_types nor full_attn_idxs in the config)")
        kinds = [ATTENTION if chosen is None or index in chosen else RECURRENT for index in range(count)]
    style = Style(qk_norm="head", tied=config.flag("tie_embedding", True))
    experts = config.optional_size("num_experts", least=0) or 0
    dense = config.size_or(0, "num_dense_layers", least=0) if experts else count
    layers = []
    for index, kind in enumerate(kinds):
        prefix = f"model.layers.{index}."
        mixer: Component = ShortConvBlock(
            config.width, config.size("conv_L_cache"), config.flag("conv_bias", False), activation=storage.base,
            **overrides_of(storage, f"{prefix}conv.", {"in": "in_proj", "out": "out_proj"}),  # type: ignore[arg-type]
        )  # fmt: skip
        if kind == ATTENTION:
            modules = {"q": "q_proj", "k": "k_proj", "v": "v_proj", "o": "out_proj"}
            formats = formats_of(storage, f"{prefix}self_attn.", modules)
            mixer = replace(attention_of(config, style, storage, f"{prefix}self_attn."), **formats)  # type: ignore[arg-type]
        feed_forward: Component
        if index < dense:
            width = config.feed_forward if experts else adjusted_width(config)
            formats = formats_of(storage, f"{prefix}feed_forward.", W123)
            feed_forward = replace(mlp_of(config, style, storage, prefix, width), **formats)  # type: ignore[arg-type]
        else:
            feed_forward = MoE(
                config.width, config.size("moe_intermediate_size"), experts, config.size("num_experts_per_tok"),
                weight=storage.linear(f"{prefix}feed_forward.experts.0.w1"), router_weight=storage.base,
                activation=storage.base,
            )  # fmt: skip
        layers.append(layer_of("rms", "pre", mixer, feed_forward, config.width, storage))
    return assemble(config, style, storage, tuple(layers), name)


def read_minimax(config: Config, storage: Storage, name: str) -> Model:
    """MiniMax-01: lightning attention and attention by layer_types (or attn_type_list, 1 for attention), experts always."""
    count = config.layers
    kinds = layer_kinds(config, count, "layer_types")
    numbers = config.per_layer("attn_type_list", count)
    if kinds is None and numbers is not None:
        kinds = [ATTENTION if number == 1 else RECURRENT for number in numbers[:count]]
    if kinds is None:
        config.assume("layer_types: attention and lightning attention in turn (not in the config)")
        kinds = [RECURRENT if index % 2 else ATTENTION for index in range(count)]
    if config.get("shared_intermediate_size", 0) not in (0, [0]):
        raise UnsupportedModel(f"config: {config.where}shared_intermediate_size is not 0; shared experts are not supported here")
    layers = []
    for index, kind in enumerate(kinds):
        prefix = f"model.layers.{index}."
        mixer: Component
        if kind == ATTENTION:
            mixer = attention_of(config, PLAIN, storage, f"{prefix}self_attn.")
        else:
            modules = {"qkv": "qkv_proj", "gate": "output_gate", "out": "out_proj"}
            mixer = LightningBlock(
                config.width, config.heads, config.head_dim, config.size_or(256, "block_size", note=False),
                activation=storage.base, state_format=storage.base,
                **overrides_of(storage, f"{prefix}self_attn.", modules),  # type: ignore[arg-type]
            )  # fmt: skip
        feed_forward = experts_of(config, storage, f"{prefix}block_sparse_moe.", "experts.0.w1")
        layers.append(layer_of("rms", "pre", mixer, feed_forward, config.width, storage))
    return assemble(config, PLAIN, storage, tuple(layers), name)
