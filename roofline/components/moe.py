"""Mixture of experts: a router picks k of E feed-forward blocks for each token; shared ones run for every token.

FLOPs follow the tokens (k experts each), weight traffic follows the experts that at least one token of the step picks:
``E (1 - (1 - k/E)^tokens)`` of them in expectation when routing is uniform. That number is a float by nature, exactly k
for a single token and exactly E where k = E; everything else here stays exact.

Sources: Fedus et al. 2021 (arXiv 2101.03961) and Jiang et al. 2024 (arXiv 2401.04088) for the layer; the expectation is
that of a draw without replacement within a token, independent between tokens.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any, ClassVar

from roofline.components.base import Block, Component, Params
from roofline.components.feedforward import ACTIVATION_FLOPS, MLP
from roofline.components.linear import Linear
from roofline.components.mixing import Elementwise
from roofline.cost import Cost
from roofline.errors import InputError
from roofline.formats import BF16, Format
from roofline.numeric import at_least_once, ceil_div, half, maximum, ratio, scale, whole
from roofline.work import Batch

SELECT_FLOPS = 3
"""Elementwise FLOPs of the router per expert beside the k comparisons: maximum, subtraction and sum of its softmax."""


@lru_cache(maxsize=256)
def selection_probabilities(E: int, k: int, skew: float) -> tuple[tuple[float, int], ...]:
    """(probability that one token picks an expert, number of such experts) under power-law routing.

    The popularity of the i-th expert is proportional to i^-skew; probabilities are capped at 1 and sum to k.
    """
    popularity = [float(i) ** -skew for i in range(1, E + 1)]
    certain = 0
    while certain < k and (k - certain) * popularity[certain] >= sum(popularity[certain:]):
        certain += 1
    rest = sum(popularity[certain:])
    chosen = [1.0] * certain + [(k - certain) * weight / rest for weight in popularity[certain:]]
    return tuple(Counter(chosen).items())


def expected_experts(E: Any, k: Any, tokens: Any, skew: float = 0) -> Any:
    """Expected number of distinct experts that at least one of ``tokens`` tokens picks: an expectation, not a count.

    Uniform routing (skew 0): ``E (1 - (1 - k/E)^tokens)``. Exactly k for one token and exactly E where k = E.

    >>> expected_experts(8, 2, 1), round(expected_experts(8, 2, 4), 2)
    (2, 5.47)
    """
    if skew == 0 or k == E or (type(tokens) is int and tokens == 1):
        return whole(scale(at_least_once(ratio(k, E), tokens), E))
    return sum(number * at_least_once(chance, tokens) for chance, number in selection_probabilities(E, k, skew))


@dataclass(frozen=True)
class GroupedLinear(Component):
    """One matmul per expert over the rows routed to it, all in one kernel (a grouped GEMM).

    FLOPs ``2 rows inputs outputs`` over ``rows = k tokens``; reads the weights of the experts that are hit, once.
    With ``tile`` > 1 every hit expert's rows are padded to whole tiles: half a tile more each, at least one tile.

    Attributes:
        inputs, outputs: dimensions of one expert's weight. E, k: experts held, experts picked per token.
        bias: one bias of ``outputs`` elements per expert, stored in the activation format.
        stored, epilogue: as in ``Linear``.
        gathers: rows come from the tokens themselves (each read once), not from one row per picked expert.
        skew, tile: as in ``MoE``.
        counts: rows of each expert where the routing is known: what holds is then no expectation but a count.

    Raises InputError where ``counts`` are not one per expert.
    """

    kind: ClassVar[str] = "grouped_linear"

    inputs: Any
    outputs: Any
    E: Any
    k: Any
    bias: bool = False
    weight: Format = BF16
    activation: Format = BF16
    stored: Any = None
    epilogue: int = 0
    gathers: bool = False
    skew: float = 0
    tile: int = 1
    counts: tuple[int, ...] | None = None
    name: str = "grouped_linear"

    def __post_init__(self) -> None:
        if self.counts is not None and len(self.counts) != self.E:
            raise InputError(f"rows of each expert: {len(self.counts)} numbers for {self.E} experts")

    @cached_property
    def _constants(self) -> tuple[Any, Any, Any, Any, Any]:
        """FLOPs and vector FLOPs per row, weight bytes per expert, activation bytes read and written per token."""
        stored = self.outputs if self.stored is None else self.stored
        biases = self.outputs if self.bias else 0
        return (
            2 * self.inputs * self.outputs,
            biases + self.epilogue * stored,
            self.weight.bytes(self.inputs * self.outputs) + self.activation.bytes(biases),
            self.activation.bytes(self.inputs * (1 if self.gathers else self.k)),
            self.activation.bytes(stored * self.k),
        )

    def hit(self, tokens: Any) -> Any:
        """Experts whose weights are read."""
        if self.counts is not None:
            return sum(1 for rows in self.counts if rows)
        return expected_experts(self.E, self.k, tokens, self.skew)

    def rows(self, tokens: Any) -> Any:
        """Rows multiplied: k per token, padded to tiles."""
        if self.counts is not None:
            return sum(self.tile * ceil_div(rows, self.tile) for rows in self.counts)
        routed = scale(tokens, self.k)
        if self.tile == 1:
            return routed
        hit = self.hit(tokens)
        return maximum(routed + scale(hit, half(self.tile - 1)), scale(hit, self.tile))

    def cost(self, work: Batch) -> Cost:
        tokens = work.tokens
        flops, vector, weights, read, written = self._constants
        rows = self.rows(tokens)
        operations = {self.weight.unit: scale(rows, flops)}
        if vector != 0:
            operations["vector"] = scale(rows, vector)
        hit = self.hit(tokens)
        return Cost(
            operations,
            {"weights": scale(hit, weights), "activations": scale(tokens, read)},
            {"activations": scale(tokens, written)},
            1,
        )

    def _of_experts(self, experts: Any) -> Params:
        params: Params = {self.weight: experts * self.inputs * self.outputs}
        if self.bias:
            params[self.activation] = params.get(self.activation, 0) + experts * self.outputs
        return params

    def params(self) -> Params:
        return self._of_experts(self.E)

    def active_params(self) -> Any:
        return sum(self._of_experts(self.k).values())


@dataclass(frozen=True)
class Select(Component):
    """The router's softmax and top-k over E logits, one kernel; writes k weights and k indices per token.

    Attributes:
        bias: a stored correction of E elements that only steers the choice (load balancing without a loss).
        picked: format of the weights and indices that are written, None for that of the logits.
    """

    kind: ClassVar[str] = "router"

    E: Any
    k: Any
    bias: bool = False
    activation: Format = BF16
    picked: Format | None = None
    name: str = "select"

    def cost(self, work: Batch) -> Cost:
        tokens = work.tokens
        per_expert = SELECT_FLOPS + self.k + (1 if self.bias else 0)
        picked = self.activation if self.picked is None else self.picked
        return Cost(
            {"vector": scale(tokens, self.E * per_expert), "special": scale(tokens, self.E)},
            {
                "weights": self.activation.bytes(self.E if self.bias else 0),
                "activations": scale(tokens, self.activation.bytes(self.E)),
            },
            {"activations": scale(tokens, picked.bytes(2 * self.k))},
            1,
        )

    def params(self) -> Params:
        return {self.activation: self.E} if self.bias else {}


def permute(width: Any, k: Any, activation: Format = BF16, name: str = "permute") -> Elementwise:
    """Rows copied into the order of their experts, for matmuls that do not gather: each read once, written k times."""
    return Elementwise(width, k * width, 0, activation, name=name)


def combine(width: Any, terms: Any, activation: Format = BF16, name: str = "combine") -> Elementwise:
    """The weighted sum of ``terms`` rows per token: of the picked experts and what the shared ones gave."""
    return Elementwise(terms * width, width, 2 * terms * width, activation, name=name)


@dataclass(frozen=True)
class MoE(Block):
    """A mixture-of-experts feed-forward block.

    Parameters ``D E + 3 E D F`` and the shared experts' ``3 D shared_F`` (gated); routed FLOPs ``6 k D F`` per token;
    routed weights read ``expected_experts(tokens)`` times an expert's bytes.

    Attributes:
        D: width of the residual stream. F: width of one routed expert. E, k: routed experts, picked per token.
        shared_F: total width of the shared experts, 0 for none. shared_gate: a sigmoid gate (D weights) on their output.
        gated: three matrices per expert, two otherwise. bias: biases on the routed experts' projections; shared_bias: on
            those of the shared experts and of the latent.
        router_bias: a stored correction of E elements. router_linear_bias: a bias of the router's projection.
        weight, router_weight, shared_weight: storage of experts, router and shared experts (None: as experts).
        down_weight: storage of the routed experts' second projection (None: as their first).
        latent: width that routed experts work on instead of D, between two projections (Nemotron 3), None for D.
        latent_weight: storage of those two projections (None: as the shared experts).
        skew: exponent of power-law routing, 0 for uniform. tile: rows to which an expert's share is padded.

    Raises InputError where k exceeds E.
    """

    D: Any
    F: Any
    E: Any
    k: Any
    shared_F: Any = 0
    shared_gate: bool = False
    gated: bool = True
    bias: bool = False
    shared_bias: bool = False
    router_bias: bool = False
    router_linear_bias: bool = False
    weight: Format = BF16
    router_weight: Format = BF16
    shared_weight: Format | None = None
    down_weight: Format | None = None
    activation: Format = BF16
    latent: Any = None
    latent_weight: Format | None = None
    skew: float = 0
    tile: int = 1
    name: str = "moe"

    def __post_init__(self) -> None:
        if isinstance(self.k, int) and isinstance(self.E, int) and not 1 <= self.k <= self.E:
            raise InputError(f"experts per token: {self.k} is not between 1 and the {self.E} experts")

    def expected_experts(self, tokens: Any) -> Any:
        """Expected number of distinct routed experts that a step over ``tokens`` tokens hits; see ``expected_experts``."""
        return expected_experts(self.E, self.k, tokens, self.skew)

    @cached_property
    def router(self) -> tuple[Component, ...]:
        """The router's projection and its choice."""
        return (
            Linear(self.D, self.E, self.router_linear_bias, self.router_weight, self.activation, name=f"{self.name}.router"),
            Select(self.E, self.k, self.router_bias, self.activation, name=f"{self.name}.select"),
        )

    @cached_property
    def experts(self) -> tuple[Component, ...]:
        """The routed experts: two grouped matmuls, the activation fused into the first."""
        width = self.D if self.latent is None else self.latent
        common = {
            "E": self.E, "k": self.k, "bias": self.bias, "activation": self.activation, "skew": self.skew, "tile": self.tile,
        }  # fmt: skip
        second = self.weight if self.down_weight is None else self.down_weight
        first = GroupedLinear(
            width, 2 * self.F if self.gated else self.F, stored=self.F, gathers=True,
            epilogue=ACTIVATION_FLOPS + (1 if self.gated else 0),
            name=f"{self.name}.{'gate_up' if self.gated else 'up'}", weight=self.weight, **common,
        )  # fmt: skip
        return (first, GroupedLinear(self.F, width, weight=second, name=f"{self.name}.down", **common))

    @cached_property
    def shared(self) -> tuple[Component, ...]:
        """The shared experts and their gate."""
        if self.shared_F == 0:
            return ()
        weight = self.weight if self.shared_weight is None else self.shared_weight
        block = MLP(
            self.D, self.shared_F, self.gated, self.shared_bias, weight, self.activation, name=f"{self.name}.shared"
        )  # fmt: skip
        if not self.shared_gate:
            return block.parts
        gate = Linear(self.D, 1, weight=self.router_weight, activation=self.activation, name=f"{self.name}.shared_gate")
        return (*block.parts, gate)

    @cached_property
    def parts(self) -> tuple[Component, ...]:
        return (*self.router, *self._routed(), *self.shared, *self._sum())

    def _routed(self) -> tuple[Component, ...]:
        if self.latent is None:
            return self.experts
        formats = (self.shared_bias, self._latent_weight, self.activation)
        inward = Linear(self.D, self.latent, *formats, name=f"{self.name}.to_latent")
        outward = Linear(self.latent, self.D, *formats, name=f"{self.name}.from_latent")
        return (inward, *self.experts, *self._combine(self.latent, self.k), outward)

    @property
    def _latent_weight(self) -> Format:
        if self.latent_weight is not None:
            return self.latent_weight
        return self.weight if self.shared_weight is None else self.shared_weight

    def _sum(self) -> tuple[Component, ...]:
        """The sum over picked and shared experts; a single expert needs none (its weight is applied on the way out)."""
        routed = self.k if self.latent is None else 1
        return self._combine(self.D, routed + (0 if self.shared_F == 0 else 1))

    def _combine(self, width: Any, terms: Any) -> tuple[Component, ...]:
        if terms == 1:
            return ()
        return (combine(width, terms, self.activation, f"{self.name}.combine"),)
