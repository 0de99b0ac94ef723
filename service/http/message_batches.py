"""`/v1/messages/batches`, Anthropic's batches: those of the gRPC servers' BatchService, whose rows are the requests as
chat completions. Answers become messages when they are read."""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import AsyncGenerator, Iterator
from datetime import UTC, datetime
from typing import Any

from pydantic import Field

from saccade._core.batches import batch_from
from saccade._core.uploads import chunks
from saccade._openai.anthropic_schema import MessagesRequest, chat_of
from saccade._openai.chat import chat_request
from saccade._openai.errors import error_object
from saccade._openai.fields import MESSAGES as NAMES
from saccade._openai.fields import part_rules
from saccade._openai.problems import validated
from saccade._openai.schema import Strict
from saccade.errors import InvalidArgument
from saccade.types import Batch
from saccade.v1 import batch_pb2, model_pb2, types_pb2
from service.http.batches import MESSAGES, URL, all_batches, cancelled, delete_batch, find_batch, output_lines
from service.http.call import HttpCall, beside, path_values
from service.http.messages import (
    anthropic_error,
    as_anthropic,
    blocks_of,
    ending_of,
    input_usage,
    message_object,
    object_of,
)
from service.http.pages import page_around, query_of
from service.http.upstream import Connection

DEFAULT_LISTED, MAX_LISTED = 20, 1000
"""Number of batches on one page of the list: without the parameter `limit`, and at most."""
DAY = 24 * 3600.0
"""Seconds after its creation at which a batch expires, as far as clients are told: it runs until it is complete."""


class BatchedMessage(Strict):
    """A request of a batch of messages."""

    custom_id: str = Field(min_length=1, max_length=512)
    params: MessagesRequest


class MessageBatch(Strict):
    """The body of `/v1/messages/batches`."""

    requests: list[BatchedMessage] = Field(min_length=1, description="At most as many as the body has space for.")


async def create(call: HttpCall) -> None:
    """Starts a batch of messages."""
    as_anthropic(call)
    rows, count = await beside(call.held, _rows, await call.json())
    header = batch_pb2.BatchHeader(
        request_id=call.request_id, size_bytes=len(rows), input_name=MESSAGES, metadata={"requests": str(count)}
    )

    def parts() -> Iterator[batch_pb2.CreateBatchRequest]:
        yield batch_pb2.CreateBatchRequest(header=header)
        yield from (batch_pb2.CreateBatchRequest(chunk=chunk) for chunk in chunks(rows))

    made = await call.caller().create("batch", "CreateBatch", parts, call.request_id)
    await call.respond(_object(batch_from(made.batch)))


def _rows(document: Any) -> tuple[bytes, int]:
    """The batch's input, and the number of its rows. Raises InvalidArgument for whatever would make the batch fail as a
    whole."""
    body = validated(MessageBatch, document)
    lines, places = [], dict[str, int]()
    for i, request in enumerate(body.requests):
        name = f"requests[{i}]"
        if (first := places.setdefault(request.custom_id, i)) != i:
            raise InvalidArgument(f"{name}.custom_id: {request.custom_id[:60]!r} is that of requests[{first}] too")
        params = request.params
        omits = params.thinking is not None and params.thinking.display == "omitted"
        refused = {"stream": params.stream, "thread": params.thread is not None, "thinking.display": omits}
        for field, given in refused.items():
            if given:
                raise InvalidArgument(f"{name}.params.{field}: it is not supported in a batch")
        rules = NAMES
        try:
            chat, parts = chat_of(params)
            rules = part_rules(parts, NAMES)
            chat_request(chat, _here)
        except InvalidArgument as error:
            told = error_object(error, 400, rules)
            raise InvalidArgument(f"{name}.params: {told['message']}", field=f"{name}.params") from None
        row = {"custom_id": request.custom_id, "method": "POST", "url": URL, "body": _body(chat)}
        lines.append(json.dumps(row, ensure_ascii=False, separators=(",", ":")).encode() + b"\n")
    return b"".join(lines), len(lines)


def _body(chat: Any) -> dict[str, Any]:
    # As in `/v1/messages`: an answer that reaches the end of the context says so.
    return {**chat.model_dump(mode="json", exclude_none=True), "clamp_max_tokens": True}


def _here(source: str | types_pb2.Image, name: str) -> types_pb2.Image:
    """Refuses images that are neither in the request nor uploaded, as batches do. Raises InvalidArgument."""
    if isinstance(source, str) or source.WhichOneof("source") == "uri":
        raise InvalidArgument(f"{name}: an image of a batch must have a source of type base64 or file")
    return source


async def get(call: HttpCall) -> None:
    """The state of a batch of messages."""
    batch, _ = await _find(call)
    await call.respond(_object(batch))


async def list_batches(call: HttpCall) -> None:
    """Lists batches of messages, newest first: at most `limit`, those after the id `after_id` or before `before_id`."""
    as_anthropic(call)
    found = await all_batches(call, lambda batch: batch.input_name == MESSAGES)
    objects = list(map(_object, found))
    await call.respond(page_around(objects, query_of(call), DEFAULT_LISTED, MAX_LISTED, "batch", "BATCH_NOT_FOUND"))


