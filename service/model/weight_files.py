"""Safetensors files of a model directory: their tables, and tensors that are mapped one at a time.

Each tensor has its own mapping, which is freed with the tensor: while a model loads, memory holds only the finished
weights and the tensors of one layer.
"""

from __future__ import annotations

import hashlib
import json
import logging
import operator
import os
import struct
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from families import CheckpointError
from service.model.cache import indexed_files
from service.model.formats.tensors import PLAIN_FLOATS, Entry
from service.model.read_ahead import Range

if TYPE_CHECKING:
    import torch

log = logging.getLogger(__name__)

DTYPES = {
    "F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16", "F8_E4M3": "float8_e4m3fn",
    "I64": "int64", "I32": "int32", "I16": "int16", "I8": "int8", "U8": "uint8", "BOOL": "bool",
}  # fmt: skip
"""Dtypes that can be read: safetensors' name -> torch's name."""

LONGEST_TABLE = 100_000_000
"""Bytes of a file's table at most, as in the safetensors library."""
COMPARED_AT_ONCE = 1 << 22
"""Bytes of two tensors that are in memory while they are compared."""


class WeightFiles:
    """The tables of a directory's safetensors files. Raises CheckpointError if files are missing, truncated or
    invalid."""

    def __init__(self, path: Path, *, optional: bool = False, only: str = "") -> None:
        """`optional`: whether there may be no files. `only`: the name of the single file that is read, if there may be
        others."""
        self.paths = _weight_files(path, optional=optional, only=only)
        """Empty where there are none, for a model or an adapter of which only the configuration is here."""
        self.table: dict[str, Entry] = {}
        """Stored name -> tensor."""
        self._places: dict[str, tuple[Path, int]] = {}
        digest = hashlib.sha256()
        for file in self.paths:
            header, raw = _read_header(file)
            digest.update(raw)
            _sample_into(digest, file)
            for name, entry in header.items():
                if name in self.table:
                    raise CheckpointError(f"{file} and {self._places[name][0]} both contain {name}")
                start, end = entry["data_offsets"]
                self.table[name] = Entry(str(entry["dtype"]), tuple(entry["shape"]), end - start)
                self._places[name] = file, 8 + len(raw) + start
        self.digest = digest.hexdigest()
        """Digest of the tables and of samples of the content."""

    @property
    def dtype(self) -> str:
        """The floating-point dtype that takes most bytes, such as `float32`; `bfloat16` if there are no weights."""
        sizes = {"BF16": 0}
        for entry in self.table.values():
            if entry.dtype in PLAIN_FLOATS:
                sizes[entry.dtype] = sizes.get(entry.dtype, 0) + entry.nbytes
        return DTYPES[max(sizes, key=sizes.__getitem__)]

    def where(self, name: str) -> Range:
        """The bytes of a tensor."""
        file, begin = self._places[name]
        return Range(file, begin, self.table[name].nbytes)

    def same(self, one: str, other: str) -> bool:
        """Whether two tensors have the same dtype, shape and bytes. Reads both."""
        if self.table[one] != self.table[other]:
            return False
        (file, begin), (other_file, other_begin) = self._places[one], self._places[other]
        left = self.table[one].nbytes
        try:
            with file.open("rb") as first, other_file.open("rb") as second:
                first.seek(begin)
                second.seek(other_begin)
                while left and (block := first.read(min(left, COMPARED_AT_ONCE))):
                    if block != second.read(len(block)):
                        return False
                    left -= len(block)
        except OSError as error:
            raise CheckpointError(f"{file}: a weights file cannot be read: {error}") from error
        return True

    def read(self, name: str) -> torch.Tensor:
        """Maps a tensor, which must not be written to."""
        import torch  # imported here: frontend processes read tables, not tensors

        from kernels.host_memory import map_file

        entry, (file, offset) = self.table[name], self._places[name]
        if entry.dtype not in DTYPES:
            raise CheckpointError(f"{file}: {name} has dtype {entry.dtype}, which is not supported")
        dtype = getattr(torch, DTYPES[entry.dtype])
        if not entry.nbytes:
            return torch.empty(entry.shape, dtype=dtype)
        try:
            handle = os.open(file, os.O_RDONLY | os.O_CLOEXEC)
            try:
                octets = map_file(handle, offset, entry.nbytes)
                os.posix_fadvise(handle, offset, entry.nbytes, os.POSIX_FADV_WILLNEED)
            finally:
                os.close(handle)
        except (OSError, ValueError) as error:
            raise CheckpointError(f"{file}: a weights file cannot be read: {error}") from error
        if octets.data_ptr() % dtype.itemsize:
            octets = octets.clone()
        return octets.view(dtype).view(entry.shape)


