"""Measured evidence: kernels on the GPU that is here, against its own roofs and the library a user would call.

Times are CUDA events around one call. Before each call the L2 cache is overwritten, and calls rotate over copies of their
inputs. A call is timed twice: as the host launches it ("eager"), and as a captured CUDA graph ("graph"); where it can be
captured, the graph's time counts. The record keeps both, with quantiles, the timer's name, clocks before and after, and the
versions.

Roofs are measured in the same run: a stream of reads and copies, and the library's largest matmul per matrix unit.

Before a kernel is timed its first proof case runs on the GPU, and when all are timed the other proof cases, as far as time
allows. The record is handed on after every step, so that a device that is lost takes nothing with it.
"""

from __future__ import annotations

import dataclasses
import datetime
import functools
import itertools
import json
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from roofline.cost import Cost
from roofline.errors import InputError, RooflineError
from roofline.kernels.registry import KERNELS, load_all
from roofline.kernels.spec import Case, Spec, Tensors
from roofline.validate.provenance import device_state, identity

MEASUREMENTS = Path(__file__).with_name("measurements")
SECONDS_IN_ALL = 420.0
"""After this nothing new begins; what is left is named in the record."""
SECONDS_AT_MOST = 470.0
"""After this a run is ended though something still runs: within 8 minutes."""
SECONDS_PER_CASE = 0.4
CALLS = (10, 200)
"""The fewest and the most calls that are timed."""
COPIES = 3


MULTIPLIES = {"bf16": "bf16", "fp16": "bf16", "fp8e4nv": "fp8", "fp8e5": "fp8", "int8": "int8", "fp32": "fp32"}
"""Triton's name of a type -> the matrix unit whose roof it has."""
FIRST_FP8 = (8, 9)
"""Compute capability from which e4m3 can be compiled."""


class NoGPU(RooflineError):
    """There is no CUDA device."""


class LostGPU(RooflineError):
    """The device answers no more, as after an illegal access: nothing that follows can run in this process."""


@dataclasses.dataclass(frozen=True)
class Times:
    """Seconds of one call: quantiles over ``calls``, by ``timer`` ("graph" or "eager")."""

    median: float
    p10: float
    p90: float
    calls: int
    timer: str


def matrix_units(cost: Cost) -> list[str]:
    """Matrix units that a Cost keeps busy."""
    return [unit for unit, flops in cost.flops.items() if unit not in ("vector", "special") and flops]


@dataclasses.dataclass(frozen=True)
class Roofs:
    """What the device reached in this run: bytes per second, FLOP/s by matrix unit, seconds of an empty launch."""

    bandwidth: float
    rates: dict[str, float]
    launch_eager: float
    launch_graph: float

    def units(self, cost: Cost, dot: str = "") -> dict[str, str | None]:
        """The unit on whose roof each matrix unit of a Cost is judged: its own, or that of the type that the dots multiply.

        None: there is no roof for it.
        """
        own = {unit: unit if unit in self.rates else MULTIPLIES.get(dot) for unit in matrix_units(cost)}
        return {unit: here if here in self.rates else None for unit, here in own.items()}

    def seconds(self, cost: Cost, dot: str = "") -> float | None:
        """The least time for a Cost on these roofs: memory, or the matrix units one after another; None without a roof."""
        matrix = 0.0
        for unit, here in self.units(cost, dot).items():
            if here is None:
                return None
            matrix += float(cost.flops[unit]) / self.rates[here]
        return max(float(cost.bytes) / self.bandwidth, matrix)


@dataclasses.dataclass(frozen=True)
class Measurement:
    """One kernel at one shape.

    Attributes:
        measured: the time that counts. eager, graph: both timers, None where one failed.
        bytes, flops: useful work, from the model's component. roof_fraction: time on the measured roofs over the time; None
            where a matrix unit has no roof.
        library: seconds of the library's call, None where it has none; library_ratio: library's time over ours.
    """

    kernel: str
    case: str
    measured: Times
    eager: Times
    graph: Times | None
    bytes: int
    flops: int
    roof_fraction: float | None
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


