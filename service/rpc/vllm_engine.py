"""`vllm.grpc.engine.VllmEngine`, the service that gateways such as smg and llm-d call on their workers.

Requests and answers are token ids; the gateway applies chat templates, detokenizes, and handles tools and reasoning.
Images and videos come as `media_refs`, references that this server fetches, with one placeholder id each in the prompt.
Preprocessed pixels (`mm_inputs`) are not supported. The messages are those of the package smg-grpc-proto.
"""

from __future__ import annotations

import asyncio
import contextlib
import datetime
import hashlib
import io
import time
import zipfile
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from smg_grpc_proto.generated import common_pb2, vllm_engine_pb2

from saccade.v1 import inference_pb2, model_pb2, types_pb2
from service.answers import convert
from service.answers.calls import Calls
from service.common import errors
from service.common.types import Delta, Finished, GenerateSpec, Logprob, Started, Usage
from service.model.assets import ModelAssets
from service.rpc.handlers import handler_of
from service.rpc.media_urls import set_source
from service.rpc.servicer import converted_request
from service.telemetry.call_context import current_call

SERVICE = "vllm.grpc.engine.VllmEngine"
CHUNK_BYTES = 2**20
MAX_ABORTED = 1024
"""Largest number of requests that one call aborts: each is looked for in all frontend processes."""
TOKENIZER_FILES = (
    "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "config.json",
    "generation_config.json", "chat_template.jinja", "chat_template.json",
)  # fmt: skip
_REASONS = {"stop": "stop", "length": "length", "aborted": "abort"}
_IMAGE, _VIDEO = common_pb2.Modality.Value("IMAGE"), common_pb2.Modality.Value("VIDEO")
_FORMATS = {"json_schema": "json_schema", "regex": "regex", "grammar": "lark"}
_UNSERVED = ("truncate_prompt_tokens", "prompt_logprobs")
_ZERO_IS_UNSET = ("top_p", "repetition_penalty", "n")
_OPTIONAL = ("temperature", "max_tokens", "logprobs")
_NO_TOP_K = 2**32 - 1
"""-1 as an unsigned integer."""
_COPIED = ("top_k", "min_p", "frequency_penalty", "presence_penalty", "min_tokens")


def request_from(request: Any) -> inference_pb2.GenerateRequest:
    """Converts `vllm_engine_pb2.GenerateRequest`. Raises InvalidArgument, Unimplemented."""
    for name in ("mm_inputs", "kv_transfer_params"):
        if request.HasField(name):
            raise errors.Unimplemented(
                f"{name}: not supported; let the worker process media (smg: --mm-processing worker)"
            )
    if request.extra_mm_inputs or request.kv_transfer_params_json:
        raise errors.Unimplemented("extra_mm_inputs, kv_transfer_params_json: not supported")
    if request.data_parallel_rank:
        raise errors.InvalidArgument(
            f"data_parallel_rank: this engine has only rank 0, got {request.data_parallel_rank}",
            field="data_parallel_rank",
        )
    made = inference_pb2.GenerateRequest(request_id=request.request_id, sampling=_sampling(request.sampling_params))
    refs = request.media_refs.items
    match request.WhichOneof("input"):
        case "tokenized":
            made.tokens.ids.extend(request.tokenized.input_ids)
            target: Any = made.tokens
        case "text":
            made.prompt.text = request.text
            made.prompt.raw = True
            target = made.prompt
        case _:
            raise errors.InvalidArgument("one of tokenized, text must be set", field="input")
    for index, ref in enumerate(refs):
        where = f"media_refs.items[{index}]"
        if ref.modality == _VIDEO:
            set_source(target.videos.add(), ref.url, f"{where}.url")
        elif ref.modality == _IMAGE:
            set_source(target.images.add(), ref.url, f"{where}.url")
        else:
            raise errors.InvalidArgument(f"{where}.modality: expected image or video, got {ref.modality}", field=where)
    return made


def _spec_from(request: Any) -> GenerateSpec:
    spec = convert.spec_from_proto(request_from(request), whole=not request.stream)
    return replace(spec, constrain_reasoning=request.sampling_params.grammar_from_first_token)


