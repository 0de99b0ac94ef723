"""Files that the client uploads automatically, when the next server has dropped them or never had them."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import grpc
import pytest
from fake_server import Failure, Script, needs_ring, serve

import saccade
from saccade import errors
from saccade._core.affinity import files
from saccade._core.images import image_message
from saccade._core.requests import build_request
from saccade._core.retrying import Deadline
from saccade._core.steps import Call, Send, Steps, with_retries
from saccade._core.uploads import Uploads
from saccade._transport.aio import _ServersStatus
from saccade.v1 import inference_pb2, media_pb2, media_pb2_grpc

Code = grpc.StatusCode
LARGE, OTHER, SMALL = b"l" * 50, b"o" * 60, b"s" * 9
ROUND_ROBIN = {"grpc.lb_policy_name": "round_robin"}


class Replica(media_pb2_grpc.MediaServiceServicer):
    """A server with its own uploads. It refuses requests that name other uploads, and files larger than
    `inline_bytes`."""

    def __init__(self) -> None:
        self.held: dict[str, bytes] = {}
        self.script = Script()
        self.seen: list[list[str]] = []
        """For each request, how its files arrived: "data", "media_id"."""
        self.inline_bytes = 10_000
        self.full = False
        self.uploads = self.refused = 0
        self.script.see = self._see  # type: ignore[method-assign]

    def _see(self, request: inference_pb2.GenerateRequest, context: grpc.ServicerContext) -> None:
        self.script.requests.append(request)
        self.seen.append([str(file.WhichOneof("source")) for file in files(request)])
        for file in files(request):
            if file.media_id and file.media_id not in self.held:
                Failure(Code.NOT_FOUND, f"no {file.media_id}", reason="MEDIA_NOT_FOUND").abort(context)
            if len(file.data) > self.inline_bytes:
                Failure(Code.RESOURCE_EXHAUSTED, "too large", reason="MESSAGE_TOO_LARGE").abort(context)

    def GetMedia(self, request: media_pb2.GetMediaRequest, context: grpc.ServicerContext) -> media_pb2.GetMediaResponse:
        if request.media_id not in self.held:
            Failure(Code.NOT_FOUND, reason="MEDIA_NOT_FOUND").abort(context)
        return media_pb2.GetMediaResponse(media=self._media(request.media_id))

    def UploadMedia(
        self, request_iterator: Iterator[media_pb2.UploadMediaRequest], context: grpc.ServicerContext
    ) -> media_pb2.UploadMediaResponse:
        if self.full:
            self.refused += 1
            Failure(Code.RESOURCE_EXHAUSTED, reason="MEDIA_SPOOL_FULL", retry_after=0.05).abort(context)
        data = b"".join(message.chunk for message in request_iterator)
        self.uploads += 1
        self.held[hashlib.sha256(data).hexdigest()] = data
        return media_pb2.UploadMediaResponse(media=self._media(hashlib.sha256(data).hexdigest()))

    def _media(self, media_id: str) -> media_pb2.Media:
        media = media_pb2.Media(media_id=media_id, size_bytes=len(self.held[media_id]))
        media.expire_time.FromSeconds(2**33)
        return media


def served(replica: Replica, ends: ExitStack, options: tuple[tuple[str, Any], ...] = ()) -> str:
    def add_port(server: grpc.Server) -> int:
        media_pb2_grpc.add_MediaServiceServicer_to_server(replica, server)
        port: int = server.add_insecure_port("127.0.0.1:0")
        return port

    return ends.enter_context(serve(replica.script, options=options, add_port=add_port))


@pytest.fixture
def replicas() -> Iterator[tuple[list[Replica], str]]:
    """Two replicas, and one target for both."""
    with ExitStack() as ends:
        both = [Replica(), Replica()]
        yield both, "ipv4:" + ",".join(served(replica, ends) for replica in both)


Ask = Callable[..., list[saccade.Generation]]


@pytest.fixture(params=["generate", "stream", "map", "async generate", "async stream", "async map"])
def ask(request: pytest.FixtureRequest) -> Ask:
    """`ask(address, times, **options)`: the answers, sequentially; uploads what is larger than 20 bytes."""
    options: dict[str, Any] = {"timeout": 20, "channel_options": ROUND_ROBIN}

    def by_thread(address: str, times: int, **given: Any) -> list[saccade.Generation]:
        with saccade.Client(address, **options) as first:
            client = first.with_options(upload_above=20)
            match request.param:
                case "generate":
                    return [client.generate("?", **given) for _ in range(times)]
                case "stream":
                    return [client.stream("?", **given).final() for _ in range(times)]
            made = [{"prompt": "?", **given} for _ in range(times)]
            return [outcome.result() for outcome in client.map(made, concurrency=1)]

    async def by_task(address: str, times: int, **given: Any) -> list[saccade.Generation]:
        async with saccade.AsyncClient(address, **options) as first:
            client = first.with_options(upload_above=20)
            match request.param:
                case "async generate":
                    return [await client.generate("?", **given) for _ in range(times)]
                case "async stream":
                    return [await client.stream("?", **given).final() for _ in range(times)]
            made = [{"prompt": "?", **given} for _ in range(times)]
            return [outcome.result() async for outcome in client.map(made, concurrency=1)]

    if "async" in request.param:
        return lambda *arguments, **given: asyncio.run(by_task(*arguments, **given))
    return by_thread


@pytest.mark.parametrize("limit", [2**18, 2**20])
def test_a_file_fits_the_messages_of_a_server_whose_limit_is_a_round_number(limit: int) -> None:
    replica = Replica()
    replica.inline_bytes = 0
    file = b"x" * 3 * 2**20
    with ExitStack() as ends:
        address = served(replica, ends, options=(("grpc.max_receive_message_length", limit),))
        client = ends.enter_context(saccade.Client(address, timeout=20))
        media = client.media.upload(file)
        assert replica.held == {media.media_id: file}
        assert client.generate("?", images=[file]).text == "a red square" and replica.seen == [["media_id"]]


def test_two_replicas_that_share_nothing(ask: Ask, replicas: tuple[list[Replica], str]) -> None:
    both, address = replicas
    answers = ask(address, 6, images=[LARGE, SMALL, OTHER])
    assert [answer.text for answer in answers] == ["a red square"] * 6
    seen = [request for replica in both for request in replica.seen]
    assert ["data", "data", "data"] in seen, "in the request where the replica has it not"
    assert ["media_id", "data", "media_id"] in seen and both[0].seen and both[1].seen


def test_files_that_fit_no_message_are_uploaded_to_each_replica(ask: Ask, replicas: tuple[list[Replica], str]) -> None:
    both, address = replicas
    for replica in both:
        replica.inline_bytes = 20
    assert [answer.text for answer in ask(address, 6, images=[LARGE])] == ["a red square"] * 6
    assert sum(replica.uploads for replica in both) <= 12
    for replica in both:  # retries end if no replica keeps uploads
        replica.held = type("Forgetful", (dict,), {"__contains__": lambda self, key: False})()
    with pytest.raises(errors.NotFound):
        ask(address, 1, images=[LARGE])


def test_an_id_of_the_callers_own_that_nobody_knows_is_an_error(ask: Ask, replicas: tuple[list[Replica], str]) -> None:
    both, address = replicas
    for images in ([saccade.Media("f" * 64, 1, 1, 1, "PNG", 0.0)], [LARGE, saccade.Media("f" * 64, 1, 1, 1, "PNG", 0)]):
        with pytest.raises(errors.NotFound) as caught:
            ask(address, 1, images=images)
        assert caught.value.reason == "MEDIA_NOT_FOUND"
        assert len(both[0].seen) + len(both[1].seen) <= 3
        both[0].seen.clear()
        both[1].seen.clear()


def test_a_full_spool_is_not_waited_for(ask: Ask, replicas: tuple[list[Replica], str]) -> None:
    both, address = replicas
    for replica in both:
        replica.full = True
    ask(address, 2, images=[LARGE])
    assert sum(replica.refused for replica in both) == 2, "once for each request"
    assert [seen for replica in both for seen in replica.seen] == [["data"], ["data"]]


def test_what_a_server_says_to_an_upload_that_it_stops_reading_is_told() -> None:
    """While a message is being written, grpc.aio sometimes reports INTERNAL instead of the server's status."""

    async def refusals(address: str) -> set[str]:
        async with saccade.AsyncClient(address, timeout=60, max_retries=0) as client:

            async def one_after_the_other(worker: int) -> set[str]:
                told = set()
                for number in range(28):
                    with pytest.raises(errors.SaccadeError) as caught:
                        await client.media.upload(b"file %d.%d" % (worker, number))
                    told.add(f"{type(caught.value).__name__} {caught.value.reason} {caught.value.message}")
                return told

            return set().union(*await asyncio.gather(*map(one_after_the_other, range(32))))

    with ExitStack() as ends:
        replica = Replica()
        replica.full = True
        told = asyncio.run(refusals(served(replica, ends)))
    assert told == {"RateLimited MEDIA_SPOOL_FULL refused"}


