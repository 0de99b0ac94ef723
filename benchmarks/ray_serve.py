"""Cost of Ray Serve's gRPC and HTTP ingress compared with Saccade's own servers, and what the gRPC ingress lacks.

    python -m benchmarks.ray_serve [--requests 60] [--tokens 100] [--write]

One caller sends requests to the embedded model through each of the four in turn: whole answers of one token, and
streams. Then the ingress gets a call of the standard health service, a call with TLS, one with a deadline, and one with
an image of 6 MB. Needs `pip install 'ray[serve-grpc]' 'saccade-server[http]'`. The last line on stdout is JSON.
"""

from __future__ import annotations

import argparse
import http.client
import json
import random
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import grpc
import ray
from grpc_health.v1 import health_pb2, health_pb2_grpc
from ray import serve

import saccade
from benchmarks import machine
from benchmarks.machine import free_port
from benchmarks.noise import noise_png
from benchmarks.record import write_result
from saccade.ray.serve import SERVICERS, app
from service.commands.server_process import ServerProcess

PORT = 9234


def one_token(client: saccade.Client) -> float:
    """Seconds of a whole answer of one token."""
    began = time.perf_counter()
    client.generate("What?", max_tokens=1, temperature=0, ignore_eos=True)
    return time.perf_counter() - began


def per_token(client: saccade.Client, tokens: int) -> float:
    """Seconds between tokens of a stream."""
    with client.stream("What?", max_tokens=tokens, temperature=0, ignore_eos=True) as stream:
        next(stream)
        began = time.perf_counter()
        got = sum(len(delta.token_ids) for delta in stream)
    return (time.perf_counter() - began) / max(1, got)


class Http:
    """One connection to an HTTP server with OpenAI's API."""

    def __init__(self, port: int) -> None:
        self._connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)

    def ask(self, tokens: int, stream: bool) -> http.client.HTTPResponse:
        messages = [{"role": "user", "content": "What?"}]
        asked = {"model": "demo", "messages": messages, "max_tokens": tokens, "temperature": 0, "ignore_eos": True}
        body = json.dumps({**asked, "stream": stream})
        self._connection.request("POST", "/v1/chat/completions", body, {"content-type": "application/json"})
        response = self._connection.getresponse()
        assert response.status == 200, response.read()
        return response

    def one_token(self) -> float:
        """Seconds of a whole answer of one token."""
        began = time.perf_counter()
        self.ask(1, stream=False).read()
        return time.perf_counter() - began

    def per_token(self, tokens: int) -> float:
        """Seconds of a stream from its first event, over its further tokens."""
        response = self.ask(tokens, stream=True)
        response.readline()
        began = time.perf_counter()
        response.read()
        return (time.perf_counter() - began) / (tokens - 1)


def said(call: Callable[[], Any]) -> str:
    """How a call ends: OK, a gRPC status, or an error of the client."""
    try:
        call()
    except grpc.RpcError as error:
        return str(error.code().name)
    except saccade.SaccadeError as error:
        return f"{type(error).__name__}: {error.message[:80]}"
    return "OK"


def lacks(address: str) -> dict[str, str]:
    """The ingress's results for four features that Saccade's own server has."""
    large = noise_png(random.Random(0), 1420, 1420)
    with grpc.insecure_channel(address) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        health = said(lambda: stub.Check(health_pb2.HealthCheckRequest(), timeout=5))
    with saccade.Client(address, tls=True, timeout=3, max_retries=0) as secure:
        tls = said(secure.models)
    with saccade.Client(address, timeout=60, max_retries=0) as client:
        deadline = said(lambda: client.generate("?", max_tokens=200, ignore_eos=True, timeout=0.05))
        inline = client.with_options(upload_above=None)
        image = said(lambda: inline.generate("?", images=[large], max_tokens=1))
    return {
        "grpc.health.v1": health, "tls": tls, "deadline_of_50_ms": deadline,
        f"image_of_{len(large) / 1e6:.1f}_MB": image,
    }  # fmt: skip


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=60)
    parser.add_argument("--tokens", type=int, default=100)
    parser.add_argument("--write", action="store_true", help="write the result to benchmarks/results")
    options = parser.parse_args(argv)
    ray.init(num_cpus=3, include_dashboard=False, object_store_memory=100 * 2**20, log_to_driver=False)
    ports = {"own": free_port(), "serve": free_port()}
    serve.start(
        proxy_location="HeadOnly", http_options={"port": ports["serve"]},
        grpc_options={"port": PORT, "grpc_servicer_functions": list(SERVICERS)},
    )  # fmt: skip
    deployment = {"ray_actor_options": {"num_cpus": 0}}
    serve.run(app({"model": "demo", "options": {"threads": 1}, "http": {}, "deployment": deployment}))
    times: dict[str, list[float]] = {}
    arguments = ["demo", "--log-level", "error", "--threads", "1", "--http-port", str(ports["own"])]
    with ServerProcess(arguments) as server:
        ways = {"own": saccade.Client(server.address), "serve": saccade.Client(f"127.0.0.1:{PORT}")}
        over_http = {name: Http(port) for name, port in ports.items()}
        for _ in range(options.requests):
            for name, client in ways.items():
                times.setdefault(f"{name}_request", []).append(one_token(client))
                times.setdefault(f"{name}_token", []).append(per_token(client, options.tokens))
                times.setdefault(f"{name}_http_request", []).append(over_http[name].one_token())
                times.setdefault(f"{name}_http_token", []).append(over_http[name].per_token(options.tokens))
        for client in ways.values():
            client.close()
    found = {name: round(1000 * statistics.median(values), 3) for name, values in times.items()}
    result = {
        "median_ms": found,
        "overhead_ms": {
            "request": round(found["serve_request"] - found["own_request"], 3),
            "token": round(found["serve_token"] - found["own_token"], 3),
            "http_request": round(found["serve_http_request"] - found["own_http_request"], 3),
            "http_token": round(found["serve_http_token"] - found["own_http_token"], 3),
        },
        "ingress": lacks(f"127.0.0.1:{PORT}"),
        "machine": machine.describe(), "load": machine.load(), "ray": ray.__version__,
    }  # fmt: skip
    serve.shutdown()
    ray.shutdown()
    if options.write:
        write_result("ray-serve", result)
    print(json.dumps(result))
    return 0


if __name__ == "__main__":
    sys.exit(main())
