"""Turns response messages into the dataclasses of `saccade.types`: the same for all three clients."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, TypedDict

from saccade.errors import Internal
from saccade.types import (
    Delta,
    Embedding,
    FinishReason,
    Generation,
    MediaLayout,
    Model,
    ModelLimits,
    Sample,
    Tensor,
    TokenLogprob,
    Tokens,
    ToolCall,
    ToolCallDelta,
    TopLogprob,
    Usage,
)
from saccade.v1 import inference_pb2, model_pb2, types_pb2

if TYPE_CHECKING:
    from typing_extensions import Unpack

_FINISH_REASONS: dict[int, FinishReason] = {
    types_pb2.FINISH_REASON_STOP: "stop",
    types_pb2.FINISH_REASON_LENGTH: "length",
    types_pb2.FINISH_REASON_ABORTED: "aborted",
    types_pb2.FINISH_REASON_TOOL_CALLS: "tool_calls",
}


def usage_from(message: types_pb2.Usage) -> Usage:
    def seconds(field: str) -> float | None:
        return getattr(message, field).ToTimedelta().total_seconds() if message.HasField(field) else None

    return Usage(
        prompt_tokens=message.prompt_tokens,
        image_tokens=message.image_tokens,
        cached_tokens=message.cached_tokens,
        completion_tokens=message.completion_tokens,
        queue_time=seconds("queue_time"),
        time_to_first_token=seconds("time_to_first_token"),
        video_tokens=message.video_tokens,
        video_frames=message.video_frames,
        reasoning_tokens=message.reasoning_tokens,
        time_to_last_token=seconds("time_to_last_token"),
    )


def logprobs_from(messages: Any) -> list[TokenLogprob]:
    return [
        TokenLogprob(
            item.token_id,
            item.logprob,
            tuple(TopLogprob(top.token_id, top.logprob, top.token) for top in item.top),
            item.token,
        )
        for item in messages
    ]


def prompt_logprobs_from(
    messages: Any, samples: list[Sample], sampling: types_pb2.SamplingParams
) -> list[TokenLogprob | None] | None:
    """By position in the prompt; None if they were not requested. A prompt of one token has no message."""
    if not sampling.HasField("prompt_logprobs") or not samples:
        return None
    found: list[TokenLogprob | None] = [None] * samples[0].usage.prompt_tokens
    for message, logprob in zip(messages, logprobs_from([m.token for m in messages]), strict=True):
        found[message.position] = logprob
    return found


def delta_from(message: inference_pb2.Delta, with_logprobs: bool) -> Delta:
    return Delta(
        text=message.text,
        token_ids=list(message.token_ids),
        index=message.index,
        logprobs=logprobs_from(message.logprobs) if with_logprobs else None,
        sequence=message.sequence,
        reasoning=message.reasoning,
        tool_calls=[ToolCallDelta(part.index, part.arguments, part.id, part.name) for part in message.tool_calls],
        cached_tokens=message.cached_tokens,
    )


def model_from(message: model_pb2.Model) -> Model:
    limits = message.limits
    return Model(
        name=message.name,
        version=message.version,
        model_type=message.model_type,
        dtype=message.dtype,
        takes_images=model_pb2.MODALITY_IMAGE in message.input_modalities,
        takes_videos=model_pb2.MODALITY_VIDEO in message.input_modalities,
        limits=ModelLimits(
            image_formats=tuple(limits.image_formats),
            uri_schemes=tuple(limits.uri_schemes),
            video_formats=tuple(limits.video_formats),
            **{
                item.name: getattr(limits, item.name)
                for item in limits.DESCRIPTOR.fields
                if item.name not in ("image_formats", "uri_schemes", "video_formats")
                and item.name in ModelLimits.__annotations__
            },
        ),
        default_sampling={
            item.name: value
            for item, value in message.default_sampling.ListFields()
            if isinstance(value, bool | int | float)
        },
        image_token_id=message.image_token_id if message.HasField("image_token_id") else None,
        eos_token_ids=tuple(message.eos_token_ids),
        vocab_size=message.vocab_size,
        has_tokenizer=message.has_tokenizer,
        has_chat_template=message.has_chat_template,
    )


def tokens_from(message: inference_pb2.TokenizeResponse) -> Tokens:
    return Tokens(
        list(message.token_ids),
        message.prompt_tokens,
        message.image_tokens,
        list(message.tokens_per_image),
        message.video_tokens,
        list(message.tokens_per_video),
        layouts_from(message.media),
    )


def layouts_from(messages: Iterable[types_pb2.MediaLayout]) -> list[MediaLayout]:
    return [
        MediaLayout(
            grid=(item.grid_rows, item.grid_columns),
            merge_size=item.merge_size,
            tokens=item.tokens,
            slices=(item.slice_rows, item.slice_columns),
            slice_grid=(item.slice_grid_rows, item.slice_grid_columns),
            frames=item.frames,
            slices_first=item.slices_first,
        )
        for item in messages
    ]


def embedding_from(message: inference_pb2.EmbedResponse) -> Embedding:
    """The embedding of a prompt."""
    return Embedding(
        last=tensor_from(message.last_hidden),
        mean=tensor_from(message.mean_hidden),
        prompt_tokens=message.prompt_tokens,
        image_tokens=message.image_tokens,
        model=message.model,
        model_version=message.model_version,
        request_id=message.request_id,
    )


def tensor_from(message: inference_pb2.Tensor) -> Tensor:
    return Tensor(tuple(message.shape), message.data)


def _stop_match(message: inference_pb2.Sample | inference_pb2.Finished) -> str | int | None:
    which = message.WhichOneof("stop_match")
    return getattr(message, which) if which else None


class _Facts(TypedDict):
    """The fields that every answer has."""

    request_id: str
    model: str
    model_version: str
    seed: int
    prompt_logprobs: list[TokenLogprob | None] | None
    media: list[MediaLayout]
    prompt_token_ids: list[int] | None


def _generation(samples: list[Sample], **facts: Unpack[_Facts]) -> Generation:
    if not samples:
        raise Internal("the server sent no answer", request_id=facts["request_id"])
    first = samples[0]
    return Generation(
        text=first.text,
        token_ids=first.token_ids,
        finish_reason=first.finish_reason,
        usage=first.usage,
        logprobs=first.logprobs,
        samples=samples,
        reasoning=first.reasoning,
        tool_calls=first.tool_calls,
        **facts,
    )


def generation_from(response: inference_pb2.GenerateResponse, sampling: types_pb2.SamplingParams) -> Generation:
    """The answer of a unary call. `sampling`: the request's."""
    with_logprobs = sampling.HasField("logprobs")
    samples = [
        Sample(
            text=sample.text,
            token_ids=list(sample.token_ids),
            finish_reason=_FINISH_REASONS.get(sample.finish_reason, ""),
            usage=usage_from(sample.usage),
            logprobs=logprobs_from(sample.logprobs) if with_logprobs else None,
            index=sample.index,
            stop_match=_stop_match(sample),
            reasoning=sample.reasoning,
            tool_calls=[ToolCall(call.id, call.name, call.arguments) for call in sample.tool_calls],
        )
        for sample in sorted(response.samples, key=lambda sample: sample.index)
    ]
    return _generation(
        samples,
        request_id=response.request_id,
        model=response.model,
        model_version=response.model_version,
        seed=response.seed,
        prompt_logprobs=prompt_logprobs_from(response.prompt_logprobs, samples, sampling),
        media=layouts_from(response.media),
        prompt_token_ids=list(response.prompt_token_ids) or None,
    )


