"""What one tensor-parallel rank holds of each component, and where engines refuse.

A block is a value object over its dimensions, so a rank's part of it is the same block with fewer heads or a narrower
feed-forward layer, followed by an all-reduce of the residual stream. Norms, routers, low-rank projections to a latent
and the latent cache itself are replicated. Refusals are those of vLLM's and SGLang's layers: heads, feed-forward width
and experts must divide, and a rank's part of a block-quantised matrix must hold whole blocks.
Sources: Shoeybi et al. 2019, Megatron-LM (arXiv 1909.08053); vllm/model_executor/layers (linear.py, fused_moe, mamba).
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from roofline.components.altup import AltUpCorrect, AltUpPredict, LayerInput, LowRankResidual
from roofline.components.attention import AttentionBlock
from roofline.components.base import Block, Component
from roofline.components.block_sparse import BlockSparseAttention
from roofline.components.compressed import CompressedAttention
from roofline.components.delta import GatedDeltaNet, KimiDeltaAttention
from roofline.components.feedforward import MLP
from roofline.components.gated_latent import DepthAttention, GatedLatentAttention
from roofline.components.hyper_connections import HyperApply, HyperConnection, HyperHead
from roofline.components.linear_attention import GriffinBlock, LightningBlock, ShortConvBlock
from roofline.components.mamba import Mamba2Block, MambaBlock
from roofline.components.mixing import Elementwise, Learned, Norm, Scale
from roofline.components.mla import MLA
from roofline.components.shared import Shared
from roofline.errors import InputError, UnsupportedModel
from roofline.formats import Format
from roofline.parallel.mesh import kv_heads_per_rank

REPLICATED = (
    Norm, Elementwise, Learned, Scale, HyperConnection, HyperApply, HyperHead, DepthAttention, AltUpPredict, AltUpCorrect,
    LayerInput, LowRankResidual,
)  # fmt: skip
"""What every rank holds whole."""


def divided(size: int, ways: int, what: str) -> int:
    """A size cut into equal parts. Raises InputError where it does not divide."""
    if size % ways:
        raise InputError(f"tp: {what} {size} does not divide by {ways}")
    return size // ways


def block_of(fmt: Format) -> int:
    """Elements along a matrix side that share a scale and cannot be cut: 128 for fp8 blocks, g for int4-g(g), else 1."""
    if fmt.name.startswith("fp8-block"):
        return 128
    match = re.fullmatch(r"int\d-g(\d+)(-asym)?", fmt.name)
    return int(match[1]) if match else 1


def narrowed(size: int, ways: int, what: str, *formats: Format) -> int:
    """A feed-forward width cut into equal parts of whole quantisation blocks. Raises InputError where it cannot be."""
    part = divided(size, ways, what)
    block = max(block_of(fmt) for fmt in formats)
    if ways > 1 and part % block:
        raise InputError(
            f"tp: {what} {size} over {ways} ranks is {part}, not a whole number of {formats[0].name} blocks of {block}; "
            f"use fewer ways or expert parallelism"
        )
    return part


def kv_heads(K: int, tp: int) -> int:
    """Key-value heads of a rank. Raises InputError where neither of K and tp divides the other."""
    if K % tp and tp % K:
        raise InputError(f"tp: {K} key-value heads neither divide by {tp} nor are replicated evenly over it")
    heads: int = kv_heads_per_rank(K, tp)
    return heads


@dataclass(frozen=True)
class Pieces(Block):
    """Components that run one after another on a rank."""

    pieces: tuple[Component, ...]
    name: str = "pieces"

    @cached_property
    def parts(self) -> tuple[Component, ...]:
        return tuple(part for piece in self.pieces for part in piece.parts)


def _attention(block: AttentionBlock, tp: int) -> Component:
    return replace(block, N=divided(block.N, tp, "query heads"), K=kv_heads(block.K, tp))


def _block_sparse(block: BlockSparseAttention, tp: int) -> Component:
    """Index heads stay with their key-value heads; the one index key is replicated."""
    heads = kv_heads(block.K, tp)
    return replace(block, N=divided(block.N, tp, "query heads"), K=heads, index_heads=heads)


def _latent(block: MLA, tp: int) -> Component:
    return replace(block, N=divided(block.N, tp, "attention heads"))


def _gated_latent(block: GatedLatentAttention, tp: int) -> Component:
    return replace(block, attention=replace(block.attention, N=divided(block.attention.N, tp, "attention heads")))


def _compressed(block: CompressedAttention, tp: int) -> Component:
    return replace(
        block, N=divided(block.N, tp, "attention heads"), groups=divided(block.groups, tp, "groups of the output projection")
    )


def _mlp(block: MLP, tp: int) -> Component:
    formats = (block.weight, *dict(block.overrides).values())
    return replace(block, F=narrowed(block.F, tp, "feed-forward width", *formats))


def _mamba(block: MambaBlock, tp: int) -> Component:
    return replace(block, inner=divided(block.inner, tp, "width of the Mamba mixer"))


def _mamba2(block: Mamba2Block, tp: int) -> Component:
    """Heads divide; groups divide, or are replicated where there are fewer than ranks."""
    heads = divided(block.heads, tp, "Mamba heads")
    if block.groups % tp and tp % block.groups:
        raise InputError(f"tp: {block.groups} Mamba groups neither divide by {tp} nor are replicated evenly over it")
    return replace(block, heads=heads, groups=max(1, block.groups // tp))


def _delta(block: GatedDeltaNet, tp: int) -> Component:
    return replace(
        block, key_heads=divided(block.key_heads, tp, "key heads"), value_heads=divided(block.value_heads, tp, "value heads")
    )


def _heads(block: Any, tp: int) -> Component:
    found: Component = replace(block, heads=divided(block.heads, tp, "heads of the linear mixer"))
    return found


RULES: dict[type[Component], Callable[[Any, int], Component]] = {
    AttentionBlock: _attention,
    BlockSparseAttention: _block_sparse,
    MLA: _latent,
    GatedLatentAttention: _gated_latent,
    CompressedAttention: _compressed,
    MLP: _mlp,
    MambaBlock: _mamba,
    Mamba2Block: _mamba2,
    GatedDeltaNet: _delta,
    KimiDeltaAttention: _heads,
    LightningBlock: _heads,
    GriffinBlock: lambda block, tp: replace(
        block, width=divided(block.width, tp, "width of the mixer"), heads=divided(block.heads, tp, "heads of the mixer")
    ),
}
"""What a rank holds of each kind of block whose output must be summed over the ranks."""


def shard(component: Component, tp: int) -> tuple[Component, bool]:
    """(a rank's part, whether its output must be summed over the ranks).

    Raises UnsupportedModel for a component that no rule covers; InputError where something does not divide.
    """
    if tp == 1 or isinstance(component, REPLICATED):
        return component, False
    if isinstance(component, Shared):
        part, summed = shard(component.original, tp)
        return Shared(part), summed
    for kind in type(component).__mro__:
        if kind in RULES:
            return RULES[kind](component, tp), True
    if isinstance(component, ShortConvBlock):
        raise UnsupportedModel("tensor parallelism of a short convolution is not supported")
    raise UnsupportedModel(f"tensor parallelism of {type(component).__name__} ({component.name}) is not supported; use tp 1")
