"""Patches in a sealed memory file: written once by an image worker, passed on by its descriptor, mapped by the engine.

The file is anonymous, so nothing is left behind however a process ends. Its seals guarantee that nobody can write to it
or change its size any more; they are checked on a file from a process that hostile files may have taken over.
"""

from __future__ import annotations

import fcntl
import mmap
import os
from dataclasses import dataclass
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
class SealedItem:
    """An image or video whose patches lie in a memory file."""

    description: ItemDescription
    file: MemoryFile

    @property
    def kind(self) -> str:
        return self.description.kind

    @property
    def tokens(self) -> int:
        return self.description.tokens

    @property
    def nbytes(self) -> int:
        return self.description.nbytes

    @property
    def num_slices(self) -> int:
        return self.description.num_slices


PreparedItem = SealedItem | EncoderItem
"""Patches from a worker process, or in this process's memory."""


def seal(item: EncoderItem) -> SealedItem:
    """Copies the patches into a sealed file. Raises OSError where there is no memory."""
    import torch  # not above: processes that only pass files on do without

    data = item.patches.contiguous().view(-1).view(torch.uint8).numpy().data
    descriptor = os.memfd_create("saccade-patches", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    file = MemoryFile(descriptor)
    offset = 0
    # By write and not by mmap: a full machine raises an error here instead of a signal in the middle of the copy.
    while offset < len(data):
        offset += os.write(descriptor, data[offset:])
    fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, SEALS)
    return SealedItem(item.description, file)


def open_patches(description: ItemDescription, descriptor: int) -> EncoderItem:
    """The item, with patches that are views of the mapped file; the mapping lives as long as they do. Takes ownership
    of the descriptor."""
    import torch

    try:
        # A private mapping: torch wants a writable buffer, and writes do not reach the file.
        memory = mmap.mmap(descriptor, description.nbytes, access=mmap.ACCESS_COPY)
    finally:
        os.close(descriptor)
    patches: torch.Tensor = torch.frombuffer(memory, dtype=getattr(torch, description.dtype))
    return description.with_patches(patches.view(description.shape))
