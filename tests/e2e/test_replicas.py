"""Several servers behind one client: hit rates of their caches, and a replica that dies under streams and batches."""

from __future__ import annotations

import json
import os
import signal
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from faults import PLAIN, check_same, long_requests, open_stream, streams_over
from images import png
from running import RunningServer
from served import IMAGE_TOKEN

import saccade
from benchmarks import replicas
from service.commands.server_process import ServerProcess

ROOMY: dict[str, Any] = {"max_seqs": 16, "max_len": 600, "admin": True}
"""Options of the replicas that live on. They are in this process, which saves the start of theirs."""


@contextmanager
def replicas_of(model: Path, lasting: int) -> Iterator[tuple[ServerProcess, list[str]]]:
    """A replica that may be killed or stopped, and the addresses of all: its own, then those of the lasting ones."""
    with ExitStack() as ends:
        mortal = ends.enter_context(ServerProcess([str(model), *PLAIN, "--max-seqs", "16", "--admin"]))
        others = [ends.enter_context(RunningServer(str(model), **ROOMY)) for _ in range(lasting)]
        yield mortal, [mortal.address, *(other.address for other in others)]


def test_ten_questions_about_an_image_hit_the_cache_of_one_replica(model: Path) -> None:
    """Also with a replica that is killed in the middle; all answers are those of one replica."""
    with replicas_of(model, 2) as (mortal, addresses):
        found = replicas.compare(addresses, 6, mortal.pid)
    met = replicas.judge(found, 6)
    assert all(met.values()), (met, {hits.name: hits.rate for hits in found})


def test_streams_and_a_batch_go_on_at_another_replica(model: Path, tmp_path: Path) -> None:
    """The replica is killed when each stream has had its first delta and the batch ten of its answers."""
    requests = long_requests(6, IMAGE_TOKEN)
    requests.append(
        {"prompt": "large", "images": [png(3, (900, 900))], "max_tokens": 60, "ignore_eos": True, "seed": 1}
    )
    rows: list[dict[str, Any]] = []
    for number in range(30):
        body = {"messages": [{"role": "user", "content": f"row {number}"}], "max_tokens": 4, "seed": number}
        rows.append({"custom_id": str(number), "body": body})
    (tmp_path / "in.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    done: list[int] = []
    begun, killed = threading.Event(), threading.Event()

    with replicas_of(model, 2) as (mortal, addresses), ThreadPoolExecutor(1) as pool:
        with saccade.Client(addresses[0]) as one:
            wanted = [open_stream(one, request).final() for request in requests]

        def strike_at_the_tenth(*_: object) -> None:
            done.append(1)
            if len(done) == 10:
                assert begun.wait(120)
                os.kill(mortal.pid, signal.SIGKILL)
                killed.set()

        def strike() -> None:
            begun.set()
            assert killed.wait(120)

        with saccade.Client(addresses, affinity="auto", max_retries=20) as client:
            batch = pool.submit(
                client.run_batch, tmp_path / "in.jsonl", tmp_path / "out.jsonl", concurrency=4,
                on_progress=strike_at_the_tenth,
            )  # fmt: skip
            found = streams_over(client, requests, strike)
            check_same(found, wanted)
            summary = batch.result(120)
    assert (summary.completed, summary.failed) == (30, 0)


def test_no_call_fails_while_a_replica_stops(text_model: Path) -> None:
    """Without a running request it stops at once. gRPC ends calls that it has received and the server has not read with
    the status CANCELLED, as if the caller had cancelled them."""
    with replicas_of(text_model, 1) as (first, addresses), ExitStack() as ends:
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
