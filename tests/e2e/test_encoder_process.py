"""The encoder in a separate process on this host: same answers, and its failures do not affect the engine."""

from __future__ import annotations

import dataclasses
import logging
import os
import queue
import signal
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
from full_disk import file_size_limit
from images import png
from log_levels import LogLevels
from resident import file_bytes, file_bytes_after_import
from running import RunningServer, children
from waiting import until

import saccade
import saccade.errors
from encoder.item import VIDEO, EncoderItem
from service.common.config import ConfigError, EngineOptions
from service.encoding import process_link
from service.encoding.encoder_pool import Link
from service.encoding.entries import EncoderUnavailable, Work
from service.encoding.handoff import Handoff
from service.encoding.process_link import ProcessLink
from service.encoding.segments import SegmentPool, create_segment, open_segment, rounded
from service.engine.build import start_encoder_process
from service.model.checkpoint import open_checkpoint
from service.model.resolve import resolve_vision

OPTIONS = {"max_seqs": 8, "max_len": 600, "encoder_process": True}


def ask(client: Any, number: int) -> list[int]:
    values = {"max_tokens": 6, "ignore_eos": True, "temperature": 0}
    return client.generate(f"what is {number}", images=[png(number)], **values).token_ids


def encoder_of(running: RunningServer) -> int:
    parent = getattr(running.engine, "pid", os.getpid())
    (pid,) = children(parent, "service.servers.encoder_process")
    return pid


def of_process(stats: dict[str, Any], name: str) -> float:
    return float(stats["encoder"]["encoders"]["process"][name])


def test_same_answers_and_a_kill_over_an_image(model: Path, client: saccade.Client) -> None:
    shared = sorted(os.listdir("/dev/shm"))
    running = RunningServer(str(model), engine_process=True, **OPTIONS)
    with running, saccade.Client(running.address, max_retries=0) as apart:
        assert [ask(apart, n) for n in (700, 701, 700)] == [ask(client, n) for n in (700, 701, 700)]
        assert file_bytes(encoder_of(running)) < 0.6 * file_bytes_after_import("service.engine.build")
        with ThreadPoolExecutor(1) as pool:
            os.kill(encoder_of(running), signal.SIGSTOP)
            hit = pool.submit(ask, apart, 702)
            running.until(lambda s: s["encoder"]["given"] == 3)
            os.kill(encoder_of(running), signal.SIGKILL)
            assert hit.result() == ask(client, 702)
        stats = running.drained()
        assert of_process(stats, "starts") == 2
        assert stats["encoder"]["lost"] == 1 and stats["handoff"]["failures"] == 0
    assert sorted(os.listdir("/dev/shm")) == shared


def test_no_shared_memory_for_a_request_between_image_worker_and_engine(
    server: RunningServer, client: saccade.Client
) -> None:
    workers = [worker.pid for worker in server.server.image_pool.workers if worker.pid is not None]
    with (
        saccade.Client(server.address, max_retries=0) as once,
        once.stream("go on", max_tokens=300, ignore_eos=True, seed=1) as other,
    ):
        next(other)
        with ExitStack() as limits, pytest.raises(saccade.errors.Unavailable) as refused:
            for worker in workers:
                limits.enter_context(file_size_limit(1 << 10, worker))
            once.generate("all of them", images=[png(i, (64, 64)) for i in range(16)], max_tokens=1)
        assert refused.value.reason == "SHARED_MEMORY_FULL" and refused.value.retryable
        assert other.final().usage.completion_tokens == 300
        assert once.generate("and now", images=[png(0, (64, 64))], max_tokens=1).usage.completion_tokens == 1


def test_late_and_awake_again_and_late_for_good(model: Path, client: saccade.Client) -> None:
    """Requests that wait meanwhile are told to retry, and do; a process that does not resume is replaced."""
    with (
        RunningServer(str(model), **OPTIONS, encoder_lease=1.0) as running,
        ThreadPoolExecutor(1) as pool,
    ):
        with saccade.Client(running.address, max_retries=100) as apart:
            sleeping = encoder_of(running)
            os.kill(sleeping, signal.SIGSTOP)
            hit = pool.submit(ask, apart, 703)
            running.until(lambda s: s["handoff"]["expirations"] >= 1)
            running.until(lambda s: of_process(s, "quarantined_bytes") > 0)  # the encoder may still write to it
            os.kill(sleeping, signal.SIGCONT)
            assert hit.result() == ask(client, 703)
            stats = running.until(lambda s: not of_process(s, "quarantined_bytes") and not of_process(s, "late_now"))

            starts = of_process(stats, "starts")
            os.kill(encoder_of(running), signal.SIGSTOP)
            assert ask(apart, 704) == ask(client, 704)
        assert of_process(running.drained(), "starts") == starts + 1


