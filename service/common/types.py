"""Types of the frontend: a request as its caller meant it, and the events of an answer. Plain Python, no protos."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

FinishReason = Literal["stop", "length", "aborted"]


@dataclass(frozen=True)
class Message:
    """One turn. `parts` is the content in order: text as str, None where an image stands."""

    role: str
    parts: tuple[str | None, ...]


@dataclass(frozen=True)
class ImageSource:
    """One image and where in the request it was, for error messages: its encoded bytes, or where they can be had."""

    data: bytes
    field: str
    media_id: str | None = None
    uri: str | None = None

    @property
    def elsewhere(self) -> bool:
        """Whether the bytes have still to be fetched."""
        return self.media_id is not None or self.uri is not None


@dataclass(frozen=True)
class VideoSource:
    """One clip: the encoded bytes of a file or where they can be had, or its frames."""

    data: bytes
    field: str
    media_id: str | None = None
    uri: str | None = None
    frames: tuple[ImageSource, ...] = ()
    fps: float | None = None
    """Of `frames`."""
    max_frames: int | None = None
    """Frames to look at; None: as many as the server does."""

    @property
    def elsewhere(self) -> bool:
        """Whether bytes have still to be fetched."""
        return self.media_id is not None or self.uri is not None or any(frame.elsewhere for frame in self.frames)


MediaSource = ImageSource | VideoSource


def files(media: Iterable[MediaSource]) -> Iterator[MediaSource]:
    """Each file of images and clips: a clip's own, or those of its frames."""
    for source in media:
        yield from source.frames if isinstance(source, VideoSource) and source.frames else (source,)


@dataclass(frozen=True)
class ChatInput:
    """Messages in which None stands for the next of the request's images and clips."""

    messages: tuple[Message, ...]
    template_arguments: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class RawInput:
    """Text that is tokenised as it is."""

    text: str


@dataclass(frozen=True)
class TokensInput:
    """Ids that are taken as they are, one image token id for each image; for a clip one, or one for each of its
    temporal patches."""

    ids: tuple[int, ...]


@dataclass(frozen=True)
class GenerateSpec:
    """A request. `sampling` holds only the fields that the caller set."""

    request_id: str
    model: str
    input: ChatInput | RawInput | TokensInput | ImageInput
    media: tuple[MediaSource, ...] = ()
    """Images and clips in the order of the prompt."""
    sampling: Mapping[str, Any] = field(default_factory=dict)
    stop: tuple[str, ...] = ()
    n: int = 1
    continued: tuple[int, ...] = ()
    priority: int = 0


@dataclass(frozen=True)
class Tokenized:
    """What a prompt becomes: ids with one image token id per image and per temporal patch, and how many tokens each
    image and each clip takes."""

    ids: tuple[int, ...]
    prompt_tokens: int
    tokens_per_image: tuple[int, ...]
    tokens_per_video: tuple[int, ...]

    @property
    def image_tokens(self) -> int:
        return sum(self.tokens_per_image)

    @property
    def video_tokens(self) -> int:
        return sum(self.tokens_per_video)


@dataclass(frozen=True)
class ImageInput:
    """The request's only image, without a prompt."""


@dataclass(frozen=True)
class Embedded:
    """Numbers about a prompt or an image, each `[..., hidden]` little-endian float32; empty where not asked for."""

    request_id: str
    model: str
    version: str
    prompt_tokens: int
    image_tokens: int
    hidden_size: int
    last: bytes = b""
    mean: bytes = b""
    rows: bytes = b""


@dataclass(frozen=True)
class Logprob:
    """Natural logs of raw probabilities."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...]


@dataclass(frozen=True)
class PromptLogprob:
    """Of the token at a position of the prompt."""

    position: int
    token: Logprob


@dataclass(frozen=True)
class Usage:
    prompt_tokens: int
    image_tokens: int
    cached_tokens: int
    completion_tokens: int
    queue_seconds: float
    first_token_seconds: float
    video_tokens: int = 0
    video_frames: int = 0


@dataclass(frozen=True)
class Started:
    """The request is admitted."""

    request_id: str
    prompt_tokens: int
    image_tokens: int
    model: str
    version: str
    seed: int
    video_tokens: int = 0


@dataclass(frozen=True)
class Delta:
    """A piece of sample `index`. Text is whole characters; ids may run ahead of it."""

    index: int
    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[Logprob, ...]
    sequence: int


@dataclass(frozen=True)
class Finished:
    """The end of sample `index`."""

    index: int
    reason: FinishReason
    usage: Usage
    stop_string: str | None = None
    stop_token: int | None = None
    prompt_logprobs: tuple[PromptLogprob, ...] = ()
    """With the first sample, where they were asked for."""


Event = Started | Delta | Finished
