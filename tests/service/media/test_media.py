"""The media spool on a real disk: accounting, expiry and errors."""

from __future__ import annotations

import hashlib
import os
import random
from dataclasses import replace
from pathlib import Path

import pytest
from clock import Clock
from counting import lines_run
from images import png
from unprivileged import permissions_apply

from encoder.images import read_header
from encoder.media_limits import ImageError, ImageHeader
from service.common import errors
from service.media.arriving import MAX_CHUNK
from service.media.media import Media, SharedSpool, Spool


def make(path: Path, capacity: int = 10**6, clock: Clock | None = None) -> Spool:
    return Spool(path, capacity, 100.0, 10**5, read_header, clock or Clock(1.7e9))


def put(spool: Spool, data: bytes, tenant: str = "t", step: int = 1000) -> Media:
    with spool.upload(tenant, len(data)) as upload:
        for start in range(0, len(data), step):
            upload.write(data[start : start + step])
        return upload.commit()


def test_what_goes_in_comes_out_under_its_hash(tmp_path: Path) -> None:
    spool, data = make(tmp_path), png(1, (20, 30))
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
    clock = Clock(1.7e9)
    spool = make(tmp_path, clock=clock)
    old, kept = put(spool, png(1)), put(spool, png(2))
    clock.now += 60
    put(spool, png(2))
    clock.now += 60
    with pytest.raises(errors.NotFound):
        spool.get("t", old.media_id)
    assert spool.sweep() == old.size and spool.get("t", kept.media_id)
    spool.check_integrity()


@pytest.mark.parametrize("cut", [0, 1, 500])
def test_an_upload_that_does_not_end_leaves_nothing(tmp_path: Path, cut: int) -> None:
    spool, data = make(tmp_path), png(1, (40, 40))
    with pytest.raises(errors.InvalidArgument, match="announced"), spool.upload("t", len(data)) as upload:
        upload.write(data[:cut])
        upload.commit()
    with pytest.raises(ConnectionError), spool.upload("t", len(data)) as upload:
        upload.write(data[:cut])
        raise ConnectionError
    assert spool.used_bytes == 0
    spool.check_integrity()


def test_refusals(tmp_path: Path) -> None:
    spool, data = make(tmp_path, capacity=3000), png(1, (20, 20))
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


def test_uploads_of_one_tenant_share_its_part(tmp_path: Path) -> None:
    """Two concurrent uploads cannot each take the rest; another tenant has its own share, and all share the total."""
    clock = Clock(1.7e9)
    spool = Spool(tmp_path, 5000, 100.0, 10**5, read_header, clock, tenant_capacity=2000)
    with spool.upload("a", 1500):
        with pytest.raises(errors.ResourceExhausted, match="your uploads fill 1500 of 2000 bytes") as full:
            with spool.upload("a", 501):
                pass
        assert full.value.retry_after is None
        with spool.upload("a", 500), spool.upload("b", 2000), spool.upload("c", 1000):
            assert spool.used_bytes == 5000
            with pytest.raises(errors.ResourceExhausted, match="fill 5000 of 5000"), spool.upload("d", 1):
                pass
        with spool.upload("b", 2000):  # space is free as soon as an upload ends
            pass
        assert spool.used_bytes == 1500
    kept = put(spool, png(1, (8, 8)), "a")
    clock.now += 40
    with pytest.raises(errors.ResourceExhausted, match=f"your uploads fill {kept.size} of 2000") as full:
        with spool.upload("a", 2001 - kept.size):
            pass
    assert full.value.retry_after == pytest.approx(60)
    with spool.upload("b", 2000), spool.upload("a", 2000 - kept.size):
        pass
    with spool.upload("b", 2000), spool.upload("c", 2000), pytest.raises(errors.ResourceExhausted) as full:
        with spool.upload("d", 1001 - kept.size):
            pass
    assert full.value.retry_after == pytest.approx(60), "until something of anybody's expires"
    spool.check_integrity()


def test_the_work_for_an_upload_does_not_grow_with_the_files_that_are_stored(tmp_path: Path) -> None:
    """Everything that is done within one lock, and by a process of which other calls need a part."""

    def cost(number: int) -> int:
        spool = Spool(tmp_path / str(number), 10**6, 100.0, 10**5, lambda data: ImageHeader("PNG", 8, 8, "RGB"))
        for i in range(number):
            put(spool, str(i).encode())
        return lines_run(put, spool, b"another") + lines_run(lambda: spool.used_bytes)

    few, many = cost(3), cost(200)
    assert many == few, f"{few} lines beside 3 files, {many} beside 200"


