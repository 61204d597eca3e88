"""llama.cpp's mixes of k-quants, against what llama-quantize reports and against its rule written out.

Sources: tools/quantize/README.md of ggml-org/llama.cpp (bits per weight and sizes of Llama-3.1-8B);
llama_tensor_get_type in src/llama-quant.cpp.
"""

from __future__ import annotations

from typing import Any

import pytest

from roofline.components.attention import AttentionBlock
from roofline.components.feedforward import MLP
from roofline.components.moe import MoE
from roofline.configs.load import load_model
from roofline.edits import apply, dtype
from roofline.edits.gguf_mix import MIXES, more_bits
from roofline.errors import InputError
from roofline.formats import FORMATS, FP16, FP32
from roofline.model import Model

REPORTED = {
    "Q3_K_S": (3.6429, 3.41), "Q3_K_L": (4.2979, 4.02), "Q4_K_S": (4.6672, 4.36), "Q4_K_M": (4.8944, 4.58),
    "Q5_K_S": (5.5704, 5.21), "Q5_K_M": (5.7036, 5.33),
}  # fmt: skip
"""Llama-3.1-8B: bits per weight, GiB."""

SMALL: dict[str, Any] = {
    "model_type": "llama", "hidden_size": 512, "intermediate_size": 1024, "num_hidden_layers": 16, "num_attention_heads": 8,
    "num_key_value_heads": 2, "vocab_size": 640, "tie_word_embeddings": False, "torch_dtype": "bfloat16",
}  # fmt: skip


def mixed(config: dict[str, Any] | str, name: str) -> Model:
    return apply(load_model(config), [dtype(name)])


def blocks(model: Model, kind: Any) -> list[Any]:
    return [block for layer in model.layers for block in layer.blocks if isinstance(block, kind)]


def stored(block: AttentionBlock, name: str) -> str:
    """The format of one projection."""
    return dict(block.overrides).get(name, block.weight).name


@pytest.mark.parametrize(("name", "reported"), REPORTED.items(), ids=REPORTED)
def test_bits_per_weight_are_those_that_llama_quantize_reports(name: str, reported: tuple[float, float]) -> None:
    model = mixed("llama-3.1-8b", name)
    assert round(8 * model.weight_bytes / model.params, 4) == reported[0]
    assert round(model.weight_bytes / 2**30, 2) == reported[1]


def test_a_file_of_8b_in_q4_k_m_takes_4_9_gb() -> None:
    assert round(mixed("llama-3.1-8b", "Q4_K_M").weight_bytes / 1e9, 1) == 4.9


def test_more_bits_in_the_first_and_last_eighth_and_every_third_between() -> None:
    assert [index for index in range(16) if more_bits(index, 16)] == [0, 1, 4, 7, 10, 13, 14, 15]
    assert sum(more_bits(index, 32) for index in range(32)) == 16


def test_q4_k_m_tensor_by_tensor() -> None:
    model = mixed(SMALL, "q4_k_m")
    many = ["q6_k" if more_bits(index, 16) else "q4_k" for index in range(16)]
    attention = blocks(model, AttentionBlock)
    assert [stored(block, "v") for block in attention] == many
    assert {stored(block, name) for block in attention for name in "qko"} == {"q4_k"}
    mlp = blocks(model, MLP)
    assert [dict(block.overrides).get("down", block.weight).name for block in mlp] == many
    assert {block.weight.name for block in mlp} == {"q4_k"}
    by_format = {fmt.name: number for fmt, number in model.params_by_format.items()}
    assert by_format["q6_k"] == 640 * 512 + 8 * (128 * 512 + 512 * 1024)
    assert by_format["fp32"] == 33 * 512
    assert len(model.groups) == 2


def test_first_layers_of_the_smaller_mixes() -> None:
    small = mixed(SMALL, "Q4_K_S")
    assert [stored(block, "v") for block in blocks(small, AttentionBlock)] == ["q5_k"] * 4 + ["q4_k"] * 12
    assert [dict(block.overrides).get("down", block.weight).name for block in blocks(small, MLP)] == ["q5_k"] * 2 + ["q4_k"] * 14
    three = mixed(SMALL, "Q3_K_M")
    assert [stored(block, "v") for block in blocks(three, AttentionBlock)] == ["q5_k"] * 2 + ["q4_k"] * 14
    assert {stored(block, "o") for block in blocks(three, AttentionBlock)} == {"q4_k"}


