"""Measured serving runs of the package aiconfigurator-core: read, cleaned and labelled by the rules of ``rows.toml``.

One row is a server under a closed loop: model, accelerator, engine, layout, lengths, clients, mean time to first token and
mean time per token. The rules are data; this file only applies them.
"""

from __future__ import annotations

import tomllib
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

RULES = Path(__file__).with_name("rows.toml")
FILE = "silicon_sample.csv"
GPUS = {"h100_sxm": "h100-sxm", "h200_sxm": "h200-sxm", "b200_sxm": "b200-sxm"}
FITTED_GPUS = ("h100-sxm", "h200-sxm")
BLIND = "b200-sxm"
"""The accelerator of which only Llama-70B in fp8 is looked at, and which no constant has seen."""
NUMBERS = {
    "lengths": 1.0, "rounds": float("inf"), "budget": 8192.0, "held": 0.0, "wave": 0.0, "fraction": 0.9, "sequences": 0.0,
    "spread": 0.0,
}  # fmt: skip
"""Fields of a protocol and their defaults; a text is an expression over the columns."""


@dataclass(frozen=True)
class Dropped:
    """A rule and the rows that it took."""

    reason: str
    rows: int


@dataclass(frozen=True)
class Measured:
    """The rows that stay, and what left.

    Attributes:
        table: pandas frame, one row per run: name, set, gpu, engine, tp, dp, ep, weights, kv, kernels, family, clients (per
            data-parallel replica), prompt, output (mean tokens), the fields of the protocol, ttft and tpot (seconds).
        dropped: by rule. left: the rows themselves, in the same columns. duplicates: copies, and runs
            that came from the benchmark's file and from its database, equal to the last digit.
    """

    table: Any
    dropped: tuple[Dropped, ...]
    left: Any
    duplicates: int


@cache
def rules() -> dict[str, Any]:
    """The file of rules."""
    return tomllib.loads(RULES.read_text(encoding="utf-8"))


def _mask(rows: Any, where: str) -> Any:
    import numpy

    return rows.eval(where, engine="python").to_numpy(dtype=bool) if where else numpy.ones(len(rows), dtype=bool)


def _formats(rows: Any) -> Any:
    """Rows with storage of weights and cache: that of the first rule that matches, else the checkpoint's."""
    rows = rows.assign(weights="", kv="")
    open_rows = _mask(rows, "")
    for rule in rules()["format"]:
        mask = _mask(rows, rule["where"]) & open_rows
        rows.loc[mask, ["weights", "kv"]] = rule["weights"], rule["kv"]
        open_rows &= ~mask
    return rows


def _kernels(rows: Any) -> Any:
    """Rows with the kernels that replace the engine's, "operator = family | model" each."""
    rows = rows.assign(kernels="")
    for rule in rules()["kernel"]:
        rows.loc[_mask(rows, rule["where"]), "kernels"] = f"{rule['operator']} = {rule['kernel']}"
    return rows


def _protocols(rows: Any) -> Any:
    """Rows with the fields of their protocol."""
    rows = rows.assign(**NUMBERS)
    open_rows = _mask(rows, "")
    for rule in rules()["protocol"]:
        mask = (rows["family"] == rule["family"]).to_numpy() & _mask(rows, rule["where"]) & open_rows
        for name in NUMBERS:
            value = rule.get(name, NUMBERS[name])
            rows.loc[mask, name] = (
                rows[mask].eval(value, engine="python").astype(float) if isinstance(value, str) else float(value)
            )
        open_rows &= ~mask
    return rows


def _labelled(rows: Any) -> Any:
    """Rows with the names of this project beside the table's own columns."""
    models = rules()["model"]
    source = rows["silicon_data_source"]
    inferencex = source.str.contains("source_file=20|db-dump")
    family = inferencex.map({True: "inferencex", False: "other"}).where(~source.str.contains("gap-analysis"), "gap")
    rows = rows.assign(
        source=source, family=family, gpu=rows["system"].map(GPUS), engine=rows["backend"],
        name=rows["model_path"].map({path: entry["name"] for path, entry in models.items()}),
        set=rows["model_path"].map({path: entry["set"] for path, entry in models.items()}),
        concurrency=source.str.extract(r"silicon_concurrency=(\d+)")[0].astype(float),
        tp=rows["tp_size"].astype(int), dp=rows["attention_dp_size"].fillna(1).clip(lower=1).astype(int),
        ep=rows["moe_ep_size"].fillna(1).astype(int), clients=rows["batch_size"].astype(float),
        ttft=rows["silicon_ttft_ms"] * 1e-3, tpot=rows["silicon_tpot_ms"] * 1e-3,
    )  # fmt: skip
    rows.loc[rows["set"] == "dense", "ep"] = 1
    for rule in rules()["relabel"]:
        rows.loc[_mask(rows, rule["where"]), "ep"] = rule["ep"]
    return _protocols(_kernels(_formats(rows)))


def wanted(rows: Any) -> Any:
    """Rows that are looked at: aggregated serving of listed models on Hopper, and Llama-70B in fp8 on B200."""
    hopper = rows["system"].isin([name for name, gpu in GPUS.items() if gpu in FITTED_GPUS])
    blind = (
        (rows["system"] == "b200_sxm") & (rows["model_path"] == "meta-llama/Llama-3.1-70B") & (rows["gemm_quant_mode"] == "fp8")
    )
    return rows[(rows["mode"] == "agg") & rows["model_path"].isin(list(rules()["model"])) & (hopper | blind)]


@cache
def measured() -> Measured:
    """The cleaned rows. Raises ModuleNotFoundError where the package is not installed."""
    import aiconfigurator_core
    import pandas

    found = wanted(pandas.read_csv(Path(aiconfigurator_core.__path__[0], "systems", FILE)))
    unique = found.drop_duplicates(subset=[column for column in found.columns if column not in ("id", "silicon_data_source")])
    rows = _labelled(unique).reset_index(drop=True)
    rows = rows.assign(prompt=rows["lengths"] * rows["isl"], output=rows["lengths"] * rows["osl"])
    bad, dropped = ~_mask(rows, ""), []
    for rule in rules()["drop"]:
        mask = _mask(rows, rule["where"]) & ~bad
        dropped.append(Dropped(rule["reason"], int(mask.sum())))
        bad |= mask
    return Measured(rows[~bad].reset_index(drop=True), tuple(dropped), rows[bad].reset_index(drop=True), len(found) - len(unique))
