"""Published figures beside what the datasheet allows: kernels as a fraction of a roof, throughputs of serving engines."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import TYPE_CHECKING, Any

from roofline.accelerator import load_accelerator
from roofline.errors import InputError
from roofline.memory import usable
from roofline.timing import time
from roofline.units import to_base

if TYPE_CHECKING:
    from roofline.inference import Deployment

FOLDER = Path(__file__).with_name("published")


def _rows(name: str) -> list[dict[str, str]]:
    with (FOLDER / f"{name}.csv").open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def kernels() -> list[dict[str, Any]]:
    """Each published rate of a kernel over the roof that limits it."""
    found = []
    for row in _rows("kernels"):
        gpu = load_accelerator(row["gpu"])
        memory = row["quantity"] == "bandwidth"
        value = float(to_base(int(row["value"]), row["unit"], "bytes/s" if memory else "flop/s", row["what"]))
        roof = float(gpu.bandwidth.value if memory else gpu.rate(row["quantity"]))
        found.append({
            "what": row["what"], "gpu": gpu.id, "roof": row["quantity"], "published": value, "datasheet": roof,
            "ratio": value / roof, "source": row["source"], "comment": row["comment"],
        })  # fmt: skip
    return found


def throughput() -> list[dict[str, Any]]:
    """Each published throughput of a serving engine over the bound of the same requests.

    A row with a batch is a static batch: its prompts, then its steps. One without is a queue that never empties, whose
    batch nobody states: its bound overlaps prefills with decodes, fills whatever memory weights leave, and takes all GPUs
    of the row as one device, so that it holds for any schedule and any layout.
    """
    from roofline.configs.load import load_model
    from roofline.edits.storage import dtype, kv_dtype
    from roofline.inference import Deployment

    found = []
    for row in _rows("throughput"):
        model = kv_dtype(row["kv"]).change(dtype(row["weights"]).change(load_model(row["model"])))
        gpus, prompt, output = (int(row[name]) for name in ("gpus", "input", "output"))
        one = Deployment(model, load_accelerator(row["gpu"]))
        queue = not row["batch"]
        bound = queue_bound(one, gpus, prompt, output) if queue else static_bound(one, int(row["batch"]), prompt, output)
        published = float(row["tokens_per_s"])
        how = f"{gpus} GPUs" if queue else f"batch {row['batch']}"
        found.append({
            "what": f"{row['model']} {row['weights']}, {how}, {prompt} in, {output} out", "gpu": row["gpu"],
            "roof": "queue" if queue else "static batch", "published": published, "datasheet": bound,
            "ratio": published / bound, "source": row["source"], "comment": row["comment"],
        })  # fmt: skip
    return found


def static_bound(one: Deployment, batch: int, prompt: int, output: int) -> float:
    """Output tokens per second of a static batch at the bound."""
    return one.generate(batch, prompt, output).output_tok_per_s


def queue_bound(one: Deployment, gpus: int, prompt: int, output: int) -> float:
    """Output tokens per second that no schedule of a full queue exceeds on ``gpus`` devices.

    The batch is what fits beside one copy of the weights when requests are on average half done; all work of a batch's
    lifetime counts once, at the longest of its roofs. Raises InputError where not one request fits.
    """
    room = gpus * usable(one.accelerator, one.memory_fraction) - one.model.weight_bytes
    batch = int(room // one.model.state_bytes(prompt + output // 2))
    if batch < 1:
        raise InputError(f"{one.model.name}: does not fit on {gpus} {one.accelerator.id} beside one request")
    work = one.generate(batch, prompt, output).cost
    return float(batch * output * gpus / time(work, one.accelerator).bound)
