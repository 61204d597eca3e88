"""How many deployments a search sizes per second: at least 10,000 in less than 10 s of one core.

python benchmarks/planner.py [MODEL]
"""

from __future__ import annotations

import sys
from time import perf_counter, process_time

from roofline.accelerator import load_accelerator
from roofline.configs.load import load_model
from roofline.engines.profile import load_engine
from roofline.planner.demand import demand
from roofline.planner.disaggregate import disaggregated
from roofline.planner.prices import rent
from roofline.planner.search import search
from roofline.planner.setups import comparable, setups, variants
from roofline.serving.metrics import Objective

GPUS = ("a100-sxm-80gb", "h100-sxm", "h200-sxm", "b200-sxm", "mi300x")
LEAST, LIMIT_S = 10_000, 10.0


def main() -> int:
    name = sys.argv[1] if len(sys.argv) > 1 else "qwen3-30b-a3b"
    load, objective = demand(2000, 500, rate=4.0), Objective(1.0, 0.04)
    model, engine = load_model(name), load_engine("vllm")
    chips = [load_accelerator(gpu) for gpu in GPUS]
    rents = {chip.id: rent(chip) for chip in chips}
    start, cpu = perf_counter(), process_time()
    found = [s for chip in chips for s in setups(model, variants(model, None, None, engine, chip), chip, engine, load.length, 64)]
    found, _ = comparable(found)
    result = search(found, load, objective, rents, 64)
    apart, tried = disaggregated(found, load, objective, rents, 64)
    wall, spent = perf_counter() - start, process_time() - cpu
    total = result.tried + tried
    kinds = sorted({setup.times.provenance for setup in found})
    print(f"{name}: {total:,} deployments of {len(found)} setups ({', '.join(kinds)}) in {wall:.1f} s, {spent:.1f} s of CPU")
    pace = f"{total / spent:,.0f} deployments per second of CPU, 10,000 in {spent / total * LEAST:.1f} s"
    print(f"{len(result.plans) + len(apart):,} meet the limits; {pace}")
    return 0 if total >= LEAST and spent / total * LEAST < LIMIT_S else 1


if __name__ == "__main__":
    sys.exit(main())
