"""Fetches images and videos by URL, for servers whose operator has listed the hosts to fetch from.

A client that sends a URL makes this server connect to an address of the client's choice. So a URL or redirect is
followed only if it is https, the host is on the list, and the host's name resolves only to public addresses or to
networks that the operator has allowed. The name is resolved once, and the connection goes to that address, with the
host's name for TLS and HTTP, so later changes in DNS have no effect. Size and time are limited, and no proxy, cookie or
credential of this machine is used.
"""

from __future__ import annotations

import asyncio
import ipaddress
import logging
import re
import socket
import ssl
from collections.abc import Awaitable, Callable, Sequence
from typing import TYPE_CHECKING

from service.common import errors
from service.common.config import ConfigError, ServerOptions
from service.common.types import MediaSource, Video
from service.media.images import MediaLimits
from service.telemetry.call_context import current_call

if TYPE_CHECKING:
    import httpx

log = logging.getLogger(__name__)

Address = ipaddress.IPv4Address | ipaddress.IPv6Address
Network = ipaddress.IPv4Network | ipaddress.IPv6Network
Resolve = Callable[[str, int], Awaitable[Sequence[str]]]
"""Resolves a host and a port to addresses."""

HTTPS = 443
CONCURRENCY = 16
_MOVED = {301, 302, 303, 307, 308}
_NAME = re.compile(r"(?!-)[a-z0-9_-]{1,63}(?<!-)(\.(?!-)[a-z0-9_-]{1,63}(?<!-))*")
MAX_NAME = 253
"""Largest number of characters of a name in DNS."""
_UNICAST6 = ipaddress.IPv6Network("2000::/3")
"""The network of public addresses. Python's `is_global` also accepts site-local addresses and private NAT64, which are
not public."""
_NAT64 = ipaddress.IPv6Network("64:ff9b::/96")


async def system_resolver(host: str, port: int) -> list[str]:
    """Resolves with this machine's resolver. Raises OSError."""
    found = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return [str(entry[4][0]).partition("%")[0] for entry in found]


class Fetcher:
    """Fetches files from the hosts of a list. Used on one event loop."""

    def __init__(
        self, hosts: Sequence[str], limits: MediaLimits, *, networks: Sequence[str] = (), timeout: float = 10.0,
        redirects: int = 3, ca: str | None = None, resolve: Resolve = system_resolver,
    ) -> None:  # fmt: skip
        """`hosts`: names, or `*.name` for all names below a name, each with `:port` if the port is not 443. `networks`:
        networks of addresses that are allowed although they are not public. `timeout`: seconds for one file, redirects
        included. `ca`: a PEM file of the certificate authority to trust instead of the system's. Raises ConfigError."""
        try:
            import httpx
        except ImportError:
            raise ConfigError(
                "image_url_hosts: fetching URLs needs the extra `urls`: pip install 'saccade-server[urls]'"
            ) from None
        self._httpx = httpx
        self._hosts = [_host_entry(entry) for entry in hosts]
        self._networks = [_network(entry) for entry in networks]
        self._limits, self._timeout, self._redirects, self._resolve = limits, timeout, redirects, resolve
        try:
            self._tls = ssl.create_default_context(cafile=ca)
        except (OSError, ssl.SSLError) as error:
            raise ConfigError(f"image_url_ca: {ca}: {error}") from None
        self._places = asyncio.Semaphore(CONCURRENCY)

    async def __call__(self, source: MediaSource) -> bytes:
        """Fetches the file at `source.uri`. Raises PermissionDenied, InvalidArgument or Unavailable, with the path of
        the request's field."""
        assert source.uri is not None
        try:
            async with self._places, asyncio.timeout(self._timeout):
                return await self._follow(source)
        except TimeoutError:
            raise _failed(source, f"the file did not arrive within {self._timeout:g} s") from None
        except (self._httpx.HTTPError, self._httpx.InvalidURL, UnicodeError) as error:
            # httpx parses the URL of a redirect itself, with errors of all three kinds.
            log.info("fetching for %s: %r", source.field, error)
            raise _failed(source, "the host cannot be reached, or does not respond like a web server") from error

    async def _follow(self, source: MediaSource) -> bytes:
        url = self._parse(source, str(source.uri))
        for _ in range(self._redirects + 1):
            address = await self._address(source, url)
            data, target = await self._get(source, url, address)
            if target is None:
                return data
            url = self._parse(source, str(url.join(target)))
        raise _failed(source, f"the URL redirects more than {self._redirects} times")

    def _parse(self, source: MediaSource, text: str) -> httpx.URL:
        try:
            url = self._httpx.URL(text)
        except self._httpx.InvalidURL:
            raise errors.InvalidArgument(f"{source.field}: this is not a valid URL", field=source.field) from None
        if url.scheme != "https":
            raise _denied(source, f"only https URLs are fetched, not {url.scheme or 'a relative URL'}")
        if url.userinfo:
            raise _denied(source, "URLs with a user or password are not fetched")
        port = url.port or HTTPS
        host = _host(url)
        if not any(_matches(entry, host, port) for entry in self._hosts):
            raise _denied(source, f"this server does not fetch from the host {host[:100]}:{port}")
        return url

    async def _address(self, source: MediaSource, url: httpx.URL) -> Address:
        """The address to connect to. All addresses of the name must be allowed, because the owner of the name can
        influence which one is used."""
        host = _host(url)
        try:
            found = [ipaddress.ip_address(text) for text in await self._resolve(host, url.port or HTTPS)]
        except (OSError, UnicodeError, ValueError):
            found = []
        if not found:
            raise _failed(source, f"the host {host[:100]} has no address")
        if not all(self._allowed(address) for address in found):
            raise _denied(source, f"the host {host[:100]} has an address that is not public")
        return found[0]

    def _allowed(self, address: Address) -> bool:
        if any(address in network for network in self._networks):
            return True
        return all(_public(inner) for inner in _unwrapped(address))

    async def _get(self, source: MediaSource, url: httpx.URL, address: Address) -> tuple[bytes, str | None]:
        """The body of the response, or the URL that it redirects to."""
        headers = {
            "Host": url.netloc.decode("ascii"), "Accept": "image/*, video/*", "Accept-Encoding": "identity",
        }  # fmt: skip
        # A client for each request, so that a connection made for one host's name is not used for another's.
        async with (
            self._httpx.AsyncClient(verify=self._tls, trust_env=False, timeout=self._timeout) as client,
            client.stream(
                "GET", url.copy_with(host=str(address), fragment=None), headers=headers,
                extensions={"sni_hostname": _host(url)},
            ) as response,
        ):  # fmt: skip
            if response.status_code in _MOVED and (target := response.headers.get("location")):
                return b"", target
            return await self._body(source, response), None

    async def _body(self, source: MediaSource, response: httpx.Response) -> bytes:
        """Receives the file, whose bytes count as held by the call."""
        limits = self._limits
        most = limits.video.max_bytes if isinstance(source, Video) else limits.image.max_bytes
        if response.status_code >= 500:
            raise _failed(source, f"the host responded with status {response.status_code}")
        if response.status_code != 200:
            raise errors.InvalidArgument(
                f"{source.field}: the host responded with status {response.status_code}", field=source.field,
                reason="MEDIA_FETCH_FAILED",
            )  # fmt: skip
        if response.headers.get("content-encoding", "identity") != "identity":
            raise _failed(source, "the response is compressed, which was not asked for")
        announced = response.headers.get("content-length", "")
        if announced.isdecimal() and int(announced) > most:
            raise _too_large(source, int(announced), most)
        data, hold = bytearray(), current_call().hold_bytes
        async for piece in response.aiter_raw():
            hold(len(piece))
            data += piece
            if len(data) > most:
                raise _too_large(source, len(data), most)
        return bytes(data)


