"""An HTTP server in front of several gRPC servers, one of which hangs, loses an answer or comes back."""

from __future__ import annotations

import contextlib
import itertools
import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from running import RunningServer
from running_http import RunningHttp

from service.http import upstream

BODY = {"messages": [{"role": "user", "content": "?"}], "max_tokens": 2, "temperature": 0}
ROW = json.dumps({"custom_id": "a", "method": "POST", "url": "/v1/chat/completions", "body": BODY}).encode()
BATCH: Any = {"endpoint": "/v1/chat/completions", "completion_window": "24h"}


@contextlib.contextmanager
def hung() -> Iterator[str]:
    """The address of a server to which connections can be made, and which never answers."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield f"127.0.0.1:{listener.getsockname()[1]}"


def client_of(http: RunningHttp) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{http.url}/v1", api_key="none", max_retries=0, timeout=60)


@pytest.mark.parametrize("place", [0, 1])
def test_a_server_that_hangs_delays_no_list(server: RunningServer, monkeypatch: pytest.MonkeyPatch, place: int) -> None:
    with hung() as address:
        servers = [server.address]
        servers.insert(place, address)
        with RunningHttp(servers) as http, client_of(http) as client:
            file = client.files.create(file=("in.jsonl", ROW), purpose="batch")  # not after the time below
            made = client.batches.retrieve(_created(server, http, file.id))
            monkeypatch.setattr(upstream, "ANSWER_SECONDS", 0.2)
            for path in ("models", "batches"):
                answer = httpx.get(f"{http.url}/v1/{path}", headers={"authorization": "Bearer none"}, timeout=60)
                assert answer.status_code == 200 and answer.json()["data"]
                assert answer.headers["x-saccade-missing-servers"] == address
            states = httpx.get(f"{http.url}/status", timeout=60).json()["servers"]
            assert [bool(state["models"]) for state in states] == [name != address for name in servers]
            assert f"{address} has not answered within 0.2 s" in states[place]["error"]["message"]
            with pytest.raises(openai.InternalServerError, match=f"{address} has not answered") as caught:
                client.batches.retrieve("batch_x")  # it may be there
            assert caught.value.status_code == 503
            monkeypatch.setattr(upstream, "ANSWER_SECONDS", 0.2)
            while client.batches.retrieve(made.id).status != "completed":
                pass
            client.files.delete(f"file-output-{made.id}")
            client.files.delete(file.id)


def _created(server: RunningServer, http: RunningHttp, file_id: str) -> str:
    """The id of a batch that is created on the server that answers."""
    answering = http.front.upstream.connections[http.front.upstream.addresses.index(server.address)]
    request_id = next(
        name for i in itertools.count() if http.front.upstream.order_of(name := f"hung-{i}")[0] is answering
    )
    with client_of(http) as client:
        return client.batches.create(input_file_id=file_id, **BATCH, extra_headers={"x-request-id": request_id}).id


class Relay:
    """Passes connections on to a server. Closes the first one through which the server sends something while `lose`
    says so, without passing that on."""

    def __init__(self, address: str, lose: Callable[[], bool]) -> None:
        self._server, self._lose, self._ends = address.rsplit(":", 1), lose, contextlib.ExitStack()
        self.lost = 0
        self._listener = self._ends.enter_context(socket.create_server(("127.0.0.1", 0)))
        self.address = f"127.0.0.1:{self._listener.getsockname()[1]}"
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                client = self._ends.enter_context(self._listener.accept()[0])
                server = self._ends.enter_context(socket.create_connection((self._server[0], int(self._server[1]))))
                threading.Thread(target=self._pass_on, args=(client, server, False), daemon=True).start()
                threading.Thread(target=self._pass_on, args=(server, client, True), daemon=True).start()

    def _pass_on(self, source: socket.socket, target: socket.socket, answers: bool) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(2**16):
                if answers and not self.lost and self._lose():
                    self.lost += 1
                    break
                target.sendall(data)
        for end in (source, target):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)

    def __enter__(self) -> Relay:
        return self

    def __exit__(self, *_: object) -> None:
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._ends.close()


def test_a_batch_whose_answer_is_lost_is_created_once(server: RunningServer, model: Path) -> None:
    def batches(running: RunningServer) -> list[str]:
        return sorted(running.server._batch_store._records)

    with (
        RunningServer(str(model), max_seqs=2, max_len=300) as first,
        Relay(first.address, lambda: bool(batches(first))) as relay,
        RunningHttp([relay.address, server.address]) as http,
        client_of(http) as client,
    ):
        order = http.front.upstream.order_of
        request_id = next(
            name for i in itertools.count() if order(name := f"once-{i}")[0] is http.front.upstream.connections[0]
        )
        before = batches(server)
        file = client.files.create(file=("in.jsonl", ROW), purpose="batch")
        headers = {"x-request-id": request_id}
        made = client.batches.create(input_file_id=file.id, **BATCH, extra_headers=headers)
        assert relay.lost == 1 and batches(first) == [made.id] and batches(server) == before
        again = client.batches.create(input_file_id=file.id, **BATCH, extra_headers=headers)
        assert again.id == made.id and batches(first) == [made.id] and batches(server) == before
        client.files.delete(file.id)
        while client.batches.retrieve(made.id).status != "completed":
            pass


def test_a_server_that_comes_back_is_found_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """Attempts to connect are made at least this often; gRPC's own pauses grow to two minutes."""
    monkeypatch.setattr(upstream, "BACKOFF", 100)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.settimeout(10.0)
        with RunningHttp([f"127.0.0.1:{listener.getsockname()[1]}"]) as http:
            asking = threading.Event()

            def ask() -> None:
                while not asking.is_set():
                    httpx.get(f"{http.url}/ready", timeout=60)

            thread = threading.Thread(target=ask)
            thread.start()
            began = time.monotonic()
            for _ in range(12):
                listener.accept()[0].close()
            assert time.monotonic() - began < 8.0
            asking.set()
            thread.join()
