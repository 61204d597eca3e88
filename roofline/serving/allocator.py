"""A paged allocator: block tables with reference counts, sharing, copy-on-write, a prefix cache, swapping.

A block is in exactly one of three places: free, idle (it holds a prefix that somebody may ask for again, and is taken
back when free blocks run out, least recently used first) or in use by as many tables as its reference count says. What a
block holds is named by an identity that stands for its tokens and everything before them, so that equal prefixes have
equal identities; see ``prefixes``. Every operation either succeeds or raises without having changed anything.
Source: Kwon et al. 2023 (arXiv 2309.06180), section 4; vllm/v1/core/block_pool.py.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field

from roofline.errors import InputError, RooflineError


class OutOfBlocks(RooflineError):
    """Not enough free blocks for what was asked; nothing was changed."""


@dataclass
class Table:
    """The blocks of one sequence, and how many tokens they hold."""

    blocks: list[int] = field(default_factory=list)
    tokens: int = 0


class Allocator:
    """Blocks of one device.

    Args:
        number: blocks. block: tokens of each. host: blocks of host memory for swapping.

    Raises InputError for sizes out of range.
    """

    def __init__(self, number: int, block: int = 16, host: int = 0) -> None:
        if number < 1 or block < 1 or host < 0:
            raise InputError(f"blocks: {number} blocks of {block} tokens with {host} on the host; give 1, 1 and 0 or more")
        self.number, self.block, self.host = number, block, host
        self.tables: dict[Hashable, Table] = {}
        self.references = [0] * number
        self.identity: list[Hashable] = [None] * number
        self.swapped: dict[Hashable, Table] = {}
        self._free: deque[int] = deque(range(number))
        self._idle: OrderedDict[int, None] = OrderedDict()
        self._holding: dict[Hashable, int] = {}

    @property
    def available(self) -> int:
        """Blocks that can be taken: free, or idle."""
        return len(self._free) + len(self._idle)

    @property
    def used(self) -> int:
        """Blocks that tables refer to, each counted once."""
        return self.number - self.available

    @property
    def host_free(self) -> int:
        """Blocks of host memory that hold nothing."""
        return self.host - sum(len(table.blocks) for table in self.swapped.values())

    def needed(self, tokens: int) -> int:
        """Blocks that hold so many tokens."""
        return -(-tokens // self.block)

    def cached(self, identities: Sequence[Hashable]) -> int:
        """Leading identities that some block holds."""
        found = 0
        for identity in identities:
            if identity not in self._holding:
                break
            found += 1
        return found

    def wanted(self, tokens: int, identities: Sequence[Hashable] = ()) -> int:
        """Available blocks that ``allocate`` would use up: fresh ones, and idle ones that it finds."""
        hits = identities[: self.cached(identities)]
        idle = sum(self.references[self._holding[identity]] == 0 for identity in hits)
        return self.needed(tokens) - len(hits) + idle

    def allocate(self, sequence: Hashable, tokens: int, identities: Sequence[Hashable] = ()) -> int:
        """A table for a new sequence of so many tokens; leading blocks whose identities are held are shared.

        Args:
            identities: of its full blocks, in order; fewer than there are leaves the rest unnamed.

        Returns the tokens found in the cache. Raises OutOfBlocks; InputError where the sequence exists or an identity has
        no full block.
        """
        if sequence in self.tables or sequence in self.swapped:
            raise InputError(f"sequence {sequence!r} has a table already")
        if tokens < 0 or len(identities) > tokens // self.block:
            raise InputError(f"sequence {sequence!r}: {len(identities)} identities for {tokens} tokens; give one per full block")
        hits = [self._holding[identity] for identity in identities[: self.cached(identities)]]
        fresh = self.needed(tokens) - len(hits)
        idle_hits = sum(self.references[block] == 0 for block in hits)
        if fresh > self.available - idle_hits:
            raise OutOfBlocks(f"{fresh} blocks wanted and {self.available - idle_hits} available")
        for block in hits:
            self._idle.pop(block, None)
            self.references[block] += 1
        table = Table([*hits, *(self._take() for _ in range(fresh))], tokens)
        for position in range(len(hits), len(identities)):
            self._name(table.blocks[position], identities[position])
        self.tables[sequence] = table
        return len(hits) * self.block

    def append(self, sequence: Hashable, tokens: int = 1, identities: Sequence[Hashable] = ()) -> tuple[int, int] | None:
        """Room for more tokens of a sequence.

        Args:
            identities: of the blocks that become full by it, in order; fewer leaves the rest unnamed.

        Returns (source, copy) where the open last block was shared and had to be copied first. Raises OutOfBlocks.
        """
        table = self._table(sequence)
        if tokens < 1 or len(identities) > (table.tokens + tokens) // self.block - table.tokens // self.block:
            raise InputError(f"sequence {sequence!r}: {tokens} tokens with {len(identities)} identities; give 1 or more tokens")
        open_block = table.tokens % self.block != 0
        copy = open_block and self.references[table.blocks[-1]] > 1
        fresh = self.needed(table.tokens + tokens) - len(table.blocks)
        if fresh + copy > self.available:
            raise OutOfBlocks(f"{fresh + copy} blocks wanted and {self.available} available")
        pair = None
        if copy:
            pair = (table.blocks[-1], self._take())
            self.references[pair[0]] -= 1
            table.blocks[-1] = pair[1]
        first_full = table.tokens // self.block
        table.blocks += [self._take() for _ in range(fresh)]
        table.tokens += tokens
        for position, identity in enumerate(identities, first_full):
            self._name(table.blocks[position], identity)
        return pair

    def fork(self, parent: Hashable, child: Hashable) -> None:
        """A second sequence with all blocks of the first, shared until one of them writes."""
        table = self._table(parent)
        if child in self.tables or child in self.swapped:
            raise InputError(f"sequence {child!r} has a table already")
        for block in table.blocks:
            self.references[block] += 1
        self.tables[child] = Table(list(table.blocks), table.tokens)

    def free(self, sequence: Hashable) -> int:
        """Gives a sequence's blocks back, the last first, so that prefixes stay longest; returns its tokens.

        It is also preemption by recomputation: the caller runs so many tokens again.
        """
        table = self._table(sequence)
        for block in reversed(table.blocks):
            self._release(block)
        del self.tables[sequence]
        return table.tokens

    def swap_out(self, sequence: Hashable) -> int:
        """Preemption by swapping: moves a sequence to host memory; returns the blocks moved. Raises OutOfBlocks for the host."""
        table = self._table(sequence)
        if len(table.blocks) > self.host_free:
            raise OutOfBlocks(f"{len(table.blocks)} blocks of host memory wanted and {self.host_free} available")
        for block in reversed(table.blocks):
            self._release(block)
        self.swapped[sequence] = self.tables.pop(sequence)
        return len(table.blocks)

    def swap_in(self, sequence: Hashable) -> int:
        """Brings a swapped sequence back into blocks of its own; returns the blocks moved. Raises OutOfBlocks."""
        if sequence not in self.swapped:
            raise InputError(f"sequence {sequence!r} is not swapped out")
        table = self.swapped[sequence]
        if len(table.blocks) > self.available:
            raise OutOfBlocks(f"{len(table.blocks)} blocks wanted and {self.available} available")
        del self.swapped[sequence]
        self.tables[sequence] = Table([self._take() for _ in table.blocks], table.tokens)
        return len(table.blocks)

    def _table(self, sequence: Hashable) -> Table:
        if sequence not in self.tables:
            raise InputError(f"sequence {sequence!r} has no table")
        return self.tables[sequence]

    def _take(self) -> int:
        if self._free:
            block = self._free.popleft()
        else:
            block, _ = self._idle.popitem(last=False)
            del self._holding[self.identity[block]]
            self.identity[block] = None
        self.references[block] = 1
        return block

    def _name(self, block: int, identity: Hashable) -> None:
        """Lets a full block be found; a second one with the same content stays unnamed."""
        if identity is not None and identity not in self._holding and self.identity[block] is None:
            self.identity[block] = identity
            self._holding[identity] = block

    def _release(self, block: int) -> None:
        self.references[block] -= 1
        if self.references[block]:
            return
        if self.identity[block] is None:
            self._free.append(block)
        else:
            self._idle[block] = None

    def check(self) -> None:
        """Raises AssertionError where an invariant is broken: a block lost, doubled or miscounted."""
        counts = [0] * self.number
        for table in self.tables.values():
            assert len(table.blocks) == self.needed(table.tokens), "a table has as many blocks as its tokens need"
            assert len(set(table.blocks)) == len(table.blocks), "a table names a block once"
            for block in table.blocks:
                counts[block] += 1
        assert counts == self.references, "reference counts are the tables that name a block"
        free, idle = set(self._free), set(self._idle)
        assert len(free) == len(self._free), "a block is free once"
        assert not free & idle, "a block is free or idle"
        assert free | idle == {block for block, count in enumerate(counts) if count == 0}, "no block is lost, none used twice"
        assert all(self.identity[block] is None for block in free), "a free block holds nothing"
        assert all(self.identity[block] is not None for block in idle), "an idle block holds a prefix"
        named = {block: identity for block, identity in enumerate(self.identity) if identity is not None}
        assert self._holding == {identity: block for block, identity in named.items()}, "identities name one block each"
        assert self.host_free >= 0, "host memory holds what it can"
