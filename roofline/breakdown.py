"""FLOPs of a step by what they are for: attention, projections, feed-forward, experts, mixers, head."""

from __future__ import annotations

from typing import Any

from roofline.components.base import Component
from roofline.cost import MATRIX_UNITS
from roofline.model import Model
from roofline.work import Batch

ROLES = ("attention", "index", "mixers", "projections", "feed-forward", "experts", "head", "other", "elementwise")
"""In the order in which tables show them."""

KINDS = {
    "attention": "attention", "position_bias": "attention", "index_scores": "index", "scan": "mixers", "delta_rule": "mixers",
    "convolution": "mixers",
}  # fmt: skip
NAMES = {
    "moe.": "experts", "mlp.": "feed-forward", "ffn_": "feed-forward", "index_": "index", "head": "head",
    **dict.fromkeys(("altup.", "laurel.", "layer_input.", "layer_embedding.", "hyper_"), "other"),
}  # fmt: skip
"""Beginning of a matmul's name -> its role; every other matmul projects into or out of a mixer."""


def role_of(kernel: Component) -> str:
    """What the matmuls of a kernel are for: one of ``ROLES``.

    "index" is all of a sparse attention's indexer; "mixers" are scans, delta rules and convolutions, whose projections
    count as "projections" like those of attention; "other" widens or mixes the residual stream.
    """
    if kernel.kind in KINDS:
        return KINDS[kernel.kind]
    return next((role for start, role in NAMES.items() if kernel.name.startswith(start)), "projections")


def flops_by_role(model: Model, work: Batch) -> dict[str, Any]:
    """FLOPs of one step by role, in the order of ``ROLES``; only roles that the model has.

    Each role counts the FLOPs of the matrix units, "mixers" all of theirs, because recurrences run elsewhere in a decode
    step; "elementwise" is the rest: norms, rotations, softmax, activations. The sum is every FLOP of the step.
    """
    found: dict[str, Any] = {}
    for number, kernel in model.counted:
        role = role_of(kernel)
        for unit, amount in kernel.cost(work).flops.items():
            name = role if unit in MATRIX_UNITS or role == "mixers" else "elementwise"
            found[name] = found.get(name, 0) + number * amount
    return {role: found[role] for role in ROLES if role in found}
