"""The service `vllm.grpc.engine.VllmEngine` by itself and behind the gateway smg. Skipped if packages are missing."""

from __future__ import annotations

import hashlib
import io
import json
import sys
import zipfile
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import grpc
import pytest
from images import data_url, png
from reasoner import OPEN, make_reasoner
from running import RunningServer
from served import IMAGE_TOKEN

import saccade
from benchmarks.gateway import ARGUMENTS, chat, gateway, hit_rate, image_messages, text_messages
from benchmarks.replicas import flush
from service.commands.server_process import ServerProcess
from service.servers.from_options import load_assets

pytest.importorskip("smg_grpc_proto", reason="smg-grpc-proto is not installed")
needs_smg = pytest.mark.skipif(
    not Path(sys.executable).with_name("smg").exists(), reason="smg is not installed: `make test-ray` installs it"
)
WEATHER = {
    "type": "object", "properties": {"city": {"type": "string", "enum": ["Rome", "Oslo"]}}, "required": ["city"],
    "additionalProperties": False,
}  # fmt: skip
TOOL = {"type": "function", "function": {"name": "weather", "description": "of a city", "parameters": WEATHER}}


# -- the service -------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def worker(model: Path) -> Iterator[RunningServer]:
    with RunningServer(str(model), engine_process=True, max_seqs=16, max_len=100_000, vllm_engine=True) as running:
        yield running


@pytest.fixture
def stub(worker: RunningServer) -> Iterator[Any]:
    from smg_grpc_proto import vllm_engine_pb2_grpc

    with grpc.insecure_channel(worker.address) as channel:
        yield vllm_engine_pb2_grpc.VllmEngineStub(channel)
    worker.drained()


def generate(stub: Any, ids: list[int], *, stream: bool = True, images: list[str] | None = None, **params: Any) -> Any:
    from smg_grpc_proto import vllm_engine_pb2 as pb

    sampling = pb.SamplingParams(**{"max_tokens": 8, "seed": 3, "temperature": 1.0, "ignore_eos": True, **params})
    request = pb.GenerateRequest(request_id=f"r{len(ids)}", stream=stream, sampling_params=sampling)
    request.tokenized.input_ids.extend(ids)
    for url in images or []:
        request.media_refs.items.add(modality=1, url=url)
    return list(stub.Generate(request, timeout=60))


def test_token_ids_in_and_out(stub: Any, worker: RunningServer) -> None:
    ids = [9, 10, IMAGE_TOKEN, 40, 41]
    with saccade.Client(worker.address) as client:
        wanted = client.generate(
            ids, images=[png(2)], max_tokens=8, seed=3, temperature=1.0, ignore_eos=True, n=2, logprobs=2
        )
    options = {"n": 2, "logprobs": 2, "images": [data_url(png(2))]}
    chunks = generate(stub, ids, **options)
    (whole) = generate(stub, ids, stream=False, **options)
    assert {message.WhichOneof("response") for message in whole} == {"complete"}
    for index, sample in enumerate(wanted.samples):
        parts = [m.chunk for m in chunks if m.HasField("chunk") and m.chunk.index == index]
        (end,) = (m.complete for m in chunks if m.HasField("complete") and m.complete.index == index)
        (complete,) = (m.complete for m in whole if m.complete.index == index)
        assert [token for part in parts for token in part.token_ids] == list(complete.output_ids) == sample.token_ids
        assert not end.output_ids and end.finish_reason == complete.finish_reason == "length"
        assert complete.prompt_tokens == wanted.usage.prompt_tokens and complete.completion_tokens == 8
        assert list(complete.output_logprobs.token_ids) == sample.token_ids
        assert [len(top.values) for top in complete.output_logprobs.top_logprobs] == [2] * 8
        found = [value for part in parts for value in part.output_logprobs.token_logprobs]
        assert found == pytest.approx(list(complete.output_logprobs.token_logprobs), abs=1e-4)


