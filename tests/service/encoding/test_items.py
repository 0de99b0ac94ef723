"""Images and clips survive conversion to messages and back."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from encoder.item import BLOCK_MAJOR, ROW_MAJOR, VIDEO, EncoderItem
from saccade.v1 import encoder_pb2
from service.encoding.items import (
    LARGEST_MESSAGE,
    PIECE_BYTES,
    bytes_of,
    empty_pixels,
    item_from_proto,
    item_to_proto,
    pieces,
    write_bytes,
)

DTYPES = st.sampled_from([torch.float32, torch.bfloat16, torch.uint8])
SIDE = st.integers(1, 4).map(lambda half: 2 * half)


@st.composite
def items(draw: st.DrawFn) -> EncoderItem:
    grid, dtype = (draw(SIDE), draw(SIDE)), draw(DTYPES)
    frames = draw(st.integers(0, 5))
    sequences, width = (1, 12) if not frames else ((frames + 1) // 2, 24)
    pixels = torch.randint(0, 200, (sequences * grid[0] * grid[1], width)).to(dtype)
    if not frames:
        return EncoderItem(grid, pixels)
    return EncoderItem(
        grid, pixels, kind=VIDEO, num_sequences=sequences, num_frames=frames,
        pruning_rate=draw(st.sampled_from([0.0, 0.25, 0.7])), order=draw(st.sampled_from([ROW_MAJOR, BLOCK_MAJOR])),
    )  # fmt: skip


@given(item=items(), cuts=st.lists(st.integers(0, 5000), max_size=4))
def test_there_and_back(item: EncoderItem, cuts: list[int]) -> None:
    message = encoder_pb2.EncodeItem.FromString(item_to_proto(item.description).SerializeToString())
    data = bytes(bytes_of(item.patches))
    pixels, offset = empty_pixels(message, len(data)), 0
    for cut in [*sorted(c for c in cuts if c <= len(data)), len(data)]:
        offset = write_bytes(pixels, offset, data[offset:cut])
    back = item_from_proto(message, pixels)
    assert back.tokens == item.tokens
    assert torch.equal(back.patches, item.patches) and back.patches.dtype == item.patches.dtype
    kept = {name: value for name, value in vars(item).items() if name != "patches"}
    assert kept == {name: getattr(back, name) for name in kept}


def test_the_message_of_an_item_stays_what_older_partners_read() -> None:
    still = item_to_proto(EncoderItem((2, 4), torch.zeros(8, 12)).description)
    assert still == encoder_pb2.EncodeItem(
        grid_rows=2, grid_columns=4, merge_size=2, shape=[8, 12], dtype="float32"
    )  # fmt: skip
    clip = EncoderItem((2, 4), torch.zeros(24, 12), kind=VIDEO, num_sequences=3, num_frames=5, pruning_rate=0.5)
    assert item_to_proto(clip.description) == encoder_pb2.EncodeItem(
        grid_rows=2, grid_columns=4, merge_size=2, shape=[3, 8, 12], dtype="float32", num_frames=5, pruning_rate=0.5
    )


def test_slices_cross_and_are_checked() -> None:
    item = EncoderItem((2, 4), torch.rand(56, 12), num_sequences=7, slices=(3, 2), slice_grid=(2, 4))
    message = item_to_proto(item.description)
    assert message.slices == [3, 2, 2, 4] and item_from_proto(message, item.patches).grids == item.grids
    for wrong, numbers in (([3, 2, 2], "slices are"), ([3, 3, 2, 4], "9 slices"), ([0, 2, 2, 4], "positive")):
        message.slices[:] = wrong
        with pytest.raises(ValueError, match=numbers):
            item_from_proto(message, item.patches)
    message.slices[:] = [3, 2, 2, 4]
    message.slices_first = True
    assert item_from_proto(message, item.patches).slices_first
    message.grid_rows = message.grid_columns = 0
    assert item_from_proto(message, item.patches[:48]).grids == ((2, 4),) * 6
    message.slices[:] = [2**20, 2**20, 2, 4]  # no tensor of that size is allocated
    with pytest.raises(ValueError, match="shape"):
        item_from_proto(message, item.patches)


def test_pieces_are_bounded_and_complete() -> None:
    data = memoryview(bytes(range(256)) * (PIECE_BYTES // 100))
    cut = list(pieces(data))
    assert max(map(len, cut)) == PIECE_BYTES and b"".join(cut) == bytes(data)


def test_a_message_with_a_whole_piece_is_not_larger_than_said() -> None:
    piece = encoder_pb2.Piece(ticket=2**64 - 1, data=bytes(PIECE_BYTES))
    for message in (encoder_pb2.AttachRequest(pixels=piece), encoder_pb2.AttachResponse(rows=piece)):
        assert PIECE_BYTES < message.ByteSize() <= LARGEST_MESSAGE


def test_what_cannot_be_is_refused_with_its_numbers() -> None:
    message = item_to_proto(EncoderItem((2, 4), torch.zeros(8, 12)).description)
    message.order = "spiral"
    with pytest.raises(ValueError, match="patches in order 'spiral'; known are 'rows' and 'blocks'"):
        item_from_proto(message, torch.zeros(8, 12))
    message.order = ""
    with pytest.raises(ValueError, match="384 bytes .* 383"):
        empty_pixels(message, 383)
    with pytest.raises(ValueError, match="400 bytes .* 384"):
        write_bytes(empty_pixels(message, 384), 0, bytes(400))
    message.dtype = "float8"
    with pytest.raises(ValueError, match="'float8'"):
        empty_pixels(message, 384)
    message.dtype, message.grid_rows = "float32", 6
    with pytest.raises(ValueError, match="6x4 needs 24"):
        item_from_proto(message, torch.zeros(8, 12))
    message.shape[:] = [2**32 - 1] * 1000  # their product has more digits than Python writes
    with pytest.raises(ValueError, match="pixels of 1000 dimensions; an image has 2 and a clip 3"):
        empty_pixels(message, 384)
    message.shape[:] = [8, 12]
    message.num_frames = 3
    with pytest.raises(ValueError, match=r"shape \[8, 12\] of an item of 3 frames"):
        item_from_proto(message, torch.zeros(8, 12))
    message.shape.clear()  # one number, without a shape
    with pytest.raises(ValueError, match=r"shape \[\] of an item of 3 frames"):
        item_from_proto(message, torch.zeros(()))
    message.num_frames, message.grid_rows, message.merge_size = 0, 2, 0
    with pytest.raises(ValueError, match="merge_size 0"):
        item_from_proto(message, torch.zeros(8, 12))
