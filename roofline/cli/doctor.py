"""``roofline doctor``: what is installed, what works with it, what is missing and how to get it; for bug reports, too."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from roofline.cli.bundles import bundled
from roofline.cli.output import OUTPUT, Output
from roofline.install import DISTRIBUTION, install, install_package, install_sources

if TYPE_CHECKING:
    from collections.abc import Iterator

SECONDS_FOR_DRIVER = 5
USES = {
    "kernels": "validate kernels and host, compression, the pytest fixture; bench with a GPU",
    "silicon": "validate silicon, serving and calibrate, plot validation",
    "checkpoints": "models --stored, folders with safetensors, GGUF files",
    "oracle": "tests against transformers",
    "notebooks": "the notebooks",
    "cluster": "simulate --jobs and --cluster",
    "dev": "the tests",
}
"""Extra -> what needs it."""
Row = tuple[str, str, str]


def _number(version: str) -> tuple[int, ...]:
    """The leading numbers of a version, for comparison: "2.13.0+cpu" -> (2, 13, 0)."""
    import re

    return tuple(int(part) for part in re.findall(r"\d+", re.split(r"[^0-9.]", version, maxsplit=1)[0]))


def _too_old(requirement: str, found: str) -> bool:
    """Whether an installed version is below what a requirement asks for at least."""
    import re

    least = re.search(r">=\s*([0-9.]+)", requirement)
    return least is not None and _number(found) < _number(least[1])


def _name(requirement: str) -> str:
    import re

    return re.split(r"[^A-Za-z0-9_.-]", requirement, maxsplit=1)[0]


def _version(name: str) -> str | None:
    from importlib import metadata

    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _packages() -> Iterator[Row]:
    """(what, found, note) of what the package depends on, and of its extras, from installed metadata."""
    import re
    from importlib import metadata

    try:
        requirements = metadata.requires(DISTRIBUTION) or []
    except metadata.PackageNotFoundError:
        yield DISTRIBUTION, "not installed", f"running from a source folder: extras are not known ({install_sources()})"
        requirements = ["numpy", "sympy", "pandas", "matplotlib", "typer", "tabulate"]
    extras: dict[str, list[str]] = {}
    for requirement in requirements:
        extra = re.search(r"extra\s*==\s*['\"]([^'\"]+)", requirement)
        if extra is not None:
            if _name(requirement) != DISTRIBUTION:
                extras.setdefault(extra[1], []).append(requirement)
            continue
        name, found = _name(requirement), _version(_name(requirement))
        wanted = requirement.partition(";")[0].strip()
        note = "" if found and not _too_old(requirement, found) else f"needed: {install_package(wanted)}"
        yield name, found or "missing", note if not found or not note else f"too old; {note}"
    yield from (_extra(name, members) for name, members in extras.items())


def _extra(extra: str, requirements: list[str]) -> Row:
    """An extra: whether its packages are there, what it is for, and which it has or lacks."""
    versions = {_name(requirement): _version(_name(requirement)) for requirement in requirements}
    missing = [name for name, found in versions.items() if found is None]
    state = "installed" if not missing else "not installed" if len(missing) == len(versions) else "incomplete"
    have = ", ".join(f"{name} {found}" for name, found in versions.items() if found)
    lacks = f"missing: {', '.join(missing)}" if len(missing) < len(versions) else ""
    parts = (f"for {USES[extra]}" if extra in USES else "", lacks if missing else have)
    return f"extra {extra}", state, "; ".join(filter(None, parts))


def _driver() -> Row:
    """Whether an NVIDIA driver answers; without one, only measuring does not work."""
    import shutil
    import subprocess

    tool = shutil.which("nvidia-smi")
    if tool is None:
        return "CUDA device", "none seen", "no nvidia-smi on the path; only bench and times in tests need a GPU"
    query = [tool, "--query-gpu=name,driver_version,memory.total", "--format=csv,noheader"]
    try:
        answer = subprocess.run(query, capture_output=True, text=True, timeout=SECONDS_FOR_DRIVER, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return "CUDA device", "unknown", "nvidia-smi does not answer"
    if answer.returncode:
        return "CUDA device", "none seen", " ".join((answer.stdout + answer.stderr).split())[:100]
    return "CUDA device", "present", "; ".join(answer.stdout.strip().splitlines())


def _completion() -> Row:
    """Whether a shell's start-up files complete this command."""
    import os
    from pathlib import Path

    shell = Path(os.environ.get("SHELL", "")).name
    files = {"bash": ".bashrc", "zsh": ".zfunc/_roofline", "fish": ".config/fish/completions/roofline.fish"}
    if shell not in files:
        return "completion", "unknown", "roofline --install-completion, in bash, zsh, fish or PowerShell"
    try:
        found = "roofline" in (Path.home() / files[shell]).read_text(encoding="utf-8", errors="ignore")
    except (OSError, RuntimeError):
        found = False
    if found:
        return "completion", shell, "commands, options, models and GPUs"
    return "completion", "not installed", "roofline --install-completion, then a new shell"


def _findings() -> Iterator[Row]:
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
    yield _completion()
    for what, number, folder in (("GPU files", len(accelerator_ids()), HARDWARE), ("model files", len(model_names()), CATALOG)):
        yield what, str(number), str(folder) if number else f"none in {folder}: the installation is incomplete"


def _verdict(found: list[Row]) -> str:
    """What works, in a line."""
    broken = [what for what, value, note in found if value == "missing" or note.startswith("too old")]
    if broken:
        return f"works: not all; needed first: {', '.join(broken)}"
    lacking = [
        what.removeprefix("extra ") for what, value, _ in found if value in ("not installed", "incomplete") and " " in what
    ]
    rest = f"; what the extras {', '.join(lacking)} are for does not" if lacking else ""
    return f"works: all commands that need no extra{rest}" if lacking else "works: all commands"


@bundled(out=OUTPUT)
def doctor(*, out: Output) -> int:
    """What is installed, what works with it, what is missing and how to get it. Imports none of it."""
    found: list[Row] = list(_findings())
    lacking = [what for what, value, _ in found if what.startswith("extra ") and value != "installed"]
    ways = {what: install(what.removeprefix("extra ")) for what in lacking}
    records: list[dict[str, Any]] = [
        {"what": what, "found": value, "note": note, "install": ways.get(what)} for what, value, note in found
    ]
    out.records(records, lambda: (["what", "found", "note"], found))
    gpu = any(what == "CUDA device" and value == "present" for what, value, _ in found)
    out.note("", _verdict(found) + ("" if gpu else "; bench needs a GPU"))
    if ways:
        out.note(f"to install an extra: {ways[lacking[0]]}; several: {install('kernels,silicon')}")
    return 0
