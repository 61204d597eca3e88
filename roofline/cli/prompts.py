"""The prompt of a generation: one prefill, or the chunks that an engine cuts it into."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from roofline.errors import InputError

if TYPE_CHECKING:
    from roofline.inference import Deployment
    from roofline.memory import Memory

SCALAR_CHUNKS = 64
"""Prompts of more chunks than this are timed as one array of floats."""


@dataclass(frozen=True)
class Prompt:
    """How long a prompt takes, and what it needs.

    Attributes:
        tokens: of the prompt. chunk: tokens per step, None for all in one.
        bound_s, serial_s: time to first token, under perfect overlap within each step and without any [s].
        memory: of the greediest step.
    """

    tokens: int
    chunk: int | None
    bound_s: float
    serial_s: float
    memory: Memory

    @property
    def name(self) -> str:
        """What runs, for a sentence."""
        return f"prefill of {self.tokens:,} tokens" + (f" in chunks of {self.chunk:,}" if self.chunk else "")


def prompt_step(deployment: Deployment, batch: int, tokens: int, chunk: int | None, source: int, *, keep: bool) -> Prompt:
    """The prefill of ``tokens`` tokens per sequence, ``chunk`` of them at a time behind those before.

    ``keep`` is False where no cache is kept. Raises InputError for chunks behind an encoder, whose run would count in each.
    """
    if chunk is not None and source:
        raise InputError("prefill-chunk: chunks behind an encoder are not modelled; leave out --prefill-chunk")
    size = min(chunk or tokens, tokens)
    full, rest = divmod(tokens, size)
    sizes = [(size, (full - 1) * size), *([(rest, full * size)] if rest else [])]
    steps = [deployment.prefill(batch, new, cached=before, source=source) for new, before in sizes]
    bound, serial = sum(float(step.bound_s) for step in steps), sum(float(step.serial_s) for step in steps)
    if full - 1 > SCALAR_CHUNKS:
        import numpy

        many = deployment.prefill(batch, size, cached=size * numpy.arange(full - 1, dtype=numpy.float64))
        bound += float(numpy.broadcast_to(many.bound_s, full - 1).sum())
        serial += float(numpy.broadcast_to(many.serial_s, full - 1).sum())
    else:
        earlier = [deployment.prefill(batch, size, cached=number * size) for number in range(full - 1)]
        bound += sum(float(step.bound_s) for step in earlier)
        serial += sum(float(step.serial_s) for step in earlier)
    memory = min((step.memory for step in steps), key=lambda one: one.spare_bytes)
    return Prompt(tokens, chunk, bound, serial, memory if keep else replace(memory, kv_bytes=0))
