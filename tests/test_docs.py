"""What the documentation shows runs, in the order of its page, and prints what stands there; its links lead somewhere.

The words behind a block's language say what becomes of it: a file's name writes it there for the blocks below, ``gpu`` and
``network`` leave it unrun, ``exit=N`` is the exit code. In what a command prints, ``...`` stands for anything.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import shlex
import subprocess
import sys
import tomllib
from collections.abc import Callable, Iterator
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import pytest

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted(DOCS.rglob("*.md"))]
RUN, FILES, SHOWN = ("python", "console"), ("json", "toml", "csv", "yaml"), ("text",)
APART = ("gpu", "network")
PLUGIN = ("-p", "no:cacheprovider", "-p", "roofline.validate.pytest_plugin")
SLOW = ("plan ", "fleet ", "simulate ")
"""Commands that take seconds."""

Cli = Callable[..., Any]


class Block(NamedTuple):
    """A fenced block of a page: ``words`` stand behind its language."""

    language: str
    words: tuple[str, ...]
    text: str
    line: int

    @property
    def file(self) -> str:
        """The file that it is to be written to, or nothing."""
        return next((word for word in self.words if "." in word), "")

    @property
    def exit_code(self) -> int:
        return next((int(word.removeprefix("exit=")) for word in self.words if word.startswith("exit=")), 0)


@cache
def blocks(page: Path) -> tuple[Block, ...]:
    text = page.read_text(encoding="utf-8")
    found = re.finditer(r"^```([^\n]*)\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)
    return tuple(
        Block((block[1].split() or [""])[0], tuple(block[1].split()[1:]), block[2], text[: block.start()].count("\n") + 1)
        for block in found
    )


@cache
def prose(page: Path) -> str:
    """A page without its fenced blocks."""
    return re.sub(r"^```.*?^```$", "", page.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE)


def name_of(page: Path) -> str:
    return str(page.relative_to(ROOT))


def commands(block: Block) -> Iterator[tuple[str, str]]:
    """(command line, what is shown below it) of a console block."""
    for piece in re.split(r"^\$ ", block.text, flags=re.MULTILINE)[1:]:
        line, _, printed = piece.partition("\n")
        yield line, printed.strip("\n")


def matches(shown: str, printed: str) -> bool:
    """Whether a command printed what is shown, ``...`` being anything; ends of lines do not count."""
    wanted, found = ("\n".join(line.rstrip() for line in text.strip().splitlines()) for text in (shown, printed))
    return re.fullmatch(".*?".join(map(re.escape, wanted.split("..."))), found, re.DOTALL) is not None


def test_what_is_shown_is_compared() -> None:
    assert matches("a ... c\n...\nz", "a b c\nd\ne\nz\n")
    assert not matches("a ... c", "a b d")
    assert not matches("a", "a\nb")


def run_pytest(line: str) -> tuple[int, str]:
    """A command line of pytest, with variables in front, in the current folder: exit code and what it printed."""
    words = shlex.split(line)
    settings = [word for word in words if re.match(r"[A-Z_]+=", word)]
    arguments = words[len(settings) + 1 :]
    environment = {key: value for key, value in os.environ.items() if key not in ("TRITON_INTERPRET", "PYTEST_ADDOPTS")}
    environment |= {"PYTHONPATH": str(ROOT), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    environment |= dict(setting.split("=", 1) for setting in settings)
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *PLUGIN, *arguments],
        env=environment, capture_output=True, text=True, check=False, timeout=200,
    )  # fmt: skip
    return done.returncode, done.stdout + done.stderr


def run_console(block: Block, cli: Cli, where: str) -> None:
    """Every command of a block: ``roofline`` in this process, pytest in one of its own."""
    for line, shown in commands(block):
        for command in line.partition("  #")[0].split(";"):
            words = shlex.split(command)
            if words[0] == "roofline":
                answer = cli(*words[1:])
                code, printed = answer.code, answer.out + answer.err
            else:
                assert "pytest" in words, f"{where}: {command!r} is not run; mark its block gpu or network"
                code, printed = run_pytest(command)
            assert code == block.exit_code, f"{where}: {command}: {printed}"
        if shown:
            assert matches(shown, printed), f"{where}: {line} prints\n{printed}\nand the page shows\n{shown}"


def needs(page: Path) -> None:
    """Skips where an optional library that a page uses is not installed."""
    python = "".join(block.text for block in blocks(page) if block.language == "python" and not set(block.words) & set(APART))
    for module in ("torch", "triton"):
        if re.search(rf"^\s*import {module}", python, re.MULTILINE) and find_spec(module) is None:
            pytest.skip(f"{module} is not installed")
    if "validate silicon" in page.read_text(encoding="utf-8") and find_spec("aiconfigurator_core") is None:
        pytest.skip("the extra silicon is not installed")


def run_apart(scripts: list[str], page: Path) -> None:
    """Python that counts traffic, in a process of its own: triton interprets there from its first import on."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "TRITON_INTERPRET": "1"}
    Path("page.py").write_text("\n".join(scripts), encoding="utf-8")
    done = subprocess.run([sys.executable, "page.py"], env=environment, capture_output=True, text=True, check=False, timeout=200)
    assert done.returncode == 0, f"{page.name}: {done.stderr}"


