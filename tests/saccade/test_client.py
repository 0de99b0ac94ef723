"""The synchronous client against a scripted server."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import grpc
import pytest
from certificates import Authority
from fake_server import Failure, Script, serve
from waiting import until

import saccade
from saccade import errors
from saccade._core.retrying import retry_delay
from saccade._core.targets import is_local

Code = grpc.StatusCode


def test_generate_returns_the_whole_answer(client: saccade.Client, script: Script) -> None:
    answer = client.generate("What is it?", temperature=0, seed=3)
    assert (answer.text, answer.token_ids, answer.finish_reason) == ("a red square", [0, 1, 2], "stop")
    assert answer.usage.prompt_tokens == 9 and answer.usage.completion_tokens == 3
    assert answer.usage.queue_time == pytest.approx(0.005)
    assert answer.usage.time_to_first_token is None
    assert answer.logprobs is None
    assert answer.seed == 3 and answer.model == "fake"
    assert answer.request_id == script.requests[0].request_id != ""
    assert answer.samples[0].stop_match == "."


def test_samples_come_in_order_and_the_first_is_the_answer(client: saccade.Client) -> None:
    answer = client.generate("?", n=3)
    assert [sample.index for sample in answer.samples] == [0, 1, 2]
    assert answer.text == answer.samples[0].text


def test_logprobs(client: saccade.Client) -> None:
    answer = client.generate("?", logprobs=2)
    assert answer.logprobs is not None
    assert [item.token_id for item in answer.logprobs] == [0, 1, 2]
    assert answer.logprobs[0].top == ((0, 0.0), (1, -1.0))
    assert answer.logprobs[0].top[1].logprob == -1.0
    assert answer.logprobs[0].top[0]._replace(logprob=-2.0).token == b""


@pytest.mark.parametrize("options", [{}, {"n": 3}, {"logprobs": 2}, {"logprobs": 0}], ids=str)
def test_streamed_is_what_unary_returns(client: saccade.Client, options: dict[str, int]) -> None:
    with client.stream("?", **options) as stream:  # type: ignore[arg-type]
        deltas = list(stream)
    assert stream.final() == client.generate("?", **options)  # type: ignore[arg-type]
    first = [delta for delta in deltas if delta.index == 0]
    assert [delta.text for delta in first] == ["a ", "red ", "square"]
    assert [delta.sequence for delta in first] == [0, 1, 2]
    assert stream.text == "a red square" and stream.token_ids == [0, 1, 2] and stream.seed == 7


def test_final_reads_the_stream_itself(client: saccade.Client) -> None:
    assert client.stream("?").final().text == "a red square"


def test_a_stream_that_is_left_early_is_cancelled(client: saccade.Client, script: Script) -> None:
    script.hang_after = 1
    with client.stream("?") as stream:
        assert next(stream).text == "a "
    assert script.ended.acquire(timeout=10)
    assert list(stream) == []
    assert stream.text == "a "
    with pytest.raises(errors.Cancelled):
        stream.final()


def test_a_stream_that_nobody_holds_any_more_is_cancelled(client: saccade.Client, script: Script) -> None:
    script.hang_after = 1
    stream = client.stream("?")
    next(stream)
    del stream
    assert script.ended.acquire(timeout=10)


def test_another_thread_can_close_a_stream_that_waits(client: saccade.Client, script: Script) -> None:
    script.hang_after = 1
    stream = client.stream("?")
    assert next(stream).text == "a "

    def close() -> None:
        until(lambda: not stream._turn)  # the reader below has begun
        stream.close()

    closer = threading.Thread(target=close)
    closer.start()
    with pytest.raises(errors.Cancelled):
        next(stream)
    closer.join()
    assert script.ended.acquire(timeout=10)


def test_a_second_thread_that_reads_a_stream_is_told(client: saccade.Client, script: Script) -> None:
    """Two readers would block gRPC's thread that ends calls, and all calls of the client would wait for ever."""
    script.hang_after = 1
    with client.stream("?") as stream:
        assert next(stream).text == "a "
        reader = threading.Thread(target=lambda: pytest.raises(errors.Cancelled, next, stream))
        reader.start()
        while stream._turn:
            assert reader.is_alive()
            time.sleep(0.001)
        for read in (lambda: next(stream), stream.final):
            with pytest.raises(errors.FailedPrecondition, match="another thread or task is reading"):
                read()
        assert stream.text == "a "
    reader.join()
    script.hang_after = None
    assert client.generate("?").text == "a red square"


