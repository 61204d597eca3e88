"""Inference on one device: prefill, decode step, whole generations; time, memory and what binds.

``Deployment(model, accelerator)`` answers; the answers are frozen dataclasses with ``to_dict`` and ``to_frame``.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from fractions import Fraction
from functools import partial
from typing import TYPE_CHECKING, Any

from roofline.accelerator import Accelerator
from roofline.components.base import Component
from roofline.cost import Cost
from roofline.errors import InputError
from roofline.memory import Largest, Memory, largest, plain, usable
from roofline.model import Model
from roofline.numeric import is_symbolic, reading
from roofline.timing import Timing, time
from roofline.work import Work

if TYPE_CHECKING:
    import pandas

CONVENTIONS = ("exact", "lecture")
LARGEST_BATCH = 2**20
LARGEST_CONTEXT = 2**30
SCALAR_STEPS = 8192
"""Generations of more steps than this are evaluated as one array of floats; up to it every count is an exact int."""


def frame(rows: list[dict[str, Any]]) -> pandas.DataFrame:
    """Rows as a pandas DataFrame; a row whose entries are lists, one per point of a sweep, becomes a row per point."""
    import pandas

    table = pandas.DataFrame(rows)
    columns = [name for name in table.columns if table[name].map(lambda cell: isinstance(cell, list)).any()]
    return table.explode(columns, ignore_index=True) if columns else table


@dataclass(frozen=True)
class Step:
    """One step of the model on one device; its sizes may be float64 arrays.

    Attributes:
        model, gpu: names.
        convention: "exact" or "lecture".
        phase: "decode" or "prefill".
        batch, new_tokens, context_tokens: B, T and S of the step.
        cost: FLOPs, bytes and launches.
        timing: seconds by stream, on the datasheet's roofs.
        memory: what must fit.
    """

    model: str
    gpu: str
    convention: str
    phase: str
    batch: Any
    new_tokens: Any
    context_tokens: Any
    cost: Cost = field(repr=False)
    timing: Timing
    memory: Memory

    @property
    def bound_s(self) -> Any:
        """Time under perfect overlap: a lower bound [s]. For a decode step this is the TPOT bound, for a prefill TTFT's."""
        return self.timing.bound

    @property
    def serial_s(self) -> Any:
        """Time without any overlap [s]."""
        return self.timing.serial

    @property
    def bound_by(self) -> Any:
        """The stream that binds: "memory", "compute" or "vector"."""
        return self.timing.bound_by

    @property
    def output_tok_per_s(self) -> Any:
        """Output tokens per second of the whole batch at the bound."""
        return self.batch / self.bound_s

    @property
    def output_tok_per_s_per_user(self) -> Any:
        """Output tokens per second that one sequence sees at the bound."""
        return 1 / self.bound_s

    def to_dict(self) -> dict[str, Any]:
        """All figures under keys that carry their unit; nothing rounded."""
        return {
            "model": self.model,
            "gpu": self.gpu,
            "convention": self.convention,
            "phase": self.phase,
            "batch": plain(self.batch),
            "new_tokens": plain(self.new_tokens),
            "context_tokens": plain(self.context_tokens),
            "weight_bytes": plain(self.memory.weight_bytes),
            "kv_bytes": plain(self.memory.kv_bytes),
            "total_bytes": plain(self.memory.total_bytes),
            "new_kv_bytes": plain(self.memory.new_kv_bytes),
            "workspace_bytes": plain(self.memory.workspace_bytes),
            "required_bytes": plain(self.memory.required_bytes),
            "capacity_bytes": plain(self.memory.capacity_bytes),
            "matrix_flop": plain(self.cost.matrix_flops),
            "moved_bytes": plain(self.cost.bytes),
            "bound_s": plain(self.bound_s),
            "serial_s": plain(self.serial_s),
            "expected_s": None,
            "bound_by": None if is_symbolic(self.bound_s) else plain(self.bound_by),
            "fits": plain(self.memory.fits),
            "provenance": "datasheet",
        }

    def to_frame(self) -> pandas.DataFrame:
        """As ``to_dict``, one row."""
        return frame([self.to_dict()])


@dataclass(frozen=True)
class Part:
    """One line of an explanation: a kernel of the step, all its occurrences together.

    Attributes:
        name: of the component. count: how often the step runs it. cost, timing: of all occurrences.
        share: of the sum of all parts' bounds.
    """

    name: str
    count: int
    cost: Cost = field(repr=False)
    timing: Timing
    share: float

    def to_dict(self) -> dict[str, Any]:
        """All figures under keys that carry their unit."""
        return {
            "component": self.name,
            "count": self.count,
            "matrix_flop": plain(self.cost.matrix_flops),
            "bytes_read": plain(self.cost.bytes_read),
            "bytes_written": plain(self.cost.bytes_written),
            "intensity_flop_per_byte": float(self.cost.intensity),
            "bound_s": self.timing.bound,
            "serial_s": self.timing.serial,
            "bound_by": self.timing.bound_by,
            "share": self.share,
        }


