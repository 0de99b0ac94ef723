"""Decoding in other processes: the same pixels, enforced limits, and workers that send invalid replies."""

from __future__ import annotations

import fcntl
import hashlib
import io
import json
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from clips import animation, moving_frames
from descriptors import NO_MORE, limited_descriptors, open_descriptors
from images import png
from PIL import Image
from waiting import ended

from encoder.item import ROW_MAJOR, EncoderItem
from encoder.media_limits import FORMATS, ImageError, ImageLimits, VideoError, VideoLimits
from encoder.stopwatch import Stopwatch
from encoder.tower import patch_order
from families import VisionSpec
from families.lfm2_vl.vision import TiledVision
from families.minicpmv4_6.slicing import Slicing
from families.minicpmv4_6.vision import SlicingVision
from families.qwen3_5.vision import QwenVision
from service.common import errors
from service.common.config import ServerOptions
from service.media import worker_processes
from service.media.image_pool import ImagePool
from service.media.image_worker import LENGTH
from service.media.images import MediaLimits
from service.media.media import Spool
from service.media.patches import Patcher
from service.media.prepared import SEALS, PreparedItem
from service.servers.from_options import load_assets

LIMITS = MediaLimits(ImageLimits(max_pixels=3_000_000), VideoLimits(max_pixels=3_000_000, max_frames=20))
VISION = load_assets(ServerOptions()).vision
assert VISION is not None
HERE = Patcher(LIMITS, VISION, "float32")


def make_pool(limits: MediaLimits = LIMITS, seconds: float = 60) -> ImagePool:
    return ImagePool(limits, 1, image_seconds=seconds, video_seconds=seconds, vision=VISION)


def make_light_pool() -> ImagePool:
    """Without a model, so that its processes start without torch; it only describes files."""
    return ImagePool(LIMITS, 1, image_seconds=60, video_seconds=60)


def image(pool: ImagePool, data: bytes) -> EncoderItem:
    """The item as the engine gets it."""
    return opened(pool.image(data, Stopwatch()))


def opened(sealed: PreparedItem) -> EncoderItem:
    assert sealed.file is not None
    return replace(sealed, file=None).opened(sealed.file.take()).encoder_item


def same(got: EncoderItem, expected: PreparedItem) -> bool:
    wanted = expected.encoder_item
    return got.description == wanted.description and torch.equal(got.patches, wanted.patches)


@pytest.fixture(scope="module")
def pool() -> Iterator[ImagePool]:
    pool = make_pool()
    pool.start()
    yield pool
    assert pool.stats() == {"workers_lost_time": 0, "workers_lost_died": 0, "workers_lost_nonsense": 0}
    pool.close()


@pytest.fixture(scope="module")
def spare() -> Iterator[ImagePool]:
    """One whose workers may be lost."""
    pool = make_pool()
    yield pool
    pool.close()


def test_the_largest_limits_that_options_allow_can_be_set() -> None:
    most = 2**63 - 1
    limits = MediaLimits(ImageLimits(most, most), VideoLimits(most, max_pixels=most, max_total_pixels=most))
    pool = ImagePool(limits, 1, image_seconds=60, video_seconds=60)
    header = pool.describe(png(1, (9, 7)))
    pool.close()
    assert (header.format, header.width, header.height) == ("PNG", 9, 7)


@pytest.mark.parametrize("form", sorted({"PNG", "JPEG", "WEBP", "TIFF", "AVIF"} & set(FORMATS)))
@pytest.mark.parametrize("size", [(57, 33), (32, 32)], ids=["resized", "cut-only"])
def test_patches_are_those_of_this_process(pool: ImagePool, form: str, size: tuple[int, int]) -> None:
    exif = Image.Exif()
    exif[0x0112] = 6
    buffer = io.BytesIO()
    Image.open(io.BytesIO(png(3, size))).save(buffer, form, **({} if form == "TIFF" else {"exif": exif}))
    data, watch = buffer.getvalue(), Stopwatch()
    got = opened(pool.image(data, watch))
    assert same(got, HERE.image(data, Stopwatch())) and got.patches.dtype == (
        torch.uint8 if size[0] == 32 else torch.float32
    )
    assert watch.seconds["decode"] > 0 and watch.seconds["patch"] > 0
    assert pool.describe(data) == HERE.describe(data)


