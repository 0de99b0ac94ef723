"""Reads model directories in the format of the Hugging Face hub.

The model's family maps published names of weights to native ones, which the decoder and the tower use. Tensors are
returned as (native name, tensor) pairs, one layer at a time, as views of the mapped file.
"""

from __future__ import annotations

import hashlib
import logging
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from families import CheckpointError, Target
from families.files import optional_json
from service.model.adapter import Adapter
from service.model.cache import resolve_model
from service.model.formats.declared import BESIDE, disagreements, read_declared
from service.model.formats.tensors import PACKED, FormatError, StoredWeight, find_weights, listed, modules_of
from service.model.merging import Merges, assembled, match_adapter
from service.model.modelconfig import ModelConfig, load_config
from service.model.read_ahead import ReadAhead
from service.model.weight_files import WeightFiles
from service.model.weight_sources import (
    EMBEDDINGS,
    HEAD,
    Source,
    expected_weights,
    find_sources,
    misfits,
    shape_of,
    untied,
)

if TYPE_CHECKING:
    import torch

    from kernels.linear import Quantised, Stack

log = logging.getLogger(__name__)

__all__ = ["Checkpoint", "CheckpointError", "open_checkpoint"]

Progress = Callable[[int, int], None]
"""Called with (bytes read, total bytes) while weights are read."""


