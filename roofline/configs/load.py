"""``load_model``: a catalogue name, the path of a config.json, or its contents -> Model."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

from roofline.configs.config import WIDTH, Config
from roofline.configs.families import reader_of
from roofline.configs.storage import Storage, base_format
from roofline.errors import InputError, suggest
from roofline.model import Model

CATALOG = Path(__file__).parent.parent / "catalog"
LARGEST_FILE = 16 * 2**20


def normalise(name: str) -> str:
    """The catalogue spelling of a model name: no owner, lower case, no ``Meta-``, ``-hf`` or ``-Instruct``.

    >>> normalise("meta-llama/Meta-Llama-3.1-8B-Instruct")
    'llama-3.1-8b'
    """
    key = name.strip().split("/")[-1].lower()
    return key.removeprefix("meta-").removesuffix("-instruct").removesuffix("-hf")


def model_names() -> list[str]:
    """Names of all catalogued models, sorted."""
    return sorted(path.stem for path in CATALOG.glob("*.toml"))


def read_catalog(name: str) -> dict[str, Any]:
    """The catalogue entry of a normalised name: full_name, source and config. Raises KeyError for an unknown one."""
    path = CATALOG / f"{name}.toml"
    if "/" in name or not path.is_file():
        raise KeyError(name)
    return tomllib.loads(path.read_text(encoding="utf-8"))


def _read_json(path: Path) -> Mapping[str, Any]:
    if path.is_dir():
        path = path / "config.json"
        if not path.is_file():
            raise InputError(f"model: {path.parent} is a directory without a config.json; give the file itself")
    try:
        size = path.stat().st_size
        if size > LARGEST_FILE:
            raise InputError(f"model: {path} has {size} bytes; a config.json has a few thousand: is it the right file?")
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise InputError(f"model: {path} cannot be read ({error.strerror})") from None
    except UnicodeDecodeError:
        raise InputError(f"model: {path} is not a text file; give the config.json of the model") from None
    if not text.strip():
        raise InputError(f"model: {path} is empty")
    try:
        data = json.loads(text)
    except (ValueError, RecursionError) as error:
        reason = "nested too deeply" if isinstance(error, RecursionError) else str(error)
        raise InputError(f"model: {path} is not valid JSON ({reason})") from None
    if not isinstance(data, Mapping):
        raise InputError(f"model: {path} holds a JSON {type(data).__name__}, not an object")
    return data


def read_storage(config: Config, inner: Config | None = None) -> Storage:
    """The storage that a config describes; ``inner`` is the text section where the dtype stands there.

    ``quantization_config`` (or ``quantization``, the key of hf_quant_config.json) may stand in either section.
    Raises UnsupportedModel for a quantisation method that is not modelled, InputError for a malformed section.
    """
    source = inner if inner is not None and ("torch_dtype" in inner or "dtype" in inner) else config
    base = base_format(source)
    for holder in (config, inner):
        for key in ("quantization_config", "quantization"):
            if holder is not None and holder.get(key):
                from roofline.configs.quantization import read_quantization

                return read_quantization(holder.section(key), base)
    return Storage(base)


def read_config(data: Mapping[str, Any], name: str) -> Model:
    """A Model from the contents of a config.json. Raises UnsupportedModel or InputError."""
    config = Config(data)
    if not data:
        raise InputError("config: the object is empty; give the config.json of the model")
    kind = config.text("model_type")
    if not kind:
        raise InputError("config: model_type is missing; it says which architecture the other keys describe")
    text = config.section("text_config") if isinstance(config.get("text_config"), Mapping) else None
    nested = text is not None and not any(key in config for key in WIDTH)
    model: Model = reader_of(kind, nested)(config, read_storage(config, text), name)
    return model


@lru_cache(maxsize=64)
def _load_named(name: str) -> Model:
    try:
        entry = read_catalog(normalise(name))
    except KeyError:
        raise InputError(
            f"model: unknown model {name!r}.{suggest(normalise(name), model_names())} "
            "Give a catalogue name (roofline models) or the path of a config.json"
        ) from None
    return read_config(entry["config"], normalise(name))


def load_model(source: str | Path | Mapping[str, Any]) -> Model:
    """A Model from a catalogue name, the path of a config.json (or its folder), or the config as a mapping.

    Args:
        source: "llama-2-13b" or "meta-llama/Llama-2-13b-hf"; a path; or a dict with the keys of a config.json.

    Raises:
        UnsupportedModel: the family, or a feature of it, is not modelled; the message names it.
        InputError: the name is unknown, the file cannot be read, or a key is missing or wrong.
    """
    if isinstance(source, Mapping):
        return read_config(source, str(source.get("_name_or_path") or source.get("model_type") or "config"))
    path = Path(source)
    if isinstance(source, Path) or path.suffix == ".json" or path.is_dir() or (path.is_file() and path.suffix != ""):
        stem = path.parent.name if path.name == "config.json" else path.stem
        return read_config(_read_json(path), stem or path.stem)
    return _load_named(source)