@pytest.mark.parametrize("form", sorted({"GIF", "PNG", "WEBP", "AVIF"} & set(FORMATS)))
def test_videos_are_those_of_this_process(pool: ImagePool, form: str) -> None:
    data, watch = animation(moving_frames(6, 20, 30), form), Stopwatch()
    ours, theirs = HERE.video(data, 3, Stopwatch()), pool.video(data, 3, watch)
    assert (theirs.total, theirs.fps) == (ours.total, ours.fps) == (6, ours.fps) and watch.frames == 3
    assert same(opened(theirs.item), ours.item)


def test_frames_are_those_of_this_process(pool: ImagePool) -> None:
    files = [(index, png(index, (40, 20))) for index in (0, 2, 5)]
    assert same(opened(pool.frames(files, Stopwatch())), HERE.frames(files, Stopwatch()))
    for bad, words in (((5, b"junk"), "frame 5: "), ((5, png(1, (20, 20))), "frame 2 has 20x20 pixels")):
        for processor in (pool, HERE):
            with pytest.raises(ValueError, match=words):
                processor.frames([*files[:2], bad], Stopwatch())
    assert same(opened(pool.frames(files[:1], Stopwatch())), HERE.frames(files[:1], Stopwatch()))


def test_nobody_can_write_to_what_a_worker_has_made(pool: ImagePool) -> None:
    sealed = pool.image(png(1), Stopwatch())
    descriptor = sealed.file.take()
    try:
        for change in (lambda: os.write(descriptor, b"x"), lambda: os.ftruncate(descriptor, 1)):
            with pytest.raises(PermissionError):
                change()
    finally:
        os.close(descriptor)


def test_what_nobody_takes_is_closed(pool: ImagePool) -> None:
    pool.image(png(1), Stopwatch())
    before = open_descriptors()
    for _ in range(3):
        pool.image(png(1), Stopwatch())
    assert open_descriptors() == before


def test_refusals_are_those_of_this_process(pool: ImagePool) -> None:
    wide, flat = io.BytesIO(), io.BytesIO()
    Image.new("1", (2000, 2000)).save(wide, "PNG")
    Image.new("1", (1, 201)).save(flat, "PNG")
    for data in (b"", b"junk", png(1)[:60], wide.getvalue(), flat.getvalue()):
        refused = []
        for processor in (HERE, pool):
            try:
                processor.image(data, Stopwatch())
            except ValueError as error:
                refused.append((type(error), str(error), getattr(error, "too_large", None)))
        assert len(refused) == 2 and refused[0] == refused[1]
    long = animation(moving_frames(21, 4, 4), "GIF")
    with pytest.raises(VideoError, match="21 frames, more than the 20") as error:
        pool.video(long, 4, Stopwatch())
    assert error.value.too_large
    with pytest.raises(VideoError):
        pool.video(animation(moving_frames(5, 40, 40), "GIF")[:-900], 5, Stopwatch())


def test_memory_is_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    limits = MediaLimits(ImageLimits(max_pixels=10**9))
    monkeypatch.setattr(MediaLimits, "worker_bytes", 100 << 20)
    pool = make_pool(limits, 120)
    buffer = io.BytesIO()
    Image.new("RGB", (6000, 6000)).save(buffer, "PNG", compress_level=1)
    with pytest.raises(ImageError, match="memory|cannot be decoded|died"):
        image(pool, buffer.getvalue())
    assert image(pool, png(1)).tokens
    pool.close()


ITEM: dict[str, Any] = {
    "grid": [4, 4], "kind": "image", "num_sequences": 1, "num_frames": 0, "pruning_rate": 0.0, "merge_size": 2,
    "width": VISION.patch_widths["image"], "dtype": "float32", "order": ROW_MAJOR, "slices": [0, 0],
    "slice_grid": [0, 0], "slices_first": False,
}  # fmt: skip
SECONDS = {"decode": 0.1, "resize": 0.1, "patch": 0.1}
SIZE = 16 * ITEM["width"] * 4


def words(seconds: Any = SECONDS, **changed: Any) -> bytes:
    return json.dumps({"item": {**ITEM, **changed}, "seconds": seconds}).encode()


def memory_file(size: int = SIZE, seals: int = SEALS) -> int:
    descriptor = os.memfd_create("x", os.MFD_ALLOW_SEALING)
    os.ftruncate(descriptor, size)
    fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, seals)
    return descriptor


