"""What the serving report is held to, and how the package that its rows come from does on them."""

from __future__ import annotations

TARGETS = (
    ("tpot", "unseen_model", None, 0.10, 0.07), ("tpot", "unseen_gpu", None, 0.11, 0.08), ("tpot", "blind", None, 0.09, 0.07),
    ("tpot", "unseen_model", "moe", 0.20, 0.12), ("ttft", "fit", None, 0.15, 0.10),
    ("ttft", "unseen_gpu", None, 0.15, 0.10), ("ttft", "blind", None, 0.15, 0.10),
)  # fmt: skip
"""(metric, split, model, to reach, stretch) of lines over all engines and accelerators."""
MISSED = (("ttft", "blind", None),)
"""(metric, split, model) of the lines that do not reach theirs; documents say so."""
ANCHORS = (
    ("tpot", None, "720 dense rows that it predicts", 0.142, 30), ("tpot", None, "the same, told the fp8 cache", 0.121, 30),
    ("tpot", "b200-sxm", "Llama-70B fp8, TensorRT-LLM", 0.320, 2), ("tpot", "b200-sxm", "Llama-70B fp8, vLLM", 0.112, 0),
    ("tpot", None, "Qwen3-235B, DeepSeek-R1 and V3", 0.360, 265), ("ttft", None, "720 dense rows that it predicts", 0.529, 30),
)  # fmt: skip
"""aiconfigurator 0.12.0 on its own rows, run through its ``cli_estimate``: (metric, gpu, rows, error, rows it refuses)."""


def target_of(metric: str, split: str, model: str | None) -> tuple[float, float] | None:
    """(to reach, stretch) of a line over all engines and accelerators; None for one that is held to nothing."""
    key = (metric, split, model)
    return next(((reach, stretch) for *line, reach, stretch in TARGETS if tuple(line) == key), None)
