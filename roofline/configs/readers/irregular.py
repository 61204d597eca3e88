"""Dense families whose keys need more than a style: what the reader makes of them before the common builder.

Sources: modelling files of transformers 5.24 (falcon, gpt_bigcode, gpt_neo, gpt_neox, mpt, opt, stablelm, apertus) and
those that are published beside the weights (baichuan, chatglm, qwen, DeciLM for nemotron-nas).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from roofline.components.base import Component
from roofline.components.linear import Embedding, Linear
from roofline.components.mixing import Learned
from roofline.configs.config import KV_HEADS, Config
from roofline.configs.dense import build
from roofline.configs.readers.nas import read_nas
from roofline.configs.storage import Storage
from roofline.configs.styles import Style
from roofline.errors import InputError, UnsupportedModel
from roofline.model import Model

XIELU_SCALARS = 2
"""alpha_p and alpha_n of the xIELU activation."""


def amended(config: Config, **values: Any) -> Config:
    """The same section with some keys set otherwise."""
    return Config({**config.data, **values}, config.where, config.assumes)


def _kv_heads(config: Config) -> int:
    """The key-value heads that a config names, else its query heads."""
    return config.kv_heads if config.optional_size(*KV_HEADS) is not None else config.heads


def read_falcon(config: Config, style: Style, storage: Storage, name: str) -> Model:
    """Falcon: num_kv_heads counts in the new architecture only; the old one has one key-value head or all."""
    new = config.flag("new_decoder_architecture", False)
    alike = 1 if config.flag("multi_query", True) else config.heads
    kv_heads = _kv_heads(config) if new else alike
    norms = "pre"
    if config.flag("parallel_attn", True):
        two = config.size_or(2 if new else 1, "num_ln_in_parallel_attn", note=False) == 2
        norms = "parallel-two" if two else "parallel"
    return build(config, replace(style, norms=norms, rotary=not config.flag("alibi", False)), storage, name, K=kv_heads)


def read_baichuan(config: Config, style: Style, storage: Storage, name: str) -> Model:
    """Baichuan: the 7B rotates, the 13B has ALiBi; only the first has max_position_embeddings."""
    rotary = "max_position_embeddings" in config
    config.assume(f"positions: {'rotary' if rotary else 'ALiBi'} (by whether max_position_embeddings is there)")
    return build(config, replace(style, rotary=rotary), storage, name)


def read_chatglm(config: Config, style: Style, storage: Storage, name: str) -> Model:
    """ChatGLM2, ChatGLM3 and GLM-4 in their first form: padded vocabulary, key-value heads as "multi-query groups"."""
    kv_heads = config.size("multi_query_group_num") if config.flag("multi_query_attention", False) else config.heads
    if config.heads % kv_heads:
        raise InputError(f"config: {config.where}multi_query_group_num {kv_heads} does not divide the {config.heads} query heads")
    style = replace(
        style, norm="rms" if config.flag("rmsnorm", True) else "layer", final_norm=config.flag("post_layer_norm", True)
    )
    if config.flag("add_bias_linear", False):
        style = replace(style, qkv_bias=True)
    return build(amended(config, vocab_size=config.size("padded_vocab_size", "vocab_size")), style, storage, name, K=kv_heads)


def read_bigcode(config: Config, style: Style, storage: Storage, name: str) -> Model:
    """GPT-BigCode: one key-value head unless multi_query is false."""
    return build(config, style, storage, name, K=1 if config.flag("multi_query", True) else config.heads)


def read_cwm(config: Config, style: Style, storage: Storage, name: str) -> Model:
    """Code World Model: every fourth layer from the first on sees everything where layer_types does not say."""
    if "layer_types" not in config:
        kinds = ["sliding_attention" if index % 4 else "full_attention" for index in range(config.layers)]
        config.assume(f"{config.where}layer_types = full attention in every 4th layer, from the first on (the family's default)")
        config = amended(config, layer_types=kinds)
    return build(config, style, storage, name)


def read_hyperclovax(config: Config, style: Style, storage: Storage, name: str) -> Model:
    """HyperCLOVA X: norms behind both halves as well, unless use_post_norm is false."""
    return build(config, replace(style, norms="sandwich" if config.flag("use_post_norm", True) else "pre"), storage, name)


def read_neo(config: Config, style: Style, storage: Storage, name: str) -> Model:
    """GPT-Neo: global and local layers by turns where attention_types does not say."""
    if "attention_types" not in config:
        config.assume(f"{config.where}attention_types = global and local by turns (not in the config: the family's default)")
        config = amended(config, attention_types=[[["global", "local"], config.layers // 2]])
    return build(config, style, storage, name)


def read_neox(config: Config, style: Style, storage: Storage, name: str) -> Model:
    """GPT-NeoX: both halves read the same stream, each through its own norm, unless use_parallel_residual is false."""
    return build(
        config, replace(style, norms="parallel-two" if config.flag("use_parallel_residual", True) else "pre"), storage, name
    )


def read_stablelm(config: Config, style: Style, storage: Storage, name: str) -> Model:
    """StableLM: one norm for both halves where use_parallel_residual is set."""
    return build(
        config, replace(style, norms="parallel" if config.flag("use_parallel_residual", False) else "pre"), storage, name
    )


def read_mpt(config: Config, style: Style, storage: Storage, name: str) -> Model:
    """MPT: heads and their kind stand in attn_config, the width of the feed-forward is a ratio."""
    attention = config.section("attn_config") if "attn_config" in config else Config({}, "attn_config.", config.assumes)
    kind = attention.text("attn_type", "multihead_attention")
    kinds = {"multihead_attention": config.heads, "multiquery_attention": 1}
    if kind == "grouped_query_attention":
        kinds[kind] = _kv_heads(Config({**attention.data, "n_heads": config.heads}, attention.where, config.assumes))
    refused = {
        f"attn_type {kind!r:.40}": kind not in kinds,
        "learned positions": not attention.flag("alibi", True),
        "rotary positions": attention.flag("rope", False),
        "a norm of queries and keys": attention.flag("qk_ln", False) or attention.flag("qk_gn", False),
        "biases": not config.flag("no_bias", True),
        "another feed-forward": config.get("ffn_config", {}).get("ffn_type", "mptmlp") != "mptmlp"
        if "ffn_config" in config
        else False,
    }
    for feature, found in refused.items():
        if found:
            raise UnsupportedModel(f"mpt: {feature} (attn_config, ffn_config or no_bias) is not supported in this family")
    width = config.size_or(4, "expansion_ratio") * config.width
    return build(config, style, storage, name, width=width, K=kinds[kind])


def read_opt(config: Config, style: Style, storage: Storage, name: str) -> Model:
    """OPT: norms before or behind each half; the embedding may be narrower than the stream and is projected then."""
    before = config.flag("do_layer_norm_before", True)
    style = replace(
        style,
        norm="layer" if config.flag("layer_norm_elementwise_affine", True) else "none",
        norms="pre" if before else "post",
        final_norm=before and not config.flag("_remove_final_layer_norm", False),
    )
    model = build(config, style, storage, name)
    narrow, width = config.size_or(config.width, "word_embed_proj_dim", note=False), config.width
    if narrow == width:
        return model
    table, head, base = model.embedding[0], model.head[0], storage.base
    assert isinstance(table, Embedding) and isinstance(head, Linear)  # noqa: PT018 - as build makes them
    embedding: tuple[Component, ...] = (
        replace(table, width=narrow, positions=0),
        Linear(narrow, width, weight=storage.linear("model.decoder.project_in"), activation=base, name="project_in"),
        Embedding(table.positions, width, weight=base, activation=base, name="positions"),
    )
    project = Linear(
        width, narrow, weight=storage.linear("model.decoder.project_out"), activation=base, rows="logit_rows", name="project_out"
    )
    return replace(model, embedding=embedding, head=(project, replace(head, inputs=narrow)))


def read_qwen(config: Config, style: Style, storage: Storage, name: str) -> Model:
    """Qwen (1): intermediate_size counts both halves of the gated feed-forward."""
    width = config.feed_forward
    if width % 2:
        raise InputError(
            f"config: {config.where}intermediate_size {width} must be even: it counts gate and up projection together"
        )
    biases = not config.flag("no_bias", True)
    return build(config, replace(style, o_bias=biases, mlp_bias=biases), storage, name, width=width // 2)


def read_apertus(config: Config, style: Style, storage: Storage, name: str) -> Model:
    """Apertus: the xIELU activation has two learned scalars per layer."""
    model = build(config, style, storage, name)
    if config.text("hidden_act", "xielu") != "xielu":
        return model
    scalars = Learned(XIELU_SCALARS, storage.base, name="xielu")
    layers = {id(layer): replace(layer, blocks=(*layer.blocks, scalars)) for layer in model.layers}
    return replace(model, layers=tuple(layers[id(layer)] for layer in model.layers))


ADJUST: dict[str, Callable[[Config, Style, Storage, str], Model]] = {
    "apertus": read_apertus,
    "baichuan": read_baichuan,
    "chatglm": read_chatglm,
    "cwm": read_cwm,
    "falcon": read_falcon,
    "gpt_bigcode": read_bigcode,
    "gpt_neo": read_neo,
    "gpt_neox": read_neox,
    "hyperclovax": read_hyperclovax,
    "mpt": read_mpt,
    "nemotron-nas": read_nas,
    "opt": read_opt,
    "qwen": read_qwen,
    "stablelm": read_stablelm,
}
"""model_type -> reader, for the families of ``STYLES`` that need one."""
