"""The examples as a user would run them, each in a process of its own, against a scripted server."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from fake_server import Script

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
CASES = {
    "ask.py": (["{picture}", "{picture}", "What is it?"], "a red square\n(stop; 9 tokens read, 3 written)\n"),
    "stream.py": (["{picture}", "What is it?"], "a red square\n[stop, seed 7]\n"),
    "chat.py": (["{picture}"], "a red square\na red square\n"),
    "many.py": (
        ["What is it?", "{picture}", "no/such.png"],
        "{picture}: a red square\nno/such.png: failed: images[0]: cannot read",
    ),
    "batch.py": (["What is it?", "{picture}"], "1 of 1 answered, 3 tokens\na.png: a red square\n"),
    "logprobs.py": (["{picture}", "What is it?"], "token 0: 0.61 (likeliest 0: 1.00, 1: 0.37)\n"),
}


@pytest.mark.parametrize("name", CASES)
def test_example(name: str, address: str, script: Script, tmp_path: Path) -> None:
    picture = tmp_path / "a.png"
    picture.write_bytes(b"png")
    arguments, expected = CASES[name]
    done = subprocess.run(
        [sys.executable, str(EXAMPLES / name), *(argument.format(picture=picture) for argument in arguments)],
        env={**os.environ, "SACCADE_SERVER": address},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(expected.format(picture=picture))
    assert script.requests


def test_the_readmes_client(address: str, script: Script, tmp_path: Path) -> None:
    (block,) = re.findall(r"```python\n(.*?)```", (EXAMPLES.parent / "README.md").read_text("utf-8"), re.DOTALL)
    for name in ("picture.png", "a.png", "b.png"):
        (tmp_path / name).write_bytes(b"png")
    program = block.replace("127.0.0.1:50051", address)
    done = subprocess.run([sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.endswith("IMAGE_UNREADABLE \n")
    assert len(script.requests) == 5


def test_each_example_has_a_case() -> None:
    # local.py loads the embedded model instead of talking to a server.
    assert {path.name for path in EXAMPLES.glob("*.py")} == {*CASES, "local.py"}
