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
from roofline.validate.serving.fit import Fit
from roofline.validate.serving.report import Score, data, everything, first_tokens, held_out, lines, refit
from roofline.validate.serving.rows import FILE
from roofline.validate.serving.runs import Runs
from roofline.validate.silicon.source import PACKAGE, package_version

HEAD = """\
# Constants of whole servers, fitted to measured serving runs with the operators' constants held; `roofline validate
# calibrate --serving` writes this file. What each constant is, its prior and its bounds: roofline/expected/serving.py.
"""
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
        group = {None: "dense", "moe": "moe"}[score.model]
        parts += ["", "[[error]]", f'metric = "{score.metric}"', f'engine = "{score.engine}"', f'group = "{group}"']
        parts += [f'split = "{score.split}"']
        parts += [f"mape = {score.mape:.3f}", f"bias = {score.bias:.3f}", f"rows = {score.n}"]
    return "\n".join(parts) + "\n"


def calibrate(target: Path = DATA) -> tuple[Fit, bool]:
    """(constants, whether the file changed). The date stays where nothing else changes."""
    found = data()
    runs = found.fitted
    whole = everything(runs)
    constants = refit(runs, whole)
    models, gpus = held_out("name"), held_out("gpu")
    known = (runs.table["family"] == "inferencex").to_numpy()
    every = [
        *lines("tpot", "unseen_model", runs, models[0], found.rows, whole),
        *lines("ttft", "unseen_gpu", runs, gpus[1], found.rows, known & first_tokens(runs)),
        *lines("ttft", "unseen_model", runs, models[1], found.rows, known & ~first_tokens(runs)),
    ]
    errors = [score for score in every if score.engine and score.model in (None, "moe")]
    before = target.read_text(encoding="utf-8") if target.is_file() else ""
    if before and before == document(constants, runs, errors, tomllib.loads(before)["date"]):
        return constants, False
    target.write_text(document(constants, runs, errors, datetime.date.today().isoformat()), encoding="utf-8")
    fitted.cache_clear()
    return constants, True
