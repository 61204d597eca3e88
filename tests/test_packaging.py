"""An installed roofline is whole, whatever it was installed from: a git checkout, an sdist, a ZIP archive, or in place.

In a ZIP archive (and in a checkout without links) ``roofline/kernels`` is a text file that holds "../kernels"; an sdist
has no such file at all. Every case runs without site packages of its own, so that an editable install of this checkout
cannot fill a gap.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import zipfile
from pathlib import Path

import pytest

import roofline

pytestmark = pytest.mark.xdist_group("packaging")

ROOT = Path(__file__).parents[1]
FOLDERS = {"roofline": "roofline", **{f"roofline/{name}": name for name in ("hardware", "kernels", "validate")}}
SUFFIXES = {".py", ".toml", ".csv", ".json", ".typed"}

PROBE = """
import importlib.util, json, os, site, sys
editable, modules = sys.argv[1], sys.argv[2:]
if editable:
    site.addsitedir(editable)
import roofline
from roofline.accelerator import accelerator_ids
from roofline.configs.load import model_names
def home(name):
    spec = importlib.util.find_spec(name)
    return spec and os.path.realpath(spec.origin or next(iter(spec.submodule_search_locations)))
print(json.dumps({"modules": {name: home(name) for name in modules}, "gpus": accelerator_ids(), "models": model_names()}))
"""


def contents() -> dict[str, Path]:
    """Path inside the package -> file of this checkout, for all code and data."""
    found = {}
    for inside, folder in FOLDERS.items():
        for here, _, files in os.walk(ROOT / folder):
            for file in files:
                if Path(file).suffix in SUFFIXES:
                    found[(Path(inside) / Path(here, file).relative_to(ROOT / folder)).as_posix()] = Path(here, file)
    return found


CONTENTS = contents()
MODULES = sorted(
    {path.removesuffix(".py").removesuffix("/__init__").replace("/", ".") for path in CONTENTS if path.endswith(".py")}
    | {"roofline.hardware"}
)


def run(*args: object, cwd: Path, **env: str) -> str:
    done = subprocess.run(
        [str(arg) for arg in args], cwd=cwd, env={**os.environ, **env}, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, f"{args}\n{done.stdout}\n{done.stderr}"
    return done.stdout


def checkout(target: Path, links: bool) -> Path:
    """A copy of this checkout with links, or as a ZIP archive unpacks: each link a text file."""
    target.mkdir()
    for name in ("pyproject.toml", "setup.py", "LICENSE", "README.md"):
        if (ROOT / name).exists():
            shutil.copy(ROOT / name, target)
    for folder in FOLDERS.values():
        shutil.copytree(ROOT / folder, target / folder, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
    for path in (target / "roofline").iterdir():
        if path.is_symlink() and not links:
            text = os.readlink(path)
            path.unlink()
            path.write_text(text)
    return target


def built(source: Path, what: str) -> Path:
    """The wheel or sdist of a checkout, from the build backend itself: no network, no isolation."""
    code = f"from setuptools import build_meta as backend; backend.build_{what}('dist')"
    run(sys.executable, "-c", code, cwd=source)
    (file,) = (source / "dist").glob("*.whl" if what == "wheel" else "*.tar.gz")
    return file


def install(target: Path, *what: object) -> Path:
    options = ("--quiet", "--no-deps", "--no-build-isolation", "--no-index", "--disable-pip-version-check")
    run(sys.executable, "-m", "pip", "install", *options, "--target", target, *what, cwd=target.parent)
    return target


def python(*args: object, cwd: Path, path: Path | None = None) -> str:
    """Python with the dependencies and ``path``, and without .pth files."""
    search = os.pathsep.join(str(folder) for folder in (path, sysconfig.get_path("purelib")) if folder)
    return run(sys.executable, "-S", *args, cwd=cwd, PYTHONPATH=search, PYTHONDONTWRITEBYTECODE="1")


def check_whole(root: Path, cwd: Path, path: Path | None = None, editable: Path | str = "") -> None:
    """Every module is found, below ``root``, and all accelerators and models are known."""
    found = json.loads(python("-c", PROBE, editable, *MODULES, cwd=cwd, path=path))
    homes = {name: home for name, home in found["modules"].items() if not (home or "").startswith(str(root.resolve()))}
    assert homes == {}, f"not found below {root}"
    for key, folder in (("gpus", "roofline/hardware"), ("models", "roofline/catalog")):
        names = sorted(Path(p).stem for p in CONTENTS if p.startswith(f"{folder}/") and p.endswith(".toml"))
        assert found[key] == names


@pytest.fixture(scope="module")
def places(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The three forms of the sources, and an empty folder outside of them."""
    base = tmp_path_factory.mktemp("packaging")
    git = checkout(base / "git", links=True)
    with tarfile.open(built(git, "sdist")) as archive:
        archive.extractall(base / "unpacked", filter="data")
    (sdist,) = (base / "unpacked").iterdir()
    (base / "outside").mkdir()
    return {"git": git, "sdist": sdist, "zip": checkout(base / "zip", links=False), "outside": base / "outside"}


@pytest.fixture(scope="module", params=["git", "sdist", "zip"])
def source(request: pytest.FixtureRequest, places: dict[str, Path]) -> Path:
    return places[request.param]


@pytest.fixture(scope="module")
def wheel(source: Path) -> Path:
    return built(source, "wheel")


def test_wheel_holds_every_file_of_every_folder_and_nothing_else(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = [name for name in archive.namelist() if ".dist-info/" not in name]
        assert sorted(names) == sorted(CONTENTS)
        assert [name for name in names if archive.read(name) != CONTENTS[name].read_bytes()] == []


def test_wheel_registers_the_command_and_the_pytest_plugin(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith("/entry_points.txt"))
        registered = archive.read(name).decode()
    assert "[console_scripts]\nroofline = roofline.cli:main" in registered
    assert "[pytest11]\nroofline = roofline.validate.pytest_plugin" in registered


def test_installed_wheel_is_whole_outside_and_inside_the_sources(wheel: Path, source: Path, places: dict[str, Path]) -> None:
    target = install(source.parent / f"target-{source.parent.name}-{source.name}", wheel)
    check_whole(target, cwd=places["outside"], path=target)
    assert roofline.__version__ in python(target / "bin" / "roofline", "--version", cwd=places["outside"], path=target)
    assert roofline.__version__ in python("-m", "roofline", "--version", cwd=source, path=target)


def test_sources_are_whole_where_they_lie(source: Path) -> None:
    """``python -c "import roofline.kernels"`` in the root meets the folder roofline/ first, installed or not."""
    check_whole(source, cwd=source)
    assert roofline.__version__ in python("-m", "roofline", "--version", cwd=source)


def test_editable_install_of_a_zip_archive_is_whole(places: dict[str, Path]) -> None:
    target = install(places["zip"].parent / "editable", "-e", places["zip"])
    check_whole(places["zip"], cwd=places["outside"], path=target, editable=target)
