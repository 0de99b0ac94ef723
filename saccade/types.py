"""The results of the client's methods: plain frozen dataclasses, which can be compared, copied and pickled."""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, TypeAlias, TypedDict

from saccade.calling import Tool as Tool
from saccade.calling import ToolCall as ToolCall
from saccade.calling import ToolCallDelta as ToolCallDelta
from saccade.errors import SaccadeError

Role: TypeAlias = Literal["system", "user", "assistant", "tool"]
FinishReason: TypeAlias = Literal["stop", "length", "aborted", "tool_calls", ""]
"""Empty if a newer server sends a reason that this client does not know."""


class TextPart(TypedDict):
    """A part of a message's content."""

    type: Literal["text"]
    text: str


class _ImagePart(TypedDict):
    type: Literal["image", "image_url"]


class ImagePart(_ImagePart, total=False):
    """An image, given under one of these keys; without any of them, the place of the next one in `images=`."""

    image: Any
    image_url: Any
    """A URL, or `{"url": ...}`."""
    url: str
    path: str
    data: bytes
    media_id: str


class _VideoPart(TypedDict):
    type: Literal["video", "video_url"]


class VideoPart(_VideoPart, total=False):
    """A video, given under one of these keys; without any of them, the place of the next one in `videos=`."""

    video: Any
    video_url: Any
    url: str
    path: str
    data: bytes
    media_id: str
    fps: float | None
    max_frames: int | None


Part: TypeAlias = str | TextPart | ImagePart | VideoPart


class _ChatMessage(TypedDict):
    role: Role
    content: str | Sequence[Part]


class ChatMessage(_ChatMessage, total=False):
    """A message of a conversation."""

    reasoning: str
    """The assistant's reasoning before its answer."""
    tool_calls: Sequence[ToolCall] | Sequence[Mapping[str, Any]]
    """In a message of the assistant: its calls, as `Generation.tool_calls` has them, or as in OpenAI's protocol."""
    tool_call_id: str
    """In a message of a tool: the call of which it is the result."""


@dataclass(frozen=True)
class Usage:
    """Token counts of one sample.

    `prompt_tokens` counts the whole prompt, including `image_tokens`, `video_tokens` and `cached_tokens`, which were in
    the prefix cache. `video_frames` counts the sampled frames of videos. `completion_tokens` counts the generated
    tokens, `continued_token_ids` included. Times are in seconds since the request was admitted, or None if the server
    does not measure them.
    """

    prompt_tokens: int = 0
    image_tokens: int = 0
    cached_tokens: int = field(default=0, compare=False)
    """Not compared: it depends on other requests."""
    completion_tokens: int = 0
    queue_time: float | None = field(default=None, compare=False)
    time_to_first_token: float | None = field(default=None, compare=False)
    video_tokens: int = 0
    video_frames: int = 0
    reasoning_tokens: int = 0
    """Those of `completion_tokens` that are reasoning."""
    time_to_last_token: float | None = field(default=None, compare=False)

    @property
    def total_tokens(self) -> int:
        return self.prompt_tokens + self.completion_tokens


class _TopLogprob(NamedTuple):
    token_id: int
    logprob: float


class TopLogprob(_TopLogprob):
    """One of the most likely tokens at a position: the pair (token id, natural log-probability), with the token's text
    in UTF-8 as `token`."""

    token: bytes = b""

    def __new__(cls, token_id: int, logprob: float, token: bytes = b"") -> TopLogprob:
        made = super().__new__(cls, token_id, logprob)
        made.token = token
        return made


@dataclass(frozen=True)
class TokenLogprob:
    """The natural log-probability of one generated token, before temperature, filters, penalties, biases and
    constraints.

    `top` has the k most likely tokens at its position, most likely first; the generated one may be missing.
    """

    token_id: int
    logprob: float
    top: tuple[TopLogprob, ...] = ()
    token: bytes = b""
    """The token's text in UTF-8; it may begin or end within a character. For a special token: its name."""


@dataclass(frozen=True)
class Regex:
    """A `response_format`: the whole text matches the regular expression, in Rust's syntax without look-around."""

    pattern: str


@dataclass(frozen=True)
class Lark:
    """A `response_format`: the whole text matches this context-free grammar in Lark's syntax, from the rule `start`."""

    grammar: str


@dataclass(frozen=True)
class Tag:
    """A part of a `StructuralTags` text: `begin`, then text in the format of `content`, then `end`."""

    begin: str
    content: Mapping[str, Any] | Regex | Lark
    """A JSON schema, a regular expression or a grammar."""
    end: str


