"""A real HTTP server in this process, in front of real gRPC servers: its event loop in a thread."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
from collections.abc import Sequence
from typing import Any

from waiting import until

from service.common.config import HttpFrontOptions
from service.http.call import Front
from service.http.listen import bind, url_of
from service.http.run import HttpServer


class RunningHttp:
    """Listens on a free port of the loopback interface. A context manager; leaving it checks that nothing is held."""

    def __init__(self, servers: Sequence[str], *, send_buffer: int | None = None, **options: Any) -> None:
        """`send_buffer`: bytes that the kernel holds for a reader that does not read; None: some megabytes."""
        self.options = HttpFrontOptions(servers=tuple(servers), **{"log_level": "warning", "grace": 1.0, **options})
        self._listener = bind(self.options, 0)
        if send_buffer is not None:  # connections inherit it
            self._listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, send_buffer)
        self.url = url_of(self._listener, self.options.tls_cert is not None)
        self.port: int = self._listener.getsockname()[1]
        self.http: HttpServer
        ready = threading.Event()

        def run() -> None:
            asyncio.run(serve())

        async def serve() -> None:
            self.http = HttpServer(self.options, ready.set)
            self.loop = asyncio.get_running_loop()
            await self.http.serve(sockets=[self._listener])

        self._thread = threading.Thread(target=run, name="test-http", daemon=True)
        self._thread.start()
        assert ready.wait(60)

    @property
    def front(self) -> Front:
        front: Front = self.http.app.state.front
        return front

    def idle(self, timeout: float = 60.0) -> None:
        """Waits until no request is in progress; then nothing may be held."""
        until(lambda: not self.front.running, timeout)
        assert (self.front.running, self.front.streams, self.front.budget.used) == (0, 0, 0)

    def close(self) -> None:
        self.http.should_exit = True
        self._thread.join()

    def __enter__(self) -> RunningHttp:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        try:
            if kind is None:
                self.idle()
        finally:
            self.close()


def request_of(document: Any, path: str = "/v1/chat/completions") -> bytes:
    """The bytes of an HTTP request with a JSON body."""
    body = json.dumps(document).encode()
    head = f"POST {path} HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
    head += f"content-length: {len(body)}\r\n\r\n"
    return head.encode() + body
