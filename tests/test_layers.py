"""A module imports from its own layer or below, without cycles, and has its place in this table before it lands."""

from __future__ import annotations

import ast
import os
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).parents[1]
FOLDERS = {"roofline": "roofline", "roofline.kernels": "kernels", "roofline.validate": "validate"}

LAYERS: tuple[tuple[str, ...], ...] = (
    ("roofline", "errors", "install", "symbols", "numeric", "units", "formats"),
    ("cost", "work", "accelerator"),
    ("components",),
    ("model", "configs", "checkpoints", "edits", "engines", "formulas", "formula_book", "ridge"),
    ("timing", "expected", "parallel", "memory", "allocation", "paging", "speculative", "training", "breakdown"),
    ("inference", "sharded", "serving", "diffusion"),
    ("fanout", "sweep", "planner", "bench_files"),
    ("report", "plots", "cli", "__main__"),
    ("kernels",),
    ("validate",),
)
LAYER_OF = {name: number for number, names in enumerate(LAYERS) for name in names}
COMMANDS = LAYER_OF["cli"]
EVIDENCE = ("kernels", "validate")


class Import(NamedTuple):
    source: str
    target: str
    line: int
    deferred: bool
    """Inside a function: paid for when that runs."""
    typing: bool
    """Under ``if TYPE_CHECKING``: never runs."""

    def __str__(self) -> str:
        return f"{self.source}:{self.line} imports {self.target}"


def _modules() -> dict[str, Path]:
    """Dotted name -> file of every module of the package."""
    found = {}
    for name, folder in FOLDERS.items():
        for here, _, files in os.walk(ROOT / folder):
            for file in sorted(files):
                if file.endswith(".py"):
                    parts = Path(here, file).relative_to(ROOT / folder).with_suffix("").parts
                    found[".".join([name, *parts]).removesuffix(".__init__")] = Path(here, file)
    return found


MODULES = _modules()
IMPORTABLE = {".".join(name.split(".")[:end]) for name in MODULES for end in range(1, name.count(".") + 2)}
"""Modules and the folders that hold them, with or without an __init__.py."""


def imports_of(source: str, tree: ast.AST, deferred: bool = False, typing: bool = False) -> Iterator[Import]:
    """Imports of ``roofline`` modules anywhere in a file; ``from roofline.components import base`` counts as base."""
    for node in ast.iter_child_nodes(tree):
        targets: list[str] = []
        if isinstance(node, ast.Import):
            targets = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{source}:{node.lineno}: write the full name instead of a relative import"
            names = [f"{node.module}.{alias.name}" for alias in node.names]
            targets = [name if name in IMPORTABLE else str(node.module) for name in names]
        for target in targets:
            if target.split(".")[0] == "roofline":
                yield Import(source, target, node.lineno, deferred, typing)
        if isinstance(node, ast.If) and ast.unparse(node.test).endswith("TYPE_CHECKING"):
            for child in node.body:
                yield from imports_of(source, ast.Module([child], []), deferred, True)
            for child in node.orelse:
                yield from imports_of(source, ast.Module([child], []), deferred, typing)
        else:
            yield from imports_of(source, node, deferred or isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)), typing)


IMPORTS = [found for name, path in MODULES.items() for found in imports_of(name, ast.parse(path.read_text(encoding="utf-8")))]


def unit(module: str) -> str:
    """The entry of the table that a module belongs to: "configs" for roofline.configs.dense."""
    return module.split(".")[1] if "." in module else module


def test_every_module_has_a_layer() -> None:
    strangers = sorted({unit(name) for name in MODULES} - set(LAYER_OF))
    assert strangers == [], "give new modules a layer in LAYERS"


def test_imports_point_down_or_sideways() -> None:
    upward = [
        str(found)
        for found in IMPORTS
        if found.source != "roofline"
        and LAYER_OF.get(unit(found.target), 0) > LAYER_OF.get(unit(found.source), 0)
        and not (found.deferred and unit(found.target) in EVIDENCE and LAYER_OF[unit(found.source)] == COMMANDS)
    ]
    assert upward == []


def test_package_itself_imports_nothing_when_imported() -> None:
    assert [str(found) for found in IMPORTS if found.source == "roofline" and not (found.typing or found.deferred)] == []


def test_modules_take_names_from_their_homes() -> None:
    """``from roofline import load_model`` would hide which layer is meant; only the version lives in the package."""
    indirect = []
    for name, path in MODULES.items():
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom) and node.module == "roofline":
                names = [alias.name for alias in node.names if f"roofline.{alias.name}" not in IMPORTABLE]
                indirect += [f"{name}:{node.lineno} {found}" for found in names if found != "__version__"]
    assert indirect == []


def test_evidence_is_imported_by_commands_only_when_they_run() -> None:
    eager = [
        str(found)
        for found in IMPORTS
        if unit(found.target) in EVIDENCE and unit(found.source) not in EVIDENCE and not (found.deferred or found.typing)
    ]
    assert eager == []


def test_no_import_cycles() -> None:
    graph: dict[str, set[str]] = {name: set() for name in MODULES}
    for found in IMPORTS:
        if not found.typing and found.source not in ("roofline", found.target):
            graph[found.source].add(found.target)
    try:
        order = list(TopologicalSorter(graph).static_order())
    except CycleError as error:
        pytest.fail(f"import cycle: {' -> '.join(error.args[1])}")
    assert set(order) >= set(MODULES)
