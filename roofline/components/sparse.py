"""Sparse attention by a lightning indexer (DSA): a cheap scorer looks at every cached token, attention at the k best.

Per layer and new token the indexer costs ``2 heads dim`` FLOP and reads one small index key per cached token; latent
attention then runs over at most k latents. The index keys are a second cache, in the stream "index".
Source: DeepSeek-V3.2-Exp, technical report (arXiv 2512.02556) and inference/model.py of its release; GLM-5 shares one
layer's selection with the layers behind it (arXiv 2603.12201).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar

from roofline.components.attention import ROTARY_FLOPS
from roofline.components.base import Block, Component, State
from roofline.components.latent import EVERYTHING, Reach, entry_state
from roofline.components.linear import Linear
from roofline.components.mixing import layer_norm
from roofline.components.mla import MLA
from roofline.cost import Cost
from roofline.formats import BF16, FORMATS, Format
from roofline.work import Work

INDEX_KEY = FORMATS["fp8-token"]
"""Index keys as released: fp8 with one fp32 scale per 128 elements."""
INDEX_VECTOR_FLOPS = 3
"""Elementwise FLOPs of the indexer per head and pair: ReLU, product with the head's weight, sum."""
INDEX_BYTES = 4
"""Bytes of one score (fp32) and of one selected position (int32)."""


@dataclass(frozen=True)
class IndexScores(Component):
    """Scores of new queries against all index keys they may see, one kernel.

    ``sum over heads of w_h ReLU(q_h . k)``: FLOPs ``2 heads dim pairs``, on the unit that multiplies the key's format.
    Reads every index key once (stream "index"), the queries and the head weights; writes one fp32 score per pair.
    Source: DeepSeek-V3.2-Exp, inference/kernel.py (fp8_index).
    """

    kind: ClassVar[str] = "index_scores"

    heads: Any
    dim: Any
    reach: Reach = EVERYTHING
    index: Format = INDEX_KEY
    activation: Format = BF16
    name: str = "index_scores"

    @cached_property
    def _constants(self) -> tuple[Any, Any, Any]:
        """FLOPs per pair, bytes per index key, activation bytes read per token."""
        return (
            2 * self.heads * self.dim,
            self.index.bytes(self.dim),
            self.index.bytes(self.heads * self.dim) + self.activation.bytes(self.heads),
        )

    def group_cost(self, work: Work) -> Cost:
        per_pair, per_key, read = self._constants
        pairs = work.B * work.once(Reach.pairs, self.reach)
        return Cost(
            {self.index.unit: per_pair * pairs, "vector": (INDEX_VECTOR_FLOPS * self.heads) * pairs},
            {"activations": read * work.tokens, "index": per_key * (work.B * work.once(Reach.read, self.reach))},
            {"activations": INDEX_BYTES * pairs},
            1,
        )


@dataclass(frozen=True)
class TopK(Component):
    """The k best of the scores of each query, one kernel: reads the fp32 scores, writes int32 positions.

    Counts one elementwise FLOP per score: every selection looks at each at least once.

    Attributes:
        seen: entries that have a score. chosen: the same, limited to k.
    """

    kind: ClassVar[str] = "select"

    seen: Reach
    chosen: Reach
    name: str = "index_select"

    def group_cost(self, work: Work) -> Cost:
        scores = work.B * work.once(Reach.pairs, self.seen)
        return Cost(
            {"vector": scores},
            {"activations": INDEX_BYTES * scores},
            {"activations": INDEX_BYTES * (work.B * work.once(Reach.pairs, self.chosen))},
            1,
        )


