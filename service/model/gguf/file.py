"""Reads a GGUF file with the `gguf` package, after it has checked what the file claims about its sizes.

The package maps the file and returns views of it. It stops reading a list only at the number of entries that the file
claims, so the checks are made before it reads on.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGMLQuantizationType, GGUFReader, GGUFValueType
from gguf.constants import GGML_QUANT_SIZES

from families import CheckpointError
from families.gguf_model import Metadata

MOST_ENTRIES = 1 << 21
"""Entries of all lists of a file together: more than twice those of a vocabulary of 262,144 tokens with its merges."""
MOST_PAIRS, MOST_TENSORS = 1 << 16, 1 << 18
LONGEST_STRING = 1 << 24
"""Bytes of a string at most, above any chat template."""
MOST_TEXT = 1 << 28
"""Bytes of all strings together."""
LONGEST_NAME = 1 << 10
MOST_SHARDS = 1000
_SHARD = re.compile(r"-(\d{5})-of-(\d{5})\.gguf$")


class _Wrong(ValueError):
    """What is wrong with the file, without its name."""


@dataclass(frozen=True)
class StoredTensor:
    """A tensor of a file."""

    name: str
    type: GGMLQuantizationType
    shape: tuple[int, ...]
    """Outputs before inputs, as in torch."""
    data: np.ndarray[Any, Any]
    """A view of the file: numbers of the type in this shape, or the bytes of each row's blocks."""

    @property
    def nbytes(self) -> int:
        return self.data.nbytes


@dataclass(frozen=True)
class GgufFile:
    """The metadata and the tensors of a file, or of all files of a model that is split."""

    path: Path
    metadata: Metadata
    tensors: Mapping[str, StoredTensor] = field(repr=False)

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(tensor.nbytes for tensor in self.tensors.values())


class _Reader(GGUFReader):
    """The package's reader, with checks of all sizes. Its methods with an underscore are the package's own."""

    def __init__(self, path: Path) -> None:
        self._entries = self._octets = 0
        super().__init__(path)

    def _get(self, offset: int, dtype: Any, count: int = 1, override_order: Any = None) -> Any:
        """Views of plain arrays, which take a tenth of the time of views of a mapped file's own type."""
        if self.byte_order != "I":
            raise _Wrong("its numbers are in the byte order of another kind of machine")
        wanted, left = int(count) * np.dtype(dtype).itemsize, self.data.nbytes - int(offset)
        if wanted > left:
            raise _Wrong(f"cut short, or a size in it is wrong: {wanted} bytes at {offset}, {max(left, 0)} are left")
        return np.frombuffer(self.data, dtype, int(count), int(offset)) if wanted else np.empty(0, dtype)

    def _get_str(self, offset: int) -> Any:
        length = self._get(offset, np.uint64)
        if length[0] > LONGEST_STRING:
            raise _Wrong(f"a string at {offset} has {length[0]} bytes; at most {LONGEST_STRING} are read")
        self._octets += int(length[0])
        if self._octets > MOST_TEXT:
            raise _Wrong(f"its strings have more than {MOST_TEXT} bytes, the last of them at {offset}")
        return length, self._get(offset + 8, np.uint8, length[0])

    def _build_fields(self, offs: int, count: int) -> Any:
        if count > MOST_PAIRS:
            raise _Wrong(f"it has {count} keys; at most {MOST_PAIRS} are read")
        return super()._build_fields(offs, count)

    def _get_field_parts(self, orig_offs: int, raw_type: int) -> Any:
        if raw_type != GGUFValueType.ARRAY:
            return super()._get_field_parts(orig_offs, raw_type)
        kind, length = int(self._get(orig_offs, np.uint32)[0]), int(self._get(orig_offs + 4, np.uint64)[0])
        if kind == GGUFValueType.ARRAY:
            raise _Wrong(f"a list at {orig_offs} has lists as entries, which no supported model has")
        self._entries += length
        if self._entries > MOST_ENTRIES:
            raise _Wrong(f"a list at {orig_offs} has {length} entries; at most {MOST_ENTRIES} are read in all lists")
        return super()._get_field_parts(orig_offs, raw_type)

    def _build_tensor_info(self, offs: int, count: int) -> Any:
        if count > MOST_TENSORS:
            raise _Wrong(f"it has {count} tensors; at most {MOST_TENSORS} are read")
        return super()._build_tensor_info(offs, count)

    def _build_tensors(self, start_offs: int, fields: Any) -> None:
        for info in fields:
            _check_tensor(info, len(self.data) - start_offs)
        super()._build_tensors(start_offs, fields)


