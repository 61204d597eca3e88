"""``roofline gpus``: the accelerators, or every number of one with its source."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from roofline.cli.bundles import bundled
from roofline.cli.options import complete_gpus
from roofline.cli.output import OUTPUT, Output

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from roofline.accelerator import Accelerator, Quantity


def _record(gpu: Accelerator) -> dict[str, Any]:
    from roofline.memory import plain

    return {
        "id": gpu.id,
        "name": gpu.name,
        "vendor": gpu.vendor,
        "kind": gpu.kind,
        "aliases": list(gpu.aliases),
        **{
            f"{unit}_flop_per_s": plain(gpu.compute[unit].value) if unit in gpu.compute else None
            for unit in ("bf16", "fp8", "fp4")
        },
        "memory_bytes": plain(gpu.capacity.value),
        "memory_rung": gpu.capacity_rung,
        "bandwidth_bytes_per_s": plain(gpu.bandwidth.value),
        "ridge_flop_per_byte": float(gpu.ridge()),
    }


def _list(out: Output) -> None:
    from roofline.accelerator import accelerator_ids, load_accelerator
    from roofline.units import GIB, count

    records = [_record(load_accelerator(name)) for name in accelerator_ids()]

    def tera(value: Any) -> str:
        return "-" if value is None else count(float(value) / 1e12)

    def cells() -> tuple[Sequence[str], Sequence[Sequence[Any]]]:
        headers = ["id", "bf16\nTFLOP/s", "fp8\nTFLOP/s", "fp4\nTFLOP/s", "memory\nGiB", "rung", "TB/s", "ridge\nFLOP/B", "kind"]
        rows = [
            [
                r["id"], *(tera(r[f"{unit}_flop_per_s"]) for unit in ("bf16", "fp8", "fp4")), f"{r['memory_bytes'] / GIB:,.2f}",
                r["memory_rung"], tera(r["bandwidth_bytes_per_s"]), f"{r['ridge_flop_per_byte']:,.1f}", r["kind"],
            ]
            for r in records
        ]  # fmt: skip
        return headers, rows

    out.records(records, cells)
    out.note("", "dense rates; ridge at bf16; memory that a process can use, or nominal; roofline gpus NAME shows sources")


SHOWN = {"bytes": "capacity", "traffic": "traffic", "bytes/s": "bandwidth", "flop/s": "flop_rate"}


def _show(value: Any, unit: str) -> str:
    from roofline import units

    if unit in SHOWN:
        return str(getattr(units, SHOWN[unit])(value))
    number = units.count(value if isinstance(value, int) else float(value))
    return {"Hz": f"{float(value) / 1e6:,.0f} MHz", "1": number}.get(unit, f"{number} {unit}")


CHIP_UNITS = {"boost_clock": "Hz", "matrix_clock": "Hz", "matrix_flop_per_clock_per_sm": "FLOP", "tdp": "W"}


def _quantities(gpu: Accelerator) -> Iterator[tuple[str, str, Quantity]]:
    """(field, unit, quantity) of every number of an accelerator."""
    for unit, quantity in gpu.compute.items():
        yield f"compute.{unit}", "flop/s", quantity
    yield "memory.bandwidth", "bytes/s", gpu.bandwidth
    for name in ("nominal", "reported", "visible"):
        quantity_or_none = getattr(gpu, name)
        if quantity_or_none is not None:
            yield f"memory.{name}", "bytes", quantity_or_none
    if gpu.l2 is not None:
        yield "memory.l2", "traffic", gpu.l2
    for name, quantity in gpu.chip.items():
        yield f"chip.{name}", CHIP_UNITS.get(name, "1"), quantity
    for name, link in gpu.links.items():
        yield f"links.{name}.bandwidth", "bytes/s", link.bandwidth
    for price in gpu.prices:
        yield f"price {price.date} {price.provider}".strip(), "USD/h", price.usd_per_hour


def _details(name: str, out: Output) -> None:
    from roofline.accelerator import load_accelerator
    from roofline.memory import plain

    gpu = load_accelerator(name)
    quantities = list(_quantities(gpu))
    out.note(
        out.paint(f"{gpu.id}: {gpu.name} ({gpu.kind}, {gpu.architecture})", "bold"),
        f"aliases: {', '.join(gpu.aliases) or 'none'}; ridge {gpu.ridge():,.1f} FLOP/B at bf16",
        *([f"usual server: {gpu.node_accelerators} of them over {gpu.node_link}"] if gpu.node_accelerators else []),
        "",
    )
    out.records(
        [
            {
                "gpu": gpu.id,
                "field": field,
                "value": plain(q.value),
                "unit": "bytes" if unit == "traffic" else unit,
                "kind": q.kind,
                "source": q.source,
            }
            for field, unit, q in quantities
        ],
        lambda: (
            ["number", "value", "kind", "source"],
            [[field, _show(q.value, unit), q.kind, q.source] for field, unit, q in quantities],
        ),
    )


@bundled(out=OUTPUT)
def gpus(
    name: Annotated[
        str | None,
        typer.Argument(
            metavar="NAME", help="An accelerator, or the path of a TOML file; without it, all.", autocompletion=complete_gpus
        ),
    ] = None,
    *,
    out: Output,
) -> int:
    """The accelerators, or every number of one with unit, kind (datasheet, measured, derived) and source."""
    if name is None:
        _list(out)
    else:
        _details(name, out)
    return 0
