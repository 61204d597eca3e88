"""Attention over compressed entries: DeepSeek-V4's sliding window, CSA and HCA layers.

Every layer attends to the last W tokens exactly, each through one entry that is key and value at once for all heads.
Most layers also see the whole context through compressed entries, one per m tokens: all of them where m is large
(heavily compressed attention, HCA), the k best by an indexer where m is small (compressed sparse attention, CSA). Only
complete blocks of m tokens become entries; the open block waits in a state of fixed size.
Source: DeepSeek-V4 (arXiv 2606.19348), section 2.3; transformers 5.24, models/deepseek_v4; entry and state layouts from
vLLM, models/deepseek_v4 (attention.py, compressor.py).
"""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property
from typing import Any, ClassVar

from roofline.components.attention import ROTARY_FLOPS, SOFTMAX_FLOPS
from roofline.components.base import Block, Component, Params, State, StatePiece
from roofline.components.latent import (
    BatchedLinear,
    EntryWrite,
    LatentAttention,
    Layout,
    Reach,
    entry_state,
    layout_bytes,
)
from roofline.components.linear import Linear
from roofline.components.mixing import RMS_FLOPS, Elementwise, Norm
from roofline.components.sparse import IndexScores, IndexWrite, TopK
from roofline.cost import Cost
from roofline.formats import BF16, FORMATS, FP32, Format
from roofline.numeric import floor_div, maximum, minimum, ratio
from roofline.work import Batch, Work

SCALE_BLOCK, SCALE_PAD = 64, 8
INDEX_KEY = FORMATS["mxfp4"]
"""Index entries as released: 4-bit with one 8-bit scale per 32."""


