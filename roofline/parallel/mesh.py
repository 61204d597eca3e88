"""The mesh: how many ways a model is split along each axis, and over which links the ranks of each axis talk.

Ranks are numbered with tensor parallelism innermost, then attention data parallelism, then pipeline stages, as engines
do: neighbours in a tensor-parallel group share a server first. A group that does not fit into one server goes over the
network, where every byte that leaves the server counts.
"""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from math import prod
from typing import Any

from roofline.accelerator import Accelerator
from roofline.errors import InputError
from roofline.numeric import ceil_div, maximum, ratio

VOCABULARY_MULTIPLE = 64
"""Rows to which vLLM and SGLang pad a vocabulary before they divide it (vllm .../vocab_parallel_embedding.py)."""
REDUCING_SWITCHES = {"nvlink": ("sm_90", "sm_100", "sm_103")}
"""Links whose switches add up what passes through them, by architecture (NVLink SHARP: NVSwitch 3 and later)."""
NETWORK = "network"


def kv_heads_per_rank(K: Any, tp: Any) -> Any:
    """Key-value heads that each tensor-parallel rank stores: ``max(1, ceil(K / tp))``; below one head they are replicated.

    >>> [kv_heads_per_rank(2, tp) for tp in (1, 2, 4)]
    [2, 1, 1]
    """
    return maximum(1, ceil_div(K, tp))


