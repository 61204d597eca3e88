"""Every table of the package is read or left for a stated reason; no row goes unchecked; MiniMax-M3's blocks."""

from __future__ import annotations

import tomllib
from collections import Counter
from collections.abc import Iterable, Mapping
from fnmatch import fnmatch
from typing import Any

import pytest

from roofline.components.block_sparse import BlockSparseAttention
from roofline.errors import InputError
from roofline.expected.calibration import families
from roofline.validate.document import TABLES
from roofline.validate.gate import UNEXPLAINED
from roofline.validate.record import harder, read, recorded_gpus
from roofline.validate.report import UNFITTED, score_silicon
from roofline.validate.scores import BANDS, SPLITS
from roofline.validate.splits import distinct
from roofline.work import Work

pytest.importorskip("aiconfigurator_core", reason="measured rows come from aiconfigurator-core, which is not installed")
pytest.importorskip("pyarrow", reason="the measured tables are parquet")

from roofline.validate.silicon import mla, msa, source, suite
from roofline.validate.silicon.bad import dropped
from roofline.validate.silicon.suite import beats_bound, chip_of

LISTED = tomllib.loads(TABLES.read_text(encoding="utf-8"))
ADAPTERS = dict.fromkeys([*suite.CLASSES.values(), *(adapter for more in suite.MORE.values() for adapter in more)])


@pytest.fixture(scope="module")
def asked() -> set[str]:
    """The tables that adapters ask for."""
    names = set()

    def nothing(gpu: str, operator: str, file: str) -> list:
        names.add(f"{operator}/{file}")
        return []

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(source, "find", nothing)
        for adapter in ADAPTERS:
            assert list(adapter.frames("h100-sxm")) == []
    return names


def test_tables_that_are_read_are_those_listed(asked) -> None:
    assert asked == set(LISTED["read"])
    assert LISTED["package"] == f"{source.PACKAGE} {source.package_version()}"


def test_every_file_is_read_or_left_for_a_reason(asked) -> None:
    files = {
        path: (path.parts[-5], f"{path.parts[-4]}/{path.stem}", path.parts[-3])
        for path in source.root().glob("*/*/*/*/*.parquet")
    }
    read = {path for gpu in source.GPUS for name in asked for _, _, path in source.find(gpu, *name.split("/"))}
    assert (len(files), len(read)) == (LISTED["files"], LISTED["read_files"])
    chosen = {files[path] for path in read}
    for path, (gpu, name, framework) in files.items():
        other_version = (gpu, name, framework) in chosen
        listed = any(
            fnmatch(gpu, entry.get("gpu", "*")) and fnmatch(framework, entry.get("framework", "*"))
            for entry in LISTED["unread"]
            if name in entry.get("files", ()) or "gpu" in entry
        )
        assert path in read or other_version or listed, path


def test_frameworks_and_gpus_of_each_table_are_those_listed() -> None:
    unread = {(name, entry.get("framework")) for entry in LISTED["unread"] for name in entry.get("files", ())}
    for name, entry in LISTED["read"].items():
        found = Counter(framework for gpu in source.GPUS for framework, *_ in source.find(gpu, *name.split("/")))
        counted = {framework: many for framework, many in found.items() if (name, framework) not in unread}
        assert counted == {framework: many for framework, many in entry.items() if framework != "class"}, name
        assert all(cls in suite.CLASSES for cls in entry["class"].split(", ")), name


