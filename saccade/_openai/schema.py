"""Requests for chat completions as Pydantic models, with the further parameters of this server, and what the other
kinds of requests share with them.

A field that would change the answer but is not supported is an error: it must not be ignored.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, TypeAlias, TypeVar

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Discriminator,
    Field,
    GetCoreSchemaHandler,
    Tag,
    model_validator,
)
from pydantic_core import CoreSchema

from saccade._core.formats import FORMAT_TYPES

UINT32 = 2**32 - 1


def _fail_fast(schema: Any) -> None:
    """Makes the lists of a schema end at their first error."""
    if isinstance(schema, dict):
        if schema.get("type") == "list":
            schema["fail_fast"] = True
        schema = list(schema.values())
    if isinstance(schema, list | tuple):
        for part in schema:
            _fail_fast(part)


class Strict(BaseModel):
    """Unknown keys, numbers as strings, and NaN are errors. A key whose value is null counts as absent, known or not:
    clients send back answers with keys of which this server knows nothing. The validation of a list ends at its first
    invalid entry: a body of megabytes may have a million of them."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False, protected_namespaces=())

    @model_validator(mode="before")
    @classmethod
    def _without_nulls(cls, value: Any) -> Any:
        if isinstance(value, dict) and None in value.values():
            return {key: item for key, item in value.items() if item is not None}
        return value

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        made = handler(source)
        _fail_fast(made)
        return made


def _some_messages(value: Any) -> Any:
    if not isinstance(value, list) or not value:
        raise ValueError("expected a list of at least one message")
    return value


MessageT = TypeVar("MessageT")
Messages: TypeAlias = Annotated[list[MessageT], Field(min_length=1), BeforeValidator(_some_messages)]


PartT = TypeVar("PartT")
TextOr: TypeAlias = Annotated[
    Annotated[str, Tag("<str>")] | Annotated[list[PartT], Tag("<list>")],
    Discriminator(lambda value: "<list>" if isinstance(value, list) else "<str>"),
]
"""A string, or a list of parts. Errors are about the one that the value is."""


# -- parts of messages -------------------------------------------------------------------------------------------------


class CachedPart(Strict):
    prompt_cache_breakpoint: Any = Field(None, description="Ignored: the server caches whatever it can.")
    cache_control: Any = Field(None, description="Ignored: the server caches whatever it can.")


class TextPart(CachedPart):
    type: Literal["text"]
    text: str


class Location(Strict):
    """Where an image or a clip is: a data URL, media:ID or, if the server's operator allows its host, an https URL."""

    url: str
    detail: str | None = Field(None, description="Ignored: an image is always encoded at the model's own resolution.")


def _located(value: Any) -> Any:
    return {"url": value} if isinstance(value, str) else value


LocationOrUrl: TypeAlias = Annotated[Location, BeforeValidator(_located, json_schema_input_type=str | Location)]


class ImageUrlPart(CachedPart):
    type: Literal["image_url"]
    image_url: LocationOrUrl


class ImagePart(Strict):
    type: Literal["image"]
    image: str | None = None
    media_id: str | None = None


class VideoUrlPart(Strict):
    type: Literal["video_url"]
    video_url: LocationOrUrl
    max_frames: int | None = None


class VideoPart(Strict):
    type: Literal["video"]
    video: TextOr[str] | None = None
    media_id: str | None = None
    fps: float | None = None
    max_frames: int | None = None


def _kind(value: Any) -> str:
    if isinstance(value, BaseModel):
        return f"<{getattr(value, 'type', '')}>"
    return f"<{value.get('type')}>" if isinstance(value, dict) else "<str>"


Part: TypeAlias = Annotated[
    Annotated[str, Tag("<str>")]
    | Annotated[TextPart, Tag("<text>")]
    | Annotated[ImageUrlPart, Tag("<image_url>")]
    | Annotated[ImagePart, Tag("<image>")]
    | Annotated[VideoUrlPart, Tag("<video_url>")]
    | Annotated[VideoPart, Tag("<video>")],
    Discriminator(
        _kind,
        custom_error_type="part",
        custom_error_message="expected a part of type text, image_url, image, video_url or video",
    ),
]


# -- tools -------------------------------------------------------------------------------------------------------------


class Function(Strict):
    name: str = Field(min_length=1)
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(Strict):
    type: Literal["function"]
    function: Function


class FunctionName(Strict):
    name: str = Field(min_length=1)


class NamedTool(Strict):
    type: Literal["function"]
    function: FunctionName


