"""Options that commands share: which model, which GPU, which sizes, which edits."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from roofline.cli import sweeps
from roofline.cli.bundles import Bundle
from roofline.errors import InputError

if TYPE_CHECKING:
    from roofline.accelerator import Accelerator
    from roofline.edits import Edit

SWEEP = "N|LIST|SWEEP"
PACKAGE = Path(__file__).parent.parent


def _stems(folder: str) -> Callable[[str], list[str]]:
    """A completion from the file names of a folder of the package; nothing is read."""

    def complete(incomplete: str) -> list[str]:
        return sorted(path.stem for path in (PACKAGE / folder).glob("*.toml") if path.stem.startswith(incomplete))

    return complete


complete_models, complete_gpus = _stems("catalog"), _stems("hardware")

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
    return [load_accelerator(name) for name in sweeps.names(names, "gpu")]


@dataclass(frozen=True)
class EditOption:
    """A what-if edit as an option.

    Attributes:
        flag: of the option. help: its line.
        read: what the option was given -> its values.
        build: (the module ``roofline.edits``, a value) -> the edit; None where the value is what the model has anyway.
        metavar: what the help shows for the value.
        completions: values to complete to.
    """

    flag: str
    help: str
    read: Callable[[list[str], str], list[Any]]
    build: Callable[[Any, Any], Edit | None]
    metavar: str = SWEEP
    completions: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        """The option as a Python name."""
        return self.flag.lstrip("-").replace("-", "_")

    @property
    def annotation(self) -> Any:
        """The option as typer reads it."""
        return Annotated[
            list[str] | None,
            typer.Option(self.flag, metavar=self.metavar, help=self.help, autocompletion=lambda: list(self.completions)),
        ]


def _attention(edits: Any, name: str) -> Edit | None:
    if name not in ("fused", "unfused"):
        raise InputError(f"attention: {name!r} is not one of fused, unfused")
    return edits.unfused() if name == "unfused" else None


WEIGHTS = ("bf16", "fp16", "fp8", "fp8-block", "int8", "int4-g128", "mxfp4", "nvfp4", "q4_k")

EDITS = (
    EditOption("--kv-heads", "Key-value heads of every attention layer.", sweeps.whole_numbers, lambda e, n: e.kv_heads(n)),
    EditOption("--window", "Tokens that every attention layer sees.", sweeps.whole_numbers, lambda e, n: e.window(n)),
    EditOption(
        "--attention", "fused, or unfused: scores written and read.", sweeps.names, _attention, "NAME", ("fused", "unfused")
    ),
    EditOption("--dtype", "Format of the weights.", sweeps.names, lambda e, n: e.dtype(n), "FORMAT", WEIGHTS),
    EditOption(
        "--kv-dtype", "Format of cached keys and values.", sweeps.names, lambda e, n: e.kv_dtype(n), "FORMAT", ("bf16", "fp8")
    ),
)
"""Every edit that the command line offers, in the order in which edits are applied: structure first, then formats."""


@dataclass(frozen=True)
class Chosen:
    """Edits that a command was given: option name -> values.

    Attributes:
        values: only of options that were given, in the order of ``EDITS``.
    """

    values: dict[str, list[Any]]

    @property
    def count(self) -> int:
        """Combinations of edits."""
        number = 1
        for values in self.values.values():
            number *= len(values)
        return number if self.values else 0

    def combinations(self) -> Iterator[tuple[Edit, ...]]:
        """Each combination of one value per option that changes anything; none where no edit was given."""
        import itertools

        from roofline import edits

        given = [option for option in EDITS if option.name in self.values]
        built = [[option.build(edits, value) for value in self.values[option.name]] for option in given]
        for combination in itertools.product(*built):
            if chosen := tuple(edit for edit in combination if edit is not None):
                yield chosen


def _chosen(**given: list[str] | None) -> Chosen:
    values = {}
    for option in EDITS:
        texts = given[option.name]
        if texts:
            values[option.name] = option.read(texts, option.flag.lstrip("-"))
    return Chosen(values)


EDIT_OPTIONS = Bundle({option.name: (option.annotation, None) for option in EDITS}, _chosen)
