"""Work spread over processes, or over a cluster; the answers are those of a loop, in the order of the items.

Processes are joblib's, a cluster is one that dask.distributed reaches by its scheduler's address. Each item is one call of
a pure function, so a worker that is lost costs no more than what it was at: the scheduler hands its items to another one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from roofline.errors import InputError, RooflineError

Item = TypeVar("Item")
Answer = TypeVar("Answer")

CONNECT_S = 15
"""Seconds in which a cluster has to answer."""
RETRIES = 3
"""Times that an item is tried again when the worker that had it is lost."""


def spread(
    function: Callable[[Item], Answer], items: Sequence[Item], *, jobs: int = 1, cluster: str | None = None,
    step: Callable[[], None] = lambda: None,
) -> list[Answer]:  # fmt: skip
    """``[function(item) for item in items]``, elsewhere.

    Args:
        function: pure, and importable by name. jobs: processes, -1 for one per core. cluster: the address of a
            dask.distributed scheduler, as in tcp://10.0.0.1:8786; ``jobs`` is then 1. step: called when an item is done.

    Raises InputError: jobs out of range, or a cluster that does not answer; and whatever ``function`` raises.
    """
    if jobs == 0 or not -1 <= jobs <= 4096:
        raise InputError(f"jobs: {jobs} is out of range; give a number of processes, or -1 for one per core")
    if cluster is not None:
        if jobs != 1:
            raise InputError("jobs: a cluster has workers of its own; give --jobs or --cluster")
        return _over_cluster(function, items, cluster, step)
    if jobs == 1 or len(items) < 2:
        return list(_stepped(map(function, items), step))
    import joblib

    parallel = joblib.Parallel(n_jobs=jobs, return_as="generator")
    return _answers(_stepped(parallel(joblib.delayed(_Tried(function))(item) for item in items), step))


def _stepped(answers: Iterable[Answer], step: Callable[[], None]) -> Iterator[Answer]:
    for answer in answers:
        step()
        yield answer


@dataclass(frozen=True)
class _Tried:
    """A function whose errors for users come back as answers: the first in order is raised, whichever came first in time."""

    function: Callable[[Any], Any]

    def __call__(self, item: Any) -> Any:
        try:
            return self.function(item)
        except RooflineError as error:
            return error


def _answers(found: Iterable[Any]) -> list[Any]:
    answers = list(found)
    for answer in answers:
        if isinstance(answer, RooflineError):
            raise answer
    return answers


def _over_cluster(
    function: Callable[[Item], Answer], items: Sequence[Item], address: str, step: Callable[[], None]
) -> list[Answer]:
    import logging

    from distributed import Client

    for name in ("distributed.core", "distributed.comm", "distributed.client"):
        logging.getLogger(name).setLevel(logging.CRITICAL)
    try:
        client = Client(address, timeout=CONNECT_S, set_as_default=False)
    except (OSError, ValueError, TimeoutError) as error:
        reason = str(error).partition("\n")[0] or type(error).__name__
        raise InputError(f"cluster: no dask scheduler answers at {address!r} within {CONNECT_S} s ({reason})") from None
    with client:
        if not client.scheduler_info()["workers"]:
            raise InputError(f"cluster: the scheduler at {address!r} has no workers; start some with: dask worker {address}")
        futures: Any = client.map(_Tried(function), list(items), pure=False, retries=RETRIES)
        return _answers(_stepped((future.result() for future in futures), step))
