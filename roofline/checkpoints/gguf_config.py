"""A GGUF file as the source of a model: its metadata as the keys of a config, its tensors' formats as the storage.

The keys are those that llama.cpp's convert_hf_to_gguf.py writes (``gguf.constants.Keys``), the module of a tensor is
what the library's own table of tensor names says. What the metadata leave out (biases, tied embeddings, rows of the
vocabulary) is seen in the tensors.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from roofline.checkpoints.gguf_headers import Gguf
from roofline.checkpoints.stored import missing_library
from roofline.components.linear import Embedding
from roofline.configs.storage import Storage, canonical
from roofline.configs.styles import STYLES, Flag
from roofline.edits.gguf_mix import with_vectors
from roofline.errors import InputError, UnsupportedModel, suggest
from roofline.formats import BF16, Format
from roofline.model import Model

ARCHITECTURES = {
    "llama": "llama", "mistral3": "ministral3", "qwen2": "qwen2", "qwen3": "qwen3", "gemma": "gemma", "gemma2": "gemma2",
    "gemma3": "gemma3_text", "phi3": "phi3", "gpt2": "gpt2", "starcoder2": "starcoder2", "stablelm": "stablelm",
    "command-r": "cohere", "cohere2": "cohere2", "olmo2": "olmo2", "internlm2": "internlm2", "granite": "granite",
    "glm4": "glm4", "smollm3": "smollm3", "exaone4": "exaone4", "seed_oss": "seed_oss", "arcee": "arcee",
    "qwen3moe": "qwen3_moe", "olmoe": "olmoe",
}  # fmt: skip
"""general.architecture -> model_type."""

WINDOWED = ("gemma2", "gemma3", "cohere2")
"""Architectures whose layers alternate: without the size of the window they cannot be read."""

SIZES = {
    "hidden_size": "embedding_length", "num_hidden_layers": "block_count", "num_attention_heads": "attention.head_count",
    "num_key_value_heads": "attention.head_count_kv", "head_dim": "attention.key_length",
    "intermediate_size": "feed_forward_length", "max_position_embeddings": "context_length",
    "rotary_dim": "rope.dimension_count", "num_local_experts": "expert_count", "num_experts_per_tok": "expert_used_count",
    "moe_intermediate_size": "expert_feed_forward_length", "sliding_window": "attention.sliding_window",
}  # fmt: skip
"""Key of a config -> key of the metadata, behind the architecture's name."""

BIASES = {
    "qkv_bias": ("attn_q.bias", "attn_qkv.bias"),
    "o_bias": ("attn_output.bias",),
    "mlp_bias": ("ffn_up.bias",),
    "head_bias": ("output.bias",),
    "qk_norm_if": ("attn_q_norm.weight",),
}
"""Field of a style -> tensors of the first layer that switch it on."""


def _one_number(key: str, value: Any) -> Any:
    """A value that may be given per layer, where all layers have the same."""
    if isinstance(value, list):
        if len(set(value)) != 1:
            raise UnsupportedModel(f"gguf: layers of different shape ({key} = {value!r:.60}) are not supported")
        return value[0]
    return value


def _family(gguf: Gguf) -> str:
    architecture = gguf.metadata.get("general.architecture")
    if not isinstance(architecture, str):
        raise InputError(f"gguf: {gguf.path} has no general.architecture; it says which model the tensors belong to")
    if architecture not in ARCHITECTURES:
        raise UnsupportedModel(
            f"gguf: the architecture {architecture!r:.40} is not read from GGUF.{suggest(architecture, ARCHITECTURES)} "
            "Give the config.json of the model instead"
        )
    return architecture


def _flags(family: str, gguf: Gguf) -> dict[str, bool]:
    """The keys that a family's style reads, as the tensors say."""
    style = STYLES.get(family)
    found: dict[str, bool] = {}
    for name, endings in BIASES.items():
        flag: Flag = getattr(style, name) if style is not None else False
        if isinstance(flag, bool):
            continue
        key = flag if isinstance(flag, str) else flag[0]
        present = any(f"blk.0.{ending}" in gguf.tensors or ending in gguf.tensors for ending in endings)
        found[key] = found.get(key, False) or present
    return found


