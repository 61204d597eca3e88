"""What the replicas that only prefill run on, as options: a mesh, a batch and a cache of their own."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated, Any

import typer

from roofline.cli import sweeps
from roofline.cli.bundles import Bundle
from roofline.cli.mesh_options import AXES
from roofline.errors import InputError

if TYPE_CHECKING:
    from roofline.allocation import Settings
    from roofline.parallel.mesh import Mesh

SIZES = {
    "prefill_max_num_seqs": ("sequences", "Prompts of a step there."),
    "prefill_max_num_batched_tokens": ("batched_tokens", "Token budget of a step there."),
    "prefill_kv_tokens": ("kv_tokens", "Tokens of the cache of each of them."),
}
"""Option -> what it sets, and its help."""


@dataclass(frozen=True)
class Prefill:
    """Replicas that only prefill; what was not given is as that of the others.

    Attributes:
        mesh: None for that of the others. sizes: of those in ``SIZES`` that were given.
    """

    mesh: Mesh | None
    sizes: dict[str, int]

    @property
    def given(self) -> bool:
        """Whether anything is said of them."""
        return self.mesh is not None or bool(self.sizes)

    @property
    def kv_tokens(self) -> int | None:
        """Tokens of a cache, None for what the engine or the maths leaves."""
        return self.sizes.get("kv_tokens")

    def settings(self, others: Settings) -> Settings:
        """Their engine's settings."""
        own: dict[str, Any] = {name: value for name, value in self.sizes.items() if name != "kv_tokens"}
        return replace(others, **own)

    def check(self, disaggregated: bool) -> Prefill | None:
        """Themselves where anything is said of them. Raises InputError where there are none of which it could be said."""
        if not self.given:
            return None
        if not disaggregated:
            name = "prefill-tp" if self.mesh else next(flag for flag, (what, _) in SIZES.items() if what in self.sizes)
            raise InputError(f"{name.replace('_', '-')}: it belongs to replicas that only prefill; give --disaggregate 1:1")
        return self


def _prefill(**given: str | None) -> Prefill:
    from roofline.parallel.mesh import Mesh

    found = {}
    for name, text in given.items():
        if text is None:
            continue
        values = sweeps.whole_numbers([text], name.replace("_", "-"))
        if len(values) != 1:
            raise InputError(f"{name.replace('_', '-')}: {text!r} are several values; give one")
        found[name] = values[0]
    axes: dict[str, Any] = {axis: found[f"prefill_{axis}"] for axis in AXES if f"prefill_{axis}" in found}
    return Prefill(Mesh(**axes) if axes else None, {SIZES[name][0]: value for name, value in found.items() if name in SIZES})


def _option(flag: str, text: str) -> tuple[Any, None]:
    return Annotated[str | None, typer.Option(flag, metavar="N", help=text)], None


PREFILL_OPTIONS = Bundle(
    {
        **{
            f"prefill_{axis}": _option(f"--prefill-{axis}", f"{flag} of replicas that only prefill.  [default: as the others]")
            for axis, (flag, _) in AXES.items()
        },
        **{name: _option(f"--{name.replace('_', '-')}", text) for name, (_, text) in SIZES.items()},
    },
    _prefill,
)
