"""A served workload as a trace that Perfetto (ui.perfetto.dev) and chrome://tracing show.

One track per replica with its steps, counters of waiting requests and used blocks, and for each request its time in the
queue, in prefill and in decode. Source: the Trace Event Format of Chrome, phases X, C, b and e; times in microseconds.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from roofline.errors import InputError
from roofline.serving.cluster import Outcome
from roofline.serving.replica import Replica

REQUESTS = 1
"""Process id of the requests' tracks; replicas follow."""


def events(outcome: Outcome) -> Iterator[dict[str, Any]]:
    """The events of a trace. Raises InputError where the replicas kept no log."""
    yield {"ph": "M", "name": "process_name", "pid": REQUESTS, "tid": 0, "args": {"name": "requests"}}
    for index, replica in enumerate(outcome.replicas):
        process = REQUESTS + 1 + index
        if replica.log is None:
            raise InputError("perfetto: the replicas kept no log of their steps; serve with record=True")
        yield {"ph": "M", "name": "process_name", "pid": process, "tid": 0, "args": {"name": replica.name}}
        for span in replica.log:
            parts = [f"prefill {span.prefill_tokens}"] if span.prefills else []
            parts += [f"decode {span.decodes}{f' x {span.steps}' if span.steps > 1 else ''}"] if span.decodes else []
            start = span.start * 1e6
            yield {
                "ph": "X", "name": " + ".join(parts), "cat": "step", "pid": process, "tid": 1, "ts": start,
                "dur": span.end * 1e6 - start,
                "args": {
                    "steps": span.steps, "prefills": span.prefills, "prefill_tokens": span.prefill_tokens,
                    "decodes": span.decodes,
                },
            }  # fmt: skip
            yield _counter(process, "waiting requests", span.start, span.waiting)
        for moment, blocks in _blocks(replica):
            yield _counter(process, "used blocks", moment, blocks)
    yield from _requests(outcome)


def _counter(process: int, name: str, moment: float, value: int) -> dict[str, Any]:
    return {"ph": "C", "name": name, "pid": process, "tid": 1, "ts": moment * 1e6, "args": {name: value}}


def _blocks(replica: Replica) -> list[tuple[float, int]]:
    """Blocks that requests hold, from when on: during each step, and after it; what a prefix cache keeps is not in use."""
    started = {span.start: span.blocks for span in replica.log or ()}
    between = {moment: blocks for moment, blocks in replica.left if moment not in started}
    return sorted((between | started).items())


def _requests(outcome: Outcome) -> Iterator[dict[str, Any]]:
    columns = (outcome.arrival, outcome.admitted, outcome.first, outcome.finish)
    for number, moments in enumerate(zip(*(column.tolist() for column in columns), strict=True)):
        if any(math.isnan(moment) for moment in moments):
            continue
        common = {"cat": "request", "id": number, "pid": REQUESTS, "tid": 1}
        size = {"prompt_tokens": int(outcome.workload.prompt[number]), "output_tokens": int(outcome.workload.output[number])}
        yield {"ph": "b", "name": f"request {number}", "ts": moments[0] * 1e6, "args": size, **common}
        for name, start, end in zip(("queue", "prefill", "decode"), moments, moments[1:], strict=False):
            yield {"ph": "b", "name": name, "ts": start * 1e6, **common}
            yield {"ph": "e", "name": name, "ts": end * 1e6, **common}
        yield {"ph": "e", "name": f"request {number}", "ts": moments[3] * 1e6, **common}


def write(outcome: Outcome, path: str | Path) -> int:
    """Writes a trace; returns the number of events. Raises InputError where it cannot be written."""
    number = 0
    try:
        with Path(path).open("w", encoding="utf-8") as file:
            file.write('{"displayTimeUnit": "ms", "traceEvents": [\n')
            for event in events(outcome):
                file.write((",\n" if number else "") + json.dumps(event))
                number += 1
            file.write("\n]}\n")
    except OSError as error:
        raise InputError(f"perfetto: {path}: {error.strerror or error}; give the path of a file that can be written") from None
    return number
