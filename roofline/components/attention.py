"""Softmax attention over cached keys and values: MHA (K = N), GQA and MQA (K = 1), any mask, any (B, T, S).

One multiply-add is 2 FLOP, and causal attention counts the causal half: S T + T (T + 1) / 2 pairs per head.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar

from roofline.components.base import Block, Component, Params, State, StatePiece
from roofline.components.linear import Linear
from roofline.components.masks import kept, keys, pairs
from roofline.components.mixing import Elementwise, Norm
from roofline.cost import Cost
from roofline.formats import BF16, Format
from roofline.work import Work

SOFTMAX_FLOPS = 3
"""Elementwise FLOPs of a softmax per score: running maximum, subtraction, sum; the exponential counts as "special"."""
ROTARY_FLOPS = 3
"""Elementwise FLOPs of a rotary embedding per element: two products and a sum."""
GATE_FLOPS = 4
"""Elementwise FLOPs of a sigmoid gate per element, its exponential apart: negate, add, divide, multiply."""


@dataclass(frozen=True)
class Attention(Component):
    """The attention core in one fused kernel (FlashAttention, FlashDecoding): scores never leave the chip.

    FLOPs ``2 B N (H + V) pairs``; reads the queries, and the keys and values of each key-value head once; writes the
    output. Ignores re-reads of keys per query tile and the merge of split keys.
    Source: Dao et al. 2022 (arXiv 2205.14135); lecture, attention intensity.

    Attributes:
        N, K: query heads, key-value heads.
        H: dimension of a query or key head. value_dim: of a value head, None for H.
        mask, size: see ``masks``; size is the window or chunk.
        kv: format of cached keys and values.
        sinks: one learned logit per head that joins the softmax.
        cached: whether the keys and values live in this component's own state (False: another layer's are read, and
            nothing is kept here).
        source: the keys are those of the second sequence (cross-attention): nothing grows with the text.
    """

    kind: ClassVar[str] = "attention"

    N: Any
    K: Any
    H: Any
    value_dim: Any = None
    mask: str = "causal"
    size: Any = None
    kv: Format = BF16
    activation: Format = BF16
    sinks: bool = False
    cached: bool = True
    source: bool = False
    name: str = "attention"

    @cached_property
    def _constants(self) -> tuple[Any, Any, Any, Any]:
        """FLOPs per pair, state bytes per key, activation bytes per token read and written."""
        value_dim = self.H if self.value_dim is None else self.value_dim
        return (
            2 * self.N * (self.H + value_dim),
            self.kv.bytes(self.K * (self.H + value_dim)),
            self.activation.bytes(self.N * self.H),
            self.activation.bytes(self.N * value_dim),
        )

    def scored(self, work: Work) -> tuple[Any, Any]:
        """(pairs per head, keys read per key-value head) of one sequence."""
        if self.source:
            return work.T * work.source, work.source
        return work.once(pairs, self.mask, self.size), work.once(keys, self.mask, self.size)

    def group_cost(self, work: Work) -> Cost:
        per_pair, per_key, read, written = self._constants
        pair_count, key_count = self.scored(work)
        all_pairs = work.B * pair_count
        scores = self.N * all_pairs
        return Cost(
            {"bf16": per_pair * all_pairs, "vector": SOFTMAX_FLOPS * scores, "special": scores},
            {"activations": read * work.tokens, "state": per_key * (work.B * key_count)},
            {"activations": written * work.tokens},
            1,
        )

    def params(self) -> Params:
        return {self.activation: self.N} if self.sinks else {}

    def state(self) -> State:
        if not self.cached:
            return ()
        value_dim = self.H if self.value_dim is None else self.value_dim
        grows = "source" if self.source else "token"
        return (StatePiece("kv", self.K * (self.H + value_dim), self.kv, grows, window=kept(self.mask, self.size)),)


@dataclass(frozen=True)
class UnfusedAttention(Attention):
    """The baseline that FlashAttention replaced: three kernels, the whole rectangle of scores through memory.

    Scores are written by the first matmul, read and written back by the softmax, read by the second matmul, and the
    mask saves nothing: all T (S + T) pairs are computed. Source: Dao et al. 2022, algorithm 0.
    """

    def group_cost(self, work: Work) -> Cost:
        fused = super().group_cost(work)
        per_pair = self._constants[0]
        key_count = work.source if self.source else work.S + (0 if self.mask == "cross" else work.T)
        all_pairs = work.B * (work.T * key_count)
        scores = self.N * all_pairs
        passes = self.activation.bytes(2 * scores)
        keys_read = {**fused.read, "state": self._constants[1] * (work.B * key_count)}
        return Cost(
            {"bf16": per_pair * all_pairs, "vector": SOFTMAX_FLOPS * scores, "special": scores},
            {**keys_read, "activations": fused.read["activations"] + passes},
            {"activations": fused.write["activations"] + passes},
            3,
        )


@dataclass(frozen=True)
class CacheWrite(Component):
    """Rotary embedding fused with the write of new keys and values into the cache, one kernel.

    Reads the projected queries, keys and values; writes the rotated queries, and keys and values as state. Without
    rotation the queries stay where they are.

    Attributes:
        rotary: elements of each query and key head that are rotated, 0 for none.
        writes: whether keys and values are written here (False where another layer's cache is used).
    """

    kind: ClassVar[str] = "cache_write"

    N: Any
    K: Any
    H: Any
    value_dim: Any = None
    rotary: Any = 0
    writes: bool = True
    kv: Format = BF16
    activation: Format = BF16
    name: str = "rotary"

    @cached_property
    def _constants(self) -> tuple[Any, Any, Any, Any]:
        """Vector FLOPs, activation bytes read and written, state bytes written; per token."""
        value_dim = self.H if self.value_dim is None else self.value_dim
        queries = 0 if self.rotary == 0 else self.N * self.H
        entry = self.K * (self.H + value_dim) if self.writes else 0
        heads = self.N + (self.K if self.writes else 0)
        return (
            ROTARY_FLOPS * heads * self.rotary,
            self.activation.bytes(queries + entry),
            self.activation.bytes(queries),
            self.kv.bytes(entry),
        )

    def group_cost(self, work: Work) -> Cost:
        flops, read, written, stored = self._constants
        tokens = work.tokens
        return Cost(
            {"vector": flops * tokens} if self.rotary != 0 else {},
            {"activations": read * tokens},
            {"activations": written * tokens, "state": stored * tokens},
            1,
        )


@dataclass(frozen=True)
class AttentionBlock(Block):
    """Projections, rotary embedding, attention and output projection of one layer.

    Parameters ``D H (2 N + 2 K)`` without biases and norms; state ``2 K H`` elements per token.

    Attributes:
        D: width of the residual stream. N, K, H, value_dim, mask, size, kv, sinks: as in ``Attention``.
        qkv_bias, o_bias: biases of the projections; k_bias False leaves the keys' out (Whisper).
        qk_norm: "" for none, "head" (one norm of width H for queries, one for keys), "full" (over all heads), "bare"
            (per head without weights, Llama 4).
        qk_norm_flops: elementwise FLOPs of that norm per element; qk_norm_bias: it has a shift as well.
        rotary: rotated elements per head, 0 for none.
        gated: a sigmoid gate on the output, projected beside the queries (Qwen3-Next); head_gate: one gate per head from a
            projection of its own (Step 3.7).
        shares_kv: keys and values are those of an earlier layer (CLA): no key-value projections, no state of its own.
        v_norm: the values are normalised as well, without weights (Gemma 4). k_is_v: values are the key projection.
        caches: False in an encoder: keys and values are read as projected, nothing is kept.
        fused: FlashAttention, or the unfused baseline.
        weight: storage of the projections; overrides: ((projection, format), ...) for "q", "k", "v", "o" that differ.
        vectors: storage of biases and of the norm, None for the activation format.
    """

    D: Any
    N: Any
    K: Any
    H: Any
    value_dim: Any = None
    mask: str = "causal"
    size: Any = None
    qkv_bias: bool = False
    o_bias: bool = False
    k_bias: bool = True
    qk_norm: str = ""
    qk_norm_bias: bool = False
    rotary: Any = 0
    sinks: bool = False
    gated: bool = False
    head_gate: bool = False
    shares_kv: bool = False
    v_norm: bool = False
    k_is_v: bool = False
    caches: bool = True
    fused: bool = True
    kv: Format = BF16
    weight: Format = BF16
    activation: Format = BF16
    overrides: tuple[tuple[str, Format], ...] = ()
    vectors: Format | None = None
    name: str = "attention"

    @cached_property
    def parts(self) -> tuple[Component, ...]:
        value_dim = self.H if self.value_dim is None else self.value_dim
        heads = {"N": self.N, "K": self.K, "H": self.H, "value_dim": self.value_dim}
        kernel = Attention if self.fused else UnfusedAttention
        parts: list[Component] = [*self._projections(value_dim)]
        parts += self._norms(value_dim)
        keeps = self.caches and not self.shares_kv
        if self.caches:
            parts.append(CacheWrite(**heads, rotary=self.rotary, writes=keeps, kv=self.kv, activation=self.activation))
        parts.append(
            kernel(
                **heads, mask=self.mask, size=self.size, kv=self.kv, activation=self.activation, sinks=self.sinks,
                cached=keeps,
            )
        )  # fmt: skip
        width = self.N * value_dim
        if self.head_gate:
            parts.append(self._linear("gate", self.D, self.N, False))
            parts.append(Elementwise(width + self.N, width, GATE_FLOPS * self.N + width, self.activation, name="gate"))
        if self.gated:
            parts.append(Elementwise(2 * width, width, GATE_FLOPS * width, self.activation, name="gate"))
        parts.append(self._linear("o", width, self.D, self.o_bias))
        return tuple(parts)

    def _linear(self, name: str, inputs: Any, outputs: Any, bias: bool) -> Linear:
        weight = dict(self.overrides).get(name[0], self.weight)
        return Linear(inputs, outputs, bias, weight, self.activation, vectors=self.vectors, name=f"{name}_proj")

    def _projections(self, value_dim: Any) -> list[Linear]:
        """One fused matmul for queries, keys and values, or one each where their formats differ."""
        widths = {"q": self.N * self.H * (2 if self.gated else 1)}
        if not self.shares_kv:
            widths["k"] = self.K * self.H
            if not self.k_is_v:
                widths["v"] = self.K * value_dim
        formats = {dict(self.overrides).get(part, self.weight) for part in widths}
        if len(formats) == 1 and (self.k_bias or not self.qkv_bias):
            fused = self._linear("".join(widths), self.D, sum(widths.values()), self.qkv_bias)
            return [fused]
        biases = {"q": self.qkv_bias, "k": self.qkv_bias and self.k_bias, "v": self.qkv_bias}
        return [self._linear(part, self.D, width, biases[part]) for part, width in widths.items()]

    def _norms(self, value_dim: Any) -> list[Norm]:
        keys_here = 0 if self.shares_kv else self.K
        elements = (self.N + keys_here) * self.H
        if self.v_norm and not self.shares_kv:
            elements = elements + self.K * value_dim
        if not self.qk_norm:
            return []
        weights = {
            "head": self.H * (1 if self.shares_kv else 2),
            "full": (self.N + keys_here) * self.H,
            "bare": 0,
        }[self.qk_norm]
        stored = weights * (2 if self.qk_norm_bias else 1)
        vectors = self.activation if self.vectors is None else self.vectors
        return [Norm(elements, stored, weight=vectors, activation=self.activation, name="qk_norm")]
