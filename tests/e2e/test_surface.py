"""The remaining interface of a real server: tokenize, cancel, coalescing, media, and the form of every error."""

from __future__ import annotations

import asyncio
import logging
import os
import queue
import threading
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest
from google.rpc import error_details_pb2, status_pb2
from images import png
from keys import fails
from rpc import Stubs, ask, connect, reason, upload
from running import RunningServer
from served import IMAGE_TOKEN

from saccade.v1 import admin_pb2, inference_pb2, media_pb2, model_pb2, types_pb2


@pytest.fixture
def stubs(server: RunningServer) -> Iterator[Stubs]:
    with connect(server.address) as stubs:
        yield stubs
    server.drained()
    server.server.spool.check_integrity()


# -- tokenize ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [0, 1, 3])
def test_tokenize_tells_what_the_prompt_costs(stubs: Stubs, count: int) -> None:
    images = [{"data": png(60 + i)} for i in range(count)]
    request = ask("what is it?", images=images)
    told = stubs.inference.Tokenize(inference_pb2.TokenizeRequest(prompt=request.prompt))
    usage = stubs.inference.Generate(request).samples[0].usage
    assert (told.prompt_tokens, told.image_tokens) == (usage.prompt_tokens, usage.image_tokens)
    assert len(told.tokens_per_image) == count and sum(told.tokens_per_image) == told.image_tokens
    assert list(told.token_ids).count(IMAGE_TOKEN) == count
    # the ids, sent as a prompt, are the same prompt
    again = inference_pb2.GenerateRequest(sampling=request.sampling)
    again.tokens.ids.extend(told.token_ids)
    again.tokens.images.extend(request.prompt.images)
    assert (
        stubs.inference.Generate(again).samples[0].token_ids == stubs.inference.Generate(request).samples[0].token_ids
    )


def test_tokenize_refuses_what_generate_would(stubs: Stubs) -> None:
    request = inference_pb2.TokenizeRequest()
    assert fails(stubs.inference.Tokenize, request)[0] == "INVALID_ARGUMENT"
    request.prompt.text = "x" * 5000
    assert fails(stubs.inference.Tokenize, request) == ("INVALID_ARGUMENT", "CONTEXT_LENGTH_EXCEEDED")


# -- cancel ------------------------------------------------------------------------------------------------------------


def test_cancel_ends_a_stream_with_what_it_has(text_model: Path) -> None:
    with RunningServer(str(text_model), max_seqs=2, max_len=100_000) as long, connect(long.address) as stubs:
        request = ask(max_tokens=500, request_id="to-be-cancelled")
        whole = list(stubs.inference.Generate(request).samples[0].token_ids)
        request.sampling.n, request.sampling.max_tokens = 2, 99_000
        call = stubs.inference.StreamGenerate(inference_pb2.StreamGenerateRequest(request=request))
        assert next(call).started.request_id == "to-be-cancelled"
        first = next(call)
        assert first.WhichOneof("event") == "delta"
        stubs.inference.CancelGeneration(inference_pb2.CancelGenerationRequest(request_id="to-be-cancelled"))
        rest = [first, *call]
    finished = [r.finished for r in rest if r.WhichOneof("event") == "finished"]
    assert sorted(f.index for f in finished) == [0, 1]
    assert {f.finish_reason for f in finished} == {types_pb2.FINISH_REASON_ABORTED}
    ids = [i for r in rest if r.WhichOneof("event") == "delta" and r.delta.index == 0 for i in r.delta.token_ids]
    assert len(ids) < 99_000 and ids[:500] == whole[: len(ids)]
    assert call.code() is grpc.StatusCode.OK


def test_cancelling_what_is_not_there(stubs: Stubs) -> None:
    request = inference_pb2.CancelGenerationRequest(request_id="nobody")
    assert fails(stubs.inference.CancelGeneration, request)[0] == "NOT_FOUND"


# -- coalescing --------------------------------------------------------------------------------------------------------


def test_chunked_streams_say_the_same_in_fewer_messages(stubs: Stubs) -> None:
    request = inference_pb2.StreamGenerateRequest(request=ask(max_tokens=40))
    plain = [r.delta for r in stubs.inference.StreamGenerate(request) if r.WhichOneof("event") == "delta"]
    request.chunk_tokens = 16
    chunked = [r.delta for r in stubs.inference.StreamGenerate(request) if r.WhichOneof("event") == "delta"]
    assert all(len(d.token_ids) >= 16 for d in chunked[:-1]) and len(chunked) <= 3
    assert "".join(d.text for d in chunked) == "".join(d.text for d in plain)
    assert [d.sequence for d in chunked] == list(range(len(chunked)))
    request.max_chunk_delay.FromNanoseconds(1)
    hurried = [r.delta for r in stubs.inference.StreamGenerate(request) if r.WhichOneof("event") == "delta"]
    assert [i for d in hurried for i in d.token_ids] == [i for d in plain for i in d.token_ids]
    request.max_chunk_delay.FromSeconds(-1)
    assert fails(lambda: list(stubs.inference.StreamGenerate(request)))[0] == "INVALID_ARGUMENT"


