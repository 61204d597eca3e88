"""A user's own measurements: a CSV or JSON file of operators, checked against the bound, fitted, and reported.

Columns: ``class`` (gemm, attention_decode or attention_prefill), ``latency_us``, ``dtype`` of weights (gemm) or of the cache,
and the shape: gemm m, n, k; attention batch, new, history, heads, kv_heads, head_dim, window (0 for none).
"""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

from roofline.errors import InputError
from roofline.validate.silicon.frame import Frame
from roofline.validate.silicon.source import Table

SHAPES = {
    "gemm": ("m", "n", "k"),
    "attention_decode": ("batch", "new", "history", "heads", "kv_heads", "head_dim", "window"),
    "attention_prefill": ("batch", "new", "history", "heads", "kv_heads", "head_dim", "window"),
}
NAMES = {
    "batch": "batch_size", "new": "isl", "history": "step", "heads": "num_heads", "kv_heads": "num_key_value_heads",
    "window": "window_size",
}  # fmt: skip


def read_rows(path: Path) -> list[dict[str, str]]:
    """Rows of a CSV file with a header, or of a JSON list of objects. Raises InputError."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"{path.name}: cannot be read ({error})") from None
    if path.suffix == ".json":
        try:
            rows = json.loads(text)
        except ValueError as error:
            raise InputError(f"{path.name}: not JSON ({error})") from None
        if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
            raise InputError(f"{path.name}: write a list of objects, one per measurement")
        return [{str(key): str(value) for key, value in row.items()} for row in rows]
    return list(csv.DictReader(text.splitlines()))


def _number(row: dict[str, str], name: str, where: str) -> float:
    if name not in row:
        found = ", ".join(column for column in row if column) or "none"
        unit = "; times are in microseconds" if name == "latency_us" else ""
        raise InputError(f"{where}: the column {name} is missing; found {found}{unit}")
    try:
        value = float(row[name])
    except (ValueError, TypeError):
        raise InputError(f"{where}: {name} must be a number; found {row.get(name)!r:.40}") from None
    if not 0 <= value < 1e15 or (value == 0 and name not in ("history", "window")):
        raise InputError(f"{where}: {name} = {value} is out of range")
    return value


def _whole(row: dict[str, str], name: str, where: str) -> int:
    value = _number(row, name, where)
    if value != int(value):
        raise InputError(f"{where}: {name} must be a whole number; found {row[name]!r:.40}")
    return int(value)


def frames(path: Path, gpu: str) -> list[Frame]:
    """The measurements as frames, one per class and dtype. Raises InputError naming line and column."""
    import pandas

    groups: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for number, row in enumerate(read_rows(path), start=2):
        where = f"{path.name} row {number}"
        cls = row.get("class", "")
        if cls not in SHAPES:
            raise InputError(f"{where}: class must be one of {', '.join(SHAPES)}; found {cls!r:.40}")
        values: dict[str, Any] = {NAMES.get(name, name): _whole(row, name, where) for name in SHAPES[cls]}
        if values.get("num_heads", 0) % values.get("num_key_value_heads", 1):
            raise InputError(f"{where}: heads = {row['heads']} is not a multiple of kv_heads = {row['kv_heads']}")
        values["latency"] = _number(row, "latency_us", where) * 1e-3
        groups.setdefault((cls, row.get("dtype") or "bf16"), []).append(values)
    if not groups:
        raise InputError(f"{path.name}: no measurements; see roofline validate --help for the columns")
    return [_frame(cls, dtype, pandas.DataFrame(rows), gpu, path.name) for (cls, dtype), rows in sorted(groups.items())]


def _frame(cls: str, dtype: str, rows: Any, gpu: str, name: str) -> Frame:
    from roofline.validate.silicon import attention, gemm

    long = {"bf16": "bfloat16", "fp16": "float16"}.get(dtype, dtype)
    table = Table(gpu, "own", "", name, rows, 0)
    if cls == "gemm":
        if long not in gemm.WEIGHTS:
            raise InputError(f"{name}: dtype {dtype!r} of a gemm is not one of bf16, {', '.join(gemm.WEIGHTS)}")
        return gemm.family(table, rows, long, "measured")
    if long not in attention.KV:
        raise InputError(f"{name}: dtype {dtype!r} of an attention cache is not one of bf16, fp8")
    return attention.family(table, rows, cls, "measured", "bfloat16", long)
