"""Converts between protobuf messages and the service's own types, in both directions."""

from __future__ import annotations

import secrets
from collections.abc import Iterable, Sequence
from typing import Any

from encoder.media_limits import FORMATS, video_formats
from saccade.v1 import inference_pb2, model_pb2, types_pb2
from service.answers.bounds import (
    MAX_LOGPROBS,
    MAX_SAMPLES,
    MAX_STOP_LENGTH,
    MAX_STOP_STRINGS,
    FrontendLimits,
)
from service.answers.formats import constraint_from_proto
from service.answers.inputs import asked_thinking, image_from_proto, input_from_proto
from service.common import errors
from service.common.config import ServerOptions
from service.common.types import (
    CallDelta,
    ChatInput,
    Delta,
    Embedded,
    Event,
    Finished,
    GenerateSpec,
    ImageInput,
    Logprob,
    MediaLayout,
    MediaSource,
    RawInput,
    Started,
    Tokenized,
    TokensInput,
    Usage,
)
from service.engine.types import EngineInfo
from service.model.assets import ModelAssets

MAX_REQUEST_ID = 128
_REASONS = {
    "stop": types_pb2.FINISH_REASON_STOP,
    "length": types_pb2.FINISH_REASON_LENGTH,
    "aborted": types_pb2.FINISH_REASON_ABORTED,
    "tool_calls": types_pb2.FINISH_REASON_TOOL_CALLS,
}
_SCALARS = (
    "max_tokens", "min_tokens", "temperature", "top_p", "top_k", "min_p", "repetition_penalty", "presence_penalty",
    "frequency_penalty", "seed", "ignore_eos", "logprobs", "prompt_logprobs",
)  # fmt: skip


def spec_from_proto(request: inference_pb2.GenerateRequest, *, whole: bool = False) -> GenerateSpec:
    """Converts a request. `whole`: the caller reads the answer only at its end. Raises InvalidArgument or Unimplemented
    with the path of the field at fault."""
    value, media = input_from_proto(request)
    sampling, constraint = request.sampling, constraint_from_proto(request.sampling)
    if constraint is not None and constraint.format is not None and request.chat.continue_final_message:
        raise errors.InvalidArgument(
            "response_format describes a whole answer and cannot be combined with chat.continue_final_message",
            field="sampling.response_format",
        )
    return GenerateSpec(
        request_id=_request_id(request.request_id),
        model=request.model,
        input=value,
        media=media,
        sampling=_sampling(sampling),
        stop=tuple(sampling.stop),
        n=sampling.n if sampling.HasField("n") else 1,
        clamp_max_tokens=sampling.clamp_max_tokens,
        continued=tuple(request.continued_token_ids),
        priority=request.priority,
        constraint=constraint,
        max_reasoning_tokens=sampling.max_reasoning_tokens if sampling.HasField("max_reasoning_tokens") else None,
        thinking=asked_thinking(value),
        show_special=sampling.HasField("skip_special_tokens") and not sampling.skip_special_tokens,
        return_prompt_ids=request.return_prompt_token_ids,
        whole=whole,
    )


def _request_id(given: str) -> str:
    if len(given) > MAX_REQUEST_ID:
        raise errors.InvalidArgument(
            f"request_id has {len(given)} characters; at most {MAX_REQUEST_ID} are allowed", field="request_id"
        )
    return given or secrets.token_hex(8)


def spec_from_embed(request: inference_pb2.EmbedRequest) -> GenerateSpec:
    """Converts an embedding request to a request for one token. Raises like `spec_from_proto`."""
    value: ChatInput | RawInput | TokensInput | ImageInput = ImageInput()
    if request.WhichOneof("input") == "image":
        media: tuple[MediaSource, ...] = (image_from_proto(request.image, "image"),)
    else:
        value, media = input_from_proto(request)
    return GenerateSpec(
        request_id=_request_id(request.request_id), model=request.model, input=value, media=media,
        sampling={"max_tokens": 1, "temperature": 0.0}, priority=request.priority,
    )  # fmt: skip


def embedded_to_proto(embedded: Embedded) -> inference_pb2.EmbedResponse:
    response = inference_pb2.EmbedResponse(
        request_id=embedded.request_id, model=embedded.model, model_version=embedded.version,
        prompt_tokens=embedded.prompt_tokens, image_tokens=embedded.image_tokens,
    )  # fmt: skip
    for target, data in (("last_hidden", embedded.last), ("mean_hidden", embedded.mean)):
        if data:
            getattr(response, target).CopyFrom(inference_pb2.Tensor(shape=[embedded.hidden_size], data=data))
    if embedded.rows:
        shape = [embedded.image_tokens, embedded.hidden_size]
        response.image_embedding.CopyFrom(inference_pb2.Tensor(shape=shape, data=embedded.rows))
    return response


def spec_from_tokenize(request: inference_pb2.TokenizeRequest) -> GenerateSpec:
    """Converts a request of which only the prompt is used. Raises like `spec_from_proto`."""
    value, media = input_from_proto(request)
    return GenerateSpec(request_id="", model=request.model, input=value, media=media)


