"""Stored bytes from headers: every packing, agreement with the config, and files that are no checkpoints."""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest

from roofline.checkpoints.agreement import compare
from roofline.checkpoints.headers import read_headers
from roofline.checkpoints.packed import unpacked
from roofline.checkpoints.stored import Share, Tensor
from roofline.configs.load import load_model
from roofline.errors import InputError

pytest.importorskip("safetensors")

D, F, V, L, N, K, H = 256, 512, 320, 3, 8, 2, 32
CONFIG: dict[str, Any] = {
    "model_type": "llama", "hidden_size": D, "intermediate_size": F, "num_hidden_layers": L, "num_attention_heads": N,
    "num_key_value_heads": K, "vocab_size": V, "max_position_embeddings": 4096, "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
}  # fmt: skip
MATRICES = {
    "self_attn.q_proj": (N * H, D), "self_attn.k_proj": (K * H, D), "self_attn.v_proj": (K * H, D),
    "self_attn.o_proj": (D, N * H), "mlp.gate_proj": (F, D), "mlp.up_proj": (F, D), "mlp.down_proj": (D, F),
}  # fmt: skip
BITS = {"F32": 32, "BF16": 16, "F16": 16, "F8_E4M3": 8, "F8_E8M0": 8, "U8": 8, "I8": 8, "I32": 32, "I64": 64}

Shapes = dict[str, tuple[str, tuple[int, ...]]]


def write(path: Path, tensors: Mapping[str, tuple[str, tuple[int, ...]]]) -> int:
    """Writes a safetensors file of zeros; returns the bytes of its tensors."""
    header: dict[str, Any] = {}
    end = 0
    for name, (dtype, shape) in tensors.items():
        size = Tensor(dtype, shape, 0).elements * BITS[dtype] // 8
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [end, end + size]}
        end += size
    text = json.dumps(header).encode()
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        file.truncate(8 + len(text) + end)
    return end


def plain(dtype: str = "BF16") -> Shapes:
    """The tensors of CONFIG as a Hugging Face checkpoint names them."""
    found: Shapes = {"model.embed_tokens.weight": (dtype, (V, D))}
    for index in range(L):
        layer = f"model.layers.{index}"
        found |= {f"{layer}.{name}.weight": (dtype, shape) for name, shape in MATRICES.items()}
        found |= {f"{layer}.{name}.weight": (dtype, (D,)) for name in ("input_layernorm", "post_attention_layernorm")}
    return {**found, "model.norm.weight": (dtype, (D,)), "lm_head.weight": (dtype, (V, D))}


def repacked(pack: Any) -> Shapes:
    """The same with every matrix of a layer stored as ``pack(path, rows, columns)`` says."""
    found: Shapes = {}
    for name, (dtype, shape) in plain().items():
        path = name.removesuffix(".weight")
        if path.partition(".layers.")[2].partition(".")[2] in MATRICES:
            found |= pack(path, *shape)
        else:
            found[name] = (dtype, shape)
    return found


