"""A real server on a real socket: answers through all interfaces, and errors."""

from __future__ import annotations

import asyncio
import io
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from images import data_url, png
from PIL import Image
from running import RunningServer
from served import IMAGE_TOKEN, VOCAB

import saccade
import saccade.errors
from saccade.v1 import inference_pb2, model_pb2, model_pb2_grpc

Request = dict[str, Any]


def mixed_requests(count: int) -> list[Request]:
    """Requests of every kind: chat and ids, zero to two images, greedy and sampled, short and long."""
    requests: list[Request] = []
    for i in range(count):
        images = [png(100 + i % 7 + j) for j in range(i % 3)]
        options: Request = {"images": images, "max_tokens": 4 + i % 13, "temperature": 0 if i % 2 else 1.0, "seed": i}
        if i % 4 == 0:
            options["prompt"] = [7 + (i * k) % 250 for k in range(1, 5 + i * 3)] + [IMAGE_TOKEN] * len(images)
        else:
            options["prompt"] = f"question {i}: " + "what is it? " * (i % 5)
        if i % 5 == 0:
            options |= {"top_k": 20, "top_p": 0.9, "repetition_penalty": 1.1}
        requests.append(options)
    return requests


def ask(client: Any, request: Request) -> saccade.Generation:
    return client.generate(request["prompt"], **{k: v for k, v in request.items() if k != "prompt"})


def test_thirty_two_at_once_equal_one_at_a_time(client: saccade.Client, local: saccade.LocalClient) -> None:
    requests = mixed_requests(32)
    with ThreadPoolExecutor(32) as pool:
        together = list(pool.map(lambda request: ask(client, request), requests))
    alone = [ask(local, request) for request in requests]
    assert together == alone


def test_streamed_equals_unary(client: saccade.Client) -> None:
    for request in mixed_requests(6):
        options = {k: v for k, v in request.items() if k != "prompt"} | {"logprobs": 3}
        whole = client.generate(request["prompt"], **options)
        with client.stream(request["prompt"], **options) as stream:
            deltas = list(stream)
            final = stream.final()
        assert (final.token_ids, final.finish_reason, final.text) == (whole.token_ids, whole.finish_reason, whole.text)
        assert final.usage.completion_tokens == whole.usage.completion_tokens
        # Equal except for rounding: the second continues from the cached beginning of the first, in other batches.
        assert final.logprobs is not None and whole.logprobs is not None
        pairs = list(zip(final.logprobs, whole.logprobs, strict=True))
        assert [mine.logprob for mine, _ in pairs] == pytest.approx([other.logprob for _, other in pairs], abs=1e-4)
        assert "".join(d.text for d in deltas) == whole.text
        assert [t for d in deltas for t in d.token_ids] == whole.token_ids
        assert [d.sequence for d in deltas] == list(range(len(deltas)))


def test_async_client_gives_the_same(client: saccade.Client, server: RunningServer) -> None:
    requests = mixed_requests(4)

    async def run() -> list[saccade.Generation]:
        async with saccade.AsyncClient(server.address) as other:
            return list(await asyncio.gather(*[ask(other, request) for request in requests]))

    assert asyncio.run(run()) == [ask(client, request) for request in requests]


def test_samples_differ_repeat_and_stand_alone(client: saccade.Client) -> None:
    """n samples share a seed and differ by their index; the same call gives the same samples again."""
    first = client.generate("a", n=3, max_tokens=8, seed=5, temperature=1.5)
    assert first == client.generate("a", n=3, max_tokens=8, seed=5, temperature=1.5)
    assert len({tuple(sample.token_ids) for sample in first.samples}) == 3
    assert first.samples[0].token_ids == client.generate("a", max_tokens=8, seed=5, temperature=1.5).token_ids


def test_an_unset_seed_is_drawn_and_returned(client: saccade.Client) -> None:
    one = client.generate("a", max_tokens=12, temperature=1.0)
    assert one.seed != client.generate("a", max_tokens=12, temperature=1.0).seed
    assert client.generate("a", max_tokens=12, temperature=1.0, seed=one.seed) == one


