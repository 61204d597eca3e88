"""Entries of the dense transformer."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Any

from roofline.components.attention import Attention, AttentionBlock, UnfusedAttention
from roofline.components.base import Component, Params, State, merge_params, weight_bytes
from roofline.components.feedforward import MLP
from roofline.components.linear import Embedding, Linear
from roofline.components.mixing import Norm, Quantise, rms_norm
from roofline.cost import Cost
from roofline.formula_book.entry import LECTURE, Bind, Build, Entry, Formats, of_kind
from roofline.symbols import symbols
from roofline.work import Batch


def _linear(formats: Formats) -> list[tuple[Any, Component]]:
    D, F = symbols("D F")
    return [(1, Linear(D, F, weight=formats["weight"]))]


def _mlp(gated: bool) -> Build:
    def build(formats: Formats) -> list[tuple[Any, Component]]:
        D, F = symbols("D F")
        return [(1, MLP(D, F, gated=gated, weight=formats["weight"]))]

    return build


def _attention(kernel: type[Attention], mask: str, heads: str = "N K H") -> Build:
    def build(formats: Formats) -> list[tuple[Any, Component]]:
        N, K, H = symbols(heads)
        size = symbols("W")[0] if mask == "window" else symbols("C")[0] if mask == "chunk" else None
        return [(1, kernel(N, K, H, mask=mask, size=size, kv=formats["kv"]))]

    return build


def _attention_block(formats: Formats) -> list[tuple[Any, Component]]:
    D, N, K, H = symbols("D N K H")
    return [(1, AttentionBlock(D, N, K, H, rotary=H, kv=formats["kv"], weight=formats["weight"]))]


def _norm(formats: Formats) -> list[tuple[Any, Component]]:
    return [(1, rms_norm(symbols("D")[0], residual=True, weight=formats["weight"]))]


def _quantise(formats: Formats) -> list[tuple[Any, Component]]:
    return [(1, Quantise(symbols("D")[0], "token"))]


def _embedding(formats: Formats) -> list[tuple[Any, Component]]:
    V, D = symbols("V D")
    return [(1, Embedding(V, D, weight=formats["weight"]))]


def _head(formats: Formats) -> list[tuple[Any, Component]]:
    D, V = symbols("D V")
    return [(1, Linear(D, V, weight=formats["weight"], rows="logit_rows", name="head"))]


@dataclass(frozen=True)
class ReadOnce(Component):
    """The lecture's count of a decode step: every parameter but those of norms and the whole cache, each byte once.

    Source: CS336 lecture 10, memory and latency of Llama-2-13B.

    Attributes:
        counted: (count, component) of the whole model.
    """

    counted: tuple[tuple[Any, Component], ...]
    name: str = "read_once"

    def cost(self, work: Batch) -> Cost:
        group = work.groups[0]
        state = sum(times * piece.bytes(group.S, group.source) for times, part in self.counted for piece in part.state())
        return Cost(read={"weights": weight_bytes(self.params()), "state": state * group.B})

    def params(self) -> Params:
        return merge_params(
            (times, kernel.params()) for times, part in self.counted for kernel in part.parts if kernel.kind != "norm"
        )

    def state(self) -> State:
        return tuple(replace(piece, elements=times * piece.elements) for times, part in self.counted for piece in part.state())


def _dense_step(formats: Formats) -> list[tuple[Any, Component]]:
    L, D = symbols("L D")
    norm = rms_norm(D, residual=True, weight=formats["weight"])
    layer = [*_attention_block(formats), *_mlp(True)(formats), (2, norm)]
    return [*_embedding(formats), *((L * times, part) for times, part in layer), (1, norm), *_head(formats)]


def _lecture_step(formats: Formats) -> list[tuple[Any, Component]]:
    return [(1, ReadOnce(tuple(_dense_step(formats))))]


def _unfused(component: Component) -> Component | None:
    if not isinstance(component, Attention) or component.source:
        return None
    return UnfusedAttention(**{item.name: getattr(component, item.name) for item in fields(component)})


def _masked(mask: str) -> Bind:
    return of_kind(Attention, lambda core: core.mask == mask and not core.source)


STEP = "step"
"""The entry that stands for a whole model."""
FLASH = "Dao et al. 2022, arXiv 2205.14135"

ENTRIES: dict[str, Entry] = {
    "linear": Entry(
        "one dense matmul",
        LECTURE,
        _linear,
        of_kind(Linear, lambda matmul: matmul.rows == "tokens"),
        in_lecture=True,
        limits=((("F", "oo"), ("D", "oo")),),
    ),
    "mlp": Entry(
        "gated feed-forward: gate and up fused with the activation, then down",
        LECTURE,
        _mlp(True),
        of_kind(MLP, lambda block: block.gated),
        in_lecture=True,
        limits=((("F", "oo"), ("D", "oo")),),
    ),
    "mlp-plain": Entry(
        "feed-forward of two matrices",
        LECTURE,
        _mlp(False),
        of_kind(MLP, lambda block: not block.gated),
        limits=((("F", "oo"), ("D", "oo")),),
    ),
    "attention": Entry(
        "causal attention core, fused: MHA (K = N), GQA, MQA (K = 1)",
        f"{FLASH}; lecture convention: {LECTURE}",
        _attention(Attention, "causal"),
        _masked("causal"),
        _attention(Attention, "cross", "N N H"),
        in_lecture=True,
        limits=((("T", "1"), ("S", "oo")), (("S", "0"), ("T", "oo")), (("S", "0"),)),
    ),
    "attention-full": Entry(
        "attention core without a mask: an encoder, or a block that is denoised",
        FLASH,
        _attention(Attention, "full"),
        _masked("full"),
        limits=((("T", "1"), ("S", "oo")),),
    ),
    "attention-window": Entry(
        "causal attention core that sees the last W tokens",
        "Beltagy et al. 2020, arXiv 2004.05150",
        _attention(Attention, "window"),
        _masked("window"),
        limits=((("T", "1"), ("S", ">= W")), (("T", "1"), ("S", "< W"))),
    ),
    "attention-chunk": Entry(
        "causal attention core inside chunks of C tokens",
        "Llama 4 modelling code in transformers",
        _attention(Attention, "chunk"),
        _masked("chunk"),
    ),
    "attention-unfused": Entry(
        "the baseline: scores and probabilities through memory, the mask saves nothing",
        f"{FLASH}, algorithm 0",
        _attention(UnfusedAttention, "causal"),
        _unfused,
        limits=((("S", "0"), ("T", "oo")),),
    ),
    "attention-block": Entry(
        "projections, rotary embedding, attention core, output projection", LECTURE, _attention_block, of_kind(AttentionBlock)
    ),
    "norm": Entry("RMS norm with a fused residual addition", "Zhang & Sennrich 2019, arXiv 1910.07467", _norm, of_kind(Norm)),
    "quantise": Entry(
        "activations stored in 8 bits by a pass of its own, one fp32 scale per token",
        "DeepSeek-V3, arXiv 2412.19437, section 3.3",
        _quantise,
        of_kind(Quantise),
    ),
    "embedding": Entry("lookup of one row per token", LECTURE, _embedding, of_kind(Embedding)),
    "head": Entry(
        "output projection onto the vocabulary",
        LECTURE,
        _head,
        of_kind(Linear, lambda matmul: matmul.rows == "logit_rows"),
        limits=((("V", "oo"), ("D", "oo")),),
    ),
    STEP: Entry(
        "one step of a whole decoder: with letters, a dense one of L equal layers",
        LECTURE,
        _dense_step,
        of_kind(Component, lambda component: False),
        _lecture_step,
        in_lecture=True,
    ),
}
