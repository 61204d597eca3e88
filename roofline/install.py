"""The command that installs what is missing, in a form that works from where the reader is.

The package is on no index. An editable installation, or a run from the sources, names the checkout; an installation from a
folder, an archive or a repository names that again.
"""

from __future__ import annotations

import json
import shlex
import sys
from pathlib import Path

DISTRIBUTION = "roofline-llm"
SOURCES = Path(__file__).resolve().parents[1]
"""The checkout, where this is one."""


def install(extra: str) -> str:
    """The command line that adds an extra of this project: ".venv/bin/python -m pip install -e '.[kernels]'"."""
    return _pip(*_requirement(extra))


def install_sources() -> str:
    """The command line that installs the sources that run, so that Python knows them and their extras."""
    return _pip("-e", _shown(SOURCES))


def install_package(requirement: str) -> str:
    """The command line that adds a package of others to the Python that runs."""
    return _pip(requirement)


def _pip(*words: str) -> str:
    return shlex.join([_shown(Path(sys.executable or "python")), "-m", "pip", "install", *words])


def _shown(path: Path) -> str:
    """A path as one would type it here: relative where it lies in this folder."""
    try:
        inside = path.relative_to(Path.cwd())
    except (ValueError, OSError):
        return str(path)
    return str(inside) if inside.parts else "."


def _requirement(extra: str) -> tuple[str, ...]:
    """What pip is asked for."""
    if (SOURCES / "pyproject.toml").is_file() and (SOURCES / "setup.py").is_file():
        return "-e", f"{_shown(SOURCES)}[{extra}]"
    source = _source()
    return (f"{DISTRIBUTION}[{extra}] @ {source}",) if source else (f"{DISTRIBUTION}[{extra}]",)


def _source() -> str:
    """The address that pip installed this from, as it recorded it; "" where it took an index."""
    from importlib import metadata

    try:
        recorded = json.loads(metadata.distribution(DISTRIBUTION).read_text("direct_url.json") or "{}")
    except (metadata.PackageNotFoundError, OSError, ValueError):
        return ""
    url, vcs = str(recorded.get("url", "")), recorded.get("vcs_info")
    if not vcs:
        return url
    return f"{vcs['vcs']}+{url}@{vcs['commit_id']}"
