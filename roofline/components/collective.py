"""Collectives: bytes that the ranks of a group exchange, and the hops that they wait for.

Bytes are those that one rank sends, in one direction, for a message of ``size`` bytes per rank; n ranks:

==============  ==================  =====================================  ====================
operation       algorithm           bytes sent by a rank                   hops one after another
==============  ==================  =====================================  ====================
all-reduce      ring                2 (n - 1) / n size                     2 (n - 1)
all-reduce      two-shot            2 (n - 1) / n size                     2
all-reduce      one-shot            (n - 1) size                           1
all-reduce      tree                2 size                                 2 ceil(log2 n)
all-reduce      switch              size                                   2
all-gather      any                 (n - 1) size  (size: its own part)     n - 1 (ring), 1 else
reduce-scatter  any                 (n - 1) size  (size: one part)         n - 1 (ring), 1 else
all-to-all      any                 (n - 1) / n size                       1
send            any                 size                                   1
==============  ==================  =====================================  ====================

A switch that reduces (NVLink SHARP) lets each rank send its message once, which no algorithm without it undercuts.

A group over several servers works in two levels: first over the server's link, then each rank exchanges its share of the
server's result with the ranks of the same place in other servers, over the network, and passes on what it received.
Sources: Thakur, Rabenseifner, Gropp 2005 (MPICH collectives); NCCL's ring, tree and NVLS algorithms (NVIDIA/nccl);
TensorRT-LLM's one-shot and two-shot all-reduce kernels.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from roofline.components.base import Component
from roofline.cost import Cost
from roofline.errors import InputError
from roofline.formats import BF16, Format
from roofline.numeric import ratio, scale
from roofline.work import Batch

OPERATIONS = ("all-reduce", "all-gather", "reduce-scatter", "all-to-all", "send")
ALGORITHMS = ("ring", "two-shot", "one-shot", "tree", "switch")


def bytes_sent(operation: str, algorithm: str, ranks: int, size: Any) -> Any:
    """Bytes that one of ``ranks`` ranks sends for a message of ``size`` bytes; 0 in a group of one."""
    _check(operation, algorithm)
    if ranks == 1:
        return 0
    if operation == "send":
        return size
    if operation == "all-to-all":
        return scale(size, ratio(ranks - 1, ranks))
    if operation in ("all-gather", "reduce-scatter"):
        return (ranks - 1) * size
    factor = {
        "ring": ratio(2 * (ranks - 1), ranks), "two-shot": ratio(2 * (ranks - 1), ranks), "one-shot": ranks - 1, "tree": 2,
        "switch": 1,
    }  # fmt: skip
    return scale(size, factor[algorithm])


def hops(operation: str, algorithm: str, ranks: int) -> int:
    """Messages that follow one another: each waits a latency alpha."""
    _check(operation, algorithm)
    if ranks == 1:
        return 0
    if operation in ("send", "all-to-all"):
        return 1
    if operation != "all-reduce":
        return ranks - 1 if algorithm == "ring" else 1
    rounds = {"ring": 2 * (ranks - 1), "two-shot": 2, "one-shot": 1, "tree": 2 * (ranks - 1).bit_length(), "switch": 2}
    return rounds[algorithm]


def alpha_beta(operation: str, algorithm: str, ranks: int, size: Any, alpha: Any, bandwidth: Any) -> Any:
    """Seconds of one collective: ``hops alpha + bytes sent / bandwidth``.

    Args:
        alpha: latency of one hop [s]. bandwidth: of the link, one direction [B/s].
    """
    return hops(operation, algorithm, ranks) * alpha + ratio(bytes_sent(operation, algorithm, ranks, size), bandwidth)


def bytes_by_link(operation: str, algorithm: str, ranks: int, servers: int, size: Any) -> tuple[Any, Any]:
    """(bytes over the server's link, bytes over the network) that one rank sends, ``ranks`` spread evenly over servers.

    All-reduce: reduce-scatter and all-gather inside, 2 (m - 1) / m of a rank's share between m servers. All-gather and
    reduce-scatter: a rank's part crosses to each other server once. All-to-all: as the partners lie.
    """
    if servers == 1:
        return bytes_sent(operation, algorithm, ranks, size), 0
    local = ranks // servers
    if operation == "all-reduce":
        share = scale(size, ratio(1, local))
        return bytes_sent(operation, algorithm, local, size), scale(share, ratio(2 * (servers - 1), servers))
    if operation == "all-to-all":
        return scale(size, ratio(local - 1, ranks)), scale(size, ratio(ranks - local, ranks))
    if operation == "send":
        return 0, size
    return (local - 1) * servers * size, (servers - 1) * size


def _check(operation: str, algorithm: str) -> None:
    if operation not in OPERATIONS:
        raise InputError(f"collective: {operation!r} is not one of {', '.join(OPERATIONS)}")
    if algorithm not in ALGORITHMS:
        raise InputError(f"algorithm: {algorithm!r} is not one of {', '.join(ALGORITHMS)}")


@dataclass(frozen=True)
class Collective(Component):
    """One collective of a step, one kernel.

    Its message is read from memory and its result written there, as activations; the sums of a reduction are left out.

    Attributes:
        operation, algorithm: see the module's table. ranks: in the group. link: what those of one server are joined by.
        servers: over which the ranks are spread. network: the link between servers.
        elements: of the message, per row. rows: "tokens", or "logit_rows".
        copies: messages per row (tokens sent to several experts' ranks), an expectation where a Fraction or float.
    """

    kind: ClassVar[str] = "collective"

    operation: str
    ranks: int
    elements: Any
    link: str
    algorithm: str = "ring"
    rows: str = "tokens"
    copies: Any = 1
    servers: int = 1
    network: str = "network"
    activation: Format = BF16
    name: str = "collective"

    @property
    def hops(self) -> int:
        """Messages that follow one another; two levels of an all-reduce follow each other."""
        local = hops(self.operation, self.algorithm, self.ranks // self.servers)
        between = hops(self.operation, "ring", self.servers) if self.operation != "send" else 0
        return max(1, local) if self.operation in ("all-to-all", "send") else local + between

    def message(self, work: Batch) -> Any:
        """Bytes of one rank's message."""
        rows = work.tokens if self.rows == "tokens" else getattr(work, self.rows)
        return scale(self.activation.bytes(self.elements) * rows, self.copies)

    def cost(self, work: Batch) -> Cost:
        size = self.message(work)
        gathered = size * (self.ranks if self.operation == "all-gather" else 1)
        scattered = size * (self.ranks if self.operation == "reduce-scatter" else 1)
        near, far = bytes_by_link(self.operation, self.algorithm, self.ranks, self.servers, size)
        sent = {self.link: near} if self.servers == 1 else {self.network: far}
        if self.servers > 1 and self.ranks > self.servers:
            sent[self.link] = near
        return Cost({}, {"activations": scattered}, {"activations": gathered}, 1, sent)
