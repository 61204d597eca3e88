"""Figures: what is drawn is the committed baseline, text overlaps no text, files are the same bytes, bad input is said."""

from __future__ import annotations

import copy
import itertools
import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy
import pytest

from roofline import Deployment, InputError, load_accelerator, load_model
from roofline.edits import apply, kv_heads
from roofline.expected.serving import batches
from roofline.parallel.mesh import Mesh
from roofline.plots import (
    Compared,
    breakdown_plot,
    describe,
    digest,
    kernel_points,
    kv_plot,
    latency_plot,
    lines_plot,
    memory_plot,
    pareto_plot,
    roofline_plot,
    save,
    step_point,
    throughput_plot,
    timeline_plot,
    validation_plot,
)
from roofline.plots.labels import GUIDE
from roofline.plots.legible import faults
from roofline.plots.roofs import Roofs, attained, datasheet
from roofline.plots.structure import dashes
from roofline.plots.style import COLOURS, FORMATS, GREY, HATCHES, INK, LINES, MARKERS, written
from roofline.sharded import ShardedDeployment

BASELINES = Path(__file__).with_name("baselines")
REACHED = Roofs(2.8e12, {"bf16": 8.0e14, "fp8": 1.2e15}, "measured")
"""Not those of the hardware file, which change with each calibration; so do expected times, which are left out here."""
DOUBLINGS = [2**power for power in range(10)]


def on(gpu: str, model: str, **mesh: int) -> Deployment:
    loaded, chip = load_model(model), load_accelerator(gpu)
    return ShardedDeployment(loaded, chip, mesh=Mesh(**mesh)) if mesh else Deployment(loaded, chip)


def _kernels() -> Any:
    one = on("h100-sxm", "llama-3.1-8b")
    prefill = kernel_points(one, 1, 0, phase="prefill", new_tokens=2048, engine="none")
    points = [*kernel_points(one, 32, 8192, engine="none"), *prefill]
    return roofline_plot(one.accelerator, points, reached=REACHED, title="llama-3.1-8b on h100-sxm")


def _crowded() -> Any:
    one = on("b200-sxm", "deepseek-v3")
    prefill = kernel_points(one, 1, 0, phase="prefill", new_tokens=4096, engine="none")
    points = [*kernel_points(one, 128, 32768, engine="none"), *prefill]
    return roofline_plot(one.accelerator, points, reached=None)


def _steps() -> Any:
    one = on("mi300x", "llama-3.1-8b")
    return roofline_plot(one.accelerator, [step_point(one.decode(b, 4096), f"batch {b}") for b in (1, 16, 256)])


def _fallback_unit() -> Any:
    """Mamba 2's scan multiplies in fp32, for which an L4 has no matrix unit."""
    one = on("l4", "mamba2-2.7b")
    points = [*kernel_points(one, 8, 4096, engine="none"), *kernel_points(one, 1, 0, phase="prefill", engine="none")]
    return roofline_plot(one.accelerator, points, reached=None)


def _models() -> Any:
    cases = {name: on("h100-sxm", name) for name in ("qwen2.5-0.5b", "llama-2-13b", "mamba2-2.7b")}
    points = [
        step_point(step, f"batch {b}", n, kind=name)
        for n, (name, one) in enumerate(cases.items())
        for b in (1, 256)
        for step in (one.decode(b, 4096), one.prefill(b, 1024))
    ]
    return roofline_plot(load_accelerator("h100-sxm"), points, reached=REACHED)


def _two_heads() -> dict[str, Deployment]:
    model, chip = load_model("llama-2-13b"), load_accelerator("h100-sxm")
    return {"MHA": Deployment(model, chip), "GQA, 8 KV heads": Deployment(apply(model, [kv_heads(8)]), chip)}


def _wide() -> Any:
    names = ("llama-3.1-405b", "deepseek-v3", "mamba2-2.7b", "gemma-3-27b-it")
    return latency_plot({name: on("mi300x", name) for name in names}, [2**power for power in range(15)], 131072, engine="none")