class AllowedTools(Strict):
    """The only tools that may be called; all of `tools` are in the prompt."""

    mode: Literal["auto", "required"]
    tools: list[NamedTool] = Field(min_length=1)


class AllowedToolChoice(Strict):
    type: Literal["allowed_tools"]
    allowed_tools: AllowedTools


def choice_kind(value: Any) -> str:
    """The tag of a `tool_choice`: `<mode>` of a string, `<allowed>` or `<name>` of an object."""
    if isinstance(value, str):
        return "<mode>"
    kind = value.get("type") if isinstance(value, dict) else getattr(value, "type", None)
    return "<allowed>" if kind == "allowed_tools" else "<name>"


ToolChoice: TypeAlias = Annotated[
    Annotated[Literal["auto", "none", "required"], Tag("<mode>")]
    | Annotated[NamedTool, Tag("<name>")]
    | Annotated[AllowedToolChoice, Tag("<allowed>")],
    Discriminator(choice_kind),
]


class CalledFunction(Strict):
    name: str
    arguments: str


class ToolCall(Strict):
    id: str
    type: Literal["function"] = "function"
    function: CalledFunction
    index: int | None = Field(None, description="Ignored: the calls of a stream have it.")


class DirectCaller(Strict):
    """The model itself has made the call, and not a program that it wrote."""

    type: Literal["direct"]


# -- chat completions --------------------------------------------------------------------------------------------------


def _generating(value: Any) -> Any:
    if isinstance(value, dict) and value.get("prewarm"):
        raise ValueError("prewarm: it is not supported; an answer of one token fills the cache, too")
    return value


CacheOptions: TypeAlias = Annotated[Any, AfterValidator(_generating)]


def _replaced_by(name: str) -> BeforeValidator:
    """For a field that OpenAI has replaced: its error says by what."""

    def refuse(value: Any) -> Any:
        raise ValueError(f"it is not supported; OpenAI has replaced it by {name}")

    return BeforeValidator(refuse)


class Message(Strict):
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: TextOr[Part] | None = None
    name: str | None = Field(None, description="Ignored: chat templates do not print it.")
    reasoning: str | None = None
    reasoning_content: str | None = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = None
    # Null in messages that clients send back as they got them.
    refusal: None = None
    audio: None = None
    function_call: Annotated[None, _replaced_by("tool_calls")] = None
    annotations: list[Any] | None = None

    @model_validator(mode="after")
    def _has_content(self) -> Message:
        if self.content is None and not (self.role == "assistant" and self.tool_calls):
            raise ValueError("expected content, a string or a list of parts, got none")
        return self


def _listed(value: Any) -> Any:
    return [value] if isinstance(value, str) else value


def _typed(value: dict[str, Any]) -> dict[str, Any]:
    if not isinstance(value.get("type"), str) or value["type"] not in FORMAT_TYPES:
        raise ValueError(f"expected an object whose type is one of {', '.join(FORMAT_TYPES)}")
    return value


TokenId: TypeAlias = Annotated[int, Field(ge=0, le=UINT32)]
Strings: TypeAlias = Annotated[list[str], BeforeValidator(_listed, json_schema_input_type=str | list[str])]
LogitBias: TypeAlias = dict[Annotated[str, Field(pattern=r"^(0|[1-9][0-9]{0,9})$")], float]
ResponseFormat: TypeAlias = Annotated[dict[str, Any], AfterValidator(_typed)]


class StreamOptions(Strict):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = Field(
        None, description="Whether each chunk of a choice has the usage of that choice so far. Needs `include_usage`."
    )
    include_obfuscation: Literal[False] | None = None

    @model_validator(mode="after")
    def _usage_of_usage(self) -> StreamOptions:
        if self.continuous_usage_stats and not self.include_usage:
            raise ValueError("continuous_usage_stats: needs include_usage to be true")
        return self


