"""Bad input is answered with one line that names the field: never a traceback, a silent default or a wrong number."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from roofline.configs.config import LARGEST_SIZE, MOST_LAYERS
from roofline.configs.load import LARGEST_FILE, load_model
from roofline.configs.styles import STYLES
from roofline.errors import InputError, RooflineError, UnsupportedModel
from roofline.model import Model

GOOD: dict[str, Any] = {
    "model_type": "llama", "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "vocab_size": 100, "max_position_embeddings": 64, "attention_bias": False,
    "mlp_bias": False, "tie_word_embeddings": False, "torch_dtype": "bfloat16",
}  # fmt: skip


def refusal(source: Any, error: type[Exception] = InputError) -> str:
    """The message with which a source is refused: one line, not too long."""
    with pytest.raises(error) as caught:
        load_model(source)
    message = str(caught.value)
    assert message == message.strip()
    assert "\n" not in message
    assert 20 < len(message) < 600
    return message


def changed(**keys: Any) -> dict[str, Any]:
    return {**GOOD, **keys}


def lacking(key: str) -> dict[str, Any]:
    return {name: value for name, value in GOOD.items() if name != key}


# Files.

TEXTS = {
    "empty": ("", "is empty"),
    "blank": (" \n\t ", "is empty"),
    "truncated": ('{"model_type": "llama", "hidden_size": 64, ', "not valid JSON"),
    "list": ("[1, 2]", "JSON list, not an object"),
    "number": ("3.5", "JSON float, not an object"),
    "text": ('"llama"', "JSON str, not an object"),
    "null": ("null", "JSON NoneType, not an object"),
    "object without keys": ("{}", "the object is empty"),
    "deep": ("[" * 200_000 + "]" * 200_000, "nested too deeply"),
    "deep object": ('{"a":' * 100_000 + "1" + "}" * 100_000, "nested too deeply"),
    "doubled key": ('{"model_type": "llama", "hidden_size": 64, "hidden_size": 128}', "hidden_size stands twice"),
    "long number": ('{"model_type": "llama", "hidden_size": ' + "9" * 5000 + "}", "not valid JSON"),
}


@pytest.mark.parametrize(("text", "says"), TEXTS.values(), ids=TEXTS)
def test_a_file_that_is_no_config(tmp_path: Path, text: str, says: str) -> None:
    path = tmp_path / "config.json"
    path.write_text(text)
    assert says in refusal(path)


def test_a_doubled_key_with_one_value_is_harmless(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(GOOD).replace("{", '{"hidden_size": 64, ', 1))
    assert load_model(path).params == load_model(GOOD).params


def test_a_binary_file(tmp_path: Path) -> None:
    path = tmp_path / "model.bin"
    path.write_bytes(bytes(range(256)) * 8)
    assert "not a text file" in refusal(path)
    assert "not a text file" in refusal(str(path))


def test_weights_are_no_config(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(bytes(8))
    assert "give the config.json beside it" in refusal(path)


def test_the_side_file_of_modelopt_is_no_config(tmp_path: Path) -> None:
    side = {"producer": {"name": "modelopt"}, "quantization": {"quant_algo": "NVFP4", "group_size": 16}}
    path = tmp_path / "hf_quant_config.json"
    path.write_text(json.dumps(side))
    assert "ModelOpt's hf_quant_config.json" in refusal(path)
    assert "give the config.json beside it" in refusal(path)
    assert "ModelOpt" in refusal(side)


def test_a_huge_file_is_not_read(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    with path.open("wb") as file:
        file.truncate(LARGEST_FILE + 1)
    assert f"{LARGEST_FILE + 1} bytes" in refusal(path)


def test_a_directory_without_a_config(tmp_path: Path) -> None:
    assert "directory without a config.json" in refusal(tmp_path)
    assert "directory without a config.json" in refusal(str(tmp_path))


def test_a_directory_in_place_of_a_config(tmp_path: Path) -> None:
    (tmp_path / "config.json").mkdir()
    assert "config.json" in refusal(tmp_path / "config.json")


def test_a_path_that_leads_nowhere(tmp_path: Path) -> None:
    assert "cannot be read" in refusal(tmp_path / "absent" / "config.json")
    assert "cannot be read" in refusal(str(tmp_path / "absent.json"))
    assert "there is no file" in refusal(str(tmp_path / "absent"))
    assert "there is no file" in refusal("./absent")


def test_a_file_that_may_not_be_read(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(GOOD))
    path.chmod(0)
    if os.access(path, os.R_OK):
        pytest.skip("this user may read everything")
    assert "cannot be read" in refusal(path)


def test_a_pipe_is_not_waited_for(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    os.mkfifo(path)
    assert "config.json" in refusal(path)


def test_a_folder_with_a_config_is_named_after_it(tmp_path: Path) -> None:
    folder = tmp_path / "my-llama"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(GOOD))
    assert load_model(folder).name == load_model(str(folder)).name == "my-llama"


def test_a_folder_named_as_a_catalogued_model_does_not_hide_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "gpt2").mkdir()
    monkeypatch.chdir(tmp_path)
    assert load_model("gpt2").params == 124_439_808
    (tmp_path / "gpt2" / "config.json").write_text(json.dumps(GOOD))
    assert load_model("gpt2").params == load_model(GOOD).params


# Names.


@pytest.mark.parametrize("name", ["", " ", "/", "..", "no\nsuch\x00model", "a" * 5000, "model\\..\\..", "é", "llama-2-13b.toml"])
def test_names_that_are_none(name: str) -> None:
    refusal(name)


def test_unknown_names_and_families_suggest_the_nearest() -> None:
    assert "Did you mean 'llama-2-13b'" in refusal("llama-2-13bb")
    assert "Did you mean" not in refusal("zzzzzzzzzzz")
    assert "'qwen3'" in refusal(changed(model_type="qwen33"), UnsupportedModel)


# Keys.

NEEDED = ["hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "vocab_size", "model_type"]
SIZES = [
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "vocab_size",
]
WRONG: list[Any] = [
    "4096",
    True,
    1e30,
    float("nan"),
    float("inf"),
    -4096,
    0,
    4096.0,
    [4096],
    {"size": 4096},
    10**30,
    LARGEST_SIZE + 1,
]


@pytest.mark.parametrize("key", NEEDED)
def test_a_missing_key_is_named(key: str) -> None:
    assert key in refusal(lacking(key))
    assert key in refusal(changed(**{key: None}))


@pytest.mark.parametrize("value", WRONG, ids=repr)
@pytest.mark.parametrize("key", SIZES)
def test_a_size_of_a_wrong_kind_is_named(key: str, value: object) -> None:
    assert key in refusal(changed(**{key: value}))


@pytest.mark.parametrize("value", ["no", 1, 0, [], 1.0])
@pytest.mark.parametrize("key", ["tie_word_embeddings", "attention_bias", "mlp_bias"])
def test_a_flag_of_a_wrong_kind_is_named(key: str, value: object) -> None:
    assert key in refusal(changed(**{key: value}), RooflineError)


@pytest.mark.parametrize("value", [7, True, "", ["llama"], {"llama": 1}])
def test_a_model_type_of_a_wrong_kind_is_named(value: object) -> None:
    assert "model_type" in refusal(changed(model_type=value))


@pytest.mark.parametrize("value", ["int4", "float8", 16, True, ["bfloat16"]])
def test_a_dtype_of_a_wrong_kind_is_named(value: object) -> None:
    assert "dtype" in refusal(changed(torch_dtype=value))


@pytest.mark.parametrize("value", [-0.5, 1.5, 1e30, float("nan"), float("inf"), "half", True])
@pytest.mark.parametrize("holder", ["top", "rope_parameters"])
def test_a_rotary_part_outside_zero_to_one_is_named(value: object, holder: str) -> None:
    keys = {"partial_rotary_factor": value}
    assert "partial_rotary_factor" in refusal(changed(**(keys if holder == "top" else {"rope_parameters": keys})))


def test_sizes_that_contradict_each_other() -> None:
    assert "num_key_value_heads 3 does not divide" in refusal(changed(num_key_value_heads=3))
    assert "is not whole" in refusal({**lacking("head_dim"), "num_attention_heads": 6, "num_key_value_heads": 2})
    assert "hidden_size = 64 and n_embd = 128 contradict" in refusal(changed(n_embd=128))
    assert "num_hidden_layers = 2 and n_layer = 3 contradict" in refusal(changed(n_layer=3))
    assert "larger than the head dimension" in refusal(changed(rotary_dim=32))


def test_one_size_under_two_names_is_no_contradiction() -> None:
    assert load_model(changed(n_embd=64, n_layer=2)) == load_model(GOOD)


def test_absurd_numbers_of_layers_are_refused_at_once() -> None:
    assert load_model(changed(num_hidden_layers=MOST_LAYERS)).params > 0
    assert "num_hidden_layers is 10001" in refusal(changed(num_hidden_layers=MOST_LAYERS + 1))
    assert "num_hidden_layers is 100000000" in refusal(changed(num_hidden_layers=10**8))


def test_lists_that_are_too_short() -> None:
    assert "layer_types has 1 entries for 2 layers" in refusal(changed(model_type="qwen3", layer_types=["full_attention"]))


@pytest.mark.parametrize("family", STYLES)
def test_a_family_without_any_key_names_the_first_that_is_missing(family: str) -> None:
    assert "missing" in refusal({"model_type": family, "torch_dtype": "bfloat16"})


VALUES = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(10**20), 10**20),
    st.integers(0, 200),
    st.floats(),
    st.text(max_size=8),
    st.sampled_from(["bfloat16", "float32", "full_attention", "llama", "gptq", "fp8"]),
    st.lists(st.integers(-3, 3), max_size=3),
    st.dictionaries(st.sampled_from(["bits", "quant_method", "partial_rotary_factor", "x"]), st.integers(-3, 200), max_size=2),
)
KEYS = [
    *GOOD, "n_embd", "num_heads", "rope_parameters", "rotary_dim", "layer_types", "sliding_window", "use_sliding_window",
    "max_window_layers", "architectures", "quantization_config", "num_nextn_predict_layers", "no_rope_layers", "use_qk_norm",
    "multi_query", "num_kv_heads", "attn_config", "block_configs", "ffn_dim", "word_embed_proj_dim", "attention_types",
    "partial_rotary_factor", "num_experts", "text_config", "vision_config", "hidden_act", "expansion_ratio", "dtype",
]  # fmt: skip


def outcome(config: dict[str, Any]) -> tuple[Model | None, str]:
    """The model, or the message of one of the two errors; any other exception passes."""
    try:
        return load_model(config), ""
    except (InputError, UnsupportedModel) as refused:
        return None, str(refused)


@settings(max_examples=600, deadline=None)
@given(
    family=st.sampled_from(sorted(STYLES)),
    changes=st.dictionaries(st.sampled_from(KEYS), VALUES, max_size=4),
    deleted=st.sets(st.sampled_from(sorted(GOOD)), max_size=2),
)
def test_a_mutated_config_is_read_or_refused(family: str, changes: dict[str, Any], deleted: set[str]) -> None:
    config = {key: value for key, value in {**GOOD, "model_type": family, **changes}.items() if key not in deleted}
    model, message = outcome(config)
    if model is None:
        assert message.strip()
        assert "\n" not in message
        return
    assert isinstance(model.params, int)
    assert model.params > 0
    assert model.kv_bytes_per_token >= 0
    assert model.weight_bytes > 0
    assert len(model.layers) <= MOST_LAYERS
