"""Who sees whom, and what attention gives: the references of the kernels that mask."""

from __future__ import annotations

import torch

MASKS = ("causal", "window", "chunk", "full", "block")


def visible(mask: str, size: int, T: int, S: int) -> torch.Tensor:
    """Which of S + T keys each of T queries sees: bool ``[T, S + T]``."""
    query, key = S + torch.arange(T)[:, None], torch.arange(S + T)[None, :]
    return {
        "causal": key <= query,
        "window": (key <= query) & (key > query - size),
        "chunk": (key <= query) & (key >= query // max(1, size) * size),
        "full": key >= 0,
        "block": key < (query // max(1, size) + 1) * size,
    }[mask].expand(T, S + T)


def attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, seen: torch.Tensor, scale: float,
    sinks: torch.Tensor | None = None, soft_cap: float = 0.0,
) -> torch.Tensor:  # fmt: skip
    """Attention of one sequence in float64: q [T, N, H], k [keys, K, H], v [keys, K, V], seen [T, keys]."""
    group = q.shape[1] // k.shape[1]
    keys, values = (x.double().repeat_interleave(group, dim=1) for x in (k, v))
    scores = torch.einsum("tnh,snh->nts", q.double(), keys) * scale
    if soft_cap:
        scores = soft_cap * torch.tanh(scores / soft_cap)
    scores = scores.masked_fill(~seen, float("-inf"))
    if sinks is not None:
        scores = torch.cat([scores, sinks.double()[:, None, None].expand(-1, scores.shape[1], 1)], 2)
    return torch.einsum("nts,snv->tnv", torch.softmax(scores, 2)[:, :, : len(k)], values)
