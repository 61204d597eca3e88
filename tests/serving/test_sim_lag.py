"""What passes between a request's arrival and its scheduling, and how many sequences it is asked for."""

from __future__ import annotations

from typing import Any

import numpy
import pytest

from roofline.serving.cluster import Cluster
from roofline.serving.policies import Policy
from roofline.serving.pool import Counted
from roofline.serving.replica import Replica
from roofline.serving.steps import StepShape
from roofline.serving.workload import Workload


class Even:
    """A millisecond a step, whatever is in it."""

    provenance, notes = "datasheet", ()

    def seconds(self, shape: StepShape) -> float:
        return 1e-3

    def decode_run(self, decodes: int, context: int, steps: int) -> Any:
        return numpy.full(steps, 1e-3)


def asked(users: int, seats: int, blocks: int | None = None) -> tuple[list[int], Any]:
    """(sequences that the lag was asked for, request by request, the outcome) of users who ask twenty times each."""
    seen: list[int] = []

    def lag(running: int) -> float:
        seen.append(running)
        return 2e-3

    number = 20 * users
    outputs = numpy.random.default_rng(1).integers(33, 68, number)
    load = Workload(numpy.zeros(number), numpy.full(number, 16), outputs, concurrency=users)
    replica = Replica(Even(), Policy("chunked", seats, 8192), Counted(blocks, 16, "oracle"))
    return seen, Cluster([replica], lag=lag).serve(load)


def test_a_request_that_nobody_else_is_there_with_is_one_sequence() -> None:
    seen, served = asked(1, 8)
    assert set(seen) == {1}
    assert served.admitted - served.arrival == pytest.approx(2e-3)


def test_in_a_steady_state_all_users_count_but_those_in_the_front_end() -> None:
    """Fifty steps of a millisecond against two in the front end: of 26 users one is there, on average."""
    seen, _ = asked(26, 64)
    assert seen[:26] == [1] * 26, "at first all are in the front end"
    assert 22 <= numpy.mean(seen[200:]) <= 26
    assert max(seen) <= 26


@pytest.mark.parametrize(("seats", "blocks"), [(8, None), (64, 32)])
def test_whoever_waits_for_a_place_does_not_count(seats: int, blocks: int | None) -> None:
    """Forty users, and eight places: of the batch, or of a cache in which each takes four or five blocks of 32."""
    seen, served = asked(40, seats, blocks)
    assert max(seen) <= 8 + 1
    assert numpy.median(served.admitted - served.arrival) > 0.1, "most wait much longer than the front end takes"
