"""A GGUF file as the source of a model: metadata as config, tensors as storage, to the byte."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from roofline.checkpoints.agreement import compare
from roofline.checkpoints.gguf_headers import TYPES, read_gguf
from roofline.checkpoints.headers import read_headers
from roofline.components.attention import AttentionBlock
from roofline.configs.load import load_model
from roofline.errors import InputError, UnsupportedModel
from roofline.formats import FORMATS, FP32, format_named
from roofline.model import Model

gguf = pytest.importorskip("gguf")
import numpy as np  # noqa: E402

D, F, V, L, N, K, H = 512, 1024, 640, 4, 8, 2, 64
Type = gguf.GGMLQuantizationType


def zeros(writer: Any, name: str, shape: tuple[int, ...], kind: Any) -> None:
    """Adds a tensor of zeros."""
    block, size = gguf.GGML_QUANT_SIZES[kind]
    if kind == Type.F32:
        writer.add_tensor(name, np.zeros(shape, np.float32))
    else:
        packed = (*shape[:-1], shape[-1] // block * size)
        writer.add_tensor(name, np.zeros(packed, np.uint8), raw_dtype=kind)


def mixture(name: str, index: int) -> Any:
    """A mix in the manner of Q4_K_M: half of the value and down projections in six bits."""
    if name in ("attn_v", "ffn_down", "ffn_down_exps") and index % 2 == 0:
        return Type.Q6_K
    return Type.Q4_K


Extra = Callable[[Any], None]


def write(path: Path, architecture: str = "llama", *, tied: bool = False, extra: Extra | None = None, **options: Any) -> Path:
    """Writes a GGUF model; ``options``: biases, qk_norm, sandwich, experts, tokens, without (tensors left out), layers."""
    writer = gguf.GGUFWriter(path, architecture)
    layers = options.get("layers", L)
    writer.add_block_count(layers)
    writer.add_context_length(4096)
    writer.add_embedding_length(D)
    writer.add_feed_forward_length(F)
    writer.add_head_count(N)
    writer.add_head_count_kv(K)
    writer.add_key_length(H)
    writer.add_value_length(H)
    writer.add_rope_dimension_count(H)
    tokens = options.get("tokens", V)
    writer.add_token_list([f"token{number}" for number in range(tokens)])
    if extra is not None:
        extra(writer)
    zeros(writer, "token_embd.weight", (V, D), Type.Q6_K if tied else Type.Q4_K)
    zeros(writer, "output_norm.weight", (D,), Type.F32)
    if not tied:
        zeros(writer, "output.weight", (V, D), Type.Q6_K)
    experts = options.get("experts", 0)
    shapes: dict[str, tuple[int, ...]] = {
        "attn_q": (N * H, D), "attn_k": (K * H, D), "attn_v": (K * H, D), "attn_output": (D, N * H),
    }  # fmt: skip
    inside = {"ffn_gate": (F, D), "ffn_up": (F, D), "ffn_down": (D, F)}
    shapes |= {f"{name}_exps": (experts, *shape) for name, shape in inside.items()} if experts else inside
    norms = ["attn_norm", "ffn_norm", *(["post_attention_norm", "post_ffw_norm"] if options.get("sandwich") else [])]
    for index in range(layers):
        for name, shape in shapes.items():
            if name not in options.get("without", ()):
                zeros(writer, f"blk.{index}.{name}.weight", shape, mixture(name, index))
        for name in norms:
            zeros(writer, f"blk.{index}.{name}.weight", (D,), Type.F32)
        if experts:
            zeros(writer, f"blk.{index}.ffn_gate_inp.weight", (experts, D), Type.F32)
        if options.get("qk_norm"):
            for name in ("attn_q_norm", "attn_k_norm"):
                zeros(writer, f"blk.{index}.{name}.weight", (H,), Type.F32)
        if options.get("biases"):
            for name in ("attn_q", "attn_k", "attn_v"):
                zeros(writer, f"blk.{index}.{name}.bias", (shapes[name][0],), Type.F32)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def to_the_byte(path: Path) -> Model:
    """The model of a file, after checking that it is stored exactly as the file says."""
    stored, model = read_headers(path), load_model(path)
    assert (model.params, model.weight_bytes) == (stored.params, stored.bytes - sum(b.bytes for b in stored.buffers))
    assert compare(stored, model).agrees
    assert "as the config says" in model.assumes[-1]
    return model


def window(writer: Any) -> None:
    writer.add_sliding_window(128)


def experts(writer: Any) -> None:
    writer.add_expert_count(8)
    writer.add_expert_used_count(2)
    writer.add_expert_feed_forward_length(F)


def test_llama(tmp_path: Path) -> None:
    model = to_the_byte(write(tmp_path / "a.gguf"))
    attention = D * H * (2 * N + 2 * K)
    assert model.params == 2 * V * D + D + L * (attention + 3 * D * F + 2 * D)
    assert model.kv_bytes_per_token == L * 2 * K * H * 2
    assert model.family == "llama"
    assert model.max_context == 4096
    embedding, head = V * D * 144 // 256, V * D * 210 // 256
    six = L // 2 * (K * H * D + D * F)
    four = L * (attention + 3 * D * F) - six
    assert model.weight_bytes == embedding + head + six * 210 // 256 + four * 144 // 256 + 4 * (2 * L + 1) * D
    first, second = (layer for _, layer in model.groups)
    assert isinstance(first.blocks[1], AttentionBlock)
    assert first.blocks[1].overrides == (("v", FORMATS["q6_k"]),)
    assert second.blocks[1].overrides == ()


def test_equal_dimensions_give_the_model_of_the_config(tmp_path: Path) -> None:
    model = to_the_byte(write(tmp_path / "a.gguf"))
    other = load_model(
        {
            "model_type": "llama", "hidden_size": D, "intermediate_size": F, "num_hidden_layers": L, "num_attention_heads": N,
            "num_key_value_heads": K, "head_dim": H, "vocab_size": V, "tie_word_embeddings": False,
        }
    )  # fmt: skip
    assert model.params == other.params
    assert model.state_bytes(1000) == other.state_bytes(1000)


def test_tied_embeddings(tmp_path: Path) -> None:
    model = to_the_byte(write(tmp_path / "a.gguf", tied=True))
    assert model.head[0].params() == {}
    assert getattr(model.head[0], "weight", None) == FORMATS["q6_k"]


def test_qwen2_has_biases(tmp_path: Path) -> None:
    model = to_the_byte(write(tmp_path / "a.gguf", "qwen2", biases=True))
    plain = load_model(write(tmp_path / "b.gguf"))
    assert model.params - plain.params == L * (N + 2 * K) * H
    assert model.weight_bytes - plain.weight_bytes == 4 * L * (N + 2 * K) * H
    assert model.params_by_format[FP32] == L * ((N + 2 * K) * H + 2 * D) + D


def test_qwen3_has_norms_of_queries_and_keys(tmp_path: Path) -> None:
    model = to_the_byte(write(tmp_path / "a.gguf", "qwen3", qk_norm=True))
    assert model.params - load_model(write(tmp_path / "b.gguf")).params == L * 2 * H


@pytest.mark.parametrize("architecture", ["gemma2", "gemma3"])
def test_gemma_alternates(tmp_path: Path, architecture: str) -> None:
    qk_norm = architecture == "gemma3"
    path = write(tmp_path / "a.gguf", architecture, tied=True, sandwich=True, qk_norm=qk_norm, extra=window, layers=6)
    model = to_the_byte(path)
    full = 3 if architecture == "gemma2" else 1
    tokens = 2 * K * H * 2
    assert model.state_bytes(1000) == tokens * (full * 1000 + (6 - full) * 128)
    with pytest.raises(InputError, match=r"sliding_window is missing"):
        load_model(write(tmp_path / "b.gguf", architecture, tied=True, sandwich=True, qk_norm=qk_norm))


def test_a_window_in_a_llama_is_mistral(tmp_path: Path) -> None:
    model = to_the_byte(write(tmp_path / "a.gguf", extra=window))
    assert model.family == "mistral"
    assert model.state_bytes(1000) == L * 2 * K * H * 2 * 128


@pytest.mark.parametrize(("architecture", "family"), [("llama", "mixtral"), ("qwen3moe", "qwen3_moe")])
def test_experts(tmp_path: Path, architecture: str, family: str) -> None:
    path = write(tmp_path / "a.gguf", architecture, experts=8, qk_norm=architecture != "llama", extra=experts)
    model = to_the_byte(path)
    assert model.family == family
    assert model.params - model.active_params == L * 6 * 3 * D * F


def test_a_tensor_too_few_is_refused_by_name(tmp_path: Path) -> None:
    path = write(tmp_path / "a.gguf", without=("ffn_up",))
    with pytest.raises(UnsupportedModel, match=r"a\.gguf is not what its architecture is read as.*layers"):
        load_model(path)


def test_biases_where_a_family_has_others_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModel, match="is not what its architecture is read as"):
        load_model(write(tmp_path / "a.gguf", "llama", biases=True))


def test_an_architecture_that_is_not_read(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModel, match=r"architecture 'mamba2' is not read from GGUF.*config\.json"):
        load_model(write(tmp_path / "a.gguf", "mamba2"))


def test_a_folder_with_a_gguf_alone(tmp_path: Path) -> None:
    write(tmp_path / "only.gguf")
    assert load_model(tmp_path).params == load_model(tmp_path / "only.gguf").params
    write(tmp_path / "other.gguf")
    with pytest.raises(InputError, match="holds 2 GGUF models"):
        load_model(tmp_path)


def test_a_long_vocabulary_is_stepped_over(tmp_path: Path) -> None:
    short, long = write(tmp_path / "a.gguf"), write(tmp_path / "b.gguf", tokens=5000)
    assert "tokenizer.ggml.tokens" in read_gguf(short).metadata
    found = read_gguf(long)
    assert "tokenizer.ggml.tokens" not in found.metadata
    assert found.tensors == read_gguf(short).tensors


def test_a_model_in_two_files(tmp_path: Path) -> None:
    whole = read_gguf(write(tmp_path / "whole.gguf"))
    for number, names in ((1, list(whole.tensors)[:20]), (2, list(whole.tensors)[20:])):
        writer = gguf.GGUFWriter(tmp_path / f"m-0000{number}-of-00002.gguf", "llama")
        if number == 1:
            for key, value in whole.metadata.items():
                if key.startswith("llama."):
                    writer.add_uint32(key, value)
        for name in names:
            tensor = whole.tensors[name]
            zeros(writer, name, tensor.shape, Type[tensor.dtype])
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
    found = read_gguf(tmp_path / "m-00001-of-00002.gguf")
    assert (found.files, found.tensors) == (2, whole.tensors)
    (tmp_path / "whole.gguf").unlink()
    assert load_model(tmp_path).params == to_the_byte(tmp_path / "m-00001-of-00002.gguf").params
    (tmp_path / "m-00002-of-00002.gguf").unlink()
    with pytest.raises(InputError, match=r"m-00002-of-00002\.gguf is missing"):
        load_model(tmp_path / "m-00001-of-00002.gguf")


@pytest.mark.parametrize("size", [0, 3, 4, 10, 30, 100, 400, -20_000, -40])
def test_a_file_that_is_cut_off(tmp_path: Path, size: int) -> None:
    path = write(tmp_path / "a.gguf")
    path.write_bytes(path.read_bytes()[:size])
    with pytest.raises(InputError, match=r"a\.gguf .*(broken GGUF header or is cut off|is no GGUF file)") as caught:
        load_model(path)
    assert "\n" not in str(caught.value)


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="cannot be read"):
        load_model(tmp_path / "absent.gguf")
    with pytest.raises(InputError, match="cannot be read"):
        load_model("absent.gguf")


def test_block_sizes_are_those_of_the_library() -> None:
    """Every quantised type that the library writes, but its internal ones."""
    for kind, (block, size) in gguf.GGML_QUANT_SIZES.items():
        name = TYPES.get(kind.name, kind.name.lower())
        if name in FORMATS:
            assert FORMATS[name].bits * block == 8 * size, name
        else:
            assert kind.name in ("Q8_1", "Q8_K", "I8", "I16", "I32", "I64", "F64"), kind.name
    assert format_named("q4_k").bits * 256 == 8 * 144


def test_without_the_library_the_extra_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    path = write(tmp_path / "a.gguf")
    monkeypatch.setitem(sys.modules, "gguf", None)
    with pytest.raises(ModuleNotFoundError, match=r"pip install .*\[checkpoints\]"):
        load_model(path)
