"""Storage orders of small integers in 32-bit words: the rows of GPTQ, and the interleaved columns of AWQ.

GPTQ packs along the inner dimension as one stream of bits: with 4 bits, nibble i of word r holds row 8 r + i; with 3 bits,
32 rows fill three words. AWQ packs eight neighbouring columns into one word in the order 0 2 4 6 1 3 5 7, so that a kernel
that masks every second nibble finds neighbours side by side. Zero points lie along the outer dimension in both; GPTQ
stores them less one. Sources: AutoGPTQ, qlinear modules (pack); AutoAWQ, packing_utils.
"""

from __future__ import annotations

import torch

WORD = 32
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
"""Column that each nibble of an AWQ word holds, lowest nibble first."""


def pack_rows(codes: torch.Tensor, bits: int) -> torch.Tensor:
    """Codes ``[K, ...]`` (0 to 2^bits - 1) as one stream of bits along the first dimension: int32 ``[K bits / 32, ...]``.

    Raises ValueError where the rows do not fill whole words.
    """
    K = codes.shape[0]
    if K * bits % WORD:
        raise ValueError(f"{K} rows of {bits} bits do not fill whole words of {WORD} bits")
    digits = torch.stack([(codes.to(torch.int64) >> bit) & 1 for bit in range(bits)], 1)
    words = digits.reshape(K * bits // WORD, WORD, *codes.shape[1:])
    weights = (1 << torch.arange(WORD, dtype=torch.int64, device=codes.device)).view(1, WORD, *[1] * (codes.dim() - 1))
    unsigned = (words * weights).sum(1)
    return torch.where(unsigned >= 1 << (WORD - 1), unsigned - (1 << WORD), unsigned).to(torch.int32)


def unpack_rows(words: torch.Tensor, bits: int) -> torch.Tensor:
    """The inverse of ``pack_rows``: int64 codes."""
    shifts = torch.arange(WORD, dtype=torch.int64, device=words.device).view(1, WORD, *[1] * (words.dim() - 1))
    digits = (words.to(torch.int64)[:, None] >> shifts) & 1
    stream = digits.reshape(words.shape[0] * WORD // bits, bits, *words.shape[1:])
    weights = (1 << torch.arange(bits, dtype=torch.int64, device=words.device)).view(1, bits, *[1] * (words.dim() - 1))
    return (stream * weights).sum(1)


def pack_gptq(codes: torch.Tensor, bits: int = 4) -> torch.Tensor:
    """Codes ``[K, N]`` in the order of GPTQ: int32 ``[K bits / 32, N]``."""
    return pack_rows(codes, bits)


def unpack_gptq(words: torch.Tensor, bits: int = 4) -> torch.Tensor:
    """The inverse of ``pack_gptq``."""
    return unpack_rows(words, bits)


def pack_gptq_zeros(zeros: torch.Tensor, bits: int = 4) -> torch.Tensor:
    """Zero points ``[groups, N]`` less one, modulo 2^bits: int32 ``[groups, N bits / 32]``."""
    return pack_rows(((zeros.to(torch.int64) - 1) % (1 << bits)).T, bits).T.contiguous()


def unpack_gptq_zeros(words: torch.Tensor, bits: int = 4) -> torch.Tensor:
    """The inverse of ``pack_gptq_zeros``."""
    return (unpack_rows(words.T, bits).T + 1) % (1 << bits)


def pack_awq(codes: torch.Tensor) -> torch.Tensor:
    """4-bit codes ``[rows, N]`` in the order of AWQ: int32 ``[rows, N / 8]``; zero points alike."""
    places = torch.tensor(AWQ_ORDER, device=codes.device)
    ordered = codes.unflatten(1, (-1, 8))[:, :, places].flatten(1)
    return pack_rows(ordered.T, 4).T.contiguous()


def unpack_awq(words: torch.Tensor) -> torch.Tensor:
    """The inverse of ``pack_awq``."""
    places = torch.tensor(AWQ_ORDER, device=words.device).argsort()
    return unpack_rows(words.T, 4).T.unflatten(1, (-1, 8))[:, :, places].flatten(1)
