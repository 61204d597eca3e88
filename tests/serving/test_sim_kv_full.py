"""Measured servers whose cache is full: the simulator finds their queues, from sizes and rules alone.

Runs of Llama-3.1-70B under InferenceX's protocol (aiconfigurator-core 0.12.0, silicon_sample.csv) in which requests wait tens
to hundreds of seconds for a place in the cache. No constant of these times knows of queues.
"""

from __future__ import annotations

from fractions import Fraction
from typing import Any

import pytest

from roofline.accelerator import load_accelerator
from roofline.allocation import Settings
from roofline.configs.load import load_model
from roofline.edits import apply, dtype, kv_dtype
from roofline.engines.profile import load_engine
from roofline.parallel.mesh import Mesh
from roofline.serving.lengths import Distribution
from roofline.serving.metrics import Result
from roofline.serving.server import Options, make_server
from roofline.serving.workload import synthetic
from roofline.sharded import ShardedDeployment

pytestmark = pytest.mark.slow

VERSIONS = {"vllm": "0.11", "trtllm": None}
WAIT_S = 20
LONG = 1.1
"""The longest length over the mean: lengths are uniform from 0.8 to 1 of the nominal one."""


def rows() -> Any:
    pytest.importorskip("aiconfigurator_core", reason="the measured rows come with aiconfigurator-core")
    from roofline.validate.serving.rows import measured

    table = measured().table
    return table[(table["name"] == "llama-3.1-70b") & (table["family"] == "inferencex") & (table["ttft"] > WAIT_S)]


def simulated(row: Any) -> Result:
    """The run of a row."""
    edits = [dtype(row["weights"]), *([kv_dtype(row["kv"])] if row["kv"] else [])]
    model = apply(load_model("llama-3.1-70b"), edits)
    deployment = ShardedDeployment(model, load_accelerator(row["gpu"]), mesh=Mesh(tp=int(row["tp"])))
    users = int(row["clients"])
    lengths = [Distribution("uniform", round(mean * 8 / 9), round(mean * 10 / 9)) for mean in (row["prompt"], row["output"])]
    load = synthetic(10 * users, lengths[0], lengths[1], concurrency=users)
    settings = Settings(
        memory_fraction=Fraction(9, 10), max_model_len=int((load.prompt + load.output).max()) + 1,
        batched_tokens=int(row["budget"]), sequences=users,
    )  # fmt: skip
    engine = load_engine(row["engine"], VERSIONS[row["engine"]])
    server = make_server(deployment, load, engine=engine, settings=settings, options=Options(scheduler="chunked"))
    assert server.times.provenance == "calibrated"
    return Result(server.serve(load))


def test_the_cache_of_the_h100_runs_is_sixteen_bits_wide() -> None:
    """By Little's law alone: the tokens of those who run are what vLLM's memory rules give of 16 bits, and half of those of 8."""
    pytest.importorskip("aiconfigurator_core", reason="the measured rows come with aiconfigurator-core")
    from roofline.validate.serving.rows import measured
    from roofline.validate.serving.runs import structure

    table = measured().table
    mine = table[(table["name"] == "llama-3.1-70b") & (table["engine"] == "vllm") & (table["isl"] == 8192) & (table["ttft"] > 5)]
    seen = []
    for _, row in mine[mine["gpu"] != "b200-sxm"].iterrows():
        life = row["output"] * row["tpot"]
        tokens = row["clients"] * life / (life + row["ttft"]) * (row["prompt"] + 0.5 * row["output"])
        narrow, wide = (
            structure("llama-3.1-70b", "fp8", kv, row["gpu"], "vllm", int(row["tp"]), 1, 1).capacity(
                0.9, int(row["clients"]), 8192, 8192 + 1024
            )
            for kv in ("fp8", "")
        )
        right, wrong = (wide, narrow) if row["gpu"] == "h100-sxm" else (narrow, wide)
        assert tokens == pytest.approx(right, rel=0.1)
        assert tokens != pytest.approx(wrong, rel=0.4)
        seen.append(row["gpu"])
    assert seen.count("h100-sxm") == 2
    assert "h200-sxm" in seen


def test_queues_of_full_caches_are_found() -> None:
    table = rows()
    assert len(table) == 9
    errors = []
    for _, row in table.iterrows():
        result = simulated(row)
        errors.append((result.ttft_s.mean() / row["ttft"] - 1, result.tpot_s.mean() / row["tpot"] - 1))
    ttft, tpot = ([abs(error[i]) for error in errors] for i in range(2))
    assert max(ttft) < 0.12
    assert sum(ttft) / 9 < 0.06
    assert max(tpot) < 0.12
    assert sum(tpot) / 9 < 0.06
