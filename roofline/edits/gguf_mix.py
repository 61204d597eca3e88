"""llama.cpp's mixes of k-quants (Q4_K_M, ...): which tensor of which layer is stored in which format.

The rule is that of llama_tensor_get_type in src/llama-quant.cpp of ggml-org/llama.cpp, for models whose queries, keys and
values are tensors of their own and that are quantised without an importance matrix: values and second feed-forward
matrices get more bits, in some layers or in all; the head (or the embedding that serves as one) gets Q6_K; what has one
dimension, and routers, stay in 32 bits.
"""

from __future__ import annotations

from dataclasses import fields, is_dataclass, replace
from fractions import Fraction
from typing import Any, NamedTuple

from roofline.components.attention import AttentionBlock
from roofline.components.base import Component
from roofline.components.feedforward import MLP
from roofline.components.linear import Embedding
from roofline.components.mixing import Norm
from roofline.components.moe import MoE
from roofline.edits.edit import Edit, map_component, map_layers, restored
from roofline.errors import InputError
from roofline.formats import FORMATS, FP16, FP32, Format
from roofline.model import Layer, Model

Q3, Q4, Q5, Q6, Q8 = (FORMATS[name] for name in ("q3_k", "q4_k", "q5_k", "q6_k", "q8_0"))
FALLBACK = {Q3: FORMATS["q4_0"], Q4: FORMATS["q5_0"], Q5: FORMATS["q5_1"], Q6: Q8}
"""Where a row is no whole number of blocks of 256."""
BLOCK, SMALL_BLOCK = 256, 32
FEW_EXPERTS, SEVENTY_BILLION_LAYERS = 8, 80
"""Models of eight experts, and those of eighty layers with grouped queries ("70B"), have rules of their own."""


class Mix(NamedTuple):
    """One mix.

    Attributes:
        base: format of every matrix without a rule.
        value, down: values, and second feed-forward matrices, of (layer, layers).
        out: output projections; few_out: those of models of eight experts.
    """

    base: Format
    value: Any
    down: Any
    out: Format
    few_out: Format


def more_bits(index: int, layers: int) -> bool:
    """Whether a layer gets more bits: the first and the last eighth, and every third between them."""
    edge = layers // 8
    return index < edge or index >= 7 * layers // 8 or (index - edge) % 3 == 2


def _sometimes(base: Format) -> Any:
    return lambda index, layers: Q6 if more_bits(index, layers) else base


def _always(fmt: Format) -> Any:
    return lambda index, layers: fmt


def _first(many: int | Fraction, early: Format, later: Format) -> Any:
    """One format in so many layers, or in such a part of them, from the first on; another behind."""
    return lambda index, layers: early if index < (many if isinstance(many, int) else int(many * layers)) else later


MIXES: dict[str, Mix] = {
    "q3_k_s": Mix(Q3, _always(Q3), _always(Q3), Q3, Q5),
    "q3_k_m": Mix(Q3, _first(2, Q5, Q4), _first(Fraction(1, 16), Q5, Q4), Q4, Q5),
    "q3_k_l": Mix(Q3, _always(Q5), _always(Q5), Q5, Q3),
    "q4_k_s": Mix(Q4, _first(4, Q5, Q4), _first(Fraction(1, 8), Q5, Q4), Q4, Q5),
    "q4_k_m": Mix(Q4, _sometimes(Q4), _sometimes(Q4), Q4, Q5),
    "q5_k_s": Mix(Q5, _always(Q5), _always(Q5), Q5, Q5),
    "q5_k_m": Mix(Q5, _sometimes(Q5), _sometimes(Q5), Q5, Q5),
}
"""Name in lower case -> rule."""


def fitted(fmt: Format, columns: int) -> Format:
    """The format that a matrix with rows of that length gets: another where they are no whole number of blocks."""
    if columns % BLOCK and fmt in FALLBACK:
        fmt = FALLBACK[fmt]
    return FP16 if columns % SMALL_BLOCK else fmt


def with_vectors(model: Model, vectors: Format, router: Format | None) -> Model:
    """The model with norms and biases in one format, and routers in another where one is given."""

    def one(component: Component) -> Component:
        if not is_dataclass(component):
            return component
        changes: dict[str, Any] = {}
        if isinstance(component, Norm):
            changes["weight"] = vectors
        elif isinstance(component, MoE) and router is not None:
            changes["router_weight"] = router
        if any(item.name == "vectors" for item in fields(component)):
            changes["vectors"] = vectors
        return replace(component, **changes) if changes else component

    def all_of(components: tuple[Component, ...]) -> tuple[Component, ...]:
        return tuple(map_component(component, one) for component in components)

    edited = map_layers(model, one)
    return replace(edited, embedding=all_of(model.embedding), final=all_of(model.final), head=all_of(model.head))


