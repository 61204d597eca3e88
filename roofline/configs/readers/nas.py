"""Decoders found by architecture search (DeciLM, Llama-Nemotron): every layer has its own shape, in ``block_configs``.

A layer's attention may be grouped-query with its own group size, a linear layer D -> D, or absent together with its norm;
its feed-forward may have its own width, be a linear layer, or be absent.
Source: modelling and configuration files published with nvidia/Llama-3_3-Nemotron-Super-49B-v1.
"""

from __future__ import annotations

from roofline.components.base import Component
from roofline.components.linear import Linear
from roofline.configs.config import Config
from roofline.configs.dense import assemble, attention_of, make_norm, mlp_of
from roofline.configs.storage import Storage
from roofline.configs.styles import Style
from roofline.errors import InputError, UnsupportedModel
from roofline.model import Layer, Model

MULTIPLE = 256
"""Feed-forward widths are rounded up to a multiple of this."""

REFUSED = ("window_length", "num_sink_tokens", "sparsify", "llama4", "mamba", "moe")


def feed_forward_width(config: Config, ffn: Config) -> int:
    """F: intermediate_size, or two thirds of ffn_mult times D, rounded up to a multiple of 256."""
    found = ffn.optional_size("intermediate_size")
    if found is not None:
        return found
    multiplier = ffn.number("ffn_mult", 0.0)
    if not 0 < multiplier <= 1000:
        raise InputError(f"config: {ffn.where}ffn_mult is {multiplier!r:.40}, outside 0 to 1000")
    return -(-int(2 * multiplier * config.width / 3) // MULTIPLE) * MULTIPLE


def kv_heads(config: Config, attention: Config) -> int:
    """K: num_key_value_heads of the layer, or N over the heads in a group."""
    group = attention.optional_size("n_heads_in_group")
    found = attention.size("num_key_value_heads", "n_heads_in_group") if group is None else config.heads // group
    if found == 0 or config.heads % found or (group is not None and config.heads % group):
        raise InputError(f"config: {attention.where}n_heads_in_group {group} does not divide the {config.heads} query heads")
    return found


def _half(config: Config, section: Config, projection: str, storage: Storage) -> tuple[Component, ...] | None:
    """What replaces the regular block: nothing, or a linear layer behind its norm; None where the regular one stands."""
    for key in REFUSED:
        if section.get(key):
            raise UnsupportedModel(f"nemotron-nas: {section.where}{key} is not supported")
    if section.flag("no_op", False):
        return ()
    if not section.flag("replace_with_linear", False):
        return None
    linear = Linear(config.width, config.width, weight=storage.linear(projection), activation=storage.base, name="linear")
    return (make_norm("rms", config.width, storage, "norm"), linear)


def layer_of_block(config: Config, style: Style, storage: Storage, block: Config, prefix: str) -> Layer:
    """One layer as its entry of block_configs shapes it."""
    attention, ffn = block.section("attention"), block.section("ffn")
    mixer = _half(config, attention, f"{prefix}self_attn.linear_attn", storage)
    if mixer is None:
        regular = attention_of(config, style, storage, f"{prefix}self_attn.", K=kv_heads(config, attention))
        mixer = (make_norm("rms", config.width, storage, "norm"), regular)
    feed_forward = _half(config, ffn, f"{prefix}mlp.linear_mlp", storage)
    if feed_forward is None:
        mlp = mlp_of(config, style, storage, f"{prefix}mlp.", feed_forward_width(config, ffn))
        feed_forward = (make_norm("rms", config.width, storage, "norm"), mlp)
    return Layer((*mixer, *feed_forward))


def read_nas(config: Config, style: Style, storage: Storage, name: str) -> Model:
    """A decoder whose layers are listed in block_configs."""
    blocks = config.per_layer("block_configs", config.layers)
    if not blocks or len(blocks) != config.layers:
        raise InputError(f"config: {config.where}block_configs must have one entry for each of the {config.layers} layers")
    layers = []
    for index in range(config.layers):
        block = Config(blocks[index] if isinstance(blocks[index], dict) else {}, f"block_configs[{index}].", config.assumes)
        layers.append(layer_of_block(config, style, storage, block, f"model.layers.{index}."))
    return assemble(config, style, storage, tuple(layers), name)
