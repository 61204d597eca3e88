"""Layers that keep a state of fixed size beside layers whose cache grows."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from fractions import Fraction
from typing import Any

import pytest

from roofline import Deployment, Model, load_accelerator, load_model
from roofline.accelerator import Accelerator, Quantity
from roofline.edits import apply, dtype
from roofline.formats import FORMATS

MIB = 2**20


def rtx_4080() -> Accelerator:
    """A 16 GB card at 716.8 GB/s (NVIDIA Ada whitepaper)."""
    sheet = "NVIDIA Ada whitepaper"
    return replace(
        load_accelerator("rtx-4090"),
        bandwidth=Quantity(716_800_000_000, "datasheet", sheet),
        nominal=Quantity(16_000_000_000, "datasheet", sheet),
        reported=None,
        visible=None,
    )


@pytest.mark.complaint("D07", "KV 16384 MiB + recurrent 598.5 MiB", "about 47 GB")
def test_a_recurrent_layer_keeps_the_same_at_any_length(state_of: Callable[[Model, str, int], Any]) -> None:
    """lmstudio-ai/lmstudio-bug-tracker#1862: all 64 layers of Qwen3.6-27B billed; llama.cpp keeps the recurrence in fp32."""
    model = load_model("qwen3.6-27b")
    cache = state_of(model, "kv", 262144)
    recurrent = 4 * model.state_elements_per_sequence * 4
    assert cache == 16384 * MIB
    assert recurrent == 4 * 48 * (48 * 128 * 128 + 10240 * 3) * 4
    assert recurrent == Fraction(5985, 10) * MIB
    whole = FORMATS["q8_0"].bytes(model.params) + cache + recurrent
    assert abs(float(whole) / 1e9 - 47) < 1


@pytest.mark.complaint("D08", "8.5 GB at 8k context", "67 t/s measured")
def test_a_hybrid_fits_and_streams_few_keys(config_of: Callable[..., dict[str, Any]]) -> None:
    """AlexsJones/llmfit#203: Qwen3.5-9B in Q8_0 at 8K declared not to fit a 16 GB card and to run at 40.9 tok/s.

    8 of 32 layers cache keys. The measured rate lies below our bound and above four fifths of it.
    """
    model = apply(load_model(config_of("qwen35-9b")), [dtype("q8_0")])
    assert model.kv_bytes_per_token == 8 * 2 * 4 * 256 * 2
    step = Deployment(model, rtx_4080()).decode(1, 8192)
    assert step.memory.fits
    assert step.memory.kv_bytes == 8192 * 32768 + model.state_bytes_per_sequence
    assert 67 < step.output_tok_per_s < 67 / 0.8
    stored = FORMATS["q8_0"].bytes(model.params - 248320 * 4096)
    assert 8.5e9 < stored + step.memory.kv_bytes < 9e9, "the lookup table stays on the host"


@pytest.mark.complaint("D10", "growth only from attention layers (4 of 40 in granite-4 tiny)")
def test_only_attention_layers_grow() -> None:
    """ollama/ollama#12186: 28 GB more for granite4 tiny between 16384 and 131072 tokens."""
    model = load_model("granite-4.0-h-tiny")
    growing = [number for number, pieces in model.state for piece in pieces if piece.grows_with == "token"]
    assert (sum(growing), len(model.layers)) == (4, 40)
    growth = model.state_bytes(131072) - model.state_bytes(16384)
    assert growth == (131072 - 16384) * 4 * 2 * 4 * 128 * 2
    assert growth < 1e9


@pytest.mark.complaint("D27", "attention layers only plus fixed Mamba cache per sequence")
def test_a_pattern_names_the_layers_that_cache() -> None:
    """NVIDIA/TensorRT-LLM#5371: KV in all 118 layers of Nemotron-H-56B, no state of its Mamba layers."""
    model = load_model("nemotron-h-56b")
    assert len(model.layers) == 118
    assert model.kv_bytes_per_token == 10 * 2 * 8 * 128 * 2
    assert model.state_elements_per_sequence == 54 * (256 * 64 * 256 + 3 * (256 * 64 + 2 * 8 * 256))


@pytest.mark.complaint("D30", "sum over KV groups")
def test_the_state_of_a_hybrid_is_the_sum_of_its_groups() -> None:
    """vllm-project/vllm#36030: one group of a Mamba-attention hybrid counted, and the context overestimated."""
    model = load_model("nemotron-h-56b")
    fixed = model.state_bytes_per_sequence
    assert fixed > 0
    assert model.state_bytes(10000) == fixed + 10000 * 40960
    gpu = load_accelerator("h200-sxm")
    largest = Deployment(model, gpu).largest_context(1)
    assert largest.size is not None
    needed = model.weight_bytes + fixed + (largest.size + 2) * 40960  # the step adds a token of its own
    workspace = Deployment(model, gpu).decode(1, largest.size + 1).memory.workspace_bytes
    assert needed + workspace - gpu.capacity.value == largest.missing_bytes > 0
