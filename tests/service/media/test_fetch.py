"""Files by URL, from a real TLS server: which are fetched, and addresses that must not be reachable through this
server."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from certificates import Authority
from images import png
from running import RunningServer
from web_site import Site

import saccade
from encoder.media_limits import ImageLimits, VideoLimits
from service.common import errors
from service.common.config import ConfigError
from service.common.types import Image, Video
from service.media.fetch import Fetcher, Resolve
from service.media.images import MediaLimits
from service.telemetry.call_context import CallInfo, set_current_call

LIMITS = MediaLimits(ImageLimits(max_bytes=5000), VideoLimits(max_bytes=9000))
LOOPBACK = ("127.0.0.0/8",)
FILE = png(1, (16, 16))


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    authority = Authority.create(tmp_path_factory.mktemp("fetch") / "ca")
    authority.issue("site")
    return authority


def everything_is(*addresses: str) -> Resolve:
    async def resolve(host: str, port: int) -> Sequence[str]:
        return addresses

    return resolve


Body = Callable[[Site, Callable[..., Fetcher]], Awaitable[None]]


def with_site(authority: Authority, body: Body) -> None:
    async def run() -> None:
        async with Site(authority).open() as site:

            def fetcher(**options: Any) -> Fetcher:
                values: dict[str, Any] = {
                    "hosts": [f"localhost:{site.port}"], "networks": LOOPBACK, "ca": str(authority.certificate),
                    "resolve": everything_is("127.0.0.1"), **options,
                }  # fmt: skip
                return Fetcher(values.pop("hosts"), LIMITS, **values)

            await body(site, fetcher)

    asyncio.run(run())


def source(url: str) -> Image:
    return Image(b"", "prompt.images[0]", uri=url)


async def refused(fetcher: Fetcher, url: str, kind: type[errors.StatusError], words: str, reason: str) -> None:
    with pytest.raises(kind, match=words) as error:
        await fetcher(source(url))
    assert error.value.reason == reason and error.value.field == "prompt.images[0]"


async def denied(fetcher: Fetcher, url: str, words: str) -> None:
    await refused(fetcher, url, errors.PermissionDenied, words, "MEDIA_HOST_DENIED")


def test_a_file_comes_whole_under_the_host_s_own_name(authority: Authority) -> None:
    async def body(site: Site, fetcher: Callable[..., Fetcher]) -> None:
        site.says("/a.png?size=1", FILE)
        assert await fetcher()(source(f"https://LOCALHOST:{site.port}/a.png?size=1#part")) == FILE
        (request,) = site.requests
        assert request.startswith(b"GET /a.png?size=1 HTTP/1.1\r\n")
        assert f"host: localhost:{site.port}\r\n".encode() in request.lower()
        assert b"cookie" not in request.lower() and b"authorization" not in request.lower()

    with_site(authority, body)


def test_the_name_is_resolved_once_and_the_connection_goes_there(authority: Authority) -> None:
    """A second, different answer of a name server is never asked for."""
    asked: list[str] = []

    async def rebinding(host: str, port: int) -> Sequence[str]:
        asked.append(host)
        return ["127.0.0.1"] if len(asked) == 1 else ["169.254.169.254"]

    async def body(site: Site, fetcher: Callable[..., Fetcher]) -> None:
        site.says("/a.png", FILE)
        url = f"https://localhost:{site.port}/a.png"
        one = fetcher(resolve=rebinding)
        assert await one(source(url)) == FILE and asked == ["localhost"]
        await denied(one, url, "not public")
        assert site.connections == 1

    with_site(authority, body)


def test_the_connection_goes_to_the_address_that_was_checked(authority: Authority) -> None:
    """Not to the name, whose address may have changed since."""

    async def body(site: Site, fetcher: Callable[..., Fetcher]) -> None:
        site.says("/a.png", FILE)
        one = fetcher(hosts=[f"site.test:{site.port}"])
        assert await one(source(f"https://site.test:{site.port}/a.png")) == FILE
        assert f"host: site.test:{site.port}\r\n".encode() in site.requests[0].lower()
        # and of several that are allowed to the first, whatever localhost may be here
        elsewhere = fetcher(resolve=everything_is("127.0.0.77", "127.0.0.1"))
        await refused(
            elsewhere, f"https://localhost:{site.port}/a.png", errors.Unavailable, "cannot be reached",
            "MEDIA_FETCH_FAILED",
        )  # fmt: skip
        assert site.connections == 1

    with_site(authority, body)


def test_nothing_of_this_machine_s_settings_is_used(authority: Authority, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither its proxies nor its stored passwords."""
    netrc = authority.folder / "netrc"
    netrc.write_text("machine 127.0.0.1 login me password secret\nmachine localhost login me password secret\n")
    monkeypatch.setenv("NETRC", str(netrc))
    for name in ("HTTPS_PROXY", "https_proxy", "ALL_PROXY", "all_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    for name in ("NO_PROXY", "no_proxy"):
        monkeypatch.delenv(name, raising=False)

    async def body(site: Site, fetcher: Callable[..., Fetcher]) -> None:
        site.says("/a.png", FILE)
        assert await fetcher()(source(f"https://localhost:{site.port}/a.png")) == FILE
        assert b"authorization" not in site.requests[0].lower()

    with_site(authority, body)


@pytest.mark.parametrize("allowed", [0, 1, 3])
def test_redirects_are_followed_as_often_as_is_allowed_and_no_further(authority: Authority, allowed: int) -> None:
    async def body(site: Site, fetcher: Callable[..., Fetcher]) -> None:
        site.says("/0", FILE)
        for step in range(1, allowed + 2):
            site.says(f"/{step}", status=302, Location=f"/{step - 1}")
        one, here = fetcher(redirects=allowed), f"https://localhost:{site.port}"
        assert await one(source(f"{here}/{allowed}")) == FILE and site.connections == allowed + 1
        words = f"redirects more than {allowed} times"
        await refused(one, f"{here}/{allowed + 1}", errors.Unavailable, words, "MEDIA_FETCH_FAILED")
        assert site.connections == 2 * (allowed + 1), "the last place that it names is not asked"

    with_site(authority, body)


def test_bytes_are_on_the_call_s_account_as_they_come(authority: Authority) -> None:
    held: list[int] = []

    def hold(size: int) -> None:
        held.append(size)
        if sum(held) > 2000:
            raise errors.Unavailable("no room", reason="QUEUE_FULL")

    async def body(site: Site, fetcher: Callable[..., Fetcher]) -> None:
        set_current_call(CallInfo(hold_bytes=hold))
        site.says("/fits", bytes(2000))
        assert len(await fetcher()(source(f"https://localhost:{site.port}/fits"))) == sum(held) == 2000
        with pytest.raises(errors.Unavailable, match="no room"):
            await fetcher()(source(f"https://localhost:{site.port}/endless"))
        assert sum(held) < 4500, "and the rest is not waited for"

    with_site(authority, body)


def test_a_certificate_for_another_name_is_no_good(authority: Authority) -> None:
    async def body(site: Site, fetcher: Callable[..., Fetcher]) -> None:
        site.says("/a.png", FILE)
        other = fetcher(hosts=[f"other.example:{site.port}"])
        url = f"https://other.example:{site.port}/a.png"
        await refused(other, url, errors.Unavailable, "cannot be reached", "MEDIA_FETCH_FAILED")
        strangers = Fetcher(
            [f"localhost:{site.port}"], LIMITS, networks=LOOPBACK, resolve=everything_is("127.0.0.1")
        )  # fmt: skip
        url = f"https://localhost:{site.port}/a.png"
        await refused(strangers, url, errors.Unavailable, "cannot be reached", "MEDIA_FETCH_FAILED")
        assert not site.requests

    with_site(authority, body)


@pytest.mark.parametrize(
    "address",
    [
        "127.0.0.1", "10.0.0.1", "172.16.5.5", "192.168.1.1", "169.254.169.254", "100.64.0.1", "0.0.0.0", "224.0.0.1",
        "255.255.255.255", "::1", "::", "fe80::1", "fc00::1", "ff02::1", "::ffff:127.0.0.1", "::ffff:10.0.0.1",
        "64:ff9b::7f00:1", "2002:7f00:1::", "2001:0:7f00:1::80ff:fffe", "192.0.2.1", "198.18.0.1",
        "::127.0.0.1", "fec0::1", "64:ff9b:1::7f00:1",
    ],
)  # fmt: skip
def test_private_addresses_are_not_reached(authority: Authority, address: str) -> None:
    async def body(site: Site, fetcher: Callable[..., Fetcher]) -> None:
        url = f"https://localhost:{site.port}/a.png"
        await denied(fetcher(resolve=everything_is(address), networks=()), url, "an address that is not public")
        mixed = everything_is("93.184.216.34", address)
        await denied(fetcher(resolve=mixed, networks=()), url, "an address that is not public")
        assert not site.connections

    with_site(authority, body)


def test_redirects_are_checked_like_urls(authority: Authority) -> None:
    hosts = {"localhost": "127.0.0.1", "inside.example": "10.0.0.7"}

    async def resolve(host: str, port: int) -> Sequence[str]:
        return [hosts[host]]

    async def body(site: Site, fetcher: Callable[..., Fetcher]) -> None:
        here = f"https://localhost:{site.port}"
        site.says("/a.png", FILE)
        site.says("/moved", status=302, Location="/a.png")
        site.says("/twice", status=307, Location=f"{here}/moved")
        site.says("/inside", status=302, Location="https://inside.example/secret")
        site.says("/elsewhere", status=302, Location="https://unknown.example/a.png")
        site.says("/plain", status=302, Location=f"http://localhost:{site.port}/a.png")
        site.says("/file", status=302, Location="file:///etc/passwd")
        site.says("/user", status=302, Location=f"https://a:b@localhost:{site.port}/a.png")
        site.says("/port", status=302, Location="https://localhost:1/a.png")
        site.says("/words", status=302, Location="//[::1")
        site.says("/scheme", status=302, Location="data:image/png;base64,AA")
        site.says("/punycode", status=302, Location="https://xn--a/")
        site.says("/loop", status=302, Location="/loop")
        one = fetcher(hosts=[f"localhost:{site.port}", "inside.example"], resolve=resolve)
        assert await one(source(f"{here}/moved")) == FILE and await one(source(f"{here}/twice")) == FILE
        await denied(one, f"{here}/inside", "inside.example has an address that is not public")
        await denied(one, f"{here}/elsewhere", "not fetch from the host unknown.example:443")
        await denied(one, f"{here}/plain", "only https URLs are fetched, not http")
        await denied(one, f"{here}/file", "only https URLs are fetched, not file")
        await denied(one, f"{here}/user", "user or password")
        await denied(one, f"{here}/port", "not fetch from the host localhost:1")
        for path in ("/words", "/scheme", "/punycode"):
            await refused(one, here + path, errors.Unavailable, "respond like a web server", "MEDIA_FETCH_FAILED")
        await refused(one, f"{here}/loop", errors.Unavailable, "more than 3 times", "MEDIA_FETCH_FAILED")

    with_site(authority, body)


def test_size_and_time_are_bounded(authority: Authority) -> None:
    async def body(site: Site, fetcher: Callable[..., Fetcher]) -> None:
        here = f"https://localhost:{site.port}"
        site.says("/large", bytes(5001))
        site.says("/most", bytes(5000))
        site.says("/lie", bytes(10), Content_Length="999999")
        site.says("/zipped", bytes(10), Content_Encoding="gzip")
        site.says("/broken", status=503)
        assert len(await fetcher()(source(f"{here}/most"))) == 5000
        assert len(await fetcher()(Video(b"", "v", uri=f"{here}/large"))) == 5001
        for path in ("/large", "/lie", "/endless"):
            await refused(
                fetcher(), here + path, errors.InvalidArgument, "bytes; at most 5000 are allowed", "IMAGE_TOO_LARGE"
            )  # fmt: skip
        await refused(fetcher(), f"{here}/zipped", errors.Unavailable, "compressed", "MEDIA_FETCH_FAILED")
        await refused(
            fetcher(), f"{here}/broken", errors.Unavailable, "responded with status 503", "MEDIA_FETCH_FAILED"
        )
        await refused(
            fetcher(), f"{here}/absent", errors.InvalidArgument, "responded with status 404", "MEDIA_FETCH_FAILED"
        )
        hasty = fetcher(timeout=0.3)
        await refused(hasty, f"{here}/slow", errors.Unavailable, "within 0.3 s", "MEDIA_FETCH_FAILED")
        nowhere = fetcher(resolve=everything_is())
        await refused(nowhere, f"{here}/most", errors.Unavailable, "has no address", "MEDIA_FETCH_FAILED")

    with_site(authority, body)


@pytest.mark.parametrize(
    "url", ["https://", "https:///a", "not a url", "//host/a", "https://[::1", "https://localhost:0/a"]
)
def test_what_is_no_url(authority: Authority, url: str) -> None:
    async def body(site: Site, fetcher: Callable[..., Fetcher]) -> None:
        with pytest.raises((errors.PermissionDenied, errors.InvalidArgument)):
            await fetcher()(source(url))
        assert not site.connections

    with_site(authority, body)


@pytest.mark.parametrize(
    "entry", ["münchen.example", "MÜNCHEN.example.", "xn--mnchen-3ya.example", "XN--MNCHEN-3YA.example"]
)
def test_a_host_matches_in_unicode_and_in_punycode(authority: Authority, entry: str) -> None:
    """On both sides, also below a name; and it is resolved in the spelling that was matched."""

    async def body(site: Site, fetcher: Callable[..., Fetcher]) -> None:
        asked: list[str] = []

        async def resolve(host: str, port: int) -> Sequence[str]:
            asked.append(host)
            return []

        one = fetcher(hosts=[entry, f"*.{entry}"], resolve=resolve)
        for name in ("münchen.example", "MÜNCHEN.example", "xn--mnchen-3ya.example", "Xn--Mnchen-3ya.example."):
            for url in (f"https://{name}/a.png", f"https://bild.{name}/a.png"):
                with pytest.raises(errors.Unavailable, match="has no address"):
                    await one(source(url))
        assert {name.removesuffix(".") for name in asked} == {
            "xn--mnchen-3ya.example", "bild.xn--mnchen-3ya.example",
        }  # fmt: skip
        await denied(one, "https://munchen.example/a.png", "not fetch from the host munchen.example:443")
        await denied(
            fetcher(hosts=["fass.example"]), "https://faß.example/a.png", "from the host xn--fa-hia.example:443"
        )
        await denied(one, "https://xn--zz.example/a.png", "not fetch from the host xn--zz.example:443")

    with_site(authority, body)


def test_hosts_of_the_list() -> None:
    from service.media.fetch import _host_entry, _matches

    exact, below = _host_entry("Example.org"), _host_entry("*.example.org:8443")
    assert _matches(exact, "example.org", 443) and _matches(exact, "example.org.", 443)
    assert not _matches(exact, "a.example.org", 443) and not _matches(exact, "example.org", 8443)
    assert _matches(below, "a.b.example.org", 8443)
    for host in ("example.org", "badexample.org", "example.org.evil.test"):
        assert not _matches(below, host, 8443)
    for entry in (
        "", "*", "*.", "a b", "a:0", "a:99999", "https://a", "a@b", "a.*", "a..b", "-a.b", "a%2e.b", "a?b", "a#b",
        "[::1]", "☃.net", "999.1.1.1", "a" * 64, ".".join(["a" * 50] * 6),
    ):  # fmt: skip
        with pytest.raises(ConfigError, match="image_url_hosts"):
            _host_entry(entry)
    with pytest.raises(ConfigError, match="image_url_networks"):
        Fetcher(["a"], LIMITS, networks=["10.0.0.1/8"])
    with pytest.raises(ConfigError, match="image_url_ca"):
        Fetcher(["a"], LIMITS, ca="no/such.pem")


def test_a_server_fetches_what_its_operator_allows(authority: Authority, tmp_path: Path) -> None:
    from served import make_served

    make_served(tmp_path / "model")

    async def body(site: Site, fetcher: Callable[..., Fetcher]) -> None:
        site.says("/a.png", FILE)

        def ask() -> None:
            options: dict[str, Any] = {
                "image_url_hosts": (f"localhost:{site.port}",), "image_url_networks": ("127.0.0.0/8", "::1/128"),
                "image_url_ca": str(authority.certificate), "max_seqs": 2, "max_len": 600,
            }  # fmt: skip
            with RunningServer(str(tmp_path / "model"), **options) as server, saccade.Client(server.address) as client:
                assert client.get_model().limits.uri_schemes == ("https",)
                given = client.generate("what?", images=[FILE], max_tokens=3, temperature=0)
                url = f"https://localhost:{site.port}/a.png"
                assert client.generate("what?", images=[url], max_tokens=3, temperature=0) == given
                with pytest.raises(saccade.errors.PermissionDenied) as error:
                    client.generate("what?", images=["https://example.org/a.png"], max_tokens=3)
                assert error.value.reason == "MEDIA_HOST_DENIED"
                server.drained()

        await asyncio.to_thread(ask)

    with_site(authority, body)
