"""Matrix multiplications with stored weights, and the lookup table that feeds them."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar

from roofline.components.base import Component, Params
from roofline.cost import Cost
from roofline.formats import BF16, Format
from roofline.work import Batch


@dataclass(frozen=True)
class Linear(Component):
    """Dense matmul ``[rows, inputs] @ [inputs, outputs]``, one kernel.

    FLOPs ``2 rows inputs outputs``; reads the weights once and ``rows inputs`` activations, writes ``rows outputs``.
    Ignores re-reads of tiles. Source: scaling book, roofline chapter.

    Attributes:
        inputs, outputs: dimensions of the weight.
        bias: whether a bias of ``outputs`` elements is added.
        weight, activation: storage formats; the weight's format decides which unit multiplies.
        stored: elements written per row where the kernel's epilogue reduces the outputs (a fused gate), else None.
        epilogue: elementwise FLOPs per stored element.
        rows: which rows it runs on: "tokens", or "logit_rows" for the head.
        tied: the weights are another component's (a head tied to the embedding): read here, stored there, the bias apart.
        vectors: storage of the bias, None for the activation format.
    """

    kind: ClassVar[str] = "linear"

    inputs: Any
    outputs: Any
    bias: bool = False
    weight: Format = BF16
    activation: Format = BF16
    stored: Any = None
    epilogue: int = 0
    rows: str = "tokens"
    tied: bool = False
    vectors: Format | None = None
    name: str = "linear"

    @property
    def _bias(self) -> Format:
        return self.activation if self.vectors is None else self.vectors

    @cached_property
    def _constants(self) -> tuple[Any, Any, Any, Any, Any]:
        """FLOPs, vector FLOPs, weight bytes, activation bytes read and written; all but the weights per row."""
        stored = self.outputs if self.stored is None else self.stored
        biases = self.outputs if self.bias else 0
        return (
            2 * self.inputs * self.outputs,
            biases + self.epilogue * stored,
            self.weight.bytes(self.inputs * self.outputs) + self._bias.bytes(biases),
            self.activation.bytes(self.inputs),
            self.activation.bytes(stored),
        )

    def cost(self, work: Batch) -> Cost:
        rows = work.tokens if self.rows == "tokens" else getattr(work, self.rows)
        flops, vector, weights, read, written = self._constants
        operations = {self.weight.unit: flops * rows}
        if vector != 0:
            operations["vector"] = vector * rows
        return Cost(operations, {"weights": weights, "activations": read * rows}, {"activations": written * rows}, 1)

    def params(self) -> Params:
        params: Params = {} if self.tied else {self.weight: self.inputs * self.outputs}
        if self.bias:
            params[self._bias] = params.get(self._bias, 0) + self.outputs
        return params


@dataclass(frozen=True)
class Embedding(Component):
    """Lookup of one row per token; no FLOPs. Reads the looked-up rows only, not the table.

    Attributes:
        vocabulary: rows of the table.
        width: elements per row.
        positions: rows of a learned table of positions, looked up and added as well; 0 for none.
        types: rows of further tables that are stored but read once per token (token types), 0 for none.
        tied: whether another component stores the table.
    """

    kind: ClassVar[str] = "embedding"

    vocabulary: Any
    width: Any
    positions: Any = 0
    weight: Format = BF16
    activation: Format = BF16
    tied: bool = False
    name: str = "embedding"

    def cost(self, work: Batch) -> Cost:
        tables = 1 if self.positions == 0 else 2
        elements = self.width * work.tokens
        return Cost(
            {} if tables == 1 else {"vector": elements},
            {"weights": tables * self.weight.bytes(elements)},
            {"activations": self.activation.bytes(elements)},
            1,
        )

    def params(self) -> Params:
        return {} if self.tied else {self.weight: (self.vocabulary + self.positions) * self.width}
