"""The committed list of rows that leave (``bad_rows.toml``): rules and reasons are data, this file only applies them."""

from __future__ import annotations

import tomllib
from collections.abc import Iterable
from dataclasses import dataclass
from fnmatch import fnmatch
from functools import cache
from pathlib import Path
from typing import Any

from roofline.errors import InputError
from roofline.validate.silicon.frame import Frame

LIST = Path(__file__).parents[1] / "bad_rows.toml"
WORK = ["num_tokens", "hidden_size", "inter_size", "topk", "num_experts", "distribution"]


@dataclass(frozen=True)
class Group:
    """One entry of the list; see the file for the meaning of its fields."""

    cls: str
    kernel: str
    gpu: str
    dtype: str
    rule: str
    where: str
    factor: float
    share: float
    reason: str

    def matches(self, frame: Frame) -> bool:
        """Whether the entry is about this family."""
        pairs = ((frame.cls, self.cls), (frame.kernel, self.kernel), (frame.gpu, self.gpu), (frame.dtype, self.dtype))
        return all(fnmatch(value, pattern) for value, pattern in pairs)

    def rows(self, frame: Frame) -> Any:
        """Mask of the rows that it picks."""
        import numpy

        if self.rule == "all":
            return numpy.ones(len(frame), dtype=bool)
        keys = frame.rows.assign(latency=frame.seconds * 1e3)
        if self.rule == "where":
            return keys.eval(self.where).to_numpy(dtype=bool)
        if self.rule == "monotonic":
            return slower_than_double(keys, self.factor)
        if self.rule == "parts":
            return slower_than_parts(keys, self.factor)
        raise InputError(f"bad_rows.toml: rule {self.rule!r} is unknown; use where, monotonic, parts or all")


RANKS = ["moe_tp_size", "moe_ep_size"]
"""Numbers of ranks that share the width and the experts."""
MOST_RANKS, MOST_TOKENS = 2**12, 2**24
"""Ranks, and tokens, of which no layer has as many: a layer is one whole number by them."""


def _slower(keys: Any, factor: float, rivals: Iterable[tuple[int, Any]]) -> Any:
    """Rows slower by ``factor`` than some rivals of theirs that were measured.

    Rivals are other layers, a frame with one for each row, and how many of them, one after the other, do at least its work.
    """
    import numpy

    kind = keys.groupby(WORK[1:], observed=True).ngroup()

    def numbered(layers: Any) -> Any:
        number = kind * MOST_TOKENS + layers[WORK[0]]
        for ranks in RANKS:
            number = number * MOST_RANKS + layers[ranks]
        return number

    latency = keys["latency"].groupby(numbered(keys)).mean()

    def measured(layers: Any) -> Any:
        return numbered(layers).map(latency).to_numpy()

    mine = measured(keys)
    return numpy.logical_or.reduce([mine > factor * runs * measured(layers) for runs, layers in rivals])


def slower_than_double(keys: Any, factor: float) -> Any:
    """Rows slower by ``factor`` than the same layer with more work: on half the ranks, or with the next number of tokens."""
    tokens = sorted(set(keys[WORK[0]].tolist()))
    following = dict(zip(tokens, [*tokens[1:], 0], strict=True))
    halves = (keys.assign(**{ranks: keys[ranks] // 2}) for ranks in RANKS)
    return _slower(keys, factor, ((1, layers) for layers in (*halves, keys.assign(num_tokens=keys["num_tokens"].map(following)))))


def slower_than_parts(keys: Any, factor: float) -> Any:
    """Rows slower by ``factor`` than the same layer cut into 2, 4 or 8 narrower ones that run one after the other."""
    return _slower(keys, factor, ((cut, keys.assign(moe_tp_size=cut * keys["moe_tp_size"])) for cut in (2, 4, 8)))


@cache
def entries(kind: str = "group") -> tuple[Group, ...]:
    """The entries of a kind: "group" (rows that leave) or "explained" (rows faster than the bound that stay)."""
    data = tomllib.loads(LIST.read_text(encoding="utf-8"))
    return tuple(
        Group(
            entry.get("class", "*"), entry.get("kernel", "*"), entry.get("gpu", "*"), entry.get("dtype", "*"),
            entry.get("rule", "all"), entry.get("where", ""), entry.get("factor", 0.0), entry.get("share", 0.0), entry["reason"],
        )
        for entry in data.get(kind, [])
    )  # fmt: skip


def dropped(frame: Frame) -> tuple[Any, tuple[str, ...]]:
    """(mask of the rows that leave, reasons)."""
    import numpy

    mask, reasons = numpy.zeros(len(frame), dtype=bool), []
    for group in entries():
        if group.matches(frame):
            picked = group.rows(frame)
            if picked.any():
                mask |= picked
                reasons.append(group.reason)
    return mask, tuple(reasons)


def explanation(frame: Frame) -> str:
    """Why rows of this family may be faster than the bound, "" where there is no reason."""
    return next((group.reason for group in entries("explained") if group.matches(frame)), "")
