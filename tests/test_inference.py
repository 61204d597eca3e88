"""Inference on one device: what a step reports, what fits, and the baselines."""

from __future__ import annotations

import json
from dataclasses import replace
from fractions import Fraction

import pytest

from roofline import Deployment, InputError, Work, load_accelerator, load_model
from roofline.edits import apply, dtype, kv_dtype, unfused
from roofline.symbols import symbol

H100 = load_accelerator("h100-sxm")
LLAMA = load_model("llama-3.1-8b")


def test_the_bytes_of_a_decode_step_are_weights_cache_and_activations():
    step = Deployment(LLAMA, H100).decode(4, 2048)
    table = 128256 * 4096 * 2
    assert step.cost.read["weights"] == LLAMA.weight_bytes - table + 4 * 4096 * 2, "of the table only four rows are read"
    assert step.cost.read["state"] == 4 * 2049 * 131072
    assert step.cost.write["state"] == 4 * 131072
    assert step.memory.weight_bytes == 2 * 8030261248
    assert step.memory.kv_bytes == 4 * 2048 * 131072
    assert step.memory.new_kv_bytes == 4 * 131072, "the step's own keys and values need room too"
    assert step.memory.required_bytes == step.memory.total_bytes + step.memory.new_kv_bytes + step.memory.workspace_bytes
    assert step.bound_by == "memory"


def test_prefill_is_compute_bound_and_decode_memory_bound():
    deployment = Deployment(LLAMA, H100)
    assert deployment.prefill(1, 4096).bound_by == "compute"
    assert deployment.decode(1, 4096).bound_by == "memory"
    flops = deployment.prefill(1, 4096).cost.matrix_flops
    assert flops == pytest.approx(2 * 7.5e9 * 4096, rel=0.1)


def test_prefill_heads_the_last_token_only_and_verification_all():
    one = Deployment(LLAMA, H100).prefill(1, 8).cost
    every = LLAMA.cost(Work(1, 8, 0, all_logits=True))
    assert every.matrix_flops - one.matrix_flops == 7 * 2 * 4096 * 128256
    verified = Deployment(LLAMA, H100).decode(1, 100, new_tokens=5)
    assert verified.cost == LLAMA.cost(Work(1, 5, 100, all_logits=True))


def test_a_prefix_cache_hit_saves_the_prefix():
    deployment = Deployment(LLAMA, H100)
    cold, hit = deployment.prefill(1, 4096), deployment.prefill(1, 1024, cached=3072)
    assert hit.bound_s < cold.bound_s / 3
    assert hit.memory.kv_bytes == cold.memory.kv_bytes


def test_formats_change_bytes_and_units_separately():
    fp8 = apply(LLAMA, [dtype("fp8"), kv_dtype("fp8")])
    step, base = Deployment(fp8, H100).decode(64, 1024), Deployment(LLAMA, H100).decode(64, 1024)
    assert step.memory.kv_bytes * 2 == base.memory.kv_bytes
    assert set(step.cost.flops) == {"fp8", "bf16", "vector", "special"}
    assert step.cost.matrix_flops == base.cost.matrix_flops
    weight_only = apply(LLAMA, [dtype("int4-g128")])
    assert "int8" not in Deployment(weight_only, H100).decode(1, 1).cost.flops
    layer_weights = 8030261248 - 2 * 128256 * 4096 - 65 * 4096
    assert weight_only.weight_bytes == layer_weights * Fraction(33, 64) + 2 * (2 * 128256 * 4096 + 65 * 4096)


def test_the_unfused_baseline_moves_the_scores_and_computes_the_whole_square():
    fused, naive = LLAMA, apply(LLAMA, [unfused()])
    work = Work(1, 2048, 0)
    scores = 32 * 2048 * 2048
    extra = naive.cost(work).bytes - fused.cost(work).bytes
    assert extra == 32 * 4 * 2 * scores
    assert naive.cost(work).matrix_flops - fused.cost(work).matrix_flops == 32 * 4 * 128 * 32 * (2048 * 2048 - 2048 * 2049 // 2)
    decode = Work(1, 1, 2048)
    assert naive.cost(decode).read["state"] == fused.cost(decode).read["state"], "fused or not, GQA loads K heads"


def test_generation_reports_consistent_rates():
    found = Deployment(LLAMA, H100).generate(8, 1000, 101)
    assert found.tpot_bound_s == pytest.approx(found.decode_bound_s / 100)
    assert found.e2e_bound_s == found.ttft_bound_s + found.decode_bound_s
    assert found.output_tok_per_s == pytest.approx(8 * 101 / found.e2e_bound_s)
    assert found.e2e_bound_s <= found.e2e_serial_s
    assert Deployment(LLAMA, H100).generate(1, 10, 1).tpot_bound_s is None


def test_long_generations_are_one_array_and_agree_with_the_loop(monkeypatch):
    import roofline.inference as inference

    deployment = Deployment(LLAMA, H100)
    for cached in (True, False):
        loop = deployment.generate(2, 50, 40, cached=cached)
        monkeypatch.setattr(inference, "SCALAR_STEPS", 3)
        array = deployment.generate(2, 50, 40, cached=cached)
        monkeypatch.undo()
        assert array.e2e_serial_s == pytest.approx(loop.e2e_serial_s, rel=1e-12)
        assert array.cost.matrix_flops == pytest.approx(loop.cost.matrix_flops, rel=1e-12)
        assert array.cost.bytes == pytest.approx(loop.cost.bytes, rel=1e-12)


def test_what_fits_and_by_how_much_the_next_misses():
    deployment = Deployment(LLAMA, H100, memory_fraction=Fraction(9, 10))
    found = deployment.largest_batch(8192)
    per_sequence = 8192 * 131072
    budget = Fraction(9, 10) * H100.capacity.value - 2 * 8030261248
    assert found.size == int(budget // per_sequence) or found.size == int(budget // per_sequence) - 1
    assert 0 < found.missing_bytes <= per_sequence
    context = deployment.largest_context(1)
    assert deployment.decode(1, context.size).memory.fits
    assert not deployment.decode(1, context.size + 1).memory.fits
    assert Deployment(load_model("llama-3.1-70b"), H100).largest_batch(1024).size == 0


def test_state_that_does_not_grow_has_no_largest_context():
    windowed = load_model(
        {
            "model_type": "mistral", "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
            "num_key_value_heads": 2, "intermediate_size": 96, "vocab_size": 100, "sliding_window": 32,
            "tie_word_embeddings": False, "torch_dtype": "bfloat16",
        }
    )  # fmt: skip
    assert Deployment(windowed, H100).largest_context(1).size is None


def test_the_lecture_convention_covers_decode_steps_only():
    with pytest.raises(InputError, match="decode steps only"):
        Deployment(LLAMA, H100, "lecture").prefill(1, 10)


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        ({"convention": "other"}, "convention"),
        ({"memory_fraction": Fraction(0)}, "memory fraction"),
        ({"memory_fraction": 2}, "fraction"),
    ],
)
def test_bad_deployments_name_the_field(options, complaint):
    with pytest.raises(InputError, match=complaint):
        Deployment(LLAMA, H100, **options)


