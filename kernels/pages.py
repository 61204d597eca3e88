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

    def __post_init__(self) -> None:
        for name in ("pages", "page"):
            if getattr(self, name) < 1:
                raise InputError(f"{name}: {getattr(self, name)}; a cache has at least one page of at least one token")

    @property
    def free(self) -> list[int]:
        """Pages that no sequence holds, lowest first."""
        return [page for page in range(self.pages) if page not in self.references]

    def _held_by(self, sequence: int) -> list[int]:
        if sequence not in self.owned:
            raise InputError(f"sequence: {sequence} was never started or is released already")
        return self.owned[sequence]

    def start(self) -> int:
        """A new, empty sequence."""
        self._next += 1
        self.owned[self._next], self.lengths[self._next] = [], 0
        return self._next

    def fork(self, sequence: int) -> int:
        """A sequence that shares every page of another; nothing is copied."""
        held = list(self._held_by(sequence))
        child = self.start()
        self.owned[child], self.lengths[child] = held, self.lengths[sequence]
        for page in self.owned[child]:
            self.references[page] += 1
        return child

    def append(self, sequence: int, tokens: int) -> tuple[list[int], list[tuple[int, int]]]:
        """Room for more tokens: their slots, and the (source, target) pages to copy before they are written.

        A last page that is partly filled and shared is replaced by a copy first, so that siblings keep theirs. Raises
        InputError, and leaves the table as it was, for a negative number of tokens and where too few pages are free.
        """
        owned, length = self._held_by(sequence), self.lengths[sequence]
        if tokens < 0:
            raise InputError(f"tokens: {tokens} cannot be appended; a sequence only grows")
        copied = bool(tokens and length % self.page and self.references[owned[-1]] > 1)
        wanted = -(-(length + tokens) // self.page) - len(owned) + copied
        free = self.free
        if wanted > len(free):
            raise InputError(
                f"pages: {tokens} more tokens need {wanted}, and {len(free)} of {self.pages} are free;"
                " release a sequence or make the cache larger"
            )
        taken = free[:wanted]
        self.references |= dict.fromkeys(taken, 1)
        copies = []
        if copied:
            source, target = owned.pop(), taken.pop(0)
            self.references[source] -= 1
            owned.append(target)
            copies.append((source, target))
        owned += taken
        self.lengths[sequence] = length + tokens
        positions = range(length, length + tokens)
        return [owned[position // self.page] * self.page + position % self.page for position in positions], copies

    def release(self, sequence: int) -> None:
        """Gives a sequence's pages back; shared ones stay with their other holders."""
        for page in self._held_by(sequence):
            self.references[page] -= 1
            if not self.references[page]:
                del self.references[page]
        del self.owned[sequence], self.lengths[sequence]

    def table(self, sequences: list[int]) -> list[list[int]]:
        """Rows of page numbers, as long as the longest sequence needs, 0 where there is none."""
        rows = [self._held_by(sequence) for sequence in sequences]
        widest = max(map(len, rows), default=0)
        return [row + [0] * (widest - len(row)) for row in rows]
