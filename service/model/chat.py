"""Renders chat messages to prompt text with the checkpoint's jinja2 template, in a sandbox."""

from __future__ import annotations

import datetime
import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from jinja2 import TemplateError, TemplateSyntaxError
from jinja2.ext import Extension, loopcontrols
from jinja2.nodes import Node, Scope
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from families import CheckpointError
from families.files import optional_json
from service.common.types import Message
from service.model.tokenizer import literal, without_literals
from service.model.tokenizer_file import SPECIAL_TOKENS, named_tokens, read_settings

TEMPLATES = "additional_chat_templates"
"""Folder of templates with other names than `default`."""


class Marked(str):
    """Text made by the server, in which image tokens stand for images: the text of a clip."""


class BrokenTemplate(CheckpointError):
    """A template cannot be read."""

    def __init__(self, source: str, problem: str) -> None:
        """`source`: its text."""
        super().__init__(problem)
        self.source = source


class NotContinued(ValueError):
    """The template does not print the last message's text unchanged."""


class Clip(Marked):
    """Marks a clip in the messages of a model whose template has a token for clips; its text is that token."""


_END = "\ufdd2 "
"""Appended to the text that an answer continues, to find its end in the prompt: a code point that does not occur in
exchanged text, and a space, which is missing if the template strips texts."""


class _Generation(Extension):
    """`{% generation %}`, which marks the assistant's text for training: renders its content unchanged, in a scope of
    its own as in transformers."""

    tags: set[str] = {"generation"}

    def parse(self, parser: Parser) -> Node:
        line = next(parser.stream).lineno
        return Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True), lineno=line)


