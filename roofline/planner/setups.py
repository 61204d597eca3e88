"""Setups: a model in given formats on a mesh of one kind of accelerator under an engine, with its step times and its memory."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from functools import cached_property
from typing import TYPE_CHECKING, Any

from roofline.accelerator import Accelerator
from roofline.allocation import Allocation, Settings, allocate
from roofline.components.moe import MoE
from roofline.engines.profile import Profile
from roofline.errors import RooflineError, UnsupportedModel
from roofline.formats import Format
from roofline.model import Model
from roofline.parallel.layouts import layouts
from roofline.parallel.mesh import Mesh
from roofline.sharded import ShardedDeployment
from roofline.work import Work

if TYPE_CHECKING:
    from roofline.planner.demand import Demand
    from roofline.serving.steps import StepShape, StepTimes

STORED = "stored"
FAST_LINKS = ("nvlink", "xgmi", "ici")
WHOLE_DATA_PARALLEL = ("sglang", "trtllm")
"""Engines whose attention data parallelism takes all of the tensor-parallel ranks (``--enable-dp-attention``,
``enable_attention_dp``)."""
LAYERS_ONLY = ("llamacpp",)
"""Engines that split a model by layers (``--split-mode layer``); their split by rows is not modelled."""
SHARE, BLOCK, BUDGET = Fraction(9, 10), 16, 2048
"""Memory that is used and tokens of a block where an engine's pages are not modelled; a token budget to ask memory with."""
BATCHES = (64, 256, 1024)
"""Sequences per step for which memory is worked out; a batch takes the next larger one's."""

MARGIN = 2.0
"""Standard deviations of the tokens of all who run that a pool has room for beyond their mean."""

CHUNKED = ("trtllm",)
"""Engines that are launched with chunked prefill beside decodes, whatever their default."""


def _batch(sequences: int) -> int:
    """The number of sequences whose memory stands for so many."""
    return next((size for size in BATCHES if sequences <= size), sequences)


def scheduler(engine: Profile) -> str:
    """How an engine schedules as it is launched here; see ``serving.policies``."""
    from roofline.serving.policies import OF_ENGINE

    return "chunked" if engine.id in CHUNKED else OF_ENGINE[engine.id]


@dataclass(frozen=True)
class Variant:
    """A model with weights and cache in given formats; ``STORED`` for what its checkpoint has."""

    model: Model
    weights: str
    kv: str


class Remembered:
    """Step times that are worked out once for each shape."""

    def __init__(self, times: StepTimes) -> None:
        self.times, self._known = times, {}  # type: ignore[var-annotated]
        self.provenance, self.notes = times.provenance, times.notes
        self.decode_run = times.decode_run
        self.request_seconds = getattr(times, "request_seconds", lambda running: 0.0)
        self.prepare = getattr(times, "prepare", lambda shapes: None)

    def seconds(self, shape: StepShape) -> float:
        """Seconds of one step."""
        if shape not in self._known:
            self._known[shape] = self.times.seconds(shape)
        found: float = self._known[shape]
        return found


