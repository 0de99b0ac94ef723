"""`/openapi.json`: the routes and the schemas of their bodies."""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache
from typing import Any

from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from saccade._openai.anthropic_schema import CountTokens, MessagesRequest
from saccade._openai.completion_schema import Completion, Detokenize, Embeddings, Tokenize
from saccade._openai.response_schema import ResponseRequest
from saccade._openai.schema import ChatCompletion
from service.http.batches import BatchRequest
from service.http.call import HttpCall
from service.http.message_batches import MessageBatch

BODIES: dict[str, type[BaseModel]] = {
    "/v1/chat/completions": ChatCompletion,
    "/v1/completions": Completion,
    "/v1/responses": ResponseRequest,
    "/v1/responses/input_tokens": ResponseRequest,
    "/v1/messages": MessagesRequest,
    "/v1/messages/count_tokens": CountTokens,
    "/v1/messages/batches": MessageBatch,
    "/v1/embeddings": Embeddings,
    "/v1/batches": BatchRequest,
    "/tokenize": Tokenize,
    "/detokenize": Detokenize,
}
_ERROR = {
    "type": "object",
    "properties": {
        "error": {
            "type": "object",
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": {"type": ["string", "null"], "description": "The field at fault."},
                "code": {"type": "string", "description": "A stable reason; docs/troubleshooting.md lists them."},
                "request_id": {"type": ["string", "null"]},
            },
        }
    },
}


@cache
def document(routes: Iterable[tuple[str, str, str]]) -> dict[str, Any]:
    """The OpenAPI document. `routes`: method, path and summary of each."""
    ordered = sorted(set(BODIES.values()), key=lambda model: model.__name__)
    _, schemas = models_json_schema(
        [(model, "validation") for model in ordered], ref_template="#/components/schemas/{model}"
    )
    paths: dict[str, dict[str, Any]] = {}
    for method, path, summary in routes:
        operation: dict[str, Any] = {
            "summary": summary,
            "operationId": f"{method.lower()}{path.replace('/', '_').replace('{', '').replace('}', '')}",
            "responses": {
                "200": {"description": "The answer."},
                "4XX": {
                    "description": "The request is invalid or was rejected.",
                    "content": {"application/json": {"schema": {"$ref": "#/components/schemas/Error"}}},
                },
            },
        }
        names = [part[1:-1].partition(":")[0] for part in path.split("/") if part.startswith("{")]
        if names:
            operation["parameters"] = [
                {"name": name, "in": "path", "required": True, "schema": {"type": "string"}} for name in names
            ]
        if method == "POST" and path in BODIES:
            reference = {"$ref": f"#/components/schemas/{BODIES[path].__name__}"}
            operation["requestBody"] = {"required": True, "content": {"application/json": {"schema": reference}}}
        paths.setdefault(path.replace(":path}", "}"), {})[method.lower()] = operation
    return {
        "openapi": "3.1.0",
        "info": {"title": "Saccade", "version": "1", "description": "OpenAI's and Anthropic's APIs over HTTP."},
        "paths": paths,
        "components": {
            "schemas": {**schemas.get("$defs", {}), "Error": _ERROR},
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
        "security": [{}, {"key": []}],
    }


async def openapi(call: HttpCall) -> None:
    """The OpenAPI document of this server."""
    await call.respond(document(call.front.routes))
