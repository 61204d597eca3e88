"""Draft trees: several guesses per position, verified together in one pass.

A node is the path that leads to it, a tuple of ranks: (0,) is the best guess for the next token, (0, 2) the third guess
for the one after it. Guesses for one position exclude each other, so a node is right with the product of its path's
accuracies, and the expected number of accepted tokens is the sum over nodes.
Source: Cai et al. 2024, Medusa (arXiv 2401.10774), section 2.2.1; Li et al. 2024, EAGLE-2 (arXiv 2406.16858); Chen et
al. 2024, Sequoia (arXiv 2402.12374): speed-up = tokens / (t(n) + d c).
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Any

from roofline.errors import InputError
from roofline.speculative.acceptance import check_rate

Node = tuple[int, ...]
Accuracies = Sequence[Sequence[Any]]
MOST_NODES = 4096


def check_accuracies(accuracies: Accuracies) -> None:
    """Raises InputError unless each depth lists rates that fall with rank and sum to 1 at most."""
    if not accuracies or not all(accuracies):
        raise InputError("accuracy: give, for each depth, the chance that the best guess is right, the second best, ...")
    for depth, ranks in enumerate(accuracies, 1):
        for rate in ranks:
            check_rate(rate, f"accuracy at depth {depth}")
        if float(sum(ranks)) > 1 + 1e-9:
            raise InputError(f"accuracy at depth {depth}: chances sum to {float(sum(ranks)):g}; guesses exclude each other")
        if any(later > earlier for earlier, later in pairwise(ranks)):
            raise InputError(f"accuracy at depth {depth}: a later guess is likelier than an earlier one; sort them")


@dataclass(frozen=True)
class Tree:
    """A draft tree.

    Attributes:
        nodes: paths of all drafted tokens, parents before children; the root, a token that is already certain, is not one.

    Raises InputError where a node's parent is missing or a path occurs twice.
    """

    nodes: tuple[Node, ...]

    def __post_init__(self) -> None:
        seen: set[Node] = {()}
        for node in self.nodes:
            if not node or node[:-1] not in seen or node in seen:
                raise InputError(f"tree: node {node} comes twice, is empty, or comes before its parent")
            seen.add(node)

    @property
    def tokens(self) -> int:
        """Tokens that one verification runs over: all nodes, and the root behind which they hang."""
        return 1 + len(self.nodes)

    @cached_property
    def depth(self) -> int:
        """Tokens of the longest path: passes of the draft."""
        return max(map(len, self.nodes), default=0)

    def widths(self) -> list[int]:
        """Nodes at each depth: tokens of each pass of a draft that runs depth by depth."""
        return [sum(len(node) == depth for node in self.nodes) for depth in range(1, self.depth + 1)]

    def expected_accepted(self, accuracies: Accuracies) -> Any:
        """Expected drafted tokens that survive: the sum over nodes of the product of accuracies along the path."""
        check_accuracies(accuracies)
        if self.depth > len(accuracies):
            raise InputError(f"accuracy: the tree is {self.depth} deep and accuracies are given for {len(accuracies)}")
        chance: dict[Node, Any] = {(): 1}
        for node in self.nodes:
            ranks = accuracies[len(node) - 1]
            chance[node] = chance[node[:-1]] * (ranks[node[-1]] if node[-1] < len(ranks) else 0)
        return sum(chance.values()) - 1

    def expected_tokens(self, accuracies: Accuracies) -> Any:
        """Expected tokens of one round: those accepted, and the target's own."""
        return 1 + self.expected_accepted(accuracies)


def chain(length: int) -> Tree:
    """A tree without branches: plain speculative decoding with that draft length."""
    return Tree(tuple((0,) * depth for depth in range(1, length + 1)))


def product_tree(ranks: Iterable[int]) -> Tree:
    """Every combination of the first ``ranks[d]`` guesses at each depth: a Medusa tree before any pruning."""
    layer: list[Node] = [()]
    nodes: list[Node] = []
    for number in ranks:
        layer = [(*node, rank) for node in layer for rank in range(number)]
        nodes += layer
        if len(nodes) > MOST_NODES:
            raise InputError(f"tree: more than {MOST_NODES} nodes")
    return Tree(tuple(nodes))


def best_tree(accuracies: Accuracies, size: int) -> Tree:
    """The tree of ``size`` nodes with most expected accepted tokens.

    A child is never likelier than its parent, so taking the likeliest reachable node each time is optimal. The tree is
    smaller where the accuracies offer fewer nodes.
    """
    check_accuracies(accuracies)
    if not 0 <= size <= MOST_NODES:
        raise InputError(f"tree: {size} nodes are out of range; give 0 to {MOST_NODES}")
    nodes: list[Node] = []
    open_nodes: list[tuple[float, Node]] = [(-float(accuracies[0][0]), (0,))]
    while open_nodes and len(nodes) < size:
        negative, node = heapq.heappop(open_nodes)
        nodes.append(node)
        depth, rank = len(node), node[-1]
        here = accuracies[depth - 1]
        if rank + 1 < len(here) and here[rank] > 0:
            sibling = negative / float(here[rank]) * float(here[rank + 1])
            heapq.heappush(open_nodes, (sibling, (*node[:-1], rank + 1)))
        if depth < len(accuracies):
            heapq.heappush(open_nodes, (negative * float(accuracies[depth][0]), (*node, 0)))
    return Tree(tuple(nodes))
