"""Published figures beside what the datasheet allows: kernels as a fraction of a roof, static batches of serving engines."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

from roofline.accelerator import load_accelerator
from roofline.units import to_base

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
    """Each published throughput of a static batch over the bound of the same batch."""
    from roofline.configs.load import load_model
    from roofline.edits.storage import dtype, kv_dtype
    from roofline.inference import Deployment

    found = []
    for row in _rows("throughput"):
        model = kv_dtype(row["kv"]).change(dtype(row["weights"]).change(load_model(row["model"])))
        batch, prompt, output = (int(row[name]) for name in ("batch", "input", "output"))
        generation = Deployment(model, load_accelerator(row["gpu"])).generate(batch, prompt, output)
        published = float(row["tokens_per_s"])
        found.append({
            "what": f"{row['model']} {row['weights']}, batch {batch}, {prompt} in, {output} out", "gpu": row["gpu"],
            "roof": "static batch", "published": published, "datasheet": generation.output_tok_per_s,
            "ratio": published / generation.output_tok_per_s, "source": row["source"],
            "comment": "a 2023 engine: launches, sampling and host time are in it, none in the bound",
        })  # fmt: skip
    return found