def test_what_a_worker_says_is_believed_where_all_of_it_fits() -> None:
    pool = make_pool(seconds=30)
    with lying(pool, words(), memory_file()):
        assert image(pool, b"an image").tokens == 4
    pool.close()


@pytest.mark.parametrize(
    ("said", "file"),
    [
        pytest.param(b"{}", memory_file, id="no-item"),
        pytest.param(words(), lambda: None, id="no-file"),
        pytest.param(words(), lambda: memory_file(SIZE - 1), id="short-file"),
        pytest.param(words(), lambda: memory_file(SIZE + 1), id="long-file"),
        pytest.param(words(), lambda: memory_file(seals=SEALS & ~fcntl.F_SEAL_WRITE), id="can-be-written"),
        pytest.param(words(), lambda: memory_file(seals=SEALS & ~fcntl.F_SEAL_SHRINK), id="can-shrink"),
        pytest.param(words(), lambda: os.open("/dev/null", os.O_RDONLY), id="no-memory-file"),
        pytest.param(words(grid=[-4, -4]), memory_file, id="negative"),
        pytest.param(words(grid=["4", True]), memory_file, id="no-numbers"),
        pytest.param(words(grid=[1, 16]), memory_file, id="ragged"),
        pytest.param(words(grid=[10**9, 10**9]), memory_file, id="more-than-there-is"),
        pytest.param(words(width=True), memory_file, id="no-width"),
        pytest.param(words(width=3), memory_file, id="another-width"),
        pytest.param(words(kind="video"), memory_file, id="another-kind"),
        pytest.param(words(merge_size=4), memory_file, id="another-merge"),
        pytest.param(words(num_sequences=10**400, pruning_rate=0.5), memory_file, id="more-than-a-float-holds"),
        pytest.param(words(pruning_rate=0.5), memory_file, id="pruned"),
        pytest.param(words(order="blocks"), memory_file, id="another-order"),
        pytest.param(words(order="spiral"), memory_file, id="no-order"),
        pytest.param(words(num_sequences=4, grid=[2, 2]), memory_file, id="several-sequences"),
        pytest.param(words(num_frames=1), memory_file, id="frames-of-an-image"),
        pytest.param(words(dtype="bfloat16", grid=[4, 8]), memory_file, id="another-type"),
        pytest.param(words(dtype="float8"), memory_file, id="no-type"),
        pytest.param(words(more=1), memory_file, id="one-field-more"),
        pytest.param(words(seconds={"decode": "long"}), memory_file, id="no-seconds"),
        pytest.param(words(seconds={"decode": -1.0}), memory_file, id="negative-seconds"),
        pytest.param(words(seconds=[]), memory_file, id="seconds-of-nothing"),
        pytest.param(b'{"item": 4', memory_file, id="half-json"),
        pytest.param(b"[1, 2]", memory_file, id="a-list"),
        pytest.param(b"x" * 100_000, memory_file, id="long"),
        pytest.param(b"[" * 60_000, memory_file, id="deep"),
    ],
)
def test_what_a_worker_says_is_not_believed(said: bytes, file: Callable[[], int | None]) -> None:
    pool = make_pool(seconds=30)
    with lying(pool, said, file()), pytest.raises(ImageError, match="the decoder returned an invalid result"):
        image(pool, b"an image")
    assert pool.stats()["workers_lost_nonsense"] == 1
    pool.close()


def test_what_a_worker_says_of_an_error_can_be_sent() -> None:
    pool = make_pool(seconds=30)
    with lying(pool, rb'{"error": "\ud800 is half a character"}', None), pytest.raises(ImageError) as error:
        image(pool, b"an image")
    assert error.value.reason.encode() == b"? is half a character"
    pool.close()