def _series() -> Any:
    measured = [1e-6 * 1.5**step for step in range(40)]
    return validation_plot(
        [
            Compared("gemm", "bf16", measured, [value * (1 + 0.2 * (-1) ** n) for n, value in enumerate(measured)]),
            Compared("attention", "fp8", measured, [value * 1.05 for value in measured]),
        ]
    )


def _trace(requests: int) -> list[dict[str, Any]]:
    """Requests that arrive every 40 ms, wait 10, prefill 30 and decode for 500 ms on two replicas, in Chrome's format."""
    names = {1: "requests", 2: "replica 0", 3: "replica 1"}
    events: list[dict[str, Any]] = [{"ph": "M", "name": "process_name", "pid": p, "args": {"name": n}} for p, n in names.items()]
    for number in range(requests):
        at, common = 40_000.0 * number, {"cat": "request", "id": number, "pid": 1}
        for name, start, end in (("queue", 0, 1e4), ("prefill", 1e4, 4e4), ("decode", 4e4, 54e4)):
            events += [{"ph": "b", "name": name, "ts": at + start, **common}, {"ph": "e", "name": name, "ts": at + end, **common}]
        replica = {"pid": 2 + number % 2, "ts": at + 1e4}
        events.append({"ph": "X", "name": f"prefill 512 + decode {number}", "dur": 3e4, **replica})
        events.append({"ph": "X", "name": f"decode {number}", **replica, "ts": at + 4e4, "dur": 1e4})
        events.append({"ph": "C", "name": "used blocks", "args": {"used blocks": 32 * number}, **replica})
    return events


SEVERAL = ("llama-2-13b", "llama-3.1-8b", "deepseek-v3", "gemma-3-27b-it", "mamba2-2.7b", "qwen3-next-80b-a3b")
SEVEN = (*SEVERAL[:2], "qwen2.5-0.5b", "mamba2-2.7b", "nemotron-h-8b", "gpt-oss-20b", "gemma-3-27b-it")
LONG = "llama-3.1-minitron-4b-depth-base"
MESHES = {"tp 8": {"tp": 8}, "tp 2, pp 4": {"tp": 2, "pp": 4}}

FIGURES: dict[str, Callable[[], Any]] = {
    "roofline": _kernels,
    "roofline-crowded": _crowded,
    "roofline-steps": _steps,
    "roofline-fallback-unit": _fallback_unit,
    "roofline-models": _models,
    "latency": lambda: latency_plot(_two_heads(), DOUBLINGS, 1024, measured={"MHA": [(1, 0.0095), (16, 0.0141)]}, engine="none"),
    "latency-small": lambda: latency_plot(on("h100-sxm", "smollm2-135m"), [1, 2], 128, engine="none"),
    "latency-wide": _wide,
    "latency-nothing-fits": lambda: latency_plot(on("l4", "llama-3.1-405b"), [1, 4], 4096, engine="none"),
    "latency-seven": lambda: latency_plot(
        {name: on("h100-sxm", name) for name in SEVEN}, [2**power for power in range(13)], 8192, engine="none"
    ),
    "throughput": lambda: throughput_plot(_two_heads(), DOUBLINGS, 1024, engine="none"),
    "pareto": lambda: pareto_plot(
        {"llama-3.1-70b": [on("h100-sxm", "llama-3.1-70b", tp=n) for n in (2, 4, 8)]}, DOUBLINGS, 8192, engine="none"
    ),
    "pareto-small": lambda: pareto_plot({"8b": [on("h100-sxm", "llama-3.1-8b")]}, [1, 2], 1024, engine="none"),
    "pareto-meshes": lambda: pareto_plot(
        {name: [on("mi300x", name, tp=n) for n in (1, 2, 4, 8)] for name in ("llama-3.1-70b", "nemotron-h-56b")},
        DOUBLINGS,
        131072,
        engine="none",
    ),
    "memory": lambda: memory_plot({n: on("h100-sxm", "llama-3.1-70b", **m) for n, m in MESHES.items()}, 64, 32768),
    "memory-small": lambda: memory_plot(on("h100-sxm", "llama-3.1-8b"), 1, 16),
    "memory-short": lambda: memory_plot(
        {f"{name} on {gpu}": on(gpu, name) for name in ("llama-3.1-8b", LONG) for gpu in ("l4", "b200-sxm")}, 4, 2**20
    ),
    "kv": lambda: kv_plot({n: load_model(n) for n in SEVERAL}, [2**p for p in range(13, 21)], accelerator=load_accelerator("l4")),
    "kv-small": lambda: kv_plot({"8b": load_model("llama-3.1-8b")}, [1000, 2000]),
    "breakdown": lambda: breakdown_plot(on("b200-sxm", "deepseek-v3"), [1, 8, 64, 512], 32768, engine="none"),
    "breakdown-prefill": lambda: breakdown_plot(on("h100-sxm", "llama-3.1-70b", tp=8), [1], 0, phase="prefill", engine="none"),
    "breakdown-long": lambda: breakdown_plot(
        {name: on("b200-sxm", name) for name in (LONG, "deepseek-v4-pro", "nemotron-h-56b")}, [1, 256], 131072, engine="none"
    ),
    "validation": _series,
    "validation-many": lambda: validation_plot([Compared("gemm", f"kernel {n}", [1e-6 * n], [1.1e-6 * n]) for n in range(1, 20)]),
    "lines": lambda: lines_plot(
        {"flat": [(1, 2.0), (512, 2.0)], "falling": [(1, 3.0), (16, 2.5), (512, 0.8)]},
        x="Batch [sequences]",
        y="Speed-up",
        title="Two lines",
        note="and a level",
        x_scale="log2",
        level=(1.0, "even"),
    ),
    "timeline": lambda: timeline_plot(_trace(30)),
    "timeline-window": lambda: timeline_plot(_trace(400), start=2.0, end=9.0),
    "timeline-small": lambda: timeline_plot(_trace(1)),
}


