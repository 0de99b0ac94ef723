"""The encoder in the engine's process: taking, writing, publishing; an image that fails does not affect others."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from pretend_gpu import pretended, recorded
from tiny_encoder import random_image, relative_error, tiny_tower

from encoder.item import VIDEO, EncoderItem
from encoder.runner import EncoderOptions, EncoderRunner
from service.encoding.encoder import LocalEncoder
from service.encoding.entries import EncodingFailed
from service.encoding.handoff import Handoff

TINY = tiny_tower(3)
WIDTH = TINY.config.text_hidden_size


def runner() -> EncoderRunner:
    return EncoderRunner(TINY.config, EncoderOptions(dtype=torch.float32, graphs="off"), TINY.weights.items())


@pytest.fixture
def handoff() -> Iterator[Handoff]:
    handoff = Handoff(2000 * WIDTH * 4, WIDTH, torch.float32)
    yield handoff
    handoff.check_integrity(idle=True)


def alone(image: EncoderItem) -> torch.Tensor:
    rows = torch.empty(image.tokens, WIDTH)
    runner().encode([image], [rows])
    return rows


@pytest.mark.parametrize(
    ("corrupt", "kind"),
    [
        pytest.param(EncoderItem((2, 4), torch.zeros(8, 47)), ValueError, id="refused-at-the-start"),
        pytest.param(EncoderItem((2, 4), torch.zeros(8, 48, device="meta")), EncodingFailed, id="fails-in-a-launch"),
    ],
)
def test_a_corrupt_image_among_seven_good_ones_fails_alone(
    handoff: Handoff, corrupt: EncoderItem, kind: type[Exception]
) -> None:
    encoder = LocalEncoder(runner(), handoff)
    good = [random_image(TINY.config, 2, 4, seed=seed) for seed in range(7)]
    images = [*good[:3], corrupt, *good[3:]]
    leases = [handoff.lease(bytes([i]), image) for i, image in enumerate(images)]
    others = handoff.lease(bytes([3]), corrupt)
    while encoder.run_time_slice():
        pass
    for lease in (leases.pop(3), others):
        assert type(lease.error) is kind
        lease.release()
    for lease, image in zip(leases, good, strict=True):
        assert relative_error(lease.rows(), alone(image)) <= 1e-5
        lease.release()
    encoder.check_integrity()
    encoder.close()


def test_a_clip_without_memory_for_its_rows_before_pruning_fails_alone(
    handoff: Handoff, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, unpruned = torch.empty, 3 * 2

    def empty(*sizes: int, **options: Any) -> torch.Tensor:
        if sizes == (unpruned, WIDTH):
            raise RuntimeError("can't allocate memory")
        return real(*sizes, **options)

    encoder = LocalEncoder(runner(), handoff)
    patches = torch.zeros(3 * 8, TINY.config.patch_widths[VIDEO])
    clip = EncoderItem((2, 4), patches, kind=VIDEO, num_sequences=3, num_frames=5, pruning_rate=0.5)
    image = random_image(TINY.config, 2, 4)
    leases = [handoff.lease(b"clip", clip), handoff.lease(b"image", image)]
    monkeypatch.setattr(torch, "empty", empty)
    while encoder.run_time_slice():
        pass
    assert type(leases[0].error) is EncodingFailed and "can't allocate memory" in str(leases[0].error)
    assert relative_error(leases[1].rows(), alone(image)) <= 1e-5
    for lease in leases:
        lease.release()
    encoder.close()


def test_a_time_slice_of_zero_is_one_layer(handoff: Handoff) -> None:
    encoder = LocalEncoder(runner(), handoff, time_slice=0.0)
    image = random_image(TINY.config, 8, 8)
    lease = handoff.lease(b"a", image)
    slices = 0
    while encoder.run_time_slice():
        slices += 1
        assert lease.ready == (slices == TINY.config.num_layers + 1)
    assert relative_error(lease.rows(), alone(image)) <= 1e-5
    lease.release()


def test_a_time_slice_continues_with_the_next_images_until_it_ends(handoff: Handoff) -> None:
    encoder = LocalEncoder(runner(), handoff, step_tokens=4, time_slice=3600.0)
    images = [random_image(TINY.config, 4, 4, seed=seed) for seed in range(3)]
    leases = [handoff.lease(bytes([i]), image) for i, image in enumerate(images)]
    assert encoder.run_time_slice() and all(lease.ready for lease in leases)
    assert not encoder.run_time_slice()
    assert encoder.runner.stats()["images"] == 3
    for lease, image in zip(leases, images, strict=True):
        assert relative_error(lease.rows(), alone(image)) <= 1e-5
        lease.release()


def test_a_thread_of_its_own_works_until_it_is_closed(handoff: Handoff) -> None:
    encoder = LocalEncoder(runner(), handoff, own_thread=True)
    handoff.on_change = encoder.wake
    failures: list[BaseException] = []
    encoder.start(failures.append)
    images = [random_image(TINY.config, 4, 4, seed=seed) for seed in range(5)]
    leases = [handoff.lease(bytes([i]), image) for i, image in enumerate(images)]
    assert not encoder.run_time_slice(), "its own thread does the work"
    while not all(lease.ready for lease in leases):
        assert not failures
    encoder.close()
    encoder.close()
    for lease, image in zip(leases, images, strict=True):
        assert relative_error(lease.rows(), alone(image)) <= 1e-5
        lease.release()


# -- a stream of its own on a GPU --------------------------------------------------------------------------------------


@pytest.mark.parametrize("graphs", ["on", "off"])
def test_on_a_gpu_the_encoder_works_beside_the_decoder(graphs: str) -> None:
    """Memory is allocated on the decoder's stream, rows are written on another stream, and read on the decoder's: each
    after an event, otherwise the pretended GPU raises an error. The host waits for neither stream."""
    images = [random_image(TINY.config, 4, 4, seed=seed) for seed in range(2)]
    expected = [alone(image) for image in images]
    with pretended():
        options = EncoderOptions(
            dtype=torch.float32, device=torch.device("cuda"), graphs=graphs, token_budgets=(12,), max_images=4
        )
        handoff = Handoff(1000 * WIDTH * 4, WIDTH, torch.float32, "cuda")
        encoder = LocalEncoder(EncoderRunner(TINY.config, options, TINY.weights.items()), handoff)
        busy = torch.zeros(4, device="cuda")
        leases = [handoff.lease(bytes([i]), image) for i, image in enumerate(images)]
        busy += 1
        assert torch.cuda.current_stream().number == 0  # type: ignore[attr-defined]
        while encoder.run_time_slice():
            pass
        with pytest.raises(RuntimeError, match="behind no event"):  # what `rows()` is for
            leases[0].entry.rows + 1  # type: ignore[operator]
        for lease, exact in zip(leases, expected, strict=True):
            rows = lease.rows()
            assert {stream for address, stream in recorded() if address == rows.data_ptr()} == {
                0,
                encoder.stream.number,
            }
            found = torch.zeros(rows.shape, device="cuda").index_copy_(0, torch.arange(len(rows), device="cuda"), rows)
            assert relative_error(found.cpu(), exact) <= 1e-5
            lease.release()
        handoff.flush()
        handoff.check_integrity(idle=True)
        encoder.close()


def test_on_a_cpu_there_is_no_stream(handoff: Handoff) -> None:
    assert LocalEncoder(runner(), handoff).stream is None
