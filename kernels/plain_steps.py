"""Recurrences of one new token per sequence, operation by operation in torch: what is run where there is no such kernel.

All sequences at once, computed in fp32, states gathered from their slots and put back. Each function takes the tensors of a
case and gives what repeats the step, or None where a sequence has other than one new token.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from roofline.kernels.fixed_state import normalised
from roofline.kernels.spec import Tensors

Step = Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor]]
"""From the states of all sequences to their outputs and new states, in fp32."""


def stepping(lengths: tuple[int, ...], tensors: Tensors, step: Step) -> Callable[[], torch.Tensor] | None:
    """What runs the step on the states in their slots and gives the outputs."""
    if any(length != 1 for length in lengths):
        return None
    state, slots, kind = tensors["state"], tensors["slots"].long(), tensors["v" if "x" not in tensors else "x"].dtype

    def run() -> torch.Tensor:
        out, new = step(state[slots].float())
        state[slots] = new.to(state.dtype)
        return out.to(kind)

    return run


def mamba2(lengths: tuple[int, ...], tensors: Tensors) -> Any:
    """Of Mamba-2; states ``[B, H, P, N]``."""
    x, dt, b, c, a_log, d, bias = (tensors[name] for name in ("x", "dt", "b", "c", "a_log", "d", "dt_bias"))

    def step(state: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        share = x.shape[1] // b.shape[1]
        key, query = (one.float().repeat_interleave(share, 1)[:, :, None] for one in (b, c))
        rate = torch.nn.functional.softplus(dt.float() + bias.float())
        decay = torch.exp(-rate * torch.exp(a_log.float()))
        new = state * decay[:, :, None, None] + (rate[..., None] * x.float())[..., None] * key
        return (new * query).sum(3) + d.float()[:, None] * x.float(), new

    return stepping(lengths, tensors, step)


def mamba1(lengths: tuple[int, ...], tensors: Tensors) -> Any:
    """Of Mamba; states ``[B, inner, J]``."""
    x, dt, z, b, c, a_log, d = (tensors[name] for name in ("x", "dt", "z", "b", "c", "a_log", "d"))

    def step(state: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        rate = torch.nn.functional.softplus(dt.float())
        decay = torch.exp(-rate[..., None] * torch.exp(a_log.float()))
        new = state * decay + (rate * x.float())[..., None] * b.float()[:, None]
        out = (new * c.float()[:, None]).sum(2) + d.float() * x.float()
        return out * torch.nn.functional.silu(z.float()), new

    return stepping(lengths, tensors, step)


def delta(lengths: tuple[int, ...], tensors: Tensors) -> Any:
    """Of the gated delta rule, a decay per head or per channel; states ``[B, H, K, V]``."""
    q, k, v, a, b, a_log, bias = (tensors[name] for name in ("q", "k", "v", "a", "b", "a_log", "dt_bias"))

    def step(state: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        share = v.shape[1] // k.shape[1]
        query, key = (normalised(one.float()).repeat_interleave(share, 1) for one in (q, k))
        rate = torch.nn.functional.softplus(a.float() + bias.float())
        rate = rate[..., None] if rate.dim() == 2 else rate
        faded = state * torch.exp(-torch.exp(a_log.float())[:, None] * rate)[..., None]
        change = torch.sigmoid(b.float())[..., None] * (v.float() - (faded * key[..., None]).sum(2))
        new = faded + key[..., None] * change[:, :, None]
        return (new * (query * k.shape[2] ** -0.5)[..., None]).sum(2), new

    return stepping(lengths, tensors, step)


def rwkv7(lengths: tuple[int, ...], tensors: Tensors) -> Any:
    """Of RWKV-7 from keys made ready; states ``[B, H, M, M]``."""
    r, w, k, v, a, u = (tensors[name] for name in ("r", "w", "k", "v", "a", "u"))

    def step(state: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        key, value = k.float()[:, :, None], v.float()[..., None]
        recalled = (state * key).sum(3, keepdim=True)
        new = state * torch.exp(w.float())[:, :, None] - recalled * (a.float()[:, :, None] * key) + value * u.float()[:, :, None]
        return (new * r.float()[:, :, None]).sum(3), new

    return stepping(lengths, tensors, step)


def rwkv4(lengths: tuple[int, ...], tensors: Tensors) -> Any:
    """Of RWKV-4; states ``[B, 3, width]``: numerator, denominator and the exponent that both are relative to."""
    k, v, decay, first = (tensors[name] for name in ("k", "v", "decay", "first"))

    def step(state: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        numerator, denominator, largest = state.unbind(1)
        key, value = k.float(), v.float()
        own = torch.exp(key + first.float() - largest)
        out = (numerator + own * value) / (denominator + own)
        old = largest - torch.exp(decay.float())
        top = torch.maximum(old, key)
        fade, new = torch.exp(old - top), torch.exp(key - top)
        return out, torch.stack([fade * numerator + new * value, fade * denominator + new, top], 1)

    return stepping(lengths, tensors, step)
