"""SGLang's admission: room for what running requests should write (sgl-project/sglang, schedule_policy.py, PrefillAdder)."""

from __future__ import annotations

from typing import Any

import numpy
import pytest

from roofline.serving.cluster import Cluster
from roofline.serving.expectation import Estimate, Expectation
from roofline.serving.policies import ESTIMATES, Policy
from roofline.serving.pool import Counted
from roofline.serving.replica import Replica
from roofline.serving.steps import StepShape
from roofline.serving.workload import Workload


class Even:
    """Steps of one second."""

    provenance = "datasheet"
    notes: tuple[str, ...] = ()

    def seconds(self, shape: StepShape) -> float:
        return 1.0

    def decode_run(self, decodes: int, context: int, steps: int) -> Any:
        return numpy.ones(steps)


DEFAULT = Estimate()


def served(tokens: int, prompts: list[int], outputs: list[int], estimate: Estimate | None = DEFAULT, **load: Any) -> Any:
    replica = Replica(Even(), Policy("prefill-first", 64, 8192, estimate=estimate), Counted(tokens, 1), record=True)
    outcome = Cluster([replica]).serve(Workload(numpy.zeros(len(prompts)), numpy.array(prompts), numpy.array(outputs), **load))
    assert replica.pool.used == 0
    return outcome


def running(outcome: Any) -> int:
    """Sequences that decode in the first step that decodes."""
    return next(span.decodes for span in outcome.replicas[0].log if span.decodes)


@pytest.mark.parametrize(("tokens", "decode"), [(7062, 4), (7063, 5), (5681, 3), (5682, 4)])
def test_a_batch_is_filled_by_whole_outputs_first_and_by_seven_tenths_of_them_then(tokens: int, decode: int) -> None:
    """Prompts of 1,024 and outputs of 512: 4 x 1,536 at once; the fifth beside 0.7 x 4 x 511: 4 x 1,024 + 1,430.8 + 1,536."""
    outcome = served(tokens, [1024] * 16, [512] * 16, concurrency=16)
    assert running(outcome) == decode


def test_whoever_is_found_full_waits_until_somebody_leaves_however_far_the_ratio_falls() -> None:
    """The third lacks 4 tokens at first, and would have them 60 steps later, but is asked again only when one has ended."""
    assert 2000 + 0.7 * (399 + 499) + 1400 > 4025 > 2000 + 2 * 60 + (0.7 - 60 * 0.602 / 600) * (339 + 439) + 1400
    outcome = served(4025, [1000] * 3, [400, 500, 400])
    assert outcome.admitted[2] == outcome.finish[0]
    assert outcome.preempted.sum() == 0


def test_plain_paging_admits_more_and_interrupts_more() -> None:
    loads = ([1024] * 48, [512] * 48)
    careful, plain = (served(7168, *loads, estimate=estimate, concurrency=16) for estimate in (Estimate(), None))
    assert careful.preempted.sum() < plain.preempted.sum() / 4


def test_the_ratio_falls_to_a_seventh_in_600_steps_and_starts_anew_when_nobody_is_there() -> None:
    expected = Expectation(ESTIMATES["sglang"], Counted(100, 1))
    expected.stepped(300)
    assert expected.ratio == pytest.approx((0.7 + 0.098) / 2)
    expected.stepped(1000)
    assert expected.ratio == pytest.approx(0.098)
    expected.retracted(written=30, outputs=99, running=1)
    assert expected.ratio == pytest.approx(0.5)
    expected.idle()
    assert expected.ratio == 0.7


def test_whoever_has_written_least_is_retracted_and_waits_behind_the_others() -> None:
    """The ratio misjudges outputs that all run to their end: 20 of 1,000 tokens are kept free for each."""
    reckless = Estimate(first=0.02, least=0.0)
    outcome = served(2500, [100, 100, 100, 1300], [1000, 1000, 1000, 10], estimate=reckless)
    assert outcome.preempted.tolist() in ([0, 0, 1, 0], [1, 0, 0, 0], [0, 1, 0, 0], [0, 0, 2, 0])
    assert outcome.finish[3] < outcome.finish.max(), "who waited goes before who was retracted"
    assert not numpy.isnan(outcome.finish).any()
