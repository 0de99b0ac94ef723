"""`serve deploy` of the shipped serve.yaml, with a small model: gRPC and HTTP through Serve, and autoscaling."""

from __future__ import annotations

import contextlib
import http.client
import json
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml
from faults import check_same, long_requests, open_stream
from images import data_url, png
from running import RunningServer

import saccade
from benchmarks.machine import free_port

ray = pytest.importorskip("ray", reason="Ray is not installed: `make test-ray` installs it")
pytest.importorskip("ray.serve.schema", reason="Ray Serve is not installed: `make test-ray` installs it")

ROOT = Path(__file__).resolve().parents[2]
OPTIONS: dict[str, Any] = {"dtype": "float32", "threads": 1, "max_seqs": 16, "max_len": 600, "image_workers": 1}
SCALING = {
    "min_replicas": 1, "max_replicas": 2, "target_ongoing_requests": 4, "upscale_delay_s": 1, "downscale_delay_s": 2,
    "look_back_period_s": 2, "metrics_interval_s": 0.5,
}  # fmt: skip


@dataclass(frozen=True)
class Deployed:
    grpc: str
    http: str

    def replicas(self) -> int:
        """Number of replicas that accept requests."""
        from ray import serve

        deployment = serve.status().applications["saccade"].deployments["Saccade"]
        return int(deployment.replica_states.get("RUNNING", 0))

    def until(self, replicas: int) -> None:
        deadline = time.monotonic() + 120
        while self.replicas() != replicas:
            assert time.monotonic() < deadline, f"{self.replicas()} replicas, expected {replicas}"
            time.sleep(0.2)


def configuration(model: Path, grpc_port: int, http_port: int) -> dict[str, Any]:
    """The shipped file, with other ports, a small model and quick decisions."""
    config: dict[str, Any] = yaml.safe_load((ROOT / "deploy" / "ray" / "serve.yaml").read_text())
    config["proxy_location"] = "HeadOnly"
    config["grpc_options"]["port"] = grpc_port
    config["http_options"] |= {"host": "127.0.0.1", "port": http_port}
    arguments = config["applications"][0]["args"]
    arguments |= {"model": str(model), "options": OPTIONS}
    arguments["deployment"]["autoscaling_config"] |= SCALING
    arguments["deployment"]["ray_actor_options"] = {"num_cpus": 0}
    return config


@pytest.fixture(scope="module")
def deployed(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployed]:
    from ray import serve

    dashboard, grpc_port, http_port = free_port(), free_port(), free_port()
    path = tmp_path_factory.mktemp("serve") / "serve.yaml"
    path.write_text(yaml.safe_dump(configuration(model, grpc_port, http_port)))
    ray.init(
        num_cpus=4, include_dashboard=True, dashboard_port=dashboard, object_store_memory=100 * 2**20,
        log_to_driver=False,
    )  # fmt: skip
    command = [Path(sys.executable).with_name("serve"), "deploy", "-a", f"http://127.0.0.1:{dashboard}", path]
    subprocess.run(list(map(str, command)), check=True, cwd=ROOT)
    found = Deployed(f"127.0.0.1:{grpc_port}", f"http://127.0.0.1:{http_port}")
    deadline = time.monotonic() + 120
    while (application := serve.status().applications.get("saccade")) is None or application.status != "RUNNING":
        assert application is None or application.status != "DEPLOY_FAILED", application.message
        assert time.monotonic() < deadline, application
        time.sleep(0.2)
    found.until(1)
    yield found
    serve.shutdown()
    ray.shutdown()


@pytest.fixture(scope="module")
def own(server: RunningServer) -> Iterator[saccade.Client]:
    with saccade.Client(server.address) as client:
        yield client


