"""Encoders and decoders in separate servers: same answers, and encoders that are late, stopped, faulty or of another
model."""

from __future__ import annotations

import asyncio
import hashlib
import os
import re
import signal
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from itertools import count
from pathlib import Path
from typing import Any, NoReturn

import pytest
import torch
from certificates import Authority
from images import png
from running import RunningEncoder, RunningServer
from served import make_served
from waiting import until

import saccade
import saccade.errors
from encoder.item import VIDEO, EncoderItem
from service.commands.server_process import ServerProcess
from service.common.config import ConfigError, EngineOptions, ServerOptions
from service.encoding.encoder_pool import EncoderPool
from service.encoding.entries import EncoderUnavailable, Lease
from service.encoding.handoff import Handoff
from service.engine.build import connect_encoders
from service.model.checkpoint import open_checkpoint
from service.model.resolve import resolve_vision
from service.servers.encoder_server import serve_encoder
from service.telemetry.sizes import read_histogram

SMALL = {"max_seqs": 8, "max_len": 600}
LEASE = 2.0


def process(model: Path, *arguments: str) -> ServerProcess:
    return ServerProcess(
        [
            str(model),
            "--role",
            "encoder",
            "--dtype",
            "float32",
            "--threads",
            "1",
            "--log-level",
            "error",
            "--no-warmup",
            *arguments,
        ]
    )


def decoder(model: Path, *encoders: Any, **options: Any) -> RunningServer:
    addresses = tuple(server.address for server in encoders)
    return RunningServer(str(model), role="decoder", encoders=addresses, **{**SMALL, **options})


def ask(client: Any, number: int, **options: Any) -> list[int]:
    """The tokens of an answer about an image that is in no cache."""
    values = {"max_tokens": 6, "ignore_eos": True, "temperature": 0, **options}
    return client.generate(f"what is {number}", images=[png(number)], **values).token_ids


