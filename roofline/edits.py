"""What-if edits: Model -> Model, chained in order.

Blocks are value objects, so an edit is a replacement of fields: the number of key-value heads, a window, a storage
format. An edit that finds nothing to change is an error, never a silent no-op.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any

from roofline.components.attention import AttentionBlock
from roofline.components.base import Component
from roofline.errors import InputError
from roofline.formats import Format, format_named
from roofline.model import Model

Change = Callable[[Component], Component]

WEIGHT_FIELDS = ("weight", "shared_weight")


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


def map_component(component: Component, change: Change) -> Component:
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
    inner: Component = replace(component, **changed) if changed else component
    return change(inner)


def map_layers(model: Model, change: Change) -> Model:
    """The model with ``change`` applied to every component of every layer; equal layers stay one object."""
    done = {id(layer): map_component(layer, change) for layer in model.layers}
    return replace(model, layers=tuple(done[id(layer)] for layer in model.layers))


def map_blocks(model: Model, kind: type[Component], change: Callable[[Any], Component], flag: str, what: str) -> Model:
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
        raise InputError(f"{flag}: {model.name} has no {what} to change")
    return edited


def _restore(component: Component, fmt: Format) -> Component:
    """A component whose weights are stored in ``fmt``; norms, and tables of small vectors, keep theirs."""
    if component.kind == "norm" or not is_dataclass(component):
        return component
    names = {item.name for item in fields(component)}
    updates: dict[str, Any] = {
        name: fmt for name in WEIGHT_FIELDS if name in names and isinstance(getattr(component, name), Format)
    }
    if updates and "overrides" in names:
        updates["overrides"] = ()
    return replace(component, **updates) if updates else component


def dtype(name: str) -> Edit:
    """Store the weights in another format.

    A 16- or 32-bit format applies to every matrix and table; a smaller one to the matrices inside the layers only:
    embedding, head and norms keep theirs, as quantised checkpoints do.
    """
    fmt = format_named(name, "--dtype")
    everywhere = fmt.element_bits >= 16

    def change(model: Model) -> Model:
        def one(component: Component) -> Component:
            return _restore(component, fmt)

        edited = map_layers(model, one)
        if everywhere:
            edited = replace(
                edited,
                embedding=tuple(map_component(c, one) for c in edited.embedding),
                head=tuple(map_component(c, one) for c in edited.head),
            )
        return edited

    note = "" if everywhere else f"{fmt.name} weights inside the layers; embedding, head and norms as stored"
    return Edit(f"--dtype {name}", change, note)


def kv_dtype(name: str) -> Edit:
    """Store cached keys, values and latents in another format."""
    fmt = format_named(name, "--kv-dtype")

    def change(model: Model) -> Model:
        found = 0

        def one(component: Component) -> Component:
            nonlocal found
            if isinstance(getattr(component, "kv", None), Format):
                found += 1
                return replace(component, kv=fmt)  # type: ignore[type-var]
            return component

        edited = map_layers(model, one)
        if not found:
            raise InputError(f"--kv-dtype: {model.name} caches no keys and values")
        return edited

    return Edit(f"--kv-dtype {name}", change)


def kv_heads(number: int) -> Edit:
    """Give every attention layer ``number`` key-value heads: fewer share more queries (GQA), 1 is MQA."""

    def one(block: AttentionBlock) -> AttentionBlock:
        if number < 1 or block.N % number:
            raise InputError(f"--kv-heads: {number} does not divide the {block.N} query heads")
        return replace(block, K=number)

    return Edit(
        f"--kv-heads {number}", lambda model: map_blocks(model, AttentionBlock, one, "--kv-heads", "attention with key-value heads")
    )


def window(tokens: int) -> Edit:
    """Let every causal attention layer see the last ``tokens`` tokens only."""
    if tokens < 1:
        raise InputError(f"--window: {tokens} is out of range; give 1 or more tokens")

    def one(block: AttentionBlock) -> AttentionBlock:
        return replace(block, mask="window", size=tokens) if block.mask in ("causal", "window") else block

    return Edit(f"--window {tokens}", lambda model: map_blocks(model, AttentionBlock, one, "--window", "causal attention"))


def unfused() -> Edit:
    """The unfused baseline: scores written to memory and read back."""
    return Edit(
        "--attention unfused",
        lambda model: map_blocks(
            model, AttentionBlock, lambda block: replace(block, fused=False), "--attention unfused", "softmax attention"
        ),
    )
