"""Draw the figures of the documentation into docs/figures; with --check, fail when they are not what would be drawn.

What is drawn is compared by its digest, which figures.json keeps: the bytes of an SVG change with the version of matplotlib.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from roofline import Deployment, load_accelerator, load_model
from roofline.edits import apply, kv_heads
from roofline.plots import digest, kernel_points, latency_plot, roofline_plot, save

FOLDER = Path(__file__).with_name("figures")
DIGESTS = FOLDER / "figures.json"


def roofline() -> Any:
    """Kernels of Llama 3.1 8B on an H100, at the times that vLLM's kernels are expected to take."""
    one = Deployment(load_model("llama-3.1-8b"), load_accelerator("h100-sxm"))
    points = [*kernel_points(one, 1, 0, phase="prefill", new_tokens=2048), *kernel_points(one, 32, 8192)]
    note = "prefill of 2,048 tokens; decode of 32 sequences at context 8,192; % of the datasheet roof at expected times (vllm)"
    return roofline_plot(one.accelerator, points, title="Llama 3.1 8B on an H100", note=note)


def latency() -> Any:
    """Llama 2 13B on an H100, with its own key-value heads and with 8."""
    model, chip = load_model("llama-2-13b"), load_accelerator("h100-sxm")
    cases = {"MHA, 40 KV heads": Deployment(model, chip), "GQA, 8 KV heads": Deployment(apply(model, [kv_heads(8)]), chip)}
    return latency_plot(cases, [2**power for power in range(10)], 1024, title="Llama 2 13B on an H100")


FIGURES: dict[str, Callable[[], Any]] = {"roofline": roofline, "latency": latency}


if __name__ == "__main__":
    figures = {name: draw() for name, draw in FIGURES.items()}
    found = {name: digest(figure) for name, figure in figures.items()}
    if "--check" in sys.argv[1:]:
        kept = json.loads(DIGESTS.read_text(encoding="utf-8")) if DIGESTS.is_file() else {}
        stale = [name for name in found if kept.get(name) != found[name] or not (FOLDER / f"{name}.svg").is_file()]
        if stale:
            print(f"docs/figures: {', '.join(stale)} would be drawn anew: run python docs/generate_figures.py", file=sys.stderr)
        sys.exit(1 if stale else 0)
    FOLDER.mkdir(exist_ok=True)
    for name, figure in figures.items():
        save(figure, FOLDER / f"{name}.svg")
    DIGESTS.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