def wrong_on_gpu(spec: Spec, case: Case) -> list[str]:
    """What is wrong with a proof case when it runs on the GPU: outputs poisoned, compared with float64."""
    import torch

    from roofline.kernels.buffers import poisoned
    from roofline.validate.compare import compare

    inputs = spec.inputs(case, "cpu")
    references = spec.reference(case, inputs)
    with poisoned():
        outputs = spec.launch(case, moved_to(inputs, "cuda"))
    torch.cuda.synchronize()
    return compare(spec, case, outputs, references)[1]


def measure(spec: Spec, case: Case, roofs: Roofs, clock: Clock) -> Measurement:
    """Times a case and its library counterpart."""
    import torch

    inputs = [spec.inputs(case, "cuda")]
    if sum(value.numel() * value.element_size() for value in inputs[0].values() if hasattr(value, "untyped_storage")) < 2**30:
        inputs += [spec.inputs(case, "cuda") for _ in range(COPIES - 1)]
    expected = spec.expected(case, inputs[0])
    cost, seconds = expected.useful, roofs.seconds(expected.useful, expected.dot)
    judged = roofs.units(cost, expected.dot).items()
    comments = [f"{unit}: {f'on the roof of {here}' if here else 'no roof'}" for unit, here in judged if here != unit]
    once = spec.timed or spec.launch
    measured, eager, graph = clock.both([functools.partial(once, case, tensors) for tensors in inputs])
    library = None
    if spec.library is not None:
        try:
            others = [spec.library(case, tensors) for tensors in inputs]
            if others[0] is not None:
                library = clock.both([other for other in others if other is not None])[0]
        except Exception as error:  # whatever befalls the library, our own time stands
            torch.cuda.synchronize()
            comments.append(f"library: {type(error).__name__}: {(str(error).splitlines() or [''])[0][:120]}")
    return Measurement(
        spec.name, case.name, measured, eager, graph, int(cost.bytes), int(cost.matrix_flops),
        None if seconds is None else seconds / measured.median, library,
        library.median / measured.median if library else None, "; ".join(comments),
    )  # fmt: skip


def settle() -> None:
    """Waits for the device and gives memory back. Raises LostGPU where it answers no more."""
    import torch

    try:
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
    except RuntimeError as error:
        raise LostGPU(f"the device is lost: {error}") from error


def lacks(error: BaseException | None, capability: Iterable[int]) -> bool:
    """Whether a kernel cannot be compiled because the device is older than its 8-bit type."""
    if tuple(capability) >= FIRST_FP8:
        return False
    while error is not None:
        if "not supported in this architecture" in str(error):
            return True
        error = error.__cause__
    return False


Step = tuple[Spec, Case, bool]
"""A case of a kernel, to be measured or proved."""


def steps(specs: Iterable[Spec]) -> list[Step]:
    """Of every kernel one proof case and one shape to measure, then the other shapes, then the other proof cases.

    A second of each kernel comes before a third, so that what time does not suffice for is spread over them.
    """
    chosen = list(specs)

    def turns(*columns: list[Step]) -> list[Step]:
        return [step for row in itertools.zip_longest(*columns) for step in row if step]

    once = [[(spec, spec.cases[0], False), *((spec, case, True) for case in spec.measured[:1])] for spec in chosen]
    measured = turns(*([(spec, case, True) for case in spec.measured[1:]] for spec in chosen))
    return [*itertools.chain(*once), *measured, *turns(*([(spec, case, False) for case in spec.cases[1:]] for spec in chosen))]