RESULTS = {
    "max_concurrency": 16, "random_input_len": 1024, "random_output_len": 128, "completed": 64, "duration": 20.0,
    "mean_ttft_ms": 90.0, "mean_tpot_ms": 9.0, "request_throughput": 3.2, "output_throughput": 409.6,
    "total_input_tokens": 65536, "total_output_tokens": 8192, "model_id": "llama-3.1-8b", "backend": "vllm",
}  # fmt: skip
REQUESTS = [{"timestamp": 1000 * n, "input_length": 512, "output_length": 64, "hash_ids": [n]} for n in range(8)]
INPUTS = {
    "results.json": json.dumps(RESULTS),
    "requests.jsonl": "\n".join(map(json.dumps, REQUESTS)),
    "AzureLLMInferenceTrace_conv.csv": "TIMESTAMP,ContextTokens,GeneratedTokens\n"
    "2024-05-10 00:00:00.009930+00:00,2162,5\n2024-05-10 00:00:00.017335+00:00,2399,6\n",
    "llama-bench.md": "| model | size | params | backend | ngl | test | t/s |\n|---|---|---|---|---|---|---|\n"
    "| llama 8B Q4_K - Medium | 4.58 GiB | 8.03 B | CUDA | 99 | tg128 | 130.00 ± 0.20 |\n",
}
"""Files of others that the pages name without showing them."""
FINDS = ("--logged-tokens",)
"""Options whose example on a page ends with a finding."""


def write_inputs() -> None:
    for file, text in INPUTS.items():
        Path(file).write_text(text, encoding="utf-8")


def runs(page: Path) -> bool:
    return any(block.language in RUN and not set(block.words) & set(APART) for block in blocks(page))