def test_constraints_and_stops(stub: Any) -> None:
    (complete,) = generate(stub, [50, 51], stream=False, ignore_eos=False, regex="[ab]{3}", max_tokens=20)
    text = bytes(complete.complete.output_ids)
    assert complete.complete.finish_reason == "stop" and len(text) == 4, "three letters and the end"
    (first,) = generate(stub, [50, 51], stream=False)
    stop = first.complete.output_ids[2]
    (stopped,) = generate(stub, [50, 51], stream=False, ignore_eos=False, stop_token_ids=[stop], max_tokens=20)
    assert stopped.complete.finish_reason == "stop" and stopped.complete.matched_token_id == stop


def test_a_text_is_tokenised_as_it_is(stub: Any, worker: RunningServer) -> None:
    from smg_grpc_proto import vllm_engine_pb2 as pb

    sampling = pb.SamplingParams(max_tokens=4, seed=3, ignore_eos=True)
    (found,) = stub.Generate(pb.GenerateRequest(request_id="t", text="what?", sampling_params=sampling), timeout=60)
    with saccade.Client(worker.address) as client:
        wanted = client.generate("what?", raw=True, max_tokens=4, seed=3, ignore_eos=True)
    assert found.complete.prompt_tokens == wanted.usage.prompt_tokens == len("what?")
    assert list(found.complete.output_ids) == wanted.token_ids


def test_a_grammar_starts_where_the_gateway_is_told_and_says(tmp_path: Path) -> None:
    """For a prompt that ends inside the model's reasoning: after the reasoning, unless the grammar includes it."""
    from smg_grpc_proto import vllm_engine_pb2 as pb
    from smg_grpc_proto import vllm_engine_pb2_grpc

    model = make_reasoner(tmp_path / "tiny")
    with (
        RunningServer(str(model), max_seqs=4, max_len=100, vllm_engine=True) as worker,
        grpc.insecure_channel(worker.address) as channel,
    ):
        stub = vllm_engine_pb2_grpc.VllmEngineStub(channel)
        told = stub.GetServerInfo(pb.GetServerInfoRequest())
        assert told.constrained_decoding_start == "after_reasoning"
        options = {"stream": False, "ignore_eos": False, "regex": "[ab]{3}"}
        found = {}
        for first in (False, True):
            (answer,) = generate(stub, [50, OPEN], grammar_from_first_token=first, **options)
            found[first] = list(answer.complete.output_ids)
        tokenizer = load_assets(worker.options).tokenizer
        assert tokenizer is not None
        letters = set(tokenizer.encode("ab"))
        assert set(found[True][:3]) <= letters and len(found[True]) == 4 and not set(found[False]) <= letters


@pytest.mark.parametrize(
    ("change", "code", "named"),
    [
        ({"images": ["data:image/png;base64,???"]}, "INVALID_ARGUMENT", "media_refs.items[0]"),
        ({"images": [data_url(b"x"), data_url(b"y")]}, "INVALID_ARGUMENT", "image"),
        ({"images": ["http://localhost/a.png"]}, "INVALID_ARGUMENT|PERMISSION_DENIED|UNIMPLEMENTED", ""),
        ({"max_tokens": 2**32 - 1}, "INVALID_ARGUMENT", "max_tokens"),
        ({"min_tokens": 2**31}, "INVALID_ARGUMENT", "min_tokens"),
        ({"n": 2**31}, "INVALID_ARGUMENT", "sampling_params.n"),
        ({"logprobs": -1}, "INVALID_ARGUMENT", "logprobs"),
        ({"logit_bias": {-1: 1.0}}, "INVALID_ARGUMENT", "logit_bias"),
        ({"json_schema": "{"}, "INVALID_ARGUMENT", "json_schema"),
        ({"structural_tag": "{}"}, "UNIMPLEMENTED", "structural_tag"),
        ({"prompt_logprobs": 1}, "UNIMPLEMENTED", "prompt_logprobs"),
        ({"include_stop_str_in_output": True}, "UNIMPLEMENTED", "include_stop"),
    ],
)
def test_what_is_not_served_is_an_error(stub: Any, change: dict[str, Any], code: str, named: str) -> None:
    with pytest.raises(grpc.RpcError) as caught:
        generate(stub, [9, IMAGE_TOKEN] if "images" in change else [9], **change)
    assert caught.value.code().name in code.split("|") and named in caught.value.details()


