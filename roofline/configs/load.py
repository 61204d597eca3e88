"""``load_model``: a catalogue name, the path of a config.json or of a GGUF file, or a config's contents -> Model."""

from __future__ import annotations

import json
import os
import re
import tomllib
from collections.abc import Mapping
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any

from roofline.configs.config import WIDTH, Config
from roofline.configs.families import reader_of
from roofline.configs.storage import QUANTISATION_KEYS, STORED_IN, Storage, base_format
from roofline.errors import InputError, UnsupportedModel, suggest
from roofline.model import Model

CATALOG = Path(__file__).parent.parent / "catalog"
LARGEST_FILE = 16 * 2**20
NAME = re.compile(r"[a-z0-9][a-z0-9._+-]{0,99}")
PATH_LIKE = ("/", "./", "../", "~")


def normalise(name: str) -> str:
    """The catalogue spelling of a model name: no owner, lower case, no ``Meta-``, ``-hf`` or ``-Instruct``.

    >>> normalise("meta-llama/Meta-Llama-3.1-8B-Instruct")
    'llama-3.1-8b'
    """
    key = name.strip().split("/")[-1].lower()
    return key.removeprefix("meta-").removesuffix("-hf").removesuffix("-instruct")


def model_names() -> list[str]:
    """Names of all catalogued models, sorted."""
    return sorted(path.stem for path in CATALOG.glob("*.toml"))


def read_catalog(name: str) -> dict[str, Any]:
    """The catalogue entry of a normalised name: full_name, source and config. Raises KeyError for an unknown one."""
    path = CATALOG / f"{name}.toml"
    if not NAME.fullmatch(name) or not path.is_file():
        raise KeyError(name)
    return tomllib.loads(path.read_text(encoding="utf-8"))


def full_name(name: str) -> str:
    """What an engine loads: the full name of a model of the catalogue, the folder of a config file, else the text as it is."""
    try:
        return str(read_catalog(normalise(name)).get("full_name") or name)
    except KeyError:
        path = Path(name)
        return str(path.parent.absolute()) if path.suffix == ".json" and path.is_file() else name