@contextmanager
def stopped(server: ServerProcess) -> Iterator[None]:
    """The server runs again at the end, if not before."""
    os.kill(server.pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(server.pid, signal.SIGCONT)


def given(count: int) -> Any:
    return lambda stats: stats["encoder"]["given"] >= count


@pytest.fixture(scope="module")
def near(model: Path) -> Iterator[RunningEncoder]:
    """An encoder in this process, whose handoff can be inspected."""
    with RunningEncoder(str(model)) as running:
        yield running


@pytest.fixture(scope="module")
def plain(model: Path, near: RunningEncoder) -> Iterator[RunningServer]:
    with decoder(model, near) as running:
        yield running


def test_remote_equals_local(client: saccade.Client, plain: RunningServer, near: RunningEncoder) -> None:
    """Greedy and sampled, with one image, several, a repeated image, and none."""
    requests: list[dict[str, Any]] = [
        {"images": [png(1)], "temperature": 0},
        {"images": [png(2), png(3), png(1)], "seed": 7},
        {"images": [png(2)], "temperature": 0},
        {"images": [], "seed": 3},
    ]
    with saccade.Client(plain.address) as remote:
        for request in requests:
            got = [c.generate("tell me", max_tokens=12, ignore_eos=True, **request) for c in (client, remote)]
            assert got[0].token_ids == got[1].token_ids
    stats = plain.drained()["encoder"]
    assert (stats["given"], stats["written"], stats["in_progress_now"]) == (3, 3, 0)
    near.thread.handoff.check_integrity(idle=True)


def test_a_local_decoder_uses_encoders_too(
    model: Path, client: saccade.Client, near: RunningEncoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in an actor of Ray Data, or in a replica of Ray Serve; not through a proxy, which is for other machines."""
    monkeypatch.delenv("no_proxy", raising=False)
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:1")
    options = {"dtype": "float32", "threads": 1, "role": "decoder", "encoders": [near.address], **SMALL}
    before = near.thread.encoder.stats()["images"]
    with saccade.LocalClient(model, **options) as local:
        assert ask(local, 110) == ask(client, 110)
    assert near.thread.encoder.stats()["images"] == before + 1


def test_many_requests_for_one_image_are_one_encoding(plain: RunningServer, near: RunningEncoder) -> None:
    before = near.thread.encoder.stats()["images"]
    with saccade.Client(plain.address) as client, ThreadPoolExecutor(40) as pool:
        answers = list(pool.map(lambda _: ask(client, 100), range(40)))
    assert len(set(map(tuple, answers))) == 1
    plain.drained()
    assert near.thread.encoder.stats()["images"] == before + 1


def test_an_encoder_that_is_killed_over_an_image_is_followed_by_another(
    model: Path, client: saccade.Client, near: RunningEncoder
) -> None:
    shared = sorted(os.listdir("/dev/shm"))
    with process(model) as doomed, decoder(model, doomed, near) as running:
        with saccade.Client(running.address) as remote, ThreadPoolExecutor(2) as pool, stopped(doomed):
            hit = pool.submit(ask, remote, 200)
            running.until(given(1))
            bystander = pool.submit(ask, remote, 201)
            running.until(given(2))
            os.kill(doomed.pid, signal.SIGKILL)
            assert hit.result() == ask(client, 200) and bystander.result() == ask(client, 201)
        stats = running.drained()
        assert stats["encoder"]["lost"] == 1 and stats["handoff"]["retries"] == 1
        assert stats["handoff"]["failures"] == 0
        assert stats["encoder"]["encoders"][doomed.address]["up_now"] == 0
    assert sorted(os.listdir("/dev/shm")) == shared


def test_an_encoder_that_stands_still_wakes_and_stops(
    model: Path, client: saccade.Client, near: RunningEncoder
) -> None:
    """A waiter that leaves takes nothing from the others. A late encoder is not used until it wakes, and finishes what
    it has when it stops."""
    with process(model) as late:
        with decoder(model, late) as running, saccade.Client(running.address) as remote:
            with ThreadPoolExecutor(3) as pool, stopped(late):
                leaving = remote.stream("bye", images=[png(400)], max_tokens=5)
                others = [pool.submit(ask, remote, 400) for _ in range(2)]
                running.until(lambda s: s["handoff"]["leases"] == 3)
                leaving.close()
                running.until(lambda s: s["handoff"]["leases"] == 2)
                alone = remote.stream("bye", images=[png(401)], max_tokens=5)
                running.until(given(2))
                alone.close()
                running.until(lambda s: s["encoder"]["cancelled"] == 1)
                os.kill(late.pid, signal.SIGCONT)
                assert others[0].result() == others[1].result() == ask(client, 400)
            stats = running.drained()
            assert stats["encoder"]["written"] == 1 and stats["handoff"]["failures"] == 0

        with decoder(model, late, near, encoder_lease=LEASE) as running, saccade.Client(running.address) as remote:
            with stopped(late):
                assert ask(remote, 300) == ask(client, 300)
                stats = running.until(
                    lambda s: (
                        s["handoff"]["late"] >= 1
                        and s["handoff"]["expirations"] >= 1
                        and s["encoder"]["encoders"][late.address]["late_now"] == 1
                    )
                )
                assert stats["handoff"]["quarantined"] == 0
                assert ask(remote, 301) == ask(client, 301), "and nothing else waits for the late one"
            running.until(lambda s: s["encoder"]["encoders"][late.address]["late_now"] == 0)
            for number in count(302):  # it may first report that it is busy
                assert ask(remote, number) == ask(client, number)
                if running.stats()["encoder"]["encoders"][late.address]["received_row_bytes_total"]:
                    break
            assert ask(remote, 500) == ask(client, 500)
            assert late.stop() == 0
            running.until(lambda s: s["encoder"]["encoders"][late.address]["up_now"] == 0)
            assert ask(remote, 501) == ask(client, 501)
            assert running.drained()["handoff"]["failures"] == 0


def test_without_an_encoder_images_are_refused_and_text_is_answered(model: Path, client: saccade.Client) -> None:
    class Nobody:
        address = "127.0.0.1:1"

    with decoder(model, Nobody, encoder_lease=0.1, warmup=True) as running:
        with saccade.Client(running.address, max_retries=0) as remote:
            with pytest.raises(saccade.errors.Unavailable, match="127.0.0.1:1") as refused:
                ask(remote, 600)
            assert refused.value.reason == "ENCODER_UNAVAILABLE" and refused.value.retryable
            text = {"max_tokens": 5, "temperature": 0}
            assert remote.generate("no image", **text).token_ids == client.generate("no image", **text).token_ids


# -- the connection itself ---------------------------------------------------------------------------------------------


class Pool:
    """An encoder pool as a decoder has one, without the decoder."""

    def __init__(self, model: Path, *encoders: RunningEncoder, capacity: int = 1 << 20, **options: Any) -> None:
        addresses = tuple(server.address for server in encoders)
        values = EngineOptions(model=str(model), dtype="float32", role="decoder", encoders=addresses, **options)
        checkpoint = open_checkpoint(str(model))
        vision = resolve_vision(values, checkpoint)
        assert vision is not None
        self.vision = vision
        self.handoff = Handoff(capacity, vision.text_hidden_size, torch.float32)
        self.encoders: EncoderPool = connect_encoders(values, checkpoint, vision, self.handoff)
        self._changed = threading.Condition()
        self.handoff.on_change = self._on_change
        self.fatal: list[BaseException] = []
        self.encoders.start(self.fatal.append)

    def lease(self, image: EncoderItem) -> Lease:
        key = hashlib.sha256(image.patches.numpy().tobytes()).digest()
        return self.handoff.lease(key, image)

    def image(self, number: int) -> EncoderItem:
        generator = torch.Generator().manual_seed(number)
        return EncoderItem((2, 4), torch.randn(8, self.vision.patch_dim, generator=generator))

    def _on_change(self) -> None:
        self.encoders.wake()
        with self._changed:
            self._changed.notify_all()

    def settled(self, leases: list[Lease]) -> None:
        """Waits until each image is encoded or has an error."""
        with self._changed:
            assert self._changed.wait_for(lambda: all(lease.ready or lease.error for lease in leases), 60)

    def __enter__(self) -> Pool:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        self.encoders.close()
        if kind is None:
            assert not self.fatal
            self.handoff.check_integrity(idle=True)


def test_a_corrupt_image_among_seven_good_ones(model: Path, near: RunningEncoder) -> None:
    with Pool(model, near) as pool:
        images = [pool.image(i) for i in range(8)]
        images[3] = EncoderItem((2, 4), torch.zeros(8, pool.vision.patch_dim - 1))
        leases = [pool.lease(image) for image in images]
        pool.settled(leases)
        assert [type(lease.error) for lease in leases] == [type(None)] * 3 + [ValueError] + [type(None)] * 4
        assert str(pool.vision.patch_dim) in str(leases[3].error)
        for lease, image in zip(leases, images, strict=True):
            if lease.ready:
                rows = torch.empty_like(lease.rows())
                near.thread.encoder.runner.encode([image], [rows])
                assert torch.allclose(rows, lease.rows(), atol=1e-5)
            lease.release()


def test_a_pruned_clip_brings_its_counts_back(model: Path, near: RunningEncoder) -> None:
    with Pool(model, near) as pool:
        width = pool.vision.patch_dim * (pool.vision.video_temporal_patch_size or 0)
        clip = EncoderItem(
            (4, 4), torch.randn(3 * 16, width), kind=VIDEO, num_sequences=3, num_frames=5, pruning_rate=0.5
        )
        lease = pool.lease(clip)
        pool.settled([lease])
        rows = torch.empty_like(lease.rows())
        (counts,) = near.thread.encoder.runner.encode([clip], [rows])
        assert lease.counts == counts and sum(counts) == clip.tokens and len(counts) == 3
        assert torch.allclose(rows, lease.rows(), atol=1e-5)
        lease.release()


def test_images_go_where_least_is_in_progress_and_stay_when_one_stops(model: Path, near: RunningEncoder) -> None:
    with RunningEncoder(str(model)) as other, Pool(model, near, other) as pool:
        leases = [pool.lease(pool.image(i)) for i in range(60)]
        # Both may have been given to `near`, or not have arrived yet.
        until(lambda: other.thread.encoder.stats()["images"] > 0)
        other.run(other.server.stop(grace=60))
        pool.settled(leases)
        assert not [lease.error for lease in leases if lease.error]
        assert pool.encoders.stats()["written"] == 60
        assert other.thread.encoder.stats()["images"] > 0
        for lease in leases:
            lease.release()


def test_pixels_wait_for_the_window_and_rows_for_space(model: Path) -> None:
    """Sixty images with a window of two and memory for three on either side."""
    checkpoint = open_checkpoint(str(model))
    vision = checkpoint.config.vision
    assert vision is not None
    largest = max(vision.max_num_patches, vision.min_num_patches)
    window = 2 * largest * vision.patch_dim * 4
    rows = vision.max_image_tokens * vision.text_hidden_size * 4
    options = {"max_inflight_bytes": 2 * window, "max_decoders": 2, "handoff_bytes": 3 * rows}
    with RunningEncoder(str(model), **options) as small, Pool(model, small, capacity=3 * rows, max_len=17) as pool:
        side = 2 * int((largest / 4) ** 0.5)
        generator = torch.Generator().manual_seed(0)
        images = [
            EncoderItem((side, side), torch.randn(side * side, vision.patch_dim, generator=generator))
            for _ in range(60)
        ]
        leases = [pool.lease(image) for image in images]
        for lease in leases:
            pool.settled([lease])
            assert lease.error is None
            assert small.thread.handoff.stats()["used_bytes"] <= 3 * rows
            lease.release()
        assert pool.encoders.stats()["written"] == 60


def test_an_item_above_the_window_is_refused_with_both_numbers(model: Path) -> None:
    with (
        RunningEncoder(str(model), max_inflight_bytes=1 << 20, max_decoders=1) as small,
        Pool(model, small, max_len=17) as pool,
    ):
        image = EncoderItem((40, 200), torch.zeros(8000, pool.vision.patch_dim))
        lease = pool.lease(image)
        pool.settled([lease])
        assert isinstance(lease.error, ValueError)
        assert str(image.patches.numel() * 4) in str(lease.error) and str(1 << 20) in str(lease.error)
        lease.release()


def test_an_encoder_must_take_the_largest_video(model: Path) -> None:
    """The number that the error names is enough: a video of that many bytes is encoded."""
    with RunningEncoder(str(model), max_inflight_bytes=8192, max_decoders=1) as narrow:
        with pytest.raises(ConfigError, match="8192 bytes .* largest image or video here may have") as refused:
            Pool(model, narrow, max_len=33)
    found = re.search(r"may have (\d+)", str(refused.value))
    assert found is not None
    with RunningEncoder(str(model), max_inflight_bytes=2 * int(found[1]), max_decoders=2) as enough:
        with Pool(model, enough, max_len=33) as pool:
            width = pool.vision.patch_widths[VIDEO]
            video = EncoderItem((4, 4), torch.zeros(8 * 16, width), kind=VIDEO, num_sequences=8, num_frames=16)
            assert video.tokens == 32 and video.nbytes == int(found[1])
            lease = pool.lease(video)
            pool.settled([lease])
            assert lease.error is None
            lease.release()


def test_two_decoders_share_an_encoding(model: Path, near: RunningEncoder) -> None:
    before = near.thread.encoder.stats()["images"]
    with Pool(model, near) as one, Pool(model, near) as two:
        leases = [pool.lease(pool.image(77)) for pool in (one, two)]
        for pool, lease in zip((one, two), leases, strict=True):
            pool.settled([lease])
        assert torch.equal(leases[0].rows(), leases[1].rows())
        for lease in leases:
            lease.release()
    assert near.thread.encoder.stats()["images"] == before + 1


def test_a_decoder_too_many_is_told_and_waits(model: Path) -> None:
    with RunningEncoder(str(model), max_decoders=1) as single, Pool(model, single) as first:
        with Pool(model, single, encoder_lease=0.2) as second:
            lease = second.lease(second.image(1))
            second.settled([lease])
            assert isinstance(lease.error, EncoderUnavailable) and "max_inflight_bytes" in str(lease.error)
            lease.release()
        lease = first.lease(first.image(1))
        first.settled([lease])
        assert lease.ready
        lease.release()


# -- who may be a partner ----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def stranger(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of the same shape with other weights."""
    return make_served(tmp_path_factory.mktemp("model") / "stranger", seed=99).path


def test_an_encoder_of_another_model_is_refused_by_name(model: Path, stranger: Path, near: RunningEncoder) -> None:
    ours, theirs = open_checkpoint(str(stranger)), open_checkpoint(str(model))
    with pytest.raises(ConfigError) as refused:
        Pool(stranger, near)
    for word in (near.address, "tiny", "stranger", "revision", ours.revision, theirs.revision):
        assert word in str(refused.value)
    for word in ("weights_digest", ours.vision_digest(), theirs.vision_digest()):
        assert word in str(refused.value)


def test_a_server_that_is_no_encoder_is_refused(model: Path, server: RunningServer) -> None:
    with pytest.raises(ConfigError, match=server.address):
        Pool(model, server)  # type: ignore[arg-type]


def test_an_encoder_of_another_dtype_or_store_is_refused_with_both_values(model: Path, near: RunningEncoder) -> None:
    with RunningEncoder(str(model), dtype="bfloat16") as other:
        with pytest.raises(ConfigError, match="dtype is 'bfloat16' there and 'float32' here"):
            Pool(model, other)
    width = open_checkpoint(str(model)).config.decoder.hidden_size
    with RunningEncoder(str(model), handoff_bytes=5 * width * 4) as small:
        with pytest.raises(ConfigError, match="of 5 tokens, but the largest here may have 16; handoff_bytes"):
            Pool(model, small, max_len=17)
    with RunningEncoder(str(model), max_inflight_bytes=4096) as narrow:
        with pytest.raises(
            ConfigError, match="takes 1024 bytes of pixels, but the largest image or video here may have"
        ):
            Pool(model, narrow)


def test_an_encoder_to_which_no_decoder_could_attach_does_not_start(model: Path) -> None:
    """The number that the error names is enough for one."""
    options = ServerOptions(
        model=str(model), role="encoder", dtype="float32", threads=1, port=0, max_inflight_bytes=4096
    )
    said = "4096 is 1024 bytes of pixels for each of 4 decoders .* the largest .*; at least (.*) would work$"
    with pytest.raises(ConfigError, match=f"max_inflight_bytes: {said}") as error:
        asyncio.run(asyncio.wait_for(serve_encoder(options), 60))
    found = re.search(said, str(error.value))
    assert found is not None
    with RunningEncoder(str(model), max_inflight_bytes=int(found[1])) as enough, Pool(model, enough):
        pass


def test_tls_and_keys(model: Path, tmp_path: Path) -> None:
    authority = Authority.create(tmp_path / "ca")
    certificate, key = authority.issue("encoder")
    mine, mine_key = authority.issue("decoder")
    secret = {name: f"sk-{name}" for name in ("encoder", "inference")}
    keys = tmp_path / "keys.toml"
    keys.write_text(
        "".join(
            f'[[key]]\nname = "{n}"\nscopes = ["{n}"]\nsha256 = "{hashlib.sha256(s.encode()).hexdigest()}"\n'
            for n, s in secret.items()
        )
    )
    options = {
        "tls_cert": str(certificate), "tls_key": str(key), "tls_client_ca": str(authority.certificate),
        "api_keys": str(keys),
    }  # fmt: skip
    right = {"encoder_ca": str(authority.certificate), "encoder_cert": str(mine), "encoder_cert_key": str(mine_key)}
    with RunningEncoder(str(model), **options) as closed:
        for name, message in (("nobody", "does not know"), ("inference", "scope 'encoder'")):
            with pytest.raises(ConfigError, match=message):
                Pool(model, closed, **right, encoder_api_key=f"sk-{name}")
        with Pool(model, closed, **right, encoder_api_key=secret["encoder"]) as pool:
            lease = pool.lease(pool.image(1))
            pool.settled([lease])
            assert lease.ready
            lease.release()
        with Pool(model, closed, encoder_lease=0.1) as plain:  # plain text to a TLS port is no refusal, but no way in
            assert not any(link.alive for link in plain.encoders.links)


def test_renewed_certificates_are_used_for_the_next_connection(model: Path, tmp_path: Path) -> None:
    """Also those that the decoder presents, after an authority that signed the earlier ones is gone."""
    files = {name: tmp_path / name for name in ("ca", "encoder", "encoder.key", "decoder", "decoder.key")}

    def install(authority: Authority) -> None:
        files["ca"].write_bytes(authority.certificate.read_bytes())
        for name in ("encoder", "decoder"):
            for source, target in zip(authority.issue(name), (files[name], files[f"{name}.key"]), strict=True):
                target.write_bytes(source.read_bytes())

    install(Authority.create(tmp_path / "old"))
    ca, certificate, key, mine, mine_key = map(str, files.values())
    there = {"tls_cert": certificate, "tls_key": key, "tls_client_ca": ca}
    here = {"encoder_ca": ca, "encoder_cert": mine, "encoder_cert_key": mine_key}
    with RunningEncoder(str(model), **there) as encoder, Pool(model, encoder, **here) as pool:
        (link,) = pool.encoders.links
        install(Authority.create(tmp_path / "new"))
        link.abandon()
        until(lambda: link.stats()["connections"] == 2)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"role": "decoder"}, "needs the encoders"),
        ({"encoders": ("a:1",)}, "would not be used"),
        ({"role": "decoder", "encoders": ("a",)}, "'a' is not HOST:PORT"),
        ({"role": "decoder", "encoders": ("a:1", "a:1")}, "twice"),
    ],
)
def test_roles_that_make_no_sense_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        EngineOptions(**options)


