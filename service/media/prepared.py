"""An image or clip of a request on its way from the worker that cuts it into patches to the engine that encodes it.

The patches are in a sealed memory file, which an image worker writes once, whose descriptor is passed on, and which the
engine maps. The file is anonymous, so nothing is left behind if a process is killed. Its seals guarantee that its
content and size can no longer change. They are checked, because the worker may have been taken over by a hostile file.
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
        """The same file with a descriptor of its own. Raises OSError if the process can have no more descriptors."""
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
    """One image or clip, cut into patches. Fields that are not known yet have their defaults."""

    layout: EncoderItem | ItemDescription
    """Its attention sequences and rows; an `EncoderItem` if the patches are in this process's memory."""
    file: MemoryFile | None = None
    """The file with the patches, if they are not in `layout`; None while the descriptor is sent beside the message."""
    field: str = ""
    """The item's path in the request, for error messages."""
    key: bytes = b""
    """Content key: a hash of tenant, model revision, preprocessing and content."""
    labels: tuple[str, ...] = ()
    """For a clip: the text before each temporal patch or, if it has none, an empty string for each."""
    frames: int = 0
    """For a clip: the number of sampled frames."""
    start: int = 0
    """The item occupies `prompt_ids[start : start + length]`."""
    between: tuple[tuple[int, ...], ...] = ()
    """For a clip with text between its temporal patches: the ids between each patch and the next. If the clip is
    pruned, the rows of each temporal patch are known only after encoding, but their total is known before."""

    @property
    def runs(self) -> int:
        """Number of runs of rows in the prompt: one for each attention sequence."""
        return self.layout.num_sequences

    @property
    def length(self) -> int:
        """Number of prompt tokens that the item takes: its rows, and the ids between them."""
        return self.layout.tokens + sum(map(len, self.between))

    @property
    def encoder_item(self) -> EncoderItem:
        """The item for the encoder; the patches must be in this process's memory."""
        assert isinstance(self.layout, EncoderItem), "the patches are in a file"
        return self.layout

    def sealed(self) -> PreparedItem:
        """The same item with its patches in a sealed file, to which they are copied if they are not in one yet. Raises
        OSError if there is no memory."""
        if not isinstance(self.layout, EncoderItem):
            return self
        return replace(self, layout=self.layout.description, file=_seal(self.layout))

    def opened(self, descriptor: int) -> PreparedItem:
        """The same item with patches that are views of the mapped file; the mapping lives as long as the patches. Takes
        ownership of the descriptor."""
        assert isinstance(self.layout, ItemDescription) and self.file is None
        try:
            patches = _mapped(descriptor, self.layout)
        finally:
            os.close(descriptor)
        return replace(self, layout=self.layout.with_patches(patches.view(self.layout.shape)))


def _mapped(descriptor: int, layout: ItemDescription) -> torch.Tensor:
    """The patches in a private mapping of the file: torch needs writable memory, and writes to it do not reach the
    file. It keeps no descriptor: all images of an engine's requests are mapped, and a process may be limited to 1,024
    descriptors."""
    import torch  # here, because processes that only pass files on do not need torch

    dtype: torch.dtype = getattr(torch, layout.dtype)
    try:
        path = f"/proc/self/fd/{descriptor}"
        return torch.from_file(path, shared=False, size=layout.nbytes // dtype.itemsize, dtype=dtype)
    except RuntimeError:  # for example, /proc is not mounted; Python's mapping keeps a copy of the descriptor
        return torch.frombuffer(mmap.mmap(descriptor, layout.nbytes, access=mmap.ACCESS_COPY), dtype=dtype)


def _seal(item: EncoderItem) -> MemoryFile:
    """Copies the patches to a sealed file. Raises OSError if there is no memory."""
    import torch  # here for the same reason as in `_mapped`

    data = item.patches.contiguous().view(-1).view(torch.uint8).numpy().data
    descriptor = os.memfd_create("saccade-patches", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    file = MemoryFile(descriptor)
    offset = 0
    # With write and not mmap, so that a lack of memory is an error here instead of a signal in the middle of the copy.
    while offset < len(data):
        offset += os.write(descriptor, data[offset:])
    fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, SEALS)
    return file
