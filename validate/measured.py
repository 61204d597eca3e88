"""Measured evidence: kernels on the GPU that is here, against its own roofs and the library a user would call.

Times are CUDA events around one call. Before each call the L2 cache is overwritten, and calls rotate over copies of their
inputs. A call is timed twice: as the host launches it ("eager"), and as a captured CUDA graph ("graph"); where it can be
captured, the graph's time counts. The record keeps both, with quantiles, the timer's name, clocks before and after, and the
versions.

Roofs are measured in the same run: a stream of reads and copies, and the library's largest matmul per matrix unit.
"""

from __future__ import annotations

import dataclasses
import datetime
import functools
import json
import subprocess
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from roofline.cost import Cost
from roofline.errors import RooflineError
from roofline.kernels.registry import KERNELS, load
from roofline.kernels.spec import Case, Spec, Tensors

MEASUREMENTS = Path(__file__).with_name("measurements")
SECONDS_IN_ALL = 420.0
"""After this, what is left is skipped and named in the record: a run ends within 8 minutes."""
SECONDS_PER_CASE = 0.4
CALLS = (10, 200)
"""The fewest and the most calls that are timed."""
COPIES = 3


class NoGPU(RooflineError):
    """There is no CUDA device."""


@dataclasses.dataclass(frozen=True)
class Times:
    """Seconds of one call: quantiles over ``calls``, by ``timer`` ("graph" or "eager")."""

    median: float
    p10: float
    p90: float
    calls: int
    timer: str


@dataclasses.dataclass(frozen=True)
class Roofs:
    """What the device reached in this run: bytes per second, FLOP/s by matrix unit, seconds of an empty launch."""

    bandwidth: float
    rates: dict[str, float]
    launch_eager: float
    launch_graph: float

    def seconds(self, cost: Cost) -> float:
        """The least time for a Cost on these roofs: memory, or the matrix units one after another."""
        matrix = sum(float(flops) / self.rates[unit] for unit, flops in cost.flops.items() if unit in self.rates and flops)
        return max(float(cost.bytes) / self.bandwidth, matrix)


@dataclasses.dataclass(frozen=True)
class Measurement:
    """One kernel at one shape.

    Attributes:
        measured: the time that counts. eager, graph: both timers, None where one failed.
        bytes, flops: useful work, from the model's component. roof_fraction: time on the measured roofs over the time.
        library: seconds of the library's call, None where it has none; library_ratio: library's time over ours.
    """

    kernel: str
    case: str
    measured: Times
    eager: Times
    graph: Times | None
    bytes: int
    flops: int
    roof_fraction: float
    library: Times | None
    library_ratio: float | None
    comment: str = ""

    @property
    def bandwidth(self) -> float:
        """Useful bytes per second."""
        return self.bytes / self.measured.median

    @property
    def rate(self) -> float:
        """Useful FLOP/s."""
        return self.flops / self.measured.median


def need_gpu() -> None:
    """Raises NoGPU where torch finds no CUDA device."""
    import torch

    if not torch.cuda.is_available():
        raise NoGPU("no CUDA device: this measures on a GPU (validate kernels shows what is proved without one)")


def quantiles(seconds: list[float], timer: str) -> Times:
    """Median, 10th and 90th percentile."""
    ranked = sorted(seconds)

    def at(share: float) -> float:
        return ranked[min(len(ranked) - 1, int(share * len(ranked)))]

    return Times(at(0.5), at(0.1), at(0.9), len(ranked), timer)


def _timed(calls: list[Callable[[], Any]], timer: str, flush: Any, seconds: float) -> Times:
    """Times calls in turn, L2 overwritten before each; the number of calls follows from a first estimate."""
    import torch

    for call in calls:
        call()
    torch.cuda.synchronize()
    began = time.perf_counter()
    flush.zero_()
    calls[0]()
    torch.cuda.synchronize()
    number = max(CALLS[0], min(CALLS[1], int(seconds / max(1e-6, time.perf_counter() - began))))
    events = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(number)]
    for index, (start, end) in enumerate(events):
        flush.zero_()
        start.record()
        calls[index % len(calls)]()
        end.record()
    torch.cuda.synchronize()
    return quantiles([start.elapsed_time(end) / 1e3 for start, end in events], timer)


