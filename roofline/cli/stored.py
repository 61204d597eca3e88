"""``roofline models PATH --stored``: what the headers of a local model say is stored, module by module."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from roofline.checkpoints.agreement import Agreement
    from roofline.checkpoints.stored import Stored
    from roofline.cli.output import Output

LAYER = re.compile(r"(?<=\.)(?:layers|h|blocks|blk|block)\.(\d+)(?=\.)")
EXPERT = re.compile(r"(?<=\.experts\.)\d+")
COLUMNS = ("module", "format", "tensors", "layers", "params", "stored bytes", "of them scales")
NAMED = 3
"""Differences that the summary names already."""


def pattern(module: str) -> tuple[str, str]:
    """(module with a star for the numbers of its layer and expert, number of the layer, "" outside of layers)."""
    match = LAYER.search(f".{module}.")
    if match is None:
        return module, ""
    start, end = match.start(1) - 1, match.end(1) - 1
    return EXPERT.sub("*", f"{module[:start]}*{module[end:]}"), match[1]


def _records(stored: Stored) -> list[dict[str, Any]]:
    """Equal modules of all layers and experts in one record for each format."""
    groups: dict[tuple[str, str], list[Any]] = {}
    for weight in stored.weights:
        module, layer = pattern(weight.module)
        groups.setdefault((module, weight.format), []).append((layer, weight))
    return [
        {
            "module": module, "format": name, "tensors": len(found), "layers": len({layer for layer, _ in found if layer}),
            "params": sum(weight.elements for _, weight in found),
            "stored_bytes": sum(weight.stored_bytes for _, weight in found),
            "scale_bytes": sum(weight.scale_bytes for _, weight in found),
        }
        for (module, name), found in groups.items()
    ]  # fmt: skip


def _agreement(path: Path, stored: Stored) -> Agreement | None:
    """The weights beside the model that a config or the metadata describe; None where neither is there."""
    from roofline.checkpoints.agreement import compare
    from roofline.configs.load import load_model

    if stored.source.endswith(".gguf"):
        return compare(stored, load_model(Path(stored.source)))
    config = (path if path.is_dir() else path.parent) / "config.json"
    return compare(stored, load_model(config)) if config.is_file() else None


def show_stored(name: str, out: Output) -> int:
    """Prints what is stored, and whether it is what the config describes: 1 where it is not."""
    from roofline.checkpoints.headers import read_headers
    from roofline.units import capacity

    stored = read_headers(name)
    agreement = _agreement(Path(name).expanduser(), stored)
    records = _records(stored)
    formats = ", ".join(f"{key} {share.elements:,} in {share.bytes:,} bytes" for key, share in stored.by_format.items())
    out.note(
        out.paint(stored.source, "bold"),
        f"{stored.params:,} parameters, {stored.bytes:,} bytes ({capacity(stored.bytes)}) "
        f"in {stored.files} file{'s' if stored.files > 1 else ''}: {formats}",
        *(
            ["no config.json lies beside it to compare with"]
            if agreement is None
            else [agreement.summary, *map(str, agreement.differences[NAMED:])]
        ),
        "",
    )
    out.records(records, lambda: (COLUMNS, [_row(record) for record in records]))
    return 0 if agreement is None or agreement.agrees else 1


def _row(record: dict[str, Any]) -> list[Any]:
    numbers = [f"{record[key]:,}" for key in ("params", "stored_bytes", "scale_bytes")]
    return [record["module"], record["format"], record["tensors"], record["layers"] or "-", *numbers]