def test_an_upload_whose_status_is_lost_is_tried_again() -> None:
    class Ended:
        """A call that has reported to its callbacks only the status of the failed write."""

        def add_done_callback(self, callback: Callable[[Any], None]) -> None:
            callback(self)

        async def details(self) -> str:
            return "Internal error from Core"

    nothing = grpc.aio.Metadata()
    status = _ServersStatus(Ended())
    lost = status.instead_of(grpc.aio.AioRpcError(Code.INTERNAL, nothing, nothing, "Internal error from Core"))
    error = errors.error_from_rpc(lost)
    assert isinstance(error, errors.Unavailable) and error.retryable and "status was lost" in str(error)
    other = grpc.aio.AioRpcError(Code.INTERNAL, nothing, nothing, "anything else")
    assert status.instead_of(other) is other


@pytest.mark.parametrize("kind", ["sync", "async"])
@pytest.mark.parametrize("n", [1, 2])
def test_a_stream_goes_on_though_the_restart_has_forgotten_its_files(kind: str, n: int) -> None:
    with ExitStack() as ends:
        replica = Replica()
        address = served(replica, ends)
        whole = [f"word{i} " for i in range(8)]

        def answer(request: Any) -> list[str]:
            if len(replica.script.requests) == 1:
                replica.held.clear()  # as a restart with the default spool does
            return whole

        replica.script.answer, replica.script.break_after = answer, [3]

        async def by_asyncio() -> saccade.Generation:
            async with saccade.AsyncClient(address, timeout=20) as first:
                return await first.with_options(upload_above=20).stream("?", images=[LARGE], n=n).final()

        if kind == "sync":
            with saccade.Client(address, timeout=20) as first:
                answered = first.with_options(upload_above=20).stream("?", images=[LARGE], n=n).final()
        else:
            answered = asyncio.run(by_asyncio())
        assert answered.text == "".join(whole) and answered.token_ids == list(range(8))
        assert replica.seen == [["media_id"], ["media_id"], ["data"]]
        assert [len(r.continued_token_ids) for r in replica.script.requests] == [0, *[3 if n == 1 else 0] * 2]


