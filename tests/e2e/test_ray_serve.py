"""Two replicas behind Ray Serve's gRPC ingress: one is killed, and a new version is rolled out, under streams."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from faults import check_same, long_requests, streams_over
from images import png
from running import RunningServer

import saccade
from saccade import errors

ray = pytest.importorskip("ray", reason="Ray is not installed: `make test-ray` installs it")
pytest.importorskip("ray.serve.schema", reason="Ray Serve is not installed: `make test-ray` installs it")

OPTIONS: dict[str, Any] = {"dtype": "float32", "threads": 1, "max_seqs": 16, "max_len": 600, "image_workers": 1}
STREAMS = 32


def deploy(model: Path, **options: Any) -> None:
    from ray import serve

    from saccade.ray.serve import app

    deployment = {
        "num_replicas": 2,
        "ray_actor_options": {"num_cpus": 0},
        "graceful_shutdown_timeout_s": 120,
        **options,
    }
    serve.run(app({"model": str(model), "options": OPTIONS, "deployment": deployment}))


@pytest.fixture(scope="module")
def address(model: Path) -> Iterator[str]:
    from ray import serve

    from saccade.ray.serve import SERVICERS

    ray.init(num_cpus=4, include_dashboard=False, object_store_memory=100 * 2**20, log_to_driver=False)
    serve.start(
        proxy_location="HeadOnly", http_options={"port": 0},
        grpc_options={"port": 9123, "grpc_servicer_functions": list(SERVICERS)},
    )  # fmt: skip
    deploy(model, user_config=None)
    yield "127.0.0.1:9123"
    serve.shutdown()
    ray.shutdown()


@pytest.fixture(scope="module")
def wanted(server: RunningServer) -> list[saccade.Generation]:
    """The expected answers, from a server outside of Ray."""
    with saccade.Client(server.address) as client:
        return [client.generate(**request) for request in requests()]


def requests() -> list[dict[str, Any]]:
    return long_requests(STREAMS)


def replica_pids() -> list[int]:
    from benchmarks.ray_jobs import command_of, descendants

    return sorted(pid for pid in descendants(os.getpid()) if command_of(pid).startswith("ray::ServeReplica"))


def test_the_ingress_gives_the_same_answers(address: str, wanted: list[saccade.Generation]) -> None:
    with saccade.Client(address) as client:
        check_same([client.generate(**requests()[1])], wanted[1:2])
        assert client.get_model().name
        assert client.tokenize("what?", images=[png(1)]).prompt_tokens > 4
        with pytest.raises(errors.InvalidArgument, match="temperature"):
            client.generate("x", temperature=-1.0)
        with client.stream("x", max_tokens=500, ignore_eos=True) as stream:
            next(stream)


def test_a_replica_whose_engine_has_ended_is_unhealthy(model: Path) -> None:
    from saccade.ray.serve import Replica

    replica = Replica(str(model), OPTIONS)
    replica.check_health()
    replica._client._service._frontend.engine.close()
    with pytest.raises(errors.Unavailable, match="engine"):
        replica.check_health()


def test_arguments_of_the_application_are_checked() -> None:
    from saccade.ray.serve import HttpReplica, app

    with pytest.raises(errors.InvalidArgument, match="modell"):
        app({"modell": "demo"})
    with pytest.raises(errors.InvalidArgument, match="http_prot"):
        HttpReplica({"http_prot": 1}, "demo")


def test_a_killed_replica_costs_no_stream(address: str, wanted: list[saccade.Generation]) -> None:
    with saccade.Client(address, max_retries=60) as client:
        found = streams_over(client, requests(), lambda: os.kill(replica_pids()[0], signal.SIGKILL))
    check_same(found, wanted)


def test_a_rolling_update_costs_no_stream(address: str, model: Path, wanted: list[saccade.Generation]) -> None:
    before = set(replica_pids())
    with saccade.Client(address, max_retries=60) as client:
        updating = threading.Thread(
            target=deploy, args=(model,), kwargs={"health_check_period_s": 7, "max_ongoing_requests": 48}
        )
        found = streams_over(client, requests(), updating.start)
        updating.join(120)
        assert not updating.is_alive()
        check_same(found, wanted)
        check_same([client.generate(**requests()[0])], wanted[:1])
    assert not before & set(replica_pids()), "all replicas are new"
