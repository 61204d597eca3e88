"""Measured operators: typed frames, the split, the physical check, and what a planted fault in a formula does to it."""

from __future__ import annotations

import hashlib
import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from roofline.cli import run
from roofline.components.attention import Attention
from roofline.components.linear import Linear
from roofline.cost import Cost
from roofline.expected.calibration import families
from roofline.validate.calibrate import calibrate_family, cleaned, section, write
from roofline.validate.fitting import fit, sample
from roofline.validate.gate import compare_predictions, predictions
from roofline.validate.report import score_silicon
from roofline.validate.silicon import routing
from roofline.validate.silicon.bad import entries, slower_than_double
from roofline.validate.silicon.source import hashes
from roofline.validate.silicon.suite import beats_bound, bound, chip_of, frames
from roofline.work import Work

pytest.importorskip("aiconfigurator_core", reason="measured rows come from aiconfigurator-core, which is not installed")
pytest.importorskip("scipy", reason="fits need scipy")
pd = pytest.importorskip("pandas")
pytest.importorskip("pyarrow", reason="the measured tables are parquet")

GPU = "h100-sxm"


@pytest.fixture(scope="module")
def gemms() -> list:
    return [sample(frame, 4000) for frame in frames(GPU, ["gemm"]) if frame.dtype in ("bf16", "fp8")]


def test_held_out_rows_are_those_whose_key_hashes_to_an_even_byte() -> None:
    rows = pd.DataFrame({"b": [1, 2, 3], "a": ["x", "y", "x"], "latency": [1.0, 2.0, 3.0]})
    _, held_out = hashes(rows, ["a", "b"])
    expected = [hashlib.sha256(f"a={a}|b={b}".encode()).digest()[-1] % 2 == 0 for a, b in zip(rows.a, rows.b, strict=True)]
    assert held_out.tolist() == expected


def test_frames_carry_the_cost_of_linear(gemms) -> None:
    frame = gemms[0]
    row = frame.keys.iloc[7]
    one = Linear(int(row["k"]), int(row["n"])).cost(Work(1, int(row["m"])))
    assert frame.cost.matrix_flops[7] == one.matrix_flops
    assert frame.cost.bytes[7] == one.bytes
    assert frame.seconds[7] > 0


def test_no_cache_explains_more_arithmetic_than_the_peak(gemms) -> None:
    frame, chip = gemms[0], chip_of(GPU)
    small = frame.columns["bytes"] < chip.l2
    heavy = small & (frame.cost.matrix_flops / chip.peak("bf16") > 0.9 * bound(frame, chip))
    assert heavy.any()
    assert beats_bound(replace(frame, seconds=frame.cost.matrix_flops / (1.2 * chip.peak("bf16"))), chip)[heavy].all()
    assert not beats_bound(replace(frame, seconds=frame.cost.matrix_flops / chip.peak("bf16")), chip)[heavy].any()


def test_no_measured_matmul_beats_the_bound(gemms) -> None:
    chip = chip_of(GPU)
    assert sum(int(beats_bound(frame, chip).sum()) for frame in gemms) == 0


@pytest.mark.parametrize("fault", ["activations read twice and written twice", "weights charged twice"])
def test_charging_bytes_twice_makes_measured_rows_beat_the_bound(monkeypatch, fault) -> None:
    right = Linear.cost

    def wrong(self, work):
        cost = right(self, work)
        read, write = dict(cost.read), dict(cost.write)
        if fault.startswith("weights"):
            read["weights"] = 2 * read["weights"]
        else:
            read["activations"], write["activations"] = 2 * read["activations"], 2 * write["activations"]
        return Cost(dict(cost.flops), read, write, cost.launches)

    monkeypatch.setattr(Linear, "cost", wrong)
    chip = chip_of(GPU)
    found = [frame for frame in frames(GPU, ["gemm"]) if frame.dtype == "bf16"]
    assert sum(int(beats_bound(frame, chip).sum()) for frame in found) > 100


