"""Layer patterns: which layer has a window, what the cache costs, and the limits where a pattern disappears."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from roofline.components.attention import AttentionBlock
from roofline.configs.config import Config
from roofline.configs.load import load_model
from roofline.configs.patterns import masks_of, rotary_layers
from roofline.errors import InputError, UnsupportedModel
from roofline.model import Layer, Model
from roofline.work import Work

F, W = ("causal", None), ("window", 512)
SLIDING, FULL = "sliding_attention", "full_attention"

CACHES = {
    "gemma-2-9b": (2113929216, 6341787648, 23253221376),
    "gemma-3-27b-it": (1107296256, 3120562176, 11173625856),
    "gemma-3-12b-it": (872415232, 2483027968, 8925478912),
    "gemma-3-1b-it": (45088768, 145752064, 548405248),
    "gpt-oss-120b": (306708480, 1212678144, 4836556800),
    "gpt-oss-20b": (204472320, 808452096, 3224371200),
    "mistral-7b-v0.1": (536870912, 536870912, 536870912),
    "llama-4-scout-17b-16e": (1610612736, 2818572288, 7650410496),
}
"""Bytes of bf16 cache of one sequence of 8192, 32768 and 131072 tokens: 2 K H b (full S + windowed min(S, W)) over layers."""

CLA = {
    "MHA, H 128": (16, 128, tuple(range(20)), 163840),
    "GQA-4": (4, 128, tuple(range(20)), 40960),
    "MQA": (1, 128, tuple(range(20)), 10240),
    "MQA, CLA2, H 512": (1, 512, tuple(range(0, 20, 2)), 20480),
    "MQA, CLA2, H 128": (1, 128, tuple(range(0, 20, 2)), 5120),
    "GQA-4, CLA2, H 256": (4, 256, tuple(range(0, 20, 2)), 40960),
    "GQA-2, CLA2": (2, 128, tuple(range(0, 20, 2)), 10240),
    "MQA, CLA3": (1, 128, tuple(range(0, 20, 3)), 3584),
    "MQA, CLA4": (1, 128, tuple(range(0, 20, 4)), 2560),
    "MQA, CLA2, KeepEnds": (1, 128, (0, 1, *range(3, 19, 2), 19), 5632),
}
"""Brandon et al. 2024 (arXiv 2405.12981), 1B models of 20 layers: key-value heads, head dimension, layers that own keys,
bytes of 16-bit cache per token."""


def text(**keys: object) -> Config:
    return Config(keys)


@pytest.mark.parametrize(
    ("config", "period", "expected"),
    [
        (text(), None, [F, F, F, F]),
        (text(sliding_window=512), None, [W, W, W, W]),
        (text(sliding_window=None), None, [F, F, F, F]),
        (text(sliding_window=512, use_sliding_window=False), None, [F, F, F, F]),
        (text(sliding_window=512, max_window_layers=2), None, [F, F, F, F]),
        (text(sliding_window=512, use_sliding_window=True, max_window_layers=2), None, [F, F, W, W]),
        (text(sliding_window=512), 2, [W, F, W, F]),
        (text(sliding_window=512), 3, [W, W, F, W]),
        (text(sliding_window=512, sliding_window_pattern=4), 2, [W, W, W, F]),
        (text(sliding_window=512, sliding_window_pattern="LG"), 4, [W, F, W, F]),
        (text(sliding_window=None, sliding_window_pattern="LG"), 4, [F, F, F, F]),
        (text(sliding_window=512, layer_types=[FULL, SLIDING, FULL, FULL]), 2, [F, W, F, F]),
        (text(attention_types=[[["global", "local"], 2]], window_size=512), None, [F, W, F, W]),
        (text(attention_chunk_size=64), None, [("chunk", 64)] * 3 + [F]),
        (text(attention_chunk_size=64, no_rope_layers=[0, 1, 1, 0]), None, [F, ("chunk", 64), ("chunk", 64), F]),
        (text(attention_chunk_size=64, no_rope_layers=[]), None, [("chunk", 64)] * 3 + [F]),
    ],
)
def test_masks_follow_the_keys(config: Config, period: int | None, expected: list[object]) -> None:
    assert masks_of(config, 4, period) == expected


def test_an_assumed_period_is_noted_and_a_stated_one_is_not() -> None:
    silent, stated = text(sliding_window=512), text(sliding_window=512, sliding_window_pattern=6)
    masks_of(silent, 6, 6)
    masks_of(stated, 6, 6)
    assert silent.assumes == ["layer_types: one layer in 6 is full attention, the others see sliding_window"]
    assert stated.assumes == []


def test_layers_without_rotation_are_every_fourth_unless_listed() -> None:
    assert rotary_layers(text(no_rope_layer_interval=4), 5) == [True, True, True, False, True]
    assert rotary_layers(text(no_rope_layers=[1, 0, 1]), 3) == [True, False, True]


@pytest.mark.parametrize(
    ("config", "error", "words"),
    [
        (text(layer_types=[FULL]), InputError, "layer_types has 1 entries for 4 layers"),
        (text(layer_types=[FULL, SLIDING, FULL, FULL]), InputError, "sliding_window"),
        (text(layer_types=["mamba"] * 4), UnsupportedModel, "'mamba' layers"),
        (text(sliding_window=512, sliding_window_pattern="LLX"), InputError, "letters L and G"),
        (text(attention_types=[[["global"], 3]]), InputError, "3 entries for 4 layers"),
        (text(sliding_window="wide"), InputError, "sliding_window must be a whole number"),
    ],
)
def test_bad_patterns_are_refused_by_key(config: Config, error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        masks_of(config, 4, 2 if "sliding_window_pattern" in config else None)


@pytest.mark.parametrize("name", CACHES)
def test_cache_of_hybrids_at_three_lengths(name: str) -> None:
    model = load_model(name)
    assert tuple(2 * model.state_bytes(S) // 2 for S in (8192, 32768, 131072)) == CACHES[name]


@pytest.mark.parametrize(
    ("name", "windowed", "full"),
    [
        ("gemma-2-9b", 21, 21), ("gemma-2-27b", 23, 23), ("gemma-3-1b-it", 22, 4), ("gemma-3-4b-it", 29, 5),
        ("gemma-3-12b-it", 40, 8), ("gemma-3-27b-it", 52, 10), ("gpt-oss-20b", 12, 12), ("gpt-oss-120b", 18, 18),
        ("llama-4-scout-17b-16e", 36, 12), ("gemma-4-26b-a4b", 25, 5), ("mimo-v2-flash", 39, 9),
    ],
)  # fmt: skip
def test_windowed_and_full_layers(name: str, windowed: int, full: int) -> None:
    masks = [block.mask for layer in load_model(name).layers for block in layer.blocks if isinstance(block, AttentionBlock)]
    assert (len([m for m in masks if m != "causal"]), masks.count("causal")) == (windowed, full)


@given(st.integers(1, 5), st.integers(1, 40), st.integers(0, 200), st.integers(0, 50))
def test_a_window_that_reaches_everything_is_full_attention(B: int, T: int, S: int, more: int) -> None:
    block = AttentionBlock(24, 6, 2, 8, rotary=8)
    work = Work(B, T, S)
    wide = replace(block, mask="window", size=S + T + more)
    chunk = replace(block, mask="chunk", size=S + T + more)
    assert wide.cost(work) == block.cost(work) == chunk.cost(work)
    assert wide.state()[0].bytes(S + T) == block.state()[0].bytes(S + T)


def layers_owning(owners: tuple[int, ...], count: int, block: AttentionBlock) -> Model:
    layers = tuple(Layer((replace(block, shares_kv=index not in owners),)) for index in range(count))
    return Model("shared", (), layers, (), ())


@pytest.mark.parametrize("name", CLA)
def test_cross_layer_attention_of_the_paper(name: str) -> None:
    K, H, owners, per_token = CLA[name]
    model = layers_owning(owners, 20, AttentionBlock(2048, 16, K, H))
    assert model.kv_bytes_per_token == per_token


@given(st.integers(1, 40), st.integers(1, 12))
def test_sharing_by_s_leaves_ceil_l_over_s_caches(L: int, s: int) -> None:
    block = AttentionBlock(24, 6, 2, 8)
    model = layers_owning(tuple(range(0, L, s)), L, block)
    assert model.kv_bytes_per_token == 2 * 2 * 8 * 2 * -(-L // s)
    unshared = layers_owning(tuple(range(L)), L, block)
    assert model.params == unshared.params - (L - -(-L // s)) * 24 * 2 * 2 * 8
    work = Work(3, 2, 17)
    assert model.cost(work).read["state"] == unshared.cost(work).read["state"]
    if s == 1:
        assert model.cost(work) == unshared.cost(work)
        assert model == unshared


def test_gemma_3n_shares_the_keys_of_its_last_fifteen_layers() -> None:
    model = load_model("gemma-3n-e4b")
    assert model.params == 6835235568
    owners = [layer for layer in model.layers if layer.state()]
    assert len(owners) == 20
    assert model.kv_bytes_per_token == 20 * 2 * 2 * 256 * 2


def test_rotation_stops_where_the_family_stops_it() -> None:
    config = {
        "model_type": "cohere2", "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 8, "num_attention_heads": 4,
        "num_key_value_heads": 2, "vocab_size": 100, "sliding_window": 16, "tie_word_embeddings": True,
    }  # fmt: skip
    blocks = [b for layer in load_model(config).layers for b in layer.blocks if isinstance(b, AttentionBlock)]
    assert [b.rotary for b in blocks] == [16, 16, 16, 0] * 2
    llama4 = load_model("llama-4-scout-17b-16e")
    turned = [b for layer in llama4.layers for b in layer.blocks if isinstance(b, AttentionBlock)]
    assert [bool(b.rotary) for b in turned[:8]] == [True, True, True, False] * 2
    assert [b.qk_norm for b in turned[:4]] == ["bare", "bare", "bare", ""]