def test_a_file_s_time_begins_anew_where_it_is_asked_for(tmp_path: Path) -> None:
    clock = Clock(1.7e9)
    spool = make(tmp_path, clock=clock)
    media = put(spool, png(1))
    clock.now += 99.0
    spool.renew("t", media.media_id)
    clock.now += 99.0
    assert spool.get("t", media.media_id).expires == clock.now + 1.0
    assert make(tmp_path, clock=clock).get("t", media.media_id), "also after a restart"
    clock.now += 1.0
    for asked in (spool.get, spool.read, spool.size, spool.delete, spool.renew):
        with pytest.raises(errors.NotFound) as gone:
            asked("t", media.media_id)
        assert gone.value.reason == "MEDIA_NOT_FOUND"


def test_frontends_share_their_files(tmp_path: Path) -> None:
    clock = Clock(1.7e9)

    def member(number: int) -> SharedSpool:
        return SharedSpool(
            tmp_path, 10**6, 100.0, 10**5, read_header, clock, member=number, members=2
        )  # fmt: skip

    one, other = member(0), member(1)
    media, data = put(one, png(1)), png(1)
    os.utime(tmp_path / "t" / media.media_id, (clock.now, clock.now))
    assert other.get("t", media.media_id) == media
    assert other.size("t", media.media_id) == len(data) and other.read("t", media.media_id) == data
    for owner, name in (("u", media.media_id), ("t", "0" * 64), ("t", "../t/" + media.media_id), ("t", "incoming-0")):
        for asked in (other.get, other.size, other.read, other.delete):
            with pytest.raises(errors.NotFound):
                asked(owner, name)
    assert other.used_bytes == one.used_bytes == len(data), "both count what either has taken"
    clock.now += 99.0
    other.renew("t", media.media_id)
    clock.now += 99.0
    assert one.sweep() == 0 and one.get("t", media.media_id)
    clock.now += 1.0
    for asked in (one.get, other.get, other.size, other.read):
        with pytest.raises(errors.NotFound):
            asked("t", media.media_id)
    # expired files of others are deleted by the first that finds them
    (tmp_path / "t" / ("1" * 64)).write_bytes(data)
    os.utime(tmp_path / "t" / ("1" * 64), (clock.now - 100.0, clock.now - 100.0))
    assert other.sweep() == 2 * len(data) and not (tmp_path / "t" / ("1" * 64)).exists()
    assert one.sweep() == other.used_bytes == one.used_bytes == 0
    again = put(other, png(2))
    one.delete("t", again.media_id)
    assert not (tmp_path / "t" / again.media_id).exists()


def test_the_limits_of_frontends_hold_after_restarts(tmp_path: Path) -> None:
    """Whichever is replaced, and for running uploads of the others, too."""
    clock, data = Clock(1.7e9), [png(i, (8, 8)) for i in range(3)]
    sizes = [len(file) for file in data]

    def member(number: int) -> SharedSpool:
        return SharedSpool(
            tmp_path, sum(sizes[:3]) + 1, 100.0, 10**5, read_header, clock, sum(sizes[:2]) + 1,
            member=number, members=2,
        )  # fmt: skip

    spools = [member(0), member(1)]
    for number in range(2):
        put(spools[number], data[number])
        spools[number] = member(number)  # a replacement, which has received nothing itself
    for path in tmp_path.glob("t/*"):
        os.utime(path, (clock.now, clock.now))
    for spool in spools:
        assert spool.used_bytes == sum(sizes[:2])
        with pytest.raises(errors.ResourceExhausted, match="your uploads") as full, spool.upload("t", sizes[2]):
            pass
        assert full.value.retry_after == pytest.approx(100)
        with pytest.raises(errors.ResourceExhausted, match="uploaded media"), spool.upload("u", sizes[2] + 2):
            pass
    with spools[0].upload("u", sizes[2]) as upload:
        with pytest.raises(errors.ResourceExhausted, match="uploaded media"), spools[1].upload("v", 2):
            pass
        assert spools[1].sweep() == 0, "does not wait for the upload"
        upload.write(data[2])
        upload.commit()
    assert spools[0].used_bytes == spools[1].used_bytes == sum(sizes[:3])
    clock.now += 100.0
    with spools[1].upload("t", sizes[0] + sizes[1] + 1):  # where the files of others have expired, there is room
        assert not list(tmp_path.glob("t/*"))


