"""Notebooks: script and .ipynb hold the same cells, what stands there is what the cells print and draw, and it is quick."""

from __future__ import annotations

import ast
import contextlib
import io
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]
SCRIPTS = sorted((ROOT / "notebooks").glob("*.py"))
ALLOWED = {"roofline", "dataclasses", "fractions", "functools", "itertools", "json", "math", "pathlib", "tempfile"}
LONGEST = 20.0
"""Seconds that a notebook may take."""

Cell = tuple[str, str]


def script_cells(path: Path) -> list[Cell]:
    """(kind, source) of the cells of a py:percent script."""
    found: list[tuple[str, list[str]]] = []
    for line in path.read_text(encoding="utf-8").splitlines():
        if line.startswith("# %%"):
            found.append(("markdown" if "[markdown]" in line else "code", []))
        else:
            found[-1][1].append(line)
    return [(kind, _source(kind, lines)) for kind, lines in found]


def _source(kind: str, lines: list[str]) -> str:
    if kind == "markdown":
        lines = [line.removeprefix("#").removeprefix(" ") for line in lines]
    return "\n".join(lines).strip()


def notebook(path: Path) -> list[dict[str, Any]]:
    """The cells of the .ipynb beside a script."""
    cells: list[dict[str, Any]] = json.loads(path.with_suffix(".ipynb").read_text(encoding="utf-8"))["cells"]
    return cells


def shown(cell: dict[str, Any]) -> list[str]:
    """What a cell of a notebook shows as text: what it printed, and the value of its last line."""
    texts = []
    for output in cell.get("outputs", ()):
        assert output["output_type"] in ("stream", "execute_result"), output
        assert output.get("name") != "stderr", output
        texts.append("".join(output["text"] if output["output_type"] == "stream" else output["data"]["text/plain"]).strip())
    return texts


def run(source: str, names: dict[str, Any]) -> list[str]:
    """What a cell prints, and the text of the value of its last line."""
    tree = ast.parse(source)
    last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
    printed, value = io.StringIO(), None
    with contextlib.redirect_stdout(printed):
        exec(compile(tree, "cell", "exec"), names)
        if isinstance(last, ast.Expr):
            value = eval(compile(ast.Expression(last.value), "cell", "eval"), names)
    return [text for text in (printed.getvalue().strip(), "" if value is None else repr(value)) if text]


def test_there_are_notebooks() -> None:
    assert {path.stem for path in SCRIPTS} >= {
        "lecture", "kv_cache", "quantise_and_prune", "speculation", "capacity_planning", "can_i_believe_it", "bring_your_own",
        "training_and_inference",
    }  # fmt: skip
    assert {path.stem for path in (ROOT / "notebooks").glob("*.ipynb")} == {path.stem for path in SCRIPTS}


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.stem)
def test_script_and_notebook_hold_the_same_cells(script: Path) -> None:
    assert [(cell["cell_type"], "".join(cell["source"]).strip()) for cell in notebook(script)] == script_cells(script)


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.stem)
def test_the_notebook_shows_what_its_cells_print_and_draw(script: Path) -> None:
    """A figure's text holds a digest of what is drawn. After a wanted change: python docs/generate_notebooks.py."""
    names: dict[str, Any] = {}
    began = time.process_time()
    for cell in notebook(script):
        if cell["cell_type"] == "code":
            assert run("".join(cell["source"]), names) == shown(cell)
    assert time.process_time() - began < LONGEST


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.stem)
def test_a_notebook_ends_with_assertions_and_imports_only_the_package(script: Path) -> None:
    code = [source for kind, source in script_cells(script) if kind == "code"]
    last = ast.parse(code[-1])
    assert sum(isinstance(node, ast.Assert) for node in ast.walk(last)) >= 5
    imported = set()
    for node in ast.walk(ast.parse("\n".join(code))):
        if isinstance(node, ast.Import):
            imported |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            imported.add(str(node.module).split(".")[0])
    assert imported <= ALLOWED
    assert "roofline" in imported


def test_own_models_need_no_extra() -> None:
    """The notebook a newcomer tries first runs with the base package alone, and says what the extra would add."""
    script = ROOT / "notebooks" / "bring_your_own.py"
    without = "import sys, runpy; sys.modules.update(dict.fromkeys(('safetensors', 'gguf', 'torch', 'transformers', 'scipy')))"
    done = subprocess.run(
        [sys.executable, "-c", f"{without}; runpy.run_path({str(script)!r})"],
        env={**os.environ, "PYTHONPATH": str(ROOT), "MPLBACKEND": "agg"}, capture_output=True, text=True, check=False,
        timeout=120,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "were not compared with the config" in done.stdout
    assert "[checkpoints]" in done.stdout


def test_a_cell_that_changed_is_found(tmp_path: Path) -> None:
    script = tmp_path / "one.py"
    script.write_text('# %% [markdown]\n# # Title\n\n# %%\nprint("one")\n1 + 1\n', encoding="utf-8")
    cells = [
        {"cell_type": "markdown", "source": ["# Title"]},
        {
            "cell_type": "code", "source": ['print("one")\n', "1 + 1"],
            "outputs": [
                {"output_type": "stream", "name": "stdout", "text": ["one\n"]},
                {"output_type": "execute_result", "data": {"text/plain": ["2"]}},
            ],
        },
    ]  # fmt: skip
    script.with_suffix(".ipynb").write_text(json.dumps({"cells": cells}), encoding="utf-8")
    assert [(cell["cell_type"], "".join(cell["source"])) for cell in notebook(script)] == script_cells(script)
    assert run("".join(cells[1]["source"]), {}) == shown(cells[1]) == ["one", "2"]
    assert run('print("two")\n1 + 1', {}) != shown(cells[1])
