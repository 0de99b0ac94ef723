"""Reads model directories as they are published on the Hugging Face hub.

The model's family maps published names of weights to ours; tensors are handed out as (name, tensor) pairs, a layer at a
time, straight from the mapped file."""

from __future__ import annotations

import hashlib
import json
import logging
import math
import struct
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from families import CheckpointError, Target
from service.model.cache import indexed_files, resolve_model
from service.model.modelconfig import ModelConfig, load_config

if TYPE_CHECKING:
    import torch

    from kernels.linear import Quantised

log = logging.getLogger(__name__)

__all__ = ["Checkpoint", "CheckpointError", "open_checkpoint"]

Progress = Callable[[int, int], None]
"""Called with (bytes read, bytes in all) as weights stream in."""


@dataclass(frozen=True)
class _Source:
    """Where the tensor of one of our names comes from: one stored tensor, or several to stack."""

    names: tuple[str, ...]
    target: Target
    """What becomes of it; of those of a stack, the first."""


class Checkpoint:
    """One model directory: its configuration and its weights by our names."""

    def __init__(self, path: Path, *, name: str | None = None, outline: bool = False) -> None:
        """`outline`: a directory without weights will do, whose shapes are then those that config.json describes."""
        self.config: ModelConfig = load_config(path, name=name)
        self.path = path
        self.targets = self.config.weight_targets()
        """Stored name -> our tensors that it contributes to; none for parts that are not served."""
        self.files = _weight_files(path, optional=outline)
        """Its safetensors files."""
        self._shapes: dict[str, tuple[int, ...]] = {}
        self._bytes: dict[str, int] = {}
        self._file_of: dict[str, Path] = {}
        digest = hashlib.sha256((path / "config.json").read_bytes())
        for file in self.files:
            header, raw = _read_header(file)
            digest.update(raw)
            _sample_into(digest, file)
            for tensor, entry in header.items():
                self._file_of[tensor] = file
                self._shapes[tensor] = tuple(entry["shape"])
                self._bytes[tensor] = entry["data_offsets"][1] - entry["data_offsets"][0]
        self.revision = digest.hexdigest()[:16]
        """Digest over config.json, the tensor tables and samples of the weights: keys caches, names the version."""
        if not self.files:
            self._shapes = self._described()
            self.targets = lambda name: [Target(name)]
        self._quantised = self._fold_quantised()
        self._plan = self._resolve_sources()

    def _described(self) -> dict[str, tuple[int, ...]]:
        """Our name -> shape of each weight that config.json describes."""
        vision = self.config.vision
        return self.config.decoder.expected_weights() | (vision.expected_weights() if vision else {})

    def _fold_quantised(self) -> set[str]:
        """Names whose tensor is stored as two parts, which become one entry of the logical shape."""
        if self.config.weights is None:
            return set()
        names = {n.removesuffix(".values") for n in self._shapes if n.endswith(".values")}
        for name in names:
            parts = f"{name}.values", f"{name}.scale"
            if absent := [part for part in parts if part not in self._shapes]:
                raise CheckpointError(f"{self.path}: missing {absent[0]}")
            *rows, stored = self._shapes.pop(parts[0])
            self._shapes.pop(parts[1])
            self._shapes[name] = (*rows, stored * (2 if self.config.weights == "int4" else 1))
            self._bytes[name] = sum(self._bytes.pop(part) for part in parts)
        return names

    def decoder_weights(self, progress: Progress | None = None) -> Iterator[tuple[str, torch.Tensor | Quantised]]:
        """(our name, tensor) of the decoder in layer order, in the file's dtype, as views of the mapped file."""
        return self._stream(self.config.decoder.expected_weights(), progress)

    def vision_weights(self, progress: Progress | None = None) -> Iterator[tuple[str, torch.Tensor]]:
        """The same for the encoder. Empty for text-only models."""
        vision = self.config.vision
        return self._stream(vision.expected_weights() if vision else {}, progress)

    @property
    def encoder_kinds(self) -> tuple[str, ...]:
        """Kinds of items that the vision weights can take; none for text-only models."""
        vision = self.config.vision
        return vision.kinds(self._plan) if vision else ()

    def vision_digest(self) -> str:
        """Digest over names, shapes and samples of the vision weights: what two hosts compare of them."""
        import torch  # not above: frontend processes read tables, not tensors

        digest = hashlib.sha256()
        for name, tensor in self.vision_weights():
            digest.update(f"{name} {tuple(tensor.shape)} {tensor.dtype}".encode())
            content = tensor.contiguous().view(-1).view(torch.uint8)
            for i in range(16):
                start = len(content) * i // 16
                digest.update(content[start : start + 4096].numpy().data)
        return digest.hexdigest()[:16]

    def decoder_shapes(self) -> dict[str, tuple[int, ...]]:
        """Our name -> shape of the decoder's weights that are there."""
        return {
            name: self._shape_of(self._plan[name])
            for name in self.config.decoder.expected_weights()
            if name in self._plan
        }

    def parameters(self, role: str = "all") -> int:
        """Parameters of the parts that a server of this role serves."""
        ours = {
            "all": lambda native: True,
            "decoder": self.config.decoder.expected_weights().__contains__,
            "encoder": lambda native: native not in self.config.decoder.expected_weights(),
        }[role]
        stored = {name for native, source in self._plan.items() if ours(native) for name in source.names}
        return sum(math.prod(self._shapes[name]) for name in stored)

    def _sources(self) -> tuple[dict[str, _Source], list[str], list[str]]:
        """Our name -> where its tensor comes from; stored names that are passed over; what is wrong with the others."""
        found: dict[str, dict[int, tuple[str, Target]]] = {}
        passed_over: list[str] = []
        problems: list[str] = []
        for stored in self._shapes:
            targets = self.targets(stored)
            if not targets:
                passed_over.append(stored)
            for target in targets:
                entries = found.setdefault(target.name, {})
                entry = target.place if target.how == "stack" else -1
                if entry in entries or (entries and (entry < 0) != (min(entries) < 0)):
                    problems.append(f"{stored} and {next(iter(entries.values()))[0]} are both {target.name}")
                entries[entry] = stored, target
        sources: dict[str, _Source] = {}
        for name, entries in found.items():
            numbers = sorted(entries)
            if numbers[0] >= 0 and numbers != list(range(len(numbers))):
                problems.append(f"{name} has entries {numbers}, which do not count up from 0")
            sources[name] = _Source(tuple(entries[i][0] for i in numbers), entries[numbers[0]][1])
        return sources, passed_over, problems

    def _resolve_sources(self) -> dict[str, _Source]:
        """Matches stored names with the expected ones; one error lists every name that is missing, unexpected, there
        twice or of another shape."""
        whole, passed_over, problems = self._sources()
        if passed_over:
            parts = sorted({".".join(n.split(".")[:2]) for n in passed_over})
            log.info("%d weights of parts that are not served are passed over: %s", len(passed_over), ", ".join(parts))
        vision = self.config.vision
        expected = dict(self.config.decoder.expected_weights())
        optional = set(self.config.decoder.optional_weights())
        if vision is not None:
            expected |= vision.expected_weights()
            optional |= vision.optional_weights()
        if self.config.decoder.tie_word_embeddings:
            whole.pop("lm_head.weight", None)
        problems += [
            f"missing {name} {list(shape)}"
            for name, shape in expected.items()
            if name not in whole and name not in optional
        ]
        problems += [f"unexpected {name}" for name in whole if name not in expected]
        for name, shape in expected.items():
            if name in whole and (found := self._shape_of(whole[name])) != shape:
                problems.append(f"{name} has shape {list(found)}, not {list(shape)}")
        if problems:
            shown = "\n  ".join(problems[:40]) + (
                f"\n  ... and {len(problems) - 40} more" if len(problems) > 40 else ""
            )
            raise CheckpointError(f"{self.path}: {len(problems)} weights do not fit config.json:\n  {shown}")
        return {name: whole[name] for name in expected if name in whole}

    def _shape_of(self, source: _Source) -> tuple[int, ...]:
        first, target = self._shapes[source.names[0]], source.target
        if target.how == "part":
            at = max(0, len(first) - 2)
            rows = first[at]
            found = (*first[:at], rows // target.parts, *first[at + 1 :])
            return found if rows % (target.parts * target.groups) == 0 else ()
        if target.how == "stack":
            same = all(self._shapes[n] == first for n in source.names)
            return (len(source.names), *first) if same else ()
        return first

    def _stream(self, expected: Mapping[str, tuple[int, ...]], progress: Progress | None) -> Iterator[tuple[str, Any]]:
        from safetensors import SafetensorError, safe_open

        from kernels.linear import Quantised, stack  # not above, as torch

        wanted = [name for name in expected if name in self._plan]
        total = sum(self._bytes[n] for name in wanted for n in self._plan[name].names) or 1
        done = 0
        handles: dict[Path, object] = {}

        def read(stored: str) -> torch.Tensor:
            file = self._file_of[stored]
            if file not in handles:
                handles[file] = safe_open(file, framework="pt")
            return handles[file].get_tensor(stored)  # type: ignore[attr-defined,no-any-return]

        def load(stored: str) -> torch.Tensor | Quantised:
            if stored not in self._quantised:
                return read(stored)
            assert self.config.weights is not None
            parts = read(f"{stored}.values"), read(f"{stored}.scale")
            try:
                return Quantised(self.config.weights, *parts, self._shapes[stored][-1])
            except ValueError as error:
                raise CheckpointError(f"{self.path}: {stored}: {error}") from error

        try:
            for name in wanted:
                source = self._plan[name]
                tensors = [load(n) for n in source.names]
                yield name, _made(stack(tensors) if source.target.how == "stack" else tensors[0], source.target)
                done += sum(self._bytes[n] for n in source.names)
                if progress:
                    progress(done, total)
        except SafetensorError as error:
            raise CheckpointError(f"{self.path}: a weights file cannot be read: {error}") from error


def open_checkpoint(model: str, revision: str | None = None, *, outline: bool = False) -> Checkpoint:
    """`demo`, directory or hub id in the cache -> Checkpoint. Raises CheckpointError, with everything that is wrong in
    one message."""
    path = resolve_model(model, revision)
    name = model if model == "demo" or not Path(model).expanduser().is_dir() else None
    return Checkpoint(path, name=name, outline=outline)


def _made(tensor: torch.Tensor | Quantised, target: Target) -> torch.Tensor | Quantised:
    """What the target is made of a stored tensor; aliases it where it can."""
    from kernels.linear import Quantised, row_part

    if target.how == "part":
        of = target.place, target.parts, target.groups
        if isinstance(tensor, Quantised):
            return tensor.row_part(*of)
        tensor = row_part(tensor, *of, max(-2, -tensor.dim()))
    if target.offset:
        assert not isinstance(tensor, Quantised), f"{target.name} is quantised, and {target.offset} to be added"
        tensor = tensor.float() + target.offset
    return tensor


def _weight_files(path: Path, *, optional: bool = False) -> list[Path]:
    index = path / "model.safetensors.index.json"
    if index.exists():
        files = [path / file for file in indexed_files(index)]
        if absent := [f.name for f in files if not f.exists()]:
            raise CheckpointError(f"{path}: the index names files that are not there: {', '.join(absent)}")
        return files
    if (single := path / "model.safetensors").exists():
        return [single]
    if files := sorted(path.glob("*.safetensors")):
        return files
    if optional:
        return []
    raise CheckpointError(f"{path} holds no safetensors weights (other formats are not read)")


def _read_header(file: Path) -> tuple[dict[str, dict[str, list[int]]], bytes]:
    """The tensor table of a safetensors file: an 8-byte little-endian length, then JSON."""
    size = file.stat().st_size
    with file.open("rb") as stream:
        prefix = stream.read(8)
        length = struct.unpack("<Q", prefix)[0] if len(prefix) == 8 else size + 1
        if length > size - 8:
            raise CheckpointError(f"{file} is not a safetensors file, or is cut short ({size} bytes)")
        raw = stream.read(length)
    try:
        header: dict[str, dict[str, list[int]]] = json.loads(raw)
    except (json.JSONDecodeError, UnicodeDecodeError):
        raise CheckpointError(f"{file} is not a safetensors file: its table is not JSON") from None
    header.pop("__metadata__", None)
    end = max((entry["data_offsets"][1] for entry in header.values()), default=0)
    if 8 + length + end > size:
        raise CheckpointError(f"{file} is cut short: {size} bytes of {8 + length + end}")
    return header, raw


def _sample_into(digest: hashlib._Hash, file: Path, blocks: int = 64, block: int = 4096) -> None:
    """Mixes evenly spaced blocks of a file into the digest: two fine-tunes differ everywhere, so samples tell them
    apart."""
    size = file.stat().st_size
    with file.open("rb") as stream:
        for i in range(blocks):
            stream.seek(size * i // blocks)
            digest.update(stream.read(block))
