"""Cache hit rates behind the gateway smg, by routing policy, compared with one server alone.

    python -m benchmarks.gateway [--groups 16] [--servers 2] [--write]

The requests of a group have a common prefix: ten questions about one image, or ten questions after one system prompt.
Each group's questions are sent in order, four groups at a time, through `/v1/chat/completions`. The hit rate is the
share of prompt tokens whose state was cached, as the gateway reports it. With `consistent_hashing`, the header
`x-smg-routing-key` of a request is the name of its group. Needs `pip install smg smg-grpc-proto`. The last line on
stdout is JSON.
"""

from __future__ import annotations

import argparse
import base64
import io
import json
import random
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from PIL import Image

from benchmarks import machine
from benchmarks.machine import free_port
from benchmarks.record import write_result
from benchmarks.replicas import QUESTIONS, flush, image
from service.commands.server_process import ServerProcess

ARGUMENTS = [
    "demo", "--log-level", "error", "--threads", "1", "--max-seqs", "8", "--no-warmup", "--vllm-engine", "--admin",
]  # fmt: skip
GROUPS_AT_ONCE = 4
KEY = "x-smg-routing-key"
POLICIES = ("cache_aware", "consistent_hashing", "round_robin")


@contextmanager
def gateway(addresses: Sequence[str], *options: str) -> Iterator[str]:
    """The URL of a gateway in front of servers, once it is ready."""
    port = free_port()
    command = [
        str(Path(sys.executable).with_name("smg")), "launch", "--host", "127.0.0.1", "--port", str(port),
        "--mm-processing", "worker", "--prometheus-port", str(free_port()), *options,
        "--worker-urls", *(f"grpc://{address}" for address in addresses),
    ]  # fmt: skip
    with tempfile.NamedTemporaryFile() as log:
        running = subprocess.Popen(command, stdout=log, stderr=log)
        try:
            base = f"http://127.0.0.1:{port}"
            while not _ready(base, len(addresses)):
                assert running.poll() is None, Path(log.name).read_text()[-2000:]
                time.sleep(0.1)
            yield f"{base}/v1"
        finally:
            running.terminate()
            running.wait()


def _ready(base: str, servers: int) -> bool:
    """Whether the gateway has registered all servers and loaded their tokenizer."""
    try:
        with urllib.request.urlopen(f"{base}/workers", timeout=5) as response:
            found = len(json.loads(response.read())["workers"])
        with urllib.request.urlopen(f"{base}/readiness", timeout=5) as response:
            return found == servers and response.status == 200
    except (urllib.error.URLError, ConnectionError, TimeoutError):  # an HTTPError is a URLError
        return False


def chat(url: str, messages: list[dict[str, Any]], key: str | None = None, **options: Any) -> dict[str, Any]:
    """The answer of `/v1/chat/completions`."""
    headers = {"content-type": "application/json"} | ({KEY: key} if key is not None else {})
    body = json.dumps({"model": "demo", "messages": messages, "temperature": 0, "max_tokens": 4, **options}).encode()
    with urllib.request.urlopen(urllib.request.Request(f"{url}/chat/completions", body, headers)) as response:
        answer: dict[str, Any] = json.loads(response.read())
        return answer


def image_messages(group: int, question: int) -> list[dict[str, Any]]:
    """A question about the group's image."""
    out = io.BytesIO()
    Image.fromarray(image(group)).save(out, "PNG")
    url = "data:image/png;base64," + base64.b64encode(out.getvalue()).decode()
    text = f"Question {question}: what does it show?"
    parts = [{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": text}]
    return [{"role": "user", "content": parts}]


def text_messages(group: int, question: int) -> list[dict[str, Any]]:
    """A question after the group's system prompt of 60 words."""
    words = random.Random(group).choices(["red", "round", "small", "digit", "shape", "left", "below", "wide"], k=60)
    asked = {"role": "user", "content": f"Question {question}: what was said?"}
    return [{"role": "system", "content": " ".join(words)}, asked]


def hit_rate(url: str, make: Any, groups: int, keyed: bool) -> float:
    """Cached prompt tokens over prompt tokens of all groups."""

    def ask(group: int) -> tuple[int, int]:
        cached = prompt = 0
        for question in range(QUESTIONS):
            usage = chat(url, make(group, question), f"group-{group}" if keyed else None)["usage"]
            cached += (usage.get("prompt_tokens_details") or {}).get("cached_tokens", 0)
            prompt += usage["prompt_tokens"]
        return cached, prompt

    with ThreadPoolExecutor(GROUPS_AT_ONCE) as pool:
        found = list(pool.map(ask, range(groups)))
    return sum(cached for cached, _ in found) / sum(prompt for _, prompt in found)


def measure(groups: int, servers: int) -> dict[str, dict[str, float]]:
    """Hit rates by policy and kind of group. Each run begins with empty caches."""
    found: dict[str, dict[str, float]] = {}
    with ExitStack() as ends:
        addresses = [ends.enter_context(ServerProcess(ARGUMENTS)).address for _ in range(servers)]
        for name in ("one server", *POLICIES):
            alone = name == "one server"
            options = [] if alone else ["--policy", name]
            with gateway(addresses[:1] if alone else addresses, *options) as url:
                for kind, make in (("images", image_messages), ("texts", text_messages)):
                    for address in addresses:
                        flush(address)
                    rate = hit_rate(url, make, groups, keyed=name == "consistent_hashing")
                    found.setdefault(name, {})[kind] = round(rate, 4)
                    print(f"{name:20} {kind:8} {100 * rate:5.1f} % of prompt tokens cached", flush=True)
    return found


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--groups", type=int, default=16)
    parser.add_argument("--servers", type=int, default=2)
    parser.add_argument("--write", action="store_true", help="write the result to benchmarks/results")
    options = parser.parse_args(argv)
    result = {
        "hit_rate": measure(options.groups, options.servers), "groups": options.groups, "servers": options.servers,
        "questions": QUESTIONS, "machine": machine.describe(), "load": machine.load(),
    }  # fmt: skip
    if options.write:
        write_result("gateway", result)
    print(json.dumps(result))
    return 0


if __name__ == "__main__":
    sys.exit(main())
