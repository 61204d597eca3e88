"""What an engine allocates on one device: the terms of its memory, each with a range, and the tokens that remain.

The other number, what the maths needs (weights, state and the workspace of one kernel), is ``memory.Memory``; both are
shown side by side. The activation term is the peak of the engine's own profile run: a forward pass over its token
budget, or the sampler over its largest batch, whichever is larger.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Any

from roofline.accelerator import Accelerator
from roofline.components.attention import AttentionBlock, CacheWrite
from roofline.components.base import weight_bytes
from roofline.components.linear import Embedding, Linear
from roofline.components.moe import GroupedLinear
from roofline.engines.layout import Layout, layout
from roofline.engines.profile import Figure, Profile
from roofline.errors import InputError
from roofline.model import Model
from roofline.parallel.experts import Gathered
from roofline.parallel.mesh import Mesh
from roofline.parallel.ranks import Sharded

NEWEST_PADDED = ("sm_90", "sm_100", "sm_103", "sm_120")
"""Architectures whose mxfp4 kernels want padded experts."""
LARGE = 60 * 2**30
"""Bytes of memory beyond which SGLang reserves at least ``reserve_floor``."""
MANY = 4
"""Devices from which on communication buffers are those of many."""
FORWARD_HIGH = Fraction(13, 10)
"""Upper end of the forward pass's peak over its estimate: temporaries of kernels that are not modelled."""


@dataclass(frozen=True)
class Term:
    """Bytes of one kind on the worst device.

    Attributes:
        low, best, high: range and best value. exact: whether it is arithmetic. note: what it is made of.
    """

    name: str
    low: Any
    best: Any
    high: Any
    note: str = ""

    @property
    def exact(self) -> bool:
        """Whether it is arithmetic: no range."""
        return bool(self.low == self.high)

    def to_dict(self) -> dict[str, Any]:
        """All figures under keys that carry their unit."""
        from roofline.memory import plain

        return {
            "term": self.name,
            "low_bytes": plain(self.low),
            "best_bytes": plain(self.best),
            "high_bytes": plain(self.high),
            "exact": self.exact,
            "note": self.note,
        }


def _exactly(name: str, value: Any, note: str = "") -> Term:
    return Term(name, value, value, value, note)


def _of(name: str, figure: Figure) -> Term:
    return Term(name, figure.low, figure.value, figure.high, figure.source)


@dataclass(frozen=True)
class Settings:
    """What an engine is started with; None for its default.

    Attributes:
        memory_fraction: see the profile's ``fraction_base``. max_model_len: longest request.
        batched_tokens: token budget of a step. sequences: sequences of a step. page_tokens: tokens of a page.
    """

    memory_fraction: Fraction | None = None
    max_model_len: int | None = None
    batched_tokens: int | None = None
    sequences: int | None = None
    page_tokens: int | None = None

    def __post_init__(self) -> None:
        if self.memory_fraction is not None and not 0 < self.memory_fraction <= 1:
            raise InputError(f"memory fraction: {float(self.memory_fraction):g} is not in (0, 1]")
        for name in ("max_model_len", "batched_tokens", "sequences", "page_tokens"):
            value = getattr(self, name)
            if value is not None and (type(value) is not int or not 1 <= value <= 10**9):
                raise InputError(f"{name.replace('_', ' ')}: {value!r} is out of range; give 1 to 1,000,000,000")


