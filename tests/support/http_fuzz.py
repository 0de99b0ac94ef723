"""Random bad HTTP requests, from a seed: broken heads, bodies, JSON, types and values, over a raw socket."""

from __future__ import annotations

import json
import random
import socket
from typing import Any

PATHS = (
    "/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages", "/v1/messages/count_tokens",
    "/v1/responses/input_tokens", "/v1/embeddings", "/tokenize", "/detokenize", "/v1/batches", "/v1/files",
)  # fmt: skip
FIELDS = (
    "messages", "prompt", "input", "model", "max_tokens", "temperature", "top_p", "n", "stop", "stream", "tools",
    "tool_choice", "response_format", "logprobs", "top_logprobs", "logit_bias", "seed", "echo", "system", "tokens",
    "stream_options", "chat_template_kwargs", "stop_token_ids", "reasoning", "text", "thinking", "input_file_id",
    "endpoint", "reasoning_effort", "max_completion_tokens", "encoding_format", "best_of", "metadata",
)  # fmt: skip
VALUES: tuple[Any, ...] = (
    None, True, False, 0, -1, 1, 2**31, 2**32, 2**63, 2**64, -(2**70), 0.5, -0.5, 1e308, "", "x", "\0", "é" * 50,
    "data:image/png;base64,AAAA", "data:,", "http://169.254.169.254/latest", "media:0", "../../etc/passwd", "file:///x",
    [], {}, [[]], [0], ["x"], [{}], {"type": "text"}, {"type": "json_schema", "json_schema": {"schema": {"type": 3}}},
    {"type": "regex", "regex": "("}, {"type": "lark", "lark": "start:"}, [{"type": "function", "function": {}}],
    {"1": 2}, {"x": "y"}, [{"role": "user"}], [{"role": "user", "content": 3}], [{"role": "tool", "content": "x"}],
    [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:image/png;base64,aGk="}}]}],
    [{"role": "user", "content": [{"type": "video_url", "video_url": "data:video/mp4;base64,aGk="}]}],
    [{"role": "assistant", "tool_calls": [{"id": "a", "function": {"name": "f", "arguments": "{"}}]}],
)  # fmt: skip


def bad_request(rng: random.Random) -> bytes:
    """One request that no server should answer with 200, or with 5xx."""
    kind = rng.random()
    if kind < 0.06:
        return rng.randbytes(rng.randint(1, 200)) + b"\r\n\r\n"
    path = rng.choice(PATHS)
    if kind < 0.12:
        head = f"{rng.choice(['GET', 'PUT', 'BREW', 'POST', 'DELETE'])} {path}/{rng.randbytes(4).hex()} HTTP/1.1\r\n"
        return head.encode() + b"host: localhost\r\nconnection: close\r\n\r\n"
    body = _body(rng)
    headers = {
        "host": "localhost",
        "connection": "close",
        "content-type": "application/json",
        "content-length": len(body),
    }
    if rng.random() < 0.1:
        name = rng.choice(["content-type", "content-length", "authorization", "x-request-timeout", "x-priority",
                           "content-encoding", "transfer-encoding", "x-request-id"])  # fmt: skip
        headers[name] = rng.choice(
            ["", "-1", "gzip", "text/plain", "\x7f", "multipart/form-data", "99999999999", "nan"]
        )
    lines = [f"POST {path} HTTP/1.1", *(f"{name}: {value}" for name, value in headers.items()), "", ""]
    return "\r\n".join(lines).encode("latin-1") + body


def _body(rng: random.Random) -> bytes:
    kind = rng.random()
    if kind < 0.1:
        return rng.randbytes(rng.randint(0, 100))
    if kind < 0.15:
        return b"[" * rng.choice([10, 100_000])
    # An unknown field makes each of these bodies invalid.
    document: dict[str, Any] = {rng.choice(FIELDS): rng.choice(VALUES) for _ in range(rng.randint(0, 6))}
    document["no_such_field"] = rng.choice(VALUES)
    if rng.random() < 0.3:  # only values are invalid
        del document["no_such_field"]
        document |= {"messages": rng.choice(VALUES), "prompt": rng.choice(VALUES), "input": rng.choice(VALUES)}
        document["max_tokens"] = rng.choice([-1, 0, "x", 2**40, 1.5])
    text = json.dumps(document).encode()
    return text[: rng.randint(0, len(text))] if rng.random() < 0.1 else text


def send(port: int, request: bytes, timeout: float = 30.0) -> int:
    """The status of the answer; 0 if the server closed the connection without one."""
    with socket.create_connection(("127.0.0.1", port), timeout=timeout) as connection:
        try:
            connection.sendall(request)
            connection.shutdown(socket.SHUT_WR)
            answer = connection.recv(64)
            while connection.recv(65536):
                pass
        except (ConnectionResetError, BrokenPipeError):
            return 0
    return int(answer.split(b" ", 2)[1]) if answer.startswith(b"HTTP/1.1 ") else 0