@dataclass
class Setup:
    """One instance before its settings are chosen.

    Attributes:
        variant, accelerator, mesh, engine: what runs where. longest: tokens of the longest request.
        bound: step times are the datasheet's bound, whatever is calibrated.
    """

    variant: Variant
    accelerator: Accelerator
    mesh: Mesh
    engine: Profile
    longest: int
    deployment: ShardedDeployment
    bound: bool = False
    _times: Any = None
    _memory: dict[tuple[int, int], Allocation] = field(default_factory=dict)
    _users: dict[tuple[int, int, int], int | None] = field(default_factory=dict)
    _tokens: dict[tuple[int, int, int, int], float | None] = field(default_factory=dict)

    @cached_property
    def remembered(self) -> Remembered:
        """The step times, each shape worked out once."""
        return Remembered(self.times)

    @property
    def gpus(self) -> int:
        """Accelerators of one instance."""
        return self.mesh.ranks

    @cached_property
    def stalls(self) -> bool:
        """Whether decodes wait while prompts run."""
        from roofline.serving.policies import Policy

        return Policy(scheduler(self.engine)).stalls

    @property
    def times(self) -> StepTimes:
        """The best step times that are known."""
        if self._times is None:
            from roofline.serving.steps import BoundSteps, step_times

            if self.bound:
                self._times = BoundSteps(self.deployment, longest=self.longest)
            else:
                self._times = step_times(self.deployment, self.engine, longest=self.longest)
        times: StepTimes = self._times
        return times

    @cached_property
    def paged(self) -> bool:
        """Whether the engine's pages for this model are modelled; memory is what the maths needs where they are not."""
        try:
            self.memory(BUDGET, BATCHES[0])
        except UnsupportedModel:
            return False
        return True

    @property
    def notes(self) -> tuple[str, ...]:
        """What the step times and the memory rest on."""
        bare = (
            f"memory is what the maths needs in {float(SHARE):g} of each GPU: the engine's pages for this model are not modelled"
        )
        return (*self.times.notes, *(() if self.paged else (bare,)))

    def memory(self, budget: int, sequences: int) -> Allocation:
        """What the engine allocates with a token budget and a batch. Raises UnsupportedModel for state without a page rule."""
        batch = _batch(sequences)
        key = (budget, batch)
        if key not in self._memory:
            settings = Settings(max_model_len=self.longest, batched_tokens=budget, sequences=batch)
            self._memory[key] = allocate(
                self.variant.model, self.accelerator, self.mesh, self.engine, settings, self.deployment.ranks
            )
        return self._memory[key]

    def users(self, budget: int, sequences: int, draft: Model | None = None) -> int:
        """Requests of the longest length that the pool of one data-parallel rank holds at once.

        A draft model stands whole on every GPU, with its own state of each request.
        """
        key = (budget, _batch(sequences), id(draft))
        if key not in self._users:
            self._users[key] = self._held(budget, sequences, draft)
        held = self._users[key]
        return sequences if held is None else held

    def room(self, load: Demand, budget: int, sequences: int, draft: Model | None = None) -> int:
        """Requests of a load that the pool of one data-parallel rank holds at once.

        Requests of several lengths need a margin for the luck of theirs: ``n mean + MARGIN sqrt(n) deviation`` tokens, at
        their full length; prefixes that all share are held once.
        """
        if load.even and not load.shared:
            return self.users(budget, sequences, draft)
        tokens = self.tokens(load, budget, sequences, draft)
        if tokens is None:
            return sequences
        mean, deviation = load.held
        left = tokens - load.shared
        if left < mean:
            return 0
        root = ((MARGIN * deviation) ** 2 + 4 * mean * left) ** 0.5 - MARGIN * deviation
        return max(1, int((root / (2 * mean)) ** 2))

    def tokens(self, load: Demand, budget: int, sequences: int, draft: Model | None = None) -> float | None:
        """Tokens of the pool of one data-parallel rank in requests of mean length; None where the state does not grow."""
        key = (budget, _batch(sequences), load.length, id(draft))
        if key not in self._tokens:
            self._tokens[key] = self._pool_tokens(load.length, budget, sequences, draft)
        return self._tokens[key]

    def _pool_tokens(self, length: int, budget: int, sequences: int, draft: Model | None) -> float | None:
        weights = draft.weight_bytes if draft else 0
        more = draft.state_bytes(length) if draft else 0
        if not self.paged:
            return self._bare(budget, weights, length, more) * length
        found = self.memory(budget, sequences)
        if found.layout is None and not more:
            return None
        each = found.layout.request_bytes(length, budget) if found.layout else 0
        return float(found.pool.best - weights) / float(each + more) * length

    def _held(self, budget: int, sequences: int, draft: Model | None) -> int | None:
        weights = draft.weight_bytes if draft else 0
        more = draft.state_bytes(self.longest) if draft else 0
        if not self.paged:
            return max(0, int(self._bare(budget, weights, self.longest, more)))
        found = self.memory(budget, sequences)
        if found.layout is None and not more:
            return None
        pool = found.pool.best - weights
        return int(pool // (found.request_bytes + more)) if pool > 0 else 0

    def _bare(self, budget: int, weights: Any, length: int, more: Any) -> float:
        """Requests whose state fits beside weights and the greediest kernel of a step."""
        rooms = []
        for stage in self.deployment.ranks.stages:
            _, workspace = stage.step(Work(1, budget))
            room = SHARE * self.accelerator.capacity.value - stage.weight_bytes - workspace - weights
            rooms.append(float(room) / float(stage.state_bytes(length) + more))
        return min(rooms)

    def blocks(self, budget: int, sequences: int, draft: Model | None = None) -> tuple[int | None, int]:
        """(blocks of the pool of one data-parallel rank, tokens of a block); None for a model without growing state."""
        if not self.paged or draft is not None:
            return self.users(budget, sequences, draft) * -(-self.longest // BLOCK), BLOCK
        found = self.memory(budget, sequences)
        if found.layout is None:
            return None, BLOCK
        page = found.layout.page_tokens
        return max(1, (found.tokens(found.pool.best) or 0) // page), page

    def fraction(self, budget: int, sequences: int) -> float | None:
        """The memory fraction that the engine is started with."""
        if not self.paged:
            return float(SHARE)
        fraction = self.memory(budget, sequences).settings.memory_fraction
        return None if fraction is None else float(fraction)


def stored_formats(model: Model) -> tuple[str, str]:
    """The formats that most weights and the cache are stored in."""
    weights = max(model.params_by_format.items(), key=lambda item: item[1])[0].name
    caches: list[Any] = [getattr(block, "kv", None) for layer in model.layers for block in layer.blocks]
    kinds = {fmt.name for fmt in caches if isinstance(fmt, Format)}
    return weights, "/".join(sorted(kinds)) or "none"


def variants(
    model: Model, weights: Sequence[str] | None, kv: Sequence[str] | None, engine: Profile, accelerator: Accelerator
) -> list[Variant]:
    """The model in every asked combination of formats; by default as stored, and in 8 bits where it is stored in 16.

    8-bit floating-point weights and caches are taken by default only on an accelerator that computes with them.
    """
    from roofline.edits import apply, dtype, kv_dtype

    stored, cached = stored_formats(model)
    eight = "q8_0" if engine.id == "llamacpp" else "fp8"
    wide = ("bf16", "fp16", "fp32") if eight in accelerator.compute or eight != "fp8" else ()
    formats = list(weights) if weights else [STORED, *([eight] if stored in wide else [])]
    caches = list(kv) if kv else [STORED, *([eight] if cached in wide else [])]
    found = []
    for weight in dict.fromkeys(STORED if name == stored else name for name in formats):
        edited = model if weight == STORED else apply(model, [dtype(weight)])
        for cache in dict.fromkeys(STORED if name == cached else name for name in caches):
            one = edited if cache == STORED else apply(edited, [kv_dtype(cache)])
            found.append(Variant(one, stored if weight == STORED else weight, cached if cache == STORED else cache))
    return found


def sizes(accelerator: Accelerator, most: int) -> list[int]:
    """Numbers of accelerators that an instance is tried on: powers of two up to two servers."""
    server = accelerator.node_accelerators or 8
    return [number for number in (1, 2, 4, 8, 16) if number <= min(most, 2 * server)]


def _worthwhile(mesh: Mesh, accelerator: Accelerator, engine: Profile, sparse: bool) -> bool:
    """Whether a mesh is one that engines offer and people run: stages where a fast link ends, whole groups of experts."""
    server = accelerator.node_accelerators or 8
    fast = accelerator.node_link in FAST_LINKS
    if engine.id in LAYERS_ONLY:
        return mesh.pp == mesh.ranks
    if mesh.pp > 1 and ((mesh.ranks <= server and fast) or mesh.pp > 4 or mesh.dp > 1):
        return False
    if mesh.tp * mesh.dp > server and not sparse:
        return False
    if engine.id in WHOLE_DATA_PARALLEL and mesh.dp not in (1, mesh.ranks):
        return False
    return mesh.dp == 1 or mesh.ep > 1


def setups(
    model: Model, found: Sequence[Variant], accelerator: Accelerator, engine: Profile, longest: int, most: int, *,
    bound: bool = False,
) -> Iterator[Setup]:  # fmt: skip
    """Every setup of an accelerator whose weights fit, with up to ``most`` of them; engines' refusals leave a mesh out."""
    capacity = accelerator.capacity.value
    sparse = any(isinstance(block, MoE) for layer in model.layers for block in layer.blocks)
    fitting = 0
    for number in sizes(accelerator, most):
        if number > (accelerator.node_accelerators or 8) and fitting:
            break
        if min(variant.model.weight_bytes for variant in found) > number * capacity:
            continue
        for mesh in layouts(model, accelerator, number).possible:
            if not _worthwhile(mesh, accelerator, engine, sparse):
                continue
            for variant in found:
                if variant.model.weight_bytes > number * capacity * max(1, mesh.dp):
                    continue
                try:
                    deployment = ShardedDeployment(variant.model, accelerator, mesh=mesh)
                    setup = Setup(variant, accelerator, mesh, engine, longest, deployment, bound)
                    if setup.users(BUDGET, BATCHES[0]) < 1:
                        continue
                except RooflineError:
                    continue
                fitting += 1
                yield setup


def comparable(found: Sequence[Setup]) -> tuple[list[Setup], list[str]]:
    """Setups whose step times are of one kind, and what was left out for that.

    A bound and a calibrated time must not compete: the bound would win. Where any setup is calibrated, those that are not
    are left out.
    """
    calibrated = [setup for setup in found if setup.times.provenance == "calibrated"]
    if not calibrated or len(calibrated) == len(found):
        return list(found), []
    lost: dict[tuple[str, str], int] = {}
    for setup in found:
        if setup.times.provenance != "calibrated":
            why = next((note for note in setup.times.notes if note.startswith("not calibrated")), "its step times are bounds")
            key = (setup.accelerator.id, why)
            lost[key] = lost.get(key, 0) + 1
    told = "layouts and formats left out, since bounds and calibrated times do not compare (--bound does)"
    number = {name: sum(setup.accelerator.id == name for setup in found) for name, _ in lost}
    return calibrated, [f"{name}: {count} of {number[name]} {told}: {why}" for (name, why), count in lost.items()]