class ChatTemplate:
    """The chat template: `chat_template.jinja`, or the field `chat_template` of `chat_template.json` or of
    `tokenizer_config.json`. Thread-safe."""

    def __init__(
        self, source: str | None, *, image_token: str | None, special_tokens: Mapping[str, str],
        video_token: str | None = None, tools_source: str | None = None,
    ) -> None:  # fmt: skip
        """`video_token`: what the template writes for a clip; None if clips are written as text. `tools_source`: the
        template for messages with tools, if it is another one."""
        self.image_token, self.video_token = image_token, video_token
        self._tokens = tuple(token for token in (image_token, video_token) if token is not None)
        self._special_tokens = dict(special_tokens)
        self._template = self._with_tools = None
        sources = [text for text in (source, tools_source) if text is not None]
        self.source = "\n".join(sources)
        self.names: frozenset[str] = frozenset()
        """All names and strings in the template's code. An argument or field that is not among them has no effect."""
        if sources:
            extensions = [loopcontrols, _Generation]
            environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=extensions)
            environment.globals["raise_exception"] = _raise
            environment.globals["strftime_now"] = lambda form: datetime.datetime.now().strftime(form)
            environment.filters["tojson"] = _tojson
            compiled = []
            words = {kind: set[str]() for kind in ("name", "string")}
            for text in sources:
                try:
                    compiled.append(environment.from_string(text))
                    for _, kind, value in environment.lex(text):
                        words.get(kind, set()).add(value)
                except TemplateSyntaxError as error:
                    raise BrokenTemplate(text, f"chat template, line {error.lineno}: {error.message}") from None
                except RecursionError:
                    raise BrokenTemplate(text, "chat template: nested too deeply") from None
            self._template, self._with_tools = compiled[0], compiled[-1]
            # Fields are read as `message.tool_calls` or as `message['tool_calls']`.
            self.names = frozenset(words["name"] | {text[1:-1] for text in words["string"]})

    @property
    def present(self) -> bool:
        """Whether the checkpoint has a template; otherwise contents are only concatenated."""
        return self._template is not None

    def render(
        self, messages: Sequence[Message], arguments: Mapping[str, Any] | None = None, *, continue_final: bool = False
    ) -> str:
        """The prompt text, with one image token per image and one video token per `Clip`, up to the assistant's turn;
        with `continue_final` up to the end of the text with which the last message ends, as in transformers.

        Such tokens in a user's text are marked as literal. Raises ValueError with the template's own message if it
        rejects the messages, and NotContinued.
        """
        parts = [part for message in messages for part in message.parts]
        images = sum(part is None for part in parts)
        if images and self.image_token is None:
            raise ValueError(f"the messages contain {images} images, but this model takes none")
        if self._template is None:
            return "\n".join(self._flat(message) for message in messages)
        final = messages[-1].parts[-1] if continue_final else None
        if final is not None:
            last = replace(messages[-1], parts=(*messages[-1].parts[:-1], final + _END))
            messages, arguments = [*messages[:-1], last], {**(arguments or {}), "add_generation_prompt": False}
        text = self._render([self._structured(m) for m in messages], arguments)
        if self._missing(text, parts):
            # A text-only template prints a list literally or drops it, so contents are passed as strings.
            flat = [{**self._head(m), "content": self._flat(m)} for m in messages]
            text = self._render(flat, arguments)
            if missing := self._missing(text, parts):
                raise ValueError(f"the chat template does not place all {missing} of these messages")
        return text if final is None else _up_to_end(text, self._safe(final))

    def _missing(self, text: str, parts: Sequence[str | None]) -> str:
        """Describes the images and clips that do not appear in the text as often as they should; empty if all do."""
        for token in self._tokens:
            meant = sum(self._meant(part, token) for part in parts)
            if without_literals(text).count(token) != meant:
                return f"{meant} {'images' if token == self.image_token else 'videos'}"
        return ""

    def _render(self, messages: list[dict[str, Any]], arguments: Mapping[str, Any] | None) -> str:
        template = self._template if (arguments or {}).get("tools") is None else self._with_tools
        assert template is not None
        # As in transformers, `tools` and `documents` are none and not undefined: templates compare them with none.
        absent = {"tools": None, "documents": None, "add_generation_prompt": True}
        values = {**self._special_tokens, **absent, **self._safe_json(arguments or {}), "messages": messages}
        try:
            return template.render(values)
        except Exception as error:  # whatever the template's code does, such as dividing by zero
            raise ValueError(f"the chat template: {str(error) or type(error).__name__}") from None

    def _meant(self, part: str | None, token: str) -> int:
        """Number of tokens of this kind in a part."""
        if part is None:
            return int(token == self.image_token)
        return part.count(token) if isinstance(part, Marked) else 0

    def _safe(self, text: str) -> str:
        return text if isinstance(text, Marked) else literal(text, *self._tokens)

    def _safe_json(self, value: Any) -> Any:
        """A JSON value with its strings as `_safe` has them."""
        match value:
            case str():
                return self._safe(value)
            case Mapping():
                return {self._safe(key): self._safe_json(item) for key, item in value.items()}
            case list():
                return [self._safe_json(item) for item in value]
        return value

    def _head(self, message: Message) -> dict[str, Any]:
        """A message without its content. Reasoning, calls and results have the names that published templates read."""
        head: dict[str, Any] = {"role": message.role}
        if message.reasoning:
            # Two names and their order, which shows where a template prints whole messages, as in transformers.
            reasoning = self._safe(message.reasoning)
            head = {"thinking": reasoning, **head, "reasoning_content": reasoning}
        if message.tool_calls:
            head["tool_calls"] = [
                {"id": self._safe(call.id), "type": "function",
                 "function": {"name": self._safe(call.name), "arguments": self._safe_json(call.arguments)}}
                for call in message.tool_calls
            ]  # fmt: skip
        if message.answered is not None:
            head |= {"tool_call_id": self._safe(message.answered.id), "name": self._safe(message.answered.name)}
        return head

    def _structured(self, message: Message) -> dict[str, Any]:
        head = self._head(message)
        if not any(part is None or isinstance(part, Clip) for part in message.parts):
            return {**head, "content": "".join(self._safe(p) for p in message.parts if p is not None)}
        return {**head, "content": [self._part(part) for part in message.parts]}

    def _part(self, part: str | None) -> dict[str, str]:
        if part is None:
            return {"type": "image"}
        return {"type": "video"} if isinstance(part, Clip) else {"type": "text", "text": self._safe(part)}

    def _flat(self, message: Message) -> str:
        return "".join(self.image_token or "" if p is None else self._safe(p) for p in message.parts)


