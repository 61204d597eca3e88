"""The data file of serving constants: written by ``roofline validate calibrate --serving``, the same to the bit each time."""

from __future__ import annotations

import datetime
import json
import re
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from roofline.expected.serving import DATA, ENGINE_CONSTANTS, SHARED_CONSTANTS, fitted
from roofline.validate.serving.fit import Fit, predict
from roofline.validate.serving.report import (
    ByLoad,
    Score,
    by_concurrency,
    data,
    everything,
    first_tokens,
    held_out,
    lines,
    refit,
)
from roofline.validate.serving.rows import BLIND, FILE
from roofline.validate.serving.runs import Runs
from roofline.validate.silicon.source import PACKAGE, package_version

HEAD = """\
# Constants of whole servers, fitted to measured serving runs with the operators' constants held; `roofline validate
# calibrate --serving` writes this file. What each constant is, its prior and its bounds: roofline/expected/serving.py.
"""
GROUPS = ("dense", "moe")
SPLIT = "fitted to all rows; errors are those of models or GPUs that the fit had not seen"


def _range(runs: Runs, engine: str) -> dict[str, Any]:
    """What an engine's rows cover."""
    from roofline.configs.load import load_model

    part = runs.table[runs.table["engine"] == engine]
    layers = sorted({len(load_model(name).layers) for name in part["name"]})
    formats = {fmt for name, weights in zip(part["name"], part["weights"], strict=True) for fmt in _formats(name, weights)}
    return {
        "rows": len(part), "gpus": sorted(set(part["gpu"])), "most_ranks": int((part["tp"] * part["dp"]).max()),
        "sequences": [int(part["clients"].min()), int(part["clients"].max())], "layers": [layers[0], layers[-1]],
        "formats": sorted(formats), "versions": _versions(part["backend_version"]),
    }  # fmt: skip


def _versions(stated: Any) -> list[str]:
    """The oldest and the newest version among the rows that state one."""
    known = {str(version): [int(part) for part in re.findall(r"\d+", str(version))] for version in stated.dropna()}
    numbered = sorted((name for name, parts in known.items() if parts), key=known.__getitem__)
    return [numbered[0], numbered[-1]]


def _formats(name: str, weights: str) -> set[str]:
    from roofline.configs.load import load_model

    stored = {fmt.name for fmt in load_model(name).params_by_format}
    return {weights, "bf16"} if weights else stored


def document(found: Fit, runs: Runs, errors: Sequence[Score], date: str) -> str:
    """The file."""
    parts = [HEAD, f'package = "{PACKAGE} {package_version()}, systems/{FILE}"', f'date = "{date}"', f'split = "{SPLIT}"']
    parts += [f"rows = {len(runs)}", "", "[shared]"]
    parts += [f"{constant.name} = {found.shared[constant.name]:g}" for constant in SHARED_CONSTANTS]
    for engine, own in found.engines.items():
        covered = _range(runs, engine)
        parts += ["", f"[engine.{engine}]"]
        parts += [f"{constant.name} = {own[constant.name]:g}" for constant in ENGINE_CONSTANTS]
        parts += [f"{name} = {json.dumps(value)}" for name, value in covered.items()]
    for score in errors:
        parts += ["", "[[error]]", f'metric = "{score.metric}"', f'engine = "{score.engine}"']
        parts += [f'group = "{_group(score)}"', f'split = "{score.split}"']
        if score.split != "unseen_model":
            parts += [f"models = {json.dumps(_models(score))}"]
        if score.split == "blind":
            parts += [f"gpus = {json.dumps([BLIND])}"]
        parts += _figures(score)
    for group in GROUPS:
        for band in by_concurrency(group):
            parts += ["", "[[band]]", f'engine = "{band.engine}"', f'group = "{group}"', f"clients = {band.clients}"]
            parts += _figures(band)
    return "\n".join(parts) + "\n"


def _group(score: Score) -> str:
    return score.model or "dense"


def _figures(found: Score | ByLoad) -> list[str]:
    return [f"mape = {found.mape:.3f}", f"bias = {found.bias:.3f}", f"rows = {found.n}"]


def _models(score: Score) -> list[str]:
    """The models of the runs behind a line of a time to first token, or of the accelerator that no constant has seen."""
    runs = data().blind if score.split == "blind" else data().fitted
    table = runs.table if score.split == "blind" else runs.table[first_tokens(runs)]
    return sorted(set(table[(table["engine"] == score.engine) & (table["set"] == _group(score))]["name"]))


def calibrate(target: Path = DATA) -> tuple[Fit, bool]:
    """(constants, whether the file changed). The date stays where nothing else changes."""
    found = data()
    runs = found.fitted
    whole = everything(runs)
    constants = refit(runs, whole)
    models, gpus = held_out("name"), held_out("gpu")
    blind = found.blind
    unseen, untouched = predict(blind, constants.of(blind)), everything(blind)
    known = (runs.table["family"] == "inferencex").to_numpy()
    every = [
        *lines("tpot", "unseen_model", runs, models[0], found.rows, whole),
        *lines("ttft", "unseen_gpu", runs, gpus[1], found.rows, known & first_tokens(runs)),
        *lines("ttft", "unseen_model", runs, models[1], found.rows, known & ~first_tokens(runs)),
        *lines("tpot", "blind", blind, unseen.tpot, found.rows, untouched),
        *lines("ttft", "blind", blind, unseen.ttft, found.rows, untouched),
    ]
    errors = [score for score in every if score.engine and score.model in (None, "moe")]
    before = target.read_text(encoding="utf-8") if target.is_file() else ""
    if before and before == document(constants, runs, errors, tomllib.loads(before)["date"]):
        return constants, False
    target.write_text(document(constants, runs, errors, datetime.date.today().isoformat()), encoding="utf-8")
    fitted.cache_clear()
    return constants, True