@dataclass(frozen=True)
class Generation:
    """A whole generation of ``output_tokens`` after ``prompt_tokens`` for each sequence of a batch.

    Attributes:
        ttft_bound_s, ttft_serial_s: time to the first token: the prefill.
        decode_bound_s, decode_serial_s: all further tokens.
        cost: of everything.
        cached: False for the naive generation that keeps no cache and re-runs the whole sequence for each token.
    """

    model: str
    gpu: str
    batch: int
    prompt_tokens: int
    output_tokens: int
    cached: bool
    cost: Cost = field(repr=False)
    ttft_bound_s: float
    ttft_serial_s: float
    decode_bound_s: float
    decode_serial_s: float

    @property
    def e2e_bound_s(self) -> float:
        """Prompt to last token at the bound [s]."""
        return self.ttft_bound_s + self.decode_bound_s

    @property
    def e2e_serial_s(self) -> float:
        """Prompt to last token without overlap [s]."""
        return self.ttft_serial_s + self.decode_serial_s

    @property
    def tpot_bound_s(self) -> float | None:
        """Mean time per output token after the first, None for a single token [s]."""
        return self.decode_bound_s / (self.output_tokens - 1) if self.output_tokens > 1 else None

    @property
    def output_tok_per_s(self) -> float:
        """Output tokens of the batch over the end-to-end time at the bound."""
        return self.batch * self.output_tokens / self.e2e_bound_s

    @property
    def total_tok_per_s(self) -> float:
        """Prompt and output tokens of the batch over the end-to-end time at the bound."""
        return self.batch * (self.prompt_tokens + self.output_tokens) / self.e2e_bound_s

    def to_dict(self) -> dict[str, Any]:
        """All figures under keys that carry their unit."""
        return {
            "model": self.model,
            "gpu": self.gpu,
            "batch": self.batch,
            "prompt_tokens": self.prompt_tokens,
            "output_tokens": self.output_tokens,
            "cached": self.cached,
            "matrix_flop": plain(self.cost.matrix_flops),
            "moved_bytes": plain(self.cost.bytes),
            "ttft_bound_s": self.ttft_bound_s,
            "ttft_serial_s": self.ttft_serial_s,
            "tpot_bound_s": self.tpot_bound_s,
            "e2e_bound_s": self.e2e_bound_s,
            "e2e_serial_s": self.e2e_serial_s,
            "output_tok_per_s_bound": self.output_tok_per_s,
            "total_tok_per_s_bound": self.total_tok_per_s,
            "provenance": "datasheet",
        }

    def to_frame(self) -> pandas.DataFrame:
        """As ``to_dict``, one row."""
        return frame([self.to_dict()])


