"""One of several frontend processes: `python -m service.servers.frontend_process FD`, started by
`service.servers.frontends`.

Protocol on the socket pair FD. Hub to frontend: (options, engine info, member, path of a private socket or None) first;
then what an engine process sends, and ("alive", bool), ("given up",), ("drain",), ("beat", log level), ("cancel",
number, salt, request id). Frontend to hub: ("serving", port) or ("failed", message) first; then what an engine process
receives, and ("cancel", number, salt, request id), ("drain",), ("log level", level), and the answers ("beat",) and
("cancelled", number, whether there was the request). A frontend process ends when its connection to the hub closes.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import os
import secrets
import sys
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

from kernels.host_memory import release_program_pages
from service.common.config import ServerOptions
from service.common.helper_process import STOP_HELPER, ignore_stop_signals, log_level, log_to_stderr
from service.engine.engine_client import EngineLink
from service.engine.types import EngineInfo
from service.servers.from_options import load_assets
from service.servers.lifetime import started, stop_signals, stop_when_told
from service.servers.server import Server

log = logging.getLogger(__name__)


class HubLink(EngineLink):
    """The engine client of a frontend process: messages to and from the engine go through the hub."""

    def __init__(self, connection: Connection, info: EngineInfo, on_death: Callable[[], None]) -> None:
        super().__init__(connection, on_death)
        self.info = info
        self._engine_alive = True
        self.on_change: Callable[[bool], None] = lambda alive: None
        self.on_give_up: Callable[[], None] = lambda: None
        self.on_request: Callable[[Any], object] = lambda message: None
        """Called with what the hub itself asks: ("drain",), ("beat", log level) and ("cancel", ...)."""

    @property
    def alive(self) -> bool:
        return self._engine_alive and not self._closing

    def _other(self, message: Any) -> None:
        match message:
            case ("alive", alive):
                self._engine_alive = alive
                self.on_change(alive)
            case ("given up",):
                self.on_give_up()
            case ("drain" | "beat" | "cancel", *_):
                self.on_request(message)
            case _:
                super()._other(message)

    async def cancel_elsewhere(self, request_id: str, salt: bytes) -> bool:
        """Cancels a request of another frontend. Returns whether there was one with this id."""
        answer = await asyncio.wrap_future(self._ask("cancel", salt, request_id))
        return bool(answer["found"])

    def tell(self, message: Any) -> None:
        self._outbox.put(message)

    def close(self) -> None:
        """Closes the connection after queued messages have been sent. The engine continues until the hub stops it.
        Idempotent."""
        self._closing = True
        self._outbox.close(timeout=5.0)


class FrontendServer(Server):
    """A server that shares its engine and its port with other frontend processes."""

    has_batches = False

    def __init__(self, options: ServerOptions, link: HubLink, member: int) -> None:
        super().__init__(options, link, load_assets(options), member=member)
        self._link = link
        # Request ids in the engine must differ from those of other frontends and of a dead one that this one replaces.
        first = secrets.randbits(32) * options.frontends + member
        self.frontend.numbers = itertools.count(first, options.frontends)
        self.calls.elsewhere = link.cancel_elsewhere
        link.on_change, link.on_give_up = self.engine_changed, self.engine_given_up
        loop = asyncio.get_running_loop()
        # On the event loop, whose answer to a heartbeat shows that it runs.
        link.on_request = lambda message: loop.call_soon_threadsafe(self._handle, message)
        self.tell_log_level = lambda: link.tell(("log level", log_level()))

    def _handle(self, message: Any) -> None:
        match message:
            case ("drain",):
                self.drain()
            case ("beat", level):
                logging.getLogger().setLevel(level)
                self._link.tell(("beat",))
            case ("cancel", number, salt, request_id):
                self._link.tell(("cancelled", number, self.frontend.cancel(request_id, salt=salt)))

    def _drain_asked(self) -> None:
        """Drains all frontends, this one included."""
        self._link.tell(("drain",))


async def serve(
    connection: Connection, options: ServerOptions, info: EngineInfo, member: int, private_socket: str | None
) -> int:
    """Runs a frontend until `STOP_HELPER`, or until the connection to the hub closes. Returns the exit code."""
    stopping = stop_signals(STOP_HELPER)
    link = HubLink(connection, info, on_death=_orphaned)
    try:
        server = FrontendServer(options, link, member)
        server.private_socket = private_socket
        ready = await started(server.start(), stopping)
    except ValueError as error:
        link.tell(("failed", str(error)))
        link.close()
        return 2
    if ready:
        link.tell(("serving", server.port))
        await stop_when_told(server, stopping, options.grace)
    else:
        await server.stop(grace=0)
    return 0


def _orphaned() -> None:
    """Ends the process at once: without the hub there is no engine."""
    log.error("the hub has ended")
    os._exit(1)


def main(descriptor: int) -> int:
    connection: Connection = Connection(descriptor)
    options, info, member, private_socket = connection.recv()
    log_to_stderr(options.log_level, f"frontend {member}")
    release_program_pages()
    return asyncio.run(serve(connection, options, info, member, private_socket))


if __name__ == "__main__":
    ignore_stop_signals()  # the hub sends STOP_HELPER
    code = main(int(sys.argv[1]))
    sys.stderr.flush()
    os._exit(code)  # not exit(): the link's reader thread may still be blocked on the hub