class Clock:
    """Times calls on the current device, with a buffer that is larger than its L2 cache."""

    def __init__(self) -> None:
        import torch

        size = getattr(torch.cuda.get_device_properties(0), "L2_cache_size", 64 << 20)
        self.flush = torch.empty(2 * size // 4, dtype=torch.int32, device="cuda")

    def eager(self, calls: list[Callable[[], Any]], seconds: float = SECONDS_PER_CASE) -> Times:
        """Calls as the host launches them."""
        return _timed(calls, "eager", self.flush, seconds)

    def graph(self, calls: list[Callable[[], Any]], seconds: float = SECONDS_PER_CASE) -> Times | None:
        """Calls as captured graphs; None where they cannot be captured."""
        import torch

        from roofline.kernels.cuda_graph import capture

        try:
            replays = [capture(call) for call in calls]
        except (RuntimeError, torch.cuda.OutOfMemoryError):
            torch.cuda.synchronize()
            return None
        return _timed(replays, "graph", self.flush, seconds)

    def both(self, calls: list[Callable[[], Any]]) -> tuple[Times, Times, Times | None]:
        """The time that counts, eager and graph."""
        eager = self.eager(calls)
        graph = self.graph(calls)
        return graph or eager, eager, graph


def measure_roofs(clock: Clock) -> Roofs:
    """The roofs and the floor of the device, now."""
    import torch

    from roofline.kernels import probes

    passes = [probes.stream(1 << 28, "cuda", read_only) for read_only in (True, False)]
    bandwidth = max(moved / clock.eager([run]).median for run, moved in passes)
    rates = {}
    for unit in ("bf16", "fp8", "int8", "fp32"):
        try:
            run, flops = probes.matmul_peak(unit, "cuda")
            rates[unit] = flops / clock.eager([run]).median
        except RuntimeError:
            torch.cuda.synchronize()
    nothing = probes.launch_overhead("cuda")
    graph = clock.graph([nothing])
    eager = clock.eager([nothing])
    return Roofs(bandwidth, rates, eager.median, graph.median if graph else eager.median)


def moved_to(tensors: Tensors, device: str) -> Tensors:
    """The tensors of a case on a device, strides kept."""
    return {name: value.to(device) if hasattr(value, "untyped_storage") else value for name, value in tensors.items()}


def wrong_on_gpu(spec: Spec) -> list[str]:
    """What is wrong with the kernel's proof cases when they run on the GPU: outputs poisoned, compared with float64."""
    import torch

    from roofline.kernels.buffers import poisoned
    from roofline.validate.compare import compare

    wrong = []
    for case in spec.cases:
        inputs = spec.inputs(case, "cpu")
        references = spec.reference(case, inputs)
        try:
            with poisoned():
                outputs = spec.launch(case, moved_to(inputs, "cuda"))
            torch.cuda.synchronize()
        except Exception as error:
            wrong.append(f"{case.name}: {type(error).__name__}: {error}")
            continue
        _, failures = compare(spec, case, outputs, references)
        wrong += [f"{case.name}: {failure}" for failure in failures]
    return wrong


def measure(spec: Spec, case: Case, roofs: Roofs, clock: Clock) -> Measurement:
    """Times a case and its library counterpart."""
    import torch

    inputs = [spec.inputs(case, "cuda")]
    if sum(value.numel() * value.element_size() for value in inputs[0].values() if hasattr(value, "untyped_storage")) < 2**30:
        inputs += [spec.inputs(case, "cuda") for _ in range(COPIES - 1)]
    cost = spec.expected(case, inputs[0]).useful
    once = spec.timed or spec.launch
    measured, eager, graph = clock.both([functools.partial(once, case, tensors) for tensors in inputs])
    library, comment = None, ""
    if spec.library is not None:
        try:
            others = [spec.library(case, tensors) for tensors in inputs]
            if others[0] is not None:
                library = clock.both([other for other in others if other is not None])[0]
        except (RuntimeError, ValueError) as error:
            torch.cuda.synchronize()
            comment = f"library: {str(error).splitlines()[0][:120]}"
    return Measurement(
        spec.name, case.name, measured, eager, graph, int(cost.bytes), int(cost.matrix_flops),
        roofs.seconds(cost) / measured.median, library, library.median / measured.median if library else None, comment,
    )  # fmt: skip


QUERIED = (
    "name",
    "driver_version",
    "clocks.sm",
    "clocks.mem",
    "clocks.max.sm",
    "power.draw",
    "temperature.gpu",
    "persistence_mode",
)


def device_state() -> dict[str, str]:
    """What nvidia-smi says of the device: clocks, power, driver. Empty where there is none."""
    query = ["nvidia-smi", f"--query-gpu={','.join(QUERIED)}", "--format=csv,noheader", "-i", "0"]
    try:
        done = subprocess.run(query, capture_output=True, text=True, check=True, timeout=10)
    except (OSError, subprocess.SubprocessError):
        return {}
    return dict(zip(QUERIED, (part.strip() for part in done.stdout.splitlines()[0].split(",")), strict=False))


def run(names: Iterable[str] = KERNELS, say: Callable[[str], None] = lambda line: None) -> dict[str, Any]:
    """Measures kernels and returns the record: device, versions, roofs, measurements, what was wrong or skipped."""
    need_gpu()
    import torch
    import triton

    began, clock = time.perf_counter(), Clock()
    before = device_state()
    roofs = measure_roofs(clock)
    say(
        f"roofs: {roofs.bandwidth / 1e9:.0f} GB/s, "
        + ", ".join(f"{unit} {rate / 1e12:.0f}" for unit, rate in roofs.rates.items())
        + " TFLOP/s"
    )
    measurements, wrong, skipped = [], {}, []
    for name in names:
        spec = load(name)
        if failures := wrong_on_gpu(spec):
            wrong[name] = failures
        for case in spec.measured:
            if time.perf_counter() - began > SECONDS_IN_ALL:
                skipped.append(f"{name} {case.name}")
                continue
            try:
                measurements.append(measure(spec, case, roofs, clock))
                say(f"{name} {case.name}: {measurements[-1].measured.median * 1e6:.1f} us")
            except Exception as error:
                wrong.setdefault(name, []).append(f"{case.name}: {type(error).__name__}: {str(error)[:200]}")
            torch.cuda.empty_cache()
    properties = torch.cuda.get_device_properties(0)
    return {
        "date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%dT%H%M%SZ"),
        "gpu": properties.name,
        "units": properties.multi_processor_count,
        "versions": {"torch": torch.__version__, "triton": triton.__version__, "cuda": torch.version.cuda},
        "before": before,
        "after": device_state(),
        "seconds": time.perf_counter() - began,
        "timer": "CUDA events around one call, L2 overwritten before each, inputs rotated; graph: captured and replayed",
        "roofs": dataclasses.asdict(roofs),
        "measurements": [
            {**dataclasses.asdict(one), "bandwidth": one.bandwidth, "rate": one.rate} for one in measurements
        ],
        "wrong": wrong,
        "skipped": skipped,
    }  # fmt: skip


def gpu_id(name: str) -> str:
    """A folder name for a device: "NVIDIA H200" -> "nvidia-h200"."""
    return "-".join("".join(letter if letter.isalnum() else " " for letter in name.lower()).split())


def save(record: dict[str, Any], folder: Path | None = None) -> Path:
    """Writes a record to ``<folder>/<gpu>/<date>.json`` (``validate/measurements`` without a folder); returns the path."""
    path = (folder or MEASUREMENTS) / gpu_id(record["gpu"]) / f"{record['date']}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(record, indent=1, allow_nan=False) + "\n", encoding="utf-8")
    return path


def records(folder: Path = MEASUREMENTS) -> Iterator[dict[str, Any]]:
    """The committed records, oldest first."""
    for path in sorted(folder.glob("*/*.json"), key=lambda path: path.name):
        yield json.loads(path.read_text(encoding="utf-8"))
