"""Nemotron-H and Nemotron 3: one mixer per layer, in the order of a pattern of letters.

M is a Mamba-2 mixer, * attention without rotary embedding, - a feed-forward of two matrices, E routed experts, which
may work on a latent narrower than the residual stream. Source: transformers 5.24, models/nemotron_h; counts are checked
against that class on the meta device. The router's correction bias is a buffer and no parameter.
"""

from __future__ import annotations

from roofline.components.base import Component
from roofline.components.moe import MoE
from roofline.configs.config import Config
from roofline.configs.dense import Style, assemble, attention_of, make_norm, mlp_of
from roofline.configs.readers.recurrent import mamba2_of, without_prediction
from roofline.configs.storage import Storage
from roofline.errors import InputError, UnsupportedModel
from roofline.model import Layer, Model

LETTERS = {
    "mamba": "M", "linear_attention": "M", "attention": "*", "full_attention": "*", "mlp": "-", "moe": "E",
}  # fmt: skip
STYLE = Style(gated=False, mlp_bias="mlp_bias", rotary=False)


def pattern_of(config: Config) -> str:
    """One letter per layer: hybrid_override_pattern, or the same from layers_block_type."""
    types = config.items("layers_block_type") or config.items("layer_types")
    if types is None:
        pattern = config.text("hybrid_override_pattern")
    else:
        pattern = "".join(LETTERS.get(kind, "?") if isinstance(kind, str) else "?" for kind in types)
    if not pattern:
        raise InputError(f"config: {config.where}hybrid_override_pattern is missing; it gives the mixer of every layer")
    unknown = set(pattern) - set(LETTERS.values())
    if unknown:
        raise UnsupportedModel(
            f"config: {config.where}hybrid_override_pattern has {''.join(sorted(unknown))!r}; M, *, - and E are supported"
        )
    count = config.size_or(len(pattern), "num_hidden_layers", note=False)
    if count != len(pattern):
        raise InputError(f"config: {config.where}hybrid_override_pattern has {len(pattern)} letters for {count} layers")
    return pattern


def moe_of(config: Config, storage: Storage, prefix: str) -> MoE:
    """The routed and shared experts of one layer."""
    return MoE(
        D=config.width,
        F=config.size("moe_intermediate_size"),
        E=config.size("n_routed_experts"),
        k=config.size("num_experts_per_tok"),
        shared_F=config.size("moe_shared_expert_intermediate_size", least=0),
        gated=False,
        shared_bias=config.flag("mlp_bias", False),
        weight=storage.linear(f"{prefix}experts.0.up_proj"),
        router_weight=storage.base,
        shared_weight=storage.linear(f"{prefix}shared_experts.up_proj"),
        activation=storage.base,
        latent=config.optional_size("moe_latent_size"),
        latent_weight=storage.linear(f"{prefix}fc1_latent_proj"),
    )


def mixer_of(config: Config, storage: Storage, prefix: str, letter: str) -> Component:
    """The one mixer of a layer."""
    if letter == "M":
        return mamba2_of(config, storage, prefix, None)
    if letter == "*":
        return attention_of(config, STYLE, storage, prefix)
    if letter == "-":
        return mlp_of(config, STYLE, storage, prefix)
    return moe_of(config, storage, prefix)


def read_nemotron_h(config: Config, storage: Storage, name: str, root: str = "backbone.") -> Model:
    """A Nemotron-H or Nemotron 3 decoder; ``root`` is the path of its modules in the checkpoint."""
    pattern = pattern_of(config)
    layers = []
    for index, letter in enumerate(pattern):
        mixer = mixer_of(config, storage, f"{root}layers.{index}.mixer.", letter)
        layers.append(Layer((make_norm("rms", config.width, storage, "norm"), mixer)))
    model = assemble(config, STYLE, storage, tuple(layers), name)
    return without_prediction(config, model, "num_nextn_predict_layers")
