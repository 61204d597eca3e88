"""Minitron: importance of heads, neurons, channels and layers from activations alone, and the network without the least of them.

Scores are taken in one pass over a few sequences: the norm of what a head puts out, the magnitude of a neuron behind the
activation, of a channel behind the norms of all layers, and how far a layer turns the residual stream (one minus the
cosine of what goes in and what comes out). Within a sequence magnitudes are averaged, over sequences their root mean
square is taken. Source: Muralidharan et al. 2024 (arXiv 2407.14679), section 2; block influence: Men et al. 2024 (arXiv
2403.03853).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn

from roofline.edits.edit import Edit
from roofline.edits.structure import prune_depth, prune_width
from roofline.kernels.compression.network import Decoder, watching


@dataclass(frozen=True)
class Importance:
    """Scores, larger for what matters more.

    Attributes:
        heads: ``[layers, N]``. neurons: ``[layers, F]``. channels: ``[D]``. layers: ``[layers]``.
    """

    heads: torch.Tensor
    neurons: torch.Tensor
    channels: torch.Tensor
    layers: torch.Tensor


def _gathered(magnitudes: torch.Tensor) -> torch.Tensor:
    """``[batch, tokens, ...]``: the mean over tokens, the root mean square over the batch."""
    return magnitudes.mean(1).square().mean(0).sqrt()


def importance(network: Decoder, tokens: torch.Tensor) -> Importance:
    """Scores of a decoder on ``tokens [batch, tokens]``."""
    sizes = network.sizes
    heads: list[torch.Tensor] = []
    neurons: list[torch.Tensor] = []
    channels: list[torch.Tensor] = []
    layers: list[torch.Tensor] = []

    def take(path: str, x: torch.Tensor, y: torch.Tensor) -> None:
        if path.endswith("o_proj"):
            heads.append(_gathered(x.unflatten(-1, (sizes.N, sizes.H)).norm(dim=-1)))
        elif path.endswith("down_proj"):
            neurons.append(_gathered(x.abs()))
        elif path.endswith("layernorm"):
            channels.append(_gathered(y.abs()))
        else:
            layers.append((1 - nn.functional.cosine_similarity(x, y, dim=-1)).mean())

    paths = [f"model.layers.{index}" for index in range(sizes.layers)]
    inside = ("self_attn.o_proj", "mlp.down_proj", "input_layernorm", "post_attention_layernorm")
    with watching(network, [*paths, *(f"{path}.{name}" for path in paths for name in inside)], take), torch.no_grad():
        network(tokens)
    return Importance(torch.stack(heads), torch.stack(neurons), torch.stack(channels).sum(0), torch.stack(layers))


@dataclass(frozen=True)
class Pruned:
    """A smaller decoder, and the edits that make the model of the whole one into its model."""

    network: Decoder
    edits: tuple[Edit, ...]


def _best(scores: torch.Tensor, number: int) -> torch.Tensor:
    """Indices of the largest scores, in their own order."""
    return scores.argsort(descending=True, stable=True)[:number].sort().values


def _kept_heads(scores: torch.Tensor, K: int, heads: int, groups: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(query heads, key-value heads): the best ``groups`` of K by the sum of their scores, and the best heads in each."""
    by_group = scores.view(K, -1)
    kept = _best(by_group.sum(1), groups)
    best = [_best(by_group[group], heads // groups) + int(group) * by_group.shape[1] for group in kept]
    return torch.cat(best), kept


def _rows(heads: torch.Tensor, H: int) -> torch.Tensor:
    """Rows of a projection that belong to heads."""
    return (heads[:, None] * H + torch.arange(H, device=heads.device)).flatten()


def prune(
    network: Decoder, scores: Importance, *, hidden: int | None = None, ffn: int | None = None, heads: int | None = None,
    kv_heads: int | None = None, layers: int | None = None,
) -> Pruned:  # fmt: skip
    """The decoder with only the most important channels, neurons, heads and layers; what is None stays whole.

    Key-value heads go with all their query heads, those with the least sum of scores first; query heads go evenly from the
    groups that stay. Without ``heads``, groups keep their size. Raises ValueError where a size is not between 1 and the
    decoder's, or heads do not divide over the groups.
    """
    sizes = network.sizes
    if heads is None and kv_heads is not None:
        heads = sizes.N // sizes.K * kv_heads
    wanted = {"D": hidden, "F": ffn, "N": heads, "K": kv_heads, "layers": layers}
    for name, size in wanted.items():
        if size is not None and not 1 <= size <= getattr(sizes, name):
            raise ValueError(f"{name} = {size} is not between 1 and {getattr(sizes, name)}")
    made = network.resized(**{name: size for name, size in wanted.items() if size is not None})
    if made.sizes.N % made.sizes.K or made.sizes.N // made.sizes.K > sizes.N // sizes.K:
        raise ValueError(f"{made.sizes.N} heads do not divide over {made.sizes.K} key-value heads of {sizes.N // sizes.K}")
    kept = _best(scores.layers, made.sizes.layers)
    channels = _best(scores.channels, made.sizes.D)
    source = network.state_dict()
    with torch.no_grad():
        for path, parameter in made.named_parameters():
            parts = path.split(".")
            layer = int(kept[int(parts[2])]) if "layers" in parts else 0
            value = source[".".join([*parts[:2], str(layer), *parts[3:]]) if "layers" in parts else path]
            queries, groups = _kept_heads(scores.heads[layer], sizes.K, made.sizes.N, made.sizes.K)
            rows = {
                "q_proj": _rows(queries, sizes.H), "k_proj": _rows(groups, sizes.H), "v_proj": _rows(groups, sizes.H),
                "gate_proj": _best(scores.neurons[layer], made.sizes.F),
            }  # fmt: skip
            parameter.copy_(_cut(parts[-2], value, channels, {**rows, "up_proj": rows["gate_proj"]}))
    return Pruned(made, _edits(wanted))


def _cut(module: str, value: torch.Tensor, channels: torch.Tensor, rows: dict[str, torch.Tensor]) -> torch.Tensor:
    """A parameter of a module without what is pruned; ``rows``: what stays of the outputs of each projection."""
    if value.dim() == 1:
        return value[channels]
    if module == "o_proj":
        return value[channels][:, rows["q_proj"]]
    if module == "down_proj":
        return value[channels][:, rows["up_proj"]]
    return value[rows[module]][:, channels] if module in rows else value[:, channels]


def _edits(wanted: dict[str, int | None]) -> tuple[Edit, ...]:
    """``--prune-width`` and ``--prune-depth`` of what was cut."""
    flags = {"D": "hidden", "F": "ffn", "N": "heads", "K": "kv-heads"}
    widths = ",".join(f"{flag}={wanted[name]}" for name, flag in flags.items() if wanted[name] is not None)
    depth = wanted["layers"]
    edits = [prune_width(widths)] if widths else []
    return (*edits, *([prune_depth(depth)] if depth is not None else []))