def test_what_gateways_ask_about_a_worker(stub: Any, worker: RunningServer, model: Path) -> None:
    from smg_grpc_proto import vllm_engine_pb2 as pb
    from smg_grpc_proto.generated import common_pb2

    assert stub.HealthCheck(pb.HealthCheckRequest()).healthy
    info = stub.GetModelInfo(pb.GetModelInfoRequest())
    assert info.is_generation and info.supports_vision and info.max_context_length == 100_000 and info.vocab_size > 256
    server = stub.GetServerInfo(pb.GetServerInfoRequest())
    assert (server.mm_processor, server.mm_media_ref_schemes, server.max_num_seqs) == ("inprocess", "data", 16)
    assert server.constrained_decoding_start == "first_token", "this model marks no reasoning"
    (load,) = stub.GetLoads(pb.GetLoadsRequest()).loads
    assert load.num_total_reqs == 0 and load.max_running_requests == 16 and 0 <= load.token_usage < 1
    chunks = list(stub.GetTokenizer(common_pb2.GetTokenizerRequest()))
    data = b"".join(chunk.data for chunk in chunks)
    assert chunks[-1].sha256 == hashlib.sha256(data).hexdigest()
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        assert archive.read("tokenizer.json") == (model / "tokenizer.json").read_bytes()
    stub.Abort(pb.AbortRequest(request_ids=["no such request"] * 1024))
    with pytest.raises(grpc.RpcError, match="request_ids has 1025 ids; at most 1024"):
        stub.Abort(pb.AbortRequest(request_ids=["no such request"] * 1025))
    with pytest.raises(grpc.RpcError) as caught:
        stub.FlushCache(common_pb2.FlushCacheRequest())
    assert caught.value.code() == grpc.StatusCode.UNIMPLEMENTED


def test_cancelling_and_aborting_free_the_slot(stub: Any, worker: RunningServer) -> None:
    from smg_grpc_proto import vllm_engine_pb2 as pb

    for how in ("cancel", "abort"):
        sampling = pb.SamplingParams(max_tokens=99_000, ignore_eos=True)
        request = pb.GenerateRequest(request_id="long", stream=True, sampling_params=sampling)
        request.tokenized.input_ids.extend([9, 10])
        call = stub.Generate(request)
        next(call)
        if how == "cancel":
            call.cancel()
        else:
            stub.Abort(pb.AbortRequest(request_ids=["long"]))
            assert [m.complete.finish_reason for m in call if m.HasField("complete")] in (["abort"], [])
        worker.drained()


# -- smg ---------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def servers() -> Iterator[list[ServerProcess]]:
    with ExitStack() as ends:
        yield [ends.enter_context(ServerProcess(ARGUMENTS)) for _ in range(2)]


@pytest.fixture(scope="module")
def url(servers: list[ServerProcess]) -> Iterator[str]:
    """The gateway in front of both servers."""
    with gateway([server.address for server in servers], "--policy", "cache_aware") as url:
        yield url


