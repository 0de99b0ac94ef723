"""What HTTP servers ask for: whether a key is known, and that several gRPC calls are one request. A drain between two
of them must not end a request that was accepted.

The HTTP process of `saccade serve` holds one call of this service open meanwhile, which the server rejects while it
drains and waits for otherwise. The request's other calls are accepted also during a drain. That is only for the
private Unix socket: calls through the public port are accepted one by one.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from typing import Any

import grpc
from google.protobuf.empty_pb2 import Empty

from service.common import errors
from service.common.http_requests import ACCEPTED, CHECK_KEY, HOLD, SERVICE
from service.rpc.statuses import abort


def is_private(context: Any) -> bool:
    """Whether a call came through the private Unix socket, which only this user's processes can open."""
    peer: str = context.peer()
    return peer.startswith("unix:")


def is_accepted(headers: Mapping[str, str | bytes], context: Any) -> bool:
    """Whether a call belongs to an HTTP request that has been accepted."""
    return ACCEPTED in headers and is_private(context)


async def _check_key(request: Empty, context: Any) -> Empty:
    """Is called once the interceptor has found the key."""
    return request


class HttpRequests:
    """The HTTP requests that are held open. Used on the server's event loop."""

    def __init__(self, refusal: Callable[[], errors.StatusError | None]) -> None:
        """`refusal`: the error for new requests if the server drains."""
        self._refusal = refusal
        self._open = 0
        self.idle = asyncio.Event()
        """Set while no request is held open."""
        self.idle.set()

    def handler(self) -> grpc.GenericRpcHandler:
        """The service."""
        hold = grpc.unary_stream_rpc_method_handler(self._hold, request_deserializer=bytes)
        check = grpc.unary_unary_rpc_method_handler(
            _check_key, request_deserializer=Empty.FromString, response_serializer=Empty.SerializeToString
        )
        methods = {HOLD: hold, CHECK_KEY: check}
        return grpc.method_handlers_generic_handler(SERVICE, {n.rpartition("/")[2]: m for n, m in methods.items()})

    async def _hold(self, request: bytes, context: Any) -> None:
        """Ends when the client cancels it."""
        if not is_private(context):
            await abort(context, errors.PermissionDenied("only this server's HTTP process may hold requests open"))
        if (refusal := self._refusal()) is not None:
            await abort(context, refusal)
        self._open += 1
        self.idle.clear()
        try:
            await context.write(b"")
            await asyncio.Event().wait()
        finally:
            self._open -= 1
            if not self._open:
                self.idle.set()
