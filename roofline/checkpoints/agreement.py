"""Whether a checkpoint stores what its config describes: parameters and bytes, and where they differ.

A config says what a model is, the headers say what lies on disk. Both are added up layer by layer; where a layer
differs, the modules and blocks that have no counterpart are named. What a checkpoint may hold beside the text model
(towers, layers that predict further tokens, a copy of tied embeddings, buffers) is told apart and named as well.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

from roofline.checkpoints.stored import Stored, Weight
from roofline.components.base import Component, weight_bytes
from roofline.model import Model
from roofline.numeric import whole

LAYER = re.compile(r"(?:^|\.)(?:layers|h|blocks|blk|block)\.(\d+)\.")
TOWER = re.compile(
    r"(?:^|\.)(?:vision|visual|audio|image|vit\b|mm_|multi_modal|multimodal|patch_merge|resampler|aligner|embed_vision|v\.|mm\.)"
)
PREDICTION = re.compile(r"(?:^|\.)(?:mtp|nextn|eh_proj|enorm|hnorm|shared_head)")
CORRECTION = re.compile(r"(?:^|\.)(?:e_score_correction_bias|expert_bias|exp_probs_b\.bias)$")
HEAD = re.compile(r"(?:^|\.)(?:lm_head|embed_out|output_layer|output|head)\.")
MOST_NAMED = 3
DIFFERS = "stored weights DIFFER from the config"
"""How the summary of a checkpoint begins that is not what its config describes."""


class Held(NamedTuple):
    """Something that holds weights: a module of the checkpoint, or a block of the model."""

    name: str
    params: int
    bytes: int

    def __str__(self) -> str:
        return f"{self.name} ({self.params:,} parameters, {self.bytes:,} bytes)"


@dataclass(frozen=True)
class Difference:
    """One place where checkpoint and config differ.

    Attributes:
        where: "layers 0-3", "outside the layers".
        stored, described: what has no counterpart on the other side.
    """

    where: str
    stored: tuple[Held, ...]
    described: tuple[Held, ...]

    @property
    def params(self) -> int:
        """Parameters that the checkpoint stores beyond the config's, of one layer."""
        return sum(held.params for held in self.stored) - sum(held.params for held in self.described)

    @property
    def bytes(self) -> int:
        """Bytes that the checkpoint stores beyond the config's, of one layer."""
        return sum(held.bytes for held in self.stored) - sum(held.bytes for held in self.described)

    def __str__(self) -> str:
        have = ", ".join(map(str, self.stored)) or "nothing"
        want = ", ".join(map(str, self.described)) or "nothing"
        return f"{self.where}: the checkpoint has {have}; the config describes {want}"


@dataclass(frozen=True)
class Agreement:
    """A checkpoint beside the model of its config.

    Attributes:
        stored_params, stored_bytes: of the text model as stored. params, bytes: as the config describes it.
        scale_bytes: how many of the stored bytes are scales, zero points and orders.
        differences: where they differ.
        aside: what lies in the checkpoint beside the text model.
        tower_params: parameters of towers as stored. described_tower_params: as the config describes them.
    """

    stored_params: int
    stored_bytes: int
    params: int
    bytes: int
    scale_bytes: int
    differences: tuple[Difference, ...]
    aside: tuple[Held, ...] = field(default=())
    tower_params: int = 0
    described_tower_params: int = 0

    @property
    def same_params(self) -> bool:
        """Whether text model and towers have as many parameters as the config describes."""
        return (self.stored_params, self.tower_params) == (self.params, self.described_tower_params)

    @property
    def agrees(self) -> bool:
        """Whether the bytes are the same as well."""
        return self.same_params and self.stored_bytes == self.bytes

    @cached_property
    def summary(self) -> str:
        """One line: that both agree, or by how much and where they do not."""
        aside = f"; beside it: {', '.join(map(str, self.aside))}" if self.aside else ""
        if self.agrees:
            return f"stored weights: {self.stored_params:,} parameters in {self.stored_bytes:,} bytes, as the config says{aside}"
        parts = []
        if self.stored_params != self.params:
            parts.append(f"{self.stored_params:,} parameters where the config describes {self.params:,}")
        if self.tower_params != self.described_tower_params:
            parts.append(f"{self.tower_params:,} parameters of towers, described are {self.described_tower_params:,}")
        if self.stored_bytes != self.bytes:
            parts.append(
                f"{self.stored_bytes:,} bytes ({self.scale_bytes:,} of them scales, zero points and orders) where the config's "
                f"formats give {self.bytes:,}"
            )
        more = len(self.differences) - MOST_NAMED
        named = "; ".join(map(str, self.differences[:MOST_NAMED])) + (f"; and {more} more" if more > 0 else "")
        return f"{DIFFERS}: {', '.join(parts)}. {named}{aside}"


def _held(name: str, weights: Sequence[Weight]) -> Held:
    return Held(name, sum(w.elements for w in weights), sum(w.stored_bytes for w in weights))


def _described(components: Iterable[Component]) -> list[Held]:
    """What blocks of a model hold, those without weights left out."""
    found = []
    for component in components:
        params = component.params()
        if params:
            found.append(Held(component.name, int(sum(params.values())), whole(weight_bytes(params))))
    return found


def _modules(weights: Iterable[Weight], layer: str) -> list[Held]:
    """The modules directly inside a layer (or, outside of layers, each module), with all that lies below them."""
    groups: dict[str, list[Weight]] = {}
    for weight in weights:
        inside = weight.name[len(layer) :]
        name = inside.split(".")[0] if layer and "." in inside else weight.module or weight.name
        groups.setdefault(name, []).append(weight)
    return [_held(name, group) for name, group in groups.items()]


