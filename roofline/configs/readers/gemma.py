"""Gemma 3n and Gemma 4: layers that share keys and values, embeddings per layer, heads that differ by kind of layer.

Sources: configuration and modelling files of transformers 5.24 (``models/gemma3n``, ``models/gemma4``), checked against
parameter counts of those classes on the meta device. Scalars that transformers keeps as buffers are no parameters here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from roofline.components.altup import AltUpCorrect, AltUpPredict, LayerEmbeddings, LayerInput, LowRankResidual
from roofline.components.attention import AttentionBlock
from roofline.components.base import Component
from roofline.components.feedforward import MLP
from roofline.components.linear import Linear
from roofline.components.mixing import Elementwise, Norm, Scale, rms_norm
from roofline.configs.config import Config
from roofline.configs.dense import assemble, attention_of, mlp_of
from roofline.configs.patterns import FULL, Mask, masks_of
from roofline.configs.readers.moe import Family, moe_of, one_size
from roofline.configs.storage import Storage
from roofline.configs.styles import Style
from roofline.errors import InputError, UnsupportedModel
from roofline.model import Layer, Model

STYLE = Style(norms="sandwich", qkv_bias="attention_bias", o_bias="attention_bias", qk_norm="head", tied=True)
MIXTURE = Family(STYLE, router_bias=True)
"""The stored factor per expert stands where other families store a correction per expert."""


def first_shared(config: Config, layers: int) -> int:
    """The first layer that reuses keys and values of an earlier one. Raises InputError where none is left to own them."""
    shared: int = config.size_or(0, "num_kv_shared_layers", least=0)
    if shared >= layers:
        raise InputError(f"config: {config.where}num_kv_shared_layers {shared} leaves no layer of {layers} with keys of its own")
    return layers - shared


def _masks(config: Config, layers: int, period: int) -> list[Mask]:
    if config.get("use_bidirectional_attention") == "all":
        raise UnsupportedModel("gemma: bidirectional attention over text (use_bidirectional_attention) is not supported")
    return masks_of(config, layers, period)


def _rotary(config: Config, kind: str, head_dim: int, default: float) -> int:
    """Rotated elements per head of a kind of layer."""
    parameters = config.get("rope_parameters", {})
    section = parameters.get(kind) if isinstance(parameters, Mapping) else None
    part = section.get("partial_rotary_factor", 1.0) if isinstance(section, Mapping) else default
    if isinstance(part, bool) or not isinstance(part, (int, float)) or not 0 <= part <= 1:
        raise InputError(f"config: {config.where}rope_parameters.{kind}.partial_rotary_factor must be a number from 0 to 1")
    return int(part * head_dim)


def _norm(config: Config, storage: Storage, name: str = "norm", *, residual: bool = False) -> Norm:
    return rms_norm(config.width, residual=residual, name=name, weight=storage.base, activation=storage.base)


def _gemma4_attention(config: Config, storage: Storage, prefix: str, mask: Mask, shared: bool) -> AttentionBlock:
    """Window layers take the plain keys, full layers the global ones; values are normalised without weights."""
    block = replace(attention_of(config, STYLE, storage, prefix), mask=mask[0], size=mask[1], v_norm=True, shares_kv=shared)
    if mask != FULL:
        return replace(block, rotary=_rotary(config, "sliding_attention", block.H, 1.0))
    H = config.size_or(512, "global_head_dim")
    same = config.flag("attention_k_eq_v", False)
    K = config.size_or(block.K, "num_global_key_value_heads", note=False) if same else block.K
    return replace(block, H=H, K=K, k_is_v=same, rotary=_rotary(config, "full_attention", H, 0.25))


def _mixture(config: Config, storage: Storage, prefix: str) -> tuple[Component, ...]:
    """Routed experts beside the dense feed-forward: three more norms, a normalised router input, the sum."""
    D = config.width
    return (
        _norm(config, storage), _norm(config, storage, "router_norm"), _norm(config, storage),
        moe_of(config, MIXTURE, storage, prefix), _norm(config, storage),
        Elementwise(2 * D, D, D, storage.base, name="experts.add"),
    )  # fmt: skip


def _layer_input(config: Config, storage: Storage, part: int, prefix: str) -> LayerInput:
    return LayerInput(config.width, part, storage.linear(f"{prefix}per_layer_projection"), storage.base)


def _layer_embeddings(config: Config, storage: Storage, part: int) -> LayerEmbeddings:
    rows = config.size_or(262144, "vocab_size_per_layer_input")
    return LayerEmbeddings(rows, config.layers * part, part, config.width, storage.base, storage.base)


def read_gemma4(config: Config, storage: Storage, name: str) -> Model:
    """Gemma 4 (text): window and full layers with heads of their own, shared keys and values, experts beside the MLP."""
    count = config.layers
    masks = _masks(config, count, 6)
    if masks[-1] != FULL:
        config.assume(f"{config.where}layer_types: the last layer is full attention, whatever the config says")
        masks[-1] = FULL
    owned = first_shared(config, count)
    part = config.size_or(256, "hidden_size_per_layer_input", least=0)
    wide = 2 if config.flag("use_double_wide_mlp", False) else 1
    layers: list[Layer] = []
    for index, mask in enumerate(masks):
        prefix = f"model.layers.{index}."
        mixer = _gemma4_attention(config, storage, f"{prefix}self_attn.", mask, index >= owned)
        width = config.feed_forward * (wide if index >= owned else 1)
        blocks: list[Component] = [
            _norm(config, storage, residual=True), mixer, _norm(config, storage), _norm(config, storage, residual=True),
            mlp_of(config, STYLE, storage, f"{prefix}mlp.", width),
        ]  # fmt: skip
        if config.flag("enable_moe_block", False):
            blocks += _mixture(config, storage, prefix)
        blocks.append(_norm(config, storage))
        if part:
            blocks.append(_layer_input(config, storage, part, prefix))
        layers.append(Layer(tuple(blocks)))
    model = assemble(config, STYLE, storage, tuple(layers), name)
    return replace(model, embedding=(*model.embedding, _layer_embeddings(config, storage, part))) if part else model


def read_gemma3n(config: Config, storage: Storage, name: str) -> Model:
    """Gemma 3n (text): AltUp streams, LAuReL, an embedding per layer; the last layers reuse earlier keys and values."""
    count, D = config.layers, config.width
    owned = first_shared(config, count)
    streams = config.size_or(4, "altup_num_inputs")
    rank = config.size_or(64, "laurel_rank")
    part = config.size_or(256, "hidden_size_per_layer_input")
    base = storage.base
    layers: list[Layer] = []
    for index, (mask, size) in enumerate(_masks(config, count, 5)):
        prefix = f"model.layers.{index}."
        mixer = replace(
            attention_of(config, STYLE, storage, f"{prefix}self_attn."),
            mask=mask, size=size, v_norm=True, shares_kv=index >= owned,
        )  # fmt: skip
        F = one_size(config, index, "intermediate_size")
        feed_forward: MLP = mlp_of(config, STYLE, storage, f"{prefix}mlp.", F)
        layers.append(
            Layer(
                (
                    AltUpPredict(streams, D, base, base), _norm(config, storage), LowRankResidual(D, rank, base, base), mixer,
                    _norm(config, storage, residual=True), _norm(config, storage), feed_forward,
                    _norm(config, storage, residual=True), AltUpCorrect(streams, D, base, base),
                    Scale(D, D, base, base, name="altup.scale"),
                    _layer_input(config, storage, part, prefix),
                )
            )
        )  # fmt: skip
    model = assemble(config, STYLE, storage, tuple(layers), name)
    spread = tuple(Linear(D, D, weight=base, activation=base, name="altup.embed") for _ in range(1, streams))
    gather = tuple(Linear(D, D, weight=base, activation=base, name="altup.unembed") for _ in range(1, streams))
    return replace(
        model,
        embedding=(*model.embedding, _layer_embeddings(config, storage, part), *spread),
        final=(*gather, *model.final),
        not_modelled=("activation_sparsity_pattern: the first layers' sparse activations are computed densely",),
    )