@pytest.mark.parametrize("kind", ["image", "video"])
@pytest.mark.parametrize(("most", "cut"), [(4, (1, 5)), (4, (10**4, 10**4)), (1, (1, 1)), (4, (2, 2))])
def test_more_slices_than_the_model_makes_are_not_believed(kind: str, most: int, cut: tuple[int, int]) -> None:
    """A file without content takes no memory, however large it is, but the words of its slices would."""
    video = Slicing(max_slice_nums=most)
    vision = SlicingVision(8, 1, 1, 8, 8, insert_layer=None, image=video, video=video)
    pool = ImagePool(LIMITS, 1, image_seconds=30, video_seconds=30, vision=vision)
    sequences, width = 1 + cut[0] * cut[1], vision.patch_widths[kind]
    item = {
        **ITEM, "kind": kind, "num_frames": int(kind == "video"), "num_sequences": sequences, "slices": cut,
        "slice_grid": (4, 4), "width": width, "order": patch_order(vision),
    }  # fmt: skip
    said = json.dumps({"item": item, "seconds": SECONDS, "total": 1, "fps": 2.0}).encode()
    make = {"image": lambda: pool.image(b"x", Stopwatch()), "video": lambda: pool.video(b"x", 8, Stopwatch()).item}[
        kind
    ]
    try:
        with lying(pool, said, memory_file(16 * sequences * width * 4)):
            if cut[0] * cut[1] <= most > 1:
                assert make().layout.slices == cut
            else:
                with pytest.raises(ImageError, match="the decoder returned an invalid result"):
                    make()
    finally:
        pool.close()


@pytest.mark.parametrize("changes", [{}, {"slices_first": False}, {"grid": [0, 4]}, {"grid": [0, 0]}])
def test_slices_in_another_order_than_the_models_are_not_believed(changes: dict[str, Any]) -> None:
    """The rows of slices would be taken for those of the whole image."""
    vision = TiledVision(8, 1, 1, 8, 8)
    width = vision.patch_widths["image"]
    item = {
        **ITEM, "num_sequences": 5, "slices": [2, 2], "slice_grid": [4, 4], "slices_first": True, "width": width,
        "order": patch_order(vision), **changes,
    }  # fmt: skip
    said = json.dumps({"item": item, "seconds": SECONDS}).encode()
    pool = ImagePool(LIMITS, 1, image_seconds=30, video_seconds=30, vision=vision)
    try:
        with lying(pool, said, memory_file(5 * 16 * width * 4)):
            if changes:
                with pytest.raises(ImageError, match="the decoder returned an invalid result"):
                    image(pool, b"x")
            else:
                assert image(pool, b"x").grids == ((4, 4),) * 5
    finally:
        pool.close()


def test_another_takes_the_place_of_one_that_lies(spare: ImagePool) -> None:
    with lying(spare, b"{}", None), pytest.raises(ImageError, match="the decoder returned an invalid result"):
        image(spare, b"an image")
    assert image(spare, png(1)).tokens


@contextmanager
def lying(pool: ImagePool, said: bytes, file: int | None) -> Iterator[None]:
    """Replaces the pool's worker by one that has sent this reply and file in advance."""
    worker = pool.workers[0]
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    with theirs:
        worker._connection, worker.pid = ours, os.getpid()
        socket.send_fds(theirs, [LENGTH.pack(len(said))], [] if file is None else [file])
        if file is not None:
            os.close(file)
        theirs.sendall(said)
        yield


def test_an_image_is_not_blamed_for_a_worker_that_does_not_start() -> None:
    """Neither for one that ends at once nor for one that cannot be started."""
    pool = make_light_pool()
    for program in ("/bin/false", "/nowhere/python"):
        with pytest.MonkeyPatch.context() as machine:
            machine.setattr(sys, "executable", program)
            pool.start()
            for _ in range(2):
                with pytest.raises(errors.Unavailable, match="no process to decode") as refused:
                    image(pool, png(1))
                assert refused.value.reason == "NO_IMAGE_WORKER" and refused.value.retry_after
    assert pool.describe(png(1)).format == "PNG", "and it is tried again"
    pool.close()
    with pytest.raises(errors.Unavailable, match="stopping"):
        image(pool, png(1))
    assert pool.workers[0].pid is None


def test_a_fork_server_that_is_ending_is_replaced_and_no_image_refused() -> None:
    pool = make_light_pool()
    pool.describe(png(1))
    worker, server = pool.workers[0], pool._fork_server
    assert worker.pid and worker._connection and server._process and server._connection
    ending = server._process
    ending.send_signal(signal.SIGSTOP)  # it has closed its socket, but has not ended yet
    server._connection.shutdown(socket.SHUT_RDWR)
    os.kill(worker.pid, signal.SIGKILL)
    worker._connection.settimeout(60)
    assert worker._connection.recv(1) == b"", "the worker has ended"
    assert pool.describe(png(2)).format == "PNG"
    assert server._process is not ending and ending.returncode == -signal.SIGKILL
    pool.close()


