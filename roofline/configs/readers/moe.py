"""Mixture-of-experts decoders: which layers are sparse, how wide the experts are, what runs for every token.

Families spell the same facts differently (``num_local_experts``, ``n_routed_experts``, ``moe_num_experts``, ...); the
keys decide, and a family says only what its code fixes. Sources: the configuration and modelling files of
transformers 5.24 (``models/<family>``), checked against parameter counts of those classes on the meta device. A
load-balancing correction that transformers keeps as a buffer is not a parameter here either.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from roofline.components.base import Component
from roofline.components.moe import MoE
from roofline.configs.config import Config
from roofline.configs.dense import assemble, layer_of, mixers_of, mlp_of
from roofline.configs.guard import left_out, refuse_unread
from roofline.configs.storage import Storage
from roofline.configs.styles import MEGATRON, Modules, Style, resolve
from roofline.errors import InputError
from roofline.model import Layer, Model

EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")
PICKED = ("num_experts_per_tok", "num_experts_per_token", "experts_per_token", "moe_topk", "moe_k", "moe_top_k", "top_k_experts")
EXPERT_WIDTH = ("moe_intermediate_size", "expert_ffn_hidden_size", "moe_ffn_hidden_size", "intermediate_size")
SHARED_WIDTH = ("shared_expert_intermediate_size", "shared_intermediate_size", "share_expert_dim")
SHARED_COUNT = ("n_shared_experts", "num_shared_experts", "moe_num_shared_experts", "num_shared_expert")


@dataclass(frozen=True)
class Family:
    """What the code of a family of sparse models fixes; fields that name a config key read that flag.

    Attributes:
        style: norms, biases and tying, as for dense models.
        shared_gate: a sigmoid gate on the shared expert. expert_bias, router_linear_bias: biases.
        router_bias: the correction of the routing is a parameter.
        always_shared: a shared expert as wide as a routed one stands beside them, whatever the config says.
        sinks: one learned logit per head.
        defaults: class defaults of keys that published configs may leave out.
    """

    style: Style
    shared_gate: bool = False
    expert_bias: bool = False
    router_linear_bias: bool = False
    router_bias: bool = False
    always_shared: bool = False
    sinks: bool = False
    defaults: Mapping[str, Any] = field(default_factory=dict)


LLAMA = Style(qkv_bias="attention_bias", o_bias="attention_bias")

FAMILIES: dict[str, Family] = {
    "mixtral": Family(Style()),
    "qwen2_moe": Family(Style(qkv_bias="qkv_bias"), shared_gate=True, defaults={"qkv_bias": True}),
    "qwen3_moe": Family(replace(LLAMA, qk_norm="head")),
    "qwen3_vl_moe_text": Family(replace(LLAMA, qk_norm="head")),
    "olmoe": Family(replace(LLAMA, qk_norm="full")),
    "flex_olmo": Family(replace(LLAMA, qk_norm="full", norms="post")),
    "phimoe": Family(replace(LLAMA, norm="layer", head_bias="lm_head_bias")),
    "granitemoe": Family(LLAMA),
    "granitemoeshared": Family(LLAMA),
    "glm4_moe": Family(Style(qkv_bias="attention_bias")),
    "ernie4_5_moe": Family(
        Style(qkv_bias="use_bias", o_bias="use_bias", mlp_bias="use_bias", head_bias="use_bias", tied=True), router_bias=True
    ),
    "hunyuan_v1_moe": Family(replace(LLAMA, qk_norm="head"), always_shared=True),
    "minimax_m2": Family(Style(qk_norm="full")),
    "llada2_moe": Family(
        Style(
            qkv_bias="use_qkv_bias", o_bias="use_bias", qk_norm="head", qk_norm_if=("use_qk_norm", True), rotary_part=0.5,
            modules=Modules(attention="attention.", qkvo=MEGATRON),
        ),
        defaults={"use_bias": True},
    ),
    "gpt_oss": Family(
        replace(LLAMA, period=2), expert_bias=True, router_linear_bias=True, sinks=True, defaults={"attention_bias": True}
    ),
    "cohere2_moe": Family(replace(LLAMA, norm="layer-no-bias", norms="parallel", tied=True, rotary="windowed", period=4)),
}  # fmt: skip


def _indices(config: Config, key: str, layers: int) -> set[int] | None:
    """Layer indices from a list, or from numbers joined by commas; None where the key is missing."""
    value = config.get(key)
    if isinstance(value, str):
        value = [int(part) for part in value.split(",") if part.strip().isdigit()]
    if value is None:
        return None
    if not isinstance(value, list) or any(isinstance(i, bool) or not isinstance(i, int) or not 0 <= i < layers for i in value):
        raise InputError(f"config: {config.where}{key} must list layers from 0 to {layers - 1}")
    return set(value)


def sparse_layers(config: Config, layers: int) -> list[bool]:
    """Whether each layer is a mixture of experts.

    By ``mlp_layer_types``; ``moe_layers`` or ``moe_layers_enum``; ``interleave_moe_layer_step``; ``moe_layer_freq`` as a
    list; ``first_k_dense_replace`` with ``moe_layer_freq``; ``moe_layer_start_index`` to ``moe_layer_end_index`` by
    ``moe_layer_interval``; ``decoder_sparse_step`` without ``mlp_only_layers``; otherwise all of them.
    Raises InputError for lists that do not fit the layers.
    """
    kinds = config.per_layer("mlp_layer_types", layers)
    if kinds:
        return [kind != "dense" for kind in kinds[:layers]]
    for key in ("moe_layers", "moe_layers_enum"):
        chosen = _indices(config, key, layers)
        if chosen is not None:
            return [index in chosen for index in range(layers)]
    if "interleave_moe_layer_step" in config:
        step = config.size("interleave_moe_layer_step")
        return [(index + 1) % step == 0 for index in range(layers)]
    if isinstance(config.get("moe_layer_freq"), list):
        flags = config.per_layer("moe_layer_freq", layers) or []
        return [bool(flag) for flag in flags[:layers]]
    if "moe_layer_start_index" in config or "moe_layer_interval" in config:
        start = config.size_or(0, "moe_layer_start_index", least=0)
        end = config.size_or(-1, "moe_layer_end_index", least=-1)
        step = config.size_or(1, "moe_layer_interval")
        last = layers - 1 if end == -1 else end
        return [(index + 1) % step == 0 and start <= index <= last for index in range(layers)]
    first = config.size_or(0, "first_k_dense_replace", least=0, note=False)
    step = config.size_or(1, "moe_layer_freq", note=False)
    sparse_step = config.size_or(1, "decoder_sparse_step", note=False)
    dense = _indices(config, "mlp_only_layers", layers) or set()
    return [
        index >= first and index % step == 0 and index not in dense and (index + 1) % sparse_step == 0 for index in range(layers)
    ]


def one_size(config: Config, index: int, *keys: str) -> int:
    """A size that may be given per layer: the number under the first key present, or its entry for one layer."""
    for key in keys:
        value = config.get(key)
        if isinstance(value, list):
            if index >= len(value) or isinstance(value[index], bool) or not isinstance(value[index], int) or value[index] < 1:
                raise InputError(f"config: {config.where}{key} must give a positive whole number for layer {index}")
            return int(value[index])
        if value is not None:
            break
    return config.size(*keys)


def shared_width(config: Config, expert_width: int) -> int:
    """Total width of the shared experts: its own key, else their number times an expert's width, else 0."""
    width = config.optional_size(*SHARED_WIDTH, least=0)
    if width is not None:
        return width
    number: int = config.size_or(0, *SHARED_COUNT, least=0, note=False)
    return number * expert_width


