"""Which pages of a cache belong to which sequence: sharing by reference counts, a copy only before a shared page is written.

Host-side bookkeeping, as serving engines keep it; the bytes are moved by ``paged_cache``.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from roofline.errors import InputError


@dataclass
class PageTable:
    """Pages of ``page`` tokens for any number of sequences.

    Attributes:
        pages: pages in the cache. page: tokens per page.
        owned: pages of each sequence, in order. lengths: its tokens.
        references: sequences that hold each page.
    """

    pages: int
    page: int
    owned: dict[int, list[int]] = field(default_factory=dict)
    lengths: dict[int, int] = field(default_factory=dict)
    references: dict[int, int] = field(default_factory=dict)
    _next: int = 0

    @property
    def free(self) -> list[int]:
        """Pages that no sequence holds, lowest first."""
        return [page for page in range(self.pages) if page not in self.references]

    def _take(self) -> int:
        for page in range(self.pages):
            if page not in self.references:
                self.references[page] = 1
                return page
        raise InputError(f"pages: all {self.pages} are held; free a sequence or make the cache larger")

    def start(self) -> int:
        """A new, empty sequence."""
        self._next += 1
        self.owned[self._next], self.lengths[self._next] = [], 0
        return self._next

    def fork(self, sequence: int) -> int:
        """A sequence that shares every page of another; nothing is copied."""
        child = self.start()
        self.owned[child], self.lengths[child] = list(self.owned[sequence]), self.lengths[sequence]
        for page in self.owned[child]:
            self.references[page] += 1
        return child

    def append(self, sequence: int, tokens: int) -> tuple[list[int], list[tuple[int, int]]]:
        """Room for more tokens: their slots, and the (source, target) pages to copy before they are written.

        A last page that is partly filled and shared is replaced by a copy first, so that siblings keep theirs.
        """
        owned, length = self.owned[sequence], self.lengths[sequence]
        copies = []
        if tokens and length % self.page and self.references[owned[-1]] > 1:
            source, target = owned[-1], self._take()
            self.references[source] -= 1
            owned[-1] = target
            copies.append((source, target))
        slots = []
        for position in range(length, length + tokens):
            if position // self.page == len(owned):
                owned.append(self._take())
            slots.append(owned[position // self.page] * self.page + position % self.page)
        self.lengths[sequence] = length + tokens
        return slots, copies

    def release(self, sequence: int) -> None:
        """Gives a sequence's pages back; shared ones stay with their other holders."""
        for page in self.owned.pop(sequence):
            self.references[page] -= 1
            if not self.references[page]:
                del self.references[page]
        del self.lengths[sequence]

    def table(self, sequences: list[int]) -> list[list[int]]:
        """Rows of page numbers, as long as the longest sequence needs, 0 where there is none."""
        widest = max((len(self.owned[sequence]) for sequence in sequences), default=0)
        return [self.owned[sequence] + [0] * (widest - len(self.owned[sequence])) for sequence in sequences]