def run(
    names: Iterable[str] = KERNELS,
    say: Callable[[str], None] = lambda line: None,
    keep: Callable[[dict[str, Any]], object] = lambda record: None,
) -> dict[str, Any]:
    """Measures kernels and returns the record: device, versions, roofs, measurements, what was wrong or left out.

    ``keep`` takes the record after every step. "skipped" holds shapes that were not timed, with the reason; "unproved" how
    many proof cases of each kernel did not run here.
    """
    need_gpu()
    began, clock = time.perf_counter(), Clock()
    record: dict[str, Any] = {
        "date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%dT%H%M%SZ"),
        **identity(),
        "before": device_state(),
        "timer": "CUDA events around one call, L2 overwritten before each, inputs rotated; graph: captured and replayed",
        "measurements": [], "wrong": {}, "skipped": [], "unproved": {},
    }  # fmt: skip
    roofs = measure_roofs(clock)
    record["roofs"] = dataclasses.asdict(roofs)
    rates = ", ".join(f"{unit} {rate / 1e12:.0f}" for unit, rate in roofs.rates.items())
    say(f"roofs: {roofs.bandwidth / 1e9:.0f} GB/s, {rates} TFLOP/s")

    def left_out(spec: Spec, case: Case, timed: bool, why: str) -> None:
        if timed:
            record["skipped"].append(f"{spec.name} {case.name}: {why}")
        else:
            record["unproved"][spec.name] = record["unproved"].get(spec.name, 0) + 1

    def wrong(spec: Spec, case: Case, lines: Iterable[str]) -> None:
        for line in lines:
            record["wrong"].setdefault(spec.name, []).append(f"{case.name}: {line}")

    lost = ""
    for spec, case, timed in steps(load_all(names)):
        late = "out of time" if time.perf_counter() - began > SECONDS_IN_ALL else ""
        if lost or late:
            left_out(spec, case, timed, lost or late)
            continue
        try:
            if timed:
                one = measure(spec, case, roofs, clock)
                record["measurements"].append({**dataclasses.asdict(one), "bandwidth": one.bandwidth, "rate": one.rate})
                say(f"{spec.name} {case.name}: {one.measured.median * 1e6:.1f} us")
            else:
                wrong(spec, case, wrong_on_gpu(spec, case))
        except Exception as error:
            if lacks(error, record["capability"]):
                left_out(spec, case, timed, "8-bit floats need a newer GPU")
            else:
                wrong(spec, case, [f"{type(error).__name__}: {str(error)[:200]}"])
        try:
            settle()
        except LostGPU as error:
            lost = "the device was lost before"
            wrong(spec, case, [str(error)[:200]])
        record["seconds"] = time.perf_counter() - began
        keep(record)
    record["after"] = device_state()
    record["seconds"] = time.perf_counter() - began
    keep(record)
    return record


def gpu_id(name: str) -> str:
    """A folder name for a device: "NVIDIA H200" -> "nvidia-h200"."""
    return "-".join("".join(letter if letter.isalnum() else " " for letter in name.lower()).split())


def check_folder(folder: Path) -> None:
    """Raises InputError where no record can be written into a folder; makes it where it is missing."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise InputError(f"folder: cannot write into {folder}: {error.strerror}. Give another with --folder.") from error


def save(record: dict[str, Any], folder: Path | None = None) -> Path:
    """Writes a record to ``<folder>/<gpu>/<date>.json`` (``validate/measurements`` without a folder); returns the path.

    A record of the same run is replaced in one step.
    """
    path = (folder or MEASUREMENTS) / gpu_id(record["gpu"]) / f"{record['date']}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    half = path.with_suffix(".part")
    half.write_text(json.dumps(record, indent=1, allow_nan=False) + "\n", encoding="utf-8")
    half.replace(path)
    return path


def records(folder: Path = MEASUREMENTS) -> Iterator[dict[str, Any]]:
    """The committed records, oldest first."""
    for path in sorted(folder.glob("*/*.json"), key=lambda path: path.name):
        yield json.loads(path.read_text(encoding="utf-8"))
