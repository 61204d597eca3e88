"""``roofline plot``: every figure is written from the command line, and what cannot be drawn is one line and exit code 2."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from roofline.cli.figures import kv
from roofline.cli.plot import FIGURES
from roofline.plots import describe

Cli = Callable[..., Any]

TRACE = [{"ph": "X", "name": "decode 3", "pid": 2, "tid": 1, "ts": 0, "dur": 1000}]
ARGUMENTS: dict[str, list[Any]] = {
    "roofline": ["llama-3.1-8b", "--gpu", "h100-sxm", "--batch", 32],
    "latency": ["llama-2-13b", "llama-2-13b:kv-heads=8", "--gpu", "h100-sxm", "--context", 1024],
    "throughput": ["llama-3.1-8b", "--gpu", "h100-sxm,mi300x", "--batch", "1,8"],
    "pareto": ["llama-3.1-8b", "--gpu", "h100-sxm", "--tp", "1,2", "--batch", "1,8,64"],
    "memory": ["llama-3.1-70b", "--gpu", "h100-sxm", "--tp", 2, "--pp", 2],
    "kv": ["llama-3.1-8b", "mamba2-2.7b", "--gpu", "l4"],
    "breakdown": ["llama-3.1-8b", "--gpu", "h100-sxm", "--kv-dtype", "fp8"],
    "timeline": [],
}
STARTS = {"svg": b"<?xml", "png": b"\x89PNG", "pdf": b"%PDF"}


@pytest.mark.parametrize("figure", ARGUMENTS)
def test_every_figure_is_written(cli: Cli, tmp_path: Path, figure: str) -> None:
    (tmp_path / "trace.json").write_text(json.dumps({"traceEvents": TRACE}), encoding="utf-8")
    kind = sorted(STARTS)[sorted(ARGUMENTS).index(figure) % 3]
    path = tmp_path / f"figure.{kind}"
    given = ARGUMENTS[figure] or [tmp_path / "trace.json"]
    answer = cli("plot", figure, *given, "--out", path, "--size", "6x4", "--title", "A title", "--dpi", 60)
    assert (answer.code, answer.err) == (0, "")
    assert answer.out.startswith(f"wrote {path} (6 x 4 in)")
    assert path.read_bytes().startswith(STARTS[kind])


def test_all_figures_are_tried_here_but_the_one_that_needs_measurements() -> None:
    assert set(FIGURES) - set(ARGUMENTS) == {"validation"}


def test_validation_draws_what_others_measured(cli: Cli, tmp_path: Path) -> None:
    pytest.importorskip("aiconfigurator_core")
    path = tmp_path / "validation.png"
    assert cli("plot", "validation", "--gpu", "h100-sxm", "--class", "kda", "--out", path, "-q").code == 0
    assert path.read_bytes().startswith(STARTS["png"])


def test_measured_points_are_drawn(cli: Cli, tmp_path: Path) -> None:
    points, path = tmp_path / "mine.csv", tmp_path / "figure.svg"
    points.write_text("batch,tpot_ms\n1,9.1\n16,13.5\n", encoding="utf-8")
    command = ("plot", "latency", "llama-2-13b", "--gpu", "h100-sxm", "--context", 1024, "--out", path, "-q")
    assert cli(*command).code == 0
    before = path.read_bytes()
    assert cli(*command, "--measured", points).code == 0
    assert path.read_bytes() != before


def test_the_command_draws_what_the_function_draws(cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from roofline import load_model
    from roofline.cli import picture
    from roofline.plots import kv_plot

    drawn: list[Any] = []
    monkeypatch.setattr(picture.Picture, "write", lambda self, figure, notes=(): drawn.append(figure) or 0)
    assert cli("plot", "kv", "llama-3.1-8b", "--context", "1024,2048", "--out", tmp_path / "a.svg").code == 0
    assert describe(drawn[0]) == describe(kv_plot({"llama-3.1-8b": load_model("llama-3.1-8b")}, [1024, 2048]))
    assert kv.__name__ == "kv"


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["latenc"], "unknown figure 'latenc'. Did you mean 'latency'"),
        (["latency", "llama-3.1-8b", "--gpu", "h100-sxm"], "out: say which file"),
        (["latency", "llama-3.1-8b", "--gpu", "h100-sxm", "--out", "a.gif"], "out: 'a.gif' has the suffix"),
        (["latency", "llama-3.1-8b", "--gpu", "h100-sxm", "--out", "nowhere/a.svg"], "out: there is no folder"),
        (["latency", "llama-3.1-8b", "--gpu", "h100-sxm", "--batch", 8, "--out", "{out}"], "batch: a curve needs two"),
        (["latency", "llama-3.1-8b", "--out", "{out}"], "gpu: say which accelerator"),
        (["latency", "no-such-model", "--gpu", "h100-sxm", "--out", "{out}"], "unknown model"),
        (["latency", "llama-3.1-8b", "--gpu", "h100-sxm", "--size", "big", "--out", "{out}"], "size: 'big' is not a size"),
        (["latency", "llama-3.1-8b", "--gpu", "h100-sxm", "--dpi", "9999", "--out", "{out}"], "dpi: 9999 is out of range"),
        (["latency", "llama-3.1-8b", "--gpu", "h100-sxm", "--measured", "none.csv", "--out", "{out}"], "measured: none.csv"),
        (["roofline", "llama-3.1-8b", "--gpu", "h100-sxm,l4", "--out", "{out}"], "gpu: a roofline shows one GPU"),
        (["roofline", "llama-3.1-8b", "--gpu", "h100-sxm", "--phase", "x", "--out", "{out}"], "phase: 'x' is not one of"),
        (["pareto", "llama-3.1-405b", "--gpu", "l4", "--out", "{out}"], "nothing fits"),
        (["kv", "t5-large", "--out", "{out}"], "source-len: t5-large"),
        (["timeline", "none.json", "--out", "{out}"], "trace: none.json cannot be read"),
    ],
)
def test_what_cannot_be_drawn_is_one_line(cli: Cli, tmp_path: Path, arguments: list[Any], says: str) -> None:
    answer = cli("plot", *(str(a).replace("{out}", str(tmp_path / "a.svg")) for a in arguments))
    assert answer.code == 2
    assert says in answer.err
    assert answer.err.count("\n") == 1
    assert not (tmp_path / "a.svg").exists()


def test_plot_alone_shows_examples(cli: Cli) -> None:
    answer = cli("plot")
    assert answer.code == 0
    assert answer.out.count("\n  roofline plot ") == 3


@pytest.mark.parametrize("figure", FIGURES)
def test_every_figure_explains_itself(cli: Cli, figure: str) -> None:
    answer = cli("plot", figure, "--help")
    assert answer.code == 0
    assert f"roofline plot {figure}" in answer.out
