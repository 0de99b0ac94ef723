"""To which of several replicas a call is sent."""

from __future__ import annotations

import asyncio
import hashlib
import os
import pickle
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import grpc
import pytest
from fake_server import Failure, Script, needs_ring, serve

import saccade
from saccade import errors
from saccade._core.affinity import BEGINNING, call_key, prompt_key
from saccade._core.requests import build_request, embed_image_request
from saccade._core.settings import make_settings
from saccade._core.steps import Call
from saccade.cli import main
from saccade.v1 import batch_pb2, inference_pb2, media_pb2, model_pb2

UNSET: dict[str, Any] = {
    "api_key": None, "tls": None, "timeout": None, "max_retries": None, "channel_options": None,
}  # fmt: skip
FIRST, SECOND = b"first", b"second"
DIGEST = hashlib.sha256(FIRST).hexdigest()
SYSTEM = [{"role": "system", "content": "be brief"}]


def key(*arguments: Any, affinity: Any = "auto", **options: Any) -> str:
    return prompt_key(build_request(*arguments, **options), affinity)


def test_requests_with_the_same_first_image_have_the_same_key() -> None:
    parts = [{"type": "image", "image": FIRST}, {"type": "text", "text": "x"}, {"type": "image", "image": SECOND}]
    media = saccade.Media(DIGEST, 5, 1, 1, "PNG", 0.0)
    for same in (
        key("a", images=[FIRST]),
        key("b", images=[FIRST, SECOND]),
        key([5, 6], images=[FIRST]),
        key([*SYSTEM, {"role": "user", "content": parts}]),
        key("c", images=[media]),
        key("c", images=[FIRST], affinity="image"),
        key("d", images=[FIRST], videos=[SECOND]),
        key("e", videos=[saccade.Video([FIRST, SECOND])]),
        prompt_key(embed_image_request(FIRST)),
    ):
        assert same == DIGEST
    assert key("a", images=[SECOND, FIRST]) != DIGEST
    assert key("a", images=["https://host/a.png"]) != key("a", images=["https://host/b.png"])


def test_requests_without_images_have_the_key_of_their_beginning() -> None:
    turns = [{"role": "user", "content": "one"}, {"role": "assistant", "content": "two"}]
    assert key([*SYSTEM, *turns]) == key([*turns[:1], *SYSTEM]) == key([*SYSTEM, {"role": "user", "content": "other"}])
    assert key(turns[:1]) == key(turns) != key([{"role": "user", "content": "other"}])
    long = "x" * BEGINNING
    assert key(long + "a", raw=True) == key(long + "b", raw=True) != key("y" + long, raw=True)
    assert key([7] * BEGINNING + [1]) == key([7] * BEGINNING + [2]) != key([8] * BEGINNING)
    assert key([*SYSTEM, *turns], affinity="image") == key("x", raw=True, affinity="image") == ""
    assert prompt_key(inference_pb2.GenerateRequest()) == ""


def test_keys_of_other_calls() -> None:
    request = build_request("a", images=[FIRST])
    stream = inference_pb2.StreamGenerateRequest(request=request)
    assert call_key(Call("inference", "Generate", request), "auto") == DIGEST
    assert call_key(Call("inference", "StreamGenerate", stream), "image") == DIGEST
    assert call_key(Call("inference", "Generate", request, moved=2), "auto") == f"{DIGEST}.2"
    assert call_key(Call("inference", "Generate", build_request("a"), moved=2), "image") == ""
    asked = media_pb2.GetMediaRequest(media_id="m")
    assert call_key(Call("media", "GetMedia", asked, moved=2), "auto") == "m", "a file does not move by itself"
    odd = media_pb2.GetMediaRequest(media_id="n\u00e4me\n")
    assert call_key(Call("media", "GetMedia", odd), "auto") == hashlib.sha256(odd.media_id.encode()).hexdigest()
    upload = Call("media", "UploadMedia", lambda: iter(()), affinity=DIGEST)
    assert call_key(upload, "auto") == DIGEST
    batches = {
        call_key(Call("batch", "CreateBatch", lambda: iter(())), "auto"),
        call_key(Call("batch", "GetBatch", batch_pb2.GetBatchRequest(batch_id="b")), "image"),
    }
    assert len(batches) == 1 and "" not in batches
    assert call_key(Call("model", "GetModel", model_pb2.GetModelRequest()), "auto") == ""


