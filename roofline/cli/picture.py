"""Options that all figures share, the deployments that they show, and how a figure is written."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from roofline.cli import sweeps
from roofline.cli.bundles import Bundle
from roofline.cli.edit_options import Chosen
from roofline.cli.mesh_options import Meshes
from roofline.cli.options import accelerators, complete_models
from roofline.errors import InputError

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from roofline.inference import Deployment
    from roofline.model import Model

BESIDE_TIMES = "in bounds: launch overheads, host time, latency of collectives"
BESIDE_MEMORY = "what an engine reserves for itself, and how its pages round"
SIZE = re.compile(r"(\d+(?:\.\d+)?)x(\d+(?:\.\d+)?)")

Models = Annotated[
    list[str],
    typer.Argument(
        metavar="MODEL...",
        help="Catalogue names or paths, with edits of their own: llama-3.1-8b:kv-heads=2.",
        show_default=False,
        autocompletion=complete_models,
    ),
]
Measured = Annotated[
    str | None,
    typer.Option(
        "--measured", metavar="FILE",
        help="CSV with your own points: batch, tpot_ms, and, for several curves, label (as in the legend).",
    ),
]  # fmt: skip


Engine = Annotated[
    str,
    typer.Option(
        "--engine", metavar="NAME",
        help="Whose expected times to show beside the bounds: vllm, sglang, trtllm, llamacpp; none for bounds alone.",
        autocompletion=lambda: ["vllm", "sglang", "trtllm", "llamacpp", "none"],
    ),
]  # fmt: skip


@dataclass(frozen=True)
class Picture:
    """Where a figure goes, and how large.

    Attributes:
        out: the file. dpi: of a PNG. size: width and height in inches, None for the figure's own. title: "" for its own.
    """

    out: Path
    dpi: float
    size: tuple[float, float] | None
    title: str
    quiet: bool

    @property
    def options(self) -> dict[str, Any]:
        """What the functions that draw take."""
        return {"title": self.title, "size": self.size}

    def write(self, figure: Figure, notes: Iterable[str] = ()) -> int:
        """Writes the figure, says so, and what it rests on."""
        from roofline.plots.style import save

        path = save(figure, self.out, self.dpi)
        if not self.quiet:
            width, height = figure.get_size_inches()
            typer.echo("\n".join([f"wrote {path} ({width:g} x {height:g} in)", *notes]))
        return 0


def number(text: str, field: str) -> float:
    """A plain number. Raises InputError."""
    try:
        return float(text)
    except ValueError:
        raise InputError(f"{field}: {text!r} is not a number; write one such as 150") from None


def _picture(out: str | None, dpi: str, size: str | None, title: str, quiet: bool, no_color: bool) -> Picture:
    """Where the figure goes; what is said about it has no colours, with ``no_color`` or without."""
    from roofline.plots.style import file_format

    if not out:
        raise InputError("out: say which file to write, as in --out figure.svg (svg, png or pdf)")
    sides = SIZE.fullmatch(size) if size else None
    if size and sides is None:
        raise InputError(f"size: {size!r} is not a size; write width and height in inches: 7x5")
    path = Path(out)
    file_format(path)
    if not path.expanduser().absolute().parent.is_dir():
        raise InputError(f"out: there is no folder {path.parent}; make it first, or give another file")
    return Picture(path, number(dpi, "dpi"), (float(sides[1]), float(sides[2])) if sides else None, title, quiet)


PICTURE = Bundle(
    {
        "out": (
            Annotated[str | None, typer.Option("--out", metavar="FILE", help="File to write; .svg, .png or .pdf.")],
            None,
        ),
        "dpi": (Annotated[str, typer.Option("--dpi", metavar="N", help="Dots per inch of a PNG.")], "150"),
        "size": (
            Annotated[str | None, typer.Option("--size", metavar="WxH", help="Inches.  [default: as the figure needs]")],
            None,
        ),
        "title": (Annotated[str, typer.Option("--title", metavar="TEXT", help="Instead of the figure's own title.")], ""),
        "quiet": (Annotated[bool, typer.Option("--quiet", "-q", help="Write the file and say nothing.")], False),
        "no_color": (Annotated[bool, typer.Option("--no-color", help="No colours in messages; figures keep theirs.")], False),
    },
    _picture,
)


def one(texts: list[str] | None, field: str, default: str, least: int = 1) -> int:
    """The one value of an option."""
    values = sweeps.whole_numbers(texts or [default], field, least)
    if len(values) > 1:
        raise InputError(f"{field}: this figure takes one value, not {len(values)}")
    return values[0]


def edited(models: Sequence[str], edits: Chosen) -> dict[str, Model]:
    """Models by label, each with the edits behind its name and those that all share. Raises InputError."""
    from roofline.cli.columns import columns

    if not models:
        raise InputError("model: name one or more models (roofline models lists them)")
    found = {column.label: column.variant.model for column in columns(models, edits, (), (), (), (), None)}
    return found


def deployments(
    models: Sequence[str], edits: Chosen, gpu: list[str] | None, meshes: Meshes | None = None, fraction: list[str] | None = None
) -> dict[str, Deployment]:
    """Every model on every GPU and mesh, by a label that says what differs."""
    from roofline.inference import Deployment
    from roofline.sharded import ShardedDeployment

    chips = accelerators(gpu)
    shares = sweeps.fractions(fraction or ["1"], "memory-fraction")
    if len(shares) > 1:
        raise InputError("memory-fraction: a figure takes one value")
    splits = meshes.all() if meshes else [None]
    found: dict[str, Deployment] = {}
    for label, model in edited(models, edits).items():
        for chip in chips:
            for mesh in splits:
                words = [label]
                words += [f"on {chip.id}"] if len(chips) > 1 else []
                words += [mesh.flags or "--tp 1"] if mesh is not None and len(splits) > 1 else []
                found[" ".join(words)] = (
                    Deployment(model, chip, memory_fraction=shares[0])
                    if mesh is None
                    else ShardedDeployment(model, chip, memory_fraction=shares[0], mesh=mesh)
                )
    return found


def source_length(models: Iterable[Model], given: str | None) -> int:
    """The length of the encoder's output that all models with an encoder share; 0 where there is none."""
    from roofline.cli import points

    length = sweeps.whole_numbers([given], "source-len")[0] if given else None
    lengths = {points.source_length(model, length) for model in models if model.encoder is not None}
    if not lengths and length is not None:
        raise InputError("source-len: none of these models has an encoder")
    if len(lengths) > 1:
        raise InputError("source-len: these models encode different lengths; give one with --source-len")
    return lengths.pop() if lengths else 0


