"""The engine process: `python -m service.servers.engine_process FD`, started by `service.engine.engine_client`.

Protocol on the socket pair FD. Frontend to engine: (options, log level) first, then ("submit", request) followed by the
descriptors of its images, ("abort", id), ("query", number, what), ("log level", level), ("close",). Engine to frontend:
("ready", info) or ("failed", message) first, then ("events", [...]), ("answer", number, value, error). Each side treats
the end of the stream as the end of the other.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import logging
import os
import sys
import threading
from concurrent.futures import Future
from multiprocessing.connection import Connection
from typing import Any

from kernels.host_memory import keep_freed_memory, release_program_pages
from service.common.channel import receive_descriptors
from service.common.config import EngineOptions
from service.common.errors import EngineDied
from service.common.helper_process import ignore_stop_signals, log_to_stderr, torch_imports
from service.engine import wire


def main(descriptor: int) -> int:
    connection: Connection = Connection(descriptor)
    ignore_stop_signals()  # the frontend decides when this process stops.
    options, log_level = connection.recv()
    log_to_stderr(log_level)
    keep_freed_memory()
    try:
        return _serve(connection, options)
    except (EOFError, ConnectionError):
        return 0  # the frontend has ended; nothing needs its requests any more


def _serve(connection: Connection, options: EngineOptions) -> int:
    try:
        with torch_imports():
            from service.engine.build import build_engine

        engine = build_engine(options)
    except ValueError as error:  # ConfigError, CheckpointError and errors of the runners
        connection.send(("failed", str(error)))
        return 1
    lock = threading.Lock()

    def send(message: Any) -> None:
        with lock, contextlib.suppress(ConnectionError):
            connection.send(message)

    def answer(number: int, future: Future[dict[str, Any]]) -> None:
        if not isinstance(future.exception(), EngineDied):  # the other side is told by the end of the connection
            send(wire.answer(number, future))

    def receive() -> None:
        try:
            while True:
                match connection.recv():
                    case ("submit", request):
                        descriptors = receive_descriptors(connection, len(request.images))
                        engine.submit(request.unpacked(descriptors))
                    case ("abort", request_id):
                        engine.abort(request_id)
                    case ("query", number, what):
                        engine.query(what).add_done_callback(functools.partial(answer, number))
                    case ("log level", level):
                        logging.getLogger().setLevel(level)
                    case ("close",):
                        return
        except (EOFError, ConnectionError):
            pass  # the frontend has ended; nothing needs its requests any more
        finally:
            engine.stop()

    # Objects created while loading are permanent. Garbage collections that examine them would delay a step by tens of
    # milliseconds.
    gc.collect()
    gc.freeze()
    release_program_pages()
    send(("ready", engine.info))
    threading.Thread(target=receive, name="saccade-engine-receiver", daemon=True).start()
    engine.run(lambda events: send(("events", wire.pack_events(events))), linger=False)
    return 0


if __name__ == "__main__":
    code = main(int(sys.argv[1]))
    sys.stderr.flush()
    os._exit(code)  # threads of torch may outlive the interpreter and crash it
