"""Chunk-parallel forms of linear recurrences: what a prefill runs on the matrix unit.

A sequence of T tokens is cut into chunks of C from its first new token on; the last chunk holds what is left. Inside a
chunk, tokens meet as in attention without a softmax; between chunks, the state is handed over. Only causal pairs
inside a chunk count, as in attention: a kernel that multiplies whole squares does up to twice that part.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from roofline.components.masks import pairs
from roofline.components.recurrent import Demand, Recurrent
from roofline.cost import Cost
from roofline.formats import Format
from roofline.numeric import ceil_div
from roofline.work import Batch, Work

MATRIX_UNIT = "bf16"


@dataclass(frozen=True)
class Heads:
    """Shape of a recurrent state: ``heads`` matrices of key_dim x value_dim.

    Attributes:
        heads: matrices of state per sequence.
        key_dim, value_dim: their sides; in the words of state-space models, state size and head dimension.
        groups: heads that have keys and queries of their own; ``heads / groups`` heads share each of them.
    """

    heads: Any
    key_dim: Any
    value_dim: Any
    groups: Any

    @property
    def state(self) -> Any:
        """Elements of state per sequence."""
        return self.heads * self.key_dim * self.value_dim

    @property
    def values(self) -> Any:
        """Elements of all values, and of all outputs, per token."""
        return self.heads * self.value_dim

    @property
    def keys(self) -> Any:
        """Elements of all keys, and of all queries, per token."""
        return self.groups * self.key_dim


@dataclass(frozen=True)
class ChunkedScan(Recurrent):
    """The chunked form of ``state = decay state + key value``, ``output = query state``; one kernel.

    Per sequence, with P = causal pairs inside its chunks, on the matrix unit: scores ``2 P groups key_dim``, scores
    times values ``2 P heads value_dim``, queries times the state that the chunk received and keys times values,
    ``4 T heads key_dim value_dim``. Elementwise: one decay per pair and head, decay and addition of the state per
    chunk; one exponential per pair and head. The first chunk is counted like the others, though a prefill from nothing
    receives an empty state. Source: Dao & Gu 2024 (arXiv 2405.21060), section 6.

    Attributes:
        step: the one-token form, from which inputs, outputs, weights and state are taken.
        shape: the state. chunk: tokens per chunk.
    """

    kind: ClassVar[str] = "scan"

    step: Recurrent
    shape: Heads
    chunk: int = 256
    name: str = "chunked_scan"

    @property
    def activation(self) -> Format:  # type: ignore[override]
        """Format of inputs and outputs."""
        return self.step.activation

    @property
    def state_format(self) -> Format:  # type: ignore[override]
        """Format of the state between steps."""
        return self.step.state_format

    @property
    def demand(self) -> Demand:
        return self.step.demand

    def chunk_flops(self, pair_count: Any, T: Any) -> tuple[Any, Any, Any]:
        """(matrix, vector, special) FLOPs of one sequence of T tokens with that many causal pairs inside its chunks."""
        heads = self.shape
        chunks = ceil_div(T, self.chunk)
        return (
            2 * (heads.keys + heads.values) * pair_count + (4 * heads.state) * T,
            heads.heads * pair_count + (2 * heads.state) * chunks,
            heads.heads * pair_count,
        )

    def cost(self, work: Batch) -> Cost:
        moved = super().cost(work)
        totals = [self._flops(group) for group in work.groups]
        matrix, vector, special = (sum(part[1:], part[0]) for part in zip(*totals, strict=True))
        return Cost(
            {MATRIX_UNIT: matrix, "vector": vector, "special": special}, dict(moved.read), dict(moved.write), moved.launches
        )

    def _flops(self, work: Work) -> tuple[Any, ...]:
        pair_count = pairs("chunk", self.chunk, work.T, 0)
        return tuple(work.B * flops for flops in self.chunk_flops(pair_count, work.T))


@dataclass(frozen=True)
class ChunkedDeltaRule(ChunkedScan):
    """The chunked form of the gated delta rule; one kernel.

    Per sequence, with P = causal pairs inside its chunks and P - T of them between different tokens, per head on the
    matrix unit: keys times keys ``2 (P - T) key_dim``; the triangular system of a chunk solved by substitution for its
    keys and its values, ``2 (P - T) (key_dim + value_dim)``; queries times keys ``2 P key_dim`` and scores times new
    values ``2 P value_dim``; keys and queries times the state received, and keys times new values,
    ``6 T key_dim value_dim``. Elementwise: decays of both score matrices, and one decay of the state per chunk.
    Source: Yang et al. 2024 (arXiv 2406.06484), section 3; 2412.06464 for the gate; 2510.26692 for decay by channel.

    Attributes:
        by_channel: each channel of a key decays at its own rate (KDA): keys, queries and their products with beta are
            scaled per element, in place of scores per pair.
    """

    by_channel: bool = False
    name: str = "chunked_delta_rule"

    def chunk_flops(self, pair_count: Any, T: Any) -> tuple[Any, Any, Any]:
        heads = self.shape
        between = pair_count - T
        sides = heads.key_dim + heads.value_dim
        matrix = 2 * heads.heads * ((heads.key_dim + sides) * between + sides * pair_count) + (6 * heads.state) * T
        handed_over = heads.state * ceil_div(T, self.chunk)
        if self.by_channel:
            scaled = heads.heads * heads.key_dim
            return matrix, (3 * scaled) * T + handed_over, (2 * scaled) * T
        return matrix, heads.heads * (between + pair_count) + handed_over, heads.heads * pair_count
