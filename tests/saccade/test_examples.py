"""The examples as a user runs them, each in a process of its own, against a scripted server."""

from __future__ import annotations

import json
import os
import re
import runpy
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from fake_server import Script
from PIL import Image

import saccade
from saccade import cli
from service.commands.server_process import ServerProcess

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
CASES = {
    "ask.py": (["{image}", "{image}", "What is it?"], "a red square\n(stop; 9 prompt tokens, 3 generated)\n"),
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


@pytest.mark.parametrize("name", ["batch.py", "logprobs.py", "many.py", "server_batch.py"])
def test_an_example_with_too_few_arguments_says_how_it_is_called(name: str) -> None:
    """It prints what to pass and sends no request."""
    command = [sys.executable, str(EXAMPLES / name), "What is it?"]
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "SACCADE_SERVER": "127.0.0.1:1"})
    assert done.returncode == 1 and done.stdout == ""
    assert f"python examples/{name}" in done.stderr and "Traceback" not in done.stderr


def test_the_readmes_client(address: str, script: Script, tmp_path: Path) -> None:
    (block,) = re.findall(r"```python\n(.*?)```", (EXAMPLES.parent / "README.md").read_text("utf-8"), re.DOTALL)
    for name in ("image.png", "a.png", "b.png"):
        (tmp_path / name).write_bytes(b"png")
    program = block.replace("127.0.0.1:50051", address)
    done = subprocess.run([sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "IMAGE_UNREADABLE images[0]: cannot read 'missing.png'" in done.stdout
    assert len(script.requests) == 2


DEMO = EXAMPLES.parent / "demo" / "pictures"
REAL = {
    "local.py": ([DEMO / "shapes.png", "What does the picture show?"], "a purple triangle at the top, a blue circle"),
    "embed.py": ([DEMO / "shapes.png", DEMO / "number.png"], f"{DEMO / 'shapes.png'}: 1.000\n"),
    "structured.py": ([], "top: purple triangle\nright: blue circle\nbottom right: blue cross\npurple\n"),
    "tools.py": ([], 'record_shape: {"color": "purple", "shape": "triangle", "place": "top"}\nDone.\n'),
    "server_batch.py": (["What does the picture show?", DEMO / "shapes.png"], "shapes.png: a purple triangle"),
}
"""Examples that need the embedded model, because a script cannot answer them."""


@pytest.fixture(scope="module")
def demo() -> Iterator[str]:
    small = ["--threads", "1", "--image-workers", "1", "--graphs", "off"]
    with ServerProcess(["demo", "--log-level", "error", *small]) as server:
        yield server.address


def output(name: str, arguments: Sequence[object], demo: str, capsys: pytest.CaptureFixture[str]) -> str:
    """Of an example in a process of its own; in this one, which has imported torch, if it loads a model itself."""
    command = [str(EXAMPLES / name), *map(str, arguments)]
    if name == "local.py":
        with pytest.MonkeyPatch.context() as program:
            program.setattr(sys, "argv", command)
            runpy.run_path(command[0], run_name="__main__")
        return capsys.readouterr().out
    done = subprocess.run(
        [sys.executable, *command], capture_output=True, text=True,
        env={**os.environ, "SACCADE_SERVER": demo, "PYTHONPATH": str(EXAMPLES.parent)},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("name", sorted(path.name for path in EXAMPLES.glob("*.py")))
def test_an_example_without_arguments_asks_about_shipped_images(
    name: str, demo: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """In any folder; its first line says what can be passed."""
    monkeypatch.chdir(tmp_path)
    said = output(name, [], demo, capsys)
    assert said.strip() and "failed" not in said
    arguments, expected = REAL.get(name, (None, ""))
    assert arguments != [] or said.startswith(expected)
    assert f"python examples/{name} [" in (EXAMPLES / name).read_text("utf-8").partition("\n")[0]


@pytest.mark.parametrize("name", [name for name, (arguments, _) in REAL.items() if arguments])
def test_example_with_the_embedded_model(name: str, demo: str, capsys: pytest.CaptureFixture[str]) -> None:
    arguments, expected = REAL[name]
    assert output(name, arguments, demo, capsys).startswith(expected)


def test_the_example_with_a_video(demo: str, tmp_path: Path) -> None:
    """A video file, and frames generated by the example, with the embedded model; it was not trained on video but
    accepts it."""
    frames = [Image.new("RGB", (32, 24), (0, 0, 40 * i)) for i in range(5)]
    frames[0].save(tmp_path / "clip.gif", save_all=True, append_images=frames[1:], duration=200)
    environment = {**os.environ, "SACCADE_SERVER": demo, "PYTHONPATH": str(EXAMPLES.parent)}
    for clip, count in (([str(tmp_path / "clip.gif")], 5), ([], 6)):
        command = [sys.executable, str(EXAMPLES / "video.py"), *clip, "What does the picture show?"]
        done = subprocess.run(command, capture_output=True, text=True, env=environment)
        assert done.returncode == 0, done.stderr
        assert re.fullmatch(rf"\({count} frames, \d+ tokens\)", done.stdout.splitlines()[-1])


def test_the_command_hands_a_batch_over(
    demo: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    body = {"messages": [{"role": "user", "content": "What is it?"}], "max_tokens": 3}
    rows = [json.dumps({"custom_id": str(i), "body": body}) for i in range(5)]
    (tmp_path / "in.jsonl").write_text("\n".join(rows))
    command = ["batch", "in.jsonl", "out.jsonl", "--server-side", "--server", demo]

    def run(*more: str) -> tuple[int, str, str]:
        """The status, standard output and standard error."""
        status = cli.main([*command, *more])
        return (status, *capsys.readouterr())

    first = run()
    assert first[0] == 0, first
    written = (tmp_path / "out.jsonl").read_bytes()
    assert len(written.splitlines()) == 5
    again = run()
    assert again[0] == 0, again
    assert (tmp_path / "out.jsonl").read_bytes() == written and again[1] == first[1]
    (tmp_path / "out.jsonl").write_bytes(written[:-20])  # a download that was cut off
    assert run()[0] == 0 and (tmp_path / "out.jsonl").read_bytes() == written
    other = run("--ordered")
    assert other[0] == 2 and "--overwrite" in other[2], "another batch, and the output is there"
    with saccade.Client(demo) as client:
        assert len(client.batches.list()) == 1, "nothing was handed over for it"
    (tmp_path / "out.jsonl.batch").unlink()
    other = run()
    assert other[0] == 2 and "--overwrite" in other[2] and "resume=" not in other[2]
    again = run("--overwrite")
    assert json.loads(again[1])["batch_id"] == json.loads(first[1])["batch_id"]
    assert (tmp_path / "out.jsonl").read_bytes() == written
    with saccade.Client(demo) as client:
        client.batches.delete(json.loads(first[1])["batch_id"])
    (tmp_path / "out.jsonl").write_bytes(b"what an earlier batch of the same name has left")
    once_more = run()
    assert once_more[0] == 0 and len((tmp_path / "out.jsonl").read_bytes().splitlines()) == 5
    (tmp_path / "in.jsonl").write_text(rows[0] + "\nnothing")
    wrong = run()
    assert wrong[0] == 2 and "in.jsonl: line 2: not JSON" in wrong[2]


def test_each_example_has_a_case() -> None:
    assert {path.name for path in EXAMPLES.glob("*.py")} == {*CASES, *REAL, "video.py"}