@dataclass(frozen=True)
class StructuralTags:
    """A `response_format`: free text, in which each trigger begins one of the tags."""

    tags: Sequence[Tag]
    triggers: Sequence[str] = ()
    """Each tag's `begin` starts with a trigger. Without triggers, each `begin` is its own trigger."""


@dataclass(frozen=True)
class Delta:
    """A piece of a streamed answer. Text contains whole characters only, so a delta can have ids and no text yet."""

    text: str
    token_ids: list[int]
    index: int = 0
    """The index of the sample that the delta belongs to."""
    logprobs: list[TokenLogprob] | None = None
    sequence: int = 0
    """Number of this delta within its sample, from 0."""
    reasoning: str = ""
    """The model's reasoning, which comes before its text."""
    tool_calls: list[ToolCallDelta] = field(default_factory=list)
    cached_tokens: int = field(default=0, compare=False)
    """With the first delta of a sample: as in `Usage`."""


@dataclass(frozen=True)
class Sample:
    """One of the n answers of a request."""

    text: str
    token_ids: list[int]
    finish_reason: FinishReason
    usage: Usage
    logprobs: list[TokenLogprob] | None = None
    index: int = 0
    stop_match: str | int | None = None
    """The stop string or token id of the request that ended this sample, if one did."""
    reasoning: str = ""
    """The model's reasoning before its answer; not part of `text`."""
    tool_calls: list[ToolCall] = field(default_factory=list)
    """Not part of `text`."""


@dataclass(frozen=True)
class MediaLayout:
    """How the server divides an image or a clip of a prompt."""

    grid: tuple[int, int]
    """Rows and columns of patches of the image, or of each temporal patch of the clip; (0, 0) for an image of which
    only slices are encoded."""
    merge_size: int
    """A token covers `merge_size` x `merge_size` patches; tokens are in the order of the grid, row by row."""
    tokens: int
    """Tokens in the prompt."""
    slices: tuple[int, int] = (0, 0)
    """Rows and columns of slices of the image, or of each frame; their tokens follow those of the whole one unless
    `slices_first` is set."""
    slice_grid: tuple[int, int] = (0, 0)
    """Rows and columns of patches of a slice."""
    frames: int = 0
    """Sampled frames of a clip; 0 for an image."""
    slices_first: bool = False
    """Whether the tokens of the slices precede those of the whole image or frame."""


@dataclass(frozen=True)
class Generation:
    """A complete answer. `samples` has all n samples; the fields before it are those of the first one."""

    text: str
    token_ids: list[int]
    finish_reason: FinishReason
    usage: Usage
    logprobs: list[TokenLogprob] | None
    samples: list[Sample]
    request_id: str = field(default="", compare=False)
    model: str = ""
    model_version: str = ""
    seed: int = field(default=0, compare=False)
    """The request's seed, or the one that the server drew. With this seed the same request gives the same answer."""
    prompt_logprobs: list[TokenLogprob | None] | None = None
    """With `prompt_logprobs=k`: one for each token of the prompt; None for the first one and for image tokens."""

    reasoning: str = ""
    media: list[MediaLayout] = field(default_factory=list)
    """For each image and clip, in the order of the prompt; empty from servers that do not send it."""
    tool_calls: list[ToolCall] = field(default_factory=list)
    prompt_token_ids: list[int] | None = None
    """With `return_prompt_token_ids`: the prompt as `Tokens.token_ids` has it."""

    @property
    def message(self) -> ChatMessage:
        """The answer as a chat message, for continuing the conversation."""
        message: ChatMessage = {"role": "assistant", "content": self.text}
        if self.reasoning:
            message["reasoning"] = self.reasoning
        if self.tool_calls:
            message["tool_calls"] = self.tool_calls
        return message


@dataclass(frozen=True)
class Outcome:
    """The result of one request of `map`: either `generation` or `error` is set."""

    index: int
    """Index of the request, from 0."""
    custom_id: str | None
    """The request's `custom_id`."""
    generation: Generation | None
    error: SaccadeError | None

    def result(self) -> Generation:
        """The generation; raises the error if there is none."""
        if self.error is not None:
            raise self.error
        assert self.generation is not None
        return self.generation


@dataclass(frozen=True)
class Tensor:
    """An array of numbers: little-endian float32 in `data`, in row-major order.

    `numpy.asarray(tensor)` converts it, and `memoryview(tensor.data).cast("f")` needs no numpy.
    """

    shape: tuple[int, ...]
    data: bytes = field(repr=False)

    def tolist(self) -> list[Any]:
        """The numbers as nested lists of Python floats."""
        values: list[Any] = list(struct.unpack(f"<{len(self.data) // 4}f", self.data))
        for size in reversed(self.shape[1:]):
            values = [values[i : i + size] for i in range(0, len(values), size)]
        return values

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Any:
        import numpy

        return numpy.array(numpy.frombuffer(self.data, "<f4").reshape(self.shape), dtype=dtype)


