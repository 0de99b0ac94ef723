"""Batches across crashes of their process, and without a server; local clients that end at any moment."""

from __future__ import annotations

import gc
import json
import subprocess
import sys
import threading
import time
import warnings
from pathlib import Path
from typing import Any

import pytest
from images import png
from running import RunningServer
from waiting import until

import saccade
import saccade.errors
from saccade import cli

ROOT = Path(__file__).resolve().parents[2]
LONG = 3900
"""Tokens of an answer that runs until it is cancelled: some seconds."""
LIMITS: dict[str, Any] = {"max_seqs": 16, "max_len": 600}


def test_a_batch_killed_over_a_real_model(model: Path, tmp_path: Path) -> None:
    (tmp_path / "a.png").write_bytes(png(7))
    with open(tmp_path / "in.jsonl", "w") as file:
        for i in range(60):
            parts = [{"type": "image_url", "image_url": {"url": "a.png"}}, {"type": "text", "text": f"{i}?"}]
            content: Any = parts if i % 4 == 0 else f"row {i}"
            body = {"messages": [{"role": "user", "content": content}], "max_tokens": 20, "seed": i, "ignore_eos": True}
            file.write(json.dumps({"custom_id": str(i), "body": body}) + "\n")
    output = tmp_path / "out.jsonl"
    with RunningServer(str(model), **LIMITS) as server:
        command = [sys.executable, "-m", "saccade", "batch", str(tmp_path / "in.jsonl"), str(output)]
        command += ["--server", server.address, "--concurrency", "4", "--quiet"]
        for lines in (5, 25):
            process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL)
            until(lambda count=lines: output.exists() and output.read_bytes().count(b"\n") >= count)  # type: ignore[misc]
            process.kill()
            process.wait()
        assert subprocess.run(command, cwd=ROOT, stdout=subprocess.DEVNULL).returncode == 0
        rows = [json.loads(line) for line in output.read_bytes().splitlines()]
        assert sorted(int(row["custom_id"]) for row in rows) == list(range(60))
        texts = {row["custom_id"]: row["response"]["body"]["choices"][0]["message"]["content"] for row in rows}
        with saccade.Client(server.address) as client:
            for i in (1, 4, 30, 59):
                images = [png(7)] if i % 4 == 0 else []
                prompt = f"{i}?" if images else f"row {i}"
                answer = client.generate(prompt, images=images, max_tokens=20, seed=i, ignore_eos=True)
                assert texts[str(i)] == answer.text


def test_a_batch_without_a_server(
    text_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    with open("in.jsonl", "w") as file:
        for i in range(8):
            body = {"messages": [{"role": "user", "content": f"row {i}"}], "max_tokens": 4}
            file.write(json.dumps({"custom_id": str(i), "body": body}) + "\n")
    done = cli.main(["batch", "in.jsonl", "out.jsonl", "--model", str(text_model), "--ordered"])
    said = capsys.readouterr()
    assert done == 0, said.err
    summary = json.loads(said.out)
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