class Sampling(Strict):
    """The fields about how tokens are drawn, which all kinds of requests share. Ranges that depend on the model are
    checked by the server."""

    model: str | None = None
    max_tokens: int | None = Field(None, ge=1)
    min_tokens: int | None = Field(None, ge=0)
    temperature: float | None = Field(None, ge=0)
    top_p: float | None = Field(None, gt=0, le=1)
    top_k: int | None = Field(None, ge=-1)
    min_p: float | None = Field(None, ge=0, le=1)
    repetition_penalty: float | None = Field(None, ge=0.001, le=1000)
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    seed: int | None = Field(None, ge=0, lt=2**64)
    n: int | None = Field(None, ge=1)
    ignore_eos: bool | None = None
    stop: Strings | None = None
    stop_token_ids: list[TokenId] | None = None
    logit_bias: LogitBias | None = None
    allowed_token_ids: list[TokenId] | None = None
    bad_words: Strings | None = None
    response_format: ResponseFormat | None = None
    priority: int | None = Field(None, ge=-(2**31), lt=2**31)
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    skip_special_tokens: bool | None = Field(
        None, description="False: texts have the names of special tokens, without that of a token that ends the answer."
    )
    return_token_ids: bool | None = Field(
        None,
        description="Choices have `token_ids`, and the answer (of completions: each choice) has `prompt_token_ids`, "
        "with one image token id for each image and each temporal patch; in a stream, they come with its first chunks.",
    )
    user: str | None = Field(None, description="Ignored.")

    @model_validator(mode="after")
    def _stream_options_of_a_stream(self) -> Sampling:
        if self.stream_options is not None and not self.stream:
            raise ValueError("stream_options: needs stream to be true")
        return self


class DefaultsOfOthers(Strict):
    """Parameters that clients of other servers send spelled out. Only the values that mean what this server always does
    are accepted."""

    include_stop_str_in_output: Literal[False] | None = None
    use_beam_search: Literal[False] | None = None
    length_penalty: float | None = Field(None, description="Ignored: it is about beam search.")
    spaces_between_special_tokens: bool | None = Field(None, description="Ignored: texts are those of the tokenizer.")


class Continuing(Strict):
    """Whether the answer to messages begins a new message or continues the last one."""

    add_generation_prompt: bool | None = Field(
        None, description="Whether the answer begins a new message: the opposite of `continue_final_message`."
    )
    continue_final_message: bool | None = Field(
        None,
        description="The answer continues the text of the last message, which is the assistant's, and does not repeat "
        "it. Not with `response_format`.",
    )

    @model_validator(mode="after")
    def _begins_or_continues(self) -> Continuing:
        if self.add_generation_prompt and self.continue_final_message:
            raise ValueError("add_generation_prompt: true and continue_final_message exclude each other")
        if self.add_generation_prompt is False and not self.continue_final_message:
            raise ValueError("add_generation_prompt: false needs continue_final_message to be true")
        return self


class Templated(Continuing):
    """What the chat template reads besides the messages."""

    chat_template_kwargs: dict[str, Any] | None = None
    reasoning_effort: str | None = None
    enable_thinking: bool | None = None
    tools: list[Tool] | None = None
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    late_system_as_user: bool | None = Field(
        None,
        description="System messages after others are given to the chat template as the user's if it rejects them, as "
        "it is done for `/v1/messages` and `/v1/responses`.",
    )


class ChatCompletion(Templated, Sampling, DefaultsOfOthers):
    """The body of `/v1/chat/completions`."""

    messages: Messages[Message]
    max_completion_tokens: int | None = Field(None, ge=1)
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0)
    max_reasoning_tokens: int | None = Field(None, ge=0)
    clamp_max_tokens: bool | None = Field(
        None, description="If `max_tokens` is more than the context leaves, the answer may reach its end. Without it, "
        "such a number is an error.",
    )  # fmt: skip
    modalities: list[Literal["text"]] | None = None
    verbosity: Literal["medium"] | None = None
    echo: Literal[False] | None = None
    add_special_tokens: Literal[False] | None = Field(None, description="The template has all that messages need.")
    include_reasoning: Literal[True] | None = None
    functions: Annotated[None, _replaced_by("tools")] = Field(None, description="Not supported: `tools` replaces it.")
    function_call: Annotated[None, _replaced_by("tool_choice")] = Field(
        None, description="Not supported: `tool_choice` replaces it."
    )
    # The following fields do not change the answer.
    metadata: Any = Field(None, description="Ignored.")
    store: Any = Field(None, description="Ignored: nothing is stored.")
    service_tier: Any = Field(None, description="Ignored.")
    safety_identifier: Any = Field(None, description="Ignored.")
    prompt_cache_key: Any = Field(None, description="Ignored: the cache needs no key.")
    prompt_cache_options: CacheOptions = Field(None, description="Ignored, but `prewarm`, which is an error.")
    prompt_cache_retention: Any = Field(None, description="Ignored.")
    prediction: Any = Field(None, description="Ignored: it would not change the answer.")

    @model_validator(mode="after")
    def _consistent(self) -> ChatCompletion:
        longest = self.max_completion_tokens
        if longest is not None and self.max_tokens not in (None, longest):
            raise ValueError("max_tokens and max_completion_tokens differ")
        if self.top_logprobs and not self.logprobs:
            raise ValueError("top_logprobs: needs logprobs to be true")
        return self
