"""Types of the frontend: requests and the events of answers. Plain Python, no protos."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

FinishReason = Literal["stop", "length", "aborted", "tool_calls"]


@dataclass(frozen=True)
class ToolCall:
    """A call in the history of a conversation."""

    id: str
    name: str
    arguments: Mapping[str, Any]


@dataclass(frozen=True)
class Message:
    """One message of a conversation. `parts` is the content in order: text as str, None for an image or a clip."""

    role: str
    parts: tuple[str | None, ...]
    reasoning: str = ""
    """The assistant's reasoning before its answer."""
    tool_calls: tuple[ToolCall, ...] = ()
    """Those of the assistant."""
    answered: ToolCall | None = None
    """In a message of a tool: the call of which it is the result."""


@dataclass(frozen=True)
class Tool:
    """A function that the model may ask its caller to run."""

    name: str
    description: str = ""
    parameters: Mapping[str, Any] = field(default_factory=dict)
    """JSON schema of the arguments; empty: there are none."""
    strict: bool = False
    """Whether calls that the model chooses to make keep to the schema."""


@dataclass(frozen=True)
class ToolUse:
    """The tools of a request, and which of them are called."""

    tools: tuple[Tool, ...]
    choice: Literal["auto", "none", "required"] = "auto"
    name: str = ""
    """The only tool that may be called, which is `required` then."""
    parallel: bool = True
    """Whether one answer may have several calls."""


@dataclass(frozen=True)
class Image:
    """The message `Image`: its encoded bytes, or where to get them; and its path in the request, for error
    messages."""

    data: bytes
    field: str
    media_id: str | None = None
    uri: str | None = None

    @property
    def elsewhere(self) -> bool:
        """Whether the bytes still have to be fetched."""
        return self.media_id is not None or self.uri is not None


@dataclass(frozen=True)
class Video:
    """The message `Video`: the encoded bytes of a file or where to get them, or its frames as images."""

    data: bytes
    field: str
    media_id: str | None = None
    uri: str | None = None
    frames: tuple[Image, ...] = ()
    fps: float | None = None
    """Frames per second of `frames`."""
    max_frames: int | None = None
    """Frames to sample; None: the server's default."""

    @property
    def elsewhere(self) -> bool:
        """Whether bytes still have to be fetched."""
        return self.media_id is not None or self.uri is not None or any(frame.elsewhere for frame in self.frames)


MediaSource = Image | Video


def files(media: Iterable[MediaSource]) -> Iterator[MediaSource]:
    """All files of the images and clips: a clip's own file, or those of its frames."""
    for source in media:
        yield from source.frames if isinstance(source, Video) and source.frames else (source,)


@dataclass(frozen=True)
class ChatInput:
    """Messages in which None is the next of the request's images and clips."""

    messages: tuple[Message, ...]
    template_arguments: Mapping[str, Any] = field(default_factory=dict)
    needed: tuple[str, ...] = ()
    """Names among the arguments that the template must read, since the request could not be followed otherwise."""
    tool_use: ToolUse | None = None
    continue_final: bool = False
    """Whether the answer continues the last message, which is the assistant's and ends with text."""

    @property
    def continued_text(self) -> str:
        """The text that the answer continues; empty if it begins a message."""
        return "".join(part or "" for part in self.messages[-1].parts) if self.continue_final else ""


@dataclass(frozen=True)
class RawInput:
    """Text that is tokenised without the chat template."""

    text: str


@dataclass(frozen=True)
class TokensInput:
    """Token ids that are used as they are, with one image token id for each image; for a clip one, or one for each of
    its temporal patches."""

    ids: tuple[int, ...]


FormatKind = Literal["json_schema", "json_object", "regex", "lark", "choice", "structural_tags", "tool_calls"]


@dataclass(frozen=True)
class TextFormat:
    """What the text of an answer must be."""

    kind: FormatKind
    source: str = ""
    """A JSON schema, a regular expression or a Lark grammar; for `choice` a JSON list of strings, for `structural_tags`
    JSON `{"tags": [{"begin", "kind", "content", "end"}], "triggers": [...]}`, for `tool_calls` the JSON that
    `service.engine.tool_grammars` describes."""


