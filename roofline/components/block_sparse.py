"""Block-sparse attention of MiniMax-M3: an indexer scores every cached token, attention runs over the best blocks of them.

Keys are cut into blocks of m. Each index head (one per key-value head) takes the maximum of its scores inside a block and
keeps the query's own block and the k - 1 best before it; the heads of one key-value group attend to what their index head
kept. The index keys are a second cache, in the stream "index".
Source: transformers 5.24, models/minimax_m3_vl (MiniMaxM3VLIndexer).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar

from roofline.components.attention import Attention, AttentionBlock
from roofline.components.base import Component
from roofline.components.latent import EVERYTHING
from roofline.components.linear import Linear
from roofline.components.masks import blocks_before
from roofline.components.mixing import Norm
from roofline.components.sparse import INDEX_BYTES, IndexWrite
from roofline.cost import Cost
from roofline.formats import BF16, Format
from roofline.numeric import maximum
from roofline.work import Work


def blocks_seen(size: Any, T: Any, S: Any) -> Any:
    """Blocks that T queries behind S cached tokens can see, their own among them, summed over the queries."""
    return blocks_before(S + T, size) - blocks_before(S, size) + T


def blocks_kept(size: Any, count: Any, T: Any, S: Any) -> Any:
    """Blocks that they keep: at most ``count`` each."""
    reach = count * size
    beyond = _beyond(S + T - reach, size) - _beyond(S - reach, size)
    return blocks_seen(size, T, S) - beyond


def _beyond(positions: Any, size: Any) -> Any:
    """Blocks that do not fit any more, summed over the first queries; ``positions`` counts those behind the last that fits."""
    late = maximum(0, positions)
    return blocks_before(late, size) + late


@dataclass(frozen=True)
class BlockScores(Component):
    """The best score of each block for new queries, one kernel: the scores of single tokens never leave the chip.

    FLOPs ``2 heads dim pairs`` on the unit of the key's format, one comparison per pair and head; reads every index key
    once (stream "index") and the queries; writes one fp32 score per block, head and query.

    Attributes:
        heads, dim: of the index. size: tokens per block.
    """

    kind: ClassVar[str] = "index_scores"

    heads: Any
    dim: Any
    size: Any
    index: Format = BF16
    name: str = "block_scores"

    @cached_property
    def _constants(self) -> tuple[Any, Any, Any]:
        """FLOPs per pair, bytes per index key, bytes of the queries of a token."""
        return 2 * self.heads * self.dim, self.index.bytes(self.dim), self.index.bytes(self.heads * self.dim)

    def group_cost(self, work: Work) -> Cost:
        per_pair, per_key, read = self._constants
        pairs = work.B * EVERYTHING.pairs(work.T, work.S)
        return Cost(
            {self.index.unit: per_pair * pairs, "vector": self.heads * pairs},
            {"activations": read * work.tokens, "index": per_key * (work.B * EVERYTHING.read(work.T, work.S))},
            {"activations": (INDEX_BYTES * self.heads) * (work.B * blocks_seen(self.size, work.T, work.S))},
            1,
        )


@dataclass(frozen=True)
class BlockSelect(Component):
    """The k best blocks of each query and index head, one kernel: reads fp32 scores, writes int32 numbers of blocks.

    Counts one elementwise FLOP per score: every selection looks at each at least once.
    """

    kind: ClassVar[str] = "select"

    heads: Any
    size: Any
    count: Any
    name: str = "block_select"

    def group_cost(self, work: Work) -> Cost:
        scores = self.heads * (work.B * blocks_seen(self.size, work.T, work.S))
        kept = self.heads * (work.B * blocks_kept(self.size, self.count, work.T, work.S))
        return Cost({"vector": scores}, {"activations": INDEX_BYTES * scores}, {"activations": INDEX_BYTES * kept}, 1)


@dataclass(frozen=True)
class BlockSparseAttention(AttentionBlock):
    """Grouped-query attention over selected blocks of keys: an ``AttentionBlock`` with the mask "blocks" and its indexer.

    The query at position p attends to min(p + 1, (k - 1) m + p mod m + 1) keys: everything while k m tokens suffice.
    Parameters: those of the block, and ``D dim (heads + 1) + 2 dim`` of the indexer; state: its keys and values, and one
    index key of ``dim`` elements per token. With another mask (an edit) it is plain attention without an indexer.

    Attributes:
        size: (m, k): tokens per block, blocks kept.
        index_heads, index_dim, index_rotary: of the indexer.
        index: format of index keys. Its projections are "i" among ``overrides``.
    """

    index_heads: Any = 4
    index_dim: Any = 128
    index_rotary: Any = 0
    index: Format = BF16

    @cached_property
    def parts(self) -> tuple[Component, ...]:
        parts = super().parts
        if self.mask != "blocks":
            return parts
        core = next(number for number, part in enumerate(parts) if isinstance(part, Attention))
        return (*parts[:core], *self._indexer(), *parts[core:])

    def _indexer(self) -> tuple[Component, ...]:
        heads, dim, (size, count) = self.index_heads, self.index_dim, self.size
        weight = dict(self.overrides).get("i", self.weight)
        vectors = self.activation if self.vectors is None else self.vectors
        return (
            Linear(self.D, (heads + 1) * dim, weight=weight, activation=self.activation, name="index_qk_proj"),
            Norm((heads + 1) * dim, 2 * dim, weight=vectors, activation=self.activation, name="index_norm"),
            IndexWrite(heads, dim, self.index_rotary, self.index, activation=self.activation),
            BlockScores(heads, dim, size, self.index),
            BlockSelect(heads, size, count),
        )
