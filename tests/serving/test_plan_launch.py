"""Launch commands: every one parses under the options that its engine documents."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from roofline import InputError, load_accelerator, load_model
from roofline.engines.documented import TYPES, load_server
from roofline.engines.profile import engine_ids, load_engine
from roofline.parallel.mesh import Mesh
from roofline.planner.launch import launches, script
from roofline.planner.search import Plan
from roofline.planner.setups import Setup, Variant, stored_formats
from roofline.planner.sizing import Drafting, Sized
from roofline.sharded import ShardedDeployment

SIZED = Sized(8, 1, 0.1, 0.01, 0.02, 0.1, 0.2, 0.01, 1.0)
DENSE, SPARSE = load_model("llama-3.1-8b"), load_model("qwen3-30b-a3b")
H100 = load_accelerator("h100-sxm")


ONE = Mesh()


def plan(
    engine: str, mesh: Mesh = ONE, weights: str | None = None, kv: str | None = None, budget: int = 2048, batch: int = 64,
    instances: int = 1, drafting: Drafting | None = None, prefill: Plan | None = None, sparse: bool = False,
) -> Plan:  # fmt: skip
    model = SPARSE if sparse else DENSE
    stored = stored_formats(model)
    variant = Variant(model, weights or stored[0], kv or stored[1])
    deployment = ShardedDeployment(model, H100, mesh=mesh)
    setup = Setup(variant, H100, mesh, load_engine(engine), 4096, deployment, True)
    return Plan(setup, budget, batch, instances, SIZED, drafting, None, prefill)


def launched(one: Plan, draft: str | None = None) -> list[Any]:
    return launches(one, "some/model", 4000, stored_formats(one.setup.variant.model), draft)


def values(engine: str, words: Any) -> dict[str, Any]:
    return load_server(engine).check(words)


@given(
    st.sampled_from(["vllm", "sglang", "trtllm", "llamacpp"]),
    st.sampled_from([Mesh(), Mesh(2), Mesh(8), Mesh(2, 2), Mesh(1, 4), Mesh(2, 1, 4, 8), Mesh(1, 1, 8, 8), Mesh(8, 1, 1, 8)]),
    st.sampled_from([None, "fp8", "int4-g128"]), st.booleans(), st.sampled_from([512, 8192, 16384]), st.integers(1, 1024),
    st.integers(1, 9), st.sampled_from([None, "mtp", "a/draft"]), st.booleans(),
)  # fmt: skip
@settings(max_examples=120, deadline=None)
def test_every_command_parses_under_documented_options(engine, mesh, weights, kv, budget, batch, number, draft, apart):
    sparse = mesh.dp > 1 or mesh.ep > 1
    eight = "q8_0" if engine == "llamacpp" else "fp8"
    drafting = Drafting(3, 0.8, None) if draft else None
    front = plan(engine, mesh, weights, eight if kv else None, 8192, 4, 2, sparse=sparse) if apart else None
    one = plan(engine, mesh, weights, eight if kv else None, budget, batch, number, drafting, front, sparse)
    if engine == "llamacpp" and (apart or draft == "mtp"):
        with pytest.raises(InputError, match=r"llama\.cpp"):
            launched(one, draft)
        return
    found = launched(one, draft)
    for launch in found:
        if launch.role != "router":
            assert values(engine, launch.words)
    assert found[-1 if engine != "trtllm" or not apart else 1].instances == number
    assert [launch.role for launch in found[:2]] == (["prefill", "decode"] if apart else [""])
    for launch in found:
        for name, text in launch.files.items():
            assert name in launch.words
            assert all((line.strip() and ":" in line) or line.strip().startswith("-") for line in text.splitlines())
    assert all(name in script(found) for launch in found for name in launch.words[:2])


def test_what_vllm_is_told():
    found = values("vllm", launched(plan("vllm", Mesh(4), "fp8", "fp8", 1024, 96, 2, Drafting(3, 0.8, None)), "a/draft")[0].words)
    assert (found["model"], found["tensor_parallel_size"], found["max_num_seqs"]) == ("some/model", 4, 96)
    assert (found["max_model_len"], found["max_num_batched_tokens"]) == (4096, 1024)
    assert (found["quantization"], found["kv_cache_dtype"]) == ("fp8", "fp8")
    assert found["speculative_config"] == {"model": "a/draft", "num_speculative_tokens": 3}
    assert found["gpu_memory_utilization"] == pytest.approx(0.92)
    experts = values("vllm", launched(plan("vllm", Mesh(2, 1, 4, 8), sparse=True))[0].words)
    assert (experts["tensor_parallel_size"], experts["data_parallel_size"], experts["enable_expert_parallel"]) == (2, 4, True)


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_what_two_parts_share_is_said_once(engine):
    front = plan(engine, Mesh(2), instances=2)
    found = launched(plan(engine, Mesh(2), instances=1, prefill=front))
    assert script(found).count("a router of") == 1
    assert all(any("a router of" in note for note in launch.notes) for launch in found)


def test_what_sglang_counts_over_all_ranks():
    """With --enable-dp-attention SGLang divides requests and chunks by the data-parallel ranks, which tp includes."""
    one = launched(plan("sglang", Mesh(1, 1, 8, 8), None, "fp8", 1024, 32, sparse=True, drafting=Drafting(2, 0.8, None)), "mtp")
    found = values("sglang", one[0].words)
    assert (found["tensor_parallel_size"], found["data_parallel_size"], found["expert_parallel_size"]) == (8, 8, 8)
    assert (found["max_running_requests"], found["chunked_prefill_size"]) == (8 * 32, 8 * 1024)
    assert found["enable_dp_attention"]
    assert (found["speculative_algorithm"], found["speculative_num_draft_tokens"]) == ("NEXTN", 3)
    assert found["kv_cache_dtype"] == "fp8_e4m3"


def test_what_tensorrt_llm_reads_from_a_file():
    front = plan("trtllm", Mesh(2), kv="fp8", instances=2)
    found = launched(plan("trtllm", Mesh(2), kv="fp8", instances=1, prefill=front, drafting=Drafting(4, 0.7, None)), "a/draft")
    assert [launch.role for launch in found] == ["prefill", "decode", "router"]
    assert "kv_cache_config:\n  dtype: fp8\n" in found[1].files["decode.yaml"]
    assert "decoding_type: DraftTarget\n  max_draft_len: 4\n  speculative_model_dir: a/draft" in found[1].files["decode.yaml"]
    assert "num_instances: 2" in found[2].files["disaggregated.yaml"]


def test_what_llama_cpp_holds_is_the_context_of_all_sequences():
    found = values("llamacpp", launched(plan("llamacpp", Mesh(1, 4), "q8_0", "q8_0", 512, 8))[0].words)
    assert (found["ctx_size"], found["parallel"], found["ubatch_size"]) == (8 * 4000, 8, 512)
    assert (found["tensor_split"], found["cache_type_k"]) == ("1,1,1,1", "q8_0")


def test_a_checkpoint_that_the_engine_cannot_make_is_asked_for():
    assert any("checkpoint in int4-g128" in note for note in launched(plan("vllm", weights="int4-g128"))[0].notes)
    assert launched(plan("vllm", weights="fp8"))[0].notes == ()
    assert any("2 servers" in note for note in launched(plan("vllm", Mesh(8, 2)))[0].notes)


@pytest.mark.parametrize(
    "words",
    [
        ("vllm", "serve", "m", "--max-num-seq", "4"), ("vllm", "serve", "m", "--max-num-seqs", "many"),
        ("vllm", "serve", "m", "--kv-cache-dtype", "fp3"), ("vllm", "serve"), ("vllm", "start", "m"),
        ("vllm", "serve", "m", "--speculative-config", "{model"),
    ],
)  # fmt: skip
def test_what_is_not_documented_is_refused(words):
    with pytest.raises(InputError):
        values("vllm", words)


def test_every_engine_has_documented_options_with_a_source():
    assert sorted(engine_ids()) == sorted(["vllm", "sglang", "trtllm", "llamacpp"])
    for engine in engine_ids():
        server = load_server(engine)
        assert " at " in server.source, "repository, file and commit"
        assert all(option.kind in TYPES and option.section for option in server.options.values())
        assert all(bool(option.choices) == (option.kind == "choice") for option in server.options.values())
    with pytest.raises(InputError, match="unknown engine"):
        load_server("ollama")


def test_settings_of_profiles_are_documented_options():
    """What ``fit --engine`` proposes as a fix must exist; TensorRT-LLM takes the cache's format and page size from its file."""
    in_file = {"--kv_cache_dtype", "--tokens_per_block"}
    for engine in ("vllm", "sglang", "trtllm"):
        server = load_server(engine)
        names = {name for option in server.options.values() for name in (option.name, *option.also)}
        assert set(load_engine(engine).flags.values()) - names <= in_file, engine


@pytest.mark.parametrize("engine", ["vllm", "sglang", "trtllm"])
def test_a_cache_format_that_the_engine_does_not_offer_is_refused(engine):
    with pytest.raises(InputError, match="int4-g128"):
        launched(plan(engine, kv="int4-g128"))


def test_commands_as_data():
    (one,) = launched(plan("vllm"))
    assert json.dumps(one.files) == "{}"
    assert one.command.startswith("vllm serve some/model --tensor-parallel-size 1")
