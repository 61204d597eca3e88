"""Parameters and windows of every dense family equal those of transformers, for its defaults and for random variants.

A variant draws sizes and every key that changes a family's shape: biases, norms of queries and keys, heads, tying,
parallel blocks, windows, narrow embeddings.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest

from roofline.components.attention import AttentionBlock
from roofline.configs.load import load_model
from roofline.configs.styles import STYLES
from roofline.model import Model

pytestmark = pytest.mark.oracle

VARIANTS = 5
ELSEWHERE = {
    "aquila", "baichuan", "chatglm", "internlm", "internlm2", "mimo", "minicpm", "nemotron-nas", "orion", "phi-msft", "qwen",
    "xverse", "Dream", "qwen3_vl_text",
}  # fmt: skip
"""Families whose code is published beside their weights, and text models of wrappers: transformers builds none of them."""

Draw = random.Random
Config = dict[str, Any]


def flip(draw: Draw) -> bool:
    return draw.random() < 0.5


def heads(draw: Draw) -> tuple[int, int]:
    """(query heads, key-value heads)."""
    many = draw.choice([2, 4, 6, 8])
    return many, draw.choice([few for few in (1, 2, 3, 4, 6, 8) if many % few == 0])


def usual(draw: Draw) -> Config:
    """Sizes under the names of Llama."""
    many, few = heads(draw)
    return {
        "hidden_size": many * draw.choice([16, 32]), "intermediate_size": draw.choice([64, 96]),
        "num_hidden_layers": draw.randint(1, 5), "num_attention_heads": many, "num_key_value_heads": few,
        "vocab_size": draw.choice([100, 257]), "max_position_embeddings": 128, "tie_word_embeddings": flip(draw),
        "pad_token_id": 0, "bos_token_id": 0, "eos_token_id": 0,
    }  # fmt: skip


def flags(*names: str) -> Callable[[Draw], Config]:
    return lambda draw: {name: flip(draw) for name in names}


def head_dim(draw: Draw) -> Config:
    return {"head_dim": draw.choice([16, 32, 48])}


def window(draw: Draw) -> Config:
    return {"sliding_window": draw.choice([None, 16])}


def switched_window(draw: Draw) -> Config:
    return {"use_sliding_window": flip(draw), "sliding_window": 16, "max_window_layers": draw.randint(0, 4)}


def mha(draw: Draw) -> Config:
    return {"num_key_value_heads": None}


def equal_biases(draw: Draw) -> Config:
    """InternLM3 in transformers wants both alike."""
    found = flip(draw)
    return {"qkv_bias": found, "bias": found}


def gpt(draw: Draw) -> Config:
    """Sizes under the names of GPT-2, in place of the usual ones."""
    many, _ = heads(draw)
    return {
        **dict.fromkeys(usual(draw)), "n_embd": 16 * many, "n_head": many, "n_layer": draw.randint(1, 4), "n_positions": 64,
        "vocab_size": 101, "n_inner": draw.choice([None, 80]), "tie_word_embeddings": flip(draw),
    }  # fmt: skip


def gpt_neo(draw: Draw) -> Config:
    many, _ = heads(draw)
    return {
        **mha(draw), "num_hidden_layers": None, "num_attention_heads": None, "hidden_size": 16 * many, "num_layers": 4,
        "num_heads": many, "attention_types": [[["global", "local"], 2]], "window_size": 16,
    }  # fmt: skip


def falcon(draw: Draw) -> Config:
    many, few = heads(draw)
    found = {
        "num_key_value_heads": None, "intermediate_size": None, "num_attention_heads": many, "hidden_size": 16 * many,
        "num_ln_in_parallel_attn": draw.choice([None, 1, 2]), "ffn_hidden_size": draw.choice([None, 70]),
        **flags("alibi", "bias", "multi_query", "parallel_attn", "new_decoder_architecture")(draw),
    }  # fmt: skip
    return {**found, "num_kv_heads": few} if found["new_decoder_architecture"] else found


def bloom(draw: Draw) -> Config:
    return {**mha(draw), "intermediate_size": None}


def opt(draw: Draw) -> Config:
    switches = flags("do_layer_norm_before", "enable_bias", "layer_norm_elementwise_affine", "_remove_final_layer_norm")
    return {
        **mha(draw), "intermediate_size": None, "ffn_dim": 70, "word_embed_proj_dim": draw.choice([None, 24]), **switches(draw),
    }  # fmt: skip


def mpt(draw: Draw) -> Config:
    many, _ = heads(draw)
    return {
        **dict.fromkeys(usual(draw)),
        "d_model": 16 * many,
        "n_heads": many,
        "n_layers": 2,
        "vocab_size": 77,
        "expansion_ratio": 4,
    }


def xglm(draw: Draw) -> Config:
    many, _ = heads(draw)
    sizes = {"d_model": 16 * many, "attention_heads": many, "num_layers": 2, "ffn_dim": 70}
    return {**dict.fromkeys(usual(draw)), **sizes, "vocab_size": 77, "tie_word_embeddings": flip(draw)}


def square_heads(draw: Draw) -> Config:
    """Helium's output projection is D x D."""
    return {"num_attention_heads": 4, "num_key_value_heads": 2, "hidden_size": 64, "head_dim": 16}


