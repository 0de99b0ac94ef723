"""The handlers of gRPC services without generated servicers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import grpc
from google.protobuf.message_factory import GetMessageClass


def handler_of(service: Any, methods: Mapping[str, Callable[..., Any]]) -> Any:
    """The handler for `add_generic_rpc_handlers`. `service`: the descriptor of the service. `methods`: by their names
    in it; others end with UNIMPLEMENTED."""
    handlers = {}
    for name, body in methods.items():
        method = service.methods_by_name[name]
        kind = "_".join("stream" if each else "unary" for each in (method.client_streaming, method.server_streaming))
        request, response = GetMessageClass(method.input_type), GetMessageClass(method.output_type)
        handlers[name] = getattr(grpc, f"{kind}_rpc_method_handler")(
            body, request_deserializer=request.FromString, response_serializer=response.SerializeToString
        )
    return grpc.method_handlers_generic_handler(service.full_name, handlers)
