"""Second opinion: transformers models on torch's meta device, which have shapes and no data.

Tests reach this module through the fixture ``meta``. Counted FLOPs are those of matrix multiplications as torch's
FlopCounterMode sees them. Attention runs eagerly under an explicit mask, hence over the full rectangle of T x (S + T)
scores per head, and the head runs on every new token.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from functools import partial
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")

import torch
import transformers
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.models.auto import modeling_auto
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.dbrx.configuration_dbrx import DbrxAttentionConfig

WINDOWED = ("sliding_attention", "chunked_attention", "compressed_sparse_attention", "heavily_compressed_attention")
"""Layers whose mask covers a window; DeepSeek-V4's compressed ones add the columns of their entries themselves."""

DbrxAttentionConfig.rope_theta = 500000.0
"""transformers 5.24 reads it and its class does not have it."""

NO_DEFAULT: dict[str, dict[str, Any]] = {
    "hunyuan_v1_dense": {"head_dim": 128},
    "hunyuan_v1_moe": {"head_dim": 128},
    "lfm2_moe": {"layer_types": ["full_attention" if index % 4 == 2 else "conv" for index in range(32)]},
    "ministral": {"head_dim": 128},
    "nemotron": {"num_key_value_heads": 48},
}
"""Keys without which a family's class cannot be built, and which it has no default for."""

TASKS = ("CAUSAL_LM", "SPEECH_SEQ_2_SEQ", "SEQ_TO_SEQ_CAUSAL_LM")

NO_POSITIONS = ("bloom", "mpt", "opt")
"""Families whose forward takes no position_ids."""
FLAT_MASK = ("bloom", "opt")
"""Families that derive positions from the mask, which must then name tokens."""


STANDS_FOR = {"kimi_k2": "deepseek_v3", "mimo": "qwen2", "deepseek_ref": "deepseek_v4", "phi-msft": "phi", "chatglm": "glm"}
"""model_type of published code -> the transformers class with the same parameters."""

RENAMED = {
    "phi-msft": {
        "n_embd": "hidden_size", "n_head": "num_attention_heads", "n_layer": "num_hidden_layers",
        "n_head_kv": "num_key_value_heads", "n_inner": "intermediate_size",
    },
    "chatglm": {
        "num_layers": "num_hidden_layers", "multi_query_group_num": "num_key_value_heads", "kv_channels": "head_dim",
        "ffn_hidden_size": "intermediate_size", "padded_vocab_size": "vocab_size", "add_qkv_bias": "attention_bias",
    },
}  # fmt: skip
"""Keys of published code -> keys of that class."""


def standard(config: Mapping[str, Any]) -> dict[str, Any]:
    """A config in the words of transformers' own class for it."""
    kind = config["model_type"]
    names = RENAMED.get(kind, {})
    found = {names.get(name, name): value for name, value in config.items()}
    found["model_type"] = STANDS_FOR.get(kind, kind)
    if kind == "phi-msft":
        found["intermediate_size"] = found.get("intermediate_size") or 4 * found["hidden_size"]
    if kind == "chatglm":
        found |= {"tie_word_embeddings": False, "pad_token_id": 0}
    if kind == "nemotron" and found.get("num_key_value_heads") is None:
        found["num_key_value_heads"] = found["num_attention_heads"]
    if kind == "step3p7" and "hidden_size" in found:
        dense = found.pop("first_k_dense_replace", 0)
        found |= {"n_routed_experts": found.pop("num_experts", None)}
        found["mlp_layer_types"] = ["dense" if index < dense else "sparse" for index in range(found["num_hidden_layers"])]
        found = {"model_type": kind, "text_config": {name: value for name, value in found.items() if name != "model_type"}}
    if isinstance(text := found.get("text_config"), Mapping) and "model_type" in text:
        found["text_config"] = standard(text)
        found["model_type"] = {"ministral3": "mistral3"}.get(kind, found["model_type"])
    return found


def plain(config: Mapping[str, Any]) -> dict[str, Any]:
    """The keys of a config.json and of its sections, storage left out: parameters are counted unquantised."""
    return {
        name: plain(value) if isinstance(value, Mapping) else value
        for name, value in config.items()
        if name not in ("quantization_config", "auto_map", "dtype", "torch_dtype")
    }


def read_config(config: Mapping[str, Any]) -> Any:
    """The configuration object of the keys of a config.json."""
    keys = plain(config)
    return CONFIG_MAPPING[keys.pop("model_type")].from_dict(keys)


