"""Reading weights ahead: how far, in which order, and what happens to files that cannot be read."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
from tiny_checkpoint import make_checkpoint

from service.model import read_ahead
from service.model.checkpoint import Checkpoint
from service.model.read_ahead import Range, ReadAhead

PIECE = 4096


def files(folder: Path, *sizes: int) -> list[Range]:
    """Files of these sizes, and ranges that leave out the first ten bytes."""
    ranges = []
    for index, size in enumerate(sizes):
        file = folder / str(index)
        file.write_bytes(bytes(size))
        ranges.append(Range(file, 10, size - 10))
    return ranges


def reading() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("read-ahead")]


def test_reading_stays_within_its_distance_of_what_was_used(tmp_path: Path) -> None:
    ranges = files(tmp_path, 10 * PIECE + 10, 17, 20 * PIECE + 11)
    total = sum(each.length for each in ranges)
    ahead = ReadAhead(ranges, ahead=5 * PIECE, threads=3, piece=PIECE)
    for done in (0, 3 * PIECE, 4 * PIECE + 1, 12 * PIECE):
        ahead.reached(done)
        assert ahead.wait(30)
        assert done + 5 * PIECE <= ahead.bytes_read < done + 6 * PIECE
    ahead.reached(total)
    assert ahead.wait(30) and ahead.bytes_read == total
    ahead.close()
    assert not reading()


def test_closing_ends_threads_that_wait(tmp_path: Path) -> None:
    ahead = ReadAhead(files(tmp_path, 100 * PIECE), ahead=PIECE, threads=4, piece=PIECE)
    assert ahead.wait(30) and len(reading()) == 4
    ahead.close()
    assert not reading() and ahead.bytes_read == PIECE


def test_nothing_to_read_starts_no_thread(tmp_path: Path) -> None:
    ahead = ReadAhead(files(tmp_path, 10), threads=4)
    assert not reading() and ahead.wait(0)
    ahead.close()


def test_files_that_are_gone_or_cut_short_end_the_reading_without_an_error(tmp_path: Path) -> None:
    whole, short, gone = files(tmp_path, 4 * PIECE + 10, 4 * PIECE + 10, 4 * PIECE)
    short.file.write_bytes(bytes(PIECE))
    gone.file.unlink()
    for ranges, least in (([gone, whole], 0), ([whole, short], 4 * PIECE)):
        ahead = ReadAhead(ranges, threads=1, piece=PIECE)
        assert ahead.wait(30)
        assert least <= ahead.bytes_read < least + PIECE
        ahead.close()


def test_a_checkpoint_reads_ahead_while_it_is_loaded_and_not_after(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(read_ahead, "AHEAD", 1)  # after the first piece, threads wait
    checkpoint = Checkpoint(make_checkpoint(tmp_path / "model", 1, vision=False).path)
    weights = checkpoint.decoder_weights()
    next(weights)
    assert reading()
    weights.close()  # type: ignore[attr-defined]
    assert not reading()
    assert len(list(checkpoint.decoder_weights())) == len(checkpoint.config.decoder.expected_weights())
    assert not reading()
