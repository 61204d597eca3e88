"""The blocks of a replica's cache, as requests take and return them.

``Counted`` keeps numbers only: nothing is shared, so which block is whose does not matter. ``Cached`` keeps the real
block tables of ``allocator`` with prefixes that stay after their request and are found by the next one.
"""

from __future__ import annotations

from collections.abc import Hashable

from roofline.errors import InputError
from roofline.paging import POLICIES, power_of_two
from roofline.serving.allocator import Allocator, OutOfBlocks
from roofline.serving.request import Request

UNLIMITED = 10**15


def _ceil(a: int, b: int) -> int:
    return -(-a // b)


class Counted:
    """Blocks as numbers.

    Args:
        blocks: None for no limit. block: tokens of each.
        allocation: "paged" takes blocks as tokens come; "oracle", "power-of-two" and "contiguous" take a request's whole
            region at its admission, of its exact length, with the output rounded up to a power of two, or of ``longest``
            tokens; regions of the last two are powers of two, as a buddy system hands them out.
        longest: the longest request that is admitted, for "contiguous".

    Raises InputError for an unknown allocation.
    """

    def __init__(self, blocks: int | None, block: int = 16, allocation: str = "paged", longest: int | None = None) -> None:
        if allocation not in POLICIES:
            raise InputError(f"allocation: {allocation!r} is not one of {', '.join(POLICIES)}")
        if allocation == "contiguous" and longest is None:
            raise InputError("allocation: contiguous regions need the longest request that is admitted")
        self.block, self.allocation, self.longest = block, allocation, longest
        self.number = UNLIMITED if blocks is None else blocks
        self.free = self.number
        self.grows = allocation == "paged"

    @property
    def used(self) -> int:
        """Blocks that requests hold."""
        return self.number - self.free

    def region(self, request: Request) -> int:
        """Blocks of a request's whole life under this allocation; for "paged" the most that it comes to hold."""
        if self.allocation == "contiguous":
            assert self.longest is not None
            return _ceil(power_of_two(self.longest), self.block)
        if self.allocation == "power-of-two":
            return _ceil(power_of_two(request.prompt + power_of_two(request.output)), self.block)
        return _ceil(max(1, request.longest), self.block)

    def fits(self, request: Request) -> bool:
        """Whether the empty pool holds the request to its end."""
        too_long = self.longest is not None and request.prompt + request.output > self.longest
        return not too_long and self.region(request) <= self.number

    def admit(self, request: Request, tokens: int, keep: int = 0) -> int | None:
        """Room for ``tokens`` of a request; returns those found in the cache: none.

        Returns None, and takes nothing, where it would leave fewer than ``keep`` blocks.
        """
        wanted = _ceil(tokens, self.block) if self.grows else self.region(request)
        if wanted + keep > self.free:
            return None
        self.free -= wanted
        request.held = wanted
        return 0

    def grow(self, requests: dict[Request, None]) -> None:
        """One more block for each; the caller has seen that there are enough."""
        self.free -= len(requests)
        for request in requests:
            request.held += 1

    def reach(self, request: Request, tokens: int) -> bool:
        """Room for a request's first ``tokens``; False, and nothing taken, where there is none."""
        wanted = _ceil(tokens, self.block) - request.held if self.grows else 0
        if wanted > self.free:
            return False
        if wanted > 0:
            self.free -= wanted
            request.held += wanted
        return True

    def release(self, request: Request) -> None:
        """Takes a request's blocks back."""
        self.free += request.held
        request.held = 0


class Cached:
    """Blocks with a prefix cache: least recently used prefixes make room first.

    A request's full blocks are named by the segment that their last token lies in; a segment of its own ends each
    request, so that blocks that nobody else can ask for take their place in the queue all the same.
    """

    grows = True
    allocation = "paged"

    def __init__(self, blocks: int, block: int = 16, longest: int | None = None) -> None:
        self.block, self.longest, self.number = block, longest, blocks
        self.tables = Allocator(blocks, block)
        self._asked: tuple[Request | None, int, list[Hashable]] = (None, 0, [])

    @property
    def free(self) -> int:
        """Blocks that can be taken: free ones and idle prefixes."""
        return self.tables.available

    @property
    def used(self) -> int:
        """Blocks that requests hold, shared ones once."""
        return self.tables.used

    def fits(self, request: Request) -> bool:
        """Whether the empty pool holds the request to its end."""
        too_long = self.longest is not None and request.prompt + request.output > self.longest
        return not too_long and _ceil(max(1, request.longest), self.block) <= self.number

    def _names(self, request: Request, first: int, last: int) -> list[Hashable]:
        """Identities of the full blocks first ... last - 1."""
        found: list[Hashable] = []
        segments = iter(request.segments)
        name, end = next(segments, (("request", request.number), UNLIMITED))
        for index in range(first, last):
            while (index + 1) * self.block > end:
                name, end = next(segments, (("request", request.number), UNLIMITED))
            found.append((name, index))
        return found

    def admit(self, request: Request, tokens: int, keep: int = 0) -> int | None:
        """Room for ``tokens`` of a request; returns how many of them are cached, at most all but the last of them.

        Returns None, and takes nothing, where it would leave fewer than ``keep`` blocks.
        """
        if self._asked[:2] != (request, tokens):
            self._asked = (request, tokens, self._names(request, 0, tokens // self.block))
        names = self._asked[2]
        if self.tables.wanted(tokens, names) + keep > self.free:
            return None
        return min(self.tables.allocate(request, tokens, names), tokens - 1)

    def grow(self, requests: dict[Request, None]) -> None:
        """One more block for each; the one before is full, and gets its name."""
        for request in requests:
            table = self.tables.tables[request]
            full = table.tokens // self.block
            if table.tokens % self.block == 0:
                self.tables.append(request, 1)
            else:
                self.tables.append(request, self.block, self._names(request, full, full + 1))

    def reach(self, request: Request, tokens: int) -> bool:
        """Room for a request's first ``tokens``; False, and nothing taken, where there is none."""
        table = self.tables.tables[request]
        more = tokens - table.tokens
        if more <= 0:
            return True
        try:
            self.tables.append(request, more, self._names(request, table.tokens // self.block, tokens // self.block))
        except OutOfBlocks:
            return False
        return True

    def release(self, request: Request) -> None:
        """Takes a request's blocks back; named ones stay findable."""
        self.tables.free(request)


Pool = Counted | Cached
