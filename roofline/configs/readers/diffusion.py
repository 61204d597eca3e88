"""Diffusion language models: decoders that attend in both directions and were trained to fill in masked tokens.

Sources, published beside the weights: configuration_llada.py and modeling_llada.py (GSAI-ML/LLaDA-8B-Base; they follow
OLMo's), modeling_dream.py (Dream-org/Dream-v0-Base-7B: Qwen2.5's layers), configuration_llada2_moe.py and
modeling_llada2_moe.py (inclusionAI/LLaDA2.0-mini).
"""

from __future__ import annotations

from dataclasses import replace

from roofline.configs.config import Config
from roofline.configs.dense import build
from roofline.configs.guard import left_out, refuse_unread
from roofline.configs.readers.decoder import read_dense
from roofline.configs.readers.moe import read_moe
from roofline.configs.storage import Storage
from roofline.configs.styles import Modules, Style
from roofline.errors import InputError, UnsupportedModel
from roofline.model import Model

BIDIRECTIONAL = "a denoiser: decode steps are those of the same shape with a causal mask; roofline diffusion counts its own steps"
DEFAULTS = {"block_type": "sequential", "layer_norm_type": "default", "rope": False, "weight_tying": True, "mlp_ratio": 4}
"""Defaults of its configuration class that decide the shape."""
MODULES = Modules(
    "model.transformer.blocks.", "", ("q_proj", "k_proj", "v_proj", "attn_out"), "", ("ff_proj", "up_proj", "ff_out"),
    "model.transformer.ff_out",
)  # fmt: skip


def _norm(config: Config) -> str:
    """The kind of its norms, as ``Style.norm`` names them."""
    kind = config.text("layer_norm_type")
    scaled = config.flag("layer_norm_with_affine", True)
    shifted = scaled and config.flag("bias_for_layer_norm", config.flag("include_bias", False))
    if kind == "rms" and scaled and not shifted:
        return "rms"
    if kind in ("default", "low_precision"):
        return "layer" if shifted else "layer-no-bias" if scaled else "none"
    raise UnsupportedModel(f"llada: a norm of type {kind!r:.40}, scaled {scaled}, shifted {shifted}, is not supported")


def _kv_heads(config: Config) -> int:
    """n_kv_heads, unless multi_query_attention says one or all."""
    number: int = config.size_or(config.heads, "n_kv_heads", note=False)
    if "multi_query_attention" in config:
        alike = 1 if config.flag("multi_query_attention", False) else config.heads
        if "n_kv_heads" in config and number != alike:
            raise InputError(f"config: {config.where}n_kv_heads = {number} and multi_query_attention contradict each other")
        number = alike
    if config.heads % number:
        raise InputError(f"config: {config.where}n_kv_heads {number} does not divide the {config.heads} query heads")
    return number


def read_llada(config: Config, storage: Storage, name: str) -> Model:
    """LLaDA: a Llama without a causal mask, under the keys of OLMo.

    Raises UnsupportedModel for blocks that are not the gated ones of Llama and for features that no release has.
    """
    refuse_unread(config, "llada", (), windows=False)
    config = config.filled(DEFAULTS)
    if config.text("block_type") != "llama":
        raise UnsupportedModel(f"llada: blocks of type {config.text('block_type')!r:.40} (block_type) are not supported")
    for key in ("attention_layer_norm", "input_emb_norm", "scale_logits"):
        if config.flag(key, False):
            raise UnsupportedModel(f"llada: {key} is not supported in this family")
    biased = config.flag("include_bias", False)
    rotary = config.flag("rope", False)
    style = Style(
        norm=_norm(config), qkv_bias=biased or config.flag("include_qkv_bias", False), o_bias=biased, mlp_bias=biased,
        head_bias=biased, rotary=rotary, modules=MODULES,
        positions="" if rotary or config.flag("alibi", False) else "max_sequence_length",
    )  # fmt: skip
    keys = {
        "vocab_size": config.size("embedding_size", "vocab_size"),
        "tie_word_embeddings": config.flag("weight_tying", True),
    }
    width = config.optional_size("mlp_hidden_size") or config.size("mlp_ratio") * config.width
    model = build(
        Config({**config.data, **keys}, config.where, config.assumes), style, storage, name, width=width, K=_kv_heads(config)
    )
    return _denoiser(replace(model, not_modelled=left_out(config)))


def read_dream(config: Config, storage: Storage, name: str) -> Model:
    """Dream: the layers of Qwen2.5, biases on queries, keys and values included, without a causal mask."""
    return _denoiser(read_dense(config, storage, name))


def read_llada2(config: Config, storage: Storage, name: str) -> Model:
    """LLaDA 2: a mixture of experts behind dense layers, denoised block by block behind an exact cache."""
    return _denoiser(read_moe(config, storage, name))


def _denoiser(model: Model) -> Model:
    """The model with a note that it is no autoregressive one."""
    return replace(model, assumes=(*model.assumes, BIDIRECTIONAL), denoiser=True)
