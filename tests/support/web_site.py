"""A scripted web server with TLS, for files that servers fetch by URL."""

from __future__ import annotations

import asyncio
import contextlib
import ssl
import threading
from collections.abc import AsyncIterator, Iterator

from certificates import Authority


class Site:
    """A scripted web server on the loopback interface, which records its requests."""

    def __init__(self, authority: Authority) -> None:
        self.authority = authority
        self.requests: list[bytes] = []
        self.connections = 0
        self.port = 0
        self.answers: dict[str, bytes] = {}
        self.stalled = asyncio.Event()
        self._tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        self._tls.load_cert_chain(authority.folder / "site.pem", authority.folder / "site.key")

    def says(self, path: str, body: bytes = b"", *, status: int = 200, **headers: str) -> None:
        fields = {"Content-Length": str(len(body)), **{k.replace("_", "-"): v for k, v in headers.items()}}
        head = f"HTTP/1.1 {status} Words\r\n" + "".join(f"{k}: {v}\r\n" for k, v in fields.items() if v != "-")
        self.answers[path] = head.encode() + b"\r\n" + body

    @contextlib.asynccontextmanager
    async def open(self) -> AsyncIterator[Site]:
        server = await asyncio.start_server(self._serve, "127.0.0.1", 0, ssl=self._tls)
        self.port = server.sockets[0].getsockname()[1]
        try:
            yield self
        finally:
            self.stalled.set()
            server.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError, ssl.SSLError):
            request = await reader.readuntil(b"\r\n\r\n")
            self.requests.append(request)
            path = request.split(b" ")[1].decode()
            if path == "/slow":
                writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\nabc")
                await writer.drain()
                await self.stalled.wait()
            elif path == "/endless":
                writer.write(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n")
                while not self.stalled.is_set():
                    writer.write(b"400\r\n" + bytes(0x400) + b"\r\n")
                    await writer.drain()
            else:
                writer.write(self.answers.get(path, b"HTTP/1.1 404 No\r\nContent-Length: 0\r\n\r\n"))
                await writer.drain()
            writer.close()

    @contextlib.contextmanager
    def in_thread(self) -> Iterator[Site]:
        """The server on an event loop of its own, for tests without one."""
        ready, over = threading.Event(), asyncio.Event()

        async def serve() -> None:
            nonlocal loop
            loop = asyncio.get_running_loop()
            async with self.open():
                ready.set()
                await over.wait()

        loop: asyncio.AbstractEventLoop | None = None
        thread = threading.Thread(target=lambda: asyncio.run(serve()), name="test-site", daemon=True)
        thread.start()
        assert ready.wait(60) and loop is not None
        try:
            yield self
        finally:
            loop.call_soon_threadsafe(over.set)
            thread.join()
