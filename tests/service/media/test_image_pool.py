"""Decoding in other processes: the same pixels, limits that hold, and workers that lie."""

from __future__ import annotations

import io
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from clips import animation, moving_frames
from fake_engine import FakeEngine
from pictures import picture
from PIL import Image

from encoder.frames import VideoError, VideoLimits
from encoder.images import ImageError, ImageLimits
from service.common import errors
from service.common.config import ConfigError, ServerOptions
from service.media.image_pool import PicturePool
from service.media.image_worker import LENGTH
from service.media.images import LocalDecoder, MediaLimits
from service.servers.limits import load_assets
from service.servers.server import Server

LIMITS = MediaLimits(ImageLimits(max_pixels=3_000_000), VideoLimits(max_pixels=3_000_000, max_frames=20))


@pytest.fixture(scope="module")
def pool() -> Iterator[PicturePool]:
    pool = PicturePool(LIMITS, 1, image_seconds=60, video_seconds=60)
    pool.start()
    yield pool
    assert pool.stats() == {"workers_lost_time": 0, "workers_lost_died": 0, "workers_lost_nonsense": 0}
    pool.close()


@pytest.mark.parametrize("form", ["PNG", "JPEG", "WEBP", "TIFF"])
def test_pixels_are_those_of_this_process(pool: PicturePool, form: str) -> None:
    exif = Image.Exif()
    exif[0x0112] = 6
    buffer = io.BytesIO()
    Image.open(io.BytesIO(picture(3, (57, 33)))).save(buffer, form, **({} if form == "TIFF" else {"exif": exif}))
    data = buffer.getvalue()
    expected = LocalDecoder(LIMITS).image(data)
    got = pool.image(data)
    assert np.array_equal(got, expected) and got.flags.writeable
    assert pool.describe(data) == LocalDecoder(LIMITS).describe(data)


@pytest.mark.parametrize("form", ["GIF", "PNG", "WEBP"])
def test_frames_are_those_of_this_process(pool: PicturePool, form: str) -> None:
    data = animation(moving_frames(6, 20, 30), form)
    ours, theirs = LocalDecoder(LIMITS).clip(data), pool.clip(data)
    assert theirs.num_frames == ours.num_frames == 6
    assert theirs.fps == ours.fps
    for got, expected in zip(theirs.arrays([0, 3, 5]), ours.arrays([0, 3, 5]), strict=True):
        assert np.array_equal(got, expected)
    given_up = theirs.arrays([0, 1])
    next(given_up)
    given_up.close()
    assert len(list(theirs.arrays([2]))) == 1


def test_refusals_are_those_of_this_process(pool: PicturePool) -> None:
    wide = io.BytesIO()
    Image.new("1", (2000, 2000)).save(wide, "PNG")
    for data in (b"", b"junk", picture(1)[:60], wide.getvalue()):
        with pytest.raises(ImageError) as expected:
            LocalDecoder(LIMITS).image(data)
        with pytest.raises(ImageError) as got:
            pool.image(data)
        assert got.value.reason == expected.value.reason
    long = animation(moving_frames(21, 4, 4), "GIF")
    with pytest.raises(VideoError, match="21 frames, more than the 20"):
        pool.clip(long)
    with pytest.raises(VideoError):
        list(pool.clip(animation(moving_frames(5, 40, 40), "GIF")[:-900]).arrays([4]))


def test_memory_is_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    limits = MediaLimits(ImageLimits(max_pixels=10**9))
    monkeypatch.setattr(MediaLimits, "worker_bytes", 400 << 20)
    pool = PicturePool(limits, 1, image_seconds=120, video_seconds=60)
    buffer = io.BytesIO()
    Image.new("RGB", (9000, 9000)).save(buffer, "PNG", compress_level=1)
    with pytest.raises(ImageError, match="memory|cannot be decoded|died"):
        pool.image(buffer.getvalue())
    assert pool.image(picture(1)).shape[2] == 3
    pool.close()


@pytest.mark.parametrize(
    "words",
    [
        pytest.param(b'{"height": 4}', id="no-width"),
        pytest.param(b'{"height": -4, "width": -4}', id="negative"),
        pytest.param(b'{"height": "4", "width": true}', id="no-numbers"),
        pytest.param(b'{"height": 4', id="half-json"),
        pytest.param(b"[1, 2]", id="a-list"),
        pytest.param(b"x" * 100_000, id="long"),
    ],
)
def test_what_a_worker_says_is_not_believed(words: bytes) -> None:
    pool = PicturePool(LIMITS, 1, image_seconds=30, video_seconds=30)
    with lying(pool, words), pytest.raises(ImageError, match="its decoder broke"):
        pool.image(b"a picture")
    assert pool.stats()["workers_lost_nonsense"] == 1
    assert pool.image(picture(1)).shape[2] == 3, "and another takes its place"
    pool.close()


