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
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

WINDOWED = ("sliding_attention", "chunked_attention", "compressed_sparse_attention", "heavily_compressed_attention")
"""Layers whose mask covers a window; DeepSeek-V4's compressed ones add the columns of their entries themselves."""
NO_POSITIONS = ("bloom", "mpt", "opt")
"""Families whose forward takes no position_ids."""
FLAT_MASK = ("bloom", "opt")
"""Families that derive positions from the mask, which must then name tokens."""


def read_config(config: Mapping[str, Any]) -> Any:
    """The configuration object of the keys of a config.json, storage left out: parameters are counted unquantised."""
    keys = {name: value for name, value in config.items() if name not in ("quantization_config", "auto_map", "dtype")}
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
