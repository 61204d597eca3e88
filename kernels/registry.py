"""The kernels by name. Listing them imports neither torch nor triton; loading a spec imports its file."""

from __future__ import annotations

import importlib
from collections.abc import Iterable

from roofline.errors import InputError, suggest
from roofline.kernels.spec import Spec

KERNELS = {
    "gemm": "Dense matmul: 16-bit, fp32, fp8 and int8; bias, split-K, persistent TMA.",
    "gemm_int8": "W8A8 matmul: int8 with a scale per token and per output channel; quantises 16-bit rows in front.",
    "gemm_int4": "Weight-only matmul: 4-bit integers by group in the storage orders of GPTQ and AWQ, zero points, sorted rows.",
    "gemm_fp8_block": "8-bit matmul with scales per 128x128 weights and 1x128 activations, sums promoted block by block.",
    "quantize_fp8": "Activations in 8 bits: scales per block, token or tensor, or known; fused with the norm.",
    "gemm_mxfp4": "Weight-only matmul: 4-bit floats in blocks, MXFP4 and NVFP4.",
    "gated_mlp": "Gate, up and activation of a feed-forward block in one kernel.",
    "hyper_connections": "Hyper-connections: projection, Sinkhorn weights and collapse, mix behind the sub-layer.",
    "csa_compress": "Pooling of overlapping blocks of tokens into entries, with its rolling state (DeepSeek-V4 CSA).",
    "compressed_attention": "Decode over a window, compressed entries (all or selected) and a sink; 16 bits or 584 bytes.",
    "flash_attention": "Prefill attention: every mask, grouped heads, sinks, soft cap, cached prefixes, ragged batches.",
    "flash_decoding": "Decode attention over pages, keys split over programs; windows, sinks, trees, 8-bit caches.",
    "hca_compress": "Pooling of long blocks of tokens into one entry each, with its rolling state (DeepSeek-V4 HCA).",
    "dsa_indexer": "Scores of the lightning indexer: fp8 or MXFP4 keys in pages, ReLU, weighted heads.",
    "mla_decode": "Absorbed latent attention over pages, in 16 bits or the 656-byte layout.",
    "mla_prefill": "Expanded latent attention: wide query heads, narrower values, keys made in this step.",
    "sparse_mla_decode": "Absorbed latent attention over selected entries: the core of DSA.",
    "moe_router": "Scores of experts, correction, groups, top-k, weights.",
    "moe_permute": "Tokens in the order of their experts, and the weighted sum back; a stable sort without atomics.",
    "grouped_gemm": "Matmuls of all experts in one kernel: 16-bit, block-scaled fp8 and MXFP4 weights; gathers, gates.",
    "paged_cache": "Write, gather and copy of keys and values in pages.",
    "quantize_kv": "Keys and values to fp8 or int4, with scales and zero points, on their way into pages.",
    "rmsnorm": "RMSNorm with the residual addition fused in.",
    "rotary": "Rotary embedding fused with the write of keys and values into pages.",
    "sampling": "Temperature, min-p, top-k, top-p and the draw, without a sort.",
    "speculative": "Verification of drafted chains and trees by modified rejection sampling.",
    "topk_select": "Positions of the k best scores of a row by radix search, ascending; ties go to the first.",
    "causal_conv1d": "Depthwise causal convolution with its rolling state: prefill and update; activation, gates.",
    "mamba2_chunk": "The recurrence of Mamba-2 in chunks (SSD): sums of chunks, states handed on, outputs.",
    "mamba2_step": "The recurrence of Mamba-2 token by token, states in slots: decode and verification.",
    "mamba1_step": "The selective scan of Mamba token by token, states in slots.",
    "gated_delta_chunk": "The gated delta rule in chunks: a triangular system per chunk, then a walk with the state on the chip.",
    "gated_delta_step": "The gated delta rule token by token, states in slots: decode and verification.",
    "kda_step": "Kimi delta attention token by token: the gated delta rule with a decay per channel.",
    "rwkv_step": "The recurrences of RWKV-7 and RWKV-4 token by token, states in slots.",
    "unfused_attention": "The baseline that writes every score to memory.",
}
"""Kernel -> one line about it; its file has its name."""


def check(name: str) -> str:
    """The name itself. Raises InputError, with the nearest names, for an unknown one."""
    if name not in KERNELS:
        raise InputError(f"kernel: unknown {name!r}.{suggest(name, KERNELS)} Known: {', '.join(KERNELS)}")
    return name


def load(name: str) -> Spec:
    """The spec of a kernel; imports its file, and with it torch and triton. Raises InputError as ``check`` does."""
    spec: Spec = importlib.import_module(f"roofline.kernels.{check(name)}").SPEC
    return spec


def load_all(names: Iterable[str] = KERNELS) -> list[Spec]:
    """The specs of several kernels, in order."""
    return [load(name) for name in names]
