"""Sparse decoders whose layers differ in more than their mask: Llama 4, MiMo-V2-Flash, Step 3.7.

Sources: configuration and modelling files of transformers 5.24 (``models/llama4``, ``mimo_v2_flash``, ``step3p7``),
checked against parameter counts of those classes on the meta device.
"""

from __future__ import annotations

from dataclasses import replace

from roofline.components.attention import AttentionBlock
from roofline.components.base import Component
from roofline.configs.config import Config
from roofline.configs.dense import assemble, attention_of, layer_of, mixers_of, mlp_of
from roofline.configs.guard import left_out
from roofline.configs.readers.moe import Family, moe_of, sparse_layers
from roofline.configs.storage import Storage
from roofline.configs.styles import Style
from roofline.errors import InputError
from roofline.model import Layer, Model

LLAMA4 = Style(qkv_bias="attention_bias", o_bias="attention_bias")
MIMO = Style(qkv_bias="attention_bias")
STEP = Style(qkv_bias="attention_bias", o_bias="attention_bias", mlp_bias="mlp_bias", qk_norm="head")


def read_llama4(config: Config, storage: Storage, name: str) -> Model:
    """Llama 4: three layers attend inside chunks, the fourth to everything without rotation; a shared expert.

    Queries and keys of rotating layers are normalised without weights; dense layers have a width of their own.
    """
    config = config.filled({"interleave_moe_layer_step": 1, "use_qk_norm": True})
    if not config.items("no_rope_layers"):
        config = config.filled({"no_rope_layer_interval": 4})
    family = Family(LLAMA4, always_shared=True)
    sparse = sparse_layers(config, config.layers)
    layers: list[Layer] = []
    for index, mixer in enumerate(mixers_of(config, LLAMA4, storage)):
        prefix = f"model.layers.{index}.feed_forward."
        feed_forward: Component
        if sparse[index]:
            feed_forward = moe_of(config, family, storage, prefix, index)
        else:
            feed_forward = mlp_of(config, LLAMA4, storage, prefix, config.size("intermediate_size_mlp"))
        if config.flag("use_qk_norm", True) and mixer.rotary:
            mixer = replace(mixer, qk_norm="bare")
        layers.append(layer_of("rms", "pre", mixer, feed_forward, config.width, storage))
    return assemble(config, LLAMA4, storage, tuple(layers), name)


def _window_kinds(config: Config, layers: int) -> list[bool]:
    """Which layers see a window: ``hybrid_layer_pattern`` (1 does), else ``layer_types``."""
    flags = config.per_layer("hybrid_layer_pattern", layers)
    if flags:
        return [bool(flag) for flag in flags[:layers]]
    kinds = config.per_layer("layer_types", layers)
    if not kinds:
        raise InputError(f"config: {config.where}hybrid_layer_pattern (or layer_types) is missing; it cannot be guessed")
    return [kind == "sliding_attention" for kind in kinds[:layers]]


def read_mimo_v2(config: Config, storage: Storage, name: str) -> Model:
    """MiMo-V2-Flash: window layers have their own key-value heads and sinks; values are narrower than keys.

    A window layer sees ``sliding_window_size`` earlier tokens and the query's own.
    """
    reach = config.optional_size("sliding_window_size")
    window = config.size("sliding_window") if reach is None else reach + 1
    sparse = sparse_layers(config, config.layers)
    layers: list[Layer] = []
    for index, windowed in enumerate(_window_kinds(config, config.layers)):
        prefix = f"model.layers.{index}."
        block: AttentionBlock = replace(
            attention_of(config, MIMO, storage, f"{prefix}self_attn."),
            value_dim=config.size("v_head_dim"),
            sinks=config.flag("add_full_attention_sink_bias", False),
        )
        if windowed:
            block = replace(
                block, mask="window", size=window, sinks=config.flag("add_swa_attention_sink_bias", True),
                N=config.size_or(block.N, "swa_num_attention_heads", note=False),
                K=config.size_or(2 * block.K, "swa_num_key_value_heads"),
                H=config.size_or(block.H, "swa_head_dim", note=False),
                value_dim=config.size_or(block.value_dim, "swa_v_head_dim", note=False),
            )  # fmt: skip
        feed_forward: Component
        if sparse[index]:
            feed_forward = moe_of(config, Family(MIMO), storage, f"{prefix}mlp.", index)
        else:
            feed_forward = mlp_of(config, MIMO, storage, f"{prefix}mlp.")
        layers.append(layer_of("rms", "pre", block, feed_forward, config.width, storage))
    return replace(assemble(config, MIMO, storage, tuple(layers), name), not_modelled=left_out(config))


def read_step(config: Config, storage: Storage, name: str) -> Model:
    """Step 3.7 (text): every head's output is gated; window layers may have their own number of query heads."""
    config = config.filled({"tie_word_embeddings": False})
    other = config.get("attention_other_setting", {})
    heads = other.get("num_attention_heads") if isinstance(other, dict) else None
    window_heads = config.size_or(heads or config.heads, "num_sliding_attention_heads", note=False)
    sparse = sparse_layers(config, config.layers)
    layers: list[Layer] = []
    for index, mixer in enumerate(mixers_of(config, STEP, storage)):
        mixer = replace(mixer, head_gate=True, N=window_heads if mixer.mask == "window" else mixer.N)
        prefix = f"model.layers.{index}.mlp."
        feed_forward: Component
        if sparse[index]:
            feed_forward = moe_of(config, Family(STEP), storage, prefix, index)
        else:
            feed_forward = mlp_of(config, STEP, storage, prefix)
        layers.append(layer_of("rms", "pre", mixer, feed_forward, config.width, storage))
    return replace(assemble(config, STEP, storage, tuple(layers), name), not_modelled=left_out(config))
