"""What a service level asks, in words: its limits, times that were typed without a unit, requests that are too long."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from roofline.serving.metrics import Objective


def service_level(objective: Objective) -> str:
    """The limits with their numbers: "TTFT 1,000 ms for 99 % and mean TPOT 40.00 ms"."""
    from roofline.units import latency

    parts = []
    if objective.ttft_s is not None:
        parts.append(f"TTFT {latency(objective.ttft_s)} for {objective.percentile:g} %")
    if objective.tpot_s is not None:
        share = objective.tpot_percentile
        parts.append(f"{'mean TPOT' if share is None else f'p{share:g} of TPOT'} {latency(objective.tpot_s)}")
    return " and ".join(parts) or "no limit on latency"


def without_unit(**given: str | None) -> list[str]:
    """What was made of times that were typed without a unit, by the name of their option."""
    return [
        f"--{name.replace('_', '-')} {text.strip()} has no unit: read as {text.strip()} s"
        for name, text in given.items()
        if text is not None and not text.strip()[-1:].isalpha() and float(text) != 0
    ]


def too_long(record: dict[str, Any]) -> str:
    """Which limit refuses requests of a simulation, what it is, and what would raise it."""
    cache, longest = record["kv_tokens"], record["max_model_len"]
    if cache is not None and (longest is None or cache < longest):
        return (
            f"longer than the {cache:,} tokens of the cache; make room for more with --tp 2 or a --kv-dtype of fewer bits, "
            "or send shorter ones"
        )
    return f"longer than max-model-len, {longest:,} tokens; raise it with --max-model-len, or send shorter ones"
