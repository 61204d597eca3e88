"""What must fit: workspace, formats, one request in the pool, and what an error names."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from fractions import Fraction
from typing import Any

import pytest

from roofline import Deployment, load_accelerator, load_model
from roofline.allocation import Settings, allocate
from roofline.edits import apply, dtype
from roofline.engines.profile import load_engine
from roofline.parallel.layouts import layouts
from roofline.parallel.mesh import Mesh
from roofline.sharded import ShardedDeployment

GIB = 2**30


@pytest.mark.complaint("D11", "compute buffer about 2.4 GB more")
def test_a_fit_counts_the_workspace() -> None:
    """ollama/ollama#17201: weights and cache of DeepSeek-V2-Lite at 32K, and nothing for activations.

    The thread's figure is what one engine reserves; ours is what one kernel of the prefill holds at the least.
    """
    model = load_model("deepseek-v2-lite")
    memory = Deployment(model, load_accelerator("h100-sxm")).prefill(1, 32768).memory
    assert memory.required_bytes == model.weight_bytes + 32768 * 27 * 576 * 2 + memory.workspace_bytes
    widest = 32768 * (2048 + 10944) * 2
    assert widest <= memory.workspace_bytes < 2.4e9
    tight = replace(memory, capacity_bytes=memory.total_bytes + memory.workspace_bytes - 1)
    assert tight.capacity_bytes > tight.total_bytes
    assert not tight.fits


@pytest.mark.complaint("D18", "626949 and 1007303 tokens (64.68, 103.92 GiB)")
def test_the_format_of_weights_is_not_that_of_the_cache(config_of: Callable[..., dict[str, Any]]) -> None:
    """redhat-performance/configiq#112: fp8 keys assumed beside NVFP4 weights, and pages that contradict each other.

    The two logs have one cost per token, so both caches are stored alike; our pool divided by our tokens is our cost.
    """
    logs = (Fraction("64.68") * GIB / 626949, Fraction("103.92") * GIB / 1007303)
    assert abs(float(logs[0] / logs[1]) - 1) < 1e-4
    plain, packed = load_model(config_of("gemma-3-27b")), apply(load_model(config_of("gemma-3-27b")), [dtype("nvfp4")])
    assert packed.state == plain.state
    for model in (load_model("llama-3.1-70b"), apply(load_model("llama-3.1-70b"), [dtype("nvfp4")])):
        found = allocate(model, load_accelerator("h200-sxm"), Mesh(2), load_engine("vllm"), Settings())
        tokens, pool = found.tokens(found.pool.best), found.pool.best
        assert tokens is not None
        assert tokens * 163840 <= pool < (tokens + 16) * 163840


@pytest.mark.complaint("D22", "131072*327680 = 40.0 GiB")
def test_the_pool_must_hold_one_request() -> None:
    """ai-dynamo/dynamo#10104: a plan for Llama-3.1-70B-FP8 whose longest request exceeds the pool, hence a crash loop."""
    model = apply(load_model("llama-3.1-70b"), [dtype("fp8")])
    one = allocate(model, load_accelerator("h100-sxm"), Mesh(), load_engine("vllm"), Settings(max_model_len=131072))
    assert one.request_bytes == 131072 * 327680 == 40 * GIB
    assert not one.fits
    assert one.longest < 131072
    two = allocate(model, load_accelerator("h100-sxm"), Mesh(2), load_engine("vllm"), Settings(max_model_len=131072))
    assert two.request_bytes == 20 * GIB
    assert two.fits


@pytest.mark.complaint("D21", "does not fit in any layout")
def test_the_error_names_memory() -> None:
    """ai-dynamo/aiconfigurator#437: DeepSeek-V3 on two H200 answered with a hint about latency; no layout holds it."""
    gpu, model = load_accelerator("h200-sxm"), load_model("deepseek-v3")
    found = layouts(model, gpu, 2)
    memories = [ShardedDeployment(model, gpu, mesh=mesh).decode(1, 1).memory for mesh in found.possible]
    assert memories
    assert not any(memory.fits for memory in memories)
    least = min(memory.required_bytes for memory in memories)
    assert least > 2 * gpu.capacity.value
