"""Drafts that live on the target's hidden state: Medusa heads, and the step of an EAGLE head.

Both are models of their own for the sake of cost: what they read, compute and store beside the target. Embedding and head
that they share with the target are read and not stored again.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from roofline.components.draft_heads import MedusaHeads
from roofline.components.linear import Embedding, Linear
from roofline.components.mixing import Norm
from roofline.errors import InputError, UnsupportedModel
from roofline.model import Model

MEDUSA_HEADS = 5
"""Heads of the released Medusa models."""
MOST_HEADS = 64


def table_of(model: Model) -> Embedding:
    """The embedding table of a decoder. Raises UnsupportedModel for a model without one, without layers or with an encoder."""
    table = next((c for c in model.embedding if isinstance(c, Embedding)), None)
    if table is None or not model.layers or model.encoder is not None:
        raise UnsupportedModel(f"{model.name}: a draft of its own is modelled for decoders behind an embedding table only")
    return table


def shared(components: tuple[Any, ...]) -> tuple[Any, ...]:
    """Components of the target as a draft reads them: stored by the target."""
    return tuple(replace(c, tied=True) if isinstance(c, (Embedding, Linear)) else c for c in components)


def medusa_heads(model: Model, heads: int = MEDUSA_HEADS, layers: int = 1) -> Model:
    """Heads on the target's last hidden state, which one pass runs all: the first guesses the token after the target's own.

    Raises InputError for a number of heads that is not from 1 to ``MOST_HEADS``.
    """
    if not 1 <= heads <= MOST_HEADS:
        raise InputError(f"draft: {heads} Medusa heads are out of range; give 1 to {MOST_HEADS}")
    table = table_of(model)
    head = MedusaHeads(table.width, table.vocabulary, heads, layers, weight=table.weight, activation=table.activation)
    assumes = (f"draft: {heads} Medusa heads of {layers} residual layer{'s' if layers > 1 else ''}, in one pass",)
    return Model(f"{model.name} Medusa heads", (), (), (), (head,), assumes=assumes)


def eagle_step(model: Model) -> Model:
    """One step of EAGLE: the next hidden state from the last one and the embedding of the token that followed it.

    A projection with bias of both onto the width, one layer like the target's last without the norm in front of it, the
    target's head. Source: Li et al. 2024 (arXiv 2401.15077), section 4.1, and its released heads.
    """
    table = table_of(model)
    join = Linear(2 * table.width, table.width, True, table.weight, table.activation, name="draft.join")
    blocks = model.layers[-1].blocks
    layer = replace(model.layers[-1], blocks=blocks[1:] if isinstance(blocks[0], Norm) else blocks)
    assumes = ("draft: one layer like the target's last behind a projection, without its first norm, as EAGLE has it",)
    return Model(f"{model.name} EAGLE head", (*shared(model.embedding), join), (layer,), (), shared(model.head), assumes=assumes)
