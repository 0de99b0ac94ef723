"""TLS, client certificates, API keys: on real sockets, with real handshakes."""

from __future__ import annotations

import asyncio
import hashlib
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from certificates import Authority
from grpc_health.v1 import health_pb2, health_pb2_grpc
from images import png
from keys import KEYS, bearer, fails, key_file
from rpc import Stubs, ask, connect, reason, upload
from running import RunningServer

import saccade
from saccade.cli import main
from saccade.v1 import admin_pb2, inference_pb2, media_pb2, model_pb2
from service.commands.probe import main as probe
from service.common.config import ConfigError, ServerOptions
from service.servers.exposure import check_exposure

SMALL = {"max_seqs": 4, "max_len": 100_000}

# -- keys --------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def guarded(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    keys = key_file(tmp_path_factory.mktemp("keys") / "keys.toml")
    with RunningServer(str(model), **SMALL, api_keys=keys, max_message_bytes=2**20) as running:
        yield running


@pytest.fixture
def stubs(guarded: RunningServer) -> Iterator[Stubs]:
    with connect(guarded.address) as stubs:
        yield stubs
    guarded.drained()


def test_no_key_and_no_entry(stubs: Stubs) -> None:
    stream = inference_pb2.StreamGenerateRequest(request=ask())
    for metadata in ((), (("authorization", "Bearer nonsense"),), (("authorization", "Basic abc"),)):
        for call in (
            lambda m: stubs.inference.Generate(ask(), metadata=m),
            lambda m: list(stubs.inference.StreamGenerate(stream, metadata=m)),
            lambda m: stubs.media.UploadMedia(upload(png(1)), metadata=m),
            lambda m: stubs.model.GetModel(model_pb2.GetModelRequest(), metadata=m),
        ):
            assert fails(call, metadata) == ("UNAUTHENTICATED", "UNAUTHENTICATED")
    assert stubs.inference.Generate(ask(), metadata=bearer("one")).samples


def test_a_refusal_does_not_read_the_message(guarded: RunningServer, stubs: Stubs) -> None:
    """gRPC rejects a message above the limit when it is read; a caller without a key is rejected before that."""
    big = ask("x" * (8 * 2**20))
    assert fails(stubs.inference.Generate, big) == ("UNAUTHENTICATED", "UNAUTHENTICATED")
    assert fails(stubs.inference.Generate, big, metadata=bearer("one")) == ("RESOURCE_EXHAUSTED", "")


def test_probes_need_no_key(guarded: RunningServer) -> None:
    with grpc.insecure_channel(guarded.address) as channel:
        status = health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest()).status
    assert status == health_pb2.HealthCheckResponse.SERVING


def test_kserve_needs_one_too(guarded: RunningServer, model: Path) -> None:
    import tritonclient.grpc as triton
    from tritonclient.utils import InferenceServerException

    with triton.InferenceServerClient(guarded.address) as client:
        with pytest.raises(InferenceServerException, match="API key"):
            client.get_model_metadata(model.name)
        assert client.get_model_metadata(model.name, headers=dict(bearer("one"))).name == model.name


def test_admin_is_a_scope_of_its_own(stubs: Stubs) -> None:
    request = admin_pb2.GetLoadsRequest()
    assert fails(stubs.admin.GetLoads, request, metadata=bearer("one")) == ("PERMISSION_DENIED", "PERMISSION_DENIED")
    assert stubs.admin.GetLoads(request, metadata=bearer("boss")).total_blocks > 0


def test_tenants_share_nothing(guarded: RunningServer, stubs: Stubs) -> None:
    data = png(300, (48, 40))

    def encoded() -> float:
        count: float = guarded.stats()["encoder"]["images"]
        return count

    media = stubs.media.UploadMedia(upload(data), metadata=bearer("one")).media.media_id
    request = ask(images=[{"media_id": media}])
    before = encoded()
    first = stubs.inference.Generate(request, metadata=bearer("one"))
    assert stubs.inference.Generate(request, metadata=bearer("one")).samples[0].token_ids == first.samples[0].token_ids
    assert encoded() == before + 1
    assert fails(stubs.inference.Generate, request, metadata=bearer("two")) == ("NOT_FOUND", "MEDIA_NOT_FOUND")
    delete = media_pb2.DeleteMediaRequest(media_id=media)
    assert fails(stubs.media.DeleteMedia, delete, metadata=bearer("two"))[0] == "NOT_FOUND"
    stubs.inference.Generate(ask(images=[{"data": data}]), metadata=bearer("two"))
    assert encoded() == before + 2, "one tenant's image answered for another's"

    text = "a prompt that is long enough to be worth keeping " * 4
    cached = [
        stubs.inference.Generate(ask(text), metadata=bearer(tenant)).samples[0].usage.cached_tokens
        for tenant in ("one", "one", "two", "two")
    ]
    wrapper = 16  # what the chat template puts before the text may be left from each tenant's own earlier requests
    assert cached[1] > wrapper and cached[3] > wrapper
    assert cached[0] < wrapper and cached[2] < wrapper, "one tenant's prompt was kept for another"

    # request ids are separate between tenants, too
    running = ask(max_tokens=99_000, request_id="same")
    call = stubs.inference.StreamGenerate(inference_pb2.StreamGenerateRequest(request=running), metadata=bearer("one"))
    next(call)
    cancel = inference_pb2.CancelGenerationRequest(request_id="same")
    assert fails(stubs.inference.CancelGeneration, cancel, metadata=bearer("two"))[0] == "NOT_FOUND"
    assert stubs.inference.Generate(ask(request_id="same"), metadata=bearer("two")).samples
    stubs.inference.CancelGeneration(cancel, metadata=bearer("one"))
    list(call)


