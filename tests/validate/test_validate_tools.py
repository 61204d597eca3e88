"""Gate, own measurements, published figures, the host, and the command around them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from roofline.accelerator import load_accelerator
from roofline.cli import run
from roofline.configs.load import load_model
from roofline.edits.storage import dtype, kv_dtype
from roofline.errors import InputError
from roofline.inference import Deployment
from roofline.validate.anchors import kernels, queue_bound, static_bound, throughput
from roofline.validate.document import markdown
from roofline.validate.gate import Finding, compare_errors, compare_predictions, predictions
from roofline.validate.own import read_rows
from roofline.validate.record import read, recorded_gpus
from roofline.validate.scores import Score, with_target

DOCUMENT = Path(__file__).parents[2] / "docs" / "validation.md"


def score(mape: float, **changes) -> Score:
    fields = {
        "gpu": "h100-sxm", "cls": "gemm", "dtype": "bf16", "kernel": "vllm/linear", "split": "random", "band": None, "n": 1000,
        "median_ratio": 1.0, "mape": mape, "p90": 0.2, "symmetric": 0.1, "plain": 0.5,
    }  # fmt: skip
    return Score(**{**fields, **changes})


def test_targets_follow_class_kernel_and_split() -> None:
    assert with_target(score(0.08)).met
    assert with_target(score(0.09)).met is False
    assert with_target(score(0.09, gpu="h200-sxm", split="other_gpu")).target == 0.10
    assert with_target(score(0.09, cls="quantize")).met is None


def test_an_answer_that_became_an_error_blocks() -> None:
    base = {"a": {"case": "a", "params": "1", "flops": "2", "bytes": "3", "bound_s": "4"}}
    broken = {"case": "a", "params": "error", "flops": "InputError", "bytes": "", "bound_s": ""}
    assert list(compare_predictions([broken], base)) == [Finding("broken", "a", "had an answer, now InputError", True)]
    assert [f.kind for f in compare_predictions([], base)] == ["gone"]


def test_worse_errors_and_unexplained_rows_block() -> None:
    record = [{"class": "gemm", "kernel": "vllm/linear", "dtype": "bf16", "split": "random", "band": "", "mape": "0.08"}]
    assert list(compare_errors([score(0.081)], record)) == []
    assert [f.kind for f in compare_errors([score(0.09)], record)] == ["worse"]
    assert [f.kind for f in compare_errors([score(0.08, bound_violations=5)], record)] == ["beats the bound"]
    assert list(compare_errors([score(0.08, bound_violations=5, explained="why")], record)) == []


def test_predictions_of_one_model_are_those_of_its_components() -> None:
    rows = list(predictions(["llama-2-7b"]))
    assert len(rows) == 6
    assert {row["params"] for row in rows} == {"6738415616"}


def test_published_figures_are_below_their_roofs() -> None:
    found = [*kernels(), *throughput()]
    assert len(found) >= 50
    assert all(record["ratio"] < 1 and record["source"] and record["comment"] for record in found)
    assert all(record["ratio"] > 0.3 for record in found if record["roof"] != "queue")
    assert all(record["ratio"] > 0.2 for record in found if record["roof"] == "queue" and "MLPerf" not in record["source"])
    flash_mla = next(record for record in found if "memory-bound" in record["what"])
    assert flash_mla["ratio"] == pytest.approx(3000 / 3350)


def test_mlperf_is_held_against_a_bound_without_the_prompts_that_it_does_not_state() -> None:
    found = [record for record in throughput() if record["source"].startswith("MLPerf")]
    assert len(found) >= 3
    assert all(" 1 in, " in record["what"] and "whatever they were" in record["comment"] for record in found)


def test_no_static_batch_and_no_split_of_the_gpus_beats_the_bound_of_a_queue() -> None:
    one = Deployment(kv_dtype("fp8").change(dtype("fp8").change(load_model("llama-3.1-8b"))), load_accelerator("h100-sxm"))
    bound = queue_bound(one, 1, 1000, 200)
    assert all(static_bound(one, batch, 1000, 200) < bound for batch in (1, 16, 256))
    assert queue_bound(one, 2, 1000, 200) == pytest.approx(2 * bound, rel=1e-3)
    assert queue_bound(one, 1, 500, 200) > bound
    with pytest.raises(InputError, match="does not fit on 1 h100-sxm"):
        queue_bound(Deployment(load_model("llama-3.1-405b"), load_accelerator("h100-sxm")), 1, 1000, 200)


def test_records_cover_the_gpus_and_the_document_is_made_of_them() -> None:
    assert {"h100-sxm", "h200-sxm", "a100-sxm-80gb", "b200-sxm"} <= set(recorded_gpus())
    splits = {row["split"] for row in read("h100-sxm")}
    assert splits == {"random", "unseen_shape", "unseen_model", "larger", "other_framework"}
    assert DOCUMENT.read_text(encoding="utf-8") == markdown()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("class,latency_us\nconv,3\n", "row 2: class must be one of gemm"),
        ("class,latency_us,m,n,k\ngemm,3,1,x,4\n", "row 2: n must be a number"),
        ("class,latency_us,m,n,k\ngemm,0,1,2,4\n", "row 2: latency_us = 0.0 is out of range"),
        ("class,latency_us,m,n,k\n", "no measurements"),
        ("class,latency_us,m,n,k\ngemm,3,1,2.5,4\n", "row 2: n must be a whole number; found '2.5'"),
        (
            "class,latency_us,batch,new,history,heads,kv_heads,head_dim,window\nattention_decode,9,1,1,64,32,7,128,0\n",
            "row 2: heads = 32 is not a multiple of kv_heads = 7",
        ),
    ],
)
def test_own_measurements_name_row_and_column(tmp_path: Path, text: str, message: str, capsys) -> None:
    pytest.importorskip("pandas")
    path = tmp_path / "own.csv"
    path.write_text(text)
    assert run(["validate", "own", "--file", str(path)]) == 2
    assert message in capsys.readouterr().err


def test_own_json_must_be_a_list_of_objects(tmp_path: Path) -> None:
    (tmp_path / "own.json").write_text('{"class": "gemm"}')
    with pytest.raises(InputError, match="write a list of objects"):
        read_rows(tmp_path / "own.json")


def test_own_measurements_are_checked_fitted_and_reported(tmp_path: Path, capsys) -> None:
    pytest.importorskip("scipy", reason="fits need scipy")
    rows = [
        {"class": "gemm", "dtype": "bf16", "m": m, "n": n, "k": 4096,
         "latency_us": 4 + max(2 * m * n * 4096 / 700e6, 2 * (n * 4096 + m * (n + 4096)) / 2.8e6)}
        for m in (1, 8, 64, 512, 2048, 4096) for n in (1024, 2048, 3072, 4096, 6144, 8192, 12288, 16384)
    ]  # fmt: skip
    path = tmp_path / "own.json"
    path.write_text(json.dumps(rows))
    assert run(["validate", "own", "--file", str(path), "-o", "json"]) == 0
    found = [record for record in json.loads(capsys.readouterr().out) if record["band"] is None]
    fitted = next(record for record in found if record["split"] == "random")
    assert fitted["mape"] < 0.2
    assert fitted["bound_violations"] == 0
    rows[-1]["latency_us"] = 1
    path.write_text(json.dumps(rows))
    assert run(["validate", "own", "--file", str(path), "-q"]) == 1


def test_unknown_subjects_and_classes_are_named(capsys) -> None:
    assert run(["validate", "silicn"]) == 2
    assert "Did you mean 'silicon'" in capsys.readouterr().err
    assert run(["validate", "silicon", "--class", "gem"]) == 2
    assert "'gem' is not an operator class" in capsys.readouterr().err


def test_this_machine_orders_its_operations_by_intensity() -> None:
    pytest.importorskip("torch")
    from roofline.validate.host import measure, too_fast

    for _ in range(3):
        roofs, placed = measure(rounds=2)
        by_name = {one.name: one for one in placed}
        matmul, vector = by_name["matmul 8192x512x512"], by_name["matrix times vector 4096x8192"]
        ordered = matmul.flops / matmul.measured_s > vector.flops / vector.measured_s
        if ordered and not too_fast(placed):
            break
    assert roofs["rate"] > roofs["bandwidth"] > 0
    assert ordered
    assert too_fast(placed) == []


def test_an_operation_that_beats_the_measured_roofs_is_said(monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    from roofline.validate import host

    placed = [host.Placed("sum", 1.0, 1.0, 1.0, 0.44), host.Placed("add", 1.0, 1.0, 1.0, 0.95)]
    monkeypatch.setattr(host, "measure", lambda: ({"bandwidth": 1e9, "rate": 1e9}, placed))
    assert run(["validate", "host"]) == 0
    said = capsys.readouterr().out
    assert "sum takes 0.44 of its bound: the roofs were disturbed" in said
    assert "add takes" not in said


def test_rows_that_beat_the_device_are_said_in_words(tmp_path: Path, capsys) -> None:
    rows = ["class,latency_us,dtype,m,n,k", "gemm,190,bf16,4096,4096,4096", "gemm,19,bf16,4096,4096,4096"]
    (tmp_path / "own.csv").write_text("\n".join([*rows, "gemm,380,bf16,8192,4096,4096", "gemm,60,bf16,64,8192,8192"]))
    assert run(["validate", "own", "--file", str(tmp_path / "own.csv")]) == 1
    assert "1 of 4 rows are faster than h100-sxm allows" in capsys.readouterr().out


def test_a_gpu_without_constants_is_held_against_its_bound(tmp_path: Path, capsys) -> None:
    pytest.importorskip("pandas")
    (tmp_path / "own.csv").write_text("class,latency_us,dtype,m,n,k\ngemm,2000,bf16,4096,4096,4096\n")
    assert run(["validate", "own", "--file", str(tmp_path / "own.csv"), "--gpu", "l4", "-o", "json"]) == 0
    record = next(record for record in json.loads(capsys.readouterr().out) if record["band"] is None)
    assert (record["constants"], record["mape"]) == (0, record["plain"])
