"""The examples as a user would run them, each in a process of its own, against a scripted server."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from fake_server import Script
from PIL import Image

import saccade
from service.commands.cli import ServerProcess

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
CASES = {
    "ask.py": (["{image}", "{image}", "What is it?"], "a red square\n(stop; 9 tokens read, 3 written)\n"),
    "stream.py": (["{image}", "What is it?"], "a red square\n[stop, seed 7]\n"),
    "chat.py": (["{image}"], "a red square\na red square\n"),
    "many.py": (
        ["What is it?", "{image}", "no/such.png"],
        "{image}: a red square\nno/such.png: failed: images[0]: cannot read",
    ),
    "batch.py": (["What is it?", "{image}"], "1 of 1 answered, 3 tokens\na.png: a red square\n"),
    "logprobs.py": (["{image}", "What is it?"], "token 0: 0.61 (likeliest 0: 1.00, 1: 0.37)\n"),
}


@pytest.mark.parametrize("name", CASES)
def test_example(name: str, address: str, script: Script, tmp_path: Path) -> None:
    image = tmp_path / "a.png"
    image.write_bytes(b"png")
    arguments, expected = CASES[name]
    done = subprocess.run(
        [sys.executable, str(EXAMPLES / name), *(argument.format(image=image) for argument in arguments)],
        env={**os.environ, "SACCADE_SERVER": address},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(expected.format(image=image))
    assert script.requests


@pytest.mark.parametrize("name", sorted(path.name for path in EXAMPLES.glob("*.py")))
def test_an_example_without_arguments_says_how_it_is_called(name: str) -> None:
    """In any number that is too small, it is one paragraph, and nobody is asked."""
    environment = {**os.environ, "SACCADE_SERVER": "127.0.0.1:1"}
    fewest = {"batch.py": 2, "logprobs.py": 2, "many.py": 2, "server_batch.py": 2}.get(name, 1)
    for count in range(fewest):
        command = [sys.executable, str(EXAMPLES / name), *["What is it?"] * count]
        done = subprocess.run(command, capture_output=True, text=True, env=environment)
        assert done.returncode == 1 and done.stdout == ""
        assert f"python examples/{name}" in done.stderr and "Traceback" not in done.stderr


def test_the_readmes_client(address: str, script: Script, tmp_path: Path) -> None:
    (block,) = re.findall(r"```python\n(.*?)```", (EXAMPLES.parent / "README.md").read_text("utf-8"), re.DOTALL)
    for name in ("image.png", "a.png", "b.png"):
        (tmp_path / name).write_bytes(b"png")
    program = block.replace("127.0.0.1:50051", address)
    done = subprocess.run([sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.endswith("IMAGE_UNREADABLE \n")
    assert len(script.requests) == 4


DEMO = EXAMPLES.parent / "demo" / "pictures"
REAL = {
    "local.py": ([DEMO / "shapes.png", "What does the picture show?"], "a purple triangle at the top, a blue circle"),
    "embed.py": ([DEMO / "shapes.png", DEMO / "number.png"], f"{DEMO / 'shapes.png'}: 1.000\n"),
    "server_batch.py": (["What does the picture show?", DEMO / "shapes.png"], "shapes.png: a purple triangle"),
}
"""What these ask is more than a script can answer: the embedded model is asked."""


@pytest.fixture(scope="module")
def demo() -> Iterator[str]:
    with ServerProcess(["demo", "--log-level", "error", "--threads", "1"]) as server:
        yield server.address


@pytest.mark.parametrize("name", REAL)
def test_example_with_the_embedded_model(name: str, demo: str) -> None:
    arguments, expected = REAL[name]
    done = subprocess.run(
        [sys.executable, str(EXAMPLES / name), *map(str, arguments)], capture_output=True, text=True,
        env={**os.environ, "SACCADE_SERVER": demo, "PYTHONPATH": str(EXAMPLES.parent)},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(expected)


def test_the_example_with_a_video(demo: str, tmp_path: Path) -> None:
    """A file, and the frames that it draws itself: the embedded model has seen no film, but it takes them."""
    frames = [Image.new("RGB", (32, 24), (0, 0, 40 * i)) for i in range(5)]
    frames[0].save(tmp_path / "clip.gif", save_all=True, append_images=frames[1:], duration=200)
    environment = {**os.environ, "SACCADE_SERVER": demo, "PYTHONPATH": str(EXAMPLES.parent)}
    for clip, count in (([str(tmp_path / "clip.gif")], 5), ([], 6)):
        command = [sys.executable, str(EXAMPLES / "video.py"), *clip, "What does the picture show?"]
        done = subprocess.run(command, capture_output=True, text=True, env=environment)
        assert done.returncode == 0, done.stderr
        assert re.fullmatch(rf"\({count} frames, \d+ tokens\)", done.stdout.splitlines()[-1])


def test_the_command_hands_a_batch_over(demo: str, tmp_path: Path) -> None:
    body = {"messages": [{"role": "user", "content": "What is it?"}], "max_tokens": 3}
    rows = [json.dumps({"custom_id": str(i), "body": body}) for i in range(5)]
    (tmp_path / "in.jsonl").write_text("\n".join(rows))
    command = [sys.executable, "-m", "saccade", "batch", "in.jsonl", "out.jsonl", "--server-side", "--server", demo]

    def run(*more: str) -> subprocess.CompletedProcess[str]:
        environment = {**os.environ, "PYTHONPATH": str(EXAMPLES.parent)}
        return subprocess.run([*command, *more], cwd=tmp_path, capture_output=True, text=True, env=environment)

    first = run()
    assert first.returncode == 0, first.stderr
    written = (tmp_path / "out.jsonl").read_bytes()
    assert len(written.splitlines()) == 5
    again = run()
    assert again.returncode == 0, again.stderr
    assert (tmp_path / "out.jsonl").read_bytes() == written and again.stdout == first.stdout
    (tmp_path / "out.jsonl").write_bytes(written[:-20])  # a download that was cut off
    assert run().returncode == 0 and (tmp_path / "out.jsonl").read_bytes() == written
    other = run("--ordered")
    assert other.returncode == 2 and "--overwrite" in other.stderr, "another batch, and the output is there"
    with saccade.Client(demo) as client:
        assert len(client.batches.list()) == 1, "nothing was handed over for it"
    (tmp_path / "out.jsonl.batch").unlink()
    other = run()
    assert other.returncode == 2 and "--overwrite" in other.stderr and "resume=" not in other.stderr
    again = run("--overwrite")
    assert json.loads(again.stdout)["batch_id"] == json.loads(first.stdout)["batch_id"]
    assert (tmp_path / "out.jsonl").read_bytes() == written
    with saccade.Client(demo) as client:
        client.batches.delete(json.loads(first.stdout)["batch_id"])
    (tmp_path / "out.jsonl").write_bytes(b"what an earlier batch of the same name has left")
    once_more = run()
    assert once_more.returncode == 0 and len((tmp_path / "out.jsonl").read_bytes().splitlines()) == 5
    (tmp_path / "in.jsonl").write_text(rows[0] + "\nnothing")
    wrong = run()
    assert wrong.returncode == 2 and "in.jsonl: line 2: not JSON" in wrong.stderr


def test_each_example_has_a_case() -> None:
    assert {path.name for path in EXAMPLES.glob("*.py")} == {*CASES, *REAL, "video.py"}
