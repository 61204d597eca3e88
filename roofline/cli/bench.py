"""``roofline bench``: kernels measured on the GPU that is here."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from roofline.cli.bundles import bundled
from roofline.cli.output import OUTPUT, Output

if TYPE_CHECKING:
    from collections.abc import Sequence

OK, FINDING, MISSING = 0, 1, 3


def complete_kernels() -> list[str]:
    """Names for the shell's completion."""
    from roofline.kernels.registry import KERNELS

    return list(KERNELS)


def columns(headers: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table in plain columns: this command runs where nothing but torch, triton and typer may be installed."""
    widths = [max(len(row[column]) for row in (headers, *rows)) for column in range(len(headers))]
    lines = [headers, ["-" * width for width in widths], *rows]
    return "\n".join("  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in lines)


def _row(one: dict[str, Any]) -> list[str]:
    from roofline.units import bandwidth, flop_rate, latency

    ratio = one["library_ratio"]
    return [
        one["kernel"], one["case"], latency(one["measured"]["median"]), one["measured"]["timer"],
        bandwidth(one["bandwidth"]), flop_rate(one["rate"]) if one["flops"] else "-",
        "-" if one["roof_fraction"] is None else f"{one['roof_fraction']:.2f}",
        "-" if ratio is None else f"{ratio:.2f}",
    ]  # fmt: skip


@bundled(out=OUTPUT)
def bench(
    kernel: Annotated[
        str, typer.Argument(metavar="KERNEL", help="Kernels, comma separated; all without it.", autocompletion=complete_kernels)
    ] = "",
    folder: Annotated[
        str | None, typer.Option(help="Write the record into this folder instead of validate/measurements.")
    ] = None,
    *,
    out: Output,
) -> int:
    """Measures kernels on the GPU that is here, beside its roofs and the usual library; exits with 3 without a GPU."""
    import os
    import sys
    import threading
    from pathlib import Path

    from roofline.kernels.registry import KERNELS, check
    from roofline.validate.measured import MEASUREMENTS, SECONDS_AT_MOST, NoGPU, check_folder, need_gpu, run, save

    names = [check(name.strip()) for name in kernel.split(",")] if kernel else list(KERNELS)
    target = MEASUREMENTS if folder is None else Path(folder)
    try:
        need_gpu()
    except NoGPU as error:
        print(f"error: {error}", file=sys.stderr)
        return MISSING
    check_folder(target)

    def give_up() -> None:
        print(f"error: ended after {SECONDS_AT_MOST:g} s; the record holds what was done by then", file=sys.stderr, flush=True)
        os._exit(FINDING)

    watch = threading.Timer(SECONDS_AT_MOST, give_up)
    watch.daemon = True
    watch.start()
    record = run(
        names,
        lambda line: None if out.quiet else print(line, file=sys.stderr, flush=True),
        lambda record: save(record, target),
    )  # fmt: skip
    watch.cancel()
    path = save(record, target)
    if out.format == "table":
        headers = ["kernel", "case", "time", "timer", "bandwidth", "rate", "of roof", "x library"]
        out.write(columns(headers, [_row(one) for one in record["measurements"]]))
    else:
        out.records(record["measurements"], lambda: ([], []))
    wrong = [f"{name}: {line}" for name, lines in record["wrong"].items() for line in lines]
    skipped, unproved = ", ".join(record["skipped"]), sum(record["unproved"].values())
    out.note(
        "", *wrong, *([f"skipped: {skipped}"] if skipped else []),
        *([f"{unproved} proof cases were not run here"] if unproved else []), f"wrote {path}",
    )  # fmt: skip
    return FINDING if wrong else OK
