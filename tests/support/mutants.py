"""Broken and hostile image files, sent to a real server among valid ones."""

from __future__ import annotations

import io
import random
import struct
import threading
import zlib
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

from PIL import Image
from running import RunningServer

import saccade
from encoder.media_limits import FORMATS

REFUSALS = {"IMAGE_DECODE_FAILED", "IMAGE_TOO_LARGE", "INVALID_ARGUMENT"}
"""Allowed errors for a broken image: it cannot be decoded, its header names a size above a limit, or one that fits no
grid."""


def original(rng: random.Random) -> bytes:
    """A valid file of a random format, with metadata if the format has it."""
    form = rng.choice(FORMATS)
    width, height = rng.randint(1, 90), rng.randint(1, 90)
    mode = rng.choice(("RGB", "L")) if form == "PPM" else rng.choice(("RGB", "L", "P", "RGBA", "1"))
    if form == "JPEG":
        mode = rng.choice(("RGB", "L", "CMYK"))
    image = Image.frombytes("RGB", (width, height), rng.randbytes(3 * width * height)).convert(mode)
    options: dict[str, Any] = {}
    if form in ("PNG", "JPEG", "WEBP", "AVIF"):
        exif = Image.Exif()
        exif[0x0112] = rng.randint(0, 9)
        exif[0x010E] = "words" * rng.randint(1, 500)
        options = {"exif": exif, "icc_profile": rng.randbytes(rng.randint(1, 3000))}
    if form in ("GIF", "PNG", "WEBP", "AVIF") and rng.random() < 0.3:
        options |= {"save_all": True, "append_images": [image] * rng.randint(1, 4)}
    buffer = io.BytesIO()
    image.save(buffer, form, **options)
    return buffer.getvalue()


def _cut(data: bytearray, rng: random.Random) -> bytes:
    return bytes(data[: rng.randrange(len(data))])


def _flip(data: bytearray, rng: random.Random) -> bytes:
    for _ in range(rng.choice((1, 1, 3, 10, 100))):
        data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
    return bytes(data)


def _flip_head(data: bytearray, rng: random.Random) -> bytes:
    for _ in range(rng.randint(1, 6)):
        data[rng.randrange(min(64, len(data)))] = rng.randrange(256)
    return bytes(data)


def _repeat(data: bytearray, rng: random.Random) -> bytes:
    start = rng.randrange(len(data))
    piece = data[start : start + rng.randint(1, 200)]
    return bytes(data[:start] + piece * rng.randint(2, 50) + data[start:])


def _splice(data: bytearray, rng: random.Random) -> bytes:
    other = original(rng)
    return bytes(data[: rng.randrange(len(data))]) + other[rng.randrange(len(other)) :]


def _noise(data: bytearray, rng: random.Random) -> bytes:
    return bytes(data[: rng.randint(1, 30)]) + rng.randbytes(rng.randint(0, 2000))


def _bomb(data: bytearray, rng: random.Random) -> bytes:
    """A PNG that claims to be huge, with few or many bytes of data."""
    width, height = rng.choice(((60_000, 60_000), (2**31 - 1, 1), (30_000, 3), (7_000, 9_000), (0, 5)))
    rows = zlib.compress(bytes(rng.choice((10, 10_000_000))))
    header = struct.pack(">IIBBBBB", width, height, rng.choice((1, 8, 16)), rng.choice((0, 2, 3, 6)), 0, 0, 0)
    chunks = [
        (b"IHDR", header),
        (b"zTXt", b"k\0\0" + zlib.compress(bytes(80_000_000))),
        (b"IDAT", rows),
        (b"IEND", b""),
    ]
    return b"\x89PNG\r\n\x1a\n" + b"".join(
        struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body)) for kind, body in chunks
    )


def _sizes(data: bytearray, rng: random.Random) -> bytes:
    """Replaces numbers that may be lengths, offsets or sides by extreme ones."""
    for _ in range(rng.randint(1, 4)):
        place = rng.randrange(len(data))
        data[place : place + 4] = rng.choice(
            (b"\xff\xff\xff\xff", b"\x7f\xff\xff\xff", b"\0\0\0\0", b"\xff\xff\xff\x7f")
        )
    return bytes(data)


MUTATIONS: tuple[Callable[[bytearray, random.Random], bytes], ...] = (
    _cut, _flip, _flip, _flip_head, _repeat, _splice, _noise, _sizes, _bomb,
)  # fmt: skip


def mutants(count: int, seed: int) -> Iterator[tuple[str, bytes]]:
    """(kind of damage, file); the same for the same seed."""
    for number in range(count):
        rng = random.Random(seed * 1_000_003 + number)
        mutate = rng.choice(MUTATIONS) if number >= len(MUTATIONS) else MUTATIONS[number]
        yield mutate.__name__.strip("_"), mutate(bytearray(original(rng)), rng)


def run_mutants(server: RunningServer, count: int, seed: int) -> dict[str, Any]:
    """Sends `count` of them while another caller keeps asking about a valid image; its answers must not change.

    Raises AssertionError with the file's number; returns counts.
    """
    ask: dict[str, Any] = {"max_tokens": 2, "temperature": 0}
    sound = original(random.Random(seed))
    ended = threading.Event()
    with saccade.Client(server.address) as client:
        expected = client.generate("and this?", images=[sound], **ask).token_ids
        disturbed: list[object] = []
        answered = 0

        def go_on() -> None:
            nonlocal answered
            while not ended.is_set():
                try:
                    if client.generate("and this?", images=[sound], **ask).token_ids != expected:
                        disturbed.append("another answer")
                except saccade.SaccadeError as error:
                    disturbed.append(error)
                answered += 1

        other = threading.Thread(target=go_on)
        other.start()
        outcomes: Counter[str] = Counter()
        try:
            for number, (kind, data) in enumerate(mutants(count, seed)):
                try:
                    client.generate("what is it?", images=[data], **ask)
                    outcomes[f"{kind}: decoded"] += 1
                except saccade.errors.InvalidArgument as error:
                    assert error.reason in REFUSALS, f"file {number} ({kind}): {error!r} {error.reason}"
                    outcomes[f"{kind}: refused"] += 1
        finally:
            ended.set()
            other.join()
    assert not disturbed, disturbed[:3]
    server.drained()
    return {"files": count, "seed": seed, "neighbours": answered, **outcomes, **server.server.image_pool.stats()}
