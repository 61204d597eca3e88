"""Sweeps: the same formulas over float64 arrays of batches and contexts, in chunks that stay in cache."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from roofline.errors import InputError
from roofline.fanout import spread
from roofline.inference import Deployment

if TYPE_CHECKING:
    import numpy
    import pandas

CHUNK = 16384
"""Points evaluated at once: about 128 KiB an array, so that a chain of operations stays in the second-level cache."""


@dataclass(frozen=True)
class Sweep:
    """Decode steps at many points; all arrays have one entry per point.

    Attributes:
        batch, context_tokens: B and S of the points.
        tpot_bound_s, tpot_serial_s: time per output token, under perfect overlap and without any [s].
        required_bytes: weights, state and workspace. capacity_bytes: what the device offers.
    """

    batch: numpy.ndarray
    context_tokens: numpy.ndarray
    tpot_bound_s: numpy.ndarray
    tpot_serial_s: numpy.ndarray
    required_bytes: numpy.ndarray
    capacity_bytes: Any

    @property
    def fits(self) -> numpy.ndarray:
        """Which points fit."""
        result: numpy.ndarray = self.required_bytes <= float(self.capacity_bytes)
        return result

    @property
    def output_tok_per_s(self) -> numpy.ndarray:
        """Output tokens per second of the whole batch at the bound."""
        result: numpy.ndarray = self.batch / self.tpot_bound_s
        return result

    def to_frame(self) -> pandas.DataFrame:
        """One row per point."""
        import pandas

        return pandas.DataFrame(
            {
                "batch": self.batch,
                "context_tokens": self.context_tokens,
                "tpot_bound_s": self.tpot_bound_s,
                "tpot_serial_s": self.tpot_serial_s,
                "required_bytes": self.required_bytes,
                "output_tok_per_s_bound": self.output_tok_per_s,
                "fits": self.fits,
            }
        )


def decode_sweep(deployment: Deployment, batch: Any, context: Any, *, jobs: int = 1, cluster: str | None = None) -> Sweep:
    """Decode steps at the points (batch[i], context[i]).

    Args:
        deployment: a model on an accelerator.
        batch, context: arrays (or lists) of one length: sequences, and tokens cached by each.
        jobs, cluster: processes, or a dask scheduler, that share the points; see ``fanout.spread``. The answers are equal.

    Raises InputError when the lengths differ or a value is out of range.
    """
    import numpy

    batches = numpy.asarray(batch, dtype=numpy.float64).ravel()
    contexts = numpy.asarray(context, dtype=numpy.float64).ravel()
    if batches.shape != contexts.shape:
        raise InputError(f"sweep: {batches.size} batches and {contexts.size} contexts; give one context per batch")
    starts = range(0, batches.size, CHUNK)
    pieces = [(deployment, batches[start : start + CHUNK], contexts[start : start + CHUNK]) for start in starts]
    bound, serial, required = (numpy.empty_like(batches) for _ in range(3))
    alone = jobs == 1 and cluster is None  # one by one, so that the arrays of a chunk are freed before the next ones are made
    answers = map(_chunk, pieces) if alone else spread(_chunk, pieces, jobs=jobs, cluster=cluster)
    for start, found in zip(starts, answers, strict=True):
        chunk = slice(start, start + CHUNK)
        bound[chunk], serial[chunk], required[chunk] = found
    capacity = deployment.decode(1, 0).memory.capacity_bytes
    return Sweep(batches, contexts, bound, serial, required, capacity)


def _chunk(piece: tuple[Deployment, Any, Any]) -> tuple[Any, Any, Any]:
    """(bound, serial, required bytes) at the points of one chunk."""
    deployment, batches, contexts = piece
    step = deployment.decode(batches, contexts)
    return step.bound_s, step.serial_s, step.memory.required_bytes


def decode_grid(deployment: Deployment, batches: Any, contexts: Any) -> Sweep:
    """Decode steps at every pair of a batch and a context, batch-major."""
    import numpy

    grid = numpy.meshgrid(numpy.asarray(batches, dtype=float), numpy.asarray(contexts, dtype=float), indexing="ij")
    return decode_sweep(deployment, grid[0], grid[1])