def test_an_encoder_that_fails_does_not_wait_for_images_that_it_will_not_encode(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its decoders send them to others as soon as it has ended."""

    def fail(*_: object) -> NoReturn:
        raise RuntimeError("broken")

    with RunningEncoder(str(model), grace=3600.0) as broken, Pool(model, broken) as pool:
        monkeypatch.setattr(broken.thread.handoff, "take", fail)
        lease = pool.lease(pool.image(1))
        until(lambda: broken.thread.failure is not None)
        broken.run(asyncio.wait_for(broken.server.stop(), 30))
        until(lambda: pool.handoff.stats()["retries"] == 1)
        lease.release()


@pytest.mark.parametrize("role", ["all", "encoder"])
def test_sizes_are_added_once_if_a_second_signal_comes_while_they_are(
    model: Path, tmp_path: Path, role: str, caplog: pytest.LogCaptureFixture
) -> None:
    """The first stop waits for a FIFO in the file's place and is cancelled, as by a second signal."""
    sizes = tmp_path / "sizes.json"

    async def stop_twice(server: Any) -> None:
        first = asyncio.create_task(server.stop(grace=0.0))
        with await asyncio.to_thread(open, sizes, "w") as file:  # returns when the first stop reads it
            first.cancel()
            await asyncio.wait({first})
            second = asyncio.create_task(server.stop(grace=0.0))
            await asyncio.sleep(0)
            file.write('{"2": 5}')
        await second
        await server.stop(grace=0.0)

    with ExitStack() as ends:
        if role == "encoder":
            running: Any = ends.enter_context(RunningEncoder(str(model), sizes_file=str(sizes)))
            with Pool(model, running) as pool:
                lease = pool.lease(pool.image(1))
                pool.settled([lease])
                lease.release()
        else:
            running = ends.enter_context(RunningServer(str(model), sizes_file=str(sizes), **SMALL))
            with saccade.Client(running.address) as client:
                ask(client, 1)
        os.mkfifo(sizes)
        running.run(stop_twice(running.server))
    assert sum(read_histogram(sizes).values()) == 6 and "sizes_file" not in caplog.text


def test_sizes_are_recorded_for_tune(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Two runs of each kind of server add to one file; `saccade tune` reads it."""
    from service.commands.cli import main

    sizes = tmp_path / "sizes.json"
    for number in range(2):
        with RunningEncoder(str(model), sizes_file=str(sizes)) as recorded, Pool(model, recorded) as pool:
            lease = pool.lease(pool.image(number))
            pool.settled([lease])
            lease.release()
    assert sizes.read_text() == '{"image_tokens": {"2": 2}}\n'
    with RunningServer(str(model), sizes_file=str(sizes), **SMALL) as running:
        with saccade.Client(running.address) as client:
            ask(client, 1)
    assert main(["tune", str(sizes)]) == 0
    assert capsys.readouterr().out.startswith("3 images")
    assert [path.name for path in tmp_path.iterdir()] == ["sizes.json"]
