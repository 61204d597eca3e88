"""Entries of mixtures of experts."""

from __future__ import annotations

from typing import Any

from roofline.components.base import Component
from roofline.components.moe import MoE
from roofline.formula_book.entry import Build, Entry, Formats, of_kind
from roofline.symbols import symbols


def _moe(*, shared: bool) -> Build:
    def build(formats: Formats) -> list[tuple[Any, Component]]:
        D, F, E, k = symbols("D F E k")
        return [(1, MoE(D, F, E, k, shared_F=F if shared else 0, weight=formats["weight"], router_weight=formats["weight"]))]

    return build


SOURCE = "Shazeer et al. 2017, arXiv 1701.06538; DeepSeekMoE, arXiv 2401.06066"

ENTRIES: dict[str, Entry] = {
    "moe": Entry(
        "k of E experts per token; weights read are those of the E (1 - (1 - k/E)^(B T)) experts expected to be hit",
        SOURCE,
        _moe(shared=False),
        of_kind(MoE, lambda block: block.shared_F == 0),
    ),
    "moe-shared": Entry(
        "the same beside one shared expert of the same width",
        SOURCE,
        _moe(shared=True),
        of_kind(MoE, lambda block: block.shared_F != 0),
    ),
}
