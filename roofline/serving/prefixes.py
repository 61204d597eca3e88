"""Identities of blocks: a radix tree over token blocks, in which a node stands for its tokens and all before them.

Two sequences that begin alike walk the same nodes, so equal identities mean equal prefixes, exactly and not by hash.
Source: Zheng et al. 2023, SGLang's RadixAttention (arXiv 2312.07104); here every edge is one block.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence


class Prefixes:
    """Identities of full blocks of tokens.

    Args:
        block: tokens of a block.
    """

    def __init__(self, block: int = 16) -> None:
        self.block = block
        self._children: dict[tuple[int, tuple[int, ...]], int] = {}

    def __len__(self) -> int:
        return len(self._children)

    def _walk(self, tokens: Sequence[int]) -> Iterator[tuple[int, tuple[int, ...]]]:
        for start in range(0, len(tokens) - self.block + 1, self.block):
            yield start, tuple(tokens[start : start + self.block])

    def identities(self, tokens: Sequence[int]) -> list[int]:
        """One identity per full block; new nodes are made where the tree ends."""
        found, node = [], 0
        for _, chunk in self._walk(tokens):
            node = self._children.setdefault((node, chunk), len(self._children) + 1)
            found.append(node)
        return found

    def known(self, tokens: Sequence[int]) -> int:
        """Tokens at the beginning that the tree has seen, whole blocks only; nothing is added."""
        node, length = 0, 0
        for start, chunk in self._walk(tokens):
            if (node, chunk) not in self._children:
                break
            node, length = self._children[node, chunk], start + self.block
        return length
