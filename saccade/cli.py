"""The `saccade` command.

`ask`, `batch` and `top` need only this package (except `batch --model`). The other commands belong to the server and
are passed to `service.commands.cli` unchanged.
"""

from __future__ import annotations

import argparse
import contextlib
import errno
import importlib.metadata
import io
import json
import os
import sys
from collections.abc import Callable, Sequence
from typing import Any

from saccade import __version__
from saccade.connection_options import add_affinity, add_connection, tls_settings
from saccade.errors import InvalidArgument, SaccadeError, Unavailable

VIDEO_SUFFIXES = (".mp4", ".m4v", ".mov", ".webm", ".mkv")
"""Suffixes of files that `ask` sends as videos."""
IMAGE_SUFFIXES = (".png", ".jpg", ".jpeg", ".webp", ".gif", ".bmp", ".tif", ".tiff", ".ppm", ".apng", ".avif", ".heic")

ASK_RETRIES = 4
"""Retries of `ask`, for a person at a terminal: long enough for an engine restart, but not ten minutes for a wrong
address."""

SERVER_COMMANDS = {
    "serve": "serve a model over gRPC",
    "http": "serve OpenAI's HTTP API and a playground, in front of gRPC servers",
    "demo": "start a server on the embedded model and ask it about the shipped images",
    "plan": "print what a configuration will do before it runs",
    "tune": "choose the encoder's token budgets for recorded image sizes",
    "quantize": "write a checkpoint with 8-bit or 4-bit weights",
    "convert": "write the checkpoint of a GGUF file",
    "key": "create an API key for a key file",
    "probe": "ask a server whether it is healthy",
}


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command; returns the exit code: 0 if all is well, 1 for an error, 2 for a wrong command line."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    # Closed ones are None, for which `print` would take the other one.
    sys.stdout, sys.stderr = (stream or open(os.devnull, "w") for stream in (sys.stdout, sys.stderr))
    if arguments and arguments[0] in SERVER_COMMANDS:
        return _server_command(arguments)
    parser = _parser()
    options = parser.parse_args(arguments)
    if options.command is None:
        parser.print_help(sys.stderr)
        return 2
    run: Callable[[argparse.Namespace], int] = options.run
    if isinstance(sys.stdout, io.TextIOWrapper):  # the encoding of a terminal may lack characters of an answer
        sys.stdout.reconfigure(errors="replace")
    try:
        return run(options)
    except SaccadeError as error:
        print(f"saccade: {error}", file=sys.stderr)
        if isinstance(error, Unavailable) and not error.reason and (server := getattr(options, "server", None)):
            hint = "`saccade serve` starts one, --server selects another"
            print(f"is a server running at {server}? {hint}", file=sys.stderr)
        return 1
    except BrokenPipeError:  # the reader of stdout has closed the pipe
        _drop_output()
        return 1
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            raise
        _drop_output()
        print(f"saccade: cannot write to stdout: {error.strerror}", file=sys.stderr)
        return 2 if options.command == "batch" else 1
    except KeyboardInterrupt:
        return 130


