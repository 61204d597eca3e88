"""A small decoder with the modules, names and mathematics of Llama: what the methods of this folder are applied to and shown on.

Its ``config`` is a Hugging Face config of the same sizes, so that the model of the cost side and a network of this side
are two readings of one thing, parameter by parameter.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import nn

ROTARY_BASE = 10000.0
EPSILON = 1e-6


@dataclass(frozen=True)
class Sizes:
    """Dimensions of a decoder: vocabulary, width D, hidden width F, N query and K key-value heads of width H, layers."""

    vocabulary: int
    D: int
    F: int
    N: int
    K: int
    H: int
    layers: int

    def config(self, dtype: str = "float16") -> dict[str, Any]:
        """The config of a Llama of these sizes."""
        return {
            "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": self.vocabulary, "hidden_size": self.D,
            "intermediate_size": self.F, "num_attention_heads": self.N, "num_key_value_heads": self.K, "head_dim": self.H,
            "num_hidden_layers": self.layers, "max_position_embeddings": 2048, "rope_theta": ROTARY_BASE,
            "rms_norm_eps": EPSILON, "tie_word_embeddings": False, "torch_dtype": dtype,
        }  # fmt: skip


class RMSNorm(nn.Module):
    """``x / rms(x) * weight``."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + EPSILON) * self.weight


def turned(x: torch.Tensor) -> torch.Tensor:
    """Rotary embedding of ``x [batch, heads, tokens, H]``, half against half."""
    tokens, H = x.shape[-2:]
    rates = ROTARY_BASE ** (-torch.arange(0, H, 2, dtype=torch.float64, device=x.device) / H)
    angles = torch.arange(tokens, dtype=torch.float64, device=x.device)[:, None] * rates
    cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
    first, second = x.chunk(2, -1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], -1)


class Attention(nn.Module):
    """Causal grouped-query attention."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.H = sizes.H
        self.q_proj = nn.Linear(sizes.D, sizes.N * sizes.H, bias=False)
        self.k_proj = nn.Linear(sizes.D, sizes.K * sizes.H, bias=False)
        self.v_proj = nn.Linear(sizes.D, sizes.K * sizes.H, bias=False)
        self.o_proj = nn.Linear(sizes.N * sizes.H, sizes.D, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (
            projection(x).unflatten(-1, (-1, self.H)).transpose(1, 2) for projection in (self.q_proj, self.k_proj, self.v_proj)
        )
        mixed = nn.functional.scaled_dot_product_attention(turned(q), turned(k), v, is_causal=True, enable_gqa=True)
        out: torch.Tensor = self.o_proj(mixed.transpose(1, 2).flatten(2))
        return out


class MLP(nn.Module):
    """``down(silu(gate(x)) * up(x))``."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(sizes.D, sizes.F, bias=False)
        self.up_proj = nn.Linear(sizes.D, sizes.F, bias=False)
        self.down_proj = nn.Linear(sizes.F, sizes.D, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.down_proj(nn.functional.silu(self.gate_proj(x)) * self.up_proj(x))
        return out


class DecoderLayer(nn.Module):
    """Attention and feed-forward, each behind a norm and added to the residual stream."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(sizes.D)
        self.self_attn = Attention(sizes)
        self.post_attention_layernorm = RMSNorm(sizes.D)
        self.mlp = MLP(sizes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.self_attn(self.input_layernorm(x))
        out: torch.Tensor = x + self.mlp(self.post_attention_layernorm(x))
        return out


class Stack(nn.Module):
    """Embedding, layers, final norm."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(sizes.vocabulary, sizes.D)
        self.layers = nn.ModuleList(DecoderLayer(sizes) for _ in range(sizes.layers))
        self.norm = RMSNorm(sizes.D)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed_tokens(tokens)
        for layer in self.layers:
            x = layer(x)
        out: torch.Tensor = self.norm(x)
        return out


class Decoder(nn.Module):
    """The whole: tokens ``[batch, tokens]`` to logits ``[batch, tokens, vocabulary]``."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.sizes = sizes
        self.model = Stack(sizes)
        self.lm_head = nn.Linear(sizes.D, sizes.vocabulary, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.lm_head(self.model(tokens))
        return out

    @staticmethod
    def seeded(sizes: Sizes, seed: int, rank: int | None = None) -> Decoder:
        """A decoder with random weights that keep activations near 1.

        Args:
            rank: embeddings lie near a space of so many dimensions and channels differ in size, so that activations are
                correlated and some are large, as in trained networks; None for neither.
        """
        generator = torch.Generator().manual_seed(seed)

        def normal(*shape: int) -> torch.Tensor:
            return torch.randn(shape, generator=generator)

        network = Decoder(sizes)
        with torch.no_grad():
            for name, parameter in network.named_parameters():
                if "embed" in name:
                    parameter.copy_(normal(*parameter.shape))
                elif parameter.dim() == 2:
                    parameter.copy_(parameter.shape[1] ** -0.5 * normal(*parameter.shape))
            if rank is not None:
                network.model.embed_tokens.weight.mul_(0.1).add_(
                    normal(sizes.vocabulary, rank) @ normal(rank, sizes.D) / rank**0.5
                )
                for layer in network.model.layers:
                    for norm in (layer.input_layernorm, layer.post_attention_layernorm):
                        norm.weight.copy_(normal(sizes.D).exp())
                    for last in (layer.self_attn.o_proj, layer.mlp.down_proj):
                        last.weight.mul_(0.3)
        return network

    def resized(self, **sizes: int) -> Decoder:
        """A decoder of other sizes, its weights still to be filled in."""
        head = self.lm_head.weight
        made: Decoder = Decoder(Sizes(**{**asdict(self.sizes), **sizes})).to(device=head.device, dtype=head.dtype)
        return made


@contextmanager
def watching(network: nn.Module, paths: list[str], take: Callable[[str, torch.Tensor, torch.Tensor], None]) -> Iterator[None]:
    """Calls ``take(path, input, output)`` for each of the modules whenever it runs inside the block."""
    modules = dict(network.named_modules())

    def hook(path: str) -> Callable[..., None]:
        return lambda module, arguments, output: take(path, arguments[0].detach(), output.detach())

    handles = [modules[path].register_forward_hook(hook(path)) for path in paths]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
