"""Kernels of sparse blocks, Mamba-2's convolution and all-to-all: what rows are made of, and the physics of their times."""

from __future__ import annotations

import numpy as np
import pytest

from roofline.components.recurrent import CausalConv
from roofline.components.sparse import IndexScores
from roofline.expected.collective import ALL_TO_ALL
from roofline.expected.waves import WAVES
from roofline.formats import BF16, FORMATS
from roofline.validate.silicon import delta, parts, sparse
from roofline.validate.silicon.bad import slower_than_parts
from roofline.validate.silicon.suite import chip_of, frames
from roofline.work import Work

pytest.importorskip("aiconfigurator_core", reason="measured rows come from aiconfigurator-core, which is not installed")
pytest.importorskip("pyarrow", reason="the measured tables are parquet")

GPU = "h100-sxm"


@pytest.fixture(scope="module")
def kernels() -> dict:
    return {frame.kernel: frame for frame in parts.frames(GPU)}


def test_scores_are_charged_by_the_indexer_of_the_block(kernels) -> None:
    frame = kernels["sglang/fp8_mqa_logits prefill"]
    row = frame.keys.iloc[100]
    one = IndexScores(32, 128, index=FORMATS["fp8-token"]).cost(Work(int(row.batch_size), int(row.isl), int(row.step)))
    assert frame.cost.matrix_flops[100] == one.matrix_flops
    assert frame.cost.read["index"][100] == one.read["index"]


def test_selections_of_scores_that_are_all_alike_stay_out(kernels) -> None:
    modes = {mode for name, frame in kernels.items() if "topk" in name for mode in frame.keys.get("score_mode", [])}
    assert modes
    assert not any("flat" in mode for mode in modes)


def test_only_queries_with_more_entries_than_the_limit_select(kernels) -> None:
    frame = kernels["sglang/fast_topk_transform_fused prefill"]
    whole = frame.keys.batch_size.to_numpy() * frame.keys.isl.to_numpy()
    reach = frame.keys.isl.to_numpy() + frame.keys.step.to_numpy()
    assert (frame.columns["ctas"] <= whole).all()
    late = frame.keys.step.to_numpy() >= sparse.SELECTED
    assert (frame.columns["ctas"][late] == whole[late]).all()
    first = (frame.keys.step.to_numpy() == 0) & (reach > sparse.SELECTED)
    assert (frame.columns["ctas"][first] == (frame.keys.batch_size.to_numpy() * (reach - sparse.SELECTED))[first]).all()


def test_convolutions_of_mamba_2_cover_inputs_and_both_projections_of_the_state() -> None:
    frame = next(frame for frame in delta.frames(GPU) if frame.kernel == "trtllm/mamba2 causal_conv1d_fn/context")
    row = frame.keys.iloc[5]
    channels = int(row.nheads * row.head_dim + 2 * row.n_groups * row.d_state)
    one = CausalConv(channels, 4, False, activation=BF16, state_format=BF16).cost(Work(int(row.batch_size), int(row.seq_len)))
    assert frame.cost.bytes[5] == one.bytes
    assert frame.columns["ctas"][5] == row.batch_size * channels


def test_a_state_that_is_written_where_it_was_read_counts_once_for_the_cache() -> None:
    frame = next(frame for frame in delta.frames(GPU) if frame.kernel.endswith("fused_recurrent_gated_delta_rule/generation"))
    moved, state = frame.columns["bytes"], frame.cost.read["state"]
    assert np.array_equal(frame.columns["touched"], moved - state)


@pytest.mark.parametrize(
    ("framework", "kernel", "kv", "padded"),
    [
        ("vllm", "FLASHMLA_SPARSE", "fp8", True),
        ("vllm", "FLASHMLA_SPARSE", "bfloat16", False),
        ("trtllm", "default", "bfloat16", True),
        ("sglang", "sglang_dsa_indexer_fa3", "bfloat16", False),
    ],
)
def test_which_cores_work_through_the_whole_selection(framework: str, kernel: str, kv: str, padded: bool) -> None:
    assert sparse.pads_selection(framework, kernel, kv) is padded


def test_a_padded_core_does_the_same_work_for_a_short_context() -> None:
    found = (frame for frame in frames(GPU, ["dsa"]) if frame.kernel == "vllm/FLASHMLA_SPARSE/decode")
    frame = next(frame for frame in found if "kv-fp8" in frame.dtype)
    same = (frame.keys.batch_size == 64) & (frame.keys.num_heads == 128) & (frame.keys.architecture == "DeepseekV32ForCausalLM")
    assert len(set(frame.columns["core.flops"][same.to_numpy()])) == 1
    assert len(set(frame.cost.matrix_flops[same.to_numpy()])) > 1


def test_waves_follow_the_number_of_ctas_once_every_sm_has_one() -> None:
    chip, constants = chip_of(GPU), WAVES.start

    def seconds(ctas: float) -> float:
        columns = {"bytes": 0.0, "ctas": ctas, "cta.flops": 1e6, "cta.bytes": 0.0, "unit": "bf16"}
        return WAVES.seconds(columns, chip, constants) - constants["launch_us"] * 1e-6

    assert seconds(1.0) == seconds(chip.sms)
    assert seconds(10 * chip.sms) == pytest.approx(10 * seconds(chip.sms))


def test_short_all_to_alls_take_the_way_that_starts_sooner() -> None:
    chip = chip_of(GPU)
    constants = {**ALL_TO_ALL.start, "ramp": 0.05}

    def seconds(size: float, **changed: float) -> float:
        columns = {"ranks": 8.0, "wire": size * 7 / 8, "at_once": size / 8}
        return ALL_TO_ALL.seconds(columns, chip, {**constants, **changed})

    assert seconds(1e3) == seconds(1e3, second_us=30.0)
    assert seconds(1e9) == seconds(1e9, direct=0.005)
    assert seconds(1e9) > seconds(1e9, second_us=3.0, link=0.95)


def test_a_layer_slower_than_its_parts_one_after_the_other_is_found() -> None:
    pd = pytest.importorskip("pandas")
    work = {"num_tokens": 64, "hidden_size": 1, "inter_size": 8, "topk": 1, "num_experts": 8, "distribution": "balanced"}
    rows = pd.DataFrame([
        {**work, "moe_tp_size": 1, "moe_ep_size": 1, "latency": 4.1},
        {**work, "moe_tp_size": 2, "moe_ep_size": 1, "latency": 1.2},
        {**work, "moe_tp_size": 4, "moe_ep_size": 1, "latency": 0.8},
    ])  # fmt: skip
    assert slower_than_parts(rows, 1.25).tolist() == [True, False, False]
    assert not slower_than_parts(rows, 1.8).any()
