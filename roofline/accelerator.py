"""Accelerators: what a device can do, read from ``hardware/*.toml``, one file per SKU.

Every number in those files is an inline table with value, unit, kind ("datasheet", "measured", "derived") and source;
a number without a source does not load. Rates are dense (no structured sparsity).
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction
from functools import cache, lru_cache
from pathlib import Path
from typing import Any

import roofline
from roofline.errors import InputError, suggest
from roofline.numeric import whole
from roofline.units import to_base

HARDWARE = Path(roofline.__path__[-1], "hardware")
KINDS = ("datasheet", "measured", "derived")
FALLBACK_UNIT = "bf16"
COMMON = ("h100-sxm", "h200-sxm", "b200-sxm", "a100-sxm-80gb", "mi300x")
"""Accelerators to name where nothing near is known."""


@dataclass(frozen=True)
class Quantity:
    """A sourced number in its base unit (bytes, bytes/s, FLOP/s, Hz, W, seconds, count, USD/h)."""

    value: int | Fraction
    kind: str
    source: str


@dataclass(frozen=True)
class Link:
    """A way to other devices: bytes per second in one direction, per accelerator."""

    name: str
    bandwidth: Quantity


@dataclass(frozen=True)
class Price:
    """A dated rental price in USD per accelerator hour."""

    usd_per_hour: Quantity
    date: str
    provider: str


@dataclass(frozen=True)
class Accelerator:
    """One device.

    Attributes:
        id: file name in ``hardware/``.
        name, vendor, kind, architecture, aliases: as in the file.
        compute: dense FLOP/s by executing unit ("bf16", "fp8", "int8", "fp4", "vector").
        bandwidth: device memory bandwidth [B/s].
        nominal: marketing capacity [B].
        reported: what the driver reports [B], where known.
        visible: what an engine finds at start-up [B], where known.
        l2: last-level cache [B], where known.
        chip: counts and clocks ("sm_count", "boost_clock", "matrix_clock", "matrix_flop_per_clock_per_sm", "tdp").
        links: by name ("nvlink", "xgmi", "pcie", "ici", "network").
        node_accelerators, node_link: the usual server, where known.
        prices: dated rental prices.
        calibration: fitted constants of time models, as in the file (see ``roofline.expected.calibration``); may be empty.
    """

    id: str
    name: str
    vendor: str
    kind: str
    architecture: str
    aliases: tuple[str, ...]
    compute: Mapping[str, Quantity]
    bandwidth: Quantity
    nominal: Quantity
    reported: Quantity | None
    visible: Quantity | None
    l2: Quantity | None
    chip: Mapping[str, Quantity]
    links: Mapping[str, Link]
    node_accelerators: int | None
    node_link: str | None
    prices: tuple[Price, ...]
    calibration: Mapping[str, Any]

    @property
    def capacity(self) -> Quantity:
        """The memory that a process can use: what an engine sees, else what the driver reports, else nominal [B]."""
        return self.visible or self.reported or self.nominal

    @property
    def capacity_rung(self) -> str:
        """Which of the three capacities ``capacity`` is: "visible", "reported" or "nominal"."""
        return "visible" if self.visible else "reported" if self.reported else "nominal"

    def unit_for(self, unit: str) -> str:
        """The unit that executes work meant for ``unit``: itself, or the 16-bit matrix unit where the chip lacks it."""
        return unit if unit in self.compute else FALLBACK_UNIT

    def rate(self, unit: str) -> int | Fraction:
        """Dense FLOP/s of the unit that executes work meant for ``unit``."""
        return self.compute[self.unit_for(unit)].value

    def ridge(self, unit: str = "bf16") -> float:
        """Arithmetic intensity at which the unit and the memory take equally long [FLOP/B]."""
        return float(self.rate(unit) / self.bandwidth.value)


def _quantity(table: Any, dimension: str, where: str) -> Quantity:
    if not isinstance(table, dict):
        raise InputError(f"{where}: write it as a table with value, unit, kind and source")
    for key in ("value", "unit", "kind", "source"):
        if key not in table:
            raise InputError(f"{where}: {key} is missing; every hardware number carries value, unit, kind and source")
    value, unit, kind, source = table["value"], table["unit"], table["kind"], table["source"]
    if isinstance(value, bool) or not isinstance(value, (int, Fraction)) or value <= 0:
        raise InputError(f"{where}: value must be a positive number, not {value!r}")
    if kind not in KINDS:
        raise InputError(f"{where}: kind must be one of {', '.join(KINDS)}, not {kind!r}")
    if not isinstance(source, str) or len(source.strip()) < 4:
        raise InputError(f"{where}: source is empty; say who states the number and where")
    return Quantity(to_base(value, str(unit), dimension, where), kind, source)


CHIP_DIMENSIONS = {
    "sm_count": "count",
    "boost_clock": "hertz",
    "matrix_clock": "hertz",
    "matrix_flop_per_clock_per_sm": "flop",
    "tdp": "watt",
}


def _parse(data: dict[str, Any], where: str) -> Accelerator:
    def section(name: str, required: bool) -> dict[str, Any]:
        table = data.get(name, {})
        if not isinstance(table, dict) or (required and not table):
            raise InputError(f"{where}: section [{name}] is missing or not a table")
        return table

    def number(table: dict[str, Any], section_name: str, key: str, dimension: str) -> Quantity | None:
        return _quantity(table[key], dimension, f"{where} [{section_name}] {key}") if key in table else None

    def required(table: dict[str, Any], section_name: str, key: str, dimension: str) -> Quantity:
        found = number(table, section_name, key, dimension)
        if found is None:
            raise InputError(f"{where} [{section_name}]: {key} is missing")
        return found

    for key in ("id", "name", "vendor", "kind", "architecture"):
        if not isinstance(data.get(key), str):
            raise InputError(f"{where}: {key} is missing or not a text")
    compute, memory, node = section("compute", True), section("memory", True), section("node", False)
    rates = {unit: _quantity(table, "flop/s", f"{where} [compute] {unit}") for unit, table in compute.items()}
    if FALLBACK_UNIT not in rates:
        raise InputError(f"{where} [compute]: {FALLBACK_UNIT} is missing")
    links = {
        name: Link(name, required(table, f"links.{name}", "bandwidth", "bytes/s"))
        for name, table in section("links", False).items()
    }
    accelerators = number(node, "node", "accelerators", "count")
    return Accelerator(
        id=data["id"],
        name=data["name"],
        vendor=data["vendor"],
        kind=data["kind"],
        architecture=data["architecture"],
        aliases=tuple(data.get("aliases", ())),
        compute=rates,
        bandwidth=required(memory, "memory", "bandwidth", "bytes/s"),
        nominal=required(memory, "memory", "nominal", "bytes"),
        reported=number(memory, "memory", "reported", "bytes"),
        visible=number(memory, "memory", "visible", "bytes"),
        l2=number(memory, "memory", "l2", "bytes"),
        chip={
            key: _quantity(table, CHIP_DIMENSIONS[key], f"{where} [chip] {key}")
            for key, table in section("chip", False).items()
            if key in CHIP_DIMENSIONS
        },
        links=links,
        node_accelerators=int(accelerators.value) if accelerators else None,
        node_link=node.get("link"),
        prices=tuple(
            Price(
                required(entry, "price", "usd_per_hour", "price"),
                str(entry.get("date", "undated")),
                str(entry.get("region_or_provider", "")),
            )
            for entry in data.get("price", ())
        ),
        calibration=section("calibration", False),
    )


def read_accelerator(path: Path) -> Accelerator:
    """An accelerator from a TOML file of one's own. Raises InputError that names file and field."""
    try:
        with path.open("rb") as file:
            data = tomllib.load(file, parse_float=lambda text: whole(Fraction(text)))
    except OSError as error:
        raise InputError(f"{path}: cannot be read ({error.strerror})") from None
    except (tomllib.TOMLDecodeError, ValueError) as error:
        raise InputError(f"{path}: not valid TOML ({error})") from None
    return _parse(data, path.name)