def _up_to_end(text: str, final: str) -> str:
    """The prompt up to the end of `final`, whose trailing white space is kept if the template keeps it."""
    end = text.rfind(_END.strip())
    prompt = text[: max(end, 0)]
    if not text.startswith(_END, end):
        prompt = prompt.rstrip()
    if end < 0 or not prompt.rstrip().endswith(final.strip()):
        raise NotContinued("the chat template does not print the last message's text unchanged")
    return prompt


def load_template(path: Path, *, image_token: str | None, video_token: str | None = None) -> ChatTemplate:
    """Reads a model directory's template; without one, returns a template that concatenates contents."""
    about = path / "tokenizer_config.json"
    config = read_settings(path)
    files, templates = _templates(path, about, config)
    specials = named_tokens(config)
    for name in SPECIAL_TOKENS:
        if name not in specials and (value := config.get(name)) is not None:
            raise CheckpointError(f"{about}: {name} must be a string or an object with its content, not {value!r}")
    try:
        return ChatTemplate(
            templates.get("default", next(iter(templates.values()), None)), image_token=image_token,
            special_tokens=specials, video_token=video_token, tools_source=templates.get("tool_use"),
        )  # fmt: skip
    except BrokenTemplate as error:
        raise CheckpointError(f"{files[error.source]}: {error}") from None


def has_other_template(path: Path, template: ChatTemplate) -> bool:
    """Whether a folder that is not the model's has a chat template, and not this one."""
    try:
        other = load_template(path, image_token=None).source
    except CheckpointError:  # which nobody will notice
        return False
    return other.strip() not in ("", template.source.strip())


def _templates(path: Path, about: Path, config: Mapping[str, Any]) -> tuple[dict[str, Path], dict[str, str]]:
    """The file of each template, for errors, and the templates by name. As in transformers, those in files of their own
    replace those in `config`, the content of `about`."""
    holder, files = path / "chat_template.jinja", {}
    if holder.exists():
        files["default"] = holder
    files |= {file.stem: file for file in sorted((path / TEMPLATES).glob("*.jinja"))}
    own = {name: _text(file) for name, file in files.items()}
    places = {own[name]: file for name, file in files.items()}
    if "default" in own:
        return places, own
    holder = path / "chat_template.json"
    if (field := optional_json(holder).get("chat_template")) is None:
        holder, field = about, config.get("chat_template")
    named = {} if field is None else _named(holder, field)
    return dict.fromkeys(named.values(), holder) | places, named | own


def _text(file: Path) -> str:
    try:
        return file.read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise CheckpointError(f"{file} cannot be read: {error}") from None


def _named(file: Path, field: Any) -> dict[str, str]:
    """The templates of a field by name: the text itself, a list of named templates, or an object."""
    if isinstance(field, str):
        return {"default": field}
    try:
        found = field if isinstance(field, Mapping) else {entry["name"]: entry["template"] for entry in field}
    except (TypeError, KeyError):
        found = {}
    if not found or not all(isinstance(text, str) for text in found.values()):
        raise CheckpointError(f"{file}: chat_template must be a string or a list of objects with name and template")
    return dict(found)


def _raise(message: str) -> None:
    raise TemplateError(message)


def _tojson(
    value: Any, ensure_ascii: bool = False, indent: int | None = None, separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:  # fmt: skip
    """As in transformers; Jinja's own filter escapes HTML characters."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
