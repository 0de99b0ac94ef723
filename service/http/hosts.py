"""Refuses requests for host names that are not the server's. Otherwise a web page could call a server on the loopback
interface that needs no API keys: its owner lets the page's own name resolve to 127.0.0.1 (DNS rebinding)."""

from __future__ import annotations

import ipaddress
from collections.abc import Awaitable, Callable, Mapping
from urllib.parse import urlsplit

from starlette.datastructures import Headers

from saccade.errors import PermissionDenied
from service.common.config import HttpFrontOptions
from service.common.tls import is_loopback
from service.http.call import OTHER_ROUTE, Front, HttpCall, Receive, Scope, Send
from service.http.listen import ANY_HOST
from service.http.messages import error_form_of


def allowed_hosts(options: HttpFrontOptions) -> frozenset[str] | None:
    """Names besides loopback ones that requests may be for; None: any. Without `http_allowed_hosts` only servers on the
    loopback interface without TLS restrict them: no page can have a certificate for its name that the server presents.
    """
    if ANY_HOST in options.http_allowed_hosts:
        return None
    if options.http_allowed_hosts:
        return frozenset(name.strip("[]").lower() for name in (*options.http_allowed_hosts, options.http_host))
    if options.tls_cert is not None or not is_loopback(options.http_host, "http_host"):
        return None
    return frozenset({options.http_host.strip("[]").lower()})


def host_of(url: str) -> str:
    """The host in a URL, in lower case, without port and brackets; empty if there is none."""
    try:
        return (urlsplit(url).hostname or "").rstrip(".")
    except ValueError:
        return ""


def _is_loopback_name(host: str) -> bool:
    if host == "localhost" or host.endswith(".localhost"):
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


class HostCheck:
    """An application behind a check of each request's `Host`, and of the `Origin` that browsers add to it.

    Programs that send neither are let through, since browsers always send `Host`. Origins in `http_cors_origins` are
    allowed.
    """

    def __init__(self, app: Callable[[Scope, Receive, Send], Awaitable[None]], front: Front) -> None:
        self._app, self._front = app, front
        self._hosts = allowed_hosts(front.options)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and self._hosts is not None:
            if problem := self._problem(Headers(scope=scope)):
                call = HttpCall(self._front, scope, receive, send)
                call.error_form = error_form_of(scope["path"])
                await call.fail(PermissionDenied(problem, reason="HOST_DENIED"))
                self._front.count(OTHER_ROUTE, call.status)
                return
        await self._app(scope, receive, send)

    def _problem(self, headers: Mapping[str, str]) -> str:
        """Why a request is refused, or an empty text."""
        host, origin = headers.get("host"), headers.get("origin")
        if host is not None and not self._allowed(name := host_of(f"//{host}")):
            return (
                f"host: {host[:100]!r} is not a name of this server; to serve it under this name, add {name[:100]!r} "
                "to --http-allowed-hosts"
            )
        origins = self._front.options.http_cors_origins
        if origin is None or origin in origins or "*" in origins or self._allowed(host_of(origin)):
            return ""
        return f"origin: pages of {origin[:100]!r} may not call this server; add it to --http-cors-origins to allow it"

    def _allowed(self, host: str) -> bool:
        assert self._hosts is not None
        return host in self._hosts or _is_loopback_name(host)