def _sampling(params: Any) -> types_pb2.SamplingParams:
    for name in _UNSERVED:
        if params.HasField(name):
            raise errors.Unimplemented(f"sampling_params.{name}: not supported")
    if params.include_stop_str_in_output:
        raise errors.Unimplemented("sampling_params.include_stop_str_in_output: not supported")
    made = types_pb2.SamplingParams(
        stop=params.stop, stop_token_ids=params.stop_token_ids, ignore_eos=params.ignore_eos
    )
    given = {name: getattr(params, name) for name in _COPIED}
    given |= {name: getattr(params, name) for name in _ZERO_IS_UNSET if getattr(params, name)}
    given |= {name: getattr(params, name) for name in _OPTIONAL if params.HasField(name)}
    if params.top_k == _NO_TOP_K:
        given["top_k"] = 0
    for name, value in given.items():
        try:
            setattr(made, name, value)
        except ValueError:  # these fields are unsigned in this protocol and signed in saccade.v1
            where = f"sampling_params.{name}"
            raise errors.InvalidArgument(f"{where}: expected at most {2**31 - 1}, got {value}", field=where) from None
    if params.HasField("seed"):
        made.seed = params.seed % 2**64  # negative seeds are allowed in this protocol
    for token, bias in params.logit_bias.items():
        if token < 0:
            raise errors.InvalidArgument(f"sampling_params.logit_bias: {token} is not a token id", field="logit_bias")
        made.logit_bias[token] = bias
    _set_format(made.response_format, params)
    if not made.response_format.WhichOneof("kind"):
        made.ClearField("response_format")
    return made


def _set_format(target: types_pb2.ResponseFormat, params: Any) -> None:
    kind = params.WhichOneof("constraint")
    if kind in _FORMATS:
        setattr(target, _FORMATS[kind], getattr(params, kind))
    elif kind == "json_object" and params.json_object:
        target.json_object.SetInParent()
    elif kind == "choice":
        target.choice.choices.extend(params.choice.choices)
    elif kind == "structural_tag":
        raise errors.Unimplemented("sampling_params.structural_tag: not supported")


@dataclass
class _Sample:
    ids: list[int]
    logprobs: list[Logprob]


class _Answer:
    """Converts the events of one request to responses."""

    def __init__(self, stream: bool) -> None:
        self._stream = stream
        self._prompt = 0
        self._samples: dict[int, _Sample] = {}

    def add(self, event: Started | Delta | Finished) -> Any | None:
        """The response to send now, if any."""
        match event:
            case Started():
                self._prompt = event.prompt_tokens
            case Delta() if self._stream:
                return self._chunk(event)
            case Delta():
                sample = self._samples.setdefault(event.index, _Sample([], []))
                sample.ids += event.token_ids
                sample.logprobs += event.logprobs
            case Finished():
                return self._complete(event, event.usage)
        return None

    def _chunk(self, event: Delta) -> Any | None:
        if not event.token_ids:
            return None
        chunk = vllm_engine_pb2.GenerateStreamChunk(
            token_ids=event.token_ids, prompt_tokens=self._prompt, completion_tokens=len(event.token_ids),
            index=event.index,
        )  # fmt: skip
        if event.logprobs:
            chunk.output_logprobs.CopyFrom(_logprobs(event.logprobs))
        return vllm_engine_pb2.GenerateResponse(chunk=chunk)

    def _complete(self, event: Finished, usage: Usage) -> Any:
        sample = self._samples.get(event.index, _Sample([], []))
        complete = vllm_engine_pb2.GenerateComplete(
            output_ids=sample.ids, finish_reason=_REASONS[event.reason], prompt_tokens=usage.prompt_tokens,
            completion_tokens=usage.completion_tokens, cached_tokens=usage.cached_tokens, index=event.index,
        )  # fmt: skip
        if sample.logprobs:
            complete.output_logprobs.CopyFrom(_logprobs(sample.logprobs))
        if event.stop_string is not None:
            complete.matched_stop_str = event.stop_string
        elif event.stop_token is not None:
            complete.matched_token_id = event.stop_token
        return vllm_engine_pb2.GenerateResponse(complete=complete)


def _logprobs(found: Sequence[Logprob]) -> Any:
    return vllm_engine_pb2.OutputLogProbs(
        token_ids=[one.token_id for one in found],
        token_logprobs=[one.logprob for one in found],
        top_logprobs=[
            vllm_engine_pb2.TopLogProbs(
                values=[value for _, value in one.top], token_ids=[token for token, _ in one.top]
            )
            for one in found
        ],
    )


