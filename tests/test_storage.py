"""What a checkpoint stores in which format: effective bits of every format, and every kind of quantization_config."""

from __future__ import annotations

import json
from collections.abc import Mapping
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest

from roofline.configs.config import Config
from roofline.configs.load import load_model, read_storage
from roofline.configs.storage import Names, Storage, canonical
from roofline.errors import InputError, UnsupportedModel
from roofline.formats import format_named

LLAMA = {
    "model_type": "llama", "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": 1000, "tie_word_embeddings": False, "torch_dtype": "bfloat16",
}  # fmt: skip
Q, DOWN, HEAD = "model.layers.0.self_attn.q_proj", "model.layers.1.mlp.down_proj", "lm_head"


def storage(section: Mapping[str, Any] | None, **more: Any) -> Storage:
    return read_storage(Config({**LLAMA, **({"quantization_config": section} if section is not None else {}), **more}))


BITS = {
    # Group-quantised integers: a 16-bit scale and, if asymmetric, a zero point per group.
    "int4-g128": Fraction(33, 8), "int4-g128-asym": Fraction(133, 32), "int4-g64-asym": Fraction(69, 16),
    "int4-g32-asym": Fraction(37, 8), "int3-g128-asym": 3 + Fraction(19, 128), "int8-g128": Fraction(65, 8),
    "fp8": Fraction(8), "int8": Fraction(8), "bf16": Fraction(16), "fp32": Fraction(32),
    # One fp32 scale per 128x128 weights (DeepSeek-V3); per 1x128 activations; OCP MX v1.0; NVFP4.
    "fp8-block": 8 + Fraction(1, 512), "fp8-token": Fraction(33, 4), "mxfp8": Fraction(33, 4), "mxfp4": Fraction(17, 4),
    "nvfp4": Fraction(9, 2), "nf4": Fraction(9, 2), "nf4-double": 4 + Fraction(1, 8) + Fraction(1, 512),
    # Block sizes of ggml/src/ggml-common.h, static asserts.
    "q4_0": Fraction("4.5"), "q4_1": Fraction(5), "q5_0": Fraction("5.5"), "q5_1": Fraction(6), "q8_0": Fraction("8.5"),
    "q2_k": Fraction("2.625"), "q3_k": Fraction("3.4375"), "q4_k": Fraction("4.5"), "q5_k": Fraction("5.5"),
    "q6_k": Fraction("6.5625"), "iq4_xs": Fraction("4.25"), "iq4_nl": Fraction("4.5"), "iq2_xxs": Fraction("2.0625"),
    "iq2_xs": Fraction("2.3125"), "iq2_s": Fraction("2.5625"), "iq3_xxs": Fraction("3.0625"), "iq3_s": Fraction("3.4375"),
    "iq1_s": Fraction("1.5625"), "iq1_m": Fraction("1.75"), "tq1_0": Fraction("1.6875"), "tq2_0": Fraction("2.0625"),
    "gguf-mxfp4": Fraction("4.25"), "gguf-nvfp4": Fraction("4.5"), "q1_0": Fraction("1.125"), "q2_0": Fraction("2.25"),
}  # fmt: skip


@pytest.mark.parametrize(("name", "bits"), BITS.items(), ids=BITS)
def test_effective_bits_are_exact(name: str, bits: Fraction) -> None:
    assert format_named(name).bits == bits


def group(
    weights: Mapping[str, Any], activations: Mapping[str, Any] | None = None, targets: tuple[str, ...] = ("Linear",)
) -> dict:
    return {"weights": dict(weights), "input_activations": activations, "targets": list(targets)}


def compressed(*groups: dict, ignore: tuple[str, ...] = ("lm_head",), **more: Any) -> dict[str, Any]:
    named = {f"group_{number}": entry for number, entry in enumerate(groups)}
    return {"quant_method": "compressed-tensors", "config_groups": named, "ignore": list(ignore), **more}


INT4 = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 128, "symmetric": True}
FLOAT8 = {"num_bits": 8, "type": "float", "strategy": "channel"}
ACT8 = {"num_bits": 8, "type": "float"}

