"""Where the rows of images and clips lie in a prompt.

An image is one run of rows, or one for the whole and one for each slice where it is cut into slices. A clip is one run
for each temporal patch. There are text tokens between the runs. Pruning drops rows after encoding: how many rows of the
whole clip stay is known from its shape, how many of each temporal patch only after encoding. So the prompt's length,
which admission and limits need, is known at once, and a request with a pruned clip is submitted to the decoder when its
clip has been encoded for the first time.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from decoder.request import ImageSpan
from encoder.item import EncoderItem, Grid

if TYPE_CHECKING:
    from service.encoding.entries import Lease
    from service.engine.types import EngineImage, EngineRequest


class _Part:
    """A run of one lease's rows, as an embedding source of its own. The runs of a lease are released in order."""

    def __init__(self, lease: Lease, first: int, count: int, complete: bool) -> None:
        self._lease, self._first, self._count, self._complete = lease, first, count, complete

    @property
    def ready(self) -> bool:
        return self._lease.ready

    @property
    def error(self) -> Exception | None:
        return self._lease.error

    def rows(self) -> torch.Tensor:
        return self._lease.rows()[self._first : self._first + self._count]

    def release(self) -> None:
        if self._complete:
            self._lease.release()


def is_settled(request: EngineRequest, leases: Sequence[Lease]) -> bool:
    """Whether the place of every row is known, or an image has failed so that its rows will never come."""
    return any(lease.error is not None for lease in leases) or all(
        _counts(image, lease) is not None for image, lease in zip(request.images, leases, strict=True)
    )


def place(request: EngineRequest, leases: Sequence[Lease]) -> tuple[list[int], tuple[ImageSpan, ...]]:
    """The prompt's ids, and its image spans in order for `DecoderRequest`. The request must be settled."""
    ids = list(request.prompt_ids)
    spans: list[ImageSpan] = []
    for image, lease in zip(request.images, leases, strict=True):
        if not image.between:
            spans.append(ImageSpan(image.start, image.length, image.key, lease))
            continue
        # A clip that failed is one run: the decoder finds its error there.
        counts = _counts(image, lease) or (image.patches.tokens, *[0] * len(image.between))
        token, laid, row = ids[image.start], list[int](), 0
        for count, words in zip(counts, (*image.between, ()), strict=True):
            if count:
                last = row + count == image.patches.tokens
                key = image.key + struct.pack("<qq", row, count)
                part = _Part(lease, row, count, last)
                spans.append(ImageSpan(image.start + len(laid), count, key, part, complete=last))
            laid += [token] * count
            laid += words
            row += count
        ids[image.start : image.start + image.length] = laid
    return ids, tuple(spans)


def blocks(request: EngineRequest, leases: Sequence[Lease]) -> list[tuple[int, Grid]]:
    """Where the attention sequences of images and clips begin in a settled prompt, and their grids; without those of
    clips that failed or were pruned."""
    found: list[tuple[int, Grid]] = []
    for image, lease in zip(request.images, leases, strict=True):
        item, start = image.patches, image.start
        assert isinstance(item, EncoderItem), image
        counts = _counts(image, lease)
        if counts is None or sum(counts) != sum(item.sequence_tokens):
            continue
        between = (*image.between, *[()] * (item.num_sequences - len(image.between)))
        for grid, rows, words in zip(item.grids, item.sequence_tokens, between, strict=True):
            found.append((start, grid))
            start += rows + len(words)
    return found


def _counts(image: EngineImage, lease: Lease) -> tuple[int, ...] | None:
    item = image.patches
    assert isinstance(item, EncoderItem), image
    if not image.between:
        return (item.tokens,)
    if item.tokens == sum(item.sequence_tokens):
        return item.sequence_tokens
    return lease.counts
