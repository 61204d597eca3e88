"""Run notebooks/*.py and write them, with what they print and draw, as notebooks/*.ipynb.

Each notebook is a script in cells (py:percent of jupytext) and an .ipynb of the same cells. With --check: fail when their
cells differ, or a notebook was never run. A script that was edited in Jupyter is written back by ``jupytext --sync``.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

NOTEBOOKS = Path(__file__).parents[1] / "notebooks"
LONGEST_RUN = 120
"""Seconds after which a notebook is given up."""


def cells(notebook: Any) -> list[tuple[str, str]]:
    """(kind, source) of each cell."""
    return [(cell.cell_type, cell.source.strip()) for cell in notebook.cells]


def stale(script: Path) -> str:
    """What is wrong with the notebook of a script, "" for nothing."""
    import jupytext
    import nbformat

    target = script.with_suffix(".ipynb")
    if not target.is_file():
        return f"{target.name} is missing"
    notebook = nbformat.read(target, as_version=4)
    if cells(notebook) != cells(jupytext.read(script)):
        return f"{target.name} and {script.name} have different cells"
    run = [cell for cell in notebook.cells if cell.cell_type == "code" and cell.outputs]
    return "" if run else f"{target.name} was not run"


def _kept(old: Any, new: Any) -> None:
    """Keeps a picture's bytes where its text says that the same is drawn: renderers differ, what they draw does not."""
    for before, after in zip(old.cells, new.cells, strict=False):
        pairs = zip(before.get("outputs", ()), after.get("outputs", ()), strict=False)
        for was, now in pairs if before.source == after.source else ():
            if was.get("data", {}).get("text/plain") == now.get("data", {}).get("text/plain") and "data" in now:
                now["data"] = was["data"]


def write(script: Path) -> None:
    """Runs a script's cells in a fresh kernel and writes the notebook."""
    import jupytext
    import nbformat
    from nbclient import NotebookClient

    notebook, target = jupytext.read(script), script.with_suffix(".ipynb")
    NotebookClient(
        notebook, timeout=LONGEST_RUN, kernel_name="python3", resources={"metadata": {"path": str(NOTEBOOKS)}},
        coalesce_streams=True,
    ).execute()  # fmt: skip
    for number, cell in enumerate(notebook.cells):
        cell["id"] = f"cell-{number}"
        cell["metadata"] = {}
    kernel = {"display_name": "Python 3", "language": "python", "name": "python3"}
    notebook["metadata"] = {"kernelspec": kernel, "language_info": {"name": "python"}}
    if target.is_file():
        _kept(nbformat.read(target, as_version=4), notebook)
    nbformat.write(notebook, target)


if __name__ == "__main__":
    scripts = sorted(NOTEBOOKS.glob("*.py"))
    if "--check" in sys.argv[1:]:
        wrong = [found for script in scripts if (found := stale(script))]
        for line in wrong:
            print(f"{line}: run python docs/generate_notebooks.py", file=sys.stderr)
        sys.exit(1 if wrong else 0)
    for script in scripts:
        write(script)
