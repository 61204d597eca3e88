"""Matrix FLOPs and parameters of dense decoders equal those of transformers on the meta device, integer for integer.

transformers' eager attention computes the whole rectangle of T (S + T) scores per head and masks it afterwards; the model
counts the causal pairs, S T + T (T + 1) / 2. The masked rest is added here by its formula. Every size of a case differs
from every other, so that no two can be swapped unnoticed.
"""

from __future__ import annotations

from dataclasses import dataclass
from types import ModuleType
from typing import Any

import pytest

from roofline.configs.load import load_model
from roofline.work import Work

pytestmark = pytest.mark.oracle

STEPS = {
    "prefill": Work(5, 7, 0, all_logits=True),
    "decode": Work(5, 1, 11, all_logits=True),
    "chunk": Work(5, 9, 13, all_logits=True),
}


@dataclass(frozen=True)
class Case:
    """A family at a small size.

    Attributes:
        D, N, H, L: as in the alphabet of the field; the other sizes stand in ``config`` alone.
        config: the keys of a config.json.
        distinct: all sizes, for the test that they are.
    """

    config: dict[str, Any]
    D: int
    N: int
    H: int
    L: int
    distinct: tuple[int, ...]


def standard(family: str, *, D: int = 48, N: int = 6, K: int = 2, H: int = 8, F: int = 76, L: int = 3, **more: Any) -> Case:
    """A config in the keys of Llama. H goes into the config only where it is not D / N."""
    config = {
        "model_type": family, "hidden_size": D, "num_attention_heads": N, "num_key_value_heads": K, "intermediate_size": F,
        "num_hidden_layers": L, "vocab_size": 101, "tie_word_embeddings": False, **more,
    }  # fmt: skip
    if D != N * H:
        config["head_dim"] = H
    heads = {N, K}
    return Case(config, D, N, H, L, (D, *heads, H, F, L, 101))


def old(family: str, *, D: int = 48, N: int = 4, L: int = 3, V: int = 103, F: int = 0, **more: Any) -> Case:
    """A family with as many key-value heads as query heads, or one; sizes under the keys that ``more`` gives."""
    return Case({"model_type": family, **more}, D, N, D // N, L, (D, N, D // N, L, V, *((F,) if F else ())))


QWEN3 = {"D": 40, "N": 6, "K": 3, "H": 14, "F": 68, "L": 2}
WIDE = {"D": 36, "N": 6, "K": 2, "H": 16, "F": 92}
GPT2 = {"n_embd": 48, "n_head": 4, "n_layer": 3, "vocab_size": 103, "n_positions": 64}
FALCON = {
    "hidden_size": 48, "num_attention_heads": 4, "num_hidden_layers": 3, "vocab_size": 103, "ffn_hidden_size": 212,
    "alibi": False,
}  # fmt: skip
NEOX = {"hidden_size": 48, "num_attention_heads": 4, "num_hidden_layers": 3, "vocab_size": 103, "intermediate_size": 212}

CASES = {
    "llama-gqa": standard("llama"),
    "llama-biases-tied": standard("llama", attention_bias=True, mlp_bias=True, tie_word_embeddings=True),
    "llama-head-dim": standard("llama", **WIDE),
    "mistral": standard("mistral", sliding_window=None),
    "qwen2": standard("qwen2", use_sliding_window=False),
    "qwen3-head-dim-qk-norm": standard("qwen3", **QWEN3, use_sliding_window=False),
    "gemma-mqa": standard("gemma", D=36, N=6, K=1, H=16, F=92, tie_word_embeddings=True),
    "phi-partial-rotary": standard("phi", K=6, partial_rotary_factor=0.5),
    "phi3-fused": standard("phi3", pad_token_id=0, sliding_window=None),
    "starcoder2-plain-mlp": standard("starcoder2", sliding_window=None),
    "stablelm": standard("stablelm", use_qkv_bias=True),
    "stablelm-parallel-qk-norm": standard("stablelm", use_parallel_residual=True, qk_layernorm=True),
    "olmo": standard("olmo", clip_qkv=None),
    "olmo2": standard("olmo2"),
    "cohere": standard("cohere", use_qk_norm=False, tie_word_embeddings=True),
    "granite": standard("granite"),
    "nemotron-relu2": standard("nemotron", **WIDE),
    "glm": standard("glm", **WIDE, pad_token_id=0, attention_bias=True),
    "glm4": standard("glm4", **WIDE, pad_token_id=0),
    "helium": standard("helium", head_dim=8),
    "seed_oss": standard("seed_oss", **WIDE),
    "arcee": standard("arcee"),
    "apertus": standard("apertus"),
    "ernie4_5": standard("ernie4_5", **WIDE, use_bias=True),
    "hunyuan": standard("hunyuan_v1_dense", **WIDE),
    "smollm3": standard("smollm3", pad_token_id=0),
    "gpt2-biases": old("gpt2", F=132, **GPT2, n_inner=132),
    "gpt_bigcode-mqa": old("gpt_bigcode", F=132, **GPT2, n_inner=132, multi_query=True),
    "gptj": old("gptj", F=132, **GPT2, n_inner=132, rotary_dim=4),
    "gpt_neox": old("gpt_neox", F=212, **NEOX),
    "falcon-mqa-parallel": old("falcon", F=212, **FALCON, multi_query=True, parallel_attn=True, bias=False),
    "falcon-grouped": old(
        "falcon", F=212, **FALCON, new_decoder_architecture=True, num_kv_heads=2, parallel_attn=True, bias=True
    ),
    "bloom-alibi": old("bloom", hidden_size=48, n_head=4, n_layer=3, vocab_size=103),
    "opt-learned-positions": old(
        "opt", F=212, hidden_size=48, num_attention_heads=4, num_hidden_layers=3, vocab_size=103, ffn_dim=212,
        word_embed_proj_dim=48, max_position_embeddings=64,
    ),
    "mpt-alibi": old("mpt", d_model=48, n_heads=4, n_layers=3, vocab_size=103, expansion_ratio=4),
}  # fmt: skip


def masked_flops(case: Case, work: Work) -> int:
    """FLOPs on scores that the causal mask throws away: 4 B N H L (T (S + T) - pairs)."""
    pairs = work.S * work.T + work.T * (work.T + 1) // 2
    return 4 * work.B * case.N * case.H * case.L * (work.T * (work.S + work.T) - pairs)


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_sizes_are_pairwise_distinct(case: Case) -> None:
    for work in STEPS.values():
        sizes = [size for size in (*case.distinct, work.B, work.T, work.S) if size != 1]
        assert len(set(sizes)) == len(sizes)


@pytest.mark.parametrize("work", STEPS.values(), ids=STEPS)
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_flops_equal_the_count_of_transformers(meta: ModuleType, case: Case, work: Work) -> None:
    counted = meta.count_flops(meta.build(**case.config), work.B, work.T, work.S)
    assert counted == load_model(case.config).cost(work).matrix_flops + masked_flops(case, work)


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_parameters_equal_those_of_transformers(meta: ModuleType, case: Case) -> None:
    assert load_model(case.config).params == meta.parameters(meta.build(**case.config))
