"""Edits of storage: the formats of weights and of cached state."""

from __future__ import annotations

from dataclasses import fields, is_dataclass, replace
from typing import Any

from roofline.components.base import Component
from roofline.edits.edit import Edit, map_component, map_layers, restored
from roofline.edits.gguf_mix import MIXES, gguf_mix
from roofline.errors import InputError
from roofline.formats import Format, format_named
from roofline.model import Model

WEIGHT_FIELDS = ("weight", "shared_weight")


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
    if updates and "down_weight" in names:
        updates["down_weight"] = None
    return replace(component, **updates) if updates else component


def dtype(name: str) -> Edit:
    """Store the weights in another format.

    A 16- or 32-bit format applies to every matrix and table; a smaller one to the matrices inside the layers only:
    embedding, head and norms keep theirs, as quantised checkpoints do. A mix of llama.cpp ("Q4_K_M") gives every tensor
    the format that llama-quantize gives it.
    """
    if name.strip().lower() in MIXES:
        return gguf_mix(name)
    fmt = format_named(name, "--dtype")
    everywhere = fmt.element_bits >= 16

    def change(model: Model) -> Model:
        def one(component: Component) -> Component:
            return _restore(component, fmt)

        edited = map_layers(model, one)
        edited = restored(edited)
        if edited.encoder is not None:
            layers = tuple(map_component(layer, one) for layer in edited.encoder.layers)
            edited = replace(edited, encoder=replace(edited.encoder, layers=layers))
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