def make_fetcher(options: ServerOptions, limits: MediaLimits) -> Fetcher | None:
    """The fetcher for the options; None if no host is listed. Raises ConfigError."""
    if not options.image_url_hosts:
        return None
    return Fetcher(
        options.image_url_hosts, limits, networks=options.image_url_networks, timeout=options.image_url_timeout,
        redirects=options.image_url_redirects, ca=options.image_url_ca,
    )  # fmt: skip


def _host(url: httpx.URL) -> str:
    """The host's name in ASCII, as in DNS, so that the name that is resolved is the one that was checked. httpx's
    `host` decodes some punycode, and the system's resolver would encode it again by older rules (ß as ss)."""
    return url.raw_host.decode("ascii")


def _host_entry(entry: str) -> tuple[str, int]:
    import httpx

    name, colon, port = entry.strip().rpartition(":")
    if not colon:
        name, port = port, str(HTTPS)
    plain = name.removeprefix("*.")
    try:
        host = "" if set(plain) & set("/?#@:[]") else _host(httpx.URL(f"https://{plain}")).removesuffix(".")
    except httpx.InvalidURL:
        host = ""
    if not port.isdecimal() or not 0 < int(port) < 2**16 or len(host) > MAX_NAME or not _NAME.fullmatch(host):
        raise ConfigError(f"image_url_hosts: {entry!r} is not a host such as example.org, *.example.org or a.b:8443")
    return f"*.{host}" if plain != name else host, int(port)


def _network(entry: str) -> Network:
    try:
        return ipaddress.ip_network(entry.strip())
    except ValueError as error:
        raise ConfigError(f"image_url_networks: {error}") from None


def _matches(entry: tuple[str, int], host: str, port: int) -> bool:
    name, allowed_port = entry
    host = host.rstrip(".")
    if port != allowed_port:
        return False
    return host.endswith(name[1:]) if name.startswith("*.") else host == name


def _public(address: Address) -> bool:
    if isinstance(address, ipaddress.IPv6Address) and address not in _UNICAST6:
        return False
    return address.is_global and not address.is_multicast


def _unwrapped(address: Address) -> list[Address]:
    """The address, and the IPv4 addresses that are embedded in it for tunnels and translators."""
    if isinstance(address, ipaddress.IPv4Address):
        return [address]
    if address.ipv4_mapped is not None:
        return [address.ipv4_mapped]
    if address in _NAT64:
        return [ipaddress.IPv4Address(int(address) & 0xFFFFFFFF)]
    inner: list[Address] = [address]
    if address.sixtofour is not None:
        inner.append(address.sixtofour)
    if address.teredo is not None:
        inner += address.teredo
    return inner


def _denied(source: MediaSource, why: str) -> errors.PermissionDenied:
    return errors.PermissionDenied(f"{source.field}: {why}", field=source.field, reason="MEDIA_HOST_DENIED")


def _failed(source: MediaSource, why: str) -> errors.Unavailable:
    return errors.Unavailable(
        f"{source.field}: {why}", field=source.field, reason="MEDIA_FETCH_FAILED", never_retry=True
    )


def _too_large(source: MediaSource, size: int, most: int) -> errors.InvalidArgument:
    kind = "VIDEO" if isinstance(source, Video) else "IMAGE"
    return errors.InvalidArgument(
        f"{source.field}: the file has at least {size} bytes; at most {most} are allowed", field=source.field,
        reason=f"{kind}_TOO_LARGE",
    )  # fmt: skip