def test_a_chunked_stream_that_is_left_frees_everything(server: RunningServer, stubs: Stubs) -> None:
    request = inference_pb2.StreamGenerateRequest(request=ask(max_tokens=500), chunk_tokens=400)
    call = stubs.inference.StreamGenerate(request)
    assert next(call).WhichOneof("event") == "started"
    call.cancel()
    assert server.drained()["decoder"]["used_slots"] == 0


# -- media -------------------------------------------------------------------------------------------------------------


def test_an_uploaded_image_answers_like_one_that_is_sent(stubs: Stubs) -> None:
    data = png(77, (64, 48))
    media = stubs.media.UploadMedia(upload(data, chunk=1000)).media
    assert (media.width, media.height, media.format) == (64, 48, "PNG")
    assert stubs.media.GetMedia(media_pb2.GetMediaRequest(media_id=media.media_id)).media == media
    by_id = stubs.inference.Generate(ask(images=[{"media_id": media.media_id}])).samples[0]
    by_value = stubs.inference.Generate(ask(images=[{"data": data}])).samples[0]
    assert by_id.token_ids == by_value.token_ids and by_id.usage.image_tokens == by_value.usage.image_tokens > 0
    stubs.media.DeleteMedia(media_pb2.DeleteMediaRequest(media_id=media.media_id))
    gone = ("NOT_FOUND", "MEDIA_NOT_FOUND")
    assert fails(stubs.media.GetMedia, media_pb2.GetMediaRequest(media_id=media.media_id)) == gone
    assert fails(stubs.inference.Generate, ask(images=[{"media_id": media.media_id}])) == gone


def test_uploads_that_make_no_sense(stubs: Stubs) -> None:
    data = png(78)
    chunk_first = iter([media_pb2.UploadMediaRequest(chunk=data)])
    assert fails(stubs.media.UploadMedia, chunk_first)[0] == "INVALID_ARGUMENT"
    assert fails(stubs.media.UploadMedia, iter([]))[0] == "INVALID_ARGUMENT"
    assert fails(stubs.media.UploadMedia, upload(data, size=len(data) + 1))[0] == "INVALID_ARGUMENT"
    assert fails(stubs.media.UploadMedia, upload(data, size=10**12)) == ("INVALID_ARGUMENT", "IMAGE_TOO_LARGE")
    assert fails(stubs.media.UploadMedia, upload(data, media_id="0" * 64)) == ("INVALID_ARGUMENT", "MEDIA_DAMAGED")
    assert fails(stubs.media.UploadMedia, upload(b"text")) == ("INVALID_ARGUMENT", "IMAGE_DECODE_FAILED")


def test_an_upload_that_breaks_off_leaves_nothing(server: RunningServer, stubs: Stubs) -> None:
    data, before = png(79), server.server.spool.used_bytes
    reached, stop = threading.Event(), threading.Event()

    def broken() -> Iterator[media_pb2.UploadMediaRequest]:
        yield from list(upload(data))[:1]
        reached.set()
        stop.wait(30)

    call = stubs.media.UploadMedia.future(broken())
    assert reached.wait(30)
    call.cancel()
    stop.set()

    server.run(spool_holds(server, before))


async def spool_holds(server: RunningServer, size: int) -> None:
    async with asyncio.timeout(30):
        while server.server.spool.used_bytes != size:
            await asyncio.sleep(0.005)


def test_what_has_expired_leaves_the_disk_by_itself(model: Path, tmp_path: Path) -> None:
    with RunningServer(str(model), max_seqs=1, max_len=64, media_ttl=0.2, media_dir=str(tmp_path)) as small:
        with connect(small.address) as stubs:
            stubs.media.UploadMedia(upload(png(81)))
        small.run(spool_holds(small, 0))
    assert not list(tmp_path.glob("anyone/*"))


def test_a_spool_without_room_says_so(model: Path, tmp_path: Path) -> None:
    with RunningServer(str(model), max_seqs=1, max_len=64, media_bytes=1000, media_dir=str(tmp_path)) as small:
        with connect(small.address) as stubs:
            full = ("RESOURCE_EXHAUSTED", "MEDIA_SPOOL_FULL")
            assert fails(stubs.media.UploadMedia, upload(png(80, (64, 64)))) == full
            kept = stubs.media.UploadMedia(upload(png(80, (8, 8)))).media.media_id
    assert [path.name for path in tmp_path.glob("anyone/*")] == [kept]


