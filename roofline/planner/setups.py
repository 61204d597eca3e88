"""Setups: a model in given formats on a mesh of one kind of accelerator under an engine, with its step times and its memory."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from roofline.accelerator import Accelerator
from roofline.allocation import Allocation, Settings, allocate
from roofline.components.moe import MoE
from roofline.engines.profile import Profile
from roofline.errors import RooflineError
from roofline.formats import Format
from roofline.model import Model
from roofline.parallel.layouts import layouts
from roofline.parallel.mesh import Mesh
from roofline.sharded import ShardedDeployment

if TYPE_CHECKING:
    from roofline.serving.steps import StepTimes

STORED = "stored"
FAST_LINKS = ("nvlink", "xgmi", "ici")
WHOLE_DATA_PARALLEL = ("sglang", "trtllm")
"""Engines whose attention data parallelism takes all of the tensor-parallel ranks (``--enable-dp-attention``,
``enable_attention_dp``)."""
LAYERS_ONLY = ("llamacpp",)
"""Engines that split a model by layers (``--split-mode layer``); their split by rows is not modelled."""
BATCHES = (64, 256, 1024)
"""Sequences per step for which memory is worked out; a batch takes the next larger one's."""


@dataclass(frozen=True)
class Variant:
    """A model with weights and cache in given formats; ``STORED`` for what its checkpoint has."""

    model: Model
    weights: str
    kv: str


@dataclass
class Setup:
    """One instance before its settings are chosen.

    Attributes:
        variant, accelerator, mesh, engine: what runs where. longest: tokens of the longest request.
    """

    variant: Variant
    accelerator: Accelerator
    mesh: Mesh
    engine: Profile
    longest: int
    deployment: ShardedDeployment
    _times: Any = None
    _memory: dict[tuple[int, int], Allocation] = field(default_factory=dict)

    @property
    def gpus(self) -> int:
        """Accelerators of one instance."""
        return self.mesh.ranks

    @property
    def times(self) -> StepTimes:
        """The best step times that are known."""
        if self._times is None:
            from roofline.serving.steps import step_times

            self._times = step_times(self.deployment, self.engine, longest=self.longest)
        times: StepTimes = self._times
        return times

    def memory(self, budget: int, sequences: int) -> Allocation:
        """What the engine allocates with a token budget and a batch."""
        batch = next((size for size in BATCHES if sequences <= size), sequences)
        key = (budget, batch)
        if key not in self._memory:
            settings = Settings(max_model_len=self.longest, batched_tokens=budget, sequences=batch)
            self._memory[key] = allocate(
                self.variant.model, self.accelerator, self.mesh, self.engine, settings, self.deployment.ranks
            )
        return self._memory[key]

    def users(self, budget: int, sequences: int) -> int:
        """Requests of the longest length that the pool of one data-parallel rank holds at once."""
        found = self.memory(budget, sequences)
        if found.layout is None:
            return sequences
        return int(found.pool.best // found.request_bytes) if found.pool.best > 0 else 0


def stored_formats(model: Model) -> tuple[str, str]:
    """The formats that most weights and the cache are stored in."""
    weights = max(model.params_by_format.items(), key=lambda item: item[1])[0].name
    kinds = {
        block.kv.name
        for layer in model.layers for block in layer.blocks if isinstance(getattr(block, "kv", None), Format)
    }  # fmt: skip
    return weights, "/".join(sorted(kinds)) or "none"


def variants(model: Model, weights: Sequence[str] | None, kv: Sequence[str] | None, engine: Profile) -> list[Variant]:
    """The model in every asked combination of formats; by default as stored, and in 8 bits where it is stored in 16."""
    from roofline.edits import apply, dtype, kv_dtype

    stored, cached = stored_formats(model)
    eight = "q8_0" if engine.id == "llamacpp" else "fp8"
    wide = ("bf16", "fp16", "fp32")
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
    model: Model, found: Sequence[Variant], accelerator: Accelerator, engine: Profile, longest: int, most: int
) -> Iterator[Setup]:
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
                    setup = Setup(variant, accelerator, mesh, engine, longest, deployment)
                    if not setup.memory(2048, 64).fits:
                        continue
                except RooflineError:
                    continue
                fitting += 1
                yield setup
