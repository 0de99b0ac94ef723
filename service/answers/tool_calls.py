"""Tool calls in the output of a request: what the request allows, and their separation from the text."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from hashlib import blake2s
from typing import Any

from decoder.sampling import MAX_BIAS
from families.tool_calls import CallPiece, CallScanner, Piece, TextPiece, ToolMarkup, calls_text
from service.common import errors
from service.common.types import CallDelta, ChatInput, ConstraintSpec, GenerateSpec, TextFormat, ToolUse
from service.model.assets import ModelAssets

_WORDS = ("<function=", "</function>", "<parameter=", "</parameter>")
"""Parts of markup that may be special tokens, besides its markers."""


def tool_use(spec: GenerateSpec) -> ToolUse | None:
    return spec.input.tool_use if isinstance(spec.input, ChatInput) else None


def with_tools(spec: GenerateSpec, assets: ModelAssets) -> GenerateSpec:
    """The request with the constraint that its tools and `tool_choice` require. Raises InvalidArgument for options
    that exclude each other, and FailedPrecondition for a model without tool calls."""
    use = tool_use(spec)
    if use is None:
        return spec
    markup = _markup(assets)
    if use.choice == "none":
        return _without_calls(spec, markup, assets)
    _check_continued(spec, markup)
    constraint = spec.constraint or ConstraintSpec()
    answer = constraint.format
    if use.free and answer is None:
        return spec
    if answer is not None and answer.kind == "structural_tags":
        raise errors.InvalidArgument(
            "response_format: structural_tags cannot be combined with tools", field="sampling.response_format"
        )
    if spec.sampling.get("ignore_eos"):
        raise errors.InvalidArgument(
            "ignore_eos cannot be combined with tool calls that follow a schema", field="sampling.ignore_eos"
        )
    return replace(spec, constraint=replace(constraint, format=calls_format(markup, use, answer)))


def _check_continued(spec: GenerateSpec, markup: ToolMarkup) -> None:
    """Raises InvalidArgument if the text that the answer continues ends within a call, whose beginning is not part of
    the answer."""
    assert isinstance(spec.input, ChatInput)
    text = spec.input.continued_text
    if text.rfind(markup.begin) > text.rfind(markup.end):
        field = "chat.continue_final_message"
        raise errors.InvalidArgument(
            f"{field}: the last message ends within a tool call; only text can be continued", field=field
        )


def calls_format(markup: ToolMarkup, use: ToolUse, answer: TextFormat | None = None) -> TextFormat:
    """The format of tool calls, as JSON for `service.engine.tool_grammars`. `answer`: the required format of an answer
    without calls."""
    required = use.choice == "required"
    tools = [
        {"name": tool.name, "schema": tool.parameters if required or tool.strict else None}
        for tool in use.tools if not use.allowed or tool.name in use.allowed
    ]  # fmt: skip
    begin = {"begin": markup.begin, "end": markup.end, "body": markup.body}
    format = None if answer is None else (answer.kind, answer.source)
    made = {"markup": begin, "tools": tools, "required": required, "parallel": use.parallel, "answer": format}
    return TextFormat("tool_calls", json.dumps(made), calls_or_answer=answer is not None and not required)


def _markup(assets: ModelAssets) -> ToolMarkup:
    markup = assets.tool_markup
    if markup is None or assets.tokenizer is None:
        raise errors.FailedPrecondition(
            f"chat.tools: the format of {assets.config.name}'s tool calls is not known", field="chat.tools"
        )
    return markup


def _without_calls(spec: GenerateSpec, markup: ToolMarkup, assets: ModelAssets) -> GenerateSpec:
    """Forbids the token that begins a call. The tools stay in the prompt, so that cached parts of it can be used. The
    marker written in other tokens would be text."""
    assert assets.tokenizer is not None
    begin = assets.tokenizer.token_id(markup.begin)
    if begin is None:
        return spec
    bias = {**spec.sampling.get("logit_bias", {}), begin: -MAX_BIAS}
    return replace(spec, sampling={**spec.sampling, "logit_bias": bias})


def with_written_calls(chat: ChatInput, assets: ModelAssets) -> ChatInput:
    """The chat with earlier calls in the texts of their messages, if the chat template prints no calls: released
    templates of several models leave that to the caller."""
    markup = assets.tool_markup
    if markup is None or "tool_calls" not in chat.needed or "tool_calls" in assets.template.names:
        return chat
    texts = [
        calls_text(markup, [(call.name, call.arguments) for call in message.tool_calls]) if message.tool_calls else ""
        for message in chat.messages
    ]
    if None in texts:
        return chat
    messages = [
        replace(message, parts=(*message.parts, text), tool_calls=()) if text else message
        for message, text in zip(chat.messages, texts, strict=True)
    ]
    needed = tuple(name for name in chat.needed if name != "tool_calls")
    return replace(chat, messages=tuple(messages), needed=needed)


def silent_markers(markup: ToolMarkup, assets: ModelAssets) -> Mapping[int, str]:
    """Special tokens that belong to the markup, whose text a detokenizer leaves out: id -> text."""
    assert assets.tokenizer is not None
    ids = {word: assets.tokenizer.token_id(word) for word in (markup.begin, markup.end, *_WORDS)}
    return {i: word for word, i in ids.items() if i is not None and assets.tokenizer.silent(i)}


class CallSplit:
    """Separates one sample's calls from its text, and from its reasoning, in which some models begin a call."""

    def __init__(
        self, markup: ToolMarkup, use: ToolUse, silent: Mapping[int, str], name: str, *, or_format: bool = False
    ) -> None:
        """`silent`: see `silent_markers`. `name`: of the sample; the ids of its calls are computed from it, so that
        they are the same if the request is sent again. `or_format`: `TextFormat.calls_or_answer`."""
        self._markup, self._use, self._name, self._or_format = markup, use, name, or_format
        self.silent = silent
        self.in_reasoning = use.free and not or_format
        """Whether reasoning may contain calls: not if a constraint produces the calls, which applies after it."""
        self._tools: dict[str, Mapping[str, Any]] = {tool.name: tool.parameters for tool in use.tools}
        self._before = 0
        """Number of calls found by earlier scanners."""
        self._broken = False
        """Whether an earlier scanner ended within a call."""
        self._scanner = self._made()

    def _made(self) -> CallScanner:
        return CallScanner(
            self._markup, self._tools, single=not self._use.parallel, at_once=self._or_format,
            only=self._use.choice == "required",
        )  # fmt: skip

    @property
    def done(self) -> bool:
        """Whether the answer is over: its only call is complete."""
        return self._scanner.done

    @property
    def called(self) -> bool:
        """Whether there are calls, all of them complete."""
        return bool(self._before + self._scanner.calls) and not self._broken and not self._scanner.pending

    def feed(self, text: str) -> list[str | CallDelta]:
        """The text and the parts of calls that can be sent now, in order."""
        return self._told(self._scanner.feed(text))

    def finish(self, *, cut: bool = False) -> list[str | CallDelta]:
        """The remaining text and parts of calls, at the end of the reasoning or of the answer. `cut`: the answer was
        cut off, so what has been written of a call is no text."""
        found = self._told(self._scanner.finish(cut=cut))
        if not self._scanner.done:
            self._broken |= self._scanner.pending
            self._before += self._scanner.calls
            self._scanner = self._made()
        return found

    def _told(self, pieces: list[Piece]) -> list[str | CallDelta]:
        return [piece.text if isinstance(piece, TextPiece) else self._delta(piece) for piece in pieces]

    def _delta(self, piece: CallPiece) -> CallDelta:
        index = self._before + piece.index
        if not piece.name:
            return CallDelta(index, piece.arguments)
        digest = blake2s(f"{self._name}/{index}".encode(), digest_size=12)
        return CallDelta(index, piece.arguments, f"call_{digest.hexdigest()}", piece.name)
