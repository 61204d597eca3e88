"""What the kernels of a stage ask of a step, as functions of a few sums over its sequences.

The work of most kernels is ``constant + per sequence + per token + per cached token + per query-key pair``; such sums
hold for any mixture of lengths. Each kernel is probed once: where that form reproduces it, its five coefficients are
added to the stage's; a kernel that looks at the number of tokens only (experts: distinct ones are hit) becomes a table
over tokens; the rest is kept as a function of one sequence's length.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from roofline.accelerator import Accelerator
from roofline.components.base import Component
from roofline.cost import Cost
from roofline.model import Model
from roofline.timing import time
from roofline.work import Work

if TYPE_CHECKING:
    from roofline.serving.steps import StepShape

PROBES = ((1, 1, 0), (2, 1, 0), (1, 2, 0), (1, 1, 4096), (3, 5, 700), (8, 64, 100_000), (5, 1, 33_333), (1, 511, 0), (64, 1, 9))
"""(B, T, S) at which kernels are probed: five determine the coefficients, the others test them."""
TABLE = 2**16
"""Steps of more tokens than this are evaluated one by one."""
EXACT = 1e-9


def _streams(cost: Cost, accelerator: Accelerator, size: int, links: tuple[str, ...]) -> Any:
    """Seconds by stream, [streams, size]."""
    import numpy

    timing = time(cost, accelerator)
    rows = [timing.memory, timing.compute, timing.vector, *(timing.links.get(name, 0.0) for name in links)]
    return numpy.stack([numpy.broadcast_to(numpy.asarray(row, dtype=numpy.float64), (size,)) for row in rows])


def _evaluate(kernel: Component, accelerator: Accelerator, points: Any, verify: bool, links: tuple[str, ...]) -> Any:
    """Seconds by stream of one kernel at points [3, n] of (B, T, S)."""
    work = Work(points[0], points[1], points[2], all_logits=verify)
    return _streams(kernel.cost(work), accelerator, points.shape[1], links)


def _basis(points: Any) -> Any:
    import numpy

    B, T, S = points
    return numpy.stack([numpy.ones_like(B), B, B * T, B * S, B * (T * S + T * (T + 1) / 2)])


@dataclass
class Bent:
    """A kernel whose work bends with a sequence's length: ``constant + a function of (T, S)`` for each sequence."""

    kernel: Component
    count: int
    verify: bool
    accelerator: Accelerator
    links: tuple[str, ...]
    reach: tuple[int, int]
    hulls: dict[int, Any] = field(default_factory=dict)
    known: dict[tuple[int, int], Any] = field(default_factory=dict)

    def at(self, T: int, S: int) -> Any:
        """Seconds by stream of one sequence."""
        import numpy

        key = (T, S)
        if key not in self.known:
            if len(self.known) > TABLE:
                self.known.clear()
            points = numpy.array([[1, 2], [T, T], [S, S]], dtype=numpy.float64)
            found = self.count * _evaluate(self.kernel, self.accelerator, points, self.verify, self.links)
            self.known[key] = found[:, 1] - found[:, 0]
        return self.known[key]

    def hull(self, T: int) -> Any:
        """For each stream, the corners of the lower convex hull of one sequence's seconds over its context."""
        import numpy

        if T not in self.hulls:
            low, high = self.reach
            contexts = numpy.unique(numpy.concatenate([
                numpy.arange(low, min(high, low + 2048) + 1), numpy.geomspace(low + 1, high + 1, 6000).round() - 1,
            ])).astype(numpy.float64)  # fmt: skip
            one = numpy.ones_like(contexts)
            first = _evaluate(self.kernel, self.accelerator, numpy.stack([one, T * one, contexts]), self.verify, self.links)
            both = _evaluate(self.kernel, self.accelerator, numpy.stack([2 * one, T * one, contexts]), self.verify, self.links)
            self.hulls[T] = [_lower_hull(contexts, self.count * row) for row in both - first]
        return self.hulls[T]

    def decode(self, sequences: float, contexts: Any, T: int) -> Any:
        """Seconds by stream, from below, of sequences whose contexts sum to ``contexts`` (an array)."""
        import numpy

        mean = numpy.asarray(contexts) / sequences
        return sequences * numpy.stack([numpy.interp(mean, x, y) for x, y in self.hull(T)])

    def prefill(self, shape: StepShape) -> Any:
        """Seconds by stream of a step's chunks: of one exactly, of several as the most even ones from position 0 on."""
        if shape.prefills == 1:
            T = shape.prefill_tokens
            S = round((shape.prefill_pairs - T * (T + 1) // 2) / T)
            return self.at(T, max(0, S))
        T, longer = divmod(shape.prefill_tokens, shape.prefills)
        least = (shape.prefills - longer) * self.at(T, 0) if T else 0.0
        return least + longer * self.at(T + 1, 0) if longer else least


def _lower_hull(x: Any, y: Any) -> tuple[Any, Any]:
    """Corners of the lower convex hull of points in order of x."""
    import numpy

    corners: list[int] = []
    for i in range(len(x)):
        while len(corners) > 1:
            a, b = corners[-2], corners[-1]
            if (y[b] - y[a]) * (x[i] - x[a]) < (y[i] - y[a]) * (x[b] - x[a]):
                break
            corners.pop()
        corners.append(i)
    kept = numpy.array(corners)
    return x[kept], y[kept]


@dataclass
class Table:
    """Kernels that look at the number of tokens only."""

    kernels: list[tuple[int, Component]]
    accelerator: Accelerator
    links: tuple[str, ...]
    rows: Any = None
    lists: list[Any] = field(default_factory=list)

    def at(self, tokens: int) -> Any:
        """Seconds by stream at so many tokens."""
        import numpy

        if tokens >= TABLE:
            return self._evaluate(numpy.array([float(tokens)]))[:, 0]
        if len(self.lists) <= tokens:
            size = max(1024, 1 << tokens.bit_length())
            self.lists = [None, *self._evaluate(numpy.arange(1.0, size + 1)).T.tolist()]
        return self.lists[tokens]

    def _evaluate(self, tokens: Any) -> Any:
        import numpy

        points = numpy.stack([tokens, numpy.ones_like(tokens), numpy.zeros_like(tokens)])
        return sum(n * _evaluate(kernel, self.accelerator, points, True, self.links) for n, kernel in self.kernels)


@dataclass
class Stage:
    """The kernels of one pipeline stage.

    Attributes:
        constant: seconds by stream that a step pays once, for any, decoding, and prefilling steps.
        decode, prefill: seconds by stream [4] per sequence, token, cached token and pair.
        tables: over all tokens, those of decoding sequences, those of prompts; None where there are none.
        bent: kernels that bend, of decoding sequences and of prompts.
    """

    constant: tuple[list[float], list[float], list[float]]
    decode: list[list[float]]
    prefill: list[list[float]]
    tables: tuple[Table | None, Table | None, Table | None]
    bent: tuple[list[Bent], list[Bent]]

    def seconds(self, shape: StepShape) -> float:
        """The longest stream of a step [s]."""
        verified = 1 + shape.drafted
        tokens = shape.decodes * verified
        cached = shape.decode_context
        pairs = cached * verified + shape.decodes * (verified * (verified + 1) // 2)
        prompts, chunks = shape.prefill_tokens, shape.prefills
        # Cached tokens behind chunks: at least what their pairs imply if all were one.
        behind = max(0.0, (shape.prefill_pairs - prompts * (prompts + 1) / 2) / prompts) if prompts and chunks == 1 else 0.0
        if chunks > 1:
            behind = max(0.0, shape.prefill_pairs / prompts - prompts)
        extra = self._extra(shape, tokens, prompts)
        longest = 0.0
        any_, decoding, prefilling = self.constant
        for s, (d, p) in enumerate(zip(self.decode, self.prefill, strict=True)):
            value = any_[s]
            if tokens:
                value += decoding[s] + d[0] * shape.decodes + d[1] * tokens + d[2] * cached + d[3] * pairs
            if prompts:
                value += prefilling[s] + p[0] * chunks + p[1] * prompts + p[2] * behind + p[3] * shape.prefill_pairs
            for row in extra:
                value += row[s]
            if value > longest:
                longest = value
        return float(longest)

    def _extra(self, shape: StepShape, tokens: int, prompts: int) -> list[Any]:
        found: list[Any] = []
        for table, size in zip(self.tables, (tokens + prompts, tokens, prompts), strict=True):
            if table is not None and size:
                found.append(table.at(size))
        if tokens:
            found += [bent.decode(shape.decodes, [float(shape.decode_context)], 1 + shape.drafted)[:, 0] for bent in self.bent[0]]
        if prompts:
            found += [bent.prefill(shape) for bent in self.bent[1]]
        return found

    def decode_seconds(self, decodes: int, contexts: Any) -> Any:
        """Seconds of decode-only steps at sums of contexts (an array)."""
        import numpy

        any_, decoding, _ = self.constant
        extra = [table.at(decodes) for table in self.tables[:2] if table is not None]
        bent = [kernel.decode(decodes, contexts, 1) for kernel in self.bent[0]]
        longest = numpy.zeros_like(contexts)
        for s, d in enumerate(self.decode):
            fixed = any_[s] + decoding[s] + (d[0] + d[1] + d[3]) * decodes + sum(row[s] for row in extra)
            value = fixed + (d[2] + d[3]) * contexts
            for rows in bent:
                value = value + rows[s]
            longest = numpy.maximum(longest, value)
        return longest


@dataclass
class _Sorted:
    """Kernels of one form by how their work grows."""

    coefficients: dict[Component, Any] = field(default_factory=dict)
    by_tokens: dict[Component, int] = field(default_factory=dict)
    bent: dict[Component, Any] = field(default_factory=dict)


def _classify(model: Model, accelerator: Accelerator, verify: bool, links: tuple[str, ...]) -> _Sorted:
    import numpy

    points = numpy.array(PROBES, dtype=numpy.float64).T
    basis = _basis(points)
    found = _Sorted()
    for count, kernel in model.counted:
        rows = _evaluate(kernel, accelerator, points, verify, links)
        solved = numpy.linalg.solve(basis[:, :5].T, rows[:, :5].T).T
        size = numpy.abs(rows).max(axis=1, keepdims=True) + 1e-300
        solved = numpy.where(numpy.abs(solved) * numpy.abs(basis[:, 3:4].T.max()) < 1e-14 * size, 0.0, solved)
        if (numpy.abs(solved @ basis - rows) <= EXACT * numpy.abs(rows) + 1e-13 * size).all():
            found.coefficients[kernel] = count * solved
            continue
        tokens = points[0] * points[1]
        flat = numpy.stack([tokens, numpy.ones_like(tokens), numpy.zeros_like(tokens)])
        if numpy.allclose(_evaluate(kernel, accelerator, flat, verify, links), rows, rtol=EXACT, atol=0.0):
            found.by_tokens[kernel] = count
        else:
            at = numpy.array([[1.0, 2.0], [1.0, 1.0], [0.0, 0.0]])
            one = count * _evaluate(kernel, accelerator, at, verify, links)
            found.bent[kernel] = (count, numpy.maximum(0.0, 2 * one[:, 0] - one[:, 1]))
    return found


def _table(kernels: list[tuple[int, Component]], accelerator: Accelerator, links: tuple[str, ...]) -> Table | None:
    return Table(kernels, accelerator, links) if kernels else None


def stage_of(model: Model, accelerator: Accelerator, reach: tuple[int, int]) -> Stage:
    """The kernels of a model, or of a stage of it, sorted and summed; ``reach`` are the contexts that occur."""
    import numpy

    links = tuple(accelerator.links)
    decoding = _classify(model, accelerator, True, links)
    prefilling = _classify(model.for_prefill, accelerator, False, links)
    streams = 3 + len(links)
    once = [numpy.zeros(streams) for _ in range(3)]
    slopes = {"decode": numpy.zeros((streams, 4)), "prefill": numpy.zeros((streams, 4))}
    both = set(decoding.coefficients) & set(prefilling.coefficients) | set(decoding.bent) & set(prefilling.bent)
    for form, sort, where in (("decode", decoding, 1), ("prefill", prefilling, 2)):
        for kernel, solved in sort.coefficients.items():
            slopes[form] += solved[:, 1:]
            if kernel not in both:
                once[where] += solved[:, 0]
            elif form == "decode":
                once[0] += solved[:, 0]
        for kernel, (_, constant) in sort.bent.items():
            if kernel not in both:
                once[where] += constant
            elif form == "decode":
                once[0] += constant
    common = [(n, k) for k, n in decoding.by_tokens.items() if k in prefilling.by_tokens]
    tables = (
        _table(common, accelerator, links),
        _table([(n, k) for k, n in decoding.by_tokens.items() if k not in prefilling.by_tokens], accelerator, links),
        _table([(n, k) for k, n in prefilling.by_tokens.items() if k not in decoding.by_tokens], accelerator, links),
    )
    bent = tuple(
        [Bent(kernel, count, verify, accelerator, links, reach) for kernel, (count, _) in sort.bent.items()]
        for sort, verify in ((decoding, True), (prefilling, False))
    )
    return Stage(
        (once[0].tolist(), once[1].tolist(), once[2].tolist()), slopes["decode"].tolist(), slopes["prefill"].tolist(), tables,
        (bent[0], bent[1]),
    )  # fmt: skip
