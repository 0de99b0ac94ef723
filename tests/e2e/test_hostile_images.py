"""Deliberately broken files: each is rejected, while the server continues to serve other requests."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from images import png
from mutants import MUTATIONS, run_mutants
from running import RunningServer
from waiting import ended, sent_to

import saccade


@pytest.mark.parametrize("seed", [1, 2])
def test_mutated_files(server: RunningServer, seed: int) -> None:
    seen = run_mutants(server, len(MUTATIONS), seed)
    assert seen["files"] == len(MUTATIONS) and seen["neighbours"] > 0
    assert seen["workers_lost_nonsense"] == 0


@pytest.fixture(scope="module")
def one_worker(model: Path) -> Iterator[RunningServer]:
    with RunningServer(str(model), max_seqs=4, max_len=600, image_workers=1, image_cache_bytes=0) as server:
        yield server


def test_a_worker_that_is_killed_costs_its_own_request_only(one_worker: RunningServer) -> None:
    pool = one_worker.server.image_pool
    with saccade.Client(one_worker.address) as client, ThreadPoolExecutor(2) as threads:
        good = client.generate("what?", images=[png(1)], max_tokens=3, temperature=0)
        worker = pool.workers[0]
        assert worker.pid is not None
        os.kill(worker.pid, signal.SIGSTOP)
        doomed = threads.submit(client.generate, "what?", images=[png(2)], max_tokens=3)
        sent_to(worker)
        beside = threads.submit(client.generate, "what?", images=[png(1)], max_tokens=3, temperature=0)
        words = client.generate("no image", max_tokens=3)
        os.kill(worker.pid, signal.SIGKILL)
        with pytest.raises(saccade.errors.InvalidArgument) as error:
            doomed.result()
        assert error.value.reason == "IMAGE_DECODE_FAILED" and not error.value.retryable
        assert beside.result() == good and words.finish_reason
        assert pool.stats()["workers_lost_died"] == 1
        # A worker that ends between two images affects no request.
        assert worker.pid is not None
        os.kill(worker.pid, signal.SIGKILL)
        ended(worker.pid)
        assert client.generate("what?", images=[png(1)], max_tokens=3, temperature=0) == good
        assert pool.stats()["workers_lost_died"] == 1


def test_an_image_that_takes_too_long(one_worker: RunningServer, monkeypatch: pytest.MonkeyPatch) -> None:
    pool = one_worker.server.image_pool
    with saccade.Client(one_worker.address) as client:
        good = client.generate("what?", images=[png(1)], max_tokens=3, temperature=0)
        monkeypatch.setattr(pool, "_image_seconds", 0.2)
        pid = pool.workers[0].pid
        assert pid is not None
        os.kill(pid, signal.SIGSTOP)
        with pytest.raises(saccade.errors.InvalidArgument, match="longer than the allowed 0.2 s") as error:
            client.generate("what?", images=[png(1)], max_tokens=3)
        assert error.value.reason == "IMAGE_DECODE_FAILED" and pool.stats()["workers_lost_time"] == 1
        ended(pid)
        monkeypatch.setattr(pool, "_image_seconds", 20.0)
        assert client.generate("what?", images=[png(1)], max_tokens=3, temperature=0) == good