@pytest.fixture(scope="module")
def figures() -> dict[str, Any]:
    """Every figure, drawn once."""
    return {name: draw() for name, draw in FIGURES.items()}


def differences(found: Any, wanted: Any, path: str = "") -> Iterator[str]:
    """Where two descriptions differ; numbers up to a relative 1e-6."""
    if isinstance(wanted, dict) and isinstance(found, dict):
        for key in sorted({*found, *wanted}):
            yield from differences(found.get(key), wanted.get(key), f"{path}.{key}")
    elif isinstance(wanted, list) and isinstance(found, list) and len(found) == len(wanted):
        for number, (one, other) in enumerate(zip(found, wanted, strict=True)):
            yield from differences(one, other, f"{path}[{number}]")
    elif isinstance(wanted, float) and isinstance(found, float):
        if found != pytest.approx(wanted, rel=1e-6):
            yield f"{path}: {found} instead of {wanted}"
    elif found != wanted:
        yield f"{path}: {found!r:.200} instead of {wanted!r:.200}"


@pytest.mark.parametrize("name", FIGURES)
def test_what_is_drawn_is_the_baseline(figures: dict[str, Any], name: str) -> None:
    """After a wanted change, look at the figure and run tests/plots/update.py."""
    wanted = json.loads((BASELINES / f"{name}.json").read_text(encoding="utf-8"))
    assert list(differences(json.loads(json.dumps(describe(figures[name]))), wanted)) == []


def _recolour(figure: Any) -> None:
    figure.axes[0].lines[0].set_color("#123456")


def _move(figure: Any) -> None:
    line = figure.axes[0].lines[0]
    line.set_ydata(line.get_ydata() * 1.01)


def _rename(figure: Any) -> None:
    figure.axes[0].set_ylabel("Time per output token [s]")


def _unlist(figure: Any) -> None:
    figure.legends[0].get_texts()[0].set_text("something else")


def _unshade(figure: Any) -> None:
    figure.axes[0].patches[0].remove()