@dataclass(frozen=True)
class ReasoningSpec:
    """Reasoning before what a constraint applies to, by the ids of its markers."""

    close: int
    open: int | None = None
    """None: the prompt has opened it. Otherwise the output may begin with this token."""
    limit: int | None = None
    """Maximum number of tokens between the markers."""


@dataclass(frozen=True)
class ConstraintSpec:
    """What an answer is held to, as the engine makes a constraint of it."""

    format: TextFormat | None = None
    allowed_token_ids: frozenset[int] | None = None
    """Ids that may be drawn besides the ends of the text; `None`: all."""
    bad_words: tuple[str, ...] = ()
    """Strings that the text does not contain."""
    reasoning: ReasoningSpec | None = None
    """The others apply after it; `None`: from the beginning."""


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
    constraint: ConstraintSpec | None = None
    max_reasoning_tokens: int | None = None
    thinking: bool | None = None
    """Whether the request asks for reasoning, or for none; None: it leaves that to the chat template."""
    constrain_reasoning: bool = False
    """Whether the constraint holds from the first token on, even if that is reasoning."""
    whole: bool = False
    """Whether the caller reads nothing before the answer's end, so that few and large deltas are enough."""


@dataclass(frozen=True)
class MediaLayout:
    """How the encoder divides an image or a clip: patches and image tokens."""

    grid: tuple[int, int]
    """Rows and columns of patches of the image, or of each temporal patch of the clip."""
    merge_size: int
    """A token stands for `merge_size` x `merge_size` patches."""
    tokens: int
    """Tokens in the prompt."""
    slices: tuple[int, int] = (0, 0)
    """Rows and columns of slices, whose tokens follow those of the whole image."""
    slice_grid: tuple[int, int] = (0, 0)
    """Rows and columns of patches of a slice."""
    frames: int = 0
    """Sampled frames of a clip; 0 for an image."""


@dataclass(frozen=True)
class Tokenized:
    """The token ids of a prompt, with one image token id per image and per temporal patch, and how many tokens each
    image and each clip takes."""

    ids: tuple[int, ...]
    prompt_tokens: int
    tokens_per_image: tuple[int, ...]
    tokens_per_video: tuple[int, ...]
    media: tuple[MediaLayout, ...] = ()
    """For each image and clip, in the order of the prompt."""

    @property
    def image_tokens(self) -> int:
        return sum(self.tokens_per_image)

    @property
    def video_tokens(self) -> int:
        return sum(self.tokens_per_video)


@dataclass(frozen=True)
class ImageInput:
    """Requests the embedding of the only image, without a prompt."""


@dataclass(frozen=True)
class Embedded:
    """The result of an embedding request: vectors of a prompt or an image, each `[..., hidden]` little-endian float32;
    empty if not requested."""

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
    """Log-probabilities of a drawn token: natural logs of the model's probabilities before temperature and filters."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...]
    texts: tuple[bytes, ...] = ()
    """The text of the token, then those of `top`; empty for models without a tokenizer."""


@dataclass(frozen=True)
class PromptLogprob:
    """The same for the token at a position of the prompt."""

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
    reasoning_tokens: int = 0
    last_token_seconds: float = 0.0


@dataclass(frozen=True)
class Started:
    """The first event: the request has been admitted."""

    request_id: str
    prompt_tokens: int
    image_tokens: int
    model: str
    version: str
    seed: int
    video_tokens: int = 0
    media: tuple[MediaLayout, ...] = ()
    """For each image and clip, in the order of the prompt."""


@dataclass(frozen=True)
class CallDelta:
    """A part of tool call `index` of a sample. The first part has its id and its name."""

    index: int
    arguments: str
    id: str = ""
    name: str = ""


@dataclass(frozen=True)
class Delta:
    """New text and tokens of sample `index`. The text has whole characters only, so the ids may be ahead of it."""

    index: int
    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[Logprob, ...]
    sequence: int
    reasoning: str = ""
    """Precedes `text`."""
    calls: tuple[CallDelta, ...] = ()


@dataclass(frozen=True)
class Finished:
    """The last event of sample `index`."""

    index: int
    reason: FinishReason
    usage: Usage
    stop_string: str | None = None
    stop_token: int | None = None
    """The one of the request's `stop_token_ids` that ended it; None for the model's own end token."""
    prompt_logprobs: tuple[PromptLogprob, ...] = ()
    """With the first sample, if prompt log-probabilities were requested."""


Event = Started | Delta | Finished
