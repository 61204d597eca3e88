"""What each rank of a tensor or pipeline parallel group holds and sends."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from roofline import Work, load_accelerator, load_model
from roofline.formats import FORMATS
from roofline.parallel.mesh import Mesh, kv_heads_per_rank
from roofline.parallel.ranks import Sharded

GIB = 2**30


@pytest.mark.complaint("D23", "per-microbatch KV of all stages")
def test_a_pipeline_holds_as_many_tokens_as_its_stages_hold_of_their_layers() -> None:
    """microsoft/vidur#18: whether the layers of a pipeline count twice. A stage keeps its layers' share of every token."""
    model, gpu = load_model("llama-3.1-70b"), load_accelerator("h100-sxm")
    pool = 10 * GIB
    for stages in (1, 2, 4, 8):
        ranks = Sharded(model, gpu, Mesh(1, stages))
        tokens = min(pool // stage.kv_bytes_per_token for stage in ranks.stages)
        assert tokens == stages * pool // (80 * 2 * 8 * 128 * 2)


@pytest.mark.complaint("D26", "norms replicated; choice depends on placement")
def test_norms_are_on_every_rank_and_placement_chooses_the_link() -> None:
    """cli99/llm-analysis#27: norms divided by the ranks, and a group of up to eight sent over the network."""
    model, gpu = load_model("llama-3.1-70b"), load_accelerator("h100-sxm")
    for tp in (2, 8):
        (stage,) = Sharded(model, gpu, Mesh(tp)).stages
        assert sum(n for n, part in stage.counted if part.kind == "norm" and part.params() == {FORMATS["bf16"]: 8192}) == 161
        assert {*stage.cost(Work(1)).sent} == {"nvlink"}
    (stage,) = Sharded(model, gpu, Mesh(16)).stages
    assert {*stage.cost(Work(1)).sent} == {"nvlink", "network"}


@pytest.mark.complaint("D29", "max(1, ceil(Nkv/TP)) heads per GPU")
def test_key_value_heads_are_replicated_below_one(config_of: Callable[..., dict[str, Any]]) -> None:
    """inference-sim, sim/latency/kv_capacity.go: two key-value heads at four ranks taken for half a head each."""
    assert [kv_heads_per_rank(2, tp) for tp in (1, 2, 4, 8)] == [2, 1, 1, 1]
    config = config_of("llama-3-8b", num_key_value_heads=2)
    per_gpu = [
        Sharded(load_model(config), load_accelerator("h100-sxm"), Mesh(tp)).stages[0].kv_bytes_per_token for tp in (2, 4, 8)
    ]
    assert per_gpu == [32 * 2 * 128 * 2] * 3
