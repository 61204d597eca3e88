"""Headers of GGUF files: metadata and tensor formats, through the ``gguf`` library, which maps the file into memory.

Source of the layout: docs/gguf.md of ggml-org/ggml; block sizes of the formats are those of ``roofline.formats``, and
the library's own must agree. A model in several files numbers them "-00001-of-00003".
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from roofline.checkpoints.packed import is_buffer
from roofline.checkpoints.stored import Stored, Tensor, Weight, merged, missing_library
from roofline.errors import InputError
from roofline.formats import FORMATS, Format

SPLIT = re.compile(r"(.*-)(\d{5})(-of-)(\d{5})(\.gguf)")
MAGIC = b"GGUF"

TYPES = {"F32": "fp32", "F16": "fp16", "BF16": "bf16", "MXFP4": "gguf-mxfp4", "NVFP4": "gguf-nvfp4"}
"""GGUF type -> name in ``FORMATS`` where it is not the same in lower case."""


@dataclass(frozen=True)
class Gguf:
    """A GGUF model by its header.

    Attributes:
        metadata: single values and short lists, by key; long lists (the vocabulary) are left out.
        tensors: by GGUF name; shapes run from the slowest dimension to the fastest, as elsewhere.
    """

    metadata: Mapping[str, Any]
    tensors: Mapping[str, Tensor]
    path: Path
    files: int = 1

    def format(self, name: str) -> Format | None:
        """The format of a tensor, None where there is no such tensor."""
        tensor = self.tensors.get(name)
        return None if tensor is None else FORMATS[TYPES.get(tensor.dtype, tensor.dtype.lower())]

    def stored(self) -> Stored:
        """The stored weights."""
        weights: list[Weight] = []
        buffers: list[Weight] = []
        for name, tensor in self.tensors.items():
            kind = TYPES.get(tensor.dtype, tensor.dtype.lower())
            holder = buffers if kind not in FORMATS or is_buffer(name, Tensor("F32", tensor.shape, 0)) else weights
            holder.append(Weight(name, kind, tensor.elements, tensor.bytes))
        return Stored(tuple(weights), tuple(buffers), str(self.path), self.files)


LONGEST_LIST = 4096
"""Entries above which a metadata list is skipped: a vocabulary takes the library ten seconds and says nothing here."""


def _reader(path: Path) -> Any:
    """The library's reader, made to step over long lists instead of taking every entry apart."""
    import struct
    import sys

    from gguf import GGUFReader, GGUFValueType

    class Reader(GGUFReader):  # type: ignore[misc]
        def _get_field_parts(self, orig_offs: int, raw_type: int) -> Any:
            if raw_type != GGUFValueType.ARRAY:
                return super()._get_field_parts(orig_offs, raw_type)
            swapped = ">" if sys.byteorder == "little" else "<"
            order = "=" if self.byte_order == "I" else swapped
            data = memoryview(self.data)
            kind, count = struct.unpack_from(f"{order}IQ", data, orig_offs)
            if count <= LONGEST_LIST:
                return super()._get_field_parts(orig_offs, raw_type)
            end = orig_offs + 12
            if kind == GGUFValueType.STRING:
                length = struct.Struct(f"{order}Q")
                for _ in range(count):
                    end += 8 + length.unpack_from(data, end)[0]
            else:
                end += count * self.gguf_scalar_to_np[GGUFValueType(kind)]().nbytes
            return end - orig_offs, [], [], [GGUFValueType.ARRAY]

    return Reader(path)


def _file(path: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """(metadata, tensors) of one file. Raises InputError where it is cut off, or no GGUF."""
    from struct import error as too_short

    try:
        with path.open("rb") as file:
            magic = file.read(4)
    except OSError as error:
        raise InputError(f"weights: {path} cannot be read ({error.strerror or error})") from None
    if magic != MAGIC:
        raise InputError(f"weights: {path} is no GGUF file (it begins with {magic!r})")
    size = path.stat().st_size
    broken = InputError(f"weights: {path} ({size} bytes) has a broken GGUF header or is cut off")
    try:
        reader = _reader(path)
        tensors, end = {}, 0
        for found in reader.tensors:
            shape = tuple(int(number) for number in reversed(found.shape.tolist()))
            tensors[found.name] = Tensor(found.tensor_type.name, shape, int(found.n_bytes))
            end = max(end, int(found.data_offset) + int(found.n_bytes))
        metadata = {key: field.contents() for key, field in reader.fields.items() if field.data}
    except ModuleNotFoundError as error:
        raise missing_library("gguf", error) from None
    except (ValueError, IndexError, KeyError, OverflowError, TypeError, MemoryError, too_short) as error:
        raise InputError(f"{broken} ({' '.join(str(error).split()):.120})") from None
    if end > size:
        raise broken
    for name, tensor in tensors.items():
        fmt = FORMATS.get(TYPES.get(tensor.dtype, tensor.dtype.lower()))
        if fmt is not None and fmt.bytes(tensor.elements) != tensor.bytes:
            raise InputError(
                f"weights: {name} in {path.name} takes {tensor.bytes} bytes, {fmt.name} takes {fmt.bytes(tensor.elements)}"
            )
    return metadata, tensors


def read_gguf(path: Path) -> Gguf:
    """The header of a GGUF model, all its files included. Raises InputError where one is missing, cut off or no GGUF."""
    split = SPLIT.fullmatch(path.name)
    if split is None:
        metadata, tensors = _file(path)
        return Gguf(metadata, tensors, path)
    before, _, of, count, end = split.groups()
    files = [path.with_name(f"{before}{number:05}{of}{count}{end}") for number in range(1, int(count) + 1)]
    missing = next((file.name for file in files if not file.is_file()), None)
    if missing is not None:
        raise InputError(f"weights: {missing} is missing beside {path.name}; the model has {int(count)} files")
    parts = [_file(file) for file in files]
    tensors = merged((file.name, part[1]) for file, part in zip(files, parts, strict=True))
    return Gguf(parts[0][0], tensors, path, len(files))
