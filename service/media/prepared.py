"""An image or clip of a request between the worker that cuts it into patches and the engine that encodes it.

The patches lie in a sealed memory file: written once by an image worker, passed on by its descriptor, mapped by the
engine. The file is anonymous, so nothing is left behind however a process ends. Its seals guarantee that nobody can
write to it or change its size any more; they are checked on a file from a process that hostile files may have taken
over.
"""

from __future__ import annotations

import fcntl
import mmap
import os
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from encoder.item import EncoderItem, ItemDescription

if TYPE_CHECKING:
    import torch

SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE | fcntl.F_SEAL_SEAL


class MemoryFile:
    """Owns a descriptor until `take`, or until the object is deleted."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor

    def take(self) -> int:
        """Hands the descriptor to the caller, who must close it. May be called once."""
        descriptor, self._descriptor = self._descriptor, -1
        assert descriptor >= 0, "the descriptor has been taken"
        return descriptor

    def copy(self) -> MemoryFile:
        """The same file by a descriptor of its own. Raises OSError where the process can have no more of them."""
        return MemoryFile(fcntl.fcntl(self._descriptor, fcntl.F_DUPFD_CLOEXEC, 0))

    def is_sealed(self, size: int) -> bool:
        """Whether the file has `size` bytes, and neither its size nor its content can be changed any more."""
        try:
            seals = fcntl.fcntl(self._descriptor, fcntl.F_GET_SEALS)
        except OSError:  # not a memory file
            return False
        return seals & SEALS == SEALS and os.fstat(self._descriptor).st_size == size

    def __del__(self) -> None:
        if self._descriptor >= 0:
            os.close(self._descriptor)


@dataclass(frozen=True)
class PreparedItem:
    """One image or clip, cut into patches. What is not known yet has its default."""

    layout: EncoderItem | ItemDescription
    """How its rows divide; with the patches, where they lie in this process's memory."""
    file: MemoryFile | None = None
    """Where the patches lie, if not in `layout`; None while the descriptor is sent beside the message."""
    field: str = ""
    """Its path in the request, for error messages."""
    key: bytes = b""
    """Content key: a hash of tenant, model revision, preprocessing and content."""
    labels: tuple[str, ...] = ()
    """For a clip: the text before each temporal patch."""
    frames: int = 0
    """For a clip: the number of sampled frames."""
    start: int = 0
    """Its rows go to `prompt_ids[start : start + length]`."""
    between: tuple[tuple[int, ...], ...] = ()
    """For a clip with text between its temporal patches: the ids between one and the next. Where each one ends is known
    only after encoding if the clip is pruned; how many tokens they take together is known before."""

    @property
    def runs(self) -> int:
        """Runs of rows that it has in a prompt: of a clip one for each temporal patch, of an image one, and one for
        each of its slices."""
        return len(self.labels) or 1 + self.layout.num_slices

    @property
    def length(self) -> int:
        """Tokens of the prompt that it takes: rows, and the ids between them."""
        return self.layout.tokens + sum(map(len, self.between))

    @property
    def encoder_item(self) -> EncoderItem:
        """For the encoder; the patches must lie in this process's memory."""
        assert isinstance(self.layout, EncoderItem), "the patches lie in a file"
        return self.layout

    def sealed(self) -> PreparedItem:
        """The same with its patches in a sealed file, to which they are copied if they are not in one. Raises OSError
        where there is no memory."""
        if not isinstance(self.layout, EncoderItem):
            return self
        return replace(self, layout=self.layout.description, file=_seal(self.layout))

    def opened(self, descriptor: int) -> PreparedItem:
        """The same with patches that are views of the mapped file; the mapping lives as long as they do. Takes
        ownership of the descriptor."""
        import torch  # not above: processes that only pass files on do without

        assert isinstance(self.layout, ItemDescription) and self.file is None
        try:
            # A private mapping: torch wants a writable buffer, and writes do not reach the file.
            memory = mmap.mmap(descriptor, self.layout.nbytes, access=mmap.ACCESS_COPY)
        finally:
            os.close(descriptor)
        patches: torch.Tensor = torch.frombuffer(memory, dtype=getattr(torch, self.layout.dtype))
        return replace(self, layout=self.layout.with_patches(patches.view(self.layout.shape)))


def _seal(item: EncoderItem) -> MemoryFile:
    """Copies the patches to a file. Raises OSError where there is no memory."""
    import torch  # as above

    data = item.patches.contiguous().view(-1).view(torch.uint8).numpy().data
    descriptor = os.memfd_create("saccade-patches", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    file = MemoryFile(descriptor)
    offset = 0
    # By write and not by mmap: a full machine raises an error here instead of a signal in the middle of the copy.
    while offset < len(data):
        offset += os.write(descriptor, data[offset:])
    fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, SEALS)
    return file