def chunking_from_proto(request: inference_pb2.StreamGenerateRequest) -> tuple[int | None, float | None]:
    """(chunk_tokens, max_chunk_delay in seconds); None if unset. Raises InvalidArgument."""
    tokens = request.chunk_tokens if request.HasField("chunk_tokens") and request.chunk_tokens > 1 else None
    if not request.HasField("max_chunk_delay"):
        return tokens, None
    delay = request.max_chunk_delay.seconds + request.max_chunk_delay.nanos / 1e9
    if delay < 0:
        raise errors.InvalidArgument(f"max_chunk_delay is {delay:g} s; it cannot be negative", field="max_chunk_delay")
    return tokens, delay or None


def tokenized_to_proto(tokenized: Tokenized) -> inference_pb2.TokenizeResponse:
    return inference_pb2.TokenizeResponse(
        token_ids=tokenized.ids, prompt_tokens=tokenized.prompt_tokens, image_tokens=tokenized.image_tokens,
        tokens_per_image=tokenized.tokens_per_image, video_tokens=tokenized.video_tokens,
        tokens_per_video=tokenized.tokens_per_video, media=_media(tokenized.media),
        context_length=tokenized.context_length,
    )  # fmt: skip


def _sampling(sampling: types_pb2.SamplingParams) -> dict[str, Any]:
    fields: Any = sampling
    values: dict[str, Any] = {name: getattr(fields, name) for name in _SCALARS if fields.HasField(name)}
    if sampling.logit_bias:
        values["logit_bias"] = dict(sampling.logit_bias)
    if sampling.stop_token_ids:
        values["stop_token_ids"] = frozenset(sampling.stop_token_ids)
    return values


def event_to_proto(event: Event) -> inference_pb2.StreamGenerateResponse:
    match event:
        case Started():
            started = inference_pb2.Started(
                request_id=event.request_id, prompt_tokens=event.prompt_tokens, image_tokens=event.image_tokens,
                model=event.model, model_version=event.version, seed=event.seed,
                video_tokens=event.video_tokens, media=_media(event.media), prompt_token_ids=event.prompt_ids,
            )  # fmt: skip
            return inference_pb2.StreamGenerateResponse(started=started)
        case Delta():
            delta = inference_pb2.Delta(
                index=event.index, text=event.text, token_ids=event.token_ids,
                logprobs=[_logprob(p) for p in event.logprobs], sequence=event.sequence, reasoning=event.reasoning,
                tool_calls=merged_calls(event.calls), cached_tokens=event.cached_tokens,
            )  # fmt: skip
            return inference_pb2.StreamGenerateResponse(delta=delta)
    finished = inference_pb2.Finished(
        index=event.index, finish_reason=_REASONS[event.reason], usage=_usage(event.usage)
    )
    _set_stop(finished, event)
    response = inference_pb2.StreamGenerateResponse(finished=finished)
    _add_prompt(response.finished, event)
    return response


def merged_calls(deltas: Sequence[CallDelta]) -> list[types_pb2.ToolCallDelta]:
    """Merges the parts of each call into one message."""
    parts: dict[int, list[CallDelta]] = {}
    for delta in deltas:
        parts.setdefault(delta.index, []).append(delta)
    return [
        types_pb2.ToolCallDelta(
            index=index, id=found[0].id, name=found[0].name, arguments="".join(part.arguments for part in found)
        )
        for index, found in parts.items()
    ]


def _set_stop(target: Any, event: Finished) -> None:
    if event.stop_string is not None:
        target.stop_string = event.stop_string
    elif event.stop_token is not None:
        target.stop_token_id = event.stop_token


def _logprob(value: Logprob) -> types_pb2.TokenLogprob:
    own, *others = value.texts or (b"",) * (1 + len(value.top))
    top = [types_pb2.TopLogprob(token_id=t, logprob=p, token=text) for (t, p), text in zip(value.top, others)]
    return types_pb2.TokenLogprob(token_id=value.token_id, logprob=value.logprob, top=top, token=own)


def _add_prompt(target: inference_pb2.Finished | inference_pb2.GenerateResponse, event: Finished) -> None:
    """Adds the log-probabilities of a prompt one by one: to copy those of a long prompt in one call would stop all
    other threads for a tenth of a second."""
    for value in event.prompt_logprobs:
        target.prompt_logprobs.add(position=value.position, token=_logprob(value.token))


def _media(layouts: Iterable[MediaLayout]) -> list[types_pb2.MediaLayout]:
    return [
        types_pb2.MediaLayout(
            grid_rows=layout.grid[0], grid_columns=layout.grid[1], merge_size=layout.merge_size, tokens=layout.tokens,
            slice_rows=layout.slices[0], slice_columns=layout.slices[1], slice_grid_rows=layout.slice_grid[0],
            slice_grid_columns=layout.slice_grid[1], frames=layout.frames, slices_first=layout.slices_first,
        )
        for layout in layouts
    ]  # fmt: skip


