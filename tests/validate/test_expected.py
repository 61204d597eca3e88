"""Time models: constants with physical bounds, never below what they are built from, in their own units."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from roofline.accelerator import HARDWARE, load_accelerator
from roofline.errors import InputError
from roofline.expected.attention import DECODE
from roofline.expected.calibration import _family, base_of, families, family_of, like, scale_of, transferred
from roofline.expected.gemm import GEMM
from roofline.expected.model import MORE_FOR_QUANTISE, MOST_CONSTANTS, Chip, overlap
from roofline.expected.module import HOST_QUANTISED_US, MODULE_PREFILL, SPARSE_PREFILL, projections_seconds, quantised
from roofline.expected.moe import MOE, copied
from roofline.expected.registry import MODELS

H100 = Chip(load_accelerator("h100-sxm"))


@pytest.mark.parametrize("model", MODELS.values(), ids=MODELS)
def test_models_have_few_constants_inside_physical_bounds(model) -> None:
    more = MORE_FOR_QUANTISE if any(c.name.startswith("quantise") for c in model.constants) else 0
    assert len(model.constants) <= MOST_CONSTANTS + more
    assert len({c.name for c in model.constants}) == len(model.constants)
    for constant in model.constants:
        assert constant.low <= constant.start <= constant.high
        assert constant.meaning
        if constant.name in ("memory", "matrix", "projection", "exponent", "quantise", "link", "direct"):
            assert constant.high < 1
        if constant.name.endswith("_bytes"):
            assert constant.high <= 128, "bytes that one SM moves per clock: what its first cache hands out"


def test_overlap_lies_between_the_longest_and_the_sum() -> None:
    a, b = np.array([1.0, 3.0]), np.array([2.0, 3.0])
    assert overlap(1.0, a, b) == pytest.approx(a + b)
    assert overlap(64.0, a, b) == pytest.approx(np.maximum(a, b), rel=0.02)
    assert (overlap(2.0, a, b) < a + b).all()
    assert (overlap(2.0, a, b) > np.maximum(a, b)).all()


def gemm_columns(m: float, n: float, k: float) -> dict:
    ones = np.ones(1)
    return {
        "m": m * ones, "n": n * ones, "k": k * ones, "bytes": 2 * (m * k + n * k + m * n) * ones, "unit": "bf16",
        "weight_bytes": 2.0, "input_bytes": 2.0,
    }  # fmt: skip


def test_a_matmul_takes_at_least_its_roofs() -> None:
    seconds = GEMM.seconds(gemm_columns(8192, 8192, 8192), H100, GEMM.start)[0]
    assert seconds > 2 * 8192**3 / H100.peak("bf16")
    assert seconds < 2 * 2 * 8192**3 / H100.peak("bf16")


def test_a_short_matmul_takes_its_launch_and_what_memory_takes_to_answer() -> None:
    columns = gemm_columns(1, 128, 128)
    assert GEMM.seconds(columns, H100, GEMM.start)[0] == pytest.approx(4.5e-6, rel=0.1)
    assert GEMM.seconds({**columns, "touched": np.zeros(1)}, H100, GEMM.start)[0] == pytest.approx(3e-6, rel=0.2)


def test_weights_that_come_round_in_the_cache_need_no_memory_and_those_of_a_step_do() -> None:
    columns = gemm_columns(16, 4096, 512)
    slow = {**GEMM.start, "memory": 0.4}

    def loss(touched: float | None) -> float:
        rows = columns if touched is None else {**columns, "touched": np.array([touched])}
        return float(GEMM.seconds(rows, H100, slow)[0] / GEMM.seconds(rows, H100, GEMM.start)[0])

    assert loss(0.3 * H100.l2) == 1.0
    assert 1.0 < loss(0.6 * H100.l2) < loss(0.9 * H100.l2) == loss(None)


def test_a_cache_in_two_partitions_holds_less_of_what_comes_round() -> None:
    l40s = Chip(load_accelerator("l40s"))
    assert H100.resident == 0.6 * H100.l2
    assert l40s.resident == l40s.l2


def test_warps_that_copy_and_multiply_have_fewer_tiles_and_overlap_less() -> None:
    ampere = Chip(replace(load_accelerator("h100-sxm"), architecture="sm_80"))
    assert H100.producers
    assert not ampere.producers
    constants = {**GEMM.start, "launch_us": 0.0, "wave_us": 0.0, "first_us": 0.0}

    def seconds(chip: Chip, m: float, moved: float) -> float:
        return float(GEMM.seconds({**gemm_columns(m, 128 * 132, 8192), "bytes": np.full(1, moved)}, chip, constants)[0])

    assert seconds(ampere, 320, 0.0) > 1.1 * seconds(H100, 320, 0.0), "no tile of 320 rows"
    alone = seconds(H100, 256, 0.0)
    assert seconds(ampere, 256, 0.0) == alone
    as_long = alone * H100.bandwidth * constants["memory"]
    assert seconds(H100, 256, as_long) == pytest.approx(2 ** (1 / 3) * alone)
    assert seconds(ampere, 256, as_long) == pytest.approx(2 ** (1 / 2) * alone)


def test_a_pair_of_ctas_feeds_on_half_of_the_weights_where_there_are_two_tiles_of_rows() -> None:
    paired = Chip(replace(load_accelerator("h100-sxm"), architecture="sm_100"))
    constants = {**GEMM.start, "port_bytes": 12.0}

    def ratio(m: float) -> float:
        columns = {**gemm_columns(m, 65536, 8192), "bytes": np.zeros(1)}
        return float(GEMM.seconds(columns, paired, constants)[0] / GEMM.seconds(columns, H100, constants)[0])

    assert ratio(16) == 1.0
    assert 2 / 3 <= ratio(4096) < 0.9


def test_kernels_that_never_split_leave_sms_idle() -> None:
    columns = gemm_columns(16, 256, 65536)
    whole, library = (float(GEMM.seconds({**columns, "menu": menu}, H100, GEMM.start)[0]) for menu in ("whole", "library"))
    assert whole > 2 * library


def test_one_tile_more_than_a_wave_takes_another_wave() -> None:
    constants = {**GEMM.start, "launch_us": 0.3}

    def seconds(tiles: int) -> float:
        columns = {**gemm_columns(128 * tiles, 128, 65536), "menu": "by_rows", "bytes": np.zeros(1)}
        return float(GEMM.seconds(columns, H100, constants)[0])

    assert seconds(133) > 1.9 * seconds(132)
    assert seconds(132) < 1.1 * seconds(67)


def test_decode_reads_more_keys_in_more_time() -> None:
    ones = np.ones(1)

    def seconds(keys: float) -> float:
        columns = {
            "sequences": 64 * ones, "groups": 8 * ones, "heads_per_group": 4 * ones, "keys": keys * ones, "windowed": 0.0,
            "width": 128.0, "key_bytes": 2.0, "bytes": 64 * 8 * 2 * 128 * 2 * keys * ones,
        }  # fmt: skip
        return float(DECODE.seconds(columns, H100, DECODE.start)[0])

    assert seconds(1024) < seconds(8192) < 8 * seconds(1024)


def test_only_memory_that_is_read_makes_an_h200_faster() -> None:
    """Of two chips that differ in memory alone, the one with more of it is faster where memory is read, and only there."""
    h100, h200 = (Chip(load_accelerator(name)) for name in ("h100-sxm", "h200-sxm"))
    one = np.ones(1)
    cores = {"sequences": 64 * one, "groups": 8 * one, "heads_per_group": one, "keys": 64 * one, "windowed": 0 * one}
    for size, warm, same in ((20e6, 1.0, True), (20e6, 0.0, False), (200e6, 1.0, False)):
        columns = {**cores, "width": 128 * one, "key_bytes": 2 * one, "bytes": size * one, "warm": warm}
        constants = {**DECODE.start, "overlap": 1.0}
        first, second = (float(DECODE.seconds(columns, chip, constants)[0]) for chip in (h100, h200))
        assert (first == second) is same
        assert second <= first

    block = {"linear0.flops": 1.0, "linear0.bytes": 1.0, "linear0.unit": "fp8", "linear0.input": 1e9}
    slow, fast = ({**quantised(MODULE_PREFILL).start, "quantise_bytes": rate} for rate in (1.0, 64.0))
    assert projections_seconds(block, h100, slow) == pytest.approx(projections_seconds(block, h200, slow), rel=1e-9)
    ratio = projections_seconds(block, h100, fast) / projections_seconds(block, h200, fast)
    assert ratio == pytest.approx(h200.bandwidth / h100.bandwidth, rel=0.01)


def test_the_host_takes_longer_for_every_projection_that_quantises_its_input() -> None:
    names = ("flops", "bytes", "entries", "tokens", "behind", "groups", "heads", "heads_per_group", "sequences", "width")
    block = {
        **{f"core.{name}": 1.0 for name in (*names, "value_width")}, "core.unit": "bf16", "other.bytes": 1.0, "index.flops": 1.0,
        "index.bytes": 1.0, "core.heads": 64.0,
    }  # fmt: skip
    for model in (quantised(MODULE_PREFILL), quantised(SPARSE_PREFILL)):
        constants = {**model.start, "host_us": 1000.0}
        plain, eight_bit, graphed = (
            float(model.seconds({**block, **more}, H100, constants))
            for more in ({}, {"host.quantised": 5.0}, {"host.quantised": 5.0, "eager": 0.0})
        )
        assert plain == pytest.approx(1e-3, rel=1e-3)
        assert eight_bit - plain == pytest.approx(5 * HOST_QUANTISED_US * 1e-6, rel=1e-3) != 0
        assert graphed < 1e-4


def test_rows_are_copied_quantised_and_summed_around_the_matmuls_of_experts() -> None:
    assert copied(100.0, 10.0, 2.0, False) == 10 * 100 + 4 * 10
    assert copied(100.0, 10.0, 1.0, False) == 8 * 100 + 2 * 10
    assert copied(100.0, 10.0, 1.0, True) == 12 * 100 + 6 * 10


def test_experts_of_the_schedule_cost_time_though_nothing_is_routed_to_them() -> None:
    chip = Chip(load_accelerator("h100-sxm"))
    columns = {
        **{f"{name}.{what}": 1024.0 for name in ("up", "down") for what in ("n", "k", "weights")}, "activation_bytes": 0.0,
        "copied_bytes": 0.0, "unit": "bf16", "input_bytes": 2.0, "weight_bytes": 2.0,
        **{f"tiles{rows}": 1.0 for rows in (16, 32, 64, 128)},
    }  # fmt: skip
    constants = {**MOE.start, "expert_us": 0.3, "overlap": 8.0}
    few, many = (MOE.seconds({**columns, "walked": walked}, chip, constants) for walked in (8.0, 256.0))
    assert many - few == pytest.approx(248 * 0.3e-6, rel=0.01)


def test_committed_constants_stay_inside_their_bounds() -> None:
    known = families("h100-sxm")
    assert len(known) > 100
    for family in known.values():
        for constant in MODELS[family.model].constants:
            value = family.constants[constant.name]
            assert constant.low * 0.99 <= value <= constant.high * 1.01, (family.name, constant.name)


def test_constants_of_one_gpu_are_under_12_kilobytes() -> None:
    text = (HARDWARE / "h100-sxm.toml").read_text(encoding="utf-8")
    assert len(text.partition("\n[calibration]\n")[2]) < 12_000


def test_h200_takes_the_constants_of_the_h100_and_a100_one_factor_more() -> None:
    assert base_of(load_accelerator("h200-sxm")) == "h100-sxm"
    assert scale_of(load_accelerator("h200-sxm"), "gemm") == 1.0
    assert 1.0 < scale_of(load_accelerator("a100-sxm-80gb"), "gemm") < 1.5
    assert scale_of(load_accelerator("a100-sxm-80gb"), "gemm_q") == scale_of(load_accelerator("b200-sxm"), "moe") == 1.0
    assert base_of(load_accelerator("l4")) == "l4"
    assert families("l4") == {}


def test_transfer_swaps_clocks_and_the_factor_counts_cycles_of_sms() -> None:
    a100 = Chip(load_accelerator("a100-sxm-80gb"))
    constants = {"launch_us": 3.0, "memory": 0.8, "port_bytes": 80.0, "cache_bytes": 10.0, "overlap": 2.0, "host_us": 50.0}
    assert transferred(constants, H100, a100, 1.25) == {
        "launch_us": pytest.approx(1.25 * 3.0 * 1980 / 1410), "memory": 0.8, "port_bytes": 80.0, "cache_bytes": 8.0,
        "overlap": 2.0, "host_us": 50.0,
    }  # fmt: skip


def test_the_power_limit_transfers_by_the_cube_root_of_watts_per_flops_within_its_bounds() -> None:
    constants = {"sustained": 0.9}
    assert transferred(constants, H100, Chip(load_accelerator("h200-sxm"))) == constants
    assert transferred(constants, H100, Chip(load_accelerator("a100-sxm-80gb"))) == {"sustained": 1.0}
    b200 = transferred({"sustained": 0.99}, H100, Chip(load_accelerator("b200-sxm")))
    assert b200 == {"sustained": pytest.approx(0.99 * ((1000 / 2250) / (700 / 989)) ** (1 / 3), rel=2e-3)}


def test_a_renamed_kernel_finds_its_family() -> None:
    known = families("h100-sxm")
    assert like(known, "gemm vllm/vllm_default bf16", "gemm") is known["gemm vllm/linear bf16", "gemm"]
    assert like(known, "gemm vllm/other fp8_block", "gemm_q") is None


def test_bad_calibration_lines_and_unknown_families_are_named() -> None:
    with pytest.raises(InputError, match=r"x\.toml \[calibration\.gemm\.gemm\] 'a bf16'"):
        _family("gemm", "gemm", "a bf16", "10 0.1 1 2", "x.toml")
    with pytest.raises(InputError, match="no constants for 'gemm vllm/liner bf16'"):
        family_of("h100-sxm", "gemm vllm/liner bf16")