def test_a_stream_without_its_end_is_an_error(client: saccade.Client, script: Script) -> None:
    stream = client.stream("?", n=2)
    stream._state.assembler.request.sampling.n = 3
    with pytest.raises(errors.Internal, match="2 of 3"):
        stream.final()


STATUSES = [
    (Failure(Code.INVALID_ARGUMENT, reason="BAD"), errors.InvalidArgument, False),
    (Failure(Code.INVALID_ARGUMENT, reason="IMAGE_DECODE_FAILED"), errors.InvalidArgument, False),
    (Failure(Code.NOT_FOUND), errors.NotFound, False),
    (Failure(Code.ALREADY_EXISTS), errors.AlreadyExists, False),
    (Failure(Code.FAILED_PRECONDITION, reason="CAPABILITY_MISSING"), errors.FailedPrecondition, False),
    (Failure(Code.OUT_OF_RANGE), errors.OutOfRange, False),
    (Failure(Code.UNIMPLEMENTED), errors.Unimplemented, False),
    (Failure(Code.UNAVAILABLE, reason="QUEUE_FULL"), errors.Overloaded, True),
    (Failure(Code.UNAVAILABLE, reason="WARMING"), errors.Overloaded, True),
    (Failure(Code.UNAVAILABLE, reason="DRAINING"), errors.Overloaded, True),
    (Failure(Code.UNAVAILABLE, reason="ENGINE_DIED"), errors.Unavailable, True),
    (Failure(Code.UNAVAILABLE), errors.Unavailable, True),
    (Failure(Code.UNAVAILABLE, reason="MEDIA_FETCH_FAILED"), errors.Unavailable, False),
    (Failure(Code.UNAVAILABLE, pushback="-1"), errors.Unavailable, False),
    (Failure(Code.RESOURCE_EXHAUSTED, reason="RATE_LIMITED"), errors.RateLimited, True),
    (Failure(Code.RESOURCE_EXHAUSTED, reason="QUOTA_SPENT"), errors.RateLimited, False),
    (Failure(Code.RESOURCE_EXHAUSTED, "Received message larger than max (5 vs. 4)"), errors.MessageTooLarge, False),
    (Failure(Code.UNAUTHENTICATED), errors.Unauthenticated, False),
    (Failure(Code.PERMISSION_DENIED, reason="MEDIA_HOST_DENIED"), errors.PermissionDenied, False),
    (Failure(Code.CANCELLED), errors.Cancelled, False),
    (Failure(Code.CANCELLED, "CANCELLED", reason="CANCELLED"), errors.Cancelled, False),
    (Failure(Code.CANCELLED, "CANCELLED"), errors.Unavailable, True),
    (Failure(Code.INTERNAL), errors.Internal, False),
    (Failure(Code.UNKNOWN), errors.Internal, False),
    (Failure(Code.DATA_LOSS), errors.Internal, False),
]


@pytest.mark.parametrize(
    ("failure", "kind", "retryable"), STATUSES, ids=[f"{f.code.name}-{f.reason or f.pushback}" for f, _, _ in STATUSES]
)
def test_each_status_is_its_error(
    address: str, script: Script, failure: Failure, kind: type[saccade.SaccadeError], retryable: bool
) -> None:
    with saccade.Client(address, max_retries=0) as client:
        for call in (client.generate, lambda prompt: client.stream(prompt).final()):
            script.failures = [failure]
            with pytest.raises(kind) as caught:
                call("?")
            error = caught.value
            assert type(error) is kind
            assert error.retryable is retryable
            assert error.reason == failure.reason
            assert isinstance(error.__cause__, grpc.RpcError)
            assert error.request_id == script.requests[-1].request_id
            assert error.request_id in str(error) and failure.message in str(error)


