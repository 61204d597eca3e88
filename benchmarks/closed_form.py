"""The closed form beside the simulator, on every measured run where nothing queues: at most 5 % apart.

Some twelve hundred servers, each simulated request by request until the mean of 400 is known: about ten minutes.
Runs whose client is unknown are given that of InferenceX, and compared per token only.

    python benchmarks/closed_form.py [--write]
"""

from __future__ import annotations

import sys
import time
from collections import defaultdict
from typing import Any

from roofline.validate.serving.record import write_agreement
from roofline.validate.serving.simulated import Compared, agreement, compared, quiet, runs

LIMIT = 0.05


def line(key: tuple[str, str, str], found: list[Compared]) -> dict[str, Any]:
    """How far the runs of one engine, model and accelerator are apart."""
    return {"engine": key[0], "model": key[1], "gpu": key[2], **agreement(found)}


def main(write: bool) -> int:
    started, groups = time.perf_counter(), defaultdict[tuple[str, str, str], list[Compared]](list)
    for blind in (False, True):
        every = runs(blind)
        for one in compared(every, quiet(every)):
            groups[one.engine, one.model, one.gpu].append(one)
    lines = [line(key, groups[key]) for key in sorted(groups)]
    for entry in lines:
        print(" ".join(f"{name}={value:.4f}" if isinstance(value, float) else f"{name}={value}" for name, value in entry.items()))
    beyond = [one for found in groups.values() for one in found if abs(one.closed_tpot / one.simulated_tpot - 1) > LIMIT]
    beyond += [
        one for found in groups.values() for one in found if one.known and abs(one.closed_ttft / one.simulated_ttft - 1) > LIMIT
    ]
    print(
        f"{sum(entry['runs'] for entry in lines)} runs, {len(beyond)} beyond {LIMIT:.0%}, {time.perf_counter() - started:.0f} s"
    )
    for one in beyond:
        print(one)
    if write:
        write_agreement(lines)
    return 1 if beyond else 0


if __name__ == "__main__":
    sys.exit(main("--write" in sys.argv[1:]))