def post(url: str, document: dict[str, Any]) -> tuple[int, dict[str, Any]]:
    request = urllib.request.Request(url, json.dumps(document).encode(), {"content-type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=60) as response:
            return response.status, json.loads(response.read())
    except urllib.error.HTTPError as error:
        return error.code, json.loads(error.read())


def test_grpc_and_http_give_the_answers_of_a_server(deployed: Deployed, own: saccade.Client) -> None:
    options: dict[str, Any] = {"images": [png(4)], "max_tokens": 12, "temperature": 0, "ignore_eos": True}
    wanted = own.generate("what is it?", **options)
    with saccade.Client(deployed.grpc) as client:
        found = client.generate("what is it?", **options)
        assert found.token_ids == wanted.token_ids and found.text == wanted.text
    url = data_url(png(4))
    parts = [{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": "what is it?"}]
    asked = {
        "messages": [{"role": "user", "content": parts}], "max_tokens": 12, "temperature": 0, "ignore_eos": True,
        "model": own.get_model().name,
    }  # fmt: skip
    status, whole = post(f"{deployed.http}/v1/chat/completions", asked)
    assert status == 200, whole
    assert whole["choices"][0]["message"]["content"] == wanted.text
    assert whole["usage"]["prompt_tokens"] == wanted.usage.prompt_tokens
    request = urllib.request.Request(
        f"{deployed.http}/v1/chat/completions", json.dumps({**asked, "stream": True}).encode(),
        {"content-type": "application/json"},
    )  # fmt: skip
    with urllib.request.urlopen(request, timeout=60) as response:
        lines = [line.removeprefix(b"data: ") for line in response.read().split(b"\n") if line.startswith(b"data: ")]
    assert lines[-1] == b"[DONE]" and len(lines) >= 4
    pieces = [json.loads(line)["choices"] for line in lines[:-1]]
    assert "".join(choices[0]["delta"].get("content") or "" for choices in pieces if choices) == wanted.text
    status, error = post(f"{deployed.http}/v1/chat/completions", {**asked, "temperature": -1})
    assert status == 400 and "temperature" in error["error"]["message"]
    status, error = post(f"{deployed.http}/v1/batches", {})
    assert status == 400, "a replica has no batches"


def test_state_and_a_client_that_leaves(deployed: Deployed, own: saccade.Client) -> None:
    with urllib.request.urlopen(f"{deployed.http}/ready", timeout=30) as response:
        assert json.loads(response.read()) == {"status": "ready", "servers": {"this process": "serving"}}
    host, _, port = deployed.http.removeprefix("http://").partition(":")
    connection = http.client.HTTPConnection(host, int(port), timeout=60)
    asked = {"messages": [{"role": "user", "content": "go on"}], "max_tokens": 500, "ignore_eos": True, "stream": True}
    body = json.dumps({**asked, "model": own.get_model().name})
    connection.request("POST", "/v1/chat/completions", body, {"content-type": "application/json"})
    response = connection.getresponse()
    assert response.status == 200 and response.read(20)
    assert streams(deployed) == 1
    connection.close()
    response.close()
    while streams(deployed):
        pass


def streams(deployed: Deployed) -> int:
    """Answers that the replica streams over HTTP."""
    with urllib.request.urlopen(f"{deployed.http}/metrics", timeout=30) as response:
        lines = response.read().decode().splitlines()
    return int(next(line for line in lines if line.startswith("saccade_http_streams ")).split()[1])


def test_replicas_follow_the_queue(deployed: Deployed, own: saccade.Client) -> None:
    """One replica, two while sixteen streams run at a time, and one again; no stream is lost."""
    assert deployed.replicas() == 1
    requests = long_requests(16)
    enough = threading.Event()
    with saccade.Client(deployed.grpc, max_retries=60) as client:

        def keep_asking(request: dict[str, Any]) -> list[saccade.Generation]:
            found = []
            while not enough.is_set():
                with open_stream(client, request) as stream:
                    found.append(stream.final())
            return found

        with ThreadPoolExecutor(len(requests)) as pool:
            running = [pool.submit(keep_asking, request) for request in requests]
            with contextlib.ExitStack() as ends:
                ends.callback(enough.set)
                deployed.until(2)
            answers = [one.result(300) for one in running]
        deployed.until(1)
        for request, found in zip(requests, answers, strict=True):
            wanted = own.generate(**request)
            check_same(found, [wanted] * len(found))
        check_same([client.generate(**requests[0])], answers[0][:1])
