"""Messages between a frontend process and the engine process: a socket pair for control, memory files for patches.

Control messages are pickled by `multiprocessing.connection`, which is safe because both ends are processes of this
program on a socket pair that has no address. The patches of each image lie in a sealed memory file, whose descriptor
crosses the socket behind the message: only the engine maps it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from encoder.item import ItemDescription
from service.engine.types import EngineEvent, EngineRequest
from service.media.sealed import SealedItem, open_patches, seal


def pack_images(request: EngineRequest) -> tuple[EngineRequest, tuple[int, ...]]:
    """The request with descriptions for images, and the descriptors of their files, which are the caller's to close.
    Patches of this process are copied to files; raises OSError where the memory cannot be had."""
    items = []
    for image in request.images:
        assert not isinstance(image.patches, ItemDescription), "packed already"
        items.append(image.patches if isinstance(image.patches, SealedItem) else seal(image.patches))
    images = tuple(replace(image, patches=item.description) for image, item in zip(request.images, items, strict=True))
    return replace(request, images=images), tuple(item.file.take() for item in items)


def unpack_images(request: EngineRequest, descriptors: Sequence[int]) -> EngineRequest:
    """The other side of `pack_images`: patches are views of the mapped files. Takes over the descriptors."""
    images = []
    for image, descriptor in zip(request.images, descriptors, strict=True):
        assert isinstance(image.patches, ItemDescription)
        images.append(replace(image, patches=open_patches(image.patches, descriptor)))
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
