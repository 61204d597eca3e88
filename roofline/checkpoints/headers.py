"""``read_headers``: what a local model folder or file stores, module by module, from headers alone."""

from __future__ import annotations

import json
import re
from pathlib import Path

from roofline.checkpoints.gguf_headers import SPLIT, read_gguf
from roofline.checkpoints.safetensors_headers import read_safetensors, weights_in
from roofline.checkpoints.stored import Stored
from roofline.errors import InputError

BITS = re.compile(r'"(?:num_bits|bits|w_bit)"\s*:\s*(\d+)')


def packed_bits(folder: Path) -> int | None:
    """Bits of packed integers, as the quantization_config of the config.json of a folder says; None where none does."""
    try:
        data = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return None
    if not isinstance(data, dict):
        return None
    text = data.get("text_config")
    section = data.get("quantization_config") or (text.get("quantization_config") if isinstance(text, dict) else None)
    found = {int(number) for number in BITS.findall(json.dumps(section))} if section else set()
    return found.pop() if len(found) == 1 else None


def gguf_in(folder: Path) -> Path | None:
    """The GGUF model of a folder, None where it holds none. Raises InputError where it holds several."""
    files = sorted(path for path in folder.glob("*.gguf") if path.is_file() and not path.name.startswith("mmproj"))
    firsts = [path for path in files if (match := SPLIT.fullmatch(path.name)) is None or int(match[2]) == 1]
    if len(firsts) > 1:
        raise InputError(f"model: {folder} holds {len(firsts)} GGUF models; give one, as {firsts[0]}")
    return next(iter(firsts), None)


def stored_at(path: Path) -> Path | None:
    """The file where the headers of a model begin: safetensors before GGUF; None where a folder holds neither."""
    return (weights_in(path) or gguf_in(path)) if path.is_dir() else path


def read_headers(path: str | Path) -> Stored:
    """What a model folder, a safetensors file or index, or a GGUF file stores.

    Raises InputError where there are no weights, or where a file is missing, cut off or malformed; ModuleNotFoundError
    naming the extra "checkpoints" where the library is not installed.
    """
    place = Path(path).expanduser()
    if place.name == "config.json":
        place = place.parent
    found = stored_at(place)
    if found is None:
        raise InputError(
            f"weights: {place} holds no model.safetensors, no model.safetensors.index.json and no .gguf file; nothing to count"
        )
    if not found.is_file():
        raise InputError(f"weights: there is no file {found}")
    if found.suffix == ".gguf":
        return read_gguf(found).stored()
    if found.suffix == ".safetensors" or found.name.endswith(".safetensors.index.json"):
        return read_safetensors(found, packed_bits(found.parent))
    raise InputError(f"weights: {found} is neither a .safetensors nor a .gguf file, nor an index of the former")
