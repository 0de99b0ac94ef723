"""Automatic uploads of images by the clients, and servers without space for them."""

from __future__ import annotations

import asyncio
import hashlib
from pathlib import Path
from typing import Any

import pytest
from images import png
from running import RunningServer

import saccade
from saccade import errors

LIMITS: dict[str, Any] = {"max_seqs": 4, "max_len": 300}
ASK: dict[str, Any] = {"max_tokens": 6, "temperature": 0}


def held(server: RunningServer) -> int:
    return server.server.spool.used_bytes


def test_large_images_travel_once(model: Path) -> None:
    one, other = png(1, (40, 40)), png(2, (20, 20))
    with RunningServer(str(model), **LIMITS) as server, saccade.Client(server.address) as plain:
        client = plain.with_options(upload_above=len(other))
        wanted = plain.generate("x", images=[one, other], **ASK)
        assert held(server) == 0
        assert client.generate("x", images=[one, other], **ASK) == wanted
        assert held(server) == len(one), "only what is large"
        before = server.server.metrics.registry.get_sample_value("saccade_request_bytes_total")
        assert before is not None
        assert client.stream("x", images=[one, other], **ASK).final() == wanted
        assert client.tokenize("x", images=[one, other]) == plain.tokenize("x", images=[one, other])
        assert client.embed_image(one) == plain.embed_image(one)
        assert client.embed("x", images=[one]).mean == plain.embed("x", images=[one]).mean
        (outcome,) = client.map([{"prompt": "x", "images": [one, other], **ASK}])
        assert outcome.result() == wanted
        media = client.media.get(hashlib.sha256(one).hexdigest())
        assert media.size_bytes == len(one) and plain.generate("x", images=[media, other], **ASK) == wanted

        async def main() -> None:
            async with saccade.AsyncClient(server.address) as asking:
                asking = asking.with_options(upload_above=10)
                assert await asking.generate("x", images=[one, other], **ASK) == wanted
                assert await asking.stream("x", images=[one, other], **ASK).final() == wanted
                assert (await asking.media.upload(other)).media_id == hashlib.sha256(other).hexdigest()
                await asking.media.delete(hashlib.sha256(other).hexdigest())

        asyncio.run(main())
        assert held(server) == len(one)
        plain.media.delete(media.media_id)
        with pytest.raises(errors.NotFound):
            plain.media.get(media.media_id)


def test_replicas_behind_one_name_need_not_share_what_is_uploaded(model: Path) -> None:
    """Calls alternate between the two, also within an upload; the caller does not notice."""
    one, other = png(1, (40, 40)), png(2, (20, 20))
    with RunningServer(str(model), **LIMITS) as first, RunningServer(str(model), **LIMITS) as second:
        address = f"ipv4:{first.address},{second.address}"
        options = {"grpc.lb_policy_name": "round_robin"}
        with saccade.Client(address, channel_options=options) as plain:
            client = plain.with_options(upload_above=10)
            wanted = plain.generate("x", images=[one, other], **ASK).text
            for _ in range(3):
                assert client.generate("x", images=[one, other], **ASK).text == wanted
                assert client.stream("x", images=[one, other], **ASK).final().text == wanted
            assert client.tokenize("x", images=[one]) == plain.tokenize("x", images=[one])
        with saccade.Client(first.address) as plain:
            client = plain.with_options(upload_above=10)
            stream = client.stream("x", images=[one], **ASK)
            plain.media.delete(hashlib.sha256(one).hexdigest())  # the server has no uploads, as after a restart
            assert stream.final() == plain.generate("x", images=[one], **ASK)


def test_a_full_spool_gets_images_as_they_are(model: Path) -> None:
    first, second = png(1, (20, 20)), png(2, (20, 20))
    room = len(first) + len(second) // 2
    with RunningServer(str(model), media_bytes=room, **LIMITS) as server, saccade.Client(server.address) as plain:
        client = plain.with_options(upload_above=10)
        media = client.media.upload(first)
        assert client.generate("x", images=[first, second], **ASK) == plain.generate("x", images=[first, second], **ASK)
        assert held(server) == len(first)
        with pytest.raises(errors.RateLimited, match=str(room)) as full:
            client.with_options(max_retries=0).media.upload(second)
        assert full.value.reason == "MEDIA_SPOOL_FULL" and full.value.retryable
        # the earliest time at which there is space again: when the first upload expires
        assert 0 < (full.value.retry_after or 0) <= server.options.media_ttl
        # no wait is started that would exceed the deadline
        with pytest.raises(errors.RateLimited):
            client.media.upload(second, timeout=30)
        client.media.delete(media.media_id)
        assert client.media.upload(second).size_bytes == len(second)


def test_what_is_larger_than_a_message_needs_the_upload(model: Path) -> None:
    large = png(3, (120, 120))
    with RunningServer(str(model), max_message_bytes=len(large) // 2, **LIMITS) as server:
        with saccade.Client(server.address) as client:
            with pytest.raises(errors.MessageTooLarge):
                client.generate("x", images=[large], **ASK)


def test_each_tenant_has_a_bound_of_its_own(model: Path, tmp_path: Path) -> None:
    keys = {name: f"sk-{name}" for name in "ab"}
    digests = {name: hashlib.sha256(key.encode()).hexdigest() for name, key in keys.items()}
    (tmp_path / "keys.toml").write_text("".join(f'[[key]]\nname = "{n}"\nsha256 = "{d}"\n' for n, d in digests.items()))
    data = png(1)
    options = {"api_keys": str(tmp_path / "keys.toml"), "media_tenant_bytes": len(data) + 10, **LIMITS}
    with RunningServer(str(model), **options) as server:
        a, b = (saccade.Client(server.address, api_key=keys[name], max_retries=0) for name in "ab")
        a.media.upload(data)
        with pytest.raises(errors.RateLimited, match="your uploads") as full:
            a.media.upload(png(2))
        assert full.value.reason == "MEDIA_SPOOL_FULL"
        assert b.media.upload(data).media_id == a.media.get(hashlib.sha256(data).hexdigest()).media_id
        a.close()
        b.close()