# -- segments ----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def options(model: Path) -> EngineOptions:
    return EngineOptions(
        model=str(model), dtype="float32", threads=1, encoder_process=True, encoder_segment_bytes=1 << 18
    )


def test_shared_memory_that_holds_no_image_is_refused(
    options: EngineOptions, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    """The size that the error names is enough. The process logs what this one logs: nothing here."""
    caplog.set_level(logging.ERROR)
    vision = resolve_vision(options, open_checkpoint(options.model))
    assert vision is not None
    handoff = Handoff(1 << 20, vision.text_hidden_size, torch.float32)
    large = dataclasses.replace(vision, min_num_patches=1 << 14, max_num_patches=1 << 15)
    with pytest.raises(ConfigError, match=r"encoder_segment_bytes: 262144 .* at least (\d+) would work") as caught:
        start_encoder_process(options, large, handoff)
    least = int(str(caught.value).split()[-3])
    start_encoder_process(dataclasses.replace(options, encoder_segment_bytes=least), large, handoff).close()
    assert " INFO " not in capfd.readouterr().err


def test_shared_memory_that_is_full_is_one_images_error(
    options: EngineOptions, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    caplog.set_level(logging.INFO)
    vision = resolve_vision(options, open_checkpoint(options.model))
    assert vision is not None
    handoff = Handoff(1 << 20, vision.text_hidden_size, torch.float32)
    pool = start_encoder_process(options, vision, handoff)
    changed = threading.Condition()

    def on_change() -> None:
        pool.wake()
        with changed:
            changed.notify_all()

    handoff.on_change = on_change
    assert " INFO " in capfd.readouterr().err, "the process logs what this one logs"
    pool.start(lambda error: None)

    def lease(number: int, columns: int) -> Any:
        image = EncoderItem((2, columns), torch.randn(2 * columns, vision.patch_dim))
        return handoff.lease(bytes([number]), image)

    def settle(*leases: Any) -> None:
        with changed:
            assert changed.wait_for(lambda: all(entry.ready or entry.error for entry in leases), 60)

    large = (1 << 16) // (vision.patch_dim * 4) // 2 * 2  # columns of an image that takes the whole bound
    with file_size_limit(1 << 16):
        leases = [lease(1, 4), lease(2, large), lease(3, 6)]
        settle(*leases)
    assert [type(entry.error) for entry in leases] == [type(None), EncoderUnavailable, type(None)]
    assert "shared memory" in str(leases[1].error)
    again = lease(4, large)
    settle(again)
    assert again.ready, "there is room now"
    beyond = lease(5, 4 * large)
    settle(beyond)
    assert isinstance(beyond.error, ValueError) and str(1 << 18) in str(beyond.error)
    width = vision.patch_dim * (vision.video_temporal_patch_size or 0)
    clip = EncoderItem((2, 4), torch.randn(3 * 8, width), kind=VIDEO, num_sequences=3, num_frames=5, pruning_rate=0.5)
    pruned = handoff.lease(b"clip", clip)
    settle(pruned)
    assert pruned.counts is not None and sum(pruned.counts) == clip.tokens and len(pruned.counts) == 3
    crowd = [lease(10 + number, large // 4 * 2) for number in range(30)]  # far more images than segments
    settle(*crowd)
    assert all(entry.ready for entry in crowd)
    assert pool.stats()["encoders"]["process"]["segment_bytes"] <= 1 << 18
    for entry in [*leases, again, beyond, pruned, *crowd]:
        entry.release()
    pool.close()
    handoff.check_integrity(idle=True)


class Told:
    """An owner of a link that keeps what it is told."""

    def __init__(self) -> None:
        self.events: queue.SimpleQueue[tuple[str, list[int]]] = queue.SimpleQueue()

    def written(self, link: Link, work: Work, counts: tuple[int, ...]) -> None:
        self.events.put(("written", [work.ticket]))

    def failed(self, link: Link, work: Work, error: Exception) -> None:
        self.events.put((str(error), [work.ticket]))

    def lost(self, link: Link, works: Sequence[Work], reason: str) -> None:
        self.events.put(("lost", [work.ticket for work in works]))

    def changed(self, link: Link) -> None:
        pass


def test_what_a_killed_process_leaves_to_the_next_one(
    options: EngineOptions, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """And the log level, which a process has from the one that starts it, and gets with an image if it has changed."""
    levels = LogLevels(tmp_path, monkeypatch)
    caplog.set_level(logging.ERROR)
    vision = resolve_vision(options, open_checkpoint(options.model))
    assert vision is not None
    link, told = ProcessLink(options, segment_bytes=1 << 18), Told()
    link.start(told)

    def send(ticket: int, columns: int) -> tuple[str, list[int]]:
        image = EncoderItem((2, columns), torch.randn(2 * columns, vision.patch_dim))
        link.send(Work(b"", image, torch.zeros(image.tokens, vision.text_hidden_size), ticket), None)
        return told.events.get(timeout=60)

    def kill() -> int:
        assert (pid := link.pid) is not None
        os.kill(pid, signal.SIGKILL)
        assert told.events.get(timeout=60) == ("lost", [])
        return pid

    def level() -> int | None:
        assert link.pid is not None
        return levels.of(link.pid)

    assert level() == logging.ERROR
    caplog.set_level(logging.INFO)
    assert send(1, 4) == ("written", [1])
    assert level() == logging.INFO
    large = (1 << 16) // (vision.patch_dim * 4) // 2 * 2
    with file_size_limit(1 << 10):
        words, failed = send(2, large)
    assert "no shared memory" in words and failed == [2]
    kill()
    # An image that is assigned just after the process had ended: the next process gets it, and not only after the
    # image's lease has run out. Nor is that process told of segments that only the last one had: a machine without
    # memory closes segments and, often, kills a process, and the next one would end over their numbers.
    assert send(3, 4) == ("written", [3])
    assert level() == logging.INFO

    # A link that is closed while the process starts again: the new process is told to end. It was killed after 10 s.
    monkeypatch.setattr(process_link, "END_SECONDS", 200.0)  # a start takes more than 10 s on a busy machine
    old = kill()
    with ThreadPoolExecutor(1) as pool:
        until(lambda: link.pid != old)
        os.kill(link.pid, signal.SIGSTOP)  # so that it cannot be ready before the link is closed
        closing = pool.submit(link.close)
        until(link._closing.is_set)
        os.kill(link.pid, signal.SIGCONT)
        closing.result(timeout=250)
    assert link._process is not None and link._process.returncode == 0


def test_what_the_encoder_refuses_is_said_in_its_words(options: EngineOptions) -> None:
    bad = EngineOptions(model=options.model, encoder_process=True, token_budgets=(4096,))
    with pytest.raises(ConfigError, match="4096"):
        ProcessLink(bad, segment_bytes=1 << 20).start(None)  # type: ignore[arg-type]


def test_both_sides_see_one_segment() -> None:
    ours = create_segment(1, 1 << 16)
    theirs = open_segment(1, os.dup(ours.descriptor))
    ours.tensor(64, (3, 5), torch.bfloat16).fill_(2.5)
    assert (theirs.tensor(64, (3, 5), torch.bfloat16) == 2.5).all()
    for segment in (ours, theirs):
        segment.close()


def test_segments_are_used_again_and_bounded() -> None:
    pool = SegmentPool(1 << 19)
    first, new = pool.take(100_000) or pytest.fail("no room")
    assert new and first.size == rounded(100_000) == 1 << 17
    pool.give_back(first)
    again, new = pool.take(70_000) or pytest.fail("no room")
    assert again is first and not new
    taken = [pool.take(1 << 17) for _ in range(3)]
    assert all(taken) and pool.take(1) is None, "the bound"
    with pytest.raises(ValueError, match=str((1 << 19) + 1)):
        pool.take((1 << 19) + 1)
    for entry in taken:
        assert entry is not None
        pool.give_back(entry[0])
    pool.give_back(again)
    large, new = pool.take(1 << 18) or pytest.fail("no room")
    assert new and len(pool.closed) == 2 and pool.bytes <= 1 << 19
    pool.give_back(large)
    pool.close()
    assert pool.bytes == 0
