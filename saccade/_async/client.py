"""The client of a server."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from saccade._async.batches import AsyncBatchMethods
from saccade._async.media import AsyncMediaMethods
from saccade._async.methods import AsyncMethods
from saccade._core.affinity import Affinity
from saccade._core.settings import Settings, TLSConfig, make_settings
from saccade._transport.aio import AsyncConnection
from saccade.errors import InvalidArgument


class AsyncClient(AsyncMethods):
    """A connection to a server, made when it is first used. It may be shared by threads, event loops and tasks.

    Copies of it in a forked or spawned process make connections of their own.

    Args:
        address: "host:port", or any gRPC target such as "unix:/path"; or the addresses "IP:PORT" of several replicas,
            as a sequence or joined by commas.
        api_key: sent with each call; by default the environment variable SACCADE_API_KEY.
        tls: True for the system's certificates, or a `TLSConfig`; None for plain text.
        timeout: seconds for a whole call, retries included; None for no limit.
        max_retries: number of retries of a call that failed as UNAVAILABLE, or because of a rate limit with a time to
            wait; None: as many as the timeout allows. A stream that breaks is resumed.
        channel_options: further gRPC channel options, over the client's own.
        affinity: which replica a call goes to, if the address has several. "auto": the same for all requests with the
            same first image or, if they have none, the same system prompt, which is then in that replica's caches;
            "image": only for requests with images. If a replica is full or cannot be reached, another one is used.
            None: listed addresses take turns, and for a name gRPC's default applies. Affinity needs grpcio 1.70 or
            newer.
    """

    def __init__(
        self,
        address: str | Sequence[str],
        *,
        api_key: str | None = None,
        tls: bool | TLSConfig | None = None,
        timeout: float | None = 600.0,
        max_retries: int | None = None,
        channel_options: Mapping[str, Any] | None = None,
        affinity: Affinity | None = None,
    ) -> None:
        settings = make_settings(
            address,
            api_key=api_key,
            tls=tls,
            timeout=timeout,
            max_retries=max_retries,
            channel_options=channel_options,
            affinity=affinity,
        )
        self.__setstate__(settings)

    def __getstate__(self) -> Settings:
        return replace(self._settings, calls=self._calls)

    def __setstate__(self, settings: Settings) -> None:
        self._settings = settings
        super().__init__(AsyncConnection(settings), settings.calls)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._settings.address!r})"

    @property
    def media(self) -> AsyncMediaMethods:
        """Uploaded images and videos."""
        return AsyncMediaMethods(self)

    @property
    def batches(self) -> AsyncBatchMethods:
        """Batches that the server processes in the background.

        Raises:
            InvalidArgument: the client has several addresses and no affinity, so calls would go to different servers.
        """
        if "," in self._settings.address and self._settings.affinity is None:
            raise InvalidArgument(
                "batches: a batch belongs to one server; connect to one of the addresses, or set affinity"
            )
        return AsyncBatchMethods(self)
