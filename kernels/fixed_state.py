"""What kernels with a state of fixed size share: ragged rows, states in slots, activations of gates and rates.

Rows of all sequences lie behind each other; ``starts [B + 1]`` says where each begins, and the end. States of all running
sequences live in one tensor ``[slots, ...]``; ``slots [B]`` says which one a sequence owns. A kernel reads the state that
the tokens before left there (zeros for a new sequence) and leaves its own, in place, so that a prefill may be cut anywhere
and handed over to decode.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import accumulate

import torch
import triton
import triton.language as tl

from roofline.kernels.arguments import FLOATING, INT32, check, check_distinct, check_starts
from roofline.kernels.spec import Moved, Tensors, Tolerance
from roofline.kernels.types import Source
from roofline.work import Ragged, Work

NORM_EPSILON = 1e-6
"""Added to the sum of squares of a query or a key before its root."""
STEP_TOLERANCE = {
    "bf16": Tolerance(3e-3, "computed in fp32; outputs, and here and there states, rounded once to bf16"),
    "fp16": Tolerance(4e-4, "computed in fp32, outputs rounded once to fp16"),
    "fp32": Tolerance(1e-6, "fp32 sums in another order"),
}
"""How far a recurrence token by token may be from float64."""


@triton.jit
def softplus(x):
    """``log(1 + exp(x))``, which is x itself where exp(x) is all that counts."""
    return tl.where(x > 20.0, x, tl.log(1.0 + tl.exp(tl.minimum(x, 20.0))))


@triton.jit
def sigmoid(x):
    """``1 / (1 + exp(-x))``."""
    return 1.0 / (1.0 + tl.exp(-x))


def check_states(
    state: torch.Tensor, sizes: tuple[int, ...], slots: torch.Tensor, starts: torch.Tensor, longest: int | None, x: torch.Tensor
) -> None:
    """Refuses states, slots and starts that do not fit rows ``x [tokens, ...]``. Raises InputError."""
    sequences = check_starts("starts", starts, len(x), longest, x)
    check("state", state, (None, *sizes), FLOATING, x)
    check("slots", slots, (sequences,), INT32, x)
    check_distinct("slots", slots, len(state))


def batch(lengths: tuple[int, ...]) -> Ragged:
    """New tokens per sequence as the model's work."""
    return Ragged(tuple(Work(1, length) for length in lengths))


def tables(lengths: tuple[int, ...], source: Source) -> Tensors:
    """``starts`` and ``slots`` of a batch, one slot more than there are sequences, in random order."""
    return {
        "starts": source.integers([0, *accumulate(lengths)]),
        "slots": source.permutation(len(lengths) + 1)[: len(lengths)],
    }


def moved_tables(lengths: tuple[int, ...], programs: int, live: int) -> dict[str, Moved]:
    """Traffic of the tables: every program reads where its sequence begins and ends, those with work its slot too."""
    B = len(lengths)
    return {
        "starts": Moved("", read=4 * (B + 1), requested=8 * programs),
        "slots": Moved("", read=4 * B, requested=4 * live),
    }


def sequences(lengths: tuple[int, ...], tensors: Tensors) -> Iterator[tuple[slice, int]]:
    """(rows, slot) of each sequence."""
    starts = [0, *accumulate(lengths)]
    for index, slot in enumerate(tensors["slots"].tolist()):
        yield slice(starts[index], starts[index + 1]), slot


def normalised(vectors: torch.Tensor) -> torch.Tensor:
    """Vectors along the last dimension, divided by their lengths."""
    return vectors / torch.sqrt(vectors.square().sum(-1, keepdim=True) + NORM_EPSILON)
