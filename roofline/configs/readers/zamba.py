"""Zamba2: Mamba-2 layers, some of which first pass a transformer block that several layers share.

The block sees the residual stream beside the embedding of the token (2 D wide). Its weights are stored once for all the
layers that use it; every use adds adapters of low rank and a projection of its own. Source: transformers 5.24,
models/zamba2; counts are checked against that class on the meta device.
"""

from __future__ import annotations

from dataclasses import replace

from roofline.components.attention import Attention, CacheWrite
from roofline.components.base import Component
from roofline.components.feedforward import MLP
from roofline.components.linear import Linear
from roofline.components.mixing import Elementwise
from roofline.components.shared import Shared
from roofline.configs.config import Config
from roofline.configs.dense import Style, assemble, make_norm
from roofline.configs.readers.recurrent import HYBRID, RECURRENT, expanded, layer_kinds, mamba2_of
from roofline.configs.storage import Storage
from roofline.errors import InputError
from roofline.model import Layer, Model


def transformer_of(config: Config, storage: Storage, prefix: str, owns: bool) -> tuple[Component, ...]:
    """The shared transformer block as one layer runs it; ``owns``: whether the shared weights are stored here."""
    width, base, rank = config.width, storage.base, config.size("adapter_rank", "lora_rank")
    wide, heads = 2 * width, config.heads
    kv_heads = config.size_or(heads, "num_key_value_heads", note=False)
    if wide % heads:
        raise InputError(f"config: {config.where}num_attention_heads {heads} does not divide twice the hidden_size {width}")
    H = wide // heads
    bias = config.flag("add_bias_linear", False)
    width_ff = config.size_or(4 * width, "intermediate_size", "ffn_hidden_size", note=False)

    def linear(name: str, inputs: int, outputs: int) -> Linear:
        return Linear(inputs, outputs, False, storage.linear(f"{prefix}{name}"), base, name=name.split(".")[-1])

    def shared(component: Component) -> Component:
        return component if owns else Shared(component)

    adapters: list[Component] = []
    if config.flag("use_shared_attention_adapter", config.flag("use_shared_attention_lora", False)):
        for part in "qkv":
            name = f"self_attn.linear_{part}_adapter_list"
            adapters += [linear(name, wide, rank), linear(name, rank, wide)]
    rotary = H if config.flag("use_mem_rope", False) else 0
    up, down = (storage.linear(f"{prefix}feed_forward.{name}") for name in ("gate_up_proj", "down_proj"))
    overrides = () if up == down else (("down", down),)
    return (
        Elementwise(wide, wide, 0, base, name="concatenate"),
        shared(make_norm("rms", wide, storage, "norm", residual=False)),
        shared(linear("self_attn.qkv_proj", wide, (heads + 2 * kv_heads) * H)),
        *adapters,
        CacheWrite(heads, kv_heads, H, rotary=rotary, kv=base, activation=base),
        Attention(heads, kv_heads, H, kv=base, activation=base),
        shared(linear("self_attn.o_proj", heads * H, width)),
        shared(make_norm("rms", width, storage, "norm", residual=False)),
        linear("feed_forward.gate_up_proj_adapter_list", width, rank),
        linear("feed_forward.gate_up_proj_adapter_list", rank, 2 * width_ff),
        shared(MLP(width, width_ff, True, bias, up, base, overrides)),
    )


def kinds_of(config: Config) -> list[str]:
    """Which layers are hybrid: layers_block_type, else hybrid_layer_ids."""
    kinds = layer_kinds(config, config.layers, "layers_block_type", "layer_types")
    if kinds is not None:
        return kinds
    chosen = config.items("hybrid_layer_ids")
    if chosen is None:
        raise InputError(f"config: {config.where}layers_block_type is missing; it says which layers hold the shared block")
    return [HYBRID if index in chosen else RECURRENT for index in range(config.layers)]


def read_zamba2(config: Config, storage: Storage, name: str) -> Model:
    """A Zamba2 decoder."""
    blocks = config.size_or(1, "num_mem_blocks")
    layers: list[Layer] = []
    used = 0
    for index, kind in enumerate(kinds_of(config)):
        prefix = f"model.layers.{index}."
        before: tuple[Component, ...] = ()
        if kind == HYBRID:
            block = transformer_of(config, storage, f"{prefix}shared_transformer.", used < blocks)
            join = Linear(config.width, config.width, False, storage.linear(f"{prefix}linear"), storage.base, name="linear")
            before = (*block, join)
            used += 1
        path = f"{prefix}mamba_decoder.mamba." if kind == HYBRID else f"{prefix}mamba."
        layers.append(
            Layer(
                (
                    *before,
                    make_norm("rms", config.width, storage, "norm"),
                    replace(mamba2_of(config, storage, path, expanded(config)), conv_bias=True),
                )
            )
        )
    return assemble(config, Style(tied=True), storage, tuple(layers), name)