# -- without a server --------------------------------------------------------------------------------------------------

NOT_FOUND = errors.NotFound("no", reason="MEDIA_NOT_FOUND")
TOO_LARGE = errors.MessageTooLarge("too large")


def uploaded(above: int | None = 20, refuse: Exception | None = None) -> tuple[Uploads, Any, list[Call]]:
    request = build_request("?", images=[LARGE, SMALL])
    calls: list[Call] = []
    uploads = Uploads(request, above)
    drive(uploads.steps(), lambda call: made(calls, call, refuse))
    return uploads, request, calls


def drive(steps: Steps[None], make: Callable[[Call], Any]) -> None:
    """Answers each attempt with the result of `make` for its call."""
    actions = with_retries(steps, 0, Deadline(None))
    try:
        action = next(actions)
        while True:
            assert isinstance(action, Send)
            try:
                answer = make(action.call)
            except errors.SaccadeError as error:
                action = actions.throw(error)
            else:
                action = actions.send(answer)
    except StopIteration:
        return


def made(calls: list[Call], call: Call, refuse: Exception | None = None) -> Any:
    calls.append(call)
    if call.method == "GetMedia":
        raise NOT_FOUND
    if refuse is not None:
        raise refuse
    media_id = next(iter(call.message())).header.media_id
    return media_pb2.UploadMediaResponse(media=media_pb2.Media(media_id=media_id))