def padded_vocabulary(V: int, multiple: int = VOCABULARY_MULTIPLE) -> int:
    """Rows of a vocabulary padded to a multiple."""
    return -(-V // multiple) * multiple


def require(accelerator: Accelerator, link: str, ranks: int) -> None:
    """Raises InputError where an accelerator does not list a link that so many ranks need."""
    if link not in accelerator.links:
        known = ", ".join(accelerator.links) or "none"
        raise InputError(f"gpu: {ranks} x {accelerator.id} need the link {link!r}, and its file lists {known}")


@dataclass(frozen=True)
class Place:
    """Where a group of ranks lies: over how many servers, and which link joins those of one server."""

    servers: int
    link: str


@dataclass(frozen=True)
class Mesh:
    """How a model is split.

    Attributes:
        tp: tensor parallelism of attention, dense feed-forward, embedding and head.
        pp: pipeline stages.
        dp: attention data parallelism: groups of tp ranks with sequences of their own that share the experts.
        ep: ranks over which the experts are spread, 1 for experts that are cut like dense layers.
        sp: ranks of a tensor-parallel group over which the tokens of a cache are spread (decode context parallelism).
        microbatches: batches in flight in the pipeline; None for one per stage.
        algorithm: of all-reduces, "" for what the link offers: "switch" where it reduces, else "ring".
        imbalance: rows of the busiest expert rank over the mean, from 1 to ep.
        node: accelerators of one server; None for what the accelerator's file says.

    Raises InputError: a size below 1, expert parallelism that does not match tp x dp, sp that does not divide tp, an imbalance
    that so many expert ranks cannot have.
    """

    tp: int = 1
    pp: int = 1
    dp: int = 1
    ep: int = 1
    sp: int = 1
    microbatches: int | None = None
    algorithm: str = ""
    imbalance: Fraction = Fraction(1)
    node: int | None = None

    def __post_init__(self) -> None:
        for name in ("tp", "pp", "dp", "ep", "sp"):
            value = getattr(self, name)
            if type(value) is not int or not 1 <= value <= 4096:
                raise InputError(f"{name}: {value!r} is out of range; give a whole number from 1 to 4096")
        if (self.tp * self.dp) % self.ep:
            raise InputError(f"ep: {self.ep} does not divide the {self.tp * self.dp} ranks of tp x dp; use {self.tp * self.dp}")
        if self.tp % self.sp:
            raise InputError(f"sp: {self.sp} does not divide tp {self.tp}; a cache is spread inside a tensor-parallel group")
        if self.microbatches is not None and self.microbatches < 1:
            raise InputError(f"microbatches: {self.microbatches} is out of range; give 1 or more")
        if self.imbalance < 1:
            raise InputError(f"imbalance: {float(self.imbalance):g} is below 1, the mean of all expert ranks")
        if self.imbalance != 1 and self.ep == 1:
            raise InputError(
                f"imbalance: {float(self.imbalance):g} is the busiest expert rank's share of the mean, and ep is 1, so there is "
                "one such rank; spread the experts with --ep 2 or more, or leave --imbalance out (no experts, no ranks)"
            )
        if self.imbalance > self.ep:
            raise InputError(
                f"imbalance: {float(self.imbalance):g} is more than the {self.ep} expert ranks of --ep: the busiest has at most "
                f"all rows, {self.ep} times the mean; give 1 to {self.ep}"
            )

    @property
    def ranks(self) -> int:
        """Devices: the product of the axes that need their own."""
        return prod((self.tp, self.pp, self.dp))

    @property
    def moe_tp(self) -> int:
        """Ways in which each expert itself is cut."""
        return self.tp * self.dp // self.ep

    @property
    def flags(self) -> str:
        """The axes above 1, and what else was said, as options: "--tp 8 --pp 2"."""
        found = [f"--{name} {getattr(self, name)}" for name in ("tp", "pp", "dp", "ep", "sp") if getattr(self, name) > 1]
        found += [f"--imbalance {float(self.imbalance):g}"] if self.imbalance != 1 else []
        found += [f"--microbatches {self.microbatches}"] if self.microbatches is not None else []
        return " ".join(found)

    def server(self, accelerator: Accelerator) -> int:
        """Accelerators that share a server. Raises InputError where neither mesh nor accelerator says it and it matters."""
        size = self.node or accelerator.node_accelerators
        if size is None:
            if self.ranks > 1 and len(accelerator.links) > 1:
                raise InputError(
                    f"node: {accelerator.id} does not say how many share a server; add [node] to its file, or say it with --node"
                )
            return self.ranks
        return size

    def place(self, accelerator: Accelerator, ranks: int) -> Place:
        """Where a group of ``ranks`` neighbouring ranks lies.

        Raises InputError where it fills servers unevenly, or where the accelerator lists no link that it needs.
        """
        if ranks <= 1:
            return Place(1, "")
        server = self.server(accelerator)
        servers = max(1, -(-ranks // server))
        if ranks % servers:
            raise InputError(f"node: {ranks} ranks fill {servers} servers of {server} unevenly; use a multiple of {server}")
        inside = accelerator.node_link or next((link for link in accelerator.links if link != NETWORK), NETWORK)
        if ranks > servers:
            require(accelerator, inside, ranks)
        if servers > 1:
            require(accelerator, NETWORK, ranks)
        return Place(servers, inside)

    def crosses(self, accelerator: Accelerator, stage: int) -> bool:
        """Whether the ranks of a pipeline stage and the next lie in different servers."""
        width, server = self.tp * self.dp, self.server(accelerator)
        return width >= server or stage * width // server != (stage + 1) * width // server

    def all_reduce(self, accelerator: Accelerator, link: str) -> str:
        """Algorithm of all-reduces over a link."""
        if self.algorithm:
            return self.algorithm
        return "switch" if accelerator.architecture in REDUCING_SWITCHES.get(link, ()) else "ring"


def bubble(stages: int, microbatches: Any) -> Any:
    """Share of a pipeline's time that its stages idle while it fills and drains: ``(p - 1) / (m + p - 1)``.

    Source: Huang et al. 2019, GPipe (arXiv 1811.06965).
    """
    return ratio(stages - 1, microbatches + stages - 1)


def stage_layers(layers: int, stages: int) -> list[int]:
    """Layers of each pipeline stage, as vLLM deals them: the rest goes to the stages before the last, the latest first.

    Source: vllm/distributed/utils.py get_pp_indices. Raises InputError where a stage would stay empty.
    """
    if not 1 <= stages <= layers:
        raise InputError(f"pp: {stages} stages for {layers} layers; give 1 to {layers}")
    each, rest = divmod(layers, stages)
    sizes = [each] * stages
    if rest:
        for index in range(2, rest + 2):
            sizes[-index] += 1
    return sizes
