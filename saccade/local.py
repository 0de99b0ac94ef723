"""The client without a server: the engine runs in this process."""

from __future__ import annotations

import os
from typing import Any, NoReturn

from saccade._core.settings import CallSettings
from saccade._sync.methods import Methods
from saccade._transport.local import LocalConnection
from saccade.errors import InvalidArgument, Unimplemented


class LocalClient(Methods):
    """Runs a model in this process. Has the methods of `saccade.Client` except `media` and `batches`, which need a
    server.

    Args:
        model: "demo" for the embedded model, a checkpoint directory, or a hub id, which is downloaded if necessary
            (`revision`, an option of the server, names a branch, tag or commit).
        dtype: "float32" or "bfloat16"; None: the engine's default.
        device: "cpu" or "cuda"; None: the engine's default.
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
        **engine_options: object,
    ) -> None:
        if not isinstance(model, str | os.PathLike):
            raise InvalidArgument(f"model: expected a name or a path, got {type(model).__name__}")
        arguments = {"model": os.fspath(model), "dtype": dtype, "device": device, **engine_options}
        # There is no other engine to retry on.
        self.__setstate__((arguments, CallSettings(timeout=None, max_retries=0, upload_above=None)))

    def __getstate__(self) -> tuple[dict[str, Any], CallSettings]:
        return self._arguments, self._calls

    def __setstate__(self, state: tuple[dict[str, Any], CallSettings]) -> None:
        self._arguments, calls = state
        super().__init__(LocalConnection(self._arguments), calls)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._arguments['model']!r})"

    @property
    def _service(self) -> Any:
        """The engine's service, for tests and benchmarks."""
        assert isinstance(self._connection, LocalConnection)
        return self._connection.service

    @property
    def media(self) -> NoReturn:
        raise Unimplemented(
            "LocalClient.media: uploads need a server, see saccade.Client; here pass the files themselves, as in "
            "images=[path]",
            reason="UNIMPLEMENTED",
        )

    @property
    def batches(self) -> NoReturn:
        raise Unimplemented(
            "LocalClient.batches: these batches need a server, see saccade.Client; here use run_batch",
            reason="UNIMPLEMENTED",
        )