def _unambiguous(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """A JSON object; a key that stands there twice with different values has no meaning."""
    data: dict[str, Any] = {}
    for key, value in pairs:
        if key in data and data[key] != value:
            raise InputError(f"config: {key:.60} stands twice with different values, {data[key]!r:.40} and {value!r:.40}")
        data[key] = value
    return data


def _with_storage(data: Mapping[str, Any], path: Path) -> Mapping[str, Any]:
    """The config with the ``hf_quant_config.json`` beside it, where ModelOpt put the quantisation there."""
    beside = path.with_name(path.name.removesuffix("config.json") + "hf_quant_config.json")
    if "quantization_config" in data or not path.name.endswith("config.json") or not beside.is_file():
        return data
    return {**data, "quantization": _read_json(beside).get("quantization")}


def _read_json(path: Path) -> Mapping[str, Any]:
    try:
        if path.name == "config.json" and path.parent.is_dir() and not path.is_file():
            raise InputError(f"model: {path.parent} is a directory without a config.json; give the file itself")
        if path.is_dir():
            raise InputError(f"model: {path} is a directory; give the config.json in it")
        if path.is_socket() or path.is_block_device():
            raise InputError(f"model: {path} is neither a file nor a pipe; give the config.json of the model")
        size = path.stat().st_size
        if size <= LARGEST_FILE:
            with path.open("rb") as file:
                data = file.read(LARGEST_FILE + 1)
            size = max(size, len(data))
        if size > LARGEST_FILE:
            raise InputError(f"model: {path} has {size} bytes; a config.json has a few thousand: is it the right file?")
        text = data.decode("utf-8-sig")
    except OSError as error:
        raise InputError(f"model: {path} cannot be read ({error.strerror})") from None
    except UnicodeDecodeError:
        raise InputError(f"model: {path} is not a text file; give the config.json of the model") from None
    if not text.strip():
        raise InputError(f"model: {path} is empty")
    try:
        config = json.loads(text, object_pairs_hook=_unambiguous)
    except (ValueError, RecursionError) as error:
        reason = "nested too deeply" if isinstance(error, RecursionError) else str(error)
        raise InputError(f"model: {path} is not valid JSON ({reason})") from None
    if not isinstance(config, Mapping):
        raise InputError(f"model: {path} holds a JSON {type(config).__name__}, not an object")
    return config


def read_storage(config: Config, inner: Config | None = None) -> Storage:
    """The storage that a config describes; ``inner`` is the text section where the dtype stands there.

    ``quantization_config`` (or ``quantization``, the key of hf_quant_config.json) may stand in either section.
    Raises UnsupportedModel for a quantisation method that is not modelled, InputError for a malformed section.
    """
    source = inner if inner is not None and ("torch_dtype" in inner or "dtype" in inner) else config
    base = base_format(source)
    for holder in (config, inner):
        for key in QUANTISATION_KEYS:
            if holder is not None and holder.get(key):
                from roofline.configs.quantization import read_quantization

                return read_quantization(holder.section(key), base)
    return Storage(base)


def read_config(data: Mapping[str, Any], name: str, storage: Storage | None = None) -> Model:
    """A Model from the contents of a config.json; ``storage`` where the config is not what says how weights are stored.

    Raises UnsupportedModel or InputError.
    """
    config = Config(data)
    if not data:
        raise InputError("config: the object is empty; give the config.json of the model")
    kind = config.text("model_type")
    if not kind and isinstance(data.get("quantization"), Mapping):
        raise InputError(
            "config: this is ModelOpt's hf_quant_config.json, which says how weights are stored and nothing else; "
            "give the config.json beside it (the quantisation beside it is read along)"
        )
    if not kind:
        raise InputError("config: model_type is missing; it says which architecture the other keys describe")
    text = config.section("text_config") if isinstance(config.get("text_config"), Mapping) else None
    nested = text is not None and not any(key in config for key in WIDTH)
    model: Model = reader_of(kind, nested)(config, storage or read_storage(config, text), name)
    return model if storage else replace(model, assumes=(*model.assumes, _stored_as(config, text, model)))


def _stored_as(config: Config, inner: Config | None, model: Model) -> str:
    """In which formats weights are read as stored, and what of the config says so."""
    params = model.params_by_format
    total = sum(params.values())
    names = [fmt.name for fmt in sorted(params, key=params.__getitem__, reverse=True) if 1000 * params[fmt] >= total]
    named = any(holder is not None and holder.get(key) for holder in (config, inner) for key in QUANTISATION_KEYS)
    says = "as the config's quantisation says" if named else "the config names no quantisation"
    return f"{STORED_IN}{' and '.join(names) or 'no format'} ({says})"


def _load_gguf(path: Path) -> Model:
    """A Model from the metadata of a GGUF file, stored as its tensors are.

    Raises UnsupportedModel where the tensors hold other parameters than the architecture that the metadata describe.
    """
    from roofline.checkpoints.agreement import compare
    from roofline.checkpoints.gguf_config import as_config, as_stored, metadata_name, storage_of
    from roofline.checkpoints.gguf_headers import read_gguf

    gguf = read_gguf(path)
    keys = as_config(gguf)
    layers = Config(keys, "gguf ").layers
    read = read_config(keys, metadata_name(gguf.metadata, path.stem), storage_of(gguf, layers))
    model = as_stored(read, gguf)
    found = compare(gguf.stored(), model)
    if not found.same_params:
        raise UnsupportedModel(f"gguf: {path.name} is not what its architecture is read as ({found.summary})")
    assumed = "activations and cached state in bfloat16 (a GGUF names no format for them)"
    return replace(model, assumes=(*model.assumes, assumed, found.summary), family=keys["model_type"])


def _checked(model: Model, folder: Path) -> Model:
    """The model with a line about the weights that lie beside its config: whether they are what the config describes.

    Raises InputError where they are cut off, incomplete or malformed: the config alone is read by its own path.
    """
    from roofline.checkpoints.agreement import compare
    from roofline.checkpoints.headers import read_headers
    from roofline.checkpoints.safetensors_headers import weights_in

    if weights_in(folder) is None:
        return model
    try:
        note = compare(read_headers(folder), model).summary
    except ModuleNotFoundError as error:
        note = f"stored weights were not compared with the config: {error}"
    except InputError as error:
        raise InputError(f"{error}; to leave the weights out, give {folder / 'config.json'}") from None
    return replace(model, assumes=(*model.assumes, note))


def _load_folder(folder: Path) -> Model:
    """A Model from the config.json of a folder and the weights beside it, or from its GGUF file where it has only that."""
    from roofline.checkpoints.headers import gguf_in

    path = folder / "config.json"
    weights = None if path.is_file() else gguf_in(folder)
    if weights is not None:
        return _load_gguf(weights)
    return _checked(read_config(_with_storage(_read_json(path), path), _folder_name(folder) or path.stem), folder)


def _folder_name(folder: Path) -> str:
    """The name of a folder however its path is written: relative, absolute or as a dot."""
    return Path(os.path.abspath(folder)).name


def _named_in_full(name: str) -> str | None:
    """The catalogue name of the entry whose full name is meant, where the file is called otherwise."""
    for path in CATALOG.glob("*.toml"):
        with path.open("rb") as file:
            if normalise(str(tomllib.load(file).get("full_name", ""))) == name:
                return path.stem
    return None


@lru_cache(maxsize=64)
def _load_named(name: str) -> Model:
    try:
        entry = read_catalog(normalise(name))
    except KeyError:
        other = _named_in_full(normalise(name)) if name.strip() else None
        if other is not None:
            return _load_named(other)
        raise InputError(
            f"model: unknown model {name!r:.100}.{suggest(normalise(name), model_names())} "
            "Give a catalogue name (roofline models) or the path of a config.json"
        ) from None
    return read_config(entry["config"], normalise(name))


def load_model(source: str | Path | Mapping[str, Any]) -> Model:
    """A Model from a catalogue name, the path of a config.json (or its folder), a GGUF file, or the config as a mapping.

    The headers of weights that lie in a folder are compared with its config, and ``assumes`` says what came of it.

    Args:
        source: "llama-2-13b" or "meta-llama/Llama-2-13b-hf"; a path; or a dict with the keys of a config.json.

    Raises:
        UnsupportedModel: the family, or a feature of it, is not modelled; the message names it.
        InputError: the name is unknown, the file cannot be read, or a key is missing or wrong.
    """
    if isinstance(source, Mapping):
        return read_config(source, str(source.get("_name_or_path") or source.get("model_type") or "config"))
    if not isinstance(source, (str, Path)):
        raise InputError(f"model: {source!r:.60} is not a model; give a catalogue name, a path, or the config as a mapping")
    if not isinstance(source, Path) and not str(source).strip():
        raise InputError("model: the name is empty; give a catalogue name (roofline models) or the path of a config.json")
    path = Path(source)
    try:
        folder, file, there = path.is_dir(), path.is_file(), path.exists()
    except OSError as error:
        raise InputError(f"model: {str(source)!r:.60} cannot be read ({error.strerror})") from None
    if folder and isinstance(source, str) and NAME.fullmatch(normalise(source)) and not (path / "config.json").is_file():
        folder = not (CATALOG / f"{normalise(source)}.toml").is_file()
    if path.suffix == ".gguf" and not folder:
        return _load_gguf(path)
    if path.suffix == ".safetensors" and file:
        raise InputError(f"model: {path} holds weights, which do not say what the model is; give the config.json beside it")
    if folder:
        return _load_folder(path)
    if (
        isinstance(source, Path)
        or path.suffix == ".json"
        or (file and path.suffix != "")
        or (there and str(source).startswith(PATH_LIKE))
    ):
        stem = _folder_name(path.parent) if path.name == "config.json" else path.stem
        return read_config(_with_storage(_read_json(path), path), stem or path.stem)
    if str(source).startswith(PATH_LIKE):
        raise InputError(f"model: there is no file {str(source)!r:.200}; give a catalogue name or the path of a config.json")
    return _load_named(str(source))
