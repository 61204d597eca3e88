"""The command that installs what is missing works from where the reader is: the checkout, or what the package came from."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest

from roofline import install as module
from roofline.install import install, install_package, install_sources

ROOT = Path(__file__).parents[1]


class Installed:
    """Metadata of an installation whose origin pip recorded, or did not."""

    def __init__(self, origin: dict[str, object] | None) -> None:
        self.origin = origin

    def read_text(self, name: str) -> str | None:
        assert name == "direct_url.json"
        return None if self.origin is None else json.dumps(self.origin)


def test_in_a_checkout_the_extra_is_that_of_the_checkout(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(ROOT)
    assert shlex.split(install("kernels"))[1:] == ["-m", "pip", "install", "-e", ".[kernels]"]
    monkeypatch.chdir(tmp_path)
    assert shlex.split(install("kernels"))[-1] == f"{ROOT.resolve()}[kernels]"
    assert shlex.split(install_sources())[-2:] == ["-e", str(ROOT.resolve())]


def test_the_python_that_runs_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    assert shlex.split(install_package("numpy>=1.26")) == [sys.executable, "-m", "pip", "install", "numpy>=1.26"]
    monkeypatch.setattr(sys, "executable", str(tmp_path / "a b" / "python"))
    assert install_package("numpy") == "'a b/python' -m pip install numpy"


@pytest.mark.parametrize(
    ("origin", "requirement"),
    [
        ({"url": "file:///home/me/roofline", "dir_info": {}}, "roofline-llm[silicon] @ file:///home/me/roofline"),
        ({"url": "https://git.example/r.git", "vcs_info": {"vcs": "git", "commit_id": "abc1"}},
         "roofline-llm[silicon] @ git+https://git.example/r.git@abc1"),
        (None, "roofline-llm[silicon]"),
    ],
)  # fmt: skip
def test_elsewhere_it_is_what_the_package_was_installed_from(
    origin: dict[str, object] | None, requirement: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(module, "SOURCES", tmp_path)
    monkeypatch.setattr(metadata, "distribution", lambda name: Installed(origin))
    assert shlex.split(install("silicon"))[-1] == requirement


def test_pip_takes_the_command_from_any_folder(tmp_path: Path) -> None:
    """Resolved and not installed: the extra is one that the project has."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    shown = subprocess.run(
        [sys.executable, "-c", "from roofline.install import install; print(install('cluster'))"],
        cwd=tmp_path, env=environment, capture_output=True, text=True, check=True, timeout=60,
    )  # fmt: skip
    words = shlex.split(shown.stdout)
    assert words[:4] == [sys.executable, "-m", "pip", "install"]
    path, _, extra = words[-1].partition("[")
    assert (Path(path) / "pyproject.toml").is_file()
    assert f"{extra.rstrip(']')} = [" in (Path(path) / "pyproject.toml").read_text(encoding="utf-8")


def test_no_hint_names_an_index_that_does_not_have_the_package() -> None:
    """Every hint is made by one function, and every page names the clone."""
    folders = [ROOT / name for name in ("roofline", "kernels", "validate", "docs", "notebooks")]
    files = [ROOT / "README.md", *(file for folder in folders for file in folder.rglob("*") if file.suffix in (".py", ".md"))]
    found = [
        f"{file.relative_to(ROOT)}: {line.strip()}"
        for file in files
        for line in file.read_text(encoding="utf-8").splitlines()
        if "pip install 'roofline-llm" in line or ('pip install "roofline-llm[' in line and "@" not in line)
    ]
    assert found == []
