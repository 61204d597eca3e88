"""What many tests use: the command line as a function, and reference data that lies beside the checkout."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from roofline.cli import run

SHARED = Path(__file__).parents[2] / "shared"


@pytest.fixture(scope="session")
def shared() -> Path:
    """The folder ``../shared``; a skip where it is absent."""
    if not SHARED.is_dir():
        pytest.skip("the shared reference data are not beside this checkout")
    return SHARED


class Answer(NamedTuple):
    """What a command line gave: exit code, stdout, stderr."""

    code: int
    out: str
    err: str

    @property
    def records(self) -> list[dict[str, Any]]:
        """The records of ``-o json``, of a command that went well."""
        assert self.code == 0, self.err
        found: list[dict[str, Any]] = json.loads(self.out)
        return found


@pytest.fixture
def cli(capsys: pytest.CaptureFixture[str]) -> Callable[..., Answer]:
    """Runs a command line, given as its arguments."""

    def call(*arguments: Any) -> Answer:
        code = run([str(argument) for argument in arguments])
        return Answer(code, *capsys.readouterr())

    return call
