"""`/v1/models`, health and the state of the servers."""

from __future__ import annotations

import asyncio
import time
from datetime import UTC, datetime
from typing import Any

import grpc
from google.protobuf import json_format

from saccade._core.results import model_from
from saccade._transport.local_aio import AsyncLocalConnection
from saccade.errors import NotFound, SaccadeError, Unavailable
from saccade.types import Model
from saccade.v1 import admin_pb2, model_pb2
from service.http.call import HttpCall, path_values
from service.http.messages import as_anthropic
from service.http.pages import Query, page_around, query_of
from service.http.upstream import Caller, Connection

PROBE_SECONDS = 2.0
"""Seconds that a server may take to say whether it is ready."""
DEFAULT_LISTED, MAX_LISTED = 20, 1000
"""Number of models on one page of Anthropic's list: without the parameter `limit`, and at most."""
_STARTED = int(time.time())
"""When models were created, as far as clients are told."""


async def health(call: HttpCall) -> None:
    """Whether the HTTP server itself is alive."""
    await call.respond({"status": "ok"})


async def ready(call: HttpCall) -> None:
    """Whether at least one gRPC server is ready. Needs no key, like the gRPC servers' health service."""
    found = await asyncio.gather(*(_serving(call, connection) for connection in call.front.upstream.connections))
    servers = dict(zip(call.front.upstream.names, found, strict=True))
    ready = any(state == "serving" for state in found)
    await call.respond({"status": "ready" if ready else "not ready", "servers": servers}, 200 if ready else 503)


async def _serving(call: HttpCall, connection: Connection) -> str:
    if isinstance(connection, AsyncLocalConnection):
        return "serving" if connection.alive else "not serving"
    from grpc_health.v1 import health_pb2

    channel = connection.grpc_channel()
    check = channel.unary_unary(
        "/grpc.health.v1.Health/Check",
        request_serializer=health_pb2.HealthCheckRequest.SerializeToString,
        response_deserializer=health_pb2.HealthCheckResponse.FromString,
    )
    try:
        answer = await check(health_pb2.HealthCheckRequest(), timeout=PROBE_SECONDS)
    except grpc.RpcError as error:
        if error.code() != grpc.StatusCode.UNIMPLEMENTED:
            return "unreachable"
        return await _with_models(call, connection)
    return "serving" if answer.status == health_pb2.HealthCheckResponse.SERVING else "not serving"


async def _with_models(call: HttpCall, connection: Connection) -> str:
    """The state of a server without a health service, such as Ray Serve's ingress."""
    try:
        await call.caller().call("model", "ListModels", model_pb2.ListModelsRequest(), on=connection)
    except SaccadeError:
        return "not serving"
    return "serving"


async def list_models(call: HttpCall) -> None:
    """Lists the models of all servers; in Anthropic's form if the header `anthropic-version` is set."""
    if anthropic := _for_anthropic(call):
        as_anthropic(call)
    found = list((await _models(call)).values())
    if anthropic:
        await call.respond(models_page(found, query_of(call)))
    else:
        await call.respond({"object": "list", "data": [model_object(model) for model in found]})


def _for_anthropic(call: HttpCall) -> bool:
    """Whether the caller uses Anthropic's API, whose paths for models are OpenAI's too."""
    return "anthropic-version" in call.headers


def models_page(models: list[Model], query: Query) -> dict[str, Any]:
    """A page of Anthropic's list of models. Raises InvalidArgument and NotFound."""
    if "active" not in query.get("lifecycle[]", ["active"]):
        models = []
    return page_around(list(map(_model_info, models)), query, DEFAULT_LISTED, MAX_LISTED, "model")


async def get_model(call: HttpCall) -> None:
    """Describes one model; in Anthropic's form if the header `anthropic-version` is set."""
    name = path_values(call.scope)["name"]
    if anthropic := _for_anthropic(call):
        as_anthropic(call)
    found = await _models(call)
    if name not in found:
        raise NotFound(f"there is no model {name[:200]!r}; there are {', '.join(found)}")
    await call.respond(_model_info(found[name]) if anthropic else model_object(found[name]))


