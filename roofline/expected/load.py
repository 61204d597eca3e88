"""One iteration of an engine as its kernels see it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Load:
    """Prompts and decoding sequences of one iteration, as averages; floats, or float64 arrays of one length.

    Attributes:
        decodes: sequences that decode. context: tokens cached behind each, on average.
        chunks: prompts, or chunks of prompts. chunk: tokens of each. behind: tokens cached behind each.
        new: tokens that each decoding sequence computes: 1, and the drafted ones that it verifies.
    """

    decodes: Any
    context: Any
    chunks: Any = 0.0
    chunk: Any = 0.0
    behind: Any = 0.0
    new: Any = 1.0

    @property
    def decode_tokens(self) -> Any:
        """New tokens of decoding sequences."""
        return self.decodes * self.new

    @property
    def prompt_tokens(self) -> Any:
        """New tokens of prompts."""
        return self.chunks * self.chunk

    @property
    def tokens(self) -> Any:
        """All new tokens."""
        return self.decode_tokens + self.prompt_tokens

    @property
    def rows(self) -> Any:
        """Rows of the head: one for each token that decodes, and one for each chunk."""
        return self.decode_tokens + self.chunks

    @property
    def sequences(self) -> Any:
        """Sequences that the host handles."""
        return self.decodes + self.chunks