class Assembler:
    """Assembles the messages of one stream. Keeps what has been received; `finish` checks that it is complete."""

    def __init__(self, request: inference_pb2.GenerateRequest) -> None:
        self.request = request
        self.with_logprobs = request.sampling.HasField("logprobs")
        self.started: inference_pb2.Started | None = None
        self._deltas: dict[int, list[Delta]] = {}
        self._finished: dict[int, inference_pb2.Finished] = {}

    def take(self, response: inference_pb2.StreamGenerateResponse) -> Delta | None:
        """Adds a message; returns the delta for the user if it is one."""
        event = response.WhichOneof("event")
        if event == "delta":
            delta = delta_from(response.delta, self.with_logprobs)
            self._deltas.setdefault(delta.index, []).append(delta)
            return delta
        if event == "started":
            self.started = response.started
        elif event == "finished":
            self._finished[response.finished.index] = response.finished
        return None

    def text(self, index: int = 0) -> str:
        return "".join(delta.text for delta in self._deltas.get(index, ()))

    def reasoning(self, index: int = 0) -> str:
        return "".join(delta.reasoning for delta in self._deltas.get(index, ()))

    def tool_calls(self, index: int = 0) -> dict[int, ToolCall]:
        """By index, as far as they have been received."""
        parts: dict[int, list[ToolCallDelta]] = {}
        for delta in self._deltas.get(index, ()):
            for part in delta.tool_calls:
                parts.setdefault(part.index, []).append(part)
        return {
            at: ToolCall(mine[0].id, mine[0].name, "".join(part.arguments for part in mine))
            for at, mine in parts.items()
        }

    def token_ids(self, index: int = 0) -> list[int]:
        return [token_id for delta in self._deltas.get(index, ()) for token_id in delta.token_ids]

    @property
    def complete(self) -> bool:
        """Whether the end of each sample has been received."""
        return self.started is not None and len(self._finished) >= max(1, self.request.sampling.n)

    def finish(self) -> Generation:
        """The whole answer, after the stream has ended.

        Raises:
            Internal: the stream ended without an error and yet without a Finished for each sample.
        """
        if not self.complete:
            expected = max(1, self.request.sampling.n)
            raise Internal(
                f"the stream ended after {len(self._finished)} of {expected} samples",
                request_id=self.request.request_id,
            )
        started = self.started
        assert started is not None
        samples = [self._sample(index) for index in sorted(self._finished)]
        return _generation(
            samples,
            request_id=started.request_id,
            model=started.model,
            model_version=started.model_version,
            seed=started.seed,
            prompt_logprobs=prompt_logprobs_from(self._finished[0].prompt_logprobs, samples, self.request.sampling),
            media=layouts_from(started.media),
            prompt_token_ids=list(started.prompt_token_ids) or None,
        )

    def _sample(self, index: int) -> Sample:
        finished = self._finished[index]
        parts = [part for delta in self._deltas.get(index, ()) for part in delta.logprobs or ()]
        return Sample(
            text=self.text(index),
            token_ids=self.token_ids(index),
            finish_reason=_FINISH_REASONS.get(finished.finish_reason, ""),
            usage=usage_from(finished.usage),
            logprobs=parts if self.with_logprobs else None,
            index=index,
            stop_match=_stop_match(finished),
            reasoning=self.reasoning(index),
            tool_calls=list(self.tool_calls(index).values()),
        )
