"""Rounds: what drafting and verifying take on an accelerator, and which draft length pays at a batch and a context.

Verification is one step of the target over T = gamma + 1 tokens per sequence, so its time is the model's own step and
not assumed to equal a decode step's: at a small batch the weights' traffic hides the extra tokens, at a large one they
cost what they are. Acceptance is counted per sequence, whatever the batch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from roofline.accelerator import Accelerator
from roofline.components.base import Component
from roofline.components.linear import Embedding, Linear
from roofline.components.mixing import rms_norm
from roofline.errors import InputError
from roofline.model import Model
from roofline.speculative.acceptance import LONGEST_DRAFT, check_cost, check_length, check_rate, expected_tokens
from roofline.speculative.heads import shared, table_of
from roofline.speculative.trees import Accuracies, Tree
from roofline.timing import time
from roofline.work import Work

MOST_UNLIKE = 128
"""Entries by which the vocabularies of target and draft may differ: padding, and special tokens (llama.cpp
common/speculative.cpp admits as many)."""
LARGEST_BATCH = 2**16


@dataclass(frozen=True)
class Seconds:
    """A duration under perfect overlap (``bound``) and without any (``serial``)."""

    bound: float
    serial: float

    def __add__(self, other: Seconds) -> Seconds:
        return Seconds(self.bound + other.bound, self.serial + other.serial)

    def times(self, factor: Any) -> Seconds:
        """Both times a factor."""
        return Seconds(self.bound * float(factor), self.serial * float(factor))


def multi_token_module(model: Model) -> Model:
    """The model's own draft of one layer: norms, a projection of hidden state and embedding, the last layer, the head.

    The shape of DeepSeek-V3's multi-token prediction (arXiv 2412.19437, section 2.2) and, but for the norms, of an EAGLE
    head (arXiv 2401.15077). Embedding and head are the target's, so they are read and not stored again.
    """
    table = table_of(model)
    width = table.width
    join: tuple[Component, ...] = (
        rms_norm(width, name="draft.embedding_norm"),
        rms_norm(width, name="draft.hidden_norm"),
        Linear(2 * width, width, activation=table.activation, name="draft.join"),
    )
    assumes = ("draft: one layer like the target's last, behind a projection of hidden state and embedding",)
    front, head = shared(model.embedding), shared(model.head)
    return Model(f"{model.name} MTP layer", (*front, *join), model.layers[-1:], model.final, head, assumes=assumes)


@dataclass(frozen=True)
class Round:
    """One round of drafting and verifying for a batch.

    Attributes:
        gamma: tokens drafted for each sequence (nodes of the tree).
        tokens: expected tokens that each sequence gains.
        draft, verify, plain: the draft's passes, the target's pass over the drafts, the target's decode step without them.
    """

    gamma: int
    tokens: float
    draft: Seconds
    verify: Seconds
    plain: Seconds

    @property
    def round(self) -> Seconds:
        """Drafting and verifying, one after the other."""
        return self.draft + self.verify

    @property
    def speedup(self) -> float:
        """Speed-up over plain decoding, both at their bounds."""
        return self.tokens * self.plain.bound / self.round.bound

    @property
    def speedup_serial(self) -> float:
        """Speed-up over plain decoding, both without overlap."""
        return self.tokens * self.plain.serial / self.round.serial

    @property
    def tpot(self) -> Seconds:
        """Expected time per output token."""
        return self.round.times(1 / self.tokens)


@dataclass(frozen=True)
class Speculation:
    """A target with a draft on one accelerator.

    Attributes:
        target, accelerator: what verifies, where.
        draft: the draft model; None where ``draft_cost`` says what a draft step takes.
        draft_cost: a draft step's time over the target's decode step.
        guesses: tokens that one pass of the draft guesses at once (Medusa heads); None for a pass per token.

    Raises InputError unless exactly one of ``draft`` and ``draft_cost`` is given, and for a draft of another vocabulary.
    """

    target: Model
    accelerator: Accelerator
    draft: Model | None = None
    draft_cost: Any = None
    guesses: int | None = None
    _times: dict[Any, Seconds] = field(default_factory=dict, init=False, compare=False, repr=False)

    def __post_init__(self) -> None:
        if (self.draft is None) == (self.draft_cost is None):
            raise InputError("draft: give a draft model, or the cost of its step relative to the target's, and not both")
        if self.draft_cost is not None:
            check_cost(self.draft_cost)
        if self.draft is not None:
            check_vocabulary(self.target, self.draft)

    def _step(self, model: Model, batch: int, tokens: int, context: int) -> Seconds:
        key = (model is self.target, batch, tokens, context)
        if key not in self._times:
            timing = time(model.cost(Work(batch, tokens, context, all_logits=True)), self.accelerator)
            self._times[key] = Seconds(float(timing.bound), float(timing.serial))
        return self._times[key]

    def plain(self, batch: int, context: int) -> Seconds:
        """A decode step of the target without speculation."""
        return self._step(self.target, batch, 1, context)

    def drafting(self, batch: int, context: int, widths: list[int]) -> Seconds:
        """The draft's passes, one for each depth over so many tokens per sequence.

        Raises InputError for more depths than the draft guesses at once.
        """
        if self.guesses is not None and len(widths) > self.guesses:
            raise InputError(f"draft: {self.guesses} heads guess {self.guesses} tokens ahead, not {len(widths)}; give more heads")
        total = Seconds(0.0, 0.0)
        for depth, width in enumerate(widths):
            total = total + self._pass(batch, context, depth, width)
        return total

    def _pass(self, batch: int, context: int, depth: int, width: int) -> Seconds:
        """What the draft takes for the guesses at one depth; heads that guess every depth at once ran for the first."""
        if self.guesses is not None and depth:
            return Seconds(0.0, 0.0)
        if self.draft is None:
            return self.plain(batch, context).times(self.draft_cost)
        return self._step(self.draft, batch, 1 if self.guesses is not None else width, context + depth)

    def chain(self, batch: int, context: int, alpha: Any, gamma: int) -> Round:
        """A round with ``gamma`` drafts one after another, each accepted with chance alpha."""
        check_rate(alpha)
        check_length(gamma)
        plain = self.plain(batch, context)
        verify = self._step(self.target, batch, gamma + 1, context)
        draft = self.drafting(batch, context, [1] * gamma)
        return Round(gamma, float(expected_tokens(alpha, gamma)), draft, verify, plain)

    def tree(self, batch: int, context: int, accuracies: Accuracies, tree: Tree) -> Round:
        """A round with a draft tree; all nodes are verified in one pass."""
        verify = self._step(self.target, batch, tree.tokens, context)
        draft = self.drafting(batch, context, tree.widths())
        tokens = float(tree.expected_tokens(accuracies))
        return Round(len(tree.nodes), tokens, draft, verify, self.plain(batch, context))

    def _rounds(self, batch: int, context: int, alpha: Any, longest: int) -> Iterator[Round]:
        """Rounds by draft length from 0 on, as far as a longer one may still be faster than every one so far.

        No round gains more than ``1 / (1 - alpha)`` tokens, and none is shorter than one of fewer drafts.
        """
        check_rate(alpha)
        plain = self.plain(batch, context)
        most = 1 / (1 - float(alpha)) if alpha < 1 else float("inf")
        drafts, tokens, fastest = Seconds(0.0, 0.0), 1.0, 1.0
        deepest = longest if self.guesses is None else min(longest, self.guesses)
        for gamma in range(deepest + 1):
            if gamma:
                drafts = drafts + self._pass(batch, context, gamma - 1, 1)
                tokens = 1 + float(alpha) * tokens
            found = Round(gamma, tokens, drafts, self._step(self.target, batch, gamma + 1, context), plain)
            yield found
            fastest = max(fastest, found.speedup)
            if most * plain.bound <= fastest * found.round.bound:
                return

    def best(self, batch: int, context: int, alpha: Any, longest: int = LONGEST_DRAFT) -> Round:
        """The round of the fastest draft length up to ``longest``; gamma 0, plain decoding, where none pays.

        Where every draft survives (alpha 1) and drafts are cheap, the longest that is searched may be the fastest.
        """
        return max(self._rounds(batch, context, alpha, longest), key=lambda r: r.speedup)

    def last_paying_batch(self, context: int, alpha: Any, longest: int = LONGEST_DRAFT) -> int | None:
        """The largest batch at which some draft length still pays; 0 where none does, None where it always does.

        Doubles the batch up to ``LARGEST_BATCH`` and then halves in on the last change.
        """

        def paying(batch: int) -> bool:
            return any(found.speedup > 1 for found in self._rounds(batch, context, alpha, longest))

        return _last(paying, LARGEST_BATCH)


def vocabulary(model: Model) -> Any:
    """Entries of a model's embedding table, None without one."""
    return next((c.vocabulary for c in model.embedding if isinstance(c, Embedding)), None)


def check_vocabulary(target: Model, draft: Model) -> None:
    """Raises InputError where drafted tokens cannot be the target's: their vocabularies differ by more than padding."""
    ours, theirs = vocabulary(target), vocabulary(draft)
    if ours is not None and theirs is not None and abs(ours - theirs) > MOST_UNLIKE:
        raise InputError(
            f"draft: {draft.name} has a vocabulary of {theirs:,} and {target.name} one of {ours:,}; drafted tokens must be the "
            "target's own, so take a draft of the same family"
        )


def _last(holds: Callable[[int], bool], limit: int) -> int | None:
    tried = {batch: holds(batch) for batch in _doublings(limit)}
    if tried[max(tried)]:
        return None
    low = max((batch for batch, yes in tried.items() if yes), default=0)
    high = 2 * low
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if holds(middle) else (low, middle)
    return low


def _doublings(limit: int) -> Iterator[int]:
    batch = 1
    while batch <= limit:
        yield batch
        batch *= 2