def test_rates_are_kept_and_told(stubs: Stubs) -> None:
    stubs.inference.Generate(ask(max_tokens=80), metadata=bearer("slow"))
    with pytest.raises(grpc.RpcError) as error:  # the limit is 60 tokens per minute, and these were more
        stubs.inference.Generate(ask(), metadata=bearer("slow"))
    assert reason(error.value) == ("RESOURCE_EXHAUSTED", "RATE_LIMITED")
    assert int(dict(error.value.trailing_metadata())["grpc-retry-pushback-ms"]) > 1000
    assert "tokens" in (error.value.details() or "")
    fails(stubs.inference.Generate, ask(), metadata=bearer("slow"))
    with pytest.raises(grpc.RpcError) as error:
        stubs.inference.Generate(ask(), metadata=bearer("slow"))
    assert "requests" in (error.value.details() or "")
    assert stubs.inference.Generate(ask(), metadata=bearer("one")).samples


def test_no_secret_is_ever_logged(guarded: RunningServer, stubs: Stubs, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG):
        stubs.inference.Generate(ask("the prompt's own words"), metadata=bearer("one"))
        fails(stubs.inference.Generate, ask(), metadata=(("authorization", "Bearer sk-secret-wrong"),))
        fails(stubs.admin.GetLoads, admin_pb2.GetLoadsRequest(), metadata=bearer("two"))
    assert 'tenant="one"' in caplog.text and 'code="UNAUTHENTICATED"' in caplog.text
    for secret in ("sk-secret", "own words", *(hashlib.sha256(k.encode()).hexdigest() for k in KEYS.values())):
        assert secret not in caplog.text


# -- TLS ---------------------------------------------------------------------------------------------------------------


def credentials(authority: Authority, client: tuple[Path, Path] | None = None) -> grpc.ChannelCredentials:
    certificate, key = client or (None, None)
    return grpc.ssl_channel_credentials(
        authority.certificate.read_bytes(),
        key.read_bytes() if key else None,
        certificate.read_bytes() if certificate else None,
    )


def test_tls_and_a_certificate_that_is_renewed(model: Path, tmp_path: Path) -> None:
    old, new = Authority.create(tmp_path / "old"), Authority.create(tmp_path / "new")
    certificate, key = tmp_path / "server.pem", tmp_path / "server.key"

    def install(authority: Authority) -> None:
        for source, target in zip(authority.issue("server"), (certificate, key), strict=True):
            target.write_bytes(source.read_bytes())

    install(old)
    with RunningServer(str(model), **SMALL, tls_cert=str(certificate), tls_key=str(key)) as running:
        with connect(running.address) as plain:
            assert fails(plain.inference.Generate, ask())[0] == "UNAVAILABLE"
        with connect(running.address, credentials(new)) as stranger:
            assert fails(stranger.inference.Generate, ask())[0] == "UNAVAILABLE"
        with connect(running.address, credentials(old)) as stubs:
            assert stubs.inference.Generate(ask()).samples
            request = inference_pb2.StreamGenerateRequest(request=ask(max_tokens=200))
            call = stubs.inference.StreamGenerate(request)
            next(call)
            # in the middle of a renewal the pair does not match; the old one stays in use
            certificate.write_bytes(new.issue("half")[0].read_bytes())
            with connect(running.address, credentials(old)) as other:
                assert other.inference.Generate(ask()).samples
            install(new)
            with connect(running.address, credentials(new)) as fresh:
                assert fresh.inference.Generate(ask()).samples
            with connect(running.address, credentials(old)) as late:
                assert fails(late.inference.Generate, ask())[0] == "UNAVAILABLE"
            assert list(call)[-1].WhichOneof("event") == "finished", "a stream that ran goes on"