@dataclass(frozen=True)
class Deployment:
    """A model on one accelerator.

    Attributes:
        model, accelerator: what runs where.
        convention: "exact" counts every kernel; "lecture" counts, for a decode step, the bytes of all parameters but
            norms and of the cache read, over the bandwidth, and nothing else (CS336 lecture 10).
        memory_fraction: share of the device memory that may be used.

    Raises InputError for a convention or a fraction out of range.
    """

    model: Model
    accelerator: Accelerator
    convention: str = "exact"
    memory_fraction: Fraction = Fraction(1)

    def __post_init__(self) -> None:
        if not isinstance(self.model, Model):
            raise InputError(f"model: {self.model!r:.60} is not a Model; load_model({self.model!r:.40}) makes one")
        if not isinstance(self.accelerator, Accelerator):
            raise InputError(f"accelerator: {self.accelerator!r:.60} is not an Accelerator; load_accelerator(...) makes one")
        if self.convention not in CONVENTIONS:
            raise InputError(f"convention: {self.convention!r} is not one of {', '.join(CONVENTIONS)}")
        if not 0 < self.memory_fraction <= 1:
            raise InputError(f"memory fraction: {float(self.memory_fraction)} is not in (0, 1]")

    def _step(self, phase: str, work: Work) -> Step:
        capacity = usable(self.accelerator, self.memory_fraction)
        if self.convention == "lecture":
            if phase != "decode":
                raise InputError("convention: the lecture's convention covers decode steps only; use --convention exact")
            weights = self.model.lecture_weight_bytes
            state = work.B * self.model.state_bytes(work.S, work.source)
            cost = Cost(read={"weights": weights, "state": state})
            memory = Memory(weights, state, 0, capacity)
        else:
            model = self.model if phase == "decode" else self.model.for_prefill
            cost, workspace = model.step(work)
            after = work.B * self.model.state_bytes(work.S + work.T, work.source)
            before = work.B * self.model.state_bytes(work.S, work.source) if phase == "decode" else after
            memory = Memory(self.model.weight_bytes, before, workspace, capacity, after - before)
        return Step(
            self.model.name, self.accelerator.id, self.convention, phase, work.B, work.T, work.S,
            cost, time(cost, self.accelerator), memory,
        )  # fmt: skip

    def decode(self, batch: Any, context: Any, *, new_tokens: Any = 1, source: Any = 0) -> Step:
        """One decode step of ``batch`` sequences with ``context`` tokens cached each.

        ``new_tokens`` above 1 verifies drafted tokens; ``source`` is the length of an encoder's output.
        """
        return self._step("decode", Work(batch, new_tokens, context, all_logits=True, source=source))

    def prefill(self, batch: Any, tokens: Any, *, cached: Any = 0, source: Any = 0) -> Step:
        """A prefill of ``tokens`` new tokens per sequence behind ``cached`` ones; its time bounds TTFT from below."""
        return self._step("prefill", Work(batch, tokens, cached, source=source))

    def explain(self, work: Work, phase: str = "decode") -> list[Part]:
        """The step kernel by kernel, the slowest first; the parts' bounds add up to more than the step's."""
        model = self.model if phase == "decode" else self.model.for_prefill
        merged: dict[str, list[tuple[int, Component]]] = {}
        for number, part in model.counted:
            merged.setdefault(part.name, []).append((number, part))
        return explained(merged, work, self.accelerator)

    def _steps(self, batch: int, prompt: int, output: int, cached: bool) -> Iterator[tuple[int, Step]]:
        """(number, step) after the first token: one by one, or all of them as one step over an array of lengths."""
        lengths: Any = range(prompt, prompt + output - 1)
        number = 1
        if len(lengths) > SCALAR_STEPS:
            import numpy

            number = len(lengths)
            lengths = [numpy.arange(prompt, prompt + output - 1, dtype=numpy.float64)]
        for length in lengths:
            yield number, self.decode(batch, length) if cached else self.prefill(batch, length + 1)

    def generate(self, batch: int, prompt: int, output: int, *, cached: bool = True) -> Generation:
        """A whole generation: the prefill gives the first token, ``output - 1`` steps the others.

        Without a cache each token re-runs the whole sequence so far: FLOPs grow with the cube of its length in
        attention, which is the lecture's case for caching.
        """
        if output < 1:
            raise InputError(f"output tokens: {output} is out of range; give 1 or more")
        first = self.prefill(batch, prompt)
        costs, bound, serial = [(1, first.cost)], 0.0, 0.0
        for number, step in self._steps(batch, prompt, output, cached):
            costs.append((1, step.cost.map(partial(_over_steps, number))))
            bound += _over_steps(number, step.bound_s)
            serial += _over_steps(number, step.serial_s)
        return Generation(
            self.model.name, self.accelerator.id, batch, prompt, output, cached, Cost.total(costs),
            first.bound_s, first.serial_s, bound, serial,
        )  # fmt: skip

    def largest_batch(self, context: int) -> Largest:
        """The largest batch of decode steps at ``context`` that fits."""
        return largest(lambda batch: self.decode(batch, context).memory, LARGEST_BATCH)

    def largest_context(self, batch: int) -> Largest:
        """The longest context at which a decode step of ``batch`` sequences fits."""
        return largest(lambda context: self.decode(batch, context).memory, LARGEST_CONTEXT)


def explained(merged: dict[str, list[tuple[int, Component]]], work: Work, accelerator: Accelerator) -> list[Part]:
    """Parts of a step from (count, kernel) by name, the slowest first."""
    costs = {name: Cost.total((n, part.cost(work)) for n, part in parts) for name, parts in merged.items()}
    times = {name: time(cost, accelerator) for name, cost in costs.items()}
    whole = sum(timing.bound for timing in times.values())
    parts = [Part(name, sum(n for n, _ in merged[name]), costs[name], times[name], times[name].bound / whole) for name in merged]
    return sorted(parts, key=lambda part: -part.timing.bound)


def _over_steps(number: int, value: Any) -> Any:
    """The sum over ``number`` steps of a value that is an array of them, or the same in each."""
    return number * value if reading(value) is None else float(value.sum())
