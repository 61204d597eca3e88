"""Simulations and sweeps spread over processes and over a cluster: the same answers, a lost worker survived."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy
import pytest

from roofline.accelerator import load_accelerator
from roofline.configs.load import load_model
from roofline.errors import InputError
from roofline.fanout import spread
from roofline.inference import Deployment
from roofline.sweep import decode_sweep

ASKED = (
    "simulate", "llama-3-8b", "--gpu", "h100-sxm,h200-sxm", "--rate", "2,8", "--isl", "lognormal:600:0.7", "--osl", "100",
    "--requests", "200", "--seed", "5", "-o", "json",
)  # fmt: skip


def square(number: int) -> int:
    return number * number


def slowly(number: int) -> tuple[int, int]:
    """(square, process) after a while."""
    time.sleep(0.3)
    return number * number, os.getpid()


def refuse(number: int) -> int:
    raise InputError(f"number: {number} is refused")


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    distributed = pytest.importorskip("distributed")
    with distributed.LocalCluster(
        n_workers=2, threads_per_worker=1, processes=True, dashboard_address=None, silence_logs=50
    ) as running:
        yield running


def test_processes_give_what_a_loop_gives() -> None:
    pytest.importorskip("joblib")
    assert spread(square, range(20), jobs=2) == [square(i) for i in range(20)] == spread(square, range(20))


def test_simulations_over_processes_are_those_of_a_loop(cli: Callable[..., Any]) -> None:
    pytest.importorskip("joblib")
    alone, together = cli(*ASKED), cli(*ASKED, "--jobs", "2")
    assert len(alone.records) == 4
    assert alone.out == together.out


def test_gaps_between_tokens_are_the_same_to_the_last_bit_in_another_process(cli: Callable[..., Any]) -> None:
    """Means over many gaps are sums in an order of their own, not products that threads divide among them."""
    pytest.importorskip("joblib")
    load = ("--rate", "4,8", "--isl", "500:900", "--osl", "lognormal:100:0.5", "--requests", "600", "-o", "json")
    alone, two = (
        cli("simulate", "llama-3-8b", "--gpu", "h100-sxm", "--engine", "vllm", *load, "--jobs", jobs).records for jobs in "12"
    )
    assert alone == two


def test_simulations_over_a_cluster_are_those_of_a_loop(cli: Callable[..., Any], cluster: Any) -> None:
    alone, together = cli(*ASKED), cli(*ASKED, "--cluster", cluster.scheduler_address)
    assert together.code == 0, together.err
    assert json.loads(alone.out) == json.loads(together.out)


def test_a_sweep_over_a_cluster_is_that_of_a_loop(cluster: Any) -> None:
    deployment = Deployment(load_model("llama-3-8b"), load_accelerator("h100-sxm"))
    batches, contexts = numpy.arange(1, 40_001) % 512 + 1, numpy.arange(40_000) * 3
    alone = decode_sweep(deployment, batches, contexts)
    together = decode_sweep(deployment, batches, contexts, cluster=cluster.scheduler_address)
    for name in ("tpot_bound_s", "tpot_serial_s", "required_bytes"):
        numpy.testing.assert_array_equal(getattr(alone, name), getattr(together, name))


def test_a_worker_that_is_killed_costs_nothing_but_time(cluster: Any) -> None:
    from distributed import Client

    with Client(cluster.scheduler_address, set_as_default=False) as client:
        victim = sorted(client.run(os.getpid).values())[0]
    killer = threading.Timer(1.0, os.kill, (victim, signal.SIGKILL))
    killer.start()
    answers = spread(slowly, range(16), cluster=cluster.scheduler_address)
    killer.join()
    assert [answer for answer, _ in answers] == [number * number for number in range(16)]
    with pytest.raises(ProcessLookupError):
        os.kill(victim, 0)


def test_errors_come_back_as_they_are(cluster: Any) -> None:
    with pytest.raises(InputError, match="number: 3 is refused"):
        spread(refuse, [3], cluster=cluster.scheduler_address)
    with pytest.raises(InputError, match="number: 3 is refused"):
        spread(refuse, [3, 4], jobs=2)


def test_a_cluster_that_is_not_there_is_said_in_one_line(cli: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("distributed")
    monkeypatch.setattr("roofline.fanout.CONNECT_S", 1)
    for address in ("tcp://127.0.0.1:9", "nonsense", "http://x"):
        answer = cli(*ASKED, "--cluster", address)
        assert answer.code == 2, answer.err
        assert answer.err.startswith("error: cluster: no dask scheduler answers at")
        assert answer.err.count("\n") == 1, answer.err
    assert cli(*ASKED, "--cluster", "tcp://127.0.0.1:9", "--jobs", "2").err.startswith("error: jobs: ")
    assert cli(*ASKED, "--jobs", "0").code == 2