def test_a_tied_embedding_is_stored_as_a_head() -> None:
    model = mixed({**SMALL, "tie_word_embeddings": True}, "Q4_K_M")
    assert getattr(model.embedding[0], "weight", None) == FORMATS["q6_k"]
    assert model.head[0].params() == {}
    assert getattr(mixed(SMALL, "Q4_K_M").embedding[0], "weight", None) == FORMATS["q4_k"]


def test_rows_that_are_no_whole_blocks_fall_back() -> None:
    """Qwen2.5-0.5B: rows of 896 and 4864; 896 is 28 blocks of 32."""
    model = mixed("qwen2.5-0.5b", "Q4_K_M")
    attention, mlp = blocks(model, AttentionBlock), blocks(model, MLP)
    assert {stored(block, "q") for block in attention} == {"q5_0"}
    assert {stored(block, "v") for block in attention} == {"q5_0", "q8_0"}
    assert {dict(block.overrides)["down"].name for block in mlp} == {"q4_k", "q6_k"}
    assert getattr(model.embedding[0], "weight", None) == FORMATS["q8_0"]
    assert model.params_by_format[FP32] == 49 * 896 + 24 * (896 + 2 * 128)
    odd = mixed({**SMALL, "hidden_size": 520, "head_dim": 64}, "Q4_K_M")
    assert blocks(odd, MLP)[0].weight == FP16


def test_eighty_layers_of_grouped_queries_have_values_in_five_bits() -> None:
    attention = blocks(mixed("llama-3.1-70b", "Q4_K_M"), AttentionBlock)
    assert {stored(block, "v") for block in attention} == {"q5_k", "q6_k"}


def test_eight_experts_have_keys_and_values_in_eight_bits() -> None:
    model = mixed("mixtral-8x7b-v0.1", "Q4_K_M")
    attention = blocks(model, AttentionBlock)
    assert [{stored(block, name) for block in attention} for name in "qkvo"] == [{"q4_k"}, {"q8_0"}, {"q8_0"}, {"q5_k"}]
    experts = blocks(model, MoE)
    assert {block.router_weight for block in experts} == {FP32}
    assert sum(block.down_weight == FORMATS["q6_k"] for block in experts) == 16
    large = blocks(mixed("mixtral-8x7b-v0.1", "Q3_K_L"), AttentionBlock)
    assert {stored(block, "o") for block in large} == {"q3_k"}


def test_a_single_format_after_a_mix_is_the_single_format() -> None:
    model = apply(load_model("mixtral-8x7b-v0.1"), [dtype("Q4_K_M"), dtype("fp8")])
    assert {block.down_weight for block in blocks(model, MoE)} == {None}
    assert all(block.overrides == () for block in blocks(model, AttentionBlock))


@pytest.mark.parametrize(("name", "says"), [("deepseek-v3", "MLA"), ("t5-small", "encoder"), ("gpt2", "table of positions")])
def test_what_the_rule_does_not_cover_is_refused(name: str, says: str) -> None:
    with pytest.raises(InputError, match=f"--dtype Q4_K_M: .*{says}"):
        mixed(name, "Q4_K_M")


@pytest.mark.parametrize("name", MIXES)
def test_every_mix_says_what_it_assumes(name: str) -> None:
    assert any("without an importance matrix" in line for line in mixed(SMALL, name).assumes)


def test_command_line_takes_a_mix(cli: Any) -> None:
    (record,) = cli("what-if", "llama-3.1-8b", "-g", "h100-sxm", "-c", "1000", "--quant", "Q4_K_M", "-o", "json").records[-1:]
    assert record["edits"] == ["--dtype Q4_K_M"]
    assert record["weight_bytes"] == mixed("llama-3.1-8b", "Q4_K_M").weight_bytes
