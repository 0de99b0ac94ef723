"""A real server in this process: its event loop in a thread, its engine and its images in this process or in others."""

from __future__ import annotations

import asyncio
import math
import threading
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

from encoder.media_limits import ImageHeader
from encoder.stopwatch import Stopwatch
from families import VisionSpec
from service.common.config import ServerOptions
from service.engine import wire
from service.engine.engine_client import EngineProcess
from service.engine.engine_thread import EngineThread
from service.engine.types import EngineHandle, EngineRequest, EventSink
from service.media.image_pool import ImagePool
from service.media.images import Frame, MediaLimits, PreparedVideo
from service.media.patches import Patcher
from service.media.prepared import PreparedItem
from service.model.assets import ModelAssets
from service.servers.encoder_server import EncoderServer, EncoderThread
from service.servers.from_options import frontend_limits, load_assets
from service.servers.server import Server

T = TypeVar("T")


class EngineHere(EngineThread):
    """An engine in this process, for tests that are not about the engine process, whose start takes 1.6 s of processor
    time. Requests, images and events are converted as they are between two processes."""

    def start(self, on_events: EventSink) -> None:
        super().start(lambda events: on_events(wire.unpack_events(wire.pack_events(events))))

    def submit(self, request: EngineRequest) -> None:
        bare, descriptors = request.packed()
        super().submit(bare.unpacked(descriptors))


class ImagesHere(ImagePool):
    """Prepares images in this process, for tests that are not about image workers, each of which takes over a second of
    processor time to start. Patches are passed on in sealed memory files, as they are between processes."""

    def __init__(self, limits: MediaLimits, vision: VisionSpec, dtype: str) -> None:
        super().__init__(limits, 0, image_seconds=math.inf, video_seconds=math.inf, vision=vision, dtype=dtype)
        self._patcher = Patcher(limits, vision, dtype)

    def image(self, data: bytes, watch: Stopwatch) -> PreparedItem:
        return self._patcher.image(data, watch).sealed()

    def video(self, data: bytes, frames: int, watch: Stopwatch) -> PreparedVideo:
        video = self._patcher.video(data, frames, watch)
        return replace(video, item=video.item.sealed())

    def frames(self, files: Sequence[Frame], watch: Stopwatch) -> PreparedItem:
        return self._patcher.frames(files, watch).sealed()

    def describe(self, data: bytes) -> ImageHeader:
        return self._patcher.describe(data)


def images_here(options: ServerOptions, engine: EngineHandle, assets: ModelAssets) -> ImagesHere | None:
    """What prepares images for a server in this process; None if the model takes none."""
    if assets.vision is None:
        return None
    return ImagesHere(frontend_limits(options).media, assets.vision, engine.info.dtype)


class RunningServer:
    """Listens on the loopback interface, on a free port unless one is given. A context manager; leaving it checks that
    nothing leaked.

    Images are prepared in this process unless `image_workers`, a number of processes, is among the options."""

    def __init__(
        self, model: str, *, engine: EngineHandle | None = None, engine_process: bool = False,
        private_socket: str | None = None, port: int = 0, **options: Any,
    ) -> None:  # fmt: skip
        values = {
            "dtype": "float32",
            "threads": 1,
            "log_level": "warning",
            "warmup": False,
            "image_workers": 1,
        } | options
        self.options = ServerOptions(model=model, port=port, **values)
        make_engine = EngineProcess if engine_process else EngineHere
        self.engine: EngineHandle = engine or make_engine(self.options)
        self._images_here = "image_workers" not in options
        self._private_socket = private_socket
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self.loop.run_forever, name="test-server", daemon=True)
        self._thread.start()
        self.server: Server = self.run(self._start())

    async def _start(self) -> Server:
        assets = load_assets(self.options)
        pool = images_here(self.options, self.engine, assets) if self._images_here else None
        server = Server(self.options, self.engine, assets, image_pool=pool)
        server.private_socket = self._private_socket
        await server.start()
        return server

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.server.port}"

    def run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(coroutine, self.loop).result(timeout=120)

    def stats(self) -> dict[str, Any]:
        return self.engine.query("stats").result(timeout=60)

    def drained(self, timeout: float = 60.0) -> dict[str, Any]:
        """Waits until no request is live in frontend and engine, no image is being encoded and no call holds a part of
        the message budget (the server's end of a call may come after its client's); then checks every pool. Returns
        the counters."""

        async def busy() -> bool:
            stats = await asyncio.wrap_future(self.engine.query("stats"))
            handoff = stats["handoff"]
            return bool(stats["live"] or (handoff and (handoff["writing"] or handoff["quarantined"])))

        async def wait() -> None:
            async with asyncio.timeout(timeout):
                while self.server.frontend.live or self.server.budget.used or await busy():
                    await asyncio.sleep(0.005)

        self.run(wait())
        return self.engine.query("integrity").result(timeout=60)

    def until(self, condition: Callable[[dict[str, Any]], bool], timeout: float = 60.0) -> dict[str, Any]:
        """Waits until the engine's counters fulfil the condition. Returns them."""

        async def wait() -> dict[str, Any]:
            async with asyncio.timeout(timeout):
                while not condition(stats := await asyncio.wrap_future(self.engine.query("stats"))):
                    await asyncio.sleep(0.005)
            return stats

        return self.run(wait())

    def close(self) -> None:
        self.run(self.server.stop(grace=0))
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join()
        self.loop.close()

    def __enter__(self) -> RunningServer:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        try:
            if kind is None and self.engine.alive:
                self.drained()
        finally:
            self.close()


class RunningEncoder:
    """A server of role `encoder` in this process. A context manager; leaving it checks that nothing leaked."""

    def __init__(self, model: str, **options: Any) -> None:
        values = {"dtype": "float32", "threads": 1, "log_level": "warning", "warmup": False, **options}
        self.options = ServerOptions(model=model, port=0, role="encoder", **values)
        self.thread = EncoderThread(self.options)
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self.loop.run_forever, name="test-encoder", daemon=True)
        self._thread.start()
        self.server = EncoderServer(self.options, self.thread)
        self.run(self.server.start())
        self.address = f"127.0.0.1:{self.server.port}"

    def run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(coroutine, self.loop).result(timeout=120)

    def close(self) -> None:
        self.run(self.server.stop(grace=0))
        self.run(_others_end())
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join()
        self.loop.close()

    def __enter__(self) -> RunningEncoder:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        try:
            self.close()
        finally:
            if kind is None:
                self.thread.handoff.check_integrity(idle=True)


async def _others_end(seconds: float = 10.0) -> None:
    """Waits until cancelled calls have released what they hold."""
    if others := asyncio.all_tasks() - {asyncio.current_task()}:
        await asyncio.wait(others, timeout=seconds)


def children(pid: int, module: str) -> list[int]:
    """Ids, in order, of the processes that `pid` started as `python -m module`."""
    started = [int(c) for task in Path(f"/proc/{pid}/task").iterdir() for c in _read(task / "children").split()]
    return sorted(c for c in started if module.encode() in _read(Path(f"/proc/{c}/cmdline")).split(b"\0"))


def _read(path: Path) -> bytes:
    """The file's bytes; empty if its thread or process has ended meanwhile."""
    try:
        return path.read_bytes()
    except (FileNotFoundError, ProcessLookupError):
        return b""
