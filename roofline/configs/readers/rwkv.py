"""RWKV-4 and RWKV-7: LayerNorms with biases, one more behind the embedding.

Sources: transformers 5.24 (models/rwkv) for RWKV-4, against which counts are checked; the configuration of the
flash-linear-attention library (fla/models/rwkv7) and Peng et al. 2025 (arXiv 2503.14456) for RWKV-7.
"""

from __future__ import annotations

from dataclasses import replace

from roofline.components.mixing import layer_norm
from roofline.components.rwkv import ChannelMix, TimeMix
from roofline.components.rwkv7 import ChannelMix7, Ranks, TimeMix7
from roofline.configs.config import Config
from roofline.configs.dense import Style, assemble, layer_of
from roofline.configs.readers.recurrent import overrides_of
from roofline.configs.storage import Storage
from roofline.errors import InputError, UnsupportedModel
from roofline.model import Layer, Model

STYLE = Style(norm="layer")
FIRST = {"r": "r_proj", "k": "k_proj", "v": "v_proj", "o": "o_proj"}
LOW_RANK = {"w": "w_lora.lora.0", "a": "a_lora.lora.0", "g": "g_lora.lora.0", "v0": "v_lora.lora.0"}


def with_first_norm(config: Config, storage: Storage, layers: list[Layer], name: str) -> Model:
    """The model, with a norm between its embedding and its layers."""
    model = assemble(config, STYLE, storage, tuple(layers), name)
    first = layer_norm(config.width, name="pre_norm", weight=storage.base, activation=storage.base)
    return replace(model, embedding=(*model.embedding, first))


def read_rwkv(config: Config, storage: Storage, name: str) -> Model:
    """RWKV-4."""
    D = config.width
    width = config.size_or(D, "attention_hidden_size", note=False)
    F = config.size_or(4 * D, "intermediate_size", note=False)
    mixes = {part: part for part in ("key", "value", "receptance", "output")}
    fed = {part: part for part in ("key", "value", "receptance")}
    layers = []
    for index in range(config.layers):
        prefix = f"rwkv.blocks.{index}."
        time = TimeMix(D, width, activation=storage.base, **overrides_of(storage, f"{prefix}attention.", mixes))  # type: ignore[arg-type]
        channel = ChannelMix(D, F, activation=storage.base, **overrides_of(storage, f"{prefix}feed_forward.", fed))  # type: ignore[arg-type]
        layers.append(layer_of("layer", "pre", time, channel, D, storage))
    return with_first_norm(config, storage, layers, name)


def read_rwkv7(config: Config, storage: Storage, name: str) -> Model:
    """RWKV-7 in the keys of flash-linear-attention."""
    D = config.width
    head_dim = config.size_or(64, "head_dim")
    if D % head_dim:
        raise InputError(f"config: {config.where}head_dim {head_dim} does not divide the hidden_size {D}")
    values = config.get("value_dim", D)
    if set(values if isinstance(values, list) else [values]) != {D}:
        raise UnsupportedModel(f"config: {config.where}value_dim other than the hidden_size {D} is not supported")
    if config.get("attn") is not None:
        raise UnsupportedModel(f"config: {config.where}attn: attention layers between those of RWKV-7 are not supported")
    ranks = Ranks(
        decay=config.size("decay_low_rank_dim"),
        rate=config.size("a_low_rank_dim"),
        value=config.size("v_low_rank_dim"),
        gate=config.size("gate_low_rank_dim"),
    )
    F = config.optional_size("intermediate_size") or int(config.number("hidden_ratio", 4.0) * D)
    layers = []
    for index in range(config.layers):
        prefix = f"model.layers.{index}."
        time = TimeMix7(
            D, head_dim, ranks, index == 0, activation=storage.base,
            **overrides_of(storage, f"{prefix}attn.", FIRST | LOW_RANK),  # type: ignore[arg-type]
        )  # fmt: skip
        channel = ChannelMix7(
            D, F, activation=storage.base,
            **overrides_of(storage, f"{prefix}ffn.", {"key": "key", "value": "value"}),  # type: ignore[arg-type]
        )  # fmt: skip
        layers.append(layer_of("layer", "pre", time, channel, D, storage))
    return with_first_norm(config, storage, layers, name)
