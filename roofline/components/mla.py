"""Multi-head latent attention: keys and values of all heads are projections of one cached latent per token.

The same mathematics runs in three orders, which cost very differently:

* "absorbed": the key projection is folded into the query and the value projection into the output, so that attention
  runs over the latents themselves. Per query-key pair ``2 N (R + P) + 2 N R`` FLOP, and only R + P elements per cached
  token are read. What engines use to decode and to verify drafts.
* "expanded": keys and values of every head are projected from the latents, cached ones and new ones alike, and
  attention runs over heads of width H + P and value_dim. ``2 N (H + P + value_dim)`` FLOP per pair, and
  ``2 R N (H + value_dim)`` per latent. What engines use to prefill (S = 0), what vLLM uses for each chunk of a chunked
  prefill, and what transformers 5 does in every step.
* "cached": keys and values are projected once and cached expanded: MHA in all but the projections, with its state.

Which order is cheaper depends on T and S, and formulas do not branch on those: a block is built absorbed, and its
``prefill_form`` is expanded.
Source: DeepSeek-V2 (arXiv 2405.04434), sections 2.1 and C; vLLM, v1/attention/backends/mla/common.py.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, ClassVar

from roofline.components.attention import Attention, CacheWrite
from roofline.components.base import Block, Component, Params
from roofline.components.latent import (
    EVERYTHING,
    BatchedLinear,
    EntryWrite,
    LatentAttention,
    Layout,
    Reach,
    latent_layout,
    layout_bytes,
)
from roofline.components.linear import Linear
from roofline.components.mixing import Norm
from roofline.cost import Cost
from roofline.errors import InputError
from roofline.formats import BF16, Format
from roofline.work import Batch, Work

FORMS = ("absorbed", "expanded", "cached")


@dataclass(frozen=True)
class Expand(Component):
    """Projection of all S + T latents to the keys and values of every head, one kernel.

    FLOPs ``2 R N (H + value_dim)`` per latent. Reads the weights once, the cached latents from the cache and the new
    ones from the activations; writes N (H + P + value_dim) elements per latent: the shared rotary key is copied to
    every head.
    """

    kind: ClassVar[str] = "linear"

    N: Any
    R: Any
    P: Any
    H: Any
    value_dim: Any
    layout: Layout
    weight: Format = BF16
    activation: Format = BF16
    name: str = "expand"

    @cached_property
    def _constants(self) -> tuple[Any, Any, Any, Any, Any]:
        """FLOPs per latent, weight bytes, bytes of a cached latent, of a new one, of an expanded one."""
        elements = self.R * self.N * (self.H + self.value_dim)
        return (
            2 * elements,
            self.weight.bytes(elements),
            layout_bytes(self.layout),
            self.activation.bytes(self.R + self.P),
            self.activation.bytes(self.N * (self.H + self.P + self.value_dim)),
        )

    def cost(self, work: Batch) -> Cost:
        flops, weights, cached, new, expanded = self._constants
        behind = sum(group.B * group.S for group in work.groups)
        latents = behind + work.tokens
        return Cost(
            {self.weight.unit: flops * latents},
            {"weights": weights, "state": cached * behind, "activations": new * work.tokens},
            {"activations": expanded * latents},
            1,
        )

    def params(self) -> Params:
        return {self.weight: self.R * self.N * (self.H + self.value_dim)}


@dataclass(frozen=True)
class ExpandedAttention(Attention):
    """Attention whose keys and values were expanded in this step: they are activations, not state."""

    def group_cost(self, work: Work) -> Cost:
        cost = super().group_cost(work)
        read = {"activations": cost.read["activations"] + cost.read["state"]}
        return Cost(dict(cost.flops), read, dict(cost.write), cost.launches)


@dataclass(frozen=True)
class MLA(Block):
    """Latent attention of one layer: low-rank query, latent key-value, rotary key beside it, output projection.

    Parameters ``D Q + Q N (H + P) + D (R + P) + R N (H + value_dim) + N value_dim D`` without norms (``D N (H + P)`` in
    place of the first two without a query rank); state R + P elements per token: the value shares the latent, so there
    is no factor 2.

    Attributes:
        D: width of the residual stream. N: heads.
        Q: rank of the query, None for a full projection. R: rank of the latent. P: rotary elements beside it.
        H: elements of a head that are not rotated. value_dim: of a value head, None for H.
        form: "absorbed", "expanded" or "cached".
        kv: format of the cache; an 8-bit one takes FlashMLA's layout, which keeps the rotary part in bf16.
        scaled: whether that layout is used; False stores all R + P elements in ``kv`` under one scale per tensor.
        bias: biases of the projections that read and write the residual stream.
        weight: storage of the projections; overrides: ((projection, format), ...) for "q", "q_a", "q_b", "kv_a",
            "kv_b", "o" that differ.
    """

    D: Any
    N: Any
    Q: Any
    R: Any
    P: Any
    H: Any
    value_dim: Any = None
    form: str = "absorbed"
    kv: Format = BF16
    scaled: bool = True
    bias: bool = False
    weight: Format = BF16
    activation: Format = BF16
    overrides: tuple[tuple[str, Format], ...] = ()
    name: str = "attention"

    def __post_init__(self) -> None:
        if self.form not in FORMS:
            raise InputError(f"form: {self.form!r} is not an order that latent attention runs in; use one of {', '.join(FORMS)}")

    def prefill_form(self) -> Component:
        """The expanded form, where the block is absorbed."""
        return replace(self, form="expanded") if self.form == "absorbed" else self

    @cached_property
    def layout(self) -> Layout:
        """How one cached latent is stored."""
        return latent_layout(self.R, self.P, self.kv, scaled=self.scaled)

    @property
    def value_width(self) -> Any:
        """Elements of one value head."""
        return self.H if self.value_dim is None else self.value_dim

    def format_of(self, projection: str) -> Format:
        """Storage of one projection."""
        return dict(self.overrides).get(projection, self.weight)

    def linear(self, projection: str, inputs: Any, outputs: Any, bias: bool = False) -> Linear:
        """One projection of the block."""
        return Linear(inputs, outputs, bias, self.format_of(projection), self.activation, name=f"{projection}_proj")

    @cached_property
    def parts(self) -> tuple[Component, ...]:
        core = {"absorbed": self._absorbed, "expanded": self._expanded, "cached": self._cached}[self.form]
        output = self.linear("o", self.N * self.value_width, self.D, self.bias)
        return (*self._projections(), *self._before_core(), *core(), output)

    def _projections(self) -> tuple[Component, ...]:
        """What leads from the residual stream to queries and latent; the two first matmuls are one where formats agree."""
        heads, latent = self.N * (self.H + self.P), self.R + self.P
        first: tuple[Component, ...]
        if self.Q is None:
            first = (self.linear("q", self.D, heads), self.linear("kv_a", self.D, latent, self.bias))
            return (*first, self._norm(self.R))
        if self.format_of("q_a") == self.format_of("kv_a"):
            first = (replace(self.linear("q_a", self.D, self.Q + latent, self.bias), name="q_a_kv_a_proj"),)
        else:
            first = (self.linear("q_a", self.D, self.Q, self.bias), self.linear("kv_a", self.D, latent, self.bias))
        return (*first, self._norm(self.Q + self.R), self.linear("q_b", self.Q, heads))

    def _norm(self, elements: Any) -> Norm:
        return Norm(elements, elements, weight=self.activation, activation=self.activation, name="latent_norm")

    def _before_core(self) -> tuple[Component, ...]:
        """What runs between projections and attention core: the write of the new latents."""
        return (
            EntryWrite(self.N, self.P, self.layout, stores=self.form != "cached", activation=self.activation),
        )  # fmt: skip

    @property
    def reach(self) -> Reach:
        """Which latents a query attends to: all behind it."""
        return EVERYTHING

    def _absorbed(self) -> tuple[Component, ...]:
        formats = {"weight": self.format_of("kv_b"), "activation": self.activation}
        return (
            BatchedLinear(self.N, self.H, self.R, name="absorb_key", **formats),
            LatentAttention(
                self.N, self.R + self.P, self.R, self.layout, (self.reach,), activation=self.activation,
            ),
            BatchedLinear(self.N, self.R, self.value_width, name="absorb_value", **formats),
        )  # fmt: skip

    def _expanded(self) -> tuple[Component, ...]:
        return (
            Expand(
                self.N, self.R, self.P, self.H, self.value_width, self.layout, self.format_of("kv_b"), self.activation
            ),
            ExpandedAttention(
                self.N, self.N, self.H + self.P, self.value_width, kv=self.activation, activation=self.activation,
                cached=False,
            ),
        )  # fmt: skip

    def _cached(self) -> tuple[Component, ...]:
        heads: dict[str, Any] = {"N": self.N, "K": self.N, "H": self.H + self.P, "value_dim": self.value_width}
        return (
            self.linear("kv_b", self.R, self.N * (self.H + self.value_width)),
            CacheWrite(**heads, kv=self.kv, activation=self.activation, name="cache_write"),
            Attention(**heads, kv=self.kv, activation=self.activation),
        )
