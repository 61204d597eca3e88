"""Entries of mixers with a fixed state, each as a decode step runs it and, where it differs, as a prefill does."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from roofline.components.base import Component
from roofline.components.delta import GatedDeltaNet, KimiDeltaAttention
from roofline.components.linear_attention import GriffinBlock, LightningBlock, ShortConvBlock
from roofline.components.mamba import Mamba2Block, MambaBlock
from roofline.components.rwkv import TimeMix
from roofline.formula_book.entry import Bind, Build, Entry, Formats, of_kind
from roofline.symbols import symbols

CHUNK = 64
"""Tokens per chunk of the chunked forms shown: structural, so it stays a number."""


def _mamba(formats: Formats) -> Component:
    D, U, J, R = symbols("D U J R")
    return MambaBlock(D, U, J, R, weight=formats["weight"])


def _mamba2(formats: Formats) -> Component:
    D, N, H, J = symbols("D N H J")
    return Mamba2Block(D, N, H, J, chunk=CHUNK, weight=formats["weight"])


def _delta(formats: Formats) -> Component:
    D, K, N, H = symbols("D K N H")
    return GatedDeltaNet(D, K, N, H, H, chunk=CHUNK, weight=formats["weight"])


def _kda(formats: Formats) -> Component:
    D, N, H = symbols("D N H")
    return KimiDeltaAttention(D, N, H, chunk=CHUNK, weight=formats["weight"])


def _lightning(formats: Formats) -> Component:
    D, N, H = symbols("D N H")
    return LightningBlock(D, N, H, chunk=CHUNK, weight=formats["weight"])


def _short_conv(formats: Formats) -> Component:
    return ShortConvBlock(symbols("D")[0], weight=formats["weight"])


def _griffin(formats: Formats) -> Component:
    D, U = symbols("D U")
    return GriffinBlock(D, U, 1, weight=formats["weight"])


def _rwkv(formats: Formats) -> Component:
    D, U = symbols("D U")
    return TimeMix(D, U, weight=formats["weight"])


def _step(make: Callable[[Formats], Component]) -> Build:
    def build(formats: Formats) -> list[tuple[Any, Component]]:
        return [(1, make(formats))]

    return build


def _prefill(make: Callable[[Formats], Component]) -> Build:
    def build(formats: Formats) -> list[tuple[Any, Component]]:
        return [(1, make(formats).prefill_form())]

    return build


def _chunked(kind: type[Component]) -> Bind:
    def bind(component: Component) -> Component | None:
        return component.prefill_form() if isinstance(component, kind) else None

    return bind


ENTRIES: dict[str, Entry] = {
    "mamba": Entry(
        "Mamba: selective scan behind a convolution of 4 taps",
        "Gu & Dao 2023, arXiv 2312.00752",
        _step(_mamba),
        of_kind(MambaBlock),
        meanings=(("R", "rank of the step size"), ("J", "state per channel")),
    ),
    "mamba2": Entry(
        "Mamba-2, token by token: N heads of H with state J, one group, a convolution of 4 taps",
        "Dao & Gu 2024, arXiv 2405.21060",
        _step(_mamba2),
        of_kind(Mamba2Block),
        meanings=(("N", "heads"), ("H", "width of a head")),
    ),
    "mamba2-prefill": Entry(
        f"Mamba-2 in chunks of {CHUNK} (state space duality)",
        "Dao & Gu 2024, arXiv 2405.21060",
        _prefill(_mamba2),
        _chunked(Mamba2Block),
        meanings=(("N", "heads"), ("H", "width of a head")),
    ),
    "gated-deltanet": Entry(
        "gated DeltaNet, token by token: K key heads and N value heads of H, a convolution of 4 taps",
        "Yang et al. 2024, arXiv 2412.06464",
        _step(_delta),
        of_kind(GatedDeltaNet),
        meanings=(("N", "value heads"), ("K", "key heads"), ("H", "width of a head")),
    ),
    "gated-deltanet-prefill": Entry(
        f"gated DeltaNet in chunks of {CHUNK}",
        "Yang et al. 2024, arXiv 2412.06464",
        _prefill(_delta),
        _chunked(GatedDeltaNet),
        meanings=(("N", "value heads"), ("K", "key heads"), ("H", "width of a head")),
    ),
    "kda": Entry(
        "Kimi delta attention, token by token, with convolutions of 4 taps",
        "Kimi Team 2025, arXiv 2510.26692",
        _step(_kda),
        of_kind(KimiDeltaAttention),
        meanings=(("N", "heads"), ("H", "width of a head")),
    ),
    "kda-prefill": Entry(
        f"Kimi delta attention in chunks of {CHUNK}",
        "Kimi Team 2025, arXiv 2510.26692",
        _prefill(_kda),
        _chunked(KimiDeltaAttention),
        meanings=(("N", "heads"), ("H", "width of a head")),
    ),
    "lightning": Entry(
        "lightning (linear) attention, token by token",
        "MiniMax-01, arXiv 2501.08313",
        _step(_lightning),
        of_kind(LightningBlock),
        meanings=(("N", "heads"), ("H", "width of a head")),
    ),
    "short-conv": Entry(
        "gated short convolution of 3 taps (LFM2)",
        "LFM2 modelling code in transformers",
        _step(_short_conv),
        of_kind(ShortConvBlock),
    ),
    "rg-lru": Entry(
        "gated linear recurrent unit (RecurrentGemma)", "De et al. 2024, arXiv 2402.19427", _step(_griffin), of_kind(GriffinBlock)
    ),
    "rwkv": Entry("RWKV-4 time mixing", "Peng et al. 2023, arXiv 2305.13048", _step(_rwkv), of_kind(TimeMix)),
}
