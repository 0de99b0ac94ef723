"""A Ray Serve application: replicas that each hold an engine, behind Serve's gRPC ingress with Saccade's own services.

`deploy/ray/serve.yaml` deploys it. `docs/scale.md` says what the ingress does not have.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc
from ray import serve

from saccade import errors
from saccade._core.steps import Call
from saccade.local import LocalClient

SERVICERS = (
    "saccade.v1.inference_pb2_grpc.add_InferenceServiceServicer_to_server",
    "saccade.v1.model_pb2_grpc.add_ModelServiceServicer_to_server",
)
"""For `grpc_options.grpc_servicer_functions`."""
CODES: Mapping[type[errors.SaccadeError], grpc.StatusCode] = {
    errors.InvalidArgument: grpc.StatusCode.INVALID_ARGUMENT,
    errors.NotFound: grpc.StatusCode.NOT_FOUND,
    errors.AlreadyExists: grpc.StatusCode.ALREADY_EXISTS,
    errors.FailedPrecondition: grpc.StatusCode.FAILED_PRECONDITION,
    errors.OutOfRange: grpc.StatusCode.OUT_OF_RANGE,
    errors.Unimplemented: grpc.StatusCode.UNIMPLEMENTED,
    errors.DeadlineExceeded: grpc.StatusCode.DEADLINE_EXCEEDED,
    errors.Overloaded: grpc.StatusCode.UNAVAILABLE,
    errors.Unavailable: grpc.StatusCode.UNAVAILABLE,
    errors.Cancelled: grpc.StatusCode.CANCELLED,
    errors.MessageTooLarge: grpc.StatusCode.RESOURCE_EXHAUSTED,
    errors.RateLimited: grpc.StatusCode.RESOURCE_EXHAUSTED,
}


class Replica:
    """One replica: the methods of InferenceService and ModelService over an engine in this process.

    Serve hands over each request by its method's name, without the client's deadline and, for errors, without status
    details: clients get codes and messages, but no reasons.

    Args:
        model, options: as for `saccade.LocalClient`.
        calls: requests that run at a time; more wait in Serve. Should be `max_ongoing_requests` of the deployment.
    """

    def __init__(self, model: str = "demo", options: Mapping[str, Any] | None = None, calls: int = 64) -> None:
        self._client = LocalClient(model, **(options or {}))
        self._threads = ThreadPoolExecutor(calls, thread_name_prefix="saccade-serve")

    def check_health(self) -> None:
        """Raises if the engine has ended; Serve then replaces the replica."""
        self._client.get_model()

    async def Generate(self, request: Any, grpc_context: Any) -> Any:
        return await self._unary("inference", "Generate", request, grpc_context)

    async def Embed(self, request: Any, grpc_context: Any) -> Any:
        return await self._unary("inference", "Embed", request, grpc_context)

    async def Tokenize(self, request: Any, grpc_context: Any) -> Any:
        return await self._unary("inference", "Tokenize", request, grpc_context)

    async def GetModel(self, request: Any, grpc_context: Any) -> Any:
        return await self._unary("model", "GetModel", request, grpc_context)

    async def ListModels(self, request: Any, grpc_context: Any) -> Any:
        return await self._unary("model", "ListModels", request, grpc_context)

    async def _unary(self, service: str, method: str, request: Any, context: Any) -> Any:
        exchange = self._client._connection.exchange()
        try:
            return await self._in_thread(exchange.send, Call(service, method, request), None)
        except errors.SaccadeError as error:
            raise _said(error, context) from error
        finally:
            exchange.close()  # cancels the work if the client has gone

    async def StreamGenerate(self, request: Any, grpc_context: Any) -> AsyncGenerator[Any, None]:
        exchange = self._client._connection.exchange()
        try:
            await self._in_thread(exchange.open, Call("inference", "StreamGenerate", request), None, "")
            while (message := await self._in_thread(exchange.receive, None)) is not None:
                yield message
        except errors.SaccadeError as error:
            raise _said(error, grpc_context) from error
        finally:
            exchange.close()

    async def _in_thread(self, function: Any, *arguments: Any) -> Any:
        return await asyncio.get_running_loop().run_in_executor(self._threads, function, *arguments)


def _said(error: errors.SaccadeError, context: Any) -> errors.SaccadeError:
    """The error, after its status has been set on Serve's context."""
    context.set_code(CODES.get(type(error), grpc.StatusCode.INTERNAL))
    context.set_details(error.message)
    return error


def app(args: Mapping[str, Any]) -> Any:
    """Builds the application.

    Args:
        args: `model` and `options` of `Replica`; `deployment`: options of the deployment, such as num_replicas,
            autoscaling_config, max_ongoing_requests (64 by default), ray_actor_options.
    """
    options = {"max_ongoing_requests": 64, **args.get("deployment", {})}
    deployment = serve.deployment(Replica, name="Saccade").options(**options)
    return deployment.bind(args.get("model", "demo"), args.get("options"), options["max_ongoing_requests"])
