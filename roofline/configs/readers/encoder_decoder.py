"""Encoder-decoders: Whisper, T5, BART and mBART; and Llama 3.2 Vision, whose text model looks at image tokens.

The encoder runs once per request over the source and leaves the keys and values of every decoder layer behind; the
decoder's layers read them. Sources: configuration and modelling files of transformers 5.24 (``models/whisper``, ``t5``,
``bart``, ``mbart``, ``mllama``), checked against parameter counts of those classes on the meta device.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from roofline.components.attention import Attention, AttentionBlock
from roofline.components.base import Component
from roofline.components.cross_attention import Convolution, CrossAttention, Positions, RelativeBias, SourceKeys
from roofline.components.feedforward import MLP
from roofline.components.linear import Embedding, Linear
from roofline.components.mixing import Norm, Scale
from roofline.configs.config import Config
from roofline.configs.dense import assemble, layer_of, make_norm, mixers_of, mlp_of
from roofline.configs.storage import Storage
from roofline.configs.styles import Style
from roofline.errors import InputError
from roofline.model import Encoder, Layer, Model


@dataclass(frozen=True)
class Stack:
    """The dimensions of one half: width, heads, head dimension, feed-forward, layers; and what its code fixes."""

    D: int
    N: int
    H: int
    F: int
    L: int
    bias: bool = True
    k_bias: bool = True
    gated: bool = False
    norm: str = "layer"
    post: bool = False

    def attention(self, storage: Storage, prefix: str, *, encoder: bool) -> AttentionBlock:
        """Self-attention: over everything and without a cache in an encoder, causal in a decoder."""
        return AttentionBlock(
            D=self.D, N=self.N, K=self.N, H=self.H, mask="full" if encoder else "causal", qkv_bias=self.bias, o_bias=self.bias,
            k_bias=self.k_bias, caches=not encoder, kv=storage.base, weight=storage.linear(f"{prefix}q_proj"),
            activation=storage.base,
        )  # fmt: skip

    def cross(self, storage: Storage, prefix: str) -> CrossAttention:
        """The decoder's half of cross-attention."""
        weight = storage.linear(f"{prefix}q_proj")
        return CrossAttention(
            self.D, self.N, self.N, self.H, self.bias, self.bias, kv=storage.base, weight=weight, activation=storage.base
        )

    def source(self, storage: Storage, prefix: str, width: int) -> SourceKeys:
        """The encoder's half of cross-attention."""
        weight = storage.linear(f"{prefix}k_proj")
        return SourceKeys(
            width, self.N, self.H, self.bias and self.k_bias, self.bias, kv=storage.base, weight=weight, activation=storage.base
        )

    def feed_forward(self, storage: Storage, prefix: str) -> MLP:
        return MLP(self.D, self.F, self.gated, self.bias, weight=storage.linear(f"{prefix}fc1"), activation=storage.base)

    def a_norm(self, storage: Storage, name: str = "norm", *, residual: bool = True) -> Norm:
        return make_norm(self.norm, self.D, storage, name, residual=residual)

    def layer(self, storage: Storage, *blocks: Component) -> Layer:
        """A layer with a norm before, or behind, each block."""
        parts: list[Component] = []
        for block in blocks:
            parts += [block, self.a_norm(storage)] if self.post else [self.a_norm(storage), block]
        return Layer(tuple(parts))


def encoder_layers(stack: Stack, storage: Storage, prefix: str = "model.encoder.layers.") -> tuple[Layer, ...]:
    """The layers of an encoder."""
    return tuple(
        stack.layer(
            storage,
            stack.attention(storage, f"{prefix}{index}.self_attn.", encoder=True),
            stack.feed_forward(storage, f"{prefix}{index}."),
        )
        for index in range(stack.L)
    )


def decoder_layers(stack: Stack, storage: Storage, prefix: str = "model.decoder.layers.") -> tuple[Layer, ...]:
    """The layers of a decoder: self-attention, cross-attention, feed-forward."""
    return tuple(
        stack.layer(
            storage,
            stack.attention(storage, f"{prefix}{index}.self_attn.", encoder=False),
            stack.cross(storage, f"{prefix}{index}.encoder_attn."),
            stack.feed_forward(storage, f"{prefix}{index}."),
        )
        for index in range(stack.L)
    )