def test_details_reach_the_error(address: str, script: Script) -> None:
    script.failures = [
        Failure(
            Code.INVALID_ARGUMENT,
            "too long",
            reason="CONTEXT_LENGTH_EXCEEDED",
            metadata={"limit": "512", "got": "600"},
            retry_after=1.5,
            request_id="the-servers-own",
            violation="chat.messages",
        )
    ]
    with saccade.Client(address) as client, pytest.raises(errors.InvalidArgument) as caught:
        client.generate("?")
    error = caught.value
    assert error.metadata == {"limit": "512", "got": "600"}
    assert error.retry_after == 1.5
    assert error.request_id == "the-servers-own"
    assert error.message == "too long [chat.messages: is wrong]"


def test_what_a_pushback_says_of_retries(address: str, script: Script) -> None:
    """gRPC's rule: a number, including 0, is a time to wait; any other value forbids retries. RetryInfo is more
    exact."""
    for pushback, retried in (("0", True), ("20", True), ("-1", False), ("soon", False), ("", False)):
        script.requests.clear()
        script.failures = [Failure(Code.UNAVAILABLE, pushback=pushback)]
        with saccade.Client(address, timeout=20) as client:
            if retried:
                client.generate("?")
            else:
                with pytest.raises(errors.Unavailable):
                    client.generate("?")
        assert len(script.requests) == 1 + retried
    script.failures = [Failure(Code.UNAVAILABLE, retry_after=1.5, pushback="20")]
    with saccade.Client(address, max_retries=0) as client, pytest.raises(errors.Unavailable) as caught:
        client.generate("?")
    assert caught.value.retry_after == 1.5


def test_a_message_does_not_say_the_same_twice() -> None:
    def message(text: str, *fields: tuple[str, str]) -> str:
        return errors.error_from_status("INVALID_ARGUMENT", text, errors.StatusDetails(fields=list(fields))).message

    assert message("top_p is 2", ("sampling.top_p", "top_p is 2")) == "top_p is 2"
    assert message("not in [0, 1]", ("sampling.top_p", "not in [0, 1]")) == "not in [0, 1] [sampling.top_p]"
    assert message("two wrong", ("a.x", "y"), ("b", "")) == "two wrong [a.x: y; b]"


def test_an_error_survives_pickling() -> None:
    error = errors.RateLimited("slow down", reason="RATE_LIMITED", request_id="r", retryable=True, metadata={"a": "b"})
    copy = pickle.loads(pickle.dumps(error))
    assert type(copy) is errors.RateLimited and str(copy) == str(error) and copy.__dict__ == error.__dict__


def test_unavailable_is_tried_again_with_the_same_request_id(address: str, script: Script) -> None:
    with saccade.Client(address, max_retries=2) as client:
        for call in (client.generate, lambda prompt: client.stream(prompt).final()):
            script.requests.clear()
            script.failures = [Failure(Code.UNAVAILABLE, reason="QUEUE_FULL", retry_after=0.01)] * 2
            assert call("?").text == "a red square"
            assert len(script.requests) == 3
            assert len({request.request_id for request in script.requests}) == 1


def test_retries_end(address: str, script: Script) -> None:
    script.failures = [Failure(Code.UNAVAILABLE, reason="QUEUE_FULL", retry_after=0.01)] * 5
    with saccade.Client(address, max_retries=1) as client, pytest.raises(errors.Overloaded):
        client.generate("?")
    assert len(script.requests) == 2


@pytest.mark.parametrize("code", [Code.INTERNAL, Code.DEADLINE_EXCEEDED, Code.INVALID_ARGUMENT], ids=lambda c: c.name)
def test_other_errors_are_not_tried_again(client: saccade.Client, script: Script, code: grpc.StatusCode) -> None:
    script.failures = [Failure(code)]
    with pytest.raises(errors.SaccadeError):
        client.generate("?")
    assert len(script.requests) == 1


