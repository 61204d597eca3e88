"""Dense decoders: one style per family (``styles``), one builder for all.

A style says what a family's code fixes and its config does not; the builder reads the rest from the config's own keys.
Every style is checked against parameter counts of the classes of transformers 5.24 on the meta device.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from roofline.components.attention import AttentionBlock
from roofline.components.base import Component
from roofline.components.feedforward import MLP
from roofline.components.linear import Embedding, Linear
from roofline.components.mixing import Norm, layer_norm, rms_norm
from roofline.configs.config import KV_HEADS, Config
from roofline.configs.patterns import FULL, Mask, masks_of, rotary_layers
from roofline.configs.storage import Storage
from roofline.configs.styles import STYLES, Style, resolve
from roofline.errors import InputError
from roofline.model import Layer, Model

__all__ = [
    "STYLES", "Style", "assemble", "attention_of", "build", "formats_of", "layer_of", "make_norm", "mixers_of", "mlp_of",
    "resolve",
]  # fmt: skip


def make_norm(kind: str, width: int, storage: Storage, name: str, *, residual: bool = True) -> Norm:
    """A norm of one of the kinds of ``Style.norm``."""
    if kind == "rms":
        return rms_norm(width, residual=residual, name=name, weight=storage.base, activation=storage.base)
    bias = kind != "layer-no-bias"
    norm = layer_norm(width, bias=bias, residual=residual, name=name, weight=storage.base, activation=storage.base)
    return replace(norm, weights=0) if kind == "none" else norm


def formats_of(storage: Storage, prefix: str, projections: dict[str, str]) -> dict[str, object]:
    """``weight`` and ``overrides`` of a block whose projections are the modules ``prefix + name``."""
    found = {short: storage.linear(prefix + name) for short, name in projections.items()}
    common = max(set(found.values()), key=list(found.values()).count)
    return {
        "weight": common,
        "overrides": tuple((short, fmt) for short, fmt in found.items() if fmt != common),
        "activation": storage.base,
    }


def stored_as(storage: Storage, prefix: str, names: tuple[str, ...]) -> tuple[object, ...]:
    """What tells the storage of one layer's block from another's: equal keys, equal blocks."""
    return () if storage.plain else tuple(storage.linear(prefix + name) for name in names)


def kv_heads_of(config: Config, style: Style) -> int:
    """K: from the config, else what the style says a missing key means."""
    if style.kv_heads == "all":
        found = config.optional_size(*KV_HEADS)
        if found not in (None, config.heads):
            raise InputError(f"config: {config.where}num_key_value_heads {found} in a family that has one for each query head")
        return config.heads
    if isinstance(style.kv_heads, int) and config.optional_size(*KV_HEADS) is None and config.heads % style.kv_heads == 0:
        config.assume(f"{config.where}num_key_value_heads = {style.kv_heads} (not in the config: the family's default)")
        return style.kv_heads
    return config.kv_heads


def head_dim_of(config: Config, style: Style) -> int:
    """H: from the config, else the family's default, else D / N."""
    if style.head_dim is not None and config.optional_size("head_dim", "kv_channels") is None:
        config.assume(f"{config.where}head_dim = {style.head_dim} (not in the config: the family's default)")
        return style.head_dim
    return config.head_dim


def attention_of(config: Config, style: Style, storage: Storage, prefix: str, **changes: Any) -> AttentionBlock:
    """The attention block of one layer, from the config's standard keys; ``changes`` are fields that stand otherwise."""
    head_dim = changes.get("H") or head_dim_of(config, style)
    fields: dict[str, Any] = {
        "D": config.width,
        "N": config.heads,
        "K": changes.get("K") or kv_heads_of(config, style),
        "H": head_dim,
        "qkv_bias": resolve(style.qkv_bias, config),
        "o_bias": resolve(style.o_bias, config),
        "qk_norm": style.qk_norm if resolve(style.qk_norm_if, config) else "",
        "qk_norm_bias": style.qk_norm_bias,
        "rotary": config.rotary_of(head_dim, style.rotary_part) if style.rotary else 0,
        "kv": storage.kv,
        **formats_of(storage, prefix, dict(zip("qkvo", style.modules.qkvo, strict=True))),
    }
    return AttentionBlock(**{**fields, **changes})


def mlp_of(config: Config, style: Style, storage: Storage, prefix: str, width: int | None = None) -> MLP:
    """The dense feed-forward block of one layer."""
    if width is None:
        width = config.feed_forward_or(style.widening * config.width if style.widening else None)
    return MLP(
        D=config.width,
        F=width,
        gated=style.gated,
        bias=resolve(style.mlp_bias, config),
        **formats_of(storage, prefix, dict(zip(("gate", "up", "down"), style.modules.gate_up_down, strict=True))),  # type: ignore[arg-type]
    )