def rotary_dim(draw: Draw) -> Config:
    return {"rotary_dim": 8}


ATTENTION, ALL = flags("attention_bias"), flags("attention_bias", "mlp_bias")

DRAWN: dict[str, tuple[Callable[[Draw], Config], ...]] = {
    "llama": (head_dim, ALL), "arcee": (head_dim, ALL), "iquestcoder": (head_dim, ALL), "granite": (ALL,), "exaone": (head_dim,),
    "apertus": (ATTENTION,), "jais2": (head_dim, ALL), "mistral": (head_dim, window), "ministral": (head_dim, window),
    "ministral3": (head_dim, window), "qwen2": (switched_window,), "qwen3": (head_dim, ATTENTION, switched_window),
    "gemma": (head_dim, ATTENTION), "phi": (flags("qk_layernorm"),), "phi3": (window,), "gpt2": (gpt,), "gptj": (gpt, rotary_dim),
    "codegen": (gpt, rotary_dim), "gpt_bigcode": (gpt, flags("multi_query")), "gpt_neo": (gpt_neo,),
    "gpt_neox": (mha, flags("use_parallel_residual", "attention_bias")), "falcon": (falcon,), "bloom": (bloom,), "opt": (opt,),
    "mpt": (mpt,), "stablelm": (flags("use_qkv_bias", "qk_layernorm", "use_parallel_residual"),),
    "starcoder2": (window, flags("use_bias")), "olmo": (ATTENTION,), "olmo2": (ATTENTION,),
    "cohere": (ATTENTION, flags("use_qk_norm")), "glm": (head_dim, ATTENTION), "glm4": (head_dim, ATTENTION),
    "nemotron": (head_dim, ALL), "smollm3": (ALL,), "seed_oss": (head_dim, ALL, flags("attention_out_bias")),
    "helium": (square_heads, ALL), "ernie4_5": (head_dim, flags("use_bias")), "hunyuan_v1_dense": (head_dim, ATTENTION),
    "internlm3": (head_dim, equal_biases), "persimmon": (mha, flags("qk_layernorm")), "xglm": (xglm,),
    "cwm": (head_dim, flags("mlp_bias"), lambda draw: {"sliding_window": 16}),
    "hyperclovax": (head_dim, ALL, flags("use_post_norm")),
}  # fmt: skip
PATTERNED = {"cohere2", "exaone4", "gemma2", "gemma3_text", "olmo3", "vaultgemma"}
"""Families of layer patterns: their defaults are compared here, their patterns in ``test_patterns``."""


def variant(family: str, seed: int) -> Config:
    """A small config of a family; None leaves a key out."""
    draw = random.Random(f"{family} {seed}")
    keys = usual(draw)
    for change in DRAWN[family]:
        keys |= change(draw)
    if draw.random() < 0.25:
        keys["tie_word_embeddings"] = None
    return {key: value for key, value in keys.items() if value is not None or key == "sliding_window"}


def windowed(model: Model) -> list[bool]:
    """Which layers see a window."""
    blocks = [block for layer in model.layers for block in layer.blocks if isinstance(block, AttentionBlock)]
    return [block.mask == "window" for block in blocks]


def windowed_in(config: Any) -> list[bool]:
    """The same as transformers' configuration tells it."""
    kinds = getattr(config, "layer_types", None) or getattr(config, "attention_layers", None)
    if kinds:
        return [kind in ("sliding_attention", "local") for kind in kinds]
    return [getattr(config, "sliding_window", None) is not None] * config.num_hidden_layers


@pytest.mark.parametrize("seed", range(VARIANTS))
@pytest.mark.parametrize("family", DRAWN)
def test_variants_equal_those_of_transformers(meta: ModuleType, family: str, seed: int) -> None:
    keys = variant(family, seed)
    built = meta.build(family, **keys)
    ours = load_model({"model_type": family, **keys})
    assert ours.params == meta.parameters(built)
    assert windowed(ours) == windowed_in(built.config)


NEEDS = {
    "hunyuan_v1_dense": {"head_dim": 128}, "nemotron": {"num_key_value_heads": 48}, "gpt_neo": {"num_hidden_layers": 24},
    "ministral": {"head_dim": 128},
}  # fmt: skip
"""Keys without which the class of transformers fails on its own defaults."""


@pytest.mark.parametrize("family", sorted(set(STYLES) - ELSEWHERE))
def test_defaults_equal_those_of_transformers(meta: ModuleType, family: str) -> None:
    keys = {"num_hidden_layers": 6, **NEEDS.get(family, {})}
    built = meta.build(family, **keys)
    assert load_model({**built.config.to_dict(), "model_type": family}).params == meta.parameters(built)


def test_every_family_is_drawn() -> None:
    assert set(DRAWN) | ELSEWHERE | PATTERNED == set(STYLES)
