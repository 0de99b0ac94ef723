"""Streams across crashes of the engine, batches across crashes of their process: nothing is lost, nothing differs."""

from __future__ import annotations

import asyncio
import gc
import json
import os
import signal
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from faults import check_same, long_requests, open_stream
from images import png
from running import RunningServer
from served import IMAGE_TOKEN, make_served
from waiting import until

import saccade
import saccade.errors
from service.common.config import ServerOptions
from service.engine.engine_client import SupervisedEngine

ROOT = Path(__file__).resolve().parents[2]
LONG = 3900
"""Tokens of an answer that runs until it is cancelled: some seconds."""
LIMITS: dict[str, Any] = {"max_seqs": 16, "max_len": 600}


@pytest.fixture(scope="module")
def supervised(model: Path) -> Iterator[RunningServer]:
    options = ServerOptions(model=str(model), dtype="float32", threads=1, **LIMITS)
    engine = SupervisedEngine(options)
    with RunningServer(str(model), engine=engine, **LIMITS) as running:
        yield running


def test_async_answers_too(supervised: RunningServer) -> None:
    made = long_requests(5, IMAGE_TOKEN)

    async def main() -> None:
        async with saccade.AsyncClient(supervised.address, max_retries=60) as client:
            wanted = [await open_stream(client, request).final() for request in made]
            streams = [open_stream(client, request) for request in made]
            for stream in streams:
                await anext(stream)
            os.kill(supervised.engine.pid, signal.SIGKILL)  # type: ignore[attr-defined]
            check_same(await asyncio.gather(*(stream.final() for stream in streams)), wanted)

    asyncio.run(main())


def test_a_batch_killed_over_a_real_model(supervised: RunningServer, tmp_path: Path) -> None:
    (tmp_path / "a.png").write_bytes(png(7))
    with open(tmp_path / "in.jsonl", "w") as file:
        for i in range(60):
            parts = [{"type": "image_url", "image_url": {"url": "a.png"}}, {"type": "text", "text": f"{i}?"}]
            content: Any = parts if i % 4 == 0 else f"row {i}"
            body = {"messages": [{"role": "user", "content": content}], "max_tokens": 20, "seed": i, "ignore_eos": True}
            file.write(json.dumps({"custom_id": str(i), "body": body}) + "\n")
    output = tmp_path / "out.jsonl"
    command = [sys.executable, "-m", "saccade", "batch", str(tmp_path / "in.jsonl"), str(output)]
    command += ["--server", supervised.address, "--concurrency", "4", "--quiet"]
    for lines in (5, 25):
        process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL)
        until(lambda count=lines: output.exists() and output.read_bytes().count(b"\n") >= count)  # type: ignore[misc]
        process.kill()
        process.wait()
    assert subprocess.run(command, cwd=ROOT, stdout=subprocess.DEVNULL).returncode == 0
    rows = [json.loads(line) for line in output.read_bytes().splitlines()]
    assert sorted(int(row["custom_id"]) for row in rows) == list(range(60))
    texts = {row["custom_id"]: row["response"]["body"]["choices"][0]["message"]["content"] for row in rows}
    with saccade.Client(supervised.address) as client:
        for i in (1, 4, 30, 59):
            images = [png(7)] if i % 4 == 0 else []
            prompt = f"{i}?" if images else f"row {i}"
            answer = client.generate(prompt, images=images, max_tokens=20, seed=i, ignore_eos=True)
            assert texts[str(i)] == answer.text


def test_a_batch_without_a_server(tmp_path: Path) -> None:
    model = make_served(tmp_path / "text-only", vision=False).path
    with open(tmp_path / "in.jsonl", "w") as file:
        for i in range(8):
            body = {"messages": [{"role": "user", "content": f"row {i}"}], "max_tokens": 4}
            file.write(json.dumps({"custom_id": str(i), "body": body}) + "\n")
    command = [sys.executable, "-m", "saccade", "batch", "in.jsonl", "out.jsonl", "--model", str(model), "--ordered"]
    path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, env={**os.environ, "PYTHONPATH": path})
    assert done.returncode == 0, done.stderr
    summary = json.loads(done.stdout)
    assert (summary["completed"], summary["completion_tokens"]) == (8, 32)
    rows = [json.loads(line) for line in (tmp_path / "out.jsonl").read_bytes().splitlines()]
    assert [row["custom_id"] for row in rows] == [str(i) for i in range(8)]


def test_a_local_client_closed_at_any_moment_leaves_no_task(model: Path) -> None:
    """Pending coroutines would cause warnings when they are collected; warnings are errors here."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for count in (0, 1, 5):
            client = saccade.LocalClient(model, dtype="float32", threads=1, max_seqs=16, max_len=4000)
            streams = [client.stream("x", max_tokens=LONG, ignore_eos=True) for _ in range(3)]
            for _ in range(count):
                next(streams[0])
            running = threading.Thread(target=_expect_cancelled, args=(client,))
            running.start()
            while client._service.stats()["live"] < 4:
                time.sleep(0.001)
            client.close()
            running.join(timeout=60)
            assert not running.is_alive()
            for stream in streams:
                with pytest.raises(saccade.errors.Cancelled):
                    stream.final()
            del streams, stream, client
            gc.collect()


def _expect_cancelled(client: saccade.LocalClient) -> None:
    with pytest.raises(saccade.errors.Cancelled):
        client.generate("x", max_tokens=LONG, ignore_eos=True)
