"""Figures show what the other commands print: every point of a curve, bar and mark against their JSON."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from roofline.cli import picture
from roofline.units import GIB

Cli = Callable[..., Any]
CASE = ("llama-2-13b", "--gpu", "h100-sxm", "--context", 1024)


@pytest.fixture
def draw(cli: Cli, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., Any]:
    """The axes that ``roofline plot`` would write."""
    drawn: list[Any] = []
    monkeypatch.setattr(picture.Picture, "write", lambda self, figure, notes=(): drawn.append(figure) or 0)

    def call(*arguments: Any) -> Any:
        assert cli("plot", *arguments, "--out", tmp_path / "a.svg").code == 0
        return drawn[-1].axes[0]

    return call


def marks(axes: Any, size: float, marker: str = "o") -> dict[float, float]:
    """x -> y of marks of a size."""
    lines = [line for line in axes.lines if line.get_marker() == marker and line.get_markersize() == size]
    return {float(x): float(y) for line in lines for x, y in line.get_xydata()}


@pytest.mark.parametrize(
    ("figure", "bound", "expected"),
    [
        ("latency", lambda row: 1e3 * row["tpot_bound_s"], lambda row: 1e3 * row["tpot_expected_s"]),
        ("throughput", lambda row: row["output_tok_per_s_bound"], lambda row: row["batch"] / row["tpot_expected_s"]),
    ],
)
def test_curves_are_those_of_what_if(cli: Cli, draw: Any, figure: str, bound: Any, expected: Any) -> None:
    rows = cli("what-if", *CASE, "--batch", "1,16,64,128,256", "-o", "json").records
    axes = draw(figure, *CASE, "--batch", "1,16,64,128,256")
    assert marks(axes, 5.5) == pytest.approx({row["batch"]: bound(row) for row in rows}, rel=1e-9)
    assert marks(axes, 3.5) == pytest.approx({row["batch"]: expected(row) for row in rows if row["fits"]}, rel=1e-9)
    hollow = [x for line in axes.lines if line.get_markerfacecolor() == "white" for x in line.get_xdata()]
    assert hollow == [row["batch"] for row in rows if not row["fits"]]


def test_a_frontier_is_that_of_what_if(cli: Cli, draw: Any) -> None:
    sizes = ("--tp", 2, "--batch", "1,16,64")
    rows = cli("what-if", *CASE, *sizes, "-o", "json").records
    wanted = {row["output_tok_per_s_per_user_bound"]: row["output_tok_per_s_bound"] / 2 for row in rows}
    found = marks(draw("pareto", *CASE, *sizes), 5.5)
    assert sorted(found) == pytest.approx(sorted(wanted), rel=1e-9)
    assert sorted(found.values()) == pytest.approx(sorted(wanted.values()), rel=1e-9)


def test_stacked_memory_is_what_what_if_requires(cli: Cli, draw: Any) -> None:
    (row,) = cli("what-if", *CASE, "--batch", 64, "-o", "json").records
    bars = draw("memory", *CASE, "--batch", 64).patches
    parts = (row["weight_bytes"], row["kv_bytes"] + row["new_kv_bytes"], row["workspace_bytes"])
    assert [bar.get_height() for bar in bars[:3]] == pytest.approx([size / GIB for size in parts], rel=1e-12)
    assert bars[3].get_y() + bars[3].get_height() == pytest.approx(row["capacity_bytes"] / GIB)


def test_cached_state_is_that_of_what_if(cli: Cli, draw: Any) -> None:
    rows = cli("what-if", *CASE[:3], "--context", "1024,4096", "--batch", 1, "-o", "json").records
    found = marks(draw("kv", CASE[0], "--context", "1024,4096"), 4.5)
    assert found == {row["context_tokens"]: row["kv_bytes"] for row in rows}


def test_shares_and_marks_of_kernels_are_those_of_explain(cli: Cli, draw: Any) -> None:
    sizes = (*CASE, "--batch", 64)
    rows = [row for row in cli("explain", *sizes, "-o", "json").records if not row["total"]]
    axes = draw("breakdown", *sizes, "--engine", "none")
    attention = next(row["share"] for row in rows if row["component"] == "attention")
    assert axes.patches[0].get_width() == pytest.approx(100 * attention, rel=1e-9)
    assert sum(bar.get_width() for bar in axes.patches) == pytest.approx(100)
    kernels = {row["intensity_flop_per_byte"]: row["matrix_flop"] / row["bound_s"] / 1e12 for row in rows if row["matrix_flop"]}
    roofline = draw("roofline", *sizes, "--phase", "decode", "--engine", "none")
    shown = [(x, y) for line in roofline.lines if line.get_marker() in ("o", "s", "^", "p") for x, y in line.get_xydata()]
    assert shown
    assert all(any((x, y) == pytest.approx(pair, rel=1e-9) for pair in kernels.items()) for x, y in shown)


def test_every_limit_is_that_of_fit_and_stands_there_with_its_reason(cli: Cli, draw: Any) -> None:
    axes = draw("latency", "llama-2-13b", "llama-2-13b:kv-heads=8", *CASE[1:])
    for label, edit in (("llama-2-13b", ()), ("llama-2-13b --kv-heads 8", ("--kv-heads", 8))):
        row = cli("fit", *CASE, *edit, "-o", "json").records[-1]
        start = f"{label}: batch {row['largest_batch'] + 1:,} does not fit: weights {row['weight_bytes'] / GIB:.2f} + KV "
        (text,) = [text.get_text() for text in axes.texts if text.get_text().startswith(start)]
        assert text.endswith(f" > {row['capacity_bytes'] / GIB:.2f} GiB")


def test_a_roofline_says_which_steps_do_not_fit(draw: Any) -> None:
    said = draw("roofline", *CASE, "--batch", "1,128", "--phase", "decode").get_title(loc="left")
    assert said.replace("\n", " ").endswith("; does not fit: decode of batch 128")
    assert "does not fit" not in draw("roofline", *CASE, "--batch", "1").get_title(loc="left")
