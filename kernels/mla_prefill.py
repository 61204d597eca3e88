"""Expanded latent attention: what a prefill of DeepSeek's models runs once a projection has made keys and values of latents.

The mathematics of ``flash_attention`` at N equal heads whose queries and keys (H + P wide: 192) are wider than their values
(128), and whose keys are activations of this step, not state. The kernel is ``flash_attention``'s; ``expand`` makes its
operands from latents, and the absorbed form (``mla_decode``) gives the same result from the latents themselves.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from roofline.components.mla import ExpandedAttention
from roofline.cost import Cost
from roofline.errors import InputError
from roofline.kernels import flash_attention as flash
from roofline.kernels.arguments import FLOATING, check, check_starts, within
from roofline.kernels.flash_attention import Prefill, Tiles, flash_attention
from roofline.kernels.gemm import gemm
from roofline.kernels.parts import tolerance
from roofline.kernels.spec import EVERYWHERE, Build, Case, Expected, Launch, Moved, Spec, Tensors
from roofline.kernels.types import TYPES
from roofline.work import Ragged, Work


def expand(entries: torch.Tensor, weight: torch.Tensor, N: int, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys ``[keys, N, H + P]`` and values ``[keys, N, V]`` from entries ``[keys, rank + P]``.

    ``weight [N (H + V), rank]`` holds each head's rows of keys (H = V), then of values; the rotary key is copied to every
    head. Raises InputError for arguments that do not fit each other.
    """
    check("entries", entries, (None, None), FLOATING, strides="any")
    within("rank", rank, 1, entries.shape[1])
    check("weight", weight, (None, rank), (entries.dtype,), entries, "any")
    if N < 1 or len(weight) % (2 * N):
        raise InputError(f"weight: {len(weight)} rows are not keys and values of {N} heads")
    heads = gemm(entries[:, :rank], weight.T).view(len(entries), N, -1)
    keys, values = heads.chunk(2, dim=2)
    rotary = entries[:, None, rank:].expand(-1, N, -1)
    return torch.cat([keys, rotary], 2), values.contiguous()


def mla_prefill(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, starts: torch.Tensor, longest: int, tiles: Tiles | None = None
) -> torch.Tensor:
    """Causal attention of ``q [tokens, N, H + P]`` over ``k [tokens, N, H + P]`` and ``v [tokens, N, V]``.

    ``starts``: int32 ``[B + 1]``, where each sequence's rows begin, and the end. ``longest``: the most rows of one. Raises
    InputError for arguments that do not fit each other.
    """
    check_starts("starts", starts, len(q), longest, q)
    return flash_attention(q, k, v, starts, starts, longest, tiles=tiles)


@dataclass(frozen=True)
class Expanded(Case):
    """``lengths`` of the sequences, N heads, width H + P of a query and V of a value."""

    lengths: tuple[int, ...]
    N: int
    width: int
    V: int
    tiles: Tiles | None = None

    @property
    def as_attention(self) -> Prefill:
        """The same launch as a case of ``flash_attention``."""
        batch = tuple((length, 0) for length in self.lengths)
        return Prefill(self.name, self.dtype, batch, self.N, self.N, self.width, self.V, tiles=self.tiles)


def inputs(case: Expanded, device: str) -> Tensors:
    """Expanded queries, keys and values."""
    tensors = flash.inputs(case.as_attention, device)
    return {"q": tensors["q"], "k": tensors["k"], "v": tensors["v"], "starts": tensors["q_starts"], "longest": tensors["longest"]}


def reference(case: Expanded, tensors: Tensors) -> Tensors:
    """Softmax attention of each sequence in float64."""
    starts = {"q_starts": tensors["starts"], "k_starts": tensors["starts"], "sinks": None}
    return flash.reference(case.as_attention, {**tensors, **starts})


def launch(case: Expanded, tensors: Tensors) -> Tensors:
    """The Triton kernel."""
    return {"out": mla_prefill(**tensors, tiles=case.tiles)}


def useful(case: Expanded) -> Cost:
    """The component's Cost."""
    fmt = TYPES[case.dtype].format
    core = ExpandedAttention(case.N, case.N, case.width, value_dim=case.V, kv=fmt, activation=fmt, cached=False)
    return core.cost(Ragged(tuple(Work(1, length, 0) for length in case.lengths)))


def expected(case: Expanded, tensors: Tensors) -> Expected:
    """The traffic of ``flash_attention``, whose keys and values are activations here; one table of starts for both."""
    cost, plain = useful(case), flash.expected(case.as_attention, tensors)
    launched = plain.kernels["flash_attention_kernel"]
    moved = {
        name: Moved("activations", one.read, one.written, one.requested) if one.stream == "state" else one
        for name, one in launched.moved.items()
        if name != "k_starts"
    }
    moved["q_starts"] = Moved("", read=moved["q_starts"].read, requested=2 * moved["q_starts"].loads)
    kernels = {"flash_attention_kernel": Launch(launched.programs, moved)}
    return Expected(cost, kernels, plain.dot, plain.executed, plain.needed)


def library(case: Expanded, tensors: Tensors) -> Any:
    """torch's scaled_dot_product_attention."""
    return flash.library(case.as_attention, tensors)


SMALL = Tiles(32, 16)
CASES = (
    Expanded("ragged", "bf16", (37, 5, 20), 2, 96, 64, SMALL),
    Expanded("deepseek-widths", "bf16", (21,), 3, 192, 128, SMALL),
    Expanded("half", "fp16", (9, 33), 2, 48, 32, SMALL),
    Expanded("single", "fp32", (26, 1), 1, 24, 16, SMALL),
)
BUILDS = (
    Build(
        Expanded("deepseek", "bf16", (4096,) * 4, 128, 192, 128), {"flash_attention_kernel": "HGMMA"}, targets=EVERYWHERE
    ),
)  # fmt: skip
MEASURED = (Expanded("deepseek-4k", "bf16", (4096,) * 2, 128, 192, 128),)
SPEC = Spec(
    "mla_prefill", "ExpandedAttention", CASES, inputs, reference, launch, expected, tolerance(), BUILDS, MEASURED, library
)  # fmt: skip
