"""A config.json as readers see it: checked access that names the key in every error and notes every assumption."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from roofline.errors import InputError

LARGEST_SIZE = 10**9
MOST_LAYERS = 10_000

WIDTH = ("hidden_size", "n_embd", "n_embed", "d_model", "dim", "model_dim")
LAYERS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers")
HEADS = ("num_attention_heads", "n_head", "n_heads", "num_heads", "attention_heads")
KV_HEADS = ("num_key_value_heads", "num_kv_heads", "n_head_kv", "kv_n_heads", "multi_query_group_num")
FEED_FORWARD = ("intermediate_size", "ffn_dim", "n_inner", "ffn_hidden_size", "d_ff")
VOCABULARY = ("vocab_size", "padded_vocab_size")
ROTARY_PARTS = ("partial_rotary_factor", "rotary_pct", "rope_pct", "rope_percent", "rotary_emb_fraction")
CONTEXT = (
    "max_position_embeddings",
    "n_positions",
    "n_ctx",
    "seq_length",
    "max_seq_len",
    "max_sequence_length",
    "model_max_length",
)


class Config:
    """Checked access to the keys of one config (or of one nested section).

    Attributes:
        data: the section itself.
        where: its path, for errors ("" at the top, "text_config." below).
        assumes: notes of what was assumed where a key is missing; shared by all sections of a file.
    """

    def __init__(self, data: Mapping[str, Any], where: str = "", assumes: list[str] | None = None) -> None:
        self.data = data
        self.where = where
        self.assumes: list[str] = [] if assumes is None else assumes

    def __contains__(self, key: str) -> bool:
        return self.data.get(key) is not None

    def get(self, key: str, default: Any = None) -> Any:
        """The raw value of a key; ``default`` where it is missing or null."""
        value = self.data.get(key)
        return default if value is None else value

    def section(self, key: str) -> Config:
        """A nested object. Raises InputError when it is missing or not an object."""
        value = self.data.get(key)
        if not isinstance(value, Mapping):
            raise InputError(f"config: {self.where}{key} is missing or not an object")
        return Config(value, f"{self.where}{key}.", self.assumes)

    def filled(self, defaults: Mapping[str, Any]) -> Config:
        """The config with ``defaults`` of a family's class where it is silent, each of them noted."""
        missing = {key: value for key, value in defaults.items() if key not in self.data}
        for key, value in missing.items():
            self.assume(f"{self.where}{key} = {json.dumps(value)} (not in the config: the default of its class)")
        return Config({**self.data, **missing}, self.where, self.assumes)

    def _checked(self, key: str, value: Any, least: int) -> int:
        if isinstance(value, bool) or not isinstance(value, int):
            raise InputError(f"config: {self.where}{key} must be a whole number, not {value!r:.60}")
        if not least <= value <= LARGEST_SIZE:
            raise InputError(f"config: {self.where}{key} is {value!r:.60}, outside {least} to {LARGEST_SIZE}")
        return value

    def size(self, *keys: str, least: int = 1) -> int:
        """The whole number under the first of ``keys`` that is present. Raises InputError naming the key."""
        found = self.optional_size(*keys, least=least)
        if found is None:
            others = f" (or {', '.join(keys[1:])})" if len(keys) > 1 else ""
            raise InputError(f"config: {self.where}{keys[0]}{others} is missing; it cannot be guessed")
        return found

    def optional_size(self, *keys: str, least: int = 1) -> int | None:
        """As ``size``, None where no key is present."""
        for key in keys:
            if self.data.get(key) is not None:
                return self._checked(key, self.data[key], least)
        return None

    def agreed_size(self, *keys: str) -> int:
        """As ``size``, for keys that name one dimension: all that are present must give the same number."""
        found = self.size(*keys)
        for key in keys:
            other = self.data.get(key)
            if other is not None and other != found:
                first = next(k for k in keys if self.data.get(k) is not None)
                raise InputError(f"config: {self.where}{first} = {found} and {key} = {other!r:.60} contradict each other")
        return found

    def size_or(self, default: int, *keys: str, least: int = 1, note: bool = True) -> int:
        """As ``size`` with a default, which is noted among the assumptions."""
        found = self.optional_size(*keys, least=least)
        if found is not None:
            return found
        if note:
            self.assume(f"{self.where}{keys[0]} = {default} (not in the config)")
        return default

    def flag(self, key: str, default: bool) -> bool:
        """A true/false key. Raises InputError when it is something else."""
        value = self.data.get(key)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise InputError(f"config: {self.where}{key} must be true or false, not {value!r:.60}")
        return value

    def number(self, key: str, default: float, *, most: float = LARGEST_SIZE) -> float:
        """A real number from 0 to ``most`` (a rotary fraction, a multiplier). Raises InputError when it is not one."""
        value = self.get(key, default)
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise InputError(f"config: {self.where}{key} must be a number, not {value!r:.60}")
        if not 0 <= value <= most:
            raise InputError(f"config: {self.where}{key} is {value!r:.60}, outside 0 to {most}")
        return value

    def text(self, key: str, default: str = "") -> str:
        """A text key. Raises InputError when it is something else."""
        value = self.get(key, default)
        if not isinstance(value, str):
            raise InputError(f"config: {self.where}{key} must be a text, not {value!r:.60}")
        return value

    def items(self, key: str) -> list[Any] | None:
        """A list, None where it is missing. Raises InputError when it is something else."""
        value = self.data.get(key)
        if value is not None and not isinstance(value, list):
            raise InputError(f"config: {self.where}{key} must be a list, not {value!r:.60}")
        return value

    def per_layer(self, key: str, layers: int) -> list[Any] | None:
        """A list with one entry per layer. Raises InputError when its length differs from the number of layers."""
        value = self.items(key)
        if value is not None and len(value) < layers:
            raise InputError(f"config: {self.where}{key} has {len(value)} entries for {layers} layers")
        return value

    def assume(self, note: str) -> None:
        """Note an assumption, once."""
        if note not in self.assumes:
            self.assumes.append(note)

    @property
    def width(self) -> int:
        """D: width of the residual stream."""
        return self.agreed_size(*WIDTH)

    @property
    def layers(self) -> int:
        """L: decoder layers, 10,000 at most."""
        found = self.agreed_size(*LAYERS)
        if found > MOST_LAYERS:
            raise InputError(f"config: {self.where}{LAYERS[0]} is {found}; more than {MOST_LAYERS} layers are surely a mistake")
        return found

    @property
    def heads(self) -> int:
        """N: query heads."""
        return self.agreed_size(*HEADS)

    @property
    def kv_heads(self) -> int:
        """K: key-value heads; N where no key says otherwise (noted)."""
        found = self.optional_size(*KV_HEADS)
        if found is None:
            self.assume(f"{self.where}num_key_value_heads = {self.heads} (not in the config: MHA)")
            return self.heads
        if self.heads % found:
            raise InputError(f"config: {self.where}num_key_value_heads {found} does not divide the {self.heads} query heads")
        return found

    @property
    def head_dim(self) -> int:
        """H: the key head_dim, else D / N, which must be whole."""
        found = self.optional_size("head_dim", "kv_channels", "attention_head_dim")
        if found is not None:
            return found
        if self.width % self.heads:
            raise InputError(
                f"config: {self.where}head_dim is missing, and hidden_size {self.width} / "
                f"num_attention_heads {self.heads} is not whole"
            )
        return self.width // self.heads

    @property
    def feed_forward(self) -> int:
        """F: width of the feed-forward layer."""
        return self.agreed_size(*FEED_FORWARD)

    def feed_forward_or(self, default: int | None) -> int:
        """F, or the width that a family's code takes where the config says none; None for no such width."""
        return self.feed_forward if default is None or self.optional_size(*FEED_FORWARD) is not None else default

    @property
    def vocabulary(self) -> int:
        """V: rows of the embedding table."""
        return self.size(*VOCABULARY)

    @property
    def max_context(self) -> int | None:
        """Longest context that the config admits."""
        return self.optional_size(*CONTEXT)

    @property
    def rotary(self) -> int:
        """Rotated elements per head: rotary_dim, or the partial rotary factor times H, else H."""
        return self.rotary_of(self.head_dim)

    def rotary_of(self, head_dim: int, default: float = 1.0) -> int:
        """As ``rotary`` for heads of another size, and for a family whose code rotates only a part by default."""
        explicit = self.optional_size("rotary_dim", "rotary_ndims", least=0)
        if explicit is not None:
            if explicit > head_dim:
                raise InputError(f"config: {self.where}rotary_dim {explicit} is larger than the head dimension {head_dim}")
            return explicit
        parameters = self.get("rope_parameters", {})
        nested = Config(parameters, f"{self.where}rope_parameters.") if isinstance(parameters, Mapping) else self
        for holder, key in ((nested, "partial_rotary_factor"), *((self, key) for key in ROTARY_PARTS)):
            if key in holder:
                return int(holder.fraction(key) * head_dim)
        return int(default * head_dim)

    def fraction(self, key: str) -> float:
        """A number from 0 to 1. Raises InputError when it is missing or lies outside."""
        value = self.number(key, 2.0)
        if not 0 <= value <= 1:
            raise InputError(f"config: {self.where}{key} is {value!r:.60}, outside 0 to 1")
        return value
