"""Options that commands share: which model, which GPU, which sizes."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from roofline.cli import sweeps
from roofline.errors import InputError

if TYPE_CHECKING:
    from roofline.accelerator import Accelerator

SWEEP = "N|LIST|SWEEP"
PACKAGE = Path(__file__).parent.parent


def complete_list(known: Iterable[str], incomplete: str) -> list[str]:
    """What the last name of a list with commas may become, with what stands before it."""
    before, comma, last = incomplete.rpartition(",")
    return [f"{before}{comma}{name}" for name in known if name.startswith(last)]


def _stems(folder: str) -> Callable[[str], list[str]]:
    """A completion from the file names of a folder of the package, also behind a comma; nothing is read."""

    def complete(incomplete: str) -> list[str]:
        return complete_list(sorted(path.stem for path in (PACKAGE / folder).glob("*.toml")), incomplete)

    return complete


complete_models, complete_gpus, complete_engines = _stems("catalog"), _stems("hardware"), _stems("engines")

Model = Annotated[
    str,
    typer.Argument(
        metavar="MODEL",
        help="A catalogue name, or the path of a config.json.",
        show_default=False,
        autocompletion=complete_models,
    ),
]
Gpu = Annotated[
    list[str] | None,
    typer.Option(
        "--gpu", "-g", metavar="NAME", help="Accelerators (roofline gpus), or the path of a TOML file.",
        autocompletion=complete_gpus,
    ),
]  # fmt: skip
Batch = Annotated[list[str] | None, typer.Option("--batch", "-b", metavar=SWEEP, help="Sequences in the batch.  [default: 1]")]
Context = Annotated[list[str] | None, typer.Option("--context", "-c", metavar=SWEEP, help="Tokens cached per sequence.")]
Fraction = Annotated[
    list[str] | None,
    typer.Option("--memory-fraction", metavar="F", help="Share of the device memory that may be used, 0 < F <= 1.  [default: 1]"),
]
Convention = Annotated[
    str,
    typer.Option(
        "--convention", metavar="NAME", help="exact, or lecture: parameter and KV bytes over bandwidth.",
        autocompletion=lambda: ["exact", "lecture"],
    ),
]  # fmt: skip
Source = Annotated[
    str | None, typer.Option("--source-len", metavar="N", help="Tokens of the encoder's output, for encoder-decoders.")
]
Check = Annotated[bool, typer.Option("--check", help="Exit with 1 when something does not fit.")]


def accelerators(names: list[str] | None) -> list[Accelerator]:
    """The accelerators of ``--gpu``. Raises InputError when there is none, or one is unknown."""
    from roofline.accelerator import accelerator_ids, load_accelerator

    if not names:
        known = [name for name in ("h100-sxm", "h200-sxm", "a100-80gb-sxm", "b200", "mi300x") if name in accelerator_ids()]
        raise InputError(
            f"gpu: say which accelerator, as in --gpu {', --gpu '.join(known or accelerator_ids()[:5])} (roofline gpus)"
        )
    found = {gpu.id: gpu for gpu in map(load_accelerator, sweeps.names(names, "gpu"))}
    return list(found.values())
