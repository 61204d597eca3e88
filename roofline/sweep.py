"""Sweeps: the same formulas over float64 arrays of batches and contexts, in chunks that stay in cache."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from roofline.errors import InputError
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


def decode_sweep(deployment: Deployment, batch: Any, context: Any) -> Sweep:
    """Decode steps at the points (batch[i], context[i]).

    Args:
        deployment: a model on an accelerator.
        batch, context: arrays (or lists) of one length: sequences, and tokens cached by each.

    Raises InputError when the lengths differ or a value is out of range.
    """
    import numpy

    batches = numpy.asarray(batch, dtype=numpy.float64).ravel()
    contexts = numpy.asarray(context, dtype=numpy.float64).ravel()
    if batches.shape != contexts.shape:
        raise InputError(f"sweep: {batches.size} batches and {contexts.size} contexts; give one context per batch")
    bound, serial, required = (numpy.empty_like(batches) for _ in range(3))
    for start in range(0, batches.size, CHUNK):
        chunk = slice(start, start + CHUNK)
        step = deployment.decode(batches[chunk], contexts[chunk])
        bound[chunk], serial[chunk] = step.bound_s, step.serial_s
        required[chunk] = step.memory.required_bytes
    capacity = deployment.decode(1, 0).memory.capacity_bytes
    return Sweep(batches, contexts, bound, serial, required, capacity)


def decode_grid(deployment: Deployment, batches: Any, contexts: Any) -> Sweep:
    """Decode steps at every pair of a batch and a context, batch-major."""
    import numpy

    grid = numpy.meshgrid(numpy.asarray(batches, dtype=float), numpy.asarray(contexts, dtype=float), indexing="ij")
    return decode_sweep(deployment, grid[0], grid[1])
