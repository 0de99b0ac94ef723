"""`client.batches` against a scripted server: streams that break and are reopened."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import grpc
import pytest
from fake_server import Failure, Script, serve

import saccade
from saccade import errors
from saccade._core.batches import Download, Messages, watch_call
from saccade._core.settings import CallSettings
from saccade._core.steps import Open, Receive, Wait
from saccade.v1 import batch_pb2, batch_pb2_grpc

OUTPUT = bytes(range(97, 123))
GONE = errors.Unavailable("gone", retryable=True, retry_after=0.0)


class Batches(batch_pb2_grpc.BatchServiceServicer):
    """Sends `OUTPUT` three bytes at a time and breaks off after each `breaks` messages."""

    def __init__(self) -> None:
        self.breaks = 2
        self.offsets: list[int] = []
        self.watched = 0

    def _break(self, context: grpc.ServicerContext) -> None:
        Failure(grpc.StatusCode.UNAVAILABLE, reason="ENGINE_DIED", retry_after=0.001).abort(context)

    def DownloadBatchOutput(
        self, request: batch_pb2.DownloadBatchOutputRequest, context: grpc.ServicerContext
    ) -> Iterator[batch_pb2.DownloadBatchOutputResponse]:
        self.offsets.append(request.offset)
        for count, start in enumerate(range(request.offset, len(OUTPUT), 3)):
            if count == self.breaks:
                self._break(context)
            yield batch_pb2.DownloadBatchOutputResponse(data=OUTPUT[start : start + 3])

    def WatchBatch(
        self, request: batch_pb2.WatchBatchRequest, context: grpc.ServicerContext
    ) -> Iterator[batch_pb2.WatchBatchResponse]:
        for _ in range(self.breaks):
            self.watched += 1
            state = batch_pb2.BATCH_STATE_COMPLETED if self.watched > 9 else batch_pb2.BATCH_STATE_RUNNING
            yield batch_pb2.WatchBatchResponse(batch=batch_pb2.Batch(batch_id="b", state=state, total=self.watched))
        self._break(context)


@pytest.fixture
def batches() -> Iterator[tuple[Batches, str]]:
    servicer = Batches()

    def add_port(server: grpc.Server) -> int:
        batch_pb2_grpc.add_BatchServiceServicer_to_server(servicer, server)
        port: int = server.add_insecure_port("127.0.0.1:0")
        return port

    with ExitStack() as ends:
        yield servicer, ends.enter_context(serve(Script(), add_port=add_port))


@pytest.mark.parametrize("kind", ["sync", "async"])
def test_a_download_goes_on_where_it_broke_off(batches: tuple[Batches, str], tmp_path: Path, kind: str) -> None:
    """More breaks than any retry count, because each piece is progress."""
    servicer, address = batches
    target = tmp_path / "out"

    async def by_asyncio() -> None:
        async with saccade.AsyncClient(address, max_retries=1) as client:
            await client.batches.download("b", target)

    if kind == "sync":
        with saccade.Client(address, max_retries=1) as client:
            client.batches.download("b", target)
            with pytest.raises(errors.FailedPrecondition, match="resume=True"):
                client.batches.download("b", target)
            with pytest.raises(errors.FailedPrecondition) as caught:
                client.batches.download("b", tmp_path / "nowhere" / "out")
            assert "resume" not in str(caught.value)
    else:
        asyncio.run(by_asyncio())
    assert target.read_bytes() == OUTPUT and servicer.offsets == [0, 6, 12, 18, 24]


def test_a_file_that_is_written_is_not_closed_by_a_cancellation(
    batches: tuple[Batches, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its descriptor may be that of another file by the time of the write."""
    writing, written, plain = threading.Event(), threading.Event(), Download.write

    def slow(self: Download, data: bytes) -> None:
        writing.set()
        assert written.wait(30)
        plain(self, data)

    monkeypatch.setattr(Download, "write", slow)

    async def main() -> None:
        async with saccade.AsyncClient(batches[1]) as client:
            task = asyncio.create_task(client.batches.download("b", tmp_path / "out"))
            await asyncio.to_thread(writing.wait, 30)
            for _ in range(2):
                task.cancel()
                assert not (await asyncio.wait({task}, timeout=0.01))[0]
            written.set()
            with pytest.raises(asyncio.CancelledError):
                await task

    asyncio.run(main())
    assert (tmp_path / "out").read_bytes() == OUTPUT[:3]


def test_two_downloads_to_one_file_write_it_once(tmp_path: Path) -> None:
    """As when a command is repeated while the first one still downloads."""
    with Download("b", tmp_path / "out", resume=False) as first:
        first.write(OUTPUT[:3])
        with Download("b", tmp_path / "out", resume=True) as second:
            assert second.offset == 3
            first.write(OUTPUT[3:8])
            second.write(OUTPUT[3:6])
            second.write(OUTPUT[6:])
        first.write(OUTPUT[8:])
    assert (tmp_path / "out").read_bytes() == OUTPUT


@pytest.mark.parametrize("kind", ["sync", "async"])
def test_a_download_that_is_refused_leaves_no_file(tmp_path: Path, kind: str) -> None:
    """Otherwise a second call would be rejected because the file exists."""

    async def by_asyncio() -> None:
        async with saccade.AsyncClient(address) as client:
            await client.batches.download("b", tmp_path / "out")

    with serve(Script()) as address, pytest.raises(errors.Unimplemented):
        if kind == "sync":
            with saccade.Client(address) as client:
                client.batches.download("b", tmp_path / "out")
        else:
            asyncio.run(by_asyncio())
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("kind", ["sync", "async"])
def test_a_download_by_a_closed_client_leaves_no_file(tmp_path: Path, kind: str) -> None:
    async def by_asyncio() -> None:
        client = saccade.AsyncClient("127.0.0.1:1")
        await client.close()
        await client.batches.download("b", tmp_path / "out")

    with pytest.raises(errors.FailedPrecondition, match="has been closed"):
        if kind == "sync":
            client = saccade.Client("127.0.0.1:1")
            client.close()
            client.batches.download("b", tmp_path / "out")
        else:
            asyncio.run(by_asyncio())
    assert not list(tmp_path.iterdir())


