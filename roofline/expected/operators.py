"""The kernels of a rank's step: which components run over which tokens, and what each takes.

Matrix multiplications and passes over the residual stream run once over all tokens; attention runs over the decodes and
over the chunks of prompts. Where a model runs prefills in another form (latent attention expanded), what only that form
has runs over the prompts' tokens, and what only the decoding form has over the decodes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from roofline.components.attention import Attention, CacheWrite
from roofline.components.base import Component
from roofline.components.collective import Collective
from roofline.components.latent import BatchedLinear, EntryWrite, LatentAttention
from roofline.components.linear import Linear
from roofline.components.mla import Expand, ExpandedAttention
from roofline.components.moe import GroupedLinear
from roofline.errors import UnsupportedModel
from roofline.expected.calibration import Family
from roofline.expected.kernels import (
    Kernels,
    Seconds,
    activation_bytes,
    affine,
    attention,
    expanded,
    experts,
    gather,
    latent,
    matmul,
    reduce,
    rotary_bytes,
    storage,
    streamed,
)  # fmt: skip
from roofline.expected.load import Load
from roofline.model import Model

LOAD = "load"
GATHERED = "gathered"
"""Kind of a kernel that runs over the tokens of several ranks (``parallel.experts``, whose import a short answer spares)."""
ROWS: dict[str, Callable[[Load], Any]] = {
    "all": lambda load: load.tokens,
    "decodes": lambda load: load.decode_tokens,
    "prompts": lambda load: load.prompt_tokens,
    "logits": lambda load: load.rows,
    "latents": lambda load: load.chunks * (load.chunk + load.behind),
}
"""Numbers of rows that kernels run over."""
PASSES = ("norm", "elementwise", "embedding", "scale", "learned", "router")


@dataclass(frozen=True)
class Operator:
    """One kernel of a step.

    Attributes:
        count: how often the step runs it.
        kind: "matmul", "attention", "experts", "dispatch" (what experts take beside their matmuls), "reduce" or "pass".
        seconds: of one run. family: whose constants it takes, "" for passes. error: of that family on held-out rows.
        launches: kernels that one run is. over: the number of rows that alone decides its time (a key of ``ROWS``), or "load".
    """

    count: int
    kind: str
    name: str
    seconds: Seconds
    family: str = ""
    error: float = 0.0
    launches: int = 1
    over: str = LOAD


def operators(stage: Model, kernels: Kernels) -> list[Operator]:
    """The kernels of one rank's step.

    Raises UnsupportedModel naming a component without a time model, or a kernel without constants.
    """
    decoding, filling = stage.counted, stage.for_prefill.counted
    both = {part for _, part in decoding} & {part for _, part in filling}
    writes: dict[type, float] = {
        kind: max((affine(p)[1] for _, p in decoding if isinstance(p, kind)), default=0.0) for kind in (CacheWrite, EntryWrite)
    }
    found: list[Operator] = []
    for number, part in decoding:
        found += _of(kernels, number, part, writes, "all" if part in both else "decodes")
    for number, part in filling:
        if part not in both:
            found += _of(kernels, number, part, writes, "prompts")
    return [*found, *_experts(kernels, decoding)]


def _of(kernels: Kernels, number: int, part: Component, writes: Mapping[type, float], over: str) -> Iterator[Operator]:
    """The operators of one component, experts apart. Kernels of prompts alone count no launch: their steps have a floor."""
    if _grouped(part):
        return

    def made(kind: str, family: Family, seconds: Seconds, over: str = over, launches: int = 1) -> Operator:
        own = 0 if over == "prompts" else launches
        return Operator(number, kind, part.name, seconds, family.name, family.mape, own, over)

    def passing(fixed: float, per_token: float, over: str = over, launches: int = 1) -> Operator:
        seconds = streamed(kernels, fixed, per_token, ROWS[over])
        return Operator(number, "pass", part.name, seconds, launches=0 if over == "prompts" else launches, over=over)

    if isinstance(part, (CacheWrite, EntryWrite)):
        yield passing(0.0, rotary_bytes(part))
    elif isinstance(part, Linear):
        rows = over if part.rows == "tokens" else "logits"
        operator = f"linear {storage(part.weight)}"
        family, seconds = matmul(kernels, part.inputs, part.outputs, part.weight, ROWS[rows], operator)
        yield made("matmul", family, seconds, rows, 1 + kernels.quantises(operator, family))
        if part.stored is not None:
            yield passing(0.0, activation_bytes(part))
    elif isinstance(part, BatchedLinear):
        wide = part.batches * part.outputs
        yield made("matmul", *matmul(kernels, part.inputs, wide, part.weight, ROWS[over], f"heads {storage(part.weight)}"))
    elif isinstance(part, Expand):
        wide = part.N * (part.H + part.value_dim)
        family, seconds = matmul(kernels, part.R, wide, part.weight, ROWS["latents"], f"linear {storage(part.weight)}")
        yield made("matmul", family, seconds, LOAD, 0)
    elif isinstance(part, ExpandedAttention):
        yield made("attention", *expanded(kernels, part, writes[EntryWrite]), over=LOAD, launches=0)
    elif type(part) is Attention:
        decode, one, prefill, many = attention(kernels, part, writes[CacheWrite])
        yield made("attention", decode, one, over=LOAD)
        yield made("attention", prefill, many, over=LOAD, launches=0)
    elif isinstance(part, LatentAttention):
        yield made("attention", *latent(kernels, part, writes[EntryWrite]), over=LOAD)
    elif isinstance(part, Collective):
        if part.servers > 1:
            raise UnsupportedModel("collectives between servers have no calibrated time")
        rows = "logits" if part.rows == "logit_rows" else over
        yield made("reduce", *(reduce if part.operation == "all-reduce" else gather)(kernels, part, ROWS[rows]), over=rows)
    elif part.kind in PASSES:
        yield passing(*affine(part), launches=0 if part.kind == "learned" else 1)
    else:
        raise UnsupportedModel(f"{type(part).__name__} ({part.name}) has no time model")


def constant(seconds: float) -> Seconds:
    """The same time for any load."""
    return lambda load: seconds


def _grouped(part: Component) -> GroupedLinear | None:
    inner = part.inner if part.kind == GATHERED else part  # type: ignore[attr-defined]
    return inner if isinstance(inner, GroupedLinear) else None


def _experts(kernels: Kernels, counted: tuple[tuple[int, Component], ...]) -> Iterator[Operator]:
    """Pairs of grouped matmuls: first and second projection, in their order."""
    pairs = [(number, part, inner) for number, part in counted if (inner := _grouped(part)) is not None]
    for (number, part, up), (_, _, down) in zip(pairs[::2], pairs[1::2], strict=True):
        ranks = float(part.ranks) if part.kind == GATHERED else 1.0  # type: ignore[attr-defined]
        family, seconds, launch = experts(kernels, up, down, ranks)
        yield Operator(number, "experts", up.name, seconds, family.name, family.mape, over="all")
        yield Operator(number, "dispatch", up.name, constant(launch), family.name, family.mape, 0, "all")
