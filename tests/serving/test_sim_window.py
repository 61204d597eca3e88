"""What the replicas were busy with is told of the time that counts, and a trace ends with what is true."""

from __future__ import annotations

from typing import Any

import numpy
import pytest

from roofline.plots.timeline import parse
from roofline.serving.cluster import Cluster, Outcome
from roofline.serving.metrics import Result
from roofline.serving.perfetto import events
from roofline.serving.policies import Policy
from roofline.serving.pool import Cached, Counted
from roofline.serving.replica import Replica
from roofline.serving.steps import StepShape
from roofline.serving.totals import Part, Totals
from roofline.serving.workload import Workload


class Second:
    """Every step takes a second."""

    provenance = "datasheet"
    notes = ()

    def seconds(self, shape: StepShape) -> float:
        return 1.0

    def decode_run(self, decodes: int, context: int, steps: int) -> Any:
        return numpy.ones(steps)


def one(workload: Workload, **options: Any) -> Outcome:
    pool = options.pop("pool", None) or Counted(100)
    return Cluster([Replica(Second(), Policy(sequences=8), pool, **options)]).serve(workload)


def together(arrival: list[float], prompt: int = 4, output: int = 5) -> Workload:
    number = len(arrival)
    return Workload(numpy.array(arrival), numpy.full(number, prompt), numpy.full(number, output))


def test_busy_time_is_that_inside_the_time_that_counts() -> None:
    """Steps of a second: requests of five tokens at 0, 20 and 22 keep the replica busy 0 to 5 and 20 to 27."""
    outcome = one(together([0.0, 20.0, 22.0]))
    assert Result(outcome).to_dict()["utilisation"] == pytest.approx(12 / 27)
    late = Result(outcome, warm_up=1).to_dict()
    assert (late["span_s"], late["utilisation"], late["utilisation_by_replica"]) == (2.0, 1.0, [1.0])
    early = Result(outcome, cool_down=1).to_dict()
    assert (early["span_s"], early["utilisation"]) == (20.0, 5 / 20)


def test_the_mean_batch_and_the_cache_are_of_the_time_that_counts() -> None:
    outcome = one(together([0.0] * 6 + [20.0, 20.0, 24.5]))
    assert Result(outcome).to_dict()["mean_decode_batch"] > 2
    assert Result(outcome, warm_up=6).to_dict()["mean_decode_batch"] == pytest.approx(2.0)
    blocks = [Result(outcome, warm_up=number).to_dict()["kv_occupancy_mean"] for number in (0, 6)]
    assert blocks[1] == pytest.approx(2 / 100)
    assert blocks[0] > blocks[1]


def test_a_replica_that_never_ran_was_never_busy() -> None:
    assert Totals().between(0.0, 10.0) == Part(0.0, 0.0, 0.0, 0.0)


@pytest.mark.parametrize("pool", [Counted(100), Cached(100)], ids=["numbers", "prefix cache"])
def test_no_block_is_in_use_while_nothing_runs(pool: Any) -> None:
    trace = parse(events(one(together([0.0, 20.0]), pool=pool, record=True)))
    assert trace.counters["used blocks"]["replica 0"] == [
        (0.0, 1.0),
        (1.0, 1.0),
        (5.0, 0.0),
        (20.0, 1.0),
        (21.0, 1.0),
        (25.0, 0.0),
    ]
