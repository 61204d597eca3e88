"""Encoder-decoders: totals, and that keys and values of the source are paid once per request, not once per step."""

from __future__ import annotations

import pytest

from roofline.components.cross_attention import CrossAttention, SourceKeys
from roofline.configs.load import load_model
from roofline.errors import InputError
from roofline.model import Model
from roofline.work import Work

COUNTS = {
    "whisper-large-v3": 1543490560,
    "t5-small": 60506624,
    "t5-large": 737668096,
    "llama-3.2-11b-vision": 9775192080,
    "llama-3.2-90b-vision": 87666865192,
}
"""Parameters of transformers 5.24 classes on the meta device (Llama 3.2 Vision: its text model)."""

BART = {
    "model_type": "bart", "d_model": 1024, "encoder_layers": 12, "decoder_layers": 12, "encoder_attention_heads": 16,
    "decoder_attention_heads": 16, "encoder_ffn_dim": 4096, "decoder_ffn_dim": 4096, "max_position_embeddings": 1024,
    "vocab_size": 50265, "tie_word_embeddings": True,
}  # fmt: skip


def test_totals() -> None:
    assert {name: load_model(name).params for name in COUNTS} == COUNTS
    assert load_model(BART).params == 406291456


def test_mbart_moves_its_norms_and_adds_two() -> None:
    assert load_model({**BART, "model_type": "mbart"}).params == 406291456 + 2 * 2 * 1024


def test_a_t5_that_does_not_tie_stores_a_head() -> None:
    config = {
        "model_type": "t5", "d_model": 512, "d_kv": 64, "d_ff": 2048, "num_layers": 6, "num_heads": 8, "vocab_size": 32128,
        "relative_attention_num_buckets": 32,
    }  # fmt: skip
    assert load_model({**config, "tie_word_embeddings": False}).params == 60506624 + 32128 * 512
    gated = load_model({**config, "tie_word_embeddings": True, "feed_forward_proj": "gated-gelu"})
    assert gated.params == 60506624 + 12 * 512 * 2048


def encoded(model: Model) -> int:
    assert model.encoder is not None
    return sum(sum(c.params().values()) for c in model.encoder.after if isinstance(c, SourceKeys))


@pytest.mark.parametrize(
    ("name", "per_token", "per_source"),
    [
        ("whisper-large-v3", 32 * 2 * 1280 * 2, 32 * 2 * 1280 * 2),
        ("t5-small", 6 * 2 * 512 * 4, 6 * 2 * 512 * 4),
        ("llama-3.2-90b-vision", 80 * 2 * 1024 * 2, 20 * 2 * 1024 * 2),
    ],
)
def test_the_cache_grows_with_the_text_and_with_the_source(name: str, per_token: int, per_source: int) -> None:
    model = load_model(name)
    base = model.state_bytes(100, 700)
    assert model.state_bytes(101, 700) - base == per_token
    assert model.state_bytes(100, 701) - base == per_source
    assert model.state_elements_per_sequence == 0


def test_growth_per_token_counts_a_source_only_where_it_is_text_of_any_length() -> None:
    assert load_model("whisper-large-v3").kv_bytes_per_token == 163840, "1500 frames do not grow"
    assert load_model("llama-3.2-90b-vision").kv_bytes_per_token == 327680, "image tokens are not text"
    assert load_model("t5-small").kv_bytes_per_token == 2 * (6 * 2 * 512 * 2), "one token on each side"


def test_whisper_hears_1500_frames() -> None:
    model = load_model("whisper-large-v3")
    assert model.encoder is not None
    assert model.encoder.tokens == 1500


def test_a_decoder_step_reads_the_source_keys_and_does_not_project_them() -> None:
    model = load_model("whisper-large-v3")
    near, far = model.cost(Work(1, 1, 8, source=1)), model.cost(Work(1, 1, 8, source=1500))
    assert far.read["state"] - near.read["state"] == 1499 * 32 * 2 * 1280 * 2
    assert far.read["weights"] == near.read["weights"]
    assert far.matrix_flops - near.matrix_flops == 1499 * 32 * 4 * 1280
    projected = encoded(model)
    assert projected == 32 * (2 * 1280 * 1280 + 1280)
    assert far.read["weights"] < 2 * (model.params - projected)


def test_encoding_pays_for_every_source_key_once() -> None:
    model = load_model("whisper-large-v3")
    assert model.encoder is not None
    cost = model.encoder.cost(Work(2, 1500))
    assert cost.write["state"] == 2 * 1500 * 32 * 2 * 1280 * 2
    D, F, L, tokens = 1280, 5120, 32, 2 * 1500
    layer = 2 * tokens * (4 * D * D + 2 * D * F) + 2 * 4 * 1500 * 1500 * D
    convolutions = 2 * (2 * tokens) * 3 * 128 * D + 2 * tokens * 3 * D * D
    keys = L * 2 * tokens * 2 * D * D
    assert cost.matrix_flops == L * layer + convolutions + keys
    self_attention = model.encoder.layers[0].blocks[1]
    assert [part.name for part in self_attention.parts] == ["q_proj", "k_proj", "v_proj", "attention", "o_proj"]
    assert self_attention.state() == ()


def test_cross_attention_of_llama_vision_sits_where_the_config_says() -> None:
    model = load_model("llama-3.2-11b-vision")
    crossed = [i for i, layer in enumerate(model.layers) if any(isinstance(b, CrossAttention) for b in layer.blocks)]
    assert crossed == [3, 8, 13, 18, 23, 28, 33, 38]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"d_model": None}, "d_model"),
        ({"decoder_layers": None}, "decoder_layers"),
        ({"encoder_attention_heads": 15}, "encoder_attention_heads 15 does not divide"),
    ],
)
def test_bad_encoder_decoders_name_the_key(change: dict[str, object], words: str) -> None:
    with pytest.raises(InputError, match=words):
        load_model({**BART, **change})