def _weight_files(path: Path, *, optional: bool, only: str) -> list[Path]:
    if only:
        if (path / only).exists():
            return [path / only]
        if optional:
            return []
        raise CheckpointError(f"{path} has no {only} (other formats are not supported)")
    single, index = path / "model.safetensors", path / "model.safetensors.index.json"
    if single.exists():  # goes before an index, as in transformers
        if index.exists():
            log.warning("%s is used, and not the files that %s names", single, index.name)
        return [single]
    if index.exists():
        files = [path / file for file in indexed_files(index)]
        if absent := [f.name for f in files if not f.exists()]:
            if optional:
                return []
            raise CheckpointError(f"{path}: the index names files that do not exist: {', '.join(absent)}")
        return files
    if files := sorted(path.glob("*.safetensors")):
        return files
    if optional:
        return []
    raise CheckpointError(f"{path} has no safetensors weights (other formats are not supported)")


def _read_header(file: Path) -> tuple[dict[str, dict[str, Any]], bytes]:
    """The tensor table of a safetensors file: an 8-byte little-endian length, then JSON."""
    if not file.is_file():  # a link to nothing, or a pipe, which would never end
        raise CheckpointError(f"{file} is not a plain file")
    try:
        size = file.stat().st_size
        with file.open("rb") as stream:
            prefix = stream.read(8)
            length = struct.unpack("<Q", prefix)[0] if len(prefix) == 8 else size + 1
            if length > size - 8:
                raise CheckpointError(f"{file} is not a safetensors file, or is cut short ({size} bytes)")
            if length > LONGEST_TABLE:  # before it is in memory
                raise CheckpointError(f"{file}: its table has {length} bytes; at most {LONGEST_TABLE} are read")
            raw = stream.read(length)
    except OSError as error:
        raise CheckpointError(f"{file} cannot be read: {error.strerror}") from None
    try:
        header: dict[str, dict[str, Any]] = json.loads(raw)
    except (ValueError, RecursionError):
        raise CheckpointError(f"{file} is not a safetensors file: its table is not JSON") from None
    if not isinstance(header, dict):
        raise CheckpointError(f"{file} is not a safetensors file: its table is not a JSON object")
    header.pop("__metadata__", None)
    try:
        for name, entry in header.items():
            _check_entry(file, name, entry["dtype"], entry["shape"], entry["data_offsets"])
    except CheckpointError:
        raise
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise CheckpointError(f"{file}: its entry {name!r} cannot be read: {error!r}") from None
    _check_places(file, {name: entry["data_offsets"] for name, entry in header.items()}, size - 8 - length)
    return header, raw


def _check_places(file: Path, places: Mapping[str, Sequence[int]], size: int) -> None:
    """Raises CheckpointError unless the tensors fill the `size` bytes after the table without gaps and overlaps, as the
    format requires. Otherwise the table is damaged, and a weight would be read from the place of another."""
    end, before = 0, "the table"
    for name, (start, stop) in sorted(places.items(), key=lambda item: tuple(item[1])):
        if start != end:
            raise CheckpointError(f"{file}: {name} begins at byte {start} of the data, but {before} ends at {end}")
        end, before = stop, name
    if end > size:
        raise CheckpointError(f"{file} is cut short: {size} bytes of {end} after its table")
    if end < size:
        raise CheckpointError(f"{file} has {size} bytes after its table, of which its tensors take {end}")


BITS = {"F64": 64, "I64": 64, "F32": 32, "I32": 32, "F16": 16, "BF16": 16, "I16": 16, "U16": 16, "U32": 32, "U64": 64}
"""Bits per number, for the dtypes that are wider than 8."""


def _check_entry(file: Path, name: str, dtype: str, shape: Sequence[int], offsets: Sequence[int]) -> None:
    """Raises CheckpointError for inconsistent sizes, which would give access to other memory."""
    start, end = map(operator.index, offsets)
    numbers = 1
    for side in shape:
        if not isinstance(side, int) or side < 0:
            raise CheckpointError(f"{file}: {name} has shape {list(shape)}")
        numbers *= side
    bits = BITS.get(dtype, 4 if dtype.startswith("F4") else 6 if dtype.startswith("F6") else 8)
    if not 0 <= start <= end or (numbers * bits + 7) // 8 != end - start:
        raise CheckpointError(f"{file}: {name} of {dtype} {list(shape)} has {end - start} bytes")


def _sample_into(digest: hashlib._Hash, file: Path, blocks: int = 64, block: int = 4096) -> None:
    """Adds evenly spaced blocks of a file to the digest: fine-tuned models differ everywhere, so samples distinguish
    them."""
    size = file.stat().st_size
    with file.open("rb") as stream:
        for i in range(blocks):
            stream.seek(size * i // blocks)
            digest.update(stream.read(block))