def test_paths_that_are_none_are_refused(batches: tuple[Batches, str], tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with saccade.Client(batches[1]) as client:
        for source in ("a\0b", tmp_path / "pipe"):
            with pytest.raises(errors.InvalidArgument, match="cannot read .*(null byte|it is a pipe)"):
                client.batches.create(source)
        with pytest.raises(errors.FailedPrecondition, match="cannot write .*null byte"):
            client.batches.download("b", "a\0b")
        with pytest.raises(errors.InvalidArgument, match="target: expected a path, got int"):
            client.batches.download("b", 5)  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", ["sync", "async"])
def test_a_file_that_is_deleted_between_two_attempts_is_named(tmp_path: Path, kind: str) -> None:
    """gRPC would only say that the call was cancelled, as if the caller's task had been."""
    source = tmp_path / "in.jsonl"
    source.write_bytes(b"row")

    class Refusing(batch_pb2_grpc.BatchServiceServicer):
        def CreateBatch(self, requests: Any, context: grpc.ServicerContext) -> batch_pb2.CreateBatchResponse:
            if source.exists():
                source.unlink()
                Failure(grpc.StatusCode.UNAVAILABLE, reason="QUEUE_FULL", retry_after=0.001).abort(context)
            list(requests)
            return batch_pb2.CreateBatchResponse()

    def add_port(server: grpc.Server) -> int:
        batch_pb2_grpc.add_BatchServiceServicer_to_server(Refusing(), server)
        port: int = server.add_insecure_port("127.0.0.1:0")
        return port

    async def by_asyncio(address: str) -> None:
        async with saccade.AsyncClient(address, timeout=20) as client:
            await client.batches.create(source)

    with (
        serve(Script(), add_port=add_port) as address,
        pytest.raises(errors.InvalidArgument, match=f"cannot read '{source}': No such file"),
    ):
        if kind == "sync":
            with saccade.Client(address, timeout=20) as client:
                client.batches.create(source)
        else:
            asyncio.run(by_asyncio(address))


def test_a_batch_of_a_folder_is_refused_before_anything_is_sent(batches: tuple[Batches, str], tmp_path: Path) -> None:
    with saccade.Client(batches[1]) as client:
        for name, why in ((tmp_path, "Is a directory"), (tmp_path / "missing", "No such file")):
            with pytest.raises(errors.InvalidArgument, match=f"cannot read '{name}': {why}"):
                client.batches.create(name)


@pytest.mark.parametrize("kind", ["sync", "async"])
def test_a_download_to_a_full_disk_says_so(batches: tuple[Batches, str], kind: str) -> None:
    async def by_asyncio() -> None:
        async with saccade.AsyncClient(batches[1]) as client:
            await client.batches.download("b", "/dev/full", resume=True)

    message = "cannot write '/dev/full' after 0 bytes: No space left on device"
    with pytest.raises(errors.FailedPrecondition, match=message):
        if kind == "sync":
            with saccade.Client(batches[1]) as client:
                client.batches.download("b", "/dev/full", resume=True)
        else:
            asyncio.run(by_asyncio())


@pytest.mark.parametrize("kind", ["sync", "async"])
def test_watching_goes_on_until_the_batch_is_over(batches: tuple[Batches, str], kind: str) -> None:
    _, address = batches

    async def by_asyncio() -> list[saccade.Batch]:
        async with saccade.AsyncClient(address, max_retries=1) as client:
            return [batch async for batch in client.batches.watch("b")]

    if kind == "sync":
        with saccade.Client(address, max_retries=1) as client:
            seen = list(client.batches.watch("b"))
    else:
        seen = asyncio.run(by_asyncio())
    assert [batch.total for batch in seen] == list(range(1, 11)) and [batch.over for batch in seen] == [False] * 9 + [
        True
    ]


def test_without_progress_it_ends() -> None:
    def read(messages: Messages, arrive: list[Any]) -> list[float]:
        """The waits until there is a message; each attempt ends as given in `arrive`."""
        waits = []
        actions = messages.read()
        action = next(actions)
        while True:
            try:
                if isinstance(action, Open):
                    action = actions.send(None)
                elif isinstance(action, Wait):
                    waits.append(action.seconds)
                    action = actions.send(None)
                else:
                    assert isinstance(action, Receive)
                    arrived = arrive.pop(0)
                    action = (actions.throw if isinstance(arrived, Exception) else actions.send)(arrived)
            except StopIteration:
                return waits

    messages = Messages(lambda: watch_call("b"), CallSettings(max_retries=2))
    assert len(read(messages, [GONE, GONE, "message"])) == 2
    assert read(messages, ["message"]) == []
    assert len(read(messages, [GONE, GONE, "message"])) == 2, "a message is progress"
    with pytest.raises(errors.Unavailable):
        read(messages, [GONE, GONE, GONE])
    short = Messages(lambda: watch_call("b"), CallSettings(timeout=60))
    with pytest.raises(errors.Unavailable):
        read(short, [errors.Unavailable("gone", retryable=True, retry_after=600.0)])