def _attention(block: AttentionBlock, mix: Mix, index: int, layers: int, few_experts: bool) -> AttentionBlock:
    """The block with each projection in its format."""
    value = mix.value(index, layers)
    if layers == SEVENTY_BILLION_LAYERS and block.N != block.K and value in (Q3, Q4):
        value = Q5
    wide = block.N * (block.H if block.value_dim is None else block.value_dim)
    found = {
        "q": fitted(mix.base, block.D),
        "k": fitted(Q8 if few_experts else mix.base, block.D),
        "v": fitted(Q8 if few_experts else value, block.D),
        "o": fitted(mix.few_out if few_experts else mix.out, wide),
    }
    base = found["q"]
    return replace(block, weight=base, overrides=tuple((name, fmt) for name, fmt in found.items() if fmt != base))


def _mlp(block: MLP, mix: Mix, index: int, layers: int) -> MLP:
    first, second = fitted(mix.base, block.D), fitted(mix.down(index, layers), block.F)
    return replace(block, weight=first, overrides=(("down", second),) if second != first else ())


def _moe(block: MoE, mix: Mix, index: int, layers: int) -> MoE:
    first, second = fitted(mix.base, block.D), fitted(mix.down(index, layers), block.F)
    return replace(block, weight=first, down_weight=second if second != first else None)


def _refuse(flag: str, what: str) -> InputError:
    return InputError(
        f"{flag}: {what} in the mixes of llama.cpp; only grouped-query attention with dense layers or routed experts is. "
        "Give a GGUF file itself, or one format (q4_k)"
    )


def _layer(layer: Layer, mix: Mix, place: tuple[int, int], few_experts: bool, flag: str) -> Layer:
    """One layer in the formats of the mix; ``place`` is its number and the number of all."""
    blocks: list[Component] = []
    for block in layer.blocks:
        if type(block) is AttentionBlock and not block.shares_kv:
            blocks.append(_attention(block, mix, *place, few_experts))
        elif type(block) is MLP:
            blocks.append(_mlp(block, mix, *place))
        elif type(block) is MoE and block.shared_F == 0 and block.latent is None and not block.bias:
            blocks.append(_moe(block, mix, *place))
        elif isinstance(block, Norm) or not block.params():
            blocks.append(block)
        else:
            raise _refuse(flag, f"a block of kind {type(block).__name__} ({block.name}) has no rule")
    return replace(layer, blocks=tuple(blocks))


def gguf_mix(name: str) -> Edit:
    """Store the weights as llama.cpp's llama-quantize does, tensor by tensor.

    Raises InputError for a model with blocks, an encoder or a table of positions that the rule does not cover.
    """
    mix, flag = MIXES[name.strip().lower()], f"--dtype {name}"

    def change(model: Model) -> Model:
        if model.encoder is not None:
            raise _refuse(flag, "an encoder has no rule")
        if any(getattr(part, "positions", 0) for part in model.embedding):
            raise _refuse(flag, "a learned table of positions has no rule")
        count = len(model.layers)
        experts = {block.E for layer in model.layers for block in layer.blocks if isinstance(block, MoE)}
        made: dict[Layer, Layer] = {}
        layers = []
        for index, layer in enumerate(model.layers):
            edited = _layer(layer, mix, (index, count), experts == {FEW_EXPERTS}, flag)
            layers.append(made.setdefault(edited, edited))
        tied = any(getattr(part, "tied", False) for part in model.head)
        columns = next(part.width for part in model.embedding if isinstance(part, Embedding))
        head = fitted(Q6, columns) if columns % BLOCK == 0 else Q8
        table = head if tied else fitted(mix.base, columns)
        embedding = tuple(replace(part, weight=table) if isinstance(part, Embedding) else part for part in model.embedding)
        heads = tuple(replace(part, weight=head) for part in model.head)  # type: ignore[type-var]
        edited_model = replace(model, layers=tuple(layers), embedding=embedding, head=heads)
        return restored(with_vectors(edited_model, FP32, FP32))

    note = f"{name.upper()} as llama.cpp mixes it for separate queries, keys and values, without an importance matrix"
    return Edit(flag, change, note)