@dataclass(frozen=True)
class Allocation:
    """The memory of the device that holds fewest tokens.

    Attributes:
        model, profile, accelerator, mesh: what runs where. settings: with every default filled in.
        budget: what the engine allows itself. terms: what goes off it, in order. outside: terms beside the budget.
        pool: what remains for state; negative where nothing does.
        layout: pages, None for a model without state. admitted: the context that the config admits, None if unknown.
    """

    model: str
    profile: Profile
    accelerator: Accelerator
    mesh: Mesh
    settings: Settings
    budget: Term
    terms: tuple[Term, ...]
    outside: tuple[Term, ...]
    layout: Layout | None
    scale: Fraction = Fraction(1)

    @property
    def pool(self) -> Term:
        """Bytes for cached state: best, and the range of all terms against it together."""
        share = self.scale
        low = share * (self.budget.low - sum(term.high for term in self.terms))
        high = share * (self.budget.high - sum(term.low for term in self.terms))
        best = share * (self.budget.best - sum(term.best for term in self.terms))
        return Term("state pool", low, best, high, "what remains of the budget")

    @property
    def _sizes(self) -> tuple[int, int]:
        assert self.settings.max_model_len is not None
        assert self.settings.batched_tokens is not None
        return self.settings.max_model_len, self.settings.batched_tokens

    @property
    def wanted(self) -> Any:
        """Bytes of state without which the engine does not start: of every sequence where it takes them all, else of one."""
        assert self.settings.sequences is not None
        return self.request_bytes * (self.settings.sequences if self.profile.whole_context else 1)

    def taken(self, pool: Any) -> Any:
        """Bytes of a pool that the engine takes: what all its sequences can need, or everything."""
        return min(pool, self.wanted) if self.profile.whole_context else pool

    def tokens(self, pool: Any) -> int | None:
        """Tokens that a pool holds, as the start-up log counts them; None without growing state."""
        return None if self.layout is None else self.layout.tokens(self.taken(pool), *self._sizes)

    def concurrency(self, pool: Any) -> Fraction | None:
        """Requests of the longest length that a pool holds at once."""
        return None if self.layout is None else self.layout.concurrency(self.taken(pool), *self._sizes)

    @property
    def request_bytes(self) -> Any:
        """Bytes of one request of the longest length."""
        return 0 if self.layout is None else self.layout.request_bytes(*self._sizes)

    @property
    def fits(self) -> bool:
        """Whether the engine starts: the pool holds one request of ``max_model_len``, or all that are allocated at once."""
        return bool(self.pool.best > 0 and self.pool.best >= self.wanted)

    @property
    def longest(self) -> int:
        """The longest request that the pool holds, up to ``max_model_len``."""
        longest, batched = self._sizes
        if self.layout is None:
            return longest
        assert self.settings.sequences is not None
        share = self.settings.sequences if self.profile.whole_context else 1
        return self.layout.longest_request(self.pool.best / share, batched, longest)


def _width(model: Model) -> Any:
    return next(c.width for c in model.embedding if hasattr(c, "width"))


def _grouped(part: Any) -> tuple[GroupedLinear, int] | None:
    """(grouped matmul, ranks whose tokens it sees) of a kernel; None for another."""
    if isinstance(part, Gathered) and isinstance(part.inner, GroupedLinear):
        return part.inner, part.ranks
    return (part, 1) if isinstance(part, GroupedLinear) else None


def forward_elements(stage: Model, width: Any, copies: int) -> Any:
    """Elements per batched token alive at the peak of a forward pass: a feed-forward layer's, and the residual stream's.

    Dense: the first matmul's output and the activated half of it. Experts: both per picked expert, the second matmul's
    output in the place of the first's.
    """
    widest: Any = 0
    for _, part in stage.counted:
        if isinstance(part, Linear) and part.epilogue:
            widest = max(widest, part.outputs + (part.outputs if part.stored is None else part.stored))
        elif (found := _grouped(part)) and found[0].epilogue:
            inner, ranks = found
            stored = inner.outputs if inner.stored is None else inner.stored
            widest = max(widest, ranks * inner.k * (max(inner.outputs, width) + stored))
    return widest + copies * width