def test_a_stream_is_not_tried_again_once_it_has_begun_if_one_says_so(client: saccade.Client, script: Script) -> None:
    script.failures = [Failure(Code.UNAVAILABLE, reason="ENGINE_DIED")]
    script.fail_after = 2
    stream = client.stream("?", resume=False)
    with pytest.raises(errors.Unavailable):
        list(stream)
    assert len(script.requests) == 1
    assert stream.text == "a red " and stream.seed == 7  # the values that a caller needs to continue


def test_a_wait_longer_than_the_deadline_is_not_begun(address: str, script: Script) -> None:
    script.failures = [Failure(Code.UNAVAILABLE, reason="QUEUE_FULL", retry_after=600)]
    began = time.monotonic()
    with saccade.Client(address, timeout=120) as client, pytest.raises(errors.Overloaded) as caught:
        client.generate("?")
    assert time.monotonic() - began < 60
    assert caught.value.retry_after == 600


def test_the_wait_doubles_and_honours_the_server() -> None:
    full = errors.Overloaded("full", retryable=True)
    waits = [retry_delay(full, attempt, 9, None, random_unit=lambda: 1.0) for attempt in range(1, 8)]
    assert waits == [0.5, 1, 2, 4, 8, 8, 8]
    assert retry_delay(full, 1, 9, None, random_unit=lambda: 0.0) == 0.25
    asked = errors.Overloaded("full", retryable=True, retry_after=3)
    assert 3 <= (retry_delay(asked, 1, 9, None) or 0) <= 3.1
    assert retry_delay(full, 3, 2, None) is None
    assert retry_delay(errors.Internal("no"), 1, 2, None) is None
    assert retry_delay(asked, 1, 9, 2.0) is None


@pytest.mark.parametrize("how", ["generate", "stream"])
def test_the_deadline_ends_the_call_on_both_sides(client: saccade.Client, script: Script, how: str) -> None:
    script.hang_after = 1
    for seconds in (0.2, 2, 20):  # until the call reaches the server in its time, as a busy machine may prevent
        with pytest.raises(errors.DeadlineExceeded, match="^the timeout of the call has passed ") as late:
            if how == "generate":
                client.generate("?", timeout=seconds)
            else:
                client.stream("?", timeout=seconds).final()
        assert late.value.reason == "DEADLINE_EXCEEDED"
        if script.requests:
            break
    assert script.ended.acquire(timeout=10)


def test_the_deadline_covers_all_attempts(address: str, script: Script) -> None:
    script.hang_after = 0
    for seconds in (1, 10, 60):  # until there is a second attempt, for which a busy machine may leave no time
        script.failures = [Failure(Code.UNAVAILABLE, retry_after=0.01)]
        script.requests.clear()
        began = time.monotonic()
        with saccade.Client(address) as client, pytest.raises(errors.SaccadeError) as late:
            client.generate("?", timeout=seconds)
        assert time.monotonic() - began < seconds + 20
        if len(script.requests) == 2:
            break
    assert len(script.requests) == 2 and isinstance(late.value, errors.DeadlineExceeded)


def test_no_server_is_unavailable() -> None:
    with saccade.Client("127.0.0.1:1", max_retries=0) as client, pytest.raises(errors.Unavailable) as caught:
        client.generate("?", timeout=10)
    assert caught.value.retryable


def test_a_message_over_the_servers_limit(script: Script) -> None:
    limit = (("grpc.max_receive_message_length", 1000),)
    with serve(script, options=limit) as address, saccade.Client(address) as client:
        with pytest.raises(errors.MessageTooLarge):
            client.generate("?", images=[b"x" * 2000])
    assert script.requests == []


def test_an_answer_over_grpcs_default_limit(client: saccade.Client, script: Script) -> None:
    script.words = ["x" * 5_000_000]
    assert len(client.generate("?").text) == 5_000_000