@dataclass(frozen=True)
class Embedding:
    """Hidden states of the decoder for a prompt, after its final norm, each `[hidden size]`."""

    last: Tensor
    """After the last token."""
    mean: Tensor
    """Mean over all tokens, those of images included."""
    prompt_tokens: int
    image_tokens: int
    model: str = ""
    model_version: str = ""
    request_id: str = field(default="", compare=False)


@dataclass(frozen=True)
class Tokens:
    """The tokens of a prompt."""

    token_ids: list[int]
    """The ids, with one image token id for each image and each temporal patch of a clip. `generate` accepts this list
    as a prompt, together with the same images and clips."""
    prompt_tokens: int
    """Number of tokens of the prompt in the context, images included."""
    image_tokens: int
    tokens_per_image: list[int]
    video_tokens: int = 0
    tokens_per_video: list[int] = field(default_factory=list)
    media: list[MediaLayout] = field(default_factory=list)
    """For each image and clip, in the order of the prompt."""


@dataclass(frozen=True)
class Media:
    """An uploaded image or video. It can be used wherever an image or a video is expected."""

    media_id: str
    size_bytes: int
    width: int
    height: int
    format: str
    expires: float
    """When the server deletes it, as Unix time."""


@dataclass(frozen=True)
class Batch:
    """A batch on the server. Times are Unix time."""

    batch_id: str
    state: str
    """"queued", "validating", "running", "completed", "failed" or "cancelled"."""
    total: int = 0
    """Number of rows of the file; 0 until it has been read."""
    completed: int = 0
    failed: int = 0
    """Rows whose line in the output is an error."""
    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0
    """Those of `prompt_tokens` that were in the prefix cache."""
    reasoning_tokens: int = 0
    """Those of `completion_tokens` that are reasoning."""
    created: float | None = None
    started: float | None = None
    ended: float | None = None
    expires: float | None = None
    reason: str = ""
    """Why it failed, as an identifier for programs. `message` describes the failure; `problems` has a sentence for each
    of the first invalid lines of the file."""
    message: str = ""
    problems: tuple[str, ...] = ()
    model: str = ""
    model_version: str = ""
    output_bytes: int = 0
    """Size of the output; 0 until the batch has ended."""
    metadata: dict[str, str] = field(default_factory=dict)
    input_name: str = ""

    @property
    def over(self) -> bool:
        """Whether the batch has ended."""
        return self.state in ("completed", "failed", "cancelled")


@dataclass(frozen=True)
class ModelLimits:
    """Limits of the server. 0: it sets no limit of this kind."""

    context_length: int = 0
    """Prompt and answer together, in tokens."""
    max_message_bytes: int = 0
    """Size of a whole request, images included."""
    max_images: int = 0
    """Images of one request."""
    max_image_bytes: int = 0
    """Size of one image's file."""
    max_image_pixels: int = 0
    min_image_tokens: int = 0
    max_image_tokens: int = 0
    image_formats: tuple[str, ...] = ()
    uri_schemes: tuple[str, ...] = ()
    """Schemes of the URLs that the server fetches; empty: it fetches none."""
    max_samples: int = 0
    max_logprobs: int = 0
    max_stop_strings: int = 0
    max_stop_string_length: int = 0
    max_videos: int = 0
    max_video_bytes: int = 0
    """Size of one clip's file."""
    max_video_frames: int = 0
    """Frames that are sampled from one clip."""
    max_video_file_frames: int = 0
    """Frames in one clip's file."""
    max_video_pixels: int = 0
    """Width x height x number of the frames of one clip that have to be decoded."""
    video_formats: tuple[str, ...] = ()


@dataclass(frozen=True)
class Model:
    """A model that is served."""

    name: str
    version: str
    """Changes whenever the weights do."""
    model_type: str = ""
    dtype: str = ""
    takes_images: bool = False
    takes_videos: bool = False
    limits: ModelLimits = field(default_factory=ModelLimits)
    default_sampling: dict[str, float | int | bool] = field(default_factory=dict)
    """The values of sampling arguments of `generate` that are None."""
    image_token_id: int | None = None
    """The id that stands for each image in a prompt of token ids."""
    eos_token_ids: tuple[int, ...] = ()
    vocab_size: int = 0
    has_tokenizer: bool = True
    has_chat_template: bool = True