class VllmEngineServicer:
    """The methods by their names in the protocol. `service.rpc.interceptor` converts their errors to statuses."""

    def __init__(
        self, calls: Calls, model: model_pb2.Model, assets: ModelAssets, *, ready: Callable[[], bool], version: str,
        max_seqs: int,
    ) -> None:  # fmt: skip
        self._calls, self._model, self._folder = calls, model, assets.config.path
        self._reasons = assets.reasoning is not None
        self._ready, self._version, self._max_seqs = ready, version, max_seqs
        self._started = time.monotonic()
        self._last_request = 0.0

    def handler(self) -> Any:
        """The handler for `add_generic_rpc_handlers`. Methods that this server does not have end with UNIMPLEMENTED,
        which gateways accept."""
        service = vllm_engine_pb2.DESCRIPTOR.services_by_name["VllmEngine"]
        return handler_of(
            service, {name: getattr(self, name) for name in service.methods_by_name if hasattr(self, name)}
        )

    async def Generate(self, request: Any, context: Any) -> AsyncGenerator[Any, None]:
        spec = await converted_request(_spec_from, request)
        current_call().request_id = spec.request_id
        self._last_request = time.time()
        answer = _Answer(request.stream)
        async with contextlib.aclosing(self._calls.stream(spec, timeout=context.time_remaining())) as events:
            async for event in events:
                response = answer.add(event)
                if response is not None:
                    yield response

    async def Abort(self, request: Any, context: Any) -> Any:
        if (count := len(request.request_ids)) > MAX_ABORTED:
            raise errors.InvalidArgument(
                f"request_ids has {count} ids; at most {MAX_ABORTED} are allowed", field="request_ids"
            )
        for request_id in request.request_ids:
            with contextlib.suppress(errors.NotFound):  # the request has ended
                await self._calls.cancel(request_id)
        return vllm_engine_pb2.AbortResponse()

    async def HealthCheck(self, request: Any, context: Any) -> Any:
        ready = self._ready()
        return vllm_engine_pb2.HealthCheckResponse(healthy=ready, message="" if ready else "not ready")

    async def GetModelInfo(self, request: Any, context: Any) -> Any:
        model = self._model
        length = model.limits.context_length
        return vllm_engine_pb2.GetModelInfoResponse(
            model_path=model.name, served_model_name=model.name, tokenizer_path=model.name, is_generation=True,
            max_context_length=length, max_req_input_len=max(0, length - 1), vocab_size=model.vocab_size,
            supports_vision=self._takes_images, model_type=model.model_type, eos_token_ids=model.eos_token_ids,
        )  # fmt: skip

    @property
    def _takes_images(self) -> bool:
        return model_pb2.MODALITY_IMAGE in self._model.input_modalities

    async def GetServerInfo(self, request: Any, context: Any) -> Any:
        limits = self._model.limits
        kinds = {"image": limits.max_images, "video": limits.max_videos}
        return vllm_engine_pb2.GetServerInfoResponse(
            active_requests=self._calls.frontend.live, last_receive_timestamp=self._last_request,
            uptime_seconds=time.monotonic() - self._started, server_type="vllm-grpc", data_parallel_size=1,
            model_dtype=f"torch.{self._model.dtype}", max_num_seqs=self._max_seqs,
            mm_processor="inprocess" if self._takes_images else "",
            mm_media_ref_schemes=",".join(("data", *limits.uri_schemes)) if self._takes_images else "",
            mm_processor_source="flag" if self._takes_images else "",
            mm_item_limits=",".join(f"{kind}={count}" for kind, count in kinds.items() if count),
            constrained_decoding_start="after_reasoning" if self._reasons else "first_token",
        )  # fmt: skip

    async def GetLoads(self, request: Any, context: Any) -> Any:
        stats = await asyncio.wrap_future(self._calls.frontend.engine.query("stats"))
        decoder = stats["decoder"]
        running, waiting = decoder["running"], decoder["waiting"]
        usage = 1 - decoder["free_blocks"] / max(1, decoder["total_blocks"])
        load = vllm_engine_pb2.SchedulerLoad(
            num_running_reqs=running, num_waiting_reqs=waiting, num_total_reqs=running + waiting, token_usage=usage,
            utilization=running / self._max_seqs, max_running_requests=self._max_seqs,
        )  # fmt: skip
        now = datetime.datetime.now(datetime.UTC).isoformat()
        return vllm_engine_pb2.GetLoadsResponse(timestamp=now, version=self._version, dp_rank_count=1, loads=[load])

    async def GetTokenizer(self, request: Any, context: Any) -> AsyncGenerator[Any, None]:
        """The tokenizer's files as a zip file, in chunks; the last one has the SHA-256 of the whole file."""
        data = await asyncio.to_thread(self._tokenizer)
        chunks = [data[start : start + CHUNK_BYTES] for start in range(0, len(data), CHUNK_BYTES)]
        for index, chunk in enumerate(chunks):
            last = index == len(chunks) - 1
            yield common_pb2.GetTokenizerChunk(data=chunk, sha256=hashlib.sha256(data).hexdigest() if last else "")

    def _tokenizer(self) -> bytes:
        if not (self._folder / "tokenizer.json").exists():
            raise errors.FailedPrecondition("the model has no tokenizer")
        out = io.BytesIO()
        with zipfile.ZipFile(out, "w", zipfile.ZIP_DEFLATED) as archive:
            for name in TOKENIZER_FILES:
                if (self._folder / name).exists():
                    # A fixed time, so that the archive of the same files is always the same.
                    archive.writestr(zipfile.ZipInfo(name), (self._folder / name).read_bytes())
        return out.getvalue()
