"""LocalClient without a model: its errors, including those without an installed engine. tests/e2e tests it with a
model."""

from __future__ import annotations

import subprocess
import sys

import pytest

import saccade
from saccade import errors
from saccade.errors import error_from_service, error_from_status, parse_trailers
from service.common import errors as service_errors
from service.rpc.statuses import details

FAILURES = [
    service_errors.InvalidArgument("bad image", reason="IMAGE_DECODE_FAILED", field="images[0]"),
    service_errors.InvalidArgument("600 > 512", reason="CONTEXT_LENGTH_EXCEEDED", metadata={"limit": "512"}),
    service_errors.NotFound("no such model"),
    service_errors.AlreadyExists("in use"),
    service_errors.FailedPrecondition("no tokenizer"),
    service_errors.Unavailable("full", reason="QUEUE_FULL", retry_after=0.25),
    service_errors.Unavailable("gone", reason="ENGINE_DIED"),
    service_errors.DeadlineExceeded("late"),
    service_errors.Internal("failed"),
    service_errors.Unimplemented("not here"),
]


@pytest.mark.parametrize("failure", FAILURES, ids=lambda failure: f"{type(failure).__name__}-{failure.reason}")
def test_an_error_is_the_same_with_and_without_a_server(failure: service_errors.StatusError) -> None:
    local = error_from_service(failure, "r1")
    trailer = details(failure, "r1")
    assert trailer is not None
    parsed = parse_trailers([("grpc-status-details-bin", trailer)])
    remote = error_from_status(failure.code.name, failure.message, parsed, request_id="r1")
    assert type(local) is type(remote) and type(local).__name__ in dir(errors)
    for name in ("reason", "request_id", "retryable", "retry_after", "metadata"):
        assert getattr(local, name) == getattr(remote, name), name


def test_a_model_that_is_not_there(tmp_path: object) -> None:
    with pytest.raises(errors.SaccadeError, match="nowhere"):
        saccade.LocalClient(f"{tmp_path}/nowhere")


def test_a_model_is_a_name_or_a_path() -> None:
    with pytest.raises(errors.InvalidArgument, match="model: expected a name or a path, got int"):
        saccade.LocalClient(5)  # type: ignore[arg-type]


def test_an_unknown_engine_option_is_an_error() -> None:
    with pytest.raises(errors.InvalidArgument, match="max_sequences"):
        saccade.LocalClient("demo", max_sequences=3)


@pytest.mark.parametrize("option", [{"port": 3}, {"api_keys": "keys.toml"}, {"batch_dir": "/tmp"}, {"http_port": 0}])
def test_an_option_that_only_a_server_uses_is_an_error(option: dict[str, object]) -> None:
    (name,) = option
    with pytest.raises(errors.InvalidArgument, match=f"{name}: only `saccade serve` uses this option"):
        saccade.LocalClient("demo", **option)  # type: ignore[arg-type]


def test_an_option_of_the_engine_is_not_taken_for_one_of_the_server() -> None:
    for name in ("host_bytes", "hang_timeout", "memory_bytes"):
        with pytest.raises(errors.InvalidArgument, match=f"{name}: .*-1.* is below the minimum"):
            saccade.LocalClient("demo", **{name: -1})


def test_what_only_a_server_keeps_is_said_at_once() -> None:
    """The errors are raised before any call and without an engine."""
    client = saccade.LocalClient.__new__(saccade.LocalClient)
    for name, instead in (("media", "images="), ("batches", "run_batch")):
        with pytest.raises(errors.Unimplemented, match=instead) as caught:
            getattr(client, name)
        assert name in str(caught.value)


@pytest.mark.parametrize("call", ["saccade.LocalClient()", "__import__('saccade.cli').cli.main(['serve'])"])
def test_without_the_servers_package_it_says_what_to_install(call: str) -> None:
    # `None` in sys.modules is Python's own way to make an import fail.
    program = f"import sys; sys.modules['service'] = None; import saccade\nprint({call})"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert "pip install saccade-server" in done.stderr
    assert "Error: " in done.stderr or done.stdout == "1\n"
