"""A decoder's linear layers quantised one after another, each against the inputs that the layers before it now give.

This is ``--dtype int4-g128-asym`` done: the matrices inside the layers are stored in the format, embedding, head and norms
stay as they are, which is what the edit assumes.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import nn

from roofline.edits.edit import Edit
from roofline.edits.storage import dtype
from roofline.kernels.compression.affine import Quantized, round_to_nearest
from roofline.kernels.compression.awq import awq
from roofline.kernels.compression.gptq import Hessian, gptq
from roofline.kernels.compression.network import Decoder, watching

METHODS = ("rtn", "gptq", "gptq-order", "awq")


@dataclass(frozen=True)
class Compressed:
    """A quantised decoder.

    Attributes:
        network: with the weights that the codes stand for. weights: module -> what is stored.
        name: of the format. method: one of ``METHODS``.
    """

    network: Decoder
    weights: dict[str, Quantized]
    name: str
    method: str

    @property
    def edit(self) -> Edit:
        """The edit that turns the model of the plain network into that of this one."""
        return dtype(self.name)

    @property
    def stored_bytes(self) -> int:
        """Bytes of all weights: quantised ones as they are packed, the rest in 16 bits. Orders of inputs are not counted."""
        rest: int = sum(
            2 * parameter.numel()
            for path, parameter in self.network.named_parameters()
            if path.removesuffix(".weight") not in self.weights
        )
        return rest + sum(weight.stored_bytes for weight in self.weights.values())


def stages(layer: str) -> Iterator[tuple[str, tuple[str, ...]]]:
    """(who makes the inputs, modules that share them) of one layer in the order in which they run.

    The maker's output channels are the inputs, so that it can be scaled instead of them; "" where nobody can: with grouped
    heads a value serves several inputs of the output projection.
    """
    yield f"{layer}.input_layernorm", tuple(f"{layer}.self_attn.{name}_proj" for name in "qkv")
    yield "", (f"{layer}.self_attn.o_proj",)
    yield f"{layer}.post_attention_layernorm", (f"{layer}.mlp.gate_proj", f"{layer}.mlp.up_proj")
    yield f"{layer}.mlp.up_proj", (f"{layer}.mlp.down_proj",)


def _inputs(network: Decoder, path: str, tokens: torch.Tensor) -> torch.Tensor:
    """What the module at a path sees, ``[tokens, inputs]``."""
    seen: list[torch.Tensor] = []
    with watching(network, [path], lambda _, x, y: seen.append(x.flatten(0, -2))), torch.no_grad():
        network(tokens)
    return torch.cat(seen)


def _one(weight: torch.Tensor, hessian: Hessian | None, name: str, method: str) -> Quantized:
    if hessian is None:
        return round_to_nearest(weight, name)
    return gptq(weight, hessian, name, act_order=method == "gptq-order")


def quantize(network: Decoder, name: str, method: str, tokens: torch.Tensor) -> Compressed:
    """Quantises a copy of a decoder.

    Args:
        name: of the format, "int4-g128-asym". method: "rtn" (to nearest), "gptq", "gptq-order" (inputs with most energy
            first) or "awq". tokens: ``[batch, tokens]``, whose activations GPTQ and AWQ work against.

    Raises ValueError for an unknown method, and for a format or sizes that do not fit.
    """
    if method not in METHODS:
        raise ValueError(f"method {method!r} is none of {', '.join(METHODS)}")
    made = copy.deepcopy(network)
    modules: dict[str, nn.Module] = dict(made.named_modules())
    found: dict[str, Quantized] = {}
    with torch.no_grad():
        for index in range(network.sizes.layers):
            for maker, paths in stages(f"model.layers.{index}"):
                x = _inputs(made, paths[0], tokens)
                weights = [modules[path].weight for path in paths]
                if method == "awq" and maker:
                    best = awq(weights, x, name)
                    parts = best.parts
                    _divide(modules[maker], best.scales)
                    if maker in found:
                        found[maker] = _divided(found[maker], best.scales)
                        modules[maker].weight.copy_(found[maker].dequantized())
                else:
                    hessian = Hessian(x.shape[1], x.device) if method.startswith("gptq") else None
                    if hessian is not None:
                        hessian.add(x)
                    parts = tuple(_one(weight, hessian, name, method) for weight in weights)
                for path, part, weight in zip(paths, parts, weights, strict=True):
                    found[path] = part
                    weight.copy_(part.dequantized())
    return Compressed(made, found, name, method)


def _divide(maker: nn.Module, scales: torch.Tensor) -> None:
    """Divides the output channels of a norm or a linear layer."""
    weight = maker.weight
    weight.div_(scales if weight.dim() == 1 else scales[:, None])


def _divided(weight: Quantized, scales: torch.Tensor) -> Quantized:
    """A quantised weight with its output channels divided: the same codes, other scales."""
    return replace(weight, scales=(weight.scales.float() / scales[:, None]).half())