@pytest.mark.parametrize("change", [_recolour, _move, _rename, _unlist, _unshade])
def test_a_planted_change_is_found(change: Any) -> None:
    figure = FIGURES["latency"]()
    before, mark = copy.deepcopy(describe(figure)), digest(figure)
    assert list(differences(describe(figure), before)) == []
    change(figure)
    assert list(differences(describe(figure), before))
    assert digest(figure) != mark


@pytest.mark.parametrize("name", FIGURES)
def test_no_text_covers_another_or_leaves_the_figure(figures: dict[str, Any], name: str) -> None:
    assert faults(figures[name]) == []


@pytest.mark.parametrize(
    ("x", "y", "text", "says"),
    [(0.0, 1.02, "Over the title of these axes", "cover one another"), (0.95, 0.5, "beyond the right edge", "leaves the figure")],
)
def test_a_planted_text_is_found(x: float, y: float, text: str, says: str) -> None:
    figure = FIGURES["lines"]()
    figure.axes[0].text(x, y, text, transform=figure.axes[0].transAxes).set_in_layout(False)
    assert any(says in fault for fault in faults(figure))


def test_a_size_without_room_for_the_words_is_refused() -> None:
    assert latency_plot(_two_heads(), DOUBLINGS, 1024, engine="none", size=(6, 4.5))
    with pytest.raises(InputError, match=r"size: 3 x 2\.5 inches leave no room"):
        latency_plot(_two_heads(), DOUBLINGS, 1024, engine="none", size=(3, 2.5))


def _same(one: Any, other: Any) -> bool:
    """Whether a colour is another one, or that of words and legends that speak of any colour."""
    from matplotlib.colors import to_hex

    return to_hex(other) in (to_hex(one), GREY.lower(), INK.lower())


def _hollow(line: Any) -> bool:
    from matplotlib.colors import to_hex

    return to_hex(line.get_markerfacecolor()) == "#ffffff"


def unexplained(figure: Any) -> list[str]:
    """What is drawn and means something, without an entry of the legend that looks like it."""
    from matplotlib.lines import Line2D

    handles = [handle for legend in figure.legends for handle in legend.legend_handles]
    words = [text.get_text() for legend in figure.legends for text in legend.get_texts()]
    lines = [handle for handle in handles if isinstance(handle, Line2D)]
    areas = [handle for handle in handles if not isinstance(handle, Line2D)]
    found = []
    for line in (line for axes in figure.axes for line in axes.lines if len(line.get_xydata())):
        label, colour, marker = str(line.get_label()), line.get_color(), str(line.get_marker())
        own = label.startswith("_") and not label.startswith("_child")
        if label == GUIDE or (own and any(word.startswith(label[1:]) for word in words)):
            continue
        style = dashes(line)
        if style != "None" and not any(dashes(h) == style and _same(colour, h.get_color()) for h in lines):
            found.append(f"line {style} {colour}")
        if marker != "None" and not any(h.get_marker() == marker and _same(colour, h.get_color()) for h in lines):
            found.append(f"marker {marker} {colour}")
        if marker not in ("None", "x", "*", "|") and not any(
            _hollow(h) == _hollow(line) for h in lines if h.get_marker() != "None"
        ):
            found.append(f"{'hollow' if _hollow(line) else 'filled'} {marker}")
    shapes = [shape for axes in figure.axes for shape in (*axes.patches, *axes.collections) if shape.get_label() != GUIDE]
    for shape in shapes:
        edge, hatch = shape.get_edgecolor(), shape.get_hatch()
        face = shape.get_facecolor()
        face, edge = (colour[0] if len(colour) and hasattr(colour[0], "__len__") else colour for colour in (face, edge))
        empty = len(face) == 0 or face[3] == 0
        alike = [h for h in areas if h.get_hatch() == hatch]
        if not any(_same(edge if empty else face, h.get_edgecolor() if empty else h.get_facecolor()) for h in alike):
            found.append(f"area {face} {hatch}")
    return found


@pytest.mark.parametrize("name", FIGURES)
def test_the_legend_or_a_word_explains_all_that_is_drawn(figures: dict[str, Any], name: str) -> None:
    assert unexplained(figures[name]) == []


