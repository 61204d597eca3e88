"""The k best of each row of scores, without a sort: what a sparse attention attends to.

The k-th best score is found digit by digit: four passes over the row, each a histogram of eight bits of an integer that
orders as the scores do, among the scores that agree with the digits found so far. A fifth pass writes the positions of all
better scores and of the first that tie with it, ascending; k scores or fewer are all selected. One program does one row.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl

from roofline.components.latent import Reach
from roofline.components.sparse import TopK
from roofline.kernels import buffers
from roofline.kernels.arguments import INT32, SINGLE, check, check_values, within
from roofline.kernels.sampling import ordered
from roofline.kernels.spec import EVERYWHERE, Build, Case, Expected, Launch, Moved, Spec, Tensors, Tolerance
from roofline.kernels.tiling import power_of_two
from roofline.kernels.types import Source
from roofline.work import Ragged, Work

DIGITS = 4
"""Passes that find the threshold; one more selects."""


@triton.jit
def score_codes(row, start, count, BLOCK: tl.constexpr):
    """A block of scores as unsigned integers of the same order, and where they stand; both zeros are one number."""
    at = start + tl.arange(0, BLOCK)
    value = tl.load(row + at, mask=at < count, other=0.0)
    value = tl.where(value == 0.0, 0.0, value)
    return ordered(value).to(tl.uint32, bitcast=True) ^ 0x80000000, at


@triton.jit
def next_digit(row, count, found, wanted, SHIFT: tl.constexpr, BLOCK: tl.constexpr):
    """Eight more bits of the threshold, and which of the scores that share them is wanted."""
    digit = tl.arange(0, 256)
    tally = tl.zeros((256,), tl.int32)
    for start in range(0, count, BLOCK):
        code, at = score_codes(row, start, count, BLOCK)
        alike = at < count
        if SHIFT < 24:
            alike = alike & ((code >> (SHIFT + 8)) == found)
        tally += tl.histogram(((code >> SHIFT) & 255).to(tl.int32), 256, mask=alike)
    above = tl.sum(tally, 0) - tl.cumsum(tally, 0)
    here = (above < wanted) & (above + tally >= wanted)
    wanted -= tl.sum(tl.where(here, above, 0), 0)
    return found * 256 + tl.sum(tl.where(here, digit, 0), 0).to(tl.uint32), wanted


@triton.jit
def topk_select_kernel(
    scores, lengths, out, longest, T: tl.constexpr, EVERY: tl.constexpr, K: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """One row of scores [B, T, longest]; out is [B, T, K]."""
    query = tl.program_id(0)
    count = (tl.load(lengths + query // T) - T + query % T + 1) // EVERY
    row = scores + query.to(tl.int64) * longest
    wanted = tl.minimum(K, count)
    found = tl.zeros((), tl.uint32)
    found, wanted = next_digit(row, count, found, wanted, 24, BLOCK)
    found, wanted = next_digit(row, count, found, wanted, 16, BLOCK)
    found, wanted = next_digit(row, count, found, wanted, 8, BLOCK)
    found, wanted = next_digit(row, count, found, wanted, 0, BLOCK)
    goal = out + query.to(tl.int64) * K
    written = tl.zeros((), tl.int32)
    tied = tl.zeros((), tl.int32)
    for start in range(0, count, BLOCK):
        code, at = score_codes(row, start, count, BLOCK)
        real = at < count
        ties = (real & (code == found)).to(tl.int32)
        kept = (real & (code > found)) | ((ties > 0) & (tied + tl.cumsum(ties, 0) <= wanted))
        place = written + tl.cumsum(kept.to(tl.int32), 0) - 1
        tl.store(goal + place, at, mask=kept)
        written += tl.sum(kept.to(tl.int32), 0)
        tied += tl.sum(ties, 0)


def topk_select(
    scores: torch.Tensor, lengths: torch.Tensor, k: int, every: int = 1, block: int = 0
) -> torch.Tensor:  # fmt: skip
    """Positions, ascending, of the k best of each row of ``scores [B, T, entries]``: int32 ``[B, T, k]``.

    Row t of a sequence has (length - T + t + 1) // every scores, ``lengths`` being int32 ``[B]`` cached and new tokens; what
    lies behind them is not looked at. With fewer than k, the rest of the result is not set. Of equal scores the first win.
    Raises InputError for arguments that do not fit each other.
    """
    check("scores", scores, (None, None, None), SINGLE)
    B, T, longest = scores.shape
    check("lengths", lengths, (B,), INT32, scores)
    within("k", k, 1)
    within("every", every, 1)
    check_values("lengths", lengths, 0, longest * every + every - 1)
    out = buffers.empty(B, T, k, dtype=torch.int32, device=scores.device)
    if out.numel() and longest:
        block = block or block_for(longest)
        topk_select_kernel[(B * T,)](
            scores, lengths, out, longest, T=T, EVERY=every, K=k, BLOCK=block, num_warps=max(1, min(16, block // 256))
        )  # fmt: skip
    return out


def block_for(entries: int) -> int:
    """Scores of a row that a program looks at together."""
    return int(min(4096, power_of_two(entries, 128)))


@dataclass(frozen=True)
class Choice(Case):
    """k of the scores of T new tokens behind ``cached`` ones; ``step``: scores are rounded to multiples of it, to tie."""

    cached: tuple[int, ...]
    k: int
    T: int = 1
    every: int = 1
    step: float = 0.0
    block: int = 0

    def counts(self, S: int) -> list[int]:
        """Scores of each new token of a sequence."""
        return [(S + token + 1) // self.every for token in range(self.T)]


def inputs(case: Choice, device: str) -> Tensors:
    """Random scores, NaN where a token does not see an entry, and lengths."""
    source, B, lengths = Source(case.name, device), len(case.cached), [S + case.T for S in case.cached]
    scores = source.normal(B, case.T, max(lengths) // case.every, dtype=case.dtype)
    if case.step:
        scores = torch.trunc(scores / case.step) * case.step
    if device != "meta":
        entry = torch.arange(scores.shape[2], device=device)
        counts = torch.tensor([case.counts(S) for S in case.cached], device=device)
        scores = torch.where(entry < counts[:, :, None], scores, float("nan"))
    return {"scores": scores, "lengths": source.integers(lengths)}


def reference(case: Choice, tensors: Tensors) -> Tensors:
    """By a stable sort; the positions of all tokens behind each other."""
    chosen = []
    for index, S in enumerate(case.cached):
        for token, count in enumerate(case.counts(S)):
            row = tensors["scores"][index, token, :count] + 0.0
            best = torch.sort(row, descending=True, stable=True).indices[: case.k]
            chosen.append(best.sort().values.to(torch.int32))
    return {"positions": torch.cat(chosen)}


def timed(case: Choice, tensors: Tensors) -> torch.Tensor:
    """The Triton kernel."""
    return topk_select(**tensors, k=case.k, every=case.every, block=case.block)


def launch(case: Choice, tensors: Tensors) -> Tensors:
    """The Triton kernel; of its result what is set."""
    out = timed(case, tensors)
    rows = [(index, token, count) for index, S in enumerate(case.cached) for token, count in enumerate(case.counts(S))]
    return {"positions": torch.cat([out[index, token, : min(case.k, count)] for index, token, count in rows])}


def expected(case: Choice, tensors: Tensors) -> Expected:
    """Scores once, requested in each of five passes; one position per selected entry."""
    B = len(case.cached)
    cost = TopK(Reach(case.every), Reach(case.every, case.k)).cost(Ragged(tuple(Work(1, case.T, S) for S in case.cached)))
    scores = cost.read["activations"]
    moved = {
        "scores": Moved("activations", read=scores, requested=(DIGITS + 1) * scores),
        "lengths": Moved("", read=4 * B, requested=4 * B * case.T),
        "out": Moved("activations", written=cost.write["activations"]),
    }
    return Expected(cost, {"topk_select_kernel": Launch(B * case.T, moved)})


def library(case: Choice, tensors: Tensors) -> Any:
    """torch.topk, which sorts the result by score, over rows of one length."""
    if case.T > 1 or any(case.cached[0] != S for S in case.cached):
        return None
    scores = tensors["scores"]
    return lambda: torch.topk(scores, min(case.k, scores.shape[2]), dim=2)


CASES = (
    Choice("chosen", "fp32", (150, 3), 40),
    Choice("ragged", "fp32", (0, 331, 70), 45, T=3, block=64),
    Choice("entries", "fp32", (250, 6), 11, T=2, every=4, block=32),
    Choice("ties", "fp32", (300, 99), 17, step=0.5, block=128),
    Choice("all-equal", "fp32", (77,), 9, step=100.0, block=16),
    Choice("everything", "fp32", (12, 30), 64, every=3),
)
TOLERANCE = {"fp32": Tolerance(0.0, "positions are equal one by one")}
BUILDS = (Build(Choice("v3.2", "fp32", (32767,) * 16, 2048), targets=EVERYWHERE),)
MEASURED = (
    Choice("v3.2-32k", "fp32", (32767,) * 64, 2048),
    Choice("v4-128k", "fp32", (131071,) * 64, 1024, every=4),
)
SPEC = Spec(
    "topk_select", "TopK", CASES, inputs, reference, launch, expected, TOLERANCE, BUILDS, MEASURED, library, timed
)  # fmt: skip
