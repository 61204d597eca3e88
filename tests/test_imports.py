"""A command pays only for what it uses, and the package has one import name."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
HEAVY = ("numpy", "sympy", "pandas", "matplotlib", "torch", "triton", "rich", "scipy", "transformers")

PROBE = """
import runpy, sys
try:
    {code}
except SystemExit as stop:
    assert not stop.code, f"exit code {{stop.code}}"
print("loaded:", *sorted({{name.split(".")[0] for name in sys.modules}} & set({heavy})))
"""
WHAT_IF = """
    sys.argv = ["roofline", "what-if", "llama-2-13b", "--gpu", "h100-sxm", "--batch", "1,16", "--context", "1024"]
    runpy.run_module("roofline", run_name="__main__")
"""


def files(*folders: str) -> list[Path]:
    """Python files below folders; links are not followed, so that each file is met once."""
    return sorted(
        Path(here, name)
        for folder in folders
        for here, _, names in os.walk(ROOT / folder)
        for name in names
        if name.endswith(".py")
    )


def imported(node: ast.AST) -> list[str]:
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    return [str(node.module)] if isinstance(node, ast.ImportFrom) and node.level == 0 else []


def at_import(tree: ast.AST) -> Iterator[ast.AST]:
    """The nodes that run when a module is imported: not function bodies, not ``if TYPE_CHECKING``."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)):
            continue
        if isinstance(node, ast.If) and ast.unparse(node.test).endswith("TYPE_CHECKING"):
            continue
        yield node
        yield from at_import(node)


@pytest.mark.parametrize(
    "code", ["import roofline", "import roofline.cli", WHAT_IF.strip()], ids=["import roofline", "import roofline.cli", "what-if"]
)
def test_command_line_loads_no_heavy_library(code: str) -> None:
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    probe = PROBE.format(code=code, heavy=HEAVY)
    done = subprocess.run(
        [sys.executable, "-c", probe], env=environment, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "loaded:"


def test_no_module_of_the_package_imports_a_heavy_library_at_module_level() -> None:
    offenders = [
        f"{path.relative_to(ROOT)}:{node.lineno} imports {name}"
        for path in files("roofline")
        for node in at_import(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, (ast.Import, ast.ImportFrom))
        for name in imported(node)
        if name.split(".")[0] in HEAVY
    ]
    assert offenders == []


def test_own_folders_are_imported_under_the_package_name_only() -> None:
    """``import kernels`` in the root would make a second copy of each module, and elsewhere is another project."""
    offenders = [
        f"{path.relative_to(ROOT)}:{node.lineno} imports {name}"
        for path in files("roofline", "kernels", "validate", "tests", "benchmarks", "notebooks", "docs")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, (ast.Import, ast.ImportFrom))
        for name in imported(node)
        if name.split(".")[0] in ("hardware", "kernels", "validate")
    ]
    assert offenders == []