def _unmatched(stored: list[Held], described: list[Held]) -> tuple[tuple[Held, ...], tuple[Held, ...]]:
    """Both sides without what has a counterpart of equal parameters and bytes."""
    rest = list(described)
    left = []
    for held in stored:
        twin = next((other for other in rest if other[1:] == held[1:]), None)
        if twin is None:
            left.append(held)
        else:
            rest.remove(twin)
    return tuple(left), tuple(rest)


def _ranges(numbers: Sequence[int]) -> str:
    """Layer numbers as text: "0-3, 7"."""
    spans: list[list[int]] = []
    for number in numbers:
        if spans and number == spans[-1][1] + 1:
            spans[-1][1] = number
        else:
            spans.append([number, number])
    return ", ".join(f"{first}-{last}" if last > first else str(first) for first, last in spans)


def _collapsed(found: Iterable[tuple[int, Difference]]) -> list[Difference]:
    """Equal differences of several layers as one."""
    same: dict[tuple[tuple[Held, ...], tuple[Held, ...]], list[int]] = {}
    for index, difference in found:
        same.setdefault((difference.stored, difference.described), []).append(index)
    return [Difference(f"layer{'s' if len(numbers) > 1 else ''} {_ranges(numbers)}", *sides) for sides, numbers in same.items()]


@dataclass
class _Sorted:
    """Weights of a checkpoint by what they belong to."""

    layers: dict[int, list[Weight]] = field(default_factory=dict)
    prefix: dict[int, str] = field(default_factory=dict)
    outside: list[Weight] = field(default_factory=list)
    towers: list[Weight] = field(default_factory=list)
    prediction: list[Weight] = field(default_factory=list)
    corrections: list[Weight] = field(default_factory=list)
    copies: list[Weight] = field(default_factory=list)


def _sort(stored: Stored, model: Model) -> _Sorted:
    found = _Sorted()
    layers, tied = len(model.layers), any(getattr(part, "tied", False) for part in model.head)
    for weight in stored.weights:
        match = LAYER.search(weight.name)
        if TOWER.search(weight.name):
            found.towers.append(weight)
        elif PREDICTION.search(weight.name) or (match is not None and int(match[1]) >= layers and model.encoder is None):
            found.prediction.append(weight)
        elif CORRECTION.search(weight.name):
            found.corrections.append(weight)
        elif match is not None and model.encoder is None:
            index = int(match[1])
            found.layers.setdefault(index, []).append(weight)
            found.prefix[index] = weight.name[: match.end()]
        elif tied and HEAD.search(f"{weight.name}.") and weight.name.endswith("weight"):
            found.copies.append(weight)
        else:
            found.outside.append(weight)
    return found


def _count_corrections(parts: _Sorted, model: Model) -> None:
    """Hands the routers' corrections back to their layers where the model counts them as parameters."""
    if not parts.corrections:
        return
    text = [weight for group in (parts.outside, *parts.layers.values()) for weight in group]
    total = sum(weight.elements for weight in text)
    if total + sum(weight.elements for weight in parts.corrections) != model.params:
        return
    for weight in parts.corrections:
        match = LAYER.search(weight.name)
        holder = parts.layers.setdefault(int(match[1]), []) if match is not None else parts.outside
        holder.append(weight)
    parts.corrections = []


def compare(stored: Stored, model: Model) -> Agreement:
    """A checkpoint beside the model of its config."""
    parts = _sort(stored, model)
    _count_corrections(parts, model)
    text = [*parts.outside, *(weight for group in parts.layers.values() for weight in group)]
    total = _held("text", text)
    bytes_described: int = model.weight_bytes
    differences: list[Difference] = []
    if (total.params, total.bytes) != (model.params, bytes_described):
        outer = [*model.embedding, *model.final, *model.head]
        if model.encoder is not None:
            outer += [*model.encoder.before, *model.encoder.layers, *model.encoder.after, *model.layers]
        pair = _unmatched(_modules(parts.outside, ""), _described(outer))
        if any(pair):
            differences.append(Difference("outside the layers", *pair))
        if model.encoder is None:
            found = []
            for index in sorted({*parts.layers, *range(len(model.layers))}):
                blocks = model.layers[index].blocks if index < len(model.layers) else ()
                modules = _modules(parts.layers.get(index, []), parts.prefix.get(index, ""))
                pair = _unmatched(modules, _described(blocks))
                if any(pair) and _sums(pair[0]) != _sums(pair[1]):
                    found.append((index, Difference("", *pair)))
            differences += _collapsed(found)
    aside = [
        _held(name, group)
        for name, group in (
            ("prediction of further tokens", parts.prediction), ("corrections of routers", parts.corrections),
            ("a copy of tied embeddings", parts.copies), ("buffers", list(stored.buffers)), ("towers", parts.towers),
        )
        if group
    ]  # fmt: skip
    return Agreement(
        total.params, total.bytes, model.params, bytes_described, sum(weight.scale_bytes for weight in text),
        tuple(differences), tuple(aside), sum(weight.elements for weight in parts.towers), model.tower_params,
    )  # fmt: skip


def _sums(held: Iterable[Held]) -> tuple[int, int]:
    entries = list(held)
    return sum(entry.params for entry in entries), sum(entry.bytes for entry in entries)
