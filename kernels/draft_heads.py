"""Draft heads in plain PyTorch: Medusa heads, one step of EAGLE, and a greedy round of either in front of a target.

The costs of both are ``roofline.components.draft_heads`` and ``roofline.speculative.heads``; the references here are what
those count, parameter by parameter and product by product.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

from roofline.kernels.compression.network import Decoder, DecoderLayer

Draft = Callable[[torch.Tensor, torch.Tensor, int], torch.Tensor]
"""(hidden states ``[tokens - 1, D]``, the text ``[tokens]`` whose last token has none yet, how many to guess) -> guesses."""


class MedusaHeads(nn.Module):
    """Heads that guess the tokens at several positions ahead from one hidden state.

    Residual layers start at zero and projections as the target's head, so that untrained heads all guess what it does.
    """

    def __init__(self, target: Decoder, heads: int, layers: int = 1) -> None:
        super().__init__()
        D, V = target.sizes.D, target.sizes.vocabulary
        self.residual = nn.ModuleList(nn.ModuleList(nn.Linear(D, D) for _ in range(layers)) for _ in range(heads))
        self.projection = nn.ModuleList(nn.Linear(D, V, bias=False) for _ in range(heads))
        self.to(target.lm_head.weight.dtype)
        with torch.no_grad():
            for parameter in self.residual.parameters():
                parameter.zero_()
            for projection in self.projection:
                projection.weight.copy_(target.lm_head.weight)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """Logits ``[heads, ..., V]`` of hidden states ``[..., D]``."""
        logits = []
        for residual, projection in zip(self.residual, self.projection, strict=True):
            x = hidden
            for layer in residual:
                x = x + nn.functional.silu(layer(x))
            logits.append(projection(x))
        return torch.stack(logits)

    def draft(self, hidden: torch.Tensor, text: torch.Tensor, number: int) -> torch.Tensor:
        """The best guess of each head for what follows a text, as a ``Draft``."""
        return self(hidden[-1])[:number].argmax(-1)


class EagleHead(nn.Module):
    """The next hidden state from the last ones and the embeddings of the tokens that followed them.

    Embedding and head are the target's and no parameters of this module.
    """

    def __init__(self, target: Decoder) -> None:
        super().__init__()
        D = target.sizes.D
        self.target = (target,)
        self.join = nn.Linear(2 * D, D)
        self.layer = DecoderLayer(target.sizes)
        self.layer.input_layernorm = nn.Identity()
        self.to(target.lm_head.weight.dtype)

    def forward(self, hidden: torch.Tensor, following: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """(hidden states one further, their logits) of ``hidden [batch, tokens, D]`` and ``following [batch, tokens]``."""
        embedded = self.target[0].model.embed_tokens(following)
        found = self.layer(self.join(torch.cat([embedded, hidden], -1)))
        return found, self.target[0].lm_head(found)

    def draft(self, hidden: torch.Tensor, text: torch.Tensor, number: int) -> torch.Tensor:
        """A chain of guesses for what follows a text, each from all states before it, as a ``Draft``."""
        states, following = hidden[None], text[None, 1:]
        for _ in range(number):
            found, logits = self(states, following)
            states = torch.cat([states, found[:, -1:]], 1)
            following = torch.cat([following, logits[:, -1].argmax(-1, keepdim=True)], 1)
        return following[0, len(text) - 1 :]


@torch.no_grad()
def generate(target: Decoder, prompt: torch.Tensor, number: int, draft: Draft, length: int) -> tuple[torch.Tensor, int]:
    """(``number`` greedy tokens behind a prompt ``[tokens]``, passes of the target) with ``length`` drafts per round.

    A round verifies the drafts in one pass and keeps those that the target would have chosen, and its own token after them:
    the result is plain greedy decoding whatever the draft.
    """
    text, passes = prompt, 1
    hidden = target.model(prompt[None])[0]
    token = target.lm_head(hidden[-1]).argmax()
    end = len(prompt) + number
    while len(text) < end:
        text = torch.cat([text, token.reshape(1)])
        guesses = draft(hidden, text, length)
        hidden = target.model(torch.cat([text, guesses])[None])[0]
        passes += 1
        chosen = target.lm_head(hidden[len(text) - 1 :]).argmax(-1)
        kept = int((chosen[:-1] == guesses).cumprod(0).sum())
        text = torch.cat([text, guesses[:kept]])
        hidden, token = hidden[: len(text)], chosen[kept]
    return text[len(prompt) : end], passes
