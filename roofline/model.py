"""Model: an embedding, a stack of layers, a head; what it costs, stores and remembers.

Layers are value objects: equal layers are counted once and multiplied, so that an 80-layer model costs ten evaluations.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from fractions import Fraction
from functools import cached_property
from typing import Any, ClassVar

from roofline.components.base import Block, Component, Params, State, merge_params, weight_bytes
from roofline.cost import Cost
from roofline.formats import BF16
from roofline.numeric import ceil_div, maximum, scale, whole
from roofline.work import Batch


@dataclass(frozen=True)
class Layer(Block):
    """One layer: blocks that run one after another (norm, mixer, norm, feed-forward)."""

    kind: ClassVar[str] = "layer"

    blocks: tuple[Component, ...]
    name: str = "layer"

    @cached_property
    def parts(self) -> tuple[Component, ...]:
        return tuple(part for block in self.blocks for part in block.parts)

    def prefill_form(self) -> Layer:
        """The layer as a prefill runs it; itself where no block changes."""
        blocks = tuple(block.prefill_form() for block in self.blocks)
        return self if all(new is old for new, old in zip(blocks, self.blocks, strict=True)) else replace(self, blocks=blocks)


def count_equal(components: Iterable[Component]) -> tuple[tuple[int, Component], ...]:
    """(count, component) for equal components, in the order of first appearance."""
    counts: dict[Component, int] = {}
    for component in components:
        counts[component] = counts.get(component, 0) + 1
    return tuple((number, component) for component, number in counts.items())


@dataclass(frozen=True)
class Encoder:
    """The first half of an encoder-decoder: runs once per request over the second sequence.

    Attributes:
        before: what turns the source into a sequence of the width of the layers.
        layers: its layers.
        after: final norm.
        tokens: source tokens per sequence when they are fixed by the config (Whisper: 1500 frames), else None.
    """

    before: tuple[Component, ...]
    layers: tuple[Layer, ...]
    after: tuple[Component, ...] = ()
    tokens: int | None = None

    @cached_property
    def counted(self) -> tuple[tuple[int, Component], ...]:
        """(count, kernel) of everything that runs, equal kernels counted once."""
        return count_equal(part for c in (*self.before, *self.layers, *self.after) for part in c.parts)

    def cost(self, work: Batch) -> Cost:
        """Cost of encoding: ``work.T`` source tokens for each sequence."""
        return Cost.total((number, part.cost(work)) for number, part in self.counted)

    def params(self) -> Params:
        return merge_params((1, c.params()) for c in (*self.before, *self.layers, *self.after))


@dataclass(frozen=True)
class Model:
    """A language model.

    Attributes:
        name: for output.
        embedding: components in front of the layers (the embedding, and what follows it).
        layers: all layers in order; equal ones may be one object.
        final: components between the last layer and the head (the final norm).
        head: output projection; empty for a model without one.
        encoder: for encoder-decoders.
        tower_params: parameters of vision or audio towers, which stand outside the token path.
        max_context: longest context the config admits, None if it does not say.
        assumes: what was assumed where the config is silent.
        not_modelled: what the config has and the token path leaves out.
        denoiser: whether it fills in masked tokens instead of writing one after another.
    """

    name: str
    embedding: tuple[Component, ...]
    layers: tuple[Layer, ...]
    final: tuple[Component, ...]
    head: tuple[Component, ...]
    encoder: Encoder | None = None
    tower_params: int = 0
    max_context: int | None = None
    assumes: tuple[str, ...] = ()
    not_modelled: tuple[str, ...] = ()
    family: str = field(default="", compare=False)
    denoiser: bool = False

    @cached_property
    def groups(self) -> tuple[tuple[int, Layer], ...]:
        """(count, layer) for equal layers, in the order of first appearance."""
        unique: dict[int, Layer] = {id(layer): layer for layer in self.layers}
        counts: dict[Layer, int] = {}
        numbers: dict[int, int] = {}
        for layer in self.layers:
            numbers[id(layer)] = numbers.get(id(layer), 0) + 1
        for key, layer in unique.items():
            counts[layer] = counts.get(layer, 0) + numbers[key]
        return tuple((number, layer) for layer, number in counts.items())

    @cached_property
    def sections(self) -> tuple[tuple[int, Component], ...]:
        """(count, component): what stands in front of the layers, the grouped layers, what follows them."""
        around = [(1, component) for component in self.embedding]
        behind = [(1, component) for component in (*self.final, *self.head)]
        return (*around, *self.groups, *behind)

    @cached_property
    def counted(self) -> tuple[tuple[int, Component], ...]:
        """(count, kernel) of everything that one step runs, equal kernels counted once."""
        counts: dict[Component, int] = {}
        for number, component in self.sections:
            for part in component.parts:
                counts[part] = counts.get(part, 0) + number
        return tuple((number, part) for part, number in counts.items())

    @cached_property
    def for_prefill(self) -> Model:
        """The model as a prefill runs it: latent attention expanded, recurrences in chunks. Itself where nothing changes."""
        forms = {id(layer): layer.prefill_form() for layer in self.layers}
        layers = tuple(forms[id(layer)] for layer in self.layers)
        return self if all(new is old for new, old in zip(layers, self.layers, strict=True)) else replace(self, layers=layers)

    def cost(self, work: Batch) -> Cost:
        """FLOPs, bytes and launches of one step of the decoder over ``work``."""
        return Cost.total([(number, part.cost(work)) for number, part in self.counted])

    def step(self, work: Batch) -> tuple[Cost, Any]:
        """(cost, workspace): as ``cost``, with the bytes of activations that the greediest kernel holds at once.

        The workspace is the largest sum of one kernel's activation inputs and outputs: what the maths needs beside
        weights and state, not what an engine reserves.
        """
        workspace: Any = 0

        def costs() -> Iterator[tuple[int, Cost]]:
            """One kernel after another, so that the arrays of a sweep are freed before the next ones are made."""
            nonlocal workspace
            for number, part in self.counted:
                cost = part.cost(work)
                workspace = maximum(workspace, cost.activation_bytes)
                yield number, cost

        total = Cost.total(costs())
        return total, workspace

    def _components(self) -> Iterator[tuple[int, Component]]:
        yield from self.sections
        if self.encoder is not None:
            yield from ((1, c) for c in (*self.encoder.before, *self.encoder.layers, *self.encoder.after))

    @cached_property
    def params_by_format(self) -> Params:
        """Stored parameters of the text path by format: decoder, embeddings, head, and the encoder where there is one."""
        return merge_params((number, component.params()) for number, component in self._components())

    @cached_property
    def params(self) -> int:
        """Parameters of the text path: decoder, embeddings, head; the encoder too where the model has one."""
        return int(sum(self.params_by_format.values()))

    @property
    def params_total(self) -> int:
        """``params`` with every vision or audio tower that the config defines."""
        return self.params + self.tower_params

    @cached_property
    def active_params(self) -> int:
        """Parameters that one token meets, input embedding included: all of them, less the experts not chosen."""
        return int(sum(number * component.active_params() for number, component in self._components()))

    @cached_property
    def weight_bytes(self) -> Any:
        """Whole bytes of all stored weights, scales and zero points included; towers in the format of the embedding."""
        text = weight_bytes(self.params_by_format)
        tower = self.embedding[0].params() if self.tower_params else {}
        return ceil_div(text + sum(fmt.bytes(self.tower_params) for fmt in list(tower)[:1]), 1)

    @cached_property
    def lecture_weight_bytes(self) -> Any:
        """Bytes of all stored weights but those of norms, as the lecture counts parameters."""
        return whole(weight_bytes(merge_params((number, part.params()) for number, part in self.counted if part.kind != "norm")))

    @cached_property
    def state(self) -> tuple[tuple[int, State], ...]:
        """(count, state) of the layers that keep any."""
        return tuple((number, found) for number, component in self.sections if (found := component.state()))

    def state_bytes(self, cached: Any, source: Any = 0) -> Any:
        """Bytes of state of one sequence with ``cached`` tokens behind it: KV cache and fixed state, as stored."""
        total: Any = 0
        for number, pieces in self.state:
            for piece in pieces:
                total = total + number * piece.bytes(cached, source)
        return total

    def _per_sequence(self, grows_with: str) -> Iterator[tuple[int, Any]]:
        for number, pieces in self.state:
            for piece in pieces:
                if piece.grows_with == grows_with:
                    yield number, piece

    @property
    def reads_source_text(self) -> bool:
        """Whether an encoder reads a text of any length."""
        return self.encoder is not None and bool(self.encoder.layers) and self.encoder.tokens is None

    @property
    def kv_bytes_per_token(self) -> int:
        """Bytes of bf16 state that one more token adds over all layers, below any window.

        Where an encoder reads text, whose length is as free as the decoder's, a token of each side is counted (T5); a
        source of fixed length (Whisper's frames) or of another kind (image tokens) does not grow with the text.
        """
        growing = [*self._per_sequence("token"), *(self._per_sequence("source") if self.reads_source_text else ())]
        per_token = sum(Fraction(number * piece.elements, piece.every) for number, piece in growing)
        return int(scale(per_token, BF16.bytes_per_element))

    @property
    def state_elements_per_sequence(self) -> int:
        """Elements of fixed recurrent state of one sequence, whatever its length."""
        return sum(number * piece.elements for number, piece in self._per_sequence("nothing"))

    @property
    def state_bytes_per_sequence(self) -> int:
        """Bytes of fixed recurrent state of one sequence, in the formats that the config names."""
        return int(sum(number * piece.bytes(0) for number, piece in self._per_sequence("nothing")))
