"""Planted faults: a kernel's file with one place changed, and what its proof then says."""

from __future__ import annotations

import importlib.util
import sys
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

from roofline.kernels.registry import load
from roofline.kernels.spec import Spec
from roofline.validate.prove import prove

KERNELS = Path(__file__).parents[1] / "kernels"


class Mutant(NamedTuple):
    """A fault in the file of a kernel: ``old`` becomes ``new``, and the proof of ``case`` must name the ``symptom``.

    ``shared`` names the file that has the fault where it is one that several kernels share.
    """

    kernel: str
    fault: str
    old: str
    new: str
    case: str
    symptom: str
    shared: str = ""

    def __str__(self) -> str:
        return f"{self.kernel}-{self.fault}-{self.case}".replace(" ", "-")


def _loaded(path: Path, name: str, wanted: str) -> ModuleType:
    """The module of a file, which is known as ``name`` while ``wanted`` is imported."""
    source = importlib.util.spec_from_file_location(name, path)
    assert source is not None
    assert source.loader is not None
    module = importlib.util.module_from_spec(source)
    known = sys.modules.get(name)
    sys.modules[name] = module
    try:
        source.loader.exec_module(module)
        return _loaded(KERNELS / f"{wanted}.py", f"mutant_{wanted}", "") if wanted else module
    finally:
        del sys.modules[name]
        if known is not None:
            sys.modules[name] = known


def mutated(mutant: Mutant, folder: Path) -> ModuleType:
    """The module of a kernel that has the fault, in its own file or in a shared one, which is written into ``folder``."""
    file = mutant.shared or mutant.kernel
    text = (KERNELS / f"{file}.py").read_text(encoding="utf-8")
    assert mutant.old in text, "the place of the fault has changed: update the mutant"
    path = folder / f"mutant_{file}.py"
    path.write_text(text.replace(mutant.old, mutant.new, 1), encoding="utf-8")
    name = f"roofline.kernels.{mutant.shared}" if mutant.shared else path.stem
    return _loaded(path, name, mutant.kernel if mutant.shared else "")


def mutate(mutant: Mutant, folder: Path) -> Spec:
    """The spec of a kernel with the fault."""
    spec: Spec = mutated(mutant, folder).SPEC
    return spec


@cache
def failures(kernel: str, case: str) -> tuple[str, ...]:
    """What the proof of the kernel without a fault says; proved once per case."""
    spec = load(kernel)
    return prove(spec, next(one for one in spec.cases if one.name == case)).failures


def found(mutant: Mutant, folder: Path) -> str:
    """What the proof of the faulty kernel says; the kernel without the fault must pass. Raises AssertionError otherwise."""
    spec = mutate(mutant, folder)
    case = next(case for case in spec.cases if case.name == mutant.case)
    assert failures(mutant.kernel, mutant.case) == ()
    try:
        return "; ".join(prove(spec, case).failures)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
