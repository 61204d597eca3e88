"""Work: the one shape of every workload, (B sequences, T new tokens each, S tokens already cached).

Decode is T = 1; a prefill has S = 0; a chunked prefill, speculative verification (T = k + 1), a denoising step of a
diffusion model (T = block) and a prefix-cache hit (S = prefix) are other points of the same function. A ragged batch is
a tuple of uniform groups: attention is paid per group, the linear layers once over all tokens (selective batching).
"""

from __future__ import annotations

import operator
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from roofline.errors import InputError

LARGEST = 10**12


def _size(value: Any, name: str, least: int) -> Any:
    """A size as formulas take it: an int in range, a float64 array, or a sympy expression as it is."""
    if type(value) is int:
        if not least <= value <= LARGEST:
            raise InputError(f"{name}: {value} is out of range; give a whole number from {least} to {LARGEST:.0e}")
        return value
    numpy, sympy = sys.modules.get("numpy"), sys.modules.get("sympy")
    if sympy is not None and isinstance(value, sympy.Basic):
        return value
    if numpy is not None and isinstance(value, numpy.ndarray):
        array = value.astype(numpy.float64)
        if array.size and not (array == numpy.floor(array)).all():
            raise InputError(f"{name}: the array holds a value that is not a whole number")
        if array.size and not (array.min() >= least and array.max() <= LARGEST):
            raise InputError(f"{name}: the array leaves the range from {least} to {LARGEST:.0e}, or holds NaN")
        return array
    try:
        return _size(operator.index(value), name, least)
    except TypeError:
        raise InputError(f"{name}: {value!r} is not a whole number; give one from {least} on") from None


@dataclass(frozen=True)
class Work:
    """A uniform batch.

    Attributes:
        B: sequences.
        T: new tokens per sequence in this step.
        S: tokens already cached per sequence.
        all_logits: whether the head runs on every new token (verification, perplexity) or, as in serving, on the last
            new token of each sequence only.
        source: tokens of a second sequence that cross-attention looks at (encoder frames, image tokens), per sequence.

    Each may be an int, a float64 array or a symbol. Raises InputError naming the field that is out of range.
    """

    B: Any = 1
    T: Any = 1
    S: Any = 0
    all_logits: bool = False
    source: Any = 0
    tokens: Any = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        values = self.__dict__
        values["B"] = _size(self.B, "batch", 1)
        values["T"] = _size(self.T, "new tokens", 1)
        values["S"] = _size(self.S, "cached tokens", 0)
        values["source"] = _size(self.source, "source tokens", 0)
        values["tokens"] = self.B * self.T

    def once(self, count: Callable[..., Any], *options: Any) -> Any:
        """``count(*options, T, S)``, computed once for this work: several components ask for the same pairs and keys.

        ``count`` and ``options`` must be hashable, and the count a pure function.
        """
        known = self.__dict__.setdefault("_counts", {})
        key = (count, *options)
        if key not in known:
            known[key] = count(*options, self.T, self.S)
        return known[key]

    @property
    def sequences(self) -> Any:
        """Sequences in the batch."""
        return self.B

    @property
    def logit_rows(self) -> Any:
        """Rows for which the head computes logits."""
        return self.tokens if self.all_logits else self.B

    @property
    def groups(self) -> tuple[Work, ...]:
        """The uniform groups of the batch: itself."""
        return (self,)


@dataclass(frozen=True)
class Ragged:
    """A batch of several uniform groups that one step runs together.

    >>> batch = Ragged((Work(1, 3), Work(1, 9), Work(1, 5)))
    >>> batch.tokens, batch.sequences
    (17, 3)
    """

    groups: tuple[Work, ...]

    def __post_init__(self) -> None:
        if not self.groups:
            raise InputError("groups: a ragged batch needs at least one group")

    @property
    def tokens(self) -> Any:
        """New tokens of all groups: the rows of every linear layer."""
        return sum(group.tokens for group in self.groups)

    @property
    def sequences(self) -> Any:
        return sum(group.B for group in self.groups)

    @property
    def logit_rows(self) -> Any:
        return sum(group.logit_rows for group in self.groups)


Batch = Work | Ragged


def decode(batch: Any, context: Any) -> Work:
    """One decode step: one new token for each of ``batch`` sequences that have ``context`` tokens cached."""
    return Work(batch, 1, context)


def prefill(batch: Any, tokens: Any, cached: Any = 0) -> Work:
    """A prefill of ``tokens`` new tokens per sequence behind ``cached`` ones (a chunk, or a prefix-cache hit)."""
    return Work(batch, tokens, cached)