def test_clients_with_certificates(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    authority, clients = Authority.create(tmp_path / "server"), Authority.create(tmp_path / "clients")
    certificate, key = authority.issue("server")
    options = {"tls_cert": str(certificate), "tls_key": str(key), "tls_client_ca": str(clients.certificate)}
    with RunningServer(str(model), **SMALL, **options) as running:
        for wrong in (None, authority.issue("client")):
            with connect(running.address, credentials(authority, wrong)) as stubs:
                assert fails(stubs.inference.Generate, ask())[0] == "UNAVAILABLE"
        with connect(running.address, credentials(authority, clients.issue("client"))) as stubs:
            assert stubs.inference.Generate(ask()).samples
        probed = [running.address, "--ca", str(authority.certificate), "--timeout", "20"]
        certificate, key = clients.issue("probe")
        assert probe([*probed, "--cert", str(certificate), "--cert-key", str(key)]) == 0
        assert probe(probed) == 1
        with pytest.raises(ConfigError, match="--cert-key: TLS needs both"):
            probe([*probed, "--cert", str(certificate)])
        asked = ["--ca", str(authority.certificate), "--cert", str(certificate), "--cert-key", str(key)]
        addresses = f"{running.address},{running.address}"
        assert main(["ask", "--server", addresses, *asked, "--server-name", "localhost", "--max-tokens", "1", "?"]) == 0
        assert main(["top", "--server", running.address, *asked, "--count", "1"]) == 1
        assert "PERMISSION_DENIED" in capsys.readouterr().err, "its connection is good, but --admin is not set"


def test_a_client_is_told_if_tls_may_be_the_reason(
    model: Path, guarded: RunningServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    monkeypatch.setattr("saccade.cli.ASK_RETRIES", 0)
    authority, clients, other = (Authority.create(tmp_path / name) for name in ("server", "clients", "other"))
    certificate, key = authority.issue("server")
    options = {"tls_cert": str(certificate), "tls_key": str(key), "tls_client_ca": str(clients.certificate)}
    expects, unused = "the server may expect TLS, or a client certificate", "the server may not use TLS"
    with RunningServer(str(model), **SMALL, **options) as running:
        cases = [
            (running.address, None, expects),
            (running.address, authority, expects),
            (running.address, other, "not signed by a trusted CA"),
            (guarded.address, authority, unused),
            ("127.0.0.1:1", None, "Connection refused"),
        ]
        for address, trusted, words in cases:
            tls = None if trusted is None else saccade.TLSConfig(ca=str(trusted.certificate))
            with saccade.Client(address, tls=tls, max_retries=0) as client:
                with pytest.raises(saccade.errors.Unavailable, match=words) as refused:
                    client.generate("x")
            assert refused.value.retryable and ("TLS" in str(refused.value)) == ("TLS" in words)

            async def ask_it(address: str = address, tls: saccade.TLSConfig | None = tls, words: str = words) -> None:
                async with saccade.AsyncClient(address, tls=tls, max_retries=0) as client:
                    with pytest.raises(saccade.errors.Unavailable, match=words):
                        await client.stream("x").final()

            asyncio.run(ask_it())
        assert main(["ask", "x", "--server", running.address]) == 1
        assert expects in capsys.readouterr().err


def test_files_that_do_not_belong_together(tmp_path: Path) -> None:
    from service.servers.credentials import server_credentials

    one, two = Authority.create(tmp_path / "one"), Authority.create(tmp_path / "two")
    certificate, key = str(one.issue("a")[0]), str(two.issue("b")[1])
    for options, message in (
        ({"tls_cert": certificate}, "tls_key"),
        ({"tls_key": key}, "tls_cert"),
        ({"tls_cert": certificate, "tls_key": key}, "tls_cert"),
        ({"tls_cert": certificate, "tls_key": str(tmp_path / "none")}, "none"),
    ):
        with pytest.raises(ConfigError, match=message):
            server_credentials(ServerOptions(**options))
    assert server_credentials(ServerOptions()) is None


@pytest.mark.parametrize(
    ("options", "refused"),
    [
        ({}, "no TLS.*no authentication"),
        ({"tls_cert": "c", "tls_key": "k"}, "no authentication"),
        ({"api_keys": "f"}, "no TLS"),
        ({"insecure": True}, None),
        ({"tls_cert": "c", "tls_key": "k", "api_keys": "f"}, None),
        ({"tls_cert": "c", "tls_key": "k", "tls_client_ca": "a"}, None),
        ({"host": "127.0.0.1"}, None),
        ({"host": "::1"}, None),
        ({"host": "[::1]"}, None),
        ({"host": "no.such.host.invalid"}, "neither an IP address nor a host name"),
    ],
)
def test_strangers_are_not_served_by_accident(options: dict[str, Any], refused: str | None) -> None:
    chosen = ServerOptions(**{"host": "0.0.0.0", **options})
    if refused is None:
        check_exposure(chosen)
    else:
        with pytest.raises(ConfigError, match=refused):
            check_exposure(chosen)