def test_a_fork_server_that_hangs_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    pool = make_light_pool()
    pool.describe(png(1))
    worker, server = pool.workers[0], pool._fork_server
    assert worker.pid and worker._connection and server._process
    server._process.send_signal(signal.SIGSTOP)
    os.kill(worker.pid, signal.SIGKILL)
    worker._connection.settimeout(60)
    assert worker._connection.recv(1) == b"", "the worker has ended"
    with monkeypatch.context() as patient:
        patient.setattr(worker_processes, "START_SECONDS", 0.1)
        with pytest.raises(errors.Unavailable, match=r"lost while starting \(time\)"):
            pool.describe(png(2))
    assert pool.describe(png(2)).format == "PNG"
    pool.close()


def test_a_fork_server_that_has_not_started_yet_is_not_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    """It may take long to read torch from a slow disk."""
    pool = make_light_pool()
    with monkeypatch.context() as patient:
        patient.setattr(worker_processes, "START_SECONDS", 0.001)
        with pytest.raises(errors.Unavailable, match=r"lost while starting \(time\)"):
            pool.describe(png(2))
    first = pool._fork_server._process
    assert first is not None and pool.describe(png(2)).format == "PNG" and pool._fork_server._process is first
    pool.close()


def test_uploads_outlive_a_start_without_workers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data, pool = png(1), make_light_pool()
    media_id = hashlib.sha256(data).hexdigest()
    (tmp_path / "anyone").mkdir()
    (tmp_path / "anyone" / media_id).write_bytes(data)
    with monkeypatch.context() as machine:
        machine.setattr(sys, "executable", "/bin/false")
        spool = Spool(tmp_path, 10**6, 100.0, 10**6, pool.describe)
        assert spool.read("anyone", media_id) == data
        with pytest.raises(errors.Unavailable, match="no process to decode"):
            spool.get("anyone", media_id)
    assert spool.get("anyone", media_id).format == "PNG"
    pool.close()


def test_a_worker_without_a_model_has_no_torch_and_ends_with_its_server() -> None:
    program = "import sys, service.media.image_worker; print('torch' in sys.modules, 'grpc' in sys.modules)"
    root = str(Path(__file__).resolve().parents[3])
    env: dict[str, Any] = {**os.environ, "PYTHONPATH": root}
    told = subprocess.run([sys.executable, "-c", program], env=env, capture_output=True, text=True, check=True).stdout
    assert told == "False False\n"
    pool = make_light_pool()
    assert pool.describe(png(1)).format == "PNG"
    worker, server = pool.workers[0], pool._fork_server
    assert worker.pid is not None and server._process is not None and server._connection is not None
    assert "libtorch" not in Path(f"/proc/{worker.pid}/maps").read_text()
    server._connection.close()
    assert server._process.wait(timeout=60) == 0
    ended(worker.pid)
    pool.close()


def test_an_image_is_not_blamed_for_a_process_without_descriptors(spare: ImagePool) -> None:
    """Neither for its patches nor for another worker."""
    assert image(spare, png(1)).tokens
    worker, before = spare.workers[0], spare.stats()
    pid = worker.pid
    with limited_descriptors(NO_MORE), pytest.raises(errors.Unavailable, match="Too many open files") as refused:
        spare.image(png(1), Stopwatch())
    assert refused.value.reason == "SHARED_MEMORY_FULL"
    assert image(spare, png(1)).tokens and worker.pid == pid and spare.stats() == before, "the same worker goes on"
    worker.stop()
    with limited_descriptors(NO_MORE), pytest.raises(errors.Unavailable, match="Too many open files") as refused:
        spare.image(png(1), Stopwatch())
    assert refused.value.reason == "NO_IMAGE_WORKER" and image(spare, png(1)).tokens


