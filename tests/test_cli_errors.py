"""Every way to go wrong: the exit code, one line on stderr that says what, nothing on stdout."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from roofline.accelerator import COMMON, load_accelerator
from roofline.cli import BAD_INPUT, INTERNAL, MISSING, run
from roofline.configs.load import load_model
from roofline.edits import apply, share_kv_every

ROOT = Path(__file__).parents[1]
SMALL = {
    "model_type": "llama", "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4,
    "vocab_size": 100,
}  # fmt: skip

Complaint = Callable[..., str]


@pytest.fixture
def complaint(capsys: pytest.CaptureFixture[str]) -> Complaint:
    """Runs a command line that must fail, and returns its message."""

    def call(*arguments: object, code: int = BAD_INPUT) -> str:
        assert run([str(argument) for argument in arguments]) == code
        out, err = capsys.readouterr()
        assert out == ""
        assert err.startswith("error: ")
        assert err.count("\n") == 1
        return err

    return call


@pytest.fixture
def model(tmp_path: Path) -> Path:
    path = tmp_path / "small.json"
    path.write_text(json.dumps(SMALL), encoding="utf-8")
    return path


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["-b", "-1"], "batch: '-1' is out of range"),
        (["-b", "nan"], "batch: 'nan' is not a number"),
        (["-b", "1e30"], "batch: '1e30' is out of range"),
        (["-b", "4k"], "write 4Ki"),
        (["-b", "1:1000:+1", "-c", "1:1000:+1"], "1,000,000 points"),
        (["-c", "-5"], "context: '-5' is out of range"),
        (["--memory-fraction", "1.5"], "memory-fraction: '1.5'"),
        (["--isl", "0"], "isl: '0' is out of range"),
        (["--osl", "4"], "add --isl"),
        (["--no-cache"], "add --isl and --osl"),
        (["--convention", "lecturer"], "convention: 'lecturer'"),
        (["--convention", "lecture", "--isl", "8"], "covers decode steps only"),
        (["--dtype", "fp9"], "Did you mean 'fp8'"),
        (["--dtype", "int4"], "int4-g128"),
        (["--kv-heads", "3"], "3 does not divide the 4 query heads"),
        (["--attention", "unfussed"], "Did you mean 'unfused'"),
        (["--source-len", "4"], "has no encoder"),
        (["-o", "jsn"], "Did you mean 'json'"),
        (["--json", "-o", "csv"], "--json contradicts"),
        (["--batchh", "7"], "Did you mean '--batch'"),
        (["extra"], "extra"),
    ],
)
def test_a_bad_option_is_named(complaint: Complaint, model: Path, options: list[str], said: str) -> None:
    assert said in complaint("what-if", model, "--gpu", "h100-sxm", *options)


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("empty.json", b"", "is empty"),
        ("truncated.json", b'{"model_type": "llama", "hidden_size": 64', "not valid JSON"),
        ("list.json", b"[1, 2]", "a JSON list"),
        ("missing.json", b'{"model_type": "llama", "hidden_size": 64}', "num_hidden_layers"),
        ("nameless.json", b'{"hidden_size": 64}', "model_type is missing"),
        ("family.json", b'{"model_type": "lama"}', "Did you mean 'llama'"),
        ("binary.json", bytes(range(128, 256)), "not a text file"),
        ("deep.json", b"[" * 100_000, "not valid JSON"),
        ("huge.json", b" " * (17 * 2**20), "has 17825792 bytes"),
    ],
)
def test_a_bad_file_is_named_with_what_is_wrong(
    complaint: Complaint, tmp_path: Path, name: str, content: bytes, said: str
) -> None:
    path = tmp_path / name
    path.write_bytes(content)
    assert said in complaint("what-if", path, "--gpu", "h100-sxm")


def test_a_directory_and_an_absent_file_are_no_models(complaint: Complaint, tmp_path: Path) -> None:
    assert "without a config.json" in complaint("what-if", tmp_path, "--gpu", "h100-sxm")
    assert "cannot be read" in complaint("what-if", tmp_path / "absent.json", "--gpu", "h100-sxm")
    assert "two lines.json" in complaint("what-if", "two\nlines.json", "--gpu", "h100-sxm")
    long = complaint("what-if", "a" * 5000, "--gpu", "h100-sxm")
    assert "File name too long" in long
    assert len(long) < 1000


def test_unknown_names_come_with_the_nearest_known_one(complaint: Complaint, model: Path) -> None:
    assert "Did you mean 'h100-sxm'" in complaint("what-if", model, "--gpu", "h100-sxmm")
    assert "Did you mean 'what-if'?" in complaint("whatif")
    assert "Did you mean 'attention'" in complaint("formula", "atention")
    assert "Did you mean 'decode'?" in complaint("explain", model, "-g", "h100-sxm", "--phase", "decod")
    assert "unknown model 'no-such'" in complaint("models", "no-such")
    assert "unknown accelerator 'no-such'" in complaint("gpus", "no-such")


def test_what_is_missing_is_asked_for(complaint: Complaint, model: Path) -> None:
    assert "--gpu h100-sxm" in complaint("what-if", model)
    assert "MODEL" in complaint("what-if")
    assert "--batch" in complaint("what-if", model, "--batch")


def test_a_bad_hardware_file_is_named(complaint: Complaint, model: Path, tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text('id = "mine"\nname = "m"\nvendor = "v"\nkind = "gpu"\narchitecture = "a"\n', encoding="utf-8")
    assert "[compute]" in complaint("what-if", model, "--gpu", path)
    assert "cannot be read" in complaint("what-if", model, "--gpu", tmp_path / "absent.toml")


def test_explain_takes_one_value_each(complaint: Complaint, model: Path) -> None:
    assert "one value" in complaint("explain", model, "-g", "h100-sxm", "-b", "1,2")
    assert "one GPU" in complaint("explain", model, "-g", "h100-sxm,h200-sxm")


def test_a_defect_is_one_line_and_code_70(
    complaint: Complaint, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def defect(name: str) -> None:
        raise ZeroDivisionError("oops")

    monkeypatch.delenv("ROOFLINE_DEBUG", raising=False)
    monkeypatch.setattr("roofline.accelerator.load_accelerator", defect)
    assert "please report" in complaint("gpus", "h100-sxm", code=INTERNAL)
    monkeypatch.setenv("ROOFLINE_DEBUG", "1")
    assert run(["gpus", "h100-sxm"]) == INTERNAL
    assert "Traceback" in capsys.readouterr().err


def test_a_missing_extra_is_named_and_code_3(complaint: Complaint, monkeypatch: pytest.MonkeyPatch) -> None:
    def needs_torch(name: str) -> None:
        raise ModuleNotFoundError("No module named 'torch'", name="torch.nn")

    monkeypatch.setattr("roofline.accelerator.load_accelerator", needs_torch)
    assert "[kernels]'" in complaint("gpus", "h100-sxm", code=MISSING)


def test_the_installed_program_keeps_codes_and_streams(model: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "LC_ALL": "C", "PYTHONIOENCODING": "ascii"}

    def program(*arguments: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "roofline", *arguments]
        return subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)

    good = program("what-if", str(model), "--gpu", "h100-sxm", "-o", "jsonl")
    assert (good.returncode, good.stderr) == (0, "")
    assert json.loads(good.stdout)["fits"] is True
    finding = program("what-if", str(model), "--gpu", "h100-sxm", "-b", "1e9", "--check", "-q")
    assert finding.returncode == 1
    bad = program("what-if", "modèle", "--gpu", "h100-sxm")
    assert (bad.returncode, bad.stdout, bad.stderr.count("\n")) == (BAD_INPUT, "", 1)


def test_messages_name_what_is_wrong_and_what_there_is(complaint: Complaint, tmp_path: Path) -> None:
    question = ("what-if", "llama-3.1-8b", "-g", "h100-sxm")
    assert "hidden=0 is out of range; give a size" in complaint(*question, "--prune-width", "hidden=0")
    assert "--share-kv-every: 64 is not between 1 and the 32 layers" in complaint(*question, "--share-kv-every", 64)
    assert apply(load_model("llama-3.1-8b"), [share_kv_every(32)]).params < load_model("llama-3.1-8b").params
    explained = complaint("explain", "llama-3.1-8b", "-g", "h100-sxm", "--tp", 8)
    assert "explain answers for one GPU; what-if, fit and simulate split a model over several" in explained
    load = ("--isl", 10, "--osl", 10, "--rate", 1)
    unknown = complaint("plan", "llama-3.1-8b", *load, "--gpus", "nonesuch")
    assert "error: gpus: unknown accelerator 'nonesuch'. Such as h100-sxm" in unknown
    for gpu in COMMON:
        assert load_accelerator(gpu).id == gpu
    (tmp_path / "own.csv").write_text("class,latency_ms,dtype,m,n,k\ngemm,1,bf16,64,64,64\n")
    own = complaint("validate", "own", "--file", tmp_path / "own.csv")
    assert "the column latency_us is missing; found class, latency_ms, dtype, m, n, k; times are in microseconds" in own
    (tmp_path / "points.csv").write_text("batch,tpot_s\n1,0.01\n")
    figure = ("plot", "latency", "llama-3.1-8b", "-g", "h100-sxm", "--out", tmp_path / "figure.svg")
    measured = complaint(*figure, "--measured", tmp_path / "points.csv")
    assert "line 2" in measured
    assert "the column tpot_ms is missing; found batch, tpot_s" in measured
    assert "{" not in measured
