"""Acceptance of drafted tokens: how many survive a verification, and what that is worth.

A cheap draft proposes gamma tokens one after another; the target scores all of them, and one more position, in a single
pass, and keeps the longest prefix that passes modified rejection sampling plus one token of its own. The output has the
target's distribution exactly. Every formula takes an acceptance rate alpha per token, the same for each and independent
of the others, as the paper assumes.
Source: Leviathan, Kalman, Matias 2022 (arXiv 2211.17192); its M_p is the target, its M_q the draft.

alpha may be an int, Fraction, float, float64 array or symbol; the draft length gamma is an int.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from roofline.errors import InputError
from roofline.numeric import maximum, minimum, ratio, reading

LONGEST_DRAFT = 1024
"""Draft lengths beyond this are not searched."""


def check_rate(alpha: Any, field: str = "alpha") -> None:
    """Raises InputError where a plain number is not in [0, 1]."""
    if reading(alpha) is None and not 0 <= alpha <= 1:
        raise InputError(f"{field}: {float(alpha):g} is not a rate; give a number from 0 to 1")


def check_length(gamma: Any, field: str = "gamma") -> None:
    """Raises InputError where a draft length is not a whole number from 0 to ``LONGEST_DRAFT``."""
    if type(gamma) is not int or not 0 <= gamma <= LONGEST_DRAFT:
        raise InputError(f"{field}: {gamma!r} is not a draft length; give a whole number from 0 to {LONGEST_DRAFT}")


def check_cost(cost: Any, field: str = "draft cost") -> None:
    """Raises InputError where a plain relative cost is negative or not finite."""
    if reading(cost) is None and not 0 <= cost < float("inf"):
        raise InputError(f"{field}: {cost!r} is not a cost; give the draft's time over the target's, 0 or more")


def expected_tokens(alpha: Any, gamma: int) -> Any:
    """Expected tokens of one round: ``(1 - alpha^(gamma+1)) / (1 - alpha)``, summed as 1 + alpha + ... + alpha^gamma.

    The sum needs no limit at alpha = 1, where every draft survives and a round gives gamma + 1 tokens.

    >>> expected_tokens(0.5, 1), expected_tokens(1, 4)
    (1.5, 5)
    """
    check_rate(alpha)
    check_length(gamma)
    total: Any = 1
    for _ in range(gamma):
        total = 1 + alpha * total
    return total


def speedup(alpha: Any, gamma: int, cost: Any) -> Any:
    """Expected speed-up ``E[tokens] / (gamma c + 1)`` where verifying takes no longer than one step of the target.

    Args:
        cost: c, a draft step's time over a target step's.
    """
    check_cost(cost)
    return ratio(expected_tokens(alpha, gamma), gamma * cost + 1)


def operations_factor(alpha: Any, gamma: int, cost: Any) -> Any:
    """Arithmetic per output token over that of plain decoding: ``(gamma c + gamma + 1) / E[tokens]``.

    Args:
        cost: FLOPs of a draft token over those of a target token.
    """
    check_cost(cost)
    return ratio(gamma * cost + gamma + 1, expected_tokens(alpha, gamma))


def oracle_tokens(alpha: Any) -> Any:
    """Tokens per round ``1 / (1 - alpha)`` where an oracle stops each draft right before its first rejection.

    No fixed draft length reaches it. Raises InputError at alpha = 1, where it is infinite.
    """
    check_rate(alpha)
    if reading(alpha) is None and alpha == 1:
        raise InputError("alpha: at 1 every draft survives and the oracle never stops; give a rate below 1")
    return ratio(1, 1 - alpha)


def pays(alpha: Any, cost: Any) -> bool:
    """Whether any draft length helps: exactly where alpha exceeds c, and then by ``(1 + alpha) / (1 + c)`` at least."""
    check_rate(alpha)
    check_cost(cost)
    return bool(alpha > cost)


def best_length(alpha: Any, cost: Any) -> tuple[int, Any]:
    """(gamma, speed-up) of the fastest draft length; (0, 1) where drafting does not pay.

    The speed-up rises to one maximum and falls from there: tokens grow ever more slowly, the round's time linearly.
    ``LONGEST_DRAFT`` ends the search where a draft costs nothing.
    """
    check_rate(alpha)
    check_cost(cost)
    best: tuple[int, Any] = (0, 1)
    tokens: Any = 1
    for gamma in range(1, LONGEST_DRAFT + 1):
        tokens = 1 + alpha * tokens
        found = ratio(tokens, gamma * cost + 1)
        if found <= best[1]:
            break
        best = (gamma, found)
    return best


def acceptance_rate(target: Sequence[Any], draft: Sequence[Any]) -> Any:
    """Chance that a token drawn from ``draft`` is kept: ``sum min(p, q)``, one minus their total variation distance."""
    return sum(minimum(p, q) for p, q in zip(target, draft, strict=True))


def residual(target: Sequence[Any], draft: Sequence[Any]) -> list[Any]:
    """Distribution that replaces a rejected token: ``max(0, p - q)``, normalised; the target itself where p = q."""
    excess = [maximum(0, p - q) for p, q in zip(target, draft, strict=True)]
    total = sum(excess)
    return list(target) if total == 0 else [ratio(part, total) for part in excess]


def output_distribution(target: Sequence[Any], draft: Sequence[Any]) -> list[Any]:
    """Distribution of a token after modified rejection sampling: kept drafts plus replaced ones. It is ``target`` exactly."""
    rejected = 1 - acceptance_rate(target, draft)
    return [minimum(p, q) + rejected * r for p, q, r in zip(target, draft, residual(target, draft), strict=True)]
