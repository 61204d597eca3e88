"""What the documentation shows runs: every Python block, in the order of its file, and every command of the README."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]
NEEDS_GPU = "kernels.md"
"""The page whose blocks launch kernels."""
PAGES = [ROOT / "README.md", *(page for page in sorted((ROOT / "docs").glob("*.md")) if page.name != NEEDS_GPU)]


def blocks(page: Path, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", page.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE)


@pytest.mark.parametrize("page", [page for page in PAGES if blocks(page, "python")], ids=lambda page: page.name)
def test_the_python_blocks_of_a_page_run(page: Path) -> None:
    pytest.importorskip("numpy")
    pytest.importorskip("sympy")
    if any("import torch" in block for block in blocks(page, "python")):
        pytest.importorskip("torch")
    names: dict[str, Any] = {}
    for number, block in enumerate(blocks(page, "python"), 1):
        exec(compile(block, f"{page.name}, block {number}", "exec"), names)


def test_the_python_page_is_among_them() -> None:
    assert len(blocks(ROOT / "docs" / "python.md", "python")) >= 7


def test_the_commands_of_the_readme_run_and_print_what_stands_there(cli: Callable[..., Any]) -> None:
    shown = 0
    for block in blocks(ROOT / "README.md", "console"):
        for piece in re.split(r"^\$ ", block, flags=re.MULTILINE)[1:]:
            line, _, printed = piece.partition("\n")
            for command in line.partition("#")[0].split(";"):
                answer = cli(*command.split()[1:])
                assert answer.code == 0, command
            if printed.strip():
                assert answer.out.rstrip() == printed.rstrip()
                shown += 1
    assert shown