def test_the_api_key_is_sent_and_never_shown(address: str, script: Script, monkeypatch: pytest.MonkeyPatch) -> None:
    with saccade.Client(address, api_key="s3cret") as client:
        client.generate("?")
        assert "s3cret" not in repr(client) + repr(client._settings)
    monkeypatch.setenv("SACCADE_API_KEY", "from-env")
    with saccade.Client(address) as client:
        client.stream("?").final()
    assert [seen["authorization"] for seen in script.metadata] == ["Bearer s3cret", "Bearer from-env"]


def test_close_may_be_called_twice_and_ends_the_client(address: str, script: Script) -> None:
    client = saccade.Client(address)
    client.generate("?")
    client.close()
    client.close()
    with pytest.raises(errors.FailedPrecondition) as caught:
        client.generate("?")
    assert caught.value.reason == "CLIENT_CLOSED"
    with pytest.raises(errors.FailedPrecondition):
        client.stream("?")
    saccade.Client(address).close()  # a client that was never used


def test_closing_the_client_ends_its_running_calls(address: str, script: Script) -> None:
    script.hang_after = 1
    client = saccade.Client(address)
    stream = client.stream("?")
    next(stream)
    client.close()
    with pytest.raises(errors.Cancelled):
        next(stream)
    assert script.ended.acquire(timeout=10)


def test_closing_the_client_ends_calls_between_two_attempts() -> None:
    """At once, not only after the pause, for which a server may request a minute; with Cancelled, like other calls."""
    client = saccade.Client("127.0.0.1:1")
    exchange = client.with_options(timeout=300)._exchange()
    closer = threading.Timer(0.01, client.close)
    closer.start()
    began = time.monotonic()
    with pytest.raises(errors.Cancelled):
        exchange.wait(30)
    closer.join()
    assert time.monotonic() - began < 20


def test_nothing_is_connected_before_it_is_used() -> None:
    client = saccade.Client("127.0.0.1:1")
    assert client._connection._channel is None


@pytest.mark.parametrize(
    "address", ["localhost", "localhost:http", ":50051", "http://localhost:50051", "a:70000", "a:\u00b2"]
)
def test_a_wrong_address_is_refused(address: str) -> None:
    with pytest.raises(errors.InvalidArgument, match="HOST:PORT"):
        saccade.Client(address)


@pytest.mark.parametrize("address", ["::1:50051", "[::1:50051", "::1]:50051", ["::1:1", "::1:2"]], ids=str)
def test_an_ipv6_address_needs_brackets(address: str | list[str]) -> None:
    """gRPC would look for a host of this name, and not find one, until the call's deadline."""
    with pytest.raises(errors.InvalidArgument, match=r"in brackets, \[ADDRESS\]:PORT, got '"):
        saccade.Client(address)


@pytest.mark.parametrize(
    "target",
    ["localhost:1", "[::1]:50051", "unix:/tmp/x", "unix-abstract:x", "dns:///host:1", "ipv4:1.2.3.4:5,1.2.3.5:6",
     "ipv6:[::1]:5", "xds:///saccade", "vsock:2:50051"],
)  # fmt: skip
def test_what_grpc_takes_for_a_target_is_taken(target: str) -> None:
    with saccade.Client(target) as client:
        assert target in repr(client)
    assert target in repr(saccade.AsyncClient(target))


WRONG_SETTINGS: list[dict[str, Any]] = [
    {"timeout": 0}, {"timeout": -1}, {"max_retries": -1}, {"max_retries": "3"}, {"max_retries": 1.5}, {"tls": "yes"},
    {"address": None}, {"address": [5]}, {"address": b"a:1"}, {"channel_options": [("a", 1)]}, {"api_key": 5},
    {"api_key": "secret\n"}, {"api_key": "s\u00e9cret"},
]  # fmt: skip


@pytest.mark.parametrize("wrong", WRONG_SETTINGS, ids=str)
def test_wrong_settings_are_refused(wrong: dict[str, Any]) -> None:
    for kind in (saccade.Client, saccade.AsyncClient):
        with pytest.raises(errors.InvalidArgument, match=f"^{next(iter(wrong))}") as caught:
            kind(**{"address": "localhost:1", **wrong})
        assert "cret" not in str(caught.value), "the key"


