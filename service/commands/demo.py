"""`saccade demo`: a server with the embedded model, which is asked questions about images."""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
import time
import webbrowser
from collections.abc import Sequence
from typing import Any

import saccade
from service.commands.server_process import ServerProcess
from service.common.helper_process import ROOT

# --host is given because the container image sets SACCADE_HOST to 0.0.0.0.
ARGUMENTS = ("demo", "--host", "127.0.0.1", "--log-level", "warning")


def main(argv: Sequence[str]) -> int:
    """Starts a server, asks it the questions and checks the answers. Exit code 0 only if all are right. `--open`:
    opens the playground in a browser instead and runs until Ctrl-C."""
    parser = argparse.ArgumentParser(
        "saccade demo", description="Start a server with the embedded model, ask it questions and check its answers."
    )
    parser.add_argument(
        "--open", action="store_true", help="open the server's playground in a browser instead; Ctrl-C stops the server"
    )
    return _page() if parser.parse_args(list(argv)).open else _questions()


def _page() -> int:
    # --admin: the page's status view needs it, and only this machine can reach the server.
    with ServerProcess([*ARGUMENTS, "--admin", "--http-host", "127.0.0.1", "--http-port", "0"]) as server:
        print(f"playground and OpenAI's API: {server.http_url}\ngRPC: {server.address}\nCtrl-C stops both", flush=True)
        if not webbrowser.open(server.http_url):
            print(f"no browser was found; open {server.http_url} in one yourself", file=sys.stderr, flush=True)
        with contextlib.suppress(KeyboardInterrupt):
            return server.wait()
        return server.stop()


def _questions() -> int:
    questions = json.loads((ROOT / "demo" / "questions.json").read_text("utf-8"))
    started = time.perf_counter()
    with ServerProcess(ARGUMENTS) as server:
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