class Checkpoint:
    """One model directory: its configuration, and its weights by native name, with an adapter merged into them."""

    def __init__(
        self, path: Path, *, name: str | None = None, adapter: Adapter | None = None, outline: bool = False
    ) -> None:
        """`outline`: the directory may have no weights; their shapes then follow from config.json."""
        self.config: ModelConfig = load_config(path, name=name)
        self.path, self.adapter = path, adapter
        self.targets = self.config.weight_targets()
        """A weight's name in the files -> the native tensors to which it contributes; none for parts that are not
        used."""
        self.files = WeightFiles(path, optional=outline)
        if not self.config.dtype:
            self.config = replace(self.config, dtype=self.files.dtype)
        digest = hashlib.sha256((path / "config.json").read_bytes() + self.files.digest.encode())
        if adapter is not None:
            digest.update(adapter.digest.encode())
        self.revision = digest.hexdigest()[:16]
        """Digest over config.json, the tensor tables and samples of the weights, and those of the adapter: part of
        cache keys, identifies the version."""
        beside = {file: optional_json(path / file) for file in BESIDE}
        self.declared = read_declared(self.config.published, beside, modules_of(self.files.table))
        """The quantisation that the configuration declares."""
        self.weights = self._find_weights()
        """By the names that the weights would have without quantisation."""
        if not self.files.paths:
            self.weights = _described(self.config)
            self.targets = lambda name: [Target(name)]
        self.merges: Merges | None = None
        """The adapter's changes of the weights."""
        self._sources = self._find_sources()
        """By native name."""

    def _find_weights(self) -> dict[str, StoredWeight]:
        declared, own = self.declared, self.config.stored_forms
        try:
            if declared is None:
                found, unused = find_weights(self.files.table, own_forms=own)
            else:
                found, unused = find_weights(
                    self.files.table, block=declared.block, group_of=declared.group_of, packed_of=declared.packed_of,
                    own_forms=own,
                )  # fmt: skip
        except FormatError as error:
            raise CheckpointError(f"{self.path}: {error}") from None
        if unused:
            log.info("%d scales of activations and caches are not used: both stay in 16 bits or more", len(unused))
        if problems := disagreements(declared, found):
            raise CheckpointError(
                f"{self.path}: {len(problems)} weights differ from what the configuration says:\n  {listed(problems)}"
            )
        return found

    def _find_sources(self) -> dict[str, Source]:
        found, not_served, problems = find_sources(self.weights, self.targets)
        if not_served:
            parts = sorted({".".join(n.split(".")[:2]) for n in not_served})
            log.info(
                "%d weights of parts of the model that are not served are not loaded: %s",
                len(not_served),
                ", ".join(parts),
            )
        if self.config.decoder.tie_word_embeddings and HEAD in found:
            self._tie(found)
        if self.adapter is not None:
            self.merges, self.config = match_adapter(self.adapter, self.config, found, self.weights)
        expected, optional = expected_weights(self.config)
        for name in found.keys() & expected.keys():
            for part in found[name].names:
                if (weight := self.weights[part]).scheme in PACKED:
                    self.weights[part] = weight.with_inputs(expected[name][-1])
        problems += misfits(found, self.weights, self.files.table, expected, optional)
        if problems:
            raise CheckpointError(
                f"{self.path}: {len(problems)} weights do not fit config.json:\n  {listed(problems, 40)}"
            )
        return {name: found[name] for name in expected if name in found}

    def _tie(self, found: dict[str, Source]) -> None:
        """Handles a vocabulary projection that is stored although config.json ties it to the embeddings, as
        transformers does. If no embeddings are stored, it is used for both. An equal matrix is left out of `found`. A
        different one is used, and the configuration is no longer tied."""
        if EMBEDDINGS not in found:
            found[EMBEDDINGS] = found.pop(HEAD)
            return
        head, table = (self.weights[found[name].names[0]].parts for name in (HEAD, EMBEDDINGS))
        if head.keys() == table.keys() and all(self.files.same(head[part], table[part]) for part in head):
            del found[HEAD]
            return
        log.warning(
            "%s: lm_head.weight differs from the embeddings, so both are used although config.json ties them", self.path
        )
        self.config = untied(self.config)

    @property
    def stored_as(self) -> dict[str, int]:
        """Bytes of weights by `StoredWeight.format`: `plain`, `fp8-block` and so on."""
        sizes: dict[str, int] = {}
        for weight in self.weights.values():
            sizes[weight.format] = sizes.get(weight.format, 0) + weight.nbytes
        return sizes

    def decoder_weights(self, progress: Progress | None = None) -> Iterator[tuple[str, torch.Tensor | Quantised]]:
        """(native name, tensor) of the decoder in layer order, in the file's dtype, as views of the mapped file.
        Weights that are stored one by one, but used as a stack, are copied."""
        from kernels.linear import Stack, stack  # imported here because it needs torch

        for name, weight in self.decoder_parts(progress):
            yield name, stack(weight) if isinstance(weight, Stack) else weight

    def decoder_parts(self, progress: Progress | None = None) -> Iterator[tuple[str, torch.Tensor | Quantised | Stack]]:
        """Like `decoder_weights`, but the parts of a stack that are stored one by one are read only when they are
        used."""
        return self._stream(self.config.decoder.expected_weights(), progress)

    def vision_weights(self, progress: Progress | None = None) -> Iterator[tuple[str, torch.Tensor | Quantised]]:
        """Like `decoder_weights`, for the encoder. Empty for text-only models."""
        from kernels.linear import Stack, stack

        vision = self.config.vision
        for name, weight in self._stream(vision.expected_weights() if vision else {}, progress):
            yield name, stack(weight) if isinstance(weight, Stack) else weight

    @property
    def encoder_kinds(self) -> tuple[str, ...]:
        """Kinds of items that the vision weights support; none for text-only models."""
        vision = self.config.vision
        return vision.kinds(self._sources) if vision else ()

    def vision_digest(self) -> str:
        """Digest over names, shapes and samples of the vision weights, which two hosts compare."""
        import torch  # imported here: frontend processes read tables, not tensors

        digest = hashlib.sha256()
        for name, tensor in self.vision_weights():
            stored = tensor if isinstance(tensor, torch.Tensor) else tensor.values
            digest.update(f"{name} {tuple(tensor.shape)} {stored.dtype}".encode())
            content = stored.contiguous().view(-1).view(torch.uint8)
            for i in range(16):
                start = len(content) * i // 16
                digest.update(content[start : start + 4096].numpy().data)
        return digest.hexdigest()[:16]

    def stored_names(self, name: str) -> tuple[str, ...]:
        """Names in the files of the tensors that make a native one."""
        return self._sources[name].names

    def decoder_shapes(self) -> dict[str, tuple[int, ...]]:
        """Native name -> shape of the decoder's weights in the files."""
        return {
            name: shape_of(self._sources[name], self.weights)
            for name in self.config.decoder.expected_weights()
            if name in self._sources
        }

    def served(self, role: str = "all", *, drafts: bool = True) -> list[str]:
        """Native names of the weights that a server of this role keeps. `drafts`: whether the multi-token prediction
        head drafts; without that it is read, but not kept."""
        decoder = self.config.decoder.expected_weights()
        unused = {} if drafts else self.config.decoder.mtp_weights()
        return [
            name
            for name in self._sources
            if name not in unused and (role == "all" or (name in decoder) == (role == "decoder"))
        ]

    def parameters(self, role: str = "all", *, drafts: bool = True) -> int:
        """Number of parameters that a server of this role keeps, as in `served`."""
        stored = {name for ours in self.served(role, drafts=drafts) for name in self._sources[ours].names}
        return sum(math.prod(self.weights[name].shape) for name in stored)

    def kind_of(self, name: str) -> str:
        """How the weight of a native name is stored: `plain`, or one of `kernels.linear.KINDS`."""
        stored = self.weights[self._sources[name].names[0]].format
        kinds = {"gptq": "int4", "gptq-int8": "int8", "awq": "int4"}
        return kinds.get(stored, stored.partition("-")[0])

    def weight_bytes(self, name: str, item: int) -> int:
        """Bytes of the weight of a native name: a plain one with `item` bytes per number, others as stored."""
        source = self._sources[name]
        stored = [self.weights[each] for each in source.names]
        total = sum(math.prod(w.shape) * item if w.scheme == "plain" else w.nbytes + w.widened for w in stored)
        target = source.target
        return total * target.num_taken // target.parts if target.how == "part" else total

    @property
    def formats(self) -> tuple[str, ...]:
        """Formats of quantised weights, largest first."""
        sizes = {stored: count for stored, count in self.stored_as.items() if stored != "plain"}
        return tuple(sorted(sizes, key=lambda stored: -sizes[stored]))

    def _stream(self, expected: Mapping[str, tuple[int, ...]], progress: Progress | None) -> Iterator[tuple[str, Any]]:
        wanted = [name for name in expected if name in self._sources]
        stored = [self.weights[n] for name in wanted for n in self._sources[name].names]
        total = sum(weight.nbytes for weight in stored) or 1
        ahead = ReadAhead([self.files.where(part) for weight in stored for part in weight.parts.values()])
        done = 0

        def reached() -> None:
            ahead.reached(done)
            if progress:
                progress(min(done, total), total)

        def read(names: Sequence[str], index: int) -> torch.Tensor | Quantised:
            nonlocal done
            reached()
            weight = self._load(names[index])
            done += self.weights[names[index]].nbytes
            return weight

        try:
            for name in wanted:
                source = self._sources[name]
                merging = None if self.merges is None else self.merges.of(name)
                shape = shape_of(source, self.weights)
                yield name, assembled(source, shape, partial(read, source.names), merging)
            reached()
        finally:
            ahead.close()

    def _load(self, name: str) -> torch.Tensor | Quantised:
        """A stored weight. Raises CheckpointError with the module's name for invalid values."""
        from service.model.formats.unpack import load

        offset = 1 if self.declared is None else self.declared.gptq_offset
        try:
            return load(self.weights[name], self.files.read, gptq_offset=offset)
        except FormatError as error:
            raise CheckpointError(f"{self.path}: {error}") from error


def _described(config: ModelConfig) -> dict[str, StoredWeight]:
    """Each weight that config.json describes, by native name."""
    return {name: StoredWeight(name, "plain", shape) for name, shape in expected_weights(config)[0].items()}


def open_checkpoint(
    model: str, revision: str | None = None, *, adapter: str | None = None, adapter_revision: str | None = None,
    outline: bool = False,
) -> Checkpoint:  # fmt: skip
    """Opens `demo`, a directory or a hub id in the cache, and an adapter, a directory or a hub id too. Raises
    CheckpointError with all problems in one message."""
    path = resolve_model(model, revision)
    opened = None
    if adapter is not None:
        folder = resolve_model(adapter, adapter_revision, kind="adapter")
        opened = Adapter(folder, name=_hub_id(adapter), outline=outline)
    return Checkpoint(path, name=model if model == "demo" else _hub_id(model), adapter=opened, outline=outline)


def _hub_id(name: str) -> str | None:
    """The name, unless it is that of a folder."""
    return None if Path(name).expanduser().is_dir() else name
