"""Random invalid requests: each ends with a status about the request, and leaves no resources."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from faults import check_outcomes
from fuzz import fill, kserve_request
from images import png
from rpc import Stubs, ask, connect
from running import RunningServer

from saccade.v1 import inference_pb2, media_pb2
from service.rpc.kserve_messages import message
from service.rpc.kserve_tensors import INPUTS


@pytest.fixture(scope="module")
def small(model: Path) -> Iterator[RunningServer]:
    with RunningServer(str(model), engine_process=True, max_seqs=8, max_len=96) as running:
        yield running


@pytest.fixture
def stubs(small: RunningServer) -> Iterator[Stubs]:
    with connect(small.address) as stubs:
        steady = stubs.inference.Generate(ask(max_tokens=20, images=[{"data": png(3, (16, 16))}])).samples[0].token_ids
        yield stubs
        again = stubs.inference.Generate(ask(max_tokens=20, images=[{"data": png(3, (16, 16))}])).samples[0].token_ids
    assert again == steady
    small.drained()
    small.server.spool.check_integrity()


def check(requests: list[tuple[Any, Any]]) -> None:
    outcomes = check_outcomes(requests)
    assert "OK" in outcomes and len(outcomes) > 1, "the generator has lost its aim"


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
    kind = message("ModelInferRequest")
    infer = stubs.channel.unary_unary("/inference.GRPCInferenceService/ModelInfer", kind.SerializeToString)
    names = [name for name, _, _ in INPUTS]
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
    requests += [(infer, kserve_request(rng, model.name)) for _ in range(200)]
    check(requests)