def test_an_upload_of_a_frontend_that_was_killed_counts_until_it_is_replaced(tmp_path: Path) -> None:
    clock = Clock(1.7e9)

    def member(number: int, members: int = 2) -> SharedSpool:
        return SharedSpool(tmp_path, 1000, 100.0, 10**5, read_header, clock, member=number, members=members)

    one, other = member(0), member(1)
    killed = other.upload("t", 900)
    killed.__enter__()
    with pytest.raises(errors.ResourceExhausted, match="fill 900 of 1000 bytes, and this one has 101"):
        one.upload("t", 101).__enter__()
    with member(0, 1).upload("t", 1000):  # a later server has fewer frontends
        pass
    member(1)
    with one.upload("t", 1000):
        pass


def test_a_full_disk_is_an_error_of_its_own(tmp_path: Path) -> None:
    """/dev/full acts as a full disk."""
    spool, data = make(tmp_path), png(1)
    with pytest.raises(errors.ResourceExhausted) as error, spool.upload("t", len(data)) as upload:
        upload.close()
        upload._file._file = open("/dev/full", "wb", buffering=0)
        upload.write(data)
    assert error.value.reason == "MEDIA_SPOOL_FULL" and "/" not in error.value.message
    spool.check_integrity()


def test_a_restart_takes_over_what_is_whole(tmp_path: Path) -> None:
    clock = Clock(1.7e9)
    first = make(tmp_path, clock=clock)
    media, old = put(first, png(1)), put(first, png(2))
    os.utime(tmp_path / "t" / media.media_id, (clock.now, clock.now))
    os.utime(tmp_path / "t" / old.media_id, (clock.now - 200, clock.now - 200))
    (tmp_path / "incoming" / "torn").write_bytes(b"half")
    second = make(tmp_path, clock=clock)
    assert second.get("t", media.media_id) == media and second.used_bytes == media.size
    with pytest.raises(errors.NotFound):
        second.get("t", old.media_id)
    second.check_integrity()


@pytest.mark.parametrize("shared", [False, True])
def test_a_folder_that_cannot_be_read_holds_no_uploads(tmp_path: Path, shared: bool) -> None:
    """Such as lost+found in a volume."""
    members = {"member": 0, "members": 2} if shared else {}
    (tmp_path / "lost+found").mkdir(mode=0)
    with permissions_apply():
        spool = (SharedSpool if shared else Spool)(tmp_path, 10**6, 100.0, 10**5, read_header, **members)
        media = put(spool, png(1))
        assert spool.used_bytes == media.size and spool.sweep() == 0
        spool.delete("t", media.media_id)


@pytest.mark.parametrize("shared", [False, True])
def test_a_restart_deletes_no_upload_because_it_cannot_be_read(tmp_path: Path, shared: bool) -> None:
    """Such as one above a lowered limit, or one whose image worker is slow to start."""
    clock, data = Clock(1.7e9), png(1, (20, 30))
    media = put(make(tmp_path, clock=clock), data)
    path = tmp_path / "t" / media.media_id
    os.utime(path, (clock.now, clock.now))
    refusing = True

    def describe(data: bytes) -> ImageHeader:
        if refusing:
            raise ImageError("decoding took longer than the allowed 20 s")
        return ImageHeader("PNG", 20, 30, "RGB")

    arguments = (tmp_path, 10**6, 100.0, 10**5, describe, clock)
    members = {"member": 0, "members": 2} if shared else {}
    second = (SharedSpool if shared else Spool)(*arguments, **members)
    assert second.used_bytes == second.size("t", media.media_id) == len(data)
    assert second.read("t", media.media_id) == data
    with pytest.raises(errors.InvalidArgument, match="allowed 20 s") as refused:
        second.get("t", media.media_id)
    assert refused.value.reason == "IMAGE_DECODE_FAILED" and refused.value.field == "media_id"
    refusing = False
    clock.now += 50.0
    second.renew("t", media.media_id)
    assert second.get("t", media.media_id) == replace(media, expires=clock.now + 100.0)
    second.delete("t", media.media_id)
    assert not path.exists()
    second.check_integrity()


def test_a_restart_deletes_an_upload_whose_content_has_changed(tmp_path: Path) -> None:
    media = put(make(tmp_path), png(1))
    (tmp_path / "t" / media.media_id).write_bytes(png(1)[:-1])
    second = make(tmp_path)
    assert second.used_bytes == 0 and not (tmp_path / "t" / media.media_id).exists()
    second.check_integrity()


def test_the_books_hold_over_any_sequence(tmp_path: Path) -> None:
    rng, clock = random.Random(5), Clock(1.7e9)
    spool = make(tmp_path, capacity=20_000, clock=clock)
    data = [png(i) for i in range(8)]
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
