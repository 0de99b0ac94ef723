"""The `saccade` command against a scripted server."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import grpc
import pytest
from fake_server import Failure, Script

import saccade
from saccade import cli, errors
from saccade._core.retrying import retry_delay


@pytest.fixture
def image(tmp_path: Path) -> str:
    path = tmp_path / "a.png"
    path.write_bytes(b"png")
    return str(path)


def test_ask_takes_videos(address: str, script: Script, image: str, tmp_path: Path) -> None:
    (tmp_path / "a.MP4").write_bytes(b"mp4")
    (tmp_path / "b.gif").write_bytes(b"gif")
    files = ["--video", str(tmp_path / "b.gif"), image, str(tmp_path / "a.MP4")]
    assert cli.main(["ask", "--server", address, *files, "What moves?"]) == 0
    prompt = script.requests[-1].prompt
    assert [video.data for video in prompt.videos] == [b"mp4", b"gif"] and len(prompt.images) == 1


def test_ask_streams_the_answer(address: str, script: Script, image: str, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--server", address, "--max-tokens", "5", "--temperature", "0", "--seed", "1"]
    assert cli.main(["ask", *options, image, image, "What is it?"]) == 0
    assert capsys.readouterr().out == "a red square\n"
    (request,) = script.requests
    assert request.prompt.text == "What is it?" and [image.data for image in request.prompt.images] == [b"png"] * 2
    assert (request.sampling.max_tokens, request.sampling.temperature, request.sampling.seed) == (5, 0, 1)


def test_ask_prints_reasoning_where_it_is_asked_for(
    address: str, script: Script, capsys: pytest.CaptureFixture[str]
) -> None:
    script.reasoning = "so"
    for option, printed in ((["--think"], "so"), ([], ""), (["--no-think"], "")):
        assert cli.main(["ask", "--server", address, *option, "?"]) == 0
        assert tuple(capsys.readouterr()) == ("a red square\n", printed)
    thinking = [(request.chat.HasField("enable_thinking"), request.chat.enable_thinking) for request in script.requests]
    assert thinking == [(True, True), (False, False), (True, False)]
    assert script.requests[1].prompt.text == "?" and script.requests[0].chat.messages[0].parts[0].text == "?"


def test_the_server_can_come_from_the_environment(
    address: str, script: Script, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("SACCADE_SERVER", address)
    assert cli.main(["ask", "no image?"]) == 0
    assert capsys.readouterr().out == "a red square\n"
    assert not script.requests[0].sampling.HasField("temperature")


def test_an_error_is_one_line_and_exit_code_1(address: str, script: Script, capsys: pytest.CaptureFixture[str]) -> None:
    script.failures = [Failure(grpc.StatusCode.INVALID_ARGUMENT, "too long", reason="CONTEXT_LENGTH_EXCEEDED")]
    assert cli.main(["ask", "--server", address, "?"]) == 1
    assert cli.main(["ask", "--server", address, "no/such.png", "?"]) == 1
    assert cli.main(["ask", "--server", address, " "]) == 1
    first, second, third = capsys.readouterr().err.splitlines()
    assert "too long" in first and "CONTEXT_LENGTH_EXCEEDED" in first
    assert "no/such.png" in second and "empty" in third


@pytest.mark.parametrize(
    "arguments",
    [["{image}"], ["{image}", "{image}"], ["cat.png"], ["CAT.JPEG"], ["film.mp4"], ["https://example.org/a"],
     ["data:image/png;base64,AA=="], ["--video", "{image}", "b.webm"]],
    ids=str,
)  # fmt: skip
def test_a_file_is_no_question(
    address: str, script: Script, image: str, arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        cli.main(["ask", "--server", address, *(argument.format(image=image) for argument in arguments)])
    assert caught.value.code == 2 and not script.requests
    assert "question is missing" in capsys.readouterr().err


@pytest.mark.parametrize("question", ["What is in cat.png", "cat", "Why?", "is it 3.5 or a.b"])
def test_a_question_may_name_a_file(address: str, script: Script, question: str) -> None:
    assert cli.main(["ask", "--server", address, question]) == 0
    assert script.requests[0].prompt.text == question


def test_the_versions_of_the_client_and_of_the_server_if_it_is_installed(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    with monkeypatch.context() as alone:
        alone.setattr(sys, "path", [])  # the folders that are searched for installed packages
        with pytest.raises(SystemExit) as caught:
            cli.main(["--version"])
    assert caught.value.code == 0 and capsys.readouterr().out == f"saccade {saccade.__version__}\n"

    (tmp_path / "saccade_server-9.8.7.dist-info").mkdir()
    (tmp_path / "saccade_server-9.8.7.dist-info" / "METADATA").write_text("Name: saccade-server\nVersion: 9.8.7\n")
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    with pytest.raises(SystemExit):
        cli.main(["--version"])
    assert capsys.readouterr().out == f"saccade {saccade.__version__}\nsaccade-server 9.8.7\n"


def test_nobody_there_is_said_within_seconds(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    gone = errors.Unavailable("gone", retryable=True)
    waits = [retry_delay(gone, n, cli.ASK_RETRIES, None, lambda: 1.0) for n in range(1, cli.ASK_RETRIES + 2)]
    assert sum(wait or 0.0 for wait in waits) < 10 and waits[-1] is None
    monkeypatch.setattr(cli, "ASK_RETRIES", 1)
    assert cli.main(["ask", "--server", "127.0.0.1:1", "?"]) == 1
    assert "127.0.0.1" in capsys.readouterr().err


def test_wrong_command_lines(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([]) == 2
    for arguments in (["ask"], ["fly"], ["ask", "--max-tokens", "many", "?"]):
        with pytest.raises(SystemExit) as caught:
            cli.main(arguments)
        assert caught.value.code == 2
    assert "serve" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--cert", "a.pem"], "--cert: has no effect without TLS"),
        (["--cert-key", "a.key"], "--cert-key: has no effect without TLS"),
        (["--server-name", "a.test"], "--server-name: has no effect without TLS"),
        (["--tls", "--cert", "a.pem"], "--cert-key: --cert needs it"),
        (["--ca", "ca.pem", "--cert-key", "a.key"], "--cert: --cert-key needs it"),
        (["--tls", "--server", "a:1,b:1"], "--server-name: several addresses with TLS need it"),
    ],
)
@pytest.mark.parametrize("command", [["ask", "?"], ["batch", "in", "out"]])
def test_options_of_tls_that_do_not_fit_are_named(
    command: list[str], options: list[str], words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    (tmp_path / "in").write_text('{"custom_id": "1", "body": {"messages": [{"role": "user", "content": "?"}]}}\n')
    assert cli.main([*command, *options]) != 0
    assert words in capsys.readouterr().err


def test_it_is_a_program_and_a_module(address: str) -> None:
    arguments = ["ask", "--server", address, "?"]
    program = Path(sys.executable).parent / "saccade"
    for command in ([str(program)], [sys.executable, "-m", "saccade"]):
        done = subprocess.run([*command, *arguments], capture_output=True, text=True)
        assert (done.returncode, done.stdout, done.stderr) == (0, "a red square\n", "")


def test_a_reader_that_has_seen_enough(address: str, script: Script) -> None:
    script.words = ["word "] * 40_000  # more than a pipe holds
    command = f"'{sys.executable}' -m saccade ask --server {address} '?' | head -c 5"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True)
    assert (done.stdout, done.stderr) == ("word ", "")


def test_characters_that_a_terminal_lacks_are_replaced(address: str, script: Script) -> None:
    script.words = ["caf\u00e9 ", "\U0001f600"]
    command = [sys.executable, "-m", "saccade", "ask", "--server", address, "?"]
    done = subprocess.run(command, capture_output=True, env={**os.environ, "PYTHONIOENCODING": "latin-1"})
    assert (done.returncode, done.stdout, done.stderr) == (0, b"caf\xe9 ?\n", b"")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
@pytest.mark.parametrize(("command", "code"), [("ask ?", 1), ("top --count 1", 1), ("batch in.jsonl out.jsonl", 2)])
def test_a_full_disk_for_what_is_printed_is_an_error(address: str, tmp_path: Path, command: str, code: int) -> None:
    (tmp_path / "in.jsonl").write_text('{"custom_id": "a", "body": {"messages": [{"role": "user", "content": "?"}]}}')
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "saccade", *command.split(), "--server", address, *(["--quiet"] * (code == 2))],
            stdout=full, stderr=subprocess.PIPE, text=True, cwd=tmp_path,
        )  # fmt: skip
    assert (done.returncode, done.stderr) == (code, "saccade: cannot write to stdout: No space left on device\n")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
@pytest.mark.parametrize("streams", ["2>&-", "2>/dev/full", ">&-", ">&- 2>&-"])
def test_a_job_whose_progress_nobody_can_see_goes_on(address: str, tmp_path: Path, streams: str) -> None:
    rows = [{"custom_id": str(i), "body": {"messages": [{"role": "user", "content": "?"}]}} for i in range(9)]
    output, command = tmp_path / "out.jsonl", f"'{sys.executable}' -m saccade batch in.jsonl out.jsonl"
    for count in (3, 9):
        (tmp_path / "in.jsonl").write_text("\n".join(map(json.dumps, rows[:count])))
        done = subprocess.run(
            ["sh", "-c", f"{command} --server {address} {streams}"], capture_output=True, text=True, cwd=tmp_path
        )
        assert done.returncode == 0 and len(output.read_text().splitlines()) == count
        assert [json.loads(line)["total"] for line in done.stdout.splitlines()] == [count] * (
            not streams.startswith(">&-")
        )


def test_a_closed_stdout_is_no_error(address: str) -> None:
    for command in ("top --count 1", "ask"):
        line = f"'{sys.executable}' -m saccade {command} --server {address} {'?' * (command == 'ask')} >&-"
        done = subprocess.run(["sh", "-c", line], capture_output=True, text=True)
        assert (done.returncode, done.stderr) == (0, "")


def test_without_a_server_it_says_how_to_start_one(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cli, "ASK_RETRIES", 0)
    assert cli.main(["ask", "What?", "--server", "127.0.0.1:1"]) == 1
    assert "is a server running at 127.0.0.1:1? `saccade serve` starts one" in capsys.readouterr().err
