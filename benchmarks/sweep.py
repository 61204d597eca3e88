"""A million what-if points: the array reading against the scalar path, in one run.

    python benchmarks/sweep.py [--points N] [--json]

Decode steps of a dense 80-layer model on an H100 with bound, serial time and memory fit, at random batches and contexts
(so that no point shares work with another). The scalar path asks the same questions one by one. Best of several
repetitions; both on one core, side by side; the ratio is the figure to quote.
"""

from __future__ import annotations

import argparse
import json
import sys
from time import perf_counter

import numpy

from roofline import Deployment, load_accelerator, load_model
from roofline.sweep import decode_sweep

MODELS = ("llama-3.1-70b", "deepseek-v4-pro", "nemotron-h-56b-base-8k")
SCALAR_QUERIES = 20_000
REPEATS = 5


def best(action, repeats: int = REPEATS) -> float:
    """Seconds of the fastest of several runs."""
    times = []
    for _ in range(repeats):
        start = perf_counter()
        action()
        times.append(perf_counter() - start)
    return min(times)


def scalar(deployment: Deployment, batches: list[int], contexts: list[int]) -> int:
    """Points that fit, asked one by one: bound, serial time and fit of each."""
    fitting = 0
    for batch, context in zip(batches, contexts, strict=True):
        step = deployment.decode(batch, context)
        fitting += step.memory.fits and step.bound_s <= step.serial_s
    return fitting


def measure(name: str, points: int) -> dict[str, object]:
    """Points per second of both paths for one model; checks that they agree."""
    deployment = Deployment(load_model(name), load_accelerator("h100-sxm"))
    random = numpy.random.default_rng(0)
    batches, contexts = random.integers(1, 513, points), random.integers(0, 131073, points)
    some = slice(0, min(points, SCALAR_QUERIES))
    listed = batches[some].tolist(), contexts[some].tolist()
    swept = decode_sweep(deployment, batches, contexts)
    if scalar(deployment, *listed) != int(swept.fits[some].sum()):
        raise SystemExit(f"{name}: the sweep and the scalar path disagree")

    def sweep() -> None:
        found = decode_sweep(deployment, batches, contexts)
        _ = found.fits

    sweep_rate = points / best(sweep)
    scalar_rate = len(listed[0]) / best(lambda: scalar(deployment, *listed), 3)
    return {
        "model": name,
        "points": points,
        "sweep_points_per_s": sweep_rate,
        "scalar_queries_per_s": scalar_rate,
        "ratio": sweep_rate / scalar_rate,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--points", type=int, default=10**6)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("models", nargs="*", default=MODELS)
    options = parser.parse_args()
    rows = []
    for name in options.models:
        rows.append(measure(name, options.points))
        if not options.json:
            row = rows[-1]
            print(
                f"{row['model']:28} sweep {row['sweep_points_per_s'] / 1e6:6.2f} M points/s   "
                f"scalar {row['scalar_queries_per_s']:8.0f} queries/s   ratio {row['ratio']:6.0f}"
            )
    if options.json:
        json.dump(rows, sys.stdout, indent=1)
        print()


if __name__ == "__main__":
    main()
