"""How an engine lays a rank's state out in pages, and how many tokens a pool of memory holds.

Layers with one kind of state form groups of equal numbers of layers that share pages of one size, so that a page of one
group can be reused by another. A request holds, in each group of growing caches, a page per ``page_tokens`` tokens (no
more than a window and one batch need), and in each group of recurrent layers a fixed number of pages. An attention page
of a hybrid model is stretched until a recurrent state fits into it.
Source: vllm/v1/core/kv_cache_utils.py (groups, capacity in tokens), vllm/model_executor/models/config.py (page size of
hybrid models).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from fractions import Fraction
from math import ceil
from typing import Any

from roofline.components.base import State
from roofline.engines.profile import Profile
from roofline.errors import UnsupportedModel

UNEVEN = Fraction(3, 2)
"""Up to this ratio between the numbers of layers of two kinds, the smaller kind is padded to the larger."""


@dataclass(frozen=True)
class Kind:
    """Layers whose state is alike.

    Attributes:
        layers: how many. token_bytes: per token and layer, 0 for a recurrent state. fixed_bytes: per sequence and layer.
        window: tokens kept, None for all.
    """

    layers: int
    token_bytes: Any
    fixed_bytes: Any
    window: int | None


@dataclass(frozen=True)
class Layout:
    """Pages of one rank.

    Attributes:
        page_tokens: tokens of an attention page. page_bytes: of one layer's page.
        group_layers: layers of a group, padding included. groups: (kind, number of groups).
        pinned: pages of a recurrent group that a request holds.
        separate: every kind of layer has a pool of its own; recurrent states lie outside, and pages differ in size.
    """

    page_tokens: int
    page_bytes: Any
    group_layers: int
    groups: tuple[tuple[Kind, int], ...]
    pinned: int
    separate: bool = False

    @property
    def uniform(self) -> bool:
        """Whether every layer keeps every token: the capacity in tokens then depends on no request's length."""
        return all(kind.window is None and kind.token_bytes for kind, _ in self.groups)

    @property
    def row_bytes(self) -> Any:
        """Bytes of one token over all growing layers, below any window."""
        return sum(kind.layers * kind.token_bytes for kind, _ in self.groups)

    @property
    def _block_bytes(self) -> Any:
        """Bytes of a page over all layers of a group, or over all layers where kinds have pools of their own."""
        return self.page_tokens * self.row_bytes if self.separate else self.page_bytes * self.group_layers

    def blocks(self, pool: Any) -> int:
        """Pages of a group that a pool of bytes holds."""
        return int(pool // self._block_bytes) if pool > 0 else 0

    def _pages(self, kind: Kind, tokens: int, batched_tokens: int) -> int:
        """Pages of one layer that a request of so many tokens holds; a window slides over one more than it fills."""
        if not kind.token_bytes:
            return self.pinned
        kept = tokens if kind.window is None else min(tokens, kind.window - 1 + batched_tokens)
        return ceil(Fraction(kept, self.page_tokens)) + (0 if kept == tokens else 1)

    def blocks_per_request(self, tokens: int, batched_tokens: int) -> int:
        """Pages that one request of so many tokens holds over all groups."""
        return sum(number * self._pages(kind, tokens, batched_tokens) for kind, number in self.groups)

    def request_bytes(self, tokens: int, batched_tokens: int) -> Any:
        """Bytes that one request of so many tokens takes from the pool."""
        if self.separate:
            return sum(
                self._pages(kind, tokens, batched_tokens) * self.page_tokens * kind.token_bytes * kind.layers
                for kind, _ in self.groups
            )
        return self.blocks_per_request(tokens, batched_tokens) * self._block_bytes

    def concurrency(self, pool: Any, max_model_len: int, batched_tokens: int) -> Fraction:
        """Requests of ``max_model_len`` tokens that fit at once, as the log prints it."""
        if self.uniform:
            return Fraction(self.tokens(pool, max_model_len, batched_tokens), max_model_len)
        if self.separate:
            return max(Fraction(0), Fraction(pool) / Fraction(self.request_bytes(max_model_len, batched_tokens)))
        return Fraction(self.blocks(pool), self.blocks_per_request(max_model_len, batched_tokens))

    def tokens(self, pool: Any, max_model_len: int, batched_tokens: int) -> int:
        """Tokens as the start-up log counts them: pages times the tokens of one, or, where a request's pages do not grow
        evenly with its length, as many as requests of ``max_model_len`` hold together.
        """
        if self.uniform:
            groups = 1 if self.separate else sum(number for _, number in self.groups)
            return self.blocks(pool) // groups * self.page_tokens
        return int(self.concurrency(pool, max_model_len, batched_tokens) * max_model_len)

    def longest_request(self, pool: Any, batched_tokens: int, limit: int) -> int:
        """The longest request, in tokens up to ``limit``, that the pool holds."""
        low, high = 0, limit
        while low < high:
            middle = (low + high + 1) // 2
            low, high = (middle, high) if self.request_bytes(middle, batched_tokens) <= pool else (low, middle - 1)
        return low


def kinds(state: Iterable[tuple[int, State]]) -> list[Kind]:
    """The kinds of layers of a model's state, larger numbers first. Raises UnsupportedModel for compressed caches."""
    found: dict[tuple[Any, Any, Any], int] = {}
    for number, pieces in state:
        growing = [piece for piece in pieces if piece.grows_with == "token"]
        fixed = [piece for piece in pieces if piece.grows_with == "nothing"]
        if any(piece.every != 1 for piece in growing) or any(piece.grows_with == "source" for piece in pieces):
            raise UnsupportedModel("engine: pages of compressed or encoder caches are not modelled; use fit without --engine")
        windows = {piece.window for piece in growing}
        if len(windows) > 1:
            raise UnsupportedModel("engine: pages of layers with several windows each are not modelled; use fit without --engine")
        token = sum(piece.bytes(1) for piece in growing)
        rest = sum(piece.bytes(0) for piece in fixed)
        if token:
            key = (token, 0, next(iter(windows)))
            found[key] = found.get(key, 0) + number
        if rest:
            key = (0, rest, None)
            found[key] = found.get(key, 0) + number
    return [Kind(number, token, rest, window) for (token, rest, window), number in sorted(found.items(), key=lambda kv: -kv[1])]


def _group_layers(sizes: list[int]) -> int:
    least, most = min(sizes), max(sizes)
    return most if most < UNEVEN * least else least


def layout(state: Iterable[tuple[int, State]], profile: Profile, page_tokens: int | None = None) -> Layout | None:
    """The pages of a rank's state; None for a model that keeps none."""
    found = kinds(state)
    if not found:
        return None
    growing = [kind for kind in found if kind.token_bytes]
    recurrent = [kind for kind in found if not kind.token_bytes]
    page = page_tokens or profile.number("page_tokens")
    if profile.separate_state:
        return Layout(page, 0, 1, tuple((kind, 1) for kind in growing), 0, True) if growing else None
    widest = max((kind.token_bytes for kind in growing), default=0)
    if recurrent and growing:
        step = profile.number("page_alignment")
        needed = ceil(Fraction(max(kind.fixed_bytes for kind in recurrent)) / widest)
        page = max(page, ceil(Fraction(needed, step)) * step)
    page_bytes = max([page * widest, *(kind.fixed_bytes for kind in recurrent)])
    layers = _group_layers([kind.layers for kind in found])
    groups = tuple((kind, ceil(Fraction(kind.layers, layers))) for kind in found)
    if len(found) == 1:
        layers, groups = found[0].layers, ((found[0], 1),)
    return Layout(page, page_bytes, layers, groups, profile.number("pinned_states"))
