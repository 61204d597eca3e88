"""Dense decoders: one style per family, one builder for all.

A style says what a family's code fixes and its config does not: which norms, which biases, which feed-forward. Whatever
the config itself states decides. Sources: the modelling files of transformers 5.24 (``models/<family>``); every style is
checked against parameter counts of those classes on the meta device.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from roofline.components.attention import AttentionBlock
from roofline.components.base import Component
from roofline.components.feedforward import MLP
from roofline.components.linear import Embedding, Linear
from roofline.components.mixing import Norm, layer_norm, rms_norm
from roofline.configs.config import Config
from roofline.configs.patterns import masks_of, rotary_layers
from roofline.configs.storage import Storage
from roofline.model import Layer, Model


@dataclass(frozen=True)
class Style:
    """What a family's code fixes.

    A field that names a config key ("attention_bias") reads that flag, with ``False`` where it is missing.

    Attributes:
        norm: "rms", "layer" (weight and bias), "layer-no-bias", "none" (no parameters).
        norms: "pre" (before mixer and feed-forward), "post" (after both), "sandwich" (both), "parallel" (one norm, mixer
            and feed-forward side by side), "parallel-two".
        qkv_bias, o_bias, mlp_bias, head_bias: biases: True, False or a config key.
        gated: three-matrix feed-forward.
        qk_norm: as in AttentionBlock.
        tied: whether head and embedding share weights where the config does not say.
        positions: config key of a learned position table, "" for none.
        position_offset: extra rows of that table.
        rotary: whether heads are rotated; "windowed" for those of sliding-window layers only.
        final_norm: a norm before the head.
        period: layers from one full-attention layer to the next where the code alternates, None where it does not.
    """

    norm: str = "rms"
    norms: str = "pre"
    qkv_bias: bool | str = False
    o_bias: bool | str = False
    mlp_bias: bool | str = False
    head_bias: bool | str = False
    gated: bool = True
    qk_norm: str = ""
    tied: bool = False
    positions: str = ""
    position_offset: int = 0
    rotary: bool | str = True
    final_norm: bool = True
    period: int | None = None


STYLES: dict[str, Style] = {
    "llama": Style(qkv_bias="attention_bias", o_bias="attention_bias", mlp_bias="mlp_bias"),
    "mistral": Style(),
    "qwen2": Style(qkv_bias=True),
    "qwen3": Style(qkv_bias="attention_bias", o_bias="attention_bias", qk_norm="head"),
    "qwen3_vl_text": Style(qkv_bias="attention_bias", o_bias="attention_bias", qk_norm="head"),
    "ministral3": Style(),
    "smollm3": Style(qkv_bias="attention_bias", o_bias="attention_bias", mlp_bias="mlp_bias", tied=True),
    "gemma2": Style(norms="sandwich", qkv_bias="attention_bias", o_bias="attention_bias", tied=True, period=2),
    "gemma3_text": Style(
        norms="sandwich", qkv_bias="attention_bias", o_bias="attention_bias", qk_norm="head", tied=True, period=6
    ),
    "vaultgemma": Style(qkv_bias="attention_bias", o_bias="attention_bias", tied=True, period=2),
    "cohere2": Style(
        norm="layer-no-bias", norms="parallel", qkv_bias="attention_bias", o_bias="attention_bias", tied=True,
        rotary="windowed", period=4,
    ),
    "olmo3": Style(norms="post", qkv_bias="attention_bias", o_bias="attention_bias", qk_norm="full", period=4),
    "exaone4": Style(norms="post", qk_norm="head", rotary="windowed", period=4),
}  # fmt: skip


def resolve(value: bool | str, config: Config) -> bool:
    """A style field: itself, or the flag of the config key it names."""
    return config.flag(value, False) if isinstance(value, str) else value


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


QKVO = {"q": "q_proj", "k": "k_proj", "v": "v_proj", "o": "o_proj"}
GATE_UP_DOWN = {"gate": "gate_proj", "up": "up_proj", "down": "down_proj"}


def attention_of(config: Config, style: Style, storage: Storage, prefix: str) -> AttentionBlock:
    """The attention block of one layer, from the config's standard keys."""
    return AttentionBlock(
        D=config.width,
        N=config.heads,
        K=config.kv_heads,
        H=config.head_dim,
        qkv_bias=resolve(style.qkv_bias, config),
        o_bias=resolve(style.o_bias, config),
        qk_norm=style.qk_norm,
        rotary=config.rotary if style.rotary else 0,
        kv=storage.base,
        **formats_of(storage, prefix, QKVO),  # type: ignore[arg-type]
    )


def mlp_of(config: Config, style: Style, storage: Storage, prefix: str, width: int | None = None) -> MLP:
    """The dense feed-forward block of one layer."""
    return MLP(
        D=config.width,
        F=config.feed_forward if width is None else width,
        gated=style.gated,
        bias=resolve(style.mlp_bias, config),
        **formats_of(storage, prefix, GATE_UP_DOWN),  # type: ignore[arg-type]
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
    head = Linear(
        width, vocabulary, resolve(style.head_bias, config), storage.linear("lm_head"), storage.base,
        rows="logit_rows", tied=tied, name="head",
    )  # fmt: skip
    return Model(
        name=name,
        embedding=(Embedding(vocabulary, width, positions, storage.base, storage.base),),
        layers=layers,
        final=(make_norm(style.norm, width, storage, "final_norm"),) if style.final_norm else (),
        head=(head,),
        max_context=config.max_context,
        assumes=tuple(config.assumes),
        family=config.text("model_type"),
    )


def mixers_of(config: Config, style: Style, storage: Storage, prefix: str = "model.layers.") -> list[AttentionBlock]:
    """The attention blocks of all layers, with the masks and rotations of the config's pattern."""
    count = config.layers
    masks = masks_of(config, count, style.period)
    rotates = [True] * count
    if "no_rope_layers" in config or "no_rope_layer_interval" in config:
        rotates = rotary_layers(config, count)
    elif style.rotary == "windowed" and any(mask == "window" for mask, _ in masks):
        rotates = [mask == "window" for mask, _ in masks]
    blocks = []
    for index, ((mask, size), rotated) in enumerate(zip(masks, rotates, strict=True)):
        block = attention_of(config, style, storage, f"{prefix}{index}.self_attn.")
        blocks.append(replace(block, mask=mask, size=size, rotary=block.rotary if rotated else 0))
    return blocks


def read_dense(config: Config, storage: Storage, name: str) -> Model:
    """A dense decoder in the style of its model_type."""
    style = STYLES[config.text("model_type")]
    layers = []
    for index, mixer in enumerate(mixers_of(config, style, storage)):
        feed_forward = mlp_of(config, style, storage, f"model.layers.{index}.mlp.")
        layers.append(layer_of(style.norm, style.norms, mixer, feed_forward, config.width, storage))
    return assemble(config, style, storage, tuple(layers), name)
