"""Every time model by name: what the names in hardware files mean."""

from __future__ import annotations

from roofline.expected.attention import DECODE, PREFILL
from roofline.expected.collective import ALL_REDUCE, ALL_TO_ALL, COLLECTIVE, CUSTOM_ALL_REDUCE, EXCHANGE
from roofline.expected.gemm import GEMM, HEADS_GEMM, QUANTISED_GEMM
from roofline.expected.latent import LATENT_DECODE
from roofline.expected.model import Model
from roofline.expected.module import (
    COMPRESSED_DECODE,
    COMPRESSED_PREFILL,
    MODULE_DECODE,
    MODULE_PREFILL,
    SPARSE_DECODE,
    SPARSE_PREFILL,
    quantised,
)
from roofline.expected.moe import MOE
from roofline.expected.stream import CHUNK_CHAIN, ROW_PASS, STREAM_PASS
from roofline.expected.waves import WAVES

MODELS: dict[str, Model] = {
    model.name: model
    for model in (
        GEMM, QUANTISED_GEMM, HEADS_GEMM, DECODE, PREFILL, LATENT_DECODE, quantised(MODULE_DECODE), quantised(MODULE_PREFILL),
        quantised(SPARSE_DECODE), quantised(SPARSE_PREFILL), quantised(COMPRESSED_DECODE), quantised(COMPRESSED_PREFILL), MOE,
        STREAM_PASS, ROW_PASS, CHUNK_CHAIN, WAVES, COLLECTIVE, ALL_TO_ALL, ALL_REDUCE, CUSTOM_ALL_REDUCE, EXCHANGE,
    )
}  # fmt: skip
