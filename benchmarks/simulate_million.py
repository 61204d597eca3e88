"""One million requests through the simulator on one core: ISL 512, OSL 128 on average, batches of up to 256.

Every iteration of the engine is simulated; the time must be under a minute, and grow linearly with the requests.

    python benchmarks/simulate_million.py
"""

from __future__ import annotations

import json
import resource
import sys
import time

from roofline.accelerator import load_accelerator
from roofline.configs.load import load_model
from roofline.inference import Deployment
from roofline.serving.cluster import Cluster
from roofline.serving.lengths import parse_length
from roofline.serving.policies import Policy
from roofline.serving.pool import Counted
from roofline.serving.replica import Replica
from roofline.serving.steps import BoundSteps
from roofline.serving.workload import synthetic

LIMIT_S = 60
SIZES = (125_000, 250_000, 500_000, 1_000_000)


def run(number: int) -> dict[str, float]:
    times = BoundSteps(Deployment(load_model("llama-3-8b"), load_accelerator("h100-sxm")), longest=8192)
    workload = synthetic(number, parse_length("512", "isl"), parse_length("lognormal:128:0.6", "osl"), concurrency=256, seed=1)
    replica = Replica(times, Policy("chunked", 256, 8192), Counted(20_000, 16))
    started = time.process_time()
    outcome = Cluster([replica]).serve(workload)
    seconds = time.process_time() - started
    assert replica.totals.output_tokens == workload.output.sum()
    assert replica.pool.used == 0
    return {
        "requests": number, "cpu_s": round(seconds, 2), "steps": replica.totals.steps,
        "output_tokens": replica.totals.output_tokens, "requests_per_s": round(number / seconds),
        "mean_batch": round(replica.totals.decode_slots / replica.totals.decode_steps, 1), "simulated_s": round(outcome.end, 1),
        "peak_memory_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024,
    }  # fmt: skip


def main() -> int:
    found = []
    for number in SIZES:
        found.append(run(number))
        print(json.dumps(found[-1]), flush=True)
    slowest, fastest = max(f["requests_per_s"] for f in found), min(f["requests_per_s"] for f in found)
    if found[-1]["cpu_s"] > LIMIT_S or slowest > 1.5 * fastest:
        print(f"missed: {found[-1]['cpu_s']} s for a million (limit {LIMIT_S} s), rates from {fastest} to {slowest} per second")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
