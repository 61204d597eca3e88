"""The guard of the dense path: a config key that changes the architecture is read, or the model is refused by name.

A family's reader looks at its own keys only. Fine-tunes and new releases add keys to a known model_type, and a reader
that passes over "num_local_experts" returns a plausible wrong number.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from roofline.configs.config import Config
from roofline.errors import UnsupportedModel

EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts", "num_moe_experts", "n_experts")
WINDOWS = ("sliding_window", "sliding_window_size", "window_size", "attention_types")

FEATURES: dict[str, str] = {
    **dict.fromkeys(EXPERTS, "a mixture of experts"),
    **dict.fromkeys(("text_config", "llm_config", "language_config"), "a nested text model beside keys of its own"),
    "moe_layer_freq": "a mixture of experts",
    "kv_lora_rank": "multi-head latent attention",
    "q_lora_rank": "multi-head latent attention",
    "qk_rope_head_dim": "multi-head latent attention",
    **dict.fromkeys(("index_topk", "sparse_attention_config", "sparse_config", "compress_ratios"), "sparse attention"),
    **dict.fromkeys(
        (
            "layers_block_type", "block_types", "hybrid_override_pattern", "hybrid_layer_pattern", "attn_layer_period",
            "attn_layer_indices", "attn_type_list", "full_attention_interval", "full_attn_idxs",
        ),
        "a hybrid of layer kinds",
    ),
    **dict.fromkeys(("mamba_d_state", "mamba_num_heads", "ssm_cfg", "ssm_state_size", "state_size"), "a state-space mixer"),
    **dict.fromkeys(("linear_attn_config", "linear_num_value_heads", "conv_L_cache"), "linear attention"),
    **dict.fromkeys(("is_encoder_decoder", "add_cross_attention", "cross_attention_layers", "encoder_layers"), "cross-attention"),
    **dict.fromkeys(("num_kv_shared_layers", "use_cla", "kv_source_layer_ids"), "keys and values shared across layers"),
    **dict.fromkeys(WINDOWS, "windowed attention"),
    "attention_chunk_size": "chunked attention",
    "block_configs": "layers of different shape",
    "num_key_value_heads_per_layer": "layers of different shape",
    "hidden_size_per_layer_input": "per-layer embeddings",
    "altup_num_inputs": "alternating updates",
    "hc_mult": "hyper-connections",
    **dict.fromkeys(("qk_norm", "use_qk_norm", "qk_layernorm", "use_qk_layernorm"), "a norm of queries and keys"),
    **dict.fromkeys(("attn_output_gate", "use_gated_attention"), "gated attention output"),
    **dict.fromkeys(("attention_sinks", "use_attention_sinks", "add_swa_attention_sink_bias"), "attention sinks"),
    **dict.fromkeys(("parallel_attn", "use_parallel_residual", "new_decoder_architecture"), "parallel residual blocks"),
    **dict.fromkeys(
        (
            "attention_bias", "qkv_bias", "use_qkv_bias", "add_qkv_bias", "attention_out_bias", "mlp_bias", "add_bias_linear",
            "use_bias",
        ),
        "biases",
    ),
    "multi_query": "multi-query attention",
    "position_encoding_2d": "two-dimensional positions",
    "no_rope_layers": "layers without rotary embedding",
    "pruned_heads": "pruned heads",
}  # fmt: skip
"""Config key -> the feature that it switches on."""

LAYER_KINDS = ("full_attention", "sliding_attention")
HEADLESS = ("Classification", "RewardModel", "QuestionAnswering")
EXTRA_LAYERS = ("num_nextn_predict_layers", "mtp_num_layers", "num_mtp_layers", "mtp_num_hidden_layers", "num_mtp_modules")


def _active(key: str, value: Any) -> bool:
    """Whether a value switches its feature on: not null, false, 0, empty; for experts, more than one."""
    if key in EXPERTS:
        many = value if isinstance(value, list) else [value]
        return any(number not in (None, False, 0, 1, "", {}) for number in many)
    return value not in (None, False, 0, "", [], {})


def refuse_unread(config: Config, family: str, reads: Iterable[str], *, windows: bool) -> Config:
    """The config without the feature keys that the reader does not read; all of them must be switched off.

    Raises UnsupportedModel naming the family, the feature and the key where one is switched on.

    Args:
        config: the text section.
        family: for the message.
        reads: feature keys that the reader takes into account.
        windows: whether it reads sliding windows, ``layer_types`` of that kind included.
    """
    known = set(reads)
    if windows or config.get("use_sliding_window") is False:
        known.update(WINDOWS)
    for key, feature in FEATURES.items():
        if key not in known and _active(key, config.data.get(key)):
            raise UnsupportedModel(
                f"{family}: {feature} ({config.where}{key} = {config.data[key]!r:.40}) is not supported in this family"
            )
    for kind in config.items("layer_types") or []:
        if kind not in LAYER_KINDS[: 2 if windows else 1]:
            raise UnsupportedModel(
                f"{family}: layers of type {kind!r:.40} ({config.where}layer_types) are not supported in this family"
            )
    for architecture in config.items("architectures") or []:
        if isinstance(architecture, str) and any(word in architecture for word in HEADLESS):
            raise UnsupportedModel(
                f"{family}: {architecture:.60} has no language-model head; only models that generate are supported"
            )
    unread = FEATURES.keys() - known
    return Config({key: value for key, value in config.data.items() if key not in unread}, config.where, config.assumes)


def left_out(config: Config) -> tuple[str, ...]:
    """What the config has beside the token path: layers that predict further tokens, and towers of other senses."""
    notes = []
    for key in EXTRA_LAYERS:
        count = config.optional_size(key, least=0)
        if count:
            notes.append(f"{count} layer{'s' if count > 1 else ''} for multi-token prediction ({config.where}{key})")
    notes += [
        f"{sense} tower ({sense}_config)" for sense in ("vision", "audio") if isinstance(config.get(f"{sense}_config"), Mapping)
    ]
    return tuple(notes)
