"""Inference on a mesh: the steps of ``Deployment`` for a model that several ranks hold together.

Times are of the whole deployment, memory is that of the rank with most to hold. With pipeline stages the batch is cut
into microbatches that are in flight at once: a decode step of the whole batch takes as many turns of the slowest stage,
and never less than one microbatch's way through all stages; a prefill takes that way once, and a turn of the slowest
stage for each further microbatch.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from roofline.components.base import Component
from roofline.cost import Cost
from roofline.errors import InputError
from roofline.inference import Deployment, Part, Step, explained
from roofline.memory import Memory, usable
from roofline.numeric import ceil_div, maximum, minimum, where
from roofline.parallel.mesh import Mesh
from roofline.parallel.ranks import Sharded
from roofline.timing import Timing, time
from roofline.work import Work

ONE_DEVICE = Mesh()


def _sum(timings: list[Timing]) -> Timing:
    """One pass after another: stream by stream."""
    links = {name for timing in timings for name in timing.links}
    return Timing(
        sum(t.memory for t in timings),
        sum(t.compute for t in timings),
        sum(t.vector for t in timings),
        {name: sum(t.links.get(name, 0.0) for t in timings) for name in sorted(links)},
    )


def _combined(a: Timing, b: Timing, change: Any) -> Timing:
    """``change`` of two timings, stream by stream."""
    links = sorted({*a.links, *b.links})
    return Timing(
        change(a.memory, b.memory),
        change(a.compute, b.compute),
        change(a.vector, b.vector),
        {name: change(a.links.get(name, 0.0), b.links.get(name, 0.0)) for name in links},
    )


@dataclass(frozen=True)
class ShardedDeployment(Deployment):
    """A model on a mesh of accelerators.

    Attributes:
        mesh: how the model is split.

    Raises InputError: the lecture's convention, or sizes that do not divide; UnsupportedModel for a component that no
    rule covers.
    """

    mesh: Mesh = ONE_DEVICE

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.convention != "exact" and self.mesh.ranks > 1:
            raise InputError("convention: the lecture's convention covers one device; use --convention exact")
        _ = self.ranks

    @cached_property
    def ranks(self) -> Sharded:
        """The model as the ranks hold it."""
        return Sharded(self.model, self.accelerator, self.mesh)

    def _step(self, phase: str, work: Work) -> Step:
        if self.mesh.ranks == 1 and self.mesh.sp == 1:
            return super()._step(phase, work)
        local = ceil_div(work.B, self.mesh.dp)
        wanted = self.mesh.microbatches or self.mesh.pp
        turns = minimum(local, wanted) if phase == "decode" else local if self.mesh.pp > 1 else 1
        micro = replace(work, B=ceil_div(local, turns))
        costs, timings, memories = [], [], []
        for stage in self.ranks.stages:
            model = stage if phase == "decode" else stage.for_prefill
            cost, workspace = model.step(micro)
            after = local * stage.state_bytes(work.S + work.T)
            before = local * stage.state_bytes(work.S) if phase == "decode" else after
            costs.append((1, cost))
            timings.append(time(cost, self.accelerator))
            capacity = usable(self.accelerator, self.memory_fraction)
            memories.append(Memory(stage.weight_bytes, before, workspace, capacity, after - before))
        return Step(
            self.model.name, self.accelerator.id, self.convention, phase, work.B, work.T, work.S,
            Cost.total(costs), self._whole(phase, timings, turns), _largest(memories),
        )  # fmt: skip

    def _whole(self, phase: str, timings: list[Timing], turns: Any) -> Timing:
        """Stream times of a step of all microbatches; their maximum is a lower bound of the pipeline's time."""
        if len(timings) == 1:
            return timings[0]
        way = _sum(timings)
        slowest = timings[0]
        for timing in timings[1:]:
            slowest = _combined(slowest, timing, maximum)
        if phase == "decode":
            return _combined(way, slowest, lambda once, each: maximum(once, turns * each))
        return _combined(way, slowest, lambda once, each: once + (turns - 1) * each)

    def explain(self, work: Work, phase: str = "decode") -> list[Part]:
        """The kernels of one rank's step, all stages together, for its share of the batch."""
        merged: dict[str, list[tuple[int, Component]]] = {}
        for stage in self.ranks.stages:
            for number, part in (stage if phase == "decode" else stage.for_prefill).counted:
                merged.setdefault(part.name, []).append((number, part))
        local = replace(work, B=ceil_div(work.B, self.mesh.dp))
        return explained(merged, local, self.accelerator)


def _largest(memories: list[Memory]) -> Memory:
    """The memory of the stage that needs most, point by point for arrays."""
    worst = memories[0]
    for memory in memories[1:]:
        more = memory.required_bytes > worst.required_bytes
        worst = Memory(
            where(more, memory.weight_bytes, worst.weight_bytes),
            where(more, memory.kv_bytes, worst.kv_bytes),
            where(more, memory.workspace_bytes, worst.workspace_bytes),
            memory.capacity_bytes,
            where(more, memory.new_kv_bytes, worst.new_kv_bytes),
        )
    return worst
