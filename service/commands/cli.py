"""The server's commands; the `saccade` command passes them to `main`."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import subprocess
import sys
import time
import webbrowser
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from service.common.config import ConfigError, HttpFrontOptions, ServerOptions
from service.common.errors import EngineDied
from service.common.helper_process import SPINNING
from service.common.settings import from_command_line

if TYPE_CHECKING:
    import saccade

ROOT = Path(__file__).resolve().parent.parent.parent
EXIT_SECONDS = 120.0
"""Seconds that a server that could not start has to end."""


def main(argv: Sequence[str]) -> int:
    """Runs one command. Returns the exit code: 0, 1 for a failure, 2 for invalid options."""
    commands = {
        "serve": serve, "http": http, "demo": demo, "plan": plan, "tune": tune, "quantize": quantize, "key": key,
        "probe": probe,
    }  # fmt: skip
    if not argv or argv[0] not in commands:
        print(f"usage: saccade {{{','.join(commands)}}} ...", file=sys.stderr)
        return 2
    try:
        return commands[argv[0]](argv[1:])
    except ValueError as error:  # ConfigError and CheckpointError: the user can correct them, so no traceback
        print(f"saccade {argv[0]}: {error}", file=sys.stderr)
        return 2
    except EngineDied as error:  # during startup; the engine process has logged the reason
        print(f"saccade {argv[0]}: {error}", file=sys.stderr)
        return 1


def serve(argv: Sequence[str]) -> int:
    """`saccade serve [MODEL] [options]`"""
    parser = argparse.ArgumentParser("saccade serve", description="Serve a model over gRPC.")
    options = from_command_line(ServerOptions, parser, argv)
    if options.role == "encoder":  # there is no helper process: this one encodes; see service/common/helper_process.py
        os.environ.update({**SPINNING, **os.environ})
    from service.servers.run import run

    return run(options)


def http(argv: Sequence[str]) -> int:
    """`saccade http [options]`: the HTTP server in front of gRPC servers."""
    parser = argparse.ArgumentParser("saccade http", description="Serve an OpenAI-compatible HTTP API.")
    options = from_command_line(HttpFrontOptions, parser, argv)
    return needs_http()(options)


def needs_http() -> Callable[[HttpFrontOptions], int]:
    """The function that runs an HTTP server. Raises ConfigError if its packages are not installed."""
    try:
        from service.http.run import run
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] not in ("starlette", "uvicorn", "httptools", "pydantic"):
            raise
        raise ConfigError(f"{error.name} is not installed: pip install 'saccade-server[http]'") from None
    return run


def plan(argv: Sequence[str]) -> int:
    """`saccade plan [MODEL] [options]`: what `serve` would do with these options, without running it. `--replicas`:
    how many servers a load needs."""
    if "--replicas" in argv:
        from service.commands.replicas import main as replicas

        return replicas([argument for argument in argv if argument != "--replicas"])
    parser = argparse.ArgumentParser(
        "saccade plan", description="Show what `saccade serve` would do with the same options, without loading weights."
    )
    options = from_command_line(ServerOptions, parser, argv)
    from service.commands.plan import plan as tables

    print("\n\n".join(str(table) for table in tables(options)))
    return 0


def tune(argv: Sequence[str]) -> int:
    """`saccade tune HISTOGRAM.json`: encoder budgets for the images that a server has seen."""
    from service.commands.tune import main as run

    return run(argv)


def quantize(argv: Sequence[str]) -> int:
    """`saccade quantize MODEL OUT --weights int8|int4|int4-32|fp8|nvfp4`: writes a smaller copy of a checkpoint."""
    from service.commands.quantize import main as run

    return run(argv)


def key(argv: Sequence[str]) -> int:
    """`saccade key NAME`: a new API key and its entry for the key file."""
    from service.commands.key import main as run

    return run(argv)


def probe(argv: Sequence[str]) -> int:
    """`saccade probe HOST:PORT`: exit code 0 if a server is healthy."""
    from service.commands.probe import main as run

    return run(argv)


def demo(argv: Sequence[str]) -> int:
    """`saccade demo`: starts a server, asks it questions about images and checks the answers. Exit code 0 only if all
    are right. `--open`: opens the playground in a browser instead and runs until Ctrl-C."""
    parser = argparse.ArgumentParser(
        "saccade demo", description="Start a server with the embedded model, ask it questions and check its answers."
    )
    parser.add_argument(
        "--open", action="store_true", help="open the server's playground in a browser instead; Ctrl-C stops the server"
    )
    return _demo_page() if parser.parse_args(list(argv)).open else _demo_questions()


# --host is given because the container image sets SACCADE_HOST to 0.0.0.0.
_DEMO = ("demo", "--host", "127.0.0.1", "--log-level", "warning")


def _demo_page() -> int:
    # --admin: the page's status view needs it, and only this machine can reach the server.
    with ServerProcess([*_DEMO, "--admin", "--http-host", "127.0.0.1", "--http-port", "0"]) as server:
        print(f"playground and OpenAI's API: {server.http_url}\ngRPC: {server.address}\nCtrl-C stops both", flush=True)
        if not webbrowser.open(server.http_url):
            print(f"no browser was found; open {server.http_url} in one yourself", file=sys.stderr, flush=True)
        with contextlib.suppress(KeyboardInterrupt):
            return server.wait()
        return server.stop()


def _demo_questions() -> int:
    import saccade

    questions = json.loads((ROOT / "demo" / "questions.json").read_text("utf-8"))
    started = time.perf_counter()
    with ServerProcess(_DEMO) as server:
        print(f"server ready on {server.address} after {time.perf_counter() - started:.1f} s\n", flush=True)
        right = tokens = 0
        with saccade.Client(server.address) as client:
            began = time.perf_counter()
            for entry in questions:
                answer = _ask(client, entry)
                correct = answer.text.strip() == entry["answer"]
                print("" if correct else f"   <- wrong, expected {entry['answer']!r}", flush=True)
                right += correct
                tokens += answer.usage.completion_tokens
            seconds = time.perf_counter() - began
    print(f"\n{right} of {len(questions)} answers right, {tokens / seconds:.0f} tokens/s (images included)")
    return 0 if right == len(questions) else 1


def _ask(client: saccade.Client, entry: dict[str, Any]) -> saccade.Generation:
    """Asks one of the demo's questions, and prints it and the answer as it arrives."""
    print(f"{', '.join(entry['images'])}\n  Q: {entry['question']}\n  A: ", end="", flush=True)
    images, form = [ROOT / "demo" / "pictures" / name for name in entry["images"]], entry.get("response_format")
    with client.stream(entry["question"], images=images, temperature=0, response_format=form) as stream:
        for delta in stream:
            print(delta.text, end="", flush=True)
        return stream.final()


