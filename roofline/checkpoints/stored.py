"""What a checkpoint stores: every learned tensor with the scales that its packing needs, in exact bytes."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property
from typing import NamedTuple

from roofline.errors import InputError


class Tensor(NamedTuple):
    """One tensor as a header describes it.

    Attributes:
        dtype: the header's own word ("BF16", "Q4_K").
        shape: as the header gives it. bytes: of its data.
    """

    dtype: str
    shape: tuple[int, ...]
    bytes: int

    @property
    def elements(self) -> int:
        """Elements as the header counts them; packed integers hold several each."""
        count = 1
        for size in self.shape:
            count *= size
        return count


@dataclass(frozen=True)
class Weight:
    """One learned tensor.

    Attributes:
        name: module path and parameter ("model.layers.0.mlp.up_proj.weight"); packed ones under the plain name.
        format: number format of its elements ("bf16", "int4", "q4_k").
        elements: parameters, unpacked.
        bytes: of the elements. scale_bytes: of scales, zero points and orders that lie in tensors of their own.
    """

    name: str
    format: str
    elements: int
    bytes: int
    scale_bytes: int = 0

    @property
    def module(self) -> str:
        """Path of the module that holds it."""
        return self.name.rpartition(".")[0]

    @property
    def stored_bytes(self) -> int:
        """Bytes with scales."""
        return self.bytes + self.scale_bytes

    @property
    def bits(self) -> Fraction:
        """Bits per parameter, scales included."""
        return Fraction(8 * self.stored_bytes, self.elements) if self.elements else Fraction(0)


class Share(NamedTuple):
    """What one number format holds of a checkpoint: parameters, and their bytes with scales."""

    elements: int
    bytes: int


@dataclass(frozen=True)
class Stored:
    """A checkpoint by its headers.

    Attributes:
        weights: all learned tensors. buffers: tensors that are not learned (rotary frequencies, masks).
        source: file or folder. files: how many files hold it.
    """

    weights: tuple[Weight, ...]
    buffers: tuple[Weight, ...]
    source: str
    files: int = 1

    @cached_property
    def params(self) -> int:
        """Parameters, unpacked."""
        return sum(weight.elements for weight in self.weights)

    @cached_property
    def bytes(self) -> int:
        """Bytes of all tensors: weights, scales, buffers."""
        return sum(weight.stored_bytes for weight in (*self.weights, *self.buffers))

    @cached_property
    def by_format(self) -> dict[str, Share]:
        """Parameters and bytes by number format, largest first."""
        found: dict[str, Share] = {}
        for weight in self.weights:
            elements, stored = found.get(weight.format, Share(0, 0))
            found[weight.format] = Share(elements + weight.elements, stored + weight.stored_bytes)
        return dict(sorted(found.items(), key=lambda item: -item[1].bytes))

    @cached_property
    def modules(self) -> dict[str, Share]:
        """Parameters and bytes of every module, in the order of the headers."""
        found: dict[str, Share] = {}
        for weight in self.weights:
            elements, stored = found.get(weight.module, Share(0, 0))
            found[weight.module] = Share(elements + weight.elements, stored + weight.stored_bytes)
        return found


def missing_library(name: str, error: ModuleNotFoundError) -> ModuleNotFoundError:
    """The error for a library of the extra "checkpoints" that is not installed."""
    from roofline.install import install

    return ModuleNotFoundError(
        f"{name} is not installed, and the headers of a checkpoint need it: {install('checkpoints')}",
        name=error.name,
    )


def merged(parts: Iterable[tuple[str, dict[str, Tensor]]]) -> dict[str, Tensor]:
    """The tensors of several files. Raises InputError for a tensor that lies in two of them."""
    found: dict[str, Tensor] = {}
    for file, tensors in parts:
        twice = next((name for name in tensors if name in found), None)
        if twice is not None:
            raise InputError(f"weights: {twice} stands in {file} and in another file of the checkpoint as well")
        found.update(tensors)
    return found
