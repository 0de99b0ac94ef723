"""Embed against transformers' hidden states, and resources that it leaves behind."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from images import png
from rpc import ask, connect, reason
from running import RunningServer
from served import IMAGE_TOKEN, make_served
from tiny_checkpoint import TinyCheckpoint, oracle_images

import saccade
import saccade.errors
from saccade.v1 import inference_pb2


@torch.no_grad()
def oracle_hidden(tiny: TinyCheckpoint, ids: list[int], files: list[bytes]) -> torch.Tensor:
    """`[T, d]`: the input of the oracle's vocabulary projection."""
    caught: list[torch.Tensor] = []
    (head,) = [module for name, module in tiny.model.named_modules() if name.endswith("lm_head")]
    handle = head.register_forward_pre_hook(lambda module, inputs: caught.append(inputs[0]))
    try:
        images = [(image.grid, image.patches) for image in oracle_images(tiny.path, files)] if files else []
        tiny.logits(ids, images)
    finally:
        handle.remove()
    return caught[0].reshape(len(ids), -1).double()


def check(found: saccade.Embedding, wanted_TD: torch.Tensor) -> None:
    scale = float(wanted_TD.abs().max())
    for tensor, wanted in ((found.last, wanted_TD[-1]), (found.mean, wanted_TD.mean(0))):
        assert tensor.shape == tuple(wanted.shape)
        assert float((torch.from_numpy(numpy.asarray(tensor)).double() - wanted).abs().max()) <= 1e-4 * scale


@pytest.mark.parametrize("seed", [11, 12, 13])
def test_hidden_states_are_those_of_transformers(tmp_path: Path, seed: int) -> None:
    """Computed in chunks that divide images, and a second time, when the whole prompt is cached."""
    tiny = make_served(tmp_path, seed)
    files = [png(seed), png(seed + 50)]
    options: dict[str, Any] = {"dtype": "float32", "threads": 1, "max_len": 600, "max_seqs": 2}
    with saccade.LocalClient(tmp_path, max_batched_tokens=7, **options) as client:
        short = [9, *range(20, 60), IMAGE_TOKEN, 11, IMAGE_TOKEN, *range(60, 80)]
        sizes = client.tokenize(short, images=files).tokens_per_image
        images = iter(sizes)
        ids = [x for i in short for x in ([i] * next(images) if i == IMAGE_TOKEN else [i])]
        wanted = oracle_hidden(tiny, ids, files)
        client.generate(short, images=files, max_tokens=1)
        for _ in range(2):
            found = client.embed(short, images=files)
            assert (found.prompt_tokens, found.image_tokens) == (len(ids), sum(sizes))
            check(found, wanted)
        check(client.embed([42]), oracle_hidden(tiny, [42], []))
        for file, patches in zip(files, oracle_images(tmp_path, files), strict=True):
            with torch.no_grad():
                features = tiny.model.get_image_features(patches.patches.float(), torch.tensor([patches.grid]))
            rows = client.embed_image(file)
            expected = features.pooler_output[0]
            assert rows.shape == tuple(expected.shape)
            error = float((torch.from_numpy(numpy.asarray(rows)) - expected).abs().max())
            assert error <= 1e-4 * float(expected.abs().max())
            assert torch.tensor(rows.tolist()).shape == expected.shape


def test_under_load_and_memory_that_is_too_small_for_everybody(tmp_path: Path) -> None:
    """Prompts that are preempted while they are computed, and images that wait for each other's memory."""
    tiny = make_served(tmp_path, 11)
    files = [png(i) for i in range(6)]
    with RunningServer(
        str(tmp_path), max_seqs=4, max_len=200, max_batched_tokens=16, memory_bytes=200_000, handoff_bytes=2**14
    ) as server:
        with saccade.Client(server.address) as client:
            requests: list[Any] = [[20 + i] * (150 - i) for i in range(12)]
            streams = [client.stream("x", max_tokens=100, ignore_eos=True, seed=i) for i in range(4)]
            outcomes = [client.embed(ids) for ids in requests]
            rows = [client.embed_image(file) for file in files]
            for stream in streams:
                stream.final()
        for ids, found in zip(requests, outcomes, strict=True):
            check(found, oracle_hidden(tiny, ids, []))
        assert len({tensor.data for tensor in rows}) == len(files)


def test_what_may_be_asked(server: RunningServer, client: saccade.Client) -> None:
    with connect(server.address) as stubs:
        for request, field in (
            (inference_pb2.EmbedRequest(), "image must be set"),
            (inference_pb2.EmbedRequest(prompt=ask().prompt, request_id="x" * 200), "200 characters"),
            (inference_pb2.EmbedRequest(image={}), "no source"),
        ):
            with pytest.raises(Exception, match=field) as caught:
                stubs.inference.Embed(request)
            assert reason(caught.value)[0] == "INVALID_ARGUMENT"
        response = stubs.inference.Embed(inference_pb2.EmbedRequest(image={"data": png(1)}, request_id="me"))
        assert response.request_id == "me" and not response.HasField("last_hidden")
        assert len(response.image_embedding.data) == 4 * numpy.prod(response.image_embedding.shape)
    with pytest.raises(saccade.errors.DeadlineExceeded):
        client.embed([9] * 590, timeout=0.001)
    server.drained()
    with RunningServer(str(server.options.model), max_message_bytes=1024) as small:
        with saccade.Client(small.address) as other:
            with pytest.raises(saccade.errors.InvalidArgument, match="1024") as refused:
                other.embed_image(numpy.zeros((64, 64), numpy.uint8))
        assert refused.value.reason == "IMAGE_TOO_LARGE"