@pytest.mark.parametrize(
    ("given", "target"),
    [
        ("10.0.0.1:1,10.0.0.2:2", "ipv4:10.0.0.1:1,10.0.0.2:2"),
        (["10.0.0.1:1", "10.0.0.2:2"], "ipv4:10.0.0.1:1,10.0.0.2:2"),
        (("[::1]:1", "[::2]:2"), "ipv6:[::1]:1,[::2]:2"),
        (["host:1"], "host:1"),
        ("dns:///saccade:50051", "dns:///saccade:50051"),
        ("ipv4:10.0.0.1:1,10.0.0.2:2", "ipv4:10.0.0.1:1,10.0.0.2:2"),
    ],
)
def test_addresses(given: Any, target: str) -> None:
    settings = make_settings(given, **UNSET)
    assert settings.address == target
    balanced = "," in target
    assert ("round_robin" in dict(settings.all_channel_options()).get("grpc.service_config", "")) == balanced
    assert pickle.loads(pickle.dumps(settings)) == settings


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ({"address": []}, "address"),
        ({"address": ["10.0.0.1:1", "host:2"]}, "'host:2'"),
        ({"address": "10.0.0.1:1,"}, "address"),
        ({"address": ["10.0.0.1:1", "[::1]:2"]}, "IPv4 or IPv6"),
        ({"address": ["10.0.0.1:1", "10.0.0.2:70000"]}, "70000"),
        ({"address": ["10.0.0.1:1", "10.0.0.2:2"], "tls": True}, "server_name"),
        ({"affinity": "sticky"}, "'sticky'"),
        ({"affinity": "auto", "channel_options": {"grpc.lb_policy_name": "round_robin"}}, "grpc.lb_policy_name"),
    ],
)
def test_settings_that_cannot_be_are_named(given: dict[str, Any], named: str) -> None:
    with pytest.raises(errors.InvalidArgument) as caught:
        saccade.Client(**{"address": "host:1", **given})
    assert named in str(caught.value)


def test_an_old_grpc_is_an_error_and_not_a_call_that_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grpc, "__version__", "1.69.0")
    with saccade.Client("127.0.0.1:1", affinity="auto") as client, pytest.raises(errors.FailedPrecondition) as caught:
        client.models()
    assert "1.70" in str(caught.value) and "1.69.0" in str(caught.value)


# -- over replicas -----------------------------------------------------------------------------------------------------


@pytest.fixture
def scripts() -> Iterator[tuple[list[Script], list[ExitStack], str]]:
    """Three replicas, what ends each, and their addresses."""
    scripts = [Script(), Script(), Script()]
    ends = [ExitStack() for _ in scripts]
    addresses = [end.enter_context(serve(script)) for script, end in zip(scripts, ends, strict=True)]
    yield scripts, ends, ",".join(addresses)
    for end in ends:
        end.close()


Ask = Callable[[str, list[bytes]], None]


@pytest.fixture(params=["sync", "stream", "asyncio"])
def ask(request: pytest.FixtureRequest) -> Ask:
    """`ask(address, images)`: a request for each image, by a new client."""
    options: dict[str, Any] = {"affinity": "auto", "timeout": 20}

    def by_thread(address: str, images: list[bytes]) -> None:
        with saccade.Client(address, **options) as client:
            for image in images:
                if request.param == "stream":
                    assert client.stream("?", images=[image]).final().text
                else:
                    assert client.generate("?", images=[image]).text

    async def by_task(address: str, images: list[bytes]) -> None:
        async with saccade.AsyncClient(address, **options) as client:
            for image in images:
                assert (await client.generate("?", images=[image])).text

    if request.param == "asyncio":
        return lambda address, images: asyncio.run(by_task(address, images))
    return by_thread


