"""Several servers behind one client: hit rates of their caches, and a replica that dies under streams and batches."""

from __future__ import annotations

import json
import os
import signal
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from faults import PLAIN, check_same, long_requests, open_stream, streams_over
from images import png
from served import IMAGE_TOKEN, make_served

import saccade
from benchmarks import replicas
from service.commands.cli import ServerProcess


@pytest.fixture
def servers(model: Path) -> Iterator[list[ServerProcess]]:
    with ExitStack() as ends:
        yield [ends.enter_context(ServerProcess([str(model), *PLAIN, "--max-seqs", "16"])) for _ in range(3)]


def test_ten_questions_about_an_image_hit_the_cache_of_one_replica(tmp_path: Path) -> None:
    """Also with a replica that is killed in the middle; all answers are those of one replica."""
    model = str(make_served(tmp_path / "model").path)
    found = replicas.measure([model, *PLAIN, "--max-seqs", "8"], 6, 3)
    met = replicas.judge(found, 6)
    assert all(met.values()), (met, {hits.name: hits.rate for hits in found})


def test_streams_and_a_batch_go_on_at_another_replica(servers: list[ServerProcess], tmp_path: Path) -> None:
    requests = long_requests(6, IMAGE_TOKEN)
    requests.append(
        {"prompt": "large", "images": [png(3, (900, 900))], "max_tokens": 60, "ignore_eos": True, "seed": 1}
    )
    addresses = [server.address for server in servers]
    with saccade.Client(addresses[0]) as one:
        wanted = [open_stream(one, request).final() for request in requests]
    with saccade.Client(addresses, affinity="auto", max_retries=20) as client:
        found = streams_over(client, requests, lambda: os.kill(servers[0].pid, signal.SIGKILL))
        check_same(found, wanted)
        rows: list[dict[str, Any]] = []
        for number in range(30):
            body = {"messages": [{"role": "user", "content": f"row {number}"}], "max_tokens": 4, "seed": number}
            rows.append({"custom_id": str(number), "body": body})
        (tmp_path / "in.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        done: list[int] = []

        def strike_at_the_tenth(*_: object) -> None:
            done.append(1)
            if len(done) == 10:
                os.kill(servers[1].pid, signal.SIGKILL)

        summary = client.run_batch(
            tmp_path / "in.jsonl", tmp_path / "out.jsonl", concurrency=4,
            on_progress=strike_at_the_tenth,
        )  # fmt: skip
    assert (summary.completed, summary.failed) == (30, 0)


def test_no_call_fails_while_a_replica_stops(model: Path) -> None:
    """Without a running request it stops at once. gRPC ends calls that it has received and the server has not read with
    the status CANCELLED, as if the caller had cancelled them."""
    with ExitStack() as ends:
        first, second = (ends.enter_context(ServerProcess([str(model), *PLAIN])) for _ in range(2))
        addresses = [first.address, second.address]
        clients = [ends.enter_context(saccade.Client(addresses)) for _ in range(8)]
        begun, stopped = threading.Barrier(len(clients) + 1), threading.Event()

        def ask(client: saccade.Client) -> None:
            client.tokenize("?")
            begun.wait(60)
            while not stopped.is_set():
                client.tokenize("?")
            client.tokenize("?")

        with ThreadPoolExecutor(len(clients)) as pool:
            asked = [pool.submit(ask, client) for client in clients]
            begun.wait(60)
            try:
                first.stop()
            finally:
                stopped.set()
            for each in asked:
                each.result(60)
