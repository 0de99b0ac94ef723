"""The media spool on a real disk: its books, its clock, its refusals."""

from __future__ import annotations

import hashlib
import os
import random
from pathlib import Path

import pytest
from pictures import picture

from encoder.images import ImageLimits
from service import errors
from service.arriving import MAX_CHUNK
from service.media import Media, Spool


class Clock:
    def __init__(self) -> None:
        self.now = 1.7e9

    def __call__(self) -> float:
        return self.now


def make(path: Path, capacity: int = 10**6, clock: Clock | None = None) -> Spool:
    return Spool(path, capacity, 100.0, ImageLimits(max_bytes=10**5), clock or Clock())


def put(spool: Spool, data: bytes, tenant: str = "t", step: int = 1000) -> Media:
    with spool.upload(tenant, len(data)) as upload:
        for start in range(0, len(data), step):
            upload.write(data[start : start + step])
        return upload.commit()


def test_what_goes_in_comes_out_under_its_hash(tmp_path: Path) -> None:
    spool, data = make(tmp_path), picture(1, (20, 30))
    media = put(spool, data)
    assert media.media_id == hashlib.sha256(data).hexdigest()
    assert (media.width, media.height, media.format, media.size) == (20, 30, "PNG", len(data))
    assert spool.read("t", media.media_id) == data
    with pytest.raises(errors.NotFound):
        spool.read("other tenant", media.media_id)
    assert put(spool, data) == media and spool.used_bytes == len(data)
    spool.check_integrity()
    spool.delete("t", media.media_id)
    with pytest.raises(errors.NotFound):
        spool.get("t", media.media_id)
    assert spool.used_bytes == 0
    spool.check_integrity()


def test_time_takes_them_away_and_uploading_again_renews(tmp_path: Path) -> None:
    clock = Clock()
    spool = make(tmp_path, clock=clock)
    old, kept = put(spool, picture(1)), put(spool, picture(2))
    clock.now += 60
    put(spool, picture(2))
    clock.now += 60
    with pytest.raises(errors.NotFound):
        spool.get("t", old.media_id)
    assert spool.sweep() == old.size and spool.get("t", kept.media_id)
    spool.check_integrity()


@pytest.mark.parametrize("cut", [0, 1, 500])
def test_an_upload_that_does_not_end_leaves_nothing(tmp_path: Path, cut: int) -> None:
    spool, data = make(tmp_path), picture(1, (40, 40))
    with pytest.raises(errors.InvalidArgument, match="announced"), spool.upload("t", len(data)) as upload:
        upload.write(data[:cut])
        upload.commit()
    with pytest.raises(ConnectionError), spool.upload("t", len(data)) as upload:
        upload.write(data[:cut])
        raise ConnectionError
    assert spool.used_bytes == 0
    spool.check_integrity()


def test_refusals(tmp_path: Path) -> None:
    spool, data = make(tmp_path, capacity=3000), picture(1, (20, 20))
    for size in (0, -5, 10**5 + 1):
        with pytest.raises(errors.InvalidArgument), spool.upload("t", size):
            pass
    with pytest.raises(errors.InvalidArgument, match="longer"), spool.upload("t", 3) as upload:
        upload.write(data)
    with pytest.raises(errors.InvalidArgument, match=str(MAX_CHUNK)), spool.upload("t", 3000) as upload:
        upload.write(bytes(MAX_CHUNK + 1))
    with pytest.raises(errors.InvalidArgument) as error, spool.upload("t", 4) as upload:
        upload.write(b"text")
        upload.commit()
    assert error.value.reason == "IMAGE_DECODE_FAILED"
    with pytest.raises(errors.InvalidArgument) as error, spool.upload("t", len(data)) as upload:
        upload.write(data)
        upload.commit("0" * 64)
    assert error.value.reason == "MEDIA_DAMAGED"
    with spool.upload("t", 2000), pytest.raises(errors.ResourceExhausted) as full, spool.upload("t", 1001):
        pass
    assert full.value.reason == "MEDIA_SPOOL_FULL" and full.value.retry_after is None
    assert spool.used_bytes == 0
    spool.check_integrity()


def test_a_full_disk_is_an_error_of_its_own(tmp_path: Path) -> None:
    """/dev/full is a disk without room."""
    spool, data = make(tmp_path), picture(1)
    with pytest.raises(errors.ResourceExhausted) as error, spool.upload("t", len(data)) as upload:
        upload.close()
        upload._file._file = open("/dev/full", "wb", buffering=0)
        upload.write(data)
    assert error.value.reason == "MEDIA_SPOOL_FULL" and "/" not in error.value.message
    spool.check_integrity()


def test_a_restart_takes_over_what_is_whole(tmp_path: Path) -> None:
    clock = Clock()
    first = make(tmp_path, clock=clock)
    media, old = put(first, picture(1)), put(first, picture(2))
    os.utime(tmp_path / "t" / media.media_id, (clock.now, clock.now))
    os.utime(tmp_path / "t" / old.media_id, (clock.now - 200, clock.now - 200))
    (tmp_path / "incoming" / "torn").write_bytes(b"half")
    second = make(tmp_path, clock=clock)
    assert second.get("t", media.media_id) == media and second.used_bytes == media.size
    with pytest.raises(errors.NotFound):
        second.get("t", old.media_id)
    second.check_integrity()


def test_the_books_hold_over_any_sequence(tmp_path: Path) -> None:
    rng, clock = random.Random(5), Clock()
    spool = make(tmp_path, capacity=20_000, clock=clock)
    data = [picture(i) for i in range(8)]
    for _ in range(150):
        chosen, tenant = rng.choice(data), rng.choice("ab")
        name = hashlib.sha256(chosen).hexdigest()
        try:
            match rng.randrange(4):
                case 0 | 1:
                    put(spool, chosen, tenant)
                case 2:
                    spool.delete(tenant, name)
                case 3:
                    clock.now += rng.choice([0, 30, 90])
                    spool.sweep()
        except errors.StatusError:
            pass
        assert 0 <= spool.used_bytes <= 20_000
        spool.check_integrity()