@pytest.mark.parametrize("style", [{"linestyle": ":"}, {"color": "#123456"}, {"marker": "h"}, {"marker": "o", "mfc": "white"}])
def test_a_planted_line_without_an_entry_is_found(style: dict[str, Any]) -> None:
    figure = FIGURES["lines"]()
    figure.axes[0].plot([1, 2], [1, 2], **{"color": COLOURS[0], **style})
    assert unexplained(figure)


@pytest.mark.parametrize("kind", FORMATS)
def test_files_are_the_same_bytes_each_time_and_hold_no_date(kind: str) -> None:
    first, second = (written(FIGURES["latency-small"](), kind, 80) for _ in range(2))
    assert first == second
    assert b"dc:date" not in first
    assert b"CreationDate" not in first


def test_another_process_with_other_settings_writes_the_same_bytes(tmp_path: Path) -> None:
    (tmp_path / "matplotlibrc").write_text("axes.facecolor: black\nfont.size: 20\nsvg.hashsalt: other\n", encoding="utf-8")
    code = (
        "import sys; from roofline import *; from roofline.plots import latency_plot, save; "
        "one = Deployment(load_model('smollm2-135m'), load_accelerator('h100-sxm')); "
        "save(latency_plot(one, [1, 2], 128, engine='none'), sys.argv[1])"
    )
    command = [sys.executable, "-c", code, "a.svg"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "a.svg").read_bytes() == written(FIGURES["latency-small"](), "svg")


def test_colours_and_lines_stay_apart_in_grey() -> None:
    """Neighbouring curves differ in line style and marker, and neighbouring colours in lightness."""
    from matplotlib.colors import to_rgb

    assert len(set(MARKERS)) == len(set(HATCHES)) == len(COLOURS) == len(LINES)
    light = [0.2126 * r + 0.7152 * g + 0.0722 * b for r, g, b in map(to_rgb, COLOURS)]
    assert all(abs(one - other) > 0.1 for one, other in itertools.pairwise(light))
    assert all(str(one) != str(other) for one, other in itertools.pairwise(LINES))


@pytest.mark.parametrize(
    ("attempt", "says"),
    [
        (lambda: latency_plot(on("h100-sxm", "llama-3.1-8b"), [8], 1024), "batch: a curve needs two or more batches"),
        (lambda: latency_plot({}, [1, 2], 1024), "nothing to draw"),
        (lambda: latency_plot(on("h100-sxm", "llama-3.1-8b"), [1, 2], 1024, measured={"x": [(1, 1.0)]}), "'x' is not one of"),
        (lambda: latency_plot(on("h100-sxm", "llama-3.1-8b"), [1, 2], 1024, measured=[(1, -1.0)]), "is not a measurement"),
        (lambda: latency_plot(on("h100-sxm", "llama-3.1-8b"), [1, 2], 1024, size=(0, 5)), "size:"),
        (lambda: validation_plot([]), "no measurements"),
        (lambda: lines_plot({}, x="x", y="y", title=""), "nothing to draw"),
        (lambda: lines_plot({"a": [(0, 1)]}, x="x", y="y", title="", x_scale="log2"), "no place on a logarithmic axis"),
        (lambda: timeline_plot([]), "no requests and no steps"),
        (lambda: timeline_plot([{"ph": "X", "name": "decode"}]), "event 0 is broken"),
        (lambda: timeline_plot(_trace(3), start=5.0, end=4.0), "not before the end"),
        (lambda: timeline_plot(_trace(3), start=50.0, end=60.0), "nothing to draw"),
        (lambda: roofline_plot(on("h100-sxm", "llama-3.1-8b").accelerator, [], size=(900, 5)), "size:"),
    ],
)
def test_what_cannot_be_drawn_is_said(attempt: Any, says: str) -> None:
    with pytest.raises(InputError, match=says):
        attempt()


