"""The chunks in which chat completions and completions are streamed. The two APIs differ in what a choice contains."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from saccade._openai.schema import Sampling
from saccade.types import Delta
from saccade.v1 import inference_pb2
from service.http.json_text import compact, quoted
from service.http.streams import Events

DONE = b"data: [DONE]\n\n"


class ChunkEvents(Events):
    """Writes chunks; a subclass says which and when."""

    def __init__(self, answer_id: str, kind: str, body: Sampling, first: int = 0) -> None:
        """`kind`: the chunks' field `object`. `first`: index of the answer's first choice in the request."""
        options = body.stream_options
        self.ids_asked = bool(body.return_token_ids)
        self.usage_asked = bool(options and options.include_usage)
        self._continuous = bool(options and options.continuous_usage_stats)
        self._id, self._kind, self._first = answer_id, kind, first
        self._head = ""
        self._prompt_tokens = 0
        self.prompt_ids = ""
        """The JSON of the field `prompt_token_ids`, after a comma, if token ids are asked for."""
        self._generated: dict[int, int] = {}
        """Tokens of each choice so far."""

    def begin(self, started: inference_pb2.Started) -> bytes:
        self._prompt_tokens = started.prompt_tokens
        if self.ids_asked:
            self.prompt_ids = f',"prompt_token_ids":{compact(list(started.prompt_token_ids))}'
        self._head = (
            f'data: {{"id":{quoted(self._id)},"object":"{self._kind}",'
            f'"created":{int(time.time())},"model":{quoted(started.model)},'
            f'"system_fingerprint":{quoted(started.model_version)},"choices":['
        )
        return b""

    def count(self, delta: Delta) -> None:
        """Counts the tokens of a delta for `continuous_usage_stats`."""
        self._generated[delta.index] = self._generated.get(delta.index, 0) + len(delta.token_ids)

    def choice(self, index: int, fields: str, ids: Sequence[int] = (), *, more: str = "") -> bytes:
        """The chunk of the choice `index` of this answer. `fields`: the JSON of those that follow its index. `ids`: of
        its tokens. `more`: fields of the chunk, after a comma."""
        told = f',"token_ids":{compact(list(ids))}' if self.ids_asked else ""
        chunk = f'{self._head}{{"index":{self._first + index},{fields}{told}}}]{more}{self._usage(index)}}}\n\n'
        return chunk.encode("utf-8", "replace")

    def without_choices(self, usage: dict[str, Any] | None, extension: dict[str, Any]) -> bytes:
        """The first or the last chunk of a stream with usage. `extension`: its field `saccade`."""
        told = f'"usage":{compact(usage)},"saccade":{compact(extension)}'
        return f"{self._head}],{told}}}\n\n".encode("utf-8", "replace")

    def error(self, error: dict[str, Any], status: int) -> bytes:
        return b"data: " + compact({"error": error}).encode("utf-8", "replace") + b"\n\n" + DONE

    def _usage(self, index: int) -> str:
        """The field `usage` of a choice's chunk, after a comma: missing, null (it follows at the end), or, with
        `continuous_usage_stats`, what the choice has used so far."""
        if not self._continuous:
            return ',"usage":null' if self.usage_asked else ""
        generated = self._generated.get(index, 0)
        return (
            f',"usage":{{"prompt_tokens":{self._prompt_tokens},"completion_tokens":{generated},'
            f'"total_tokens":{self._prompt_tokens + generated}}}'
        )
