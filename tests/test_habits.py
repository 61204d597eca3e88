"""Habits of the command line: bars, quiet, colours, completion, a first run, what doctor says."""

from __future__ import annotations

import contextlib
import io
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest

from roofline.cli import progress
from roofline.cli.app import EXAMPLES, command
from roofline.cli.output import Output
from roofline.fanout import spread
from roofline.install import install

Cli = Callable[..., Any]

ROOT = Path(__file__).parents[1]


class Quiet:
    """A context in which groups are asked for their commands."""

    resilient_parsing = True
    command_path = "roofline"


def commands(group: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Every command that does something, with the words that call it."""
    for name in group.table:
        found = group.get_command(Quiet, name)
        where = f"{path} {name}".strip()
        if hasattr(found, "table"):
            yield from commands(found, where)
        else:
            yield where, found


COMMANDS = dict(commands(command()))
NAMES = ("gpu", "gpus", "model", "models", "target", "draft", "engine", "base", "kernel", "what", "name")
"""Parameters that take a name from a list."""


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_can_be_quiet_and_plain(name: str) -> None:
    options = {option for parameter in COMMANDS[name].params for option in parameter.opts}
    assert {"--quiet", "-q", "--no-color"} <= options


def test_names_of_models_accelerators_and_engines_are_completed_everywhere() -> None:
    missing = [
        f"{name}: {parameter.name}"
        for name, found in COMMANDS.items()
        for parameter in found.params
        if parameter.name in NAMES and not parameter._custom_shell_complete and f"{name} {parameter.name}" != "fit gpus"
    ]
    assert missing == []


def test_the_first_run_shows_three_examples_that_run(cli: Cli) -> None:
    shown = cli().out
    assert shown.rstrip() == EXAMPLES
    examples = [line.split() for line in shown.splitlines() if line.startswith("  roofline ")]
    assert len(examples) == 3
    assert [cli(*example[1:]).code for example in examples] == [0, 0, 0]


class Terminal(io.StringIO):
    """A stream that says it is a terminal."""

    def isatty(self) -> bool:
        return True


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> Terminal:
    monkeypatch.setattr(progress, "PATIENCE_S", 0.02)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "100")
    monkeypatch.delenv("NO_COLOR", raising=False)
    return Terminal()


@contextlib.contextmanager
def as_stderr(stream: io.StringIO) -> Iterator[None]:
    """Within a test: pytest sets its own stderr between a fixture and its test."""
    before, sys.stderr = sys.stderr, stream
    try:
        yield
    finally:
        sys.stderr = before


def work(out: Output, terminal: Terminal, wait_s: float) -> list[int]:
    """Two items, of which the second waits until a bar is there, or as long as told."""
    done = []
    with as_stderr(terminal):
        for item in out.watch([1, 2], "working"):
            end = time.monotonic() + wait_s
            while item == 2 and "1/2" not in terminal.getvalue() and time.monotonic() < end:
                time.sleep(0.01)
            done.append(item)
    return done


def test_long_work_on_a_terminal_has_a_bar(terminal: Terminal) -> None:
    assert work(Output("json"), terminal, 10) == [1, 2]
    assert "working" in terminal.getvalue()
    assert "1/2" in terminal.getvalue()


def test_short_work_has_none(terminal: Terminal, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "PATIENCE_S", 60)
    assert work(Output("table"), terminal, 0.1) == [1, 2]
    assert terminal.getvalue() == ""


@pytest.mark.parametrize("how", ["quiet", "no terminal", "dumb"])
def test_nobody_sees_a_bar_who_should_not(terminal: Terminal, monkeypatch: pytest.MonkeyPatch, how: str) -> None:
    if how == "no terminal":
        monkeypatch.setattr(Terminal, "isatty", lambda self: False)
    if how == "dumb":
        monkeypatch.setenv("TERM", "dumb")
    with as_stderr(terminal):
        assert not progress.wanted(how == "quiet")
    assert work(Output("table", quiet=how == "quiet"), terminal, 0.3) == [1, 2]
    assert terminal.getvalue() == ""


def test_a_bar_goes_when_the_work_fails(terminal: Terminal) -> None:
    def fail() -> None:
        with as_stderr(terminal), Output("table").bar("working", 1):
            end = time.monotonic() + 10
            while "working" not in terminal.getvalue() and time.monotonic() < end:
                time.sleep(0.01)
            raise KeyError("the work")

    with pytest.raises(KeyError, match="the work"):
        fail()
    shown = terminal.getvalue()
    time.sleep(0.3)
    assert terminal.getvalue() == shown
    assert "working" in shown


def test_work_that_is_spread_steps_once_for_each_item() -> None:
    steps: list[int] = []
    assert spread(abs, [-1, -2, 3], step=lambda: steps.append(1)) == [1, 2, 3]
    assert len(steps) == 3


def rows(cli: Cli) -> dict[str, dict[str, str]]:
    return {row["what"]: row for row in cli("doctor", "-o", "json").records}


def test_doctor_says_what_an_extra_is_for_and_how_to_get_it(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    requirements = ["numpy>=1.26", "torch; extra == 'kernels'", "triton>=3.6; sys_platform == 'linux' and extra == 'kernels'"]
    versions = {"numpy": "1.20.0", "torch": "2.13.0+cpu"}

    def version(name: str) -> str:
        if name not in versions:
            raise metadata.PackageNotFoundError(name)
        return versions[name]

    monkeypatch.setattr(metadata, "requires", lambda name: requirements)
    monkeypatch.setattr(metadata, "version", version)
    found = rows(cli)
    assert found["numpy"]["note"].startswith("too old; needed: ")
    assert found["numpy"]["note"].endswith("-m pip install 'numpy>=1.26'")
    assert found["extra kernels"]["found"] == "incomplete"
    assert found["extra kernels"]["note"].endswith("; missing: triton")
    assert found["extra kernels"]["install"] == install("kernels")
    assert f"to install an extra: {install('kernels')}; several: " in cli("doctor").out
    assert "needed first: numpy" in cli("doctor").out
    versions |= {"numpy": "1.26.4", "triton": "3.6.0"}
    assert rows(cli)["numpy"]["note"] == ""
    assert rows(cli)["extra kernels"]["found"] == "installed"
    assert "works: all commands" in cli("doctor").out
    versions.pop("torch")
    assert "what the extras kernels are for does not" in cli("doctor").out


@pytest.mark.parametrize(
    ("line", "found"),
    [
        ("roofline do", ["doctor"]),
        ("roofline plot ro", ["roofline"]),
        ("roofline plot kv llama-2-13b mamba2", ["mamba2-2.7b"]),
        ("roofline what-if llama-3.1-8b --gpu l40s,h200", ["l40s,h200-sxm"]),
        ("roofline simulate llama-3.1-8b --engine v", ["vllm"]),
        ("roofline validate ser", ["serving"]),
    ],
)
def test_the_shell_completes(line: str, found: list[str]) -> None:
    """As bash asks, with the word at the cursor last."""
    words = {"_ROOFLINE_COMPLETE": "complete_bash", "COMP_WORDS": line, "COMP_CWORD": str(line.count(" "))}
    done = subprocess.run(
        [sys.executable, "-c", "from roofline.cli import main; main()"],
        env={**os.environ, "PYTHONPATH": str(ROOT), **words}, capture_output=True, text=True, check=False, timeout=60,
    )  # fmt: skip
    assert done.stdout.split() == found, done.stderr