def accelerator_ids() -> list[str]:
    """Ids of all accelerators that the package knows, sorted."""
    return sorted(path.stem for path in HARDWARE.glob("*.toml"))


@lru_cache(maxsize=1)
def _aliases() -> dict[str, str]:
    """Every alias of every file -> id. Reads the whole folder: only for names that are not an id."""
    return {alias: name for name in accelerator_ids() for alias in load_accelerator(name).aliases}


def load_accelerator(name: str | Path) -> Accelerator:
    """The accelerator of an id ("h100-sxm"), a short alias ("h100"), or the path of a TOML file of one's own.

    A file is read anew each time. Raises InputError: the name is unknown (the nearest known ones are suggested) or the file is
    bad.
    """
    if isinstance(name, Path) or (isinstance(name, str) and name.endswith(".toml")):
        return read_accelerator(Path(name))
    if not isinstance(name, str):
        raise InputError(f"gpu: {name!r:.60} is not a name; give one such as 'h100-sxm', or the path of a TOML file")
    return _load_named(name)


@cache
def _load_named(name: str) -> Accelerator:
    key = name.strip().lower().replace("_", "-").replace(" ", "-")
    path = HARDWARE / f"{key}.toml"
    if "/" not in key and path.is_file():
        return read_accelerator(path)
    if key in _aliases():
        return _load_named(_aliases()[key])
    near = suggest(key, [*accelerator_ids(), *_aliases()]) or f" Such as {', '.join(COMMON)}"
    raise InputError(f"gpu: unknown accelerator {name!r}.{near} (roofline gpus)")


def forget() -> None:
    """Reads the package's files anew from now on: for those who write them."""
    _load_named.cache_clear()
