"""What-if edits as options: the one table to extend for a new edit."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

import typer

from roofline.cli import sweeps
from roofline.cli.bundles import Bundle
from roofline.cli.options import SWEEP, complete_list
from roofline.errors import InputError, suggest

if TYPE_CHECKING:
    from roofline.edits import Edit


@dataclass(frozen=True)
class EditOption:
    """A what-if edit as an option.

    Attributes:
        flag: of the option. help: its line. alias: another spelling, "" for none.
        read: (what the option was given, its name) -> its values; None where a value is what the model has anyway.
        maker: the function of ``roofline.edits`` that makes the edit of a value.
        metavar: what the help shows for the value.
        completions: values to complete to.
    """

    flag: str
    help: str
    read: Callable[[list[str], str], list[Any]]
    maker: str
    metavar: str = SWEEP
    completions: tuple[str, ...] = ()
    alias: str = ""

    @property
    def name(self) -> str:
        """The option as a Python name."""
        return self.flag.lstrip("-").replace("-", "_")

    def complete(self, incomplete: str) -> list[str]:
        """Values that begin so, also behind a comma."""
        return complete_list(self.completions, incomplete)

    @property
    def annotation(self) -> Any:
        """The option as typer reads it."""
        spellings = (self.flag, self.alias) if self.alias else (self.flag,)
        return Annotated[
            list[str] | None,
            typer.Option(*spellings, metavar=self.metavar, help=self.help, autocompletion=self.complete),
        ]


KERNELS = ("fused", "unfused")
MIXERS = ("gated-deltanet", "kda", "mamba2")
WEIGHTS = ("bf16", "fp16", "fp8", "fp8-block", "int8", "int4-g128", "mxfp4", "nvfp4", "q4_k", "q4_k_m")


def _verbatim(texts: list[str], field: str) -> list[str]:
    """Values that have commas of their own: one per option."""
    return list(dict.fromkeys(texts))


def _kernels(texts: list[str], field: str) -> list[str | None]:
    """Attention kernels; None for the fused one, which every model has."""
    found: list[str | None] = []
    for name in sweeps.names(texts, field):
        if name not in KERNELS:
            raise InputError(f"{field}: {name!r} is not one of {', '.join(KERNELS)}.{suggest(name, KERNELS)}")
        found.append(None if name == "fused" else name)
    return found


EDITS = (
    EditOption("--prune-width", "Narrow the model.", _verbatim, "prune_width", "hidden=N,ffn=N,heads=N"),
    EditOption("--prune-depth", "Keep N layers, the first and the last ones.", sweeps.whole_numbers, "prune_depth"),
    EditOption("--experts", "Experts, or experts and those picked per token.", sweeps.names, "experts", "N[:PICKED]"),
    EditOption("--swap-attention", "Fixed-state mixers in some layers.", sweeps.names, "swap_attention", "NAME[:NofM]", MIXERS),
    EditOption("--pattern", "Local and global attention layers in turn.", sweeps.names, "pattern", "LLLG:WINDOW"),
    EditOption("--window", "Tokens that every attention layer sees.", sweeps.whole_numbers, "window"),
    EditOption("--kv-heads", "Key-value heads of every attention layer.", sweeps.whole_numbers, "kv_heads"),
    EditOption("--share-kv-every", "Layers that share keys and values (CLA).", sweeps.whole_numbers, "share_kv_every"),
    EditOption("--mla-rank", "Rank of the latent; turns GQA into MLA.", sweeps.whole_numbers, "mla_rank"),
    EditOption("--attention", "fused, or unfused: scores written and read.", _kernels, "unfused", "NAME", KERNELS),
    EditOption(
        "--dtype",
        "Format of the weights: bf16, fp8, int4-g128, nvfp4, q4_k, ...",
        sweeps.names,
        "dtype",
        "FORMAT",
        WEIGHTS,
        "--quant",
    ),
    EditOption("--kv-dtype", "Format of cached keys and values.", sweeps.names, "kv_dtype", "FORMAT", ("bf16", "fp8")),
)
"""Every edit that the command line offers, in the order of the help; they are applied in the order in which they are typed."""
BY_NAME = {option.name: option for option in EDITS}


@dataclass(frozen=True)
class Chosen:
    """Edits that a command was given: option name -> values.

    Attributes:
        values: only of options that were given, in the order in which they are applied.
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

        def made(option: EditOption, value: Any) -> Edit:
            maker = getattr(edits, option.maker)
            edit: Edit = maker() if option.maker == "unfused" else maker(value)
            return edit

        built = [[value and made(BY_NAME[name], value) for value in values] for name, values in self.values.items()]
        for combination in itertools.product(*built):
            if chosen := tuple(edit for edit in combination if edit):
                yield chosen


def _chosen(**given: list[str] | None) -> Chosen:
    """The edits that were given, in the order of the arguments."""
    return Chosen({name: BY_NAME[name].read(texts, BY_NAME[name].flag.lstrip("-")) for name, texts in given.items() if texts})


EDIT_OPTIONS = Bundle({option.name: (option.annotation, None) for option in EDITS}, _chosen)