@pytest.mark.parametrize("cut", [1, 5, 11, 12])
@pytest.mark.parametrize("temperature", [0, 1.2])
def test_a_continued_answer_equals_the_uninterrupted_one(client: saccade.Client, cut: int, temperature: float) -> None:
    options: Request = {"images": [png(1)], "max_tokens": 12, "seed": 3, "ignore_eos": True, "logprobs": 0}
    options |= {"presence_penalty": 0.7, "temperature": temperature}
    whole = client.generate("go on", **options)
    rest = client.generate("go on", continued_token_ids=whole.token_ids[:cut], **options)
    assert whole.token_ids[:cut] + rest.token_ids == whole.token_ids
    assert rest.finish_reason == whole.finish_reason
    assert rest.usage.completion_tokens == whole.usage.completion_tokens == 12


@pytest.mark.parametrize("cut", [1, 6, 19])
def test_a_message_is_continued_where_it_was_cut(client: saccade.Client, local: saccade.LocalClient, cut: int) -> None:
    letters = client.tokenize("abcdefgh klmn", raw=True).token_ids  # bytes that are complete characters
    options: Request = {"temperature": 0, "ignore_eos": True, "allowed_token_ids": letters}
    asked: list[Request] = [{"role": "user", "content": [{"type": "image", "image": png(1)}, "what is it?"]}]
    whole = client.chat(asked, max_tokens=20, **options)
    begun = [*asked, {"role": "assistant", "content": whole.text[:cut]}]
    for server in (client, local):
        rest = server.chat(begun, max_tokens=20 - cut, continue_final_message=True, **options)
        assert whole.text[:cut] + rest.text == whole.text
        assert rest.usage.prompt_tokens == whole.usage.prompt_tokens + cut
        assert server.tokenize(begun, continue_final_message=True).prompt_tokens == rest.usage.prompt_tokens
    with client.stream(begun, max_tokens=20 - cut, continue_final_message=True, **options) as stream:
        assert "".join(delta.text for delta in stream) == rest.text
    with pytest.raises(saccade.errors.InvalidArgument, match="the last message's role is user") as error:
        client.chat(asked, continue_final_message=True)
    assert error.value.field == "chat.continue_final_message"


def test_stop_strings_and_ids(client: saccade.Client) -> None:
    whole = client.generate("abc", max_tokens=40, temperature=0, ignore_eos=True)
    assert len(whole.text) > 8
    stop = whole.text[5:8]
    cut = client.generate("abc", max_tokens=40, temperature=0, ignore_eos=True, stop=[stop])
    assert cut.text == whole.text[: whole.text.index(stop)]
    assert cut.finish_reason == "stop" and cut.samples[0].stop_match == stop
    token = whole.token_ids[6]
    ended = client.generate("abc", max_tokens=40, temperature=0, ignore_eos=True, stop_token_ids=[token])
    at = whole.token_ids.index(token)
    assert ended.token_ids == whole.token_ids[: at + 1] and ended.samples[0].stop_match == token


def test_logit_bias_and_limits(client: saccade.Client) -> None:
    answer = client.generate("a", max_tokens=5, temperature=0, ignore_eos=True, logit_bias={9: 1000.0})
    assert answer.token_ids == [9] * 5 and answer.finish_reason == "length"
    assert answer.usage.completion_tokens == 5


@pytest.mark.parametrize("mode", ["RGB", "RGBA", "L", "P", "CMYK", "1", "I;16"])
def test_images_of_every_kind(client: saccade.Client, local: saccade.LocalClient, mode: str) -> None:
    image_rgb = Image.open(io.BytesIO(png(5, (40, 24))))
    converted = image_rgb.convert("I").convert("I;16") if mode == "I;16" else image_rgb.convert(mode)
    buffer = io.BytesIO()
    converted.save(buffer, "TIFF" if mode == "CMYK" else "PNG")
    data = buffer.getvalue()
    answer = client.generate("what?", images=[data], max_tokens=3, temperature=0)
    assert answer == local.generate("what?", images=[data], max_tokens=3, temperature=0)
    assert answer.usage.image_tokens > 0


