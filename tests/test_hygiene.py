"""What a reader of the repository should never meet, and tests that cannot fail."""

from __future__ import annotations

import ast
import re
import subprocess
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
LONGEST_MODULE = 450

# Written in two parts, so that this file does not match itself.
UNFINISHED = re.compile("|".join([r"\bTO" + "DO", r"\bFIX" + "ME", "NotImplemented" + "Error"]))
ELSEWHERE = re.compile(
    "|".join(
        [
            r"(?<![\w.~}-])/wor" + r"k\b", r"(?<![\w.~}-])/tm" + "p/", r"\bwork" + r"place\b", r"\bsub-?a" + r"gents?\b",
            r"\b(coding|AI|LLM) a" + r"gents?\b", r"\b(this|previous|next|another|other|earlier) ses" + r"sions?\b",
            r"\bhelper ses" + "sion", r"\bcla" + r"ude\b", r"\banthro" + "pic", r"\bmy bri" + r"ef\b", r"\bthe bri" + r"ef\b",
        ]
    ),
    re.IGNORECASE,
)  # fmt: skip
BOOLEAN = re.compile(r"(?!assert)\w*(allclose|isclose|array_equal|array_equiv)")


@cache
def tracked() -> tuple[Path, ...]:
    """Files of the repository that git knows, or all of them where this is no git checkout."""
    done = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        pytest.skip("not a git checkout")
    paths = (ROOT / name for name in done.stdout.split("\0") if name)
    return tuple(path for path in paths if path.is_file() and not path.is_symlink())


def text(path: Path) -> str:
    """Contents of a text file; nothing for a binary one."""
    return path.read_bytes().decode("utf-8", errors="ignore")


def matches(pattern: re.Pattern[str]) -> list[str]:
    return [
        f"{path.relative_to(ROOT)}:{number}: {line.strip():.100}"
        for path in tracked()
        for number, line in enumerate(text(path).splitlines(), 1)
        if pattern.search(line)
    ]


def called(node: ast.AST) -> str:
    """Name of the function that a call names last: "allclose" for np.allclose(...)."""
    if not isinstance(node, ast.Call):
        return ""
    return getattr(node.func, "attr", getattr(node.func, "id", ""))


def python_tests() -> list[Path]:
    return [path for path in tracked() if path.parent == ROOT / "tests" and path.suffix == ".py"]


def test_no_test_drops_the_verdict_of_a_comparison() -> None:
    """``np.allclose(a, b)`` on a line of its own checks nothing."""
    dropped = [
        f"{path.name}:{node.lineno}"
        for path in python_tests()
        for node in ast.walk(ast.parse(text(path)))
        if isinstance(node, ast.Expr) and BOOLEAN.fullmatch(called(node.value))
    ]
    assert dropped == []


def test_every_test_file_asserts_something() -> None:
    def asserts(path: Path) -> bool:
        nodes = list(ast.walk(ast.parse(text(path))))
        return any(isinstance(node, ast.Assert) or called(node).startswith(("assert_", "raises")) for node in nodes)

    assert [path.name for path in python_tests() if path.name.startswith("test_") and not asserts(path)] == []


def test_nothing_is_left_unfinished() -> None:
    assert matches(UNFINISHED) == []


def test_nothing_points_outside_the_project() -> None:
    assert matches(ELSEWHERE) == []


def test_modules_stay_short() -> None:
    modules = [path for path in tracked() if path.suffix == ".py" and path.is_relative_to(ROOT / "roofline")]
    assert {path.name: n for path in modules if (n := len(text(path).splitlines())) > LONGEST_MODULE} == {}


@pytest.mark.parametrize(
    ("pattern", "line", "found"),
    [
        (ELSEWHERE, "see /wor" + "k/notes.md", True),
        (ELSEWHERE, "roofline/work.py and tests/work", False),
        (ELSEWHERE, "a user session with a long prefix", False),
        (UNFINISHED, "# TO" + "DO later", True),
        (BOOLEAN, "allclose", True),
        (BOOLEAN, "assert_allclose", False),
    ],
)
def test_patterns_find_what_they_are_for(pattern: re.Pattern[str], line: str, found: bool) -> None:
    assert bool(pattern.search(line) if pattern is not BOOLEAN else pattern.fullmatch(line)) is found