def test_urls_are_not_fetched(stubs: Stubs) -> None:
    request = ask(images=[{"uri": "https://example.com/a.png"}])
    assert fails(stubs.inference.Generate, request) == ("PERMISSION_DENIED", "MEDIA_HOST_DENIED")


# -- failures ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", ["Generate", "StreamGenerate", "Tokenize"])
def test_malformed_messages_are_the_senders_fault(server: RunningServer, method: str) -> None:
    with grpc.insecure_channel(server.address) as channel:
        path = f"/saccade.v1.InferenceService/{method}"
        call = channel.unary_stream(path) if method == "StreamGenerate" else channel.unary_unary(path)
        for garbage in (b"\xff", b"\x0a\x7f", os.urandom(64) + b"\xff"):
            with pytest.raises(grpc.RpcError) as error:
                list(call(garbage)) if method == "StreamGenerate" else call(garbage)
            assert reason(error.value) == ("INVALID_ARGUMENT", "MALFORMED_MESSAGE")


def test_a_failure_has_an_id_even_if_the_request_had_none(
    stubs: Stubs, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    lines: queue.SimpleQueue[logging.LogRecord] = queue.SimpleQueue()
    handler, access = logging.Handler(), logging.getLogger("service.access")
    handler.emit = lines.put  # type: ignore[method-assign]
    monkeypatch.setattr(access, "handlers", [handler])
    caplog.set_level(logging.INFO, "service.access")
    with pytest.raises(grpc.RpcError) as error:
        stubs.inference.Generate(inference_pb2.GenerateRequest())
    line = lines.get(timeout=30).getMessage()  # comes after the answer
    status = status_pb2.Status.FromString(dict(error.value.trailing_metadata())["grpc-status-details-bin"])
    named = error_details_pb2.RequestInfo()
    assert any(detail.Unpack(named) for detail in status.details) and len(named.request_id) == 16
    assert f'request_id="{named.request_id}"' in line


def test_methods_that_do_not_exist(server: RunningServer) -> None:
    with grpc.insecure_channel(server.address) as channel:
        with pytest.raises(grpc.RpcError) as error:
            channel.unary_unary("/saccade.v1.InferenceService/Detokenize")(b"")
    assert error.value.code() is grpc.StatusCode.UNIMPLEMENTED


def test_long_errors_keep_their_code(stubs: Stubs) -> None:
    """Trailers larger than the peer's limit would turn the status into RESOURCE_EXHAUSTED."""
    for text in ("x" * 100_000, "\N{GRINNING FACE}" * 20_000, "\n" * 50_000):
        assert fails(stubs.inference.Generate, ask(model=text))[0] == "NOT_FOUND"


def test_a_bug_leaves_no_words(server: RunningServer, stubs: Stubs, caplog: pytest.LogCaptureFixture) -> None:
    """A real exception in the middle of a call: the client only gets the request id, and the log has everything
    else."""

    async def breaks(spec: object, salt: bytes) -> object:
        raise KeyError("the secret of the house")

    resolve, server.server.frontend.resolve = server.server.frontend.resolve, breaks  # type: ignore[assignment]
    try:
        for call in (
            lambda r: stubs.inference.Generate(r),
            lambda r: list(stubs.inference.StreamGenerate(inference_pb2.StreamGenerateRequest(request=r))),
        ):
            with pytest.raises(grpc.RpcError) as error:
                call(ask(images=[{"media_id": "0" * 64}], request_id="the-id"))
            assert reason(error.value) == ("INTERNAL", "INTERNAL")
            assert "secret" not in (error.value.details() or "") + str(error.value.trailing_metadata())
    finally:
        server.server.frontend.resolve = resolve
    assert "the secret of the house" in caplog.text and "the-id" in caplog.text


def test_a_message_budget_refuses_and_recovers(text_model: Path) -> None:
    with RunningServer(str(text_model), max_seqs=1, max_len=64, max_inflight_bytes=2000) as small:
        with connect(small.address) as stubs:
            big = ask("x" * 4000)
            assert fails(stubs.inference.Generate, big) == ("UNAVAILABLE", "QUEUE_FULL")
            assert stubs.inference.Generate(ask()).samples
        small.drained()


def test_a_reader_that_stops_reading_is_dropped(text_model: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Logprobs make an answer of many megabytes, which flow control blocks; the next request gets the slot."""
    caplog.set_level(logging.INFO, "service.access")
    with RunningServer(str(text_model), max_seqs=1, max_len=900, stall_timeout=0.2) as small:
        request = ask(max_tokens=850)
        request.sampling.logprobs = 100
        options = [("grpc.http2.lookahead_bytes", 1024), ("grpc.http2.bdp_probe", 0)]
        with grpc.insecure_channel(small.address, options) as channel:
            calls = [
                Stubs(channel).inference.StreamGenerate(
                    inference_pb2.StreamGenerateRequest(request=request), timeout=60
                )
                for _ in range(2)
            ]
            for call in calls:
                next(call)
            small.drained()  # although no reader takes messages and both calls still exist
            assert caplog.text.count("a client has not read its stream for 0.2 s") == 2
            assert not any(call.done() for call in calls)
            assert caplog.text.count('code="DEADLINE_EXCEEDED" reason="SLOW_READER"') == 2
            for call in calls:  # a late reader first gets the messages that were in flight, then the error
                assert fails(list, call) == ("DEADLINE_EXCEEDED", "SLOW_READER")


# -- admin -------------------------------------------------------------------------------------------------------------


def test_admin_is_closed_unless_it_is_opened(stubs: Stubs) -> None:
    for call, request in (
        (stubs.admin.Drain, admin_pb2.DrainRequest()),
        (stubs.admin.FlushCache, admin_pb2.FlushCacheRequest()),
        (stubs.admin.GetLoads, admin_pb2.GetLoadsRequest()),
        (stubs.admin.UpdateLogLevel, admin_pb2.UpdateLogLevelRequest(level="debug")),
    ):
        assert fails(call, request)[0] == "PERMISSION_DENIED"


def test_an_operators_levers(model: Path) -> None:
    with (
        RunningServer(str(model), max_seqs=2, max_len=100_000, admin=True) as running,
        connect(running.address) as stubs,
    ):
        stubs.inference.Generate(ask(images=[{"data": png(5)}]))
        loads = stubs.admin.GetLoads(admin_pb2.GetLoadsRequest())
        assert loads.live_requests == loads.running == loads.waiting == 0
        assert 0 < loads.free_blocks <= loads.total_blocks and loads.handoff_used_bytes > 0
        assert loads.handoff_cached_bytes == loads.handoff_used_bytes and loads.max_running == 2
        assert loads.max_requests == running.options.max_queue and loads.output_tokens > 0
        assert not loads.waiting_media and not loads.encoding_media
        budgets = [budget.tokens for budget in loads.encoder.budgets]
        assert budgets and budgets == sorted(budgets) and loads.encoder.images == 1 and loads.encoder.max_images > 0
        launches = loads.encoder.eager_launches + sum(budget.replays for budget in loads.encoder.budgets)
        assert launches == 1 and loads.encoder.real_tokens > 0
        freed = stubs.admin.FlushCache(admin_pb2.FlushCacheRequest()).freed_bytes
        assert freed == loads.handoff_used_bytes
        assert stubs.admin.GetLoads(admin_pb2.GetLoadsRequest()).handoff_used_bytes == 0

        told = stubs.admin.UpdateLogLevel(admin_pb2.UpdateLogLevelRequest(level="error")).previous_level
        assert stubs.admin.UpdateLogLevel(admin_pb2.UpdateLogLevelRequest(level=told)).previous_level == "error"
        loud = admin_pb2.UpdateLogLevelRequest(level="loud")
        assert fails(stubs.admin.UpdateLogLevel, loud)[0] == "INVALID_ARGUMENT"

        call, endless = (
            stubs.inference.StreamGenerate(inference_pb2.StreamGenerateRequest(request=ask(max_tokens=count)))
            for count in (300, 99_000)
        )
        next(call), next(endless)
        assert stubs.admin.Drain(admin_pb2.DrainRequest()).live_requests in (1, 2)
        assert fails(stubs.inference.Generate, ask()) == ("UNAVAILABLE", "DRAINING")
        assert stubs.admin.GetLoads(admin_pb2.GetLoadsRequest()).draining
        endless.cancel()
        assert list(call)[-1].finished.finish_reason == types_pb2.FINISH_REASON_LENGTH


def test_token_ids_become_text_again(stubs: Stubs) -> None:
    ids = stubs.inference.Tokenize(inference_pb2.TokenizeRequest(prompt={"text": "aé<", "raw": True})).token_ids
    told = stubs.model.Detokenize(model_pb2.DetokenizeRequest(token_ids=[*ids, IMAGE_TOKEN]))
    assert told.text == "aé<" and b"".join(told.tokens[:-1]).decode() == "aé<" and told.tokens[-1] == b"<image>"
    wrong = model_pb2.DetokenizeRequest(token_ids=[1, 2**31])
    assert fails(stubs.model.Detokenize, wrong) == ("INVALID_ARGUMENT", "INVALID_ARGUMENT")
    assert fails(stubs.model.Detokenize, model_pb2.DetokenizeRequest(model="nothing"))[0] == "NOT_FOUND"
