"""The roofs of an accelerator: what its datasheet says, and what kernels were seen to attain."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from roofline.accelerator import Accelerator, load_accelerator
from roofline.cost import MATRIX_UNITS
from roofline.errors import InputError
from roofline.expected.calibration import Family, base_of, families, scale_of, transferred
from roofline.expected.model import Chip
from roofline.expected.registry import MODELS

LARGE = 8192.0
"""Rows, inputs and outputs of the matrix multiplication that stands for a matrix unit's attained rate."""
WIDE = 16384.0
"""Inputs and outputs of the matrix-vector product that stands for the attained bandwidth."""
OPERANDS = {"bf16": ("bf16", 2.0), "fp8": ("fp8", 1.0), "nvfp4": ("fp4", 0.5)}
"""Last word of a family's name -> unit that multiplies, bytes of an operand's element."""


@dataclass(frozen=True)
class Roofs:
    """Bytes per second of memory, FLOP/s by matrix unit, and how they are known."""

    bandwidth: float
    rates: Mapping[str, float]
    source: str

    def attainable(self, unit: str, intensity: float) -> float:
        """The most FLOP/s at an intensity: the lower of the two roofs."""
        return min(self.rates[unit], self.bandwidth * intensity)


def datasheet(accelerator: Accelerator) -> Roofs:
    """The dense rates of the accelerator's file."""
    rates = {unit: float(rate.value) for unit, rate in accelerator.compute.items() if unit in MATRIX_UNITS}
    return Roofs(float(accelerator.bandwidth.value), rates, "datasheet")


def _predicted(family: Family, accelerator: Accelerator, m: float, n: float, unit: str, width: float) -> tuple[float, float]:
    """(seconds, bytes) of ``y[m, n] = x[m, n] w[n, n]`` by a family's constants on an accelerator."""
    chip, constants = Chip(accelerator), dict(family.constants)
    base = base_of(accelerator)
    if base != accelerator.id:
        constants = transferred(constants, Chip(load_accelerator(base)), chip, scale_of(accelerator, family.model))
    moved = width * n * n + 4.0 * m * n
    columns = {"m": m, "n": n, "k": n, "bytes": moved, "weight_bytes": width, "input_bytes": width, "unit": unit}
    return float(MODELS[family.model].seconds(columns, chip, constants)), moved


def fitted(accelerator: Accelerator) -> Roofs | None:
    """What the fitted matrix multiplications attain at their largest: the best family counts; None where none is fitted."""
    bandwidth, rates = 0.0, dict[str, float]()
    for family in families(base_of(accelerator)).values():
        cls, dtype = family.name.partition(" ")[0], family.name.replace("/", " ").split()[-1]
        if cls != "gemm" or dtype not in OPERANDS or not family.model.startswith("gemm"):
            continue
        unit, width = OPERANDS[dtype]
        if unit not in accelerator.compute:
            continue
        seconds, _ = _predicted(family, accelerator, LARGE, LARGE, unit, width)
        rates[unit] = max(rates.get(unit, 0.0), 2.0 * LARGE**3 / seconds)
        if unit == "bf16":
            seconds, moved = _predicted(family, accelerator, 1.0, WIDE, unit, width)
            bandwidth = max(bandwidth, moved / seconds)
    return Roofs(bandwidth, rates, "attained (fitted)") if rates and bandwidth else None


def _same_device(name: str, accelerator: Accelerator) -> bool:
    """Whether a driver's name of a device ("NVIDIA H100 80GB HBM3") is that of an accelerator."""
    words = name.lower().removeprefix("nvidia ").replace("-", " ").split()
    for end in range(len(words), 0, -1):
        try:
            return load_accelerator("-".join(words[:end])).id == accelerator.id
        except InputError:
            continue
    return False


def own(accelerator: Accelerator) -> Roofs | None:
    """The roofs that ``roofline bench`` measured on such a device, of its newest committed record; None where there is none."""
    from roofline.validate.measured import records

    found = [record for record in records() if _same_device(str(record["gpu"]), accelerator)]
    if not found:
        return None
    roofs = found[-1]["roofs"]
    return Roofs(float(roofs["bandwidth"]), {unit: float(rate) for unit, rate in roofs["rates"].items()}, "measured")


def attained(accelerator: Accelerator) -> Roofs | None:
    """The measured roofs where there is a record of such a device, else the fitted ones, else None."""
    return own(accelerator) or fitted(accelerator)