def _check_tensor(info: Any, size: int) -> None:
    """Raises _Wrong unless a tensor is within the `size` bytes of the file's data, in whole blocks."""
    _, _, _, dims, raw_type, offset = info.parts
    name, shape, start = info.name, [int(side) for side in dims], int(offset[0])
    if len(name) > LONGEST_NAME:
        raise _Wrong(f"a tensor's name has {len(name)} characters; at most {LONGEST_NAME} are read")
    try:
        kind = GGMLQuantizationType(int(raw_type[0]))
        block, block_bytes = GGML_QUANT_SIZES[kind]
    except (ValueError, KeyError):
        raise _Wrong(f"{name}: its type {int(raw_type[0])} is not known") from None
    if not 1 <= len(shape) <= 4 or min(shape) < 1:
        raise _Wrong(f"{name} has shape {shape[::-1]}")
    if shape[0] % block:
        raise _Wrong(f"{name} of {kind.name} has {shape[0]} inputs, which are not whole blocks of {block}")
    wanted = block_bytes
    for side in (shape[0] // block, *shape[1:]):
        wanted *= side
    if start + wanted > size:
        raise _Wrong(
            f"{name} of {kind.name} {shape[::-1]} is at bytes {start} to {start + wanted} of the data, of which "
            f"the file has {max(size, 0)}"
        )


def open_gguf(path: Path) -> GgufFile:
    """Opens a file and, if it is the first of several (`-00001-of-00003.gguf`), the others beside it. Raises
    CheckpointError naming the file and what is wrong."""
    metadata, tensors = _read(path)
    shards = metadata.count("split.count", 1, least=0, most=MOST_SHARDS)
    if shards > 1:
        named = _SHARD.search(path.name)
        if named is None or int(named[1]) != 1 or int(named[2]) != shards:
            raise CheckpointError(
                f"{path} is one of {shards} files of a model: name the first, ...-00001-of-{shards:05d}.gguf"
            )
        for number in range(2, shards + 1):
            more = _read(path.with_name(f"{path.name[: named.start()]}-{number:05d}-of-{shards:05d}.gguf"))[1]
            if twice := sorted(more.keys() & tensors):
                raise CheckpointError(f"{path} and another of its {shards} files both have {twice[0]}")
            tensors |= more
    return GgufFile(path, metadata, tensors)


def _read(path: Path) -> tuple[Metadata, dict[str, StoredTensor]]:
    if not path.is_file():  # a folder, or a pipe, which would never end
        raise CheckpointError(f"{path} is not a file")
    if path.stat().st_size < 24:
        raise CheckpointError(f"{path} is not a GGUF file: it has {path.stat().st_size} bytes")
    try:
        reader = _Reader(path)
        values = {name: _value(part) for name, part in reader.fields.items()}
        tensors = {
            tensor.name: StoredTensor(
                tensor.name, tensor.tensor_type, tuple(int(side) for side in reversed(tensor.shape)), tensor.data
            )
            for tensor in reader.tensors
        }
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}") from None
    except (ValueError, KeyError, IndexError, OverflowError) as error:
        what = error.args[0] if error.args else repr(error)
        raise CheckpointError(f"{path} is not a GGUF file that can be read: {what}") from None
    return Metadata(values, _architecture(values, path), path.name), tensors


def _architecture(values: Mapping[str, Any], path: Path) -> str:
    found = values.get("general.architecture")
    if not isinstance(found, str):
        raise CheckpointError(f"{path}: general.architecture is {found!r}, not the name of an architecture")
    return found


def _value(part: Any) -> Any:
    """A field's value: int, float, bool, str, or a list of one of these. A float32 becomes the shortest decimal number
    that is rounded to it, as 1e-06 was before it was stored."""
    kind = part.types[0] if part.types else None
    if kind == GGUFValueType.ARRAY:
        if not part.data:
            return []
        inner = part.types[1]
        return [_scalar(part.parts[index], inner) for index in part.data]
    return _scalar(part.parts[part.data[0]], kind)


def _scalar(raw: Any, kind: Any) -> Any:
    if kind == GGUFValueType.STRING:
        return bytes(raw).decode("utf-8")
    number = raw[0]
    if kind == GGUFValueType.BOOL:
        return bool(number)
    if kind == GGUFValueType.FLOAT32:
        return float(str(number))
    return number.item()
