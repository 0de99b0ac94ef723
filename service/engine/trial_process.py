"""The process that compiles each text format before the engine does: `python -m service.engine.trial_process FD`.

A hostile format can at most end this process, whose memory and processor time are limited. It reads one message at a
time from the socket FD and answers each with one. All messages are JSON, so the engine need not trust this process.

    first     {"tokenizer": path, "vocab_size": n, "ends": ids}      -> {} when it is ready
    format    {"kind": ..., "source": ...}                           -> {}, or {"message": ..., "field": ...}
"""

from __future__ import annotations

import json
import os
import sys
import threading
from multiprocessing.connection import Connection
from pathlib import Path

from families import CheckpointError
from service.common.helper_process import ignore_stop_signals
from service.common.process_limits import allow_seconds, confine
from service.common.types import TextFormat
from service.engine.grammars import COMPILE_SECONDS, Grammars
from service.engine.trials import MEMORY_BYTES, STACK_BYTES
from service.engine.types import UnusableConstraint
from service.model.token_bytes import ByteVocabulary


def _serve(connection: Connection) -> None:
    first = json.loads(connection.recv_bytes())
    grammars = Grammars(ByteVocabulary(Path(first["tokenizer"]), first["vocab_size"]), first["ends"])
    confine(MEMORY_BYTES)
    connection.send_bytes(b"{}")
    while True:
        format = TextFormat(**json.loads(connection.recv_bytes()))
        allow_seconds(COMPILE_SECONDS)
        reply = {}
        try:
            grammars.compile(format)
        except UnusableConstraint as error:
            reply = {"message": error.message, "field": error.field}
        except MemoryError:
            os.abort()  # as the compiler does without memory
        connection.send_bytes(json.dumps(reply).encode())


def _until_the_end(connection: Connection) -> None:
    try:
        _serve(connection)
    except (EOFError, ConnectionError):
        return  # the engine has ended
    except (CheckpointError, UnusableConstraint):
        return  # the engine reads the same vocabulary and reports its fault


def main(descriptor: int) -> None:
    ignore_stop_signals()  # the engine decides when this process stops.
    threading.stack_size(STACK_BYTES)
    thread = threading.Thread(target=_until_the_end, args=(Connection(descriptor),))
    thread.start()
    thread.join()


if __name__ == "__main__":
    main(int(sys.argv[1]))