def how(request: Any) -> list[str]:
    return [file.WhichOneof("source") for file in files(request)]


def test_what_is_uploaded_and_what_is_not() -> None:
    assert how(uploaded(49)[1]) == ["media_id", "data"] and how(uploaded(50)[1]) == ["data", "data"]
    assert uploaded(None)[2] == [] and how(uploaded(0)[1]) == ["media_id", "media_id"]
    full = errors.RateLimited("full", reason="MEDIA_SPOOL_FULL")
    for refusal in (full, errors.Unimplemented("no"), errors.PermissionDenied("not with this key")):
        uploads, request, _ = uploaded(refuse=refusal)
        assert how(request) == ["data", "data"] and uploads.recovery(NOT_FOUND) is None
    for refusal in (errors.RateLimited("slow", reason="RATE_LIMITED"), errors.Unauthenticated("who?")):
        with pytest.raises(type(refusal)):
            uploaded(refuse=refusal)


def test_only_errors_about_uploads_are_recovered_from() -> None:
    uploads, request, calls = uploaded()
    for error in (errors.NotFound("no model", reason="NOT_FOUND"), TOO_LARGE, errors.Unavailable("gone")):
        assert uploads.recovery(error) is None
    recovery = uploads.recovery(NOT_FOUND)
    assert recovery is not None
    drive(recovery, lambda call: made(calls, call))
    assert how(request) == ["data", "data"] and [file.data for file in files(request)] == [LARGE, SMALL]
    assert uploads.recovery(NOT_FOUND) is None, "it names nothing of ours any more"


def test_what_is_too_large_is_uploaded_again_without_asking_and_not_for_ever() -> None:
    uploads, request, calls = uploaded()
    drive(uploads.recovery(NOT_FOUND) or iter(()), lambda call: made(calls, call))  # type: ignore[arg-type]
    rounds = 0
    error: saccade.SaccadeError = TOO_LARGE
    while (recovery := uploads.recovery(error)) is not None:
        calls.clear()
        drive(recovery, lambda call: made(calls, call))
        assert [call.method for call in calls] == ["UploadMedia"] and how(request) == ["media_id", "data"]
        error, rounds = NOT_FOUND, rounds + 1
    assert rounds == 6


def test_what_upload_does_not_take(client: saccade.Client, address: str, script: Script) -> None:
    """None of these has bytes of its own, so there would be nothing to upload."""
    media = saccade.Media("f" * 64, 1, 1, 1, "PNG", 0.0)
    for wrong, message in (
        ("https://example.org/a.png", "fetched by the server"), ("HTTP://example.org/a.png", "fetched by the server"),
        (media, "uploaded already"), (b"", "empty"), (image_message(b""), "empty"),
    ):  # fmt: skip
        with pytest.raises(errors.InvalidArgument, match=message):
            client.media.upload(wrong)

        async def main(wrong: Any = wrong, message: str = message) -> None:
            async with saccade.AsyncClient(address) as other:
                with pytest.raises(errors.InvalidArgument, match=message):
                    await other.media.upload(wrong)

        asyncio.run(main())


@needs_ring
def test_with_affinity_files_are_uploaded_to_the_replica_that_gets_the_request(
    replicas: tuple[list[Replica], str],
) -> None:
    both, address = replicas
    with saccade.Client(address, timeout=20, affinity="auto") as first:
        client = first.with_options(upload_above=20)
        for number in range(12):
            client.generate("?", images=[b"small %d" % number, LARGE, b"large enough to be uploaded %d" % number])
    seen = [request for replica in both for request in replica.seen]
    assert seen == [["data", "media_id", "media_id"]] * 12 and both[0].seen and both[1].seen
