"""Converts images and clips to messages and back, and pixels and rows to bytes, for encoders in other processes."""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch

from encoder.item import DTYPE_BYTES, IMAGE, ROW_MAJOR, VIDEO, EncoderItem, ItemDescription
from saccade.v1 import encoder_pb2

PIECE_BYTES = 1 << 20
"""Bytes of pixels or rows in one message: large enough to be efficient, small enough not to delay other messages."""
LARGEST_MESSAGE = PIECE_BYTES + 64
"""Maximum bytes of a message with a whole piece."""


def bytes_of(tensor: torch.Tensor) -> memoryview:
    """The tensor's elements in order, as bytes. Waits for the device and copies from it; on a CPU it copies nothing."""
    return tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().data


def pieces(data: memoryview) -> Iterator[bytes]:
    """Cuts `data` into pieces of one message each."""
    for start in range(0, len(data), PIECE_BYTES):
        yield bytes(data[start : start + PIECE_BYTES])


def write_bytes(target: torch.Tensor, offset: int, data: bytes) -> int:
    """Copies `data` to the bytes of a contiguous tensor from `offset` on; returns the offset after it. Raises
    ValueError if it would exceed the tensor."""
    flat = target.view(-1).view(torch.uint8)
    end = offset + len(data)
    if end > len(flat):
        raise ValueError(f"{end} bytes for a tensor of {len(flat)}")
    if data:
        flat[offset:end].copy_(torch.frombuffer(bytearray(data), dtype=torch.uint8))
    return end


def item_to_proto(item: ItemDescription) -> encoder_pb2.EncodeItem:
    """Converts everything except the ticket and the urgency, which the caller adds.

    The message has no kind: an item with frames is a video. Unless its frames are cut into slices, its shape begins
    with its sequences.
    """
    rows, width = item.shape
    equal = item.num_frames and not item.num_slices
    shape = (item.num_sequences, rows // item.num_sequences, width) if equal else (rows, width)
    return encoder_pb2.EncodeItem(
        grid_rows=item.grid[0], grid_columns=item.grid[1], merge_size=item.merge_size, shape=shape, dtype=item.dtype,
        num_frames=item.num_frames, pruning_rate=item.pruning_rate,
        order="" if item.order == ROW_MAJOR else item.order,
        slices=(*item.slices, *item.slice_grid) if item.num_slices else (), slices_first=item.slices_first,
    )  # fmt: skip


def empty_pixels(message: encoder_pb2.EncodeItem, limit: int) -> torch.Tensor:
    """A tensor to receive the item's pixels. Raises ValueError for a dtype or size that is not allowed."""
    if message.dtype not in DTYPE_BYTES:
        raise ValueError(f"pixels of type {message.dtype!r}; known are {', '.join(DTYPE_BYTES)}")
    if len(message.shape) > 3:
        raise ValueError(f"pixels of {len(message.shape)} dimensions; an image has 2 and a clip 3")
    size = math.prod(message.shape) * DTYPE_BYTES[message.dtype]
    if not 0 < size <= limit:
        raise ValueError(f"{size} bytes of pixels; expected 1 to {limit}, the number that may still be in progress")
    return torch.empty(tuple(message.shape), dtype=getattr(torch, message.dtype))


def item_from_proto(message: encoder_pb2.EncodeItem, pixels: torch.Tensor) -> EncoderItem:
    """The item. Raises ValueError for a shape that does not fit the grid."""
    rows, columns, *slice_grid = message.slices or (0, 0, 0, 0)
    if len(slice_grid) != 2:
        raise ValueError(f"slices are {list(message.slices)}; rows, columns and a grid would work")
    sliced = rows * columns > 0
    if pixels.dim() != (3 if message.num_frames and not sliced else 2):
        raise ValueError(f"pixels of shape {list(message.shape)} of an item of {message.num_frames} frames")
    grid = message.grid_rows, message.grid_columns
    each = rows * columns + (grid != (0, 0))
    sequences = pixels.shape[0] if pixels.dim() == 3 else max(message.num_frames, 1) * each
    description = ItemDescription(
        grid, pixels.shape[-1], str(pixels.dtype).removeprefix("torch."),
        kind=VIDEO if message.num_frames else IMAGE, num_sequences=sequences, num_frames=message.num_frames,
        pruning_rate=message.pruning_rate, merge_size=message.merge_size, order=message.order or ROW_MAJOR,
        slices=(rows, columns), slice_grid=(slice_grid[0], slice_grid[1]), slices_first=message.slices_first,
    )  # fmt: skip
    return description.with_patches(pixels.flatten(0, -2))
