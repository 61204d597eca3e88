"""Whole networks in fewer bits: nearer than rounding, and stored as the edits of the model say."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

pytest.importorskip("triton")

import torch

from roofline.checkpoints.agreement import compare
from roofline.checkpoints.headers import read_headers
from roofline.configs.load import load_model
from roofline.edits.edit import apply
from roofline.kernels.compression.checkpoint import write
from roofline.kernels.compression.distillation import divergence
from roofline.kernels.compression.network import Decoder
from roofline.kernels.compression.quantize import METHODS, quantize
from roofline.kernels.packing import unpack_awq
from roofline.model import Model

Correlated = Callable[[int], tuple[Decoder, torch.Tensor, torch.Tensor]]
SEEDS = (0, 1, 2)


@pytest.mark.parametrize("name", ["int4-g32-asym", "int3-g32-asym"])
@pytest.mark.parametrize("seed", SEEDS)
def test_a_network_by_gptq_or_awq_is_nearer_to_the_whole_one(seed: int, name: str, correlated: Correlated) -> None:
    """KL divergence of next tokens, on tokens not seen: GPTQ below 2/3 of rounding to nearest, AWQ below 0.95."""
    network, tokens, held = correlated(seed)
    found = {}
    for method in METHODS:
        with torch.no_grad():
            found[method] = float(divergence(quantize(network, name, method, tokens).network(held), network(held)))
    assert max(found["gptq"], found["gptq-order"]) < 2 / 3 * found["rtn"]
    assert found["awq"] < 0.95 * found["rtn"]


def test_the_network_is_the_model_parameter_by_parameter(correlated: Correlated, described: Model) -> None:
    network = correlated(0)[0]
    assert sum(parameter.numel() for parameter in network.parameters()) == described.params
    assert described.family == "llama"


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("name", ["int4-g32-asym", "int3-g32-asym", "int4-g64", "int8-g32-asym"])
def test_stored_bytes_are_those_of_the_edited_model(name: str, method: str, correlated: Correlated, described: Model) -> None:
    network, tokens, _ = correlated(0)
    made = quantize(network, name, method, tokens[:1])
    assert made.stored_bytes == apply(described, [made.edit]).weight_bytes


@pytest.mark.parametrize(
    ("name", "method", "extra"),
    [("int4-g32-asym", "awq", 0), ("int3-g32-asym", "gptq", 0), ("int4-g64", "rtn", 16 * 14), ("int4-g32-asym", "gptq-order", 0)],
)
def test_a_written_checkpoint_is_what_its_config_describes(
    name: str, method: str, extra: int, tmp_path: Path, correlated: Correlated, described: Model
) -> None:
    """To the byte, but for what a container needs beside: the shape of each weight, or the group of each input."""
    pytest.importorskip("safetensors")
    network, tokens, _ = correlated(0)
    made = quantize(network, name, method, tokens[:1])
    folder = write(tmp_path, made)
    if method == "gptq-order":
        extra = sum(4 * weight.codes.shape[1] for weight in made.weights.values())
    agreement = compare(read_headers(folder), load_model(str(folder / "config.json")))
    assert agreement.same_params
    assert agreement.stored_bytes == agreement.bytes + extra
    assert agreement.bytes == apply(described, [made.edit]).weight_bytes


def test_a_written_checkpoint_holds_the_tensors_themselves(tmp_path: Path, correlated: Correlated) -> None:
    load_file = pytest.importorskip("safetensors.torch").load_file
    network, tokens, _ = correlated(0)
    made = quantize(network, "int4-g32-asym", "awq", tokens[:1])
    tensors = load_file(write(tmp_path, made) / "model.safetensors")
    name = "model.layers.1.mlp.down_proj"
    assert torch.equal(unpack_awq(tensors[f"{name}.qweight"]).T, made.weights[name].codes.long())
    assert torch.equal(tensors[f"{name}.scales"].T, made.weights[name].scales)


@pytest.mark.parametrize(("name", "method"), [("int3-g32", "rtn"), ("int4-g32", "gptq-order")])
def test_weights_without_a_container_are_refused(name: str, method: str, tmp_path: Path, correlated: Correlated) -> None:
    network, tokens, _ = correlated(0)
    with pytest.raises(ValueError, match="have no container; quantise to an asymmetric format"):
        write(tmp_path, quantize(network, name, method, tokens[:1]))


def test_an_unknown_method_is_refused(correlated: Correlated) -> None:
    network, tokens, _ = correlated(0)
    with pytest.raises(ValueError, match="'best' is none of rtn, gptq, gptq-order, awq"):
        quantize(network, "int4-g32", "best", tokens)
