"""What-if edits: Model -> Model, chained in order.

Blocks are value objects, so an edit is a replacement of fields: the number of key-value heads, a window, a storage
format. An edit that finds nothing to change is an error, never a silent no-op.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any

from roofline.components.base import Component
from roofline.configs.storage import STORED_IN
from roofline.errors import InputError
from roofline.model import Layer, Model

Change = Callable[[Component], Component]


@dataclass(frozen=True)
class Edit:
    """One change of a model.

    Attributes:
        flag: how the command line spells it ("--kv-heads 8").
        change: what it does to a model; raises InputError when it does not apply.
        note: what the edit assumes, "" for nothing.
    """

    flag: str
    change: Callable[[Model], Model]
    note: str = ""


def apply(model: Model, edits: Sequence[Edit]) -> Model:
    """The model after all edits, in order. Raises InputError naming the edit that does not apply."""
    for edit in edits:
        changed = edit.change(model)
        notes = (edit.note,) if edit.note and edit.note not in changed.assumes else ()
        model = replace(changed, assumes=(*changed.assumes, *notes))
    return model


def restored(model: Model) -> Model:
    """The model without the note that names the formats that its config stores weights in, once they are others."""
    return replace(model, assumes=tuple(note for note in model.assumes if not note.startswith(STORED_IN)))


def map_component(component: Component, change: Change) -> Any:
    """``change`` applied to a component and, where it holds others as fields, to them first."""
    if not is_dataclass(component):
        return change(component)
    updates: dict[str, Any] = {}
    for item in fields(component):
        value = getattr(component, item.name)
        if isinstance(value, Component):
            updates[item.name] = map_component(value, change)
        elif isinstance(value, tuple) and value and all(isinstance(entry, Component) for entry in value):
            updates[item.name] = tuple(map_component(entry, change) for entry in value)
    changed = {name: new for name, new in updates.items() if new != getattr(component, name)}
    return change(replace(component, **changed) if changed else component)


def map_layers(model: Model, change: Change) -> Model:
    """The model with ``change`` applied to every component of every layer; equal layers stay one object."""
    done = {id(layer): map_component(layer, change) for layer in model.layers}
    return replace(model, layers=tuple(done[id(layer)] for layer in model.layers))


def map_blocks(model: Model, kind: Any, change: Callable[[Any], Component], flag: str, what: str) -> Model:
    """``change`` applied to every block of a kind in the layers; InputError when the model has none."""
    found = 0

    def one(component: Component) -> Component:
        nonlocal found
        if not isinstance(component, kind):
            return component
        found += 1
        return change(component)

    edited = map_layers(model, one)
    if not found:
        raise InputError(f"{flag}: {model.name} has no {what} here (edits apply in the order in which they are typed)")
    return edited


def map_layers_in_order(model: Model, kind: Any, change: Callable[[int, Any], Component], flag: str, what: str) -> Model:
    """As ``map_blocks``, with the running number of the block among those of its kind; equal layers stay one object."""
    number = 0
    layers: list[Layer] = []
    made: dict[Layer, Layer] = {}

    def one(component: Component) -> Component:
        nonlocal number
        if not isinstance(component, kind):
            return component
        number += 1
        return change(number - 1, component)

    for layer in model.layers:
        edited = map_component(layer, one)
        layers.append(made.setdefault(edited, edited))
    if number == 0:
        raise InputError(f"{flag}: {model.name} has no {what} here (edits apply in the order in which they are typed)")
    return replace(model, layers=tuple(layers))
