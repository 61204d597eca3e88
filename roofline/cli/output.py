"""How answers leave: data on stdout as a table, JSON, JSON lines, CSV or Markdown; notes around it.

A table is for people, so its notes stand with it on stdout; in every other format stdout carries data only, and notes go
to stderr (JSON carries what matters of them itself). Data is never rounded; only tables are.
"""

from __future__ import annotations

import json
import math
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from fractions import Fraction
from typing import Annotated, Any, TypeVar

import typer

from roofline.cli.bundles import Bundle
from roofline.errors import InputError, suggest

FORMATS = ("table", "json", "jsonl", "csv", "md")
COLOURS = {"red": "31", "green": "32", "yellow": "33", "bold": "1"}

WIDEST_CELL = 80
"""Characters after which a cell of a table goes on in the next line."""

Item = TypeVar("Item")
Record = dict[str, Any]
Cells = tuple[Sequence[str], Sequence[Sequence[Any]]]


def plain(value: Any) -> Any:
    """A value as JSON takes it: a Fraction as an int where whole, else a float; NaN and infinity as null."""
    if isinstance(value, Fraction):
        value = value.numerator if value.denominator == 1 else float(value)
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    return value


def colour_wanted() -> bool:
    """Whether stdout shows colours: a terminal, and neither NO_COLOR nor TERM=dumb says otherwise."""
    return sys.stdout.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


@dataclass(frozen=True)
class Output:
    """Where and how a command prints.

    Attributes:
        format: one of ``FORMATS``. quiet: leave the notes out. colour: paint verdicts.
    """

    format: str
    quiet: bool = False
    colour: bool = False

    @property
    def silent(self) -> bool:
        """Whether notes go nowhere: when quiet, and with JSON, which carries them itself."""
        return self.quiet or self.format in ("json", "jsonl")

    def paint(self, text: str, *styles: str) -> str:
        """Text in the named colours where the terminal wants them."""
        codes = ";".join(COLOURS[style] for style in styles)
        return f"\x1b[{codes}m{text}\x1b[0m" if self.colour and self.format == "table" else text

    def bar(self, what: str, total: int | None = None) -> AbstractContextManager[Callable[[], None]]:
        """A bar on stderr while a block of long work runs; it gives what to call after each of ``total`` pieces."""
        from roofline.cli.progress import bar

        return bar(what, total, quiet=self.quiet, colour=self.colour)

    def watch(self, items: Iterable[Item], what: str, total: int | None = None) -> Iterator[Item]:
        """The items one by one, behind a bar. ``total``: how many there are, where ``items`` cannot say."""
        with self.bar(what, len(items) if isinstance(items, Sequence) else total) as step:
            for item in items:
                yield item
                step()

    def write(self, text: str) -> None:
        """Text and a line end to stdout."""
        sys.stdout.write(text + "\n")

    def note(self, *lines: str) -> None:
        """Lines about the data: on stdout with a table, on stderr with Markdown and CSV."""
        if self.silent:
            return
        if self.format == "table":
            sys.stdout.writelines(line + "\n" for line in lines)
        else:
            sys.stderr.writelines(line + "\n" for line in lines if line)

    def warn(self, line: str) -> None:
        """A line on stderr that no format swallows, unless quiet: the answer may not be about what lies there."""
        if not self.quiet:
            sys.stderr.write(f"note: {line}\n")

    def records(self, records: Iterable[Record], cells: Callable[[], Cells]) -> None:
        """The data: records as they are, or, for a table, (headers, rows of cells)."""
        if self.format in ("table", "md"):
            headers, rows = cells()
            self.write(table(headers, rows, markdown=self.format == "md"))
        elif self.format == "json":
            self.write(json.dumps([plain(record) for record in records], indent=1, allow_nan=False))
        elif self.format == "jsonl":
            for record in records:
                self.write(json.dumps(plain(record), allow_nan=False))
        else:
            self._csv([plain(record) for record in records])

    def _csv(self, records: list[Record]) -> None:
        import csv

        if not records:
            return
        writer = csv.writer(sys.stdout, lineterminator="\n")
        writer.writerow(records[0])
        writer.writerows([_csv_cell(key, value) for key, value in record.items()] for record in records)


def _csv_cell(key: str, value: Any) -> Any:
    """A value of a CSV: flags with spaces between them, so that they paste, other lists with semicolons."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, list):
        texts = (json.dumps(item) if isinstance(item, (dict, list)) else str(item) for item in value)
        return (" " if key == "edits" else "; ").join(texts)
    return json.dumps(value) if isinstance(value, dict) else value


def table(headers: Sequence[str], rows: Sequence[Sequence[Any]], *, markdown: bool = False) -> str:
    """Rows as a table of text: columns whose cells are all numbers flush right, others left."""
    import tabulate

    tabulate.MIN_PADDING = 0  # columns as narrow as their texts
    right = [all(_numeric(row[column]) for row in rows) for column in range(len(headers))]
    if markdown:
        headers = [header.replace("\n", " ") for header in headers]
        rows = [[str(cell).replace("|", "\\|") for cell in row] for row in rows]
    else:
        rows = [[_wrapped(str(cell)) for cell in row] for row in rows]
    text: str = tabulate.tabulate(
        rows,
        headers=headers,
        tablefmt="pipe" if markdown else "simple",
        colalign=["right" if flush else "left" for flush in right] if rows else None,
        disable_numparse=True,
    )
    return text


def _wrapped(text: str) -> str:
    if len(text) <= WIDEST_CELL:
        return text
    import textwrap

    return textwrap.fill(text, WIDEST_CELL)


def _numeric(cell: Any) -> bool:
    text = str(cell)
    return text in ("", "-", "no limit") or text.lstrip("-< ")[:1].isdigit()


def output(format: str, json: bool, quiet: bool, no_color: bool) -> Output:
    """The Output that the options ask for. Raises InputError for an unknown format."""
    if format not in FORMATS:
        raise InputError(f"output: unknown format {format!r}.{suggest(format, FORMATS)} Known: {', '.join(FORMATS)}")
    if json and format not in ("table", "json"):
        raise InputError(f"output: --json contradicts --output {format}; give one of them")
    return Output("json" if json else format, quiet, colour_wanted() and not no_color)


OUTPUT = Bundle(
    {
        "format": (
            Annotated[
                str,
                typer.Option(
                    "--output", "-o", metavar="FORMAT", help="table, json, jsonl, csv or md.", autocompletion=lambda: FORMATS
                ),
            ],
            "table",
        ),
        "json": (Annotated[bool, typer.Option("--json", help="The same as -o json.")], False),
        "quiet": (Annotated[bool, typer.Option("--quiet", "-q", help="Data only: no verdicts, no notes.")], False),
        "no_color": (Annotated[bool, typer.Option("--no-color", help="No colours; NO_COLOR does the same.")], False),
    },
    output,
)