@pytest.mark.parametrize("value", [0, -1, 10**13, 1.5, float("nan"), "8", None])
def test_bad_sizes_name_the_field(value):
    with pytest.raises(InputError, match="batch"):
        Deployment(LLAMA, H100).decode(value, 1)


def test_explain_covers_the_whole_step():
    deployment = Deployment(LLAMA, H100)
    work = Work(8, 1, 4096)
    parts = deployment.explain(work)
    step = deployment.decode(8, 4096)
    assert sum(part.cost.matrix_flops for part in parts) == step.cost.matrix_flops
    assert sum(part.cost.bytes for part in parts) == step.cost.bytes
    assert sum(part.share for part in parts) == pytest.approx(1)
    assert sum(part.timing.bound for part in parts) >= step.bound_s
    assert parts == sorted(parts, key=lambda part: -part.timing.bound)


def test_results_turn_into_json_and_frames():
    deployment = Deployment(LLAMA, H100)
    for result in (deployment.decode(2, 64), deployment.generate(2, 64, 8)):
        assert json.loads(json.dumps(result.to_dict(), allow_nan=False)) == result.to_dict()
        assert len(result.to_frame()) == 1
    assert deployment.decode(2, 64).to_dict()["expected_s"] is None


def test_verification_needs_room_for_all_drafted_tokens():
    deployment = Deployment(LLAMA, H100)
    drafted = deployment.decode(1, 0, new_tokens=64).memory
    assert drafted.kv_bytes == 0
    assert drafted.new_kv_bytes == 64 * 131072
    prefilled = deployment.prefill(1, 64).memory
    assert prefilled.kv_bytes + prefilled.new_kv_bytes == 64 * 131072


def test_the_tower_of_a_multimodal_model_is_resident_as_well():
    llava = load_model("llava-1.5-7b")
    assert llava.tower_params > 3 * 10**8
    assert llava.weight_bytes == 2 * llava.params_total
    assert Deployment(llava, H100).decode(1, 1).memory.weight_bytes == llava.weight_bytes
    assert Deployment(llava, H100).decode(1, 1).cost.read["weights"] < 2 * llava.params, "but not read by a step"


@pytest.mark.parametrize("name", ["gemma-3n-e4b", "llama-3.2-11b-vision", "llama-3.1-8b"])
def test_bytes_are_whole(name):
    found = Deployment(apply(load_model(name), [dtype("int4-g128")]), H100).decode(1, 1000).to_dict()
    for key in ("weight_bytes", "kv_bytes", "total_bytes", "workspace_bytes", "required_bytes", "capacity_bytes"):
        assert isinstance(found[key], int), key


def test_an_array_gives_a_frame_of_one_row_per_point_and_a_symbol_text():
    import numpy

    deployment = Deployment(LLAMA, H100)
    table = deployment.decode(numpy.array([1.0, 8.0, 64.0]), 1024).to_frame()
    assert len(table) == 3
    assert table["bound_s"].tolist() == [deployment.decode(b, 1024).bound_s for b in (1, 8, 64)]
    symbolic = deployment.decode(symbol("B"), 1024).to_dict()
    assert symbolic["kv_bytes"] == "134217728*B"
    assert symbolic["bound_by"] is None
    with pytest.raises(InputError, match="whole number"):
        deployment.decode(numpy.array([1.5]), 1024)


def test_names_in_place_of_objects_are_refused_with_advice():
    with pytest.raises(InputError, match="load_model"):
        Deployment("llama-3.1-8b", H100)
    with pytest.raises(InputError, match="load_accelerator"):
        Deployment(LLAMA, "h100")
    for bad in (None, [], 5):
        with pytest.raises(InputError, match="model"):
            load_model(bad)
    for bad in (None, 5):
        with pytest.raises(InputError, match="gpu"):
            load_accelerator(bad)


def test_public_names_are_listed_and_share_a_base_of_errors():
    import roofline

    assert {"Deployment", "load_model", "RooflineError"} <= set(dir(roofline))
    assert issubclass(InputError, roofline.RooflineError)


def test_a_smaller_device_fits_less():
    small = replace(H100, visible=replace(H100.visible, value=20 * 10**9))
    assert not Deployment(LLAMA, small).decode(64, 8192).memory.fits
    assert Deployment(LLAMA, small).decode(1, 1024).memory.fits
