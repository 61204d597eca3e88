"""Latent-attention decoders with routed experts: DeepSeek-V2, V3, R1, V3.1, V3.2, Kimi-K2, GLM-5 and their kin.

One reader: keys decide. ``q_lora_rank`` null (or 0) means a full query projection, ``index_topk`` means sparse attention
(DSA), ``n_routed_experts`` means experts from layer ``first_k_dense_replace`` on. Multi-token-prediction layers are left
out, and so is the router's correction bias, a buffer of E elements that is no parameter.
Sources: the modelling files of transformers 5.24 (deepseek_v2, deepseek_v3, deepseek_v32, glm_moe_dsa); counts are
checked against those classes on the meta device.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from roofline.components.base import Component
from roofline.components.mla import MLA
from roofline.components.moe import MoE
from roofline.components.sparse import DSA
from roofline.configs.config import Config
from roofline.configs.dense import Style, assemble, formats_of, layer_of, mlp_of
from roofline.configs.storage import Storage
from roofline.errors import InputError, UnsupportedModel
from roofline.model import Model

STYLE = Style(mlp_bias="mlp_bias")
SHARED, FULL = "shared", "full"
LATENT = {"kv_a": "kv_a_proj_with_mqa", "kv_b": "kv_b_proj", "o": "o_proj"}


def query_rank(config: Config) -> int | None:
    """Q: q_lora_rank, which must be there; null or 0 means a full query projection."""
    if "q_lora_rank" not in config.data:
        raise InputError(f"config: {config.where}q_lora_rank is missing; write null for a model without a low-rank query")
    return config.optional_size("q_lora_rank", least=0) or None


def indexers(config: Config, layers: int) -> list[bool]:
    """Whether each layer has its own indexer (True) or reuses the selection of the one before it.

    Keys: indexer_types, else index_topk_pattern ("FSSS..."), else every index_topk_freq-th layer from
    index_skip_topk_offset - 1 on, with the layers in front of it.
    """
    types = config.per_layer("indexer_types", layers)
    pattern = config.get("index_topk_pattern")
    if types is None and pattern is not None:
        types = [{"F": FULL, "S": SHARED}.get(letter, letter) for letter in pattern]
    if types is None:
        frequency = config.size_or(1, "index_topk_freq", note=False)
        offset = config.size_or(2, "index_skip_topk_offset", least=0, note=False)
        return [max(index - offset + 1, 0) % frequency == 0 for index in range(layers)]
    for found in types:
        if found not in (FULL, SHARED):
            raise UnsupportedModel(
                f"config: {config.where}indexer_types has {found!r:.40}; {FULL!r} and {SHARED!r} are supported"
            )
    if len(types) < layers or types[0] != FULL:
        raise InputError(f"config: {config.where}index_topk_pattern must start with a full layer and cover all {layers} layers")
    return [found == FULL for found in types[:layers]]


def mla_of(config: Config, storage: Storage, prefix: str) -> MLA:
    """The latent attention of one layer."""
    rank = query_rank(config)
    queries = {"q": "q_proj"} if rank is None else {"q_a": "q_a_proj", "q_b": "q_b_proj"}
    return MLA(
        D=config.width,
        N=config.heads,
        Q=rank,
        R=config.size("kv_lora_rank"),
        P=config.size("qk_rope_head_dim", least=0),
        H=config.size("qk_nope_head_dim"),
        value_dim=config.size("v_head_dim"),
        kv=storage.kv,
        bias=config.flag("attention_bias", False),
        **formats_of(storage, prefix, queries | LATENT),  # type: ignore[arg-type]
    )


def dsa_of(config: Config, storage: Storage, prefix: str, own: bool) -> DSA:
    """The sparse latent attention of one layer, with its own indexer or without."""
    dense = mla_of(config, storage, prefix)
    if dense.Q is None:
        raise InputError(f"config: {config.where}index_topk needs q_lora_rank: the indexer projects from the query latent")
    fields: dict[str, Any] = {name: getattr(dense, name) for name in dense.__dataclass_fields__}
    index = storage.linear(f"{prefix}indexer.wq_b")
    if index != dense.weight:
        fields["overrides"] = (*dense.overrides, ("index", index))
    return DSA(
        **fields,
        k=config.size("index_topk"),
        index_heads=config.size("index_n_heads") if own else 0,
        index_dim=config.size("index_head_dim"),
        base=storage.base,
    )


def moe_of(config: Config, storage: Storage, prefix: str) -> MoE:
    """The routed and shared experts of one layer."""
    width = config.size("moe_intermediate_size")
    return MoE(
        D=config.width,
        F=width,
        E=config.size("n_routed_experts", "num_experts"),
        k=config.size_or(6, "num_experts_per_tok"),
        shared_F=width * config.size_or(0, "n_shared_experts", least=0, note=False),
        shared_bias=config.flag("mlp_bias", False),
        weight=storage.linear(f"{prefix}experts.0.up_proj"),
        router_weight=storage.base,
        shared_weight=storage.linear(f"{prefix}shared_experts.up_proj"),
        activation=storage.base,
    )


def sparse_layers(config: Config, layers: int) -> list[bool]:
    """Whether the feed-forward of each layer is routed: mlp_layer_types, else all from first_k_dense_replace on."""
    types = config.per_layer("mlp_layer_types", layers)
    for found in types or []:
        if found not in ("dense", "sparse"):
            raise UnsupportedModel(f"config: {config.where}mlp_layer_types has {found!r:.40}; dense and sparse are supported")
    if types is not None:
        return [found == "sparse" for found in types[:layers]]
    if "n_routed_experts" not in config and "num_experts" not in config:
        return [False] * layers
    first = config.size_or(0, "first_k_dense_replace", least=0)
    frequency = config.size_or(1, "moe_layer_freq", note=False)
    return [index >= first and index % frequency == 0 for index in range(layers)]


def without_prediction_layers(config: Config, model: Model) -> Model:
    """The model, with the config's multi-token-prediction layers named as left out."""
    extra = config.size_or(0, "num_nextn_predict_layers", "num_mtp_layers", least=0, note=False)
    if extra == 0:
        return model
    note = f"{extra} multi-token-prediction layer{'s' if extra > 1 else ''} (num_nextn_predict_layers)"
    return replace(model, not_modelled=(*model.not_modelled, note))


def read_latent(config: Config, storage: Storage, name: str, root: str = "model.") -> Model:
    """A decoder with latent attention; ``root`` is the path of its modules in the checkpoint.

    Raises InputError for a missing key, UnsupportedModel for a feature that is not modelled.
    """
    kind = config.text("model_type")
    if config.flag("mlp_bias", False) and kind != "deepseek_v2":
        raise UnsupportedModel(f"{kind}: biases of the feed-forward ({config.where}mlp_bias) are not part of this family")
    count = config.layers
    routed = sparse_layers(config, count)
    own = indexers(config, count) if "index_topk" in config else None
    layers = []
    for index in range(count):
        prefix = f"{root}layers.{index}."
        mixer: Component
        if own is None:
            mixer = mla_of(config, storage, f"{prefix}self_attn.")
        else:
            mixer = dsa_of(config, storage, f"{prefix}self_attn.", own[index])
        feed_forward: Component
        feed_forward = (
            moe_of(config, storage, f"{prefix}mlp.") if routed[index] else mlp_of(config, STYLE, storage, f"{prefix}mlp.")
        )
        layers.append(layer_of("rms", "pre", mixer, feed_forward, config.width, storage))
    return without_prediction_layers(config, assemble(config, STYLE, storage, tuple(layers), name))