def test_blocks_of_minimax_m3_are_the_sum_of_their_parts() -> None:
    frame = next(frame for frame in msa.frames("h100-sxm") if frame.kernel == "vllm/msa decode" and frame.dtype == "bf16-kv-fp8")
    row = frame.keys.iloc[700]
    heads = int(row.num_heads)
    block = msa.block(heads, "bfloat16", "fp8")
    assert isinstance(block, BlockSparseAttention)
    groups = block.K
    assert groups == max(heads // 16, 1)
    cost = block.cost(Work(int(row.batch_size), 1, int(row.step)))
    assert frame.cost.bytes[700] == cost.bytes
    assert frame.cost.matrix_flops[700] == cost.matrix_flops


def test_tiles_of_scores_are_full_and_in_whole_waves_or_cost_as_if_they_were() -> None:
    assert msa.padding(Work(1, 64, 0), 1, 132) == 132
    assert msa.padding(Work(1, 1, 4096), 4, 132) == 64 * 132 / 4
    assert msa.padding(Work(132, 64, 0), 1, 132) == 1
    assert msa.padding(Work(133, 64, 0), 1, 132) == 2 * 132 / 133


def test_no_block_of_minimax_m3_beats_the_bound_and_one_that_read_every_key_would() -> None:
    found = list(msa.frames("h100-sxm"))
    assert sum(map(len, found)) > 40_000
    assert sum(int(beats_bound(frame, chip_of("h100-sxm")).sum()) for frame in found) == 0
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(msa.MINIMAX_M3, "size", (128, 10**6))
        whole = list(msa.frames("h100-sxm"))
    assert sum(int(beats_bound(frame, chip_of("h100-sxm")).sum()) for frame in whole) > 100


@pytest.fixture(scope="module")
def scores() -> list:
    return score_silicon("h100-sxm")


def line(record: Mapping[str, Any]) -> tuple[Any, ...]:
    """What tells a line of the report from all others."""
    return tuple(record[name] for name in ("gpu", "class", "dtype", "kernel", "split", "band"))


def test_no_two_lines_of_a_report_are_called_the_same(scores) -> None:
    report = Counter(line(score.record()) for score in [*scores, *harder("h100-sxm")])
    assert [names for names, times in report.items() if times > 1] == []
    for gpu in recorded_gpus():
        recorded = Counter(map(line, read(gpu)))
        assert [names for names, times in recorded.items() if times > 1] == []


def test_families_of_one_name_are_told_apart_by_their_time_model() -> None:
    block = "mla_module a/b fp8"
    pairs = [(block, "module_decode_q"), (block, "module_prefill_q"), ("collective n/n", "exchange")]
    assert list(distinct(pairs).values()) == [
        "mla_module a/b/module_decode fp8", "mla_module a/b/module_prefill fp8", "collective n/n",
    ]  # fmt: skip
    known = families("h100-sxm")
    assert len({name for name, _ in known}) < len(known) == len(set(distinct(known).values()))


def test_every_line_keeps_the_contract_and_every_class_has_some(scores) -> None:
    keys = {
        "gpu", "class", "dtype", "kernel", "split", "band", "n", "median_ratio", "mape", "p90", "noise_floor", "bound_violations",
        "target",
    }  # fmt: skip
    bands = {None, "keys>=1024, no window", *(name for name, _, _ in BANDS)}
    for record in (score.record() for score in scores):
        assert keys <= set(record)
        assert record["split"] in SPLITS
        assert record["band"] in bands
        assert record["n"] > 0
        assert 0 < record["mape"] < (1 if record["band"] is None else 10), record
    assert {score.cls for score in scores} == set(suite.CLASSES) == {
        "gemm", "attention_prefill", "attention_decode", "mla_prefill", "mla_decode", "mla_module", "dsa", "csa", "hca", "moe",
        "gated_delta", "kda", "mhc", "quantize", "all_reduce", "collective",
    }  # fmt: skip


def test_every_held_out_row_is_scored_or_dropped(scores) -> None:
    frames = list(suite.frames("h100-sxm"))
    unscored = sum(int(frame.held_out.sum()) for frame in frames) - sum(s.n + s.dropped for s in scores if s.band is None)
    gone = sum(int(frame.held_out.sum()) for frame in frames if dropped(frame)[0].all())
    assert unscored == gone < 10
    assert all(score.note == UNFITTED for score in scores if score.constants == 0)


def shares(lines: Iterable[Mapping[str, Any]]) -> tuple[dict[str, float], dict[str, float]]:
    """(dropped, unexplained) shares by class; MoE's cutlass kernels, which may lose more, as a class of their own."""
    n, out, beaten = Counter[str](), Counter[str](), Counter[str]()
    for line in lines:
        if line["band"] or line["split"] not in ("random", "other_gpu"):
            continue
        cutlass = line["class"] == "moe" and fnmatch(line["kernel"], "trtllm/*cutlass*")
        cls = "moe cutlass" if cutlass else line["class"]
        n[cls] += int(line["n"])
        out[cls] += int(line["dropped"])
        beaten[cls] += 0 if line["explained"] else int(line["bound_violations"])
    return {cls: out[cls] / (n[cls] + out[cls]) for cls in n}, {cls: beaten[cls] / n[cls] for cls in n}


@pytest.mark.parametrize("gpu", ["now", *recorded_gpus()])
def test_few_rows_leave_and_hardly_any_beat_the_bound_without_a_reason(gpu: str, scores) -> None:
    leave, unexplained = shares((score.record() for score in scores) if gpu == "now" else read(gpu))
    assert all(share <= (0.12 if cls == "moe cutlass" else 0.01) for cls, share in leave.items()), leave
    assert all(share <= UNEXPLAINED for share in unexplained.values()), unexplained


def test_a_class_that_was_not_measured_is_said() -> None:
    with pytest.raises(InputError, match="no operators of hca were measured on l40s"):
        score_silicon("l40s", ["hca"])


def test_gpus_without_constants_are_held_against_the_bound() -> None:
    found = score_silicon("rtx-pro-6000", ["mhc"])
    assert found
    assert all(score.constants == 0 and score.mape == score.plain for score in found)


def test_narrow_projections_are_charged_as_narrow() -> None:
    blocks = [mla.block(128, gemm, "fp8", absorbed=True) for gemm in ("bfloat16", "nvfp4")]
    wide, narrow = (block.cost(Work(1, 1, 100)).read["weights"] for block in blocks)
    assert narrow < 0.5 * wide
