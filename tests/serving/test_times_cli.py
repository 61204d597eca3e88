"""Expected times on the command line: beside bounds where constants exist, with their error; never a guess."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest

from roofline.expected.errors import bands, error_at, error_of

Cli = Callable[..., Any]


def test_what_if_shows_expected_times_of_an_engine_with_their_error(cli: Cli) -> None:
    (row,) = cli("what-if", "llama-3.1-70b", "-g", "h100-sxm", "--tp", 4, "-b", 16, "-c", 2000, "-o", "json").records
    assert row["tpot_bound_s"] < row["tpot_expected_s"] < 3 * row["tpot_bound_s"]
    assert 0 < row["tpot_expected_error"] < 0.3
    assert (row["tpot_expected_engine"], row["tpot_expected_provenance"]) == ("vllm", "calibrated")
    assert row["tpot_expected_outside"] is None
    assert row["provenance"] == "datasheet"


def test_engines_differ(cli: Cli) -> None:
    found = {
        engine: cli("what-if", "llama-3.1-8b", "-g", "h100-sxm", "-b", 8, "--engine", engine, "-o", "json").records[0]
        for engine in ("vllm", "trtllm", "sglang", "llamacpp")
    }
    assert len({row["tpot_expected_s"] for row in found.values()}) == 4
    assert {row["tpot_expected_engine"] for row in found.values()} == set(found)
    assert "outside the calibrated range" in found["llamacpp"]["tpot_expected_outside"]


def test_a_table_shows_them_where_an_engine_is_named(cli: Cli) -> None:
    named = cli("what-if", "llama-3.1-8b", "-g", "h100-sxm", "-b", 16, "--engine", "trtllm")
    assert "expected ms" in named.out
    assert "expected times are those of trtllm servers" in named.out + named.err
    assert "expected ms" not in cli("what-if", "llama-3.1-8b", "-g", "h100-sxm").out


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        (("qwen3-next-80b-a3b", "--gpu", "h200-sxm"), "no time model"),
        (("llama-3.1-8b", "--gpu", "mi300x"), "no NVIDIA device"),
        (("llama-3.1-8b", "--gpu", "h100-sxm", "--convention", "lecture"), "lecture's convention"),
        (("t5-large", "--gpu", "h100-sxm", "--source-len", "128"), "encoder-decoders"),
    ],
)
def test_where_nothing_is_calibrated_there_is_no_number(cli: Cli, options: tuple[str, ...], reason: str) -> None:
    for row in cli("what-if", *options, "-o", "json").records:
        assert row["tpot_expected_s"] is None
        assert row["tpot_expected_provenance"] is None
        assert reason in row["tpot_expected_outside"]


def test_data_parallel_replicas_share_the_batch(cli: Cli) -> None:
    def seconds(batch: int, dp: int) -> float:
        sizes = ("-b", batch, "-c", 1000, "--tp", 2, "--dp", dp)
        (row,) = cli("what-if", "llama-3.1-8b", "-g", "h100-sxm", *sizes, "-o", "json").records
        return row["tpot_expected_s"]

    assert seconds(64, 2) == seconds(32, 1)


def test_batches_beyond_those_measured_are_extrapolated_without_an_error(cli: Cli) -> None:
    question = ("what-if", "llama-3.1-70b", "-g", "h100-sxm", "--tp", 4, "-c", 2000, "--engine", "vllm", "-b")
    rows = cli(*question, "1,4,128,129", "-o", "json").records
    assert [row["tpot_expected_provenance"] for row in rows] == ["extrapolated", "calibrated", "calibrated", "extrapolated"]
    assert [row["tpot_expected_error"] is None for row in rows] == [True, False, False, True]
    assert rows[3]["tpot_expected_outside"] == "batch 129 is outside the calibrated range of vllm (4 to 128 at once)"
    some, none = cli(*question, "1,16,256").out, cli(*question, "256").out
    assert "batches 1 and 256 are outside the calibrated range of vllm" in some
    error = f"{100 * error_at('vllm', False, [16]).mean:.0f} % off at 16 to 31 at once"
    said = rf"those of vllm servers, {error} \(\d+ % too short on average\) on models they were not fitted to, inside"
    assert re.search(said, some)
    assert "expected times are those" not in none
    assert "expected times are extrapolated from those of vllm servers, error unknown" in none


def test_the_error_is_that_of_the_batches_that_are_asked(cli: Cli) -> None:
    """The residual by concurrency of the report: 64 clients under vLLM are twice as far off as 16, 128 twice as far as 64."""
    few, more, most = (error_at("vllm", False, [number]) for number in (16, 64, 128))
    assert few.mean < more.mean < most.mean
    assert error_at("vllm", False, [16, 128, 64]) == error_at("vllm", False, [500]) == most
    assert error_at("vllm", False, [127]) == more
    assert error_at("vllm", False, [1]) == bands("vllm", False)[0]
    question = ("what-if", "llama-3.1-70b", "-g", "h100-sxm", "--tp", 4, "-c", 1000, "--engine", "vllm", "-b")
    rows = cli(*question, "64,128", "-o", "json").records
    assert [row["tpot_expected_error"] for row in rows] == [more.mean, most.mean]
    assert f"up to {100 * most.mean:.0f} % off at 128 at once" in cli(*question, "64,128").out
    assert f"servers, {100 * more.mean:.0f} % off at 64 to 127 at once" in cli(*question, 64).out


def test_the_committed_bands_and_blind_errors_are_those_of_the_report() -> None:
    from roofline.validate.serving.record import read

    record = read()
    for line in record["by_concurrency"]:
        found = error_at(line["engine"], False, [line["clients"]])
        assert (found.mean, found.bias) == (pytest.approx(line["mape"], abs=6e-4), pytest.approx(line["bias"], abs=6e-4))
    for metric in ("tpot", "ttft"):
        for score in record["scores"]:
            chosen = (score["metric"], score["split"], score["model"]) == (metric, "blind", None)
            if chosen and score["engine"]:
                found = error_of(score["engine"], False, metric, "b200-sxm")
                assert (found.split, found.gpus) == ("blind", ("b200-sxm",))
                assert found.mean == pytest.approx(score["mape"], abs=6e-4)


def test_a_gpu_that_was_measured_and_not_fitted_to_is_told_its_own_error(cli: Cli) -> None:
    blind = error_of("vllm", False, gpu="b200-sxm")
    out = cli("what-if", "llama-3.1-70b", "-g", "b200-sxm", "--tp", 4, "-c", 1000, "--engine", "vllm", "-b", 64).out
    assert "extrapolated from those of vllm servers" in out
    assert f"{100 * blind.mean:.0f} % off" in out
    assert "on b200-sxm, which they were not fitted to (llama-3.1-70b alone)" in out


def test_a_time_to_first_token_that_no_unseen_model_tested_says_which_model_did() -> None:
    dense, experts = error_of("vllm", False, "ttft"), error_of("vllm", True, "ttft")
    assert dense.of == "on a GPU it has not seen (llama-3.1-70b alone)"
    assert experts.of == "on models it has not seen"


def test_the_range_of_batches_is_that_of_one_replica(cli: Cli) -> None:
    sizes = ("-b", 256, "-c", 1000, "--dp", 2, "-o", "json")
    (row,) = cli("what-if", "llama-3-8b", "-g", "h100-sxm", "--engine", "trtllm", *sizes).records
    assert row["tpot_expected_provenance"] == "calibrated"


def test_an_unknown_engine_is_refused(cli: Cli) -> None:
    answer = cli("what-if", "llama-3.1-8b", "-g", "h100-sxm", "--engine", "vlm")
    assert answer.code == 2
    assert "unknown engine" in answer.err
