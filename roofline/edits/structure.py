"""Edits of structure: width, depth and experts, as Minitron prunes them (Muralidharan et al. 2024, arXiv 2407.14679)."""

from __future__ import annotations

import re
from dataclasses import is_dataclass, replace
from typing import Any

from roofline.components.attention import AttentionBlock
from roofline.components.base import Component
from roofline.components.feedforward import MLP
from roofline.components.linear import Embedding, Linear
from roofline.components.mixing import Norm
from roofline.components.moe import MoE
from roofline.edits.edit import Change, Edit, map_component, map_layers
from roofline.errors import InputError
from roofline.model import Model
from roofline.numeric import whole

WIDTHS = {"hidden": "D", "ffn": "F", "heads": "N", "kv-heads": "K"}
"""What a width edit may set, and the field it sets."""


def _pairs(text: str, flag: str, known: dict[str, str]) -> dict[str, int]:
    found = {}
    for part in text.split(","):
        match = re.fullmatch(r"\s*([a-z-]+)=(\d+)\s*", part)
        if match is None or match[1] not in known:
            raise InputError(f"{flag}: {part!r} is not one of {', '.join(f'{name}=SIZE' for name in known)}")
        if int(match[2]) < 1:
            raise InputError(f"{flag}: {match[1]}={match[2]} is out of range; give a size of 1 or more")
        found[match[1]] = int(match[2])
    return found


def prune_width(text: str) -> Edit:
    """Narrow a model: "hidden=4096,ffn=16384,heads=48,kv-heads=8" sets the widths that it names.

    Heads keep their width. Every matrix, norm and table that touches the residual stream follows ``hidden``.
    """
    sizes = _pairs(text, "--prune-width", WIDTHS)

    def change(model: Model) -> Model:
        old = next((c.width for c in model.embedding if isinstance(c, Embedding)), 0)
        new = sizes.get("hidden", old)

        def one(component: Component) -> Component:
            if new != old:
                component = _resized(component, old, new)
            if isinstance(component, MLP) and "ffn" in sizes:
                component = _smaller(component, "F", sizes["ffn"], "ffn")
            return _fewer_heads(component, sizes) if isinstance(component, AttentionBlock) else component

        if new > old:
            raise InputError(f"--prune-width: hidden={new} is not below the model's {old}")
        return _map_everywhere(model, one)

    return Edit(f"--prune-width {text}", change)


def _fewer_heads(block: AttentionBlock, sizes: dict[str, int]) -> AttentionBlock:
    for name in ("heads", "kv-heads"):
        if name in sizes:
            block = _smaller(block, WIDTHS[name], sizes[name], name)
    if block.N % block.K:
        raise InputError(f"--prune-width: {block.K} key-value heads do not divide {block.N} heads")
    return block


def _map_everywhere(model: Model, change: Change) -> Model:
    """The model with ``change`` applied to every component, those around the layers included."""
    edited = map_layers(model, change)

    def each(components: tuple[Component, ...]) -> tuple[Component, ...]:
        return tuple(map_component(component, change) for component in components)

    return replace(edited, embedding=each(edited.embedding), final=each(edited.final), head=each(edited.head))


def _smaller(block: Any, field: str, size: int, name: str) -> Any:
    if size > getattr(block, field):
        raise InputError(f"--prune-width: {name}={size} is not below the model's {getattr(block, field)}")
    return replace(block, **{field: size})


def _resized(component: Component, old: int, new: int) -> Component:
    """A component that follows the width of the residual stream from ``old`` to ``new``."""
    if isinstance(component, Norm):
        if component.elements != old:
            return component
        return replace(component, elements=new, weights=whole(component.weights // old * new))
    if isinstance(component, Embedding):
        return replace(component, width=new) if component.width == old else component
    if isinstance(component, Linear):
        return replace(
            component,
            inputs=new if component.inputs == old else component.inputs,
            outputs=new if component.outputs == old else component.outputs,
        )
    width = getattr(component, "D", None)
    return replace(component, D=new) if width == old and is_dataclass(component) else component


def prune_depth(layers: int) -> Edit:
    """Keep ``layers`` layers: the first and the last ones, as depth pruning drops the middle of the stack."""

    def change(model: Model) -> Model:
        total = len(model.layers)
        if not 1 <= layers <= total:
            raise InputError(f"--prune-depth: {layers} is not between 1 and the {total} layers of {model.name}")
        front = (layers + 1) // 2
        behind = layers - front
        return replace(model, layers=(*model.layers[:front], *model.layers[total - behind :]))

    return Edit(f"--prune-depth {layers}", change)


def experts(text: str) -> Edit:
    """Another number of experts: "64" keeps the number picked per token, "64:4" sets both.

    A dense model's feed-forward layers become experts of their own width.
    """
    match = re.fullmatch(r"(\d+)(?::(\d+))?", text)
    if match is None or int(match[1]) < 1:
        raise InputError(f"--experts: {text!r} is not a number of experts, or experts and those picked per token, like 64:4")
    number, picked = int(match[1]), int(match[2]) if match[2] else None

    def change(model: Model) -> Model:
        sparse = False

        def routed(component: Component) -> Component:
            nonlocal sparse
            if not isinstance(component, MoE):
                return component
            sparse = True
            return replace(component, E=number, k=component.k if picked is None else picked)

        def dense(component: Component) -> Component:
            if not isinstance(component, MLP):
                return component
            if picked is None:
                raise InputError(f"--experts: {model.name} is dense; say how many experts a token picks, like {number}:2")
            return MoE(
                component.D, component.F, number, picked, gated=component.gated, bias=component.bias,
                weight=component.weight, activation=component.activation,
            )  # fmt: skip

        edited = map_layers(model, routed)
        return edited if sparse else map_layers(model, dense)

    return Edit(f"--experts {text}", change)
