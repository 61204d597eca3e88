"""What a kernel's time is compared with does the same: every library's outputs against the float64 reference.

At the first proof cases that a library takes, or at cases of its own where those are ragged.
"""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("triton")

import torch

from roofline.kernels.compressed_attention import Compressed
from roofline.kernels.dsa_indexer import Index
from roofline.kernels.flash_decoding import Decode
from roofline.kernels.mla_decode import Dense
from roofline.kernels.quantize_kv import FACTORS, dequantize
from roofline.kernels.registry import load_all
from roofline.kernels.sparse_mla_decode import Selected
from roofline.kernels.spec import Case, Spec, Tensors
from roofline.kernels.topk_select import Choice

SPECS = {spec.name: spec for spec in load_all()}
WITHOUT = {"csa_compress", "hca_compress", "gated_delta_chunk", "mamba2_chunk", "speculative"}
"""Kernels that torch has nothing for but a loop over blocks or tokens."""
NEEDS_CUDA = {"gemm_fp8_block": "torch scales blocks of fp8 on a GPU only"}
DRAWS = {"sampling": "two generators draw different tokens"}
OWN: dict[str, list[Case]] = {
    "sparse_mla_decode": [
        Selected("own", "bf16", (40, 40), 5, 128, 32, page=16, k=13),
        Selected("own-packed", "bf16", (30, 20), 5, 128, 32, page=16, packed=True, k=9),
    ],
    "compressed_attention": [
        Compressed("own", "bf16", (70, 70), 6, 64, 12, 4, k=9, page=8),
        Compressed("own-all", "bf16", (50,), 5, 128, 7, 3, page=8, packed=True, sinks=False),
    ],
    "mla_decode": [Dense("own", "bf16", (30, 30), 5, 128, 32, page=16, packed=True)],
    "flash_decoding": [
        Decode("own", "bf16", (40, 40), 4, 2, 32),
        Decode("own-verify", "bf16", (21, 21), 4, 2, 32, T=4),
        Decode("own-fp8", "bf16", (33,), 4, 2, 64, kv="fp8"),
    ],
    "dsa_indexer": [Index("own", "bf16", (60, 60), 3, 128, "fp8", page=16)],
    "topk_select": [Choice("own", "fp32", (90, 90), 12)],
}
LIMIT = 2e-2
"""Largest error over the largest element: inputs of 16 bits, rounded once or twice more on the way than in the kernel."""


def given(spec: Spec, case: Case, tensors: Tensors, out: Any) -> Tensors:
    """The outputs of a library by the reference's names."""
    names = list(spec.reference(case, tensors))
    if isinstance(out, dict):
        return out
    if spec.name == "quantize_kv":
        out = tuple(dequantize(pages, case.kv, factor) for pages, factor in zip(out, FACTORS, strict=True))  # type: ignore[attr-defined]
    if spec.name == "topk_select":
        out = out.indices.sort(2).values
    return dict(zip(names, out if isinstance(out, tuple) else (out,), strict=False))


def close(mine: torch.Tensor, right: torch.Tensor) -> bool:
    """Whether numbers agree, in the order of the reference or with heads in front of tokens."""
    wide = right.double()
    ways = [mine, mine.transpose(1, 2)] if mine.dim() > 2 else [mine]
    return any(float((way.reshape(right.shape).double() - wide).abs().max()) <= LIMIT * float(wide.abs().max()) for way in ways)


def test_a_kernel_without_a_library_is_one_that_is_listed() -> None:
    assert {name for name, spec in SPECS.items() if spec.library is None} == WITHOUT


@pytest.mark.usefixtures("interpreted")
@pytest.mark.parametrize("name", sorted({*SPECS} - WITHOUT - {*NEEDS_CUDA} - {*DRAWS}))
def test_a_library_does_what_the_kernel_does(name: str) -> None:
    spec, compared = SPECS[name], 0
    assert spec.library is not None
    for case in OWN.get(name) or spec.cases:
        tensors = spec.inputs(case, "cpu")
        call = spec.library(case, tensors)
        if call is None or compared == 3:
            continue
        outputs = given(spec, case, tensors, call())
        rights = spec.reference(case, spec.inputs(case, "cpu"))
        assert outputs, case
        assert all(close(mine, rights[key]) for key, mine in outputs.items()), case
        compared += 1
    assert compared