def gptq(path: str, rows: int, columns: int) -> Shapes:
    """AutoGPTQ, 4 bits, groups of 128: packed along the inputs."""
    groups = columns // 128
    return {
        f"{path}.qweight": ("I32", (columns // 8, rows)), f"{path}.qzeros": ("I32", (groups, rows // 8)),
        f"{path}.scales": ("F16", (groups, rows)), f"{path}.g_idx": ("I32", (columns,)),
    }  # fmt: skip


def awq(path: str, rows: int, columns: int) -> Shapes:
    """AutoAWQ, 4 bits, groups of 128: packed along the outputs."""
    groups = columns // 128
    return {
        f"{path}.qweight": ("I32", (columns, rows // 8)), f"{path}.qzeros": ("I32", (groups, rows // 8)),
        f"{path}.scales": ("F16", (groups, rows)),
    }  # fmt: skip


def fp8_block(path: str, rows: int, columns: int) -> Shapes:
    """fp8 with an fp32 scale per 128x128."""
    return {
        f"{path}.weight": ("F8_E4M3", (rows, columns)),
        f"{path}.weight_scale_inv": ("F32", (-(-rows // 128), -(-columns // 128))),
    }


def nvfp4(path: str, rows: int, columns: int) -> Shapes:
    """ModelOpt's NVFP4: two weights per byte, an fp8 scale per 16, an fp32 scale per tensor."""
    return {
        f"{path}.weight": ("U8", (rows, columns // 2)), f"{path}.weight_scale": ("F8_E4M3", (rows, columns // 16)),
        f"{path}.weight_scale_2": ("F32", ()), f"{path}.input_scale": ("F32", ()),
    }  # fmt: skip


def checkpoint(folder: Path, tensors: Shapes, config: dict[str, Any] = CONFIG) -> Path:
    """A model folder: config.json and one safetensors file."""
    (folder / "config.json").write_text(json.dumps(config))
    write(folder / "model.safetensors", tensors)
    return folder


def quantised(section: dict[str, Any]) -> dict[str, Any]:
    return {**CONFIG, "quantization_config": section}


def test_a_plain_checkpoint_holds_what_its_config_describes(tmp_path: Path) -> None:
    stored = read_headers(checkpoint(tmp_path, plain()))
    model = load_model(CONFIG)
    assert (stored.params, stored.bytes) == (model.params, model.weight_bytes)
    assert stored.by_format == {"bf16": Share(model.params, 2 * model.params)}
    assert stored.modules["model.layers.1.mlp.down_proj"] == Share(D * F, 2 * D * F)
    found = compare(stored, model)
    assert found.agrees
    assert found.differences == ()
    assert load_model(tmp_path).assumes[-1] == found.summary
    assert "as the config says" in found.summary


def test_the_path_of_the_config_leaves_the_weights_out(tmp_path: Path) -> None:
    folder = checkpoint(tmp_path, plain())
    (folder / "model.safetensors").write_bytes(b"broken")
    assert load_model(folder / "config.json").params == load_model(CONFIG).params
    with pytest.raises(InputError, match=r"no valid safetensors header.*to leave the weights out, give .*config\.json"):
        load_model(folder)


def test_shards_are_one_checkpoint(tmp_path: Path) -> None:
    tensors = plain()
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    names = list(tensors)
    halves = {"a.safetensors": names[:11], "b.safetensors": names[11:]}
    total = sum(write(tmp_path / file, {name: tensors[name] for name in part}) for file, part in halves.items())
    places = {name: file for file, part in halves.items() for name in part}
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"metadata": {"total_size": total}, "weight_map": places}))
    stored = read_headers(tmp_path)
    assert (stored.files, stored.bytes) == (2, total)
    assert compare(stored, load_model(CONFIG)).agrees
    assert read_headers(index) == read_headers(tmp_path)

    index.write_text(json.dumps({"metadata": {"total_size": total + 2}, "weight_map": places}))
    with pytest.raises(InputError, match=f"total_size of {total + 2} bytes, its files hold {total}"):
        read_headers(tmp_path)
    index.write_text(json.dumps({"weight_map": {**places, "more.weight": "a.safetensors"}}))
    with pytest.raises(InputError, match=r"more\.weight is in no file"):
        read_headers(tmp_path)
    index.write_text(json.dumps({"weight_map": places | {names[0]: "c.safetensors"}}))
    with pytest.raises(InputError, match=r"names c\.safetensors, which is not beside it \(1 of 3 missing\)"):
        read_headers(tmp_path)
    index.write_text(json.dumps({"weight_map": places | {names[0]: "../a.safetensors"}}))
    with pytest.raises(InputError, match="outside its folder"):
        read_headers(tmp_path)
    write(tmp_path / "b.safetensors", {name: tensors[name] for name in names[10:]})
    index.write_text(json.dumps({"weight_map": places}))
    with pytest.raises(InputError, match=f"{names[10]} stands in b.safetensors and in another file"):
        read_headers(tmp_path)


INNER = sum(rows * columns for rows, columns in MATRICES.values())
WORDS = sum(columns for _, columns in MATRICES.values())

PACKED = {
    # layout, config section, format, parameters, bytes of a layer's matrices with scales
    "awq": (awq, {"quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": True}, "int4", Fraction(133, 32)),
    "fp8 by block": (fp8_block, {"quant_method": "fp8", "weight_block_size": [128, 128]}, "fp8", None),
    "nvfp4": (nvfp4, {"quant_method": "modelopt", "quant_algo": "NVFP4", "group_size": 16}, "nvfp4", None),
    "gptq": (gptq, {"quant_method": "gptq", "bits": 4, "group_size": 128, "sym": False, "desc_act": True}, "int4", None),
}


@pytest.mark.parametrize(("pack", "section", "name", "bits"), PACKED.values(), ids=PACKED)
def test_packed_weights_are_unpacked(tmp_path: Path, pack: Any, section: Any, name: str, bits: Fraction | None) -> None:
    stored = read_headers(checkpoint(tmp_path, repacked(pack), quantised(section)))
    assert stored.params == load_model(CONFIG).params
    assert stored.by_format[name].elements == L * INNER
    assert stored.bytes == sum(Tensor(d, s, 0).elements * BITS[d] // 8 for d, s in repacked(pack).values())
    if bits is not None:
        assert all(weight.bits == bits for weight in stored.weights if weight.format == name)
    assert load_model(tmp_path).params == stored.params


def test_awq_is_stored_to_the_byte_as_its_config_says(tmp_path: Path) -> None:
    folder = checkpoint(tmp_path, repacked(awq), quantised(PACKED["awq"][1]))
    found = compare(read_headers(folder), load_model(folder))
    assert found.agrees
    assert found.scale_bytes == L * INNER // 128 * 5 // 2


def test_what_formats_leave_out_is_named(tmp_path: Path) -> None:
    """GPTQ keeps the order of the inputs (four bytes each); ModelOpt two fp32 scales per tensor."""
    folder = checkpoint(tmp_path, repacked(gptq), quantised(PACKED["gptq"][1]))
    found = compare(read_headers(folder), load_model(folder))
    assert found.same_params
    assert not found.agrees
    assert found.stored_bytes - found.bytes == 4 * L * WORDS
    assert [difference.where for difference in found.differences] == ["layers 0-2"]
    assert found.differences[0].bytes == 4 * WORDS
    assert "DIFFER" in load_model(folder).assumes[-1]

    other = checkpoint(tmp_path, repacked(nvfp4), quantised(PACKED["nvfp4"][1]))
    found = compare(read_headers(other), load_model(other))
    assert found.same_params
    assert found.stored_bytes - found.bytes == 8 * L * len(MATRICES)


def test_scales_of_ragged_blocks_are_whole(tmp_path: Path) -> None:
    """64 rows of a 128x128 block take a whole scale where the format counts half of one."""
    folder = checkpoint(tmp_path, repacked(fp8_block), quantised(PACKED["fp8 by block"][1]))
    found = compare(read_headers(folder), load_model(folder))
    ragged = 2 * (D // 128) * 4 // 2
    assert found.stored_bytes - found.bytes == L * ragged


SINGLE = {
    "compressed-tensors, 4 bits": (
        {"m.weight_packed": ("I32", (64, 32)), "m.weight_scale": ("BF16", (64, 2)), "m.weight_shape": ("I64", (2,))},
        4, "int4", 64 * 256, 64 * 32 * 4, 64 * 2 * 2 + 16,
    ),
    "compressed-tensors, zero points": (
        {"m.weight_packed": ("I32", (64, 64)), "m.weight_scale": ("BF16", (64, 2)), "m.weight_zero_point": ("I32", (16, 2))},
        None, "int8", 64 * 256, 64 * 64 * 4, 64 * 2 * 2 + 128,
    ),
    "compressed-tensors, mxfp4": (
        {"m.weight_packed": ("U8", (64, 128)), "m.weight_scale": ("U8", (64, 8))}, None, "mxfp4", 64 * 256, 64 * 128, 512,
    ),
    "gpt-oss": (
        {"e.down_proj_blocks": ("U8", (4, 64, 8, 16)), "e.down_proj_scales": ("U8", (4, 64, 8))},
        None, "mxfp4", 4 * 64 * 256, 4 * 64 * 128, 4 * 64 * 8,
    ),
    "DeepSeek-V4": (
        {"m.weight": ("I8", (64, 128)), "m.scale": ("F8_E8M0", (64, 8))}, None, "mxfp4", 64 * 256, 64 * 128, 512,
    ),
    "bitsandbytes, 4 bits": (
        {
            "m.weight": ("U8", (8192, 1)), "m.weight.absmax": ("F32", (256,)), "m.weight.quant_map": ("F32", (16,)),
            "m.weight.quant_state.bitsandbytes__nf4": ("U8", (90,)),
        },
        None, "nf4", 16384, 8192, 1024 + 64 + 90,
    ),
    "bitsandbytes, 8 bits": ({"m.weight": ("I8", (64, 256)), "m.SCB": ("F32", (64,))}, None, "int8", 16384, 16384, 256),
    "mxfp8": ({"m.weight": ("F8_E4M3", (64, 256)), "m.weight_scale": ("U8", (64, 8))}, None, "mxfp8", 16384, 16384, 512),
    "fp8 by tensor": (
        {"m.weight": ("F8_E4M3", (64, 256)), "m.weight_scale": ("F32", ()), "m.k_scale": ("F32", ())},
        None, "fp8", 16384, 16384, 8,
    ),
    "three bits": (
        {"m.qweight": ("I32", (24, 64)), "m.qzeros": ("I32", (2, 6)), "m.scales": ("F16", (2, 64))},
        None, "int3", 16384, 6144, 48 + 256,
    ),
}  # fmt: skip


@pytest.mark.parametrize(("tensors", "bits", "name", "elements", "size", "scales"), SINGLE.values(), ids=SINGLE)
def test_one_packed_weight(tensors: Shapes, bits: int | None, name: str, elements: int, size: int, scales: int) -> None:
    given = {key: Tensor(d, s, Tensor(d, s, 0).elements * BITS[d] // 8) for key, (d, s) in tensors.items()}
    (weight,), buffers = unpacked(given, bits)
    assert (weight.format, weight.elements, weight.bytes, weight.scale_bytes) == (name, elements, size, scales)
    assert buffers == ()


def test_bits_that_nothing_tells_are_asked_for() -> None:
    with pytest.raises(InputError, match=r"how many bits m\.weight_packed packs.*quantization_config"):
        unpacked({"m.weight_packed": Tensor("I32", (64, 32), 8192), "m.weight_scale": Tensor("BF16", (64, 2), 256)})


def test_what_is_not_learned_is_a_buffer() -> None:
    names = {
        "model.layers.0.self_attn.rotary_emb.inv_freq": Tensor("F32", (16,), 64),
        "h.0.attn.bias": Tensor("F32", (1, 1, 8, 8), 256),
        "h.0.attn.masked_bias": Tensor("F32", (), 4),
        "vision.position_ids": Tensor("I64", (1, 9), 72),
        "h.0.attn.c_attn.bias": Tensor("F32", (48,), 192),
    }
    weights, buffers = unpacked(names)
    assert [weight.name for weight in weights] == ["h.0.attn.c_attn.bias"]
    assert sum(buffer.bytes for buffer in buffers) == 64 + 256 + 4 + 72


def test_a_layer_that_is_not_what_the_config_says_is_named(tmp_path: Path) -> None:
    tensors = plain()
    tensors["model.layers.1.mlp.down_proj.weight"] = ("BF16", (D, F - 64))
    tensors["model.layers.2.self_attn.q_proj.bias"] = ("BF16", (D,))
    folder = checkpoint(tmp_path, tensors)
    found = compare(read_headers(folder), load_model(folder))
    assert not found.same_params
    assert [(difference.where, difference.params) for difference in found.differences] == [
        ("layer 1", -64 * D),
        ("layer 2", D),
    ]
    assert [held.name for held in found.differences[0].stored] == ["mlp"]
    assert [held.name for held in found.differences[1].described] == ["attention"]
    assert "layer 1: the checkpoint has mlp" in found.summary


def test_what_lies_beside_the_text_model_is_told_apart(tmp_path: Path) -> None:
    """A copy of tied embeddings, a layer that predicts further tokens, buffers."""
    tensors = {
        **plain(),
        "model.layers.3.eh_proj.weight": ("BF16", (D, 2 * D)),
        "model.layers.3.mlp.up_proj.weight": ("BF16", (F, D)),
        "model.rotary_emb.inv_freq": ("F32", (H // 2,)),
    }
    folder = checkpoint(tmp_path, tensors, {**CONFIG, "tie_word_embeddings": True})
    found = compare(read_headers(folder), load_model(folder))
    assert found.agrees
    assert [(held.name, held.params) for held in found.aside] == [
        ("prediction of further tokens", 2 * D * D + F * D),
        ("a copy of tied embeddings", V * D),
        ("buffers", H // 2),
    ]


BROKEN = {
    "empty": b"",
    "short": b"abc",
    "a length beyond the file": struct.pack("<Q", 10**9) + b"{}",
    "no JSON": struct.pack("<Q", 5) + b"{bad}",
    "no tensors but text": b"version https://git-lfs.github.com/spec/v1\noid sha256:0000\nsize 1234\n",
}


@pytest.mark.parametrize("data", BROKEN.values(), ids=BROKEN)
def test_a_file_that_is_no_safetensors(tmp_path: Path, data: bytes) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(data)
    with pytest.raises(InputError, match=r"model\.safetensors .*has no valid safetensors header or is cut off") as caught:
        read_headers(path)
    assert "\n" not in str(caught.value)


def test_a_file_that_is_cut_off(tmp_path: Path) -> None:
    path = checkpoint(tmp_path, plain()) / "model.safetensors"
    whole = path.read_bytes()
    for size in (len(whole) - 1, len(whole) // 2, 100):
        path.write_bytes(whole[:size])
        with pytest.raises(InputError, match=f"{size} bytes"):
            read_headers(path)


def test_places_without_weights(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="nothing to count"):
        read_headers(tmp_path)
    with pytest.raises(InputError, match="there is no file"):
        read_headers(tmp_path / "absent.safetensors")
    (tmp_path / "model.bin").write_bytes(b"x")
    with pytest.raises(InputError, match=r"neither a \.safetensors nor a \.gguf"):
        read_headers(tmp_path / "model.bin")
    (tmp_path / "model.safetensors.index.json").write_text("[]")
    with pytest.raises(InputError, match="not an index"):
        read_headers(tmp_path)


def test_a_folder_without_the_library_still_loads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    folder = checkpoint(tmp_path, plain())
    monkeypatch.setitem(sys.modules, "safetensors", None)
    assert "not compared" in load_model(folder).assumes[-1]
    with pytest.raises(ModuleNotFoundError, match=r"pip install .*\[checkpoints\]"):
        read_headers(folder)


def test_command_line_shows_what_is_stored(tmp_path: Path, cli: Any) -> None:
    answer = cli("models", checkpoint(tmp_path, plain()), "--stored", "-o", "json")
    records = {record["module"]: record for record in answer.records}
    assert records["model.layers.*.mlp.down_proj"] == {
        "module": "model.layers.*.mlp.down_proj", "format": "bf16", "tensors": L, "layers": L, "params": L * D * F,
        "stored_bytes": 2 * L * D * F, "scale_bytes": 0,
    }  # fmt: skip
    assert sum(record["stored_bytes"] for record in records.values()) == load_model(CONFIG).weight_bytes
    assert "as the config says" in cli("models", tmp_path, "--stored").out


def test_command_line_ends_with_a_finding_where_the_config_differs(tmp_path: Path, cli: Any) -> None:
    folder = checkpoint(tmp_path, plain(), {**CONFIG, "intermediate_size": F + 64})
    answer = cli("models", folder, "--stored")
    assert answer.code == 1
    assert "DIFFER" in answer.out
    (folder / "config.json").unlink()
    answer = cli("models", folder, "--stored")
    assert (answer.code, "no config.json" in answer.out) == (0, True)
    assert cli("models", "--stored").code == 2
    assert cli("models", tmp_path / "absent", "--stored").code == 2


def test_an_answer_about_other_weights_than_those_that_lie_there_says_so_on_stderr(tmp_path: Path, cli: Any) -> None:
    folder = checkpoint(tmp_path, repacked(gptq), quantised(PACKED["gptq"][1]))
    answer = cli("what-if", str(folder), "--gpu", "h100-sxm", "-o", "json")
    assert "note: stored weights DIFFER" in answer.err
    assert any("DIFFER" in line for line in answer.records[0]["assumes"])
    assert "DIFFER" not in cli("what-if", str(folder), "--gpu", "h100-sxm", "-o", "json", "--quiet").err


def test_command_line_names_the_extra(tmp_path: Path, cli: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    monkeypatch.setitem(sys.modules, "safetensors", None)
    answer = cli("models", checkpoint(tmp_path, plain()), "--stored")
    assert answer.code == 3
    assert "[checkpoints]'" in answer.err