class ServerProcess:
    """A `saccade serve` of this checkout, on a free port unless one is given, for the demo, benchmarks and tests."""

    def __init__(self, arguments: Sequence[str] = (), *, port: int = 0) -> None:
        """Returns when the server is ready. Raises ConfigError if it ends before."""
        path = os.pathsep.join(p for p in (str(ROOT), os.environ.get("PYTHONPATH", "")) if p)
        self._process = subprocess.Popen(
            [sys.executable, "-m", "service", "serve", *arguments, "--port", str(port)],
            stdout=subprocess.PIPE, text=True, env={**os.environ, "PYTHONPATH": path},
        )  # fmt: skip
        self.address = self._line_after("saccade ready on ", "the server")
        self.http_url = ""
        if "--http-port" in arguments:
            self.http_url = self._line_after("saccade http ready on ", "the HTTP server")

    def _line_after(self, words: str, what: str) -> str:
        """Reads the line that begins with `words`, which says that `what` is ready; returns the rest of it. Raises
        ConfigError if there is none."""
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line.startswith(words):
            code = self._process.wait(EXIT_SECONDS)
            raise ConfigError(f"{what} did not start (exit code {code}); its log says why")
        return line.removeprefix(words).strip()

    @property
    def pid(self) -> int:
        return self._process.pid

    def wait(self) -> int:
        """Waits until the server ends, by itself or by Ctrl-C, which the terminal sends to it too. Returns the exit
        code."""
        return self._process.wait()

    def stop(self) -> int:
        """SIGTERM, then wait. Returns the exit code. Idempotent."""
        if self._process.poll() is None:
            self._process.terminate()
        code = self._process.wait()
        if self._process.stdout is not None:
            self._process.stdout.close()
        return code

    def __enter__(self) -> ServerProcess:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()
