"""Kimi delta attention token by token: the gated delta rule with a decay per channel of a key.

The kernel is ``gated_delta_step``'s, with ``g [K]`` per head in place of one number: ``S = diag(exp(g)) S``, and the rest as
there. Every head has keys of its own, and its state is kept in fp32.
"""

from __future__ import annotations

from typing import Any

from roofline.kernels.fixed_state import STEP_TOLERANCE
from roofline.kernels.gated_delta_step import Delta, expected, inputs, launch, library, reference
from roofline.kernels.spec import Build, Spec

CHANNEL: dict[str, Any] = {"by_channel": True}
CASES = (
    Delta("ragged", "bf16", (2, 1, 3), 5, 5, 20, 12, **CHANNEL),
    Delta("decode", "bf16", (1, 1), 3, 3, 16, 24, "bf16", **CHANNEL),
    Delta("several-blocks", "fp16", (1, 2), 2, 2, 300, 19, **CHANNEL),
    Delta("single", "fp32", (4,), 1, 4, 9, 5, **CHANNEL),
)
KIMI_LINEAR: dict[str, Any] = {"HK": 32, "H": 32, "K": 128, "V": 128, **CHANNEL}
BUILDS = (Build(Delta("kimi-linear", "bf16", (1,) * 64, **KIMI_LINEAR)),)
MEASURED = (Delta("kimi-linear-256", "bf16", (1,) * 256, **KIMI_LINEAR),)
SPEC = Spec("kda_step", "DeltaRule", CASES, inputs, reference, launch, expected, STEP_TOLERANCE, BUILDS, MEASURED, library)