@pytest.mark.parametrize(
    ("name", "says"), [("a.gif", "suffix"), ("a", "no suffix"), ("nowhere/a.svg", "cannot be written"), ("a.svg.gz", "suffix")]
)
def test_what_cannot_be_written_is_said(tmp_path: Path, name: str, says: str) -> None:
    with pytest.raises(InputError, match=says):
        save(FIGURES["latency-small"](), tmp_path / name)


def _pale(figure: Any) -> list[Any]:
    """The lines of expected times."""
    return [line for line in figure.axes[0].lines if line.get_linewidth() > 3]


def test_expected_times_are_drawn_where_they_are_calibrated_and_said_where_not() -> None:
    known = latency_plot(on("h100-sxm", "llama-2-13b"), DOUBLINGS, 1024)
    (line, beyond), (low, high) = _pale(known), batches("vllm")
    shown = set(line.get_xdata()[~numpy.isnan(line.get_ydata())])
    assert shown & set(DOUBLINGS) == {batch for batch in DOUBLINGS if low <= batch <= min(high, 70)}
    assert dashes(line) != dashes(beyond)
    bound = max(known.axes[0].collections[0].get_paths()[0].vertices[:, 1].min(), 0.0)
    assert numpy.nanmin(line.get_ydata()) > bound
    assert unexplained(known) == faults(known) == []
    assert "expected, vllm" in describe(known)["legends"][0][2]
    small = latency_plot(on("h100-sxm", "qwen2.5-0.5b"), DOUBLINGS, 1024)
    assert [dashes(line) for line in _pale(small)] == [dashes(beyond)]
    assert any("beyond what it was fitted to" in text for text in describe(small)["legends"][0])
    unknown = latency_plot(on("mi300x", "llama-2-13b"), DOUBLINGS, 1024)
    assert _pale(unknown) == []
    assert any(text.startswith("expected: mi300x has no calibrated kernels") for text in describe(unknown)["legends"][0])
    assert not any("expected" in text for text in describe(FIGURES["latency"]())["legends"][0])
    with pytest.raises(InputError, match="engine: 'vlm' is not one of"):
        latency_plot(on("h100-sxm", "llama-2-13b"), [1, 2], 1024, engine="vlm")


def test_kernels_stand_at_their_expected_times_below_the_roof() -> None:
    one = on("h100-sxm", "llama-3.1-8b")
    points = kernel_points(one, 32, 8192)
    roofs = datasheet(one.accelerator)
    assert points
    assert all(point.expected for point in points)
    assert all(0.05 < point.rate / roofs.attainable(point.unit, point.intensity) < 1 for point in points)
    assert not any(point.expected for point in kernel_points(one, 32, 8192, engine="none"))


def test_attained_roofs_lie_below_the_datasheet_and_are_drawn_solid() -> None:
    chip = load_accelerator("h100-sxm")
    spec, found = datasheet(chip), attained(chip)
    assert found is not None
    assert 0.7 < found.bandwidth / spec.bandwidth < 1
    assert 0.6 < found.rates["bf16"] / spec.rates["bf16"] < 1
    assert attained(load_accelerator("mi300x")) is None
    texts = describe(roofline_plot(load_accelerator("mi300x"), []))["legends"][0]
    assert "attained roof: not calibrated" in texts


def test_a_record_of_such_a_device_comes_before_fitted_roofs(monkeypatch: pytest.MonkeyPatch) -> None:
    from roofline.validate import measured

    record = {"gpu": "NVIDIA H100 80GB HBM3", "roofs": {"bandwidth": 3.0e12, "rates": {"bf16": 7.0e14}}}
    monkeypatch.setattr(measured, "records", lambda: [record])
    assert attained(load_accelerator("h100-sxm")) == Roofs(3.0e12, {"bf16": 7.0e14}, "measured")
    assert attained(load_accelerator("h200-sxm")) != Roofs(3.0e12, {"bf16": 7.0e14}, "measured")


def test_no_pyplot_state_is_left() -> None:
    code = "from roofline import *; from roofline.plots import *; import sys; " \
           "kv_plot({'a': load_model('llama-3.1-8b')}, [1024, 2048]); assert 'matplotlib.pyplot' not in sys.modules"  # fmt: skip
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
