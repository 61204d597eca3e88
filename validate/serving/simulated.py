"""The discrete-event simulator on the benchmark's own protocol, beside the closed form and the measurement.

InferenceX's client is known: all clients start at once, ten requests of each, lengths uniform in [0.8, 1] of the stated ones.
The simulator draws such lengths and schedules every iteration; its step times are those of the closed form. Runs whose client
is not known are given that client, in both; those that come in waves (``rows.toml``) have the stated lengths.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any

from roofline.accelerator import load_accelerator
from roofline.parallel.mesh import Mesh
from roofline.serving.calibrated import ExpectedSteps
from roofline.serving.closed_form import Steady
from roofline.serving.cluster import Cluster
from roofline.serving.metrics import Result
from roofline.serving.policies import ESTIMATES, RESERVES, Policy
from roofline.serving.pool import Counted
from roofline.serving.replica import Replica
from roofline.serving.workload import Workload
from roofline.sharded import ShardedDeployment
from roofline.validate.serving.fit import predict
from roofline.validate.serving.report import committed, data
from roofline.validate.serving.runs import Runs, runs_of, structure

SCHEDULERS = {"vllm": "chunked", "trtllm": "continuous", "sglang": "prefill-first"}
"""Engine -> how its measured configuration schedules: chunks beside decodes, whole prompts beside them, or prompts first."""
BLOCK = {"sglang": 1}
"""Engine -> tokens of a page, where not 16."""
LEAST = 0.8
"""Shortest length, in shares of the stated one."""
CLIENT = {"lengths": 0.9, "rounds": 10.0, "spread": 0.0642}
"""InferenceX's client, in the fields of a protocol."""
ENOUGH = 400
"""Requests whose mean is taken for the mean of all: short runs are repeated with other lengths."""
UNLIMITED = 1e12


@dataclass(frozen=True)
class Compared:
    """One run: measured, by the closed form, simulated; seconds.

    Attributes:
        known: whether the client is, so that the measurement may be compared. running: sequences that the cache holds by the
            closed form, below ``clients`` where it is full.
    """

    gpu: str
    engine: str
    model: str
    tp: int
    isl: int
    osl: int
    clients: int
    known: bool
    running: float
    measured_tpot: float
    closed_tpot: float
    simulated_tpot: float
    measured_ttft: float
    closed_ttft: float
    simulated_ttft: float


@cache
def _times(key: tuple[Any, ...]) -> ExpectedSteps:
    one = structure(*key)
    _, _, _, gpu, engine, tp, dp, ep, _ = key
    deployment = ShardedDeployment(one.model, load_accelerator(gpu), mesh=Mesh(tp=tp, dp=dp, ep=ep))
    return ExpectedSteps(deployment, engine, kernels=[one.operators])


def _load(row: Any, seed: int) -> Workload:
    """The requests of a run."""
    import numpy

    random, number = numpy.random.Generator(numpy.random.PCG64(seed)), int(min(row.rounds, CLIENT["rounds"]) * row.clients)
    sizes = [
        numpy.full(number, int(stated)) if row.wave else random.integers(int(LEAST * stated), int(stated) + 1, number)
        for stated in (row.isl, row.osl)
    ]
    return Workload(numpy.zeros(number), sizes[0], sizes[1], concurrency=int(row.clients))


def _served(row: Any, capacity: float, seed: int) -> Result:
    """A run of one data-parallel replica."""
    times = _times((row.name, row.weights, row.kv, row.gpu, row.engine, row.tp, row.dp, row.ep, row.kernels))
    budget, clients, block = int(row.budget), int(row.clients), BLOCK.get(row.engine, 16)
    allocation = RESERVES.get(row.engine, "paged")
    pool = Counted(int(capacity) // block if capacity < UNLIMITED else None, block, allocation)
    policy = Policy(SCHEDULERS[row.engine], clients, max(budget, clients), estimate=ESTIMATES.get(row.engine))
    return Result(Cluster([Replica(times, policy, pool)], lag=times.request_seconds).serve(_load(row, seed)))


def simulate(row: Any, capacity: float, enough: int = ENOUGH) -> tuple[float, float]:
    """(TTFT, TPOT) of a run [s], means over at least so many requests."""
    repeats = 1 if row.wave else -(-enough // int(CLIENT["rounds"] * row.clients))
    found = [_served(row, capacity, seed) for seed in range(1, repeats + 1)]
    return tuple(sum(float(times.mean()) for times in column) / repeats for column in (
        [one.ttft_s for one in found], [one.tpot_s for one in found],
    ))  # type: ignore[return-value]  # fmt: skip


def runs(blind: bool = False) -> Runs:
    """All runs, those whose client is unknown as InferenceX's would send them; no engine holds prompts back."""
    table = (data().blind if blind else data().fitted).table.assign(held=0.0)
    table.loc[~known(table) & (table["wave"] == 0), list(CLIENT)] = list(CLIENT.values())
    return runs_of(table.assign(prompt=table["lengths"] * table["isl"], output=table["lengths"] * table["osl"]))


def known(table: Any) -> Any:
    """Mask of the runs whose client is known."""
    return (table["family"] == "inferencex").to_numpy()


def crowded(found: Runs) -> Any:
    """Mask of the runs that all clients together may fill the cache of."""
    return (found.table["clients"] * (found.table["isl"] + found.table["osl"])).to_numpy() > found.capacity


def expected(found: Runs) -> Steady:
    """The closed form of runs, with the committed constants."""
    return predict(found, committed().of(found))


def quiet(found: Runs) -> Any:
    """Mask of the runs where nothing queues: the cache holds all at their longest, all run, and prompts do not wait."""
    seats = ((found.table["sequences"] == 0) | (found.table["sequences"] >= found.table["clients"])).to_numpy()
    return ~crowded(found) & seats & expected(found).quiet


def compared(found: Runs, chosen: Any, enough: int = ENOUGH) -> Iterator[Compared]:
    """The runs of a mask."""
    means = expected(found)
    table = found.table.rename(columns={"set": "group"})
    for place, row in enumerate(table.itertuples(index=False)):
        if chosen[place]:
            ttft, tpot = simulate(row, float(found.capacity[place]), enough)
            yield Compared(
                row.gpu, row.engine, row.name, row.tp, int(row.isl), int(row.osl), int(row.clients),
                row.family == "inferencex" or bool(row.wave), float(found.steps.running[place]), row.tpot,
                float(means.tpot[place]), tpot, row.ttft, float(means.ttft[place]), ttft,
            )  # fmt: skip


def full() -> Iterator[Compared]:
    """The runs of known clients whose cache is full: requests wait for a place in the closed form, or in the measurement."""
    found = data().fitted
    client = known(found.table) | (found.table["wave"] > 0).to_numpy()
    yield from compared(found, client & crowded(found), 1)


def agreement(found: list[Compared]) -> dict[str, Any]:
    """How far the closed form lies from the simulator, mean and most: per token, and to the first token of known clients."""

    def apart(pairs: list[tuple[float, float]]) -> list[float]:
        return [abs(value / other - 1.0) for value, other in pairs]

    seen = [one for one in found if one.known]
    tpot = apart([(one.closed_tpot, one.simulated_tpot) for one in found])
    ttft = apart([(one.closed_ttft, one.simulated_ttft) for one in seen])
    return {
        "runs": len(found), "tpot_apart": sum(tpot) / len(found), "tpot_most": max(tpot),
        "ttft_apart": sum(ttft) / len(seen) if seen else None, "ttft_most": max(ttft, default=None),
    }  # fmt: skip
