"""Which reader reads which model_type: the one table to extend for a new family."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

from roofline.configs.styles import STYLES
from roofline.configs.unsupported import UNSUPPORTED
from roofline.errors import UnsupportedModel, suggest

LATENT = ("deepseek_v2", "deepseek_v3", "kimi_k2", "deepseek_v32", "glm_moe_dsa", "glm4_moe_lite")
SPARSE = (
    "mixtral", "qwen2_moe", "qwen3_moe", "olmoe", "flex_olmo", "phimoe", "granitemoe", "granitemoeshared", "glm4_moe",
    "ernie4_5_moe", "hunyuan_v1_moe", "minimax_m2", "gpt_oss", "cohere2_moe", "qwen3_vl_moe_text",
)  # fmt: skip
FIXED_STATE = {
    "mamba:read_mamba": ("mamba", "falcon_mamba"),
    "mamba:read_mamba2": ("mamba2",),
    "mamba:read_jamba": ("jamba",),
    "mamba:read_bamba": ("bamba",),
    "mamba:read_granite": ("granitemoehybrid",),
    "mamba:read_falcon_h1": ("falcon_h1",),
    "zamba:read_zamba2": ("zamba2",),
    "nemotron:read_nemotron_h": ("nemotron_h",),
    "delta:read_gated_delta": ("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text"),
    "delta:read_olmo_hybrid": ("olmo_hybrid",),
    "kimi:read_kimi_linear": ("kimi_linear",),
    "fixed_state:read_recurrent_gemma": ("recurrent_gemma",),
    "rwkv:read_rwkv": ("rwkv",),
    "rwkv:read_rwkv7": ("rwkv7",),
    "fixed_state:read_lfm2": ("lfm2", "lfm2_moe"),
    "fixed_state:read_minimax": ("minimax", "minimax_text_01", "minimax_m1"),
}

WRAPPED = (
    "llava", "gemma3", "gemma4", "llama4", "mistral3", "mllama", "lfm2_vl", "kimi_k25", "kimi_k3",
    "minimax_m3_vl", "qwen3_vl", "qwen3_vl_moe", "qwen3_5", "qwen3_5_moe",
)  # fmt: skip

READERS: dict[str, str] = {
    **dict.fromkeys(STYLES, "decoder:read_dense"),
    **dict.fromkeys(LATENT, "deepseek:read_latent"),
    **dict.fromkeys(SPARSE, "moe:read_moe"),
    **dict.fromkeys(WRAPPED, "multimodal:read_wrapper"),
    "dbrx": "moe:read_dbrx",
    "whisper": "encoder_decoder:read_whisper",
    **dict.fromkeys(("bart", "mbart"), "encoder_decoder:read_bart"),
    **dict.fromkeys(("t5", "mt5"), "encoder_decoder:read_t5"),
    "mllama_text_model": "encoder_decoder:read_mllama_text",
    "gemma3n_text": "gemma:read_gemma3n",
    "gemma4_text": "gemma:read_gemma4",
    "llama4_text": "moe_mixed:read_llama4",
    "mimo_v2_flash": "moe_mixed:read_mimo_v2",
    "hunyuan": "hunyuan:read_hunyuan",
    **dict.fromkeys(("minimax_m3", "minimax_m3_vl_text"), "minimax:read_minimax_m3"),
    "step3p5": "moe_mixed:read_step",
    "step3p7": "moe_mixed:read_step",
    **{family: reader for reader, families in FIXED_STATE.items() for family in families},
    **dict.fromkeys(("deepseek_v4", "deepseek_ref"), "deepseek_v4:read_compressed"),
    "llada": "diffusion:read_llada",
    "Dream": "diffusion:read_dream",
    "llada2_moe": "diffusion:read_llada2",
}
"""model_type -> "module:function" under ``roofline.configs.readers``; the module is imported when its family is met."""


def reader_of(kind: str, nested: bool = False) -> Callable[..., Any]:
    """The reader of a model_type: (config, storage, name) -> Model.

    ``nested``: the text model's keys stand in a section of their own, whatever the model_type at the top says.
    Raises UnsupportedModel naming the family or the feature.
    """
    if kind in UNSUPPORTED and kind not in READERS and not nested:
        raise UnsupportedModel(f"{kind}: {UNSUPPORTED[kind]} is not supported yet")
    if kind not in READERS and not nested:
        raise UnsupportedModel(f"{kind}: this model family is not supported.{suggest(kind, READERS)}")
    module, function = ("multimodal:read_wrapper" if nested else READERS[kind]).split(":")
    reader: Callable[..., Any] = getattr(importlib.import_module(f"roofline.configs.readers.{module}"), function)
    return reader