METHODS: dict[str, tuple[dict[str, Any], Fraction, str]] = {
    "gptq": ({"quant_method": "gptq", "bits": 4, "group_size": 128, "sym": True, "desc_act": True}, Fraction(33, 8), "bf16"),
    "gptq asymmetric": ({"quant_method": "gptq", "bits": 3, "group_size": 128, "sym": False}, 3 + Fraction(19, 128), "bf16"),
    "gptq by channel": ({"quant_method": "gptq", "bits": 8, "group_size": -1}, Fraction(8), "bf16"),
    "awq": ({"quant_method": "awq", "bits": 4, "group_size": 64, "zero_point": True}, Fraction(69, 16), "bf16"),
    "awq old keys": ({"quant_method": "awq", "w_bit": 4, "q_group_size": 128, "zero_point": False}, Fraction(33, 8), "bf16"),
    "fp8 dynamic": ({"quant_method": "fp8", "activation_scheme": "dynamic"}, Fraction(8), "fp8"),
    "fp8 static": ({"quant_method": "fp8", "activation_scheme": "static"}, Fraction(8), "fp8"),
    "fp8 128x128": ({"quant_method": "fp8", "weight_block_size": [128, 128]}, 8 + Fraction(1, 512), "fp8"),
    "fp8 128x128 ue8m0": (
        {"quant_method": "fp8", "weight_block_size": [128, 128], "scale_fmt": "ue8m0"}, 8 + Fraction(1, 2048), "fp8",
    ),
    "fp8 32x32": ({"quant_method": "fp8", "weight_block_size": [32, 32]}, 8 + Fraction(1, 32), "fp8"),
    "fbgemm_fp8": ({"quant_method": "fbgemm_fp8", "activation_scale_ub": 1200.0}, Fraction(8), "fp8"),
    "mxfp4": ({"quant_method": "mxfp4"}, Fraction(17, 4), "fp4"),
    "eetq": ({"quant_method": "eetq", "weights": "int8"}, Fraction(8), "bf16"),
    "bitsandbytes 8": ({"quant_method": "bitsandbytes", "load_in_8bit": True}, Fraction(8), "int8"),
    "bitsandbytes 4": ({"quant_method": "bitsandbytes", "load_in_4bit": True}, Fraction(9, 2), "bf16"),
    "bitsandbytes 4 double": (
        {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_use_double_quant": True}, Fraction(2113, 512), "bf16",
    ),
    "compressed int4": (compressed(group(INT4)), Fraction(33, 8), "bf16"),
    "compressed int4 asymmetric": (compressed(group({**INT4, "symmetric": False})), Fraction(133, 32), "bf16"),
    "compressed w4a8": (compressed(group(INT4, {"num_bits": 8, "type": "int"})), Fraction(33, 8), "int8"),
    "compressed fp8": (compressed(group(FLOAT8, ACT8)), Fraction(8), "fp8"),
    "compressed fp8 weights only": (compressed(group(FLOAT8)), Fraction(8), "bf16"),
    "compressed fp8 block": (
        compressed(group({"num_bits": 8, "type": "float", "strategy": "block", "block_structure": [128, 128]}, ACT8)),
        8 + Fraction(1, 512), "fp8",
    ),
    "compressed int8": (
        compressed(group({"num_bits": 8, "type": "int", "strategy": "channel"}, {"num_bits": 8, "type": "int"})),
        Fraction(8), "int8",
    ),
    "compressed nvfp4": (
        compressed(group({"num_bits": 4, "type": "float", "group_size": 16}, {"num_bits": 4, "type": "float"})),
        Fraction(9, 2), "fp4",
    ),
    "compressed mxfp4 weights only": (
        compressed(group({"num_bits": 4, "type": "float", "strategy": "group", "group_size": 32})), Fraction(17, 4), "bf16",
    ),
    "modelopt nvfp4": ({"quant_method": "modelopt", "quant_algo": "NVFP4", "group_size": 16}, Fraction(9, 2), "fp4"),
    "modelopt nvfp4 weights only": ({"quant_method": "modelopt", "quant_algo": "W4A16_NVFP4"}, Fraction(9, 2), "bf16"),
    "modelopt fp8": ({"quant_method": "modelopt", "quant_algo": "FP8", "exclude_modules": ["lm_head"]}, Fraction(8), "fp8"),
    "modelopt without a method": ({"quant_algo": "FP8", "ignore": ["lm_head"], "producer": {}}, Fraction(8), "fp8"),
    "modelopt awq": ({"quant_method": "modelopt", "quant_algo": "W4A16_AWQ", "group_size": 128}, Fraction(33, 8), "bf16"),
    "modelopt by groups": (
        {"quant_method": "modelopt", **{k: v for k, v in compressed(group(FLOAT8, ACT8)).items() if k != "quant_method"}},
        Fraction(8), "fp8",
    ),
}  # fmt: skip


@pytest.mark.parametrize(("section", "bits", "unit"), METHODS.values(), ids=METHODS)
def test_linear_layers_are_quantised_and_the_head_is_not(section: dict[str, Any], bits: Fraction, unit: str) -> None:
    found = storage(section)
    assert found.linear(Q).bits == bits
    assert found.linear(Q).unit == unit
    assert found.linear(DOWN) == found.linear(Q)
    assert found.linear(HEAD).name == "bf16"
    assert found.base.name == "bf16"


@pytest.mark.parametrize(("section", "bits", "unit"), METHODS.values(), ids=METHODS)
def test_bytes_of_a_model_are_those_of_its_parts(section: dict[str, Any], bits: Fraction, unit: str) -> None:
    model = load_model({**LLAMA, "quantization_config": section})
    plain = load_model(LLAMA)
    linear = 2 * (256 * 256 * 2 + 2 * 256 * 128 + 3 * 256 * 512)
    assert model.params == plain.params
    assert model.weight_bytes == 2 * (plain.params - linear) + linear * bits / 8


@pytest.mark.parametrize("name", ["gate", "router", "embed_tokens"])
@pytest.mark.parametrize(("section", "bits", "unit"), METHODS.values(), ids=METHODS)
def test_routers_and_embeddings_stay_in_the_base_dtype(section: dict[str, Any], bits: Fraction, unit: str, name: str) -> None:
    assert storage(section).linear(f"model.layers.3.mlp.{name}").name == "bf16"


@pytest.mark.parametrize(
    ("method", "key"),
    [
        ("awq", "modules_to_not_convert"), ("fp8", "modules_to_not_convert"), ("fp8", "ignored_layers"),
        ("fbgemm_fp8", "modules_to_not_convert"), ("gptq", "modules_to_not_convert"), ("mxfp4", "modules_to_not_convert"),
        ("bitsandbytes", "llm_int8_skip_modules"), ("modelopt", "exclude_modules"), ("modelopt", "ignore"),
    ],
)  # fmt: skip
def test_a_listed_module_is_spared_and_its_neighbour_is_not(method: str, key: str) -> None:
    section = {"quant_method": method, "bits": 4, "group_size": 128, "load_in_8bit": True, "quant_algo": "FP8", key: [Q]}
    found = storage(section)
    assert found.linear(Q).name == "bf16"
    assert found.linear(Q.replace("q_proj", "k_proj")).name != "bf16"
    assert found.linear(Q.replace("layers.0", "layers.10")).name != "bf16"


def test_spared_projections_split_the_fused_matmul() -> None:
    section = {"quant_method": "fp8", "modules_to_not_convert": ["model.layers.0.self_attn.v_proj", "model.layers.1.mlp"]}
    model = load_model({**LLAMA, "quantization_config": section})
    names = [[part.name for part in layer.parts] for layer in model.layers]
    assert {"q_proj", "k_proj", "v_proj"} <= set(names[0])
    assert "qkv_proj" in names[1]
    spared = 256 * 128 + 3 * 256 * 512
    assert sum(count for fmt, count in model.params_by_format.items() if fmt.name == "fp8") == 2 * 589_824 - spared


NAMES = [
    ("lm_head", "lm_head", True),
    ("model.layers.1", "model.layers.1.mlp.up_proj", True),
    ("model.layers.1", "model.layers.11.mlp.up_proj", False),
    ("mlp.gate", "model.layers.4.mlp.gate", True),
    ("gate", "model.layers.4.mlp.gate_proj", False),
    ("model.layers.*.self_attn", "model.layers.7.self_attn.o_proj", True),
    ("model.layers.*.self_attn", "model.layers.7.mlp.up_proj", False),
    ("model.layers.1.*", "model.layers.10.mlp.up_proj", False),
    ("model.layers.0.self_attn*", "model.layers.0.self_attn.q_proj", True),
    ("*.mlp.shared_expert.*", "model.layers.0.mlp.shared_expert.up_proj", True),
    ("re:.*lm_head", "lm_head", True),
    (r"re:.*mlp\.(gate|up)_proj$", "model.layers.0.mlp.up_proj", True),
    (r"re:.*mlp\.(gate|up)_proj$", "model.layers.0.mlp.down_proj", False),
    ("re:language_model.*self_attn.*", "model.layers.0.self_attn.q_proj", True),
    ("model.language_model.layers.0.mlp", "model.layers.0.mlp.up_proj", True),
    ("language_model.model.layers.0.mlp", "model.layers.0.mlp.up_proj", True),
    ("backbone.layers.4.mixer.in_proj", "model.layers.4.mixer.in_proj", True),
    ("model.layers.0.mlp.experts.3.up_proj", "model.layers.0.mlp.experts.9.up_proj", True),
]


@pytest.mark.parametrize(("entry", "path", "named"), NAMES)
def test_what_an_entry_of_a_module_list_names(entry: str, path: str, named: bool) -> None:
    assert (path in Names([entry])) is named


def test_canonical_paths_forget_wrappers_and_expert_numbers() -> None:
    assert canonical("language_model.model.layers.2.mlp.experts.17.up_proj") == "model.layers.2.mlp.experts.up_proj"


def test_groups_of_compressed_tensors_have_their_own_targets() -> None:
    eight = group(FLOAT8, ACT8, ("re:.*self_attn.*",))
    found = storage(compressed(group(INT4), eight))
    assert found.linear(Q).name == "fp8"
    assert found.linear(DOWN).bits == Fraction(33, 8)
    only = storage(compressed(group(INT4, None, (DOWN,))))
    assert only.linear(DOWN).bits == Fraction(33, 8)
    assert only.linear(Q).name == "bf16"


def test_compressed_tensors_quantise_the_head_unless_it_is_ignored() -> None:
    assert storage(compressed(group(INT4), ignore=())).linear(HEAD).bits == Fraction(33, 8)


def test_gptq_quantises_the_head_where_it_says_so() -> None:
    section = {"quant_method": "gptq", "bits": 4, "group_size": 128, "lm_head": True}
    assert storage(section).linear(HEAD).bits == Fraction(33, 8)


def test_dynamic_rules_of_gptq_change_and_spare_modules() -> None:
    rules = {r"+:.*\.mlp\..*": {"bits": 8, "group_size": 64}, r"-:.*\.0\.self_attn.*": {}}
    found = storage({"quant_method": "gptq", "bits": 4, "group_size": 128, "dynamic": rules})
    assert found.linear(DOWN).bits == 8 + Fraction(1, 4)
    assert found.linear(Q).name == "bf16"
    assert found.linear(Q.replace(".0.", ".1.")).bits == Fraction(33, 8)


def test_gptq_may_name_the_modules_it_quantises() -> None:
    section = {"quant_method": "gptq", "bits": 4, "group_size": 128, "modules_in_block_to_quantize": [["self_attn.q_proj"]]}
    assert storage(section).linear(Q).bits == Fraction(33, 8)
    assert storage(section).linear(DOWN).name == "bf16"


def test_mixed_precision_of_modelopt_goes_by_layer() -> None:
    layers = {Q: {"quant_algo": "FP8"}, "model.layers.1.mlp": {"quant_algo": "NVFP4", "group_size": 16}}
    found = storage({"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION", "quantized_layers": layers})
    assert (found.linear(Q).name, found.linear(DOWN).name, found.linear(HEAD).name) == ("fp8", "nvfp4", "bf16")


def test_fp8_checkpoints_may_store_some_layers_otherwise() -> None:
    """As fp8 checkpoints with NVFP4 experts do; the ignore list is that of the other algorithm."""
    section = {
        "quant_method": "fp8", "weight_block_size": [128, 128], "quant_algo": "MIXED_PRECISION", "ignore": ["*.self_attn.*"],
        "quantized_layers": {"model.layers.1.mlp": {"quant_algo": "NVFP4"}},
    }  # fmt: skip
    assert storage(section).linear(Q).name == "fp8-block"
    assert storage(section).linear(DOWN).name == "nvfp4"


@pytest.mark.parametrize(
    ("scheme", "name"),
    [
        ({"kv_cache_scheme": {"num_bits": 8, "type": "float"}}, "fp8"), ({"kv_cache_quant_algo": "FP8"}, "fp8"),
        ({"kv_cache_scheme": "FP8"}, "fp8"), ({"kv_cache_scheme": None}, "bf16"), ({}, "bf16"),
    ],
)  # fmt: skip
def test_the_cache_takes_the_format_that_the_config_names(scheme: dict[str, Any], name: str) -> None:
    section = {"quant_method": "modelopt", "quant_algo": "FP8", **scheme}
    assert storage(section).kv.name == name
    model = load_model({**LLAMA, "quantization_config": section})
    assert model.state_bytes(10) == 10 * 2 * 2 * 2 * 64 * format_named(name).bytes_per_element
    assert model.kv_bytes_per_token == 2 * 2 * 2 * 64 * 2


def test_the_key_of_hf_quant_config_is_read_inside_and_beside_a_config(tmp_path: Path) -> None:
    section = {"quant_algo": "NVFP4", "kv_cache_quant_algo": "FP8", "group_size": 16, "exclude_modules": ["lm_head"]}
    assert storage(None, quantization=section).linear(Q).name == "nvfp4"
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    assert load_model(tmp_path).weight_bytes == 2 * load_model(LLAMA).params
    (tmp_path / "hf_quant_config.json").write_text(json.dumps({"producer": {"name": "modelopt"}, "quantization": section}))
    assert load_model(tmp_path).weight_bytes == load_model({**LLAMA, "quantization": section}).weight_bytes
    assert load_model(tmp_path / "config.json").weight_bytes < load_model(LLAMA).weight_bytes


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16", "torch.float16"])
@pytest.mark.parametrize("key", ["torch_dtype", "dtype"])
def test_the_base_dtype(dtype: str, key: str) -> None:
    config = {name: value for name, value in LLAMA.items() if name != "torch_dtype"}
    width = 4 if dtype == "float32" else 2
    model = load_model({**config, key: dtype})
    assert model.weight_bytes == width * model.params
    assert model.state_bytes(1) == width * 2 * 2 * 2 * 64


def test_a_missing_dtype_is_an_assumption() -> None:
    config = {name: value for name, value in LLAMA.items() if name != "torch_dtype"}
    assert "dtype = bfloat16 (not in the config)" in load_model(config).assumes
    assert not any("dtype" in note for note in load_model(LLAMA).assumes)


@pytest.mark.parametrize("method", ["aqlm", "auto-round", "bitnet", "higgs", "hqq", "quark", "quanto", "spqr", "torchao", "vptq"])
def test_known_methods_without_a_model_are_refused_by_name(method: str) -> None:
    with pytest.raises(UnsupportedModel, match=f"quant_method '{method}' is known"):
        storage({"quant_method": method, "bits": 4})


REFUSED: dict[str, tuple[type[Exception], dict[str, Any], str]] = {
    "unknown method": (UnsupportedModel, {"quant_method": "zip"}, "'zip' is unknown; known are gptq"),
    "no method": (InputError, {"zip": 1}, "quant_method is missing"),
    "MLX": (UnsupportedModel, {"bits": 4, "group_size": 64}, "MLX"),
    "not an object": (InputError, {"quant_method": ["gptq"]}, "quant_method must be a text"),
    "gptq without bits": (InputError, {"quant_method": "gptq", "group_size": 128}, "bits"),
    "gptq of one bit": (InputError, {"quant_method": "gptq", "bits": 1, "group_size": 128}, "1-bit"),
    "gptq with a bad rule": (
        InputError,
        {"quant_method": "gptq", "bits": 4, "group_size": 8, "dynamic": {"+:(": {}}},
        "valid regex",
    ),
    "block of one": (InputError, {"quant_method": "fp8", "weight_block_size": [128]}, "weight_block_size"),
    "block of text": (InputError, {"quant_method": "fp8", "weight_block_size": ["a", "b"]}, "weight_block_size"),
    "bnb without a width": (InputError, {"quant_method": "bitsandbytes"}, "load_in_8bit"),
    "no groups": (InputError, {"quant_method": "compressed-tensors"}, "config_groups"),
    "empty groups": (InputError, compressed(), "config_groups is empty"),
    "six-bit floats": (UnsupportedModel, compressed(group({**FLOAT8, "num_bits": 6})), "6-bit float"),
    "sparse": (UnsupportedModel, compressed(group(INT4), sparsity_config={"format": "sparse-24-bitmask"}), "sparse"),
    "a bad regex": (InputError, compressed(group(INT4), ignore=("re:(",)), "not a valid regex"),
    "odd algorithm": (UnsupportedModel, {"quant_method": "modelopt", "quant_algo": "W3A3"}, "W3A3"),
    "odd block": (UnsupportedModel, {"quant_method": "modelopt", "quant_algo": "NVFP4", "group_size": 32}, "blocks of 32"),
    "odd cache": (UnsupportedModel, {"quant_method": "fp8", "kv_cache_scheme": {"num_bits": 2, "type": "int"}}, "INT2"),
    "list of numbers": (InputError, {"quant_method": "fp8", "modules_to_not_convert": [1]}, "module names"),
}


@pytest.mark.parametrize(("error", "section", "says"), REFUSED.values(), ids=REFUSED)
def test_what_cannot_be_understood_is_refused_in_one_line(error: type[Exception], section: dict[str, Any], says: str) -> None:
    with pytest.raises(error) as caught:
        storage(section)
    assert says in str(caught.value)
    assert "\n" not in str(caught.value)
