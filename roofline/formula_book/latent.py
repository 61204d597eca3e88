"""Entries of latent, sparse and compressed attention, and of caches shared across layers."""

from __future__ import annotations

from typing import Any

from roofline.components.attention import Attention, AttentionBlock
from roofline.components.base import Component
from roofline.components.block_sparse import BlockSparseAttention
from roofline.components.compressed import CompressedAttention
from roofline.components.hyper_connections import HyperConnection
from roofline.components.latent import LatentAttention
from roofline.components.mla import MLA
from roofline.components.sparse import DSA
from roofline.formula_book.entry import Build, Entry, Formats, of_kind
from roofline.symbols import symbols

GROUPS = 8
"""Groups of the low-rank output projection in DeepSeek-V4-Flash; a structural number, so it stays one."""
CSA_EVERY, HCA_EVERY = 4, 128
"""Tokens per compressed entry in the V4 configs; structural as well."""
BLOCK = 128
"""Tokens per block in MiniMax-M3; structural as well."""


def _mla(form: str) -> Build:
    def build(formats: Formats) -> list[tuple[Any, Component]]:
        D, N, Q, R, P, H, Z = symbols("D N Q R P H Z")
        block = MLA(D, N, Q, R, P, H, Z, form=form, kv=formats["kv"], scaled=False, weight=formats["weight"])
        return [(1, block)]

    return build


def _mla_core(formats: Formats) -> list[tuple[Any, Component]]:
    D, N, Q, R, P, H, Z = symbols("D N Q R P H Z")
    block = MLA(D, N, Q, R, P, H, Z, kv=formats["kv"], scaled=False, weight=formats["weight"])
    return [(1, part) for part in block.parts if part.kind == "attention"]


def _dsa(formats: Formats) -> list[tuple[Any, Component]]:
    D, N, Q, R, P, H, Z, k, heads, dim = symbols("D N Q R P H Z k I Y")
    block = DSA(
        D, N, Q, R, P, H, Z, kv=formats["kv"], scaled=False, weight=formats["weight"], k=k, index_heads=heads, index_dim=dim,
        base=formats["weight"],
    )  # fmt: skip
    return [(1, block)]


def _block_sparse(formats: Formats) -> list[tuple[Any, Component]]:
    D, N, K, H, k, dim = symbols("D N K H k Y")
    block = BlockSparseAttention(
        D, N, K, H, mask="blocks", size=(BLOCK, k), rotary=H, index_heads=K, index_dim=dim, index_rotary=dim, kv=formats["kv"],
        weight=formats["weight"],
    )  # fmt: skip
    return [(1, block)]


def _compressed(every: int, *, indexed: bool) -> Build:
    def build(formats: Formats) -> list[tuple[Any, Component]]:
        D, N, H, P, Q, R, W = symbols("D N H P Q R W")
        k, heads, dim = symbols("k I Y")
        index = {"k": k, "index_heads": heads, "index_dim": dim} if indexed else {}
        block = CompressedAttention(
            D, N, H, P, Q, GROUPS, R, window=W, every=every, overlap=indexed, kv=formats["kv"], weight=formats["weight"],
            base=formats["weight"], **index,
        )  # fmt: skip
        return [(1, block)]

    return build


def _hyper_connection(formats: Formats) -> list[tuple[Any, Component]]:
    D, n = symbols("D n")
    return [(1, HyperConnection(D, n))]


def _shared(formats: Formats) -> list[tuple[Any, Component]]:
    D, N, K, H = symbols("D N K H")
    return [(1, AttentionBlock(D, N, K, H, rotary=H, shares_kv=True, kv=formats["kv"], weight=formats["weight"]))]


def _cross(formats: Formats) -> list[tuple[Any, Component]]:
    N, K, H = symbols("N K H")
    return [(1, Attention(N, K, H, kv=formats["kv"], source=True))]


def _expanded(component: Component) -> Component | None:
    return component.prefill_form() if isinstance(component, MLA) and not isinstance(component, DSA) else None


MLA_SOURCE = "DeepSeek-V2, arXiv 2405.04434"
V4_SOURCE = "DeepSeek-V4, arXiv 2606.19348"

ENTRIES: dict[str, Entry] = {
    "mla": Entry(
        "latent attention, absorbed: a decode step scores the cached latent itself", MLA_SOURCE, _mla("absorbed"), of_kind(MLA)
    ),
    "mla-core": Entry(
        "the core of absorbed latent attention: R + P elements scored, R summed, per head and pair",
        MLA_SOURCE,
        _mla_core,
        of_kind(LatentAttention),
        limits=((("T", "1"), ("S", "oo")),),
    ),
    "mla-expanded": Entry(
        "latent attention as a prefill runs it: every latent in reach expanded to keys and values",
        MLA_SOURCE,
        _mla("expanded"),
        _expanded,
    ),
    "dsa": Entry(
        "sparse attention over the k latents that an index selects", "DeepSeek-V3.2-Exp, inference/model.py", _dsa, of_kind(DSA)
    ),
    "block-sparse": Entry(
        f"grouped-query attention over the k blocks of {BLOCK} tokens that an index selects",
        "MiniMax-M3, transformers models/minimax_m3_vl",
        _block_sparse,
        of_kind(BlockSparseAttention),
    ),
    "csa": Entry(
        f"compressed sparse attention: a window, and k of the entries that stand for {CSA_EVERY} tokens each",
        V4_SOURCE,
        _compressed(CSA_EVERY, indexed=True),
        of_kind(CompressedAttention, lambda block: block.index_heads != 0),
    ),
    "hca": Entry(
        f"heavily compressed attention: a window, and all entries that stand for {HCA_EVERY} tokens each",
        V4_SOURCE,
        _compressed(HCA_EVERY, indexed=False),
        of_kind(CompressedAttention, lambda block: block.every != 0 and block.index_heads == 0),
    ),
    "hyper-connection": Entry(
        "mixing of n residual streams around one block (mHC)", V4_SOURCE, _hyper_connection, of_kind(HyperConnection)
    ),
    "cla": Entry(
        "attention that reads another layer's keys and values and keeps none",
        "Brandon et al. 2024, arXiv 2405.12981",
        _shared,
        of_kind(AttentionBlock, lambda block: block.shares_kv),
    ),
    "cross-attention": Entry(
        "attention core over the X tokens of a second sequence",
        "Vaswani et al. 2017, arXiv 1706.03762",
        _cross,
        of_kind(Attention, lambda core: core.source),
    ),
}