def layer_of(norm: str, norms: str, mixer: Component, feed_forward: Component, width: int, storage: Storage) -> Layer:
    """A layer with its norms where the style puts them; every norm but a parallel one carries a residual addition."""

    def a_norm(name: str) -> Norm:
        return make_norm(norm, width, storage, name)

    if norms == "parallel":
        return Layer((a_norm("norm"), mixer, feed_forward))
    if norms == "parallel-two":
        return Layer((a_norm("norm"), mixer, a_norm("norm"), feed_forward))
    if norms == "post":
        return Layer((mixer, a_norm("norm"), feed_forward, a_norm("norm")))
    if norms == "sandwich":
        return Layer((a_norm("norm"), mixer, a_norm("norm"), a_norm("norm"), feed_forward, a_norm("norm")))
    return Layer((a_norm("norm"), mixer, a_norm("norm"), feed_forward))


def assemble(config: Config, style: Style, storage: Storage, layers: tuple[Layer, ...], name: str) -> Model:
    """A Model around finished layers: embedding, positions, final norm and head."""
    width, vocabulary = config.width, config.vocabulary
    positions = 0
    if style.positions:
        positions = config.size(style.positions, "max_position_embeddings", "n_positions") + style.position_offset
    tied = config.flag("tie_word_embeddings", style.tied)
    if "tie_word_embeddings" not in config:
        config.assume(f"tie_word_embeddings = {str(tied).lower()} (not in the config)")
    embedding: tuple[Component, ...] = (Embedding(vocabulary, width, positions, storage.base, storage.base),)
    if style.embedding_norm:
        embedding = (*embedding, make_norm(style.norm, width, storage, "embedding_norm", residual=False))
    head = Linear(
        width, vocabulary, resolve(style.head_bias, config), storage.linear(style.modules.head), storage.base,
        rows="logit_rows", tied=tied, name="head",
    )  # fmt: skip
    return Model(
        name=name,
        embedding=embedding,
        layers=layers,
        final=(make_norm(style.norm, width, storage, "final_norm"),) if style.final_norm else (),
        head=(head,),
        max_context=config.max_context,
        assumes=tuple(config.assumes),
        family=config.text("model_type"),
    )


def patterns_of(config: Config, style: Style) -> list[tuple[Mask, bool]]:
    """(mask, whether it rotates) of every layer."""
    count = config.layers
    masks = masks_of(config, count, style.period)
    rotates = [bool(style.rotary)] * count
    if style.still or "no_rope_layers" in config or "no_rope_layer_interval" in config:
        rotates = rotary_layers(config, count, style.still or 4)
    elif style.rotary == "windowed" and any(mask == "window" for mask, _ in masks):
        rotates = [mask == "window" for mask, _ in masks]
    if style.still and "layer_types" not in config:
        masks = [FULL if rotated else mask for mask, rotated in zip(masks, rotates, strict=True)]
    return list(zip(masks, rotates, strict=True))


def mixers_of(config: Config, style: Style, storage: Storage, prefix: str | None = None, **changes: Any) -> list[AttentionBlock]:
    """The attention blocks of all layers, with the masks and rotations of the config's pattern; equal ones are one."""
    prefix = style.modules.layers if prefix is None else prefix
    built: dict[object, AttentionBlock] = {}
    blocks = []
    for index, ((mask, size), rotated) in enumerate(patterns_of(config, style)):
        at = f"{prefix}{index}.{style.modules.attention}"
        key = (mask, size, rotated, stored_as(storage, at, style.modules.qkvo))
        if key not in built:
            still = {} if rotated else {"rotary": 0}
            built[key] = attention_of(config, style, storage, at, **{"mask": mask, "size": size, **still, **changes})
        blocks.append(built[key])
    return blocks


def mlps_of(config: Config, style: Style, storage: Storage, width: int | None = None) -> list[MLP]:
    """The feed-forward blocks of all layers; equal ones are one."""
    built: dict[object, MLP] = {}
    blocks = []
    for index in range(config.layers):
        at = f"{style.modules.layers}{index}.{style.modules.mlp}"
        key = stored_as(storage, at, style.modules.gate_up_down)
        if key not in built:
            built[key] = mlp_of(config, style, storage, at, width)
        blocks.append(built[key])
    return blocks


def build(config: Config, style: Style, storage: Storage, name: str, *, width: int | None = None, **changes: Any) -> Model:
    """A Model in a style; ``changes`` are fields of every attention block, ``width`` is F, that stand otherwise."""
    layers: dict[tuple[int, int], Layer] = {}
    order = []
    mixers = mixers_of(config, style, storage, **changes)
    for mixer, feed_forward in zip(mixers, mlps_of(config, style, storage, width), strict=True):
        key = (id(mixer), id(feed_forward))
        if key not in layers:
            layers[key] = layer_of(style.norm, style.norms, mixer, feed_forward, config.width, storage)
        order.append(layers[key])
    return assemble(config, style, storage, tuple(order), name)