def test_images_as_path_bytes_pil_numpy_and_message_part(client: saccade.Client, tmp_path: Path) -> None:
    import numpy as np

    data = png(6)
    file = tmp_path / "image.png"
    file.write_bytes(data)
    image = Image.open(io.BytesIO(data))
    options: Request = {"max_tokens": 6, "temperature": 0}
    answers = [client.generate("what?", images=[x], **options) for x in (file, str(file), data, image, np.array(image))]
    url = data_url(data)
    parts = [{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": "what?"}]
    answers.append(client.generate([{"role": "user", "content": parts}], **options))
    assert all(answer == answers[0] for answer in answers)


def test_one_image_in_many_requests_is_encoded_once(server: RunningServer, client: saccade.Client) -> None:
    before = server.stats()["handoff"]["misses"]
    data = png(777)
    with ThreadPoolExecutor(16) as pool:
        list(pool.map(lambda i: client.generate(f"{i}", images=[data], max_tokens=2), range(16)))
    assert server.stats()["handoff"]["misses"] == before + 1


INVALID: list[tuple[str, Request, str]] = [
    ("temperature", {"temperature": -1}, "temperature"),
    ("top_p", {"top_p": 0}, "top_p"),
    ("top_k", {"top_k": -2}, "top_k"),
    ("min_p", {"min_p": 1.5}, "min_p"),
    ("repetition_penalty", {"repetition_penalty": 0}, "repetition_penalty"),
    ("max_tokens", {"max_tokens": 0}, "max_tokens"),
    ("max_tokens above the context", {"max_tokens": 10_000}, "600"),
    ("min_tokens above the context", {"min_tokens": 10_000, "max_tokens": None}, "min_tokens 10000 .* of 600"),
    ("n", {"n": 0}, "from 1 to 64"),
    ("logprobs", {"logprobs": 1000}, "from 0 to 100"),
    ("empty stop", {"stop": [""]}, r"stop\[0\]"),
    ("bias of an unknown token", {"logit_bias": {VOCAB: 1.0}}, str(VOCAB)),
    ("nan", {"temperature": float("nan")}, "temperature"),
    ("ids out of range", {"prompt": [1, VOCAB]}, str(VOCAB)),
    ("no ids", {"prompt": []}, "empty"),
    ("too long", {"prompt": [5] * 700}, "700.*600"),
    ("image without a place", {"prompt": [5], "images": [png(1)]}, "0 image tokens.*1 images"),
    ("place without an image", {"prompt": [5, IMAGE_TOKEN]}, "1 image tokens.*0 images"),
    ("not an image", {"images": [b"hello"]}, "recognised"),
    ("cut short", {"images": [png(1, (64, 64))[:200]]}, "images"),
    ("too many images", {"images": [png(1)] * 17}, "from 0 to 16"),
    ("continued with samples", {"continued_token_ids": [5], "n": 2}, "continued"),
]


@pytest.mark.parametrize(("request_fields", "message"), [c[1:] for c in INVALID], ids=[c[0] for c in INVALID])
@pytest.mark.parametrize("transport", ["grpc", "local"])
def test_bad_input_is_named_and_nothing_else_is_touched(
    client: saccade.Client, local: saccade.LocalClient, transport: str, request_fields: Request, message: str
) -> None:
    target: Any = client if transport == "grpc" else local
    with ThreadPoolExecutor(1) as pool:
        good = pool.submit(target.generate, "steady", max_tokens=8, temperature=0)
        with pytest.raises(saccade.errors.InvalidArgument, match=message) as error:
            ask(target, {"prompt": "x", **request_fields})
    assert not error.value.retryable
    assert good.result() == local.generate("steady", max_tokens=8, temperature=0)


def test_an_undecodable_image_has_its_own_reason(client: saccade.Client) -> None:
    with pytest.raises(saccade.errors.InvalidArgument) as error:
        client.generate("x", images=[b"not an image"])
    assert error.value.reason == "IMAGE_DECODE_FAILED"


def test_an_image_above_a_limit_is_too_large_in_a_request_and_as_an_upload(client: saccade.Client) -> None:
    file = io.BytesIO()
    Image.new("1", (8001, 8000)).save(file, "PNG")
    for call in (lambda: client.generate("x", images=[file.getvalue()]), lambda: client.media.upload(file.getvalue())):
        with pytest.raises(saccade.errors.InvalidArgument, match="64008000 in all, more than the 64000000") as error:
            call()
        assert error.value.reason == "IMAGE_TOO_LARGE"


def test_unknown_model(server: RunningServer) -> None:
    with grpc.insecure_channel(server.address) as channel:
        with pytest.raises(grpc.RpcError) as error:
            model_pb2_grpc.ModelServiceStub(channel).GetModel(model_pb2.GetModelRequest(name="other"))
    assert error.value.code() is grpc.StatusCode.NOT_FOUND


def test_the_model_tells_its_limits(server: RunningServer, model: Path) -> None:
    with grpc.insecure_channel(server.address) as channel:
        stub = model_pb2_grpc.ModelServiceStub(channel)
        listed = stub.ListModels(model_pb2.ListModelsRequest()).models
        found = stub.GetModel(model_pb2.GetModelRequest()).model
    assert list(listed) == [found]
    assert found.name == model.name and found.limits.context_length == 600
    assert model_pb2.MODALITY_IMAGE in found.input_modalities and found.image_token_id == IMAGE_TOKEN
    assert found.default_sampling.temperature == 0 and found.default_sampling.HasField("temperature")


def test_health_and_reflection(server: RunningServer) -> None:
    with grpc.insecure_channel(server.address) as channel:
        check = health_pb2_grpc.HealthStub(channel).Check
        for service in ("", "saccade.v1.InferenceService", "saccade.v1.ModelService"):
            request = health_pb2.HealthCheckRequest(service=service)
            assert check(request).status == health_pb2.HealthCheckResponse.SERVING
        from google.protobuf.descriptor_pool import DescriptorPool
        from grpc_reflection.v1alpha.proto_reflection_descriptor_database import ProtoReflectionDescriptorDatabase

        database = ProtoReflectionDescriptorDatabase(channel)
        assert "saccade.v1.InferenceService" in database.get_services()
        service = DescriptorPool(database).FindServiceByName("saccade.v1.InferenceService")
        assert service.methods_by_name["StreamGenerate"].output_type.name == "StreamGenerateResponse"


def test_a_queue_that_is_full_says_when_to_come_back(text_model: Path) -> None:
    with RunningServer(str(text_model), max_seqs=1, max_len=100_000, max_queue=1) as small:
        with saccade.Client(small.address, max_retries=0) as one:
            # More tokens than any machine draws before the second request arrives.
            with one.stream("x", max_tokens=99_000, ignore_eos=True) as stream:
                next(stream)
                with pytest.raises(saccade.errors.Overloaded) as error:
                    one.generate("y", max_tokens=1)
            assert error.value.reason == "QUEUE_FULL" and error.value.retryable


def test_an_image_above_the_handoff_bound_is_refused_with_both_numbers(model: Path) -> None:
    with saccade.LocalClient(model, dtype="float32", threads=1, handoff_bytes=6 * 4 * 64) as small:
        with pytest.raises(saccade.errors.InvalidArgument, match=r"takes \d+ tokens.*holds \d+"):
            small.generate("x", images=[png(3, (64, 64))])
        assert small.generate("x", max_tokens=2).usage.completion_tokens == 2


def test_deadlines_free_what_they_held(server: RunningServer, client: saccade.Client) -> None:
    with pytest.raises(saccade.errors.DeadlineExceeded):
        client.generate("x", images=[png(2)], n=8, max_tokens=500, ignore_eos=True, timeout=0.03)
    server.drained()


def test_a_live_request_id_is_not_taken_twice(text_model: Path) -> None:
    from saccade.v1 import inference_pb2_grpc

    request = inference_pb2.GenerateRequest(request_id="mine")
    request.prompt.text = "x"
    request.sampling.max_tokens = 99_000  # more than any machine draws before the second request arrives
    request.sampling.ignore_eos = True
    with (
        RunningServer(str(text_model), max_seqs=2, max_len=100_000) as long,
        grpc.insecure_channel(long.address) as channel,
    ):
        stub = inference_pb2_grpc.InferenceServiceStub(channel)
        call = stub.StreamGenerate(inference_pb2.StreamGenerateRequest(request=request))
        next(call)
        with pytest.raises(grpc.RpcError) as error:
            stub.Generate(request)
        assert error.value.code() is grpc.StatusCode.ALREADY_EXISTS
        call.cancel()
        long.drained()


def test_images_that_fill_the_handoff_one_by_one_still_pass(model: Path, local: saccade.LocalClient) -> None:
    """Memory for one image, requests with three each, sharing some in another order: all end, with the same answers."""
    shared = [png(50 + i, (64, 64)) for i in range(4)]
    requests = [
        {"prompt": f"{i}", "images": [shared[i % 4], shared[(i + 2) % 4], shared[(3 * i + 1) % 4]], "max_tokens": 6}
        for i in range(10)
    ]
    for request in requests:
        request |= {"temperature": 0}
    hidden = local._service._frontend.assets.config.decoder.hidden_size
    bound = 16 * 4 * hidden  # an image of 64 x 64 pixels takes 16 tokens
    with saccade.LocalClient(model, dtype="float32", threads=1, max_seqs=2, max_len=600, handoff_bytes=bound) as small:
        with ThreadPoolExecutor(10) as pool:
            together = list(pool.map(lambda request: ask(small, request), requests))
        stats = small._service.stats(integrity=True)
    assert together == [ask(local, request) for request in requests]
    assert stats["handoff"]["used_bytes"] <= bound and stats["handoff"]["revocations"] > 0


@pytest.mark.parametrize("step", [*range(1, 10), 15, 16, 17, 31, 32, 33, 64])
def test_any_step_size_gives_the_same(model: Path, local: saccade.LocalClient, step: int) -> None:
    """Chunked = whole, with images divided in the middle."""
    requests = mixed_requests(6)
    with saccade.LocalClient(
        model, dtype="float32", threads=1, max_seqs=3, max_len=600, max_batched_tokens=step
    ) as chunked:
        with ThreadPoolExecutor(6) as pool:
            assert list(pool.map(lambda r: ask(chunked, r), requests)) == [ask(local, r) for r in requests]


@pytest.mark.parametrize("graphs", ["on", "off"])
def test_encoder_graphs_change_nothing(model: Path, local: saccade.LocalClient, graphs: str) -> None:
    with saccade.LocalClient(model, dtype="float32", threads=1, max_len=600, graphs=graphs) as other:
        for request in mixed_requests(6):
            assert ask(other, request) == ask(local, request)
        encoder = other._service.stats()["encoder"]
    assert encoder["real_tokens"] > 0 and (encoder["padded_tokens"] > 0) == (graphs == "on")


@pytest.mark.parametrize("mode", ["auto", "align", "all", "none"])
def test_the_same_image_asked_about_again(model: Path, mode: str) -> None:
    """Cached tokens are not computed again, the image is not encoded again, and the answers do not change."""
    data = png(9, (64, 64))
    questions = [f"question number {i}?" for i in range(4)]
    options: Request = {"images": [data], "max_tokens": 6, "temperature": 0, "logprobs": 1}
    fresh = []
    for question in questions:
        with saccade.LocalClient(model, dtype="float32", threads=1, max_len=600, state_cache="none") as client:
            fresh.append(client.generate(question, **options))
    with saccade.LocalClient(
        model, dtype="float32", threads=1, max_len=600, state_cache=mode, state_block=16
    ) as client:
        cached = [client.generate(question, **options) for question in questions]
        stats = client._service.stats(integrity=True)
    for one, two in zip(cached, fresh, strict=True):
        assert one.token_ids == two.token_ids and one.text == two.text
    hits = [answer.usage.cached_tokens for answer in cached]
    assert hits[0] == 0 and (min(hits[1:]) > 0) == (mode in ("auto", "all"))
    assert stats["handoff"]["misses"] == 1


def test_prompt_logprobs_in_a_unary_answer_and_in_a_stream(client: saccade.Client) -> None:
    """One for each token except the first and the image's; the sum is the same in both forms."""
    options: dict[str, Any] = {"images": [png(950)], "max_tokens": 3, "seed": 4, "prompt_logprobs": 2, "n": 2}
    whole = client.generate("what is it?", **options)
    stream = client.stream("what is it?", **options)
    for _ in stream:
        pass
    scores = whole.prompt_logprobs
    assert scores is not None and len(scores) == whole.usage.prompt_tokens
    assert scores[0] is None and scores.count(None) == 1 + whole.usage.image_tokens
    assert all(len(score.top) == 2 and score.logprob <= 0 for score in scores if score is not None)
    streamed = stream.final().prompt_logprobs
    assert streamed is not None
    assert [s and s.logprob for s in streamed] == pytest.approx([s and s.logprob for s in scores], abs=1e-4)
    assert client.generate("what is it?", max_tokens=3).prompt_logprobs is None
    assert client.generate([65], max_tokens=1, prompt_logprobs=0).prompt_logprobs == [None]
    assert client.stream([65], max_tokens=1, prompt_logprobs=0).final().prompt_logprobs == [None]
    alone = {**options, "n": 1}
    ids = client.generate("what is it?", **alone).token_ids
    for cut in range(len(ids) + 1):  # also if the stream broke between its last token and its end
        rest = client.generate("what is it?", continued_token_ids=ids[:cut], **alone)
        assert rest.token_ids == ids[cut:] and rest.prompt_logprobs is not None
        assert [s and s.logprob for s in rest.prompt_logprobs] == pytest.approx(
            [s and s.logprob for s in scores], abs=1e-4
        )
    with pytest.raises(saccade.errors.InvalidArgument, match="prompt_logprobs"):
        client.generate("what is it?", prompt_logprobs=-1)