@pytest.mark.parametrize(
    ("option", "wrong", "words"),
    [
        ("upload_above", "2 MiB", "expected an integer, got '2 MiB'"),
        ("upload_above", -1, "expected 0 or more, got -1"),
        ("max_retries", float("nan"), "expected an integer, got nan"),
        ("concurrency", "4", "expected an integer, got '4'"),
        ("concurrency", None, "expected an integer, got None"),
        ("concurrency", 0, "expected 1 or more, got 0"),
    ],
)
def test_a_wrong_count_is_named(option: str, wrong: Any, words: str) -> None:
    with (
        saccade.Client("localhost:1") as client,
        pytest.raises(errors.InvalidArgument, match=f"^{option}: {words}$"),
    ):
        client.map([], concurrency=wrong) if option == "concurrency" else client.with_options(**{option: wrong})


def test_a_key_of_the_environment_that_no_header_can_hold(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SACCADE_API_KEY", "secret\r\n")
    with pytest.raises(errors.InvalidArgument, match=r"^SACCADE_API_KEY: .*got '\\r' at position 6 of 8$"):
        saccade.Client("localhost:1")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        # gRPC ends the whole process over these two.
        ({"certificate": b"x"}, "^tls.key: expected with tls.certificate, got None; give both or neither"),
        ({"key": "key.pem"}, "^tls.certificate: expected with tls.key, got None; give both or neither"),
        ({"ca": 5}, "^tls.ca: expected a path or bytes, got int"),
        ({"ca": "a\0b"}, "^tls.ca: cannot read 'a.*null byte"),
        ({"ca": b"no certificate \xff"}, "^tls.ca: no certificate in PEM format"),
        ({"ca": b" \n"}, "^tls.ca: expected PEM, got nothing"),
        ({"certificate": b"", "key": b""}, "^tls.key: expected PEM, got nothing"),
        ({"server_name": 5}, "^tls.server_name: expected a string"),
    ],
)
def test_tls_settings_that_cannot_be_used_are_named(options: dict[str, Any], words: str) -> None:
    with pytest.raises(errors.InvalidArgument, match=words):
        saccade.Client("localhost:1", tls=saccade.TLSConfig(**options)).generate("?")


def test_a_certificate_without_its_key_is_an_error_at_once(address: str) -> None:
    """gRPC does not read either file again, so a retry would not help."""
    tls = saccade.TLSConfig(certificate=b"x", key=b"y")
    with saccade.Client(address, tls=tls, timeout=20) as client:
        with pytest.raises(errors.Unavailable, match="certificate or key cannot be used, or") as caught:
            client.generate("?")
        assert not caught.value.retryable


def test_a_certificate_for_another_name_is_said_to_be_that(script: Script, tmp_path: Path) -> None:
    authority = Authority.create(tmp_path / "ca")
    certificate, key = authority.issue("server")
    credentials = grpc.ssl_server_credentials([(key.read_bytes(), certificate.read_bytes())])
    with serve(script, add_port=lambda server: server.add_secure_port("127.0.0.1:0", credentials)) as address:
        for name, words in (("localhost", None), ("elsewhere.test", r"not for this name; TLSConfig\(server_name")):
            tls = saccade.TLSConfig(ca=authority.certificate, server_name=name)
            with saccade.Client(address, tls=tls, timeout=20, max_retries=0) as client:
                if words is None:
                    assert client.generate("?").text == "a red square"
                    continue
                with pytest.raises(errors.Unavailable, match=words):
                    client.generate("?")


