"""Limits on one request, checked before its content is decoded, tokenised or copied."""

from __future__ import annotations

from dataclasses import dataclass, field

from service.common import errors
from service.common.types import ChatInput, GenerateSpec, Image, RawInput, TokensInput, ToolCall, Video
from service.media.images import MediaLimits

MAX_COUNT = 2**31 - 1
MAX_SAMPLES = 64
MAX_LOGPROBS = 100
MAX_STOP_STRINGS = 32
MAX_STOP_LENGTH = 256
MAX_TEMPLATE_JSON = 2**18
"""Longest arguments of a chat template, in characters: parsing takes milliseconds and blocks the event loop."""


@dataclass(frozen=True)
class FrontendLimits:
    """Limits on one request."""

    max_queue: int = 1024
    max_images: int = 16
    max_videos: int = 4
    media: MediaLimits = field(default_factory=MediaLimits)
    prepared_bytes: int = 2**31
    """Bytes of the patches of images and clips that the encoder has not read yet."""
    prepared_cache_bytes: int = 2**28
    """Bytes of patches that are kept for later requests with the same file."""
    max_answer_bytes: int = 2**31 - 1
    """Bytes of one response message."""


def check_counts(spec: GenerateSpec, limits: FrontendLimits) -> None:
    """Checks the numbers of samples, log-probabilities, stop strings, images and videos. Raises InvalidArgument."""
    bounds = [
        ("sampling.n", spec.n, 1, MAX_SAMPLES),
        ("sampling.logprobs", spec.sampling.get("logprobs"), 0, MAX_LOGPROBS),
        ("sampling.max_reasoning_tokens", spec.max_reasoning_tokens, 0, MAX_COUNT),
        ("sampling.prompt_logprobs", spec.sampling.get("prompt_logprobs"), 0, MAX_LOGPROBS),
        ("images", sum(isinstance(source, Image) for source in spec.media), 0, limits.max_images),
        ("videos", sum(isinstance(source, Video) for source in spec.media), 0, limits.max_videos),
        ("sampling.stop", len(spec.stop), 0, MAX_STOP_STRINGS),
    ]
    for source in spec.media:
        if isinstance(source, Video):
            bounds += _bounds_of(source, limits.media)
    for name, value, low, high in bounds:
        if value is not None and not low <= value <= high:
            raise errors.InvalidArgument(f"{name} is {value}; it must be from {low} to {high}", field=name)
    for i, stop in enumerate(spec.stop):
        check_length(f"sampling.stop[{i}]", stop, MAX_STOP_LENGTH)
    if spec.continued and spec.n != 1:
        raise errors.InvalidArgument(f"continued_token_ids need n = 1, and n is {spec.n}", field="continued_token_ids")


def _bounds_of(source: Video, limits: MediaLimits) -> list[tuple[str, int | None, int, int]]:
    if len(source.frames) > limits.video.max_frames:
        raise errors.InvalidArgument(
            f"{source.field}.frames has {len(source.frames)} frames; at most {limits.video.max_frames} are allowed",
            field=f"{source.field}.frames", reason="VIDEO_TOO_LARGE",
        )  # fmt: skip
    return [(f"{source.field}.max_frames", source.max_frames, 1, limits.video_frames)]


def check_size(spec: GenerateSpec, limits: FrontendLimits, max_len: int, longest_token: int) -> None:
    """Rejects requests that cannot fit a context of `max_len` tokens, by counts that are cheap to compute.

    A message, and a part of one, counts as at least one token, and no token stands for more than `longest_token`
    characters. Raises InvalidArgument."""
    videos = sum(isinstance(source, Video) for source in spec.media)
    room = max_len - 1  # at least one token is the answer's
    counts = [("continued_token_ids", len(spec.continued), room - 1, "tokens")]  # and one is the prompt's
    match spec.input:
        case ChatInput(messages):
            counts.append(("chat.messages", len(messages), room, "messages"))
            counts.append(("chat.messages", sum(len(message.parts) for message in messages), room, "parts"))
        case TokensInput(ids):
            # A pruned video may keep fewer rows than it has ids.
            counts.append(("tokens.ids", len(ids), room + videos * limits.media.video_frames, "tokens"))
    counts.append(("input", characters(spec), room * longest_token, "characters"))
    for name, count, most, what in counts:
        if count > most:
            told, beside = f"the prompt is too long: {count}", "the answer"
            if name == "continued_token_ids":
                told, beside = str(count), "the prompt and the answer"
            raise too_long(
                f"{name}: {told} {what}; the maximum context length of {max_len} tokens holds at most {most} besides "
                f"{beside}", name, most, count,
            )  # fmt: skip


def check_length(field: str, text: str, most: int, *, least: int = 1) -> None:
    """Raises InvalidArgument for a text that does not have from `least` to `most` characters."""
    if not least <= len(text) <= most:
        raise errors.InvalidArgument(
            f"{field} has {len(text)} characters; it must have from {least} to {most}", field=field
        )


def too_long(message: str, field: str, limit: int, got: int) -> errors.InvalidArgument:
    """The error for a request that does not fit the context. `limit` and `got`: of what the message counts."""
    return errors.InvalidArgument(
        message, reason="CONTEXT_LENGTH_EXCEEDED", field=field, metadata={"limit": str(limit), "got": str(got)}
    )


def _written(call: ToolCall) -> int:
    """A lower bound on the characters that a call adds to the prompt."""
    return len(call.name) + sum(len(key) + (len(value) if isinstance(value, str) else 1)
                                for key, value in call.arguments.items())  # fmt: skip


def characters(spec: GenerateSpec) -> int:
    """Characters of the input's text."""
    match spec.input:
        case ChatInput(messages):
            text = sum(len(part or "") for message in messages for part in (message.reasoning, *message.parts))
            return text + sum(_written(call) for message in messages for call in message.tool_calls)
        case RawInput(text=text):
            return len(text)
    return 0
