"""Attention over one shared cached entry per position: what MLA, DSA and DeepSeek-V4's compressed attention have in common.

The entry is key and value at once (the value is its first elements), so it is stored and read once for all query heads.
Which entries a query sees is a ``Reach``; how an entry is stored is a ``Layout``.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar

from roofline.components.attention import ROTARY_FLOPS, SOFTMAX_FLOPS
from roofline.components.base import Component, Params, State, StatePiece
from roofline.components.masks import keys, pairs
from roofline.cost import Cost
from roofline.formats import BF16, FORMATS, FP32, Format
from roofline.numeric import floor_div, maximum, minimum, triangle
from roofline.work import Batch, Work

Layout = tuple[tuple[Any, Format], ...]
"""How one cached entry is stored: (elements, format) of each of its parts."""


def latent_layout(rank: Any, rotary: Any, kv: Format, *, scaled: bool = True) -> Layout:
    """Layout of an MLA entry: a latent of ``rank`` elements and the rotary key beside it.

    With an 8-bit ``kv`` and ``scaled``, FlashMLA's: the latent in fp8 with one fp32 scale per 128, the rotary part in
    bf16 (512 + 16 + 128 = 656 bytes for DeepSeek-V3). Otherwise every element in ``kv``.
    Source: deepseek-ai/FlashMLA, README.
    """
    if kv.element_bits == 8 and scaled:
        parts: Layout = ((rank, FORMATS["fp8-token"]), (rotary, BF16))
        return tuple((elements, fmt) for elements, fmt in parts if elements != 0)
    return ((rank + rotary, kv),)


def layout_bytes(layout: Layout) -> Any:
    """Bytes of one entry."""
    return sum(fmt.bytes(elements) for elements, fmt in layout)


def entry_state(name: str, layout: Layout, every: int = 1, window: Any = None) -> State:
    """The state of entries of a layout: one per ``every`` tokens, none older than ``window``."""
    return tuple(StatePiece(name, elements, fmt, every=every, window=window) for elements, fmt in layout)


@dataclass(frozen=True)
class Reach:
    """Which entries a query sees.

    Entry j stands for the ``every`` tokens from j * every on and is seen once the last of them is there: a query at
    position p sees floor((p + 1) / every) entries, and attends to at most ``limit`` of them.

    Attributes:
        every: tokens per entry.
        limit: None, the k of a top-k selection, or the width of a window.
        recent: the limit keeps the latest entries (a window) instead of the best ones (a selection).
    """

    every: int = 1
    limit: Any = None
    recent: bool = False

    def entries(self, tokens: Any) -> Any:
        """Entries that are complete after that many tokens."""
        return tokens if self.every == 1 else floor_div(tokens, self.every)

    def completed(self, T: Any, S: Any) -> Any:
        """Entries that T new tokens behind S cached ones complete."""
        return self.entries(S + T) - self.entries(S)

    def _seen(self, n: Any) -> Any:
        """Entries seen by the queries of n tokens together: floor(1 / m) + ... + floor(n / m)."""
        whole = floor_div(n, self.every)
        return self.every * triangle(whole - 1) + whole * (n - self.every * whole + 1)

    def pairs(self, T: Any, S: Any) -> Any:
        """Query-entry pairs of T new queries behind S cached tokens: the sum of min(limit, floor((p + 1) / every))."""
        if self.every == 1:
            return pairs("causal" if self.limit is None else "window", self.limit, T, S)
        seen = self._seen(S + T) - self._seen(S)
        if self.limit is None:
            return seen
        reach = self.every * self.limit
        return seen - self._seen(maximum(0, S + T - reach)) + self._seen(maximum(0, S - reach))

    def read(self, T: Any, S: Any) -> Any:
        """Entries that T new queries behind S cached tokens read.

        A selection differs from query to query: each reads its own limit of entries, but never more than there are, each
        counted once however often it is gathered. Exact for one query; for many, the union of their selections is
        taken to be everything once their number times the limit exceeds it.
        """
        if self.recent:
            return keys("window", self.limit, T, S)
        if self.limit is None:
            return self.entries(S + T)
        return minimum(self.pairs(T, S), self.entries(S + T))


EVERYTHING = Reach()
"""Every token is an entry, and a query sees all of them behind it: dense causal attention."""


@dataclass(frozen=True)
class LatentAttention(Component):
    """The attention core over shared entries, one fused kernel: multi-query attention whose values are part of its keys.

    FLOPs ``2 B N (H + value_dim) pairs``; every entry is read once for all N heads. Scores never leave the chip; the
    entries are dequantised to 16 bits before they are multiplied, as FlashMLA does. Splits and their merge are ignored.
    Source: DeepSeek-V2 (arXiv 2405.04434), section 2.1; deepseek-ai/FlashMLA.

    Attributes:
        N: query heads. H: elements of an entry that are scored. value_dim: its first elements that are summed up.
        layout: how an entry is stored.
        reaches: the sets of entries that a query sees, all in one softmax.
        sinks: one learned fp32 logit per head that joins the softmax.
    """

    kind: ClassVar[str] = "attention"

    N: Any
    H: Any
    value_dim: Any
    layout: Layout
    reaches: tuple[Reach, ...] = (EVERYTHING,)
    sinks: bool = False
    activation: Format = BF16
    name: str = "attention"

    @cached_property
    def _constants(self) -> tuple[Any, Any, Any, Any]:
        """FLOPs per pair, state bytes per entry, activation bytes per token read and written."""
        return (
            2 * self.N * (self.H + self.value_dim),
            layout_bytes(self.layout),
            self.activation.bytes(self.N * self.H),
            self.activation.bytes(self.N * self.value_dim),
        )

    def scored(self, work: Work) -> tuple[Any, Any]:
        """(pairs per head, entries read) of one sequence."""
        return (
            sum(work.once(Reach.pairs, reach) for reach in self.reaches),
            sum(work.once(Reach.read, reach) for reach in self.reaches),
        )

    def group_cost(self, work: Work) -> Cost:
        per_pair, per_entry, read, written = self._constants
        pair_count, entry_count = self.scored(work)
        all_pairs = work.B * pair_count
        scores = self.N * all_pairs
        return Cost(
            {"bf16": per_pair * all_pairs, "vector": SOFTMAX_FLOPS * scores, "special": scores},
            {"activations": read * work.tokens, "state": per_entry * (work.B * entry_count)},
            {"activations": written * work.tokens},
            1,
        )

    def params(self) -> Params:
        return {FP32: self.N} if self.sinks else {}


@dataclass(frozen=True)
class EntryWrite(Component):
    """Rotary embedding of queries and key, fused with the write of the new entries into the cache, one kernel.

    Attributes:
        N: query heads. rotary: rotated elements of each query head and of the entry.
        layout: how an entry is stored. window: the most tokens whose entries are kept, None for all.
        query: elements of each query head that the kernel reads and writes (None: the rotated ones only).
        query_flops: elementwise FLOPs per query element beside the rotation (a norm).
        stores: whether the entry goes into the cache (False: it is another form's business).
        state_name: name of the state.
    """

    kind: ClassVar[str] = "cache_write"

    N: Any
    rotary: Any
    layout: Layout
    window: Any = None
    query: Any = None
    query_flops: int = 0
    stores: bool = True
    activation: Format = BF16
    state_name: str = "latent"
    name: str = "rotary"

    @cached_property
    def _constants(self) -> tuple[Any, Any, Any, Any]:
        """Vector FLOPs, activation bytes read and written, state bytes written; per token."""
        queries = self.N * (self.rotary if self.query is None else self.query)
        entry = sum(elements for elements, _ in self.layout)
        return (
            ROTARY_FLOPS * (self.N + 1) * self.rotary + self.query_flops * queries,
            self.activation.bytes(queries + entry),
            self.activation.bytes(queries if self.stores else queries + entry),
            layout_bytes(self.layout) if self.stores else 0,
        )

    def group_cost(self, work: Work) -> Cost:
        flops, read, written, stored = self._constants
        tokens = work.tokens
        return Cost(
            {"vector": flops * tokens},
            {"activations": read * tokens},
            {"activations": written * tokens, "state": stored * tokens},
            1,
        )

    def state(self) -> State:
        return entry_state(self.state_name, self.layout, window=self.window) if self.stores else ()


@dataclass(frozen=True)
class BatchedLinear(Component):
    """Independent matmuls side by side, one kernel: ``batches`` times ``[rows, inputs] @ [inputs, outputs]``.

    FLOPs ``2 rows batches inputs outputs``; reads the weights once. A projection per head (MLA's absorbed matrices) or
    per group of heads (a grouped output projection).
    """

    kind: ClassVar[str] = "linear"

    batches: Any
    inputs: Any
    outputs: Any
    weight: Format = BF16
    activation: Format = BF16
    name: str = "linear"

    @cached_property
    def _constants(self) -> tuple[Any, Any, Any, Any]:
        """FLOPs, weight bytes, activation bytes read and written; all but the weights per row."""
        elements = self.batches * self.inputs * self.outputs
        return (
            2 * elements,
            self.weight.bytes(elements),
            self.activation.bytes(self.batches * self.inputs),
            self.activation.bytes(self.batches * self.outputs),
        )

    def cost(self, work: Batch) -> Cost:
        flops, weights, read, written = self._constants
        rows = work.tokens
        return Cost(
            {self.weight.unit: flops * rows},
            {"weights": weights, "activations": read * rows},
            {"activations": written * rows},
            1,
        )

    def params(self) -> Params:
        return {self.weight: self.batches * self.inputs * self.outputs}
