"""What Kimi-K3 adds to latent attention and to the residual stream: an output gate, and attention over depth.

Source: the published configuration of Kimi-K3 and vLLM's model of it (vllm/models/kimi_k3), read for shapes.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, ClassVar

from roofline.components.attention import GATE_FLOPS
from roofline.components.base import Block, Component, Params
from roofline.components.linear import Linear
from roofline.components.mixing import RMS_FLOPS, Elementwise
from roofline.components.mla import MLA
from roofline.cost import Cost
from roofline.formats import BF16, Format
from roofline.work import Batch

DEPTH_FLOPS = 6
"""Elementwise FLOPs of attention over depth per element of a candidate: mean square (2), score (2), weighted sum (2)."""


@dataclass(frozen=True)
class GatedLatentAttention(Block):
    """Latent attention whose output passes a sigmoid gate, projected from the residual stream: ``D N value_dim`` more.

    Attributes:
        attention: the latent attention. gate: storage of the gate's projection.
    """

    attention: MLA
    gate: Format = BF16
    name: str = "attention"

    def prefill_form(self) -> Component:
        """The gate around the prefill form of the attention."""
        form = self.attention.prefill_form()
        return replace(self, attention=form) if isinstance(form, MLA) else self

    @cached_property
    def parts(self) -> tuple[Component, ...]:
        inner, same = self.attention, self.attention.activation
        width = inner.N * inner.value_width
        return (
            *inner.parts[:-1],
            Linear(inner.D, width, False, self.gate, same, name="gate_proj"),
            Elementwise(2 * width, width, GATE_FLOPS * width, same, name="gate"),
            inner.parts[-1],
        )


@dataclass(frozen=True)
class DepthAttention(Component):
    """Attention over depth in place of a residual addition, one kernel: a softmax over the sums of earlier blocks.

    Each token weighs ``blocks`` sums of finished blocks of layers and the running sum of the open one by a learned
    query against their normalised values, and a norm follows. Reads ``(blocks + 2) D`` elements per token (the last
    output is added to the running sum), writes ``2 D``.

    Attributes:
        D: width. blocks: finished blocks. normed: whether the norm in front of the next mixer is fused into it.
    """

    kind: ClassVar[str] = "norm"

    D: Any
    blocks: int
    normed: bool = True
    weight: Format = BF16
    activation: Format = BF16
    name: str = "depth_attention"

    def cost(self, work: Batch) -> Cost:
        tokens = work.tokens
        candidates = self.blocks + 1
        flops = DEPTH_FLOPS * candidates + 1 + (RMS_FLOPS if self.normed else 0)
        return Cost(
            {"vector": (flops * self.D) * tokens, "special": candidates * tokens},
            {
                "weights": self.weight.bytes(self._learned),
                "activations": self.activation.bytes((self.blocks + 2) * self.D) * tokens,
            },
            {"activations": self.activation.bytes(2 * self.D) * tokens},
            1,
        )

    @property
    def _learned(self) -> Any:
        return (3 if self.normed else 2) * self.D

    def params(self) -> Params:
        return {self.weight: self._learned}