def moe_of(config: Config, family: Family, storage: Storage, prefix: str, index: int = 0) -> MoE:
    """The mixture of experts of one layer, from the config's keys; ``prefix`` ends at the feed-forward module."""
    E, k = one_size(config, index, *EXPERTS), one_size(config, index, *PICKED)
    if k > E:
        raise InputError(f"config: {config.where}{PICKED[0]} {k} exceeds the {E} experts")
    F = one_size(config, index, *EXPERT_WIDTH)
    shared = F if family.always_shared else shared_width(config, F)
    first, second = storage.linear(f"{prefix}experts.0.gate_proj"), storage.linear(f"{prefix}experts.0.down_proj")
    return MoE(
        D=config.width, F=F, E=E, k=k, shared_F=shared, shared_gate=family.shared_gate,
        bias=family.expert_bias, shared_bias=resolve(family.style.mlp_bias, config),
        router_bias=family.router_bias, router_linear_bias=family.router_linear_bias,
        weight=first, down_weight=None if second == first else second, router_weight=storage.base,
        shared_weight=storage.linear(f"{prefix}shared_experts.gate_proj"), activation=storage.base,
    )  # fmt: skip


def read_moe(config: Config, storage: Storage, name: str) -> Model:
    """A sparse decoder of one of ``FAMILIES``. Raises UnsupportedModel for a feature that its family does not have."""
    kind = config.text("model_type")
    family = FAMILIES[kind]
    reads = {*EXPERTS, "moe_layer_freq", "use_qk_norm", *family.style.keys}
    if set(config.items("attn_type_list") or [1]) == {1}:
        reads.add("attn_type_list")
    refuse_unread(config, kind, reads, windows=True)
    model = read_sparse(config.filled(family.defaults), family, storage, name)
    return replace(model, not_modelled=left_out(config))


def read_sparse(config: Config, family: Family, storage: Storage, name: str) -> Model:
    """A sparse decoder as its family's code builds it."""
    style = family.style
    if not style.qk_norm and config.flag("use_qk_norm", False):
        style = replace(style, qk_norm="head")
    layers: list[Layer] = []
    sparse = sparse_layers(config, config.layers)
    for index, mixer in enumerate(mixers_of(config, style, storage)):
        prefix = f"model.layers.{index}.mlp."
        feed_forward: Component
        if sparse[index]:
            feed_forward = moe_of(config, family, storage, prefix, index)
        else:
            feed_forward = mlp_of(config, style, storage, prefix, config.optional_size("prefix_dense_intermediate_size"))
        mixer = replace(mixer, sinks=family.sinks)
        layers.append(layer_of(style.norm, style.norms, mixer, feed_forward, config.width, storage))
    return assemble(config, style, storage, tuple(layers), name)


def read_dbrx(config: Config, storage: Storage, name: str) -> Model:
    """DBRX: attention and feed-forward keys stand in sections of their own."""
    attention, feed_forward = config.section("attn_config"), config.section("ffn_config")
    keys = {
        **config.data,
        "num_key_value_heads": attention.size("kv_n_heads"),
        "num_experts": feed_forward.size("moe_num_experts"),
        "num_experts_per_tok": feed_forward.size("moe_top_k"),
        "intermediate_size": feed_forward.size("ffn_hidden_size"),
    }
    flat = Config(keys, config.where, config.assumes)
    return read_sparse(flat, Family(Style(norm="layer-no-bias")), storage, name)
