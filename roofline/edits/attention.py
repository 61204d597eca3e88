"""Edits of attention: fewer key-value heads, windows and patterns, caches shared across layers, latents, other mixers."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace

from roofline.components.attention import AttentionBlock
from roofline.components.base import Component
from roofline.components.delta import GatedDeltaNet, KimiDeltaAttention
from roofline.components.mamba import Mamba2Block
from roofline.components.mla import MLA
from roofline.edits.edit import Edit, map_blocks, map_layers_in_order
from roofline.errors import InputError
from roofline.model import Model

HEADED = "attention with key-value heads"
"""What these edits look for, in the words of their errors."""
ROPE_DIM = 64
"""Rotary elements kept beside a new latent, as in DeepSeek-V2 (arXiv 2405.04434)."""


def kv_heads(number: int) -> Edit:
    """Give every attention layer ``number`` key-value heads: fewer share more queries (GQA), 1 is MQA."""

    def one(block: AttentionBlock) -> AttentionBlock:
        if number < 1 or block.N % number:
            raise InputError(f"--kv-heads: {number} does not divide the {block.N} query heads")
        return replace(block, K=number)

    return Edit(
        f"--kv-heads {number}",
        lambda model: map_blocks(model, AttentionBlock, one, "--kv-heads", HEADED),
    )


def window(tokens: int) -> Edit:
    """Let every causal attention layer see the last ``tokens`` tokens only."""
    if tokens < 1:
        raise InputError(f"--window: {tokens} is out of range; give 1 or more tokens")

    def one(block: AttentionBlock) -> AttentionBlock:
        return replace(block, mask="window", size=tokens) if block.mask in ("causal", "window") else block

    return Edit(f"--window {tokens}", lambda model: map_blocks(model, AttentionBlock, one, "--window", "causal attention"))


def unfused() -> Edit:
    """The unfused baseline: scores written to memory and read back."""
    return Edit(
        "--attention unfused",
        lambda model: map_blocks(model, AttentionBlock, lambda block: replace(block, fused=False), "--attention unfused", HEADED),
    )


def bidirectional() -> Edit:
    """Let every token of a step see all others: a diffusion model's denoising step."""

    def one(block: AttentionBlock) -> AttentionBlock:
        if block.mask not in ("causal", "full"):
            raise InputError(f"diffusion: attention with a {block.mask} mask cannot be made bidirectional")
        return replace(block, mask="full")

    return Edit("--bidirectional", lambda model: map_blocks(model, AttentionBlock, one, "diffusion", HEADED))


def pattern(text: str) -> Edit:
    """Alternate local and global attention layers: "LLLG:1024" is three layers that see 1024 tokens, then one that sees all.

    Without the width, the local layers keep the window that the model has.
    """
    match = re.fullmatch(r"([LG]+)(?::(\d+))?", text)
    if match is None:
        raise InputError(f"--pattern: {text!r} is not a pattern; write L (local) and G (global) and the window, like LLLG:1024")
    order, width = match[1], int(match[2]) if match[2] else None

    def one(index: int, block: AttentionBlock) -> AttentionBlock:
        if order[index % len(order)] == "G":
            return replace(block, mask="causal", size=None)
        size = width if width is not None else block.size if block.mask == "window" else None
        if size is None or size < 1:
            raise InputError(f"--pattern: the model has no window for the L layers; write it behind a colon, like {order}:4096")
        return replace(block, mask="window", size=size)

    return Edit(f"--pattern {text}", lambda model: map_layers_in_order(model, AttentionBlock, one, "--pattern", HEADED))


def share_kv_every(layers: int) -> Edit:
    """Cross-layer attention: of every ``layers`` attention layers the first computes keys and values, the others reuse them.

    Source: Brandon et al. 2024, arXiv 2405.12981.
    """
    if layers < 1:
        raise InputError(f"--share-kv-every: {layers} is out of range; give 1 (no sharing) or more layers")

    def one(index: int, block: AttentionBlock) -> AttentionBlock:
        return replace(block, shares_kv=index % layers != 0)

    def change(model: Model) -> Model:
        total = len(model.layers)
        if layers > total:
            raise InputError(f"--share-kv-every: {layers} is not between 1 and the {total} layers of {model.name}")
        return map_layers_in_order(model, AttentionBlock, one, "--share-kv-every", HEADED)

    return Edit(f"--share-kv-every {layers}", change)


def mla_rank(rank: int) -> Edit:
    """Keep a latent of ``rank`` elements per token: another rank for latent attention, or MLA in place of GQA.

    A converted layer has a full query projection and 64 rotary elements beside the latent.
    """
    if rank < 1:
        raise InputError(f"--mla-rank: {rank} is out of range; give 1 or more elements")

    def one(block: Component) -> Component:
        if isinstance(block, MLA):
            return replace(block, R=rank)
        if isinstance(block, AttentionBlock):
            if block.mask != "causal" or block.shares_kv:
                raise InputError(
                    f"--mla-rank: attention with a {block.mask} mask or a shared cache cannot become latent attention"
                )
            return MLA(
                block.D, block.N, None, rank, ROPE_DIM, block.H, block.value_dim, kv=block.kv, weight=block.weight,
                activation=block.activation, name=block.name,
            )  # fmt: skip
        return block

    def change(model: Model) -> Model:
        return map_blocks(model, (MLA, AttentionBlock), one, "--mla-rank", "attention")

    return Edit(f"--mla-rank {rank}", change, f"converted layers keep {ROPE_DIM} rotary elements beside the latent")


def _delta(block: AttentionBlock) -> Component:
    return GatedDeltaNet(
        block.D, block.N, block.N, block.H, block.H, weight=block.weight, activation=block.activation
    )  # fmt: skip


def _kda(block: AttentionBlock) -> Component:
    return KimiDeltaAttention(block.D, block.N, block.H, weight=block.weight, activation=block.activation)


def _mamba2(block: AttentionBlock) -> Component:
    inner = 2 * block.D
    return Mamba2Block(
        block.D, inner // 64, 64, 128, weight=block.weight, activation=block.activation
    )  # fmt: skip


MIXERS: dict[str, tuple[Callable[[AttentionBlock], Component], str]] = {
    "gated-deltanet": (
        _delta,
        "gated DeltaNet with as many key and value heads, of the same width, as the attention had query heads",
    ),
    "kda": (_kda, "KDA with as many heads, of the same width, as the attention had query heads"),
    "mamba2": (_mamba2, "Mamba-2 of twice the model's width in heads of 64, state 128, one group"),
}


def swap_attention(text: str) -> Edit:
    """Replace attention by a fixed-state mixer in some layers: "gated-deltanet:3of4" keeps every fourth attention layer."""
    match = re.fullmatch(r"([a-z0-9-]+)(?::(\d+)of(\d+))?", text)
    if match is None or match[1] not in MIXERS:
        raise InputError(f"--swap-attention: {text!r} is not one of {', '.join(MIXERS)}, with a share like gated-deltanet:3of4")
    swapped, of = int(match[2] or 1), int(match[3] or 1)
    if not 1 <= swapped <= of:
        raise InputError(f"--swap-attention: {swapped} of {of} layers is not a share")
    make, note = MIXERS[match[1]]

    def one(index: int, block: AttentionBlock) -> Component:
        return make(block) if index % of < swapped else block

    return Edit(
        f"--swap-attention {text}",
        lambda model: map_layers_in_order(model, AttentionBlock, one, "--swap-attention", HEADED),
        note,
    )