def build_from(config: Any, cls: Any = AutoModelForCausalLM) -> PreTrainedModel:
    """The model of a configuration object on the meta device, in bf16 with eager attention and batched experts."""
    make = getattr(cls, "from_config", None) or cls._from_config
    with torch.device("meta"):
        model = make(config, attn_implementation="eager", dtype=torch.bfloat16)
    if hasattr(model, "set_experts_implementation"):
        model.set_experts_implementation("batched_mm")
    return model.eval()


def build(model_type: str, **config: Any) -> PreTrainedModel:
    """The causal language model of a family with the given keys of a config.json, on the meta device."""
    return build_from(read_config({"model_type": model_type, **config}))


def parameters(model: PreTrainedModel) -> int:
    """Parameters, tied ones once."""
    return sum(parameter.numel() for parameter in model.parameters())


def text_class(config: Any) -> Any:
    """The class that generates text from a text configuration, None where there is none."""
    if config.model_type == "mllama_text_model":
        return transformers.MllamaForCausalLM
    causal, spoken, translated = (getattr(modeling_auto, f"MODEL_FOR_{task}_MAPPING") for task in TASKS)
    for known in (spoken, translated) if config.is_encoder_decoder else (causal,):
        if type(config) in known:
            return known[type(config)]
    return None


def language_parameters(model: PreTrainedModel) -> int:
    """Parameters of the language model and the head inside a wrapper."""
    named = model.named_parameters()
    return sum(parameter.numel() for name, parameter in named if "language_model." in name or name.startswith("lm_head."))


def parameters_of(config: Mapping[str, Any]) -> tuple[int, int | None] | None:
    """(text parameters, all parameters) of a config.json; None for what transformers has no class for.

    All parameters only where the file has sections for other senses: a wrapper without them would be built with towers
    of its class's defaults. The outer tie_word_embeddings decides where the file has it, as in the wrapper.
    """
    config = standard(config)
    if config["model_type"] not in CONFIG_MAPPING:
        return None
    whole = read_config(config)
    text = whole.get_text_config()
    if "tie_word_embeddings" in config:
        text.tie_word_embeddings = whole.tie_word_embeddings
    cls, wrapper = text_class(text), modeling_auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING.get(type(whole), None)
    model = None if text is whole or wrapper is None else build_from(whole, wrapper)
    everything = parameters(model) if model is not None and "vision_config" in config else None
    if cls is not None:
        return parameters(build_from(text, cls)), everything
    return None if model is None else (language_parameters(model), everything)


def default_config(family: str) -> dict[str, Any] | None:
    """The default configuration of a family as it is written to a file; None where transformers has no class."""
    if family not in CONFIG_MAPPING:
        return None
    return {**CONFIG_MAPPING[family](**NO_DEFAULT.get(family, {})).to_dict(), "model_type": family}


def masks(model: PreTrainedModel, batch: int, new: int, cached: int) -> Any:
    """A 4-D additive mask (a flat one for a few old families), or one for each layer type where the family tells them apart.

    The cache of a windowed layer keeps the last W - 1 tokens, so that its mask has fewer columns.
    """
    config = model.config.get_text_config()
    if config.model_type in FLAT_MASK:
        return torch.ones(batch, cached + new, dtype=torch.long, device="meta")

    def mask(keys: int) -> torch.Tensor:
        return torch.zeros(batch, 1, new, keys + new, dtype=torch.bfloat16, device="meta")

    kinds = set(getattr(config, "layer_types", None) or [])
    if not kinds & {*WINDOWED, "linear_attention"}:
        return mask(cached)
    window = getattr(config, "sliding_window", None)
    kept = min(cached, window - 1) if window else cached
    found = {"full_attention": mask(cached), "linear_attention": None, **dict.fromkeys(WINDOWED, mask(kept))}
    return {kind: found[kind] for kind in kinds}


def count_flops(model: PreTrainedModel, batch: int, new: int, cached: int = 0) -> int:
    """FLOPs of one step: ``new`` tokens in each of ``batch`` sequences behind ``cached`` ones, which are not counted."""
    step = partial(_forward, model, batch)
    with torch.no_grad():
        past = step(cached, 0, None).past_key_values if cached else None
        with FlopCounterMode(display=False) as counter:
            step(new, cached, past)
    return int(counter.get_total_flops())


def _forward(model: PreTrainedModel, batch: int, new: int, cached: int, past: Any) -> Any:
    keys: dict[str, Any] = {"attention_mask": masks(model, batch, new, cached), "cache": past, "use_cache": True}
    if model.config.model_type not in NO_POSITIONS:
        keys["position_ids"] = (torch.arange(new, device="meta") + cached).expand(batch, new)
    return model(torch.zeros(batch, new, dtype=torch.long, device="meta"), **keys)
