"""Latent, sparse and compressed attention give the same values as integers, as symbols and over arrays."""

from __future__ import annotations

import numpy
import pytest
from sympy import sympify

from roofline.components.base import Component
from roofline.components.compressed import CompressedAttention
from roofline.components.hyper_connections import HyperConnection
from roofline.components.mla import MLA
from roofline.components.sparse import DSA
from roofline.formats import FP8
from roofline.symbols import symbols
from roofline.work import Work

V4 = {"D": 48, "N": 6, "H": 72, "P": 8, "Q": 20, "groups": 3, "rank": 10, "window": 9, "kv": FP8}
BLOCKS: dict[str, Component] = {
    "absorbed": MLA(D=48, N=6, Q=20, R=14, P=4, H=10, value_dim=8),
    "expanded": MLA(D=48, N=6, Q=20, R=14, P=4, H=10, value_dim=8, form="expanded"),
    "cached": MLA(D=48, N=6, Q=None, R=14, P=4, H=10, value_dim=8, form="cached"),
    "sparse": DSA(D=48, N=6, Q=20, R=14, P=4, H=10, value_dim=8, k=11, index_heads=3, index_dim=12, kv=FP8),
    "csa": CompressedAttention(**V4, every=4, overlap=True, k=5, index_heads=3, index_dim=8),
    "hca": CompressedAttention(**V4, every=7),
    "window": CompressedAttention(**V4),
    "mhc": HyperConnection(48, 4),
}
POINTS = [(1, 1, 0), (2, 1, 37), (3, 29, 0), (1, 6, 50), (2, 1, 3)]


@pytest.mark.parametrize("block", BLOCKS.values(), ids=BLOCKS)
def test_symbols_read_what_integers_read(block: Component) -> None:
    B, T, S = symbols("B T S")
    formula = block.cost(Work(B, T, S))
    for b, t, s in POINTS:
        at = {B: b, T: t, S: s}
        assert formula.map(lambda entry, at=at: sympify(entry).subs(at)) == block.cost(Work(b, t, s))


@pytest.mark.parametrize("block", BLOCKS.values(), ids=BLOCKS)
def test_arrays_read_what_integers_read(block: Component) -> None:
    swept = block.cost(Work(*(numpy.array(column, dtype=float) for column in zip(*POINTS, strict=True))))
    for index, point in enumerate(POINTS):
        for (section, key, exact), (_, _, found) in zip(block.cost(Work(*point)).entries(), swept.entries(), strict=True):
            value = found[index] if isinstance(found, numpy.ndarray) else found
            assert float(exact) == pytest.approx(float(value), rel=1e-12), (section, key)