def notes(cases: Mapping[str, Model | Deployment], engine: str = "", batches: Collection[int] = ()) -> list[str]:
    """What was assumed about the models, what expected times rest on, and what the bounds leave out.

    ``engine`` is whose expected times a figure shows, "" for a figure without times; ``batches`` are those it shows.
    """
    from roofline.cli.verdict import memory_of, merged, model_notes
    from roofline.expected.serving import left_range
    from roofline.model import Model
    from roofline.plots.expected import expected_of

    models = {label: case if isinstance(case, Model) else case.model for label, case in cases.items()}
    placed = {label: case for label, case in cases.items() if not isinstance(case, Model)}
    chips = [case.accelerator for case in placed.values()]
    lines = [f"assumes: {line}" for line in merged([(label, model_notes(model, chips)) for label, model in models.items()])]
    if not engine:
        lines += dict.fromkeys(f"assumes: {case.accelerator.id}: {memory_of(case.accelerator)}" for case in placed.values())
    else:
        known = [(label, expected_of(case, engine)) for label, case in placed.items()]
        told = [
            (label, dict.fromkeys([*e.steps.notes, *left_range(e.steps, _of_a_replica(placed[label], batches))]))
            for label, e in known if e.steps
        ]  # fmt: skip
        lines += [f"expected: {line}" for line in merged([*told, *((label, ()) for label, e in known if not e.steps)])]
    outside = list(dict.fromkeys(item for model in models.values() for item in model.not_modelled))
    return [*lines, f"not modelled: {', '.join([*outside, BESIDE_TIMES if engine else BESIDE_MEMORY])}"]


def _of_a_replica(case: Deployment, batches: Collection[int]) -> list[int]:
    """What one data-parallel replica has of batches."""
    groups = getattr(getattr(case, "mesh", None), "dp", 1)
    return [-(-batch // groups) for batch in batches]


def _wrong(row: Mapping[str, Any]) -> str:
    """Which column of a row is missing, or holds no number."""
    columns = [name for name in row if name]
    missing = [name for name in ("batch", "tpot_ms") if name not in columns]
    if missing:
        return f"the column {' and '.join(missing)} is missing; found {', '.join(columns)} (times are tpot_ms, in milliseconds)"
    return f"batch and tpot_ms must be numbers; found {row['batch']!r:.40} and {row['tpot_ms']!r:.40}"


def measured(path: str | None, labels: Sequence[str]) -> dict[str, list[tuple[int, float]]]:
    """(batch, seconds per step) by label from a CSV file. Raises InputError that names the line."""
    import csv

    if path is None:
        return {}
    try:
        rows = list(csv.DictReader(Path(path).expanduser().read_text(encoding="utf-8-sig").splitlines()))
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"measured: {path} cannot be read ({getattr(error, 'strerror', None) or 'not a text'})") from None
    found: dict[str, list[tuple[int, float]]] = {}
    for place, row in enumerate(rows, start=2):
        label = row.get("label") or labels[0]
        if label not in labels:
            raise InputError(f"measured: line {place} of {path}: no curve is called {label!r:.60}; there are {', '.join(labels)}")
        try:
            batch, seconds = int(row["batch"]), float(Fraction(row["tpot_ms"]) / 1000)
        except (KeyError, TypeError, ValueError, ZeroDivisionError):
            raise InputError(f"measured: line {place} of {path}: {_wrong(row)}") from None
        found.setdefault(label, []).append((batch, seconds))
    if not found:
        raise InputError(f"measured: {path} has no rows; its first line must be batch,tpot_ms")
    return found
