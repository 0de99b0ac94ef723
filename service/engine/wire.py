"""Messages between the front process and the engine process: a socket pair for control, shared memory for pixels.

Control messages are pickled by `multiprocessing.connection`, which is safe because both ends are processes of this
program on a socket pair that has no address. The pixels of a request travel in one anonymous memory file whose
descriptor crosses the socket: it has no name, so nothing is left behind however either process ends."""

from __future__ import annotations

import math
import mmap
import os
from dataclasses import fields, replace
from typing import TYPE_CHECKING, Any

from service.engine.types import EngineEvent, EngineImage, EngineRequest

if TYPE_CHECKING:
    import torch

ALIGNMENT = 64


def pack_pixels(request: EngineRequest) -> tuple[EngineRequest, int | None]:
    """Moves the request's pixels to an anonymous memory file: (request without pixels, descriptor or None).

    The caller owns the descriptor. Where an image was stands what is needed to put it together again. Raises OSError
    where the memory cannot be had.
    """
    if not request.images:
        return request, None
    tensors = [image.patches.patches.contiguous() for image in request.images]
    import torch

    total = sum(_aligned(t.numel() * t.element_size()) for t in tensors)
    descriptor = os.memfd_create("saccade-pixels", os.MFD_CLOEXEC)
    try:
        os.posix_fallocate(descriptor, 0, total)  # a full machine is an error here, and no signal in the middle
        with mmap.mmap(descriptor, total) as memory:
            offset = 0
            for tensor in tensors:
                view = tensor.view(torch.uint8).numpy().reshape(-1)
                memory[offset : offset + view.nbytes] = view.data
                offset += _aligned(view.nbytes)
    except BaseException:
        os.close(descriptor)
        raise
    bare: Any = tuple(map(_Bare, request.images, tensors))
    return replace(request, images=bare), descriptor


def _aligned(size: int) -> int:
    """Tensors of different types follow each other."""
    return -(-size // ALIGNMENT) * ALIGNMENT


class _Bare:
    """A picture or clip without its pixels, as it is pickled."""

    def __init__(self, image: EngineImage, tensor: torch.Tensor) -> None:
        self.image = {f.name: getattr(image, f.name) for f in fields(image) if f.name != "patches"}
        self.kind = type(image.patches)
        self.item = {f.name: getattr(image.patches, f.name) for f in fields(image.patches) if f.name != "patches"}
        self.shape, self.dtype = tuple(tensor.shape), tensor.dtype


def unpack_pixels(request: EngineRequest, descriptor: int | None) -> EngineRequest:
    """The other side of `pack_pixels`: patches become views of the mapped memory, which lives as long as they do.

    Takes over the descriptor.
    """
    if descriptor is None:
        return request
    try:
        memory = mmap.mmap(descriptor, 0)
    finally:
        os.close(descriptor)
    import torch

    images, offset = [], 0
    for bare in request.images:
        assert isinstance(bare, _Bare)
        count = math.prod(bare.shape)
        patches = torch.frombuffer(memory, dtype=bare.dtype, count=count, offset=offset).view(bare.shape)
        offset += _aligned(count * bare.dtype.itemsize)
        images.append(EngineImage(patches=bare.kind(patches=patches, **bare.item), **bare.image))
    return replace(request, images=tuple(images))


PackedEvents = tuple[list[str], list[int], list[int], list[tuple[int, float]], list[EngineEvent]]


def pack_events(events: list[EngineEvent]) -> PackedEvents:
    """Events of one step as they cross: plain tokens in three lists, with the places of those that are first ones and
    when they were scheduled; everything else as it is. Most are plain, and pickling each as an object costs the
    engine's thread more than drawing it did."""
    packed: PackedEvents = [], [], [], [], []
    names, tokens, cached, scheduled, others = packed
    for event in events:
        bare = event.logprob is None and not event.embedded and not event.prompt_scores
        if event.token_id is None or event.finish_reason or event.error or not bare:
            others.append(event)
        else:
            if event.scheduled is not None:
                scheduled.append((len(names), event.scheduled))
            names.append(event.request_id)
            tokens.append(event.token_id)
            cached.append(event.cached_tokens)
    return packed


def unpack_events(packed: PackedEvents) -> list[EngineEvent]:
    """The other side. Of one request's events only the last may differ in kind, so each request keeps its order."""
    names, tokens, cached, scheduled, others = packed
    plain = [EngineEvent(n, t, cached_tokens=c) for n, t, c in zip(names, tokens, cached, strict=True)]
    for place, moment in scheduled:
        plain[place] = plain[place]._replace(scheduled=moment)
    return plain + others