@dataclass(frozen=True)
class IndexWrite(Component):
    """Rotary embedding and quantisation of index queries and keys, fused with the write of the new keys, one kernel.

    The Hadamard rotation in front of the quantisation is ignored.

    Attributes:
        heads, dim: of the index. rotary: rotated elements of each.
        keys: whether keys are made here as well (False: a compressor makes them).
    """

    kind: ClassVar[str] = "cache_write"

    heads: Any
    dim: Any
    rotary: Any
    index: Format = INDEX_KEY
    keys: bool = True
    activation: Format = BF16
    name: str = "index_write"

    @cached_property
    def _constants(self) -> tuple[Any, Any, Any, Any]:
        """Vector FLOPs, activation bytes read and written, index bytes written; per token."""
        queries, keys = self.heads * self.dim, self.dim if self.keys else 0
        return (
            ROTARY_FLOPS * (self.heads + (1 if self.keys else 0)) * self.rotary,
            self.activation.bytes(queries + keys),
            self.index.bytes(queries),
            self.index.bytes(keys),
        )

    def group_cost(self, work: Work) -> Cost:
        flops, read, written, stored = self._constants
        tokens = work.tokens
        return Cost(
            {"vector": flops * tokens},
            {"activations": read * tokens},
            {"activations": written * tokens, "index": stored * tokens},
            1,
        )

    def state(self) -> State:
        return entry_state("index", ((self.dim, self.index),)) if self.keys else ()


@dataclass(frozen=True)
class Indexer(Block):
    """The lightning indexer of one layer.

    Parameters ``Q heads dim + D dim + D heads + 2 dim`` (query projection, key projection, head weights, LayerNorm);
    state: one key of ``dim`` elements per token.

    Attributes:
        D: width of the residual stream. Q: rank of the query latent it projects from.
        heads, dim: of the index. rotary: rotated elements of each. k: positions selected per query.
        index: format of index keys and queries; its unit multiplies them.
        weight: storage of query and key projections; base: of the projection to head weights and of the norm.
    """

    D: Any
    Q: Any
    heads: Any
    dim: Any
    k: Any
    rotary: Any = 0
    index: Format = INDEX_KEY
    weight: Format = BF16
    base: Format = BF16
    activation: Format = BF16
    name: str = "indexer"

    @cached_property
    def parts(self) -> tuple[Component, ...]:
        every: dict[str, Any] = {"activation": self.activation}
        return (
            Linear(self.Q, self.heads * self.dim, weight=self.weight, name="index_q_proj", **every),
            Linear(self.D, self.dim, weight=self.weight, name="index_k_proj", **every),
            Linear(self.D, self.heads, weight=self.base, name="index_weights_proj", **every),
            layer_norm(self.dim, weight=self.base, name="index_norm", **every),
            IndexWrite(self.heads, self.dim, self.rotary, self.index, **every),
            IndexScores(self.heads, self.dim, EVERYTHING, self.index, **every),
            TopK(EVERYTHING, Reach(limit=self.k)),
        )


@dataclass(frozen=True)
class DSA(MLA):
    """Latent attention over the k positions that an indexer selects for each query; absorbed in every phase.

    The core scores ``min(k, p + 1)`` latents for the query at position p; with k >= S + T it costs what ``MLA`` costs.
    Prefill runs absorbed too: the selection differs from query to query, so there is no common set to expand. In the
    other forms the core is dense under a mask and saves nothing (what transformers computes).

    Attributes:
        k: positions attended to per query.
        index_heads, index_dim: of the indexer; index_heads = 0 for a layer that reuses an earlier layer's selection.
        index: format of index keys. base: storage of the indexer's head weights and norm; "index" among ``overrides``
            is that of its other projections.
    """

    k: Any = 2048
    index_heads: Any = 64
    index_dim: Any = 128
    index: Format = INDEX_KEY
    base: Format = BF16

    def prefill_form(self) -> Component:
        """Itself: engines run sparse attention absorbed in every phase."""
        return self

    @property
    def reach(self) -> Reach:
        """Which latents a query attends to: the k selected."""
        return Reach(limit=self.k)

    @cached_property
    def indexer(self) -> Indexer | None:
        """The layer's own indexer, None where another layer's selection is used."""
        if self.index_heads == 0:
            return None
        return Indexer(
            self.D, self.Q, self.index_heads, self.index_dim, self.k, self.P, self.index, self.format_of("index"),
            self.base, self.activation,
        )  # fmt: skip

    def _before_core(self) -> tuple[Component, ...]:
        own = self.indexer.parts if self.indexer is not None else ()
        return (*super()._before_core(), *own)
