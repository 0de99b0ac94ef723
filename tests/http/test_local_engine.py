"""The HTTP server's routes over an engine in the same process, as in a replica of Ray Serve; and a server without a
health service."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest
from fake_server import ModelServicer, Script
from images import data_url, png

import saccade
from saccade._transport.local_aio import AsyncLocalConnection
from saccade.v1 import model_pb2_grpc
from service.common.config import HttpFrontOptions
from service.http.app import make_app


@pytest.fixture(scope="module")
def engine(model: Path) -> Iterator[saccade.LocalClient]:
    with saccade.LocalClient(str(model), dtype="float32", threads=1, max_seqs=8, max_len=600) as client:
        yield client


@contextmanager
def made(options: HttpFrontOptions, engine: AsyncLocalConnection | None = None) -> Iterator[Any]:
    app = make_app(options, engine)
    try:
        yield app
    finally:
        app.state.front.files.close()


@pytest.fixture
def app(engine: saccade.LocalClient) -> Iterator[Any]:
    connection: Any = engine._connection
    with ThreadPoolExecutor(8) as threads, made(HttpFrontOptions(), AsyncLocalConnection(connection, threads)) as app:
        yield app


async def ask(app: Any, path: str, document: Any = None, *, leave: bool = False) -> tuple[int, bytes]:
    """Sends one request. With `leave`, the client disconnects after the first piece of the answer."""
    body = b"" if document is None else json.dumps(document).encode()
    sent: list[dict[str, Any]] = []
    began, received = asyncio.Event(), False

    async def receive() -> dict[str, Any]:
        nonlocal received
        if not received:
            received = True
            return {"type": "http.request", "body": body, "more_body": False}
        await (began.wait() if leave else asyncio.Event().wait())
        return {"type": "http.disconnect"}

    async def send(message: dict[str, Any]) -> None:
        sent.append(message)
        if message["type"] == "http.response.body":
            began.set()

    scope = {
        "type": "http", "http_version": "1.1", "method": "GET" if document is None else "POST", "path": path,
        "raw_path": path.encode(), "root_path": "", "query_string": b"", "scheme": "http",
        "headers": [(b"content-type", b"application/json")],
    }  # fmt: skip
    await app(scope, receive, send)
    return sent[0]["status"], b"".join(message.get("body", b"") for message in sent[1:])


def asked(**options: Any) -> dict[str, Any]:
    url = data_url(png(4))
    parts = [{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": "what is it?"}]
    return {"model": "", "messages": [{"role": "user", "content": parts}], "temperature": 0, **options}


def test_answers_are_those_of_the_engine(app: Any, engine: saccade.LocalClient) -> None:
    wanted = engine.generate("what is it?", images=[png(4)], max_tokens=12, temperature=0, ignore_eos=True)
    document = asked(max_tokens=12, ignore_eos=True)
    status, body = asyncio.run(ask(app, "/v1/chat/completions", document))
    assert status == 200 and json.loads(body)["choices"][0]["message"]["content"] == wanted.text
    status, body = asyncio.run(ask(app, "/v1/chat/completions", {**document, "stream": True}))
    lines = [line.removeprefix("data: ") for line in body.decode().split("\n") if line.startswith("data: {")]
    pieces = [choice["delta"].get("content") or "" for line in lines for choice in json.loads(line)["choices"]]
    assert status == 200 and "".join(pieces) == wanted.text


def test_what_only_a_server_has_is_an_error(app: Any, engine: saccade.LocalClient) -> None:
    for path in ("/v1/batches", "/v1/files", "/v1/files/file-1"):
        status, body = asyncio.run(ask(app, path))
        assert status == 400 and "batches need a server with one frontend" in json.loads(body)["error"]["message"]
    status, body = asyncio.run(ask(app, "/v1/chat/completions", asked(temperature=-1)))
    assert status == 400 and "temperature" in json.loads(body)["error"]["message"]
    status, body = asyncio.run(ask(app, "/status"))
    (server,) = json.loads(body)["servers"]
    assert status == 200 and len(server["models"]) == 1 and "needs a server" in server["loads_error"]["message"]


def test_a_client_that_leaves_frees_the_slot(app: Any, engine: saccade.LocalClient) -> None:
    asyncio.run(ask(app, "/v1/chat/completions", asked(max_tokens=500, ignore_eos=True, stream=True), leave=True))
    while engine._service.stats()["decoder"]["running"]:
        pass
    assert app.state.front.running == 0


def test_an_engine_that_has_ended_is_not_ready(model: Path) -> None:
    client = saccade.LocalClient(str(model), dtype="float32", threads=1, max_seqs=2, max_len=600)
    connection: Any = client._connection
    with ThreadPoolExecutor(2) as threads, made(HttpFrontOptions(), AsyncLocalConnection(connection, threads)) as app:
        assert asyncio.run(ask(app, "/ready"))[0] == 200
        client.close()
        assert asyncio.run(ask(app, "/ready"))[0] == 503


def test_a_server_without_a_health_service_is_ready_if_it_has_models() -> None:
    """Ray Serve's ingress."""
    for has_models, wanted in ((True, "serving"), (False, "not serving")):
        with ThreadPoolExecutor(4) as threads:
            server = grpc.server(threads)
            if has_models:
                model_pb2_grpc.add_ModelServiceServicer_to_server(ModelServicer(Script()), server)
            address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
            server.start()
            with made(HttpFrontOptions(servers=(address,))) as app:
                status, body = asyncio.run(ask(app, "/ready"))
            server.stop(None).wait()
        assert (status, json.loads(body)["servers"]) == (200 if has_models else 503, {address: wanted})