@needs_smg
def test_openai_clients_get_the_same_answers_through_smg(url: str, servers: list[ServerProcess]) -> None:
    openai = pytest.importorskip("openai", reason="OpenAI's client is not installed")
    client = openai.OpenAI(base_url=url, api_key="none")
    model = client.models.list().data[0].id
    image = Path(__file__).resolve().parents[2] / "demo" / "pictures"
    files = sorted(image.glob("*.png"))[:3]
    with saccade.Client(servers[0].address) as own:
        for file in files:
            question = "What does the image show?"
            wanted = own.generate(question, images=[file], max_tokens=16, temperature=0)
            content = [
                {"type": "image_url", "image_url": {"url": data_url(file.read_bytes())}},
                {"type": "text", "text": question},
            ]
            asked = {
                "model": model,
                "messages": [{"role": "user", "content": content}],
                "max_tokens": 16,
                "temperature": 0,
            }
            whole = client.chat.completions.create(**asked)
            assert whole.choices[0].message.content == wanted.text
            assert whole.usage.prompt_tokens == wanted.usage.prompt_tokens
            streamed = client.chat.completions.create(**asked, stream=True)
            parts = [chunk.choices[0].delta.content or "" for chunk in streamed if chunk.choices]
            assert "".join(parts) == wanted.text


@needs_smg
def test_cancelling_through_smg_frees_the_slot(url: str, servers: list[ServerProcess]) -> None:
    openai = pytest.importorskip("openai", reason="OpenAI's client is not installed")
    from saccade.v1 import admin_pb2, admin_pb2_grpc

    client = openai.OpenAI(base_url=url, api_key="none")
    message = {"role": "user", "content": "go on"}
    extra = {"ignore_eos": True}
    stream = client.chat.completions.create(
        model=client.models.list().data[0].id, messages=[message], max_tokens=200, stream=True, extra_body=extra
    )
    next(iter(stream))
    stream.close()
    for server in servers:
        with grpc.insecure_channel(server.address) as channel:
            stub = admin_pb2_grpc.AdminServiceStub(channel)
            while stub.GetLoads(admin_pb2.GetLoadsRequest(), timeout=60).live_requests:
                pass


@needs_smg
def test_tool_calls_through_smg(url: str) -> None:
    """smg sends the tool's schema as the constraint, and makes the call of the text."""
    openai = pytest.importorskip("openai", reason="OpenAI's client is not installed")
    client = openai.OpenAI(base_url=url, api_key="none")
    asked = {
        "model": client.models.list().data[0].id, "max_tokens": 60, "temperature": 0, "tools": [TOOL],
        "messages": [{"role": "user", "content": "What is the weather in Oslo?"}],
        "tool_choice": {"type": "function", "function": {"name": "weather"}},
    }  # fmt: skip
    (choice,) = client.chat.completions.create(**asked).choices
    (call,) = choice.message.tool_calls
    assert choice.finish_reason == "tool_calls" and call.function.name == "weather"
    arguments = json.loads(call.function.arguments)
    assert list(arguments) == ["city"] and arguments["city"] in ("Rome", "Oslo")
    chunks = [chunk.choices[0] for chunk in client.chat.completions.create(**asked, stream=True) if chunk.choices]
    pieces = [piece.function for chunk in chunks for piece in chunk.delta.tool_calls or ()]
    assert [piece.name for piece in pieces if piece.name] == ["weather"]
    assert json.loads("".join(piece.arguments or "" for piece in pieces)) == arguments
    answer = chat(url, asked["messages"], tools=[TOOL], tool_choice="none", max_tokens=8)
    assert not answer["choices"][0]["message"].get("tool_calls")


@needs_smg
def test_routing_keeps_what_one_server_would_have_cached(servers: list[ServerProcess]) -> None:
    addresses = [server.address for server in servers]
    rates = {}
    policies = {"one": (), "keyed": ("--policy", "consistent_hashing"), "aware": ("--policy", "cache_aware")}
    for name, options in policies.items():
        with gateway(addresses if options else addresses[:1], *options) as url:
            for kind in (image_messages, text_messages):
                for address in addresses:
                    flush(address)
                rates[name, kind] = hit_rate(url, kind, groups=6, keyed=name == "keyed")
    for kind in (image_messages, text_messages):
        assert rates["keyed", kind] >= 0.95 * rates["one", kind] > 0.4, rates
    assert rates["aware", text_messages] >= 0.95 * rates["one", text_messages], rates