def decode_frames(monkeypatch, change) -> list:
    right = Attention.group_cost
    monkeypatch.setattr(Attention, "group_cost", lambda self, work: change(self, right(self, work)))
    return [frame for frame in frames(GPU, ["attention_decode"]) if "fa3 bf16/bf16" in frame.family]


@pytest.mark.parametrize(
    ("fault", "change"),
    [
        ("keys and values charged twice", lambda self, cost: Cost(
            dict(cost.flops), {**cost.read, "state": 2 * cost.read["state"]}, dict(cost.write), cost.launches)),
        ("query heads in place of key-value heads", lambda self, cost: Cost(
            dict(cost.flops), {**cost.read, "state": self.N / self.K * cost.read["state"]}, dict(cost.write), cost.launches)),
    ],
)  # fmt: skip
def test_a_faulty_decode_formula_is_caught_by_the_bound(monkeypatch, fault, change) -> None:
    chip = chip_of(GPU)
    assert sum(int(beats_bound(frame, chip).sum()) for frame in decode_frames(monkeypatch, lambda self, cost: cost)) == 0
    assert sum(int(beats_bound(frame, chip).sum()) for frame in decode_frames(monkeypatch, change)) > 100


def test_a_dropped_factor_two_is_caught_by_the_gate(monkeypatch) -> None:
    base = {row["case"]: row for row in predictions(["llama-2-7b"])}
    assert list(compare_predictions(predictions(["llama-2-7b"]), base)) == []
    right = Linear.cost

    def halved(self, work):
        cost = right(self, work)
        return Cost({unit: flops // 2 for unit, flops in cost.flops.items()}, dict(cost.read), dict(cost.write), cost.launches)

    monkeypatch.setattr(Linear, "cost", halved)
    findings = list(compare_predictions(predictions(["llama-2-7b"]), base))
    assert len(findings) == len(base)
    assert all(finding.kind == "drift" and finding.blocks for finding in findings)


def test_fit_recovers_constants_that_made_the_rows(gemms) -> None:
    frame, chip = sample(gemms[0], 2000), chip_of(GPU)
    truth = {**frame.model.start, "launch_us": 5.0, "memory": 0.7, "matrix": 0.6}
    made = replace(frame, seconds=frame.model.seconds(frame.columns, chip, truth))
    found = fit([made], chip)
    assert found["launch_us"] == pytest.approx(5.0, rel=0.05)
    assert found["memory"] == pytest.approx(0.7, rel=0.05)
    assert found["matrix"] == pytest.approx(0.6, rel=0.1)


def test_calibration_is_reproducible_and_what_the_hardware_file_holds(tmp_path: Path) -> None:
    chip = chip_of(GPU)
    (name, model), many = next(
        item for item in sorted(cleaned(frames(GPU, ["mhc"])).items()) if "vllm/pre" in item[0][0]
    )  # fmt: skip
    first, second = (calibrate_family(name, many, chip) for _ in range(2))
    assert first == second
    assert families(GPU)[name, model].constants == pytest.approx(first.constants, rel=0.02)
    (tmp_path / "x.toml").write_text('id = "x"\n')
    assert write("x", lambda date: section([first], date), tmp_path)
    assert not write("x", lambda date: section([first], date), tmp_path)
    before = (tmp_path / "x.toml").read_text()
    other = replace(first, family="zeta kernel bf16")
    assert write("x", lambda date: section([other], date), tmp_path, some=True)
    after = (tmp_path / "x.toml").read_text()
    assert after == f"{before}\n{section([other], '').partition(chr(10) * 2)[2]}"
    assert not write("x", lambda date: section([first], date), tmp_path, some=True)


def test_report_has_the_keys_of_the_contract_and_meets_what_it_met() -> None:
    scores = score_silicon(GPU, ["mhc", "all_reduce", "kda"])
    record = scores[0].record()
    assert {
        "gpu", "class", "dtype", "kernel", "split", "band", "n", "median_ratio", "mape", "p90", "noise_floor", "bound_violations",
        "target",
    } <= set(record)  # fmt: skip
    whole = [score for score in scores if score.band is None]
    assert {score.split for score in whole} == {"random"}
    assert all(score.met for score in whole if score.cls in ("mhc", "all_reduce") and score.met is not None)


def test_json_report_holds_every_split(capsys) -> None:
    assert run(["validate", "silicon", "--class", "gemm", "-o", "json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert {record["split"] for record in found} == {"random", "unseen_shape", "larger", "other_framework"}
    bf16 = {r["kernel"]: r["mape"] for r in found if r["split"] == "larger" and "bf16" in f"{r['kernel']} {r['dtype']}"}
    assert all(error < 0.12 for kernel, error in bf16.items() if "per-head" not in kernel)


def test_h200_is_predicted_from_the_constants_of_the_h100() -> None:
    scores = [score for score in score_silicon("h200-sxm", ["mla_prefill"]) if score.band is None]
    assert {score.split for score in scores} == {"other_gpu"}
    assert all(score.mape < 0.12 for score in scores)


def test_balanced_routing_hits_every_expert_once_there_are_enough_choices() -> None:
    assert routing.rank_loads((1, 1024), 256, 8, 1, "balanced")["hit"].tolist() == [8, 256]
    load = routing.rank_loads((1024,), 256, 8, 8, "balanced")
    assert [load[name][0] for name in routing.FIGURES] == [1024, 32, 32, 64, 32, 32, 32]


def test_drawn_routing_keeps_all_choices_and_gives_the_first_rank_most() -> None:
    one, all_ranks = (routing.rank_loads((64, 512), 128, 8, ranks, "power_law_1.2")["rows"] for ranks in (4, 1))
    assert all_ranks.tolist() == [64 * 8, 512 * 8]
    assert (one > all_ranks / 4).all()
    assert routing.rank_loads((512,), 128, 8, 4, "power_law_1.2")["rows"][0] == one[1]


def test_rows_slower_than_twice_their_work_are_found() -> None:
    work = {"num_tokens": 64, "hidden_size": 1, "inter_size": 1, "topk": 1, "num_experts": 8, "distribution": "balanced"}
    rows = pd.DataFrame([
        {**work, "moe_tp_size": 1, "moe_ep_size": 4, "latency": 1.0},
        {**work, "moe_tp_size": 1, "moe_ep_size": 8, "latency": 2.0},
        {**work, "moe_tp_size": 2, "moe_ep_size": 4, "latency": 1.2},
    ])  # fmt: skip
    assert slower_than_double(rows, 1.25).tolist() == [False, True, False]


def test_rows_leave_only_within_their_group_s_share() -> None:
    found = list(frames(GPU, ["moe", "quantize", "attention_prefill"]))
    for group in entries():
        mine = [frame for frame in found if group.matches(frame)]
        rows = sum(len(frame) for frame in found if group.rule != "all" or frame.cls == group.cls)
        of = sum(map(len, mine)) if group.rule != "all" else rows
        picked = sum(int(group.rows(frame).sum()) for frame in mine)
        assert picked <= group.share * of, group.reason
        if group.gpu == "*":
            assert picked > 0, f"nothing is left to drop: {group.reason}"


def test_bound_of_an_all_reduce_is_one_pass_over_the_link() -> None:
    frame = next(frame for frame in frames(GPU, ["all_reduce"]) if frame.kernel.startswith("nccl"))
    chip = chip_of(GPU)
    row = int(np.argmax(frame.columns["wire"]))
    message = frame.keys.message_size.to_numpy()[row] * {"half": 2, "int8": 1}[frame.keys.nccl_dtype.to_numpy()[row]]
    assert bound(frame, chip)[row] == pytest.approx(message / 450e9)
