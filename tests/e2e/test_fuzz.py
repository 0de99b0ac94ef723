"""Requests that nobody meant: each ends with a status that is about the request, and leaves nothing."""

from __future__ import annotations

import random
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import pytest
from fuzz import fill
from pictures import picture
from rpc import Stubs, ask, connect, reason
from running import RunningServer

from saccade.v1 import inference_pb2, media_pb2
from service import kserve

FAIR = {"OK", "INVALID_ARGUMENT", "NOT_FOUND", "ALREADY_EXISTS", "PERMISSION_DENIED", "FAILED_PRECONDITION"}


@pytest.fixture(scope="module")
def small(model: Path) -> Iterator[RunningServer]:
    with RunningServer(str(model), max_seqs=8, max_len=96) as running:
        yield running


@pytest.fixture
def stubs(small: RunningServer) -> Iterator[Stubs]:
    with connect(small.address) as stubs:
        steady = (
            stubs.inference.Generate(ask(max_tokens=20, images=[{"data": picture(3, (16, 16))}])).samples[0].token_ids
        )
        yield stubs
        again = (
            stubs.inference.Generate(ask(max_tokens=20, images=[{"data": picture(3, (16, 16))}])).samples[0].token_ids
        )
    assert again == steady
    small.drained()
    assert small.server.budget.used == 0
    small.server.spool.check_integrity()


def outcome(call: Any, *arguments: Any) -> str:
    try:
        result = call(*arguments, timeout=60)
        if isinstance(result, grpc.Call) and not hasattr(result, "SerializeToString"):
            list(result)
    except grpc.RpcError as error:
        return reason(error)[0]
    return "OK"


def check(requests: list[tuple[Any, Any]]) -> None:
    with ThreadPoolExecutor(4) as pool:
        outcomes = list(pool.map(lambda pair: outcome(*pair), requests))
    strange = {
        code: str(request)[:500] for (_, request), code in zip(requests, outcomes, strict=True) if code not in FAIR
    }
    assert not strange
    assert "OK" in outcomes and len(set(outcomes)) > 1, "the generator has lost its aim"


def generate(rng: random.Random) -> inference_pb2.GenerateRequest:
    request = fill(rng, inference_pb2.GenerateRequest())
    if rng.random() < 0.5:  # or else hardly any would pass
        request.model = ""
        request.ClearField("sampling")
        request.sampling.max_tokens = rng.randint(1, 5)
        request.ClearField("continued_token_ids")
        if request.WhichOneof("input") is None or rng.random() < 0.3:
            request.prompt.text = "hello"
    return request


def test_random_questions(stubs: Stubs) -> None:
    rng = random.Random(1)
    requests: list[tuple[Any, Any]] = []
    for _ in range(300):
        request = generate(rng)
        stream = fill(rng, inference_pb2.StreamGenerateRequest())
        stream.request.CopyFrom(request)
        requests.append(rng.choice([(stubs.inference.Generate, request), (stubs.inference.StreamGenerate, stream)]))
    check(requests)


def test_random_token_counts_and_media(stubs: Stubs) -> None:
    rng = random.Random(2)
    requests: list[tuple[Any, Any]] = []
    for _ in range(100):
        requests.append((stubs.inference.Tokenize, fill(rng, inference_pb2.TokenizeRequest(), 0.5)))
        requests.append((stubs.inference.Embed, fill(rng, inference_pb2.EmbedRequest(), 0.5)))
        parts = [fill(rng, media_pb2.UploadMediaRequest()) for _ in range(rng.randint(0, 3))]
        requests.append((stubs.media.UploadMedia, iter(parts)))
    sensible = inference_pb2.TokenizeRequest(prompt=ask().prompt)
    check([*requests, (stubs.inference.Tokenize, sensible)])


def test_random_kserve_requests(small: RunningServer, stubs: Stubs, model: Path) -> None:
    rng = random.Random(3)
    kind = kserve.message("ModelInferRequest")
    infer = stubs.channel.unary_unary("/inference.GRPCInferenceService/ModelInfer", kind.SerializeToString)
    names = [name for name, _, _ in kserve.INPUTS]
    requests: list[tuple[Any, Any]] = []
    for _ in range(200):
        request = fill(rng, kind())
        request.model_name = model.name if rng.random() < 0.9 else "other"
        request.model_version = ""
        for tensor in request.inputs:
            tensor.name, tensor.datatype = rng.choice(names), rng.choice(["BYTES", "BYTES", "BOOL"])
        if rng.random() < 0.3:
            request = kind(model_name=model.name)
            request.inputs.add(name="text_input", datatype="BYTES", shape=[1]).contents.bytes_contents.append(b"hi")
            request.parameters["max_tokens"].int64_param = rng.choice([3, 3, 3, 0, -1, 2**40])
        requests.append((infer, request))
    check(requests)


def test_damaged_messages(stubs: Stubs) -> None:
    rng = random.Random(4)
    call = stubs.channel.unary_unary("/saccade.v1.InferenceService/Generate")
    requests: list[tuple[Any, Any]] = []
    for _ in range(200):
        data = bytearray(ask(max_tokens=3, images=[{"data": picture(2, (12, 12))}]).SerializeToString())
        for _ in range(rng.randint(0, 4)):
            data[rng.randrange(len(data))] = rng.randrange(256)
        if rng.random() < 0.3:
            del data[rng.randrange(len(data)) :]
        requests.append((call, bytes(data)))
    check(requests)