def test_a_server_on_this_machine_is_not_reached_through_a_proxy(address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Containers often have a proxy for downloads in their environment."""
    for name in ("no_proxy", "no_grpc_proxy"):
        monkeypatch.delenv(name, raising=False)
    for name in ("grpc_proxy", "https_proxy", "http_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:1")
    port = address.rpartition(":")[2]
    targets = (address, f"localhost:{port}", f"dns:///localhost:{port}", f"ipv4:{address}", f"{address},{address}")
    for target in targets:
        with saccade.Client(target, timeout=20, max_retries=0) as client:
            assert client.generate("?").text == "a red square"
    options = {"grpc.enable_http_proxy": 1}
    with (
        saccade.Client(address, timeout=20, max_retries=0, channel_options=options) as client,
        pytest.raises(errors.Unavailable, match=r"127\.0\.0\.1:1: "),
    ):
        client.generate("?")


@pytest.mark.parametrize(
    ("target", "local"),
    [
        ("127.0.0.1:1", True), ("[::1]:1", True), ("localhost:1", True), ("ipv6:[::1]:1", True), ("127.0.0.2:1", True),
        ("10.0.0.1:1", False), ("ipv4:127.0.0.1:1,10.0.0.1:1", False), ("127.example.org:1", False), ("h:1", False),
        ("dns:///h:1", False), ("localhost.example.org:1", False),
        ("dns:///localhost:1", True), ("dns:localhost:1", True), ("dns:///[::1]:1", True), ("dns:///10.0.0.1:1", False),
        ("dns://localhost/h:1", False), ("dns://10.0.0.1/localhost:1", True), ("dns:h:1", False), ("dns:///", False),
    ],
)  # fmt: skip
def test_which_targets_are_this_machine(target: str, local: bool) -> None:
    assert is_local(target) is local


def test_a_private_key_is_not_shown() -> None:
    tls = saccade.TLSConfig(ca="ca.pem", certificate=b"certificate", key=b"private")
    assert "private" not in repr(saccade.Client("localhost:1", tls=tls)._settings) + repr(tls) and "ca.pem" in repr(tls)


def test_a_pickled_client_connects_anew(address: str) -> None:
    with saccade.Client(address, api_key="k", timeout=20, max_retries=5) as client:
        client.generate("?")
        copy = pickle.loads(pickle.dumps(client))
    assert copy._settings == client._settings
    with copy:
        assert copy.generate("?").text == "a red square"


def _ask_in_child(client: saccade.Client) -> str:
    return client.generate("?").text


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_a_client_works_in_a_forked_process(tmp_path: Path) -> None:
    # The server runs in a process of its own: a process that forks while its threads run may misbehave.
    context = multiprocessing.get_context("spawn")
    ready, done = context.Queue(), context.Event()
    server = context.Process(target=_serve_until, args=(ready, done))
    server.start()
    try:
        with saccade.Client(ready.get(timeout=60), timeout=20) as client:
            assert client.generate("?").text == "a red square"
            reading, writing = os.pipe()
            child = os.fork()
            if child == 0:
                try:
                    os.write(writing, _ask_in_child(client).encode())
                finally:
                    os._exit(0)
            os.close(writing)
            with os.fdopen(reading) as pipe:
                assert pipe.read() == "a red square"
            os.waitpid(child, 0)
            assert client.generate("?").text == "a red square"
    finally:
        done.set()
        server.join()


def _serve_until(ready: multiprocessing.Queue[str], done: threading.Event) -> None:
    with serve(Script()) as address:
        ready.put(address)
        done.wait()


def test_a_program_ends_whatever_grpc_was_doing(address: str) -> None:
    """A thread of gRPC that is stopped at Python's end may hold the lock of a call."""
    program = """
import sys, threading
import saccade

client = saccade.Client(sys.argv[1])
exchange = client._exchange()
client._generate(saccade.v1.inference_pb2.GenerateRequest(), 20, exchange)
thread = threading.Thread(target=exchange._call._call._state.condition.acquire)
thread.start()
thread.join()
"""
    checkout = Path(__file__).resolve().parents[2]
    done = subprocess.run(
        [sys.executable, "-B", "-c", program, address], cwd=checkout, capture_output=True, text=True, timeout=20
    )
    assert (done.returncode, done.stderr) == (0, "")
