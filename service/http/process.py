"""The HTTP server of `saccade serve`: `python -m service.http.process FD`, started by `service.servers.http_process`.

Protocol on the socket pair FD. Parent to child: (options, descriptor of the listening socket) first, then (address of
gRPC, empty until it is known, log level) after each change. Child to parent: ("ready",) once it serves, or ("failed",
message); then ("beat",) every `BEAT_SECONDS`. The process ends on `STOP_HELPER`, and when the connection closes.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
import sys
import threading
from multiprocessing.connection import Connection

from service.common.config import HttpFrontOptions
from service.common.helper_process import BEAT_SECONDS, STOP_HELPER, ignore_stop_signals, log_to_stderr
from service.http.call import Front
from service.http.run import HttpServer

log = logging.getLogger(__name__)


def _listen_to(connection: Connection, front: Front) -> None:
    """Receives the address of gRPC and the log level; ends the process when its parent has ended."""
    try:
        while True:
            address, level = connection.recv()
            front.grpc_address = address or front.grpc_address
            logging.getLogger().setLevel(level)
    except (EOFError, OSError):
        os._exit(1)


async def _beat(connection: Connection) -> None:
    """Tells the parent that the event loop runs. Ends with the parent."""
    with contextlib.suppress(OSError):
        while True:
            await asyncio.sleep(BEAT_SECONDS)
            connection.send(("beat",))


def main(descriptor: int) -> int:
    connection: Connection = Connection(descriptor)
    options: HttpFrontOptions
    options, listening = connection.recv()
    log_to_stderr(options.log_level, "http")
    logging.getLogger("uvicorn").setLevel(logging.WARNING)
    tasks = []

    def ready() -> None:
        connection.send(("ready",))
        tasks.append(asyncio.get_running_loop().create_task(_beat(connection)))

    try:
        server = HttpServer(options, ready, (STOP_HELPER,))
    except ValueError as error:
        connection.send(("failed", str(error)))
        return 2
    threading.Thread(target=_listen_to, args=(connection, server.app.state.front), daemon=True).start()
    asyncio.run(server.serve(sockets=[socket.socket(fileno=listening)]))
    return 0


if __name__ == "__main__":
    ignore_stop_signals()  # the parent sends STOP_HELPER
    code = main(int(sys.argv[1]))
    sys.stderr.flush()
    os._exit(code)  # not exit(): the thread may still be blocked on the connection