def _windows(architecture: str, keys: dict[str, Any], gguf: Gguf) -> None:
    """What the metadata say of windows, in the words of a config."""
    window = keys.get("sliding_window")
    pattern = gguf.metadata.get(f"{architecture}.attention.sliding_window_pattern")
    if not window:
        keys.pop("sliding_window", None)
        if architecture in WINDOWED:
            raise InputError(f"gguf: {architecture}.attention.sliding_window is missing; it cannot be guessed")
        return
    if isinstance(pattern, list):
        keys["layer_types"] = ["sliding_attention" if local else "full_attention" for local in pattern]
    elif isinstance(pattern, int):
        keys["sliding_window_pattern"] = pattern
    keys["use_sliding_window"] = True


def as_config(gguf: Gguf) -> dict[str, Any]:
    """The metadata as the keys of a config.json.

    Raises InputError where a key is missing, UnsupportedModel for an architecture that is not read from GGUF.
    """
    architecture = _family(gguf)
    keys: dict[str, Any] = {}
    for key, name in SIZES.items():
        value = _one_number(name, gguf.metadata.get(f"{architecture}.{name}"))
        if value is not None:
            keys[key] = value
    heads, kv_heads = keys.get("num_attention_heads"), keys.get("num_key_value_heads")
    keys["num_key_value_heads"] = heads if kv_heads is None else kv_heads
    value_dim = gguf.metadata.get(f"{architecture}.attention.value_length")
    if value_dim is not None and value_dim != keys.get("head_dim", value_dim):
        raise UnsupportedModel(f"gguf: values of another width than keys ({value_dim}) are not supported")
    table = gguf.tensors.get("token_embd.weight")
    if table is None:
        raise InputError(f"gguf: {gguf.path} has no token_embd.weight; is it a language model?")
    family = ARCHITECTURES[architecture]
    _windows(architecture, keys, gguf)
    if architecture == "llama" and keys.get("num_local_experts"):
        family = "mixtral"
    elif architecture == "llama" and "sliding_window" in keys:
        family = "mistral"
    elif architecture == "olmo2" and "sliding_window" in keys:
        family = "olmo3"
    positions = gguf.tensors.get("position_embd.weight")
    if positions is not None:
        keys["n_positions"] = positions.shape[0]
    return {
        "model_type": family,
        **keys,
        "vocab_size": table.shape[0],
        "tie_word_embeddings": "output.weight" not in gguf.tensors,
        **_flags(family, gguf),
    }


def storage_of(gguf: Gguf, layers: int) -> Storage:
    """The format of every matrix, by the library's table of names."""
    try:
        from gguf import get_tensor_name_map
        from gguf.constants import MODEL_ARCH, MODEL_ARCH_NAMES
    except ModuleNotFoundError as error:
        raise missing_library("gguf", error) from None
    named = {name: architecture for architecture, name in MODEL_ARCH_NAMES.items()}
    table = get_tensor_name_map(named.get(_family(gguf), MODEL_ARCH.LLAMA), layers)
    head = gguf.format("output.weight") or gguf.format("token_embd.weight")

    def special(path: str) -> Format | None:
        name = table.get_name(canonical(path))
        if name == "output":
            return head
        return None if name is None else gguf.format(f"{name}.weight")

    return Storage(BF16, special=special)


def small_format(gguf: Gguf) -> Format:
    """The format of norms and biases: what most tensors of one dimension are stored in."""
    counts = Counter(tensor.dtype for tensor in gguf.tensors.values() if len(tensor.shape) == 1)
    if not counts:
        return BF16
    dtype = counts.most_common(1)[0][0]
    return next(gguf.format(name) or BF16 for name, t in gguf.tensors.items() if len(t.shape) == 1 and t.dtype == dtype)


def as_stored(model: Model, gguf: Gguf) -> Model:
    """The model with norms, biases, routers and the embedding in the formats of the file."""
    table = gguf.format("token_embd.weight") or BF16
    router = next((gguf.format(name) for name in gguf.tensors if name.endswith("ffn_gate_inp.weight")), None)
    edited = with_vectors(model, small_format(gguf), router)
    embedding = tuple(replace(part, weight=table) if isinstance(part, Embedding) else part for part in edited.embedding)
    return replace(edited, embedding=embedding)


def metadata_name(metadata: Mapping[str, Any], fallback: str) -> str:
    """The model's own name, else that of its file."""
    name = metadata.get("general.name")
    return name if isinstance(name, str) and name.strip() else fallback
