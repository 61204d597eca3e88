"""Models side by side: what each column of a comparison is, and its figures at every point."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property
from pathlib import Path
from typing import Any

from roofline.accelerator import Accelerator
from roofline.breakdown import flops_by_role
from roofline.cli.edit_options import EDITS, Chosen
from roofline.cli.points import SCHEMA, Point, Question, Variant, kv_bytes_per_token, source_length
from roofline.cli.verdict import beyond, largest_batch, model_notes, not_modelled
from roofline.configs.load import load_model
from roofline.edits import Edit, apply
from roofline.errors import InputError, suggest
from roofline.memory import plain
from roofline.work import Work

EDIT = re.compile(r":(?=[a-z-]+=)")
FLAGS = {option.flag.lstrip("-"): option for option in EDITS}


@dataclass(frozen=True)
class Place:
    """A point with what a comparison adds to it.

    Attributes:
        flops: per token, by role; see ``roofline.breakdown``.
        largest: the largest batch that fits at its context; None where nothing limits it.
        best: the point at that batch; None where not even one sequence fits, or nothing limits it.
    """

    point: Point
    flops: dict[str, Any]
    largest: int | None
    best: Point | None


@dataclass(frozen=True)
class Column:
    """One model, edited or not, at every point of a question.

    Attributes:
        variant: the model. question: sizes and GPUs.
    """

    variant: Variant
    question: Question

    @property
    def label(self) -> str:
        """The model's name, with its edits."""
        return " ".join((self.variant.model.name, *self.variant.flags))

    @cached_property
    def places(self) -> list[Place]:
        """All points, the batch running fastest; the largest batch is searched once per GPU and context."""
        found: dict[Any, tuple[int | None, Point | None]] = {}
        places = []
        for point in self.question.points(self.variant):
            where = (point.accelerator.id, point.fraction, point.context)
            if where not in found:
                found[where] = self._best(point)
            source = source_length(self.variant.model, self.question.source)
            flops = flops_by_role(self.variant.model, Work(1, 1, point.context, all_logits=True, source=source))
            places.append(Place(point, flops, *found[where]))
        return places

    def _best(self, point: Point) -> tuple[int | None, Point | None]:
        size = largest_batch(self.question, point, point.context).size
        if not size:
            return size, None
        deployment = self.question.deployment(self.variant, point.accelerator, point.fraction)
        return size, self.question.point(self.variant, deployment, size, point.context, None, None)

    def notes(self, places: Sequence[Place]) -> Iterator[str]:
        """What was assumed about the model at some of its places."""
        yield from model_notes(self.variant.model, [place.point.accelerator for place in places])
        yield from beyond(self.variant.model, max(place.point.context for place in places))


def record(column: Column, place: Place, assumes: Sequence[str]) -> dict[str, Any]:
    """All figures of one model at one point, under keys that carry their unit; nothing rounded."""
    model, step, best = column.variant.model, place.point.step, place.best
    fixed = model.state_bytes_per_sequence
    return {
        "schema": SCHEMA,
        "model": model.name,
        "edits": list(column.variant.flags),
        "gpu": step.gpu,
        "batch": step.batch,
        "context_tokens": place.point.context,
        "params": model.params,
        "active_params": model.active_params,
        "weight_bytes": plain(model.weight_bytes),
        "kv_bytes_per_token": plain(kv_bytes_per_token(model)),
        "kv_bytes_per_sequence": plain(state_bytes(column, place) - fixed),
        "state_bytes_per_sequence": fixed,
        "flop_per_token": plain(sum(place.flops.values())),
        "flop_per_token_by_part": {role: plain(amount) for role, amount in place.flops.items()},
        "intensity_flop_per_byte": float(step.cost.intensity),
        "required_bytes": plain(step.memory.required_bytes),
        "memory_fraction": float(place.point.fraction),
        "fits": step.memory.fits,
        "tpot_bound_s": step.bound_s,
        "output_tok_per_s_bound": step.output_tok_per_s,
        "bound_by": step.bound_by,
        "largest_batch": place.largest,
        "largest_batch_tpot_bound_s": best.step.bound_s if best else None,
        "largest_batch_output_tok_per_s_bound": best.step.output_tok_per_s if best else None,
        "provenance": "datasheet",
        "assumes": list(assumes),
        "not_modelled": not_modelled(model, [place.point]),
    }


def state_bytes(column: Column, place: Place) -> Any:
    """Bytes of state of one sequence: what grows and what is fixed."""
    model = column.variant.model
    return model.state_bytes(place.point.context, source_length(model, column.question.source))


def _own_edits(text: str) -> tuple[str, Chosen]:
    """A model and the edits behind its name: "llama-3.1-8b:kv-heads=2:kv-dtype=fp8"."""
    if Path(text).exists():
        return text, Chosen({})
    name, *terms = EDIT.split(text)
    values: dict[str, list[Any]] = {}
    for term in terms:
        flag, _, value = term.partition("=")
        if flag not in FLAGS:
            raise InputError(f"model: unknown edit {flag!r} in {text!r:.80}.{suggest(flag, FLAGS)} Known: {', '.join(FLAGS)}")
        if FLAGS[flag].name in values:
            raise InputError(f"model: the edit {flag!r} stands twice in {text!r:.80}")
        values[FLAGS[flag].name] = FLAGS[flag].read([value], flag)
    return name, Chosen(values)


def columns(
    texts: Sequence[str], shared: Chosen, accelerators: Sequence[Accelerator], batches: Sequence[int], contexts: Sequence[int],
    fractions: Sequence[Fraction], source: int | None,
) -> list[Column]:  # fmt: skip
    """A column for each model and each combination of its own edits with those that all models share.

    Raises InputError for an unknown model or edit, or an edit that does not apply to one of the models.
    """
    found = []
    for text in texts:
        name, own = _own_edits(text)
        model = load_model(name)
        question = Question(
            accelerators, batches, contexts, fractions=fractions, source=source if model.encoder is not None else None
        )
        nothing: list[tuple[Edit, ...]] = [()]
        for first in list(own.combinations()) or nothing:
            for then in list(shared.combinations()) or nothing:
                edits = (*first, *then)
                found.append(Column(Variant(tuple(edit.flag for edit in edits), apply(model, edits)), question))
    return found