def images_of(script: Script) -> set[bytes]:
    return {
        request.prompt.images[0].data or request.chat.messages[0].parts[0].image.data for request in script.requests
    }


@needs_ring
def test_an_image_stays_with_its_replica_and_only_a_dead_ones_images_move(
    ask: Ask, scripts: tuple[list[Script], list[ExitStack], str]
) -> None:
    replicas, ends, address = scripts
    images = [b"image %d" % number for number in range(60)]
    ask(address, images)
    before = [images_of(script) for script in replicas]
    assert sum(map(len, before)) == 60 and all(before), "each image at one replica, each replica has some"
    ask(address, images)
    assert [images_of(script) for script in replicas] == before, "another client makes the same choice"
    ends[1].close()
    ask(address, images)
    after = [images_of(script) for script in (replicas[0], replicas[2])]
    assert before[0] <= after[0] and before[2] <= after[1]
    assert (after[0] - before[0]) | (after[1] - before[2]) == before[1]
    assert not (after[0] - before[0]) & (after[1] - before[2])


@needs_ring
@pytest.mark.parametrize("reason", ["QUEUE_FULL", "DRAINING", "ENGINE_DIED"])
def test_a_replica_that_rejects_a_call_is_not_asked_again(
    ask: Ask, scripts: tuple[list[Script], list[ExitStack], str], reason: str
) -> None:
    replicas, _, address = scripts
    ask(address, [FIRST])
    (home,) = [script for script in replicas if script.requests]
    home.failures += [Failure(grpc.StatusCode.UNAVAILABLE, reason=reason, retry_after=0.001) for _ in range(40)]
    ask(address, [FIRST])
    assert len(home.failures) >= 30, "a few attempts may be hashed to the same replica"
    assert sum(len(script.requests) for script in replicas if script is not home) == 1
    home.failures.clear()
    ask(address, [FIRST])
    assert sum(len(script.requests) for script in replicas if script is not home) == 1, "later calls return to it"


@needs_ring
def test_a_rate_limit_is_no_reason_to_ask_another_replica(
    ask: Ask, scripts: tuple[list[Script], list[ExitStack], str]
) -> None:
    replicas, _, address = scripts
    for script in replicas:
        limit = Failure(grpc.StatusCode.RESOURCE_EXHAUSTED, reason="RATE_LIMITED", retry_after=0.001)
        script.failures.append(limit)
    ask(address, [FIRST])
    assert sorted(len(script.requests) for script in replicas) == [0, 0, 2]


@needs_ring
def test_without_affinity_listed_addresses_take_turns(scripts: tuple[list[Script], list[ExitStack], str]) -> None:
    replicas, _, address = scripts
    with saccade.Client(address, timeout=20) as client:
        for script in replicas:  # all are connected
            while not script.requests:
                client.generate("?")
            script.requests.clear()
        for script in replicas:
            script.requests.clear()
        for _ in range(9):
            client.generate("?", images=[FIRST])
    assert [len(script.requests) for script in replicas] == [3, 3, 3]


@needs_ring
def test_the_command_line_has_addresses_and_affinity(
    scripts: tuple[list[Script], list[ExitStack], str], tmp_path: Any
) -> None:
    replicas, _, address = scripts
    (tmp_path / "a.png").write_bytes(FIRST)
    command = [sys.executable, "-m", "saccade", "ask", "--server", address, "--affinity", "auto"]
    for question in ("one?", "two?", "three?"):
        subprocess.run([*command, str(tmp_path / "a.png"), question], check=True, env=os.environ, capture_output=True)
    assert sorted(len(script.requests) for script in replicas) == [0, 0, 3]


def test_calls_that_belong_to_one_server_need_affinity(capsys: pytest.CaptureFixture[str]) -> None:
    two = "10.0.0.1:1,10.0.0.2:1"
    for client in (saccade.Client(two), saccade.AsyncClient(two)):
        with pytest.raises(errors.InvalidArgument, match="one server"):
            _ = client.batches
    assert saccade.Client(two, affinity="image").batches
    assert main(["top", "--server", two]) == 1
    assert "--server: expected one address" in capsys.readouterr().err
