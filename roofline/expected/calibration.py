"""Fitted constants of an accelerator, as its hardware file carries them, and what they predict.

``[calibration]`` names package, date and split, and for a device without constants of its own whose it takes (``base``)
and one factor on what SMs do in 16-bit matmuls (``scale``); ``[calibration.<class>]`` for each time model one line per
family of kernels: ``name=rows fitted, error on held-out rows, constants`` in the order of that model in
``roofline.expected.registry``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from roofline.accelerator import Accelerator, load_accelerator
from roofline.errors import InputError, suggest
from roofline.expected.gemm import CACHED, GEMM, SUSTAINED
from roofline.expected.model import Chip
from roofline.expected.registry import MODELS

VOLTAGE = 3.0
"""Power goes with the cube of the clock: once by itself, and twice by the voltage that follows it."""
HEADER = ("package", "date", "split", "base", "scale")


@dataclass(frozen=True)
class Family:
    """Fitted constants of one family of kernels.

    Attributes:
        name: "<class> <kernel> <dtype>". model: time model. constants: by name.
        fitted: rows. mape: mean absolute error relative to the measurement, on the held-out rows (about as many).
    """

    name: str
    model: str
    constants: Mapping[str, float]
    fitted: int
    mape: float


def _family(cls: str, model: str, name: str, line: Any, where: str) -> Family:
    words = str(line).split()
    try:
        constants = MODELS[model].named(map(float, words[2:]))
        return Family(f"{cls} {name}", model, constants, int(words[0]), float(words[1]))
    except (IndexError, KeyError, ValueError):
        raise InputError(f"{where} [calibration.{cls}.{model}] {name!r}: not rows, an error and the model's constants") from None


@lru_cache(maxsize=32)
def families(gpu: str) -> Mapping[tuple[str, str], Family]:
    """The families of an accelerator by (name, model); empty where it is not calibrated. Raises InputError for a bad section."""
    accelerator = load_accelerator(gpu)
    section = accelerator.calibration
    found = {}
    for cls, of_model in section.items():
        for model, lines in of_model.items() if cls not in HEADER else ():
            for name, _, line in (each.partition("=") for each in lines.splitlines()):
                family = _family(cls, model, name, line, accelerator.id)
                found[family.name, model] = family
    return found


def base_of(accelerator: Accelerator) -> str:
    """Whose constants an accelerator takes: its own, or those of the one that its file names."""
    return str(accelerator.calibration.get("base", accelerator.id))


def scale_of(accelerator: Accelerator, model: str) -> float:
    """How many cycles of a device do what one does of the one whose constants it takes; 1 where that is not fitted.

    It is fitted on 16-bit matrix multiplications and holds for their time model alone: kernels of other libraries, with
    passes that quantise beside them, do not follow it.
    """
    return float(accelerator.calibration.get("scale", 1.0)) if model == GEMM.name else 1.0


def transferred(constants: Mapping[str, float], base: Chip, chip: Chip, scale: float = 1.0) -> dict[str, float]:
    """Constants of one device on another: datasheet rates swap by themselves, fixed times are cycles, so the clock swaps.

    What the power limit leaves of the matrix units' rate in a long run goes by the cube root of the watts that a device has
    per FLOP/s, up to the whole rate. ``scale`` is the one number that is fitted (``scale_of``): fixed times are multiplied
    by it, and what the cache delivers per clock is divided.
    """
    cycles = scale * base.clock / chip.clock
    power = float((chip.watts_per_flops / base.watts_per_flops) ** (1.0 / VOLTAGE))

    def on_chip(name: str, value: float) -> float:
        if name == SUSTAINED.name:
            return min(max(value * power, SUSTAINED.low), SUSTAINED.high)
        if name.endswith("_us") and name != "host_us":
            return value * cycles
        return value / scale if name == CACHED.name else value

    return {name: on_chip(name, value) for name, value in constants.items()}


def like(known: Mapping[tuple[str, str], Family], name: str, model: str) -> Family | None:
    """The family of a name, or the only one of the same class, framework and format (kernels are renamed between GPUs)."""
    if (name, model) in known:
        return known[name, model]

    def words(family: str) -> tuple[str, str, str]:
        cls, _, rest = family.partition(" ")
        framework, _, kernel = rest.partition("/")
        return cls, framework, kernel.rpartition(" ")[2]

    alike = [family for (other, of), family in known.items() if of == model and words(other) == words(name)]
    return alike[0] if len(alike) == 1 else None


def family_of(gpu: str, name: str) -> Family:
    """The family of a name, "<class> <kernel> <dtype>". Raises InputError with the nearest names for an unknown one."""
    known = {family.name: family for family in families(gpu).values()}
    if name not in known:
        raise InputError(f"kernel family: {gpu} has no constants for {name!r}.{suggest(name, known)}")
    return known[name]