def test_a_worker_cannot_speak_of_more_than_is_allowed() -> None:
    pool = PicturePool(LIMITS, 1, image_seconds=30, video_seconds=30)
    with lying(pool, b'{"height": 2000, "width": 2000}'), pytest.raises(ImageError, match="more than the 3000000"):
        pool.image(b"a picture")
    pool.close()


@contextmanager
def lying(pool: PicturePool, words: bytes) -> Iterator[None]:
    """Puts a process in the place of the pool's worker that has said `words` before it was asked."""
    worker = pool.workers[0]
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    with theirs:
        worker.start()
        assert worker._process is not None and worker._connection is not None
        worker._connection.close()
        worker._connection, worker._greeted = ours, True
        theirs.sendall(LENGTH.pack(len(words)) + words)
        yield


@pytest.mark.parametrize("program", ["/bin/false", "/nowhere/python"], ids=["dies-at-once", "cannot-be-started"])
def test_a_picture_is_not_blamed_for_a_worker_that_does_not_start(program: str) -> None:
    pool = PicturePool(LIMITS, 1, image_seconds=60, video_seconds=60)
    with pytest.MonkeyPatch.context() as machine:
        machine.setattr(sys, "executable", program)
        pool.start()
        for _ in range(2):
            with pytest.raises(errors.Unavailable, match="no process to decode") as refused:
                pool.image(picture(1))
            assert refused.value.reason == "NO_PICTURE_WORKER" and refused.value.retry_after
    assert pool.image(picture(1)).shape[2] == 3, "and it is tried again"
    pool.close()
    with pytest.raises(errors.Unavailable, match="stopping"):
        pool.image(picture(1))
    assert pool.workers[0].pid is None


def test_uploads_outlive_a_start_that_cannot_look_at_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kept = tmp_path / "anyone" / ("0" * 64)
    kept.parent.mkdir()
    kept.write_bytes(picture(1))
    options = ServerOptions(media_dir=str(tmp_path))
    monkeypatch.setattr(sys, "executable", "/bin/false")
    with pytest.raises(ConfigError, match="media_dir: .*no process to decode"):
        Server(options, FakeEngine(vocabulary=64), load_assets(options))
    assert kept.exists()


def test_a_large_picture_s_memory_is_given_back() -> None:
    pool = PicturePool(MediaLimits(), 1, image_seconds=60, video_seconds=60)
    buffer = io.BytesIO()
    Image.new("RGB", (3000, 3000), (1, 2, 3)).save(buffer, "PNG", compress_level=1)
    assert (pool.image(buffer.getvalue()) == (1, 2, 3)).all()
    memory = pool.workers[0]._memory
    assert memory is not None and memory[:3] == b"\0\0\0", "the pages have gone"
    assert pool.image(picture(1)).any()
    pool.close()


def test_a_worker_imports_no_torch_and_ends_with_its_server(tmp_path: Path) -> None:
    program = "import sys, service.media.image_worker; print('torch' in sys.modules, 'grpc' in sys.modules)"
    root = str(Path(__file__).resolve().parents[3])
    env: dict[str, Any] = {**os.environ, "PYTHONPATH": root}
    told = subprocess.run([sys.executable, "-c", program], env=env, capture_output=True, text=True, check=True).stdout
    assert told == "False False\n"
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    memory = os.memfd_create("pixels")
    os.ftruncate(memory, 4096)
    process = subprocess.Popen(
        [sys.executable, "-m", "service.media.image_worker", str(theirs.fileno()), str(memory)],
        pass_fds=[theirs.fileno(), memory],
        env=env,
    )
    os.close(memory)
    theirs.close()
    ours.close()
    assert process.wait(timeout=60) == 0


def test_a_worker_sees_no_secret_of_its_server(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SACCADE_ADMIN_KEY", "the secret of the house")
    monkeypatch.setenv("LD_PRELOAD_NOT", "nor this")
    pool = PicturePool(LIMITS, 1, image_seconds=60, video_seconds=60)
    try:
        assert pool.image(picture(1)).any()
        pid = pool.workers[0].pid
        names = {entry.partition(b"=")[0] for entry in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")}
        assert b"PYTHONPATH" in names and b"OMP_NUM_THREADS" in names
        assert not names & {b"SACCADE_ADMIN_KEY", b"LD_PRELOAD_NOT"}
    finally:
        pool.close()


@pytest.mark.parametrize("fps", [b"1e-320", b"NaN", b"Infinity", b"-3.0", b"0.0", b'"5"', b"1" + b"0" * 400])
def test_a_rate_that_no_clip_has_is_not_believed(fps: bytes) -> None:
    pool = PicturePool(LIMITS, 1, image_seconds=30, video_seconds=30)
    try:
        with lying(pool, b'{"frames": 2}'):
            clip = pool.clip(b"a clip")
        with lying(pool, b'{"fps": %b}' % fps):
            assert clip.fps is None
    finally:
        pool.close()
