"""A Ray Serve application: replicas that each hold an engine, behind Serve's gRPC ingress with Saccade's own services,
and behind its HTTP ingress with OpenAI's API.

`deploy/ray/serve.yaml` deploys it. `docs/scale.md` lists what the ingress lacks.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc
from ray import serve

from saccade import errors
from saccade._core.steps import Call
from saccade._transport.local import LocalConnection
from saccade._transport.local_aio import AsyncLocalConnection
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

    Serve calls the method that a request names, without the client's deadline. It returns errors without status
    details: clients get codes and messages, but no reasons.

    Args:
        model, options: as for `saccade.LocalClient`.
        calls: requests that run at a time; others wait in Serve. It should equal the deployment's
            `max_ongoing_requests`.
    """

    def __init__(self, model: str = "demo", options: Mapping[str, Any] | None = None, calls: int = 64) -> None:
        self._client = LocalClient(model, **(options or {}))
        threads = ThreadPoolExecutor(calls, thread_name_prefix="saccade-serve")
        connection = self._client._connection
        assert isinstance(connection, LocalConnection)
        self._engine = AsyncLocalConnection(connection, threads)

    def check_health(self) -> None:
        """Raises if the engine has ended; Serve then replaces the replica."""
        if not self._engine.alive:
            raise errors.Unavailable("the replica's engine has ended")

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
        try:
            return await self._engine.start(Call(service, method, request), request, None)
        except errors.SaccadeError as error:
            raise _said(error, context) from error

    async def StreamGenerate(self, request: Any, grpc_context: Any) -> AsyncGenerator[Any, None]:
        call = self._engine.start(Call("inference", "StreamGenerate", request), request, None)
        try:
            while (message := await call.read()) is not grpc.aio.EOF:
                yield message
        except errors.SaccadeError as error:
            raise _said(error, grpc_context) from error
        finally:
            call.cancel()


class HttpReplica(Replica):
    """A replica that also has the HTTP server's routes, for Serve's HTTP proxies.

    Args:
        http: options of `saccade http` with underscores, such as max_message_bytes.

    Raises:
        InvalidArgument: an option is wrong.
        FailedPrecondition: the server was installed without its extra `http`.
    """

    def __init__(self, http: Mapping[str, Any], *args: Any) -> None:
        from service.common.config import ConfigError, HttpFrontOptions
        from service.common.settings import from_keywords
        from service.http.listen import check_packages

        try:
            self._http = from_keywords(HttpFrontOptions, http)
        except ConfigError as error:
            raise errors.InvalidArgument(f"http: {error}") from error
        try:
            check_packages()
        except ConfigError as error:
            raise errors.FailedPrecondition(str(error), reason="NOT_INSTALLED") from error
        super().__init__(*args)

    def __serve_build_asgi_app__(self) -> Any:
        """Called by Serve in the replica."""
        from service.http.app import make_app

        return make_app(self._http, self._engine)


def _said(error: errors.SaccadeError, context: Any) -> errors.SaccadeError:
    """The error, after its status has been set on Serve's context."""
    context.set_code(CODES.get(type(error), grpc.StatusCode.INTERNAL))
    context.set_details(error.message)
    return error


def app(args: Mapping[str, Any]) -> Any:
    """Builds the application.

    Args:
        args: `model` and `options` of `Replica`; `http`: if given, the replicas have OpenAI's HTTP API as well, with
            these options (see `HttpReplica`); `deployment`: options of the deployment, such as num_replicas,
            autoscaling_config, max_ongoing_requests (64 by default), ray_actor_options.

    Raises:
        InvalidArgument: an unknown argument.
    """
    if unknown := sorted(set(args) - {"model", "options", "http", "deployment"}):
        raise errors.InvalidArgument(f"args: expected model, options, http and deployment, got {', '.join(unknown)}")
    options = {"max_ongoing_requests": 64, **(args.get("deployment") or {})}
    replica: list[Any] = [args.get("model", "demo"), args.get("options"), options["max_ongoing_requests"]]
    if args.get("http") is None:
        return serve.deployment(Replica, name="Saccade").options(**options).bind(*replica)
    with_http = serve.ingress()(HttpReplica)
    return serve.deployment(with_http, name="Saccade").options(**options).bind(args["http"], *replica)
