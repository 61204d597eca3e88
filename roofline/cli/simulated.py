"""What ``roofline simulate`` shows of its records: a table, and whether each load is served as asked."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from roofline.cli.limits import service_level, too_long
from roofline.cli.output import Cells, Output

if TYPE_CHECKING:
    from roofline.engines.profile import Profile
    from roofline.serving.metrics import Objective

BOUNDS = "step times are the datasheet's bounds, and a real server is slower"
Record = dict[str, Any]


def cells(records: Sequence[Record], loads: Sequence[str]) -> Cells:
    """A row for each simulation."""
    from roofline.units import latency

    several = any(r["edits"] for r in records)
    headers = [
        *(["variant"] if several else []), "gpu", "load", "done", "TTFT\nmean", "TTFT\np99", "TPOT\nmean", "ITL\np99", "E2E\np99",
        "output\ntok/s", "tok/s\nper GPU", "decode\nbatch", "busy\n%", "cache\npeak %", "pre-\nempted", "good\n%",
    ]  # fmt: skip

    def share(value: float | None) -> str:
        return "-" if value is None else f"{100 * value:.1f}"

    def time(value: float | None) -> str:
        return "-" if value is None else latency(value)

    def count(value: float | None) -> str:
        return "-" if value is None else f"{value:,.1f}"

    rows = [
        [
            *([_variant(r)] if several else []),
            f"{r['gpus']} x {r['gpu']}" if r["gpus"] > 1 else r["gpu"], load, f"{r['completed']:,}", time(r["ttft_mean_s"]),
            time(r["ttft_p99_s"]), time(r["tpot_mean_s"]), time(r["itl_p99_s"]), time(r["e2e_p99_s"]),
            count(r["output_tok_per_s"]), count(r["output_tok_per_s_per_gpu"]), count(r["mean_decode_batch"]),
            share(r["utilisation"]), share(r["kv_occupancy_peak"]), f"{r['preemptions']:,}", share(r["good_share"]),
        ]
        for r, load in zip(records, loads, strict=True)
    ]  # fmt: skip
    return headers, rows


def _variant(record: Record) -> str:
    """The edits of a record, or "base"."""
    return " ".join(record["edits"]) or "base"


def verdicts(records: Sequence[Record], loads: Sequence[str], objective: Objective, out: Output) -> Iterator[str]:
    """Whether each load meets the objective, where there is one, and how many of its requests are refused.

    Edited models, and the one they are compared with, go by their edits.
    """
    several = any(r["edits"] for r in records)
    asked = service_level(objective)
    for r, load in zip(records, loads, strict=True):
        before = f"{_variant(r) if several else ''} {r['mesh']}".strip()
        where = f"{before + ' on ' if before else ''}{r['gpu']} at {load}"
        if r["meets_objective"]:
            yield f"{where}: {out.paint('meets', 'green')} the objective ({asked})"
        elif r["misses"]:
            yield f"{where}: {out.paint('misses', 'red')} the objective ({asked}): {'; '.join(r['misses'])}"
        if r["refused"]:
            yield f"{where}: {r['refused']:,} of {r['requests']:,} requests are refused: {too_long(r)}"


def assumed(records: Sequence[Record]) -> list[str]:
    """What the simulations rest on, each line once; what only some deployments share stands behind what tells them apart."""
    from roofline.cli.verdict import merged

    places = [(_variant(r), r["mesh"] or "1 GPU", r["gpu"]) for r in records]
    differ = [len(set(values)) > 1 for values in zip(*places, strict=True)]
    found: dict[str, list[str]] = {}
    for place, r in zip(places, records, strict=True):
        name = " on ".join(word for word, tells in zip(place, differ, strict=True) if tells)
        found.setdefault(name, []).extend(r["assumes"])
    return list(merged(list(found.items())))


def bounds(records: Sequence[Record], engine: str | None) -> list[str]:
    """That step times are bounds, where all are, and what would give others."""
    if any(r["provenance"] != "datasheet" for r in records):
        return []
    return [BOUNDS if engine else f"{BOUNDS}: --engine vllm takes those of measured servers"]


def batches(profile: Profile | None, records: Sequence[Record]) -> tuple[str, ...]:
    """Mean batches that leave the range of the calibrated times, in one sentence."""
    from roofline.expected.serving import outside_batches

    found = [r["mean_decode_batch"] for r in records if r["provenance"] != "datasheet" and r["mean_decode_batch"] is not None]
    return outside_batches(profile.id, found) if profile and found else ()