@pytest.mark.parametrize("page", [page for page in PAGES if runs(page)], ids=name_of)
def test_the_blocks_of_a_page_run(page: Path, cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    needs(page)
    monkeypatch.chdir(tmp_path)
    write_inputs()
    names: dict[str, Any] = {}
    interpreted = any("counting" in block.text and not block.file for block in blocks(page) if block.language == "python")
    scripts = []
    for block in blocks(page):
        where = f"{page.name}, line {block.line}"
        if set(block.words) & set(APART):
            continue
        if block.file:
            Path(block.file).parent.mkdir(parents=True, exist_ok=True)
            Path(block.file).write_text(block.text, encoding="utf-8")
        elif block.language == "python" and interpreted:
            scripts.append(block.text)
        elif block.language == "python":
            with contextlib.redirect_stdout(io.StringIO()):
                exec(compile(block.text, where, "exec", dont_inherit=True), names)
        elif block.language == "console":
            run_console(block, cli, where)
    if scripts:
        run_apart(scripts, page)


def test_pages_run_what_they_promise() -> None:
    """Blocks were found at all, where most of them are."""
    counted = {page.name: sum(block.language in RUN for block in blocks(page)) for page in PAGES}
    assert counted["python.md"] >= 7
    assert counted["tutorial.md"] >= 6
    assert counted["README.md"] >= 3


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_every_block_says_what_it_is(page: Path) -> None:
    for block in blocks(page):
        where = f"{page.name}, line {block.line}"
        assert block.language in (*RUN, *FILES, *SHOWN), f"{where}: a block of {block.language or 'no language'}"
        if block.language == "console":
            assert all(line.startswith("$ ") for line in block.text.splitlines()[:1]), f"{where} shows no command"
        elif block.language == "python":
            compile(block.text, where, "exec")
        elif block.language == "json":
            json.loads(block.text)
        elif block.language == "toml":
            tomllib.loads(block.text)


def indented() -> Iterator[Any]:
    """Commands that stand indented in a page."""
    for page in PAGES:
        for line in re.findall(r"^    (?:\$ )?(roofline .*?)(?:  #.*)?$", prose(page), re.MULTILINE):
            slow = [pytest.mark.slow] if line.split("roofline ")[1].startswith(SLOW) else []
            yield pytest.param(line, id=f"{page.name}: {line.removeprefix('roofline ')[:60]}", marks=slow)


@pytest.mark.parametrize("line", list(indented()))
def test_indented_commands_run(line: str, cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    write_inputs()
    answer = cli(*shlex.split(line)[1:])
    assert answer.code == any(option in line for option in FINDS), answer.err or answer.out


def test_the_readme_shows_an_answer_in_full() -> None:
    shown = [printed for block in blocks(ROOT / "README.md") for _, printed in commands(block) if printed.strip()]
    assert shown
    assert not any("..." in printed for printed in shown)


def slug(heading: str) -> str:
    """The anchor that GitHub gives a heading."""
    text = re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", heading).strip().lower()
    return re.sub(r"[^\w\- ]", "", text).replace(" ", "-")


@cache
def anchors(page: Path) -> frozenset[str]:
    found: list[str] = []
    for heading in re.findall(r"^#{1,6} (.*)$", prose(page), re.MULTILINE):
        anchor = slug(heading)
        same = found.count(anchor)
        found += [anchor, f"{anchor}-{same}"] if same else [anchor]
    return frozenset(found)


LINK = re.compile(r"\]\(([^)\s]+)\)")


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_links_lead_somewhere(page: Path) -> None:
    broken = []
    for target in LINK.findall(prose(page)):
        if re.match(r"https://", target):
            continue
        path, _, anchor = target.partition("#")
        there = (page.parent / path).resolve() if path else page
        if not there.exists() or not there.is_relative_to(ROOT) or (anchor and anchor not in anchors(there)):
            broken.append(target)
    assert broken == []


def test_a_broken_anchor_is_found() -> None:
    assert slug("What an answer says") in anchors(DOCS / "cli.md")
    assert slug("`roofline.cost`") == "rooflinecost"
    assert "nowhere" not in anchors(DOCS / "cli.md")


def test_every_page_is_on_the_map() -> None:
    linked = {(DOCS / target.partition("#")[0]).resolve() for target in LINK.findall(prose(DOCS / "index.md"))}
    pages = [page for page in PAGES[2:] if page.name != "index.md"]
    assert [name_of(page) for page in [*pages, *(ROOT / "notebooks").glob("*.ipynb")] if page not in linked] == []


@pytest.mark.parametrize("script", ["generate_reference.py", "generate_limits.py"])
def test_generated_pages_are_fresh(script: str) -> None:
    done = subprocess.run(
        [sys.executable, DOCS / script, "--check"], cwd=ROOT, capture_output=True, text=True, check=False, timeout=60
    )
    assert done.returncode == 0, done.stderr


def test_the_workflow_for_kernels_of_others_does_what_it_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its lines that run pytest run; those of a job on a GPU collect; what it installs is what the project offers."""
    yaml = pytest.importorskip("yaml")
    if find_spec("triton") is None:
        pytest.skip("triton is not installed")
    monkeypatch.chdir(tmp_path)
    page = DOCS / "howto" / "ci.md"
    for block in blocks(page):
        if block.file:
            Path(block.file).parent.mkdir(parents=True, exist_ok=True)
            Path(block.file).write_text(block.text, encoding="utf-8")
    (workflow,) = (yaml.safe_load(block.text) for block in blocks(page) if block.language == "yaml")
    assert set(workflow["jobs"]) == {"traffic", "times"}
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["optional-dependencies"]
    ran = 0
    for name, job in workflow["jobs"].items():
        settings = " ".join(f"{key}={value}" for key, value in job.get("env", {}).items())
        if name == "traffic":
            run_pytest(f"{settings} pytest tests/test_traffic.py --roofline-update")
        for line in (line for step in job["steps"] for line in step.get("run", "").splitlines()):
            if line.startswith("pip install"):
                assert [extra for extra in re.findall(r"roofline-llm\[(\w+)\]", line) if extra not in extras] == []
            else:
                assert line.startswith("pytest "), line
                code, printed = run_pytest(f"{settings} {line}{' --collect-only' if name == 'times' else ''}".strip())
                assert code == 0, printed
                assert "skipped" not in printed, printed
                ran += 1
    assert ran == 2
