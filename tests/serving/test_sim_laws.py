"""Laws that every simulation keeps, whatever is served, however it is scheduled."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from roofline.errors import InputError
from roofline.serving.cluster import Cluster, Link, Outcome
from roofline.serving.expectation import Estimate
from roofline.serving.lengths import Distribution
from roofline.serving.metrics import Result
from roofline.serving.perfetto import events
from roofline.serving.policies import SCHEDULERS, Policy
from roofline.serving.pool import Cached, Counted
from roofline.serving.replica import Replica, Speculation, Swap
from roofline.serving.steps import StepShape
from roofline.serving.totals import Part
from roofline.serving.workload import Workload, synthetic


@dataclass
class Linear:
    """Step times that are easy to check, and a record of every shape that was asked for."""

    fixed: float = 1.0
    token: float = 0.01
    cached: float = 0.001
    provenance: str = "datasheet"
    notes: tuple[str, ...] = ()
    seen: list[StepShape] = field(default_factory=list)

    def seconds(self, shape: StepShape) -> float:
        self.seen.append(shape)
        tokens = shape.prefill_tokens + shape.decodes * (1 + shape.drafted)
        return self.fixed + self.token * tokens + self.cached * shape.decode_context

    def decode_run(self, decodes: int, context: int, steps: int) -> Any:
        return self.fixed + self.token * decodes + self.cached * (context + decodes * numpy.arange(steps, dtype=float))


@dataclass(frozen=True)
class Setting:
    scheduler: str
    sequences: int
    budget: int
    blocks: int
    block: int
    preemption: str
    drafted: int
    cached: bool
    replicas: int
    split: bool
    even: bool
    """Every step takes as long, so that replicas begin at the same moments."""


def settings_of(draw: Any) -> Setting:
    scheduler = draw(st.sampled_from(SCHEDULERS))
    sequences = draw(st.integers(1, 8))
    return Setting(
        scheduler, sequences, draw(st.integers(sequences, 64)), draw(st.integers(12, 60)), draw(st.integers(1, 7)),
        draw(st.sampled_from(["recompute", "swap"])), draw(st.sampled_from([0, 0, 0, 2])),
        draw(st.booleans()) and scheduler != "static", draw(st.integers(1, 2)), draw(st.booleans()) and scheduler != "static",
        draw(st.booleans()),
    )  # fmt: skip


SETTINGS = st.composite(settings_of)()


@st.composite
def workloads(draw: Any) -> Workload:
    number = draw(st.integers(1, 30))
    prompt = Distribution("uniform", 1, draw(st.integers(1, 40)))
    output = Distribution("uniform", 1, draw(st.integers(1, 12)))
    arrive: dict[str, Any] = draw(
        st.sampled_from([{"rate": 0.05}, {"rate": 0.5}, {"rate": 0.5, "burst": 3.0}, {"concurrency": 3}, {}])
    )
    turns = draw(st.sampled_from([1, 1, 3]))
    return synthetic(
        number, prompt, output, **arrive, turns=turns, think_s=draw(st.sampled_from([0.0, 5.0])) if turns > 1 else 0.0,
        prefix=draw(st.sampled_from([0, 9])), classes=draw(st.integers(1, 3)), seed=draw(st.integers(0, 1000)),
    )  # fmt: skip


def replica(setting: Setting, **options: Any) -> Replica:
    pool: Any
    if setting.cached:
        pool = Cached(setting.blocks, setting.block)
    else:
        pool = Counted(setting.blocks, setting.block, "oracle" if setting.scheduler == "static" else "paged")
    speculation = Speculation(setting.drafted, 0.6, cost=0.1) if setting.drafted and setting.scheduler != "static" else None
    estimate = Estimate(steps=20) if setting.scheduler == "prefill-first" and setting.blocks % 2 else None
    policy = Policy(setting.scheduler, setting.sequences, setting.budget, setting.preemption, estimate=estimate)
    times = Linear(token=0.0, cached=0.0) if setting.even else Linear()
    return Replica(times, policy, pool, speculation=speculation, swap=Swap(100.0, 1e4), seed=7, **options)


def serve(setting: Setting, workload: Workload, **options: Any) -> Outcome:
    if not setting.split:
        return Cluster([replica(setting, **options) for _ in range(setting.replicas)]).serve(workload)
    prefill = [replica(setting, prefill_only=True, **options) for _ in range(setting.replicas)]
    decode = [replica(setting, **options)]
    return Cluster(prefill, decode, Link(1e3, lambda tokens: 10 * tokens, 0.5)).serve(workload)


def totals(outcome: Outcome, name: str) -> Any:
    return sum(getattr(one.totals, name) for one in outcome.replicas)


MANY = settings(max_examples=150, deadline=None)


@MANY
@given(SETTINGS, workloads())
def test_every_token_once_and_every_block_back(setting: Setting, workload: Workload) -> None:
    outcome = serve(setting, workload)
    done = ~numpy.isnan(outcome.finish)
    assert totals(outcome, "output_tokens") == workload.output[done].sum()
    assert all(one.pool.used == 0 and one.load == 0 for one in outcome.replicas)
    assert all(one.totals.peak_blocks <= one.pool.number for one in outcome.replicas)
    if setting.cached:
        for one in outcome.replicas:
            one.pool.tables.check()  # type: ignore[union-attr]


@MANY
@given(SETTINGS, workloads())
def test_whoever_arrives_is_served_or_refused_for_its_size(setting: Setting, workload: Workload) -> None:
    outcome = serve(setting, workload)
    done = ~numpy.isnan(outcome.finish)
    longest = setting.blocks * setting.block
    for number in outcome.refused:
        assert workload.prompt[number] + workload.output[number] - 1 > longest
    if not outcome.refused:
        assert done.all()


@MANY
@given(SETTINGS, workloads())
def test_tokens_computed_are_tokens_asked_for_and_those_lost_by_preemption(setting: Setting, workload: Workload) -> None:
    if setting.scheduler == "static" or setting.cached or setting.drafted:
        return
    outcome = serve(setting, workload)
    done = ~numpy.isnan(outcome.finish)
    asked = int((workload.prompt + workload.output - 1)[done].sum())
    assert totals(outcome, "prompt_tokens") + totals(outcome, "decode_slots") == asked + totals(outcome, "recomputed")


@MANY
@given(SETTINGS, workloads())
def test_nothing_happens_before_its_cause(setting: Setting, workload: Workload) -> None:
    outcome = serve(setting, workload)
    done = ~numpy.isnan(outcome.finish)
    arrival, admitted, first, finish = (
        column[done] for column in (outcome.arrival, outcome.admitted, outcome.first, outcome.finish)
    )
    assert (arrival <= admitted).all()
    assert (admitted + 1.0 <= first).all(), "a step takes a second at least"
    steps = numpy.ceil((workload.output[done] - 1) / (1 + setting.drafted))
    assert (first + steps * 1.0 <= finish + 1e-9).all()
    if workload.after is not None:
        for number in numpy.flatnonzero(done & (workload.after >= 0)):
            before = outcome.finish[workload.after[number]]
            assert outcome.arrival[number] == before + workload.arrival[number]


@MANY
@given(SETTINGS, workloads())
def test_a_replica_works_exactly_while_somebody_is_there(setting: Setting, workload: Workload) -> None:
    if setting.replicas > 1 or setting.split:
        return
    outcome = serve(setting, workload)
    done = ~numpy.isnan(outcome.finish)
    stays = sorted(zip(outcome.arrival[done].tolist(), outcome.finish[done].tolist(), strict=True))
    covered = until = 0.0
    for start, end in stays:
        covered += max(0.0, end - max(start, until))
        until = max(until, end)
    assert outcome.replicas[0].totals.busy_s == pytest.approx(covered, rel=1e-9)


@MANY
@given(SETTINGS, workloads())
def test_gaps_between_tokens_are_as_many_as_tokens_after_the_first(setting: Setting, workload: Workload) -> None:
    outcome = serve(setting, workload)
    done = ~numpy.isnan(outcome.finish)
    gaps = sum(
        float(numpy.sum(gap)) * weight
        for one in outcome.replicas
        for gap, weight in zip(one.totals.gaps, one.totals.weights, strict=True)
    )
    assert gaps == pytest.approx(float((outcome.finish - outcome.first)[done].sum()), rel=1e-9, abs=1e-9)
    if not setting.drafted or setting.scheduler == "static":
        number = sum(
            numpy.size(gap) * weight
            for one in outcome.replicas
            for gap, weight in zip(one.totals.gaps, one.totals.weights, strict=True)
        )
        assert number == (workload.output[done] - 1).sum()


@MANY
@given(SETTINGS, workloads())
def test_runs_of_steps_are_those_steps(setting: Setting, workload: Workload) -> None:
    runs, steps = serve(setting, workload), serve(setting, workload, exact_steps=True)
    for name in ("arrival", "admitted", "first", "finish"):
        numpy.testing.assert_allclose(getattr(runs, name), getattr(steps, name), rtol=1e-9)
    for name in ("steps", "output_tokens", "preemptions", "peak_blocks", "decode_slots"):
        assert totals(runs, name) == totals(steps, name), name
    assert totals(runs, "block_seconds") == pytest.approx(totals(steps, "block_seconds"), rel=1e-9)


@settings(max_examples=30, deadline=None)
@given(SETTINGS, workloads())
def test_the_same_again_is_the_same(setting: Setting, workload: Workload) -> None:
    one, other = serve(setting, workload), serve(setting, workload)
    for name in ("arrival", "admitted", "first", "finish", "hit", "preempted"):
        numpy.testing.assert_array_equal(getattr(one, name), getattr(other, name))


@MANY
@given(SETTINGS, workloads())
def test_a_step_stays_within_its_budget(setting: Setting, workload: Workload) -> None:
    outcome = serve(setting, workload)
    for one in outcome.replicas:
        for shape in one.times.seen:  # type: ignore[attr-defined]
            assert shape.decodes + shape.prefills <= setting.sequences or setting.split
            if setting.scheduler in ("chunked", "priority"):
                assert not shape.prefills or shape.prefill_tokens + shape.decodes * (1 + shape.drafted) <= setting.budget
            if setting.scheduler in ("prefill-first", "static"):
                assert not (shape.prefills and shape.decodes)


@settings(max_examples=150, deadline=None)
@given(SETTINGS, workloads(), st.integers(0, 12), st.integers(0, 12))
def test_shares_are_at_most_one_whatever_counts(setting: Setting, workload: Workload, warm_up: int, cool_down: int) -> None:
    if warm_up + cool_down >= len(workload):
        return
    found = Result(serve(setting, workload), warm_up=warm_up, cool_down=cool_down).to_dict()
    for share in (
        *(found[name] for name in ("utilisation", "kv_occupancy_mean", "kv_occupancy_peak")),
        *found["utilisation_by_replica"],
    ):
        assert share is None or 0 <= share <= 1
    assert found["mean_decode_batch"] is None or 0 < found["mean_decode_batch"] <= setting.sequences


@settings(max_examples=100, deadline=None)
@given(SETTINGS, workloads())
def test_parts_of_the_time_add_up_to_the_whole(setting: Setting, workload: Workload) -> None:
    outcome = serve(setting, workload)
    for totals in (replica.totals for replica in outcome.replicas):
        parts = [totals.between(low, high) for low, high in ((-1.0, 7.3), (7.3, 20.1), (20.1, float("inf")))]
        for name in Part.__dataclass_fields__:
            assert sum(getattr(part, name) for part in parts) == pytest.approx(getattr(totals, name), rel=1e-9, abs=1e-9)


@settings(max_examples=100, deadline=None)
@given(SETTINGS, workloads())
def test_the_last_counters_of_a_trace_are_zero(setting: Setting, workload: Workload) -> None:
    lines: dict[Any, list[tuple[float, float]]] = {}
    for event in events(serve(setting, workload, record=True)):
        if event["ph"] == "C":
            lines.setdefault((event["pid"], event["name"]), []).append((event["ts"], event["args"][event["name"]]))
    for line in lines.values():
        assert line[-1][1] == 0
        assert [moment for moment, _ in line] == sorted(moment for moment, _ in line)


def test_a_policy_refuses_what_cannot_run() -> None:
    with pytest.raises(InputError, match="max-num-batched-tokens: 10"):
        Policy("chunked", 20, 10)
    with pytest.raises(InputError, match="Did you mean 'chunked'"):
        Policy("chunkd")


def test_a_run_of_steps_is_cut_when_somebody_joins_it() -> None:
    """Two replicas begin at the same moment; the first one's run is long when the second one's user moves over to it."""
    workload = Workload(
        numpy.zeros(3), numpy.array([4, 4, 4]), numpy.array([50, 3, 5]), concurrency=2,
        segments=lambda number: ((("session", number % 2), 99),),
    )  # fmt: skip
    found = []
    for exact in (False, True):
        replicas = [
            Replica(Linear(token=0.0, cached=0.0), Policy(sequences=4), Counted(None), exact_steps=exact) for _ in range(2)
        ]
        found.append(Cluster(replicas).serve(workload))
    assert found[0].admitted[2] == 3.0
    numpy.testing.assert_array_equal(found[0].first, found[1].first)