async def cancel(call: HttpCall) -> None:
    """Cancels a batch of messages; finished answers are kept."""
    await call.respond(_object(await cancelled(call, *await _find(call))))


async def delete(call: HttpCall) -> None:
    """Deletes a batch of messages that has ended, with its results."""
    batch, connection = await _find(call)
    await delete_batch(call, batch, connection)
    await call.respond({"id": batch.batch_id, "type": "message_batch_deleted"})


async def results(call: HttpCall) -> None:
    """The results of a batch of messages that has ended, one in each line, in the order in which they were ready."""
    batch, connection = await _find(call)
    async with call.connected():
        async with contextlib.aclosing(_results(call, batch, connection)) as source:
            async for piece in source:
                if not call.started:
                    await call.start(200, "application/x-jsonl", [])
                await call.write(piece)
        if not call.started:
            await call.start(200, "application/x-jsonl", [])
        await call.end()


async def _find(call: HttpCall) -> tuple[Batch, Connection]:
    as_anthropic(call)
    return await find_batch(call, path_values(call.scope)["batch_id"], messages=True)


async def _results(call: HttpCall, batch: Batch, connection: Connection) -> AsyncGenerator[bytes, None]:
    request = model_pb2.ListModelsRequest()
    models = (await call.caller().call("model", "ListModels", request, on=connection)).models
    context = next((model.limits.context_length for model in models if model.name == batch.model), 0)
    async with contextlib.aclosing(output_lines(call, batch, connection)) as source:
        async for lines in source:
            yield b"".join(_result(json.loads(line), context) for line in lines)


def _result(row: dict[str, Any], context: int) -> bytes:
    """The line for one of the batch's output. `context`: tokens that the model's context holds; 0: not known."""
    response = row["response"]
    if (error := row["error"]) is None:
        message = _message(response["body"], response["request_id"], context)
        result = {"type": "succeeded", "message": message}
    else:
        # Parts have other places in the row's chat completion than in the request.
        words = re.sub(r"^messages\[\d+\][^: ]*", "messages", error["message"])
        told = {**error, "message": words, "request_id": response["request_id"]}
        result = {"type": "errored", "error": anthropic_error(told, response["status_code"])}
    line = json.dumps({"custom_id": row["custom_id"], "result": result}, ensure_ascii=False, separators=(",", ":"))
    return line.encode("utf-8", "replace") + b"\n"


def _message(completion: dict[str, Any], request_id: str, context: int) -> dict[str, Any]:
    """The message of a chat completion."""
    usage, (choice,) = completion["usage"], completion["choices"]
    said = choice["message"]
    blocks = blocks_of(said.get("reasoning") or "", said["content"] or "")
    for call in said.get("tool_calls", ()):
        function = call["function"]
        made = {"type": "tool_use", "id": call["id"], "name": function["name"]}
        blocks.append({**made, "input": object_of(function["arguments"])})
    cached = usage["prompt_tokens_details"]["cached_tokens"]
    full = bool(context) and usage["total_tokens"] >= context
    return {
        **message_object(request_id, completion["model"]),
        "content": blocks,
        **ending_of(choice["finish_reason"], choice["stop_reason"], whole=not full),
        "usage": input_usage(usage["prompt_tokens"], cached) | {"output_tokens": usage["completion_tokens"]},
    }


def _object(batch: Batch) -> dict[str, Any]:
    """Anthropic's object for a batch. Its results are at a path, since the server does not know under which URL a proxy
    offers it; clients resolve paths. The object `saccade` says why a batch failed."""
    told = batch.metadata.get("requests", "")  # any text if a client of gRPC has created the batch
    total = max(int(told) if told.isdecimal() else 0, batch.total)
    unanswered = total - batch.completed - batch.failed
    stopped = batch.state == "cancelled"
    counts = {"processing": total, "succeeded": 0, "errored": 0, "canceled": 0, "expired": 0}
    if batch.over:
        counts |= {
            "processing": 0, "succeeded": batch.completed, "canceled": unanswered if stopped else 0,
            "errored": batch.failed + (0 if stopped else unanswered),
        }  # fmt: skip
    return {
        "type": "message_batch",
        "id": batch.batch_id,
        "processing_status": "ended" if batch.over else "in_progress",
        "request_counts": counts,
        "created_at": _time(batch.created),
        "ended_at": _time(batch.ended),
        "expires_at": _time(batch.expires or (batch.created or 0.0) + DAY),
        "cancel_initiated_at": _time(batch.ended) if stopped else None,
        "archived_at": None,
        "results_url": f"{MESSAGES}/{batch.batch_id}/results" if batch.over else None,
        "saccade": {"state": batch.state, "reason": batch.reason or None, "message": batch.message or None},
    }


def _time(seconds: float | None) -> str | None:
    return None if seconds is None else datetime.fromtimestamp(seconds, UTC).isoformat().replace("+00:00", "Z")
