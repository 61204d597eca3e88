"""Wrappers: the text path is that of its own section; towers and projectors are counted exactly beside it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from roofline.configs.load import load_model, read_catalog
from roofline.errors import InputError, UnsupportedModel

CONFIGS = Path(__file__).parents[2] / "shared" / "cases" / "configs"

COUNTS = {
    "llava-1.5-7b": (6738939904, 7063427072),
    "gemma-3-4b-it": (3880263168, 4300079472),
    "gemma-3-12b-it": (11766034176, 12187325040),
    "gemma-3-27b-it": (27009346304, 27432406640),
    "gemma-4-26b-a4b": (25233141760, 25805933872),
    "llama-4-scout-17b-16e": (107769861120, 108641793536),
    "llama-3.2-11b-vision": (9775192080, 10670220835),
    "llama-3.2-90b-vision": (87666865192, 88593355323),
    "ministral-3-3b-instruct-2512": (3429006336, 3849090048),
    "qwen3-vl-2b": (1720574976, 2127532032),
    "qwen3-vl-30b-a3b": (30532122624, 31070754032),
    "qwen3-vl-235b-a22b": (235093634560, 235670022896),
}
"""(text path, with towers and projectors) of transformers 5.24 classes on the meta device."""


def entry(name: str) -> dict[str, Any]:
    config: dict[str, Any] = json.loads(json.dumps(read_catalog(name)["config"]))
    return config


@pytest.mark.parametrize("name", COUNTS)
def test_text_path_and_total(name: str) -> None:
    model = load_model(name)
    assert (model.params, model.params_total) == COUNTS[name]
    assert any("vision tower" in note or "vision encoder" in note for note in model.not_modelled)


@pytest.mark.parametrize("name", ["gemma-3-27b-it", "qwen3-vl-2b", "gemma-4-26b-a4b", "llama-4-scout-17b-16e"])
def test_the_wrapper_costs_what_its_text_section_costs(name: str) -> None:
    config = entry(name)
    text = {**config["text_config"], "tie_word_embeddings": config.get("tie_word_embeddings", name.startswith("gemma"))}
    alone, wrapped = load_model(text), load_model(config)
    assert alone.layers == wrapped.layers
    assert (alone.params, alone.tower_params) == (wrapped.params, 0)


def test_a_nearly_empty_text_section_takes_the_defaults_of_its_class_and_says_so() -> None:
    model = load_model("llava-1.5-7b")
    assert model.kv_bytes_per_token == 524288
    assert any("text_config.num_hidden_layers = 32" in note for note in model.assumes)


def test_gemma_3_as_first_published_leaves_out_heads_and_vocabulary() -> None:
    config = entry("gemma-3-4b-it")
    for key in ("num_attention_heads", "num_key_value_heads", "head_dim", "vocab_size"):
        del config["text_config"][key]
    assert load_model(config).params_total == 4300079472


def test_a_text_family_named_at_the_top_of_a_nested_config_is_still_a_wrapper() -> None:
    config = {**entry("ministral-3-3b-instruct-2512"), "model_type": "ministral3"}
    assert load_model(config).params_total == 3849090048


def test_tying_is_read_at_the_top_first_and_in_the_text_section_otherwise() -> None:
    config = entry("qwen3-vl-2b")
    head = 151936 * 2048
    top = {**config, "tie_word_embeddings": False}
    assert load_model(top).params == 1720574976 + head
    del config["tie_word_embeddings"]
    assert load_model(config).params == 1720574976
    config["text_config"]["tie_word_embeddings"] = False
    assert load_model(config).params == 1720574976 + head


def test_a_wrapper_without_a_described_tower_counts_none_and_says_so() -> None:
    config = entry("llama-4-scout-17b-16e")
    del config["vision_config"]
    model = load_model(config)
    assert model.params_total == model.params == 107769861120
    assert any("does not describe one" in note for note in model.not_modelled)


@pytest.mark.skipif(not CONFIGS.is_dir(), reason="the shared reference configs are not beside this checkout")
def test_storage_of_a_wrapper_reaches_its_text_modules() -> None:
    model = load_model(CONFIGS / "RedHatAI__Llama-4-Scout-17B-16E-Instruct-FP8-dynamic.json")
    formats = {fmt.name: number for fmt, number in model.params_by_format.items()}
    attention = 48 * (2 * 5120 * 5120 + 2 * 5120 * 1024)
    assert formats["fp8"] == 48 * (16 + 1) * 3 * 5120 * 8192
    assert formats["bf16"] == 107769861120 - formats["fp8"]
    assert formats["bf16"] > attention + 2 * 202048 * 5120


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        ({"model_type": "gemma3n"}, UnsupportedModel, "gemma3n.*text_config alone"),
        ({"audio_config": {"hidden_size": 8}}, UnsupportedModel, "audio tower of audio_config"),
        ({"vision_config": {"model_type": "swin", "hidden_size": 8}}, UnsupportedModel, "swin vision tower"),
        ({"vision_config": {"model_type": "siglip_vision_model", "hidden_size": 8}}, InputError, r"vision_config\."),
        ({"text_config": {"model_type": "nobody"}}, UnsupportedModel, "nobody"),
        ({"text_config": {}}, InputError, r"text_config\.num_hidden_layers"),
    ],
)
def test_wrappers_are_refused_by_name(change: dict[str, Any], error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        load_model({**entry("gemma-3-4b-it"), **change})
