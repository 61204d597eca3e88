"""The discrete-event simulator on the benchmark's own protocol, beside the closed form and the measurement.

InferenceX's client is known: all clients start at once, ten requests of each, lengths uniform in [0.8, 1] of the stated ones.
The simulator draws such lengths and schedules every iteration; its step times are those of the closed form.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from roofline.accelerator import load_accelerator
from roofline.engines.profile import load_engine
from roofline.parallel.mesh import Mesh
from roofline.serving.calibrated import ExpectedSteps
from roofline.serving.closed_form import Client, closed_form
from roofline.serving.metrics import Result
from roofline.serving.policies import RESERVES, Policy
from roofline.serving.server import Cache, Server
from roofline.serving.workload import Workload
from roofline.sharded import ShardedDeployment
from roofline.validate.serving.report import data
from roofline.validate.serving.runs import Runs, structure

SCHEDULERS = {"vllm": "chunked", "trtllm": "continuous"}
"""Engine -> how its measured configuration schedules: chunks beside decodes, or whole prompts beside them."""
BLOCK = 16
LEAST = 0.8
"""Shortest length, in shares of the stated one."""


@dataclass(frozen=True)
class Compared:
    """One run: measured, by the closed form, simulated; seconds.

    Attributes:
        running: sequences that the cache holds by the closed form, below ``clients`` where it is full.
    """

    gpu: str
    engine: str
    model: str
    tp: int
    isl: int
    osl: int
    clients: int
    running: float
    measured_tpot: float
    closed_tpot: float
    simulated_tpot: float
    measured_ttft: float
    closed_ttft: float
    simulated_ttft: float


def _drawn(stated: int, number: int, random: Any) -> Any:
    return random.integers(int(LEAST * stated), stated + 1, number)


def simulate(row: Any, capacity: float, seed: int = 1) -> Compared:
    """One row of the table."""
    import numpy

    key = (row.name, row.weights, row.kv, row.gpu, row.engine, row.tp, row.dp, row.ep, row.kernels)
    model = structure(*key).model
    deployment = ShardedDeployment(model, load_accelerator(row.gpu), mesh=Mesh(tp=row.tp, dp=row.dp, ep=row.ep))
    times = ExpectedSteps(deployment, row.engine)
    clients, isl, osl, budget = int(row.clients), int(row.isl), int(row.osl), int(row.budget)
    random, number = numpy.random.Generator(numpy.random.PCG64(seed)), int(row.rounds) * clients
    workload = Workload(
        numpy.zeros(number), _drawn(isl, number, random), _drawn(osl, number, random), concurrency=clients
    )  # fmt: skip
    cache = Cache(int(capacity) // BLOCK, BLOCK, None, "engine", "", clients, budget)
    policy = Policy(SCHEDULERS[row.engine], clients, budget)
    allocation = RESERVES.get(row.engine, "paged")
    served = Result(Server(deployment, cache, policy, times, allocation=allocation).serve(workload))
    closed = closed_form(
        deployment, load_engine(row.engine), clients, row.prompt, row.output, times=times, capacity_tokens=capacity,
        batched_tokens=budget, client=Client(rounds=row.rounds, spread=row.spread),
    )  # fmt: skip
    return Compared(
        row.gpu, row.engine, row.name, row.tp, isl, osl, clients, closed.running, row.tpot, closed.tpot_s,
        float(served.tpot_s.mean()), row.ttft, closed.ttft_s, float(served.ttft_s.mean()),
    )  # fmt: skip


def _rows(runs: Runs, mask: Any) -> Iterator[tuple[Any, float]]:
    table = runs.table[mask].rename(columns={"set": "group"})
    yield from zip(table.itertuples(index=False), runs.capacity[mask].tolist(), strict=True)


def known(runs: Runs) -> Any:
    """Mask of dense runs whose client is known and whose engine holds no prompts back."""
    table = runs.table
    return ((table["family"] == "inferencex") & (table["set"] == "dense") & (table["held"] == 0)).to_numpy()


def compared(full: bool, every: int = 1, engine: str | None = None, longest: int = 10**6) -> list[Compared]:
    """Every so manieth run of a known client: those that all clients together may fill the cache of, or the others.

    ``engine`` takes those of one engine only, ``longest`` those of at most so many output tokens.
    """
    import numpy

    runs = data().fitted
    most = runs.table["clients"] * (runs.table["prompt"] + runs.table["output"])
    crowded = most.to_numpy() > runs.capacity
    wanted = known(runs) & (crowded if full else ~crowded) & (runs.table["osl"] <= longest).to_numpy()
    wanted &= ((runs.table["engine"] == engine) | (engine is None)).to_numpy()
    chosen = numpy.flatnonzero(wanted)[::every]
    mask = numpy.zeros(len(runs), dtype=bool)
    mask[chosen] = True
    return [simulate(row, capacity) for row, capacity in _rows(runs, mask)]


def agreement(runs: list[Compared]) -> dict[str, float]:
    """How far the closed form lies from the simulator, and the simulator from the measurement: means and the most."""

    def apart(pairs: list[tuple[float, float]]) -> list[float]:
        return [abs(value / other - 1.0) for value, other in pairs]

    tpot = apart([(one.closed_tpot, one.simulated_tpot) for one in runs])
    ttft = apart([(one.closed_ttft, one.simulated_ttft) for one in runs])
    token_errors = apart([(one.simulated_tpot, one.measured_tpot) for one in runs])
    first_errors = apart([(one.simulated_ttft, one.measured_ttft) for one in runs])
    return {
        "runs": len(runs), "tpot_apart": sum(tpot) / len(runs), "tpot_most": max(tpot), "ttft_apart": sum(ttft) / len(runs),
        "ttft_most": max(ttft), "tpot_error": sum(token_errors) / len(runs), "ttft_error": sum(first_errors) / len(runs),
    }  # fmt: skip
