"""Runs everything once that is slow the first time (kernels, graphs, memory), before health becomes SERVING."""

from __future__ import annotations

import asyncio
import logging
import struct
import time
import zlib

from service.answers.frontend import Frontend
from service.common import errors
from service.common.types import GenerateSpec, Image, ImageInput, TokensInput

log = logging.getLogger(__name__)

SALT = b"warm-up"
"""The salt of these requests, so that requests of callers do not hit what they leave in caches."""


async def warm_up(frontend: Frontend) -> None:
    """Generates a short answer and, if the model takes images, encodes one. Raises StatusError if the model cannot
    answer. Limits that are too small for this, and encoders that are not connected yet, are only logged."""
    began = time.perf_counter()
    sampling = {"max_tokens": 2, "temperature": 0.0, "ignore_eos": True}
    length = max(1, min(8, frontend.engine.info.max_len - 3))
    try:
        async for _ in frontend.stream(
            GenerateSpec("text", "", TokensInput((0,) * length), sampling=sampling), salt=SALT
        ):
            pass
        if frontend.assets.vision is not None:
            image = Image(await asyncio.to_thread(_grey_image), "image")
            spec = GenerateSpec("image", "", ImageInput(), (image,), {"max_tokens": 1})
            await frontend.embed(spec, salt=SALT)
    except errors.InvalidArgument as error:  # limits so small that not even this fits
        log.warning("warm-up: %s", error)
    except errors.Unavailable as error:
        if error.reason != "ENCODER_UNAVAILABLE":
            raise
        log.warning("warm-up: %s", error)  # encoders may connect later, and text requests need none
    log.info("warmed up in %.1f s", time.perf_counter() - began)


def _grey_image(side: int = 64) -> bytes:
    """A PNG file, made without Pillow, which this process does not need otherwise."""

    def chunk(kind: bytes, content: bytes) -> bytes:
        body = kind + content
        return struct.pack(">I", len(content)) + body + struct.pack(">I", zlib.crc32(body))

    header = struct.pack(">IIBBBBB", side, side, 8, 2, 0, 0, 0)  # 8 bits of three channels
    rows = (b"\0" + b"\x80" * 3 * side) * side
    return b"\x89PNG\r\n\x1a\n" + b"".join(
        chunk(*each) for each in ((b"IHDR", header), (b"IDAT", zlib.compress(rows)), (b"IEND", b""))
    )