def compressed_layout(H: Any, P: Any, kv: Format) -> Layout:
    """Layout of one entry of H elements, the last P of them rotary.

    With an 8-bit ``kv``, vLLM's: fp8 with one 8-bit scale per 64 elements, the scales padded to a multiple of 8 bytes,
    and the rotary part in bf16 (448 + 8 + 128 = 584 bytes for H = 512, P = 64). Otherwise every element in ``kv``.
    """
    if kv.element_bits != 8:
        return ((H, kv),)
    plain = H - P
    scales = -(-plain // SCALE_BLOCK)
    stored = SCALE_PAD * -(-scales // SCALE_PAD)
    note = f"one 8-bit scale per {SCALE_BLOCK}, padded to {stored} bytes"
    scaled = Format("fp8-entry", 8 + Fraction(8 * stored, plain), 8, "fp8", note)
    return tuple((elements, fmt) for elements, fmt in ((plain, scaled), (P, BF16)) if elements != 0)


@dataclass(frozen=True)
class CompressWrite(Component):
    """Pooling of complete blocks into entries, one kernel: softmax over a block's gates, weighted sum, norm, rotation.

    Each new token's projections join the state of the open block (fp32); when a block is complete, its tokens (with
    overlap also those of the block before it) are read back, as far as an earlier step left them there, and one entry
    is written. Gate biases and the norm's weight are read where a block is completed. The state is a ring of the last
    tokens.

    Attributes:
        dim: elements of an entry. every: tokens per entry. overlap: blocks reach back over the one before.
        rotary: rotated elements of an entry. layout: how an entry is stored. state_name: name of its state, which is
            also the stream that its bytes belong to where that is "index".
    """

    kind: ClassVar[str] = "cache_write"

    dim: Any
    every: int
    overlap: bool
    rotary: Any
    layout: Layout
    activation: Format = BF16
    state_name: str = "compressed"
    name: str = "compress"

    @property
    def series(self) -> int:
        """Projections per token: one for its own block, and with overlap one for the next."""
        return 2 if self.overlap else 1

    @cached_property
    def _constants(self) -> tuple[Any, Any, Any, Any, Any, Any]:
        """Tokens pooled; per token: elements projected; per entry: vector FLOPs, exponentials, bytes; learned elements."""
        pooled = self.series * self.every
        return (
            pooled,
            2 * self.series * self.dim,
            (SOFTMAX_FLOPS + 2) * pooled * self.dim + RMS_FLOPS * self.dim + ROTARY_FLOPS * self.rotary,
            pooled * self.dim,
            layout_bytes(self.layout),
            self.every * self.series * self.dim,
        )

    def _behind(self, T: Any, S: Any) -> Any:
        """Projections of one series that an earlier step left, as far as blocks completed in this step pool them.

        The first of those blocks pools the S mod m tokens of the open one; with overlap also the m tokens of the block
        before it, and the second pools those of the open block once more, by their other series.
        """
        complete = Reach(self.every).completed(T, S)
        first, opened = minimum(complete, 1), S - self.every * floor_div(S, self.every)
        if not self.overlap:
            return first * opened
        return first * (opened + minimum(self.every, S - opened)) + (minimum(complete, 2) - first) * opened

    def cost(self, work: Batch) -> Cost:
        """As of each group, but the learned elements are read once for all of them."""
        cost = super().cost(work)
        if len(work.groups) == 1:
            return cost
        most = self.group_cost(work.groups[0]).read["weights"]
        for group in work.groups[1:]:
            most = maximum(most, self.group_cost(group).read["weights"])
        return Cost(dict(cost.flops), {**cost.read, "weights": most}, dict(cost.write), cost.launches)

    def group_cost(self, work: Work) -> Cost:
        pooled, projected, flops, special, entry, biases = self._constants
        complete = work.once(Reach.completed, Reach(self.every))
        entries = work.B * complete
        behind = work.B * self._behind(work.T, work.S)
        stream = "index" if self.state_name == "index" else "state"
        waiting = FP32.bytes(projected) * (work.B * minimum(work.T, pooled))
        written = {"state": waiting}
        written[stream] = written.get(stream, 0) + entry * entries
        return Cost(
            {"vector": flops * entries + (self.series * self.dim) * work.tokens, "special": special * entries},
            {
                "weights": (FP32.bytes(biases) + self.activation.bytes(self.dim)) * minimum(complete, 1),
                "activations": self.activation.bytes(projected) * work.tokens,
                "state": FP32.bytes(2 * self.dim) * behind,
            },
            written,
            1,
        )

    def params(self) -> Params:
        return {FP32: self._constants[-1], self.activation: self.dim}

    def state(self) -> State:
        pooled, projected = self._constants[:2]
        waiting = StatePiece(f"{self.state_name}_open", pooled * projected, FP32, "nothing")
        return (*entry_state(self.state_name, self.layout, every=self.every), waiting)


@dataclass(frozen=True)
class CompressedAttention(Block):
    """The attention of one DeepSeek-V4 layer.

    Projection parameters ``D Q + Q N H + D H + N H rank + groups rank D``; compressed layers add ``2 s D H`` (s = 2 with
    overlap, else 1), indexed ones ``4 D index_dim + Q index_heads index_dim + D index_heads``. Core FLOPs per new token
    ``4 N H`` times the entries it sees: min(p + 1, W), and min(k, floor((p + 1) / every)).

    Attributes:
        D: width of the residual stream. N: query heads. H: elements of a head and of an entry. P: rotary ones of them.
        Q: rank of the query. groups, rank: of the grouped low-rank output projection.
        window: W, None for none.
        every: tokens per compressed entry, 0 for a layer with the window only. overlap: see ``CompressWrite``.
        k: compressed entries selected per query, None for all. index_heads, index_dim: of the indexer, 0 for none.
        sinks: one learned logit per head joins the softmax.
        kv: format of entries; an 8-bit one takes ``compressed_layout``. index: format of index entries.
        weight: storage of the projections; overrides: ((projection, format), ...) for "q_a", "q_b", "kv", "o_a",
            "o_b", "index" that differ. base: storage of compressors and index head weights.
    """

    D: Any
    N: Any
    H: Any
    P: Any
    Q: Any
    groups: Any
    rank: Any
    window: Any = None
    every: int = 0
    overlap: bool = False
    k: Any = None
    index_heads: Any = 0
    index_dim: Any = 0
    sinks: bool = True
    kv: Format = BF16
    index: Format = INDEX_KEY
    weight: Format = BF16
    base: Format = BF16
    activation: Format = BF16
    overrides: tuple[tuple[str, Format], ...] = ()
    name: str = "attention"

    def format_of(self, projection: str) -> Format:
        """Storage of one projection."""
        return dict(self.overrides).get(projection, self.weight)

    def linear(self, projection: str, inputs: Any, outputs: Any) -> Linear:
        """One projection of the block."""
        return Linear(inputs, outputs, False, self.format_of(projection), self.activation, name=f"{projection}_proj")

    @cached_property
    def layout(self) -> Layout:
        """How one entry is stored."""
        return compressed_layout(self.H, self.P, self.kv)

    @cached_property
    def reaches(self) -> tuple[Reach, ...]:
        """The sets of entries that a query sees."""
        window = () if self.window is None else (Reach(limit=self.window, recent=True),)
        return (*window, Reach(self.every, self.k)) if self.every else window

    @cached_property
    def parts(self) -> tuple[Component, ...]:
        core = LatentAttention(
            self.N, self.H, self.H, self.layout, self.reaches, self.sinks, self.activation,
        )  # fmt: skip
        return (*self._projections(), *self._compressor(), *self._indexer(), core, *self._output())

    def _projections(self) -> tuple[Component, ...]:
        """Query and window entry; their first matmuls are one where the formats agree."""
        entry = 0 if self.window is None else self.H
        first: tuple[Component, ...] = (self.linear("q_a", self.D, self.Q), self.linear("kv", self.D, self.H))
        if self.window is None:
            first = first[:1]
        elif self.format_of("q_a") == self.format_of("kv"):
            first = (Linear(self.D, self.Q + entry, weight=self.format_of("kv"), activation=self.activation, name="q_a_kv_proj"),)
        normed = self.Q + entry
        return (
            *first,
            Norm(normed, normed, weight=self.activation, activation=self.activation, name="latent_norm"),
            self.linear("q_b", self.Q, self.N * self.H),
            EntryWrite(
                self.N, self.P, () if self.window is None else self.layout, self.window, query=self.H,
                query_flops=RMS_FLOPS, activation=self.activation, state_name="window",
            ),
        )  # fmt: skip

    def _pooling(self, dim: Any, layout: Layout, state_name: str, name: str) -> tuple[Component, ...]:
        """A compressor: values and gates of all series in one matmul, then the pooling."""
        series = 2 if self.overlap else 1
        return (
            Linear(self.D, 2 * series * dim, weight=self.base, activation=self.activation, name=f"{name}_proj"),
            CompressWrite(dim, self.every, self.overlap, self.P, layout, self.activation, state_name, name),
        )

    def _compressor(self) -> tuple[Component, ...]:
        return self._pooling(self.H, self.layout, "compressed", "compress") if self.every else ()

    def _indexer(self) -> tuple[Component, ...]:
        """The indexer with its own, narrower compressor."""
        if self.index_heads == 0:
            return ()
        heads, dim, seen = self.index_heads, self.index_dim, Reach(self.every)
        every: dict[str, Any] = {"activation": self.activation}
        return (
            *self._pooling(dim, ((dim, self.index),), "index", "index_compress"),
            Linear(self.Q, heads * dim, weight=self.format_of("index"), name="index_q_proj", **every),
            Linear(self.D, heads, weight=self.base, name="index_weights_proj", **every),
            IndexWrite(heads, dim, self.P, self.index, keys=False, name="index_rotary", **every),
            IndexScores(heads, dim, seen, self.index, **every),
            TopK(seen, Reach(self.every, self.k)),
        )

    def _output(self) -> tuple[Component, ...]:
        """Rotation undone on the values' rotary part, then the grouped low-rank projection."""
        rotated = self.N * self.P
        undo = () if self.P == 0 else (Elementwise(rotated, rotated, ROTARY_FLOPS * rotated, self.activation, "undo_rotary"),)
        grouped = BatchedLinear(
            self.groups, ratio(self.N * self.H, self.groups), self.rank, self.format_of("o_a"), self.activation, "o_a_proj"
        )
        return (*undo, grouped, self.linear("o_b", self.groups * self.rank, self.D))
