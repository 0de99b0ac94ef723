"""Calls through the generated stubs, as gRPC clients without the SDK make them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import grpc
from google.rpc import error_details_pb2, status_pb2

from saccade.v1 import (
    admin_pb2_grpc,
    batch_pb2_grpc,
    inference_pb2,
    inference_pb2_grpc,
    media_pb2,
    media_pb2_grpc,
    model_pb2_grpc,
)


@dataclass
class Stubs:
    """All services of one server."""

    channel: grpc.Channel

    def __post_init__(self) -> None:
        self.inference = inference_pb2_grpc.InferenceServiceStub(self.channel)
        self.batch = batch_pb2_grpc.BatchServiceStub(self.channel)
        self.media = media_pb2_grpc.MediaServiceStub(self.channel)
        self.admin = admin_pb2_grpc.AdminServiceStub(self.channel)
        self.model = model_pb2_grpc.ModelServiceStub(self.channel)


@contextmanager
def connect(address: str, credentials: grpc.ChannelCredentials | None = None) -> Iterator[Stubs]:
    options = [("grpc.max_send_message_length", -1), ("grpc.use_local_subchannel_pool", 1)]
    if credentials is None:
        channel = grpc.insecure_channel(address, options)
    else:
        channel = grpc.secure_channel(address, credentials, options)
    with channel:
        yield Stubs(channel)


def ask(text: str = "x", *, max_tokens: int = 8, images: Any = (), **fields: Any) -> inference_pb2.GenerateRequest:
    """A greedy request that generates `max_tokens` tokens."""
    request = inference_pb2.GenerateRequest(**fields)
    request.prompt.text = text
    for image in images:
        request.prompt.images.add(**image)
    request.sampling.max_tokens = max_tokens
    request.sampling.temperature = 0
    request.sampling.ignore_eos = True
    return request


def upload(data: bytes, *, chunk: int = 2**20, size: int | None = None, media_id: str = "") -> Iterator[Any]:
    header = media_pb2.MediaHeader(size_bytes=len(data) if size is None else size, media_id=media_id)
    yield media_pb2.UploadMediaRequest(header=header)
    for start in range(0, len(data), chunk):
        yield media_pb2.UploadMediaRequest(chunk=data[start : start + chunk])


def reason(error: grpc.RpcError) -> tuple[str, str]:
    """(code, ErrorInfo.reason) of a failed call."""
    packed = dict(error.trailing_metadata() or ()).get("grpc-status-details-bin")
    info = error_details_pb2.ErrorInfo()
    if packed is not None:
        for detail in status_pb2.Status.FromString(packed).details:
            if detail.Unpack(info):
                break
    return error.code().name, info.reason
