"""Requests for completions, embeddings and tokens as Pydantic models."""

from __future__ import annotations

from typing import Annotated, Any, Literal, TypeAlias

from pydantic import Discriminator, Field, Tag, model_validator

from saccade._openai.schema import DefaultsOfOthers, Message, Messages, Sampling, Strict, Templated, TokenId

SPECIAL_TOKENS = (
    "Whether text prompts get the special tokens that the tokenizer adds to texts, such as a beginning-of-sequence "
    "token. True by default."
)


def _prompt_kind(value: Any) -> str:
    if not isinstance(value, list):
        return "<str>"
    first = value[0] if value else ""
    return "<ids>" if isinstance(first, int) else "<lists>" if isinstance(first, list) else "<strings>"


Prompts: TypeAlias = Annotated[
    Annotated[str, Tag("<str>")]
    | Annotated[list[TokenId], Tag("<ids>")]
    | Annotated[list[str], Field(min_length=1), Tag("<strings>")]
    | Annotated[list[Annotated[list[TokenId], Field(min_length=1)]], Tag("<lists>")],
    Discriminator(_prompt_kind),
]
"""A string, token ids, or a list of either."""


def prompt_list(prompts: str | list[int] | list[str] | list[list[int]]) -> list[str] | list[list[int]]:
    """The prompts of a request, one or several."""
    if isinstance(prompts, str):
        return [prompts]
    if prompts and isinstance(prompts[0], int):
        return [prompts]  # type: ignore[list-item]
    return prompts  # type: ignore[return-value]


class Completion(Sampling, DefaultsOfOthers):
    """The body of `/v1/completions`. The prompt is tokenized literally, without the chat template."""

    prompt: Prompts
    max_tokens: int | None = Field(16, ge=0, description="0 only with echo.")
    logprobs: int | None = Field(None, ge=0)
    return_tokens_as_token_ids: bool | None = Field(
        None, description="Tokens in `logprobs` are named `token_id:ID`, so that no two have the same name."
    )
    echo: bool | None = None
    add_special_tokens: bool | None = Field(None, description=SPECIAL_TOKENS)
    best_of: int | None = Field(None, ge=1)
    suffix: None = None

    @model_validator(mode="after")
    def _consistent(self) -> Completion:
        if self.max_tokens == 0 and not self.echo:
            raise ValueError("max_tokens: 0 needs echo to be true")
        if self.best_of not in (None, 1, self.n):
            raise ValueError(f"best_of: expected n = {self.n or 1}, got {self.best_of}: all samples are returned")
        if self.stream and self.echo and self.logprobs is not None:
            raise ValueError("echo: it cannot be streamed with logprobs")
        return self


def _check_input(body: Embeddings | Tokenize, name: str) -> None:
    """Raises ValueError unless the body has either the field `name` or messages, and for options of the other one."""
    if (getattr(body, name) is None) == (body.messages is None):
        raise ValueError(f"expected either {name} or messages")
    usual = {"add_generation_prompt": True, "continue_final_message": False, "late_system_as_user": False}
    given = [key for key in Templated.model_fields if getattr(body, key) not in (None, [], {}, usual.get(key))]
    if given and body.messages is None:
        raise ValueError(f"{given[0]}: needs messages")
    if body.add_special_tokens and body.messages is not None:
        raise ValueError("add_special_tokens: expected false or none with messages, which have the template's")


class Embeddings(Templated):
    """The body of `/v1/embeddings`: prompts, which are tokenized literally, or messages, with what the prompt of a chat
    completion depends on."""

    input: Prompts | None = None
    messages: Messages[Message] | None = Field(None, description="As in chat completions, with the same prompt.")
    model: str | None = None
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: int | None = Field(None, ge=1, description="The model's own number: embeddings are not shortened.")
    pooling: Literal["mean", "last"] | None = Field(
        None, description="Mean of the hidden states of all tokens (the default), or that of the last token."
    )
    add_special_tokens: bool | None = Field(None, description=f"{SPECIAL_TOKENS} Messages have those of the template.")
    truncate_prompt_tokens: Literal[-1] | None = Field(
        None, description="Accepted because `vllm bench serve` sends it. A prompt longer than the context is an error."
    )
    user: str | None = Field(None, description="Ignored.")

    @model_validator(mode="after")
    def _one_input(self) -> Embeddings:
        _check_input(self, "input")
        return self


class Tokenize(Templated):
    """The body of `/tokenize`: a prompt, which is tokenized literally, or messages, with what the prompt of a chat
    completion depends on."""

    model: str | None = None
    prompt: str | None = None
    messages: list[Message] | None = None
    return_token_strs: bool | None = None
    add_special_tokens: bool | None = Field(None, description=f"{SPECIAL_TOKENS} Messages have those of the template.")

    @model_validator(mode="after")
    def _one_input(self) -> Tokenize:
        _check_input(self, "prompt")
        return self


class Detokenize(Strict):
    """The body of `/detokenize`."""

    model: str | None = None
    tokens: list[TokenId]
