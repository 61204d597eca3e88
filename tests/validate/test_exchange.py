"""Token exchanges, wide groups of experts and the attention beside them; extrapolation judged against twice the error."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from roofline.accelerator import load_accelerator
from roofline.expected.calibration import families
from roofline.expected.collective import EXCHANGE
from roofline.expected.model import Chip
from roofline.validate.document import _borrowed
from roofline.validate.scores import extrapolations

pytest.importorskip("aiconfigurator_core", reason="the silicon extra is not installed")

from roofline.validate.silicon import delta, exchange, mla, wide
from roofline.validate.silicon.routing import rank_loads
from roofline.validate.silicon.source import hashes
from roofline.validate.silicon.suite import beats_bound, bound, chip_of

GPU = "h100-sxm"
H100 = Chip(load_accelerator(GPU))


@pytest.fixture(scope="module")
def exchanges():
    return list(exchange.frames(GPU))


def test_a_throughput_kernel_sends_a_token_once_per_rank_and_a_low_latency_one_per_expert() -> None:
    chosen = np.array([1.0, 8.0, 1000.0])
    assert exchange.copies("ll", 8, chosen).tolist() == [1, 8, 1000]
    assert exchange.copies("normal", 8, chosen) == pytest.approx([1, 8 * (1 - (7 / 8) ** 8), 8])


def test_a_low_latency_kernel_gives_each_sm_the_same_number_of_experts() -> None:
    experts = np.array([8.0, 128.0, 256.0, 512.0])
    assert exchange.ways("ll", 0, experts, 132.0).tolist() == [8, 128, 128, 128]
    assert exchange.ways("normal", np.array([0, 20]), experts[:2], 132.0).tolist() == [132, 20]


def test_dispatched_bytes_are_rows_times_remote_ranks(exchanges) -> None:
    frame = next(f for f in exchanges if f.kernel == "sglang/deepep_ll/dispatch")
    row = int(np.flatnonzero((frame.keys["num_token"] == 1024) & (frame.keys["hidden_size"] == 7168))[0])
    chosen = int(frame.keys["num_topk"].iloc[row])
    assert frame.columns["wire"][row] == 1024 * chosen * 7 / 8 * (7168 + 7168 / 128 * 4)
    assert bound(frame, H100)[row] == frame.columns["wire"][row] / H100.link


def test_no_exchange_beats_the_link(exchanges) -> None:
    assert sum(map(len, exchanges)) > 6000
    assert not any(beats_bound(frame, H100).any() for frame in exchanges)


def test_fewer_sms_send_more_slowly_until_the_link_is_full() -> None:
    def seconds(ways: float) -> float:
        ones = np.ones(1)
        columns = {"wire": 1e9 * ones, "own": 0 * ones, "ways": ways * ones, "steps": ones}
        return float(EXCHANGE.seconds(columns, H100, EXCHANGE.start)[0])

    assert seconds(4) == pytest.approx(2 * seconds(8), rel=0.05)
    assert 1e9 / H100.link < seconds(132) < 1.1 * seconds(66)


def test_a_balancer_splits_the_hottest_expert_over_its_copies_and_no_further() -> None:
    def rows(ranks: int, distribution: str, slots: int = 0) -> float:
        return float(rank_loads((8192,), 256, 8, ranks, distribution, slots)["rows"][0])

    law = "power_law_1.2"
    assert 8192 * 8 / 16 <= rows(16, f"{law}_eplb", 256) < rows(16, law)
    one_each, spare = (rows(256, f"{law}_eplb", slots) for slots in (256, 512))
    assert one_each > 1.5 * spare >= 1.5 * 8192 * 8 / 256
    assert rows(4, "uniform") == rows(4, "balanced")


def test_wide_rows_keep_the_keys_of_their_tables() -> None:
    frames = [*wide.frames(GPU), *(frame for frame in mla.frames(GPU) if "/wide_" in frame.kernel)]
    assert {frame.cls for frame in frames} == {"moe", "mla_module"}
    decode = next(frame for frame in frames if frame.kernel == "sglang/wide_fa3/decode")
    assert decode.keys["isl"].max() > 1
    assert (decode.keys["step"] == 0).all()
    assert decode.columns["core.entries"].max() == decode.keys["isl"].max()
    assert (decode.held_out == hashes(decode.keys, list(decode.keys_of))[1]).all()


def test_wide_experts_are_predicted_from_the_committed_constants() -> None:
    for frame in wide.frames(GPU):
        family = families(GPU)[frame.family, "moe"]
        expected = frame.model.seconds(frame.columns, chip_of(GPU), family.constants)
        error = np.abs(expected - frame.seconds) / frame.seconds
        assert error[frame.held_out].mean() < (0.12 if "sglang" in frame.kernel else 0.2)


def test_a_state_that_is_written_in_place_fits_a_cache_once() -> None:
    frame = next(f for f in delta.frames(GPU) if f.kernel == "vllm/fused_recurrent_gated_delta_rule_packed_decode/generation")
    instant = replace(frame, seconds=np.zeros(len(frame)))
    distinct, moved = frame.columns["touched"], frame.columns["bytes"]
    limit = 1.5 * chip_of(GPU).l2
    assert ((distinct < limit) & (moved > limit)).any()
    assert (beats_bound(instant, chip_of(GPU)) == (distinct > limit)).all()


def test_a_poor_transfer_is_said_with_its_figures() -> None:
    def row(n: int, mape: float, plain: float) -> dict[str, str]:
        return {"n": str(n), "mape": str(mape), "plain": str(plain)}

    good = list(_borrowed([row(300, 0.1, 0.7), row(100, 0.2, 0.1)]))
    assert good == ["Over all rows the error is 12.5 % (the bound alone: 55.0 %)."]
    poor = " ".join(_borrowed([row(300, 0.9, 0.5), row(100, 0.1, 0.5)]))
    assert "70.0 %" in poor
    assert "transfer is poor" in poor
    assert "75 % of the rows" in poor


def test_extrapolation_is_judged_by_twice_the_random_error() -> None:
    def row(cls: str, kernel: str, dtype: str, mape: str, split: str = "larger") -> dict[str, str]:
        return {"class": cls, "kernel": kernel, "dtype": dtype, "mape": mape, "split": split}

    rows = [
        row("gemm", "vllm/linear", "bf16", "0.15"), row("gemm", "trtllm/fp8", "trtllm/fp8", "0.11"),
        row("moe", "vllm/triton", "bf16", "0.9"), row("gemm", "vllm/linear", "bf16", "0.5", "unseen_shape"),
    ]  # fmt: skip
    errors = {"gemm vllm/linear bf16": 0.08, "gemm trtllm/fp8": 0.05, "moe vllm/triton bf16": 0.1}
    found = list(extrapolations(rows, errors))
    assert [(one.family, one.met) for one in found] == [
        ("gemm vllm/linear bf16", True), ("gemm trtllm/fp8", False), ("moe vllm/triton bf16", None),
    ]  # fmt: skip