def _drop_output() -> None:
    """Avoids a second error when Python flushes stdout at exit."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _server_command(arguments: list[str]) -> int:
    try:
        from service.commands.cli import main as service_main
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != "service":
            raise
        print(f"saccade {arguments[0]} needs the server's package: pip install saccade-server", file=sys.stderr)
        return 1
    return int(service_main(arguments) or 0)


class _Versions(argparse.Action):
    """Prints the client's version and, where it is installed, the server's."""

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> None:
        print(f"saccade {__version__}")
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            print(f"saccade-server {importlib.metadata.version('saccade-server')}")
        parser.exit()


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="saccade", description="Ask and serve vision-language models.")
    parser.add_argument(
        "--version", action=_Versions, nargs=0, help="print the versions of the installed packages and exit"
    )
    commands = parser.add_subparsers(dest="command", metavar="COMMAND")
    _add_ask(commands)
    _add_batch(commands)
    _add_top(commands)
    for name, text in SERVER_COMMANDS.items():
        commands.add_parser(name, help=text, add_help=False)
    return parser


def _add_ask(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    ask = commands.add_parser(
        "ask", help="ask a running server about images and videos", usage="%(prog)s [options] [FILE...] QUESTION"
    )
    ask.add_argument(
        "image_and_question",
        nargs="+",
        metavar="FILE... QUESTION",
        help=f"images and videos ({', '.join(VIDEO_SUFFIXES)}), by path or URL, then the question",
    )
    ask.add_argument(
        "--video", action="append", default=[], metavar="FILE", help="send FILE as a video, whatever its suffix"
    )
    add_connection(ask)
    add_affinity(ask)
    ask.add_argument("--max-tokens", type=int, metavar="N", help="maximum number of tokens of the answer")
    ask.add_argument("--temperature", type=float, metavar="T", help="0 is greedy (default: the model's own)")
    ask.add_argument("--seed", type=int, metavar="N", help="the same seed gives the same answer")
    ask.add_argument("--timeout", type=float, metavar="SECONDS", help="limit for the whole answer (default: 600)")
    ask.add_argument("--json-schema", metavar="FILE", help="the answer is JSON that the JSON schema in FILE accepts")
    ask.add_argument(
        "--tools", metavar="FILE", help="a JSON list of tools; calls are printed as lines of JSON after the answer"
    )
    ask.add_argument("--tool-choice", metavar="CHOICE", help="auto, none, required or the name of a tool")
    ask.add_argument(
        "--think",
        action=argparse.BooleanOptionalAction,
        help="whether the model reasons first, on stderr (default: the model's own; its reasoning is not printed)",
    )
    ask.set_defaults(run=_ask, refuse=ask.error)


def _add_batch(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    batch = commands.add_parser(
        "batch",
        help="answer a JSONL file of requests or, with --ray, a data set",
        description="Answers a file of requests in OpenAI's batch format (a chat completion request in each line) and "
        "writes the answers to another file. After an interruption, the same command continues. Exit code 0: each row "
        "has its answer; 1: some rows are errors; 2: the job failed. The last line on stdout is a summary in JSON.",
    )
    batch.add_argument("input", metavar="IN", help="a JSONL file; images may be named by paths inside its folder")
    batch.add_argument("output", metavar="OUT", help="a JSONL file; answers of an interrupted run in it are kept")
    add_connection(batch)
    add_affinity(batch)
    batch.add_argument("--model", metavar="MODEL", help="load this model here instead of asking a server")
    batch.add_argument("--adapter", metavar="ADAPTER", help="with --model: a LoRA adapter, a folder or hub id")
    batch.add_argument("--concurrency", type=int, metavar="N", help="requests in flight (default: 32)")
    batch.add_argument("--ordered", action="store_true", help="write the answers in the order of the requests")
    batch.add_argument("--max-errors", type=int, metavar="N", help="stop after more than N error rows")
    batch.add_argument("--max-retries", type=int, default=8, metavar="N", help="retries of a row (default: 8)")
    batch.add_argument("--timeout", type=float, metavar="SECONDS", help="limit for each row (default: 600)")
    batch.add_argument("--any-model", action="store_true", help="also answer rows that name another model")
    batch.add_argument("--strict", action="store_true", help="reject the file if an image that it names cannot be read")
    batch.add_argument("--overwrite", action="store_true", help="start from the first row, whatever OUT contains")
    batch.add_argument(
        "--server-side",
        action="store_true",
        help="upload the file and let the server process it in the background; the same command finds it again",
    )
    batch.add_argument("--quiet", action="store_true", help="show no progress")
    from saccade.ray_command import add_options

    add_options(batch)
    batch.set_defaults(run=_batch, refuse=batch.error)


def _batch(options: argparse.Namespace) -> int:
    from saccade import ray_command

    try:
        ray_command.check_options(options)
    except InvalidArgument as error:
        options.refuse(error.message)
    if options.ray is not None:
        return ray_command.run(options)
    from saccade.batch_command import run

    return run(options)


def _add_top(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    top = commands.add_parser(
        "top",
        help="show the state of a running server",
        description="A live view of a running server: requests, state, image embeddings, messages. One line per "
        "update if stdout is not a terminal. The server has to allow it: `saccade serve --admin`, or a key with the "
        "scope admin in SACCADE_API_KEY.",
    )
    add_connection(top)
    top.add_argument("--interval", type=float, default=1.0, metavar="SECONDS", help="time between updates (default: 1)")
    top.add_argument("--count", type=int, metavar="N", help="stop after N updates")
    top.set_defaults(run=_top)


def _top(options: argparse.Namespace) -> int:
    from saccade.top import run

    return run(options)


def _ask(options: argparse.Namespace) -> int:
    from saccade._sync.client import Client

    *files, question = options.image_and_question
    videos = [file for file in files if file.lower().endswith(VIDEO_SUFFIXES)]
    images = [file for file in files if file not in videos]
    if not question.strip():
        raise InvalidArgument("the question is empty")
    if _names_a_file(question):
        options.refuse(f"the question is missing: {question!r}, the last argument, is a file")
    with (
        Client(options.server, tls=tls_settings(options), max_retries=ASK_RETRIES, affinity=options.affinity) as client,
        client.stream(
            question,
            images=images,
            videos=[*videos, *options.video],
            max_tokens=options.max_tokens,
            temperature=options.temperature,
            seed=options.seed,
            timeout=options.timeout,
            response_format=_schema(options.json_schema) if options.json_schema else None,
            enable_thinking=options.think,
            tools=_tools(options.tools) if options.tools else (),
            tool_choice=options.tool_choice,
        ) as stream,
    ):
        for delta in stream:
            if options.think and delta.reasoning:
                print(delta.reasoning, end="", flush=True, file=sys.stderr)
            print(delta.text, end="", flush=True)
        print()
        for call in stream.final().tool_calls:
            print(json.dumps({"id": call.id, "name": call.name, "arguments": call.arguments}, ensure_ascii=False))
        if stream.final().finish_reason == "length":
            print("saccade: the answer was cut off at its token limit", file=sys.stderr)
    return 0


def _json_file(option: str, path: str) -> Any:
    from saccade._core.images import file_content
    from saccade._core.ranges import file_reason

    try:
        text = file_content(path)
    except (OSError, ValueError) as error:
        raise InvalidArgument(f"{option}: cannot read {path!r}: {file_reason(error)}") from error
    try:
        return json.loads(text.decode("utf-8"))
    except (ValueError, RecursionError) as error:
        raise InvalidArgument(f"{option}: {path!r} is not JSON: {error}") from error


def _tools(path: str) -> list[Any]:
    tools = _json_file("--tools", path)
    if not isinstance(tools, list):
        raise InvalidArgument(f"--tools: expected a JSON list in {path!r}, got a {type(tools).__name__}")
    return tools


def _schema(path: str) -> dict[str, Any]:
    schema = _json_file("--json-schema", path)
    if not isinstance(schema, dict):
        raise InvalidArgument(f"--json-schema: expected a JSON object in {path!r}, got a {type(schema).__name__}")
    return {"type": "json_schema", "json_schema": {"schema": schema}}


def _names_a_file(text: str) -> bool:
    """Whether an argument is meant as a file: it has a file's suffix, or the file exists."""
    one_word = not any(character.isspace() for character in text)
    named = text.lower().endswith((*IMAGE_SUFFIXES, *VIDEO_SUFFIXES)) or "://" in text or text.startswith("data:")
    return (one_word and named) or os.path.isfile(text)
