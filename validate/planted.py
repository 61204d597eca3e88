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
    """A fault in the file of a kernel: ``old`` becomes ``new``, and the proof of ``case`` must name the ``symptom``."""

    kernel: str
    fault: str
    old: str
    new: str
    case: str
    symptom: str

    def __str__(self) -> str:
        return f"{self.kernel}-{self.fault}-{self.case}".replace(" ", "-")


def mutated(mutant: Mutant, folder: Path) -> ModuleType:
    """The module of a kernel whose file, written into ``folder``, has the fault."""
    text = (KERNELS / f"{mutant.kernel}.py").read_text(encoding="utf-8")
    assert mutant.old in text, "the place of the fault has changed: update the mutant"
    path = folder / f"mutant_{mutant.kernel}.py"
    path.write_text(text.replace(mutant.old, mutant.new, 1), encoding="utf-8")
    source = importlib.util.spec_from_file_location(path.stem, path)
    assert source is not None
    assert source.loader is not None
    module = importlib.util.module_from_spec(source)
    sys.modules[path.stem] = module
    try:
        source.loader.exec_module(module)
    finally:
        del sys.modules[path.stem]
    return module


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