def _usage(usage: Usage) -> types_pb2.Usage:
    proto = types_pb2.Usage(
        prompt_tokens=usage.prompt_tokens, image_tokens=usage.image_tokens, cached_tokens=usage.cached_tokens,
        completion_tokens=usage.completion_tokens, video_tokens=usage.video_tokens, video_frames=usage.video_frames,
        reasoning_tokens=usage.reasoning_tokens,
    )  # fmt: skip
    proto.queue_time.FromMicroseconds(round(usage.queue_seconds * 1e6))
    proto.time_to_first_token.FromMicroseconds(round(usage.first_token_seconds * 1e6))
    proto.time_to_last_token.FromMicroseconds(round(usage.last_token_seconds * 1e6))
    return proto


class ResponseBuilder:
    """Collects the events of a stream into the response of a unary call."""

    def __init__(self) -> None:
        self._started: Started | None = None
        self._samples: dict[int, inference_pb2.Sample] = {}
        self._text: dict[int, list[tuple[str, str]]] = {}
        """Reasoning and text of the deltas of each sample."""
        self._calls: dict[int, list[CallDelta]] = {}
        self._response = inference_pb2.GenerateResponse()

    def add(self, event: Event) -> None:
        match event:
            case Started():
                self._started = event
            case Delta():
                sample = self._sample(event.index)
                sample.token_ids.extend(event.token_ids)
                sample.logprobs.extend(_logprob(p) for p in event.logprobs)
                self._text.setdefault(event.index, []).append((event.reasoning, event.text))
                self._calls.setdefault(event.index, []).extend(event.calls)
            case Finished():
                sample = self._sample(event.index)
                sample.finish_reason = _REASONS[event.reason]
                sample.usage.CopyFrom(_usage(event.usage))
                _set_stop(sample, event)
                _add_prompt(self._response, event)

    def _sample(self, index: int) -> inference_pb2.Sample:
        return self._samples.setdefault(index, inference_pb2.Sample(index=index))

    def response(self) -> inference_pb2.GenerateResponse:
        """The response, once all events have been added. To be called once."""
        assert self._started is not None, "a stream without Started"
        for index, pieces in self._text.items():
            reasoning, text = ("".join(part) for part in zip(*pieces))
            self._samples[index].reasoning, self._samples[index].text = reasoning, text
            for call in merged_calls(self._calls[index]):
                self._samples[index].tool_calls.add(id=call.id, name=call.name, arguments=call.arguments)
        response, started = self._response, self._started
        response.request_id, response.seed = started.request_id, started.seed
        response.model, response.model_version = started.model, started.version
        response.samples.extend(self._samples[i] for i in sorted(self._samples))
        response.media.extend(_media(started.media))
        response.prompt_token_ids.extend(started.prompt_ids)
        return response


def model_to_proto(
    info: EngineInfo, assets: ModelAssets, limits: FrontendLimits, options: ServerOptions | None = None
) -> model_pb2.Model:
    """What clients need to know about the model before they send a request."""
    vision = assets.vision
    modalities = [model_pb2.MODALITY_TEXT] + ([model_pb2.MODALITY_IMAGE] if vision else [])
    modalities += [model_pb2.MODALITY_VIDEO] if info.takes_video else []
    defaults = types_pb2.SamplingParams()
    for name, value in assets.sampling_defaults.items():
        setattr(defaults, name, value)
    return model_pb2.Model(
        name=info.model,
        version=info.revision,
        model_type=assets.config.family.name,
        dtype=info.dtype,
        input_modalities=modalities,
        default_sampling=defaults,
        image_token_id=assets.image_token_id,
        eos_token_ids=sorted(assets.eos_token_ids),
        vocab_size=assets.config.decoder.vocab_size,
        has_tokenizer=assets.tokenizer is not None,
        has_chat_template=assets.template.present,
        limits=model_pb2.Limits(
            context_length=info.max_len,
            max_message_bytes=options.max_message_bytes if options else 0,
            max_images=limits.max_images if vision else 0,
            max_image_bytes=limits.media.image.max_bytes,
            max_image_pixels=limits.media.image.max_pixels,
            min_image_tokens=vision.min_image_tokens if vision else 0,
            max_image_tokens=min(vision.max_image_tokens, info.max_image_tokens) if vision else 0,
            image_formats=sorted(FORMATS) if vision else [],
            uri_schemes=["https"] if vision and options and options.image_url_hosts else [],
            max_samples=MAX_SAMPLES,
            max_logprobs=MAX_LOGPROBS,
            max_stop_strings=MAX_STOP_STRINGS,
            max_stop_string_length=MAX_STOP_LENGTH,
            **_video_limits(limits, info),
        ),
    )


def _video_limits(limits: FrontendLimits, info: EngineInfo) -> dict[str, Any]:
    if not info.takes_video:
        return {}
    video = limits.media.video
    return {
        "max_videos": limits.max_videos,
        "max_video_bytes": video.max_bytes,
        "max_video_frames": limits.media.video_frames,
        "max_video_file_frames": video.max_frames,
        "max_video_pixels": video.max_total_pixels,
        "video_formats": video_formats(),
    }
