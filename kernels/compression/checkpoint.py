"""Writes a decoder, plain or quantised, as a Hugging Face folder that engines and ``roofline models FOLDER --stored`` read.

Quantised weights are stored in the container of their kind: asymmetric 4-bit codes without an order as AutoAWQ stores them,
other asymmetric ones as AutoGPTQ does (zero points less one, ``g_idx`` where inputs were sorted), symmetric ones as
compressed-tensors does ("pack-quantized", which stores no zero points but the shape of every weight, and whole codes per
word, so that 3-bit ones do not fit it).
"""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from roofline.kernels.compression.affine import Quantized
from roofline.kernels.compression.network import Decoder
from roofline.kernels.compression.quantize import Compressed
from roofline.kernels.packing import WORD, pack_awq, pack_gptq, pack_gptq_zeros, pack_rows

NAMES = {
    torch.float16: "F16", torch.bfloat16: "BF16", torch.float32: "F32", torch.int32: "I32", torch.int64: "I64",
}  # fmt: skip

Tensors = dict[str, torch.Tensor]


def container(weights: Mapping[str, Quantized]) -> str:
    """The quantisation method whose storage holds the weights: "awq", "gptq" or "compressed-tensors".

    Raises ValueError for weights that none of them holds.
    """
    grids = {weight.grid for weight in weights.values()}
    ordered = any(weight.order is not None for weight in weights.values())
    if not all(grid.asymmetric for grid in grids):
        if ordered or any(WORD % grid.bits for grid in grids):
            raise ValueError(
                "symmetric codes with an order of inputs, or of bits that do not divide 32, have no container; "
                "quantise to an asymmetric format"
            )
        return "compressed-tensors"
    return "awq" if not ordered and {grid.bits for grid in grids} == {4} else "gptq"


def packed(weight: Quantized, kind: str) -> Tensors:
    """The tensors of one weight, by the last parts of their names."""
    bits, codes, scales = weight.grid.bits, weight.codes, weight.scales
    if kind == "compressed-tensors":
        shape = torch.tensor(codes.shape, dtype=torch.int64)
        return {"weight_packed": pack_rows(codes.T, bits).T, "weight_scale": scales, "weight_shape": shape}
    assert weight.zeros is not None
    if kind == "awq":
        return {"qweight": pack_awq(codes.T), "qzeros": pack_awq(weight.zeros.T), "scales": scales.T}
    order = weight.order
    by_input = codes.T if order is None else codes.T[order.argsort()]
    tensors = {
        "qweight": pack_gptq(by_input, bits), "qzeros": pack_gptq_zeros(weight.zeros.T, bits), "scales": scales.T,
    }  # fmt: skip
    if order is not None:
        tensors["g_idx"] = (order.argsort() // weight.grid.group).to(torch.int32)
    return tensors


def section(compressed: Compressed, kind: str) -> dict[str, Any]:
    """The quantization_config of the container."""
    grid = next(iter(compressed.weights.values())).grid
    if kind == "awq":
        return {"quant_method": "awq", "bits": 4, "group_size": grid.group, "zero_point": True, "version": "gemm"}
    if kind == "gptq":
        ordered = any(weight.order is not None for weight in compressed.weights.values())
        return {
            "quant_method": "gptq", "bits": grid.bits, "group_size": grid.group, "sym": False, "desc_act": ordered,
            "checkpoint_format": "gptq",
        }  # fmt: skip
    weights = {
        "num_bits": grid.bits, "type": "int", "symmetric": True, "strategy": "group", "group_size": grid.group, "dynamic": False,
    }  # fmt: skip
    group = {"targets": ["Linear"], "weights": weights, "input_activations": None, "output_activations": None}
    return {
        "quant_method": "compressed-tensors", "format": "pack-quantized", "quantization_status": "compressed",
        "config_groups": {"group_0": group}, "ignore": ["lm_head"], "kv_cache_scheme": None,
    }  # fmt: skip


def save_tensors(path: Path, tensors: Mapping[str, torch.Tensor]) -> None:
    """One safetensors file: the length of a header, the header in JSON, the data of all tensors behind one another."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    data: list[bytes] = []
    end = 0
    for name, tensor in tensors.items():
        raw = tensor.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes()
        header[name] = {"dtype": NAMES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [end, end + len(raw)]}
        data.append(raw)
        end += len(raw)
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    path.write_bytes(struct.pack("<Q", len(text)) + text + b"".join(data))


def write(folder: str | Path, made: Decoder | Compressed) -> Path:
    """Writes config.json and model.safetensors into a folder, made if need be; everything not quantised in fp16."""
    place = Path(folder)
    place.mkdir(parents=True, exist_ok=True)
    network = made.network if isinstance(made, Compressed) else made
    weights = made.weights if isinstance(made, Compressed) else {}
    config, kind = network.sizes.config(), container(weights) if weights else ""
    if isinstance(made, Compressed):
        config["quantization_config"] = section(made, kind)
    tensors: Tensors = {}
    for name, parameter in network.state_dict().items():
        module = name.removesuffix(".weight")
        if module in weights:
            tensors |= {f"{module}.{last}": tensor for last, tensor in packed(weights[module], kind).items()}
        else:
            tensors[name] = parameter.to(torch.float16)
    (place / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    save_tensors(place / "model.safetensors", tensors)
    return place
