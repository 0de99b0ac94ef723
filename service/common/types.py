"""Types of the frontend: requests and the events of answers. Plain Python, no protos."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
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
    """In a message of the assistant: the calls that it made."""
    answered: ToolCall | None = None
    """In a message of a tool: the call whose result it contains."""


@dataclass(frozen=True)
class Tool:
    """A function that the model may ask its caller to run."""

    name: str
    description: str = ""
    parameters: Mapping[str, Any] = field(default_factory=dict)
    """JSON schema of the arguments; empty: there are none."""
    strict: bool = False
    """Whether arguments follow the schema even if the model decides by itself to call; in a required call they always
    do."""


@dataclass(frozen=True)
class ToolUse:
    """The tools of a request, and whether the model may or must call them."""

    tools: tuple[Tool, ...]
    choice: Literal["auto", "none", "required"] = "auto"
    allowed: tuple[str, ...] = ()
    """Names of the only tools that may be called; empty: any of them."""
    parallel: bool = True
    """Whether one answer may contain several calls."""

    @property
    def free(self) -> bool:
        """Whether the model decides by itself what it calls and with which arguments, so that no constraint is
        needed."""
        return self.choice == "auto" and not self.allowed and not any(tool.strict for tool in self.tools)


@dataclass(frozen=True)
class Image:
    """An image of a request: its encoded bytes, or where to get them. `field`: its path in the request, for error
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
    """A video of a request: the encoded bytes of a file or where to get them, or its frames as images. `field`: its
    path in the request, for error messages."""

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
    """Messages in whose parts each None stands for the next of the request's images and clips."""

    messages: tuple[Message, ...]
    template_arguments: Mapping[str, Any] = field(default_factory=dict)
    needed: tuple[str, ...] = ()
    """Template arguments that the chat template must read; one that ignores them cannot do what the request asks."""
    tool_use: ToolUse | None = None
    continue_final: bool = False
    """Whether the answer continues the last message, which is the assistant's and ends with text."""
    late_system_as_user: bool = False
    """Whether system messages after others become the user's if the chat template rejects the messages."""

    @property
    def continued_text(self) -> str:
        """The text that the answer continues; empty if it begins a message."""
        return "".join(part or "" for part in self.messages[-1].parts) if self.continue_final else ""


@dataclass(frozen=True)
class RawInput:
    """Text that is tokenised without the chat template."""

    text: str
    special_tokens: bool = False
    """Whether the special tokens that the tokenizer adds to texts are added."""


@dataclass(frozen=True)
class TokensInput:
    """Token ids that are used as they are, with one image token id for each image, and for each clip either one or one
    for each of its temporal patches."""

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
    calls_or_answer: bool = False
    """For `tool_calls`: whether an answer consists either of calls only or of a text in a required format, which
    contains no calls."""


@dataclass(frozen=True)
class ReasoningSpec:
    """The reasoning that precedes the constrained text, described by the ids of its markers."""

    close: int
    open: int | None = None
    """The token that opens the reasoning, with which the output may begin. None: the prompt has opened it already."""
    limit: int | None = None
    """Maximum number of tokens between the markers."""


@dataclass(frozen=True)
class ConstraintSpec:
    """What an answer must satisfy. The engine builds the constraint from this description."""

    format: TextFormat | None = None
    allowed_token_ids: frozenset[int] | None = None
    """Ids that may be drawn, besides those that end the text; `None`: all."""
    bad_words: tuple[str, ...] = ()
    """Strings that the text must not contain."""
    reasoning: ReasoningSpec | None = None
    """If set, the other fields apply only after the reasoning; `None`: from the first token on."""


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
    clamp_max_tokens: bool = False
    """Whether a `max_tokens` above the rest of the context length is reduced to the rest, not an error."""
    continued: tuple[int, ...] = ()
    priority: int = 0
    constraint: ConstraintSpec | None = None
    max_reasoning_tokens: int | None = None
    thinking: bool | None = None
    """Whether the request asks for reasoning or for none; None: the chat template decides."""
    constrain_reasoning: bool = False
    """Whether the constraint holds from the first token on, even if that is reasoning."""
    show_special: bool = False
    """Whether the text has the names of special tokens."""
    return_prompt_ids: bool = False
    """Whether the answer has the token ids of the prompt."""
    whole: bool = False
    """Whether the caller reads the answer only at its end, so that a few large deltas are enough."""


@dataclass(frozen=True)
class MediaLayout:
    """How the encoder divides an image or a clip: patches and image tokens."""

    grid: tuple[int, int]
    """Rows and columns of patches of the image, or of each temporal patch of the clip; (0, 0) for an image of which
    only slices are encoded."""
    merge_size: int
    """A token stands for `merge_size` x `merge_size` patches."""
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
class Tokenized:
    """The token ids of a prompt, with one image token id per image and per temporal patch, and how many tokens each
    image and each clip takes."""

    ids: tuple[int, ...]
    prompt_tokens: int
    tokens_per_image: tuple[int, ...]
    tokens_per_video: tuple[int, ...]
    media: tuple[MediaLayout, ...] = ()
    """For each image and clip, in the order of the prompt."""
    context_length: int = 0
    """Tokens that a prompt and its answer can have together."""

    @property
    def image_tokens(self) -> int:
        return sum(self.tokens_per_image)

    @property
    def video_tokens(self) -> int:
        return sum(self.tokens_per_video)


@dataclass(frozen=True)
class ImageInput:
    """Asks for the embedding of the request's only image, without a prompt."""


@dataclass(frozen=True)
class Embedded:
    """The result of an embedding request: vectors of a prompt or an image, each `[..., hidden]` little-endian float32;
    empty if not requested."""

    request_id: str
    model: str
    version: str
    prompt_tokens: int
    image_tokens: int
    video_tokens: int
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
    """The text of the token, then the texts of the tokens in `top`; empty for models without a tokenizer."""


@dataclass(frozen=True)
class PromptLogprob:
    """Log-probabilities of the token at a position of the prompt."""

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
    prompt_ids: tuple[int, ...] = ()
    """If the request asks for them: the token ids of the prompt, as in `Tokenized`."""


@dataclass(frozen=True)
class CallDelta:
    """A part of tool call `index` of a sample. The first part carries the call's id and name."""

    index: int
    arguments: str
    id: str = ""
    name: str = ""


@dataclass(frozen=True)
class Delta:
    """New text and tokens of sample `index`. The text consists of whole characters, so the ids may be ahead of it."""

    index: int
    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[Logprob, ...]
    sequence: int
    reasoning: str = ""
    """New text of the reasoning, which precedes `text`."""
    calls: tuple[CallDelta, ...] = ()
    cached_tokens: int = 0
    """With the first delta of a sample: as in `Usage`."""


@dataclass(frozen=True)
class Finished:
    """The last event of sample `index`."""

    index: int
    reason: FinishReason
    usage: Usage
    stop_string: str | None = None
    stop_token: int | None = None
    """The one of the request's `stop_token_ids` that ended it; None for the model's own end token."""
    prompt_logprobs: Sequence[PromptLogprob] = ()
    """Only in the first sample, if prompt log-probabilities were requested."""


Event = Started | Delta | Finished
