"""The client that needs no server: the engine runs in this process."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NoReturn, Self, Unpack

from saccade._core.settings import CallOptions, CallSettings
from saccade.calls import Responses, UnaryCall
from saccade.client import SyncClient
from saccade.errors import (
    Cancelled,
    FailedPrecondition,
    SaccadeError,
    Unimplemented,
    error_from_service,
)
from saccade.v1 import inference_pb2

INSTALL = "LocalClient runs the engine in this process, which needs the server's package: pip install saccade-server"


class LocalClient(SyncClient):
    """Loads a model and serves this process alone, with the methods of `saccade.Client`, but for `media` and `batches`,
    which only a server can keep.

    Args:
        model: "demo" for the embedded model, a checkpoint's folder, or a hub id that the local Hugging Face cache
        holds.
        dtype: "float32" or "bfloat16"; None leaves it to the engine.
        device: "cpu" or "cuda"; None leaves it to the engine.
        engine_options: the options of `saccade serve`, with underscores.

    Raises:
        FailedPrecondition: the server's package is not installed.
        SaccadeError: the model cannot be loaded.
    """

    def __init__(
        self,
        model: str | os.PathLike[str] = "demo",
        *,
        dtype: str | None = None,
        device: str | None = None,
        **engine_options: Any,
    ) -> None:
        self._arguments = {"model": os.fspath(model), "dtype": dtype, "device": device, **engine_options}
        # Nobody else's engine stands behind this one: a call that failed would fail again.
        self._calls = CallSettings(timeout=None, max_retries=0, upload_above=None)
        self._origin: LocalClient | None = None
        self._closed = False
        self._load()

    def _load(self) -> None:
        try:
            from service.servers.local import LocalService
        except ModuleNotFoundError as error:
            if (error.name or "").partition(".")[0] != "service":
                raise
            raise FailedPrecondition(INSTALL, reason="NOT_INSTALLED") from error
        self._pid = os.getpid()
        with _translated(""):
            self._service = LocalService(**self._arguments)

    def __getstate__(self) -> tuple[dict[str, Any], CallSettings]:
        return self._arguments, self._calls

    def __setstate__(self, state: tuple[dict[str, Any], CallSettings]) -> None:
        self._arguments, self._calls = state
        self._origin = None
        self._closed = False
        self._load()

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._arguments['model']!r})"

    @property
    def _call_settings(self) -> CallSettings:
        return self._calls

    def with_options(self, **options: Unpack[CallOptions]) -> Self:
        copy = type(self).__new__(type(self))
        copy._arguments, copy._calls = self._arguments, self._calls.changed(**options)
        copy._origin = self._origin or self
        copy._closed = False
        return copy

    @property
    def media(self) -> NoReturn:
        raise Unimplemented(
            "LocalClient.media: uploads are kept by a server, see saccade.Client; here pass the files themselves, as "
            "in images=[path]",
            reason="UNIMPLEMENTED",
        )

    @property
    def batches(self) -> NoReturn:
        raise Unimplemented(
            "LocalClient.batches: batches that go on by themselves are a server's, see saccade.Client; here use "
            "run_batch",
            reason="UNIMPLEMENTED",
        )

    def close(self) -> None:
        """Ends the engine and frees what it holds. May be called any number of times."""
        if not self._closed:
            self._closed = True
            if self._origin is None and self._pid == os.getpid():
                self._service.close()

    @property
    def _ended(self) -> bool:
        return self._closed or (self._origin is not None and self._origin._closed)

    def _engine(self) -> Any:
        if self._closed:
            raise FailedPrecondition("the client has been closed", reason="CLIENT_CLOSED")
        if self._origin is not None:
            return self._origin._engine()
        if self._pid != os.getpid():
            # Threads do not survive a fork: the engine behind the inherited object is one that nobody runs.
            self._load()
        return self._service

    def _begin(self, service: str, method: str, message: Any, timeout: float | None) -> UnaryCall:
        request_id = getattr(message, "request_id", "")
        with self._ended_by_close(request_id), _translated(request_id):
            return _LocalCall(self, self._engine().begin(method, message, timeout), request_id)

    def _open(self, request: inference_pb2.GenerateRequest, timeout: float | None) -> Responses:
        with self._ended_by_close(request.request_id), _translated(request.request_id):
            return _LocalResponses(self, self._engine().stream(request, timeout), request.request_id)

    @contextmanager
    def _ended_by_close(self, request_id: str) -> Iterator[None]:
        """Whatever the engine says of a call that `close` has cut short, the caller gets Cancelled, as over gRPC."""
        running = not self._ended
        try:
            yield
        except SaccadeError as error:
            if running and self._ended:
                raise Cancelled("the client has been closed", request_id=request_id) from error
            raise


class _LocalCall:
    """One unary call of the engine."""

    def __init__(self, client: LocalClient, call: Any, request_id: str) -> None:
        self._client, self._call, self._request_id = client, call, request_id

    def result(self) -> Any:
        with self._client._ended_by_close(self._request_id), _translated(self._request_id):
            return self._call.result()

    def cancel(self) -> None:
        self._call.cancel()


class _LocalResponses:
    """The messages of one stream of the engine."""

    def __init__(self, client: LocalClient, stream: Any, request_id: str) -> None:
        self._client, self._stream, self._request_id = client, stream, request_id

    def receive(self, patience: float | None) -> inference_pb2.StreamGenerateResponse | None:
        if self._client._ended:
            raise Cancelled("the client has been closed", request_id=self._request_id)
        with self._client._ended_by_close(self._request_id), _translated(self._request_id):
            response: inference_pb2.StreamGenerateResponse | None = self._stream.receive(patience)
            return response

    def close(self) -> None:
        self._stream.cancel()

    def __del__(self) -> None:
        # A stream that nobody holds any more is cancelled, as over gRPC.
        self._stream.cancel()


class _translated:
    """Turns the service's own status errors into the client's, as the wire would have."""

    def __init__(self, request_id: str) -> None:
        self.request_id = request_id

    def __enter__(self) -> None: ...

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        if error is None or isinstance(error, SaccadeError):
            return
        from service.common.errors import StatusError

        if isinstance(error, StatusError):
            raise error_from_service(error, self.request_id) from error