def source_keys(stack: Stack, storage: Storage, width: int, prefix: str = "model.decoder.layers.") -> tuple[SourceKeys, ...]:
    """What the encoder leaves for every decoder layer."""
    return tuple(stack.source(storage, f"{prefix}{index}.encoder_attn.", width) for index in range(stack.L))


def _half(config: Config, side: str, *, k_bias: bool = True, post: bool = False) -> Stack:
    """One half of a BART-like model."""
    D, N = config.size("d_model"), config.size(f"{side}_attention_heads")
    if D % N:
        raise InputError(f"config: {config.where}{side}_attention_heads {N} does not divide d_model {D}")
    return Stack(D, N, D // N, config.size(f"{side}_ffn_dim"), config.size(f"{side}_layers"), k_bias=k_bias, post=post)


def _head(config: Config, storage: Storage, tied: bool) -> Linear:
    tied = config.flag("tie_word_embeddings", tied)
    if "tie_word_embeddings" not in config:
        config.assume(f"{config.where}tie_word_embeddings = {str(tied).lower()} (not in the config)")
    return Linear(
        config.size("d_model"), config.vocabulary, weight=storage.base, activation=storage.base, rows="logit_rows", tied=tied,
        name="head",
    )  # fmt: skip


def _model(
    config: Config, name: str, embedding: tuple[Component, ...], layers: tuple[Layer, ...], final: tuple[Component, ...],
    head: Linear, encoder: Encoder, context: int | None,
) -> Model:  # fmt: skip
    return Model(
        name, embedding, layers, final, (head,), encoder=encoder, max_context=context, assumes=tuple(config.assumes),
        family=config.text("model_type"),
    )  # fmt: skip


def read_whisper(config: Config, storage: Storage, name: str) -> Model:
    """Whisper: two convolutions halve the mel frames, learned positions on both sides, keys without biases."""
    encoder, decoder = _half(config, "encoder", k_bias=False), _half(config, "decoder", k_bias=False)
    D, base = encoder.D, storage.base
    frames, tokens = config.size("max_source_positions"), config.size("max_target_positions")
    before = (
        Convolution(config.size("num_mel_bins"), D, 3, rows=2, weight=base, activation=base, name="conv1"),
        Convolution(D, D, 3, stride=2, weight=base, activation=base, name="conv2"),
        Positions(frames, D, base, base),
    )
    after = (encoder.a_norm(storage, "encoder_norm"), *source_keys(decoder, storage, D))
    return _model(
        config, name,
        (Embedding(config.vocabulary, D, tokens, base, base),),
        decoder_layers(decoder, storage),
        (decoder.a_norm(storage, "final_norm"),),
        _head(config, storage, True),
        Encoder(before, encoder_layers(encoder, storage), after, frames),
        tokens,
    )  # fmt: skip


def read_bart(config: Config, storage: Storage, name: str) -> Model:
    """BART (norms behind the blocks) and mBART (norms before them and one more at the end); shared embeddings."""
    post = config.text("model_type") == "bart"
    encoder, decoder = _half(config, "encoder", post=post), _half(config, "decoder", post=post)
    D, base = encoder.D, storage.base
    positions = config.size("max_position_embeddings") + 2

    def ends(stack: Stack, label: str) -> tuple[Component, ...]:
        return () if post else (stack.a_norm(storage, label),)

    before = (
        Embedding(config.vocabulary, D, weight=base, activation=base, tied=True),
        Positions(positions, D, base, base),
        encoder.a_norm(storage, "embedding_norm", residual=False),
    )
    after = (*ends(encoder, "encoder_norm"), *source_keys(decoder, storage, D))
    return _model(
        config, name,
        (Embedding(config.vocabulary, D, positions, base, base), decoder.a_norm(storage, "embedding_norm", residual=False)),
        decoder_layers(decoder, storage),
        ends(decoder, "final_norm"),
        _head(config, storage, True),
        Encoder(before, encoder_layers(encoder, storage), after),
        config.size("max_position_embeddings"),
    )  # fmt: skip


def _biased(layer: Layer, buckets: int, storage: Storage, stored: bool) -> Layer:
    """The layer with T5's bias on the scores of its self-attention."""
    blocks: list[Component] = []
    for block in layer.blocks:
        blocks.append(block)
        if isinstance(block, AttentionBlock):
            core = next(part for part in block.parts if isinstance(part, Attention))
            blocks.append(RelativeBias(block.N, buckets, core, stored, storage.base))
    return replace(layer, blocks=tuple(blocks))


def read_t5(config: Config, storage: Storage, name: str) -> Model:
    """T5: no biases, RMS norms, a learned bias of distances that the first layer of each half holds."""
    D, H, N, F = config.size("d_model"), config.size("d_kv"), config.size("num_heads"), config.size("d_ff")
    gated = config.text("feed_forward_proj", "relu").startswith("gated")
    encoder = Stack(D, N, H, F, config.size("num_layers"), bias=False, gated=gated, norm="rms")
    decoder = replace(encoder, L=config.size_or(encoder.L, "num_decoder_layers"))
    buckets, base = config.size("relative_attention_num_buckets"), storage.base

    def biased(layers: tuple[Layer, ...]) -> tuple[Layer, ...]:
        return tuple(_biased(layer, buckets, storage, index == 0) for index, layer in enumerate(layers))

    before = (Embedding(config.vocabulary, D, weight=base, activation=base, tied=True),)
    after = (encoder.a_norm(storage, "encoder_norm"), *source_keys(decoder, storage, D))
    return _model(
        config, name,
        (Embedding(config.vocabulary, D, weight=base, activation=base),),
        biased(decoder_layers(decoder, storage)),
        (decoder.a_norm(storage, "final_norm"),),
        _head(config, storage, True),
        Encoder(before, biased(encoder_layers(encoder, storage)), after),
        config.optional_size("n_positions"),
    )  # fmt: skip


MLLAMA = Style()
IMAGE_ROWS = 8
"""Rows of Llama 3.2 Vision's embedding beyond the vocabulary of its head."""


def read_mllama_text(config: Config, storage: Storage, name: str) -> Model:
    """The text model of Llama 3.2 Vision: some layers look at the image tokens instead of the text, behind scalar gates."""
    chosen = config.items("cross_attention_layers")
    if chosen is None or any(isinstance(i, bool) or not isinstance(i, int) or not 0 <= i < config.layers for i in chosen):
        raise InputError(f"config: {config.where}cross_attention_layers must list layers from 0 to {config.layers - 1}")
    D, K, H, base = config.width, config.kv_heads, config.head_dim, storage.base
    layers: list[Layer] = []
    keys: list[Component] = []
    for index, mixer in enumerate(mixers_of(config, MLLAMA, storage)):
        prefix = f"model.layers.{index}."
        feed_forward = mlp_of(config, MLLAMA, storage, f"{prefix}mlp.")
        if index not in chosen:
            layers.append(layer_of("rms", "pre", mixer, feed_forward, D, storage))
            continue
        weight = storage.linear(f"{prefix}cross_attn.q_proj")
        cross = CrossAttention(D, config.heads, K, H, qk_norm=True, kv=base, weight=weight, activation=base)
        keys.append(SourceKeys(D, K, H, qk_norm=True, kv=base, weight=weight, activation=base))
        gate = Scale(D, 1, base, base, name="cross.gate")
        plain = layer_of("rms", "pre", cross, feed_forward, D, storage)
        first, _, second, _ = plain.blocks
        layers.append(Layer((first, cross, gate, second, feed_forward, gate)))
    config.assume(f"{config.where}cross_attention_layers run for every token, also where no image was given")
    model = assemble(config, MLLAMA, storage, tuple(layers), name)
    table = Embedding(config.vocabulary + IMAGE_ROWS, D, weight=base, activation=base)
    return replace(
        model,
        embedding=(table,),
        encoder=Encoder((), (), tuple(keys)),
        not_modelled=("the vision encoder's own work: only the keys and values of its image tokens (source) are costed",),
    )
