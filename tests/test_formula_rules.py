"""Rules of formulas that a reading cannot show: read from the source of the components."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

COMPONENTS = sorted((Path(__file__).parent.parent / "roofline" / "components").glob("*.py"))
SIZES = {"B", "T", "S", "tokens", "source", "sequences", "logit_rows"}
STRUCTURAL = {
    ("collective.py", "ranks // servers"): "ranks per server: a mesh is a product",
    ("collective.py", "self.ranks // self.servers"): "ranks per server: a mesh is a product",
    ("compressed.py", "-plain // SCALE_BLOCK"): "scales of one entry's layout",
    ("compressed.py", "-scales // SCALE_PAD"): "padding of one entry's layout",
    ("linear_attention.py", "width // self.heads"): "width of a block of a block-diagonal matrix",
    ("moe.py", "(k - certain) * weight / rest"): "a probability, a float by nature",
    ("rwkv7.py", "D // self.head_dim"): "heads of a layer",
}
"""Divisions of dimensions that are whole by construction, each with its reason."""


def divisions(tree: ast.AST) -> list[str]:
    """Every division of two operands, as source."""
    return [
        ast.unparse(node)
        for node in ast.walk(tree)
        if isinstance(node, ast.BinOp) and isinstance(node.op, (ast.Div, ast.FloorDiv, ast.Mod))
    ]


def truth_tests(tree: ast.AST) -> list[str]:
    """Every comparison, condition or boolean operation on a size of the work, as source."""
    conditions = (ast.If, ast.IfExp, ast.While)
    tested = [
        node.test if isinstance(node, conditions) else node
        for node in ast.walk(tree)
        if isinstance(node, (*conditions, ast.Compare, ast.BoolOp))
    ]
    return [
        ast.unparse(test)
        for test in tested
        for part in ast.walk(test)
        if isinstance(part, ast.Attribute) and part.attr in SIZES and ast.unparse(part.value) in ("work", "group")
    ]


@pytest.mark.parametrize("path", COMPONENTS, ids=lambda path: path.stem)
def test_formulas_divide_through_the_numeric_module_only(path):
    tree = ast.parse(path.read_text(encoding="utf-8"))
    assert [found for found in divisions(tree) if (path.name, found) not in STRUCTURAL] == []


@pytest.mark.parametrize("path", COMPONENTS, ids=lambda path: path.stem)
def test_formulas_never_branch_on_the_sizes_of_the_work(path):
    assert truth_tests(ast.parse(path.read_text(encoding="utf-8"))) == []


def test_the_checks_see_what_they_look_for():
    assert divisions(ast.parse("flops = B * T // 2 + a / b")) == ["B * T // 2", "a / b"]
    assert truth_tests(ast.parse("x = 1 if work.T == 1 else 2")) == ["work.T == 1", "work.T == 1"]
    assert truth_tests(ast.parse("if work.S and y: pass")) == ["work.S and y", "work.S and y"]
