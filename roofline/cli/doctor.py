"""``roofline doctor``: what is installed and found, for bug reports."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from roofline.cli.bundles import bundled
from roofline.cli.output import OUTPUT, Output

if TYPE_CHECKING:
    from collections.abc import Iterator

DISTRIBUTION = "roofline-llm"
SECONDS_FOR_DRIVER = 5


def _packages() -> Iterator[tuple[str, str, str]]:
    """(what, value, note) of the package itself, what it depends on, and its extras, from installed metadata."""
    import re
    from importlib import metadata

    def version(name: str) -> str | None:
        try:
            return metadata.version(name)
        except metadata.PackageNotFoundError:
            return None

    try:
        requirements = metadata.requires(DISTRIBUTION) or []
    except metadata.PackageNotFoundError:
        yield DISTRIBUTION, "not installed", "running from a source folder: extras are not known"
        requirements = ["numpy", "sympy", "pandas", "matplotlib", "typer", "tabulate"]
    extras: dict[str, list[str]] = {}
    for requirement in requirements:
        name = re.split(r"[^A-Za-z0-9_.-]", requirement, maxsplit=1)[0]
        extra = re.search(r"extra\s*==\s*['\"]([^'\"]+)", requirement)
        if extra is not None:
            if name != DISTRIBUTION:
                extras.setdefault(extra[1], []).append(name)
        else:
            found = version(name)
            yield name, found or "missing", "" if found else f"needed: pip install {name}"
    for extra_name, members in extras.items():
        missing = [name for name in members if version(name) is None]
        have = ", ".join(f"{name} {version(name)}" for name in members if name not in missing)
        state = "installed" if not missing else "not installed" if len(missing) == len(members) else "incomplete"
        yield f"extra {extra_name}", state, f"missing: {', '.join(missing)}" if missing else have


def _driver() -> tuple[str, str, str]:
    """Whether an NVIDIA driver answers."""
    import shutil
    import subprocess

    tool = shutil.which("nvidia-smi")
    if tool is None:
        return "CUDA device", "none seen", "no nvidia-smi on the path"
    query = [tool, "--query-gpu=name,driver_version,memory.total", "--format=csv,noheader"]
    try:
        answer = subprocess.run(query, capture_output=True, text=True, timeout=SECONDS_FOR_DRIVER, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return "CUDA device", "unknown", "nvidia-smi does not answer"
    if answer.returncode:
        return "CUDA device", "none seen", " ".join((answer.stdout + answer.stderr).split())[:100]
    return "CUDA device", "present", "; ".join(answer.stdout.strip().splitlines())


def _findings() -> Iterator[tuple[str, str, str]]:
    import platform
    import sys

    from roofline import __version__
    from roofline.accelerator import HARDWARE, accelerator_ids
    from roofline.configs.load import CATALOG, model_names

    yield "roofline", __version__, ""
    yield "Python", platform.python_version(), sys.executable
    yield "platform", f"{platform.system()} {platform.machine()}", platform.release()
    yield from _packages()
    yield _driver()
    for what, number, folder in (("GPU files", len(accelerator_ids()), HARDWARE), ("model files", len(model_names()), CATALOG)):
        yield what, str(number), str(folder) if number else f"none in {folder}: the installation is incomplete"


@bundled(out=OUTPUT)
def doctor(*, out: Output) -> int:
    """What is installed and found, for bug reports. Imports none of it."""
    found: list[tuple[str, str, str]] = list(_findings())
    records: list[dict[str, Any]] = [{"what": what, "found": value, "note": note} for what, value, note in found]
    out.records(records, lambda: (["what", "found", "note"], found))
    return 0
