"""The measured tables of the package aiconfigurator-core: which file answers for what, rows without duplicates, splits.

A table is parquet, one row per measurement, latency in ms. Every column but the measured ones is part of a row's key;
a row is held out iff the last byte of the sha256 of its key ("column=value" sorted by column, joined by "|") is even.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from roofline.errors import InputError

PACKAGE = "aiconfigurator-core"
GPUS = {
    "h100-sxm": "h100_sxm", "h200-sxm": "h200_sxm", "a100-sxm-80gb": "a100_sxm", "b200-sxm": "b200_sxm", "gb200": "gb200",
    "b300-sxm": "b300_sxm", "gb300": "gb300", "l40s": "l40s", "rtx-pro-6000": "rtx_pro_6000_server",
}  # fmt: skip
"""Accelerator id -> folder of the package's tables."""
PREFERRED = ("0.24.0", "1.3.0rc20", "0.5.14", "2.29.2")
"""Versions of vLLM, TensorRT-LLM, SGLang and NCCL that cover most operators; elsewhere the newest there is."""
MEASURED = ("latency", "power", "power_watts", "energy")
MOST_COMBINED = 2048
"""Combinations of values of neighbouring columns that are spelled out."""


@dataclass(frozen=True)
class Table:
    """One file: a pandas frame without exact duplicates, and where it comes from."""

    gpu: str
    framework: str
    version: str
    file: str
    rows: Any
    duplicates: int

    @property
    def keys(self) -> list[str]:
        """Columns that identify a row."""
        return sorted(column for column in self.rows.columns if column not in MEASURED)


def package_version() -> str:
    """Version of the installed package."""
    from importlib.metadata import version

    return version(PACKAGE)


@cache
def root() -> Path:
    """Folder of the tables. Raises ModuleNotFoundError where the package is not installed."""
    import aiconfigurator_core

    return Path(aiconfigurator_core.__path__[0], "systems", "data")


def _newest_first(version: str) -> list[int]:
    return [-int(number) for number in re.findall(r"\d+", version)]


def folder_of(gpu: str) -> str:
    """The package's name of an accelerator. Raises InputError where it holds no tables of it."""
    if gpu not in GPUS:
        raise InputError(f"gpu: no measured operators of {gpu!r}; there are tables of {', '.join(GPUS)}")
    return GPUS[gpu]


def find(gpu: str, operator: str, file: str) -> list[tuple[str, str, Path]]:
    """(framework, version, path) of each framework's table of that name, the preferred version or the newest."""
    found: dict[str, list[tuple[str, Path]]] = {}
    for path in sorted(root().glob(f"{folder_of(gpu)}/{operator}/*/*/{file}.parquet")):
        found.setdefault(path.parts[-3], []).append((path.parts[-2], path))
    chosen = []
    for framework, versions in sorted(found.items()):
        versions.sort(key=lambda entry: (entry[0] not in PREFERRED, _newest_first(entry[0])))
        chosen.append((framework, *versions[0]))
    return chosen


@cache
def read(path: Path) -> tuple[Any, int]:
    """Rows of a file in their order without exact duplicates and without zero latencies, and how many duplicates went.

    Columns of text are categories in the order of their names: they are few texts over many rows.
    """
    import pandas
    from pyarrow import parquet, types

    texts = [
        field.name for field in parquet.read_schema(path) if types.is_string(field.type) or types.is_large_string(field.type)
    ]
    rows = pandas.read_parquet(path, read_dictionary=texts)
    for name in texts:
        named = rows[name].cat.rename_categories(rows[name].cat.categories.astype(object))
        rows[name] = named.cat.reorder_categories(named.cat.categories.sort_values())
    kept = rows.drop_duplicates(ignore_index=True)
    duplicates = len(rows) - len(kept)
    if "latency" in kept:
        kept = kept[kept["latency"] > 0].reset_index(drop=True)
    return kept, duplicates


def tables(gpu: str, operator: str, file: str) -> list[Table]:
    """The tables of one operator on one accelerator, one per framework."""
    result = []
    for framework, version, path in find(gpu, operator, file):
        rows, duplicates = read(path)
        result.append(Table(gpu, framework, version, f"{operator}/{path.parts[-3]}/{version}/{file}", rows, duplicates))
    return result


def joined(rows: Any, columns: Sequence[str], named: bool = False, by: str = "|") -> list[str]:
    """The values of some columns of each row, joined by a sign (with ``named``, each as "column=value").

    Neighbouring columns of few values are joined once per combination of them.
    """
    import numpy
    import pandas

    parts: list[tuple[Any, list[str]]] = []
    for column in columns:
        array = rows[column].array
        coded = isinstance(array, pandas.Categorical)
        codes, values = pandas.factorize(array.codes if coded else array.to_numpy())
        values = array.categories[values] if coded else values
        texts = [f"{column}={value}" if named else str(value) for value in values]
        if parts and len(parts[-1][1]) * len(texts) <= min(MOST_COMBINED, len(rows)):
            before, firsts = parts.pop()
            codes, texts = before * len(texts) + codes, [f"{first}{by}{text}" for first in firsts for text in texts]
        parts.append((codes, texts))
    return list(map(by.join, zip(*(numpy.array(texts, dtype=object)[codes].tolist() for codes, texts in parts), strict=True)))


def hashes(rows: Any, keys: Sequence[str]) -> Any:
    """(order, held_out) of each row: the first eight bytes of its key's sha256 as uint64, the parity of the last."""
    import numpy

    sha256 = hashlib.sha256
    digests = b"".join([sha256(line.encode()).digest() for line in joined(rows, keys, named=True)])
    table = numpy.frombuffer(digests, dtype=numpy.uint8).reshape(-1, 32)
    return table[:, :8].copy().view(">u8").ravel().astype(numpy.uint64), table[:, 31] % 2 == 0
