"""The contract of a component, and the state it keeps between steps."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, ClassVar

from roofline.cost import Cost
from roofline.formats import BF16, Format
from roofline.numeric import floor_div, minimum, scale
from roofline.work import Batch, Work

Params = dict[Format, Any]


@dataclass(frozen=True)
class StatePiece:
    """State of one kind that a component keeps for each sequence.

    Attributes:
        name: "kv", "latent", "index", "conv", "recurrent", ...
        elements: elements per entry (growing state) or in all (fixed state).
        format: how an element is stored.
        grows_with: "token" (one entry per ``every`` cached tokens), "source" (one per token of the second sequence) or
            "nothing" (a recurrent state of fixed size).
        every: cached tokens per entry; an open block is not an entry yet.
        window: the most tokens that are kept, None for all.
    """

    name: str
    elements: Any
    format: Format = BF16
    grows_with: str = "token"
    every: int = 1
    window: Any = None

    def entries(self, cached: Any, source: Any = 0) -> Any:
        """Entries that one sequence holds with ``cached`` tokens behind it."""
        if self.grows_with == "nothing":
            return 1
        tokens = source if self.grows_with == "source" else cached
        if self.window is not None:
            tokens = minimum(tokens, self.window)
        return tokens if self.every == 1 else floor_div(tokens, self.every)

    def bytes(self, cached: Any, source: Any = 0) -> Any:
        """Bytes that one sequence holds with ``cached`` tokens behind it."""
        return scale(self.elements * self.entries(cached, source), self.format.bytes_per_element)


State = tuple[StatePiece, ...]


def merge_params(many: Iterable[tuple[Any, Params]]) -> Params:
    """The sum of ``count * params`` over (count, params) pairs, format by format."""
    total: Params = {}
    for times, params in many:
        for fmt, number in params.items():
            total[fmt] = total.get(fmt, 0) + times * number
    return total


def weight_bytes(params: Params) -> Any:
    """Bytes that parameters occupy, scales and zero points included."""
    return sum(fmt.bytes(number) for fmt, number in params.items())


class Component:
    """A piece of a model: a kernel, or a block of several.

    A component that is one kernel implements ``cost`` (or ``group_cost``, when it must look at each sequence's length)
    and ``params``; a block lists its ``parts``.
    """

    kind: ClassVar[str] = "component"
    name: str

    @property
    def parts(self) -> tuple[Component, ...]:
        """The kernels it consists of: itself, unless it is a block."""
        return (self,)

    def cost(self, work: Batch) -> Cost:
        """FLOPs, bytes and launches of one step over ``work``."""
        groups = work.groups
        if len(groups) == 1:
            return self.group_cost(groups[0])
        total = Cost.total((1, self.group_cost(group)) for group in groups)
        return Cost(dict(total.flops), dict(total.read), dict(total.write), self.group_cost(groups[0]).launches)

    def group_cost(self, work: Work) -> Cost:
        """Cost of one uniform group of a batch; a launch serves all groups."""
        raise TypeError(f"{type(self).__name__} defines neither cost nor group_cost")

    def params(self) -> Params:
        """Stored parameters by format."""
        return {}

    def active_params(self) -> Any:
        """Parameters that one token meets."""
        return sum(self.params().values())

    def state(self) -> State:
        """What it keeps for each sequence between steps."""
        return ()

    def prefill_form(self) -> Component:
        """The same component as a prefill runs it: another order of the same mathematics, or itself."""
        return self


class Block(Component):
    """A component made of others; subclasses provide ``parts``, once (a cached property)."""

    kind: ClassVar[str] = "block"

    def cost(self, work: Batch) -> Cost:
        return Cost.total((1, part.cost(work)) for part in self.parts)

    def params(self) -> Params:
        return merge_params((1, part.params()) for part in self.parts)

    def active_params(self) -> Any:
        return sum(part.active_params() for part in self.parts)

    def state(self) -> State:
        return tuple(piece for part in self.parts for piece in part.state())
