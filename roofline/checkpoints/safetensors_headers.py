"""Headers of safetensors files: names, dtypes and shapes, through the ``safetensors`` library; no tensor is loaded.

Source of the layout: the safetensors format (github.com/huggingface/safetensors): a header of JSON in front of the
data; a sharded checkpoint has an index that maps each tensor to its file.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from roofline.checkpoints.packed import unpacked
from roofline.checkpoints.stored import Stored, Tensor, merged, missing_library
from roofline.errors import InputError

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"

BITS = {
    "F64": 64, "I64": 64, "U64": 64, "C64": 64, "F32": 32, "I32": 32, "U32": 32, "F16": 16, "BF16": 16, "I16": 16, "U16": 16,
    "F8_E4M3": 8, "F8_E5M2": 8, "F8_E8M0": 8, "I8": 8, "U8": 8, "BOOL": 8, "F6_E2M3": 6, "F6_E3M2": 6, "F4": 4,
}  # fmt: skip


def _header(path: Path) -> dict[str, Tensor]:
    """The tensors of one file. Raises InputError where it is cut off, or its header is no header."""
    try:
        from safetensors import SafetensorError, safe_open
    except ModuleNotFoundError as error:
        raise missing_library("safetensors", error) from None
    try:
        with safe_open(path, framework="numpy") as file:
            found = {}
            for name in file.keys():  # noqa: SIM118  (not a dict)
                view = file.get_slice(name)
                dtype, shape = view.get_dtype(), tuple(view.get_shape())
                if dtype not in BITS:
                    raise InputError(f"weights: {name} in {path.name} has the dtype {dtype}, whose size is not known")
                elements = Tensor(dtype, shape, 0).elements
                found[name] = Tensor(dtype, shape, elements * BITS[dtype] // 8)
            return found
    except SafetensorError as error:
        size = path.stat().st_size if path.is_file() else 0
        raise InputError(f"weights: {path} ({size} bytes) has no valid safetensors header or is cut off ({error})") from None
    except OSError as error:
        raise InputError(f"weights: {path} cannot be read ({error.strerror or error})") from None


def _index(path: Path) -> tuple[dict[str, str], int | None]:
    """(tensor -> file, bytes of all tensors where it says so) of an index. Raises InputError where it is malformed."""
    try:
        data: Any = json.loads(path.read_text(encoding="utf-8"))
        places = data["weight_map"]
        total = data.get("metadata", {}).get("total_size")
    except (OSError, ValueError, RecursionError, KeyError, TypeError, AttributeError):
        raise InputError(f"weights: {path} is not an index of safetensors files (no weight_map)") from None
    if not isinstance(places, dict) or not all(isinstance(file, str) for file in places.values()):
        raise InputError(f"weights: weight_map of {path} must give a file for each tensor")
    if any(Path(file).name != file for file in places.values()):
        raise InputError(f"weights: weight_map of {path} names a file outside its folder")
    return places, total if isinstance(total, int) and not isinstance(total, bool) else None


def weights_in(folder: Path) -> Path | None:
    """The index or the single safetensors file of a folder, None where it holds neither."""
    return next((folder / name for name in (INDEX, SINGLE) if (folder / name).is_file()), None)


def read_tensors(path: Path) -> tuple[dict[str, Tensor], int]:
    """(tensors, number of files) of a safetensors file or of an index with its files.

    Raises InputError for a file that is missing, cut off or no safetensors, and for an index that its files belie.
    """
    if path.suffix != ".json":
        return _header(path), 1
    places, total = _index(path)
    files = sorted(set(places.values()))
    missing = [file for file in files if not (path.parent / file).is_file()]
    if missing:
        raise InputError(
            f"weights: {path.name} names {missing[0]}, which is not beside it ({len(missing)} of {len(files)} missing)"
        )
    tensors = merged((file, _header(path.parent / file)) for file in files)
    strangers = sorted(places.keys() ^ tensors.keys())
    if strangers:
        where = "is in no file" if strangers[0] in places else "is not in the index"
        raise InputError(f"weights: {strangers[0]} {where}; {path.name} and its files do not belong together")
    counted = sum(tensor.bytes for tensor in tensors.values())
    if total is not None and total != counted:
        raise InputError(f"weights: {path.name} gives a total_size of {total} bytes, its files hold {counted}")
    return tensors, len(files)


def read_safetensors(path: Path, bits: int | None = None) -> Stored:
    """The stored weights of a safetensors file, or of an index with its files.

    Args:
        bits: of packed integers whose shapes do not say.
    """
    tensors, files = read_tensors(path)
    return Stored(*unpacked(tensors, bits), str(path), files)