async def _models(call: HttpCall) -> dict[str, Model]:
    """The models of all servers that answer, by name; a header of the answer names the servers that do not. Raises
    SaccadeError if there is none."""
    caller = call.caller()
    answers, failures = await caller.of_each(
        lambda connection: caller.call("model", "ListModels", model_pb2.ListModelsRequest(), on=connection)
    )
    call.note_missing(failures)
    found = {model.name: model_from(model) for answer in answers for model in answer.models}
    if not found:
        raise Unavailable("no server has a model", retryable=True)
    return found


def _model_info(model: Model) -> dict[str, Any]:
    """Anthropic's object for a model."""
    return {
        "type": "model",
        "id": model.name,
        "display_name": model.name,
        "created_at": datetime.fromtimestamp(_STARTED, UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
        "lifecycle": "active",
        "max_input_tokens": model.limits.context_length,
        "saccade": model_object(model)["saccade"],
    }


def model_object(model: Model) -> dict[str, Any]:
    """OpenAI's object for a model; `saccade` contains what OpenAI's format has no fields for."""
    limits = model.limits
    return {
        "id": model.name,
        "object": "model",
        "created": _STARTED,
        "owned_by": "saccade",
        "max_model_len": limits.context_length,
        "saccade": {
            "version": model.version,
            "dtype": model.dtype,
            "takes_images": model.takes_images,
            "takes_videos": model.takes_videos,
            "image_formats": list(limits.image_formats),
            "video_formats": list(limits.video_formats),
            "url_schemes": list(limits.uri_schemes),
            "max_images": limits.max_images,
            "max_image_bytes": limits.max_image_bytes,
            "max_image_tokens": limits.max_image_tokens,
            "max_videos": limits.max_videos,
            "max_samples": limits.max_samples,
            "max_logprobs": limits.max_logprobs,
            "default_sampling": model.default_sampling,
        },
    }


async def status(call: HttpCall) -> None:
    """The state of each server. Its loads need the scope "admin", like AdminService."""
    caller, upstream = call.caller(), call.front.upstream
    servers = await asyncio.gather(
        *(
            _server_state(caller, *server)
            for server in zip(upstream.addresses, upstream.names, upstream.connections, strict=True)
        )
    )
    front = {
        "running": call.front.running,
        "streams": call.front.streams,
        "body_bytes": call.front.budget.used,
        "servers": len(servers),
        "grpc_address": call.front.grpc_address,
    }
    await call.respond({"http": front, "servers": servers})


async def _server_state(caller: Caller, address: str, name: str, connection: Connection) -> dict[str, Any]:
    state: dict[str, Any] = {"address": address, "error": None, "models": [], "loads": None, "loads_error": None}
    try:
        asked = caller.call("model", "ListModels", model_pb2.ListModelsRequest(), on=connection)
        models = await caller.soon(name, asked)
        state["models"] = [model_object(model_from(model)) for model in models.models]
    except SaccadeError as error:
        state["error"] = {"code": error.reason or type(error).__name__, "message": error.message}
        return state
    try:
        asked = caller.call("admin", "GetLoads", admin_pb2.GetLoadsRequest(), on=connection)
        loads = await caller.soon(name, asked)
        state["loads"] = _numbers(_all_fields(loads))
    except SaccadeError as error:
        state["loads_error"] = {"code": error.reason or type(error).__name__, "message": error.message}
    return state


def _all_fields(message: Any) -> dict[str, Any]:
    fields: dict[str, Any] = json_format.MessageToDict(
        message, preserving_proto_field_name=True, always_print_fields_with_no_presence=True
    )
    return fields


def _numbers(value: Any) -> Any:
    """Converts strings to numbers where proto3's JSON has strings for 64-bit integers."""
    if isinstance(value, dict):
        return {name: _numbers(item) for name, item in value.items()}
    if isinstance(value, list):
        return [_numbers(item) for item in value]
    return int(value) if isinstance(value, str) and value.lstrip("-").isdigit() else value