def _activations(whole: Model, stage: Model, profile: Profile, settings: Settings) -> Term:
    """The peak of the profile run."""
    assert settings.batched_tokens is not None
    assert settings.sequences is not None
    width = _width(whole)
    tokens, rows = settings.batched_tokens, min(settings.sequences, settings.batched_tokens)
    element = profile.number("activation_bytes")
    forward = element * tokens * forward_elements(stage, width, profile.number("residual_copies"))
    head = next((c for c in whole.head if isinstance(c, Linear) and c.rows == "logit_rows"), None)
    figure = profile.figure("logit_bytes")
    logits = 0 if head is None else (tokens if profile.logits_of_all_tokens else rows) * head.outputs
    hidden = element * tokens * width
    low, best, high = (hidden + rate * logits for rate in (figure.low, figure.value, figure.high))
    sampler = best > forward
    note = (
        f"sampler over {'all batched tokens' if profile.logits_of_all_tokens else f'{rows:,} sequences'}, "
        f"{float(figure.value):g} B per logit"
        if sampler
        else f"forward pass over {tokens:,} tokens"
    )
    return Term("activations", max(low, forward), max(best, forward), max(high, FORWARD_HIGH * forward), note)


def _extra_weights(whole: Model, stage: Model, accelerator: Accelerator, profile: Profile) -> Term:
    """What an engine stores beside the parameters: rotary tables, padding of experts."""
    rotary = max((part.rotary for _, part in stage.counted if isinstance(part, CacheWrite)), default=0)
    rotary = max([rotary, *(b.rotary for layer in stage.layers for b in layer.blocks if isinstance(b, AttentionBlock))])
    table = 0 if profile.rotation_computed else 2 * rotary * (whole.max_context or 0)
    multiple = profile.number("expert_multiple")
    padding: Any = 0
    for number, part in stage.counted:
        found = _grouped(part)
        if found and found[0].weight.name == "mxfp4" and accelerator.architecture in NEWEST_PADDED:
            inner = found[0]
            size = inner.inputs if inner.stored is None and not inner.gathers else inner.stored
            padded = -(-size // multiple) * multiple
            padding += number * inner.weight.bytes(inner.E * inner.inputs * inner.outputs) * Fraction(padded - size, size)
    total = table + padding
    parts = [text for amount, text in ((table, "rotary table"), (padding, "padded experts")) if amount]
    return Term("other weights", Fraction(9, 10) * total, total, Fraction(11, 10) * total, ", ".join(parts) or "none")


def filled(model: Model, profile: Profile, accelerator: Accelerator, mesh: Mesh, given: Settings) -> Settings:
    """Settings with the engine's defaults in place of what was not given. Raises InputError where nothing says a length."""
    length = given.max_model_len or model.max_context
    if length is None:
        raise InputError(f"max-model-len: the config of {model.name} does not say its context; give --max-model-len")
    sequences = given.sequences or profile.sequences(accelerator, mesh.tp * mesh.dp)
    settings = replace(
        given,
        max_model_len=length,
        batched_tokens=given.batched_tokens or profile.batched_tokens(accelerator, length),
        sequences=sequences,
    )
    if given.memory_fraction is None:
        settings = replace(settings, memory_fraction=_default_fraction(profile, accelerator, mesh, settings))
    return settings


def _default_fraction(profile: Profile, accelerator: Accelerator, mesh: Mesh, settings: Settings) -> Fraction:
    """The engine's own memory fraction; SGLang derives its from what it reserves for each setting."""
    if profile.id != "sglang":
        return Fraction(profile.figure("memory_fraction").value)
    assert settings.batched_tokens is not None
    assert settings.sequences is not None
    total = (accelerator.reported or accelerator.capacity).value
    graph, dp = settings.sequences, mesh.dp
    reserve = profile.figure("reserve_base").value + profile.figure("reserve_per_token").value * max(
        settings.batched_tokens, 2048
    )
    reserve += profile.figure("reserve_per_graph").value * graph
    reserve += profile.figure("reserve_per_rank").value * mesh.ranks
    if dp > 1:
        reserve += profile.figure("reserve_per_dp").value * graph * dp
        reserve += profile.figure("reserve_per_large").value * graph * dp if graph > 300 else 0
    if total > LARGE:
        reserve = max(reserve, profile.figure("reserve_floor").value)
    if reserve >= total:
        raise InputError(f"memory fraction: SGLang would reserve more than {accelerator.id} has; give --memory-fraction")
    return Fraction(round(1000 * (total - reserve) / total), 1000)


def allocate(
    model: Model, accelerator: Accelerator, mesh: Mesh, profile: Profile, given: Settings, ranks: Sharded | None = None
) -> Allocation:
    """What an engine allocates for a model on the device of the mesh that holds fewest tokens.

    ``ranks`` is the model on that mesh where it is at hand.

    Raises InputError for settings out of range, UnsupportedModel for state that has no page rule.
    """
    settings = filled(model, profile, accelerator, mesh, given)
    stages = (ranks or Sharded(model, accelerator, mesh)).stages
    found = [_stage(model, stage, accelerator, mesh, profile, settings) for stage in stages]
    return min(found, key=lambda one: (one.tokens(one.pool.best) or 0, one.pool.best))


def _weights(whole: Model, stage: Model, profile: Profile) -> Term:
    """Stored weights of a rank. A table that stays on the host counts only where the head uses it too: it is copied then."""
    note = "parameters of this rank, scales and towers included"
    table = next((c for c in stage.embedding if isinstance(c, Embedding) and not c.tied), None)
    if not profile.host_embedding or table is None:
        return _exactly("weights", stage.weight_bytes, note)
    if any(isinstance(c, Linear) and c.tied for c in whole.head):
        return _exactly("weights", stage.weight_bytes, f"{note}; the token embedding once, as the head")
    on_host = weight_bytes(table.params())
    return _exactly("weights", stage.weight_bytes - on_host, f"{note}; the token embedding stays on the host")


def _stage(whole: Model, stage: Model, accelerator: Accelerator, mesh: Mesh, profile: Profile, settings: Settings) -> Allocation:
    assert settings.memory_fraction is not None
    assert settings.sequences is not None
    devices = "single" if mesh.ranks == 1 else "multi" if mesh.ranks < MANY else "many"
    other = _of("outside torch", profile.figure(f"{devices}_non_torch"))
    weights = _weights(whole, stage, profile)
    extra = _extra_weights(whole, stage, accelerator, profile)
    activations = _activations(whole, stage, profile, settings)
    graphs = _of("CUDA graphs", profile.figure("graphs"))
    capacity, fraction, scale = accelerator.capacity.value, settings.memory_fraction, Fraction(1)
    outside: list[Term] = []
    terms = [weights, extra, activations, other]
    (terms if profile.graphs_counted else outside).append(graphs)
    base = f"{float(fraction):g} of {accelerator.capacity_rung} memory"
    budget = _exactly("budget", fraction * capacity, base)
    if profile.fraction_base == "free-before-load":
        budget = Term(
            "budget", fraction * (capacity - other.high), fraction * (capacity - other.best), fraction * (capacity - other.low),
            f"{float(fraction):g} of what is free before weights are loaded",
        )  # fmt: skip
        terms, outside = [weights, extra], [activations, other, graphs]
    elif profile.fraction_base == "free-after-load":
        budget, scale = _exactly("budget", capacity, f"{float(fraction):g} of what weights and workspace leave"), fraction
    if profile.separate_state:
        fixed = sum(n * piece.bytes(0) for n, pieces in stage.state for piece in pieces if piece.grows_with == "nothing")
        if fixed:
            terms.append(_exactly("recurrent state", settings.sequences * fixed, f"of {settings.sequences:,} sequences"))
    pages = layout(stage.state, profile, settings.page_tokens)
    return Allocation(
        whole.name, profile, accelerator, mesh, settings, budget, tuple(terms), tuple(outside), pages, scale
    )  # fmt: skip


def contradiction(allocation: Allocation, tokens: int) -> str | None:
    """Why a claimed capacity cannot be true: state and weights together exceed the device; None where they do not."""
    if allocation.layout is None:
        return None
    weights, room = allocation.terms[0].best, allocation.accelerator.capacity.value
    claimed = tokens * allocation.layout.row_bytes
    if allocation.layout.uniform and claimed + weights > room:
        from roofline.units import capacity

        return (
            f"{tokens:,} tokens take {capacity(claimed)} per GPU, which with {capacity(weights)} of weights exceeds the "
            f"{capacity(room)} of {allocation.accelerator.id}"
        )
    return None
