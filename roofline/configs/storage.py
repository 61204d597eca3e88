"""How a checkpoint stores its weights: the base dtype and, module by module, what quantization_config says.

The base dtype and the shape of a Storage are here; what each quantisation method writes into a config is read in
``quantization``. Norms, embeddings and routers are asked for by nobody: they stay in the base dtype.
"""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import lru_cache

from roofline.configs.config import Config
from roofline.errors import InputError
from roofline.formats import BF16, FORMATS, Format

DTYPES = {
    "float32": "fp32", "float": "fp32", "float16": "fp16", "half": "fp16", "bfloat16": "bf16",
    "torch.float32": "fp32", "torch.float16": "fp16", "torch.bfloat16": "bf16",
}  # fmt: skip

Keeps = Callable[[str], bool]
Special = Callable[[str], Format | None]


def _nothing_kept(path: str) -> bool:
    return False


def nothing_special(path: str) -> Format | None:
    """No module is stored in a way of its own."""
    return None


@dataclass(frozen=True)
class Storage:
    """Formats of one checkpoint.

    Attributes:
        base: dtype of everything that is not quantised; activations use it too.
        quantised: format of quantised linear layers, None where only those of ``special`` are.
        keeps: whether a module path ("model.layers.0.self_attn.q_proj") stays in the base dtype.
        special: the format of a module that the checkpoint stores in its own way, None for all others.
        cached: format of cached keys and values where the config names one, else None.
    """

    base: Format = BF16
    quantised: Format | None = None
    keeps: Keeps = field(default=_nothing_kept, compare=False)
    special: Special = field(default=nothing_special, compare=False)
    cached: Format | None = None

    @property
    def plain(self) -> bool:
        """Whether every module is stored in the base dtype."""
        return self.quantised is None and self.special is nothing_special

    @property
    def kv(self) -> Format:
        """Format of cached keys and values: the one that the config names, else the base dtype."""
        return self.base if self.cached is None else self.cached

    def linear(self, path: str) -> Format:
        """Storage of the linear layer at a module path."""
        if self.plain or self.keeps(path):
            return self.base
        return self.special(path) or self.quantised or self.base


WRAPPERS = (
    ("model.language_model.", "model."),
    ("language_model.model.", "model."),
    ("language_model.", ""),
    ("backbone.", "model."),
)
EXPERT = re.compile(r"\.experts\.\d+(?=\.|$)")


@lru_cache(maxsize=8192)
def canonical(path: str) -> str:
    """A module path without what wrappers put in front of the text model, and without the number of an expert."""
    for wrapper, plain in WRAPPERS:
        if path.startswith(wrapper):
            path = plain + path.removeprefix(wrapper)
            break
    return EXPERT.sub(".experts", path)


def heads_of(path: str) -> list[str]:
    """A module path and every module that contains it: "a.b.c", "a.b", "a"."""
    parts = path.split(".")
    return [".".join(parts[:end]) for end in range(len(parts), 0, -1)]


QUANTISATION_KEYS = ("quantization_config", "quantization")
"""Sections that say how weights are quantised: a config's own, and the one of an hf_quant_config.json."""
STORED_IN = "weights in "
"""How the note begins that names the formats of a config's weights."""


def tails_of(path: str) -> list[str]:
    """The ends of a module path: "a.b.c", "b.c", "c"."""
    parts = path.split(".")
    return [".".join(parts[start:]) for start in range(len(parts))]


class Names:
    """Which modules a list of a config names.

    An entry is a module path (it names what lies below as well), the end of one ("gate"), a glob ("*.mlp.gate*") or a
    regex ("re:.*mlp.gate$", matched from the start of the path as written by the model with or without its wrapper).
    """

    def __init__(self, entries: Iterable[str]) -> None:
        self.words: set[str] = set()
        self.paths: set[str] = set()
        globs, regexes = [], []
        for entry in entries:
            if entry.startswith("re:"):
                regexes.append(entry[3:])
            elif any(letter in entry for letter in "*?["):
                globs.append(fnmatch.translate(canonical(entry)))
            else:
                short = canonical(entry.strip("."))
                (self.paths if "." in short else self.words).add(short)
        try:
            self.glob = re.compile("|".join(globs)) if globs else None
            self.regexes = [re.compile(regex) for regex in regexes]
        except re.error as error:
            raise InputError(f"quantization_config: a module pattern is not a valid regex ({error})") from None

    def __contains__(self, path: str) -> bool:
        short = canonical(path)
        parts = short.split(".")
        if not self.words.isdisjoint(parts):
            return True
        if self.paths or self.glob is not None:
            for module in heads_of(short):
                if self.glob is not None and self.glob.match(module):
                    return True
                if module in self.paths or any(tail in self.paths for tail in tails_of(module)):
                    return True
        if not self.regexes:
            return False
        spellings = (path, short, f"language_model.{short}", short.replace("model.", "model.language_model.", 1))
        return any(regex.match(spelling) for regex in self.regexes for spelling in spellings)


def base_format(config: Config) -> Format:
    """The dtype of the config; bf16, noted, where it names none."""
    name = config.get("torch_dtype", config.get("dtype"))
    if name is None:
        config.assume("dtype = bfloat16 (not in the config)")
        return BF16
    if not isinstance(name, str) or name not in DTYPES:
        raise InputError(f"config: {config.where}torch_dtype {name!r:.40} is not one of {', '.join(sorted(set(DTYPES)))}")
    return FORMATS[DTYPES[name]]