def test_workers_are_forked_and_end_with_what_they_are_forked_from(spare: ImagePool) -> None:
    """A new worker needs no second import of torch, and shares what the import has made."""
    assert image(spare, png(1)).tokens
    worker, first, before = spare.workers[0], spare._fork_server._process, spare.stats()
    assert worker.pid is not None and first is not None
    pids = [worker.pid]
    for _ in range(3):
        os.kill(worker.pid, signal.SIGKILL)
        ended(worker.pid)
        assert image(spare, png(1)).tokens
        pids.append(worker.pid)
    assert len(set(pids)) == 4 and spare._fork_server._process is first
    shared = Path(f"/proc/{worker.pid}/smaps_rollup").read_text()
    kib = {line.split(":")[0]: int(line.split()[1]) for line in shared.splitlines()[1:]}
    assert kib["Private_Dirty"] < kib["Shared_Dirty"] / 4
    first.kill()
    ended(worker.pid)
    assert image(spare, png(1)).tokens and spare._fork_server._process is not first
    assert spare.stats() == before, "between two images, an end costs nothing"


def test_a_worker_sees_no_secret_of_its_server(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SACCADE_ADMIN_KEY", "the secret of the house")
    monkeypatch.setenv("LD_PRELOAD_NOT", "nor this")
    pool = make_light_pool()
    try:
        assert pool.describe(png(1)).format == "PNG"
        pid = pool.workers[0].pid
        names = {entry.partition(b"=")[0] for entry in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")}
        assert b"PYTHONPATH" in names and b"OMP_NUM_THREADS" in names
        assert not names & {b"SACCADE_ADMIN_KEY", b"LD_PRELOAD_NOT"}
    finally:
        pool.close()


@pytest.mark.parametrize("fps", [b"1e-320", b"NaN", b"Infinity", b"-3.0", b"0.0", b'"5"', b"1" + b"0" * 400])
def test_a_rate_that_no_video_has_is_not_believed(fps: bytes) -> None:
    pool = make_pool(seconds=30)
    item = {**ITEM, "kind": "video", "num_frames": 2, "width": VISION.patch_widths["video"]}
    said = json.dumps({"item": item, "seconds": SECONDS, "total": 2})[:-1].encode() + b', "fps": %b}' % fps
    try:
        with lying(pool, said, memory_file(2 * SIZE)):
            assert pool.video(b"a video", 8, Stopwatch()).fps is None
    finally:
        pool.close()


@pytest.mark.parametrize("vision", [VISION, QwenVision(8, 1, 1, 8, 8)], ids=["nemotron", "qwen"])
@pytest.mark.parametrize(("total", "frames"), [(0, 2), (3, 2), (True, 1), (1, 2), pytest.param(10**400, 2, id="huge")])
def test_frames_that_a_video_cannot_have_are_not_believed(total: int, frames: int, vision: VisionSpec) -> None:
    pool = ImagePool(LIMITS, 1, image_seconds=30, video_seconds=30, vision=vision)
    width, order = vision.patch_widths["video"], patch_order(vision)
    item = {**ITEM, "kind": "video", "num_frames": frames, "width": width, "order": order}
    said = json.dumps({"item": item, "seconds": SECONDS, "total": total, "fps": 2.0}).encode()
    try:
        with (
            lying(pool, said, memory_file(16 * width * 4)),
            pytest.raises(VideoError, match="the decoder returned an invalid result"),
        ):
            pool.video(b"a video", 8, Stopwatch())
    finally:
        pool.close()


def test_two_threads_may_close_it_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """As after a second signal. While the first one kills a process, the second gets no further than that process."""
    pool, inside, beside, errors_seen = make_pool(), threading.Event(), threading.Event(), []
    pool.start()
    kill, (worker,) = subprocess.Popen.kill, pool.workers

    def slowly(process: subprocess.Popen[bytes]) -> None:
        kill(process)
        if inside.is_set():  # the second thread
            beside.set()
            first.join(60)
        else:
            inside.set()
            beside.wait(0.2)

    def close() -> None:
        try:
            pool.close()
        except BaseException as error:
            errors_seen.append(error)

    monkeypatch.setattr(subprocess.Popen, "kill", slowly)
    first, second = threading.Thread(target=close), threading.Thread(target=close)
    first.start()
    assert inside.wait(60)
    second.start()
    first.join(60)
    second.join(60)
    assert not errors_seen and pool._fork_server._process is None and not beside.is_set()
    with pytest.raises(errors.Unavailable, match="the server is stopping"):
        pool.describe(png(1))
    worker.stop()
    pool._restart(worker)
    assert worker._connection is None and pool._fork_server._process is None, "none is started after the end"
