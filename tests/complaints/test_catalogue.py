"""Wrong numbers that users of other tools reported, and ours beside the right ones.

Each test of this folder that is marked ``complaint`` stands for one entry of the collected complaints (D_complaints.json,
kept beside the checkout); its docstring names the public thread. Figures that the file states are quoted with the mark.
"""

from __future__ import annotations

import ast
import json
from collections import defaultdict
from pathlib import Path

HERE = Path(__file__).parent


def quoted() -> dict[str, list[str]]:
    """Name of a complaint -> the figures of the file that its tests claim to reproduce."""
    found: dict[str, list[str]] = defaultdict(list)
    for path in sorted(HERE.glob("test_*.py")):
        for function in ast.parse(path.read_text(encoding="utf-8")).body:
            for mark in function.decorator_list if isinstance(function, ast.FunctionDef) else ():
                if isinstance(mark, ast.Call) and ast.unparse(mark.func) == "pytest.mark.complaint":
                    name, *figures = (ast.literal_eval(argument) for argument in mark.args)
                    found[name] += figures
    return dict(found)


def test_every_complaint_has_a_test_and_its_figures_are_those_of_the_file(shared: Path) -> None:
    right = {entry["id"]: entry["right"] for entry in json.loads((shared / "cases" / "D_complaints.json").read_text("utf-8"))}
    assert {*quoted()} == {*right}
    missing = {name: quote for name, quotes in quoted().items() for quote in quotes if quote not in right[name]}
    assert missing == {}, "figures quoted that the file does not state"
